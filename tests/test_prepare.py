"""The operators that prepare masks (sort, intervals, moves of rows, block lists), on the CPU against brute force."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flashmsa  # noqa: F401  registers the operators

OPS = torch.ops.flashmsa
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
SEEDS = st.integers(0, 2**31)
# Few buckets and many, negative ones, one alone, ids with gaps, both ends of int32.
RANGES = [(0, 0), (5, 5), (0, 1), (0, 63), (-7, 3), (-1, 255), (0, 256), (-70000, 70000), (INT_MIN, INT_MAX)]


def random_buckets(seed: int, shape: tuple[int, ...], low: int, high: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, shape, generator=generator, dtype=torch.int64).int()


def sorted_order(bucket: torch.Tensor) -> torch.Tensor:
    """The stable order by torch.sort: (batch, heads, length) int32."""
    return torch.sort(bucket, dim=-1, stable=True).indices.int()


# ---------------------------------------------------------------------------------------------------------------------
# bucket_sort


@given(
    seed=SEEDS,
    shape=st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 300)),
    ends=st.sampled_from(RANGES),
)
def test_sort_is_stable(seed: int, shape: tuple[int, int, int], ends: tuple[int, int]) -> None:
    bucket = random_buckets(seed, shape, *ends)
    order = OPS.bucket_sort(bucket)
    assert order.dtype == torch.int32 and order.is_contiguous()
    assert torch.equal(order, sorted_order(bucket))


@pytest.mark.parametrize("ends", RANGES)
def test_sort_of_a_long_segment(ends: tuple[int, int]) -> None:
    bucket = random_buckets(1, (1, 2, 40000), *ends)
    assert torch.equal(OPS.bucket_sort(bucket), sorted_order(bucket))


def test_sort_reads_any_strides() -> None:
    bucket = random_buckets(2, (70, 3, 2), -5, 5)
    for view in (bucket.permute(2, 1, 0), bucket.transpose(0, 2)[:, :, ::3], bucket[:1].expand(4, 3, 2)):
        assert torch.equal(OPS.bucket_sort(view), sorted_order(view))


# ---------------------------------------------------------------------------------------------------------------------
# bucket_rows


def expected_rows(
    q_bucket: torch.Tensor, kv_bucket: torch.Tensor, causal: bool
) -> tuple[list[list[tuple[int, int]]], list[list[int]]]:
    """By counting, for each batch and head of the result: (begin, end) of every sorted row."""
    batch = max(q_bucket.shape[0], kv_bucket.shape[0])
    heads = max(q_bucket.shape[1], kv_bucket.shape[1])
    len_q, len_kv = q_bucket.shape[2], kv_bucket.shape[2]
    rows = []
    for b in range(batch):
        for h in range(heads):
            q = q_bucket[b % q_bucket.shape[0], h * q_bucket.shape[1] // heads].tolist()
            kv = kv_bucket[b % kv_bucket.shape[0], h * kv_bucket.shape[1] // heads].tolist()
            ends = []
            for row in sorted(range(len_q), key=lambda i: (q[i], i)):
                begin = sum(x < q[row] for x in kv)
                last = row + len_kv - len_q if causal else len_kv
                ends.append((begin, begin + sum(x == q[row] and j <= last for j, x in enumerate(kv))))
            rows.append(ends)
    return rows


@given(
    seed=SEEDS,
    batches=st.sampled_from([(1, 1), (2, 2), (1, 3), (3, 1)]),
    heads=st.sampled_from([(1, 1), (4, 2), (1, 3), (3, 1), (4, 4)]),
    lengths=st.tuples(st.integers(0, 90), st.integers(0, 90)),
    ends=st.sampled_from([(0, 0), (0, 3), (-4, 40), (INT_MIN, INT_MAX)]),
    causal=st.booleans(),
)
def test_rows_equal_counting(seed, batches, heads, lengths, ends, causal) -> None:
    q_bucket = random_buckets(seed, (batches[0], heads[0], lengths[0]), *ends)
    kv_bucket = random_buckets(seed + 1, (batches[1], heads[1], lengths[1]), *ends)
    begin, end = OPS.bucket_rows(
        q_bucket, sorted_order(q_bucket), kv_bucket, sorted_order(kv_bucket), causal, lengths[0], lengths[1]
    )
    assert begin.dtype == end.dtype == torch.int32
    assert begin.shape == end.shape == (max(batches), max(heads), lengths[0])
    got = [
        list(zip(*ends, strict=True))
        for ends in zip(begin.flatten(0, 1).tolist(), end.flatten(0, 1).tolist(), strict=True)
    ]
    assert got == expected_rows(q_bucket, kv_bucket, causal)
    assert bool((begin.diff(dim=-1) >= 0).all()) and bool((end.diff(dim=-1) >= 0).all())


def test_rows_of_absent_buckets_are_empty_where_they_would_stand() -> None:
    q_bucket = torch.tensor([[[-3, 2, 9]]], dtype=torch.int32)
    kv_bucket = torch.tensor([[[1, 3, 3, 3]]], dtype=torch.int32)
    order = torch.arange(4, dtype=torch.int32).view(1, 1, 4)
    begin, end = OPS.bucket_rows(q_bucket, order[..., :3], kv_bucket, order, False, 3, 4)
    assert begin.tolist() == end.tolist() == [[[0, 1, 4]]]


# ---------------------------------------------------------------------------------------------------------------------
# gather_rows, scatter_rows


@given(
    seed=SEEDS,
    batch=st.integers(1, 2),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 4), (4, 2), (2, 6)]),
    length=st.integers(0, 50),
    dim=st.sampled_from([8, 24, 64, 200]),
    shared=st.booleans(),
)
def test_rows_move_there_and_back(seed, batch, heads, length, dim, shared) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, length, heads[0], dim, generator=generator).bfloat16().transpose(1, 2)
    order = sorted_order(random_buckets(seed, (1 if shared else batch, heads[1], length), 0, 3))
    many = max(heads)
    wide_x = x.repeat_interleave(many // heads[0], 1)
    wide = order.repeat_interleave(many // heads[1], 1).expand(batch, many, length)
    index = wide.long()[..., None].expand(batch, many, length, dim)
    (gathered,) = OPS.gather_rows([x], [order])
    assert torch.equal(gathered, wide_x.gather(2, index))
    (back,) = OPS.scatter_rows([gathered], [order])
    assert torch.equal(back, wide_x)


def test_several_tensors_move_in_one_call() -> None:
    order = sorted_order(random_buckets(3, (2, 3, 77), 0, 9))
    x, lse = torch.randn(2, 3, 77, 16).half(), torch.randn(2, 3, 77)
    out = OPS.scatter_rows([x, lse], [order, order])
    where = order.long()
    assert torch.equal(out[0].gather(2, where[..., None].expand_as(x)), x)
    assert torch.equal(out[1].gather(2, where), lse)


def test_an_order_that_is_none_reads_inside() -> None:
    x = torch.arange(12.0).view(1, 1, 3, 4)
    order = torch.tensor([[[-1, 3, INT_MAX]]], dtype=torch.int32)
    assert torch.equal(OPS.gather_rows([x], [order])[0], x[:, :, [2, 2, 2]])


def test_no_gradient_is_dropped() -> None:
    x = torch.randn(1, 1, 4, 8, requires_grad=True)
    order = torch.arange(4, dtype=torch.int32).view(1, 1, 4)
    for op in (OPS.gather_rows, OPS.scatter_rows):
        with pytest.raises(NotImplementedError, match=r"xs: requires grad.*no_grad"):
            op([x], [order])
        with torch.no_grad():
            assert torch.equal(op([x], [order])[0], x)


# ---------------------------------------------------------------------------------------------------------------------
# block_list


def random_blocks(
    seed: int, heads: tuple[int, int], lengths: tuple[int, int], block: tuple[int, int], density: float
) -> torch.Tensor:
    """bool (batch, heads, q blocks, kv blocks)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*heads, *(-(-n // b) for n, b in zip(lengths, block, strict=True)), generator=generator) < density


def random_pairs(seed: int, heads: tuple[int, int], lengths: tuple[int, int]) -> torch.Tensor:
    """bool (batch, heads, len_q, len_kv): whole stretches, empty ones, and single pairs."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(*heads, *(-(-n // 64) for n in lengths), generator=generator)
    level = coarse.repeat_interleave(64, -2).repeat_interleave(64, -1)[..., : lengths[0], : lengths[1]]
    return torch.rand(level.shape, generator=generator) < (level * 3 - 1)


def expected_list(
    blocks: torch.Tensor, block: tuple[int, int], lengths: tuple[int, int], pairs: torch.Tensor | None
) -> list[tuple[list[int], list[tuple[int, object]]]]:
    """Pair by pair, for each cell row: its whole columns, and its mixed ones with four bits or the pairs themselves."""
    allowed = blocks.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)[..., : lengths[0], : lengths[1]]
    if pairs is not None:
        allowed = allowed & pairs
    rows = []
    for plane in allowed.flatten(0, 1):
        for row in range(0, lengths[0], 128):
            whole, mixed = [], []
            for column in range(0, lengths[1], 128):
                cell = plane[row : row + 128, column : column + 128]
                if cell.all():
                    whole.append(column // 128)
                elif cell.any() and pairs is None:
                    halves = [(a, b) for a in range(2) for b in range(2)]
                    bits = sum(
                        1 << (2 * a + b) for a, b in halves if cell[64 * a : 64 * a + 64, 64 * b : 64 * b + 64].any()
                    )
                    mixed.append((column // 128, bits))
                elif cell.any():
                    tile = torch.zeros(128, 128, dtype=torch.bool)
                    tile[: cell.shape[0], : cell.shape[1]] = cell
                    mixed.append((column // 128, tile))
            rows.append((whole, mixed))
    return rows


def tile_pairs(tile: torch.Tensor) -> torch.Tensor:
    """bool (128, 128) of an int32 tile (128, 4)."""
    return (tile[:, :, None] >> torch.arange(32) & 1).bool().flatten(1)


def assert_is_list(result, expected, capacity: int | None = None, tile_capacity: int | None = None) -> None:
    """`result` of block_list (CPU tensors) holds `expected`, up to the capacities."""
    row_start, whole_count, cells, detail, bits = result
    starts = row_start.flatten(0, 1)
    assert torch.equal(starts[1:, 0], starts[:-1, -1]), "the last column repeats the next row's start"
    starts, ends, wholes = starts[:, :-1].flatten().tolist(), starts[:, 1:].flatten().tolist(), whole_count.flatten()
    assert len(starts) == len(ends) == len(wholes) == len(expected)
    at, tile = 0, 0
    for start, end, whole_kept, (whole, mixed) in zip(starts, ends, wholes.tolist(), expected, strict=True):
        kept = mixed
        if tile_capacity is not None:
            kept = mixed[: max(0, tile_capacity - tile)]
        limit = at + len(whole) + len(kept) if capacity is None else min(at + len(whole) + len(kept), capacity)
        assert start == (at if capacity is None else min(at, capacity)) and end == limit
        entries = [(column, -1) for column in whole] + [
            (column, bits_or_tile if isinstance(bits_or_tile, int) else tile + i)
            for i, (column, bits_or_tile) in enumerate(kept)
        ]
        entries = entries[: end - start]
        assert list(zip(cells[start:end].tolist(), detail[start:end].tolist(), strict=True)) == entries
        assert whole_kept == min(len(whole), end - start)
        for (_, index), (_, pairs) in zip(entries[len(whole) :], kept, strict=False):
            if not isinstance(pairs, int):
                assert torch.equal(tile_pairs(bits[index]), pairs)
        at += len(whole) + len(kept)
        tile += len(mixed)


LENGTHS = st.one_of(st.integers(0, 420), st.sampled_from([64, 127, 128, 129, 192, 193, 256]))
BLOCKS = st.sampled_from([64, 128, 192, 256, 448])
DENSITIES = st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])


@given(
    seed=SEEDS,
    heads=st.tuples(st.integers(1, 2), st.integers(0, 3)),
    lengths=st.tuples(LENGTHS, LENGTHS),
    block=st.tuples(BLOCKS, BLOCKS),
    density=DENSITIES,
)
def test_list_of_blocks(seed, heads, lengths, block, density) -> None:
    blocks = random_blocks(seed, heads, lengths, block, density)
    result = OPS.block_list(blocks, *block, *lengths, None, -1, -1)
    expected = expected_list(blocks, block, lengths, None)
    count = sum(len(whole) + len(mixed) for whole, mixed in expected)
    assert [tuple(x.shape) for x in result] == [
        (*heads, -(-lengths[0] // 128) + 1),
        (*heads, -(-lengths[0] // 128)),
        (max(1, count),),
        (max(1, count),),
        (0, 128, 4),
    ]
    assert all(x.dtype == torch.int32 for x in result)
    assert_is_list(result, expected)


@given(
    seed=SEEDS,
    lengths=st.tuples(LENGTHS, LENGTHS),
    block=st.tuples(BLOCKS, BLOCKS),
    density=DENSITIES,
    shared=st.booleans(),
    layout=st.sampled_from(["contiguous", "transposed", "padded", "every second"]),
)
def test_list_of_pairs(seed, lengths, block, density, shared, layout) -> None:
    heads = (1, 2)
    blocks = random_blocks(seed, heads, lengths, block, density)
    pairs = random_pairs(seed, (1, 1) if shared else heads, lengths)
    if layout == "transposed":
        pairs = pairs.mT.contiguous().mT
    elif layout == "padded":
        pairs = torch.nn.functional.pad(pairs, (3, 5))[..., 3 : 3 + lengths[1]]
    elif layout == "every second":
        pairs = pairs.repeat_interleave(2, -1)[..., ::2]
    result = OPS.block_list(blocks, *block, *lengths, pairs, -1, -1)
    expected = expected_list(blocks, block, lengths, pairs)
    tiles = sum(len(mixed) for _, mixed in expected)
    assert result[4].shape == (tiles, 128, 4)
    assert_is_list(result, expected)


@given(seed=SEEDS, capacity=st.integers(1, 40), tile_capacity=st.integers(0, 20), with_pairs=st.booleans())
def test_what_does_not_fit_is_dropped(seed, capacity, tile_capacity, with_pairs) -> None:
    lengths, block, heads = (500, 700), (64, 128), (1, 2)
    blocks = random_blocks(seed, heads, lengths, block, 0.7)
    pairs = random_pairs(seed, heads, lengths) if with_pairs else None
    result = OPS.block_list(blocks, *block, *lengths, pairs, capacity, tile_capacity)
    assert result[2].shape == result[3].shape == (capacity,)
    assert result[4].shape == (tile_capacity if with_pairs else 0, 128, 4)
    expected = expected_list(blocks, block, lengths, pairs)
    assert_is_list(result, expected, capacity, tile_capacity if with_pairs else None)


def test_list_reads_any_strides_and_bytes() -> None:
    blocks = random_blocks(5, (3, 4), (600, 900), (64, 64), 0.5)
    plain = OPS.block_list(blocks, 64, 64, 600, 900, None, -1, -1)
    strange = (blocks.permute(3, 0, 2, 1).contiguous().byte() * 6).view(torch.bool).permute(1, 3, 2, 0)
    for got, want in zip(OPS.block_list(strange, 64, 64, 600, 900, None, -1, -1), plain, strict=True):
        assert torch.equal(got, want)


# ---------------------------------------------------------------------------------------------------------------------
# Tracing, errors


def sample_calls() -> list:
    bucket = random_buckets(4, (2, 3, 40), 0, 5)
    order = sorted_order(bucket)
    blocks = random_blocks(4, (1, 2), (300, 200), (64, 64), 0.5)
    pairs = random_pairs(4, (1, 2), (300, 200))
    x = torch.randn(2, 3, 40, 8)
    count = OPS.block_list(blocks, 64, 64, 300, 200, None, -1, -1)[2].numel()
    entries, tiles = (OPS.block_list(blocks, 64, 64, 300, 200, pairs, -1, -1)[i].shape[0] for i in (2, 4))
    return [
        pytest.param(OPS.bucket_sort, (bucket,), id="bucket_sort"),
        pytest.param(OPS.bucket_rows, (bucket, order, bucket[:1], order[:1], True, 40, 40), id="bucket_rows"),
        pytest.param(OPS.gather_rows, ([x, x[..., 0]], [order, order]), id="gather_rows"),
        pytest.param(OPS.scatter_rows, ([x, x[..., 0]], [order, order]), id="scatter_rows"),
        pytest.param(OPS.block_list, (blocks, 64, 64, 300, 200, None, count, 0), id="block_list"),
        pytest.param(OPS.block_list, (blocks, 64, 64, 300, 200, pairs, entries, tiles), id="block_list-pairs"),
    ]


@pytest.mark.parametrize("op, arguments", sample_calls())
def test_opcheck(op, arguments) -> None:
    torch.library.opcheck(op.default, arguments)


def test_a_tracer_needs_capacities() -> None:
    blocks = torch.ones(1, 1, 2, 2, dtype=torch.bool, device="meta")
    for capacity, mask in ((-1, None), (4, torch.ones(1, 1, 128, 128, dtype=torch.bool, device="meta"))):
        with pytest.raises(ValueError, match=r"capacity, tile_capacity: -1 counts.*must be given"):
            OPS.block_list(blocks, 64, 64, 128, 128, mask, capacity, -1)


INTS = torch.zeros(2, 4, 6, dtype=torch.int32)
TRUE = torch.ones(1, 2, 3, 2, dtype=torch.bool)
PAIRS = torch.ones(1, 2, 192, 128, dtype=torch.bool)


def rows_call(q=INTS, q_order=INTS, kv=INTS, kv_order=INTS, len_q=6, len_kv=6):
    return OPS.bucket_rows(q, q_order, kv, kv_order, False, len_q, len_kv)


def list_call(blocks=TRUE, block_q=64, block_kv=64, len_q=192, len_kv=128, mask=None, capacity=-1, tiles=-1):
    return OPS.block_list(blocks, block_q, block_kv, len_q, len_kv, mask, capacity, tiles)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: OPS.bucket_sort(INTS.long()), TypeError, "bucket: dtype torch.int64; must be torch.int32"),
        (lambda: OPS.bucket_sort(INTS[0]), ValueError, r"bucket: shape \[4, 6\]; must be \(batch, heads, length\)"),
        (lambda: rows_call(q_order=INTS[:1]), ValueError, r"q_order: shape \[1, 4, 6\] does not match q_bucket's"),
        (lambda: rows_call(kv_order=INTS.float()), TypeError, "kv_order: dtype torch.float32"),
        (lambda: rows_call(len_q=5), ValueError, "len_q: 5 does not match q_bucket's length 6"),
        (lambda: rows_call(kv=INTS[:, :3], kv_order=INTS[:, :3]), ValueError, "kv_bucket: 3 heads do not match.*4"),
        (
            lambda: rows_call(kv=INTS.repeat(2, 1, 1), kv_order=INTS.repeat(2, 1, 1)),
            ValueError,
            "kv_bucket: batch 4 does not match q_bucket's 2; must be the same, or 1",
        ),
        (
            lambda: rows_call(kv=INTS.to("meta"), kv_order=INTS.to("meta")),
            ValueError,
            "kv_bucket: on meta, q_bucket is on",
        ),
        (lambda: OPS.gather_rows([INTS], []), ValueError, "orders: 0 tensors for 1 of xs"),
        (lambda: OPS.gather_rows([INTS] * 5, [INTS] * 5), ValueError, "xs: 5 tensors; one call takes up to 4"),
        (lambda: OPS.gather_rows([INTS[0]], [INTS]), ValueError, r"x: shape \[4, 6\]; must be"),
        (
            lambda: OPS.gather_rows([INTS.half()], [INTS]),
            ValueError,
            "x: rows of 2 bytes; must be a multiple of 16, or 4",
        ),
        (lambda: OPS.gather_rows([INTS[..., :5]], [INTS]), ValueError, "order: length 6 does not match x's 5"),
        (lambda: list_call(TRUE.int()), TypeError, "blocks: dtype torch.int32; must be torch.bool"),
        (lambda: list_call(TRUE[0]), ValueError, r"blocks: shape \[2, 3, 2\]; must be \(batch, heads, q blocks"),
        (lambda: list_call(block_q=96), ValueError, "block_q: 96 is not supported; must be a positive multiple of 64"),
        (lambda: list_call(block_kv=0), ValueError, "block_kv: 0 is not supported"),
        (lambda: list_call(len_q=-1), ValueError, "len_q: -1 is not supported"),
        (lambda: list_call(len_kv=129), ValueError, r"blocks: shape \[1, 2, 3, 2\] does not match.*\(3, 3\)"),
        (lambda: list_call(capacity=0), ValueError, "capacity: 0; must be from 1 to"),
        (lambda: list_call(tiles=-2), ValueError, "tile_capacity: -2; must be from 0 to"),
        (lambda: list_call(mask=PAIRS.byte()), TypeError, "bits_mask: dtype torch.uint8; must be torch.bool"),
        (
            lambda: list_call(mask=PAIRS[..., 1:]),
            ValueError,
            "bits_mask: shape .* does not match len_q 192 and len_kv 128",
        ),
        (
            lambda: list_call(mask=PAIRS.expand(3, 2, 192, 128)),
            ValueError,
            "bits_mask: shape .* does not match blocks'.*must be the same, or 1",
        ),
    ],
)
def test_errors_name_the_argument(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
