"""The kernels that prepare masks, against the same operators on the CPU (which test_prepare holds to brute force)."""

from __future__ import annotations

import pytest
import torch
from helpers import poisoned_allocations
from test_prepare import INT_MAX, OPS, RANGES, random_blocks, random_buckets, random_pairs, sorted_order

pytestmark = pytest.mark.gpu


def assert_same(got, want) -> None:
    assert len(got) == len(want)
    for on_gpu, on_cpu in zip(got, want, strict=True):
        assert on_gpu.is_cuda and torch.equal(on_gpu.cpu(), on_cpu)


def assert_sorts(bucket: torch.Tensor) -> None:
    """`bucket` on the GPU."""
    with poisoned_allocations():
        order = OPS.bucket_sort(bucket)
    assert order.dtype == torch.int32 and order.is_contiguous()
    assert torch.equal(order, sorted_order(bucket))


# ---------------------------------------------------------------------------------------------------------------------
# bucket_sort

# Both sides of every change of kernel: one CTA, clusters of 2, 4 and 8 keys a thread, then chunks of 8192.
SORT_LENGTHS = [1, 31, 32, 33, 1000, 4096, 4097, 8195, 16384, 16385, 32768, 32769, 65536, 65537, 73728, 200001]


@pytest.mark.parametrize("length", SORT_LENGTHS)
def test_sort_of_every_length(length: int) -> None:
    for seed, ends in enumerate(RANGES):
        assert_sorts(random_buckets(seed, (1, 3, length), *ends).cuda())


@pytest.mark.parametrize("length", [4096, 16384, 65000, 100000])
@pytest.mark.parametrize("bits", range(1, 33))
def test_sort_of_every_count_of_bits(length: int, bits: int) -> None:
    assert_sorts(random_buckets(bits, (1, 1, length), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1).cuda())


@pytest.mark.parametrize("length", [3000, 50000, 90000])
def test_sort_of_skewed_buckets(length: int) -> None:
    ramp = torch.arange(length, dtype=torch.int32, device="cuda")
    one_apart = torch.zeros(length, dtype=torch.int32, device="cuda")
    one_apart[length // 2] = -1
    assert_sorts(torch.stack([ramp, ramp.flip(0), ramp % 2, one_apart, ramp // 1000, -ramp]).view(2, 3, length))


def test_sort_of_many_segments_with_strides() -> None:
    bucket = random_buckets(0, (500, 300, 7), -3, 60).cuda()
    assert_sorts(bucket)
    assert_sorts(bucket.permute(2, 0, 1))
    assert_sorts(bucket[:, ::7, 1:].transpose(0, 1))
    assert_sorts(bucket[:1].expand(5, 300, 7))
    assert_sorts(bucket[:0])


def test_sorts_are_captured_and_repeat() -> None:
    for length in (3000, 16384, 70000):
        bucket = random_buckets(1, (1, 4, length), 0, 63).cuda()
        OPS.bucket_sort(bucket)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            order = OPS.bucket_sort(bucket)
        for seed, ends in enumerate(RANGES):
            bucket.copy_(random_buckets(seed, (1, 4, length), *ends))
            graph.replay()
            assert torch.equal(order, sorted_order(bucket))


# ---------------------------------------------------------------------------------------------------------------------
# bucket_rows


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ends", [(0, 0), (0, 63), (-2, 1), (-5000, 5000), RANGES[-1]])
@pytest.mark.parametrize(
    "lengths", [(1, 1), (33, 4000), (4000, 33), (16384, 16384), (1000, 0), (0, 1000), (5000, 70001)]
)
def test_rows_equal_those_of_the_cpu(lengths: tuple[int, int], ends: tuple[int, int], causal: bool) -> None:
    for batches, heads in [((1, 1), (1, 1)), ((2, 1), (4, 2)), ((1, 3), (1, 2))]:
        q = random_buckets(1, (batches[0], heads[0], lengths[0]), *ends)
        kv = random_buckets(2, (batches[1], heads[1], lengths[1]), *ends)
        arguments = (q, sorted_order(q), kv, sorted_order(kv))
        with poisoned_allocations():
            got = OPS.bucket_rows(*(x.cuda() for x in arguments), causal, *lengths)
        assert_same(got, OPS.bucket_rows(*arguments, causal, *lengths))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ends", [(0, 0), (0, 63), (-2, 1), (-5000, 5000), RANGES[-1]])
@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 127, 128, 129, 5000, 16384, 70001])
def test_rows_of_queries_that_are_the_keys(length: int, ends: tuple[int, int], causal: bool) -> None:
    """One tensor of buckets and one order for both sides, which take a shorter way."""
    for leading in ((1, 1), (2, 3)):
        bucket = random_buckets(1, (*leading, length), *ends)
        order = sorted_order(bucket)
        on_gpu, order_on_gpu = bucket.cuda(), order.cuda()
        with poisoned_allocations():
            got = OPS.bucket_rows(on_gpu, order_on_gpu, on_gpu, order_on_gpu, causal, length, length)
        assert_same(got, OPS.bucket_rows(bucket, order, bucket, order, causal, length, length))


# ---------------------------------------------------------------------------------------------------------------------
# gather_rows, scatter_rows


@pytest.mark.parametrize("op", [OPS.gather_rows, OPS.scatter_rows], ids=["gather", "scatter"])
@pytest.mark.parametrize("dim", [8, 16, 24, 64, 96, 128, 136, 256, 264, 1024])
def test_moved_rows_equal_those_of_the_cpu(op, dim: int) -> None:
    for length in (1, 127, 1000):
        packed = torch.randn(2, length, 4, 2 * dim).bfloat16()
        x = packed[..., dim:].transpose(1, 2)
        few, one = x[:, :2], x[:1, :1]
        lse = torch.randn(2, 4, length)
        order = sorted_order(random_buckets(dim, (2, 4, length), 0, 9))
        shared = sorted_order(random_buckets(dim, (1, 1, length), 0, 9))
        for xs, orders in [([x, few, one, lse], [order] * 4), ([x, lse], [shared, order]), ([lse], [shared])]:
            on_gpu = [y.cuda() for y in xs]
            with poisoned_allocations():
                got = op(on_gpu, [y.cuda() for y in orders])
            assert_same(got, op(xs, orders))


def test_rows_are_read_where_they_lie() -> None:
    """Slices of a packed tensor, and one whose rows are not aligned, which is copied."""
    packed = torch.randn(2, 300, 3, 4, 72, device="cuda").half()
    order = sorted_order(random_buckets(1, (2, 4, 300), 0, 9).cuda())
    index = order.long()[..., None]
    for x in (*packed[..., :64].permute(2, 0, 3, 1, 4), packed[:, :, 0, :, 1:65].transpose(1, 2)):
        assert torch.equal(OPS.gather_rows([x], [order])[0], x.gather(2, index.expand_as(x)))


def test_an_order_that_is_none_stays_inside() -> None:
    x = torch.randn(1, 1, 1000, 8, device="cuda")
    order = random_buckets(1, (1, 1, 1000), *RANGES[-1]).cuda()
    last = torch.where((order >= 0) & (order < 1000), order, 999).long()
    assert torch.equal(OPS.gather_rows([x], [order])[0], x[:, :, last[0, 0]])
    OPS.scatter_rows([x], [order])
    q = random_buckets(2, (1, 1, 1000), 0, 5).cuda()
    begin, end = OPS.bucket_rows(q, order, q, order.flip(-1).contiguous(), True, 1000, 1000)
    assert int(begin.min()) >= 0 and int(end.max()) <= 1000


# ---------------------------------------------------------------------------------------------------------------------
# block_list

LIST_SIZES = [(1, 1), (128, 128), (129, 1000), (1000, 129), (5000, 4500), (4096, 40000), (40000, 300), (0, 64), (64, 0)]


@pytest.mark.parametrize("lengths", LIST_SIZES)
@pytest.mark.parametrize("block", [(64, 64), (128, 128), (64, 256), (192, 128), (448, 320)])
def test_list_of_blocks_equals_that_of_the_cpu(lengths: tuple[int, int], block: tuple[int, int]) -> None:
    for density in (0.0, 0.1, 0.7, 1.0):
        blocks = random_blocks(1, (2, 3), lengths, block, density)
        for capacity in (-1, 17, 1000):
            with poisoned_allocations():
                got = OPS.block_list(blocks.cuda(), *block, *lengths, None, capacity, -1)
            want = OPS.block_list(blocks, *block, *lengths, None, capacity, -1)
            assert_same_list(got, want)


def assert_same_list(got, want) -> None:
    """Past the last entry and the last tile nothing is said."""
    assert [x.shape for x in got] == [x.shape for x in want]
    assert_same(got[:2], want[:2])
    entries = int(want[0].max()) if want[0].numel() else 0
    assert_same([x[:entries] for x in got[2:4]], [x[:entries] for x in want[2:4]])
    tiles = want[3][:entries]
    if want[4].shape[0] and bool((tiles >= 0).any()):
        used = tiles[tiles >= 0].long()
        assert_same([got[4][used.cuda()]], [want[4][used]])


@pytest.mark.parametrize("lengths", [(1, 1), (128, 128), (300, 1024), (1024, 300), (1000, 2064), (0, 64)])
@pytest.mark.parametrize("block", [(64, 64), (128, 128), (192, 256)])
def test_list_of_pairs_equals_that_of_the_cpu(lengths: tuple[int, int], block: tuple[int, int]) -> None:
    for density in (0.3, 1.0):
        blocks = random_blocks(2, (1, 2), lengths, block, density)
        pairs = random_pairs(3, (1, 2), lengths)
        views = [pairs, pairs[:, :1], pairs.mT.contiguous().mT, torch.nn.functional.pad(pairs, (1, 0))[..., 1:]]
        for view in views:
            for capacity, tiles in ((-1, -1), (9, -1), (1000, 3), (1000, 0)):
                want = OPS.block_list(blocks, *block, *lengths, view, capacity, tiles)
                with poisoned_allocations():
                    got = OPS.block_list(blocks.cuda(), *block, *lengths, view.cuda(), capacity, tiles)
                assert_same_list(got, want)


def test_pairs_are_read_at_any_address() -> None:
    """Views of GPU memory whose rows begin anywhere."""
    lengths = (256, 384)
    blocks = torch.ones(1, 1, 2, 3, dtype=torch.bool)
    wide = random_pairs(4, (1, 1), (256, 500))
    for first in (0, 1, 8, 16, 100):
        pairs = wide[..., first : first + 384]
        want = OPS.block_list(blocks, 128, 128, *lengths, pairs, -1, -1)
        got = OPS.block_list(blocks.cuda(), 128, 128, *lengths, wide.cuda()[..., first : first + 384], -1, -1)
        assert_same_list(got, want)


def test_a_captured_list_follows_its_blocks() -> None:
    lengths, block = (2000, 3000), (64, 128)
    blocks = random_blocks(1, (1, 2), lengths, block, 0.5).cuda()
    pairs = random_pairs(1, (1, 2), lengths).cuda()
    OPS.block_list(blocks, *block, *lengths, pairs, 500, 300)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = OPS.block_list(blocks, *block, *lengths, pairs, 500, 300)
    for seed, density in enumerate((0.9, 0.0, 0.2, 1.0)):
        blocks.copy_(random_blocks(seed, (1, 2), lengths, block, density))
        pairs.copy_(random_pairs(seed, (1, 2), lengths))
        graph.replay()
        assert_same_list(got, OPS.block_list(blocks.cpu(), *block, *lengths, pairs.cpu(), 500, 300))


def test_list_of_a_long_mask() -> None:
    """More cell rows than the scan takes at once."""
    lengths, block = (131072, 131072), (128, 128)
    blocks = random_blocks(1, (1, 9), lengths, block, 0.05)
    assert_same_list(
        OPS.block_list(blocks.cuda(), *block, *lengths, None, -1, -1),
        OPS.block_list(blocks, *block, *lengths, None, -1, -1),
    )


def test_nothing_waits_for_the_device() -> None:
    """Except a list that is counted first."""
    bucket = random_buckets(1, (1, 2, 50000), 0, 63).cuda()
    blocks = random_blocks(1, (1, 2), (1000, 1000), (64, 64), 0.5).cuda()
    x = torch.randn(1, 2, 50000, 64, device="cuda").half()
    torch.cuda.set_sync_debug_mode("error")
    try:
        order = OPS.bucket_sort(bucket)
        OPS.bucket_rows(bucket, order, bucket, order, True, 50000, 50000)
        OPS.scatter_rows(OPS.gather_rows([x], [order]), [order])
        OPS.block_list(blocks, 64, 64, 1000, 1000, None, 200, -1)
        with pytest.raises(RuntimeError, match="synchroniz"):
            OPS.block_list(blocks, 64, 64, 1000, 1000, None, -1, -1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_ids_at_both_ends_of_int32() -> None:
    ends = torch.tensor([INT_MAX, -INT_MAX - 1, 0, INT_MAX, -1], dtype=torch.int32).repeat(20000)
    for length in (5, 30000, 100000):
        assert_sorts(ends[:length].view(1, 1, length).cuda())
