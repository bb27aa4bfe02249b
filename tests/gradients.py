"""What the tests of the backward pass share: gradients of a call, of the oracle, and of the rule's yardstick."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from helpers import (
    DENSE,
    PLAIN,
    MaskCase,
    Options,
    Target,
    _by_head,
    _heads_like,
    assert_lse,
    assert_within_rule,
    largest,
    ulp,
    with_sinks,
)

import flashmsa
from flashmsa.dropout import keep_scale

NAMES = ("dq", "dk", "dv", "dsinks")
Gradients = dict[str, torch.Tensor]


def grad_like(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Standard normal dO (B, Hq, Sq, Dv) of q's dtype, and dlse (B, Hq, Sq) fp32."""
    d_out = torch.randn(*q.shape[:3], v.shape[3], device=q.device).to(q.dtype)
    return d_out, torch.randn(q.shape[:3], device=q.device)


def gradients_of(
    call: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    sinks: torch.Tensor | None,
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None,
) -> Gradients:
    """out, lse and the gradients of call(q, k, v, sinks), which are leaves of the layout that was given."""
    leaves = [x.detach().requires_grad_() for x in (*inputs, *(() if sinks is None else (sinks,)))]
    out, lse = call(*leaves[:3], leaves[3] if sinks is not None else None)
    results, weights = (out, lse), (d_out.to(out.dtype), None if d_lse is None else d_lse.to(lse.dtype))
    results, weights = zip(*[(x, w) for x, w in zip(results, weights, strict=True) if w is not None], strict=True)
    found = torch.autograd.grad(results, leaves, weights, allow_unused=True, materialize_grads=True)
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(NAMES, found, strict=False))}


def run_backward(
    target: Target,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: MaskCase | flashmsa.Mask | None,
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None = None,
    options: Options = PLAIN,
    **kwargs: Any,
) -> Gradients:
    """The gradients of flashmsa.attention on a target."""
    built = mask.build(q.device) if isinstance(mask, MaskCase) else mask
    rest = {name: value for name, value in options.call().items() if name != "sinks"}

    def call(q, k, v, sinks):
        options = {**rest, "sinks": sinks, "mask": built, "backend": target.backend, **kwargs}
        return flashmsa.attention(q, k, v, return_lse=True, **options)

    return gradients_of(call, (q, k, v), options.sinks, d_out, d_lse)


def expected_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: MaskCase,
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None = None,
    options: Options = PLAIN,
    **kwargs: Any,
) -> Gradients:
    """Autograd through flashmsa.reference, in float64."""
    rest = {name: value for name, value in options.call().items() if name != "sinks"}
    built = mask.build(q.device)

    def call(q, k, v, sinks):
        return flashmsa.reference(q, k, v, built, sinks=sinks, return_lse=True, **rest, **kwargs)

    wide = (q.double(), k.double(), v.double())
    return gradients_of(call, wide, options.sinks, d_out, d_lse)


def composed_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: MaskCase,
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None = None,
    options: Options = PLAIN,
    scale: float | None = None,
    kept: torch.Tensor | None = None,
    p: float = 0.0,
) -> Gradients:
    """Autograd through torch's operators in q's own dtype, nothing upcast: the yardstick. `kept`: dropout's."""
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    allowed = _by_head(mask.allowed(q.shape[2], k.shape[2], device=q.device), q.shape[1])
    options = options.of(mask, q.shape[2], k.shape[2], None, q.device)
    empty = ~allowed.any(-1, keepdim=True)

    def call(q, k, v, sinks):
        k, v = _heads_like(q, k), _heads_like(q, v)
        s = options.bend(torch.matmul(q, k.mT) * scale).masked_fill(~allowed, -math.inf)
        # Rows without a key get one: their softmax has no gradient that is a number.
        s = with_sinks(s.masked_fill(empty, 0.0), Options(sinks=sinks))
        weight = torch.softmax(s, dim=-1)[..., : k.shape[2]].masked_fill(empty, 0.0)
        if kept is not None:
            weight = weight * kept * keep_scale(p)
        lse = torch.logsumexp(s, -1) if s.shape[-1] else s.new_zeros(s.shape[:-1])
        return torch.matmul(weight, v), lse.masked_fill(empty[..., 0].expand(lse.shape), 0.0)

    return gradients_of(call, (q, k, v), options.sinks, d_out, d_lse)


def check_gradients(
    found: Gradients,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: MaskCase,
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None = None,
    options: Options = PLAIN,
    *,
    note: object = "",
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int | torch.Tensor | None = None,
) -> None:
    """Out, lse and gradients against float64 autograd through the reference, by the tolerance rule."""
    note = note or f"{mask} q {tuple(q.shape)} k {tuple(k.shape)} v {tuple(v.shape)}"
    expected = expected_gradients(q, k, v, mask, d_out, d_lse, options, scale=scale, dropout_p=dropout_p, seed=seed)
    assert_lse(found["lse"], expected["lse"], note)
    dropout = {"dropout_p": dropout_p, "seed": seed}
    assert_gradients(found, expected, q, k, v, mask, d_out, d_lse, options, note=note, scale=scale, **dropout)


def assert_gradients(
    found: Gradients,
    expected: Gradients,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: MaskCase,
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None = None,
    options: Options = PLAIN,
    *,
    note: object = "",
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int | torch.Tensor | None = None,
) -> None:
    """Out and gradients against expected ones in float64, by the tolerance rule for these inputs."""
    clean = [torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0) for x in (q, k, v, d_out)]
    kept = None
    if dropout_p > 0.0:
        kept = flashmsa.dropout_mask(*q.shape[:3], k.shape[2], dropout_p, seed, device=q.device)
    yardstick = composed_gradients(*clean[:3], mask, clean[3], d_lse, options, scale, kept, dropout_p)
    sums = magnitudes(tuple(clean), mask, d_lse, options, scale, keep_scale(dropout_p))
    known = rounding_of_out(tuple(clean), expected["out"], mask, options, scale)
    for name, want in expected.items():
        got = found[name]
        if name == "lse":
            continue
        like = {"out": q, "dq": q, "dk": k, "dv": v, "dsinks": options.sinks}[name]
        assert got.shape == want.shape and got.dtype == like.dtype, f"{note}: {name} {got.dtype} {tuple(got.shape)}"
        extra, limit = extra_limit(name, expected, sums, q, k, v)
        rest = torch.zeros_like(want)
        assert_within_rule(got, want, rest, yardstick[name], f"{note}: {name}", limit, extra, known.get(name))


def magnitudes(
    inputs: tuple[torch.Tensor, ...],
    mask: MaskCase,
    d_lse: torch.Tensor | None,
    options: Options,
    scale: float | None,
    times: float,
) -> Gradients:
    """For out and every gradient the sum of its terms' magnitudes, in float64, for finite inputs q, k, v and dO.

    ds = p (dp - delta) counts as p (|dp| + |delta|), and |delta| as |dO| |out| + |dlse|; a cap's slope as 1. Kept
    weights of dropout count `times` times.
    """
    q, k, v, d_out = (x.detach().double() for x in inputs)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    allowed = _by_head(mask.allowed(q.shape[2], k.shape[2], device=q.device), q.shape[1])
    options = options.of(mask, q.shape[2], k.shape[2], None, q.device)
    k_, v_ = _heads_like(q, k), _heads_like(q, v)
    s = with_sinks(options.bend(q @ k_.mT * scale).masked_fill(~allowed, -math.inf), options)
    p = torch.softmax(s, -1).nan_to_num(0.0)
    p, of_sink = p[..., : k.shape[2]] * times, p[..., k.shape[2] :]
    q, k_, v_, d_out = q.abs(), k_.abs(), v_.abs(), d_out.abs()
    delta = (d_out * (p @ v_)).sum(-1, keepdim=True) + (0.0 if d_lse is None else d_lse.abs()[..., None])
    ds = p * (d_out @ v_.mT + delta)
    groups = (k.shape[1], q.shape[1] // k.shape[1])
    return {
        "out": p @ v_,
        "dq": abs(scale) * (ds @ k_),
        "dk": abs(scale) * (ds.mT @ q).unflatten(1, groups).sum(2),
        "dv": (p.mT @ d_out).unflatten(1, groups).sum(2),
        "dsinks": (of_sink * delta).sum((0, 2, 3)),
    }


def rounding_of_out(
    inputs: tuple[torch.Tensor, ...],
    out: torch.Tensor,
    mask: MaskCase,
    options: Options,
    scale: float | None,
) -> Gradients:
    """What it does to gradients, in float64, that backward gets `out` rounded to its dtype.

    delta = sum of dO * out moves by d = sum of dO * (rounded out - out), and every ds of the row by -p d. The yardstick
    keeps p and dp instead.
    """
    dtype = inputs[0].dtype
    q, k, _, d_out = (x.detach().double() for x in inputs)
    q, k = q.requires_grad_(), k.requires_grad_()
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    allowed = _by_head(mask.allowed(q.shape[2], k.shape[2], device=q.device), q.shape[1])
    options = options.of(mask, q.shape[2], k.shape[2], None, q.device)
    out = out.detach().nan_to_num(0.0, 0.0, 0.0)
    moved = (d_out * (out.to(dtype).double() - out)).sum(-1, keepdim=True)
    s = options.bend(q @ _heads_like(q, k).mT * scale).masked_fill(~allowed, -math.inf)
    ds = torch.softmax(with_sinks(s, options), -1).nan_to_num(0.0).detach() * moved
    dq, dk = torch.autograd.grad((s.masked_fill(~allowed, 0.0) * ds[..., : k.shape[2]]).sum(), (q, k))
    return {"dq": dq, "dk": dk, "dsinks": ds[..., k.shape[2] :].sum((0, 2, 3))}


def extra_limit(
    name: str, expected: Gradients, sums: Gradients, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[float, float | None]:
    """What the rule leaves out, as (extra, limit instead of the rule).

    The lse that backward gets is fp32 by contract. Its rounding scales a row's weights by 1 + eps |lse|, which in fp32
    counts beside the rule's yardstick, whose softmax has none. float64 cannot judge itself: n roundings err by n units
    of the sum of magnitudes. Gradients of sinks come from that lse and an fp32 delta in every dtype, and are fp32, the
    expected ones too.
    """
    lse = expected["lse"]
    row = torch.finfo(torch.float32).eps * max(1.0, largest(lse.masked_fill(~lse.isfinite(), 0.0)))
    most = largest(sums[name])
    of_sinks = 0.0
    if name == "dsinks":
        of_sinks = ulp(largest(expected[name].nan_to_num(0.0)), torch.float32) + 2.0 * row * most
    if q.dtype == torch.float64:
        n = 2 * (q.shape[2] * q.shape[1] + k.shape[2] + q.shape[3] + v.shape[3])
        return 0.0, n * torch.finfo(torch.float64).eps * most + of_sinks
    return 2.0 * row * most if q.dtype == torch.float32 and name not in ("out", "dsinks") else of_sinks, None


def run_and_check_backward(
    target: Target,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: MaskCase = DENSE,
    *,
    options: Options = PLAIN,
    with_lse: bool = True,
    note: object = "",
    **kwargs: Any,
) -> Gradients:
    """run_backward(), then check_gradients()."""
    d_out, d_lse = grad_like(q, v)
    d_lse = d_lse if with_lse else None
    found = run_backward(target, q, k, v, mask, d_out, d_lse, options, **kwargs)
    checked = {name: value for name, value in kwargs.items() if name in ("scale", "dropout_p", "seed")}
    check_gradients(found, q, k, v, mask, d_out, d_lse, options, note=note, **checked)
    return found
