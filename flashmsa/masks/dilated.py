"""DilatedWindow: every dilation-th key of a window."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .base import (
    ALIGNMENTS,
    DILATED,
    UNBOUNDED,
    Mask,
    as_bound,
    call_text,
    check_align,
    positions,
    set_fields,
    without_bound,
)


@dataclass(frozen=True, repr=False)
class DilatedWindow(Mask):
    """Query i at position p sees the keys j = p + t * dilation for the whole t in [-left, right].

    left, right  steps, ints >= 0, or ``math.inf`` for no bound. ``right=None``: the same as ``left``; 0 is causal.
    dilation     keys between two steps, an int >= 1; 1 is ``SlidingWindow(left, right)``
    align        "bottom-right" (the default): p = i + len_kv - len_q; "top-left": p = i.

    Of the other masks it goes (``&``) with Dense, and with a DilatedWindow of the same dilation and alignment.
    Raises TypeError for a bound or dilation that is no int, ValueError for a negative bound or a dilation below 1.

    The dilated window is that of Beltagy et al., Longformer (2020).
    """

    left: int | float
    right: int | float | None = None
    dilation: int = field(kw_only=True)
    align: str = field(default=ALIGNMENTS[0], kw_only=True)

    def __post_init__(self) -> None:
        check_align(self.align)
        left = as_bound("left", self.left)
        right = left if self.right is None else as_bound("right", self.right)
        dilation = as_bound("dilation", self.dilation, infinite=False, least=1)
        set_fields(self, left=without_bound(left), right=without_bound(right), dilation=dilation)
        set_fields(self, _lowered=(DILATED, (int(self.align == ALIGNMENTS[1]), left, right, dilation), ()))

    def to_dense(self, len_q: int, len_kv: int, device: torch.device | str | None = None) -> Tensor:
        key = torch.arange(len_kv, device=device)
        distance = key - positions(self.align, len_q, len_kv, key.device)[:, None]
        steps = torch.div(distance, self.dilation, rounding_mode="floor")
        return (distance == steps * self.dilation) & (steps >= -self.left) & (steps <= self.right)

    def _meet(self, other: DilatedWindow) -> DilatedWindow:
        if (self.dilation, self.align) != (other.dilation, other.align):
            raise NotImplementedError(
                f"mask: {self!r} & {other!r} is not supported; dilated windows of one dilation and alignment are"
            )
        left, right = (min(a, b) for a, b in ((self.left, other.left), (self.right, other.right)))
        return DilatedWindow(left, right, dilation=self.dilation, align=self.align)

    def _natural_size(self) -> tuple[int, int]:
        reach = [x * self.dilation for x in self._lowered[1][1:3] if x != UNBOUNDED]
        size = max(8, min(64, 2 * max(reach, default=4)))
        return size, size

    def __repr__(self) -> str:
        options = {"dilation": (self.dilation, None), "align": (self.align, ALIGNMENTS[0])}
        return call_text("DilatedWindow", self.left, self.right, **options)
