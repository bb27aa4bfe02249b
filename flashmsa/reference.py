"""The float64 oracle: attention written down from its definition, for tests. Slow, and large in memory."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .checks import check_arguments, check_gaps, check_tensor
from .masks import Dense, Mask
from .torch_backend import without_autocast


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
    config: Any = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``flashmsa.attention`` computed in float64 from the mask's ``to_dense``; out and lse are float64.

    Same arguments, shapes and errors; ``seed``, ``deterministic`` and ``backend`` change nothing here. Differentiable.
    Holds a (B, Hq, block, Sk) float64 tensor for a block of query rows at a time, beside the dense mask.
    """
    check_tensor("q", q)
    check_gaps(q, dropout_p, config)
    check_arguments(q, k, v, mask, scale=scale, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes, out=out)
    mask = Dense() if mask is None else mask
    heads, len_q, len_kv = q.shape[1], q.shape[2], k.shape[2]
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    groups = heads // max(1, k.shape[1])
    with without_autocast(q.device.type):
        # Query head h uses kv head h // groups.
        k64, v64 = (x.double().repeat_interleave(groups, dim=1) for x in (k, v))
        dense = mask.to_dense(len_q, len_kv, q.device)
        if dense.dim() == 4 and dense.shape[1] not in (1, heads):
            dense = dense.repeat_interleave(heads // dense.shape[1], dim=1)
        position = mask._visible(len_q, len_kv, q.device).position
        distance = (position[..., None] - torch.arange(len_kv, device=q.device)).abs()
        distance = distance[:, None] if distance.dim() == 3 else distance
        parts = []
        rows = max(1, 2**25 // max(1, q.shape[0] * heads * len_kv))
        for first in range(0, len_q, rows):
            block = slice(first, first + rows)
            s = scale * (q[:, :, block].double() @ k64.mT)
            if softcap > 0.0:
                s = softcap * torch.tanh(s / softcap)
            if alibi_slopes is not None:
                s = s - alibi_slopes.double()[..., None, None] * distance[..., block, :]
            parts.append(_softmax_times_v(s, dense[..., block, :], v64, sinks))
    if parts:
        result, lse = torch.cat([o for o, _ in parts], dim=2), torch.cat([x for _, x in parts], dim=2)
    else:
        result, lse = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=torch.float64), q.new_zeros(q.shape[:3]).double()
    if out is not None:
        result = out.copy_(result)
    return (result, lse) if return_lse else result


def _softmax_times_v(s: Tensor, allowed: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows of logits (B, H, R, Sk) to out (B, H, R, Dv) and lse (B, H, R); the softmax is over the allowed keys."""
    s = torch.where(allowed, s, -math.inf)
    # A row that sees nothing, or only logits of -inf, is 0 whatever its sink.
    unseen = torch.nn.functional.pad(s, (0, 1), value=-math.inf).amax(-1, keepdim=True) == -math.inf
    if sinks is not None:
        s = torch.cat([s, sinks.double()[:, None, None].expand(*s.shape[:-1], 1)], dim=-1)
    # One more key of weight 0, so that a row always has a maximum.
    m = torch.nn.functional.pad(s, (0, 1), value=-math.inf).amax(-1, keepdim=True).detach()
    m = torch.where(m == -math.inf, 0.0, m)
    e = torch.exp(s - m)
    total = e.sum(-1, keepdim=True)
    empty = total == 0.0
    p = torch.where(allowed, e[..., : v.shape[2]], 0.0) / torch.where(empty, 1.0, total)
    lse = torch.where(empty, -math.inf, m + torch.log(torch.where(empty, 1.0, total))).squeeze(-1)
    if sinks is not None:
        p = torch.where(unseen, 0.0, p)
        lse = torch.where(unseen.squeeze(-1), sinks.double()[:, None], lse)
    if bool(v.isfinite().all()):
        return p @ v, lse
    # 0 * NaN is NaN: terms of keys that a row may not see have to be left out of the sum, one row after another.
    rows = [torch.where(allowed[..., i, :, None], p[:, :, i, :, None] * v, 0.0).sum(-2) for i in range(p.shape[2])]
    return torch.where(unseen, 0.0, torch.stack(rows, dim=2)), lse
