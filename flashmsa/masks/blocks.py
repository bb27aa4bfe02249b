"""BlockSparse: a table of blocks, each seen or not; from FlexAttention's block masks and dense masks as well."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import _prepare
from .base import Interval, Lowered, Mask, check_tensor, on_cpu, same_tensors, set_fields
from .intersection import lower_blocks, lower_composite
from .visible import CELL, visible

# Of the multiples of 64 the largest that a length can have.
_MAX_BLOCK = 2**31 - 2**16 - 64
_SHAPE = "(B or 1, Hq or 1, ceil(Sq / block_q), ceil(Sk / block_kv))"


@dataclass(frozen=True, eq=False, repr=False, init=False)
class BlockSparse(Mask):
    """Query i sees key j where the block that the pair lies in is set.

    blocks      bool (B or 1, Hq or 1, ceil(Sq / block_q), ceil(Sk / block_kv))
    block_size  (block_q, block_kv), each a multiple of 64
    capacity    how many cells of 128 x 128 an ``update`` may set, over all batches and heads; None: as many as are set
                now, which are counted, once, and waited for

    A snapshot: a list of the set cells is made here, on the blocks' device, and later changes of the tensor do not
    show. ``update`` reads a new one. It goes (``&``) with interval masks: Causal, SlidingWindow, PrefixLM, Document.

    Raises TypeError for a dtype other than bool, ValueError for a wrong shape or block size.
    """

    block_size: tuple[int, int]
    shape: tuple[int, int, int, int]  # of the blocks
    capacity: int | None = field(default=None)

    def __init__(self, blocks: Tensor, block_size: tuple[int, int] = (CELL, CELL), *, capacity: int | None = None):
        check_tensor("blocks", blocks, torch.bool, (4,), _SHAPE)
        block_size = _as_block_size(block_size)
        if capacity is not None and (isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1):
            error = ValueError if type(capacity) is int else TypeError
            raise error(f"capacity: {capacity!r}; must be an int >= 1, or None")
        set_fields(self, block_size=block_size, shape=tuple(blocks.shape), capacity=capacity, _lengths=None)
        listed = self._list(blocks, -1 if capacity is None else capacity)
        self._set(listed)
        if capacity is not None:
            self._note_cells(blocks)

    def _set(self, listed: tuple[Tensor, ...]) -> None:
        set_fields(self, _cells=tuple(listed), _used=None)
        set_fields(self, _lowered=self._lower_with(*lower_composite(Interval())))

    def _lower_with(self, ints: tuple[int, ...], tensors: tuple[Tensor, ...]) -> Lowered:
        """As the native operator takes it, in an intersection with this composite."""
        return lower_blocks(ints, tensors, (*self.block_size, *self.shape[2:]), self._cells)

    def _list(self, blocks: Tensor, capacity: int) -> tuple[Tensor, ...]:
        lengths = (self.shape[2] * self.block_size[0], self.shape[3] * self.block_size[1])
        return _prepare.block_list(blocks.detach(), *self.block_size, *lengths, None, capacity, 0)

    def _note_cells(self, blocks: Tensor) -> None:
        """Remembers on the device how many cells the blocks set, for checked mode; raises on the CPU."""
        halves = blocks
        for dim, size in zip((2, 3), self.block_size, strict=True):
            halves = halves.repeat_interleave(size // 64, dim)
        padded = torch.nn.functional.pad(halves, (0, halves.shape[3] % 2, 0, halves.shape[2] % 2))
        set_fields(self, _used=padded.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).any(5).any(3).sum())
        if on_cpu(blocks):
            self._check_values(0, 0)

    def update(self, blocks: Tensor) -> None:
        """Takes new blocks of the same shape, dtype and device, in place.

        With a ``capacity`` it waits for nothing, so a CUDA graph can capture it; cells beyond the capacity are left
        out, which is an error on the CPU and in checked mode (``flashmsa.check``). Without one the new cells are
        counted, and more of them than the mask was made with are an error.

        Raises TypeError or ValueError for other blocks, NotImplementedError for a mask with dense bits, RuntimeError
        inside a capture without a capacity.
        """
        check_tensor("blocks", blocks, torch.bool, (4,), _SHAPE)
        if tuple(blocks.shape) != self.shape or blocks.device != self.device:
            raise ValueError(
                f"blocks: shape {tuple(blocks.shape)} on {blocks.device}; must be {self.shape} on {self.device}, as "
                "when the mask was made"
            )
        if self._cells[4].shape[0]:
            raise NotImplementedError("update: a mask with dense bits cannot be updated; make another one")
        entries = self._cells[2].shape[0]
        if self.capacity is None:
            if blocks.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "update: counts the blocks, which a capture cannot wait for; make the mask with a capacity, as by "
                    f"BlockSparse(blocks, {self.block_size}, capacity={entries})"
                )
            found = self._list(blocks, -1)
            if found[2].shape[0] > entries:
                raise ValueError(
                    f"update: {found[2].shape[0]} cells of {CELL} x {CELL} are set, and the mask was made with "
                    f"{entries}; make it with capacity={found[2].shape[0]} or more"
                )
        else:
            self._note_cells(blocks)
            found = self._list(blocks, entries)
        for old, new in zip(self._cells, found, strict=True):
            old[: new.shape[0]].copy_(new)

    @classmethod
    def from_dense(cls, attn_mask: Tensor) -> BlockSparse:
        """The mask of a dense bool ``attn_mask``, True where the query may see the key, as SDPA takes it.

        attn_mask: (Sq, Sk), or (B or 1, Hq or 1, Sq, Sk). Blocks of 128 x 128 without a pair are skipped, those with
        every pair run without a test, and of the others the bits are kept: one for each pair. Waits for the mask's
        device once. Fits q and k of these lengths alone.

        Raises NotImplementedError for a float mask (a bias), TypeError for another dtype, ValueError for a shape.
        """
        if isinstance(attn_mask, Tensor) and attn_mask.is_floating_point():
            raise NotImplementedError(
                f"attn_mask: dtype {attn_mask.dtype}, a bias added to the logits, is not supported; only a bool mask is"
            )
        check_tensor("attn_mask", attn_mask, torch.bool, (2, 4), "(Sq, Sk) or (B or 1, Hq or 1, Sq, Sk)")
        dense = attn_mask[None, None] if attn_mask.dim() == 2 else attn_mask
        counts = [-(-n // CELL) for n in dense.shape[2:]]
        return cls._of_pairs(torch.ones(*dense.shape[:2], *counts, dtype=torch.bool, device=dense.device), dense)

    @classmethod
    def _of_pairs(cls, blocks: Tensor, pairs: Tensor, block_size: tuple[int, int] = (CELL, CELL)) -> BlockSparse:
        """Of the set blocks those pairs (B, H, Sq, Sk) alone."""
        mask = object.__new__(cls)
        set_fields(mask, block_size=block_size, shape=tuple(blocks.shape), capacity=None)
        lengths = tuple(pairs.shape[2:])
        set_fields(mask, _lengths=lengths)
        mask._set(_prepare.block_list(blocks, *block_size, *lengths, pairs.detach(), -1, -1))
        return mask

    @classmethod
    def from_flex(cls, block_mask: Any, partial: Mask | Tensor | None = None) -> Mask:
        """The mask of a FlexAttention ``BlockMask``.

        block_mask  its kv_num_blocks and kv_indices name the partial blocks, its full_kv_num_blocks and
                    full_kv_indices the full ones, in blocks of BLOCK_SIZE, a multiple of 64 each way
        partial     which pairs of the partial blocks are seen: the flashmsa mask that says what mask_mod says (the
                    result is the blocks & that mask: Flex's full blocks lie inside it), or a dense bool tensor (Sq, Sk)
                    or (B or 1, H or 1, Sq, Sk). None: there are no partial blocks.

        Without ``partial`` it waits for the block mask's device, as it does to count the blocks. Raises ValueError
        where there are partial blocks and ``partial`` is None, and for a block size or shapes that do not fit.
        """
        block_size = _as_block_size(block_mask.BLOCK_SIZE)
        mixed = _table_of(block_mask.kv_num_blocks, block_mask.kv_indices, block_mask, block_size)
        full = None
        if getattr(block_mask, "full_kv_num_blocks", None) is not None:
            full = _table_of(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, block_mask, block_size)
        blocks = mixed if full is None else mixed | full
        if partial is None:
            everything = getattr(getattr(block_mask, "mask_mod", None), "__name__", "") == "noop_mask"
            if not everything and bool(mixed.any()):
                raise ValueError(
                    f"partial: None, but the block mask has {int(mixed.sum())} partial blocks; give the flashmsa mask "
                    "that says what its mask_mod says, or a dense bool tensor"
                )
            return cls(blocks, block_size)
        if isinstance(partial, Mask):
            return cls(blocks, block_size) & partial
        check_tensor("partial", partial, torch.bool, (2, 4), "(Sq, Sk) or (B or 1, H or 1, Sq, Sk), or a flashmsa mask")
        pairs = partial[None, None] if partial.dim() == 2 else partial
        _check_blocks("partial", blocks.shape, block_size, *pairs.shape[2:])
        shape = torch.broadcast_shapes(blocks.shape[:2], pairs.shape[:2])
        blocks, pairs = (x.expand(*shape, -1, -1) for x in (blocks, pairs))
        if full is not None:
            for dim, size in zip((2, 3), block_size, strict=True):
                full = full.repeat_interleave(size, dim).narrow(dim, 0, pairs.shape[dim])
            pairs = pairs | full
        return cls._of_pairs(blocks.contiguous(), pairs, block_size)

    def to_dense(self, len_q: int, len_kv: int, device: torch.device | str | None = None) -> Tensor:
        """(B or 1, H or 1, len_q, len_kv), for lengths that the blocks cover (ValueError for others)."""
        self._check_lengths(len_q, len_kv)
        own = visible(*self._lowered, len_q, len_kv, self.device)
        dense = own.rows(slice(0, len_q))
        return dense if device is None else dense.to(device)

    def to(self, device: torch.device | str) -> BlockSparse:
        moved = tuple(x.to(device) for x in self._cells)
        if moved[0] is self._cells[0]:
            return self
        mask = object.__new__(BlockSparse)
        set_fields(mask, block_size=self.block_size, shape=self.shape, capacity=self.capacity, _lengths=self._lengths)
        mask._set(moved)
        set_fields(mask, _used=None if self._used is None else self._used.to(device))
        return mask

    def _check_shapes(self, batch: int, heads_q: int, heads_kv: int, len_q: int, len_kv: int) -> None:
        self._check_lengths(len_q, len_kv)
        for what, mine, theirs in (("batch", self.shape[0], batch), ("heads", self.shape[1], heads_q)):
            if mine not in (1, theirs):
                raise ValueError(f"mask: blocks of {what} {mine} do not match q's {what} {theirs}; must be that or 1")

    def _check_lengths(self, len_q: int, len_kv: int) -> None:
        if self._lengths is not None and self._lengths != (len_q, len_kv):
            raise ValueError(f"mask: dense bits for {self._lengths} queries and keys do not match {(len_q, len_kv)}")
        _check_blocks("mask", self.shape, self.block_size, len_q, len_kv)

    def _check_values(self, len_q: int, len_kv: int) -> None:
        if self._used is not None and int(self._used) > self.capacity:
            raise ValueError(
                f"blocks: {int(self._used)} cells of {CELL} x {CELL} are set, over the mask's capacity of "
                f"{self.capacity}; make it with a larger one"
            )

    def _natural_size(self) -> tuple[int, int]:
        if self._lengths is not None:
            return self._lengths
        return self.shape[2] * self.block_size[0], self.shape[3] * self.block_size[1]

    def __eq__(self, other: object) -> bool:
        """The same pairs in blocks of one size on one device. Reads the list, so it waits for the device."""
        if not isinstance(other, BlockSparse):
            return NotImplemented
        mine, theirs = ((x.block_size, x.shape, x._lengths) for x in (self, other))
        return mine == theirs and same_tensors(self._used_cells(), other._used_cells())

    __hash__ = None  # type: ignore[assignment]  # it holds tensors, whose values may change

    def _used_cells(self) -> list[Tensor]:
        """The list without what is left of its capacity."""
        row_start, whole_count, cells, detail, bits = self._cells
        used = int(row_start[-1, -1, -1]) if row_start.numel() else 0
        return [row_start, whole_count, cells[:used], detail[:used], bits]

    def __repr__(self) -> str:
        size = "" if self.block_size == (CELL, CELL) else f", {self.block_size}"
        bits = ", with dense bits" if self._cells[4].shape[0] else ""
        return f"BlockSparse(<bool {self.shape} on {self.device}{bits}>{size})"


def _as_block_size(block_size: Any) -> tuple[int, int]:
    if isinstance(block_size, int) and not isinstance(block_size, bool):
        block_size = (block_size, block_size)
    if not isinstance(block_size, (tuple, list)) or len(block_size) != 2:
        raise TypeError(f"block_size: {block_size!r}; must be (block_q, block_kv), multiples of 64")
    for size in block_size:
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"block_size: {block_size!r}; must be two ints, multiples of 64")
        if size < 64 or size % 64:
            nearest = min(max(64, -(-size // 64) * 64), _MAX_BLOCK)
            raise ValueError(f"block_size: {size} is no multiple of 64; the nearest that is: {nearest}")
        if size > _MAX_BLOCK:
            raise ValueError(f"block_size: {size}; must be a multiple of 64 from 64 to {_MAX_BLOCK}")
    return tuple(block_size)


def _check_blocks(name: str, shape: tuple[int, ...], block_size: tuple[int, int], len_q: int, len_kv: int) -> None:
    for what, count, size, length in zip(("q", "k"), shape[2:], block_size, (len_q, len_kv), strict=True):
        if count != -(-length // size):
            raise ValueError(
                f"{name}: {count} blocks of {size} do not match {what}'s length {length}; must be {-(-length // size)}"
            )


def _table_of(counts: Tensor, indices: Tensor, block_mask: Any, block_size: tuple[int, int]) -> Tensor:
    """bool (B, H, rows, columns) of FlexAttention's lists: the first counts[..., r] of indices[..., r, :] are set."""
    lengths = getattr(block_mask, "seq_lengths", None)
    columns = indices.shape[-1] if lengths is None else -(-lengths[1] // block_size[1])
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    # NOTE: what is not listed goes to one more column, which is cut off.
    place = torch.where(listed, indices.long(), columns).clamp(0, columns)
    table = torch.zeros(*counts.shape, columns + 1, dtype=torch.bool, device=indices.device)
    table = table.scatter_(-1, place, True)[..., :columns]
    return table[(None,) * (4 - table.dim())]
