"""`python -m flashmsa demo`: search the running Python's documentation with packed all-MiniLM-L6-v2 embeddings.

corpus.py gathers the texts, weights.py finds the model, batches.py packs or pads, encoder.py is the model,
app.py runs them, compares and prints.
"""

from .app import main

__all__ = ["main"]
