"""``attention``: the one call. Short on purpose: an eager call to a native backend passes a few comparisons only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _C, torch_backend
from .checks import check_arguments, check_dropout, check_gaps, check_mask, check_number, check_tensor
from .dispatch import BACKENDS, CPU_DTYPES, Wanted, all_kernels_exist, choose, named_error, reject, warn_once
from .dropout import rng_state
from .masks import Dense, Mask, lower
from .masks.base import BLOCK_SPARSE, HASH

_native = _C.attention
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_DENSE = Dense._lowered

# (device index, dtype) for which a native backend runs every call. Index -1 is the CPU, and the meta device, which the
# operator serves as well. CUDA devices enter with their first call.
# PERF: an index costs a quarter of a microsecond less than a torch.device to make and hash.
_FAST: set[tuple[int, torch.dtype]] = {(-1, dtype) for dtype in CPU_DTYPES}
# Those of them for which that holds with dropout and gradients too.
_FAST_TRAINING: set[tuple[int, torch.dtype]] = set(_FAST)

# Set by flashmsa.check: validate values that lie on the device.
_checked = False


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
    seed: int | Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
    config: Any = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v over the keys that ``mask`` allows each query.

    q              (B, Hq, Sq, D) float16, bfloat16, float32 or float64 (CPU); D and Dv multiples of 8 from 8 to 256
    k, v           (B, Hkv, Sk, D), (B, Hkv, Sk, Dv) of q's dtype and device; query head h reads kv head h // (Hq / Hkv)
    mask           Dense(), Causal(), Document(offsets), ...; None: every key
    scale          factor of the logits, any finite number; default 1/sqrt(D)
    softcap        > 0: logits become softcap * tanh(logit / softcap)
    sinks          (Hq,) float32: one more term e^sink in each row's denominator
    alibi_slopes   (Hq,) or (B, Hq) float32: logits lose slope * |p - j|, p the query's place among the keys
    dropout_p      in [0, 1): the probability that a weight is dropped, rounded to 1/65536; the kept ones are scaled to
                   make up for it. lse is that of all weights
    seed           of dropout: an int, or an int64 tensor (seed, offset) on q's device; None: by torch's generator
    return_lse     also return the logarithm of each row's denominator, sink included
    deterministic  the same gradients, bit for bit, in every run of the same call, as
                   torch.use_deterministic_algorithms(True) asks of every call; the forward pass always is
    backend        "sm90", "cpu" or "torch"; None: sm90 on compute capability 9.0, cpu for CPU tensors, and otherwise
                   torch, with one warning per reason
    config         not supported yet; None
    out            write the result here: (B, Hq, Sq, Dv) of q's dtype and device; not differentiable

    Returns out (B, Hq, Sq, Dv) in q's dtype and memory order, and with ``return_lse`` lse (B, Hq, Sq) float32. Sums are
    in float32, for float64 in float64. A row without an allowed key is 0, its lse -inf. Keys that a row may not see do
    not touch its result, NaN included. Differentiable once by q, k, v and sinks, through out and lse; on the torch
    backend by alibi_slopes too.

    Raises TypeError, ValueError, NotImplementedError (second derivatives among others) or RuntimeError (the machine)
    before anything is launched.

    Algorithm: Milakov and Gimelshein, Online normalizer calculation for softmax (2018); Dao et al., FlashAttention
    (2022).
    """
    if (
        backend is None
        and config is None
        and out is None
        and not _is_dynamo_compiling()
        and not _checked
        and (mask is None or isinstance(mask, Mask))
        and isinstance(q, Tensor)
    ):
        # NOTE: the operator has autocast's casts itself.
        place = (q.get_device(), q.dtype)
        if place in _FAST and (place in _FAST_TRAINING or not _trains(dropout_p, q, k, v, sinks)):
            kind, ints, tensors = _DENSE if mask is None else mask._lowered
            if kind < HASH or _fits_native(kind, mask, q, k, alibi_slopes):
                state = None if dropout_p == 0.0 else dropout_state(dropout_p, seed, q)
                # fmt: off
                result = _native(
                    q, k, v, kind, ints, tensors, scale, softcap, sinks, alibi_slopes,
                    dropout_p, state, deterministic, return_lse,
                )
                # fmt: on
                return result if return_lse else result[0]
    options = (dropout_p, seed, return_lse, deterministic, backend, config, out)
    return _attention(q, k, v, mask, scale, softcap, sinks, alibi_slopes, *options)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    scale: float | None,
    softcap: float,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    dropout_p: float,
    seed: int | Tensor | None,
    return_lse: bool,
    deterministic: bool,
    backend: str | None,
    config: Any,
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Any call: options, autocast, checked mode, the choice of a backend."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
    check_mask(mask)
    check_gaps(q, dropout_p, config)
    check_number("softcap", softcap)
    q, k, v = autocast(q, k, v)
    if _checked:
        _check_values(q, k, mask)
    backward = out is None and wants_gradient(q, k, v, sinks)
    wanted = wanted_of(mask, softcap, alibi_slopes, dropout_p, backward)
    chosen, reason = _resolve(backend, q, wanted)
    state = dropout_state(dropout_p, seed, q)
    if chosen == "torch":
        check_arguments(q, k, v, mask, scale=scale, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes, out=out)
        if reason is not None:
            warn_once(reason)
        _check_no_grad(out, q, k, v, sinks, alibi_slopes)
        options = {"scale": scale, "softcap": softcap, "sinks": sinks, "alibi_slopes": alibi_slopes}
        result = torch_backend.attention(q, k, v, mask, **options, dropout_p=dropout_p, rng_state=state)
        if out is not None:
            result = out.copy_(result[0]), result[1]
    else:
        options = (scale, softcap, sinks, alibi_slopes, dropout_p, state, deterministic, return_lse)
        result = _run_native(q, k, v, mask, options, out)
        if chosen == "sm90" and not _is_dynamo_compiling():
            _remember(q)
    return result if return_lse else result[0]


def _run_native(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, options: tuple[Any, ...], out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``options``: the operator's arguments from scale on."""
    lowered = lower(mask)
    _fits_native(lowered[0], mask, q, k, options[3])
    call = (q, k, v, *lowered, *options)
    # NOTE: a tracer has to see the operator; the binding's entry skips torch.ops' parsing of arguments.
    if _is_dynamo_compiling():
        op = torch.ops.flashmsa.attention
        return op.default(*call) if out is None else (out, op.out(*call, out=out))
    return _native(*call) if out is None else _C.attention_out(*call, out)


def _remember(q: Tensor) -> None:
    """That kernels serve every call on q's device and dtype, where they do."""
    place = (q.device.index, q.dtype)
    if place not in _FAST and all_kernels_exist(q.dtype):
        _FAST.add(place)
        if all_kernels_exist(q.dtype, training=True):
            _FAST_TRAINING.add(place)


def _trains(dropout_p: float, *inputs: Tensor | None) -> bool:
    return dropout_p != 0.0 or wants_gradient(*inputs)


def wants_gradient(*inputs: Tensor | None) -> bool:
    """Whether a call with these inputs is recorded for a backward pass."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)


def dropout_state(dropout_p: float, seed: int | Tensor | None, q: Tensor) -> Tensor | None:
    """Seed and offset on q's device for dropout; None without, whatever the seed."""
    check_dropout(dropout_p)
    return rng_state(seed, q.device) if dropout_p > 0.0 else None


def _fits_native(kind: int, mask: Mask | None, q: Tensor, k: Tensor, alibi_slopes: Tensor | None) -> bool:
    """Whether native backends run this kind with these options. Raises where dense bits are for other lengths."""
    # NOTE: the binding checks all other shapes; a list of blocks does not say to it which lengths its bits are for.
    if kind == BLOCK_SPARSE and q.dim() == 4 and k.dim() == 4:
        mask._check_shapes(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
    return kind != HASH or alibi_slopes is None


def wanted_of(
    mask: Mask | None, softcap: float, alibi_slopes: Tensor | None, dropout_p: float, backward: bool
) -> Wanted:
    """What a backend must have for these arguments."""
    return Wanted(lower(mask)[0], softcap != 0.0, alibi_slopes is not None, dropout_p > 0.0, backward)


def _resolve(backend: str | None, q: Tensor, wanted: Wanted) -> tuple[str, str | None]:
    """The backend to run, and where that is ``torch`` by default, why."""
    if backend is None:
        chosen, rejections = choose(q, wanted)
        if chosen != "torch":
            return chosen, None
        # The reason that matters is that of the tensors' own backend.
        own = {"cuda": "sm90", "cpu": "cpu"}.get(q.device.type)
        reason = next((r.reason for r in rejections if r.backend == own), f"no native backend for {q.device.type}")
        return chosen, reason
    check_backend(backend)
    rejection = reject(backend, q, wanted)
    if rejection is not None:
        raise named_error(rejection)
    return backend, None


def check_backend(backend: Any) -> None:
    if not isinstance(backend, str):
        raise TypeError(f"backend: {type(backend).__name__}; must be a str or None")
    if backend not in BACKENDS:
        raise ValueError(f"backend: {backend!r} does not exist; one of {', '.join(map(repr, BACKENDS))}, or None")


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """q, k and v as autocast has scaled_dot_product_attention take them: all but float64 in its dtype."""
    device_type = tensors[0].device.type
    if device_type not in torch_backend.AUTOCAST_DEVICES or not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(
        x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 and x.device.type == device_type else x
        for x in tensors
    )


def runs_at_once(q: Tensor) -> bool:
    """Whether a native backend runs every call on q's device and dtype, and nothing has to be traced or validated."""
    place = (q.get_device(), q.dtype)
    return not _is_dynamo_compiling() and not _checked and place in _FAST and place in _FAST_TRAINING


def can_read(q: Tensor) -> bool:
    """Whether device values can be looked at: not while a graph is traced or captured."""
    if _is_dynamo_compiling() or q.device.type == "meta":
        return False
    return not (q.is_cuda and torch.cuda.is_current_stream_capturing())


def _check_values(q: Tensor, k: Tensor, mask: Mask | None) -> None:
    """Checked mode."""
    if mask is not None and q.dim() == 4 and k.dim() == 4 and can_read(q):
        mask._check_values(q.shape[2], k.shape[2])


def _check_no_grad(out: Tensor | None, *inputs: Tensor | None) -> None:
    if out is not None and torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (out, *inputs)):
        raise NotImplementedError("out: not differentiable, but an input requires grad; use torch.no_grad(), or no out")
