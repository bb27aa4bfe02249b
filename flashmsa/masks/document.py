"""Document: sequences packed one after another; and what people already hold that says the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .bands import IntervalMask
from .base import DOCUMENT, INT32_MAX, Interval, Mask, as_int, describe, on_cpu, same_tensors, set_fields
from .columns import from_columns
from .hash import HashBucket


@dataclass(frozen=True, eq=False, repr=False)
class Document(IntervalMask):
    """Sequences packed one after another: query i and key j must lie in the same document.

    offsets     int32 (n + 1,), shared by the batch, or (B, n + 1): document d is [offsets[d], offsets[d + 1]). Starts
                at 0 and never decreases; empty documents are fine. A sequence of Python ints makes a tensor on torch's
                default device, the CPU unless it was set.
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
        lowered = (DOCUMENT, (int(causal),), (offsets, offsets if kv_offsets is None else kv_offsets))
        set_fields(self, offsets=offsets, kv_offsets=kv_offsets, causal=causal, _lowered=lowered)

    @classmethod
    def from_ids(cls, ids: Tensor, causal: bool = False) -> Document | HashBucket:
        """The mask of a document id per token: int (S,), or (B, S); tokens of equal ids see each other.

        Negative ids mark padding: those tokens see nothing, and nothing sees them. Where the tokens of every document
        are neighbours and padding stands at the end of a row, as in packed sequences, the result is a Document. Where
        an id comes back after another one, or padding stands before an id, the tokens are grouped as HashBucket does,
        and the result is a HashBucket (causal by the tokens' places in the whole row). Waits for the ids' device once.

        Raises TypeError for ids that are no integers, ValueError for a wrong shape.
        """
        if not isinstance(ids, Tensor):
            ids = torch.as_tensor(ids)
        if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
            raise TypeError(f"ids: dtype {ids.dtype}; must be an integer type")
        if ids.dim() not in (1, 2):
            raise ValueError(f"ids: shape {tuple(ids.shape)}; must be (S,) or (B, S)")
        rows = (ids[None] if ids.dim() == 1 else ids).detach().cpu()
        cuts = [_cuts_of(row) for row in rows.unbind()]
        if None in cuts:
            return _grouped(rows, causal).to(ids.device)
        # Rows with fewer documents are filled up with empty ones at their end.
        most = max((len(row) for row in cuts), default=1)
        filled = [row + row[-1:] * (most - len(row)) for row in cuts]
        offsets = torch.tensor(filled, dtype=torch.int32, device="cpu").reshape(*ids.shape[:-1], most)
        return cls(offsets.to(ids.device), causal=causal)

    @classmethod
    def from_cu_seqlens(
        cls, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None, causal: bool = False
    ) -> Document:
        """The mask of flash-attn's cumulative lengths, (n + 1,) int32; int64 ones are converted (a copy).

        Use it with the packed tensors as one sequence: q (1, H, T, D).
        """
        return cls(_narrow("cu_seqlens_q", cu_seqlens_q), _narrow("cu_seqlens_k", cu_seqlens_k), causal=causal)

    @classmethod
    def from_startend_row_indices(cls, startend_row_indices: Tensor, causal: bool = False) -> Mask:
        """The mask of FlashMask's ``startend_row_indices`` where it is an interval for each row.

        int32 (B, H or 1, S, n), for each key column the rows that do not see it (S queries, S keys): with ``causal``
        the rows above the diagonal and, n = 1, those from start on, n = 2, [start, end); without, n = 2, the rows
        from start on and those before end; n = 4, [start, end) and [start, end) again.

        The result is a Document, Causal, SlidingWindow or PrefixLM, or an ``&`` of them, and equals the columns pair by
        pair. Waits for the tensor's device once. Raises NotImplementedError where no such mask says the same,
        TypeError and ValueError for a wrong dtype or shape.

        The format is that of Wang et al., FlashMask: Efficient and Rich Mask Extension of FlashAttention (2024).
        """
        return from_columns(startend_row_indices, causal)

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

    def _interval(self) -> Interval:
        return Interval(offsets=self._lowered[2], causal=self.causal)

    def _check_shapes(self, batch: int, heads_q: int, heads_kv: int, len_q: int, len_kv: int) -> None:
        if self.offsets.dim() == 2 and self.offsets.shape[0] != batch:
            raise ValueError(f"mask: offsets for a batch of {self.offsets.shape[0]} do not match q's batch {batch}")

    def _check_values(self, len_q: int, len_kv: int) -> None:
        for name, offsets, length, whose in (
            ("offsets", self.offsets, len_q, "q"),
            ("kv_offsets" if self.kv_offsets is not None else "offsets", self._lowered[2][1], len_kv, "k"),
        ):
            values = offsets.detach().cpu()
            check_offset_values(name, values)
            last = int(values[..., -1].max()) if values.numel() else 0
            if last > length:
                raise ValueError(f"{name}: the last value {last} lies past {whose}'s length {length}")

    def _natural_size(self) -> tuple[int, int]:
        # Batch 0's; a batch of 0 has none.
        ends = (x[..., -1].flatten()[:1].tolist() for x in self._lowered[2])
        return tuple(end[0] if end else 0 for end in ends)

    def __eq__(self, other: object) -> bool:
        """Equal documents, causal and device. Reads the offsets, so it waits for their device."""
        if not isinstance(other, Document):
            return NotImplemented
        return self.causal == other.causal and same_tensors(self._lowered[2], other._lowered[2])

    __hash__ = None  # type: ignore[assignment]  # it holds tensors, whose values may change

    def __repr__(self) -> str:
        fields = [describe(self.offsets)]
        if self.kv_offsets is not None:
            fields.append(f"kv_offsets={describe(self.kv_offsets)}")
        if self.causal:
            fields.append("causal=True")
        return f"Document({', '.join(fields)})"


def _as_offsets(name: str, value: Any) -> Tensor:
    """``value`` as an int32 tensor, its values checked where they lie on the CPU."""
    listed = not isinstance(value, Tensor)
    if listed:
        if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
            raise TypeError(f"{name}: {type(value).__name__}; must be an int32 tensor, or a sequence of ints")
        value = _from_ints(name, value)
    if value.dtype != torch.int32:
        raise TypeError(f"{name}: dtype {value.dtype}; must be torch.int32, as by {name}.to(torch.int32)")
    if value.dim() not in (1, 2) or value.shape[-1] == 0:
        raise ValueError(f"{name}: shape {tuple(value.shape)}; must be (n + 1,) or (B, n + 1) for n documents")
    # NOTE: while a graph is traced there are no values to look at.
    if on_cpu(value):
        check_offset_values(name, value)
    return value.to(torch.empty(0).device) if listed else value


def _from_ints(name: str, values: Sequence[Any]) -> Tensor:
    numbers = [as_int(x) for x in values]
    for index, (x, number) in enumerate(zip(values, numbers, strict=True)):
        if number is None:
            raise TypeError(f"{name}[{index}]: {x!r} is a {type(x).__name__}; must be an int")
        if not -INT32_MAX <= number <= INT32_MAX:
            raise ValueError(f"{name}[{index}]: {number} does not fit into int32; at most {INT32_MAX}")
    return torch.tensor(numbers, dtype=torch.int32, device="cpu")


def check_offset_values(name: str, values: Tensor) -> None:
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


def _cuts_of(ids: Tensor) -> list[int] | None:
    """Where documents begin in one row of ids, and where the last one ends; None where they are not neighbours."""
    padding = ids < 0
    length = int((~padding).sum())
    ids = ids[:length]
    begins = [0, *((ids[1:] != ids[:-1]).nonzero().flatten() + 1).tolist()] if length else []
    if padding[:length].any() or ids[begins].unique().numel() < len(begins):
        return None
    return [*begins, length]


def _grouped(ids: Tensor, causal: bool) -> HashBucket:
    """The tokens of ids (B, S), on the CPU, by bucket: padding goes to one that no key, or no query, is in."""
    # Ids of any size by their rank, which fits into int32.
    rank = ids.unique(return_inverse=True)[1].to(torch.int32)[:, None]
    padding = (ids < 0)[:, None]
    return HashBucket(rank.masked_fill(padding, -2), rank.masked_fill(padding, -1), causal=causal)


def _narrow(name: str, offsets: Tensor | None) -> Tensor | None:
    if not isinstance(offsets, Tensor) or offsets.dtype != torch.int64:
        return offsets
    if offsets.device.type == "cpu" and offsets.numel():
        for bound in (int(offsets.min()), int(offsets.max())):
            if not -INT32_MAX <= bound <= INT32_MAX:
                raise ValueError(f"{name}: {bound} does not fit into int32; must be from 0 to {INT32_MAX}")
    return offsets.to(torch.int32)
