"""merge_states: attention over [K1; K2] from attention over each (case 35)."""

from __future__ import annotations

import math

import pytest
import torch

from flashmsa import Document, attention, merge_states, reference

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def make(len_kv: int, dtype: torch.dtype, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(
        torch.randn(2, heads, length, 64).to(device, dtype) for heads, length in ((4, 33), (2, len_kv), (2, len_kv))
    )


@pytest.mark.parametrize("split", [0, 1, 64, 99, 100], ids=lambda x: f"split at {x}")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_case_35_two_key_sets(split: int, dtype: torch.dtype, device: str) -> None:
    """One of them empty too. Three roundings to the dtype instead of one: 3/2 of an ulp of the largest value."""
    q, k, v = make(100, dtype, device)
    options = {"return_lse": True, "backend": "torch" if device == "cuda" and dtype in DTYPES[:2] else None}
    parts = [attention(q, k[:, :, part], v[:, :, part], **options) for part in (slice(split), slice(split, None))]
    out, lse = merge_states(*parts[0], *parts[1])
    whole, whole_lse = reference(q, k, v, return_lse=True)
    assert out.dtype == dtype and lse.dtype == torch.float32
    ulp = torch.finfo(torch.float32 if dtype == torch.float64 else dtype).eps * whole.abs().max().item()
    bound = 2 * ulp if dtype in (torch.bfloat16, torch.float16) else 16 * ulp
    assert (out.double() - whole).abs().max().item() <= bound
    assert ((lse.double() - whole_lse).abs() / whole_lse.abs().clamp(min=1.0)).max().item() <= 1e-5
    if split in (0, 100):
        full = parts[1] if split == 0 else parts[0]
        assert torch.equal(out, full[0]) and torch.equal(lse, full[1])


def test_order_does_not_matter() -> None:
    q, k, v = make(100, torch.float32)
    a, b = (attention(q, k[:, :, x], v[:, :, x], return_lse=True) for x in (slice(30), slice(30, None)))
    for x, y in zip(merge_states(*a, *b), merge_states(*b, *a), strict=True):
        assert torch.equal(x, y)


def test_rows_that_see_nothing_on_one_side_or_both() -> None:
    q, k, v = make(60, torch.float32)
    first, second = Document([0, 10], [0, 40]), Document([0, 20], [0, 20])
    a = attention(q, k[:, :, :40], v[:, :, :40], first, return_lse=True)
    b = attention(q, k[:, :, 40:], v[:, :, 40:], second, return_lse=True)
    out, lse = merge_states(*a, *b)
    assert torch.equal(out[:, :, 10:20], b[0][:, :, 10:20]) and torch.equal(lse[:, :, 10:20], b[1][:, :, 10:20])
    assert not out[:, :, 20:].count_nonzero() and (lse[:, :, 20:] == -math.inf).all()
    whole = reference(q[:, :, :10], k, v)
    torch.testing.assert_close(out[:, :, :10].double(), whole, rtol=1e-5, atol=1e-5)


def test_a_side_without_keys_may_hold_anything() -> None:
    out = torch.randn(1, 1, 4, 8)
    lse = torch.randn(1, 1, 4)
    nothing = torch.full_like(lse, -math.inf)
    for garbage in (math.nan, math.inf):
        merged = merge_states(torch.full_like(out, garbage), nothing, out, lse)
        assert torch.equal(merged[0], out) and torch.equal(merged[1], lse)


@pytest.mark.parametrize("size", [1e4, -6e4])
def test_large_logits(size: float) -> None:
    out_a, out_b = torch.ones(1, 1, 1, 8), torch.full((1, 1, 1, 8), 3.0)
    lse = torch.full((1, 1, 1), size)
    out, merged = merge_states(out_a, lse, out_b, lse)
    assert torch.equal(out, torch.full_like(out, 2.0)) and merged.item() == pytest.approx(size + math.log(2), abs=1e-2)


def test_gradients() -> None:
    """Against finite differences, an empty side among them: never NaN."""
    out_a, out_b = (torch.randn(1, 2, 3, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    lse_a, lse_b = (torch.randn(1, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(merge_states, (out_a, lse_a, out_b, lse_b))
    empty = torch.full((1, 2, 3), -math.inf, dtype=torch.float64, requires_grad=True)
    out, _ = merge_states(out_a, empty, out_b, empty)
    grads = torch.autograd.grad(out.sum(), (out_a, out_b, empty))
    assert not any(x.count_nonzero() for x in grads)
    # What an empty side's rows hold reaches no gradient either.
    garbage = torch.full_like(out_a, math.nan).requires_grad_()
    out, _ = merge_states(garbage, empty, out_b, lse_b)
    grads = torch.autograd.grad(out.sum(), (garbage, empty, out_b, lse_b))
    assert not any(x.count_nonzero() for x in (grads[0], grads[1], grads[3])) and torch.equal(
        grads[2], torch.ones_like(out_b)
    )


def test_errors() -> None:
    out, lse = torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3)
    for bad, error, message in (
        ((out, lse[:, :1], out, lse), ValueError, r"lse_a: shape \(1, 1, 3\); must be out_a's without the last"),
        ((out, lse, out[..., :4], lse), ValueError, r"out_b: shape \(1, 2, 3, 4\) does not match out_a's"),
        ((out, lse, out.double(), lse), TypeError, "out_b: dtype torch.float64 does not match out_a's torch.float32"),
        ((out, lse, out, None), TypeError, "lse_b: NoneType; must be a torch.Tensor"),
        ((out, lse.long(), out, lse), TypeError, "lse_a: dtype torch.int64; must be a floating-point type"),
        ((out, lse, out.to("meta"), lse.to("meta")), ValueError, "out_b: on meta, out_a on cpu"),
    ):
        with pytest.raises(error, match=message):
            merge_states(*bad)
