"""Which keys each query row sees, from the lowered form of a mask: for the composed backend, counts and drawings.

A row sees a run of keys [begin, end), and with always-visible first keys one run before it. Other kinds thin out that
run or reorder the keys: a dilated window sees those of its residue alone, a hash mask counts keys in bucket order, a
block-sparse mask looks up the cell of 128 x 128 that a pair lies in. Blocks of rows are written out one at a time, so
memory is O(len_kv * block).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._prepare import common_size
from .base import ALIGNMENTS, CAUSAL, COMPOSITE, DENSE, DILATED, DOCUMENT, HASH, UNBOUNDED, Band, row_blocks
from .intersection import (
    DOCUMENTS,
    KV_USED,
    LOCAL_PREFIX_BR,
    LOCAL_PREFIX_TL,
    PER_DOCUMENT,
    PREFIX_BR,
    PREFIX_TL,
    TOP_LEFT,
)

CELL = 128
# Rows that a count writes out at once.
_COUNTED_ROWS = 256


class Visible(NamedTuple):
    """Nothing but tensors, so that an autograd function can save it. B and H are 1 where all batches or heads agree."""

    position: Tensor  # int64 (len_q,) or (B, len_q): the row's place among the keys
    key: Tensor  # int64 (len_kv,): 0, 1, 2, ...
    begin: Tensor  # int64 (B, H, len_q): the run of keys [begin, end) that a row sees
    end: Tensor
    first_begin: Tensor | None = None  # (B, H, len_q): a run before that one
    first_end: Tensor | None = None
    rank: Tensor | None = None  # int64 (B, H, len_kv): the place of each key in the order in which runs are counted
    q_class: Tensor | None = None  # (len_q,), (len_kv,): only pairs of one class see each other
    kv_class: Tensor | None = None
    cells: Tensor | None = None  # int32 (B, H, cells of rows, cells of keys): the cell's detail, or -2 where not listed
    bits: Tensor | None = None  # int32 (tiles, 128, 4): the mixed cells pair by pair, where the mask has them so

    @property
    def planes(self) -> tuple[int, int]:
        """(B, H): the batches and heads that differ."""
        of_cells = (1, 1) if self.cells is None else self.cells.shape[:2]
        return tuple(map(common_size, self.begin.shape[:2], of_cells))

    def rows(self, rows: slice) -> Tensor:
        """(B, H, rows, len_kv) bool: may the row see the key?"""
        key = self.key if self.rank is None else self.rank[:, :, None]
        allowed = (key >= self.begin[..., rows, None]) & (key < self.end[..., rows, None])
        if self.first_begin is not None:
            allowed |= (key >= self.first_begin[..., rows, None]) & (key < self.first_end[..., rows, None])
        if self.q_class is not None:
            allowed &= self.q_class[rows, None] == self.kv_class
        return allowed if self.cells is None else allowed & self._cell_rows(rows)

    def _cell_rows(self, rows: slice) -> Tensor:
        """(B, H, rows, len_kv) bool: is the pair set in its cell?"""
        first, last = rows.start // CELL, -(-rows.stop // CELL)
        state = self.cells[:, :, first:last]
        if self.bits is not None:
            word = self.bits[state.clamp(min=0).long()]  # (B, H, cell rows, cells, 128, 4)
            shift = torch.arange(32, dtype=torch.int32, device=state.device)
            pairs = ((word[..., None] >> shift) & 1).bool().flatten(-2)
            pairs = torch.where((state >= 0)[..., None, None], pairs, (state == -1)[..., None, None])
        else:
            code = torch.where(state >= 0, state, torch.where(state == -1, 15, 0))
            shift = torch.arange(4, dtype=torch.int32, device=state.device).view(2, 2)
            halves = ((code[..., None, None] >> shift) & 1).bool()
            pairs = halves.repeat_interleave(CELL // 2, -2).repeat_interleave(CELL // 2, -1)
        # Cell by cell to row by row.
        pairs = pairs.transpose(-3, -2).flatten(-2).flatten(-3, -2)
        top = rows.start - first * CELL
        return pairs[:, :, top : top + rows.stop - rows.start, : self.key.shape[0]]

    def count(self) -> tuple[int, int]:
        """(allowed pairs, all pairs), over the batches and heads that differ."""
        len_q, len_kv = self.begin.shape[-1], self.key.shape[0]
        if self.q_class is None and self.cells is None:
            return sum(int((end - begin).sum()) for begin, end in self._runs()), self.begin.numel() * len_kv
        batch, heads = self.planes
        pairs = batch * heads * len_q * len_kv
        return sum(int(self.rows(rows).sum()) for rows in row_blocks(0, len_q, _COUNTED_ROWS)), pairs

    def count_columns(self, top: int, bottom: int, edges: Sequence[int]) -> list[int]:
        """The allowed pairs of batch 0, head 0 in the rows [top, bottom), for each [edges[c], edges[c + 1])."""
        cuts = torch.tensor(edges, device=self.begin.device)
        counts = torch.zeros(len(edges) - 1, dtype=torch.int64, device=self.begin.device)
        if self.q_class is None and self.cells is None and self.rank is None:
            for begin, end in self._runs():
                begin, end = begin[0, 0, top:bottom, None], end[0, 0, top:bottom, None]
                inside = torch.minimum(end, cuts[1:]) - torch.maximum(begin, cuts[:-1])
                counts += inside.clamp(min=0).sum(0)
            return counts.tolist()
        one = Visible(*(x if name == "bits" or x is None or x.dim() < 3 else x[:1, :1] for name, x in self._named()))
        for rows in row_blocks(top, bottom, _COUNTED_ROWS):
            before = torch.nn.functional.pad(one.rows(rows)[0, 0].sum(0).cumsum(0), (1, 0))
            counts += before[cuts].diff()
        return counts.tolist()

    def _named(self) -> zip[tuple[str, Tensor | None]]:
        return zip(self._fields, self, strict=True)

    def _runs(self) -> list[tuple[Tensor, Tensor]]:
        """They do not overlap."""
        first = [] if self.first_begin is None else [(self.first_begin, self.first_end)]
        return [*first, (self.begin, self.end)]


def visible(
    kind: int, ints: Sequence[int], tensors: Sequence[Tensor], len_q: int, len_kv: int, device: torch.device
) -> Visible:
    """The rows of the mask that was lowered to these, unchecked: its tensors may hold anything by now."""
    key = torch.arange(len_kv, device=device)
    tensors = [x.to(device) for x in tensors]
    if kind == DENSE:
        return _composite(Band(), key, len_q)
    if kind == CAUSAL:
        return _composite(Band.aligned(ALIGNMENTS[ints[0]], right=0), key, len_q, flags=TOP_LEFT * ints[0])
    if kind == DOCUMENT:
        local = Band(right_br=0) if ints[0] else Band()
        return _composite(Band(), key, len_q, local, DOCUMENTS, tensors)
    if kind == COMPOSITE:
        return _composite(Band(*ints[:9]), key, len_q, Band(*ints[9:18]), ints[18], tensors)
    if kind == DILATED:
        return _dilated(ints, key, len_q)
    if kind == HASH:
        return _hash(tensors, key, len_q)
    *composite_tensors, row_start, whole_count, cells, detail, tiles = tensors
    found = _composite(Band(*ints[:9]), key, len_q, Band(*ints[9:18]), ints[18], composite_tensors)
    state = cell_states(row_start, whole_count, cells, detail, -(-ints[21] * ints[23] // CELL))
    return found._replace(cells=state, bits=tiles if tiles.shape[0] else None)


def _composite(
    band: Band,
    key: Tensor,
    len_q: int,
    local: Band = Band(),  # noqa: B008
    flags: int = 0,
    tensors: Sequence[Tensor] = (),
) -> Visible:
    len_kv, device = key.shape[0], key.device
    row = torch.arange(len_q, device=device)[None]
    rest = iter(tensors)
    offsets = (next(rest), next(rest)) if flags & DOCUMENTS else None
    kv_used = next(rest) if flags & KV_USED else None
    prefixes = [next(rest) if flags & bit else None for bit in (PREFIX_BR, PREFIX_TL, LOCAL_PREFIX_BR, LOCAL_PREFIX_TL)]
    world = [number if x is None else x.long()[:, None] for x, number in zip(prefixes[:2], band[4:6], strict=True)]
    p_br, p_tl = row + (len_kv - len_q), row
    position = p_tl if flags & TOP_LEFT else p_br
    origin = torch.zeros_like(row)
    runs = _runs(band, p_br, p_tl, world, origin, origin, origin + len_kv)
    if offsets is not None:
        document, q_begin, q_end, begin, stop = _documents(row, *offsets, kv_used)
        own = [
            # Without documents all rows lie past the last one, and there is no prefix to read.
            number if x is None or x.shape[0] == 0 else x.long()[document]
            for x, number in zip(prefixes[2:], local[4:6], strict=True)
        ]
        low = begin.clamp(0, len_kv)
        high = torch.maximum(stop.clamp(0, len_kv), low)
        p_br, p_tl = row - q_end + stop, row - q_begin + begin
        if flags & PER_DOCUMENT:
            position = p_tl if flags & TOP_LEFT else p_br
        runs = _both(runs, _runs(local, p_br, p_tl, own, begin, low, high))
    begin, end, *first = runs
    if first:
        # What both runs hold counts once.
        first = [first[0], torch.maximum(torch.minimum(first[1], begin), first[0])]
    rows = torch.broadcast_tensors(begin, torch.maximum(end, begin), *first)
    rows = [x.unsqueeze(1) for x in rows]
    return Visible(position[0] if position.shape[0] == 1 else position, key, *rows)


def _documents(
    row: Tensor, q_offsets: Tensor, kv_offsets: Tensor, kv_used: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """For each row (B, len_q) its document, and where that begins and ends among queries and keys.

    The same steps as csrc/mask/document.h: offsets on a device may hold anything. A row past the last document gets an
    empty run.
    """
    q_offsets, kv_offsets = (x.reshape(-1, x.shape[-1]).long() for x in (q_offsets, kv_offsets))
    documents = q_offsets.shape[1] - 1
    row = row.expand(q_offsets.shape[0], -1).contiguous()
    document = torch.searchsorted(q_offsets[:, 1:].contiguous(), row, right=True)
    following = (document + 1).clamp(max=documents)
    q_begin, q_end = (torch.take_along_dim(q_offsets, x, 1) for x in (document, following))
    begin, stop = (torch.take_along_dim(kv_offsets, x, 1) for x in (document, following))
    within = document.clamp(max=max(0, documents - 1))
    if kv_used is not None and documents:
        stop = torch.minimum(begin + kv_used.long()[within].clamp(min=0), stop)
    return within, q_begin, q_end, begin, stop


def _runs(
    band: Band,
    p_br: Tensor,
    p_tl: Tensor,
    prefix: Sequence[int | Tensor],
    origin: Tensor,
    low: Tensor,
    high: Tensor,
) -> list[Tensor]:
    """[begin, end) of each row within [low, high), and with first keys a second pair; the band counts from origin."""
    begin = torch.maximum(p_br - band.left_br, p_tl - band.left_tl)
    end = torch.minimum(p_br + band.right_br, p_tl + band.right_tl)
    for p, keys in zip((p_br, p_tl), prefix, strict=True):
        end = torch.minimum(end, torch.maximum(p, origin + (keys - 1)))
    end = end + 1
    pairs = [begin, end]
    if band.keep_first:
        outer = torch.maximum(p_br - band.outer_br, p_tl - band.outer_tl)
        pairs += [outer, torch.minimum(end, origin + band.keep_first)]
    return [torch.minimum(torch.maximum(x, low), high) for x in pairs]


def _both(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
    """The runs of a inside those of b. One of them alone has first keys: an `&` gives them to the whole, a sequence's
    mask to each document."""
    many, one = (a, b) if len(a) > 2 else (b, a)
    clipped = []
    for begin, end in (many[n : n + 2] for n in range(0, len(many), 2)):
        begin, end = torch.maximum(begin, one[0]), torch.minimum(end, one[1])
        clipped += [begin, torch.maximum(end, begin)]
    return clipped


def _dilated(ints: Sequence[int], key: Tensor, len_q: int) -> Visible:
    top_left, left, right, dilation = ints
    # NOTE: at most 2^31 steps of 2^31 keys: 64 bits hold them.
    reach = [UNBOUNDED if steps == UNBOUNDED else min(steps * dilation, UNBOUNDED) for steps in (left, right)]
    found = _composite(Band.aligned(ALIGNMENTS[top_left], *reach), key, len_q, flags=TOP_LEFT * top_left)
    return found._replace(q_class=found.position % dilation, kv_class=key % dilation)


def _hash(tensors: Sequence[Tensor], key: Tensor, len_q: int) -> Visible:
    """Rows and keys back in their own order; a run is counted in the order of the buckets."""
    q_order, kv_order, *ends = (x.long() for x in tensors)
    # Rows of heads that share an order may still see other keys, and the other way round.
    shape = torch.broadcast_shapes(q_order.shape[:2], ends[0].shape[:2])
    q_order = q_order.expand(*shape, -1)
    begin, end = (torch.empty_like(q_order).scatter_(-1, q_order, x.expand_as(q_order)) for x in ends)
    place = key.expand_as(kv_order)
    rank = torch.empty_like(kv_order).scatter_(-1, kv_order, place)
    if rank.shape[1] not in (1, shape[1]):
        rank = rank.repeat_interleave(shape[1] // rank.shape[1], 1)
    position = torch.arange(len_q, device=key.device) + (key.shape[0] - len_q)
    return Visible(position, key, begin, end, rank=rank)


def cell_states(row_start: Tensor, whole_count: Tensor, cells: Tensor, detail: Tensor, columns: int) -> Tensor:
    """The list of cells as a table, int32 (B, H, cells of rows, cells of keys): the detail of each, or -2."""
    batch, heads, rows = whole_count.shape
    states = torch.full((batch * heads * rows * columns + 1,), -2, dtype=torch.int32, device=cells.device)
    starts = row_start[:, :, :-1].flatten().contiguous()
    if starts.numel() and columns:
        entry = torch.arange(cells.shape[0], dtype=starts.dtype, device=cells.device)
        row = torch.searchsorted(starts, entry, right=True) - 1
        listed = entry < row_start[-1, -1, -1]
        # NOTE: entries past the list's end go to one more place, which is cut off: no count is read on the host.
        place = torch.where(listed, row * columns + cells.clamp(0, columns - 1), states.shape[0] - 1)
        states.scatter_(0, place, detail)
    return states[:-1].view(batch, heads, rows, columns)
