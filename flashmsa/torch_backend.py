"""The ``torch`` backend: attention composed of torch operators, on any device, with the same rules as the kernels.

    s = scale q k^T, capped and biased;  m = max s,  p = exp(s - m),  l = sum p,  over the allowed keys of each row
    o = p v / l,  lse = m + log l;  with dropout the p of o alone are dropped, and the kept ones scaled

Blocks of query rows are taken one after another, forward and backward, so that memory is O(S * block). The backward
pass recomputes p = exp(s - lse) and follows Dao et al., FlashAttention-2 (2023), section 3.1.2.

It runs where no native backend can: other GPUs, and options that the kernels lack.

An eager call is an autograd function over these steps. A traced one is the operator ``flashmsa::composed`` (backward:
``flashmsa::composed_backward``), whose loop over blocks no tracer sees, so that one graph serves all lengths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .dropout import keep_scale, kept_rows
from .masks import Dense, Lowered, Mask, has_values
from .masks.visible import Visible, visible

# Logits held at once: 64 MiB in fp32.
_BLOCK_ELEMENTS = 2**24


class _Rules(NamedTuple):
    """What turns q k^T into logits and says which of them count."""

    scale: float
    softcap: float
    visible: Visible  # which keys a row may see, and its place among them
    dropout_p: float = 0.0
    rng_state: Tensor | None = None  # int64 (2,), where dropout_p > 0


def attention(
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
    rng_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) for arguments that have been checked. Shapes as in ``flashmsa.attention``; differentiable once.

    rng_state   int64 (2,) on q's device, (seed, offset), where dropout_p > 0: see dropout.py
    """
    mask = Dense() if mask is None else mask
    if torch.compiler.is_compiling():
        return _traced(q, k, v, mask, scale, softcap, sinks, alibi_slopes, dropout_p, rng_state)
    # NOTE: torch's own test in Function.apply, which says that we lack a method.
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "flashmsa.attention: torch.func's transforms (vmap, grad, jvp, ...) are not supported; torch.autograd is"
        )
    with without_autocast(q.device.type):
        rules = _rules(q, k, mask._lower(), scale, softcap, dropout_p, rng_state)
        numbers = (rules.scale, rules.softcap, rules.dropout_p)
        return _Attention.apply(q, k, v, sinks, alibi_slopes, *numbers, rules.rng_state, *rules.visible)


def _rules(
    q: Tensor,
    k: Tensor,
    mask: Lowered,
    scale: float | None,
    softcap: float,
    dropout_p: float,
    rng_state: Tensor | None,
) -> _Rules:
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else float(scale)
    rows = visible(*mask, q.shape[2], k.shape[2], q.device)
    return _Rules(scale, float(softcap), rows, float(dropout_p), rng_state)


_BATCHED = torch._C._parse_dispatch_key("Batched")


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        slopes: Tensor | None,
        scale: float,
        softcap: float,
        dropout_p: float,
        rng_state: Tensor | None,
        *rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        rules = _Rules(scale, softcap, Visible(*rows), dropout_p, rng_state)
        out, lse = _forward(q, k, v, sinks, slopes, rules)
        ctx.save_for_backward(q, k, v, sinks, slopes, out, lse, rng_state, *rows)
        ctx.numbers = (scale, softcap, dropout_p)
        result = _empty_out(q, v.shape[3])
        result.copy_(out)
        return result, lse.float()

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
        # NOTE: torch.autograd.grad(is_grads_batched=True), which has a vmap of its own.
        if any(torch._C._dispatch_keys(x).has(_BATCHED) for x in (d_out, d_lse)):
            raise NotImplementedError(
                "flashmsa.attention: vmap is not supported, of gradients neither; ask for them one by one"
            )
        q, k, v, sinks, slopes, out, lse, rng_state, *rows = ctx.saved_tensors
        scale, softcap, dropout_p = ctx.numbers
        rules = _Rules(scale, softcap, Visible(*rows), dropout_p, rng_state)
        with torch.no_grad(), without_autocast(q.device.type):
            grads = _backward(q, k, v, sinks, slopes, rules, out, lse, d_out, d_lse)
        if torch.is_grad_enabled():
            # NOTE: autograd's once_differentiable looks at d_out alone, and would take these for constants of q, k, v.
            sources = tuple(x for x in (q, k, v, sinks, slopes, d_out, d_lse) if x is not None)
            grads = tuple(None if x is None else _OnceDifferentiable.apply(x, *sources) for x in grads)
        return (*grads, None, None, None, None, *(None for _ in rows))


class _OnceDifferentiable(torch.autograd.Function):
    """A gradient as it is, that depends on its sources in a way which cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, d_gradient: Tensor) -> tuple[Tensor | None, ...]:
        raise _no_second_derivative()


def _no_second_derivative() -> NotImplementedError:
    return NotImplementedError("flashmsa.attention: second derivatives are not supported")


# ---------------------------------------------------------------------------------------------------------------------
# The traced path. The operators take the mask as the native one does, and compute the rules inside.

_RULES = "int mask, int[] mask_ints, Tensor[] mask_tensors, float? scale, float softcap"
_OPTIONS = "Tensor? sinks, Tensor? alibi_slopes, float dropout_p, Tensor? rng_state"


def _traced(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float | None,
    softcap: float,
    sinks: Tensor | None,
    slopes: Tensor | None,
    dropout_p: float,
    rng_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    kind, ints, tensors = mask._lower()
    op = torch.ops.flashmsa.composed.default
    out, lse = op(q, k, v, kind, ints, tensors, scale, softcap, sinks, slopes, dropout_p, rng_state)
    return _empty_out(q, v.shape[3]).copy_(out), lse.float()


@torch.library.custom_op(
    "flashmsa::composed",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_RULES}, {_OPTIONS}) -> (Tensor, Tensor)",
)
def _composed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: int,
    mask_ints: Sequence[int],
    mask_tensors: Sequence[Tensor],
    scale: float | None,
    softcap: float,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    dropout_p: float,
    rng_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Sq, Dv) and lse (B, Hq, Sq), contiguous, in the dtype of the computation: backward needs them so."""
    with without_autocast(q.device.type):
        rules = _rules(q, k, (mask, mask_ints, mask_tensors), scale, softcap, dropout_p, rng_state)
        return _forward(q, k, v, sinks, alibi_slopes, rules)


@_composed.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    dtype = _compute_dtype(q)
    return q.new_empty((*q.shape[:3], v.shape[3]), dtype=dtype), q.new_empty(q.shape[:3], dtype=dtype)


@torch.library.custom_op(
    "flashmsa::composed_backward",
    mutates_args=(),
    schema="(Tensor d_out, Tensor d_lse, Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, "
    f"{_RULES}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _composed_backward(
    d_out: Tensor,
    d_lse: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: int,
    mask_ints: Sequence[int],
    mask_tensors: Sequence[Tensor],
    scale: float | None,
    softcap: float,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    dropout_p: float,
    rng_state: Tensor | None,
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, sinks and alibi_slopes; (0,) for one of the latter two that is not there."""
    with without_autocast(q.device.type):
        rules = _rules(q, k, (mask, mask_ints, mask_tensors), scale, softcap, dropout_p, rng_state)
        grads = _backward(q, k, v, sinks, alibi_slopes, rules, out, lse, d_out, d_lse)
    return tuple(q.new_empty(0) if x is None else x for x in grads)


@_composed_backward.register_fake
def _(d_out: Tensor, d_lse: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    return tuple(q.new_empty(0) if x is None else torch.empty_like(x) for x in (q, k, v, *rest[-4:-2]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, mask_ints, mask_tensors, scale, softcap, sinks, slopes, dropout_p, rng_state = inputs
    ctx.save_for_backward(*output, q, k, v, sinks, slopes, rng_state, *mask_tensors)
    ctx.mask, ctx.numbers = (mask, mask_ints), (scale, softcap, dropout_p)


def _gradients(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Any, ...]:
    out, lse, q, k, v, sinks, slopes, rng_state, *mask_tensors = ctx.saved_tensors
    op = torch.ops.flashmsa.composed_backward.default
    mask, mask_ints = ctx.mask
    scale, softcap, dropout_p = ctx.numbers
    options = (sinks, slopes, dropout_p, rng_state)
    rules = (mask, mask_ints, mask_tensors, scale, softcap)
    dq, dk, dv, d_sinks, d_slopes = op(d_out, d_lse, out, lse, q, k, v, *rules, *options)
    # NOTE: torch wants a list for each list of tensors among the arguments, and takes an empty one of ints for one.
    no_rules = (None, None if mask_ints else [], [None] * len(mask_tensors), None, None)
    of_options = (None if sinks is None else d_sinks, None if slopes is None else d_slopes, None, None)
    return dq, dk, dv, *no_rules, *of_options


def _refuse(ctx: Any, *_: Tensor) -> None:
    raise _no_second_derivative()


_composed.register_autograd(_gradients, setup_context=_save)
_composed_backward.register_autograd(_refuse)


# ---------------------------------------------------------------------------------------------------------------------
# The computation


def _forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, slopes: Tensor | None, rules: _Rules
) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Sq, Dv) and lse (B, Hq, Sq), both in the dtype of the computation."""
    dtype = _compute_dtype(q)
    k, v = k.to(dtype), v.to(dtype)
    v_is_finite = _known_finite(v)
    out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=dtype)
    lse = q.new_full(q.shape[:3], -math.inf, dtype=dtype)
    sink = None if sinks is None else _per_head(sinks, k.shape[1]).to(dtype)
    for rows in _row_blocks(q, k):
        allowed = _allowed(rules, rows, k.shape[1])
        s, _ = _logits(_group(q[:, :, rows].to(dtype), k), k, slopes, rules, rows)
        s = torch.where(allowed, s, -math.inf)
        # NOTE: amax has no value over no key.
        m = s.amax(-1, keepdim=True) if k.shape[2] else s.new_full((*s.shape[:-1], 1), -math.inf)
        empty = m == -math.inf
        m = m if sink is None else torch.maximum(m, sink)
        # NOTE: a row that sees nothing, or only logits of -inf, has no maximum to subtract: exp(-inf - 0) = 0.
        m = torch.where(m == -math.inf, 0.0, m)
        p = torch.where(allowed, torch.exp(s - m), 0.0)
        l = p.sum(-1, keepdim=True)
        l = l if sink is None else l + torch.exp(sink - m)
        if rules.dropout_p > 0.0:
            p = torch.where(_kept(rules, q, rows, k), p * keep_scale(rules.dropout_p), 0.0)
        o = p @ v[:, :, None] if v_is_finite else _weighted_sum(p, allowed, v[:, :, None])
        # NOTE: also where the sink is infinite or NaN, which l then is NaN from. NaN logits have a maximum of NaN.
        out[:, :, rows] = torch.where(empty, 0.0, o / l).flatten(1, 2)
        of_empty = -math.inf if sink is None else sink
        lse[:, :, rows] = torch.where(empty, of_empty, m + torch.log(l)).squeeze(-1).flatten(1, 2)
    return out, lse


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    slopes: Tensor | None,
    rules: _Rules,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor,
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, sinks and alibi_slopes, with dO and dlse given."""
    dtype = _compute_dtype(q)
    k_, v_ = k.to(dtype), v.to(dtype)
    dq = torch.zeros_like(q)
    dk, dv = torch.zeros_like(k_), torch.zeros_like(v_)
    d_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=dtype)
    d_slopes = None if slopes is None else slopes.new_zeros(q.shape[:2], dtype=dtype)
    for rows in _row_blocks(q, k):
        allowed = _allowed(rules, rows, k.shape[1])
        q_rows, do = _group(q[:, :, rows].to(dtype), k), _group(d_out[:, :, rows].to(dtype), k)
        s, s_slope = _logits(q_rows, k_, slopes, rules, rows)
        lse_rows = _group(lse[:, :, rows, None], k)
        # NOTE: a row that sees nothing, or only logits of -inf, gives q, k and v no gradient, whatever is asked of its
        # lse, and a sink that of its lse alone.
        live = lse_rows != -math.inf
        sees = (allowed & (s != -math.inf)).any(-1, keepdim=True)
        allowed = allowed & sees
        p = torch.where(allowed, torch.exp(s - lse_rows), 0.0)
        dp, weight = do @ v_[:, :, None].mT, p
        if rules.dropout_p > 0.0:
            kept, times = _kept(rules, q, rows, k), keep_scale(rules.dropout_p)
            dp, weight = torch.where(kept, dp * times, 0.0), torch.where(kept, p * times, 0.0)
        delta = torch.where(sees, (do * _group(out[:, :, rows], k)).sum(-1, keepdim=True), 0.0)
        delta = delta - _group(d_lse[:, :, rows, None].to(dtype), k)
        ds = torch.where(allowed, p * (dp - delta), 0.0)
        if d_slopes is not None:
            d_slopes -= (ds * _distance(rules, rows)).sum((-2, -1)).flatten(1, 2)
        if d_sinks is not None:
            share = torch.exp(_per_head(sinks, k.shape[1]).to(dtype) - lse_rows)
            d_sinks -= torch.where(live, share * delta, 0.0).sum((0, -2, -1)).flatten()
        ds = torch.where(allowed, ds * s_slope, 0.0)
        dq[:, :, rows] = _sum_gradient(ds, allowed, k_[:, :, None]).flatten(1, 2).to(dq.dtype)
        dk += _sum_gradient(ds.mT, allowed.mT, q_rows).sum(2)
        dv += _sum_gradient(weight.mT, allowed.mT, do).sum(2)
    if d_slopes is not None:
        d_slopes = (d_slopes if slopes.dim() == 2 else d_slopes.sum(0)).to(slopes.dtype)
    return dq, dk.to(k.dtype), dv.to(v.dtype), None if d_sinks is None else d_sinks.to(sinks.dtype), d_slopes


def _logits(q: Tensor, k: Tensor, slopes: Tensor | None, rules: _Rules, rows: slice) -> tuple[Tensor, Tensor | float]:
    """Logits (B, Hkv, G, rows, len_kv) before masking, and their derivative by q k^T."""
    s = (q @ k[:, :, None].mT) * rules.scale
    derivative: Tensor | float = rules.scale
    if rules.softcap > 0.0:
        bent = torch.tanh(s / rules.softcap)
        s = rules.softcap * bent
        derivative = rules.scale * (1.0 - bent * bent)
    if slopes is not None:
        s = s - _per_head(slopes, k.shape[1]).to(s.dtype) * _distance(rules, rows).to(s.dtype)
    return s, derivative


def _weighted_sum(p: Tensor, allowed: Tensor, v: Tensor) -> Tensor:
    """The sum over allowed keys alone of p v, p >= 0 being 0 elsewhere.

    A plain product would add 0 * NaN for keys that a row may not see. So finite values are summed, and for each result
    the kinds of non-finite terms among its row's allowed keys are counted: NaN gives NaN, infinities their sum.
    """
    dtype = p.dtype
    visible = allowed.to(dtype).expand(p.shape)
    weighty = (p > 0.0).to(dtype)
    plus, minus = weighty @ (v == math.inf).to(dtype), weighty @ (v == -math.inf).to(dtype)
    # 0 * inf is NaN where the key may be seen, as in any sum.
    unweighted = visible @ v.isinf().to(dtype) > plus + minus
    is_nan = (visible @ v.isnan().to(dtype) > 0.0) | ((plus > 0.0) & (minus > 0.0)) | unweighted
    total = p @ torch.where(v.isfinite(), v, 0.0)
    total = torch.where(plus > 0.0, math.inf, torch.where(minus > 0.0, -math.inf, total))
    return torch.where(is_nan, math.nan, total)


def _sum_gradient(weight: Tensor, allowed: Tensor, x: Tensor) -> Tensor:
    """The sum over allowed pairs alone of weight * x, weight being 0 elsewhere; NaN where a term is not finite."""
    if _known_finite(x):
        return weight @ x
    finite = x.isfinite()
    poisoned = allowed.to(weight.dtype).expand(weight.shape) @ (~finite).to(weight.dtype) > 0.0
    return torch.where(poisoned, math.nan, weight @ torch.where(finite, x, 0.0))


# NOTE: asked for once: not every torch traces the question.
AUTOCAST_DEVICES = frozenset(x for x in ("cpu", "cuda", "xpu", "mps", "hpu") if torch.amp.is_autocast_available(x))


def without_autocast(device_type: str) -> AbstractContextManager[None]:
    """No casts inside; devices that autocast does not know have none anyway."""
    if device_type in AUTOCAST_DEVICES:
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def _known_finite(x: Tensor) -> bool:
    """Whether x is known to be finite without waiting for a device."""
    return has_values(x) and x.device.type == "cpu" and bool(x.isfinite().all())


def _allowed(rules: _Rules, rows: slice, heads_kv: int) -> Tensor:
    """(1 or B, 1 or Hkv, 1 or G, rows, len_kv) bool."""
    allowed = rules.visible.rows(rows)
    heads = allowed.shape[1]
    # NOTE: a mask of as many heads as k has is shared by the query heads of each.
    return allowed.unflatten(1, (heads_kv, heads // max(1, heads_kv))) if heads != 1 else allowed[:, :, None]


def _kept(rules: _Rules, q: Tensor, rows: slice, k: Tensor) -> Tensor:
    """The weights that dropout keeps, (B, Hkv, G, rows, len_kv) bool."""
    return _group(kept_rows(rules.rng_state, rules.dropout_p, *q.shape[:2], rows, k.shape[2]), k)


def _distance(rules: _Rules, rows: slice) -> Tensor:
    """|p - j|, (1 or B, 1, 1, rows, len_kv) int64."""
    position, key = rules.visible.position, rules.visible.key
    distance = (position[..., rows, None] - key).abs()
    return distance[:, None, None] if distance.dim() == 3 else distance[None, None, None]


def _group(x: Tensor, k: Tensor) -> Tensor:
    """(B, Hq, ...) as (B, Hkv, G, ...): query head h reads kv head h // G."""
    return x.unflatten(1, (k.shape[1], x.shape[1] // max(1, k.shape[1])))


def _per_head(x: Tensor, heads_kv: int) -> Tensor:
    """(Hq,) or (B, Hq) as (1 or B, Hkv, G, 1, 1)."""
    x = x if x.dim() == 2 else x[None]
    return x.unflatten(1, (heads_kv, x.shape[1] // max(1, heads_kv)))[..., None, None]


def _row_blocks(q: Tensor, k: Tensor) -> Iterator[slice]:
    batch, heads, len_q = q.shape[:3]
    rows = block_rows(batch, heads, k.shape[2])
    return (slice(first, min(first + rows, len_q)) for first in range(0, len_q, rows))


def block_rows(batch: int, heads: int, len_kv: int) -> int:
    """Query rows taken at once."""
    return max(16, min(512, _BLOCK_ELEMENTS // max(1, batch * heads * len_kv)))


def _compute_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _empty_out(q: Tensor, head_dim_v: int) -> Tensor:
    """(B, H, S, Dv) in q's memory order: heads outside the sequence, or inside it where q has them so."""
    batch, heads, len_q = q.shape[:3]
    if q.stride(1) < q.stride(2):
        return q.new_empty(batch, len_q, heads, head_dim_v).transpose(1, 2)
    return q.new_empty(batch, heads, len_q, head_dim_v)
