"""``a & b``: interval masks make one interval mask, and with a BlockSparse its partial blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from .base import (
    ALIGNMENTS,
    BLOCK_SPARSE,
    COMPOSITE,
    UNBOUNDED,
    Band,
    Interval,
    Lowered,
    Mask,
    describe,
    same_tensors,
    set_fields,
)

# Bits of a composite's flags: which tensors follow, and how positions are counted for ALiBi.
DOCUMENTS, KV_USED, PREFIX_BR, PREFIX_TL, LOCAL_PREFIX_BR, LOCAL_PREFIX_TL, PER_DOCUMENT, TOP_LEFT = (
    1 << n for n in range(8)
)
COMPOSITE_FLAGS = 18  # their place among the ints
_ANY = Interval()


def lower_composite(
    world: Interval, local: Interval = _ANY, kv_used: Tensor | None = None, per_document: bool = False
) -> tuple[tuple[int, ...], tuple[Tensor, ...]]:
    """(ints, tensors) of kind 3: the bands of the whole tensors and of each document."""
    offsets = world.offsets or local.offsets
    optional = (kv_used, world.prefix_br, world.prefix_tl, local.prefix_br, local.prefix_tl)
    flags = DOCUMENTS if offsets is not None else 0
    for flag, x in zip((KV_USED, PREFIX_BR, PREFIX_TL, LOCAL_PREFIX_BR, LOCAL_PREFIX_TL), optional, strict=True):
        flags |= flag if x is not None else 0
    flags |= PER_DOCUMENT if per_document else 0
    flags |= TOP_LEFT if (local if per_document else world).align == ALIGNMENTS[1] else 0
    local_band = _meet_bands(local.band, Band.aligned(ALIGNMENTS[0], right=0)) if world.causal else local.band
    tensors = (*(offsets or ()), *(x for x in optional if x is not None))
    return (*world.band, *local_band, flags, 0), tensors


def lower_interval(interval: Interval) -> Lowered:
    return (COMPOSITE, *lower_composite(interval))


def meet(a: Interval, b: Interval) -> Interval:
    """Both intervals at once. Raises NotImplementedError for what one composite cannot say."""
    offsets = a.offsets or b.offsets
    if a.offsets is not None and b.offsets is not None:
        if any(x is not y for x, y in zip(a.offsets, b.offsets, strict=True)):
            raise NotImplementedError(
                "mask: & of two Document masks with different offsets is not supported; cut the documents at both "
                "masks' offsets and use one Document"
            )
    prefixes = {}
    for side in ("prefix_br", "prefix_tl"):
        x, y = getattr(a, side), getattr(b, side)
        for tensor, other, number in ((x, b, y), (y, a, x)):
            if tensor is not None and (number is not None or getattr(other.band, side) != UNBOUNDED):
                raise NotImplementedError(
                    "mask: & of two PrefixLM of one alignment where a prefix is a tensor is not supported; use one "
                    "PrefixLM(torch.minimum(a, b))"
                )
        prefixes[side] = y if x is None else x
    said = {x.align for x in (a, b)} - {None}
    align = said.pop() if len(said) == 1 else ALIGNMENTS[0] if said else None
    return Interval(
        band=_meet_bands(a.band, b.band), offsets=offsets, causal=a.causal or b.causal, align=align, **prefixes
    )


def _meet_bands(a: Band, b: Band) -> Band:
    smaller = Band(*map(min, a, b))
    if a.keep_first and b.keep_first:
        if a.keep_first != b.keep_first and (a.left_br, a.left_tl) != (b.left_br, b.left_tl):
            raise NotImplementedError(
                f"mask: & of windows with keep_first {a.keep_first} and {b.keep_first} and different left bounds is "
                "not supported; use one keep_first, or one left bound"
            )
        return smaller
    if a.keep_first or b.keep_first:
        # The one without first keys holds for the other's first keys as well.
        kept, plain = (a, b) if a.keep_first else (b, a)
        outer = {"outer_br": min(kept.outer_br, plain.left_br), "outer_tl": min(kept.outer_tl, plain.left_tl)}
        return smaller._replace(keep_first=kept.keep_first, **outer)
    return smaller


@dataclass(frozen=True, repr=False)
class Intersection(Mask):
    """What ``a & b`` makes: the keys that all of its masks allow. One kernel runs it, whatever the masks."""

    masks: tuple[Mask, ...]

    def __post_init__(self) -> None:
        from .bands import IntervalMask
        from .blocks import BlockSparse

        if not self.masks:
            raise ValueError("mask: an intersection of no masks; use Dense()")
        blocks = [mask for mask in self.masks if isinstance(mask, BlockSparse)]
        intervals = [mask for mask in self.masks if isinstance(mask, IntervalMask)]
        if len(blocks) + len(intervals) < len(self.masks):
            named = next(type(m).__name__ for m in self.masks if not isinstance(m, (BlockSparse, IntervalMask)))
            raise NotImplementedError(
                f"mask: & with {named} is not supported; Dense, Causal, SlidingWindow, PrefixLM, Document and one "
                "BlockSparse are"
            )
        if len(blocks) > 1:
            raise NotImplementedError(
                "mask: & of two BlockSparse masks is not supported; use one BlockSparse of the blocks that both set"
            )
        interval = reduce(meet, (mask._interval() for mask in intervals), _ANY)
        if blocks:
            lowered = blocks[0]._lower_with(*lower_composite(interval))
        else:
            lowered = lower_interval(interval)
        set_fields(self, _lowered=lowered)

    def _interval(self) -> Interval:
        return reduce(meet, (mask._interval() for mask in self.masks))

    def to_dense(self, len_q: int, len_kv: int, device: torch.device | str | None = None) -> Tensor:
        dense = (mask.to_dense(len_q, len_kv, self.device if device is None else device) for mask in self.masks)
        return reduce(torch.logical_and, dense)

    def to(self, device: torch.device | str) -> Intersection:
        moved = tuple(mask.to(device) for mask in self.masks)
        same = all(a is b for a, b in zip(moved, self.masks, strict=True))
        return self if same else Intersection(moved)

    def _check_shapes(self, batch: int, heads_q: int, heads_kv: int, len_q: int, len_kv: int) -> None:
        for mask in self.masks:
            mask._check_shapes(batch, heads_q, heads_kv, len_q, len_kv)

    def _check_values(self, len_q: int, len_kv: int) -> None:
        for mask in self.masks:
            mask._check_values(len_q, len_kv)

    def _natural_size(self) -> tuple[int, int]:
        from .blocks import BlockSparse

        sizes = [mask._natural_size() for mask in self.masks]
        # Blocks are of their own lengths alone.
        for mask, size in zip(self.masks, sizes, strict=True):
            if isinstance(mask, BlockSparse):
                return size
        fixed = [size for mask, size in zip(self.masks, sizes, strict=True) if mask.device is not None]
        return tuple(map(max, zip(*(fixed or sizes), strict=True)))

    def __repr__(self) -> str:
        return " & ".join(map(repr, self.masks))


def intersect(a: Mask, b: Mask) -> Mask:
    from .bands import Dense
    from .dilated import DilatedWindow

    parts = [part for mask in (a, b) for part in (mask.masks if isinstance(mask, Intersection) else (mask,))]
    parts = [part for part in parts if not isinstance(part, Dense)]
    if len(parts) < 2:
        return parts[0] if parts else Dense()
    if all(isinstance(part, DilatedWindow) for part in parts):
        return reduce(DilatedWindow._meet, parts)
    for part, other in ((parts[0], parts[1:]), (parts[-1], parts[:-1])):
        _check_devices(part, other)
    return Intersection(tuple(parts))


def _check_devices(mask: Mask, others: Sequence[Any]) -> None:
    for other in others:
        if mask.device is not None and other.device is not None and mask.device != other.device:
            raise ValueError(f"mask: & of masks on {mask.device} and {other.device}; use mask.to({str(mask.device)!r})")


def lower_blocks(
    ints: Sequence[int], tensors: Sequence[Tensor], sizes: Sequence[int], cells: Sequence[Tensor]
) -> Lowered:
    """Kind 6: a composite's ints and tensors, the sizes of the blocks, and the list of cells."""
    return BLOCK_SPARSE, (*ints, *sizes), (*tensors, *cells)


@dataclass(frozen=True, eq=False, repr=False)
class PerSequence(Mask):
    """A mask applied inside each of a batch of packed sequences; what ``attention_varlen`` runs.

    mask        an interval mask without documents of its own; its positions are counted within each sequence
    q_offsets   int32 (n + 1,): sequence d has the query rows [q_offsets[d], q_offsets[d + 1])
    kv_offsets  the same for keys
    kv_used     int32 (n,) or None: of the keys of sequence d only the first kv_used[d] are there

    Raises NotImplementedError for a mask that is none of these.
    """

    mask: Mask
    q_offsets: Tensor
    kv_offsets: Tensor
    kv_used: Tensor | None = None

    def __post_init__(self) -> None:
        set_fields(self, _lowered=lower_in_sequences(self.mask, self.q_offsets, self.kv_offsets, self.kv_used))

    def to_dense(self, len_q: int, len_kv: int, device: torch.device | str | None = None) -> Tensor:
        """Reads the offsets, so it waits for their device."""
        cuts = zip(self.q_offsets.tolist(), self.kv_offsets.tolist(), strict=True)
        used = None if self.kv_used is None else self.kv_used.tolist()
        dense = torch.zeros(len_q, len_kv, dtype=torch.bool, device="cpu")
        (q_begin, kv_begin), *ends = cuts
        for d, (q_end, kv_end) in enumerate(ends):
            keys = kv_end - kv_begin if used is None else min(max(used[d], 0), kv_end - kv_begin)
            one = self.mask.to_dense(q_end - q_begin, keys, "cpu")
            one = one[min(d, one.shape[0] - 1), 0] if one.dim() == 4 else one
            place = dense[q_begin:q_end, kv_begin : kv_begin + keys]
            place.copy_(one[: place.shape[0], : place.shape[1]])
            q_begin, kv_begin = q_end, kv_end
        return dense.to(self.q_offsets.device if device is None else device)

    def to(self, device: torch.device | str) -> PerSequence:
        tensors = (self.q_offsets, self.kv_offsets, self.kv_used)
        moved = [None if x is None else x.to(device) for x in tensors]
        if all(a is b for a, b in zip(moved, tensors, strict=True)):
            return self
        return PerSequence(self.mask.to(device), *moved)

    def _check_values(self, len_q: int, len_kv: int) -> None:
        check_sequences(self.q_offsets, self.kv_offsets, self.kv_used, len_q, len_kv)
        self.mask._check_values(len_q, len_kv)

    def _natural_size(self) -> tuple[int, int]:
        return int(self.q_offsets[-1]), int(self.kv_offsets[-1])

    def __eq__(self, other: object) -> bool:
        """The same mask in the same sequences, on one device. Reads the offsets, so it waits for their device."""
        if not isinstance(other, PerSequence):
            return NotImplemented
        mine, theirs = ((x.q_offsets, x.kv_offsets, x.kv_used) for x in (self, other))
        return self.mask == other.mask and same_tensors(mine, theirs)

    __hash__ = None  # type: ignore[assignment]  # it holds tensors, whose values may change

    def __repr__(self) -> str:
        used = "" if self.kv_used is None else f", {describe(self.kv_used)}"
        return f"PerSequence({self.mask!r}, {describe(self.q_offsets)}, {describe(self.kv_offsets)}{used})"


def lower_in_sequences(mask: Mask | None, q_offsets: Tensor, kv_offsets: Tensor, kv_used: Tensor | None) -> Lowered:
    """What ``PerSequence`` lowers to. Raises ValueError for prefixes of another number of sequences."""
    # PERF: all but the offsets is the mask's own, and made once for each mask.
    cached = _EVERYTHING if mask is None else getattr(mask, "_in_sequences", None)
    if cached is None:
        cached = _split_lowered(_sequence_interval(mask))
        if not torch.compiler.is_compiling():
            set_fields(mask, _in_sequences=cached)
    ints, ints_used, prefixes = cached
    for prefix in prefixes:
        if prefix.shape[0] != q_offsets.shape[0] - 1:
            count = q_offsets.shape[0] - 1
            raise ValueError(f"mask: prefix for {prefix.shape[0]} sequences does not match cu_seqlens_q's {count}")
    if kv_used is None:
        return COMPOSITE, ints, (q_offsets, kv_offsets, *prefixes)
    return COMPOSITE, ints_used, (q_offsets, kv_offsets, kv_used, *prefixes)


def _split_lowered(interval: Interval) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Tensor, ...]]:
    """The ints without and with lengths in use, and the prefixes that are tensors."""
    ints, prefixes = lower_composite(_ANY, interval, per_document=True)
    flags = ints[18] | DOCUMENTS
    return (*ints[:18], flags, 0), (*ints[:18], flags | KV_USED, 0), prefixes


_EVERYTHING = _split_lowered(_ANY)


def check_sequences(q_offsets: Tensor, kv_offsets: Tensor, kv_used: Tensor | None, len_q: int, len_kv: int) -> None:
    """Reads the tensors of packed sequences, and raises ValueError for values that they may not hold."""
    from .document import check_offset_values

    for name, offsets, length in (("cu_seqlens_q", q_offsets, len_q), ("cu_seqlens_k", kv_offsets, len_kv)):
        values = offsets.detach().cpu()
        check_offset_values(name, values)
        if int(values[-1]) > length:
            raise ValueError(f"{name}: the last value {int(values[-1])} lies past the {length} packed tokens")
    if kv_used is not None:
        used, most = kv_used.detach().cpu(), kv_offsets.detach().cpu().diff()
        bad = ((used < 0) | (used > most)).nonzero()
        if bad.numel():
            d = int(bad[0])
            raise ValueError(f"seqused_k[{d}]: {int(used[d])}; must be from 0 to the sequence's {int(most[d])} keys")


def _sequence_interval(mask: Mask) -> Interval:
    interval = getattr(mask, "_interval", None)
    if isinstance(mask, Intersection) and not all(hasattr(part, "_interval") for part in mask.masks):
        interval = None
    found = None if interval is None else interval()
    if found is None or found.offsets is not None:
        raise NotImplementedError(
            f"mask: {mask!r} inside each sequence is not supported; Dense, Causal, SlidingWindow, PrefixLM and "
            "intersections of them are"
        )
    return found
