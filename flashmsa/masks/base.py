"""What all masks share: the base class, the band of an interval mask, and the checks of arguments."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .._prepare import has_values, is_readable

if TYPE_CHECKING:
    from .visible import Visible

# (kind, ints, tensors): what the native operator takes. The kinds are those of MaskKind in csrc/core/params.h.
Lowered = tuple[int, tuple[int, ...], tuple[Tensor, ...]]

DENSE, CAUSAL, DOCUMENT, COMPOSITE, DILATED, HASH, BLOCK_SPARSE = range(7)

ALIGNMENTS = ("bottom-right", "top-left")
INT32_MAX = 2**31 - 1
UNBOUNDED = INT32_MAX
_DRAWN_PAIRS = 2**26


class Mask:
    """What all masks can do. Not to be made directly: see the classes of this package."""

    _lowered: Lowered

    def __new__(cls, *_: Any, **__: Any) -> Mask:
        if cls is Mask:
            raise TypeError(
                "Mask: not to be made directly; use Dense(), Causal(), SlidingWindow(left, right) or another mask"
            )
        return super().__new__(cls)

    def to_dense(self, len_q: int, len_kv: int, device: torch.device | str | None = None) -> Tensor:
        """The mask as a bool tensor, True where query i may see key j.

        Shape (len_q, len_kv), or (B or 1, H or 1, len_q, len_kv) for a mask that differs by batch or head: either
        broadcasts against (B, H, len_q, len_kv), so it serves as SDPA's ``attn_mask``. Lies on the mask's device (CPU
        when it holds no tensor) unless ``device`` names another.
        """
        raise NotImplementedError

    def _visible(self, len_q: int, len_kv: int, device: torch.device | None = None) -> Visible:
        """Which keys each row sees, block of rows by block of rows, from what the native operator takes."""
        from .visible import visible

        return visible(*self._lowered, len_q, len_kv, device or self.device or torch.device("cpu"))

    def __and__(self, other: object) -> Mask:
        """Both masks at once: key j is allowed where both allow it. Positions are those of the whole tensors.

        Dense, Causal, SlidingWindow, PrefixLM and Document go with each other and with one BlockSparse; dilated windows
        of one dilation with each other. Raises NotImplementedError for other pairs.
        """
        from .intersection import intersect

        return intersect(self, other) if isinstance(other, Mask) else NotImplemented

    def _lower(self) -> Lowered:
        """What the native operator takes: (kind, ints, tensors). Made once, when the mask is made."""
        return self._lowered

    def _check_shapes(self, batch: int, heads_q: int, heads_kv: int, len_q: int, len_kv: int) -> None:
        """Raises ValueError where the mask's tensors do not fit q (batch, heads_q, len_q, D) and k."""

    def _check_values(self, len_q: int, len_kv: int) -> None:
        """Reads the mask's tensors, wherever they are, and raises ValueError on what no mask may hold."""

    def _natural_size(self) -> tuple[int, int]:
        """The (len_q, len_kv) that ``str`` draws."""
        return 8, 8

    @property
    def device(self) -> torch.device | None:
        """Where the mask's tensors lie; None when it holds none."""
        tensors = self._lowered[2]
        return tensors[0].device if tensors else None

    def to(self, device: torch.device | str) -> Mask:
        """This mask with its tensors on ``device``; itself where nothing has to move."""
        return self

    def sparsity(self, len_q: int, len_kv: int) -> float:
        """The share of (query, key) pairs that the mask forbids: 0.0 for a dense mask, 1.0 when no row sees a key.

        Over all batches and heads where they differ. Reads the mask's tensors, so it waits for their device. Memory
        O(len_q) for interval masks, one block of rows at a time for others.
        """
        allowed, pairs = self._visible(len_q, len_kv).count()
        return 1.0 - allowed / pairs if pairs else 0.0

    def draw(self, len_q: int, len_kv: int, cells: int = 16) -> str:
        """A picture of at most ``cells`` x ``cells`` cells: █ every pair is allowed, ▒ some, · none.

        Shows batch 0, head 0. Reads the mask's tensors, so it waits for their device.
        """
        rows, columns = min(cells, len_q), min(cells, len_kv)
        if rows == 0 or columns == 0:
            return f"(nothing to draw: {len_q} queries, {len_kv} keys)"
        row_edges = [r * len_q // rows for r in range(rows + 1)]
        column_edges = [c * len_kv // columns for c in range(columns + 1)]
        visible = self._visible(len_q, len_kv)
        if 0 in visible.planes:
            return "(nothing to draw: no batch or no head)"
        lines = []
        for top, bottom in pairwise(row_edges):
            counts = visible.count_columns(top, bottom, column_edges)
            areas = [(bottom - top) * (b - a) for a, b in pairwise(column_edges)]
            # NOTE: two characters a cell: a character is about twice as high as it is wide.
            symbols = ("·" if n == 0 else "█" if n == area else "▒" for n, area in zip(counts, areas, strict=True))
            lines.append("".join(2 * symbol for symbol in symbols))
        return "\n".join(lines)

    def __str__(self) -> str:
        if not all(map(has_values, self._lowered[2])):
            return repr(self)
        len_q, len_kv = self._natural_size()
        # NOTE: these are drawn from every pair, which takes long where there are many; ``draw`` does it if asked. The
        # others take memory for every row.
        if self._lowered[0] in (HASH, BLOCK_SPARSE) and len_q * len_kv > _DRAWN_PAIRS:
            return repr(self)
        if max(len_q, len_kv) > _DRAWN_PAIRS:
            return repr(self)
        return f"{self!r}, {len_q} queries (down) x {len_kv} keys (across)\n{self.draw(len_q, len_kv)}"


class Band(NamedTuple):
    """Bounds of an interval mask, each for queries counted from the end ("br") and from the start ("tl"):

    j <= p + right   and   (j < prefix or j <= p)   and   (j >= p - left   or   (j < keep_first and j >= p - outer))

    UNBOUNDED is no bound, keep_first 0 no first keys. The order is that of the lowered form.
    """

    left_br: int = UNBOUNDED
    left_tl: int = UNBOUNDED
    right_br: int = UNBOUNDED
    right_tl: int = UNBOUNDED
    prefix_br: int = UNBOUNDED
    prefix_tl: int = UNBOUNDED
    keep_first: int = 0
    outer_br: int = UNBOUNDED
    outer_tl: int = UNBOUNDED

    @classmethod
    def aligned(
        cls, align: str, left: int = UNBOUNDED, right: int = UNBOUNDED, prefix: int = UNBOUNDED, keep_first: int = 0
    ) -> Band:
        side = "tl" if align == ALIGNMENTS[1] else "br"
        # First keys say nothing where every earlier key is seen anyway.
        keep_first = 0 if left == UNBOUNDED else keep_first
        return cls(**{f"left_{side}": left, f"right_{side}": right, f"prefix_{side}": prefix}, keep_first=keep_first)


class Interval(NamedTuple):
    """An interval mask in parts that can be intersected; what kind 3 is made of."""

    band: Band = Band()
    prefix_br: Tensor | None = None  # int32 (B,), in place of the band's number
    prefix_tl: Tensor | None = None
    offsets: tuple[Tensor, Tensor] | None = None  # of queries and keys
    causal: bool = False  # inside each document
    align: str | None = None  # where positions are counted from, for ALiBi; None: it does not say


def on_cpu(x: Tensor) -> bool:
    """Whether x's values can be looked at without waiting for a device, or for a trace."""
    return x.device.type == "cpu" and is_readable(x)


def positions(align: str | None, len_q: int, len_kv: int, device: torch.device) -> Tensor:
    """The place p of each query among the keys, int64 (len_q,)."""
    return torch.arange(len_q, device=device) + (0 if align == ALIGNMENTS[1] else len_kv - len_q)


def call_text(name: str, *arguments: object, **named: tuple[object, object]) -> str:
    """The expression that makes a mask; of the named arguments, (value, default), only those that differ."""
    said = [*map(str, arguments), *(f"{k}={v!r}" for k, (v, default) in named.items() if v != default)]
    return f"{name}({', '.join(said)})"


def check_align(align: Any) -> None:
    if align not in ALIGNMENTS:
        raise ValueError(f"align: {align!r} is not an alignment; one of {', '.join(map(repr, ALIGNMENTS))}")


def as_bound(name: str, value: Any, infinite: bool = True, least: int = 0) -> int:
    """A number of keys; no bound at all as the largest int32."""
    allowed = f"an int >= {least}, or math.inf" if infinite else f"an int >= {least}"
    if isinstance(value, float) and infinite and value == math.inf:
        return UNBOUNDED
    bound = as_int(value)
    if bound is None:
        raise TypeError(f"{name}: {value!r} is a {type(value).__name__}; must be {allowed}")
    if bound < least:
        raise ValueError(f"{name}: {bound} is {'negative' if bound < 0 else 'too small'}; must be {allowed}")
    # Lengths are below the largest int32, so a larger bound bounds nothing.
    return min(bound, UNBOUNDED)


def as_int(value: Any) -> int | None:
    """``value`` as an int, one of numpy's too; None for what is none: a bool, a float, a tensor."""
    if isinstance(value, (bool, Tensor)):
        return None
    if isinstance(value, int):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return None


def without_bound(bound: int) -> int | float:
    """A bound as its mask shows it."""
    return math.inf if bound == UNBOUNDED else bound


def check_tensor(name: str, value: Any, dtype: torch.dtype, dims: Sequence[int], shape: str) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: {type(value).__name__}; must be a tensor of {dtype}, {shape}")
    if value.dtype != dtype:
        raise TypeError(f"{name}: dtype {value.dtype}; must be {dtype}, as by {name}.to({dtype})")
    if value.dim() not in dims:
        raise ValueError(f"{name}: shape {tuple(value.shape)}; must be {shape}")


def describe(x: Tensor, most: int = 16) -> str:
    """Short, and without waiting for a device."""
    if x.device.type == "cpu" and has_values(x) and x.numel() <= most:
        return str(x.tolist())
    return f"<{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)} on {x.device}>"


def same_tensors(mine: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> bool:
    """Equal in number, place, shape and values; waits for their device."""
    return len(mine) == len(theirs) and all(
        a is b
        or (a is not None and b is not None and a.device == b.device and a.dtype == b.dtype and torch.equal(a, b))
        for a, b in zip(mine, theirs, strict=True)
    )


def set_fields(mask: Mask, **fields: Any) -> None:
    """Writes the fields of a mask that is being made; masks do not change later."""
    for name, value in fields.items():
        object.__setattr__(mask, name, value)


def lower(mask: Mask | None) -> Lowered:
    """``mask`` as the native operator takes it; None is ``Dense()``."""
    return (DENSE, (), ()) if mask is None else mask._lower()


def row_blocks(first: int, last: int, rows: int) -> Iterator[slice]:
    """[first, last) in slices of ``rows``."""
    return (slice(a, min(a + rows, last)) for a in range(first, last, rows))
