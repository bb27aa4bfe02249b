"""Masks: which keys each query may see.

A mask is an immutable object that can be compared and printed; one that holds no tensor can be hashed as well. Its text
drawing is its ``str``. The definitions, with p = i + len_kv - len_q the position of query i among the keys:

=============  ==========================================================================================
Dense          every key
Causal         key j where j <= p (``align="top-left"``: p = i)
SlidingWindow  key j where p - left <= j <= p + right
PrefixLM       key j where j < prefix or j <= p
Document       key j in the same document as i; with ``causal``, aligned at each document's end
a & b          key j that both allow; not yet with a document mask
=============  ==========================================================================================

Every mask so far is an *interval mask*: the keys of a row form one interval [begin, end). That is all that ``_rows``
says; sparsity, drawing and the composed backend follow from it. ``to_dense`` is written from the definition instead, so
that each can be tested against the other.

Adding a mask: its trait in csrc/mask/, a dataclass here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Causal", "Dense", "Document", "Intersection", "Mask", "PrefixLM", "SlidingWindow"]

# (kind, ints, tensors): what the native operator takes. The kinds are those of MaskKind in csrc/core/params.h.
Lowered = tuple[int, tuple[int, ...], tuple[Tensor, ...]]

_ALIGNMENTS = ("bottom-right", "top-left")
_INT32_MAX = 2**31 - 1
_UNBOUNDED = _INT32_MAX


class Mask:
    """What all masks can do. Not to be made directly: see the classes of this module."""

    _lowered: Lowered

    def __new__(cls, *_: Any, **__: Any) -> Mask:
        if cls is Mask:
            raise TypeError(
                "Mask: not to be made directly; use Dense(), Causal(), SlidingWindow(left, right) or another mask"
            )
        return super().__new__(cls)

    def to_dense(self, len_q: int, len_kv: int, device: torch.device | str | None = None) -> Tensor:
        """The mask as a bool tensor, True where query i may see key j.

        Shape (len_q, len_kv), or (B, 1, len_q, len_kv) for a mask that differs by batch: either broadcasts against
        (B, H, len_q, len_kv), so it serves as SDPA's ``attn_mask``. Lies on the mask's device (CPU when it holds no
        tensor) unless ``device`` names another.
        """
        raise NotImplementedError

    def _rows(self, len_q: int, len_kv: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The interval of keys [begin, end) of each query row: two int64 tensors (len_q,) or (B, len_q)."""
        raise NotImplementedError

    def _positions(self, len_q: int, len_kv: int, device: torch.device) -> Tensor:
        """The position of each query among the keys, int64 (len_q,); distances of ALiBi are counted from it."""
        return torch.arange(len_q, device=device) + (len_kv - len_q)

    def _band(self) -> tuple[str | None, int, int, int] | None:
        """(alignment, left, right, prefix) of a mask that is a band, see csrc/mask/band.h; None for any other mask."""
        return None

    def __and__(self, other: object) -> Mask:
        """Both masks at once: key j is allowed where both allow it.

        Raises NotImplementedError for a document mask, and where the two are aligned differently.
        """
        return _intersect(self, other) if isinstance(other, Mask) else NotImplemented

    def _lower(self) -> Lowered:
        """What the native operator takes: (kind, ints, tensors). Made once, when the mask is made."""
        return self._lowered

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

        Reads the mask's tensors, so it waits for their device. Memory O(len_q).
        """
        begin, end = self._rows(len_q, len_kv, self.device or torch.device("cpu"))
        pairs = begin.numel() * len_kv
        return 1.0 - (end - begin).sum().item() / pairs if pairs else 0.0

    def draw(self, len_q: int, len_kv: int, cells: int = 16) -> str:
        """A picture of at most ``cells`` x ``cells`` cells: █ every pair is allowed, ▒ some, · none. Shows batch 0.

        Reads the mask's tensors, so it waits for their device.
        """
        begin, end = (
            x[0] if x.dim() == 2 else x for x in self._rows(len_q, len_kv, self.device or torch.device("cpu"))
        )
        rows, columns = min(cells, len_q), min(cells, len_kv)
        if rows == 0 or columns == 0:
            return f"(nothing to draw: {len_q} queries, {len_kv} keys)"
        row_edges = torch.arange(rows + 1, device=begin.device) * len_q // rows
        column_edges = torch.arange(columns + 1, device=begin.device) * len_kv // columns
        overlap = torch.minimum(end[:, None], column_edges[1:]) - torch.maximum(begin[:, None], column_edges[:-1])
        total = torch.nn.functional.pad(overlap.clamp(min=0).cumsum(0), (0, 0, 1, 0))[row_edges].diff(dim=0)
        area = row_edges.diff()[:, None] * column_edges.diff()
        symbol = torch.where(total == 0, 0, torch.where(total == area, 2, 1)).tolist()
        # NOTE: two characters a cell: a character is about twice as high as it is wide.
        return "\n".join("".join("·▒█"[cell] * 2 for cell in line) for line in symbol)

    def __str__(self) -> str:
        if not all(map(has_values, self._lowered[2])):
            return repr(self)
        len_q, len_kv = self._natural_size()
        return f"{self!r}, {len_q} queries (down) x {len_kv} keys (across)\n{self.draw(len_q, len_kv)}"


@dataclass(frozen=True)
class Dense(Mask):
    """Every query sees every key. The same as ``mask=None``."""

    _lowered = (0, (), ())

    def to_dense(self, len_q: int, len_kv: int, device: torch.device | str | None = None) -> Tensor:
        return torch.ones(len_q, len_kv, dtype=torch.bool, device=device)

    def _rows(self, len_q: int, len_kv: int, device: torch.device) -> tuple[Tensor, Tensor]:
        begin = torch.zeros(len_q, dtype=torch.int64, device=device)
        return begin, torch.full_like(begin, len_kv)

    def _band(self) -> tuple[str | None, int, int, int] | None:
        return None, _UNBOUNDED, _UNBOUNDED, _UNBOUNDED


class _Band(Mask):
    """What the masks have in common whose rows are bands: query at p sees p - left <= j <= p + right, and of these
    either j < prefix or j <= p. The definition is csrc/mask/band.h's."""

    def _set_band(self, align: str, left: int, right: int, prefix: int) -> None:
        object.__setattr__(self, "_lowered", (3, (int(align == "top-left"), left, right, prefix), ()))

    def _band(self) -> tuple[str | None, int, int, int]:
        top_left, left, right, prefix = self._lowered[1]
        return _ALIGNMENTS[top_left], left, right, prefix

    def _positions(self, len_q: int, len_kv: int, device: torch.device) -> Tensor:
        return torch.arange(len_q, device=device) + (0 if self._band()[0] == "top-left" else len_kv - len_q)

    def _rows(self, len_q: int, len_kv: int, device: torch.device) -> tuple[Tensor, Tensor]:
        _, left, right, prefix = self._band()
        position = self._positions(len_q, len_kv, device)
        begin = (position - left).clamp(0, len_kv)
        end = torch.minimum(position + right, position.clamp(min=prefix - 1)) + 1
        return begin, torch.maximum(end.clamp(max=len_kv), begin)

    def _natural_size(self) -> tuple[int, int]:
        bounds = [x for x in self._band()[1:] if x != _UNBOUNDED]
        size = max(8, min(64, 2 * max(bounds, default=0)))
        return size, size

    def _call(self, *arguments: object) -> str:
        """The expression that makes this mask; the usual alignment is not said."""
        align = self._band()[0]
        said = [*map(str, arguments), *([] if align == _ALIGNMENTS[0] else [f"align={align!r}"])]
        return f"{type(self).__name__}({', '.join(said)})"


@dataclass(frozen=True, repr=False)
class Causal(_Band):
    """Query i sees the keys j <= p.

    ``align="bottom-right"`` (the default): p = i + len_kv - len_q, so the last query sees every key, and with more
    queries than keys the first ones see none. ``align="top-left"``: p = i, so the first query sees key 0 alone.
    """

    align: str = "bottom-right"

    def __post_init__(self) -> None:
        _check_align(self.align)
        object.__setattr__(self, "_lowered", (1, (int(self.align == "top-left"),), ()))

    def to_dense(self, len_q: int, len_kv: int, device: torch.device | str | None = None) -> Tensor:
        key = torch.arange(len_kv, device=device)
        return key <= self._positions(len_q, len_kv, key.device)[:, None]

    # NOTE: a band by its definition, but lowered to a kind of its own: a simpler trait.
    def _band(self) -> tuple[str | None, int, int, int]:
        return self.align, _UNBOUNDED, 0, _UNBOUNDED

    def __repr__(self) -> str:
        return self._call()


@dataclass(frozen=True, repr=False)
class SlidingWindow(_Band):
    """Query i at position p sees the keys p - left <= j <= p + right.

    left, right  ints >= 0, or ``math.inf`` for no bound. ``right=None``: the same as ``left``; 0 is a causal window.
                 A window of W keys that counts the query's own, as Hugging Face does, is ``SlidingWindow(W - 1, 0)``.
    keep_first   0. (The always-visible first keys of other values are not supported yet.)
    align        "bottom-right" (the default): p = i + len_kv - len_q; "top-left": p = i.

    Raises TypeError for a bound that is no int, ValueError for a negative one, NotImplementedError for keep_first > 0.
    """

    left: int | float
    right: int | float | None = None
    keep_first: int = 0
    align: str = "bottom-right"

    def __post_init__(self) -> None:
        _check_align(self.align)
        left = _as_bound("left", self.left)
        right = left if self.right is None else _as_bound("right", self.right)
        if _as_bound("keep_first", self.keep_first, infinite=False):
            raise NotImplementedError(f"keep_first: {self.keep_first} is not supported yet; 0 is")
        # Equal windows compare equal however they were written.
        for name, bound in (("left", left), ("right", right)):
            object.__setattr__(self, name, math.inf if bound == _UNBOUNDED else bound)
        self._set_band(self.align, left, right, _UNBOUNDED)

    def to_dense(self, len_q: int, len_kv: int, device: torch.device | str | None = None) -> Tensor:
        key = torch.arange(len_kv, device=device)
        distance = key - self._positions(len_q, len_kv, key.device)[:, None]
        return (distance >= -self.left) & (distance <= self.right)

    def __repr__(self) -> str:
        return self._call(self.left, self.right)


@dataclass(frozen=True, repr=False)
class PrefixLM(_Band):
    """Query i at position p sees the keys j < prefix, and those j <= p.

    prefix  an int >= 0, the same for every batch: 0 is causal, len_kv or more dense. (One prefix per batch, as a
            tensor, is not supported yet.)
    align   "bottom-right" (the default): p = i + len_kv - len_q; "top-left": p = i.

    Raises TypeError for a prefix that is no int, ValueError for a negative one, NotImplementedError for a tensor.
    """

    prefix: int
    align: str = "bottom-right"

    def __post_init__(self) -> None:
        _check_align(self.align)
        if isinstance(self.prefix, Tensor):
            raise NotImplementedError("prefix: a tensor, one prefix per batch, is not supported yet; pass an int")
        self._set_band(self.align, _UNBOUNDED, _UNBOUNDED, _as_bound("prefix", self.prefix, infinite=False))

    def to_dense(self, len_q: int, len_kv: int, device: torch.device | str | None = None) -> Tensor:
        key = torch.arange(len_kv, device=device)
        return (key < self.prefix) | (key <= self._positions(len_q, len_kv, key.device)[:, None])

    def __repr__(self) -> str:
        return self._call(self.prefix)


@dataclass(frozen=True, repr=False)
class Intersection(_Band):
    """What ``a & b`` makes: the keys that all of its masks allow. Still one interval a row, and one kernel."""

    masks: tuple[Mask, ...]

    def __post_init__(self) -> None:
        bands = [mask._band() for mask in self.masks]
        if not bands or None in bands:
            named = next(
                (type(m).__name__ for m, band in zip(self.masks, bands, strict=True) if band is None), "no mask"
            )
            raise NotImplementedError(
                f"mask: & with {named} is not supported yet; Dense, Causal, SlidingWindow and PrefixLM are"
            )
        alignments = {band[0] for band in bands} - {None}
        if len(alignments) > 1:
            raise NotImplementedError(
                "mask: & of a bottom-right and a top-left mask is not supported yet; align both alike"
            )
        align = alignments.pop() if alignments else _ALIGNMENTS[0]
        self._set_band(align, *(min(band[n] for band in bands) for n in (1, 2, 3)))

    def to_dense(self, len_q: int, len_kv: int, device: torch.device | str | None = None) -> Tensor:
        dense = [mask.to_dense(len_q, len_kv, device) for mask in self.masks]
        return torch.stack(dense).all(0)

    def __repr__(self) -> str:
        return " & ".join(map(repr, self.masks))


def lifted_band(top_left: int, left: int, right: int, prefix: int) -> Mask:
    """The mask that was lowered to these numbers, as windows and prefix of one alignment."""
    band = object.__new__(_Band)
    band._set_band(_ALIGNMENTS[top_left], left, right, prefix)
    return band


def _intersect(a: Mask, b: Mask) -> Mask:
    parts = [part for mask in (a, b) for part in (mask.masks if isinstance(mask, Intersection) else (mask,))]
    parts = [part for part in parts if not isinstance(part, Dense)]
    if len(parts) < 2:
        return parts[0] if parts else Dense()
    return Intersection(tuple(parts))


@dataclass(frozen=True, eq=False, repr=False)
class Document(Mask):
    """Sequences packed one after another: query i and key j must lie in the same document.

    offsets     int32 (n + 1,), shared by the batch, or (B, n + 1): document d is [offsets[d], offsets[d + 1]). Starts
                at 0 and never decreases; empty documents are fine. A sequence of Python ints makes a CPU tensor.
    kv_offsets  the documents' places among the keys, the same shape; None: the same as ``offsets``.
    causal      within its document, query i sees no key past its own position, aligned at the document's end.

    Rows past the last offset belong to no document: they see nothing, and their output is 0. The tensors are held, not
    copied: every call reads them again, so a captured CUDA graph replays with the offsets then in place.

    Values on the CPU are checked here. Values on a device are not read; the kernels clamp them, and
    ``flashmsa.check(True)`` validates them on every call.

    Raises TypeError for a dtype other than int32, ValueError for a wrong shape or value.
    """

    offsets: Tensor
    kv_offsets: Tensor | None = None
    causal: bool = False

    def __post_init__(self) -> None:
        offsets = _as_offsets("offsets", self.offsets)
        kv_offsets = None if self.kv_offsets is None else _as_offsets("kv_offsets", self.kv_offsets)
        if kv_offsets is not None:
            if kv_offsets.shape != offsets.shape:
                raise ValueError(
                    f"kv_offsets: shape {tuple(kv_offsets.shape)} does not match offsets' {tuple(offsets.shape)}; both "
                    "hold the same documents, in one shape"
                )
            if kv_offsets.device != offsets.device:
                raise ValueError(f"kv_offsets: on {kv_offsets.device}, offsets on {offsets.device}; both on one device")
        self._set(offsets, kv_offsets, bool(self.causal))

    def _set(self, offsets: Tensor, kv_offsets: Tensor | None, causal: bool) -> None:
        for name, value in (
            ("offsets", offsets),
            ("kv_offsets", kv_offsets),
            ("causal", causal),
            ("_lowered", (2, (int(causal),), (offsets, offsets if kv_offsets is None else kv_offsets))),
        ):
            object.__setattr__(self, name, value)

    @classmethod
    def from_ids(cls, ids: Tensor, causal: bool = False) -> Document:
        """The mask of a document id per token: int (S,), or (B, S); tokens of equal ids see each other.

        The tokens of a document must be neighbours. Negative ids mark padding, allowed at the end of a row only: those
        tokens see nothing. Waits for the ids' device once.

        Raises NotImplementedError where an id comes back after another one, ValueError for padding inside a row.
        """
        if not isinstance(ids, Tensor):
            ids = torch.as_tensor(ids)
        if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
            raise TypeError(f"ids: dtype {ids.dtype}; must be an integer type")
        if ids.dim() not in (1, 2):
            raise ValueError(f"ids: shape {tuple(ids.shape)}; must be (S,) or (B, S)")
        rows = (ids[None] if ids.dim() == 1 else ids).detach().cpu()
        cuts = [_cuts_of(row, b) for b, row in enumerate(rows.unbind())]
        # Rows with fewer documents are filled up with empty ones at their end.
        most = max((len(row) for row in cuts), default=1)
        filled = [row + row[-1:] * (most - len(row)) for row in cuts]
        offsets = torch.tensor(filled, dtype=torch.int32).reshape(*ids.shape[:-1], most)
        return cls(offsets.to(ids.device), causal=causal)

    @classmethod
    def from_cu_seqlens(
        cls, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None, causal: bool = False
    ) -> Document:
        """The mask of flash-attn's cumulative lengths, (n + 1,) int32; int64 ones are converted (a copy).

        Use it with the packed tensors as one sequence: q (1, H, T, D).
        """
        return cls(_narrow("cu_seqlens_q", cu_seqlens_q), _narrow("cu_seqlens_k", cu_seqlens_k), causal=causal)

    def to(self, device: torch.device | str) -> Document:
        """This mask with its offsets on ``device``; itself where they lie there. Values are not checked again."""
        offsets = self.offsets.to(device)
        if offsets is self.offsets:
            return self
        moved = object.__new__(Document)
        moved._set(offsets, None if self.kv_offsets is None else self.kv_offsets.to(device), self.causal)
        return moved

    def to_dense(self, len_q: int, len_kv: int, device: torch.device | str | None = None) -> Tensor:
        q_offsets, kv_offsets = (x.long().reshape(-1, x.shape[-1]) for x in self._lowered[2])
        i = torch.arange(len_q, device=q_offsets.device)
        j = torch.arange(len_kv, device=q_offsets.device)
        documents = q_offsets.shape[1] - 1
        # The document of a token is the number of documents that end at or before it; (B, len).
        q_document = (q_offsets[:, None, 1:] <= i[:, None]).sum(-1)
        kv_document = (kv_offsets[:, None, 1:] <= j[:, None]).sum(-1)
        allowed = (q_document[:, :, None] == kv_document[:, None, :]) & (q_document < documents)[:, :, None]
        if self.causal:
            # Distances to the document's end: a key may not be nearer to its end than the query is to its own.
            q_left = torch.take_along_dim(q_offsets, (q_document + 1).clamp(max=documents), 1) - i
            kv_left = torch.take_along_dim(kv_offsets, (kv_document + 1).clamp(max=documents), 1) - j
            allowed &= kv_left[:, None, :] >= q_left[:, :, None]
        dense = allowed[:, None] if self.offsets.dim() == 2 else allowed[0]
        return dense if device is None else dense.to(device)

    def _rows(self, len_q: int, len_kv: int, device: torch.device) -> tuple[Tensor, Tensor]:
        # The same steps as csrc/mask/document.h, clamps included: offsets on a device may hold anything.
        q_offsets, kv_offsets = (x.reshape(-1, x.shape[-1]).to(device, torch.int64) for x in self._lowered[2])
        documents = q_offsets.shape[1] - 1
        row = torch.arange(len_q, device=device).expand(q_offsets.shape[0], len_q).contiguous()
        document = torch.searchsorted(q_offsets[:, 1:].contiguous(), row, right=True)
        past = document >= documents
        following = (document + 1).clamp(max=documents)
        begin = torch.take_along_dim(kv_offsets, document, 1).clamp(0, len_kv)
        stop = torch.take_along_dim(kv_offsets, following, 1)
        end = torch.maximum(stop.clamp(0, len_kv), begin)
        if self.causal:
            visible = row - torch.take_along_dim(q_offsets, following, 1) + stop + 1
            end = torch.minimum(torch.maximum(visible, begin), end)
        end = torch.where(past, begin, end)
        return (begin, end) if self.offsets.dim() == 2 else (begin[0], end[0])

    def _check_values(self, len_q: int, len_kv: int) -> None:
        for name, offsets, length, whose in (
            ("offsets", self.offsets, len_q, "q"),
            ("kv_offsets" if self.kv_offsets is not None else "offsets", self._lowered[2][1], len_kv, "k"),
        ):
            values = offsets.detach().cpu()
            _check_offset_values(name, values)
            last = int(values[..., -1].max())
            if last > length:
                raise ValueError(f"{name}: the last value {last} lies past {whose}'s length {length}")

    def _natural_size(self) -> tuple[int, int]:
        q_offsets, kv_offsets = self._lowered[2]
        return int(q_offsets.reshape(-1, q_offsets.shape[-1])[0, -1]), int(
            kv_offsets.reshape(-1, kv_offsets.shape[-1])[0, -1]
        )

    def __eq__(self, other: object) -> bool:
        """Equal documents, causal and device. Reads the offsets, so it waits for their device."""
        if not isinstance(other, Document):
            return NotImplemented
        mine, theirs = self._lowered, other._lowered
        return mine[1] == theirs[1] and all(
            a is b or (a.device == b.device and torch.equal(a, b)) for a, b in zip(mine[2], theirs[2], strict=True)
        )

    __hash__ = None  # type: ignore[assignment]  # it holds tensors, whose values may change

    def __repr__(self) -> str:
        fields = [_describe(self.offsets)]
        if self.kv_offsets is not None:
            fields.append(f"kv_offsets={_describe(self.kv_offsets)}")
        if self.causal:
            fields.append("causal=True")
        return f"Document({', '.join(fields)})"


def lower(mask: Mask | None) -> Lowered:
    """``mask`` as the native operator takes it; None is ``Dense()``."""
    return Dense._lowered if mask is None else mask._lower()


def has_values(x: Tensor) -> bool:
    """Whether there is anything to read: not on the meta device, nor in a tensor that stands for one in a trace."""
    return x.device.type != "meta" and type(x).__name__ != "FakeTensor"


def _check_align(align: Any) -> None:
    if align not in _ALIGNMENTS:
        raise ValueError(f"align: {align!r} is not an alignment; one of {', '.join(map(repr, _ALIGNMENTS))}")


def _as_bound(name: str, value: Any, infinite: bool = True) -> int:
    """A number of keys; no bound at all as the largest int32."""
    allowed = "an int >= 0, or math.inf" if infinite else "an int >= 0"
    if isinstance(value, float) and infinite and value == math.inf:
        return _UNBOUNDED
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: {value!r} is a {type(value).__name__}; must be {allowed}")
    if value < 0:
        raise ValueError(f"{name}: {value} is negative; must be {allowed}")
    # Lengths are below the largest int32, so a larger bound bounds nothing.
    return min(value, _UNBOUNDED)


def _as_offsets(name: str, value: Any) -> Tensor:
    """``value`` as an int32 tensor, its values checked where they lie on the CPU."""
    if not isinstance(value, Tensor):
        if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
            raise TypeError(f"{name}: {type(value).__name__}; must be an int32 tensor, or a sequence of ints")
        value = _from_ints(name, value)
    if value.dtype != torch.int32:
        raise TypeError(f"{name}: dtype {value.dtype}; must be torch.int32, as by {name}.to(torch.int32)")
    if value.dim() not in (1, 2) or value.shape[-1] == 0:
        raise ValueError(f"{name}: shape {tuple(value.shape)}; must be (n + 1,) or (B, n + 1) for n documents")
    # NOTE: while a graph is traced there are no values to look at.
    if value.device.type == "cpu" and not torch.compiler.is_compiling() and has_values(value):
        _check_offset_values(name, value)
    return value


def _from_ints(name: str, values: Sequence[Any]) -> Tensor:
    for index, x in enumerate(values):
        if isinstance(x, bool) or not isinstance(x, int):
            raise TypeError(f"{name}[{index}]: {x!r} is a {type(x).__name__}; must be an int")
        if not -_INT32_MAX <= x <= _INT32_MAX:
            raise ValueError(f"{name}[{index}]: {x} does not fit into int32; at most {_INT32_MAX}")
    return torch.tensor(list(values), dtype=torch.int32)


def _check_offset_values(name: str, values: Tensor) -> None:
    """Raises ValueError where CPU offsets do not start at 0 or decrease."""
    rows = values.reshape(-1, values.shape[-1])

    def place(b: int, index: int) -> str:
        return f"{name}[{index}]" if values.dim() == 1 else f"{name}[{b}, {index}]"

    bad_start = rows[:, 0].nonzero()
    if bad_start.numel():
        b = int(bad_start[0])
        raise ValueError(f"{place(b, 0)}: {int(rows[b, 0])}; the first offset must be 0")
    bad = (rows[:, 1:] < rows[:, :-1]).nonzero()
    if bad.numel():
        b, index = bad[0].tolist()
        raise ValueError(
            f"{place(b, index + 1)}: {int(rows[b, index + 1])} is below the {int(rows[b, index])} before it; offsets "
            "must never decrease"
        )


def _cuts_of(ids: Tensor, batch: int) -> list[int]:
    """Where documents begin in one row of ids, and where the last one ends."""
    padding = ids < 0
    length = int((~padding).sum())
    inside = padding[:length].nonzero()
    if inside.numel():
        index = int(inside[0])
        raise ValueError(
            f"ids: {int(ids[index])} (padding) at index {index} of row {batch} stands before document ids; "
            "padding may stand at the end of a row only"
        )
    ids = ids[:length]
    begins = [0, *((ids[1:] != ids[:-1]).nonzero().flatten() + 1).tolist()] if length else []
    seen: dict[int, int] = {}
    for index in begins:
        document = int(ids[index])
        if document in seen:
            raise NotImplementedError(
                f"ids: {document} at index {index} of row {batch} comes back after another document (first at "
                f"{seen[document]}); a document's tokens must be neighbours: sort the tokens by document first"
            )
        seen[document] = index
    return [*begins, length]


def _narrow(name: str, offsets: Tensor | None) -> Tensor | None:
    if not isinstance(offsets, Tensor) or offsets.dtype != torch.int64:
        return offsets
    if offsets.device.type == "cpu" and offsets.numel() and int(offsets.max()) > _INT32_MAX:
        raise ValueError(f"{name}: {int(offsets.max())} does not fit into int32; at most {_INT32_MAX}")
    return offsets.to(torch.int32)


def _describe(offsets: Tensor) -> str:
    """Short, and without waiting for a device."""
    if offsets.device.type == "cpu" and has_values(offsets) and offsets.numel() <= 16:
        return str(offsets.tolist())
    return f"<int32 {tuple(offsets.shape)} on {offsets.device}>"
