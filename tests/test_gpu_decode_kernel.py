"""The decode kernel on a GPU: its plans, its ways of loading and of merging, against the definition.

Caches are poisoned where nothing may be read (see paged_cases.py), so every call also tests what it touches.
"""

from __future__ import annotations

import math
import random

import pytest
import torch
from helpers import DENSE, MaskCase, Options, Target
from paged_cases import (
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

pytestmark = pytest.mark.gpu

CAUSAL = MaskCase("causal")
WINDOW = MaskCase("window", left=150, right=0, keep=40)
BF16 = Target("sm90", "cuda", torch.bfloat16)
FP16 = Target("sm90", "cuda", torch.float16)


@pytest.mark.parametrize("page_size", [1, 8, 16, 48, 64, 128])
@pytest.mark.parametrize("dim, dim_v", [(64, 64), (128, 128), (256, 256), (192, 128), (40, 40), (72, 200), (8, 8)])
@pytest.mark.parametrize("target", [BF16, FP16], ids=str)
def test_pages_and_head_dims(target: Target, dim: int, dim_v: int, page_size: int) -> None:
    """Boxes of every width and rows one by one; columns past a head dim are read from nowhere."""
    cache = make_cache(target, [333, 1, 0, 129], page_size, 2, dim, dim_v)
    run_and_check(target, queries(target, 4, 8, 1, dim), cache)


@pytest.mark.parametrize("len_q", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("heads, heads_kv", [(1, 1), (3, 1), (8, 8), (8, 1), (16, 1), (6, 2), (48, 3)])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_rows_of_a_kv_head(heads: int, heads_kv: int, len_q: int, dim: int) -> None:
    """One tile of 16 rows up to several groups of 64, the last tile in part."""
    cache = make_cache(BF16, [700, 5, 260], 16, heads_kv, dim)
    run_and_check(BF16, queries(BF16, 3, heads, len_q, dim), cache)


PLANS = {
    "one long": [20000],
    "uneven": [3000, 1, 0, 9000, 77, 640, 12000],
    "more than a table holds": [(37 * n) % 200 for n in range(300)],
    "all empty": [0, 0, 0],
    "short": [1024, 3, 0, 700],
    "a cluster each": [8192, 0, 5000],
    "a cluster each, and they fill the SMs": [9000, 0, 1, 300, 8200, 33, 5000, 12000],
}


HOW = [{}, {"num_splits": 1}, {"num_splits": 7}, {"num_splits": 40}, {"batch_invariant": True}]


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "sinks"])
@pytest.mark.parametrize("mask", [DENSE, WINDOW], ids=str)
@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("lens", PLANS.values(), ids=PLANS)
def test_plans(lens: list[int], how: dict, mask: MaskCase, plain: bool) -> None:
    """Sequences cut by shares, into parts of one number, and not at all; sequences of which nothing is seen."""
    cache = make_cache(BF16, lens, 32, 2, 64)
    options = Options(sinks=None if plain else torch.randn(8, device="cuda"))
    run_and_check(BF16, queries(BF16, len(lens), 8, 2, 64), cache, mask, options, **how)


@pytest.mark.parametrize("parts", [2, 8, 9, 16, 17, 40])
@pytest.mark.parametrize("len_q", [1, 4, 16])
@pytest.mark.parametrize("dim, dim_v", [(8, 8), (64, 64), (128, 72), (128, 128), (256, 200)])
def test_merges(dim: int, dim_v: int, len_q: int, parts: int) -> None:
    """Parts that lie in shared memory all at a time or not, of rows that take one pass or several, at once or not."""
    cache = make_cache(BF16, [96 * parts, 0, 33], 16, 2, dim, dim_v)
    run_and_check(BF16, queries(BF16, 3, 8, len_q, dim), cache, num_splits=parts)


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("len_q", [1, 8])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("lens", PLANS.values(), ids=PLANS)
def test_plain_kernels_give_the_same_bits(lens: list[int], dim: int, len_q: int, how: dict) -> None:
    """A sink of -inf adds nothing, and is more than the kernels for plain calls know."""
    cache = make_cache(BF16, lens, 32, 2, dim)
    q, nothing = queries(BF16, len(lens), 8, len_q, dim), torch.full((8,), -math.inf, device="cuda")
    call = {"mask": DENSE.build(q.device), "return_lse": True, **how}
    plain = flashmsa.paged_attention(q, *cache.arguments(), **call)
    general = flashmsa.paged_attention(q, *cache.arguments(), **call, sinks=nothing)
    assert all(torch.equal(x, y) for x, y in zip(plain, general, strict=True))


@pytest.mark.parametrize("len_q", [1, 8])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("batch, length", [(1, 60000), (3, 50001), (40, 700), (128, 129), (130, 65), (30, 1)])
def test_equal_sequences_are_as_any(batch: int, length: int, dim: int, len_q: int) -> None:
    """Without lengths each warp that loads finds its share by itself, with them in the table that the others make."""
    k, v = (torch.randn(batch, length, 2, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q, lens = queries(BF16, batch, 8, len_q, dim), torch.full((batch,), length, dtype=torch.int32, device="cuda")
    call = {"mask": DENSE.build(q.device), "return_lse": True}
    equal = flashmsa.paged_attention(q, k, v, None, None, **call)
    any_lengths = flashmsa.paged_attention(q, k, v, None, lens, **call)
    assert all(torch.equal(x, y) for x, y in zip(equal, any_lengths, strict=True))


def test_causal_forbids_one_query_nothing() -> None:
    """So that it is a plain call, cut like one without a mask."""
    cache = make_cache(BF16, [9000, 1, 0, 777], 16, 4, 128)
    q = queries(BF16, 4, 32, 1, 128)
    dense, causal = (
        flashmsa.paged_attention(q, *cache.arguments(), mask=case.build(q.device)) for case in (DENSE, CAUSAL)
    )
    assert torch.equal(dense, causal)


@pytest.mark.parametrize("len_q", [5, 8, 16])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("lens", PLANS.values(), ids=PLANS)
def test_plans_of_many_rows(lens: list[int], dim: int, len_q: int) -> None:
    """More than 16 rows of a kv head, which eight warps attend to."""
    cache = make_cache(BF16, lens, 16, 2, dim)
    run_and_check(BF16, queries(BF16, len(lens), 8, len_q, dim), cache, CAUSAL)


# Of more rows than two tiles hold, by wgmma: so many sequences and, as the table is wide, keys that it is worth while.
MANY = [8000, 8, 0, 129, 640, 64, 63, 65, 1, 300, 7, 1500, 32, 128, 1000, 257, 999, 77, 2, 512]
ROW_MASKS = [
    DENSE,
    CAUSAL,
    WINDOW,
    MaskCase("prefix", prefix=200),
    MaskCase("prefix-window", prefix=90, left=100),
]


@pytest.mark.parametrize("page_size", [1, 8, 16, 48, 256])
@pytest.mark.parametrize("rows", [(12, 3), (16, 4), (11, 6), (16, 5), (16, 8), (16, 12)], ids=str)
@pytest.mark.parametrize("mask", ROW_MASKS, ids=str)
def test_rows_of_warpgroups(mask: MaskCase, rows: tuple[int, int], page_size: int) -> None:
    """Rows of one warpgroup and of two, in groups of 128; poison behind lengths that end anywhere in a chunk."""
    heads, len_q = rows
    cache = make_cache(BF16, MANY, page_size, 2, 128)
    run_and_check(BF16, queries(BF16, len(MANY), 2 * heads, len_q, 128), cache, mask)


@pytest.mark.parametrize("dim, dim_v", [(128, 128), (96, 72), (72, 128), (128, 8), (64, 64), (40, 8)])
@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("len_q", [3, 4, 8])
@pytest.mark.parametrize("target", [BF16, FP16], ids=str)
def test_plans_of_warpgroups(target: Target, len_q: int, how: dict, dim: int, dim_v: int) -> None:
    """Rows that a warp has alone are stored from its registers, whole and as parts; others are merged first."""
    lens = [3000, 0, 5, *MANY]
    cache = make_cache(target, lens, 16, 2, dim, dim_v)
    run_and_check(target, queries(target, len(lens), 32, len_q, dim), cache, CAUSAL, **how)


@pytest.mark.parametrize("len_q", [4, 8])
@pytest.mark.parametrize(
    "options",
    [{"softcap": 3.0}, {"slopes": True}, {"sinks": True}, {"softcap": 3.0, "slopes": True, "sinks": True}],
    ids=str,
)
@pytest.mark.parametrize("mask", ROW_MASKS, ids=str)
def test_options_of_warpgroups(mask: MaskCase, options: dict, len_q: int) -> None:
    cache = make_cache(BF16, MANY, 16, 2, 128)
    made = Options(
        softcap=options.get("softcap", 0.0),
        slopes=torch.rand(32, device="cuda") if "slopes" in options else None,
        sinks=torch.randn(32, device="cuda") if "sinks" in options else None,
    )
    run_and_check(BF16, queries(BF16, len(MANY), 32, len_q, 128), cache, mask, made)


@pytest.mark.parametrize("len_q", [4, 8])
@pytest.mark.parametrize("how", HOW, ids=str)
def test_plain_warpgroups_give_the_same_bits(len_q: int, how: dict) -> None:
    cache = make_cache(BF16, MANY, 32, 2, 128)
    q, nothing = queries(BF16, len(MANY), 32, len_q, 128), torch.full((32,), -math.inf, device="cuda")
    call = {"mask": None, "return_lse": True, **how}
    plain = flashmsa.paged_attention(q, *cache.arguments(), **call)
    general = flashmsa.paged_attention(q, *cache.arguments(), **call, sinks=nothing)
    assert all(torch.equal(x, y) for x, y in zip(plain, general, strict=True))


@pytest.mark.parametrize("len_q", [4, 8])
@pytest.mark.parametrize("mask", [DENSE, CAUSAL], ids=str)
@pytest.mark.parametrize("batch, length", [(3, 50001), (40, 5000), (128, 1100)])
def test_equal_sequences_of_warpgroups(batch: int, length: int, mask: MaskCase, len_q: int) -> None:
    """Without lengths, and as the last row sees all keys, each warp that loads finds its share by itself."""
    k, v = (torch.randn(batch, length, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q, lens = queries(BF16, batch, 32, len_q, 128), torch.full((batch,), length, dtype=torch.int32, device="cuda")
    call = {"mask": mask.build(q.device), "return_lse": True}
    equal = flashmsa.paged_attention(q, k, v, None, None, **call)
    any_lengths = flashmsa.paged_attention(q, k, v, None, lens, **call)
    assert all(torch.equal(x, y) for x, y in zip(equal, any_lengths, strict=True))


@pytest.mark.parametrize("len_q", [4, 7])
def test_trees_of_warpgroups(len_q: int) -> None:
    """Bits over the last keys, some of which lie before the first or in the chunk before the last."""
    rng = random.Random(len_q)
    cache = make_cache(BF16, MANY, 16, 2, 128)
    trees = torch.stack([random_tree(len_q, rng) for _ in MANY])
    allowed = [tree_pairs(tree, length).cuda() for tree, length in zip(trees, MANY, strict=True)]
    run_and_check(BF16, queries(BF16, len(MANY), 32, len_q, 128), cache, allowed=allowed, tree_mask=trees.cuda())


@pytest.mark.parametrize("page_size", [1, 16, 48, 128])
@pytest.mark.parametrize("len_q", [4, 8])
def test_listed_pages_of_warpgroups(len_q: int, page_size: int) -> None:
    """Chunks of keys from several pages, in an order of their own; the last page listed or not."""
    cache = make_cache(BF16, MANY, page_size, 2, 128)
    generator = torch.Generator().manual_seed(page_size)
    lists = torch.randint(-1, 1 + 8000 // page_size, (len(MANY), 1, 40), generator=generator, dtype=torch.int32)
    allowed = [
        listed_pairs(pages, 128, page_size, len_q, length, CAUSAL).cuda()
        for pages, length in zip(lists, MANY, strict=True)
    ]
    q = queries(BF16, len(MANY), 32, len_q, 128)
    run_and_check(BF16, q, cache, allowed=allowed, query_pages=lists.cuda(), num_splits=2)


@pytest.mark.parametrize("len_q", [1, 4, 8])
def test_part_of_a_sequence_by_its_own_length(len_q: int) -> None:
    """batch_invariant: bitwise the same alone, in a batch, and over a table of another width."""
    lens = [5000, 1, 777, 40000, 1024, 1025]
    cache = make_cache(BF16, lens, 64, 4, 128)
    q = queries(BF16, len(lens), 64, len_q, 128)
    both = flashmsa.paged_attention(q, *cache.arguments(), batch_invariant=True, return_lse=True)
    for b, length in enumerate(lens):
        table = cache.table[b : b + 1, : -(-length // 64)].contiguous()
        alone = flashmsa.paged_attention(
            q[b : b + 1],
            cache.k_pages,
            cache.v_pages,
            table,
            cache.lens[b : b + 1],
            batch_invariant=True,
            return_lse=True,
        )
        assert all(torch.equal(x[b], y[0]) for x, y in zip(both, alone, strict=True)), f"sequence {b} of {length} keys"


def test_repeated_calls_are_bitwise_equal() -> None:
    """However late its CTAs are, a sequence's parts are merged in the same order."""
    cache = make_cache(BF16, [9000, 4000, 12000], 16, 4, 128)
    q = queries(BF16, 3, 32, 1, 128)
    first = flashmsa.paged_attention(q, *cache.arguments())
    for _ in range(200):
        assert torch.equal(flashmsa.paged_attention(q, *cache.arguments()), first)


@pytest.mark.parametrize("how", [{}, {"batch_invariant": True}], ids=str)
@pytest.mark.parametrize("len_q", [1, 8])
def test_what_else_runs_changes_no_bit(len_q: int, how: dict) -> None:
    """Copies on another stream take SMs and bandwidth at changing times, so that other CTAs are waited for."""
    cache = make_cache(BF16, [20000, 300, 12000], 16, 4, 128)
    q = queries(BF16, 3, 32, len_q, 128)
    first = flashmsa.paged_attention(q, *cache.arguments(), return_lse=True, **how)
    source, other = torch.empty(1 << 26, dtype=torch.int32, device="cuda"), torch.cuda.Stream()
    target = torch.empty_like(source)
    for step in range(100):
        if step % 3 == 0:
            with torch.cuda.stream(other):
                target[: (step % 5 + 1) * (1 << 23)].copy_(source[: (step % 5 + 1) * (1 << 23)])
        again = flashmsa.paged_attention(q, *cache.arguments(), return_lse=True, **how)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True)), f"call {step}"


@pytest.mark.parametrize("heads", [8, 32])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_value_that_some_rows_see(dim: int, heads: int) -> None:
    """NaN in the newest key's V: rows that may not see it stay as they are; of one tile, and of a warpgroup."""
    cache = make_cache(BF16, [300, 64], 16, 2, dim)
    for b, page in enumerate((299 // 16, 63 // 16)):
        place = cache.table[b, page].item()
        cache.v_pages[place, (299 if b == 0 else 63) % 16] = math.nan
        cache.v[b][-1] = math.nan
    run_and_check(BF16, queries(BF16, 2, heads, 4, dim), cache, num_splits=1)


@pytest.mark.parametrize(("heads", "how"), [(8, {}), (32, {"num_splits": 2}), (64, {"num_splits": 2})], ids=str)
def test_packed_queries_and_tail(heads: int, how: dict) -> None:
    q, cuts = packed(BF16, [3, 0, 1, 4], heads, 128, tail=5)
    cache = make_cache(BF16, [300, 20, 0, 777], 16, 2, 128)
    run_packed_and_check(BF16, q, cuts, cache, max_seqlen_q=4, **how)


REPLAYED = {
    "clusters": ([8000, 300, 5000, 64], [17, 299, 0, 64]),
    "parts through memory": ([20000, 300, 12000], [17, 299, 11000]),
}


@pytest.mark.parametrize("both", REPLAYED.values(), ids=REPLAYED)
def test_graphs_replayed_at_once(both: tuple[list[int], list[int]]) -> None:
    """Two captures with workspaces of their own on two streams, lengths changed between replays.

    What the workspaces hold does not matter, be it from the replay before.
    """
    cache = make_cache(BF16, both[0], 16, 4, 128)
    q = queries(BF16, len(both[0]), 16, 1, 128)
    lens = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in both]
    expected = [flashmsa.paged_attention(q, *cache.arguments()[:3], x) for x in lens]
    streams = [torch.cuda.Stream() for _ in range(2)]
    own = [cache.lens.clone() for _ in range(2)]
    spaces = [flashmsa.paged_workspace(q, *cache.arguments()[:3]) for _ in range(2)]
    graphs, outs = [], []
    for n in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs.append(flashmsa.paged_attention(q, *cache.arguments()[:3], own[n], workspace=spaces[n]))
        graphs.append(graph)
    for step in range(40):
        for n in range(2):
            own[n].copy_(lens[(step + n) % 2])
            spaces[n].view(torch.uint8).random_(0, 256)
            outs[n].fill_(math.nan)
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
                graph.replay()
        torch.cuda.synchronize()
        for n in range(2):
            assert torch.equal(outs[n], expected[(step + n) % 2]), f"replay {step}, graph {n}"
