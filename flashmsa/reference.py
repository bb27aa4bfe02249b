"""The float64 oracle: attention written down from its definition, for tests. Slow, and large in memory."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .checks import check_arguments, check_gaps, check_tensor
from .dropout import keep_scale, kept_rows, rng_state
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

    Same arguments, shapes and errors; ``deterministic`` and ``backend`` change nothing here. Differentiable, slopes
    too: gradients keep to the pairs that the mask allows, so that NaN elsewhere does not touch them.
    Holds a (B, Hq, block, Sk) float64 tensor for a block of query rows at a time, beside the dense mask.
    """
    check_tensor("q", q)
    check_gaps(q, dropout_p, config)
    check_arguments(q, k, v, mask, scale=scale, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes, out=out)
    mask = Dense() if mask is None else mask
    heads, len_q, len_kv = q.shape[1], q.shape[2], k.shape[2]
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    groups = heads // max(1, k.shape[1])
    state = rng_state(seed, q.device) if dropout_p > 0.0 else None
    with without_autocast(q.device.type):
        # Query head h uses kv head h // groups.
        k64, v64 = (x.double().repeat_interleave(groups, dim=1) for x in (k, v))
        # NOTE: once, so that their float32 gradients are rounded once.
        sinks64, slopes64 = (None if x is None else x.double() for x in (sinks, alibi_slopes))
        dense = mask.to_dense(len_q, len_kv, q.device)
        if dense.dim() == 4 and dense.shape[1] not in (1, heads):
            dense = dense.repeat_interleave(heads // dense.shape[1], dim=1)
        position = mask._visible(len_q, len_kv, q.device).position
        distance = (position[..., None] - torch.arange(len_kv, device=q.device)).abs()
        distance = distance[:, None] if distance.dim() == 3 else distance
        parts = []
        rows = max(1, 2**25 // max(1, q.shape[0] * heads * len_kv))
        # NOTE: one block also of no rows, so that the result of no rows has gradients too.
        for first in range(0, max(1, len_q), rows):
            block = slice(first, min(first + rows, len_q))
            allowed, away = dense[..., block, :], distance[..., block, :]

            def bend(s: Tensor, away: Tensor = away) -> Tensor:
                s = scale * s
                s = softcap * torch.tanh(s / softcap) if softcap > 0.0 else s
                return s if slopes64 is None else s - slopes64[..., None, None] * away

            q64 = q[:, :, block].double()
            # A row that sees nothing, or only logits of -inf, is 0 whatever its sink, and so are its gradients.
            with torch.no_grad():
                seen = (allowed & (bend(q64 @ k64.mT) != -math.inf)).any(-1, keepdim=True)
            counted = allowed & seen
            s = torch.where(counted, bend(_Products.apply(q64, k64, counted)), -math.inf)
            times = None
            if state is not None:
                kept = kept_rows(state, dropout_p, q.shape[0], heads, block, len_kv)
                times = kept.double() * keep_scale(dropout_p)
            parts.append(_softmax_times_v(s, counted, v64, sinks64, times))
    result, lse = (torch.cat(x, dim=2) for x in zip(*parts, strict=True))
    if out is not None:
        result = out.copy_(result)
    return (result, lse) if return_lse else result


def _softmax_times_v(
    s: Tensor, counted: Tensor, v: Tensor, sinks: Tensor | None, times: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Rows of logits (B, H, R, Sk) to out (B, H, R, Dv) and lse (B, H, R); the softmax is over the counted keys.

    Each weight counts ``times`` times in out, not in lse.
    """
    if sinks is not None:
        s = torch.cat([s, sinks[:, None, None].expand(*s.shape[:-1], 1)], dim=-1)
    # One more key of weight 0, so that a row always has a maximum.
    m = torch.nn.functional.pad(s, (0, 1), value=-math.inf).amax(-1, keepdim=True).detach()
    m = torch.where(m == -math.inf, 0.0, m)
    e = torch.exp(s - m)
    total = e.sum(-1, keepdim=True)
    empty = total == 0.0
    p = torch.where(counted, e[..., : v.shape[2]] / torch.where(empty, 1.0, total), 0.0)
    lse = torch.where(empty, -math.inf, m + torch.log(torch.where(empty, 1.0, total))).squeeze(-1)
    if sinks is not None:
        # NOTE: not log(e^sink): a sink may be infinite or NaN.
        unseen = ~counted.any(-1).expand(lse.shape)
        lse = torch.where(unseen, sinks[:, None], lse)
    return _Sums.apply(p if times is None else p * times, v, counted), lse


class _Products(torch.autograd.Function):
    """q k^T, (B, H, R, Sk), whose gradient comes from the counted pairs alone; it is 0 elsewhere."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, counted: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, counted)
        return q @ k.mT

    @staticmethod
    def backward(ctx: Any, d_s: Tensor) -> tuple[Tensor, Tensor, None]:
        q, k, counted = ctx.saved_tensors
        # NOTE: what stands between, a cap, makes NaN of the 0 of a pair that may not be seen where its product is NaN.
        d_s = torch.where(counted, d_s, 0.0)
        return _Sums.apply(d_s, k, counted), _Sums.apply(d_s.mT, q, counted.mT), None


class _Sums(torch.autograd.Function):
    """For each row the sum of weight * x over the counted pairs alone. It is 0 elsewhere, but 0 * NaN is NaN."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, counted: Tensor) -> Tensor:
        ctx.save_for_backward(weight, x, counted)
        if bool(x.isfinite().all()):
            return weight @ x
        counted, weight, x = counted.expand(weight.shape)[..., None], weight[..., None], x[..., None, :, :]
        # The terms one by one, of some rows at a time.
        rows = max(1, 2**24 // max(1, x.numel()))
        parts = zip(weight.split(rows, dim=-3), counted.split(rows, dim=-3), strict=True)
        return torch.cat([torch.where(c, w * x, 0.0).sum(-2) for w, c in parts], dim=-2)

    @staticmethod
    def backward(ctx: Any, d_sum: Tensor) -> tuple[Tensor, Tensor, None]:
        weight, x, counted = ctx.saved_tensors
        return torch.where(counted, d_sum @ x.mT, 0.0), _Sums.apply(weight.mT, d_sum, counted.mT), None
