"""What HashBucket and BlockSparse are made from: orders of buckets, runs of keys, lists of cells.

The compiled operators do it in a few kernels. Where they are missing (another device, an older build) the same is
composed of torch operators here; the tests compare the two. Without a capacity to fill, a list is counted first, which
waits for the device once; nothing else does.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

CELL = 128
_HALF = CELL // 2
_WORD = 32


def has_values(x: Tensor) -> bool:
    """Whether there is anything to read: not on the meta device, nor in a tensor that stands for one in a trace."""
    return x.device.type != "meta" and type(x).__name__ != "FakeTensor"


def is_readable(x: Tensor) -> bool:
    """Whether x's values can be looked at, if only by waiting for its device: not while a call is traced."""
    return not torch.compiler.is_compiling() and has_values(x)


def bucket_sort(bucket: Tensor) -> Tensor:
    """The stable order that sorts each row of ``bucket`` int32 (B, H, S); int32 (B, H, S)."""
    if _is_compiled("bucket_sort", bucket.device):
        return torch.ops.flashmsa.bucket_sort(bucket)
    return composed_bucket_sort(bucket)


def bucket_rows(
    q_bucket: Tensor, q_order: Tensor, kv_bucket: Tensor, kv_order: Tensor, causal: bool, len_q: int, len_kv: int
) -> tuple[Tensor, Tensor]:
    """(begin, end), int32 (B, H, len_q): the run of sorted keys that each sorted query row sees.

    ``q_bucket`` (B or 1, H or 1, len_q) and ``kv_bucket`` (B or 1, H' or 1, len_kv) are not sorted, the orders are
    bucket_sort's. B and H are those of both together; of the more heads, H / H' neighbours share one of the fewer.
    ``causal``: of the keys in its bucket a query sees those at or before i + len_kv - len_q.
    """
    if _is_compiled("bucket_rows", q_bucket.device):
        return torch.ops.flashmsa.bucket_rows(q_bucket, q_order, kv_bucket, kv_order, causal, len_q, len_kv)
    return composed_bucket_rows(q_bucket, q_order, kv_bucket, kv_order, causal, len_q, len_kv)


def block_list(
    blocks: Tensor,
    block_q: int,
    block_kv: int,
    len_q: int,
    len_kv: int,
    bits_mask: Tensor | None = None,
    capacity: int = -1,
    tile_capacity: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(row_start, whole_count, cells, detail, bits): the set cells of 128 x 128, row by row of cells.

    blocks         bool (B, H, ceil(len_q / block_q), ceil(len_kv / block_kv)); blocks are multiples of 64
    bits_mask      bool (B, H, len_q, len_kv): a set block allows those pairs alone
    capacity       entries of the list; -1: as many as there are, which waits for the device; where nothing can be
                   counted, in a trace and on the meta device, as many as there may be
    tile_capacity  mixed cells with bits; -1 likewise

    row_start    int32 (B, H, rows + 1): where the entries of a row of cells begin; offsets count over everything
    whole_count  int32 (B, H, rows): the first so many entries of a row are whole cells, ascending; then mixed ones
    cells        int32 (entries,): the cell's column
    detail       int32 (entries,): -1 for a whole cell; of a mixed one the number of its bit tile, or without bits_mask
                 a bit 2 a + b for each 64-row half a and 64-key half b that is set
    bits         int32 (tiles, 128, 4): bit k of word w of a row is key 32 w + k; (0, 128, 4) without bits_mask
    """
    if not is_readable(blocks):
        most = max(blocks.shape[0] * blocks.shape[1] * -(-len_q // CELL) * -(-len_kv // CELL), 1)
        capacity, tile_capacity = (most if x < 0 else x for x in (capacity, tile_capacity))
    arguments = (blocks, block_q, block_kv, len_q, len_kv, bits_mask, capacity, tile_capacity)
    if _is_compiled("block_list", blocks.device):
        return torch.ops.flashmsa.block_list(*arguments)
    return composed_block_list(*arguments)


# NOTE: torch.compile can trace neither the question nor the cache; while it traces, the answer is a constant.
@torch.compiler.assume_constant_result
def _is_compiled(name: str, device: torch.device) -> bool:
    return _asked_once(name, device)


@cache
def _asked_once(name: str, device: torch.device) -> bool:
    from .dispatch import machine_reason

    key = {"cpu": "CPU", "cuda": "CUDA", "meta": "Meta"}.get(device.type)
    if key is None or not hasattr(torch.ops.flashmsa, name):
        return False
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"flashmsa::{name}", key):
        return False
    # NOTE: an operator for CUDA exists in every build, and its kernels run on compute capability 9.0 alone.
    return key != "CUDA" or machine_reason(device.index) is None


def common_size(a: int, b: int) -> int:
    """How many batches or heads two tensors have together, of which the fewer are shared by the more; 0 where either
    has none."""
    return max(a, b) if a and b else 0


def per_head(x: Tensor, heads: int) -> Tensor:
    """``x`` (B, H, ...) for ``heads`` heads, of which each ``heads`` / H neighbours share one of x's."""
    return x.repeat_interleave(heads // x.shape[1], 1) if x.shape[1] else x


def composed_bucket_sort(bucket: Tensor) -> Tensor:
    return torch.sort(bucket, dim=-1, stable=True).indices.to(torch.int32)


def composed_bucket_rows(
    q_bucket: Tensor, q_order: Tensor, kv_bucket: Tensor, kv_order: Tensor, causal: bool, len_q: int, len_kv: int
) -> tuple[Tensor, Tensor]:
    batch = common_size(q_bucket.shape[0], kv_bucket.shape[0])
    heads = common_size(q_bucket.shape[1], kv_bucket.shape[1])
    q_bucket, q_order, kv_bucket, kv_order = (
        per_head(x, heads).expand(batch, -1, -1).long() for x in (q_bucket, q_order, kv_bucket, kv_order)
    )
    # One number for (bucket, position): keys sorted by bucket, and inside a bucket by position, ascend in it.
    step = 2**32
    place = (torch.take_along_dim(kv_bucket, kv_order, 2) * step + kv_order).contiguous()
    bucket = torch.take_along_dim(q_bucket, q_order, 2) * step
    last = (q_order + (len_kv - len_q) + 1).clamp(0, len_kv) if causal else len_kv
    begin, end = (torch.searchsorted(place, x.contiguous()) for x in (bucket, bucket + last))
    return begin.to(torch.int32), end.to(torch.int32)


def composed_block_list(
    blocks: Tensor,
    block_q: int,
    block_kv: int,
    len_q: int,
    len_kv: int,
    bits_mask: Tensor | None = None,
    capacity: int = -1,
    tile_capacity: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tiles = None
    if bits_mask is None:
        whole, mixed, code = _states_of_halves(blocks, block_q, block_kv, len_q, len_kv)
    else:
        whole, mixed, code, tiles = _states_of_pairs(blocks, block_q, block_kv, bits_mask)
        tile_capacity = int(mixed.sum()) if tile_capacity < 0 else tile_capacity
        mixed = mixed & (code < tile_capacity)
    row_start, whole_count, place, entries = _places(whole, mixed)
    capacity = max(1, int(entries) if capacity < 0 else capacity)
    # NOTE: what does not fit, and cells that are not set, go to one more place, which is cut off.
    place = torch.where(whole | mixed, place.clamp(max=capacity), capacity).flatten()
    column = torch.arange(whole.shape[3], dtype=torch.int32, device=blocks.device).expand(whole.shape).flatten()
    detail = torch.where(whole, -1, code).to(torch.int32).flatten()
    cells, details = (column.new_zeros(capacity + 1).scatter_(0, place, x)[:-1] for x in (column, detail))
    row_start = row_start.clamp(max=capacity)
    whole_count = torch.minimum(whole_count, row_start.diff(dim=-1))
    bits = _keep_tiles(tiles, mixed, code, tile_capacity) if tiles is not None else cells.new_zeros(0, CELL, CELL // 32)
    return row_start.to(torch.int32), whole_count.to(torch.int32), cells, details, bits


def _states_of_halves(
    blocks: Tensor, block_q: int, block_kv: int, len_q: int, len_kv: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(whole, mixed, code) of each cell (B, H, rows, columns), from its four squares of 64 x 64."""
    rows, columns = -(-len_q // CELL), -(-len_kv // CELL)
    a, b = (torch.arange(2 * n, device=blocks.device) * _HALF for n in (rows, columns))
    inside = (a < len_q)[:, None] & (b < len_kv)
    # A square past the end belongs to no block.
    a, b = (a // block_q).clamp(max=max(0, blocks.shape[2] - 1)), (b // block_kv).clamp(max=max(0, blocks.shape[3] - 1))
    squares = blocks[:, :, a][:, :, :, b] & inside
    weight = torch.tensor([[1, 2], [4, 8]], device=blocks.device)
    code = _by_cell(squares, 2).mul(weight).sum((-2, -1))
    whole = _by_cell(squares | ~inside, 2).flatten(-2).all(-1)
    return whole, (code > 0) & ~whole, code


def _states_of_pairs(
    blocks: Tensor, block_q: int, block_kv: int, bits_mask: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(whole, mixed, number among the mixed, bits of every cell), from the pairs themselves."""
    len_q, len_kv = bits_mask.shape[-2:]
    pairs = blocks.repeat_interleave(block_q, 2)[:, :, :len_q].repeat_interleave(block_kv, 3)[..., :len_kv] & bits_mask
    padding = (0, -len_kv % CELL, 0, -len_q % CELL)
    seen, filled = (_by_cell(torch.nn.functional.pad(pairs, padding, value=value), CELL) for value in (False, True))
    whole = filled.flatten(-2).all(-1)
    mixed = seen.flatten(-2).any(-1) & ~whole
    number = (mixed.flatten().cumsum(0) - 1).view(mixed.shape)
    # The last bit is the sign.
    weight = [1 << n for n in range(_WORD - 1)] + [-(1 << _WORD - 1)]
    weight = torch.tensor(weight, dtype=torch.int32, device=blocks.device)
    bits = seen.unflatten(-1, (CELL // _WORD, _WORD)).mul(weight).sum(-1, dtype=torch.int32)
    return whole, mixed, number, bits


def _by_cell(x: Tensor, size: int) -> Tensor:
    """(B, H, rows size, columns size) as (B, H, rows, columns, size, size)."""
    return x.unflatten(3, (x.shape[3] // size, size)).unflatten(2, (x.shape[2] // size, size)).transpose(3, 4)


def _places(whole: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(row_start, whole_count, place of each cell in the list, entries)."""
    whole_count, mixed_count = whole.sum(-1), mixed.sum(-1)
    stop = (whole_count + mixed_count).flatten().cumsum(0)
    start = torch.nn.functional.pad(stop, (1, 0))
    entries = start[-1]
    row_start = (
        torch.cat([start[:-1].view(whole_count.shape), stop.view(whole_count.shape)[..., -1:]], -1)
        if (whole_count.numel())
        else start.new_zeros((*whole_count.shape[:2], whole_count.shape[2] + 1))
    )
    first = row_start[..., :-1, None]
    of_whole = first + whole.cumsum(-1) - 1
    of_mixed = first + whole_count[..., None] + mixed.cumsum(-1) - 1
    return row_start, whole_count, torch.where(whole, of_whole, of_mixed), entries


def _keep_tiles(tiles: Tensor, mixed: Tensor, number: Tensor, capacity: int) -> Tensor:
    """The bits of the mixed cells alone, in the order of the list."""
    place = torch.where(mixed, number, capacity).flatten()
    kept = tiles.new_zeros(capacity + 1, *tiles.shape[-2:])
    return kept.index_copy_(0, place, tiles.flatten(0, 3))[:-1]
