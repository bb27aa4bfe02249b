"""The kernels under stress: races, streams, memory, edges of the grid, sizes of real use. Needs a Hopper GPU.

The oracle runs on the GPU in float64; long cases compare sampled rows, the edges of tiles and documents among them.
"""

from __future__ import annotations

import gc
import itertools
import math
import random
from collections.abc import Callable

import pytest
import torch
from helpers import (
    ALL_FAMILIES,
    CAUSAL,
    DENSE,
    Buckets,
    MaskCase,
    Target,
    check,
    document,
    make_qkv,
    mask_for,
    poisoned_allocations,
    poisoned_out,
    random_cuts,
    run,
    run_and_check,
)

import flashmsa

pytestmark = pytest.mark.gpu

HALVES = [pytest.param(torch.bfloat16, id="bf16"), pytest.param(torch.float16, id="fp16")]
BUCKETS = [64, 96, 128, 192, 256]


def sm90(dtype: torch.dtype = torch.bfloat16) -> Target:
    return Target("sm90", "cuda", dtype)


def sampled_rows(length: int, count: int, *edges: int, seed: int = 0) -> torch.Tensor:
    """`count` random rows, the first and last ones, and both sides of every edge."""
    rng = random.Random(seed)
    rows = {rng.randrange(length) for _ in range(count)} | {0, 1, 63, 64, 127, 128, length - 1, length - 2, length - 65}
    rows |= {row for edge in edges for row in (edge - 1, edge)}
    return torch.tensor(sorted(row for row in rows if 0 <= row < length), device="cuda")


# ---------------------------------------------------------------------------------------------------------------------
# Every kernel over ragged sizes

RAGGED = [
    (1, 1),
    (1, 1000),
    (15, 63),
    (64, 65),
    (65, 64),
    (127, 257),
    (128, 128),
    (129, 191),
    (192, 192),
    (193, 127),
    (257, 1000),
    (383, 385),
    (1000, 1),
    (1000, 1000),
]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_every_kernel_over_ragged_sizes(dtype: torch.dtype, dim: int, family: str) -> None:
    for len_q, len_kv in RAGGED:
        q, k, v = make_qkv(sm90(dtype), 2, (4, 2), len_q, len_kv, dim)
        mask = mask_for(family, 2, len_q, len_kv, heads=(4, 2))
        run_and_check(sm90(dtype), q, k, v, mask, note=f"{len_q}x{len_kv} d{dim} {mask}")


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dim", BUCKETS)
@pytest.mark.parametrize("family", ["dense", "causal"])
def test_tiles_of_both_sizes(dtype: torch.dtype, dim: int, family: str) -> None:
    """Few rows have small tiles at head dims 64 and 128. Of the others a CTA gets one, two and more here: the first two
    of numbers that it knows, later ones from a counter."""
    for heads, (len_q, len_kv) in [
        (1, (300, 300)),
        (4, (513, 1030)),
        (70, (511, 200)),
        (70, (513, 1030)),
        (132, (640, 257)),
        (264, (300, 511)),
    ]:
        q, k, v = make_qkv(sm90(dtype), 1, (heads, heads), len_q, len_kv, dim)
        mask = mask_for(family, 1, len_q, len_kv)
        kernel = flashmsa.explain(q, k, v, mask.build("cuda")).kernel
        assert ("_small_" in kernel) == (dim in (64, 128) and heads < 70), kernel
        run_and_check(sm90(dtype), q, k, v, mask, note=f"{heads} heads {len_q}x{len_kv} d{dim}")


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "family", ["causal", "document-cross-causal", "window-keep", "dilated", "hash-causal", "blocks"]
)
@pytest.mark.parametrize("dim", range(8, 257, 8))
def test_every_pair_of_head_dims(dtype: torch.dtype, dim: int, family: str) -> None:
    """D against a third of all Dv: over all D every bucket meets every bucket."""
    for dim_v in range(8 + dim % 24, 257, 24):
        q, k, v = make_qkv(sm90(dtype), 1, (2, 1), 130, 200, dim, dim_v)
        run_and_check(sm90(dtype), q, k, v, mask_for(family, 1, 130, 200), note=f"{dim}/{dim_v}")


@pytest.mark.parametrize("seed", range(24))
def test_random_shapes(seed: int) -> None:
    """Shapes, heads, layouts, scales and masks at random, more tiles than the GPU has multiprocessors among them."""
    rng = random.Random(seed)
    for n in range(12):
        target = sm90(rng.choice([torch.bfloat16, torch.float16]))
        batch, heads_kv, group = rng.randint(1, 4), rng.randint(1, 4), rng.randint(1, 4)
        len_q, len_kv = (
            rng.choice([rng.randint(1, 200), rng.randint(200, 1500), 64 * rng.randint(1, 16)]) for _ in "qk"
        )
        dim, dim_v = (8 * rng.randint(1, 32) for _ in "qv")
        heads = (heads_kv * group, heads_kv)
        documents = rng.choice([1, 3, 20, 200])
        mask = mask_for(rng.choice(ALL_FAMILIES), batch, len_q, len_kv, seed=n, documents=documents, heads=heads)
        scale = rng.choice([None, None, 1.0, 0.0, -0.1])
        q, k, v = make_qkv(target, batch, heads, len_q, len_kv, dim, dim_v)
        if rng.random() < 0.5:
            q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        shapes = f"q {tuple(q.shape)} k {tuple(k.shape)} v {tuple(v.shape)} {target.dtype} scale {scale}"
        run_and_check(target, q, k, v, mask, scale=scale, note=f"{shapes} {mask}")


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dim", BUCKETS)
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_surrounded_by_nan(dtype: torch.dtype, dim: int, family: str) -> None:
    """Views into larger tensors whose every other element is NaN: rows, columns, heads and batches beside ours."""
    for size, (len_q, len_kv) in itertools.product((dim, dim - 24), ((100, 300), (300, 100), (65, 257))):
        plain = make_qkv(sm90(dtype), 2, (4, 2), len_q, len_kv, size)
        views = []
        for x in plain:
            b, h, s, d = x.shape
            base = torch.full((b + 1, h + 1, s + 150, d + 40), math.nan, dtype=dtype, device="cuda")
            view = base[:b, :h, 10 : 10 + s, 16 : 16 + d]
            views.append(view.copy_(x))
        mask = mask_for(family, 2, len_q, len_kv, heads=(4, 2))
        out, lse = run(sm90(dtype), *views, mask)
        check(out, lse, *plain, mask, note=f"{len_q}x{len_kv} d{size} {mask}")


# ---------------------------------------------------------------------------------------------------------------------
# Sizes of real use


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "shape",
    [
        (2, (16, 16), 4096, 64),
        (2, (16, 4), 4097, 128),
        (1, (8, 8), 4095, 256),
        (1, (8, 1), 16384, 128),
        (1, (2, 2), 32768, 64),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "family",
    [
        "dense",
        "causal",
        "document",
        "document-causal",
        "window",
        "window-keep",
        "prefix",
        "and-document-window",
        "dilated",
        "hash-causal",
        "blocks",
        "and-blocks-causal",
    ],
)
def test_long(dtype: torch.dtype, shape: tuple, family: str) -> None:
    batch, heads, length, dim = shape
    mask = mask_for(family, batch, length, length, documents=16)
    q, k, v = make_qkv(sm90(dtype), batch, heads, length, length, dim)
    rows = sampled_rows(length, 60, *itertools.chain(*mask.q_offsets))
    run_and_check(sm90(dtype), q, k, v, mask, rows=rows, note=f"{shape} {mask}")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_thousands_of_documents(causal: bool, batched: bool) -> None:
    """A packed batch of short texts, none longer than 40 tokens, many of them empty."""
    rng = random.Random(0)
    batch, length = (2 if batched else 1), 50_000
    cuts = []
    for _ in range(batch):
        row = [0]
        while len(row) < 3001:
            row.append(min(length, row[-1] + rng.choice([0, 1, 7, rng.randint(1, 40)])))
        cuts.append(tuple(row))
    mask = MaskCase("document-causal" if causal else "document", tuple(cuts), None, batched)
    q, k, v = make_qkv(sm90(), batch, (4, 2), length, length, 64)
    out, lse = run(sm90(), q, k, v, mask)
    used = max(row[-1] for row in cuts)
    # A window of rows sees a window of keys alone: the oracle needs the documents around it, moved to start at 0.
    for b in range(batch):
        row = cuts[b]
        for first in (0, 700, 1500, 2900):
            part = row[first : first + 101]
            inside = slice(part[0], part[-1])
            moved = MaskCase(mask.kind, (tuple(c - part[0] for c in part),))
            one = slice(b, b + 1)
            check(
                out[one, :, inside],
                lse[one, :, inside],
                *(x[one, :, inside] for x in (q, k, v)),
                moved,
                note=f"batch {b}, documents {first} .. {first + 100}",
            )
    assert not out[:, :, used:].count_nonzero() and not out.isnan().any()
    assert lse[:, :, used:].isneginf().all()


@pytest.mark.parametrize("causal", [False, True])
def test_short_documents_in_many_heads(causal: bool) -> None:
    """Parts of 64 rows go round the warpgroups, more than 256 to each, and the plan has several turns. All heads have
    the same data, so the same bits."""
    rng = random.Random(1)
    cuts = [0]
    while len(cuts) < 151:
        cuts.append(cuts[-1] + rng.choice([0, 1, 64, 65, 192, 193, rng.randint(1, 256)]))
    length, heads = cuts[-1], 512
    mask = document(*cuts, causal=causal)
    q, k, v = (x.expand(-1, heads, -1, -1) for x in make_qkv(sm90(), 1, 1, length, length, 128))
    out, lse = run(sm90(), q, k, v, mask)
    assert torch.equal(out, out[:, :1].expand_as(out)) and torch.equal(lse, lse[:, :1].expand_as(lse))
    rows = sampled_rows(length, 200, *cuts)
    check(out[:, :1], lse[:, :1], *(x[:, :1] for x in (q, k, v)), mask, rows=rows)


def test_short_documents_of_which_some_rows_are_not_finite() -> None:
    """Under a causal mask the rows ahead of a NaN keep their values; warps that take the slow way wait for no other."""
    cuts = tuple(range(0, 2001, 100))
    q, k, clean = make_qkv(sm90(), 1, 2, cuts[-1], cuts[-1], 128)
    mask = document(*cuts, causal=True)
    want, _ = run(sm90(), q, k, clean, mask)
    v = clean.clone()
    v[:, :, cuts[5] + 40] = math.nan
    out, lse = run(sm90(), q, k, v, mask)
    bad = slice(cuts[5] + 40, cuts[6])
    assert out[:, :, bad].isnan().all()
    out[:, :, bad] = want[:, :, bad]
    check(out, lse, q, k, clean, mask)


@pytest.mark.parametrize("shape", [(1, 70_000), (70_000, 1), (300, 300)], ids=str)
@pytest.mark.parametrize("family", ["dense", "causal", "document-causal"])
def test_more_heads_than_a_grid_dimension(shape: tuple[int, int], family: str) -> None:
    """More than 65535 heads, batches, or both together."""
    q, k, v = make_qkv(sm90(), *shape, 5, 9, 16)
    run_and_check(sm90(), q, k, v, mask_for(family, shape[0], 5, 9))


def test_case_32_more_than_2_to_the_31_elements() -> None:
    """q, k, v and out of 2^31 elements and more: the last rows and heads equal the oracle."""
    heads, length, dim, text = 32, 2**19 + 520, 128, 520
    torch.cuda.empty_cache()
    q = torch.randn(1, heads, length, dim, device="cuda", dtype=torch.bfloat16)
    k, v = q.flip(1), q.roll(1, 3)
    assert q.numel() > 2**31
    cuts = torch.arange(0, length + 1, text, dtype=torch.int32, device="cuda")
    out = poisoned_out(q, v)
    for causal in (False, True):
        out.fill_(math.nan)
        mask = flashmsa.Document(cuts, causal=causal)
        _, lse = flashmsa.attention(q, k, v, mask=mask, backend="sm90", return_lse=True, out=out)
        last = int(cuts[-1])
        assert not out[:, -1, last:].count_nonzero() and not out[:, -1].isnan().any()
        for h, begin in ((0, 0), (heads - 1, 0), (heads - 1, last - text), (heads // 2, last - text)):
            part = (slice(None), slice(h, h + 1), slice(begin, begin + text))
            check(
                out[part],
                lse[part],
                q[part],
                k[part],
                v[part],
                CAUSAL if causal else DENSE,
                note=f"head {h} from {begin}",
            )
    del q, k, v, out
    gc.collect()
    torch.cuda.empty_cache()


def test_case_32_strides_past_2_to_the_31() -> None:
    """Small tensors whose batches or heads lie 2^31 elements and more apart."""
    far = 2**31 + 64
    base = torch.empty(2 * far, dtype=torch.bfloat16, device="cuda")
    small = make_qkv(sm90(), 2, 2, 150, 150, 64)
    for strides in ((far, 150 * 64, 64, 1), (150 * 64, far, 64, 1)):
        views = [
            base.as_strided(x.shape, strides, storage_offset=n * 2**16).copy_(x)
            for n, x in enumerate((*small, small[0]))
        ]
        out = views.pop().fill_(math.nan)
        for mask in (CAUSAL, document(0, 70, 150)):
            flashmsa.attention(*views, mask=mask.build("cuda"), backend="sm90", out=out)
            check(out, None, *small, mask, note=f"strides {strides}")
    del base, views, out
    torch.cuda.empty_cache()


# ---------------------------------------------------------------------------------------------------------------------
# Races and streams


class Load:
    """Matrix products on a stream of their own, enough to keep the GPU busy for about the given launches."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.a = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
        self.b = torch.empty_like(self.a)
        torch.cuda.synchronize()

    def add(self, launches: int) -> None:
        with torch.cuda.stream(self.stream):
            for _ in range(launches):
                torch.mm(self.a, self.a, out=self.b)


def same_bits(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One device bool; NaN equals the same NaN."""
    as_int = {2: torch.int16, 4: torch.int32}[x.element_size()]
    return (x.view(as_int) == y.view(as_int)).all()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dim", BUCKETS)
@pytest.mark.parametrize(
    "family",
    [
        "dense",
        "causal",
        "document",
        "document-batched-causal",
        "and-document-window",
        "dilated",
        "hash-causal",
        "blocks",
    ],
)
def test_case_34_a_thousand_launches_are_one(dtype: torch.dtype, dim: int, family: str) -> None:
    """Bitwise equal while other work runs beside: a race of one launch in a thousand shows."""
    q, k, v = make_qkv(sm90(dtype), 3, (8, 2), 700, 710, dim)
    mask_case = mask_for(family, 3, 700, 710, documents=11)
    mask = mask_case.build("cuda")
    first, first_lse = run(sm90(dtype), q, k, v, mask_case)
    check(first, first_lse, q, k, v, mask_case)
    out = poisoned_out(q, v)
    equal = torch.ones((), dtype=torch.bool, device="cuda")
    load = Load()
    for n in range(1000):
        if n % 10 == 0:
            load.add(10)
            out.fill_(math.nan)
        _, lse = flashmsa.attention(q, k, v, mask=mask, backend="sm90", return_lse=True, out=out)
        equal &= same_bits(out, first)
        if n % 10 == 0:
            equal &= same_bits(lse, first_lse)
    torch.cuda.synchronize()
    assert bool(equal)


@pytest.mark.parametrize("dim", BUCKETS)
@pytest.mark.parametrize(
    "families",
    [
        ("document-causal", "document", "causal", "document-batched"),
        ("hash-causal", "and-document-window", "dilated", "blocks-64x192"),
    ],
    ids="-".join,
)
def test_two_streams_at_once(families: tuple[str, ...], dim: int) -> None:
    """Two calls in flight share nothing: other masks, other lengths, each on its own stream."""
    jobs = []
    for length, family in zip((300, 777, 512, 130), families, strict=True):
        mask = mask_for(family, 2, length, length, documents=7)
        q, k, v = make_qkv(sm90(), 2, (6, 2), length, length, dim)
        expected = run(sm90(), q, k, v, mask)
        check(*expected, q, k, v, mask)
        jobs.append((q, k, v, mask.build("cuda"), *expected))
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results = []
    for n in range(100):
        for s, stream in enumerate(streams):
            job = jobs[(n + 2 * s + n // 4) % 4]
            with torch.cuda.stream(stream):
                results.append((job, flashmsa.attention(*job[:3], mask=job[3], backend="sm90", return_lse=True)))
    torch.cuda.synchronize()
    for n, (job, (out, lse)) in enumerate(results):
        assert torch.equal(out, job[4]) and torch.equal(lse, job[5]), f"launch {n}"


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_the_host_never_waits(family: str) -> None:
    """No synchronisation, no reading back: torch's own watch stays quiet, and calls return while the GPU sleeps."""
    q, k, v = make_qkv(sm90(), 2, (4, 2), 300, 300, 64)
    mask = mask_for(family, 2, 300, 300, heads=(4, 2)).build("cuda")

    def call() -> None:
        flashmsa.attention(q, k, v, mask=mask, backend="sm90", return_lse=True)

    call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(200_000_000)
        for _ in range(20):
            call()
        waiting = not torch.cuda.current_stream().query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert waiting, "the calls returned only after the GPU had finished"


@pytest.mark.parametrize("dim", BUCKETS)
def test_workspace_holds_nothing_over(dim: int) -> None:
    """Whatever memory the workspace lands in: fresh allocations are filled with NaN, or with what other calls left."""
    for family, length in itertools.product(ALL_FAMILIES, (60, 700)):
        mask = mask_for(family, 2, length, length, heads=(4, 2))
        q, k, v = make_qkv(sm90(), 2, (4, 2), length, length, dim)
        plain, plain_lse = run(sm90(), q, k, v, mask)
        with poisoned_allocations():
            out, lse = flashmsa.attention(q, k, v, mask=mask.build("cuda"), backend="sm90", return_lse=True)
        assert torch.equal(out, plain) and torch.equal(lse, plain_lse), f"{family} {length}"
        junk = [torch.full((n,), -1, dtype=torch.uint8, device="cuda") for n in (512, 4096, 2**16, 2**20)]
        del junk
        out, lse = flashmsa.attention(q, k, v, mask=mask.build("cuda"), backend="sm90", return_lse=True)
        assert torch.equal(out, plain) and torch.equal(lse, plain_lse), f"{family} {length}"


# ---------------------------------------------------------------------------------------------------------------------
# Memory


def peak_of(call: Callable[[], object]) -> int:
    """The most bytes of device memory that `call` holds beyond what was there before; its results count."""
    call()
    torch.cuda.synchronize()
    # NOTE: the allocator hands out a cached block whole when less than 1 MiB of it would be left over.
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = call()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before


def workspace_limit(batch: int, heads: int, length: int, documents: int) -> int:
    """O(tiles + documents): 64 bytes for each, the tiles as small as a kernel may use, and the allocator's rounding."""
    return 64 * (batch * heads * math.ceil(length / 64) + batch * documents) + 16 * 1024


@pytest.mark.parametrize("dim", BUCKETS)
@pytest.mark.parametrize("length", [1000, 8192])
@pytest.mark.parametrize(
    "family",
    ["dense", "causal", "document", "document-batched-causal", "window", "and-document-window", "dilated", "blocks"],
)
def test_peak_memory(dim: int, length: int, family: str) -> None:
    """Nothing beyond out, lse and the workspace, for contiguous, transposed and packed inputs alike."""
    batch, heads, documents = 2, 8, 64
    mask = mask_for(family, batch, length, length, documents=documents).build("cuda")
    limit = workspace_limit(batch, heads, length, documents)
    q, k, v = make_qkv(sm90(), batch, heads, length, length, dim)
    packed = torch.randn(batch, length, 3, heads, dim, device="cuda", dtype=torch.bfloat16)
    layouts = {
        "contiguous": (q, k, v),
        "transposed": tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)),
        "packed": tuple(x.transpose(1, 2) for x in packed.unbind(2)),
        "expanded": (q, k[:, :1].expand_as(k), v[:1].expand_as(v)),
    }
    out = torch.empty_like(q)
    lse_bytes = 4 * batch * heads * length
    for name, tensors in layouts.items():
        found = peak_of(lambda t=tensors: flashmsa.attention(*t, mask=mask, backend="sm90", out=out))
        assert found <= limit, f"{name}: {found} bytes of workspace, at most {limit}"
        found = peak_of(lambda t=tensors: flashmsa.attention(*t, mask=mask, backend="sm90", return_lse=True))
        found -= out.nbytes + lse_bytes
        assert found <= limit, f"{name}: {found} bytes beyond out and lse, at most {limit}"


@pytest.mark.parametrize("dim", BUCKETS)
@pytest.mark.parametrize("causal", [False, True])
def test_peak_memory_of_hash_buckets(dim: int, causal: bool) -> None:
    """The results beside the workspace; with a soft cap also one sorted copy of q, k, v, out and lse."""
    batch, heads, length = 2, 8, 8192
    q, k, v = make_qkv(sm90(), batch, heads, length, length, dim)
    buckets = torch.randint(0, 64, (batch, heads, length), dtype=torch.int32, device="cuda")
    mask = flashmsa.HashBucket(buckets, causal=causal)
    lse_bytes = 4 * batch * heads * length
    limit = workspace_limit(batch, heads, length, 0) + 2**20
    found = peak_of(lambda: flashmsa.attention(q, k, v, mask=mask, backend="sm90", return_lse=True))
    assert found <= q.nbytes + lse_bytes + limit
    found = peak_of(lambda: flashmsa.attention(q, k, v, mask=mask, backend="sm90", return_lse=True, softcap=5.0))
    assert found <= 5 * q.nbytes + 2 * lse_bytes + limit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_peak_memory_of_the_composed_backend(dtype: torch.dtype) -> None:
    """O(S block), not S^2: far under the 4 GiB that one matrix of logits takes here."""
    q, k, v = make_qkv(Target("torch", "cuda", dtype), 1, 4, 16384, 16384, 64)
    mask = mask_for("document-causal", 1, 16384, 16384, documents=16).build("cuda")
    found = peak_of(lambda: flashmsa.attention(q, k, v, mask=mask, backend="torch"))
    assert found < 2**30


# ---------------------------------------------------------------------------------------------------------------------
# Hash buckets, whose rows and keys are found by their order


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("size", [(64, 64), (40, 64), (128, 128), (72, 120), (256, 256), (136, 200)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_buckets_by_head_with_poison_between(dtype: torch.dtype, size: tuple[int, int], causal: bool) -> None:
    """Every head of every batch has buckets of its own on both sides, some of them without keys; keys that no query has
    the bucket of hold NaN; heads lie behind each other or beside; the same bits again."""
    for seed, (len_q, len_kv, count) in enumerate([(700, 900, 9), (900, 257, 40), (130, 2000, 3), (1500, 1500, 300)]):
        torch.manual_seed(seed)
        q, k, v = make_qkv(sm90(dtype), 2, (4, 2), len_q, len_kv, *size)
        mine, theirs = (
            torch.randint(0, count, (2, heads, length), dtype=torch.int32)
            for heads, length in ((4, len_q), (2 if seed % 2 else 4, len_kv))
        )
        theirs[theirs == 1] = 0  # queries without a key
        theirs[..., ::5] = -7  # keys without a query, the same in all heads
        k[:, :, ::5] = math.nan
        v[:, :, ::5] = math.nan if causal else math.inf
        mask = Buckets("hash", q=mine, kv=theirs, causal=causal)
        out, lse = run_and_check(sm90(dtype), q, k, v, mask, note=f"{len_q}x{len_kv} {size} {count} buckets")
        beside = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        again = run(sm90(dtype), *beside, mask)
        assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


def test_buckets_without_sorted_copies() -> None:
    """Plain calls run one attention kernel on the tensors as they lie; what it does not serve moves rows."""
    q, k, v = make_qkv(sm90(), 1, 4, 1000, 1000, 64)
    mask = flashmsa.HashBucket(torch.arange(1000, dtype=torch.int32, device="cuda").view(1, 1, -1) % 7, causal=True)
    for options, moves in (({}, False), ({"sinks": torch.zeros(4, device="cuda")}, False), ({"softcap": 5.0}, True)):
        flashmsa.attention(q, k, v, mask, **options)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            flashmsa.attention(q, k, v, mask, **options)
            torch.cuda.synchronize()
        names = [event.key for event in profile.key_averages()]
        assert any("attention_forward_kernel" in name for name in names)
        assert any("move_rows_kernel" in name for name in names) == moves
        kernel = flashmsa.explain(q, k, v, mask, **options).kernel
        assert kernel.startswith("fwd_composite") if moves else kernel == "fwd_hash_d64_bf16"


# ---------------------------------------------------------------------------------------------------------------------
# Documents at the edges of tiles


@pytest.mark.parametrize("dim", BUCKETS)
@pytest.mark.parametrize("causal", [False, True])
def test_document_edges_around_tiles(dim: int, causal: bool) -> None:
    """Cuts one before, at and after every multiple of 64; the neighbour of a poisoned document stays clean."""
    for shift in (-1, 0, 1):
        cuts = (0, *(n * 64 + shift for n in range(1, 12)), 800)
        q, k, v = make_qkv(sm90(), 1, (2, 1), 800, 800, dim)
        mask = document(*cuts, causal=causal)
        run_and_check(sm90(), q, k, v, mask)
        for d in (0, 3, 4, 11):
            k_, v_ = k.clone(), v.clone()
            k_[:, :, cuts[d] : cuts[d + 1]] = math.nan
            v_[:, :, cuts[d] : cuts[d + 1]] = math.inf
            out, lse = run(sm90(), q, k_, v_, mask)
            inside = torch.zeros(800, dtype=torch.bool, device="cuda")
            inside[cuts[d] : cuts[d + 1]] = True
            assert out[:, :, inside].isnan().all()
            rows = (~inside).nonzero()[:, 0]
            check(out, lse, q, k_, v_, mask, rows=rows, note=f"document {d} of {cuts} poisoned")


@pytest.mark.parametrize("seed", range(6))
def test_random_documents_with_poison(seed: int) -> None:
    """Random cuts on both sides; a NaN in a random value reaches the rows that see it and no other."""
    rng = random.Random(seed)
    for _ in range(8):
        batch, len_q, len_kv = rng.randint(1, 3), rng.randint(1, 600), rng.randint(1, 600)
        kind = rng.choice(["document", "document-causal"])
        count = rng.choice([1, 2, 9, 60])
        cuts = [tuple(random_cuts(rng, n, count) for _ in range(batch)) for n in (len_q, len_kv)]
        mask = MaskCase(kind, cuts[0], cuts[1], batched=True)
        q, k, v = make_qkv(sm90(), batch, (4, 2), len_q, len_kv, rng.choice([40, 64, 128, 200]))
        for x in rng.sample([k, v], rng.randint(1, 2)):
            x[rng.randrange(batch), rng.randrange(2), rng.randrange(len_kv)] = math.nan
        run_and_check(sm90(), q, k, v, mask, note=f"q {tuple(q.shape)} k {tuple(k.shape)} {mask}")
