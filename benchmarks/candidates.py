"""The kernels that are compared. A candidate is a factory: case -> a function without arguments that launches it once.

FACTORIES maps names to factories; `run.py --candidate NAME=module:attribute` adds to it or replaces one. A factory that
cannot serve a case raises Unavailable or NotImplementedError with the reason; its lane is then left out and the reason
printed. The function may return (B, H, S, D), (B, S, H, D) or packed (S, H, D), or a tuple that starts with one.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.cases import Case

Call = Callable[[], Any]
Factory = Callable[[Case], Call]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PEERS = ("cudnn", "flash", "fa4")


class Unavailable(Exception):
    """This candidate cannot run this case here; the message says why."""


def build(name: str, case: Case) -> tuple[Call, Any]:
    """The candidate's function and the result of its first call, which may compile. Unavailable where either fails."""
    try:
        call = FACTORIES[name](case)
        result = call()
        if settings.device == "cuda":
            torch.cuda.synchronize()
    except getattr(torch, "AcceleratorError", ()):
        raise  # the device is lost for this process
    except Exception as error:  # peers fail in ways of their own
        reason = str(error).strip().split("\n")[0]
        raise Unavailable(reason if isinstance(error, Unavailable) else f"{type(error).__name__}: {reason}") from error
    return call, result


@dataclass
class Settings:
    device: str = "cuda"
    layout: str = "bhsd"  # memory order of q, k, v for all but FA4, which takes (B, S, H, D) only


settings = Settings()


# Inputs


@lru_cache(maxsize=2)
def _draw(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str, layout: str) -> tuple[torch.Tensor, ...]:
    batch, heads, length, head_dim = shape
    generator = torch.Generator(device).manual_seed(0)
    size = (3, batch, heads, length, head_dim) if layout == "bhsd" else (3, batch, length, heads, head_dim)
    packed = torch.randn(size, generator=generator, device=device, dtype=torch.float32).to(dtype)
    return tuple(x if layout == "bhsd" else x.transpose(1, 2) for x in packed)


@lru_cache(maxsize=2)
def _draw_bshd(*key: Any) -> tuple[torch.Tensor, ...]:
    return tuple(x.transpose(1, 2).contiguous() for x in _draw(*key))


def _key(case: Case) -> tuple:
    shape = (case.batch, case.heads, case.length, case.head_dim)
    return shape, DTYPES[case.dtype], settings.device, settings.layout


def inputs(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of shape (B, H, S, D), random normal and the same for every candidate of a case."""
    return _draw(*_key(case))


def inputs_bshd(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same values, contiguous in (B, S, H, D)."""
    return _draw_bshd(*_key(case))


@lru_cache(maxsize=8)
def offsets(case: Case) -> torch.Tensor:
    """Cumulative document offsets (n + 1), int32, on the device."""
    return torch.tensor(case.offsets, dtype=torch.int32, device=settings.device)


def release() -> None:
    """Drops the cached inputs."""
    _draw.cache_clear()
    _draw_bshd.cache_clear()
    offsets.cache_clear()


def canonical(case: Case, result: Any) -> torch.Tensor:
    """A candidate's result as (B, H, S, D)."""
    out = result[0] if isinstance(result, tuple | list) else result
    if out.dim() == 3:
        out = out.unsqueeze(0)
    if tuple(out.shape[1:3]) == (case.length, case.heads):
        out = out.transpose(1, 2)
    expected = (case.batch, case.heads, case.length, case.head_dim)
    if tuple(out.shape) != expected:
        raise ValueError(f"out: shape {tuple(out.shape)} is not (batch, heads, length, head_dim) = {expected}")
    return out


# Ours


def _our_mask(case: Case) -> Any:
    import flashmsa

    if case.is_document:
        return flashmsa.Document(offsets(case), causal=case.is_causal)
    if case.mask == "prefix":
        return flashmsa.PrefixLM(case.width)
    if case.is_band:
        return flashmsa.SlidingWindow(*case.bounds)
    return flashmsa.Causal() if case.is_causal else None


def _flashmsa(case: Case, **options: Any) -> Call:
    try:
        import flashmsa
    except ImportError as error:
        raise Unavailable(f"flashmsa does not import: {error}") from error
    q, k, v = inputs(case)
    mask = _our_mask(case)
    return lambda: flashmsa.attention(q, k, v, mask=mask, **options)


def flashmsa_native(case: Case) -> Call:
    """Our kernel itself. NOTE: the backend is named, so that the dispatcher cannot hand a short case to SDPA."""
    return _flashmsa(case, backend="sm90" if settings.device == "cuda" else "cpu")


def flashmsa_eager(case: Case) -> Call:
    """The call a user writes."""
    return _flashmsa(case)


DOCUMENT_KIND = 2  # MaskKind in csrc/core/params.h


def kernel_tile(case: Case) -> tuple[int, int] | None:
    """Rows and keys of a tile of our kernel for a document case; None where no kernels were built."""
    try:
        from flashmsa import _C
    except ImportError:
        return None
    kernel = _C.find_kernel(DOCUMENT_KIND, DTYPES[case.dtype], case.head_dim, case.head_dim)
    return (kernel["block_q"], kernel["block_kv"]) if kernel else None


def tile_efficiency(case: Case, tile: tuple[int, int] | None) -> float | None:
    """Allowed pairs / area of the tiles (rows, keys) that a document case visits, by the C++ mask traits."""
    if tile is None:
        return None
    from flashmsa import _C

    cpu_offsets = torch.tensor(case.offsets, dtype=torch.int32)
    shape = (case.batch, case.heads, case.length, case.length)
    counts = _C.tile_counts(DOCUMENT_KIND, [int(case.is_causal)], [cpu_offsets, cpu_offsets], *shape, *tile)
    return counts["allowed_pairs"] / ((counts["full"] + counts["partial"]) * tile[0] * tile[1])


# SDPA


def sdpa(case: Case) -> Call:
    """scaled_dot_product_attention as a user calls it: torch chooses the backend."""
    if case.is_document or case.is_band:
        raise Unavailable("SDPA has no document, window or prefix mask")
    q, k, v = inputs(case)
    return lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=case.is_causal)


def sdpa_choice(case: Case) -> str | None:
    """The backend that torch picks by itself for such a call without a document mask."""
    q, k, v = inputs(case)
    try:
        return SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=case.is_causal)).name.lower()
    except (AttributeError, RuntimeError, ValueError):  # a private function of torch
        return None


PINNED = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def _pin(name: str) -> AbstractContextManager:
    """In force, SDPA runs that backend or raises. A dry run lets torch choose: these backends need a GPU."""
    return sdpa_kernel(PINNED[name]) if settings.device == "cuda" else nullcontext()


def _sdpa_pinned(name: str) -> Factory:
    def build(case: Case) -> Call:
        call = sdpa(case)

        def pinned() -> torch.Tensor:
            with _pin(name):
                return call()

        return pinned

    return build


def host_call(name: str, case: Case) -> tuple[Callable[[], AbstractContextManager], Call]:
    """A context to enter and the call to time inside it: choosing SDPA's backend is no part of its host time."""
    if name in PINNED and not case.is_document:
        return partial(_pin, name), sdpa(case)
    return nullcontext, FACTORIES[name](case)


def flash(case: Case) -> Call:
    """SDPA's flash backend (FA2); with documents the variable-length form of the same kernel."""
    if not case.is_document:
        return _sdpa_pinned("flash")(case)
    if settings.device != "cuda":
        raise Unavailable("variable-length flash attention needs a GPU")
    q, k, v = (x.flatten(0, 1) for x in inputs_bshd(case))
    cu, longest = offsets(case), max(case.document_lengths)
    forward = torch.ops.aten._flash_attention_forward
    return lambda: forward(q, k, v, cu, cu, longest, longest, 0.0, case.is_causal, False)


# flash-attn-4


@cache
def _fa4() -> Any:
    try:
        return importlib.import_module("flash_attn.cute")
    except Exception as error:  # its import runs a JIT toolchain, which fails in many ways
        raise Unavailable(f"flash-attn-4 does not import: {type(error).__name__}: {error}") from error


def fa4(case: Case) -> Call:
    module = _fa4()
    q, k, v = inputs_bshd(case)
    if case.mask == "prefix":
        raise Unavailable("flash-attn-4 has no prefix mask of its own")
    if case.is_band:
        return lambda: module.flash_attn_func(q, k, v, window_size=case.bounds)
    if not case.is_document:
        return lambda: module.flash_attn_func(q, k, v, causal=case.is_causal)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    function = module.flash_attn_varlen_func
    options: dict[str, Any] = {"cu_seqlens_q": offsets(case), "cu_seqlens_k": offsets(case), "causal": case.is_causal}
    longest = max(case.document_lengths)
    accepted = inspect.signature(function).parameters  # early releases have no max_seqlen
    options.update({name: longest for name in ("max_seqlen_q", "max_seqlen_k") if name in accepted})
    return lambda: function(q, k, v, **options)


# FlexAttention


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def flex(case: Case) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask

    q, k, v = inputs(case)
    function = _compiled_flex()
    if case.mask == "dense":
        return lambda: function(q, k, v)
    lengths = torch.tensor(case.document_lengths, device=settings.device)
    document = torch.repeat_interleave(torch.arange(len(lengths), device=settings.device), lengths)

    def allowed(b: Any, h: Any, i: Any, j: Any) -> Any:
        same = document[i] == document[j]
        return same & (j <= i) if case.is_causal else same

    def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
        return j <= i

    def band(b: Any, h: Any, i: Any, j: Any) -> Any:
        if case.mask == "prefix":
            return (j < case.width) | (j <= i)
        left, right = case.bounds
        return (i - j <= left) & (j - i <= right)

    rule = allowed if case.is_document else band if case.is_band else causal
    block_mask = create_block_mask(rule, None, None, case.length, case.length, device=settings.device)
    return lambda: function(q, k, v, block_mask=block_mask)


# After a QKV projection


def _projected(attend: Callable[[Case, torch.Tensor, torch.Tensor, torch.Tensor], Any]) -> Factory:
    """x (B, S, H * D) times a weight (H * D, 3 * H * D), then attention over views of the product."""

    def build(case: Case) -> Call:
        width = case.heads * case.head_dim
        generator = torch.Generator(settings.device).manual_seed(0)
        options = {"generator": generator, "device": settings.device}
        x = torch.randn(case.batch, case.length, width, **options).to(DTYPES[case.dtype])
        weight = (torch.randn(width, 3 * width, **options) / width**0.5).to(DTYPES[case.dtype])
        shape = (case.batch, case.length, 3, case.heads, case.head_dim)
        return lambda: attend(case, *(x @ weight).view(shape).permute(2, 0, 3, 1, 4))

    return build


def _attend_cudnn(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with _pin("cudnn"):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=case.is_causal)


def _attend_flashmsa(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    import flashmsa

    return flashmsa.attention(q, k, v, mask=_our_mask(case))


FACTORIES: dict[str, Factory] = {
    "flashmsa": flashmsa_native,
    "flashmsa-eager": flashmsa_eager,
    "sdpa": sdpa,
    "cudnn": _sdpa_pinned("cudnn"),
    "flash": flash,
    "efficient": _sdpa_pinned("efficient"),
    "fa4": fa4,
    "flex": flex,
    "qkv+cudnn": _projected(_attend_cudnn),
    "qkv+flashmsa": _projected(_attend_flashmsa),
}


def register(spec: str) -> str:
    """Adds or replaces the candidate of `NAME=module:attribute`, the attribute being a factory. Returns NAME."""
    name, _, target = spec.partition("=")
    module, _, attribute = target.partition(":")
    if not (name and module and attribute):
        raise ValueError(f"--candidate: {spec!r} is not NAME=module:attribute")
    FACTORIES[name] = getattr(importlib.import_module(module), attribute)
    return name
