"""Paged caches: attention, append and gather against the definition, on every backend."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from helpers import (
    CAUSAL,
    DENSE,
    ONE_EACH,
    TOP_LEFT,
    MaskCase,
    Options,
    Prefixes,
    Target,
    both,
    copies_in,
    poisoned_allocations,
    targets,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import (
    Cache,
    Judge,
    listed_pairs,
    make_cache,
    packed,
    queries,
    random_tree,
    run_and_check,
    run_packed_and_check,
    tree_pairs,
)

import flashmsa

EVERYWHERE = pytest.mark.parametrize("target", targets())
FEW = pytest.mark.parametrize("target", ONE_EACH)
NATIVE = pytest.mark.parametrize("target", [ONE_EACH[0], ONE_EACH[2]])
GPU = pytest.mark.parametrize("target", [ONE_EACH[2]])
PAGE_SIZES = (1, 8, 16, 32, 48, 64, 128, 256)
WINDOW = MaskCase("window", left=20, right=0)


# ---------------------------------------------------------------------------------------------------------------------
# Shapes


@EVERYWHERE
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_page_sizes(target: Target, page_size: int) -> None:
    """Shuffled and shared pages, the last one partly filled, one empty sequence; poison wherever nobody should look."""
    lens = [page_size, 2 * page_size + 1, 0, 300, 3 * page_size - 1, 67]
    cache = make_cache(target, lens, page_size, 2, 64, shared=2)
    for len_q in (1, 5):
        with poisoned_allocations():
            run_and_check(target, queries(target, len(lens), 8, len_q, 64), cache)


@EVERYWHERE
@pytest.mark.parametrize("group", [1, 4, 8, 16])
def test_groups_and_few_queries(target: Target, group: int) -> None:
    cache = make_cache(target, [130, 17, 4, 333], 16, 2, 64)
    for len_q in (1, 2, 3, 8, 16):
        run_and_check(target, queries(target, 4, 2 * group, len_q, 64), cache)


@EVERYWHERE
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (80, 80), (192, 128), (8, 8), (96, 40)], ids=str)
def test_head_dims(target: Target, dims: tuple[int, int]) -> None:
    cache = make_cache(target, [100, 257, 31], 32, 2, *dims)
    for len_q in (1, 33):
        run_and_check(target, queries(target, 3, 4, len_q, dims[0]), cache)


@EVERYWHERE
@pytest.mark.parametrize("page_size", [1, 16, 64, 48])
def test_chunked_prefill(target: Target, page_size: int) -> None:
    """Many new tokens behind many, few and no cached ones, and more queries than keys."""
    cache = make_cache(target, [500, 200, 203, 90], page_size, 2, 64)
    with poisoned_allocations():
        run_and_check(target, queries(target, 4, 4, 200, 64), cache)


@EVERYWHERE
@pytest.mark.parametrize("longest", [None, 140])
def test_mixed_batch(target: Target, longest: int | None) -> None:
    """Prefill, decode and a sequence without a query in one packed call, with rows that belong to nobody."""
    counts = [1, 1, 37, 0, 140, 3]
    cache = make_cache(target, [80, 333, 37, 12, 512, 2], 16, 2, 64)
    q, cuts = packed(target, counts, 8, 64, tail=9)
    with poisoned_allocations():
        run_packed_and_check(target, q, cuts, cache, max_seqlen_q=longest)


@EVERYWHERE
def test_packed_decode(target: Target) -> None:
    cache = make_cache(target, [80, 333, 1, 0], 16, 2, 128)
    q, cuts = packed(target, [2, 1, 1, 1], 8, 128, tail=2)
    run_packed_and_check(target, q, cuts, cache, max_seqlen_q=2)


@FEW
def test_nothing_to_do(target: Target) -> None:
    """No query, no sequence, no page in the table, no page at all, no key."""
    cache = make_cache(target, [20, 5], 16, 2, 64)

    def shapes(q: torch.Tensor, *arguments: torch.Tensor, **options) -> torch.Tensor:
        out, lse = flashmsa.paged_attention(q, *arguments, return_lse=True, backend=target.backend, **options)
        assert out.shape == q.shape and lse.isneginf().all() and not out.count_nonzero()
        return lse

    k, v, table, lens = cache.arguments()
    assert shapes(queries(target, 2, 4, 0, 64), *cache.arguments()).shape == (2, 4, 0)
    assert shapes(queries(target, 0, 4, 3, 64), k, v, table[:0], lens[:0]).shape == (0, 4, 3)
    q = queries(target, 2, 4, 3, 64)
    assert shapes(q, k, v, table[:, :0], lens).shape == (2, 4, 3)
    assert shapes(q, k[:0], v[:0], table, lens).shape == (2, 4, 3)
    assert shapes(q, k, v, table, torch.zeros_like(lens)).shape == (2, 4, 3)
    cuts = torch.zeros(3, dtype=torch.int32, device=target.device)
    assert shapes(q[0].transpose(0, 1), k, v, table, lens, cu_seqlens_q=cuts).shape == (4, 3)
    sinks = torch.randn(4, device=target.device)
    out, lse = flashmsa.paged_attention(
        q, k, v, table[:, :0], lens, sinks=sinks, return_lse=True, backend=target.backend
    )
    assert not out.count_nonzero() and torch.equal(lse, sinks[:, None].expand(2, 4, 3))


# ---------------------------------------------------------------------------------------------------------------------
# Masks and options

MASKS = {
    "dense": DENSE,
    "top-left": TOP_LEFT,
    "window": MaskCase("window", left=20, right=0),
    "window both sides": MaskCase("window", left=3, right=2),
    "first keys": MaskCase("window", left=9, right=0, keep=4),
    "first keys ahead": MaskCase("window", left=5, right=4, keep=70),
    "prefix": MaskCase("prefix", prefix=60),
    "prefix by sequence": Prefixes("prefix", prefixes=(0, 70, 9)),
    "prefix and window": both(MaskCase("prefix", prefix=50), MaskCase("window", left=40, right=9)),
}


@EVERYWHERE
@pytest.mark.parametrize("name", MASKS)
def test_masks(target: Target, name: str) -> None:
    cache = make_cache(target, [150, 64, 70], 16, 2, 64)
    for len_q in (1, 6, 140):
        run_and_check(target, queries(target, 3, 4, len_q, 64), cache, MASKS[name])


@FEW
def test_masks_of_packed_sequences(target: Target) -> None:
    cache = make_cache(target, [150, 64, 90], 16, 2, 64)
    q, cuts = packed(target, [5, 64, 1], 4, 64)
    for name, mask in MASKS.items():
        if name != "top-left":
            run_packed_and_check(target, q, cuts, cache, mask)


@EVERYWHERE
@pytest.mark.parametrize("name", ["softcap", "sinks", "alibi", "alibi by sequence", "all"])
def test_options(target: Target, name: str) -> None:
    heads, batch, device = 8, 3, target.device
    sinks, slopes = torch.randn(heads, device=device), torch.rand(heads, device=device)
    options = {
        "softcap": Options(softcap=1.5),
        "sinks": Options(sinks=sinks),
        "alibi": Options(slopes=slopes),
        "alibi by sequence": Options(slopes=torch.rand(batch, heads, device=device)),
        "all": Options(2.0, sinks, slopes),
    }[name]
    cache = make_cache(target, [150, 5, 0], 16, 2, 64)
    for len_q, mask in ((1, CAUSAL), (7, WINDOW), (140, CAUSAL), (140, WINDOW)):
        run_and_check(target, queries(target, batch, heads, len_q, 64), cache, mask, options)


@pytest.mark.parametrize("target", [*ONE_EACH[:2], ONE_EACH[4]])
def test_slopes_and_prefixes_by_sequence(target: Target) -> None:
    """Together, padded and packed: where no kernel has them the default backend is another."""
    cache = make_cache(target, [150, 64, 90], 16, 2, 64)
    slopes = Options(slopes=torch.rand(3, 4, device=target.device))
    q, cuts = packed(target, [50, 64, 1], 4, 64)
    mask = Prefixes("prefix", prefixes=(0, 70, 9))
    run_packed_and_check(target, q, cuts, cache, mask, slopes)
    run_and_check(target, queries(target, 3, 4, 60, 64), cache, mask, slopes)


@EVERYWHERE
@pytest.mark.parametrize("scale", [0.0, -0.3, 1.7])
def test_scales(target: Target, scale: float) -> None:
    cache = make_cache(target, [150, 64, 1], 64, 1, 64)
    for len_q in (1, 70):
        run_and_check(target, queries(target, 3, 4, len_q, 64), cache, scale=scale)


@FEW
@pytest.mark.parametrize("len_q", [1, 140])
def test_visible_nan(target: Target, len_q: int) -> None:
    """NaN in a value gives NaN in the rows that see it alone; NaN in a query in its row alone."""
    cache = make_cache(target, [100, 100], 16, 2, 64)
    place = cache.table[0, 3].item()
    cache.v_pages[place, 2, 1, 5] = math.nan
    cache.v[0] = cache.v[0].clone()
    cache.v[0][50, 1, 5] = math.nan
    q = queries(target, 2, 4, len_q, 64)
    out, _ = run_and_check(target, q, cache, MaskCase("window", left=30, right=0))
    assert out.isnan().any() == (len_q > 20)
    q[1, 2, len_q - 1] = math.nan
    out = flashmsa.paged_attention(q, *cache.arguments(), backend=target.backend)
    assert out[1, 2, len_q - 1].isnan().all() and not out[1, 3].isnan().any()


# ---------------------------------------------------------------------------------------------------------------------
# Listed pages, trees


@EVERYWHERE
@pytest.mark.parametrize("mask", [CAUSAL, MaskCase("window", left=90, right=0)], ids=str)
def test_query_pages(target: Target, mask: MaskCase) -> None:
    """Subsets by block of queries: none, one, any order, one twice, beyond the length, all; the last block is short."""
    page_size, lens, len_q, block = 16, [300, 170, 64], 150, 64
    cache = make_cache(target, lens, page_size, 2, 64)
    rng = random.Random(3)
    lists = torch.full((3, 3, 21), -1, dtype=torch.int32)
    for b, length in enumerate(lens):
        pages = -(-length // page_size)
        every = list(range(pages))
        rng.shuffle(every)
        some = rng.sample(every, pages // 2)
        for n, listed in enumerate(
            (some + some[:2], [], every) if b != 1 else ([pages - 1], [*every, pages, 20], some)
        ):
            where = rng.sample(range(21), len(listed)) if len(listed) <= 21 else range(21)
            for place, page in zip(where, listed, strict=True):
                lists[b, n, place] = page
    allowed = [
        listed_pairs(lists[b], block, page_size, len_q, lens[b], mask).to(target.device) for b in range(len(lens))
    ]
    q = queries(target, 3, 4, len_q, 64)
    run_and_check(target, q, cache, mask, allowed=allowed, query_pages=lists.to(target.device), query_block=block)


@EVERYWHERE
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", ["softcap", "alibi", "alibi by sequence", "all"])
def test_query_pages_and_options(target: Target, name: str, dim: int) -> None:
    """What bends the logits, by true positions, over pages that do not follow each other; padded queries and packed."""
    page_size, lens, heads = 16, [500, 170], 4
    slopes = torch.tensor([0.5, 0.1, 0.02, 0.0], device=target.device)
    options = {
        "softcap": Options(softcap=1.5),
        "alibi": Options(slopes=slopes),
        "alibi by sequence": Options(slopes=torch.rand(2, heads, device=target.device)),
        "all": Options(softcap=4.0, sinks=torch.randn(heads, device=target.device), slopes=slopes),
    }[name]
    cache = make_cache(target, lens, page_size, 2, dim)
    lists = torch.randint(-1, 32, (2, 2, 12), dtype=torch.int32)
    lists[:, :, 0] = torch.tensor([[31], [10]])  # the last page, which ends before its slots do
    on_device = lists.to(target.device)
    allowed = [listed_pairs(lists[b], 128, page_size, 150, lens[b], CAUSAL).to(target.device) for b in (0, 1)]
    run_and_check(
        target, queries(target, 2, heads, 150, dim), cache, CAUSAL, options, allowed=allowed, query_pages=on_device
    )
    counts = [150, 60]
    q, cuts = packed(target, counts, heads, dim)
    allowed[1] = listed_pairs(lists[1], 128, page_size, 60, lens[1], CAUSAL).to(target.device)
    run_packed_and_check(
        target, q, cuts, cache, CAUSAL, options, allowed=allowed, query_pages=on_device, max_seqlen_q=150
    )


@EVERYWHERE
@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
def test_lists_of_no_page(target: Target, is_packed: bool) -> None:
    """Lists without any room list nothing; they are no missing lists."""
    cache = make_cache(target, [60, 37], 16, 2, 64)
    sinks = torch.randn(4, device=target.device)
    for len_q in (1, 5, 140):
        q = queries(target, 2, 4, len_q, 64)
        blocks = -(-len_q // 128)
        options: dict = {}
        if is_packed:
            q, cuts = packed(target, [len_q, len_q], 4, 64)
            options = {"cu_seqlens_q": cuts, "max_seqlen_q": len_q}
        lists = torch.zeros(2, blocks, 0, dtype=torch.int32, device=target.device)
        call = {"query_pages": lists, "return_lse": True, "backend": target.backend, **options}
        for with_sinks in (False, True):
            out, lse = flashmsa.paged_attention(q, *cache.arguments(), sinks=sinks if with_sinks else None, **call)
            expected = sinks[:, None].expand_as(lse) if with_sinks else torch.full_like(lse, float("-inf"))
            assert not out.count_nonzero() and torch.equal(lse, expected), (len_q, with_sinks)


@EVERYWHERE
def test_query_pages_of_few_and_packed_queries(target: Target) -> None:
    page_size, lens = 16, [300, 170]
    cache = make_cache(target, lens, page_size, 2, 64)
    lists = torch.tensor([[[3, 18, -1, 0]], [[10, 2, 2, -1]]], dtype=torch.int32)
    for len_q in (1, 4):
        allowed = [listed_pairs(lists[b], 128, page_size, len_q, lens[b], CAUSAL).to(target.device) for b in (0, 1)]
        q = queries(target, 2, 8, len_q, 64)
        run_and_check(target, q, cache, allowed=allowed, query_pages=lists.to(target.device))
    counts = [70, 130]
    more = torch.cat([lists, lists.flip(2) + 1], 1)
    allowed = [listed_pairs(more[b], 128, page_size, counts[b], lens[b], CAUSAL).to(target.device) for b in (0, 1)]
    q, cuts = packed(target, counts, 4, 64, tail=3)
    run_packed_and_check(target, q, cuts, cache, allowed=allowed, query_pages=more.to(target.device), max_seqlen_q=130)


@EVERYWHERE
@pytest.mark.parametrize(
    ("page_size", "lens", "count"), [(16, [500, 470, 333], 9), (1, [700, 650, 300], 280)], ids=["few", "many"]
)
def test_lists_with_and_without_room(target: Target, page_size: int, lens: list[int], count: int) -> None:
    """Lists that have a page in every place, in any order; then one of them with a place less, or with a page twice."""
    cache = make_cache(target, lens, page_size, 2, 64)
    rng = random.Random(5)
    lists = torch.tensor([[rng.sample(range(-(-n // page_size)), count)] for n in lens], dtype=torch.int32)
    q = queries(target, 3, 8, 1, 64)
    for entry in (None, -1, lists[1, 0, 0].item(), lens[1]):
        if entry is not None:
            lists[1, 0, 4] = entry
        allowed = [listed_pairs(lists[b], 128, page_size, 1, lens[b], CAUSAL).to(target.device) for b in range(3)]
        run_and_check(target, q, cache, allowed=allowed, query_pages=lists.to(target.device))


@pytest.mark.parametrize("target", targets(dtypes=(torch.float32,)))
def test_query_pages_of_any_block(target: Target) -> None:
    """Blocks that no kernel tile knows, pages of one token, with softcap."""
    cache = make_cache(target, [50, 33], 1, 2, 64)
    lists = torch.randint(-1, 33, (2, 7, 20), dtype=torch.int32)
    allowed = [listed_pairs(lists[b], 3, 1, 20, (50, 33)[b], CAUSAL).to(target.device) for b in (0, 1)]
    q = queries(target, 2, 4, 20, 64)
    options = Options(softcap=3.0)
    run_and_check(
        target, q, cache, options=options, allowed=allowed, query_pages=lists.to(target.device), query_block=3
    )


@FEW
def test_listed_halves_merge_to_the_whole(target: Target) -> None:
    """Attention over two disjoint sets of pages, one of them empty too, joined by merge_states."""
    cache = make_cache(target, [200, 90], 16, 2, 64)
    q = queries(target, 2, 4, 3, 64)

    def over(*pages: int) -> tuple[torch.Tensor, torch.Tensor]:
        lists = torch.tensor(pages or [-1], dtype=torch.int32, device=target.device).expand(2, 1, -1)
        return flashmsa.paged_attention(
            q, *cache.arguments(), query_pages=lists, return_lse=True, backend=target.backend
        )

    whole, whole_lse = run_and_check(target, q, cache)
    limit = 4 * torch.finfo(target.dtype).eps
    for a, b in ((range(0, 13, 2), range(1, 13, 2)), (range(13), ())):
        out, lse = flashmsa.merge_states(*over(*a), *over(*b))
        assert (out.float() - whole.float()).abs().max() <= limit * whole.float().abs().max()
        assert (lse - whole_lse).abs().max() <= 1e-5 * whole_lse.abs().max()


@EVERYWHERE
@pytest.mark.parametrize("group", [1, 4, 16])
def test_trees(target: Target, group: int) -> None:
    """Bits over the last keys; in the third sequence they reach before the first key."""
    rng = random.Random(group)
    lens = [100, 64, 5]
    cache = make_cache(target, lens, 16, 2, 64)
    for len_q in (1, 7, 16):
        trees = torch.stack([random_tree(len_q, rng) for _ in lens])
        allowed = [tree_pairs(trees[b], lens[b]).to(target.device) for b in range(3)]
        q = queries(target, 3, 2 * group, len_q, 64)
        run_and_check(target, q, cache, allowed=allowed, tree_mask=trees.to(target.device))


@FEW
def test_tree_words_and_shared_trees(target: Target) -> None:
    """Words of bits are the same as bools, also bit 31; a tree of one batch serves all."""
    cache = make_cache(target, [100, 40], 16, 2, 64)
    tree = torch.eye(32, dtype=torch.bool) | (torch.rand(32, 32) < 0.3)
    words = [sum(1 << t for t in range(32) if row[t]) for row in tree.tolist()]
    signed = torch.tensor([w - (1 << 32 if w >> 31 else 0) for w in words], dtype=torch.int32, device=target.device)
    allowed = [tree_pairs(tree, n).to(target.device) for n in (100, 40)]
    q = queries(target, 2, 2, 32, 64)
    a, _ = run_and_check(target, q, cache, allowed=allowed, tree_mask=tree[None].to(target.device))
    b, _ = run_and_check(target, q, cache, allowed=allowed, tree_mask=signed.expand(2, 32))
    assert torch.equal(a, b)


# ---------------------------------------------------------------------------------------------------------------------
# What lengths and tables hold


@FEW
@pytest.mark.parametrize("len_q", [1, 140])
def test_out_of_range_entries_stay_in_bounds(target: Target, len_q: int) -> None:
    """Unchecked, an entry within a length is clamped into the pool, and a length into the table."""
    cache = make_cache(target, [100, 90], 16, 2, 64)
    k, v, table, lens = cache.arguments()
    k.nan_to_num_(0.5), v.nan_to_num_(0.5, posinf=0.25)
    table[0, 1], table[1, 2] = 2**31 - 1, -5
    clamped = table.clamp(0, k.shape[0] - 1)
    q = queries(target, 2, 4, len_q, 64)

    def run(table: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        return flashmsa.paged_attention(q, k, v, table, lens, backend=target.backend)

    assert torch.equal(run(table, lens), run(clamped, lens)) and run(table, lens).isfinite().all()
    most = table.shape[1] * 16
    full = torch.full_like(lens, most)
    assert torch.equal(run(clamped, full + 1), run(clamped, full))
    assert torch.equal(run(clamped, torch.full_like(lens, 2**31 - 1)), run(clamped, full))
    assert not run(clamped, torch.full_like(lens, -(2**31))).count_nonzero()
    gathered = flashmsa.gather_pages(k, v, table, full * 2, backend=target.backend)
    assert gathered[0].isfinite().all()


@NATIVE
def test_offsets_of_any_kind_stay_in_bounds(target: Target) -> None:
    """Unchecked, packed offsets are clamped: rows of good sequences come out, nothing else is touched."""
    cache = make_cache(target, [40, 40, 40], 16, 2, 64)
    q, cuts = packed(target, [4, 5, 6], 4, 64)
    bad = cuts.clone()
    bad[3] = 2**31 - 1
    out = flashmsa.paged_attention(q, *cache.arguments(), cu_seqlens_q=bad, backend=target.backend)
    good = flashmsa.paged_attention(q, *cache.arguments(), cu_seqlens_q=cuts, backend=target.backend)
    assert torch.equal(out[:9], good[:9]) and out.isfinite().all()
    bad[:] = torch.tensor([-7, 3, 1, -(2**31)], dtype=torch.int32, device=target.device)
    assert flashmsa.paged_attention(q, *cache.arguments(), cu_seqlens_q=bad, backend=target.backend).isfinite().all()


@pytest.mark.parametrize("target", targets(composed=False))
@pytest.mark.parametrize("len_q", [1, 4, 90])
def test_batch_invariance(target: Target, len_q: int) -> None:
    """Bitwise the same alone, in a batch, and in another table with other neighbours."""
    lens = [130, 700, 3, 64, 300]
    cache = make_cache(target, lens, 16, 2, 64)
    q = queries(target, 5, 8, len_q, 64)
    k, v, table, lengths = cache.arguments()

    def run(*rows: int) -> torch.Tensor:
        rows = torch.tensor(rows, device=target.device)
        places = int(max(-(-lens[b] // 16) for b in rows.tolist()))
        return flashmsa.paged_attention(
            q[rows], k, v, table[rows, :places], lengths[rows], batch_invariant=True, backend=target.backend
        )

    whole = run(0, 1, 2, 3, 4)
    for b in range(5):
        assert torch.equal(run(b)[0], whole[b])
    assert torch.equal(run(4, 1), whole[[4, 1]])


@NATIVE
@pytest.mark.parametrize("splits", [1, 2, 7, 64])
def test_num_splits(target: Target, splits: int) -> None:
    cache = make_cache(target, [1000, 130, 0, 1], 16, 2, 128)
    for len_q in (1, 3):
        run_and_check(target, queries(target, 4, 8, len_q, 128), cache, num_splits=splits)


# ---------------------------------------------------------------------------------------------------------------------
# Layouts


@EVERYWHERE
def test_layouts_of_pools(target: Target) -> None:
    """K and V interleaved in one pool; heads outside the page; pages of a larger pool; no cache is copied."""
    cache = make_cache(target, [100, 37], 16, 2, 64)
    k, v, table, lens = cache.arguments()
    both_in_one = torch.stack([k, v], 1)
    heads_outside = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    wide = torch.cat([k, v], 3)
    layers = torch.stack([v, k, v])
    for pools in (
        both_in_one.unbind(1),
        heads_outside,
        (wide[..., :64], wide[..., 64:]),
        (layers[1], layers[2]),
    ):
        assert not pools[0].is_contiguous() or pools[0].storage_offset()
        for len_q in (1, 140):
            q = queries(target, 2, 4, len_q, 64)
            other = Cache(*pools, table, lens, cache.k, cache.v)
            run_and_check(target, q, other)
    if target.native and target.device == "cpu":
        q = queries(target, 2, 4, 1, 64)
        assert copies_in(lambda: flashmsa.paged_attention(q, *both_in_one.unbind(1), table, lens)) == 0


@EVERYWHERE
def test_layouts_of_queries(target: Target) -> None:
    """A view of (B, S, H, D) gives its own memory order back; a slice of packed qkv; expanded heads."""
    cache = make_cache(target, [100, 37], 16, 2, 64)
    for len_q in (2, 140):
        q = queries(target, 2, 4, len_q, 64)
        inside = q.transpose(1, 2).contiguous().transpose(1, 2)
        out, _ = run_and_check(target, inside, cache)
        assert out.transpose(1, 2).is_contiguous()
        sliced = torch.cat([inside, inside], 3)[..., :64]
        run_and_check(target, sliced, cache)
        run_and_check(target, q[:, :1].expand(-1, 4, -1, -1), cache)


@EVERYWHERE
@pytest.mark.parametrize("length", [64, 77])
def test_dense_caches(target: Target, length: int) -> None:
    """Without a table: (B, S, Hkv, D) of any length, lengths given or not."""
    lens = [length, 13, 0]
    k, v = (torch.full((3, length, 2, 64), x) for x in (math.nan, math.inf))
    for b, n in enumerate(lens):
        k[b, :n], v[b, :n] = torch.randn(n, 2, 64), torch.randn(n, 2, 64)
    k, v = (x.to(target.dtype).to(target.device) for x in (k, v))
    lengths = torch.tensor(lens, dtype=torch.int32, device=target.device)
    tokens = [[x[b, :n] for b, n in enumerate(lens)] for x in (k, v)]
    cache = Cache(k, v, None, lengths, *tokens)
    for len_q in (1, 5, 40):
        run_and_check(target, queries(target, 3, 4, len_q, 64), cache)
    full = Cache(k[:1], v[:1], None, None, tokens[0][:1], tokens[1][:1])
    run_and_check(target, queries(target, 1, 4, 3, 64), full)


# ---------------------------------------------------------------------------------------------------------------------
# Gather, append


@EVERYWHERE
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_gather(target: Target, page_size: int) -> None:
    lens = [page_size, 2 * page_size + 1, 0, 67]
    cache = make_cache(target, lens, page_size, 3, 40, 24)
    with poisoned_allocations():
        k, v = flashmsa.gather_pages(*cache.arguments(), backend=target.backend)
    length = cache.table.shape[1] * page_size
    assert k.shape == (4, 3, length, 40) and v.shape == (4, 3, length, 24) and k.dtype == v.dtype == target.dtype
    for b, n in enumerate(lens):
        for got, tokens in ((k, cache.k), (v, cache.v)):
            assert torch.equal(got[b, :, :n], tokens[b].transpose(0, 1))
            assert not got[b, :, n:].count_nonzero()


def rope_tables(positions: int, half: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.arange(positions)[:, None] * 100.0 ** (-torch.arange(half) / half)
    return tuple(x.to(dtype).to(device) for x in (angle.cos(), angle.sin()))


def turned(k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, first: int, interleaved: bool) -> torch.Tensor:
    """k (tokens, heads, D) of positions from `first` on, pair by pair in float64."""
    out, half = k.double().clone(), cos.shape[1]
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        c, s = (x[first : first + k.shape[0], i].double()[:, None] for x in (cos, sin))
        x, y = k[..., a].double(), k[..., b].double()
        out[..., a], out[..., b] = x * c - y * s, y * c + x * s
    return out


@EVERYWHERE
@pytest.mark.parametrize("rope", ["none", "half", "interleaved", "part", "own dtype"])
@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
def test_append(target: Target, rope: str, is_packed: bool) -> None:
    """New tokens behind those that are there, turned; every other place of the pools keeps its bits."""
    lens, counts, page_size = [20, 0, 47, 16], [5, 5, 5, 5], 16
    if is_packed:
        counts = [5, 1, 33, 0]
    cache = make_cache(target, [a + b for a, b in zip(lens, counts, strict=True)], page_size, 2, 64, 40)
    k_pages, v_pages, table, _ = cache.arguments()
    before = torch.tensor(lens, dtype=torch.int32, device=target.device)
    half = 16 if rope == "part" else 32
    dtype = target.dtype if rope == "own dtype" else torch.float32
    tables = None if rope == "none" else rope_tables(100, half, dtype, target.device)
    interleaved = rope in ("interleaved", "part")
    k_new, v_new = (torch.randn(sum(counts), 2, d).to(target.dtype).to(target.device) for d in (64, 40))
    expected_k, expected_v = k_pages.clone().double(), v_pages.clone()
    row = 0
    for b, count in enumerate(counts):
        for i in range(count):
            place = int(table[b, (lens[b] + i) // page_size]), (lens[b] + i) % page_size
            token = k_new[row : row + 1]
            token = token.double() if tables is None else turned(token, *tables, lens[b] + i, interleaved)
            expected_k[place], expected_v[place] = token[0], v_new[row]
            row += 1
    cuts = None
    if is_packed:
        cuts = torch.tensor([0, 5, 6, 39, 39], dtype=torch.int32, device=target.device)
    else:
        k_new, v_new = (x.view(4, 5, 2, -1).transpose(1, 2) for x in (k_new, v_new))
    lens_kept = before.clone()
    flashmsa.append_kv(
        *(k_pages, v_pages, table, before, k_new, v_new),
        None if tables is None else (*tables, interleaved),
        cu_seqlens=cuts,
        backend=target.backend,
    )
    assert torch.equal(before, lens_kept), "kv_lens is what it was"
    assert torch.equal(v_pages.nan_to_num(), expected_v.nan_to_num())
    if tables is None:
        assert torch.equal(k_pages.nan_to_num().double(), expected_k.nan_to_num())
    else:
        # One rounding, and products in fp32 (float64 for float64).
        unit = torch.finfo(target.dtype).eps + 4 * torch.finfo(torch.promote_types(target.dtype, torch.float32)).eps
        error = (k_pages.double() - expected_k).nan_to_num()
        assert torch.equal(k_pages.isnan(), expected_k.isnan())
        assert (error.abs() <= unit * 1.5 * k_new.double().abs().max()).all()


@EVERYWHERE
@pytest.mark.parametrize("from_values", [False, True], ids=["from k_pages", "from v_pages"])
def test_appended_tokens_may_lie_in_the_caches(target: Target, from_values: bool) -> None:
    """A sequence's beginning behind another one: places that are read are written by the same call."""
    k_pages, v_pages = (torch.randn(8, 16, 2, 64).to(target.dtype).to(target.device) for _ in "kv")
    table = torch.arange(8, dtype=torch.int32, device=target.device).view(2, 4)
    before = torch.tensor([10, 3], dtype=torch.int32, device=target.device)
    k_new, v_new = (
        x[:4].flatten(0, 1)[None].expand(2, -1, -1, -1).transpose(1, 2)[:, :, :20] for x in (k_pages, v_pages)
    )
    if from_values:
        k_new, v_new = v_new, k_new
    expected = k_pages.clone(), v_pages.clone()
    flashmsa.append_kv(*expected, table, before, k_new.clone(), v_new.clone(), backend=target.backend)
    flashmsa.append_kv(k_pages, v_pages, table, before, k_new, v_new, backend=target.backend)
    assert torch.equal(k_pages, expected[0]) and torch.equal(v_pages, expected[1])


@EVERYWHERE
@pytest.mark.parametrize("name", ["k_pages", "v_pages"])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_caches_that_overlap_are_not_written(target: Target, name: str, dim: int) -> None:
    caches = {n: torch.zeros(4, 16, 2, 64, dtype=target.dtype, device=target.device) for n in ("k_pages", "v_pages")}
    table = torch.arange(4, dtype=torch.int32, device=target.device).view(2, 2)
    lens = torch.zeros(2, dtype=torch.int32, device=target.device)
    new = torch.ones(2, 2, 3, 64, dtype=target.dtype, device=target.device)
    caches[name] = caches[name].narrow(dim, 0, 1).expand(4, 16, 2, 64)
    with pytest.raises(ValueError, match=rf"{name}: strides .*overlap"):
        flashmsa.append_kv(*caches.values(), table, lens, new, new, backend=target.backend)
    assert not any(cache.count_nonzero() for cache in caches.values())


@EVERYWHERE
def test_appended_tokens_without_a_place_are_dropped(target: Target) -> None:
    """Beyond the table; on a page that does not exist; all of them."""
    cache = make_cache(target, [30, 30], 16, 2, 64, spare=0)
    k_pages, v_pages, table, _ = cache.arguments()
    table[1, 1] = 2**31 - 1
    before = torch.tensor([30, 14], dtype=torch.int32, device=target.device)
    k_new, v_new = (queries(target, 2, 2, 4, 64) for _ in range(2))
    expected_k, expected_v = k_pages.clone(), v_pages.clone()
    for expected, new in ((expected_k, k_new), (expected_v, v_new)):
        expected[table[0, 1].item(), 14:16] = new[0, :, :2].transpose(0, 1)
        expected[table[1, 0].item(), 14:16] = new[1, :, :2].transpose(0, 1)

    def append(table: torch.Tensor, lens: torch.Tensor) -> None:
        flashmsa.append_kv(k_pages, v_pages, table, lens, k_new, v_new, backend=target.backend)
        assert torch.equal(k_pages.nan_to_num(), expected_k.nan_to_num())
        assert torch.equal(v_pages.nan_to_num(), expected_v.nan_to_num())

    append(table, before)
    append(table, torch.full_like(before, 2**31 - 1))
    append(torch.full_like(table, -1), before)


@FEW
def test_append_any_page_size_and_layout(target: Target) -> None:
    """A dense cache is a pool of long pages, whatever their length; heads outside the page."""
    k, v = (torch.zeros(3, 2, 50, 64, dtype=target.dtype, device=target.device).transpose(1, 2) for _ in range(2))
    table = torch.tensor([[2], [0], [1]], dtype=torch.int32, device=target.device)
    lens = torch.tensor([0, 48, 13], dtype=torch.int32, device=target.device)
    k_new, v_new = (queries(target, 3, 2, 2, 64) for _ in range(2))
    flashmsa.append_kv(k, v, table, lens, k_new, v_new, backend=target.backend)
    for pool, new in ((k, k_new), (v, v_new)):
        expected = torch.zeros_like(pool)
        for b, (page, first) in enumerate(zip((2, 0, 1), (0, 48, 13), strict=True)):
            expected[page, first : first + 2] = new[b].transpose(0, 1)
        assert torch.equal(pool, expected)


@FEW
def test_decode_step_by_step(target: Target) -> None:
    """Append, then attend, token by token: as one causal call over the whole sequence."""
    batch, heads, dim, steps, page_size = 2, 2, 64, 40, 16
    k, v = (queries(target, batch, heads, steps, dim) for _ in range(2))
    q = queries(target, batch, 4, steps, dim)
    k_pages, v_pages = (
        torch.full((6, page_size, heads, dim), math.nan, dtype=target.dtype, device=target.device) for _ in range(2)
    )
    table = torch.tensor([[4, 0, 2], [1, 5, 3]], dtype=torch.int32, device=target.device)
    lens = torch.zeros(batch, dtype=torch.int32, device=target.device)
    outs = []
    for t in range(steps):
        step = slice(t, t + 1)
        flashmsa.append_kv(k_pages, v_pages, table, lens, k[:, :, step], v[:, :, step], backend=target.backend)
        lens += 1
        outs.append(flashmsa.paged_attention(q[:, :, step], k_pages, v_pages, table, lens, backend=target.backend))
    tokens = [[x[b].transpose(0, 1) for b in range(batch)] for x in (k, v)]
    whole = Cache(k_pages, v_pages, table, lens, *tokens)
    once, lse = run_and_check(target, q, whole)
    judge = Judge(whole)
    for b in range(batch):
        judge.add(b, q[b], torch.cat(outs, 2)[b], lse[b], CAUSAL)
    judge.decide()
    assert once.shape == q.shape


# ---------------------------------------------------------------------------------------------------------------------
# Random cases


@settings(max_examples=60)
@given(st.data())
def test_any_case(data: st.DataObject) -> None:
    """Shapes, masks and options at random, packed and padded, on the CPU backend and the composed one."""
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    target = Target(data.draw(st.sampled_from(["cpu", "torch"])), "cpu", dtype)
    page_size = data.draw(st.sampled_from(PAGE_SIZES))
    batch = data.draw(st.integers(1, 4))
    lens = [data.draw(st.integers(0, 300)) for _ in range(batch)]
    heads_kv, group = data.draw(st.sampled_from([1, 2, 3])), data.draw(st.sampled_from([1, 2, 5, 16, 70]))
    dim, dim_v = (data.draw(st.sampled_from([8, 40, 64])) for _ in range(2))
    kind = data.draw(st.sampled_from(["dense", "causal", "window", "prefix"]))
    left, right, keep = (data.draw(st.integers(0, 90)) for _ in range(3))
    mask = MaskCase(kind, left=left, right=right, keep=keep if kind == "window" else 0, prefix=left)
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    sinks = torch.randn(heads_kv * group) if data.draw(st.booleans()) else None
    slopes = torch.rand(heads_kv * group) if data.draw(st.booleans()) and group < 70 else None
    options = Options(data.draw(st.sampled_from([0.0, 2.0])), sinks, slopes)
    cache = make_cache(target, lens, page_size, heads_kv, dim, dim_v, shared=1)
    if data.draw(st.booleans()) and sinks is None:
        counts = [data.draw(st.integers(0, 40)) for _ in range(batch)]
        q, cuts = packed(target, counts, heads_kv * group, dim, tail=2)
        run_packed_and_check(target, q, cuts, cache, mask, options)
    else:
        q = queries(target, batch, heads_kv * group, data.draw(st.integers(1, 30)), dim)
        run_and_check(target, q, cache, mask, options)


# ---------------------------------------------------------------------------------------------------------------------
# Tracing, threads


@FEW
def test_compiled(target: Target) -> None:
    """fullgraph, with lengths that change: one graph, equal to eager; append too."""
    cache = make_cache(target, [100, 37], 16, 2, 64)
    k_pages, v_pages, table, lens = (x.nan_to_num(0.0, 0.0) if x.is_floating_point() else x for x in cache.arguments())
    table = table.clamp(0, k_pages.shape[0] - 1)

    def step(q, k_new, v_new, k_pages, v_pages, table, lens):
        flashmsa.append_kv(k_pages, v_pages, table, lens, k_new, v_new, backend=target.backend)
        return flashmsa.paged_attention(q, k_pages, v_pages, table, lens + 1, backend=target.backend)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for shift in (0, 3):
        q = queries(target, 2, 4, 1, 64)
        new = [queries(target, 2, 2, 1, 64) for _ in range(2)]
        pools = [[x.clone() for x in (k_pages, v_pages)] for _ in range(2)]
        expected = step(q, *new, *pools[0], table, lens - shift)
        got = compiled(q, *new, *pools[1], table, lens - shift)
        assert torch.equal(got, expected) or target.backend == "torch"
        assert (got.float() - expected.float()).abs().max() <= 8 * torch.finfo(target.dtype).eps
        assert all(torch.equal(a, b) for a, b in zip(*pools, strict=True))


@NATIVE
def test_opcheck(target: Target) -> None:
    cache = make_cache(target, [100, 37], 16, 2, 64)
    k, v, table, lens = (x.nan_to_num(0.0, 0.0) if x.is_floating_point() else x for x in cache.arguments())
    q = queries(target, 2, 4, 3, 64)
    call = (q, k, v, table, lens, None, -1, None, 128, 1, [0], [], None, None, 0.0, None, None, 0, False, None, True)
    torch.library.opcheck(torch.ops.flashmsa.paged_attention.default, call)
    torch.library.opcheck(torch.ops.flashmsa.gather_pages.default, (k, v, table, lens))
    new = queries(target, 2, 2, 1, 64)
    arguments = (k, v, table.clamp(0, 3), lens, new, new, None, None, None, False)
    torch.library.opcheck(torch.ops.flashmsa.append_kv.default, arguments)


def test_number_of_threads() -> None:
    target = Target("cpu", "cpu", torch.float32)
    cache = make_cache(target, [500, 37, 260], 16, 2, 64)
    q = queries(target, 3, 8, 70, 64)
    results = []
    for threads in (1, 4):
        torch.set_num_threads(threads)
        results.append(flashmsa.paged_attention(q, *cache.arguments()))
    torch.set_num_threads(1)
    assert torch.equal(*results)


def test_workspace_and_explain_on_the_cpu() -> None:
    target = Target("cpu", "cpu", torch.float32)
    cache = make_cache(target, [50], 16, 2, 64)
    q = queries(target, 1, 4, 1, 64)
    workspace = flashmsa.paged_workspace(q, *cache.arguments()[:3], num_splits=3)
    assert workspace.dtype == torch.uint8 and workspace.numel() == 0
    expected = flashmsa.paged_attention(q, *cache.arguments())
    assert torch.equal(flashmsa.paged_attention(q, *cache.arguments(), workspace=workspace), expected)
    explained = flashmsa.explain_paged(q, *cache.arguments())
    assert (explained.backend, explained.path, explained.runs) == ("cpu", "pages", True)
    assert "sm90" in explained.rejected and "pages" in str(explained)
    assert flashmsa.explain_paged(q, *cache.arguments(), backend="torch").path == "composed"
    sm90 = flashmsa.explain_paged(q, *cache.arguments(), backend="sm90")
    assert not sm90.runs and "CPU" in sm90.reason.upper()


# ---------------------------------------------------------------------------------------------------------------------
# Streams, graphs, devices


@GPU
@pytest.mark.gpu
def test_paths_explained(target: Target) -> None:
    """Few rows decode, many prefill, what neither serves takes two stages, what nothing serves runs on torch."""
    cache = make_cache(target, [500, 300], 16, 2, 128)

    def path(len_q: int, **options) -> str:
        return flashmsa.explain_paged(queries(target, 2, 8, len_q, 128), *cache.arguments(), **options).path

    assert path(1) == "decode" and path(200) == "prefill"
    assert path(200, softcap=2.0) == "two-stage"
    lists = torch.zeros(2, 2, 4, dtype=torch.int32, device=target.device)
    assert path(200, query_pages=lists) == path(200, query_pages=lists, softcap=2.0) == "prefill"
    odd = torch.zeros(2, 5, 4, dtype=torch.int32, device=target.device)
    assert path(200, query_pages=odd, query_block=48) == "composed"
    tree = torch.eye(16, dtype=torch.bool, device=target.device)[None]
    many = flashmsa.explain_paged(queries(target, 2, 64, 16, 128), *cache.arguments(), tree_mask=tree)
    assert many.path == "decode" and many.runs
    with pytest.raises(NotImplementedError, match="query_pages"):
        flashmsa.paged_attention(
            queries(target, 2, 8, 200, 128), *cache.arguments(), query_pages=odd, query_block=48, backend="sm90"
        )


@GPU
@pytest.mark.gpu
@pytest.mark.parametrize("case", ["decode", "speculative", "prefill", "packed", "two-stage"])
def test_graph_replay(target: Target, case: str) -> None:
    """Captured once, replayed with shorter, longer and zero lengths and other tables; two captures in turn."""
    steps = [[300, 64, 7, 129], [500, 1, 500, 33], [0, 0, 3, 0], [17, 480, 0, 500]]
    caches = [make_cache(target, lens, 16, 2, 128, seed=n) for n, lens in enumerate(steps)]
    len_q = {"decode": 1, "speculative": 4, "prefill": 70, "packed": 1, "two-stage": 70}[case]
    options = {"softcap": 3.0} if case == "two-stage" else {}
    places, pages = max(c.table.shape[1] for c in caches), max(c.k_pages.shape[0] for c in caches)
    buffers = Cache(
        *(torch.zeros(pages, 16, 2, 128, dtype=target.dtype, device=target.device) for _ in range(2)),
        torch.zeros(4, places, dtype=torch.int32, device=target.device),
        torch.zeros(4, dtype=torch.int32, device=target.device),
    )
    q = queries(target, 4, 8, len_q, 128)
    cuts = torch.tensor([0, 2, 2, 3, 4], dtype=torch.int32, device=target.device)
    if case == "packed":
        q = queries(target, 1, 6, 8, 128)[0]
        options = {"cu_seqlens_q": cuts, "max_seqlen_q": 4}
    workspace = flashmsa.paged_workspace(q, *buffers.arguments()[:3], **options)

    def call(**more) -> torch.Tensor:
        return flashmsa.paged_attention(q, *buffers.arguments(), backend=target.backend, **options, **more)

    def fill(cache: Cache) -> None:
        buffers.k_pages[: cache.k_pages.shape[0]] = cache.k_pages
        buffers.v_pages[: cache.v_pages.shape[0]] = cache.v_pages
        buffers.table.fill_(-1)[:, : cache.table.shape[1]] = cache.table
        buffers.lens.copy_(cache.lens)

    fill(caches[0])
    call(), torch.cuda.synchronize()
    graphs = []
    for more in ({"workspace": workspace}, {}):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call(**more)
        graphs.append((graph, out))
    for cache in (*caches, *caches):
        fill(cache)
        expected = call()
        for graph, out in graphs:
            out.fill_(math.nan)
            graph.replay()
            assert torch.equal(out, expected)


@GPU
@pytest.mark.gpu
def test_side_stream_behind_a_slow_producer(target: Target) -> None:
    cache = make_cache(target, [500, 300], 16, 2, 128)
    stream = torch.cuda.Stream()
    for len_q in (1, 100):
        q = queries(target, 2, 8, len_q, 128)
        expected = flashmsa.paged_attention(q, *cache.arguments())
        lens = torch.zeros_like(cache.lens)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            lens.copy_(cache.lens)
            out = flashmsa.paged_attention(q, cache.k_pages, cache.v_pages, cache.table, lens)
        stream.synchronize()
        assert torch.equal(out, expected)


@GPU
@pytest.mark.gpu
def test_runs_repeat_bitwise(target: Target) -> None:
    """Two streams at once, many times over: no run may differ."""
    cache = make_cache(target, [3000, 130, 7, 2000], 16, 2, 128)
    q = queries(target, 4, 8, 1, 128)
    expected = flashmsa.paged_attention(q, *cache.arguments())
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    outs = []
    for _, stream in itertools.product(range(150), streams):
        with torch.cuda.stream(stream):
            outs.append(flashmsa.paged_attention(q, *cache.arguments()))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in outs)


@GPU
@pytest.mark.gpu
def test_device_that_is_not_current(target: Target) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    other = Target(target.backend, "cuda:1", target.dtype)
    cache = make_cache(other, [500, 300], 16, 2, 128)
    with torch.cuda.device(0):
        for len_q in (1, 100):
            run_and_check(other, queries(other, 2, 8, len_q, 128), cache)
