"""Sliding windows, prefix-LM and their intersections: what the object says, cases with a known answer, bad input."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import MaskCase, Target, make_qkv, run, run_and_check, targets

import flashmsa
from flashmsa import Causal, Dense, Document, Intersection, PrefixLM, SlidingWindow

ALL = pytest.mark.parametrize("target", targets(auto=True))


def window(left: int, right: int) -> MaskCase:
    return MaskCase("window", left=left, right=right)


def prefix(keys: int) -> MaskCase:
    return MaskCase("prefix", prefix=keys)


@ALL
@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 300])
def test_case_14_a_window_of_the_whole_length_is_causal(target: Target, length: int) -> None:
    q, k, v = make_qkv(target, 1, (4, 2), length, length, 64)
    out, lse = run(target, q, k, v, MaskCase("causal"))
    for left in (length - 1, length):
        mine, mine_lse = run_and_check(target, q, k, v, window(left, 0))
        if target.backend in ("cpu", "sm90"):
            assert torch.equal(mine, out) and torch.equal(mine_lse, lse)


@ALL
def test_case_14_a_window_of_one_key(target: Target) -> None:
    q, k, v = make_qkv(target, 2, (4, 2), 200, 200, 64)
    out, _ = run_and_check(target, q, k, v, window(0, 0))
    assert torch.equal(out, v.repeat_interleave(2, 1))


@ALL
@pytest.mark.parametrize("lengths", [(129, 300), (300, 129), (129, 129), (40, 1000), (1000, 40), (7, 700)], ids=str)
@pytest.mark.parametrize("bounds", [(32, 64), (0, 5), (5, 0), (127, 128), (2000, 2000)], ids=str)
def test_case_15_absolute_positions(target: Target, lengths: tuple[int, int], bounds: tuple[int, int]) -> None:
    q, k, v = make_qkv(target, 1, (4, 2), *lengths, 64)
    run_and_check(target, q, k, v, window(*bounds))


@ALL
def test_case_16_unbounded_sides(target: Target) -> None:
    q, k, v = make_qkv(target, 1, (2, 1), 300, 130, 64)
    for left, right in ((math.inf, math.inf), (math.inf, 3), (3, math.inf), (2**40, 2**40)):
        mask = SlidingWindow(left, right)
        out = flashmsa.attention(q, k, v, mask=mask, backend=target.backend)
        bounds = [int(min(x, 10_000)) for x in (left, right)]
        same, _ = run_and_check(target, q, k, v, window(*bounds))
        assert torch.equal(out, same)


@ALL
@pytest.mark.parametrize("keys", [0, 1, 63, 64, 65, 127, 128, 129, 300, 400])
def test_case_17_prefixes(target: Target, keys: int) -> None:
    for len_q, len_kv in ((300, 300), (120, 300), (300, 120)):
        q, k, v = make_qkv(target, 1, (4, 2), len_q, len_kv, 64)
        out, lse = run_and_check(target, q, k, v, prefix(keys))
        if target.backend in ("cpu", "sm90") and keys in (0, 400):
            same = run(target, q, k, v, MaskCase("causal" if keys == 0 else "dense"))
            assert torch.equal(lse, same[1]) and torch.equal(out, same[0])


@ALL
@pytest.mark.parametrize("dim", [40, 64, 128, 192, 256])
def test_masked_nan_is_not_touched(target: Target, dim: int) -> None:
    q, k, v = make_qkv(target, 1, (2, 1), 300, 300, dim)
    k[0, 0, 100] = math.nan
    v[0, 0, 200] = math.inf
    mask = window(20, 0)
    out, lse = run(target, q, k, v, mask)
    sees_k, sees_v = (mask.allowed(300, 300, device=q.device)[0][:, j] for j in (100, 200))
    assert torch.equal(out.isnan().any(-1)[0, 0], sees_k)
    assert torch.equal(lse.isnan()[0, 0], sees_k)
    assert torch.equal((~out.isfinite()).any(-1)[0, 1], sees_k | sees_v)


@pytest.mark.parametrize("len_q,len_kv", [(9, 9), (5, 12), (12, 5), (1, 7), (0, 4), (4, 0)])
@pytest.mark.parametrize(
    "mask",
    [
        SlidingWindow(3),
        SlidingWindow(2, 0),
        SlidingWindow(math.inf, 1),
        SlidingWindow(1, 2, align="top-left"),
        PrefixLM(0),
        PrefixLM(4),
        PrefixLM(100),
        PrefixLM(3, align="top-left"),
        PrefixLM(6) & SlidingWindow(2, 3),
        Causal() & SlidingWindow(4),
        Dense() & PrefixLM(2) & Causal(),
    ],
    ids=repr,
)
def test_rows_and_native_tiles_are_the_dense_mask(mask: flashmsa.Mask, len_q: int, len_kv: int) -> None:
    dense = mask.to_dense(len_q, len_kv)
    assert dense.shape == (len_q, len_kv)
    begin, end = mask._rows(len_q, len_kv, torch.device("cpu"))
    key = torch.arange(len_kv)
    assert torch.equal((key >= begin[:, None]) & (key < end[:, None]), dense)
    pairs = int(dense.sum())
    assert mask.sparsity(len_q, len_kv) == (1 - pairs / dense.numel() if dense.numel() else 0.0)
    counts = flashmsa._C.tile_counts(*_native(mask), 1, 1, len_q, len_kv, 64, 64)
    assert counts["allowed_pairs"] == pairs


def _native(mask: flashmsa.Mask) -> tuple[int, list[int], list[torch.Tensor]]:
    kind, ints, tensors = mask._lower()
    return kind, list(ints), list(tensors)


def test_objects() -> None:
    assert SlidingWindow(4) == SlidingWindow(4, 4) and hash(SlidingWindow(4)) == hash(SlidingWindow(4, 4))
    assert SlidingWindow(4, 0) != SlidingWindow(4) and SlidingWindow(4) != SlidingWindow(4, align="top-left")
    assert SlidingWindow(2**31 - 1) == SlidingWindow(math.inf)
    assert PrefixLM(3) == PrefixLM(3) and PrefixLM(3) != PrefixLM(4)
    assert Dense() & PrefixLM(3) == PrefixLM(3) == PrefixLM(3) & Dense() and Dense() & Dense() == Dense()
    both = Causal() & SlidingWindow(4) & PrefixLM(2)
    assert isinstance(both, Intersection) and len(both.masks) == 3
    assert repr(both) == "Causal() & SlidingWindow(4, 4) & PrefixLM(2)"
    assert "█" in str(both) and SlidingWindow(3).device is None and SlidingWindow(3).to("cpu") == SlidingWindow(3)


@pytest.mark.parametrize(
    "make,error,words",
    [
        (lambda: SlidingWindow(-1), ValueError, "left: -1 is negative"),
        (lambda: SlidingWindow(1, -2), ValueError, "right: -2 is negative"),
        (lambda: SlidingWindow(1.5), TypeError, "left: 1.5 is a float"),
        (lambda: SlidingWindow(math.nan), TypeError, "left: nan is a float"),
        (lambda: SlidingWindow(-math.inf), TypeError, "left: -inf"),
        (lambda: SlidingWindow(True), TypeError, "left: True is a bool"),
        (lambda: SlidingWindow(1, keep_first=4), NotImplementedError, "keep_first: 4 is not supported yet"),
        (lambda: SlidingWindow(1, keep_first=-4), ValueError, "keep_first: -4 is negative"),
        (lambda: SlidingWindow(1, align="left"), ValueError, "align: 'left'"),
        (lambda: PrefixLM(-1), ValueError, "prefix: -1 is negative"),
        (lambda: PrefixLM(math.inf), TypeError, "prefix: inf is a float"),
        (lambda: PrefixLM(torch.tensor([1, 2])), NotImplementedError, "prefix: a tensor"),
        (lambda: Causal() & Document([0, 4]), NotImplementedError, "& with Document"),
        (lambda: Document([0, 4]) & Causal(), NotImplementedError, "& with Document"),
        (lambda: Causal() & SlidingWindow(3, align="top-left"), NotImplementedError, "align both alike"),
        (lambda: Causal() & 3, TypeError, "unsupported operand"),
        (lambda: Intersection(()), NotImplementedError, "no mask"),
    ],
)
def test_bad_input(make, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert words in str(caught.value)


@pytest.mark.parametrize("ints", [(0, 1, 2), (2, 1, 1, 1), (0, -1, 1, 1), (0, 1, 2**31, 1)])
def test_the_operator_refuses_bad_bounds(ints: tuple[int, ...]) -> None:
    q = torch.randn(1, 1, 8, 8)
    with pytest.raises(ValueError, match="mask: Band"):
        torch.ops.flashmsa.attention(q, q, q, 3, list(ints), [], None, False)
