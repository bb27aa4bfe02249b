"""Properties that hold for every input, searched by hypothesis on the CPU backends with small shapes.

Only rounding is allowed for, at its worst; precision is the subject of test_attention.
"""

from __future__ import annotations

import math

import pytest
import torch
from helpers import (
    ALL_FAMILIES,
    CAUSAL,
    DENSE,
    FAMILY_KINDS,
    HEAD_FAMILY_KINDS,
    TOP_LEFT,
    MaskCase,
    Target,
    check,
    mask_for,
    run,
    run_and_check,
    worst_case,
)
from hypothesis import given
from hypothesis import strategies as st

import flashmsa

BACKENDS = pytest.mark.parametrize("backend", ["cpu", "torch"])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])
# Lengths around the edges of tiles as often as anything else.
LENGTHS = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 127, 128, 129]))
DIMS = st.integers(1, 8).map(lambda n: 8 * n)
SEEDS = st.integers(0, 2**31)


def normal(seed: int, target: Target, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(target.dtype) for shape in shapes]


@st.composite
def document_cuts(draw, length: int) -> tuple[int, ...]:
    """Offsets from 0 to `length`, empty documents among them."""
    return (0, *sorted(draw(st.lists(st.integers(0, length), max_size=6))), length)


@st.composite
def any_mask(draw, batch: int, len_q: int, len_kv: int, heads: tuple[int, int] = (1, 1)) -> MaskCase:
    """A mask of any family; documents with offsets of any kind, heads that differ if told so."""
    kinds = {**FAMILY_KINDS, **(HEAD_FAMILY_KINDS if heads != (1, 1) else {})}
    others = [family for family, kind in kinds.items() if kind > 2]
    kind = draw(st.sampled_from(["dense", "causal", "top-left", "document", "document-causal", *others]))
    if kind in others:
        return mask_for(kind, batch, len_q, len_kv, draw(st.integers(0, 999)), draw(st.integers(1, 5)), heads)
    if not kind.startswith("document"):
        return MaskCase(kind)
    count = draw(st.integers(1, 6))
    batched = draw(st.booleans())

    def cuts(length: int) -> tuple[int, ...]:
        return (0, *sorted(draw(st.lists(st.integers(0, length), min_size=count, max_size=count))))

    q_offsets = tuple(cuts(len_q) for _ in range(batch if batched else 1))
    kv_offsets = tuple(cuts(len_kv) for _ in range(batch if batched else 1))
    return MaskCase(kind, q_offsets, kv_offsets, batched)


@BACKENDS
@given(data=st.data())
def test_equals_the_oracle(backend: str, data: st.DataObject) -> None:
    target = Target(backend, "cpu", data.draw(DTYPES))
    batch, heads_kv, group = (data.draw(st.integers(1, 3)) for _ in range(3))
    len_q, len_kv, dim, dim_v = (data.draw(s) for s in (LENGTHS, LENGTHS, DIMS, DIMS))
    mask = data.draw(any_mask(batch, len_q, len_kv, (heads_kv * group, heads_kv)))
    scale = data.draw(st.sampled_from([None, 1.0, 0.0, -0.3]))
    q, k, v = normal(
        data.draw(SEEDS),
        target,
        (batch, heads_kv * group, len_q, dim),
        (batch, heads_kv, len_kv, dim),
        (batch, heads_kv, len_kv, dim_v),
    )
    run_and_check(target, q, k, v, mask, scale=scale, limit=worst_case(q, k, v, scale))


@BACKENDS
@given(data=st.data())
def test_permuting_documents_permutes_the_rows(backend: str, data: st.DataObject) -> None:
    target = Target(backend, "cpu", torch.float32)
    length = data.draw(LENGTHS)
    cuts = data.draw(document_cuts(length))
    kind = data.draw(st.sampled_from(["document", "document-causal"]))
    order = data.draw(st.permutations(range(len(cuts) - 1)))
    q, k, v = normal(data.draw(SEEDS), target, *[(1, 2, length, 16)] * 3)
    rows = torch.cat([torch.arange(cuts[d], cuts[d + 1]) for d in order])
    new_cuts = [0]
    for d in order:
        new_cuts.append(new_cuts[-1] + cuts[d + 1] - cuts[d])
    out, lse = run(target, *(x[:, :, rows] for x in (q, k, v)), MaskCase(kind, (tuple(new_cuts),)))
    back = torch.empty_like(rows)
    back[rows] = torch.arange(length)
    check(out[:, :, back], lse[:, :, back], q, k, v, MaskCase(kind, (cuts,)), limit=worst_case(q, k, v))


@BACKENDS
@given(data=st.data())
def test_documents_are_the_texts_alone(backend: str, data: st.DataObject) -> None:
    target = Target(backend, "cpu", data.draw(DTYPES))
    len_q, len_kv = data.draw(LENGTHS), data.draw(LENGTHS)
    count = data.draw(st.integers(1, 5))
    q_cuts, kv_cuts = (
        (0, *sorted(data.draw(st.lists(st.integers(0, n), min_size=count, max_size=count)))) for n in (len_q, len_kv)
    )
    causal = data.draw(st.booleans())
    q, k, v = normal(data.draw(SEEDS), target, (1, 2, len_q, 16), (1, 2, len_kv, 16), (1, 2, len_kv, 24))
    mask = MaskCase("document-causal" if causal else "document", (q_cuts,), (kv_cuts,))
    out, lse = run(target, q, k, v, mask)
    limit = worst_case(q, k, v)
    for d in range(count):
        mine, theirs = slice(q_cuts[d], q_cuts[d + 1]), slice(kv_cuts[d], kv_cuts[d + 1])
        text = (q[:, :, mine], k[:, :, theirs], v[:, :, theirs])
        alone = CAUSAL if causal else DENSE
        check(out[:, :, mine], lse[:, :, mine], *text, alone, note=f"text {d} of {mask}", limit=limit)
    assert not out[:, :, q_cuts[-1] :].count_nonzero()


@BACKENDS
@given(data=st.data())
def test_keys_in_two_parts_merge(backend: str, data: st.DataObject) -> None:
    target = Target(backend, "cpu", torch.float32)
    len_q, len_kv = data.draw(LENGTHS), data.draw(LENGTHS)
    cut = data.draw(st.integers(0, len_kv))
    q, k, v = normal(data.draw(SEEDS), target, (1, 2, len_q, 16), (1, 2, len_kv, 16), (1, 2, len_kv, 16))
    a = run(target, q, k[:, :, :cut], v[:, :, :cut])
    b = run(target, q, k[:, :, cut:], v[:, :, cut:])
    out, lse = flashmsa.merge_states(*a, *b)
    # The weights come from two lse, each right to 1e-5 max(1, |lse|).
    weights = 4e-5 * max(
        1.0, a[1].abs().nan_to_num(posinf=0.0).max().item(), b[1].abs().nan_to_num(posinf=0.0).max().item()
    )
    check(out, lse, q, k, v, limit=worst_case(q, k, v) + weights * v.abs().max().item())


@BACKENDS
@given(data=st.data())
def test_permuting_keys_changes_nothing(backend: str, data: st.DataObject) -> None:
    target = Target(backend, "cpu", torch.float32)
    len_q, len_kv = data.draw(LENGTHS), data.draw(LENGTHS)
    q, k, v = normal(data.draw(SEEDS), target, (1, 2, len_q, 16), (1, 2, len_kv, 16), (1, 2, len_kv, 16))
    order = torch.randperm(len_kv, generator=torch.Generator().manual_seed(data.draw(SEEDS)))
    out, lse = run(target, q, k[:, :, order], v[:, :, order])
    check(out, lse, q, k, v, limit=worst_case(q, k, v))


@BACKENDS
@given(data=st.data())
def test_causal_rows_are_dense_rows_over_a_prefix(backend: str, data: st.DataObject) -> None:
    target = Target(backend, "cpu", torch.float32)
    len_q, len_kv = data.draw(LENGTHS), data.draw(LENGTHS)
    q, k, v = normal(data.draw(SEEDS), target, (1, 2, len_q, 16), (1, 2, len_kv, 16), (1, 2, len_kv, 16))
    i = data.draw(st.integers(0, len_q - 1))
    for mask, last in ((CAUSAL, i + len_kv - len_q), (TOP_LEFT, i)):
        out, lse = run(target, q, k, v, mask)
        seen = max(0, min(last + 1, len_kv))
        row = slice(i, i + 1)
        limit = worst_case(q, k, v)
        check(out[:, :, row], lse[:, :, row], q[:, :, row], k[:, :, :seen], v[:, :, :seen], limit=limit)


@BACKENDS
@given(data=st.data())
def test_moving_all_keys_moves_only_lse(backend: str, data: st.DataObject) -> None:
    """k + c adds scale q.c to every logit of a row: the same out, and lse + scale q.c. Exact numbers, float64."""
    target = Target(backend, "cpu", torch.float64)
    len_q, len_kv = data.draw(LENGTHS), data.draw(LENGTHS)
    q, k, v, c = normal(
        data.draw(SEEDS), target, (1, 2, len_q, 16), (1, 2, len_kv, 16), (1, 2, len_kv, 16), (1, 2, 1, 16)
    )
    mask = data.draw(any_mask(1, len_q, len_kv))
    out, lse = run(target, q, k, v, mask)
    moved, moved_lse = run(target, q, k + c, v, mask)
    torch.testing.assert_close(moved, out, rtol=0, atol=1e-13 * (1 + k.abs().max().item() + c.abs().max().item()) ** 2)
    torch.testing.assert_close(moved_lse.double(), lse.double() + (q * c).sum(-1) / 4, rtol=2e-5, atol=2e-5)


@BACKENDS
@given(data=st.data())
def test_linear_in_v(backend: str, data: st.DataObject) -> None:
    target = Target(backend, "cpu", torch.float64)
    len_q, len_kv = data.draw(LENGTHS), data.draw(LENGTHS)
    q, k, v, w = normal(data.draw(SEEDS), target, (1, 2, len_q, 16), *[(1, 2, len_kv, 16)] * 3)
    mask = data.draw(any_mask(1, len_q, len_kv))
    (a, lse_a), (b, lse_b) = run(target, q, k, v, mask), run(target, q, k, w, mask)
    both, lse = run(target, q, k, 2 * v - 3 * w, mask)
    torch.testing.assert_close(both, 2 * a - 3 * b, rtol=0, atol=1e-13)
    assert torch.equal(lse_a, lse_b) and torch.equal(lse_a, lse)


@BACKENDS
@given(data=st.data())
def test_out_lies_between_the_values(backend: str, data: st.DataObject) -> None:
    """A row is an average of the values it sees, however large the logits."""
    target = Target(backend, "cpu", data.draw(st.sampled_from([torch.float32, torch.bfloat16])))
    len_q, len_kv = data.draw(LENGTHS), data.draw(LENGTHS)
    size = data.draw(st.sampled_from([1e-3, 1.0, 30.0, 1e3]))
    q, k, v = normal(data.draw(SEEDS), target, (1, 1, len_q, 16), (1, 1, len_kv, 16), (1, 1, len_kv, 16))
    mask = data.draw(any_mask(1, len_q, len_kv))
    out, lse = run(target, q * size, k, v, mask)
    allowed = mask.allowed(len_q, len_kv)[:, None, :, :, None]
    values = v[:, :, None].double()
    low = values.masked_fill(~allowed, math.inf).amin(3)
    high = values.masked_fill(~allowed, -math.inf).amax(3)
    alive = allowed.any(3).expand_as(out)
    slack = 4 * torch.finfo(target.dtype).eps * v.abs().max().item()
    assert (out.double()[alive] >= low.expand_as(out)[alive] - slack).all()
    assert (out.double()[alive] <= high.expand_as(out)[alive] + slack).all()
    assert torch.equal(lse.isneginf(), ~alive[..., 0])


@BACKENDS
@given(data=st.data())
def test_batches_and_heads_are_independent(backend: str, data: st.DataObject) -> None:
    target = Target(backend, "cpu", torch.float32)
    batch, heads = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    len_q, len_kv = data.draw(LENGTHS), data.draw(LENGTHS)
    q, k, v = normal(
        data.draw(SEEDS), target, (batch, heads, len_q, 16), (batch, heads, len_kv, 16), (batch, heads, len_kv, 16)
    )
    mask = mask_for(data.draw(st.sampled_from(ALL_FAMILIES)), batch, len_q, len_kv, heads=(heads, heads))
    out, lse = run(target, q, k, v, mask)
    b, h = data.draw(st.integers(0, batch - 1)), data.draw(st.integers(0, heads - 1))
    alone = mask.alone(b, h, heads)
    one = (slice(b, b + 1), slice(h, h + 1))
    check(out[one], lse[one], q[one], k[one], v[one], alone, limit=worst_case(q, k, v))
    if backend == "cpu":
        single, single_lse = run(target, q[one], k[one], v[one], alone)
        assert torch.equal(single, out[one]) and torch.equal(single_lse, lse[one])
