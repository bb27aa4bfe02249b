"""Masks whose rows are bands around the query's position: Dense, Causal, SlidingWindow, PrefixLM."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .base import (
    ALIGNMENTS,
    CAUSAL,
    DENSE,
    UNBOUNDED,
    Band,
    Interval,
    Mask,
    as_bound,
    call_text,
    check_align,
    check_tensor,
    describe,
    on_cpu,
    positions,
    same_tensors,
    set_fields,
    without_bound,
)
from .intersection import lower_interval


class IntervalMask(Mask):
    """A mask that is an interval of keys for each row, and can be intersected with any other such mask."""

    def _interval(self) -> Interval:
        raise NotImplementedError


@dataclass(frozen=True)
class Dense(IntervalMask):
    """Every query sees every key. The same as ``mask=None``."""

    _lowered = (DENSE, (), ())

    def to_dense(self, len_q: int, len_kv: int, device: torch.device | str | None = None) -> Tensor:
        return torch.ones(len_q, len_kv, dtype=torch.bool, device=device)

    def _interval(self) -> Interval:
        return Interval()


@dataclass(frozen=True, repr=False)
class Causal(IntervalMask):
    """Query i sees the keys j <= p.

    ``align="bottom-right"`` (the default): p = i + len_kv - len_q, so the last query sees every key, and with more
    queries than keys the first ones see none. ``align="top-left"``: p = i, so the first query sees key 0 alone.
    """

    align: str = ALIGNMENTS[0]

    def __post_init__(self) -> None:
        check_align(self.align)
        set_fields(self, _lowered=(CAUSAL, (int(self.align == ALIGNMENTS[1]),), ()))

    def to_dense(self, len_q: int, len_kv: int, device: torch.device | str | None = None) -> Tensor:
        key = torch.arange(len_kv, device=device)
        return key <= positions(self.align, len_q, len_kv, key.device)[:, None]

    # NOTE: a band by its definition, but lowered to a kind of its own: a simpler trait.
    def _interval(self) -> Interval:
        return Interval(Band.aligned(self.align, right=0), align=self.align)

    def __repr__(self) -> str:
        return call_text("Causal", align=(self.align, ALIGNMENTS[0]))


@dataclass(frozen=True, repr=False)
class SlidingWindow(IntervalMask):
    """Query i at position p sees the keys p - left <= j <= p + right.

    left, right  ints >= 0, or ``math.inf`` for no bound. ``right=None``: the same as ``left``; 0 is a causal window.
    keep_first   so many first keys are seen from everywhere (StreamingLLM's attention sinks); where ``right`` is finite
                 they too satisfy j <= p + right.
    align        "bottom-right" (the default): p = i + len_kv - len_q; "top-left": p = i.

    A window of W keys that counts the query's own, as Hugging Face does, is ``SlidingWindow.from_window_size(W)``.
    Raises TypeError for a bound that is no int, ValueError for a negative one.

    The first keys are those of Xiao et al., Efficient Streaming Language Models with Attention Sinks (2023).
    """

    left: int | float
    right: int | float | None = None
    keep_first: int = field(default=0, kw_only=True)
    align: str = field(default=ALIGNMENTS[0], kw_only=True)

    def __post_init__(self) -> None:
        check_align(self.align)
        left = as_bound("left", self.left)
        right = left if self.right is None else as_bound("right", self.right)
        keep_first = as_bound("keep_first", self.keep_first, infinite=False)
        # Equal windows compare equal however they were written.
        set_fields(self, left=without_bound(left), right=without_bound(right), keep_first=keep_first)
        set_fields(self, _lowered=lower_interval(self._interval()))

    @classmethod
    def from_window_size(cls, window_size: int) -> SlidingWindow:
        """The causal window of ``window_size`` keys that counts the query's own, as in Hugging Face's models.

        Raises TypeError for what is no int, ValueError below 1.
        """
        return cls(as_bound("window_size", window_size, infinite=False, least=1) - 1, 0)

    def to_dense(self, len_q: int, len_kv: int, device: torch.device | str | None = None) -> Tensor:
        key = torch.arange(len_kv, device=device)
        distance = key - positions(self.align, len_q, len_kv, key.device)[:, None]
        return ((distance >= -self.left) | (key < self.keep_first)) & (distance <= self.right)

    def _interval(self) -> Interval:
        left, right = (UNBOUNDED if x == math.inf else x for x in (self.left, self.right))
        return Interval(Band.aligned(self.align, left, right, keep_first=self.keep_first), align=self.align)

    def _natural_size(self) -> tuple[int, int]:
        return natural_size(self.left, self.right, self.keep_first)

    def __repr__(self) -> str:
        options = {"keep_first": (self.keep_first, 0), "align": (self.align, ALIGNMENTS[0])}
        return call_text("SlidingWindow", self.left, self.right, **options)


@dataclass(frozen=True, repr=False, eq=False)
class PrefixLM(IntervalMask):
    """Query i at position p sees the keys j < prefix, and those j <= p.

    prefix  an int >= 0, the same for every batch: 0 is causal, len_kv or more dense. Or an int32 tensor (B,), one
            prefix per batch, which is held, not copied: every call reads it again.
    align   "bottom-right" (the default): p = i + len_kv - len_q; "top-left": p = i.

    Values on the CPU are checked here; ``flashmsa.check(True)`` validates those on a device, where a negative prefix
    counts as 0. Raises TypeError for a prefix that is neither, ValueError for a negative one or a wrong shape.
    """

    prefix: int | Tensor
    align: str = ALIGNMENTS[0]

    def __post_init__(self) -> None:
        check_align(self.align)
        if isinstance(self.prefix, Tensor):
            check_tensor("prefix", self.prefix, torch.int32, (1,), "(B,), one prefix per batch")
            if on_cpu(self.prefix):
                self._check_values(0, 0)
        else:
            set_fields(self, prefix=as_bound("prefix", self.prefix, infinite=False))
        set_fields(self, _lowered=lower_interval(self._interval()))

    def to_dense(self, len_q: int, len_kv: int, device: torch.device | str | None = None) -> Tensor:
        prefix = self.prefix
        by_batch = isinstance(prefix, Tensor)
        key = torch.arange(len_kv, device=prefix.device if by_batch else device)
        seen_before = key < (prefix[:, None, None, None] if by_batch else prefix)
        dense = seen_before | (key <= positions(self.align, len_q, len_kv, key.device)[:, None])
        return dense if device is None else dense.to(device)

    def _interval(self) -> Interval:
        if not isinstance(self.prefix, Tensor):
            return Interval(Band.aligned(self.align, prefix=self.prefix), align=self.align)
        side = "prefix_tl" if self.align == ALIGNMENTS[1] else "prefix_br"
        return Interval(Band.aligned(self.align, prefix=0), align=self.align, **{side: self.prefix})

    def _check_shapes(self, batch: int, heads_q: int, heads_kv: int, len_q: int, len_kv: int) -> None:
        if isinstance(self.prefix, Tensor) and self.prefix.shape[0] != batch:
            raise ValueError(f"mask: prefix for a batch of {self.prefix.shape[0]} does not match q's batch {batch}")

    def _check_values(self, len_q: int, len_kv: int) -> None:
        if isinstance(self.prefix, Tensor):
            values = self.prefix.detach().cpu()
            bad = (values < 0).nonzero()
            if bad.numel():
                b = int(bad[0])
                raise ValueError(f"prefix[{b}]: {int(values[b])} is negative; must be an int >= 0")

    def to(self, device: torch.device | str) -> PrefixLM:
        if not isinstance(self.prefix, Tensor):
            return self
        prefix = self.prefix.to(device)
        return self if prefix is self.prefix else PrefixLM(prefix, self.align)

    def _natural_size(self) -> tuple[int, int]:
        if not isinstance(self.prefix, Tensor):
            return natural_size(self.prefix)
        return natural_size(int(self.prefix[0]) if self.prefix.shape[0] else 0)

    def __eq__(self, other: object) -> bool:
        """Equal prefix and alignment. Reads a tensor's values, so it waits for their device."""
        if not isinstance(other, PrefixLM):
            return NotImplemented
        return self._lowered[1] == other._lowered[1] and same_tensors(self._lowered[2], other._lowered[2])

    def __hash__(self) -> int:
        if isinstance(self.prefix, Tensor):
            raise TypeError("unhashable: this PrefixLM holds a tensor, whose values may change")
        return hash((PrefixLM, self.prefix, self.align))

    def __repr__(self) -> str:
        prefix = describe(self.prefix) if isinstance(self.prefix, Tensor) else self.prefix
        return call_text("PrefixLM", prefix, align=(self.align, ALIGNMENTS[0]))


def natural_size(*bounds: int | float) -> tuple[int, int]:
    """Enough for a picture to show where the bounds lie."""
    size = max(8, min(64, 2 * max((int(x) for x in bounds if x != math.inf), default=0)))
    return size, size
