"""flashmsa: attention under structured masks, by hand-written sm_90a kernels and a native CPU backend.

    out = flashmsa.attention(q, k, v, mask=flashmsa.Causal())

q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv). See ``help(flashmsa.attention)``.
"""

from __future__ import annotations

import torch as _torch  # before _C, which links to its libraries

try:
    from . import _C  # noqa: F401
except ImportError as error:
    import pathlib as _pathlib

    _built = sorted(x.name for x in _pathlib.Path(__file__).parent.glob("_C*.so"))
    _state = (
        f"{', '.join(_built)} does not load ({error}); it may have been built for another Python or torch than "
        f"this one ({_torch.__version__})"
        if _built
        else "flashmsa._C has not been built"
    )
    raise ImportError(
        f"flashmsa: its compiled part is missing: {_state}. Build it with `pip install --no-build-isolation .`, or in "
        "place with `python setup.py build_ext --inplace` (FLASHMSA_CUDA=0 leaves the GPU kernels out). An installed "
        "flashmsa is hidden by the sources in the current directory: leave the checkout to use it"
    ) from error

from . import compat, nn
from .checked import check
from .dropout import dropout_mask
from .explain import Explanation, explain
from .masks import (
    BlockSparse,
    Causal,
    Dense,
    DilatedWindow,
    Document,
    HashBucket,
    Intersection,
    Mask,
    PrefixLM,
    SlidingWindow,
)
from .merge import merge_states
from .ops import attention
from .paged import PagedExplanation, append_kv, explain_paged, gather_pages, paged_attention, paged_workspace
from .reference import reference
from .rope import Rope, apply_rope, rope_tables
from .tune import autotune, use_tuning
from .varlen import attention_varlen

__version__ = "0.1.0"

__all__ = [
    "BlockSparse",
    "Causal",
    "Dense",
    "DilatedWindow",
    "Document",
    "Explanation",
    "HashBucket",
    "Intersection",
    "Mask",
    "PagedExplanation",
    "PrefixLM",
    "Rope",
    "SlidingWindow",
    "append_kv",
    "apply_rope",
    "attention",
    "attention_varlen",
    "autotune",
    "check",
    "compat",
    "dropout_mask",
    "explain",
    "explain_paged",
    "gather_pages",
    "merge_states",
    "nn",
    "paged_attention",
    "paged_workspace",
    "reference",
    "rope_tables",
    "use_tuning",
]
