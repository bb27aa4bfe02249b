"""Cases with a known right answer, for gradients; numbered as in test_cases.py. And what may not be seen: NaN there."""

from __future__ import annotations

import math

import pytest
import torch
from gradients import Gradients, check_gradients, grad_like, run_and_check_backward, run_backward
from helpers import (
    ALL_FAMILIES,
    CAUSAL,
    DENSE,
    ONE_OF_EACH,
    TOP_LEFT,
    Blocks,
    MaskCase,
    Options,
    Target,
    both,
    by_family,
    document,
    largest,
    make_qkv,
    mask_for,
    targets,
)

import flashmsa

ALL = pytest.mark.parametrize("target", targets(auto=True))
FEW = pytest.mark.parametrize("target", targets(auto=True, dtypes=(torch.float32, torch.bfloat16)))
EVERY = pytest.mark.parametrize(
    ("target", "family"), by_family(targets(auto=True, dtypes=(torch.float32, torch.bfloat16)), ALL_FAMILIES)
)


def allowed_pairs(mask: MaskCase, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """(B, Hq, Sq, Sk) bool."""
    allowed = mask.allowed(q.shape[2], k.shape[2], device=q.device)
    allowed = allowed if allowed.dim() == 4 else allowed[:, None]
    allowed = allowed.repeat_interleave(q.shape[1] // allowed.shape[1], 1)
    return allowed.expand(q.shape[0], q.shape[1], -1, -1)


def of_keys(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Whether any query head of a kv head has it: (B, Hq, Sk) as (B, Hkv, Sk)."""
    return x.unflatten(1, (k.shape[1], -1)).any(2)


def assert_zero(x: torch.Tensor, note: object = "") -> None:
    assert not x.isnan().any() and not x.count_nonzero(), f"{note}: not exactly 0"


def assert_equal_but(target: Target, found: Gradients, clean: Gradients) -> None:
    """The CPU backend's bits do not depend on what nobody sees; a GPU may take a slow path, torch another kernel."""
    if target.backend == "cpu":
        for name, want in clean.items():
            assert torch.equal(found[name], want), name


# ---------------------------------------------------------------------------------------------------------------------
# Empty rows and lengths


@ALL
def test_case_1_more_queries_than_keys(target: Target) -> None:
    """Rows 0 .. 2 see nothing: their dQ is exactly 0, and their dO reaches nothing."""
    q, k, v = make_qkv(target, 2, 2, 5, 2, 64)
    d_out, d_lse = grad_like(q, v)
    found = run_backward(target, q, k, v, CAUSAL, d_out, d_lse)
    check_gradients(found, q, k, v, CAUSAL, d_out, d_lse)
    assert_zero(found["dq"][:, :, :3])
    for poison in (math.nan, math.inf):
        d_out[:, :, :3], d_lse[:, :, :3] = poison, poison
        again = run_backward(target, q, k, v, CAUSAL, d_out, d_lse)
        assert_equal_but(target, again, found)
        assert_zero(again["dq"][:, :, :3])
        clean = [x.clone() for x in (d_out, d_lse)]
        clean[0][:, :, :3], clean[1][:, :, :3] = 0, 0
        check_gradients(again, q, k, v, CAUSAL, *clean, note=f"{poison} in rows that see nothing")


@pytest.mark.parametrize(
    ("target", "family"), by_family(targets(auto=True, dtypes=(torch.float32, torch.bfloat16)), ALL_FAMILIES)
)
def test_case_3_empty_dimensions(target: Target, family: str) -> None:
    for batch, len_q, len_kv in ((2, 70, 0), (2, 0, 70), (0, 70, 70), (2, 0, 0)):
        q, k, v = make_qkv(target, batch, (4, 2), len_q, len_kv, 64, 40)
        mask = mask_for(family, batch, len_q, len_kv, heads=(4, 2))
        if mask.batched and not batch:
            offsets = torch.zeros(0, 6, dtype=torch.int32, device=q.device)
            built = flashmsa.Document(offsets, offsets.clone(), causal=mask.kind == "document-causal")
        else:
            built = mask.build(q.device)
        d_out, d_lse = grad_like(q, v)
        sinks = torch.randn(4, device=q.device)
        for options in (Options(), Options(sinks=sinks)):
            found = run_backward(target, q, k, v, built, d_out, d_lse, options)
            for name, like in (("dq", q), ("dk", k), ("dv", v)):
                assert found[name].shape == like.shape and found[name].dtype == like.dtype
                assert_zero(found[name], name)
        # Without keys lse is the sink.
        wanted = d_lse.sum((0, 2)) if len_kv == 0 else torch.zeros(4, device=q.device)
        torch.testing.assert_close(found["dsinks"], wanted)


@ALL
@pytest.mark.parametrize("causal", [False, True])
def test_case_4_empty_sequences_on_either_side(target: Target, causal: bool) -> None:
    """q lengths [0, 150, 0, 150], k lengths [100, 0, 100, 100]."""
    q, k, v = make_qkv(target, 1, (4, 2), 300, 300, 64)
    mask = document(0, 0, 150, 150, 300, kv=(0, 100, 100, 200, 300), causal=causal)
    found = run_and_check_backward(target, q, k, v, mask)
    assert_zero(found["dq"][:, :, :150])
    assert_zero(found["dk"][:, :, :200])
    assert_zero(found["dv"][:, :, :200])
    assert found["dk"][:, :, 200:].count_nonzero() and found["dv"][:, :, 200:].count_nonzero()


@ALL
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("used", [1, 63, 64, 129, 200])
def test_case_6_tail_past_the_offsets(target: Target, causal: bool, used: int) -> None:
    """NaN in the tails of all that goes in, dO and dlse among it."""
    q, k, v = make_qkv(target, 2, (4, 2), used + 100, used + 100, 64)
    mask = document(0, used // 3, used // 3, used, causal=causal)
    d_out, d_lse = grad_like(q, v)
    clean = run_backward(target, q, k, v, mask, d_out, d_lse)
    for x in (q, k, v, d_out, d_lse):
        x[:, :, used:] = math.nan
    found = run_backward(target, q, k, v, mask, d_out, d_lse)
    for name in ("dq", "dk", "dv"):
        assert_zero(found[name][:, :, used:], name)
    real = [x[:, :, :used] for x in (q, k, v, d_out, d_lse)]
    cut = {name: x[:, :, :used] for name, x in found.items()}
    check_gradients(cut, *real[:3], mask, *real[3:])
    assert_equal_but(target, found, clean)


# ---------------------------------------------------------------------------------------------------------------------
# Values


@ALL
def test_case_8_logits_under_minus_100(target: Target) -> None:
    """Causal, grouped heads 14 / 2: the first visited tile may be masked whole."""
    q, k, v = make_qkv(target, 1, (14, 2), 88, 448, 64)
    q, k = q * 0.25 + 4, k * 0.25 - 4
    found = run_and_check_backward(target, q, k, v, CAUSAL)
    assert found["lse"].max().item() < -100 + math.log(448)


@ALL
@pytest.mark.parametrize("mask", [DENSE, CAUSAL, document(0, 300, 704, causal=True)], ids=str)
def test_case_9_logits_near_minus_120(target: Target, mask: MaskCase) -> None:
    """A padded key column (704 is no multiple of 128) must not weigh e^(0 + 120)."""
    q, k, v = make_qkv(target, 1, 1, 704, 704, 64)
    q, k = q * 0.125 + 4, k * 0.125 - 3.75
    found = run_and_check_backward(target, q, k, v, mask)
    assert -140 < found["lse"].mean().item() < -100
    assert all(found[name].isfinite().all() for name in ("dq", "dk", "dv"))


@ALL
@pytest.mark.parametrize("hot", [0, 63, 64, 128, 199])
def test_case_10_one_logit_far_above(target: Target, hot: int) -> None:
    """That key takes all: dV is the sum of dO there and 0 elsewhere, and a weight of 1 has no slope."""
    q = torch.full((1, 2, 200, 64), 16.0, dtype=target.dtype, device=target.device)
    k = torch.zeros_like(q)
    k[:, :, hot] = 10.0
    v = make_qkv(target, 1, 2, 200, 200, 64)[2]
    d_out, _ = grad_like(q, v)
    found = run_backward(target, q, k, v, DENSE, d_out, scale=1.0)
    others = torch.arange(200, device=q.device) != hot
    assert_zero(found["dv"][:, :, others])
    assert_zero(found["dk"][:, :, others])
    total = d_out.double().sum(2)
    # Sums of 200 terms in fp32 at least, lse off by an ulp of fp32 at 10240, and one rounding to the dtype.
    unit = 200 * torch.finfo(torch.promote_types(target.dtype, torch.float32)).eps + 10240 * 2.0**-23
    limit = largest(d_out.double().abs().sum(2)) * unit + largest(total) * torch.finfo(target.dtype).eps
    assert largest(found["dv"][:, :, hot].double() - total) <= limit
    # ds = p (dp - delta), whose two terms are one number computed twice: out is rounded to the dtype between.
    terms = largest(d_out.double() @ v.double().mT) + largest((d_out * v[:, :, hot : hot + 1]).double().abs().sum(-1))
    rounding = 64 * (unit + torch.finfo(target.dtype).eps) * terms
    assert largest(found["dq"]) <= 10.0 * rounding and largest(found["dk"]) <= 200 * 16.0 * rounding


@ALL
@pytest.mark.parametrize("mask", [DENSE, CAUSAL, TOP_LEFT, document(0, 50, 120, causal=True)], ids=str)
def test_case_11_scale_zero(target: Target, mask: MaskCase) -> None:
    """Every visible key weighs the same, and no logit depends on q or k."""
    q, k, v = make_qkv(target, 1, (4, 2), 130, 140, 64)
    found = run_and_check_backward(target, q, k, v, mask, scale=0.0)
    assert_zero(found["dq"])
    assert_zero(found["dk"])


@ALL
@pytest.mark.parametrize("mask", [DENSE, CAUSAL, document(0, 50, 120, causal=True)], ids=str)
def test_case_11_scale_negative_is_q_negated(target: Target, mask: MaskCase) -> None:
    q, k, v = make_qkv(target, 1, (4, 2), 130, 140, 64)
    d_out, d_lse = grad_like(q, v)
    found = run_backward(target, q, k, v, mask, d_out, d_lse, scale=-0.25)
    check_gradients(found, q, k, v, mask, d_out, d_lse, scale=-0.25)
    check_gradients({**found, "dq": -found["dq"]}, -q, k, v, mask, d_out, d_lse, scale=0.25)


@FEW
@pytest.mark.parametrize("family", ["dense", "causal", "document-causal", "window-keep"])
def test_large_gradients_and_inputs(target: Target, family: str) -> None:
    """Values near the edge of fp16's range where the result is finite: no overflow on the way."""
    q, k, v = make_qkv(target, 1, (4, 2), 100, 130, 64)
    mask = mask_for(family, 1, 100, 130)
    d_out, _ = grad_like(q, v)
    for factor in (2.0**-12, 2.0**7):
        found = run_backward(target, q, k, v, mask, d_out * factor)
        check_gradients(found, q, k, v, mask, d_out * factor, note=f"dO times {factor}")


# ---------------------------------------------------------------------------------------------------------------------
# What may not be seen


@EVERY
def test_case_12_what_is_masked_for_all_is_never_touched(target: Target, family: str) -> None:
    """Keys and values that nobody sees, queries and dO of rows that see nothing: any content, and gradients of 0."""
    for lengths in ((150, 300), (300, 150)):
        mask = mask_for(family, 2, *lengths, heads=(4, 2))
        q, k, v = make_qkv(target, 2, (4, 2), *lengths, 64, 72)
        d_out, d_lse = grad_like(q, v)
        clean = run_backward(target, q, k, v, mask, d_out, d_lse)
        allowed = allowed_pairs(mask, q, k)
        unseen, empty = ~of_keys(allowed.any(2), k)[..., None], ~allowed.any(3)[..., None]
        for poison in (math.nan, math.inf):
            k_, v_ = (x.masked_fill(unseen, poison) for x in (k, v))
            q_, d_out_ = (x.masked_fill(empty, poison) for x in (q, d_out))
            d_lse_ = d_lse.masked_fill(empty[..., 0], poison)
            found = run_backward(target, q_, k_, v_, mask, d_out_, d_lse_)
            assert_zero(found["dq"].masked_fill(~empty, 0.0), "dq")
            assert_zero(found["dk"].masked_fill(~unseen, 0.0), "dk")
            assert_zero(found["dv"].masked_fill(~unseen, 0.0), "dv")
            assert_equal_but(target, found, clean)
            check_gradients(found, q, k, v, mask, d_out, d_lse, note=f"{mask} {poison}")


@EVERY
@pytest.mark.parametrize("where", ["k", "v", "q", "dO"])
def test_case_12_nan_reaches_what_may_see_it_alone(target: Target, where: str, family: str) -> None:
    """NaN in one visible row of q, k, v or dO, on both sides of tile edges, against the definition."""
    mask = mask_for(family, 2, 150, 300, heads=(4, 2))
    q, k, v = make_qkv(target, 2, (4, 2), 150, 300, 64)
    clean_out, d_lse = grad_like(q, v)
    allowed = allowed_pairs(mask, q, k)
    for j in (0, 40, 64, 127, 149) if target.device == "cuda" else (40, 127):
        given = {"q": q.clone(), "k": k.clone(), "v": v.clone(), "dO": clean_out.clone()}
        given[where][1, 0, j, 7 if where != "v" else slice(None)] = math.nan
        *inputs, d_out = given.values()
        found = run_backward(target, *inputs, mask, d_out, d_lse)
        check_gradients(found, *inputs, mask, d_out, d_lse, note=f"{mask} NaN in row {j} of {where}")
        hit = torch.zeros_like(allowed[..., 0])
        if where in "kv":
            hit[1, :2] = allowed[1, :2, :, j]  # query heads 0 and 1 use kv head 0
        else:
            hit[1, 0, j] = allowed[1, 0, j].any()
        assert torch.equal(found["dq"].isnan().any(-1), hit), f"{where} {j}"
        keys = of_keys((allowed & hit[..., None]).any(2), k)
        assert torch.equal(found["dk"].isnan().any(-1), keys), f"{where} {j}"
        # A value of NaN has no part in dV = P^T dO.
        of_dv = torch.zeros_like(keys) if where == "v" else keys
        assert torch.equal(found["dv"].isnan().any(-1), of_dv), f"{where} {j}"


@FEW
@pytest.mark.parametrize("name", ["softcap", "sinks", "alibi"])
@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_masked_nan_with_options(target: Target, name: str, family: str) -> None:
    """The same with a cap, sinks or slopes: a cap's slope at NaN is NaN, and 0 times that must not come out."""
    if name == "alibi" and "hash" in family:
        return
    options = {
        "softcap": Options(softcap=1.5),
        "sinks": Options(sinks=torch.randn(4, device=target.device)),
        "alibi": Options(slopes=torch.rand(4, device=target.device)),
    }[name]
    mask = mask_for(family, 2, 150, 300, heads=(4, 2))
    q, k, v = make_qkv(target, 2, (4, 2), 150, 300, 64)
    d_out, d_lse = grad_like(q, v)
    allowed = allowed_pairs(mask, q, k)
    unseen = ~of_keys(allowed.any(2), k)[..., None]
    k, v = (x.masked_fill(unseen, math.nan) for x in (k, v))
    k[1, 0, 140, 3] = math.nan
    v[0, 1, 64] = math.nan
    found = run_backward(target, q, k, v, mask, d_out, d_lse, options)
    check_gradients(found, q, k, v, mask, d_out, d_lse, options)


@ALL
@pytest.mark.parametrize("mask", [DENSE, CAUSAL, document(0, 70, 130, causal=True)], ids=str)
def test_case_12_keys_of_very_low_logit(target: Target, mask: MaskCase) -> None:
    """Logits that are -inf in fp32, or weigh 0 beside the others: no NaN, and no gradient of theirs through p."""
    q, k, v = make_qkv(target, 1, 2, 130, 130, 64)
    q = q.abs() + 0.5
    k[:, :, 10:20] = -6e4
    d_out, d_lse = grad_like(q, v)
    found = run_backward(target, q, k, v, mask, d_out, d_lse)
    assert all(found[name].isfinite().all() for name in ("dq", "dk", "dv"))
    assert_zero(found["dk"][:, :, 10:20])
    assert_zero(found["dv"][:, :, 10:20])
    assert found["dk"][:, :, :10].count_nonzero() and found["dk"][:, :, 20:].count_nonzero()


@ALL
@pytest.mark.parametrize("with_sinks", [False, True])
def test_case_12_all_logits_minus_infinity(target: Target, with_sinks: bool) -> None:
    """Every visible key is infinitely far: an empty row, whose gradients are 0 and not 0 times infinity."""
    options = Options(sinks=torch.randn(2, device=target.device)) if with_sinks else Options()
    q, k, v = make_qkv(target, 1, 2, 70, 140, 64)
    q, k = q.abs() + 0.5, torch.full_like(k, -math.inf)
    d_out, d_lse = grad_like(q, v)
    for mask in (DENSE, CAUSAL, document(0, 30, 70)):
        found = run_backward(target, q, k, v, mask, d_out, d_lse, options)
        if not with_sinks:
            assert found["lse"].isneginf().all()
        for name in ("dq", "dk", "dv"):
            assert_zero(found[name], name)


@ALL
@pytest.mark.parametrize("causal", [False, True])
def test_case_13_unused_cache_slots(target: Target, causal: bool) -> None:
    """A cache of 128 slots filled to [32, 64, 96, 48], the rest NaN in K and +inf in V: no gradient there."""
    lengths = (32, 64, 96, 48)
    q, k, v = make_qkv(target, 4, (4, 2), 16, 128, 64)
    for b, used in enumerate(lengths):
        k[b, :, used:], v[b, :, used:] = math.nan, math.inf
    kind = "document-causal" if causal else "document"
    mask = MaskCase(kind, ((0, 16),) * 4, tuple((0, used) for used in lengths), batched=True)
    found = run_and_check_backward(target, q, k, v, mask)
    for b, used in enumerate(lengths):
        assert_zero(found["dk"][b, :, used:])
        assert_zero(found["dv"][b, :, used:])


# ---------------------------------------------------------------------------------------------------------------------
# Blocks


@ALL
@pytest.mark.parametrize("dim", [8, 64, 96, 256])
@pytest.mark.parametrize("block", [64, 128])
def test_case_21_triangle_of_blocks_and_causal(target: Target, block: int, dim: int) -> None:
    """S 257, whose last block has one row."""
    q, k, v = make_qkv(target, 1, (4, 2), 257, 257, dim)
    count = -(-257 // block)
    triangle = Blocks("blocks", blocks=torch.ones(count, count).tril().bool()[None, None], size=(block, block))
    d_out, d_lse = grad_like(q, v)
    found = run_backward(target, q, k, v, both(triangle, CAUSAL), d_out, d_lse)
    check_gradients(found, q, k, v, CAUSAL, d_out, d_lse)


@ALL
def test_case_21_empty_rows_and_columns_of_blocks(target: Target) -> None:
    q, k, v = make_qkv(target, 1, (4, 2), 300, 300, 64)
    blocks = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    blocks[:, :, 1], blocks[:, :, :, 0] = False, False
    found = run_and_check_backward(target, q, k, v, Blocks("blocks", blocks=blocks))
    assert_zero(found["dq"][:, :, 128:256])
    assert_zero(found["dk"][:, :, :128])
    assert_zero(found["dv"][:, :, :128])
    assert found["dk"][:, :, 128:].count_nonzero() and found["dq"][:, :, :128].count_nonzero()
