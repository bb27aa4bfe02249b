"""The backward kernels under stress: determinism under load, streams, graphs, the host, memory. Needs a Hopper GPU."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from gradients import Gradients, check_gradients, grad_like, run_and_check_backward, run_backward
from helpers import (
    ALL_FAMILIES,
    CAUSAL,
    DENSE,
    Blocks,
    MaskCase,
    Options,
    Target,
    document,
    make_qkv,
    mask_for,
    poisoned_allocations,
)
from test_gpu_stress import peak_of, workspace_limit

import flashmsa

pytestmark = pytest.mark.gpu

BUCKETS = [64, 128, 256]
GRADS = ("dq", "dk", "dv")


def sm90(dtype: torch.dtype = torch.bfloat16) -> Target:
    return Target("sm90", "cuda", dtype)


def assert_same_bits(found: Gradients, wanted: Gradients, note: object) -> None:
    for name, want in wanted.items():
        assert torch.equal(found[name], want), f"{note}: {name} differs"


@pytest.mark.parametrize("dim", BUCKETS)
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=str)
@pytest.mark.parametrize(
    "family", ["dense", "causal", "document-batched-causal", "window-keep", "dilated", "hash-causal", "blocks"]
)
def test_case_34_deterministic_under_load(dim: int, heads: tuple[int, int], family: str) -> None:
    """100 runs, bitwise equal, while another stream keeps the GPU's memory and SMs busy in bursts."""
    q, k, v = make_qkv(sm90(), 2, heads, 700, 700, dim)
    mask = mask_for(family, 2, 700, 700, heads=heads).build("cuda")
    d_out, d_lse = grad_like(q, v)
    busy, x = torch.cuda.Stream(), torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    first = run_backward(sm90(), q, k, v, mask, d_out, d_lse, deterministic=True)
    different = torch.zeros((), device="cuda", dtype=torch.bool)
    for n in range(100):
        with torch.cuda.stream(busy):
            for _ in range(n % 4):
                x = (x @ x).clamp(-1, 1)
        found = run_backward(sm90(), q, k, v, mask, d_out, d_lse, deterministic=True)
        for name, want in first.items():
            different |= (found[name] != want).any()
    assert not different


@pytest.mark.parametrize("dim", BUCKETS)
@pytest.mark.parametrize("family", ["causal", "document-causal"])
def test_case_34_a_thousand_launches(dim: int, family: str) -> None:
    q, k, v = make_qkv(sm90(), 1, (4, 2), 300, 300, dim)
    mask = mask_for(family, 1, 300, 300).build("cuda")
    d_out, _ = grad_like(q, v)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flashmsa.attention(*leaves, mask=mask, backend="sm90", deterministic=True)
    first = torch.autograd.grad(out, leaves, d_out, retain_graph=True)
    different = torch.zeros((), device="cuda", dtype=torch.bool)
    for _ in range(1000):
        for got, want in zip(torch.autograd.grad(out, leaves, d_out, retain_graph=True), first, strict=True):
            different |= (got != want).any()
    assert not different


@pytest.mark.parametrize("family", ["dense", "causal"])
@pytest.mark.parametrize(
    "batch, heads, length, dim", [(4, (32, 8), 4096, 128), (1, (3, 1), 20001, 64), (1, (2, 2), 17000, 256)]
)
def test_case_34_more_than_the_l2_holds(batch: int, heads: tuple[int, int], length: int, dim: int, family: str) -> None:
    """Sums that come from memory, and heads of more key tiles than run at a time. An addition that only its own thread
    knows complete can be overtaken here; the rounding to 16 bits mostly hides it."""
    q, k, v = make_qkv(sm90(), batch, heads, length, length, dim)
    mask = mask_for(family, batch, length, length).build("cuda")
    d_out, d_lse = grad_like(q, v)
    first = run_backward(sm90(), q, k, v, mask, d_out, d_lse, deterministic=True)
    for n in range(30):
        assert_same_bits(run_backward(sm90(), q, k, v, mask, d_out, d_lse, deterministic=True), first, n)


@pytest.mark.parametrize("dim", BUCKETS)
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_without_determinism_by_the_rule_every_time(dim: int, family: str) -> None:
    """Sums in whatever order: right each time, also into memory that held NaN."""
    q, k, v = make_qkv(sm90(), 2, (4, 2), 300, 400, dim)
    mask = mask_for(family, 2, 300, 400, heads=(4, 2))
    d_out, d_lse = grad_like(q, v)
    for n in range(3):
        junk = [torch.full((size,), math.nan, device="cuda") for size in (2**12, 2**16, 2**20)]
        del junk
        check_gradients(run_backward(sm90(), q, k, v, mask, d_out, d_lse), q, k, v, mask, d_out, d_lse, note=f"run {n}")
    with poisoned_allocations():
        check_gradients(run_backward(sm90(), q, k, v, mask, d_out, d_lse), q, k, v, mask, d_out, d_lse, note="poisoned")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", BUCKETS)
def test_tiles_of_rows_that_see_nothing(dim: int, deterministic: bool) -> None:
    """No key tile comes to them, and in deterministic mode nobody clears their dQ: it is 0 whatever the memory held."""
    q, k, v = make_qkv(sm90(), 1, (4, 2), 900, 300, dim)
    d_out, d_lse = grad_like(q, v)
    with poisoned_allocations():
        found = run_backward(sm90(), q, k, v, CAUSAL, d_out, d_lse, deterministic=deterministic)
    assert not found["dq"][:, :, :600].any()
    check_gradients(found, q, k, v, CAUSAL, d_out, d_lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", BUCKETS)
@pytest.mark.parametrize(
    "case", [DENSE, CAUSAL, document(0, 700, 1500, 1501, 2000, causal=True), mask_for("window", 1, 2000, 2000)], ids=str
)
def test_longer_lengths(dtype: torch.dtype, dim: int, case) -> None:
    q, k, v = make_qkv(sm90(dtype), 1, (4, 2), 2000, 2000, dim)
    run_and_check_backward(sm90(dtype), q, k, v, case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", [(128, 128), (72, 128), (128, 96)], ids=str)
@pytest.mark.parametrize(
    "case",
    [DENSE, CAUSAL, MaskCase("window", left=6000, right=0), MaskCase("window-top-left", left=100, right=3900)],
    ids=str,
)
def test_bands_in_clusters(dtype: torch.dtype, dims: tuple[int, int], case: MaskCase) -> None:
    """Key tiles of two CTAs (csrc/bwd/band.h). The second of the last one has some keys, two, or none."""
    target = sm90(dtype)
    for len_q, len_kv in ((700, 4000), (65, 3970), (65, 7808)):
        q, k, v = make_qkv(target, 2, (4, 2), len_q, len_kv, dims[0], dims[1])
        told = flashmsa.explain(q.requires_grad_(), k, v, case.build("cuda"), backend="sm90").backward_kernel
        assert "band" in told, told
        run_and_check_backward(target, q.detach(), k, v, case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", [DENSE, CAUSAL], ids=str)
def test_small_and_large_numbers_of_rows(dtype: torch.dtype, case: MaskCase) -> None:
    """At head dim 64 lse and Δ are sums of three 16-bit terms (csrc/bwd/terms.cuh): logits of tens, gradients so tiny
    that fp16 has few bits of them, and in fp16 an lse that they do not reach, in logits' units."""
    target = sm90(dtype)
    q, k, v = make_qkv(target, 1, (4, 2), 300, 500, 64)
    d_out, d_lse = grad_like(q, v)
    for factor, of_gradients, scale in ((6.0, 1.0, None), (1.0, 2.0**-12, None), (1.0, 1.0, 1e-9)):
        given = q * factor, k * factor, v, case, d_out * of_gradients, d_lse * of_gradients
        found = run_backward(target, *given, scale=scale)
        check_gradients(found, *given, scale=scale, note=f"{factor} {of_gradients} {scale}")


def test_not_finite_in_clusters() -> None:
    """An infinite query, key or value: what sees it is computed once more, pair by pair."""
    q, k, v = make_qkv(sm90(), 1, (2, 2), 300, 3900, 128)
    d_out, d_lse = grad_like(q, v)
    for x, row in ((q, 130), (k, 3890), (v, 200)):
        x[:, :, row, 5] = math.inf
        found = run_backward(sm90(), q, k, v, CAUSAL, d_out, d_lse)
        check_gradients(found, q, k, v, CAUSAL, d_out, d_lse, note=f"row {row}")
        x[:, :, row, 5] = 0.0


# Lengths of documents that have tiles of their own (csrc/bwd/packed.h): none, one token, and about a tile.
LENGTHS = (0, 1, 127, 128, 129, 0, 700, 1300)
OTHERS = (300, 0, 64, 65, 900, 2, 128, 900)


def cuts(lengths: tuple[int, ...]) -> tuple[int, ...]:
    return (0, *itertools.accumulate(lengths))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [*BUCKETS, 40])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_documents(dtype: torch.dtype, dim: int, causal: bool) -> None:
    own, others = cuts(LENGTHS), cuts(OTHERS)
    kind = "document-causal" if causal else "document"
    cases = {
        "alike": (document(*own, causal=causal), own[-1], own[-1]),
        "tokens past the last offset": (document(*own, causal=causal), own[-1] + 90, own[-1] + 200),
        "keys cut elsewhere": (document(*own, kv=others, causal=causal), own[-1], others[-1]),
        "offsets of each batch": (
            MaskCase(kind, (own, cuts(LENGTHS[::-1])), None, batched=True),
            own[-1],
            own[-1],
        ),
        "one": (document(0, 1024, causal=causal), 1024, 1024),
    }
    for note, (case, len_q, len_kv) in cases.items():
        target = sm90(dtype)
        q, k, v = make_qkv(target, 2, (4, 2), len_q, len_kv, dim)
        with poisoned_allocations():
            run_and_check_backward(target, q, k, v, case, note=note)


@pytest.mark.parametrize("dim", BUCKETS)
@pytest.mark.parametrize("causal", [False, True])
def test_packed_documents_do_not_see_each_other(dim: int, causal: bool) -> None:
    """A document that is NaN throughout leaves the others as they are."""
    offsets = cuts(LENGTHS)
    case = document(*offsets, causal=causal)
    q, k, v = make_qkv(sm90(), 1, (4, 2), offsets[-1], offsets[-1], dim)
    d_out, d_lse = grad_like(q, v)
    clean = run_backward(sm90(), q, k, v, case, d_out, d_lse)
    for d in (2, 4, 6):
        rows = slice(offsets[d], offsets[d + 1])
        spoilt = [x.clone() for x in (q, k, v, d_out)]
        for x in spoilt:
            x[:, :, rows] = math.nan
        found = run_backward(sm90(), *spoilt[:3], case, spoilt[3], d_lse)
        for name in GRADS:
            assert found[name][:, :, rows].isnan().all(), f"{name} of document {d}"
        for name, values in found.items():
            values[:, :, rows] = clean[name][:, :, rows]
        check_gradients(found, q, k, v, case, d_out, d_lse, note=f"beside document {d}")


@pytest.mark.parametrize("dim", BUCKETS)
def test_long_rows_of_cells(dim: int) -> None:
    q, k, v = make_qkv(sm90(), 1, (4, 2), 4100, 4100, dim)
    cells = torch.rand(1, 4, 33, 33, generator=torch.Generator().manual_seed(0)) < 0.9
    run_and_check_backward(sm90(), q, k, v, Blocks("blocks", blocks=cells, size=(128, 128)))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("family", ["causal", "document-causal", "window-keep", "blocks"])
def test_many_heads_of_one_kv_head(dim: int, family: str) -> None:
    """More tiles of queries than a block of threads keeps bits for: what a head gets depends on no head beside it."""
    heads, length = 4096 // dim + 2, 4100
    q, k, v = make_qkv(sm90(), 1, (heads, 1), length, length, dim)
    mask = mask_for(family, 1, length, length).build("cuda")
    d_out, d_lse = grad_like(q, v)
    each = {}
    for deterministic in (True, False):
        # NOTE: eight heads, since of two the forward pass would take smaller tiles, and its bits would be others.
        for name, some in (("every", slice(None)), ("last", slice(-8, None))):
            inputs = (q[:, some], k, v, mask, d_out[:, some], d_lse[:, some])
            each[name] = run_backward(sm90(), *inputs, deterministic=deterministic)["dq"][:, -8:]
        if deterministic:
            assert torch.equal(each["every"], each["last"])
        else:
            torch.testing.assert_close(each["every"], each["last"])


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_captured_step(family: str) -> None:
    """Forward and backward in one graph, replayed with other values: as eager."""
    q, k, v = (x.requires_grad_() for x in make_qkv(sm90(), 2, (4, 2), 300, 400, 64))
    mask = mask_for(family, 2, 300, 400, heads=(4, 2))
    built = mask.build("cuda")
    d_out, d_lse = grad_like(q, v)
    sinks = torch.randn(4, device="cuda", requires_grad=True)

    def step() -> tuple[torch.Tensor, ...]:
        options = {"mask": built, "sinks": sinks, "backend": "sm90", "return_lse": True, "deterministic": True}
        out, lse = flashmsa.attention(q, k, v, **options)
        return out, lse, *torch.autograd.grad((out, lse), (q, k, v, sinks), (d_out, d_lse))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = step()
    for _ in range(3):
        with torch.no_grad():
            for x in (q, k, v, sinks, d_out, d_lse):
                x.normal_()
            for x in held:
                x.fill_(math.nan)
        graph.replay()
        found = dict(zip(("out", "lse", *GRADS, "dsinks"), held, strict=True))
        inputs = [x.detach() for x in (q, k, v)]
        options = Options(sinks=sinks.detach())
        check_gradients(found, *inputs, mask, d_out, d_lse, options)
        assert_same_bits(found, run_backward(sm90(), *inputs, built, d_out, d_lse, options, deterministic=True), family)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_the_host_never_waits(family: str, deterministic: bool) -> None:
    q, k, v = (x.requires_grad_() for x in make_qkv(sm90(), 2, (4, 2), 300, 300, 64))
    mask = mask_for(family, 2, 300, 300, heads=(4, 2)).build("cuda")
    sinks = torch.randn(4, device="cuda", requires_grad=True)
    d_out = torch.randn_like(q)

    def step() -> None:
        out = flashmsa.attention(q, k, v, mask=mask, sinks=sinks, backend="sm90", deterministic=deterministic)
        torch.autograd.grad(out, (q, k, v, sinks), d_out)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("family", ["dense", "causal", "document-causal", "dilated", "hash", "blocks"])
def test_two_streams_at_once(family: str) -> None:
    """Steps on two streams share nothing: each gets the bits that it gets alone."""
    jobs = []
    for n in range(2):
        q, k, v = make_qkv(sm90(), 2, (4, 2), 500 + 130 * n, 700, 64)
        mask = mask_for(family, 2, 500 + 130 * n, 700, seed=n).build("cuda")
        d_out, d_lse = grad_like(q, v)
        given = (q, k, v, mask, d_out, d_lse)
        jobs.append((given, run_backward(sm90(), *given, deterministic=True), torch.cuda.Stream()))
    torch.cuda.synchronize()
    results = []
    for _ in range(20):
        for given, wanted, stream in jobs:
            with torch.cuda.stream(stream):
                results.append((run_backward(sm90(), *given, deterministic=True), wanted))
    torch.cuda.synchronize()
    for n, (found, wanted) in enumerate(results):
        assert_same_bits(found, wanted, f"launch {n}")


@pytest.mark.parametrize("dim", BUCKETS)
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)], ids=str)
@pytest.mark.parametrize("family", ["dense", "causal", "document", "window", "blocks"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_peak_memory(dim: int, heads: tuple[int, int], family: str, deterministic: bool) -> None:
    """Beyond the gradients: dQ in fp32, delta, and what is linear in the rows; nothing that grows with S^2."""
    batch, length = 2, 4096
    q, k, v = (x.requires_grad_() for x in make_qkv(sm90(), batch, heads, length, length, dim))
    mask = mask_for(family, batch, length, length, documents=64).build("cuda")
    d_out = torch.randn_like(q)
    out = flashmsa.attention(q, k, v, mask=mask, backend="sm90", deterministic=deterministic)
    found = peak_of(lambda: torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True))
    rows = batch * heads[0] * length
    terms = 2 * 6 * rows if dim == 64 else 0  # lse and delta once more, each as three numbers of 16 bits
    linear = 4 * rows * dim + 4 * 4 * rows + terms + workspace_limit(batch, heads[0], length, 64) + 2**20
    assert found <= q.nbytes + k.nbytes + v.nbytes + linear


def test_on_the_stream_of_the_forward_pass() -> None:
    """Autograd runs backward where forward ran, behind a slow producer of dO."""
    q, k, v = make_qkv(sm90(), 2, (4, 2), 300, 300, 64)
    values, _ = grad_like(q, v)
    wanted = run_backward(sm90(), q, k, v, CAUSAL, values, deterministic=True)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    d_out = torch.full_like(values, math.nan)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        out = flashmsa.attention(*leaves, flashmsa.Causal(), backend="sm90", deterministic=True)
        torch.cuda._sleep(50_000_000)
        d_out.copy_(values)
        found = torch.autograd.grad(out, leaves, d_out)
    stream.synchronize()
    assert_same_bits(dict(zip(GRADS, found, strict=True)), {name: wanted[name] for name in GRADS}, "side stream")
