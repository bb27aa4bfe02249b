"""Paged caches of keys and values: attention over them, appending to them, and their dense view.

A cache is a pool of pages, (pages, page_size, Hkv, D) for K and for V. A sequence is a row of ``block_table``, the
pages that hold its tokens in order, and an entry of ``kv_lens``, how many tokens there are. Pages may be shared.
Lengths, tables and lists of pages are read on the device by every launch and never on the host, so that a captured
CUDA graph replays with others; entries past a length are never followed, and what is out of range is clamped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _C, ops, paged_composed
from .checks import check_mask, check_number, check_tensor
from .dispatch import BACKENDS, Wanted, dtype_name, reject, warn_once
from .masks import Causal, Mask, lower
from .masks.base import CAUSAL, COMPOSITE, DENSE, Lowered
from .varlen import _check_longest

# SMs of the machine that a path is told for where q is on no GPU: an H200's.
_H200_SMS = 132
_WORD_BITS = 32
_CAUSAL = Causal()


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor | None,
    kv_lens: Tensor | None,
    *,
    mask: Mask | None = _CAUSAL,
    query_pages: Tensor | None = None,
    query_block: int = 128,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    tree_mask: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    workspace: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new queries to the cached keys of their sequences: decode, chunked prefill, or both in one call.

    Query i of the Sq of sequence b stands at p = i + kv_lens[b] - Sq; the newest keys are those of the queries
    themselves, so append first.

    q                (B, Hq, Sq, D); or packed (T, Hq, D) with ``cu_seqlens_q``: sequences one after another
    k_pages          (pages, page_size, Hkv, D), any order of the first three dimensions by strides, in q's dtype;
    v_pages          (pages, page_size, Hkv, Dv). Never copied: the last stride must be 1, on a GPU the others and the
                     address multiples of 16 bytes. page_size is 1, 8, or a multiple of 16
    block_table      int32 (B, max_pages): the pages of each sequence. None: dense caches, (B, S, Hkv, D), any S
    kv_lens          int32 (B,): tokens of each sequence, the new ones included; at most max_pages * page_size
    mask             Causal() (the default), None or Dense(), SlidingWindow, PrefixLM (its prefix an int, or a tensor
                     (B,)), an ``&`` of these; inside each sequence
    query_pages      int32 (B, ceil(Sq / query_block), n): the logical pages (places in a row of block_table) that each
                     block of queries may see, for all heads; -1 fills, order does not matter, twice counts once. The
                     mask still applies. Packed: Sq is max_seqlen_q, or T without it
    query_block      queries of a block; on a GPU a multiple of 64
    cu_seqlens_q     int32 (B + 1,): sequence b has the rows [cu_seqlens_q[b], cu_seqlens_q[b + 1]) of a packed q
    max_seqlen_q     an int that no sequence of a packed q exceeds; with a small one decode kernels can run
    tree_mask        bool (B or 1, Sq, Sq), or int32 words (B, Sq) of its bits: of the last Sq keys query i sees those
                     set in row i (speculative decoding), in place of the mask; Sq at most 32. Not with a packed q
    scale, softcap, sinks, alibi_slopes   as in ``attention``; slopes (Hq,) or (B, Hq)
    num_splits       parts that a sequence's keys are split into; 0: chosen
    batch_invariant  True: a sequence's result is bitwise the same whatever else is in the batch
    workspace        from ``paged_workspace``, for a call that must not allocate; None: allocated
    return_lse       also return the logarithm of each row's denominator, sink included
    backend          as in ``attention``

    Returns out (B, Hq, Sq, Dv), or (T, Hq, Dv), of q's dtype, and with ``return_lse`` lse float32 (B, Hq, Sq), or
    (Hq, T). A row without a key is 0, its lse -inf (with sinks: the sink); rows of a packed q past the last sequence
    are 0 and -inf. ``explain_paged`` tells which kernels run. Not differentiable.

    Raises TypeError, ValueError, NotImplementedError or RuntimeError before anything is launched.

    Pages are those of Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention
    (2023); splitting keys is Dao et al.'s Flash-Decoding (2023).
    """
    call = _make_call(
        q,
        k_pages,
        v_pages,
        block_table,
        kv_lens,
        mask=mask,
        query_pages=query_pages,
        query_block=query_block,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        tree_mask=tree_mask,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        num_splits=num_splits,
        batch_invariant=batch_invariant,
    )
    if ops._checked and ops.can_read(q):
        _check_values(call)
    chosen, reason = call.resolve(backend)
    if chosen == "torch":
        call.refuse_gradients()
        if batch_invariant:
            raise NotImplementedError(
                "batch_invariant: the 'torch' backend's sums depend on what is in the batch; must be False there"
                f"{'' if reason is None else f', which runs because of: {reason}'}"
            )
        if reason is not None:
            warn_once(reason)
        if not ops._is_dynamo_compiling():
            call.path()  # for its checks
        result = paged_composed.attention(*call[:5], lowered=call.lowered, **call.options())
    else:
        # NOTE: a trace plans its memory itself, and takes an operator's arguments for unwritten.
        given = None if ops._is_dynamo_compiling() else workspace
        result = torch.ops.flashmsa.paged_attention.default(*call.arguments(), given, return_lse)
    return result if return_lse else result[0]


def paged_workspace(q: Tensor, k_pages: Tensor, v_pages: Tensor, block_table: Tensor | None, **options: Any) -> Tensor:
    """Device memory for ``paged_attention(..., workspace=)`` of the same arguments: uint8, on q's device.

    Its size depends on shapes, dtypes and options alone, never on what lengths and tables hold: a workspace made for
    the tensors that a CUDA graph is captured with serves every replay. Kernels leave nothing in it, so that calls
    one after another on a stream can share one; calls on two streams need one each. Empty where nothing is needed: on
    the CPU, and for the composed backend. A call that goes through a dense copy of the pages (``explain_paged`` says
    so) takes memory for that from torch's allocator all the same.

    Decode keeps (Dv + 2) * 4 bytes for each part of a sequence and each of the up to 128 query rows of a kv head that a
    thread block takes. There are at most two parts for each of up to two thread blocks an SM; with ``num_splits``, or
    the 32 parts of ``batch_invariant``, B * Hkv * parts. Besides a few words for each sequence and listed page. Prefill
    keeps a plan: a few words for each tile of query rows, and the sorted ``query_pages``.
    """
    options.pop("return_lse", None)
    explanation = explain_paged(q, k_pages, v_pages, block_table, options.pop("kv_lens", None), **options)
    return torch.empty(explanation.workspace_bytes or 0, dtype=torch.uint8, device=q.device)


def gather_pages(
    k_pages: Tensor, v_pages: Tensor, block_table: Tensor, kv_lens: Tensor, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """The dense view of a paged cache: k (B, Hkv, max_pages * page_size, D) and v, rows past a length 0.

    Arguments as in ``paged_attention``. Not differentiable.
    """
    _check_tensors(k_pages=k_pages, v_pages=v_pages, block_table=block_table, kv_lens=kv_lens)
    arguments = (k_pages, v_pages, block_table, kv_lens)
    if ops._checked and ops.can_read(k_pages):
        _check_table(block_table, _check_lengths(kv_lens, block_table.shape[1] * k_pages.shape[1]), k_pages)
    if _resolve_cache(backend, k_pages) == "torch":
        _refuse_gradients(k_pages=k_pages, v_pages=v_pages)
        _check_on_meta("gather_pages", arguments)
        return paged_composed.gather(*arguments)
    return torch.ops.flashmsa.gather_pages.default(*arguments)


def append_kv(
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    kv_lens: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    rope: Any = None,
    *,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Writes new tokens behind those that are cached, in one kernel; k turned by a rotary embedding on its way.

    k_pages, v_pages, block_table   as in ``paged_attention``; written to. Any page_size. Where two sequences append to
                one place of a shared page it holds either's token: copy such a page before. Expanded ones raise; new
                tokens may lie in them, and are read as they were before
    kv_lens     int32 (B,): the lengths before. They stay: add the new tokens yourself
    k_new       (B, Hkv, n, D), v_new (B, Hkv, n, Dv); or packed (T, Hkv, D), (T, Hkv, Dv) with ``cu_seqlens``
    rope        None, or (cos, sin) or (cos, sin, interleaved), or an object with these attributes: tables (positions,
                rotary_dim / 2), float32 or of k's dtype, row p for position p in the sequence, the last row for those
                past it. Of the first rotary_dim columns, pairs (i, i + rotary_dim / 2), interleaved (2i, 2i + 1),
                become (x cos - y sin, y cos + x sin)
    cu_seqlens  int32 (B + 1,): the rows of a packed k_new and v_new that belong to each sequence

    Tokens beyond the table, or on a page that does not exist, are dropped; ``flashmsa.check(True)`` raises for them.
    Raises TypeError, ValueError, NotImplementedError or RuntimeError before anything is written. Not differentiable.

    Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding (2021).
    """
    _check_tensors(k_pages=k_pages, v_pages=v_pages, block_table=block_table, kv_lens=kv_lens, k_new=k_new, v_new=v_new)
    cos, sin, interleaved = _rope_tables(rope)
    k_new, v_new = ops.autocast(k_new, v_new)
    arguments = (k_pages, v_pages, block_table, kv_lens, k_new, v_new, cu_seqlens, cos, sin, interleaved)
    chosen = _resolve_cache(backend, k_pages)
    if ops._checked and ops.can_read(k_pages):
        _check_on_meta("append_kv", arguments)
        _check_append_values(*arguments[:4], k_new, cu_seqlens, cos)
    if chosen == "torch":
        _refuse_gradients(k_pages=k_pages, v_pages=v_pages, k_new=k_new, v_new=v_new)
        _check_on_meta("append_kv", arguments)
        paged_composed.append(*arguments)
    else:
        torch.ops.flashmsa.append_kv.default(*arguments)


@dataclass(frozen=True)
class PagedExplanation:
    """What ``paged_attention`` would do with some arguments. Print it, or read its fields."""

    backend: str  # "sm90", "cpu" or "torch"
    runs: bool  # False: that backend was asked for by name and cannot run the call here
    path: str | None  # "decode", "prefill", "two-stage", "pages" (CPU) or "composed"; None where it is not known
    reason: str  # why this backend and path
    kernel: str | None  # the compiled kernel's name
    workspace_bytes: int | None
    rejected: dict[str, str]  # each other backend and its reason
    call: str  # the arguments in short

    def __str__(self) -> str:
        state = "" if self.runs else " cannot run"
        lines = [("call", self.call), ("backend", f"{self.backend}{state}: {self.reason}")]
        lines += [(f"not {name}", why) for name, why in self.rejected.items()]
        if self.path is not None:
            lines.append(("path", _PATHS[self.path]))
        if self.kernel:
            lines.append(("kernel", self.kernel))
        if self.workspace_bytes:
            lines.append(("workspace", f"{self.workspace_bytes:,} bytes"))
        return "\n".join(f"{name:<12}{text}" for name, text in lines)


_PATHS = {
    "decode": "decode: keys read from their pages, split over the SMs, the parts merged",
    "prefill": "prefill: tiles of query rows, keys read from their pages",
    "two-stage": "two stages: the pages gathered to a dense copy, then the forward kernel over it",
    "pages": "keys read from their pages",
    "composed": "the pages gathered, then torch operators",
}


def explain_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor | None,
    kv_lens: Tensor | None = None,
    *,
    mask: Mask | None = _CAUSAL,
    backend: str | None = None,
    **options: Any,
) -> PagedExplanation:
    """What ``paged_attention`` would do with the same arguments, and why; nothing runs, no value is read.

    ``kv_lens`` may be left out. ``backend="sm90"`` with tensors on the CPU or the meta device tells which path an H200
    would take, where this build has kernels. Raises for arguments that ``paged_attention`` would not take anywhere.
    """
    for name in ("workspace", "return_lse"):
        options.pop(name, None)
    if kv_lens is None and isinstance(block_table, Tensor):
        kv_lens = block_table.new_empty(block_table.shape[:1])
    call = _make_call(q, k_pages, v_pages, block_table, kv_lens, mask=mask, **options)
    path = call.path()
    chosen, reason = backend, None
    if backend is None:
        chosen, reason = call.resolve(None)
    else:
        ops.check_backend(backend)
    rejection = reject(chosen, call.q, call.wanted)
    runs = rejection is None and (chosen != "sm90" or path is None or path["path"] != "")
    rejected = {}
    for other in BACKENDS:
        if other != chosen:
            why = reject(other, call.q, call.wanted)
            rejected[other] = why.reason if why is not None else "runs where no native backend can, or by name"
            if other == "sm90" and why is None and path is not None and path["path"] == "":
                rejected[other] = path["reason"]
    if not runs:
        reason = rejection.reason if rejection is not None else path["reason"]
    elif chosen == "sm90":
        reason = path["reason"]
    elif reason is None:
        reason = f"q is on {q.device}" if backend is None else "asked for by name"
    native = path if chosen == "sm90" else None
    return PagedExplanation(
        backend=chosen,
        runs=runs,
        path={"cpu": "pages", "torch": "composed"}.get(chosen, native and (native["path"] or None)),
        reason=reason,
        kernel=(native and native["kernel"]) or None,
        workspace_bytes=native["workspace_bytes"] if native else 0 if chosen != "sm90" else None,
        rejected=rejected,
        call=call.describe(mask),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Arguments


class _Call(NamedTuple):
    """The arguments of a call as the operator takes them."""

    q: Tensor
    k_pages: Tensor  # of a dense cache (B, Hkv, S, D)
    v_pages: Tensor
    block_table: Tensor | None
    kv_lens: Tensor | None
    cu_seqlens_q: Tensor | None
    max_seqlen_q: int
    query_pages: Tensor | None
    query_block: int
    lowered: Lowered
    tree_mask: Tensor | None  # words
    scale: float | None
    softcap: float
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    num_splits: int
    batch_invariant: bool

    def arguments(self) -> tuple[Any, ...]:
        """In the operator's order, without the workspace and return_lse."""
        return (*self[:9], *self.lowered, *self[10:])

    def options(self) -> dict[str, Any]:
        """What else the composed backend wants to know."""
        names = ("cu_seqlens_q", "max_seqlen_q", "query_pages", "query_block", "tree_mask", "scale", "softcap", "sinks")
        return {name: getattr(self, name) for name in (*names, "alibi_slopes")}

    @property
    def wanted(self) -> Wanted:
        return Wanted(COMPOSITE, self.softcap != 0.0, self.alibi_slopes is not None)

    def path(self) -> dict[str, Any] | None:
        """What would run on a GPU, see ``_C.paged_path``; checks every argument."""
        sms = _H200_SMS
        if self.q.is_cuda:
            sms = torch.cuda.get_device_properties(self.q.device).multi_processor_count
        kind, ints, tensors = self.lowered
        return _C.paged_path(*self[:9], kind, list(ints), list(tensors), *self[10:], sms)

    def resolve(self, backend: str | None) -> tuple[str, str | None]:
        """The backend to run, and where that is ``torch`` by default, why."""
        chosen, reason = ops._resolve(backend, self.q, self.wanted)
        # What may find no kernel: see two_stage_gap in csrc/binding/paged_cuda.cpp.
        by_sequence = self.alibi_slopes is not None and self.alibi_slopes.dim() == 2
        rare = self.query_pages is not None or self.tree_mask is not None or by_sequence
        if (
            chosen == "sm90"
            and backend is None
            and rare
            and not self.batch_invariant
            and not ops._is_dynamo_compiling()
        ):
            path = self.path()
            if path is not None and path["path"] == "":
                return "torch", path["reason"]
        return chosen, reason

    def refuse_gradients(self) -> None:
        named = ("q", "k_pages", "v_pages", "sinks", "alibi_slopes")
        _refuse_gradients(**{name: getattr(self, name) for name in named})

    def describe(self, mask: Mask | None) -> str:
        shapes = [f"{name} {tuple(getattr(self, name).shape)}" for name in ("q", "k_pages", "v_pages")]
        if self.block_table is not None:
            shapes.append(f"block_table {tuple(self.block_table.shape)}")
        named = ("cu_seqlens_q", "query_pages", "tree_mask", "sinks", "alibi_slopes")
        options = [name for name in named if getattr(self, name) is not None]
        options += [f"softcap {self.softcap}"] if self.softcap else []
        options += ["batch_invariant"] if self.batch_invariant else []
        where = f"{dtype_name(self.q.dtype)} on {self.q.device}"
        return ", ".join([*shapes, where, f"mask {'Dense()' if mask is None else repr(mask)}", *options])


def _make_call(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor | None,
    kv_lens: Tensor | None,
    *,
    mask: Mask | None = _CAUSAL,
    query_pages: Tensor | None = None,
    query_block: int = 128,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    tree_mask: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
) -> _Call:
    """Raises TypeError for arguments that are no tensors or numbers; the operator checks the rest."""
    _check_tensors(q=q, k_pages=k_pages, v_pages=v_pages)
    optional = {
        "block_table": block_table,
        "kv_lens": kv_lens,
        "query_pages": query_pages,
        "cu_seqlens_q": cu_seqlens_q,
        "tree_mask": tree_mask,
        "sinks": sinks,
        "alibi_slopes": alibi_slopes,
    }
    _check_tensors(**{name: x for name, x in optional.items() if x is not None})
    for name, number in (("query_block", query_block), ("num_splits", num_splits)):
        if isinstance(number, bool) or not isinstance(number, (int, torch.SymInt)):
            raise TypeError(f"{name}: {type(number).__name__}; must be an int")
    if not isinstance(batch_invariant, bool):
        raise TypeError(f"batch_invariant: {type(batch_invariant).__name__}; must be a bool")
    if scale is not None:
        check_number("scale", scale)
    check_number("softcap", softcap)
    if block_table is None:
        k_pages, v_pages = _dense_cache("k_pages", k_pages), _dense_cache("v_pages", v_pages)
    (q,) = ops.autocast(q)
    longest = _longest(cu_seqlens_q, max_seqlen_q)
    words = None if tree_mask is None else _tree_words(q, tree_mask)
    where = (q, k_pages, v_pages, block_table, kv_lens, cu_seqlens_q, longest, query_pages, query_block)
    return _Call(*where, _lower(mask), words, scale, softcap, sinks, alibi_slopes, num_splits, batch_invariant)


def _dense_cache(name: str, cache: Tensor) -> Tensor:
    """(B, S, Hkv, D) as the operator takes it, (B, Hkv, S, D)."""
    if cache.dim() != 4:
        raise ValueError(
            f"{name}: shape {tuple(cache.shape)}; without block_table a dense cache, (batch, length, heads, head_dim)"
        )
    return cache.transpose(1, 2)


def _check_tensors(**tensors: Any) -> None:
    for name, x in tensors.items():
        check_tensor(name, x)
        if x.is_nested:
            raise TypeError(f"{name}: a nested tensor is not supported; must be a strided one")


def _longest(cu_seqlens_q: Tensor | None, max_seqlen_q: int | None) -> int:
    if max_seqlen_q is None:
        return -1
    if cu_seqlens_q is None:
        raise ValueError(f"max_seqlen_q: {max_seqlen_q} without cu_seqlens_q; it is for a packed q")
    if isinstance(max_seqlen_q, Tensor):
        raise TypeError("max_seqlen_q: a Tensor; must be an int that no sequence exceeds, known without the device")
    _check_longest("max_seqlen_q", max_seqlen_q, cu_seqlens_q)
    return max_seqlen_q


def _lower(mask: Mask | None) -> Lowered:
    check_mask(mask)
    lowered = lower(mask)
    if lowered[0] not in (DENSE, CAUSAL, COMPOSITE):
        raise NotImplementedError(
            f"mask: {mask!r} over a paged cache is not supported; Dense, Causal, SlidingWindow, PrefixLM and "
            "intersections of them are"
        )
    return lowered


def _tree_words(q: Tensor, tree: Tensor) -> Tensor:
    """int32 (B, Sq): bit t of word i is tree[b, i, t]."""
    if tree.dtype == torch.int32:
        return tree
    if tree.dtype != torch.bool:
        raise TypeError(f"tree_mask: dtype {tree.dtype}; must be torch.bool (batch, len_q, len_q) or int32 words")
    if q.dim() != 4:
        raise NotImplementedError("tree_mask: not supported for packed queries; give q as (batch, heads, length, D)")
    batch, _, rows, _ = q.shape
    if tree.dim() != 3 or tree.shape[0] not in (1, batch) or tree.shape[1:] != (rows, rows):
        raise ValueError(f"tree_mask: shape {tuple(tree.shape)}; must be {(batch, rows, rows)}")
    if rows > _WORD_BITS:
        raise ValueError(f"tree_mask: {rows} queries; at most {_WORD_BITS} are supported")
    words = (tree.long() << torch.arange(rows, device=tree.device)).sum(-1)
    signed = torch.where(words >= 1 << (_WORD_BITS - 1), words - (1 << _WORD_BITS), words)
    return signed.to(torch.int32).expand(batch, rows)


def _rope_tables(rope: Any) -> tuple[Tensor | None, Tensor | None, bool]:
    if rope is None:
        return None, None, False
    if isinstance(rope, Sequence) and len(rope) in (2, 3):
        cos, sin, interleaved = (*rope, False)[:3]
    elif all(hasattr(rope, name) for name in ("cos", "sin", "interleaved")):
        cos, sin, interleaved = rope.cos, rope.sin, rope.interleaved
    else:
        raise TypeError(
            f"rope: {type(rope).__name__}; must be (cos, sin), (cos, sin, interleaved), or have these attributes"
        )
    _check_tensors(**{"rope cos": cos, "rope sin": sin})
    if not isinstance(interleaved, bool):
        raise TypeError(f"rope interleaved: {type(interleaved).__name__}; must be a bool")
    return cos, sin, interleaved


def _resolve_cache(backend: str | None, cache: Tensor) -> str:
    """The backend that gathers from, or appends to, a cache."""
    return ops._resolve(backend, cache, Wanted(CAUSAL, False, False))[0]


def _refuse_gradients(**tensors: Tensor | None) -> None:
    for name, x in tensors.items():
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"{name}: requires grad, but caches are for inference and have no backward pass; call under "
                "torch.no_grad(), or use flashmsa.attention"
            )


def _check_on_meta(name: str, arguments: tuple[Any, ...]) -> None:
    """The checks of an operator for a path that does not go through it."""
    if ops._is_dynamo_compiling():
        return
    devices = {x.device for x in arguments if isinstance(x, Tensor)}
    if len(devices) > 1:
        raise ValueError(f"{name}: tensors on {', '.join(sorted(map(str, devices)))}; all on one device")
    # NOTE: Tensor.to does not keep the strides of a tensor with gaps.
    described = [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x
        for x in arguments
    ]
    with torch.no_grad():
        getattr(torch.ops.flashmsa, name).default(*described)


# ---------------------------------------------------------------------------------------------------------------------
# Checked mode: reads what lies on the device


def _check_values(call: _Call) -> None:
    call.path()  # shapes first
    if call.cu_seqlens_q is not None:
        offsets = call.cu_seqlens_q.tolist()
        if offsets[0] != 0 or any(a > b for a, b in pairwise(offsets)):
            raise ValueError(f"cu_seqlens_q: {offsets}; must start at 0 and never decrease")
        if offsets[-1] > call.q.shape[0]:
            raise ValueError(f"cu_seqlens_q: the last value {offsets[-1]} lies past the {call.q.shape[0]} tokens of q")
        longest = max((b - a for a, b in pairwise(offsets)), default=0)
        if 0 <= call.max_seqlen_q < longest:
            raise ValueError(f"max_seqlen_q: {call.max_seqlen_q}, but a sequence has {longest} queries")
    if call.block_table is None:
        if call.kv_lens is not None:
            _check_lengths(call.kv_lens, call.k_pages.shape[2])
        return
    lengths = _check_lengths(call.kv_lens, call.block_table.shape[1] * call.k_pages.shape[1])
    _check_table(call.block_table, lengths, call.k_pages)
    if call.query_pages is not None:
        most = call.block_table.shape[1]
        bad = ((call.query_pages < -1) | (call.query_pages >= most)).nonzero().tolist()
        if bad:
            value = int(call.query_pages[tuple(bad[0])])
            raise ValueError(f"query_pages{bad[0]}: {value}; must be a place in block_table, 0 to {most - 1}, or -1")


def _check_lengths(kv_lens: Tensor, capacity: int) -> list[int]:
    lengths = kv_lens.tolist()
    for b, length in enumerate(lengths):
        if not 0 <= length <= capacity:
            raise ValueError(f"kv_lens[{b}]: {length}; must be from 0 to the {capacity} tokens that the cache holds")
    return lengths


def _check_table(table: Tensor, lengths: Sequence[int], k_pages: Tensor) -> None:
    """The entries up to each length."""
    pages, page_size = k_pages.shape[:2]
    for b, row in enumerate(table.tolist()):
        for n, page in enumerate(row[: -(-lengths[b] // page_size)]):
            if not 0 <= page < pages:
                raise ValueError(f"block_table[{b}, {n}]: {page}; must be a page from 0 to {pages - 1}")


def _check_append_values(
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    kv_lens: Tensor,
    k_new: Tensor,
    cu_seqlens: Tensor | None,
    cos: Tensor | None,
) -> None:
    page_size = k_pages.shape[1]
    before = _check_lengths(kv_lens, table.shape[1] * page_size)
    if cu_seqlens is None:
        new = [k_new.shape[2]] * len(before)
    else:
        offsets = cu_seqlens.tolist()
        if offsets[0] != 0 or offsets != sorted(offsets) or offsets[-1] > k_new.shape[0]:
            raise ValueError(f"cu_seqlens: {offsets}; must rise from 0 to at most the {k_new.shape[0]} new tokens")
        new = [b - a for a, b in pairwise(offsets)]
    after = [a + b for a, b in zip(before, new, strict=True)]
    for b, length in enumerate(after):
        if length > table.shape[1] * page_size:
            raise ValueError(
                f"kv_lens[{b}]: {before[b]} and {new[b]} new tokens are more than the {table.shape[1] * page_size} "
                "that block_table has pages for"
            )
    _check_table(table, after, k_pages)
    if cos is not None and max(after, default=0) > cos.shape[0]:
        raise ValueError(f"rope cos: {cos.shape[0]} positions; a sequence reaches {max(after)}")
