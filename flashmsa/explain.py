"""``explain``: what a call would run, and why."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import _C, torch_backend
from .checks import check_arguments, check_gaps, check_tensor
from .dispatch import BACKENDS, SDPA_BELOW, Wanted, build_reason, choose, dtype_name, gap_reason, reject
from .masks import Mask, has_values, lower
from .masks.base import CAUSAL, COMPOSITE, DENSE, DILATED, DOCUMENT, HASH
from .masks.intersection import COMPOSITE_FLAGS, DOCUMENTS, TOP_LEFT
from .ops import autocast, check_backend, wanted_of, wants_gradient

_CPU_TILE = (64, 64)  # kBlockQ, kBlockKv of csrc/cpu/block.h


@dataclass(frozen=True)
class Explanation:
    """What ``flashmsa.attention`` would do with some arguments. Print it, or read its fields.

    Fields that do not apply to the backend, or cannot be known (a mask's values on the meta device), are None.
    """

    backend: str  # "sm90", "cpu" or "torch"
    runs: bool  # False: that backend was asked for by name and cannot run the call here
    reason: str  # why it was chosen, or why it cannot run
    rejected: dict[str, str]  # each other path and its reason
    call: str  # the arguments in short
    kernel: str | None  # the compiled kernel's name
    head_dim_bucket: int | None  # head_dim is padded to this inside the kernel
    head_dim_v_bucket: int | None  # head_dim_v likewise
    tile: tuple[int, int] | None  # (query rows, keys); None too where parts of the keys are dealt out instead
    stages: int | None  # tiles of K, and of V, in flight
    threads: int | None  # per thread block
    registers: tuple[int, int] | None  # per thread: (producer warp, consumer warps)
    shared_memory: int | None  # bytes per thread block
    backward_kernel: str | None  # the compiled kernel of the gradients, where some are wanted
    backward_tile: tuple[int, int] | None
    full: int | None  # tiles without a mask test, over all batches and heads
    partial: int | None  # tiles with one
    skipped: int | None  # tiles that are never visited
    pairs: int | None  # allowed (query, key) pairs, over all batches and heads
    flops: int | None  # useful floating-point operations: 2 (D + Dv) for each allowed pair
    notes: tuple[str, ...]

    @property
    def efficiency(self) -> float | None:
        """Allowed pairs over the area of the visited tiles; None without tiles."""
        if self.full is None or self.partial is None or self.tile is None or self.pairs is None:
            return None
        area = (self.full + self.partial) * self.tile[0] * self.tile[1]
        return self.pairs / area if area else None

    def __str__(self) -> str:
        lines = [
            ("call", self.call),
            ("backend", f"{self.backend}: {self.reason}" if self.runs else f"{self.backend} cannot run: {self.reason}"),
            *((f"not {path}", why) for path, why in self.rejected.items()),
            ("kernel", self._kernel_line()),
            ("backward", self._backward_line()),
            ("tiles", self._tiles_line()),
            ("work", None if self.flops is None else f"{_short(self.flops)}FLOP useful, {self.pairs:,} allowed pairs"),
            *(("note", note) for note in self.notes),
        ]
        shown = [(name, text) for name, text in lines if text is not None]
        return "\n".join(
            textwrap.fill(text, 116, initial_indent=f"{name:<12}", subsequent_indent=" " * 12, break_long_words=False)
            for name, text in shown
        )

    def _kernel_line(self) -> str | None:
        if self.tile is None:
            return None if self.kernel is None else self._decode_line()
        rows, keys = self.tile
        if self.kernel is None:
            return f"tiles of {rows} rows x {keys} keys"
        producer, consumer = self.registers or (0, 0)
        return (
            f"{self.kernel}: tiles of {rows} rows x {keys} keys, {self._head_dims()}, {self.stages} stages, "
            f"{self.threads} threads, registers {producer} (producer) / {consumer} (consumer), "
            f"{self.shared_memory:,} bytes of shared memory"
        )

    def _decode_line(self) -> str:
        return (
            f"{self.kernel}: keys dealt out over all SMs in parts, {self._head_dims()}, "
            f"{self.threads} threads, {self.shared_memory:,} bytes of shared memory"
        )

    def _head_dims(self) -> str:
        value = "" if self.head_dim_v_bucket == self.head_dim_bucket else f", of v up to {self.head_dim_v_bucket}"
        return f"head dims up to {self.head_dim_bucket}{value}"

    def _backward_line(self) -> str | None:
        if self.backward_kernel is None:
            return None
        rows, keys = self.backward_tile
        return f"{self.backward_kernel}: tiles of {rows} rows x {keys} keys"

    def _tiles_line(self) -> str | None:
        if self.full is None:
            return None
        text = f"{self.full:,} full, {self.partial:,} partial, {self.skipped:,} skipped"
        return text if self.efficiency is None else f"{text}; {self.efficiency:.1%} of the visited area is allowed"


def explain(
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
) -> Explanation:
    """What ``attention`` would do with the same arguments, and why; nothing runs.

    With ``backend`` named it describes that backend whether or not it can run here: ``backend="sm90"`` with CPU or meta
    tensors tells which kernel a Hopper GPU would run, where this build has kernels. Reads the mask's tensors, so it
    waits for their device. Raises for arguments that ``attention`` would not take on any backend.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
    check_gaps(q, dropout_p, config)
    q, k, v = autocast(q, k, v)
    check_arguments(q, k, v, mask, scale=scale, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes, out=out)
    wanted = wanted_of(mask, softcap, alibi_slopes, dropout_p, out is None and wants_gradient(q, k, v, sinks))
    notes = []
    if backend is None:
        chosen, rejections = choose(q, wanted)
        rejection, reason = None, _why_chosen(chosen, q)
        rejected = {r.backend: r.reason for r in rejections}
    else:
        check_backend(backend)
        chosen, rejection = backend, reject(backend, q, wanted)
        reason = "asked for by name" if rejection is None else rejection.reason
        rejected = {}
    if chosen == "sm90":
        rejected["sdpa"] = (
            f"the threshold is a length of {SDPA_BELOW}, so it is never taken: at no measured length was it faster"
        )
    for other in BACKENDS:
        if other != chosen and other not in rejected:
            rejected[other] = _why_not(other, backend, q, wanted)
    if rejection is not None and rejection.error is not NotImplementedError:
        gap = gap_reason(chosen, q.dtype, wanted)
        if gap is not None:
            notes.append(f"nor could {chosen} run it elsewhere: {gap}")
    decode = _decode_kernel(q, k, v, mask, wanted) if chosen == "sm90" else None
    kernel = _forward_kernel(q, k, v, mask, wanted) if chosen == "sm90" and decode is None else None
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    backward = _backward_kernel(q, k, v, mask, wanted, deterministic) if chosen == "sm90" and wanted.backward else None
    if chosen == "sm90" and kernel is None and decode is None and build_reason() is not None:
        notes.append(f"which kernel it would be is not known: {build_reason()}")
    tile = _tile(chosen, kernel, q, k)
    # Where no tiles are walked any size does, for the pairs alone.
    drops = kernel is not None and wanted.dropout
    walked = _CPU_TILE if tile is None or chosen == "torch" else tile
    counts = _tile_counts(q, k, mask, walked, drops, kernel["least_packed"] if kernel else 0)
    if counts is None:
        notes.append("the mask's tensors hold no values, on the meta device or in a trace: its tiles are not known")
    notes += _how_it_runs(chosen, q, mask, wanted, kernel)
    if decode is not None:
        notes.append("few queries against many keys: all query heads of a kv head share each key, read once")
    walks_tiles = counts is not None and tile is not None and chosen != "torch"
    registers = None if kernel is None else (kernel["registers_producer"], kernel["registers_consumer"])
    runs_by = decode or kernel or {}
    return Explanation(
        backend=chosen,
        runs=rejection is None,
        reason=reason,
        rejected=rejected,
        call=_describe_call(q, k, v, mask, softcap, sinks, alibi_slopes, dropout_p),
        kernel=runs_by.get("name"),
        head_dim_bucket=runs_by.get("head_dim_bucket"),
        head_dim_v_bucket=runs_by.get("head_dim_v_bucket", runs_by.get("head_dim_bucket")),
        tile=tile,
        stages=None if kernel is None else kernel["stages"],
        threads=runs_by.get("threads"),
        registers=registers,
        shared_memory=runs_by.get("shared_memory"),
        backward_kernel=None if backward is None else backward["name"],
        backward_tile=None if backward is None else (backward["block_q"], backward["block_kv"]),
        full=counts["full"] if walks_tiles else None,
        partial=counts["partial"] if walks_tiles else None,
        skipped=counts["skipped"] if walks_tiles else None,
        pairs=None if counts is None else counts["allowed_pairs"],
        flops=None if counts is None else 2 * counts["allowed_pairs"] * (q.shape[3] + v.shape[3]),
        notes=tuple(notes),
    )


def _why_chosen(chosen: str, q: Tensor) -> str:
    if chosen == "sm90":
        return f"q is on {q.device}, of compute capability 9.0, and a kernel serves the call"
    if chosen == "cpu":
        return "q is on the CPU" if q.device.type == "cpu" else "q is on the meta device: shapes alone, nothing runs"
    return "no native backend can run the call"


def _why_not(other: str, named: str | None, q: Tensor, wanted: Wanted) -> str:
    if other == "torch":
        return "composed of torch operators; runs where no native backend can, or by name"
    rejection = reject(other, q, wanted)
    return f"{named} was asked for by name" if rejection is None else rejection.reason


def _kernel(q: Tensor, v: Tensor, wanted: Wanted, **facts: Any) -> dict[str, Any] | None:
    return _C.find_kernel(
        wanted.mask_kind, q.dtype, q.shape[3], v.shape[3], wanted.softcap, wanted.alibi, wanted.dropout, **facts
    )


def _forward_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, wanted: Wanted) -> dict[str, Any] | None:
    kind, ints, tensors = lower(mask)
    facts = {"batch": q.shape[0], "heads_q": q.shape[1], "len_q": q.shape[2], "len_kv": k.shape[2]}
    if kind == DOCUMENT:
        facts["documents"] = tensors[0].shape[-1] - 1
    if kind == COMPOSITE and not tensors:
        facts["mask_ints"] = ints
    return _kernel(q, v, wanted, **facts)


def _backward_kernel(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, wanted: Wanted, deterministic: bool
) -> dict[str, Any] | None:
    kind, ints, tensors = lower(mask)
    facts = {"len_q": q.shape[2], "len_kv": k.shape[2], "deterministic": deterministic}
    if kind == DOCUMENT:
        facts |= {"documents": tensors[0].shape[-1] - 1, "causal": bool(ints[0])}
    if kind in (CAUSAL, COMPOSITE) and not tensors:
        facts["mask_ints"] = ints
    return _kernel(q, v, wanted, backward=True, **facts)


def _decode_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, wanted: Wanted) -> dict[str, Any] | None:
    """The kernel of few queries against many keys, where the call is one of these."""
    kind, ints, _ = lower(mask)
    flags = ints[COMPOSITE_FLAGS] if kind == COMPOSITE else 0
    if kind not in (DENSE, CAUSAL, COMPOSITE) or flags & DOCUMENTS or wanted.dropout:
        return None
    from_start = bool(ints[0] if kind == CAUSAL else flags & TOP_LEFT)
    shape = (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3])
    return _C.few_queries_kernel(kind, q.dtype, *shape, wanted.alibi, from_start)


def _tile(chosen: str, kernel: dict[str, Any] | None, q: Tensor, k: Tensor) -> tuple[int, int] | None:
    if chosen == "cpu":
        return _CPU_TILE
    if chosen == "torch":
        # Blocks of rows against all keys, every pair computed.
        return torch_backend.block_rows(q.shape[0], q.shape[1], k.shape[2]), k.shape[2]
    return None if kernel is None else (kernel["block_q"], kernel["block_kv"])


def _tile_counts(
    q: Tensor, k: Tensor, mask: Mask | None, tile: tuple[int, int], dropout: bool, least_packed: int
) -> dict[str, int] | None:
    kind, ints, tensors = lower(mask)
    if not all(map(has_values, tensors)):
        return None
    values = [x.cpu() for x in tensors]
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    return _C.tile_counts(
        kind, list(ints), values, *shape, *tile, heads_kv=k.shape[1], dropout=dropout, least_packed=least_packed
    )


def _how_it_runs(
    chosen: str, q: Tensor, mask: Mask | None, wanted: Wanted, kernel: dict[str, Any] | None
) -> Iterator[str]:
    """What the tiles of a native backend are tiles of, and where another mask's kernel runs the call."""
    if chosen == "torch":
        return
    if wanted.mask_kind == DILATED:
        yield (
            f"queries and keys of one residue modulo {lower(mask)[1][3]} see each other alone: each residue is a "
            "window over strided rows, and the tiles counted are those of the residues"
        )
    if wanted.mask_kind == HASH and kernel is not None and kernel["mask"] == "hash":
        yield (
            "rows of q, k and v are read, and the result is written, in the order of the buckets, where they lie: the "
            "tiles counted are those of the sorted rows and keys"
        )
    elif wanted.mask_kind == HASH:
        yield (
            "rows of q, k and v are gathered in the order of the buckets, and the result is scattered back: the tiles "
            "counted are those of the sorted rows and keys"
        )
    if kernel is not None and kernel["ctas_per_sm"] > 1:
        yield f"so few rows that larger tiles would leave SMs idle: small ones, {kernel['ctas_per_sm']} CTAs an SM"
    if kernel is not None and wanted.mask_kind in (DENSE, CAUSAL, DOCUMENT) and kernel["mask"] == "composite":
        yield "with softcap, alibi_slopes or dropout_p this mask is run by the kernels of intersections"


def _describe_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    softcap: float,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    dropout_p: float,
) -> str:
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
    mask_text = "Dense()" if mask is None else repr(mask)
    options = [f"softcap {softcap}"] if softcap != 0.0 else []
    options += [name for name, x in (("sinks", sinks), ("alibi_slopes", alibi_slopes)) if x is not None]
    options += [f"dropout_p {dropout_p}"] if dropout_p > 0.0 else []
    return ", ".join([shapes, f"{dtype_name(q.dtype)} on {q.device}", f"mask {mask_text}", *options])


def _short(number: float) -> str:
    for prefix in ("", "k", "M", "G", "T"):
        if number < 1000:
            return f"{number:.4g} {prefix}"
        number /= 1000
    return f"{number:.4g} P"
