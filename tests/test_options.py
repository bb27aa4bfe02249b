"""softcap, attention sinks and ALiBi slopes, from their definitions: every mask, on every backend."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import (
    ALL_FAMILIES,
    CAUSAL,
    DENSE,
    FAMILIES,
    TOP_LEFT,
    MaskCase,
    Options,
    Target,
    check,
    document,
    make_qkv,
    mask_for,
    poisoned_allocations,
    run,
    run_and_check,
    targets,
)

import flashmsa

ALL = pytest.mark.parametrize("target", targets(auto=True))
# The dtypes of kernels are those of test_every_kernel.
FEW = pytest.mark.parametrize("target", targets(auto=True, dtypes=(torch.float32, torch.bfloat16)))
OPTIONS = ("softcap", "sinks", "alibi", "alibi by batch", "all")


def options_for(name: str, device: str, heads: int, batch: int, steep: float = 1.0) -> Options:
    sinks = torch.randn(heads, device=device)
    slopes = steep * torch.rand(heads, device=device)
    return {
        "softcap": Options(softcap=1.5),
        "sinks": Options(sinks=sinks),
        "alibi": Options(slopes=slopes),
        "alibi by batch": Options(slopes=steep * torch.rand(batch, heads, device=device)),
        "all": Options(softcap=2.0, sinks=sinks, slopes=slopes),
    }[name]


def has_gap(target: Target, family: str, options: Options) -> bool:
    """ALiBi's distances are not those of sorted rows: HashBucket has it in the composed backend alone."""
    return target.backend != "torch" and "hash" in family and options.slopes is not None


@FEW
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_every_mask(target: Target, family: str) -> None:
    """Grouped heads; lengths and head dims that fill no tile; nothing stays unwritten."""
    for n, name in enumerate(OPTIONS):
        len_q, len_kv = ((90, 200), (200, 90))[n % 2]
        q, k, v = make_qkv(target, 2, (4, 2), len_q, len_kv, 40, 24)
        options = options_for(name, target.device, 4, 2)
        mask = mask_for(family, 2, len_q, len_kv, heads=(4, 2))
        if not has_gap(target, family, options):
            with poisoned_allocations():
                run_and_check(target, q, k, v, mask, options=options, note=f"{mask} {name}")
        elif target.native:
            with pytest.raises(NotImplementedError, match=r"alibi_slopes.*HashBucket"):
                run(target, q, k, v, mask, **options.call())


@ALL
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("family", ["dense", "causal", "and-document-window"])
def test_every_dtype(target: Target, name: str, family: str) -> None:
    q, k, v = make_qkv(target, 2, (4, 2), 60, 80, 32)
    run_and_check(target, q, k, v, mask_for(family, 2, 60, 80), options=options_for(name, target.device, 4, 2))


@FEW
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dims", [(8, 8), (64, 64), (96, 40), (128, 128), (192, 128), (256, 256)], ids=str)
def test_head_dims(target: Target, name: str, dims: tuple[int, int]) -> None:
    q, k, v = make_qkv(target, 2, (4, 2), 70, 150, *dims)
    for mask in (DENSE, CAUSAL, document(0, 40, 70, kv=(0, 100, 150), causal=True)):
        run_and_check(target, q, k, v, mask, options=options_for(name, target.device, 4, 2))


@ALL
@pytest.mark.parametrize("scale", [0.0, -0.3, 1.0])
@pytest.mark.parametrize("family", ["causal", "window-keep", "blocks", "dilated"])
def test_with_a_scale(target: Target, scale: float, family: str) -> None:
    """The cap is on the scaled logit, whatever its sign."""
    q, k, v = make_qkv(target, 1, (4, 2), 130, 140, 64)
    options = options_for("all", target.device, 4, 1)
    run_and_check(target, q, k, v, mask_for(family, 1, 130, 140), options=options, scale=scale)


@ALL
@pytest.mark.parametrize("mask", [DENSE, CAUSAL, TOP_LEFT], ids=str)
def test_softcap_at_its_ends(target: Target, mask: MaskCase) -> None:
    """A cap far above the logits changes nothing; one far below makes them all +-cap."""
    q, k, v = make_qkv(target, 1, (4, 2), 100, 130, 64)
    out, lse = run(target, q, k, v, mask, softcap=1e12)
    check(out, lse, q, k, v, mask)
    run_and_check(target, q * 100, k, v, mask, options=Options(softcap=0.01))


@ALL
@pytest.mark.parametrize("softcap", [30.0, 50.0])
def test_logits_of_thousands_under_a_cap(target: Target, softcap: float) -> None:
    q, k, v = make_qkv(target, 1, (4, 2), 100, 130, 64)
    run_and_check(target, q * 64, k * 16, v, CAUSAL, options=Options(softcap=softcap))


@FEW
@pytest.mark.parametrize("family", ["causal", "window-keep", "blocks"])
@pytest.mark.parametrize("softcap", [4.0, 50.0])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_logits_of_all_sizes_under_a_cap(target: Target, family: str, softcap: float, dim: int) -> None:
    """From row to row and from key to key logits grow from far below the cap to far above it, or all are low: what
    serves one part of a tile does not serve another."""
    q, k, v = make_qkv(target, 1, (4, 2), 300, 400, dim)
    rows = torch.linspace(-1.0, 4.0, 300, device=q.device).exp()[:, None]
    keys = torch.ones(400, 1, device=q.device)
    keys[70::130] = 20.0
    low = torch.zeros(dim, device=q.device)
    low[0] = 2.0 * dim**0.5
    mask = mask_for(family, 1, 300, 400, heads=(4, 2))
    for query, key in ((q * rows, k), (q, k * keys), (q + low, k - low / 4)):
        run_and_check(target, query.to(q.dtype), key.to(k.dtype), v, mask, options=Options(softcap=softcap))


@FEW
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_empty_rows_with_a_sink(target: Target, family: str) -> None:
    """Case 1 with a sink: out is 0 and lse the sink where a row sees nothing; also without keys, or without queries."""
    sinks = torch.tensor([0.5, -3.0, 40.0, -90.0], device=target.device)
    for len_q, len_kv in ((150, 40), (70, 0), (0, 70)):
        q, k, v = make_qkv(target, 2, (4, 2), len_q, len_kv, 64, 40)
        mask = mask_for(family, 2, len_q, len_kv, heads=(4, 2))
        out, lse = run_and_check(target, q, k, v, mask, options=Options(sinks=sinks))
        allowed = mask.allowed(len_q, len_kv, device=q.device)
        allowed = allowed if allowed.dim() == 4 else allowed[:, None]
        alive = allowed.any(-1)
        alive = alive.repeat_interleave(4 // alive.shape[1], 1).expand(2, 4, -1)
        assert not out[~alive].count_nonzero()
        torch.testing.assert_close(lse[~alive], sinks[None, :, None].expand(2, 4, len_q)[~alive], rtol=1e-6, atol=0)


@ALL
def test_sinks_at_their_ends(target: Target) -> None:
    """A sink of -inf is none; one far above all logits takes everything, and leaves out near 0."""
    q, k, v = make_qkv(target, 1, (4, 2), 100, 130, 64)
    plain, plain_lse = run(target, q, k, v, CAUSAL)
    none = torch.full((4,), -math.inf, device=q.device)
    out, lse = run(target, q, k, v, CAUSAL, sinks=none)
    check(out, lse, q, k, v, CAUSAL)
    if target.native:
        assert torch.equal(out, plain) and torch.equal(lse, plain_lse)
    out, lse = run(target, q, k, v, CAUSAL, sinks=torch.full((4,), 100.0, device=q.device))
    assert out.abs().max().item() < 1e-30 and (lse - 100.0).abs().max().item() <= 1e-3
    out, lse = run(target, q, k, v, document(0, 0), sinks=none)
    assert not out.count_nonzero() and lse.isneginf().all()


@pytest.mark.parametrize(
    "target",
    [Target("cpu", "cpu", torch.float32), Target("cpu", "cpu", torch.bfloat16), Target("torch", "cpu", torch.float32)],
)
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_rows_without_keys_have_their_sink_whatever_it_is(target: Target, family: str) -> None:
    """O = 0, lse = sink: infinite and NaN sinks too, as with no keys at all."""
    sinks = torch.tensor([math.inf, math.nan, -math.inf, 1.0], device=target.device)
    q, k, v = make_qkv(target, 2, (4, 2), 150, 70, 64)
    case = mask_for(family, 2, 150, 70, heads=(4, 2))
    allowed = case.allowed(150, 70, device=q.device)
    allowed = allowed if allowed.dim() == 4 else allowed[:, None]
    empty = ~allowed.any(-1)
    empty = empty.repeat_interleave(4 // empty.shape[1], 1).expand(2, 4, -1)
    want = sinks[None, :, None].expand(2, 4, 150)[empty]
    for result in (run(target, q, k, v, case, sinks=sinks), reference_of(q, k, v, case, sinks)):
        out, lse = result
        assert not out[empty].count_nonzero()
        torch.testing.assert_close(lse[empty].float(), want, rtol=0, atol=0, equal_nan=True)
    out, lse = run(target, q, k[:, :, :0], v[:, :, :0], sinks=sinks)
    assert not out.count_nonzero()
    torch.testing.assert_close(lse, sinks[None, :, None].expand(2, 4, 150), rtol=0, atol=0, equal_nan=True)


def reference_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: MaskCase, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return flashmsa.reference(q, k, v, case.build(q.device), sinks=sinks, return_lse=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_slopes_that_overflow_over_a_dilation(dtype: torch.dtype) -> None:
    """A step times a slope may be more than fp32 holds: the query's own key still has distance 0."""
    mask = flashmsa.DilatedWindow(4, dilation=2**31 - 1)
    q, k, v = (torch.randn(1, 2, 20, 8, dtype=dtype) for _ in range(3))
    out = flashmsa.attention(q, k, v, mask, alibi_slopes=torch.tensor([1e30, -1e30]), backend="cpu")
    torch.testing.assert_close(out, v)


@ALL
def test_a_sink_is_one_more_key_without_a_value(target: Target) -> None:
    """From its definition: attention over the keys and one more, of value 0, whose logit is the sink."""
    q, k, v = make_qkv(target, 1, 2, 64, 64, 64)
    out, lse = run(target, q, k, v, sinks=torch.zeros(2, device=q.device))
    padded = [torch.nn.functional.pad(x, (0, 0, 1, 0)) for x in (k, v)]
    check(out, lse, q, *padded)


@FEW
@pytest.mark.parametrize("family", FAMILIES)
def test_steep_slopes(target: Target, family: str) -> None:
    """Logits of minus thousands far from the diagonal, and the slopes of no bias at all among them."""
    slopes = torch.tensor([0.0, 8.0, 0.5, -0.05], device=target.device)
    q, k, v = make_qkv(target, 2, (4, 2), 150, 300, 64)
    options = Options(slopes=slopes)
    if not has_gap(target, family, options):
        run_and_check(target, q, k, v, mask_for(family, 2, 150, 300), options=options)


# By batch and head: none, flat, steep, so flat that 16 bits hold only pieces of it; rising with the distance; one that
# 16 bits do not hold at all.
SLOPES = ([0.0, 0.3, 2**-8, 1e-6], [1.7, -0.004, -0.5, 6e4])


@ALL
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "family", ["dense", "causal", "top-left", "window", "window-keep", "document-causal", "dilated"]
)
def test_slopes_over_many_key_blocks(target: Target, family: str, head_dim: int) -> None:
    """Blocks of keys before all rows of a tile, behind them and amid them, more of one kind or of the other."""
    slopes = torch.tensor(SLOPES, device=target.device)
    for len_q, len_kv in ((450, 450), (130, 700), (700, 300)):
        q, k, v = make_qkv(target, 2, (4, 2), len_q, len_kv, head_dim)
        mask = mask_for(family, 2, len_q, len_kv)
        run_and_check(target, q, k, v, mask, options=Options(slopes=slopes), note=f"{len_q} x {len_kv}")


@ALL
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("family", ["dense", "causal", "window-keep"])
def test_slopes_of_all_sizes(target: Target, family: str, head_dim: int) -> None:
    """Of either sign: logits fall or rise by up to 1e8 a block of keys, so that every block outgrows the one before."""
    for slopes in ([1e2, 1e4, 1e6, 1e8], [-1e2, -1e3, -1e4, -1e5]):
        q, k, v = make_qkv(target, 1, (4, 2), 300, 450, head_dim)
        options = Options(slopes=torch.tensor(slopes, device=target.device))
        run_and_check(target, q, k, v, mask_for(family, 1, 300, 450), options=options, note=str(slopes))


# By runs of 64 keys: logits of hundreds beside 0, each size after each other one.
SIZES = (0.0, 1.0, 0.0, 30.0, 0.0, 1.0, 100.0, 1.0, 30.0, 100.0, 0.0)


@ALL
@pytest.mark.parametrize("name", ["plain", "softcap", "alibi"])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("family", ["dense", "causal", "window-keep", "blocks"])
def test_blocks_that_outgrow_each_other(target: Target, family: str, head_dim: int, name: str) -> None:
    """Weights of one block beyond fp16's range, or fp32's, by the reference of the blocks before."""
    slopes = torch.tensor([0.3, -0.3, 2**-8, 0.0], device=target.device)
    options = {"plain": Options(), "softcap": Options(softcap=50.0), "alibi": Options(slopes=slopes)}[name]
    q, k, v = make_qkv(target, 1, (4, 2), 300, 64 * len(SIZES), head_dim)
    k *= torch.tensor(SIZES, device=k.device).repeat_interleave(64)[:, None]
    mask = mask_for(family, 1, 300, k.shape[2], heads=(4, 2))
    run_and_check(target, q, k, v, mask, options=options)


@FEW
@pytest.mark.parametrize("name", ["softcap", "alibi", "all"])
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_masked_nan_is_not_touched(target: Target, name: str, family: str) -> None:
    """Rule 4 with options: keys and values that nothing sees hold NaN, and rows that see a NaN value are NaN alone."""
    options = options_for(name, target.device, 4, 2)
    if has_gap(target, family, options):
        return
    q, k, v = make_qkv(target, 2, (4, 2), 150, 300, 64)
    mask = mask_for(family, 2, 150, 300, heads=(4, 2))
    allowed = mask.allowed(150, 300, device=q.device)
    allowed = allowed if allowed.dim() == 4 else allowed[:, None]
    allowed = allowed.repeat_interleave(4 // allowed.shape[1], 1).expand(2, 4, -1, -1)
    seen = allowed.any(2).unflatten(1, (2, 2)).any(2)
    k, v = (x.masked_fill(~seen[..., None], math.nan) for x in (k, v))
    run_and_check(target, q, k, v, mask, options=options)
    v[1, 0, 200] = math.nan
    out, lse = run(target, q, k, v, mask, **options.call())
    hit = torch.zeros_like(lse, dtype=torch.bool)
    hit[1, :2] = allowed[1, :2, :, 200]
    assert torch.equal(out.isnan().any(-1), hit) and not lse.isnan().any()


@pytest.mark.parametrize("target", targets(composed=False))
def test_same_bits_every_time(target: Target) -> None:
    q, k, v = make_qkv(target, 2, (4, 2), 150, 300, 64)
    for family in ALL_FAMILIES:
        options = options_for("softcap" if "hash" in family else "all", target.device, 4, 2)
        mask = mask_for(family, 2, 150, 300, heads=(4, 2))
        out, lse = run(target, q, k, v, mask, **options.call())
        again, lse_again = run(target, q, k, v, mask, **options.call())
        assert torch.equal(out, again) and torch.equal(lse, lse_again), family


@FEW
def test_options_of_any_layout(target: Target) -> None:
    """Sinks and slopes that are no contiguous tensors, and the same ones for every head or batch by stride 0."""
    q, k, v = make_qkv(target, 2, (4, 2), 100, 130, 64)
    wide = torch.rand(2, 8, device=q.device)
    for sinks, slopes in (
        (wide[0, ::2], wide[:, ::2]),
        (wide[0, :1].expand(4), wide[:1, :4].expand(2, 4)),
        (wide.T[:4, 0], wide.T[:2].T.repeat(1, 2)),
    ):
        run_and_check(target, q, k, v, CAUSAL, options=Options(sinks=sinks, slopes=slopes))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_every_kernel(dtype: torch.dtype, name: str, dim: int, family: str) -> None:
    target = Target("sm90", "cuda", dtype)
    options = options_for(name, "cuda", 4, 2)
    if has_gap(target, family, options):
        return
    for len_q, len_kv in ((1, 300), (129, 191), (257, 1000), (1000, 257)):
        q, k, v = make_qkv(target, 2, (4, 2), len_q, len_kv, dim)
        mask = mask_for(family, 2, len_q, len_kv, heads=(4, 2))
        run_and_check(target, q, k, v, mask, options=options, note=f"{family} {name} {len_q}x{len_kv}")


@pytest.mark.gpu
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_captured_with_other_options(family: str) -> None:
    """Sinks and slopes are read by every launch: a captured call replays with others."""
    target = Target("sm90", "cuda", torch.bfloat16)
    q, k, v = make_qkv(target, 2, (4, 2), 300, 500, 64)
    case = mask_for(family, 2, 300, 500, heads=(4, 2))
    mask = case.build("cuda")
    slopes = None if "hash" in family else torch.rand(4, device="cuda")
    options = Options(softcap=3.0, sinks=torch.randn(4, device="cuda"), slopes=slopes)
    flashmsa.attention(q, k, v, mask=mask, backend="sm90", **options.call())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flashmsa.attention(q, k, v, mask=mask, backend="sm90", return_lse=True, **options.call())
    for _ in range(3):
        options.sinks.normal_()
        if slopes is not None:
            slopes.uniform_()
        graph.replay()
        check(out, lse, q, k, v, case, options=options)
