"""Joining attention over two disjoint key sets."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys of A and of B together, from the attention over each of them.

        lse = log(e^lse_a + e^lse_b),   out = e^(lse_a - lse) out_a + e^(lse_b - lse) out_b

    out_a, out_b  (B, H, S, Dv), one shape, dtype and device
    lse_a, lse_b  (B, H, S) fp32, natural logarithm; -inf where a side saw no key, which then adds nothing
    returns       (out, lse): out in the inputs' dtype, summed in fp32 (fp64 for fp64); lse fp32. Rows without a key on
                  either side are 0 and -inf.

    Give attention sinks to one side only. Differentiable. Raises TypeError and ValueError for sides that do not fit.
    """
    _check("out_a", "lse_a", out_a, lse_a)
    _check("out_b", "lse_b", out_b, lse_b)
    if out_b.shape != out_a.shape:
        raise ValueError(f"out_b: shape {tuple(out_b.shape)} does not match out_a's {tuple(out_a.shape)}")
    if out_b.dtype != out_a.dtype:
        raise TypeError(f"out_b: dtype {out_b.dtype} does not match out_a's {out_a.dtype}")
    if out_b.device != out_a.device:
        raise ValueError(f"out_b: on {out_b.device}, out_a on {out_a.device}; all on one device")
    dtype = torch.float64 if torch.float64 in (out_a.dtype, lse_a.dtype, lse_b.dtype) else torch.float32
    a, b = lse_a.to(dtype), lse_b.to(dtype)
    # NOTE: the maximum only keeps the exponentials in range; the result does not depend on it, nor does the gradient.
    m = torch.maximum(a, b).detach()
    m = torch.where(m == -math.inf, 0.0, m)
    weight_a, weight_b = torch.exp(a - m), torch.exp(b - m)
    total = weight_a + weight_b
    empty = total == 0.0
    total = torch.where(empty, 1.0, total)
    lse = torch.where(empty, -math.inf, m + torch.log(total))
    out = _share(out_a, weight_a / total, a) + _share(out_b, weight_b / total, b)
    return out.to(out_a.dtype), lse.to(torch.promote_types(lse_a.dtype, lse_b.dtype))


def _share(out: Tensor, weight: Tensor, lse: Tensor) -> Tensor:
    """One side's part of the result; nothing where it saw no key, whatever its rows hold."""
    # NOTE: not the product is replaced: its gradient would be 0 * NaN there.
    return weight[..., None] * torch.where((lse == -math.inf)[..., None], 0.0, out.to(weight.dtype))


def _check(out_name: str, lse_name: str, out: Tensor, lse: Tensor) -> None:
    for name, x in ((out_name, out), (lse_name, lse)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: {type(x).__name__}; must be a torch.Tensor")
        if not x.dtype.is_floating_point:
            raise TypeError(f"{name}: dtype {x.dtype}; must be a floating-point type")
    if lse.shape != out.shape[:-1]:
        raise ValueError(
            f"{lse_name}: shape {tuple(lse.shape)}; must be {out_name}'s without the last, {tuple(out.shape[:-1])}"
        )
    if lse.device != out.device:
        raise ValueError(f"{lse_name}: on {lse.device}, {out_name} on {out.device}; all on one device")
