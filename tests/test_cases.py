"""Cases with a known right answer, after public fault reports on attention libraries; numbered as they are there."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from helpers import (
    ALL_FAMILIES,
    CAUSAL,
    DENSE,
    FAMILIES,
    ONE_EACH,
    TOP_LEFT,
    MaskCase,
    Prefixes,
    Target,
    assert_lse,
    assert_within_rule,
    by_family,
    check,
    composed,
    document,
    limit_of_whole,
    make_qkv,
    mask_for,
    oracle,
    poisoned_out,
    run,
    run_and_check,
    targets,
    ulp,
)

import flashmsa

ALL = pytest.mark.parametrize("target", targets(auto=True))


def fill(target: Target, *shape: int, value: float) -> torch.Tensor:
    return torch.full(shape, value, dtype=target.dtype, device=target.device)


def assert_one_ulp(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Within one ulp of each expected element."""
    spacing = torch.finfo(got.dtype).eps * 2.0 ** expected.double().abs().log2().floor()
    spacing = torch.where(expected == 0, torch.finfo(got.dtype).tiny, spacing)
    assert ((got.double() - expected.double()).abs() <= spacing).all()


# ---------------------------------------------------------------------------------------------------------------------
# Empty rows and lengths


@ALL
def test_case_1_more_queries_than_keys(target: Target) -> None:
    q, k, v = make_qkv(target, 2, 2, 5, 2, 64)
    out, lse = run_and_check(target, q, k, v, CAUSAL)
    assert not out[:, :, :3].count_nonzero() and lse[:, :, :3].isneginf().all()
    assert_one_ulp(out[:, :, 3], v[:, :, 0])
    assert lse[:, :, 3:].isfinite().all()


@ALL
def test_case_2_fewer_queries_than_keys(target: Target) -> None:
    q, k, v = make_qkv(target, 2, 2, 2, 5, 64)
    out, lse = run_and_check(target, q, k, v, CAUSAL)
    limit = limit_of_whole(q, k, v)
    check(out[:, :, :1], lse[:, :, :1], q[:, :, :1], k[:, :, :4], v[:, :, :4], limit=limit)
    check(out[:, :, 1:], lse[:, :, 1:], q[:, :, 1:], k, v, limit=limit)
    out, _ = run_and_check(target, q, k, v, TOP_LEFT)
    assert_one_ulp(out[:, :, 0], v[:, :, 0])
    check(out[:, :, 1:], None, q[:, :, 1:], k[:, :, :2], v[:, :, :2], limit=limit)


@pytest.mark.parametrize(("target", "family"), by_family(targets(auto=True)))
def test_case_3_empty_dimensions(target: Target, family: str) -> None:
    for batch, len_q, len_kv in ((2, 70, 0), (2, 0, 70), (0, 70, 70), (2, 0, 0), (0, 0, 0)):
        q, k, v = make_qkv(target, batch, (4, 2), len_q, len_kv, 64, 40)
        mask = mask_for(family, batch, len_q, len_kv)
        if mask.batched and not batch:
            offsets = torch.zeros(0, 6, dtype=torch.int32, device=q.device)
            built = flashmsa.Document(offsets, offsets.clone(), causal=mask.kind == "document-causal")
        else:
            built = mask.build(q.device)
        given = poisoned_out(q, v)
        for out in (None, given):
            got, lse = flashmsa.attention(q, k, v, mask=built, backend=target.backend, return_lse=True, out=out)
            assert got.shape == (batch, 4, len_q, 40) and got.dtype == q.dtype
            assert lse.shape == (batch, 4, len_q)
            assert not got.count_nonzero() and not got.isnan().any()
            assert lse.isneginf().all()


@ALL
def test_case_3_empty_documents_only(target: Target) -> None:
    q, k, v = make_qkv(target, 2, 2, 70, 70, 64)
    for cuts in ((0, 0), (0, 0, 0, 0)):
        out, lse = run(target, q, k, v, document(*cuts))
        assert not out.count_nonzero() and not out.isnan().any() and lse.isneginf().all()


@ALL
@pytest.mark.parametrize("causal", [False, True])
def test_case_4_empty_sequences_on_either_side(target: Target, causal: bool) -> None:
    """q lengths [0, 150, 0, 150], k lengths [100, 0, 100, 100]."""
    q, k, v = make_qkv(target, 1, (4, 2), 300, 300, 64)
    mask = document(0, 0, 150, 150, 300, kv=(0, 100, 100, 200, 300), causal=causal)
    out, lse = run_and_check(target, q, k, v, mask)
    assert not out[:, :, :150].count_nonzero() and lse[:, :, :150].isneginf().all()
    assert lse[:, :, 250:].isfinite().all()


@ALL
@pytest.mark.parametrize("causal", [False, True])
def test_case_5_more_documents_than_tokens(target: Target, causal: bool) -> None:
    q, k, v = make_qkv(target, 1, (21, 7), 1, 1, 120)
    out, _ = run_and_check(target, q, k, v, document(0, 0, 0, 0, 1, causal=causal))
    assert_one_ulp(out, v[:, torch.arange(21, device=v.device) // 3])
    out, _ = run(target, q, k, v, document(0, 1, 1, 1, 1, causal=causal))
    assert_one_ulp(out, v[:, torch.arange(21, device=v.device) // 3])


@ALL
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("used", [1, 63, 64, 100, 128, 129, 200])
def test_case_6_tail_past_the_offsets(target: Target, causal: bool, used: int) -> None:
    q, k, v = make_qkv(target, 2, (4, 2), used + 100, used + 100, 64)
    mask = document(0, used // 3, used // 3, used, causal=causal)
    plain, plain_lse = run(target, q, k, v, mask)
    for x in (q, k, v):
        x[:, :, used:] = math.nan
    out, lse = run(target, q, k, v, mask)
    assert not out[:, :, used:].count_nonzero() and not out.isnan().any()
    assert lse[:, :, used:].isneginf().all()
    check(out[:, :, :used], lse[:, :, :used], *(x[:, :, :used] for x in (q, k, v)), mask)
    if target.backend == "cpu":
        assert torch.equal(out, plain) and torch.equal(lse, plain_lse)


# ---------------------------------------------------------------------------------------------------------------------
# Values
#
# Where a NaN or inf must not count, the CPU backend gives the bits of the clean call. The kernels may redo a tile of
# rows on their slow path, which adds in another order: there the oracle judges.


@ALL
@pytest.mark.parametrize("mask", [DENSE, CAUSAL, document(0, 64)], ids=str)
def test_case_7_all_logits_minus_60000(target: Target, mask: MaskCase) -> None:
    q, k = fill(target, 1, 2, 64, 64, value=-30.0), fill(target, 1, 2, 64, 64, value=31.25)
    v = make_qkv(target, 1, 2, 64, 64, 64)[2]
    out, lse = run_and_check(target, q, k, v, mask, scale=1.0)
    mean = v.double().mean(2)
    assert ((out[:, :, -1].double() - mean).abs() <= 4 * torch.finfo(target.dtype).eps * v.abs().max().item()).all()
    expected = -60000.0 + math.log(64.0)
    assert (lse[:, :, -1].double() - expected).abs().max().item() <= 4 * ulp(expected, torch.float32)


@ALL
def test_case_8_first_visited_tile_fully_masked(target: Target) -> None:
    """Causal, grouped heads 14 / 2, every logit under -100."""
    q, k, v = make_qkv(target, 1, (14, 2), 88, 448, 64)
    q, k = q * 0.25 + 4, k * 0.25 - 4
    _, lse = run_and_check(target, q, k, v, CAUSAL)
    assert lse.max().item() < -100 + math.log(448)


@ALL
@pytest.mark.parametrize("mask", [DENSE, CAUSAL, document(0, 300, 704, causal=True)], ids=str)
def test_case_9_logits_near_minus_120(target: Target, mask: MaskCase) -> None:
    """A padded key column (704 is no multiple of 128) must not weigh e^(0 + 120)."""
    q, k, v = make_qkv(target, 1, 1, 704, 704, 64)
    q, k = q * 0.125 + 4, k * 0.125 - 3.75
    _, lse = run_and_check(target, q, k, v, mask)
    assert -140 < lse.mean().item() < -100


@ALL
@pytest.mark.parametrize("hot", [0, 63, 64, 128, 199])
def test_case_10_one_logit_far_above(target: Target, hot: int) -> None:
    q, k = fill(target, 1, 2, 200, 64, value=16.0), fill(target, 1, 2, 200, 64, value=0.0)
    k[:, :, hot] = 10.0
    v = make_qkv(target, 1, 2, 200, 200, 64)[2]
    out, lse = run(target, q, k, v, scale=1.0)
    assert_one_ulp(out, v[:, :, hot : hot + 1].expand_as(out))
    assert (lse - 10240.0).abs().max().item() <= 0.1
    out, _ = run(target, q, k, v, CAUSAL, scale=1.0)
    assert_one_ulp(out[:, :, hot:], v[:, :, hot : hot + 1].expand_as(out[:, :, hot:]))
    check(out, None, q, k, v, CAUSAL, scale=1.0)


@ALL
@pytest.mark.parametrize("mask", [DENSE, CAUSAL, TOP_LEFT, document(0, 50, 120, causal=True)], ids=str)
def test_case_11_scale_zero_is_the_mean(target: Target, mask: MaskCase) -> None:
    q, k, v = make_qkv(target, 1, (4, 2), 130, 140, 64)
    _, lse = run_and_check(target, q, k, v, mask, scale=0.0)
    count = mask.allowed(130, 140, device=q.device).sum(-1).double()
    assert (lse.double() - count.log()).nan_to_num(0.0).abs().max().item() <= 1e-5 * 5


@ALL
@pytest.mark.parametrize("mask", [DENSE, CAUSAL, document(0, 50, 120, causal=True)], ids=str)
def test_case_11_scale_negative_is_q_negated(target: Target, mask: MaskCase) -> None:
    q, k, v = make_qkv(target, 1, (4, 2), 130, 140, 64)
    out, lse = run_and_check(target, q, k, v, mask, scale=-0.25)
    check(out, lse, -q, k, v, mask, scale=0.25)


@ALL
@pytest.mark.parametrize("scale", [None, 0.0, -0.5])
@pytest.mark.parametrize("mask", [DENSE, CAUSAL, document(0, 50, 120), document(0, 50, 120, causal=True)], ids=str)
def test_case_12_nan_in_a_query(target: Target, mask: MaskCase, scale: float | None) -> None:
    """Only that row; a row that sees nothing stays 0 whatever it holds."""
    q, k, v = make_qkv(target, 1, (4, 2), 130, 140, 64)
    clean, clean_lse = run(target, q, k, v, mask, scale=scale)
    rows = [3, 64, 125]  # 125 lies past the documents
    q[0, 1, rows, 5] = math.nan
    out, lse = run_and_check(target, q, k, v, mask, scale=scale)
    hit = torch.zeros_like(lse, dtype=torch.bool)
    hit[0, 1, rows] = mask.allowed(130, 140, device=q.device)[0, rows].any(-1)
    assert torch.equal(out.isnan().any(-1), hit) and torch.equal(lse.isnan(), hit)
    if target.backend == "cpu":
        assert torch.equal(out[~hit], clean[~hit]) and torch.equal(lse[~hit], clean_lse[~hit])


@pytest.mark.parametrize(("target", "family"), by_family(targets(auto=True)))
@pytest.mark.parametrize("where", ["k", "v", "both"])
def test_case_12_nan_in_a_key_or_value(target: Target, where: str, family: str) -> None:
    """NaN in exactly the rows that may see it, on both sides of every tile edge, full tiles and partial ones."""
    mask = mask_for(family, 2, 150, 300)
    q, k, v = make_qkv(target, 2, (4, 2), 150, 300, 64)
    clean, clean_lse = run(target, q, k, v, mask)
    for j in (0, 40, 63, 64, 149, 200, 299):
        k_, v_ = k.clone(), v.clone()
        if where in ("k", "both"):
            k_[1, 0, j, 7] = math.nan
        if where in ("v", "both"):
            v_[1, 0, j] = math.nan
        out, lse = run(target, q, k_, v_, mask)
        seen = mask.allowed(150, 300, device=q.device)[-1, :, j]
        hit = torch.zeros_like(lse, dtype=torch.bool)
        hit[1, :2] = seen  # query heads 0 and 1 use kv head 0
        assert torch.equal(out.isnan().all(-1), hit) and torch.equal(out.isnan().any(-1), hit), f"key {j}"
        assert torch.equal(lse.isnan(), hit & (where != "v")), f"key {j}"
        if target.backend != "cpu" or j == 40:
            check(out, lse, q, k_, v_, mask, note=f"key {j}")
        if target.backend == "cpu":
            assert torch.equal(out[~hit], clean[~hit]) and torch.equal(lse[~hit], clean_lse[~hit]), f"key {j}"


@pytest.mark.parametrize(("target", "family"), by_family(targets(auto=True)))
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_case_12_what_is_masked_for_all_is_never_touched(target: Target, poison: float, family: str) -> None:
    """Every key and value that no query of its batch sees holds the poison."""
    for lengths in ((150, 300), (300, 150), (65, 65)):
        mask = mask_for(family, 2, *lengths)
        q, k, v = make_qkv(target, 2, (4, 2), *lengths, 64, 72)
        clean, clean_lse = run(target, q, k, v, mask)
        unseen = ~mask.allowed(*lengths, device=q.device).any(1).expand(2, -1)
        poisoned = [x.masked_fill(unseen[:, None, :, None], poison) for x in (k, v)]
        out, lse = run(target, q, *poisoned, mask)
        check(out, lse, q, *poisoned, mask)
        if target.backend == "cpu":
            assert torch.equal(out, clean) and torch.equal(lse, clean_lse)


@ALL
@pytest.mark.parametrize("poison", [math.inf, -math.inf])
@pytest.mark.parametrize("family", ["causal", "top-left", "document", "document-cross-causal"])
def test_case_12_infinite_values_in_a_partial_tile(target: Target, poison: float, family: str) -> None:
    """An infinite V[j] leaves the rows that may not see j alone."""
    mask = mask_for(family, 1, 150, 150)
    q, k, v = make_qkv(target, 1, 2, 150, 150, 64)
    clean, clean_lse = run(target, q, k, v, mask)
    for j in (20, 64, 130):
        v_ = v.clone()
        v_[:, :, j] = poison
        out, lse = run(target, q, k, v_, mask)
        seen = mask.allowed(150, 150, device=q.device)[0, :, j]
        assert not out[:, :, seen].isfinite().any()
        assert out[:, :, ~seen].isfinite().all()
        check(out, lse, q, k, v, mask, rows=(~seen).nonzero()[:, 0])
        if target.backend == "cpu":
            assert torch.equal(out[:, :, ~seen], clean[:, :, ~seen]) and torch.equal(lse, clean_lse)


@ALL
@pytest.mark.parametrize("mask", [DENSE, CAUSAL, document(0, 70, 130, causal=True)], ids=str)
def test_case_12_keys_of_infinitely_low_logit_weigh_nothing(target: Target, mask: MaskCase) -> None:
    """Keys 0 .. 9 have the logit -inf: absent, but for a row that sees nothing else, which is empty."""
    q, k, v = make_qkv(target, 1, 2, 130, 130, 64)
    q = q.abs() + 0.5
    k[:, :, :10] = -math.inf
    out, lse = run(target, q, k, v, mask)
    allowed = mask.allowed(130, 130, device=q.device).clone()
    allowed[..., :10] = False
    k = k.masked_fill(k.isneginf(), 0.0)
    expected, rest, expected_lse = oracle(q, k, v, allowed)
    assert not out[expected_lse.isneginf()].count_nonzero()
    assert_within_rule(out, expected, rest, composed(q, k, v, allowed))
    assert_lse(lse, expected_lse)


@ALL
def test_case_12_all_logits_minus_infinity(target: Target) -> None:
    """Every visible key is infinitely far: the row is empty, not NaN."""
    q, k, v = make_qkv(target, 1, 2, 70, 140, 64)
    q, k = q.abs() + 0.5, torch.full_like(k, -math.inf)
    for mask in (DENSE, CAUSAL, document(0, 30, 70)):
        out, lse = run(target, q, k, v, mask)
        assert not out.count_nonzero() and not out.isnan().any() and lse.isneginf().all()


@ALL
@pytest.mark.parametrize("causal", [False, True])
def test_case_13_unused_cache_slots(target: Target, causal: bool) -> None:
    """A cache of 128 slots filled to [32, 64, 96, 48], the rest NaN in K and +inf in V: as the sliced result."""
    lengths = (32, 64, 96, 48)
    q, k, v = make_qkv(target, 4, (4, 2), 16, 128, 64)
    for b, used in enumerate(lengths):
        k[b, :, used:], v[b, :, used:] = math.nan, math.inf
    kind = "document-causal" if causal else "document"
    mask = MaskCase(kind, ((0, 16),) * 4, tuple((0, used) for used in lengths), batched=True)
    out, lse = run_and_check(target, q, k, v, mask)
    assert out.isfinite().all()
    limit = limit_of_whole(q, k, v, mask)
    for b, used in enumerate(lengths):
        one = slice(b, b + 1)
        cache = (k[one, :, :used], v[one, :, :used])
        check(out[one], lse[one], q[one], *cache, CAUSAL if causal else DENSE, limit=limit)


# ---------------------------------------------------------------------------------------------------------------------
# Documents


@ALL
@pytest.mark.parametrize("causal", [False, True])
def test_case_19_documents_equal_the_texts_alone(target: Target, causal: bool) -> None:
    """ids [0, 0, 1, 1, 1, 2], and lengths of every kind modulo 128: as each text alone."""
    for cuts in ((0, 2, 5, 6), (0, 1, 128, 129, 256, 383, 384, 500), (0, 127, 254, 381, 508)):
        q, k, v = make_qkv(target, 1, (4, 2), cuts[-1], cuts[-1], 64)
        mask = document(*cuts, causal=causal)
        out, lse = run(target, q, k, v, mask)
        limit = limit_of_whole(q, k, v, mask)
        for a, b in itertools.pairwise(cuts):
            text = (x[:, :, a:b] for x in (q, k, v))
            alone = CAUSAL if causal else DENSE
            check(out[:, :, a:b], lse[:, :, a:b], *text, alone, note=f"text {a}:{b}", limit=limit)


def test_case_19_from_ids() -> None:
    ids = torch.tensor([0, 0, 1, 1, 1, 2])
    for causal in (False, True):
        mask = flashmsa.Document.from_ids(ids, causal=causal)
        expected = document(0, 2, 5, 6, causal=causal).allowed(6, 6)[0]
        assert torch.equal(mask.to_dense(6, 6), expected)


@ALL
@pytest.mark.parametrize("causal", [False, True])
def test_case_19_one_token_documents(target: Target, causal: bool) -> None:
    q, k, v = make_qkv(target, 2, (4, 2), 200, 200, 64)
    out, _ = run(target, q, k, v, document(*range(201), causal=causal))
    assert_one_ulp(out, v[:, torch.arange(4, device=v.device) // 2])


@ALL
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("start", [1, 43, 85])
def test_case_19_lengths_modulo_128(target: Target, causal: bool, start: int) -> None:
    """Neighbours of every length from `start` on: nothing of one is written into another."""
    cuts = [0]
    for n in range(start, min(start + 42, 128)):
        cuts.append(cuts[-1] + n)
    q, k, v = make_qkv(target, 1, 1, cuts[-1], cuts[-1], 16)
    middle = torch.tensor([c for cut in cuts[1:] for c in (cut - 1, cut) if c < cuts[-1]], device=q.device)
    run_and_check(target, q, k, v, document(*cuts, causal=causal), rows=middle)


# ---------------------------------------------------------------------------------------------------------------------
# Head dims, devices, size


@ALL
@pytest.mark.parametrize("dim", [8, 40, 72, 80, 96, 112, 160, 200])
@pytest.mark.parametrize("mask", [DENSE, CAUSAL], ids=str)
def test_case_26_head_dim_equals_the_zero_padded(target: Target, dim: int, mask: MaskCase) -> None:
    q, k, v = make_qkv(target, 1, (4, 2), 70, 100, dim)
    out, lse = run(target, q, k, v, mask)
    padded = [torch.nn.functional.pad(x, (0, 256 - dim)) for x in (q, k, v)]
    wide, wide_lse = run(target, *padded, mask, scale=1.0 / math.sqrt(dim))
    check(out, lse, q, k, v, mask)
    check(wide[..., :dim], wide_lse, q, k, v, mask)
    assert not wide[..., dim:].count_nonzero() and not wide.isnan().any()


@pytest.mark.gpu
def test_case_29_device_that_is_not_current() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    target = Target("sm90", "cuda:1", torch.bfloat16)
    with torch.cuda.device(0):
        q, k, v = make_qkv(target, 2, (4, 2), 150, 150, 64)
        for family in FAMILIES:
            run_and_check(target, q, k, v, mask_for(family, 2, 150, 150))
            assert torch.cuda.current_device() == 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    "family", ["dense", "causal", "document-causal", "window-keep", "dilated", "hash-causal", "blocks"]
)
def test_case_29_side_stream_behind_a_slow_producer(family: str) -> None:
    """Work runs on the current stream: it waits for what that stream still computes, and for nothing else."""
    target = Target("sm90", "cuda", torch.bfloat16)
    mask = mask_for(family, 2, 300, 300)
    built = mask.build("cuda")
    values = make_qkv(target, 2, (4, 2), 300, 300, 64)
    q, k, v = (torch.full_like(x, math.nan) for x in values)
    out = poisoned_out(q, v)
    flashmsa.attention(*values, mask=built, backend="sm90")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for x, value in zip((q, k, v), values, strict=True):
            x.copy_(value)
        _, lse = flashmsa.attention(q, k, v, mask=built, backend="sm90", return_lse=True, out=out)
        assert not stream.query(), "the call waited for the device"
    stream.synchronize()
    check(out, lse, *values, mask)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_case_30_graph_replayed_with_other_lengths(dim: int, causal: bool) -> None:
    """Shorter, longer up to the whole tensor, nothing, more or fewer filled documents: replay reads the offsets."""
    target = Target("sm90", "cuda", torch.bfloat16)
    q, k, v = make_qkv(target, 1, (4, 2), 1000, 1000, dim)
    offsets = torch.tensor([0, 200, 300, 500], dtype=torch.int32, device="cuda")
    mask = flashmsa.Document(offsets, causal=causal)
    flashmsa.attention(q, k, v, mask=mask, backend="sm90")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flashmsa.attention(q, k, v, mask=mask, backend="sm90", return_lse=True)
    for cuts in (
        (0, 200, 300, 500),
        (0, 10, 20, 30),
        (0, 1, 999, 1000),
        (0, 0, 0, 0),
        (0, 0, 1000, 1000),
        (0, 64, 128, 640),
    ):
        offsets.copy_(torch.tensor(cuts, dtype=torch.int32))
        new = make_qkv(target, 1, (4, 2), 1000, 1000, dim)
        for x, y in zip((q, k, v), new, strict=True):
            x.copy_(y)
        out.fill_(math.nan)
        lse.fill_(math.nan)
        graph.replay()
        check(out, lse, q, k, v, document(*cuts, causal=causal), note=f"replay with {cuts}")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["sm90", "torch"])
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_case_30_every_mask_is_captured(family: str, backend: str) -> None:
    """Replayed with other queries, keys and values, NaN where the mask lets nobody look."""
    target = Target(backend, "cuda", torch.bfloat16)
    q, k, v = make_qkv(target, 2, (4, 2), 300, 500, 64)
    case = mask_for(family, 2, 300, 500, heads=(4, 2))
    mask = case.build("cuda")
    flashmsa.attention(q, k, v, mask=mask, backend=backend)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flashmsa.attention(q, k, v, mask=mask, backend=backend, return_lse=True)
    allowed = case.allowed(300, 500, device="cuda")
    allowed = allowed if allowed.dim() == 4 else allowed[:, None]
    unseen = ~allowed.any(2).any(1).expand(2, -1)[:, None, :, None]
    for n in range(3):
        for x, new in zip((q, k, v), make_qkv(target, 2, (4, 2), 300, 500, 64), strict=True):
            x.copy_(new)
        for x in (k, v) if n == 1 else ():
            x.masked_fill_(unseen, math.nan)
        out.fill_(math.nan)
        lse.fill_(math.nan)
        graph.replay()
        check(out, lse, q, k, v, case, note=f"replay {n} of {case}")


@pytest.mark.gpu
def test_case_30_graph_replayed_with_other_prefixes() -> None:
    target = Target("sm90", "cuda", torch.bfloat16)
    q, k, v = make_qkv(target, 3, (4, 2), 300, 300, 64)
    prefixes = torch.tensor([0, 10, 300], dtype=torch.int32, device="cuda")
    mask = flashmsa.PrefixLM(prefixes)
    flashmsa.attention(q, k, v, mask=mask, backend="sm90")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flashmsa.attention(q, k, v, mask=mask, backend="sm90", return_lse=True)
    for values in ((0, 10, 300), (127, 128, 129), (0, 0, 0), (1000, 64, 1)):
        prefixes.copy_(torch.tensor(values, dtype=torch.int32))
        graph.replay()
        check(out, lse, q, k, v, Prefixes("prefix", prefixes=values))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "family", ["dense", "causal", "document-batched-causal", "and-document-window", "dilated", "hash"]
)
def test_case_30_two_captures(family: str) -> None:
    """Two graphs replayed in turn, and both at once on two streams: each keeps its own workspace."""
    target = Target("sm90", "cuda", torch.bfloat16)
    captured = []
    for length in (500, 770):
        q, k, v = make_qkv(target, 2, (8, 2), length, length, 128)
        mask = mask_for(family, 2, length, length)
        built = mask.build("cuda")
        expected = flashmsa.attention(q, k, v, mask=built, backend="sm90", return_lse=True)
        check(*expected, q, k, v, mask)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = flashmsa.attention(q, k, v, mask=built, backend="sm90", return_lse=True)
        captured.append((graph, got, expected, torch.cuda.Stream(), (q, k, v, built)))

    def assert_right(when: str) -> None:
        torch.cuda.synchronize()
        for _, got, expected, _, _ in captured:
            assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1]), when
            got[0].fill_(math.nan)
            got[1].fill_(math.nan)
        torch.cuda.synchronize()

    for turn in range(10):
        for graph, *_ in captured[:: 1 if turn % 2 else -1]:
            graph.replay()
        assert_right("in turn")
    for _ in range(10):
        for _ in range(10):
            for graph, _, _, stream, _ in captured:
                with torch.cuda.stream(stream):
                    graph.replay()
        assert_right("at once")


@pytest.mark.parametrize("target", [ONE_EACH[0], ONE_EACH[1]])
def test_case_32_offsets_past_2_to_the_31(target: Target) -> None:
    """Batches and heads 2^31 elements apart, in memory that is reserved but hardly touched."""
    far = 2**31 + 64
    base, base_out = (torch.empty(far + 2**20, dtype=torch.bfloat16) for _ in range(2))
    target = Target(target.backend, "cpu", torch.bfloat16)
    small = make_qkv(target, 2, 2, 40, 40, 64)
    for strides in ((far, 40 * 64, 64, 1), (40 * 64, far, 64, 1)):
        views = []
        for n, x in enumerate(small):
            view = base.as_strided(x.shape, strides, storage_offset=n * 8192)
            views.append(view.copy_(x))
        out = base_out.as_strided(small[0].shape, strides).fill_(math.nan)
        flashmsa.attention(*views, mask=flashmsa.Causal(), backend=target.backend, out=out)
        check(out, None, *small, CAUSAL)


def test_case_32_expanded_past_2_to_the_31() -> None:
    """More than 2^31 elements by expanded heads: the last head equals a sliced call."""
    target = Target("cpu", "cpu", torch.float32)
    q, k, v = make_qkv(target, 1, 1, 1, 2**13 + 8, 64)
    heads = 2**12 + 1
    q = torch.randn(1, heads, 1, 64)
    k, v = k.expand(1, heads, -1, -1), v.expand(1, heads, -1, -1)
    assert k.numel() > 2**31
    out, lse = run(target, q, k, v)
    last, last_lse = run(target, q[:, -1:], k[:, -1:], v[:, -1:])
    assert torch.equal(out[:, -1:], last) and torch.equal(lse[:, -1:], last_lse)
    several = slice(-20, None)
    check(out[:, several], lse[:, several], q[:, several], k[:, several], v[:, several])


@ALL
def test_case_36_grouped_heads_share_their_kv_head(target: Target) -> None:
    """6 query heads over 2: heads 0 .. 2 use kv head 0, heads 3 .. 5 kv head 1."""
    q, k, v = make_qkv(target, 2, (6, 2), 100, 120, 64)
    v[:, 0], v[:, 1] = 1.0, 2.0
    out, _ = run_and_check(target, q, k, v)
    assert torch.equal(out.round(), torch.tensor([1.0, 1, 1, 2, 2, 2]).to(out)[:, None, None].expand_as(out))
    # Another kv head changes the other half alone.
    k_ = k.clone()
    k_[:, 1] = k_[:, 1].roll(1, dims=1) * 2
    v = make_qkv(target, 2, (6, 2), 100, 120, 64)[2]
    one, other = run(target, q, k, v)[0], run(target, q, k_, v)[0]
    check(other, None, q, k_, v)
    if target.native:
        assert torch.equal(one[:, :3], other[:, :3])
    assert not torch.equal(one[:, 3:], other[:, 3:])
