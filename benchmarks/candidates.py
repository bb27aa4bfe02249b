"""The kernels that are compared. A candidate is a factory: case -> a function without arguments that launches it once.

FACTORIES maps names to factories; `run.py --candidate NAME=module:attribute` adds to it or replaces one. A factory that
cannot serve a case raises Unavailable or NotImplementedError with the reason; its lane is then left out and the reason
printed. The function may return (B, H, S, D), (B, S, H, D) or packed (S, H, D), or a tuple that starts with one.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.cache_cases import CacheCase
from benchmarks.cases import BLOCK, OTHER_DIMS, SOFTCAP, Case

Call = Callable[[], Any]
Factory = Callable[[Any], Call]  # of a Case, or of a CacheCase

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PEERS = ("cudnn", "flash", "fa4")
RECORDED = "-recorded"  # ends the names of candidates whose calls are recorded for a backward pass
FA4_SITE = "FLASHMSA_FA4_SITE"  # environment variable: folders, as in PATH, in which flash-attn-4 lies unpacked


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
def _draw(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: str, layout: str
) -> tuple[torch.Tensor, ...]:
    batch, heads, length, head_dim, head_dim_v = shape
    generator = torch.Generator(device).manual_seed(0)
    size = (3, batch, heads, length, head_dim) if layout == "bhsd" else (3, batch, length, heads, head_dim)
    packed = torch.randn(size, generator=generator, device=device, dtype=torch.float32).to(dtype)
    q, k, v = packed
    drawn = (q, k, v if head_dim_v == head_dim else v[..., :head_dim_v].contiguous())
    return tuple(x if layout == "bhsd" else x.transpose(1, 2) for x in drawn)


@lru_cache(maxsize=2)
def _draw_bshd(*key: Any) -> tuple[torch.Tensor, ...]:
    return tuple(x.transpose(1, 2).contiguous() for x in _draw(*key))


def _key(case: Case) -> tuple:
    shape = (case.batch, case.heads, case.length, case.head_dim, case.value_dim)
    return shape, DTYPES[case.dtype], settings.device, settings.layout


def inputs(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of shape (B, H, S, D), of v (B, H, S, Dv), random normal and the same for every candidate of a case."""
    return _as_leaves(_draw(*_key(case)))


def inputs_bshd(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same values, contiguous in (B, S, H, D)."""
    return _as_leaves(_draw_bshd(*_key(case)))


_recorded: list[torch.Tensor] | None = None


@contextmanager
def leaves() -> Iterator[list[torch.Tensor]]:
    """Inside, inputs want gradients. What is yielded holds them, once a candidate has asked for its own."""
    global _recorded
    _recorded = []
    try:
        yield _recorded
    finally:
        _recorded = None


def _as_leaves(drawn: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    if _recorded is None:
        return drawn
    _recorded[:] = [x.detach().requires_grad_() for x in drawn]
    return tuple(_recorded)


@lru_cache(maxsize=8)
def offsets(case: Case) -> torch.Tensor:
    """Cumulative document offsets (n + 1), int32, on the device."""
    return torch.tensor(case.offsets, dtype=torch.int32, device=settings.device)


@lru_cache(maxsize=2)
def blocks(case: Case) -> torch.Tensor:
    """bool (1, H or 1, n, n), on the device."""
    return case.blocks()[None].to(settings.device)


@lru_cache(maxsize=2)
def buckets(case: Case) -> torch.Tensor:
    """int32 (1, H or 1, S), on the device."""
    return case.buckets()[None].to(settings.device)


def alibi_slopes(case: Case) -> torch.Tensor:
    """float32 (H,): the slopes of Press et al., Train Short, Test Long (2022)."""
    return torch.tensor([2 ** (-8 * (h + 1) / case.heads) for h in range(case.heads)], device=settings.device)


def sinks(case: Case) -> torch.Tensor:
    """float32 (H,), values that bfloat16 holds as well."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(case.heads, generator=generator).bfloat16().float().to(settings.device)


def release() -> None:
    """Drops the cached inputs."""
    blocks.cache_clear()
    buckets.cache_clear()
    _draw.cache_clear()
    _draw_bshd.cache_clear()
    offsets.cache_clear()


class Gradients(NamedTuple):
    """Of q, k and v, in the layout in which the candidate took them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def canonical(case: Case | CacheCase, result: Any) -> torch.Tensor:
    """A candidate's result as (B, H, S, D); gradients of q, k and v as three of them."""
    if isinstance(result, Gradients):
        return torch.stack([canonical(case, x) for x in result])
    out = result[0] if isinstance(result, tuple | list) else result
    if out.dim() == 3:
        out = out.unsqueeze(0)
    expected = (case.batch, case.heads, case.rows, case.value_dim)
    if tuple(out.shape) != expected and tuple(out.shape[1:3]) == (case.rows, case.heads):
        out = out.transpose(1, 2)
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
    if case.is_dilated:
        return flashmsa.DilatedWindow(case.width, dilation=case.dilation)
    if case.is_hash:
        return flashmsa.HashBucket(buckets(case), causal=case.is_causal)
    if case.is_blocks:
        mask = flashmsa.BlockSparse(blocks(case), (BLOCK, BLOCK))
        return mask & flashmsa.Causal() if case.is_causal else mask
    if case.is_band:
        return flashmsa.SlidingWindow(*case.bounds)
    return flashmsa.Causal() if case.is_causal else None


def _our_options(case: Case) -> dict[str, Any]:
    made = {
        "softcap": lambda: {"softcap": SOFTCAP},
        "alibi": lambda: {"alibi_slopes": alibi_slopes(case)},
        "sinks": lambda: {"sinks": sinks(case)},
    }
    return made[case.option]() if case.option else {}


def _backend() -> str:
    """Our kernel by name. NOTE: so the dispatcher can hand no case to SDPA or to torch operators."""
    return "sm90" if settings.device == "cuda" else "cpu"


def _import_ours() -> Any:
    try:
        return importlib.import_module("flashmsa")
    except ImportError as error:
        raise Unavailable(f"flashmsa does not import: {error}") from error


def _flashmsa(case: Case, **options: Any) -> Call:
    flashmsa = _import_ours()
    q, k, v = inputs(case)
    mask = _our_mask(case)
    options |= _our_options(case)
    return lambda: flashmsa.attention(q, k, v, mask=mask, **options)


def flashmsa_native(case: Case, **options: Any) -> Call:
    """Our kernel itself."""
    return _flashmsa(case, backend=_backend(), **options)


def flashmsa_padded(case: Case, head_dim: int) -> Call:
    """q, k and v with columns of zeros ahead of the call, up to the width of a wider kernel; the result is cut."""
    flashmsa = _import_ours()
    q, k, v = (functional.pad(x, (0, head_dim - x.shape[3])) for x in inputs(case))
    given = {"mask": _our_mask(case), "backend": _backend(), "scale": case.head_dim**-0.5}
    return lambda: flashmsa.attention(q, k, v, **given)[..., : case.value_dim]


def flashmsa_eager(case: Case) -> Call:
    """The call a user writes."""
    return _flashmsa(case)


def flashmsa_varlen(case: Case) -> Call:
    """The documents of a case as sequences of a packed batch."""
    flashmsa = _import_ours()
    if not hasattr(flashmsa, "attention_varlen"):
        raise Unavailable("this flashmsa has no attention_varlen")
    q, k, v = (x.flatten(0, 1) for x in inputs_bshd(case))
    cu = offsets(case)
    mask = flashmsa.Causal() if case.is_causal else None
    return lambda: flashmsa.attention_varlen(q, k, v, cu, cu, mask=mask, backend=_backend())


def flashmsa_graph(case: Case) -> Call:
    """The same call replayed from a CUDA graph: the device's time where the host's would be longer."""
    return _captured(flashmsa_native(case))


def flashmsa_built(case: Case) -> Call:
    """The mask is made anew for each call."""
    flashmsa = _import_ours()
    q, k, v = inputs(case)
    backend = _backend()
    return lambda: flashmsa.attention(q, k, v, mask=_our_mask(case), backend=backend)


def flashmsa_updated_graph(case: Case) -> Call:
    """``mask.update`` and the call, replayed from a CUDA graph."""
    flashmsa = _import_ours()
    q, k, v = inputs(case)
    mask, source, backend = _our_mask(case), buckets(case), _backend()

    def call() -> torch.Tensor:
        mask.update(source)
        return flashmsa.attention(q, k, v, mask=mask, backend=backend)

    return _captured(call)


def _captured(call: Call) -> Call:
    """One call in a CUDA graph; the returned function replays it. On the CPU the call itself."""
    if settings.device != "cuda":
        return call
    try:
        return _replay_of(call)
    except RuntimeError as error:  # what a capture cannot hold fails here, and the device lives on
        raise Unavailable(f"cannot be captured: {str(error).strip().splitlines()[0]}") from error


def _replay_of(call: Call) -> Call:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


# Masks alone: what it takes to make one on the device


def _mask_and_source(case: Case) -> tuple[Callable[..., Any], torch.Tensor, int]:
    """What makes the mask of a tensor, the tensor, and how many cells of 128 x 128 a block mask sets."""
    flashmsa = _import_ours()
    if case.is_hash:
        return partial(flashmsa.HashBucket, causal=case.is_causal), buckets(case), 0
    source = blocks(case)
    return partial(flashmsa.BlockSparse, block_size=(BLOCK, BLOCK)), source, int(source.sum())


def mask_made(case: Case) -> Call:
    """The mask made from its tensor. Blocks are counted first, which waits for the device once."""
    make, source, _ = _mask_and_source(case)
    return lambda: make(source)


def mask_made_capacity(case: Case) -> Call:
    """A block mask whose capacity is given: waits for nothing."""
    make, source, cells = _mask_and_source(case)
    return lambda: make(source, capacity=cells)


def mask_updated_graph(case: Case) -> Call:
    """``mask.update`` replayed from a CUDA graph."""
    make, source, cells = _mask_and_source(case)
    mask = make(source, capacity=cells) if case.is_blocks else make(source)
    return _captured(lambda: mask.update(source))


def visited_share(case: Case) -> float | None:
    """Allowed pairs / area of the tiles that our kernel visits; None where no kernel serves the case here."""
    flashmsa = _import_ours()
    backend = _backend()
    return flashmsa.explain(*inputs(case), _our_mask(case), backend=backend, **_our_options(case)).efficiency


DOCUMENT_KIND = 2  # MaskKind in csrc/core/params.h


def kernel_efficiency(case: Case) -> float | None:
    """What tile_efficiency() gives for the kernel that serves a document case; None where no kernels were built."""
    try:
        from flashmsa import _C
    except ImportError:
        return None
    documents = {"documents": len(case.offsets) - 1, "len_q": case.length, "len_kv": case.length}
    kernel = _C.find_kernel(DOCUMENT_KIND, DTYPES[case.dtype], case.head_dim, case.value_dim, **documents)
    return kernel and tile_efficiency(case, (kernel["block_q"], kernel["block_kv"]), kernel["least_packed"])


def tile_efficiency(case: Case, tile: tuple[int, int], least_packed: int = 0) -> float:
    """Allowed pairs / area of the tiles (rows, keys) that a document case visits, by the C++ mask traits.

    least_packed: mean length of documents from which on blocks of rows begin where documents do; 0: on a fixed grid."""
    from flashmsa import _C

    cpu_offsets = torch.tensor(case.offsets, dtype=torch.int32)
    shape = (case.batch, case.heads, case.length, case.length)
    offsets = [cpu_offsets, cpu_offsets]
    counts = _C.tile_counts(DOCUMENT_KIND, [int(case.is_causal)], offsets, *shape, *tile, least_packed=least_packed)
    return counts["allowed_pairs"] / ((counts["full"] + counts["partial"]) * tile[0] * tile[1])


# SDPA


def sdpa(case: Case) -> Call:
    """scaled_dot_product_attention as a user calls it: torch chooses the backend."""
    if case.mask not in ("dense", "causal") or case.option:
        raise Unavailable("SDPA has no such mask or option")
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
    """A context to enter and the call to time inside it: what chooses SDPA's backend, or switches gradients on, is no
    part of its host time."""
    if name.endswith(RECORDED):
        return torch.enable_grad, FACTORIES[name](case)
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


def add_fa4_site() -> None:
    """Lets Python find flash-attn-4 where the environment variable says. Behind everything installed."""
    sys.path += [path for path in os.environ.get(FA4_SITE, "").split(os.pathsep) if path and path not in sys.path]


@cache
def _fa4() -> Any:
    try:
        return importlib.import_module("flash_attn.cute")
    except Exception as error:  # its import runs a JIT toolchain, which fails in many ways
        raise Unavailable(f"flash-attn-4 does not import: {type(error).__name__}: {error}") from error


def fa4(case: Case) -> Call:
    module = _fa4()
    if not (case.mask in ("dense", "causal") or case.is_document or case.mask.startswith("window")):
        raise Unavailable(f"flash-attn-4 has no {case.mask} mask of its own")
    if case.option == "alibi":
        raise Unavailable("flash-attn-4 has no ALiBi slopes")
    options: dict[str, Any] = {}
    if case.option == "softcap":
        options["softcap"] = SOFTCAP
    if case.option == "sinks":
        options["learnable_sink"] = sinks(case).bfloat16()
    q, k, v = inputs_bshd(case)
    if case.is_band:
        return lambda: module.flash_attn_func(q, k, v, window_size=case.bounds, **options)
    if not case.is_document:
        return lambda: module.flash_attn_func(q, k, v, causal=case.is_causal, **options)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    function = module.flash_attn_varlen_func
    options |= {"cu_seqlens_q": offsets(case), "cu_seqlens_k": offsets(case), "causal": case.is_causal}
    longest = max(case.document_lengths)
    accepted = inspect.signature(function).parameters  # early releases have no max_seqlen
    options.update({name: longest for name in ("max_seqlen_q", "max_seqlen_k") if name in accepted})
    return lambda: function(q, k, v, **options)


# FlexAttention


@cache
def _flex_function() -> Any:
    """flex_attention, compiled; on the CPU (dry runs) as it is, which writes all scores out."""
    from torch.nn.attention.flex_attention import flex_attention

    if settings.device != "cuda":
        return flex_attention
    if importlib.util.find_spec("triton") is None:
        raise Unavailable("absent: FlexAttention needs Triton, which is not installed here")
    import torch._dynamo

    # NOTE: each case compiles anew, and past the limit calls would run uncompiled.
    for name in ("recompile_limit", "cache_size_limit", "accumulated_recompile_limit", "accumulated_cache_size_limit"):
        if hasattr(torch._dynamo.config, name):
            setattr(torch._dynamo.config, name, 4096)
    return torch.compile(flex_attention, dynamic=False)


def _flex_rule(case: Case) -> Callable[..., Any] | None:
    """The mask as FlexAttention's mask_mod(b, h, i, j); None for a dense one."""
    width, dilation = case.width, case.dilation

    def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
        return j <= i

    def prefix(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (j < width) | (j <= i)

    def dilated(b: Any, h: Any, i: Any, j: Any) -> Any:
        reach = width * dilation
        return ((i - j) % dilation == 0) & (i - j <= reach) & (j - i <= reach)

    if case.is_document or case.is_hash:
        labels = buckets(case)[0] if case.is_hash else _document_of(case)[None]
        shared = labels[0]

        def same(b: Any, h: Any, i: Any, j: Any) -> Any:
            return shared[i] == shared[j] if len(labels) == 1 else labels[h, i] == labels[h, j]

        return _both(same, causal) if case.is_causal else same
    if case.mask.startswith("window"):
        left, right = case.bounds

        def window(b: Any, h: Any, i: Any, j: Any) -> Any:
            return (i - j <= left) & (j - i <= right)

        return window
    return {"dense": None, "causal": causal, "prefix": prefix, "dilated": dilated}[case.mask]


def _document_of(case: Case) -> torch.Tensor:
    lengths = torch.tensor(case.document_lengths, device=settings.device)
    return torch.repeat_interleave(torch.arange(len(lengths), device=settings.device), lengths)


def _both(first: Callable[..., Any], second: Callable[..., Any]) -> Callable[..., Any]:
    return lambda b, h, i, j: first(b, h, i, j) & second(b, h, i, j)


def _flex_block_mask(case: Case) -> Any:
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    if not case.is_blocks:
        rule = _flex_rule(case)
        heads = case.heads if case.draw and case.draw.per_head else None
        lengths = (None, heads, case.length, case.length)
        return None if rule is None else create_block_mask(rule, *lengths, device=settings.device)
    table = blocks(case)
    partial = torch.zeros_like(table)
    rule = None
    if case.is_causal:
        count = table.shape[-1]
        partial = table & torch.eye(count, dtype=torch.bool, device=table.device)
        table = table & torch.ones(count, count, dtype=torch.bool, device=table.device).tril(-1)

        def rule(b: Any, h: Any, i: Any, j: Any) -> Any:
            return j <= i

    if settings.device != "cuda":  # uncompiled, it looks at the rule alone
        rule = _block_rule(blocks(case)[0], case.is_causal)
    listed = [_flex_list(x) for x in (partial, table)]
    return BlockMask.from_kv_blocks(*listed[0], *listed[1], BLOCK_SIZE=BLOCK, mask_mod=rule,
                                    seq_lengths=(case.length, case.length))  # fmt: skip


def _block_rule(table: torch.Tensor, causal: bool) -> Callable[..., Any]:
    """What a table of blocks (H or 1, n, n) says pair by pair."""
    heads = table.shape[0]

    def rule(b: Any, h: Any, i: Any, j: Any) -> Any:
        seen = table[h % heads, i // BLOCK, j // BLOCK]
        return seen & (j <= i) if causal else seen

    return rule


def _flex_list(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(kv_num_blocks, kv_indices) of a table (B, H, rows, columns): the set columns first, ascending."""
    indices = table.int().argsort(dim=-1, descending=True, stable=True)
    return table.sum(-1, dtype=torch.int32), indices.to(torch.int32).contiguous()


def _flex_score(case: Case) -> Callable[..., Any] | None:
    if case.option == "softcap":
        return lambda score, b, h, i, j: SOFTCAP * torch.tanh(score / SOFTCAP)
    if case.option == "alibi":
        slopes = alibi_slopes(case)
        return lambda score, b, h, i, j: score - slopes[h] * (i - j).abs()
    return None


def _flex(backend: str | None) -> Factory:
    def build(case: Case) -> Call:
        if case.option == "sinks":
            raise Unavailable("FlexAttention has no sinks")
        if case.is_hash and settings.device == "cuda":
            # NOTE: which would end the whole run.
            raise Unavailable("FlexAttention of torch 2.11 stops at hash buckets with an illegal memory access")
        function = _flex_function()
        q, k, v = inputs(case)
        options: dict[str, Any] = {"block_mask": _flex_block_mask(case), "score_mod": _flex_score(case)}
        if backend is not None:
            _fa4()
            options["kernel_options"] = {"BACKEND": backend}
        return lambda: function(q, k, v, **options)

    return build


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
    **{f"flashmsa-padded-{dim}": partial(flashmsa_padded, head_dim=dim) for dim in set(OTHER_DIMS.values())},
    "flashmsa-eager": flashmsa_eager,
    "flashmsa-varlen": flashmsa_varlen,
    "flashmsa-graph": flashmsa_graph,
    "flashmsa-built": flashmsa_built,
    "flashmsa-updated-graph": flashmsa_updated_graph,
    "mask-made": mask_made,
    "mask-made-capacity": mask_made_capacity,
    "mask-updated-graph": mask_updated_graph,
    "sdpa": sdpa,
    "cudnn": _sdpa_pinned("cudnn"),
    "flash": flash,
    "efficient": _sdpa_pinned("efficient"),
    "fa4": fa4,
    "flex": _flex(None),
    "flex-fa4": _flex("FLASH"),  # FlexAttention through flash-attn-4's kernel
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
