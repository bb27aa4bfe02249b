"""Sliding windows, prefix-LM and their intersections: cases with a known answer, and bad input."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import (
    CAUSAL,
    TOP_LEFT,
    MaskCase,
    Prefixes,
    Target,
    both,
    document,
    make_qkv,
    run,
    run_and_check,
    targets,
)

import flashmsa
from flashmsa import Causal, Dense, Document, Intersection, PrefixLM, SlidingWindow
from flashmsa.masks import PerSequence

ALL = pytest.mark.parametrize("target", targets(auto=True))
FEW = pytest.mark.parametrize("target", targets(auto=True, dtypes=(torch.float32, torch.bfloat16)))


def window(left: int, right: int, keep: int = 0, align: str = "bottom-right") -> MaskCase:
    return MaskCase("window-top-left" if align == "top-left" else "window", left=left, right=right, keep=keep)


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


@FEW
@pytest.mark.parametrize("lengths", [(129, 300), (300, 129), (129, 129), (40, 1000), (1000, 40), (7, 700)], ids=str)
@pytest.mark.parametrize("bounds", [(32, 64), (0, 5), (5, 0), (127, 128), (2000, 2000)], ids=str)
def test_case_15_absolute_positions(target: Target, lengths: tuple[int, int], bounds: tuple[int, int]) -> None:
    q, k, v = make_qkv(target, 1, (4, 2), *lengths, 64)
    run_and_check(target, q, k, v, window(*bounds))


@ALL
def test_case_16_unbounded_sides(target: Target) -> None:
    q, k, v = make_qkv(target, 1, (2, 1), 300, 130, 64)
    for left, right in ((math.inf, math.inf), (math.inf, 3), (3, math.inf), (2**40, 2**40)):
        bounds = [int(min(x, 10_000)) for x in (left, right)]
        same, _ = run_and_check(target, q, k, v, window(*bounds))
        out = flashmsa.attention(q, k, v, mask=SlidingWindow(left, right), backend=target.backend)
        assert torch.equal(out, same)


@FEW
@pytest.mark.parametrize("keys", [0, 1, 63, 64, 65, 127, 128, 129, 300, 400])
def test_case_17_prefixes(target: Target, keys: int) -> None:
    for len_q, len_kv in ((300, 300), (120, 300), (300, 120)):
        q, k, v = make_qkv(target, 1, (4, 2), len_q, len_kv, 64)
        out, lse = run_and_check(target, q, k, v, prefix(keys))
        if target.backend in ("cpu", "sm90") and keys in (0, 400):
            same = run(target, q, k, v, MaskCase("causal" if keys == 0 else "dense"))
            assert torch.equal(lse, same[1]) and torch.equal(out, same[0])


@FEW
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


@FEW
@pytest.mark.parametrize("lengths", [(300, 300), (129, 400), (400, 129)], ids=str)
@pytest.mark.parametrize("keep", [1, 4, 64, 127, 128, 129, 1000])
@pytest.mark.parametrize("bounds", [(32, 0), (0, 0), (40, 70), (20, 2000)], ids=str)
def test_first_keys_stay_visible(target: Target, lengths: tuple[int, int], keep: int, bounds: tuple[int, int]) -> None:
    q, k, v = make_qkv(target, 1, (4, 2), *lengths, 64)
    run_and_check(target, q, k, v, window(*bounds, keep))
    run_and_check(target, q, k, v, window(*bounds, keep, "top-left"))


@ALL
def test_case_17_a_prefix_for_each_batch(target: Target) -> None:
    for len_q, len_kv in ((130, 130), (70, 130), (130, 70)):
        q, k, v = make_qkv(target, 6, (4, 2), len_q, len_kv, 64)
        mask = Prefixes("prefix", prefixes=(0, 1, 63, 64, 65, len_kv))
        out, lse = run_and_check(target, q, k, v, mask)
        for b, prefix_of_one in enumerate(mask.prefixes):
            one, one_lse = run_and_check(target, q[b : b + 1], k[b : b + 1], v[b : b + 1], prefix(prefix_of_one))
            if target.native and target.device == "cpu":  # on a GPU one prefix has kernels of its own, with other tiles
                assert torch.equal(out[b : b + 1], one) and torch.equal(lse[b : b + 1], one_lse)


@ALL
def test_prefixes_are_read_by_every_call(target: Target) -> None:
    q, k, v = make_qkv(target, 2, (2, 1), 100, 100, 64)
    mask = Prefixes("prefix", prefixes=(3, 90))
    expected, _ = run(target, q, k, v, mask)
    prefixes = torch.tensor([40, 0], dtype=torch.int32, device=q.device)
    held = PrefixLM(prefixes)
    prefixes.copy_(torch.tensor([3, 90]))
    assert torch.equal(flashmsa.attention(q, k, v, mask=held, backend=target.backend), expected)


@FEW
@pytest.mark.parametrize("lengths", [(300, 300), (129, 400), (400, 129)], ids=str)
@pytest.mark.parametrize(
    "mask",
    [
        both(window(40, 9), window(200, 300, align="top-left")),
        both(CAUSAL, TOP_LEFT),
        both(window(40, 9, keep=5), TOP_LEFT, window(250, 250, align="top-left")),
        both(document(0, 100, 100, 129), window(20, 20, keep=4)),
        both(document(0, 60, 129, kv=(0, 1, 120), causal=True), window(50, 300, keep=90), prefix(70)),
        both(document(0, 10, 129), prefix(40)),
    ],
    ids=str,
)
def test_intersections(target: Target, lengths: tuple[int, int], mask: MaskCase) -> None:
    """One interval a row, whatever the masks, and rows that see nothing."""
    q, k, v = make_qkv(target, 1, (4, 2), *lengths, 64)
    run_and_check(target, q, k, v, mask)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("align", ["bottom-right", "top-left"])
def test_alibi_counts_from_where_the_mask_stands(backend: str, align: str) -> None:
    """p is the mask's own: from the top for top-left masks, from the bottom where masks of an & differ."""
    q, k, v = make_qkv(Target("torch", "cpu", torch.float64), 1, 2, 20, 30, 16)
    slopes = torch.tensor([0.5, 0.25])
    wide = SlidingWindow(100, 100, align=align)
    options = {"alibi_slopes": slopes, "backend": backend, "return_lse": True}
    p = torch.arange(20)[:, None] + (0 if align == "top-left" else 10)
    for mask, place in (
        (wide, p),
        (wide & PrefixLM(30, align), p),
        (wide & Document([0, 20], [0, 30]), p),
        (wide & SlidingWindow(100, align="top-left"), p),
        (wide & SlidingWindow(100, align="bottom-right"), torch.arange(20)[:, None] + 10),
    ):
        logits = q @ k.mT / 4 - slopes[:, None, None] * (place - torch.arange(30)).abs()
        out, lse = flashmsa.attention(q, k, v, mask=mask, **options)
        torch.testing.assert_close(out, logits.softmax(-1) @ v, rtol=0, atol=1e-12)
        torch.testing.assert_close(lse.double(), logits.logsumexp(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("align", ["bottom-right", "top-left"])
def test_alibi_inside_each_sequence(backend: str, align: str) -> None:
    q, k, v = make_qkv(Target("torch", "cpu", torch.float64), 1, 2, 12, 14, 16)
    slopes = torch.tensor([0.5, 0.25])
    q_cuts, kv_cuts, used = [0, 5, 5, 12], [0, 4, 6, 14], [4, 2, 6]
    offsets = [torch.tensor(x, dtype=torch.int32) for x in (q_cuts, kv_cuts, used)]
    mask = PerSequence(SlidingWindow(9, 9, align=align), *offsets)
    out = flashmsa.attention(q, k, v, mask=mask, alibi_slopes=slopes, backend=backend)
    for d in range(3):
        mine, keys = slice(q_cuts[d], q_cuts[d + 1]), slice(kv_cuts[d], kv_cuts[d] + used[d])
        alone = flashmsa.attention(
            *(q[:, :, mine], k[:, :, keys], v[:, :, keys]),
            mask=SlidingWindow(9, 9, align=align),
            alibi_slopes=slopes,
            backend=backend,
        )
        torch.testing.assert_close(out[:, :, mine], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("len_q,len_kv", [(9, 9), (5, 12), (12, 5), (1, 7), (0, 4), (4, 0)])
@pytest.mark.parametrize(
    "mask",
    [
        SlidingWindow(3),
        SlidingWindow(2, 0),
        SlidingWindow(2, 0, keep_first=2),
        SlidingWindow(math.inf, 1),
        SlidingWindow(1, 2, align="top-left"),
        PrefixLM(0),
        PrefixLM(4),
        PrefixLM(100),
        PrefixLM(3, align="top-left"),
        PrefixLM(6) & SlidingWindow(2, 3),
        Causal() & SlidingWindow(4),
        Causal() & SlidingWindow(4, align="top-left"),
        Dense() & PrefixLM(2) & Causal(),
        Document([0, 2, 9], [0, 3, 4], causal=True) & SlidingWindow(1, 0, keep_first=2),
    ],
    ids=repr,
)
def test_native_tiles_are_the_dense_mask(mask: flashmsa.Mask, len_q: int, len_kv: int) -> None:
    pairs = int(mask.to_dense(len_q, len_kv).sum())
    assert int(mask._visible(len_q, len_kv).rows(slice(0, len_q)).sum()) == pairs
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
        (lambda: SlidingWindow(1, keep_first=math.inf), TypeError, "keep_first: inf is a float"),
        (lambda: SlidingWindow(1, keep_first=-4), ValueError, "keep_first: -4 is negative"),
        (lambda: SlidingWindow(1, align="left"), ValueError, "align: 'left'"),
        (lambda: PrefixLM(-1), ValueError, "prefix: -1 is negative"),
        (lambda: PrefixLM(math.inf), TypeError, "prefix: inf is a float"),
        (lambda: PrefixLM(torch.tensor([1, 2])), TypeError, "prefix: dtype torch.int64; must be torch.int32"),
        (lambda: PrefixLM(torch.tensor([[1]], dtype=torch.int32)), ValueError, "prefix: shape (1, 1); must be (B,)"),
        (lambda: PrefixLM(torch.tensor([1, -2], dtype=torch.int32)), ValueError, "prefix[1]: -2 is negative"),
    ],
)
def test_bad_input(make, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert words in str(caught.value)
