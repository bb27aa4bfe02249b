"""The argument checks of the paths written in Python: the composed backend and the reference.

The native backends have the same checks in the binding, before any launch. Each message names the argument, what it was
and what is allowed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .masks import Mask, lower

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_HEAD_DIM = 256
_FP32_MAX = torch.finfo(torch.float32).max
_FP64_MAX = torch.finfo(torch.float64).max
# A gap of ours, not a mistake of the caller's.
_FP8 = tuple(getattr(torch, name) for name in dir(torch) if name.startswith("float8_"))


def check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: {type(value).__name__}; must be a torch.Tensor")


def check_mask(mask: Any) -> None:
    if mask is not None and not isinstance(mask, Mask):
        hint = "; BlockSparse.from_dense(mask) makes one of a dense bool mask" if isinstance(mask, Tensor) else ""
        raise TypeError(
            f"mask: {type(mask).__name__}; must be a flashmsa mask (Dense, Causal, Document, …) or None{hint}"
        )


def check_gaps(q: Tensor, dropout_p: float, config: Any) -> None:
    """Raises for what no backend can do: NotImplementedError for gaps, TypeError and ValueError otherwise."""
    if q.dtype in _FP8:
        raise NotImplementedError(f"q: dtype {q.dtype} is not supported yet; use torch.bfloat16")
    _check_dtype("q", q)
    check_dropout(dropout_p)
    if config is not None:
        raise NotImplementedError(f"config: {config!r}; choosing a kernel is not supported yet, use None")


def check_dropout(p: Any, name: str = "dropout_p") -> None:
    check_number(name, p)
    if not 0.0 <= p < 1.0:
        raise ValueError(f"{name}: {p}; must lie in [0, 1)")


def check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    *,
    scale: float | None,
    softcap: float,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    out: Tensor | None,
) -> None:
    """Raises TypeError or ValueError for tensors and options that do not fit together."""
    _check_inputs(q, k, v)
    _check_shapes(q, k, v)
    check_mask(mask)
    _check_mask_fits(q, k, mask)
    if scale is not None:
        check_number("scale", scale)
        if _overflows(q, scale):
            raise ValueError(f"scale: {scale} is not finite in fp32; the default is 1/sqrt({q.shape[3]})")
    check_number("softcap", softcap)
    if softcap < 0.0 or _overflows(q, softcap):
        raise ValueError(f"softcap: {softcap}; must be positive and finite in fp32, or 0 for none")
    heads = q.shape[1]
    _check_per_head("sinks", sinks, q, ((heads,),))
    _check_per_head("alibi_slopes", alibi_slopes, q, ((heads,), (q.shape[0], heads)))
    if out is not None:
        _check_out(out, q, v)


def _overflows(q: Tensor, value: Any) -> bool:
    """Whether a finite number is none in the computation: in fp32, for float64 in fp64. Symbols are not looked at."""
    symbolic = isinstance(value, (torch.SymFloat, torch.SymInt))
    return q.dtype != torch.float64 and not symbolic and abs(float(value)) > _FP32_MAX


def _check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.is_nested:
            raise TypeError(f"{name}: a nested tensor is not supported; pack the sequences under a Document mask")
        if x.layout != torch.strided:
            raise TypeError(
                f"{name}: layout {x.layout} is not supported; must be torch.strided, as by {name}.to_dense()"
            )
        if x.dim() != 4:
            raise ValueError(f"{name}: shape {tuple(x.shape)}; must be (batch, heads, sequence, head_dim)")
        _check_dtype(name, x)
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: dtype {x.dtype} does not match q's {q.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name}: on {x.device}, q on {q.device}; all on one device")


def _check_dtype(name: str, x: Tensor) -> None:
    if x.dtype not in DTYPES:
        raise TypeError(f"{name}: dtype {x.dtype} is not supported; must be float16, bfloat16, float32 or float64")


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    batch, heads_q, _, head_dim = q.shape
    heads_kv, len_kv = k.shape[1:3]
    if k.shape[3] != head_dim:
        raise ValueError(f"k: head_dim {k.shape[3]} does not match q's {head_dim}")
    for name, x in (("k", k), ("v", v)):
        if x.shape[0] != batch:
            raise ValueError(f"{name}: batch {x.shape[0]} does not match q's {batch}")
    if v.shape[1] != heads_kv:
        raise ValueError(f"v: {v.shape[1]} heads do not match k's {heads_kv}")
    if v.shape[2] != len_kv:
        raise ValueError(f"v: length {v.shape[2]} does not match k's {len_kv}")
    if heads_q % heads_kv if heads_kv else heads_q:
        raise ValueError(
            f"k: {heads_kv} heads do not divide q's {heads_q}; query head h uses kv head h // (heads_q / heads_kv)"
        )
    for name, d in (("q", head_dim), ("v", v.shape[3])):
        if d % 8 or not 8 <= d <= MAX_HEAD_DIM:
            nearest = min(max(-(-d // 8) * 8, 8), MAX_HEAD_DIM)
            raise ValueError(
                f"{name}: head_dim {d}; must be a multiple of 8 from 8 to {MAX_HEAD_DIM}, the nearest is {nearest}"
            )


def _check_mask_fits(q: Tensor, k: Tensor, mask: Mask | None) -> None:
    if mask is None:
        return
    for x in lower(mask)[2]:
        if x.device != q.device:
            raise ValueError(f"mask: on {x.device}, q on {q.device}; use mask.to({str(q.device)!r})")
    mask._check_shapes(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])


def check_number(name: str, value: Any) -> None:
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        return
    # NOTE: not what float() takes: reading a tensor waits for its device and drops its gradient.
    if isinstance(value, (bool, Tensor)) or not (isinstance(value, (int, float)) or hasattr(value, "__float__")):
        raise TypeError(f"{name}: {type(value).__name__}; must be a number")
    # NOTE: no math.isfinite: torch.compile of torch 2.11 breaks the graph there. NaN compares false.
    if not isinstance(value, (int, float)):
        try:
            value = float(value)
        except TypeError:
            raise TypeError(f"{name}: {type(value).__name__} of more than one value; must be a number") from None
    if not -_FP64_MAX <= value <= _FP64_MAX:
        raise ValueError(
            f"{name}: {value if isinstance(value, float) else 'an int that no float holds'}; must be finite"
        )


def _check_per_head(name: str, x: Tensor | None, q: Tensor, shapes: tuple[tuple[int, ...], ...]) -> None:
    if x is None:
        return
    check_tensor(name, x)
    if x.dtype != torch.float32:
        raise TypeError(f"{name}: dtype {x.dtype}; must be torch.float32")
    if x.shape not in shapes:
        raise ValueError(f"{name}: shape {tuple(x.shape)}; must be {' or '.join(map(str, shapes))}")
    if x.device != q.device:
        raise ValueError(f"{name}: on {x.device}, q on {q.device}; all on one device")


def _check_out(out: Tensor, q: Tensor, v: Tensor) -> None:
    check_tensor("out", out)
    shape = (*q.shape[:3], v.shape[3])
    if out.shape != shape:
        raise ValueError(f"out: shape {tuple(out.shape)}; must be {shape}")
    if out.dtype != q.dtype:
        raise TypeError(f"out: dtype {out.dtype} does not match q's {q.dtype}")
    if out.device != q.device:
        raise ValueError(f"out: on {out.device}, q on {q.device}; all on one device")
