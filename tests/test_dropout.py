"""Dropout: the generator against published numbers, the mask against plain Python, and calls that drop by it."""

from __future__ import annotations

import itertools
import math
import struct

import pytest
import torch
from gradients import check_gradients, grad_like, run_backward
from helpers import (
    ALL_FAMILIES,
    CAUSAL,
    NATIVE_ONE_EACH,
    ONE_EACH,
    ONE_OF_EACH,
    Options,
    Target,
    assert_lse,
    by_family,
    document,
    make_qkv,
    mask_for,
    targets,
)

import flashmsa
from flashmsa.dropout import keep_scale, philox, threshold

ALL = pytest.mark.parametrize("target", targets(auto=True))
FEW = pytest.mark.parametrize("target", targets(auto=True, dtypes=(torch.float32, torch.bfloat16)))
WORD = 2**32 - 1


def bfloat16(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


# 16-bit draws by value as bfloat16, -0 before 0; then what is no number.
ORDER = sorted(
    range(2**16),
    key=lambda x: (1, x % 2**15, x // 2**15) if math.isnan(bfloat16(x)) else (0, bfloat16(x), x < 2**15),
)
PLACE = {draw: place for place, draw in enumerate(ORDER)}


# ---------------------------------------------------------------------------------------------------------------------
# The generator


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((WORD,) * 4, (WORD,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_by_published_numbers(counter: tuple, key: tuple, words: tuple) -> None:
    """Known answers of Random123 for Philox4x32 of 10 rounds, with ints and with tensors."""
    assert philox(counter, key, rounds=10) == words
    tensors = [tuple(torch.tensor([x, 0]) for x in numbers) for numbers in (counter, key)]
    assert tuple(int(x[0]) for x in philox(*tensors, rounds=10)) == words


def is_kept(b: int, h: int, i: int, j: int, heads: int, p: float, seed: int, offset: int) -> bool:
    """From the definition, with Python's unbounded ints and floats."""
    c = [offset % 2**32, j // 64 * 4 + j % 8 // 2, b * heads + h, i // 32 * 8 + i % 8]
    k = [seed % 2**32, (seed // 2**32 % 2**32) ^ (offset // 2**32 % 2**32)]
    for _ in range(7):
        x, y = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [y // 2**32 ^ c[1] ^ k[0], y % 2**32, x // 2**32 ^ c[3] ^ k[1], x % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    n = j % 64 // 8
    word = c[n % 4] * (0x9E37F2D1, 0x7F4A805B, 0xC2B2A6DD, 0x85EB8C27)[i % 32 // 8] + c[(n + 1) % 4]
    word = (word + (c[(n + 2) % 4] if n >= 4 else 0)) % 2**32
    draw = word // 65536 if j % 2 else word % 65536
    return PLACE[draw] >= min(round(p * 65536), 65535)


@pytest.mark.parametrize(
    ("seed", "offset"), [(0, 0), (7, 0), (-1, 0), (2**40 + 3, 0), (5, 9), (5, 2**33 + 1), (-(2**63), 2**63 - 1)]
)
@pytest.mark.parametrize("sizes", [(2, 3, 37, 50), (1, 1, 1, 1), (1, 2, 16, 16), (3, 1, 65, 9)], ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_mask_by_its_definition(sizes: tuple[int, ...], seed: int, offset: int, device: str) -> None:
    batch, heads, len_q, len_kv = sizes
    given = seed if offset == 0 else torch.tensor([seed, offset])
    given = given.to(device) if isinstance(given, torch.Tensor) else given
    found = flashmsa.dropout_mask(*sizes, 0.3, given, device=device)
    assert found.shape == sizes and found.dtype == torch.bool and found.device.type == device
    places = itertools.product(range(batch), range(heads), range(len_q), range(len_kv))
    wanted = [is_kept(b, h, i, j, heads, 0.3, seed, offset) for b, h, i, j in places]
    assert found.flatten().tolist() == wanted


def assert_share(events: torch.Tensor, wanted: float, note: str) -> None:
    """Within 4 sigma of independent events."""
    sigma = math.sqrt(wanted * (1.0 - wanted) / events.numel())
    assert abs(events.double().mean().item() - wanted) <= 4.0 * sigma, note


@pytest.mark.parametrize("p", [0.001, 0.01, 0.1, 0.5, 0.9])
def test_keep_rate(p: float) -> None:
    """Of all weights, of every head, and of neighbours in each direction that are kept together."""
    kept = flashmsa.dropout_mask(2, 4, 512, 512, p, 11)
    rate = 1.0 - threshold(p) / 65536
    assert_share(kept, rate, "all")
    for b, h in itertools.product(range(2), range(4)):
        assert_share(kept[b, h], rate, f"head {h} of batch {b}")
    # NOTE: disjoint pairs, which are independent draws.
    for step in (1, 2, 4, 8, 16, 32, 64):
        for dim in (2, 3):
            pairs = kept.unflatten(dim, (-1, 2, step))
            together = pairs.select(dim + 1, 0) & pairs.select(dim + 1, 1)
            assert_share(together, rate**2, f"{step} apart in {dim}")
    assert_share(kept[:, 0] & kept[:, 1], rate**2, "heads")
    assert_share(kept[0] & kept[1], rate**2, "batches")
    assert_share(kept & flashmsa.dropout_mask(2, 4, 512, 512, p, 12), rate**2, "seeds")
    assert_share(kept & flashmsa.dropout_mask(2, 4, 512, 512, p, torch.tensor([11, 1])), rate**2, "offsets")


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5])
def test_draws_of_one_call(p: float) -> None:
    """Weights of the same call of the generator: any two of the 64, and any three of one pair of keys."""
    size = 4096
    dropped = ~flashmsa.dropout_mask(1, 1, size, size, p, 3)[0, 0]
    # Rows i / 32, i % 32 / 8, i % 8; keys j / 64, j % 64 / 8, j % 8 / 2, j % 2.
    calls = dropped.view(size // 32, 4, 8, size // 64, 8, 4, 2).permute(0, 2, 3, 5, 1, 4, 6).reshape(-1, 4, 16)
    rate = threshold(p) / 65536
    draws = calls.reshape(-1, 64).float()
    together = (draws.mT @ draws).double() / draws.shape[0]
    sigma = math.sqrt(rate**2 * (1.0 - rate**2) / draws.shape[0])
    # NOTE: 2016 pairs, of which some are 3.5 sigma off.
    off = (together - rate**2).abs().fill_diagonal_(0.0)
    assert off.max().item() <= 4.5 * sigma
    for queries in itertools.combinations(range(4), 3):
        for key in range(16):
            assert_share(calls[:, queries, key].all(1), rate**3, f"queries {queries}, key {key}")


def test_thresholds() -> None:
    """p in steps of 1/65536, and the scale that makes up for what is dropped in fact."""
    assert [threshold(p) for p in (0.0, 2**-18, 2**-17, 0.5, 1.0 - 2**-20)] == [0, 0, 1, 32768, 65535]
    # The draws at places 32640 and 32641 compare equal as numbers, so that both are dropped or none.
    assert [threshold(n / 65536) for n in (32640, 32641, 32642)] == [32640, 32642, 32642]
    assert keep_scale(0.0) == 1.0 and keep_scale(0.5) == 2.0 and keep_scale(0.9999999) == 65536.0
    for p in (0.1, 0.25, 0.7):
        assert keep_scale(p) * (1.0 - threshold(p) / 65536) == pytest.approx(1.0, rel=1e-15)
    assert flashmsa.dropout_mask(1, 1, 40, 40, 0.0, 3).all()


def test_a_part_of_a_mask_is_that_part_of_the_whole() -> None:
    """Rows, keys and batches are numbered from the start, whatever the lengths."""
    whole = flashmsa.dropout_mask(3, 4, 150, 200, 0.4, 5)
    for batch, len_q, len_kv in ((1, 150, 200), (3, 1, 200), (2, 70, 33), (3, 150, 1), (3, 0, 5), (0, 3, 3)):
        part = flashmsa.dropout_mask(batch, 4, len_q, len_kv, 0.4, 5)
        assert torch.equal(part, whole[:batch, :, :len_q, :len_kv])


# ---------------------------------------------------------------------------------------------------------------------
# Calls


def weights_forward(target: Target, len_q: int, len_kv: int, dim: int, **kwargs) -> torch.Tensor:
    """The weights of a call (2, 4, len_q, len_kv), which values that are the unit vectors bring out."""
    q, k, _ = make_qkv(target, 2, (4, 2), len_q, len_kv, dim)
    v = torch.eye(len_kv, device=q.device, dtype=q.dtype).expand(2, 2, -1, -1)
    return flashmsa.attention(q, k, v, backend=target.backend, **kwargs)


def weights_backward(target: Target, len_q: int, len_kv: int, dim: int, **kwargs) -> torch.Tensor:
    """The same from dV = P^T dO: dO of the two heads that share a kv head are different unit vectors."""
    q, k, v = make_qkv(target, 2, (4, 2), len_q, len_kv, dim, 2 * len_q)
    v.requires_grad_()
    d_out = torch.eye(2 * len_q, device=q.device, dtype=q.dtype).unflatten(0, (2, len_q)).repeat(2, 1, 1)
    out = flashmsa.attention(q, k, v, backend=target.backend, **kwargs)
    (dv,) = torch.autograd.grad(out, v, d_out.expand(2, -1, -1, -1))
    return dv.mT.unflatten(2, (2, len_q)).flatten(1, 2)


@ALL
@pytest.mark.parametrize("dim", [8, 64, 128, 192, 256])
@pytest.mark.parametrize("seed", [3, (2**40 + 5, 2**35 + 9)], ids=["int", "tensor"])
def test_forward_and_backward_drop_what_the_mask_says(target: Target, dim: int, seed: int | tuple[int, int]) -> None:
    """Whatever the head dim, hence the tile shape: the weights that are not 0 are those of dropout_mask."""
    given = torch.tensor(seed, device=target.device) if isinstance(seed, tuple) else seed
    options = {"dropout_p": 0.3, "seed": given}
    found = weights_forward(target, 150, 200, dim, **options)
    assert torch.equal(found != 0, flashmsa.dropout_mask(2, 4, 150, 200, 0.3, given, device=target.device))
    found = weights_backward(target, 120, 300, dim, **options)
    assert torch.equal(found != 0, flashmsa.dropout_mask(2, 4, 120, 300, 0.3, given, device=target.device))


@ALL
@pytest.mark.parametrize("p", [2**-16, 32641 / 65536, 65281 / 65536, 65282 / 65536, 0.9999])
def test_any_probability(target: Target, p: float) -> None:
    """The least one, the draws that are zeros, and the last that GPUs compare as numbers, and beyond."""
    wanted = flashmsa.dropout_mask(2, 4, 150, 200, p, 7, device=target.device)
    assert torch.equal(weights_forward(target, 150, 200, 64, dropout_p=p, seed=7) != 0, wanted)
    wanted = flashmsa.dropout_mask(2, 4, 100, 200, p, 7, device=target.device)
    assert torch.equal(weights_backward(target, 100, 200, 64, dropout_p=p, seed=7) != 0, wanted)


@ALL
def test_kept_weights_are_scaled(target: Target) -> None:
    """By one over the realised keep rate, against the weights without dropout: each rounded to the dtype."""
    torch.manual_seed(5)
    plain = weights_forward(target, 100, 120, 64).double()
    torch.manual_seed(5)
    dropped = weights_forward(target, 100, 120, 64, dropout_p=0.37, seed=1).double()
    wanted = torch.where(dropped != 0, plain * keep_scale(0.37), 0.0)
    eps = torch.finfo(target.dtype).eps
    # One rounding each of result and plain result to the dtype, the kept weights of half types before the product too.
    torch.testing.assert_close(dropped, wanted, rtol=4 * max(eps, 2.0**-23), atol=torch.finfo(target.dtype).tiny)


@pytest.mark.parametrize(
    ("target", "family"), by_family(targets(auto=True, dtypes=(torch.float32, torch.bfloat16)), ALL_FAMILIES)
)
def test_every_mask(target: Target, family: str) -> None:
    """Original indices, whatever order or stride a kernel takes the rows in; lse is that without dropout."""
    for len_q, len_kv in ((90, 150), (150, 90)):
        q, k, v = make_qkv(target, 2, (4, 2), len_q, len_kv, 40, 24)
        mask = mask_for(family, 2, len_q, len_kv, heads=(4, 2))
        d_out, d_lse = grad_like(q, v)
        options = Options(sinks=torch.randn(4, device=q.device))
        dropout = {"dropout_p": 0.2, "seed": 17}
        found = run_backward(target, q, k, v, mask, d_out, d_lse, options, **dropout)
        check_gradients(found, q, k, v, mask, d_out, d_lse, options, **dropout)
        plain = run_backward(target, q, k, v, mask, d_out, d_lse, options)
        if target.backend == "cpu":
            assert torch.equal(found["lse"], plain["lse"])
        elif target.native:  # another kernel, whose tiles have another shape
            assert_lse(found["lse"], plain["lse"].double())
        assert len_kv == 0 or not torch.equal(found["out"], plain["out"]) or not plain["out"].count_nonzero()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_every_kernel(dtype: torch.dtype, dims: tuple[int, int], family: str) -> None:
    target = Target("sm90", "cuda", dtype)
    q, k, v = make_qkv(target, 2, (4, 2), 257, 300, *dims)
    mask = mask_for(family, 2, 257, 300, heads=(4, 2))
    slopes = None if "hash" in family else torch.rand(4, device="cuda")
    for options in (Options(), Options(softcap=2.0, sinks=torch.randn(4, device="cuda"), slopes=slopes)):
        d_out, d_lse = grad_like(q, v)
        dropout = {"dropout_p": 0.1, "seed": 2**50 + 1}
        found = run_backward(target, q, k, v, mask, d_out, d_lse, options, **dropout)
        check_gradients(found, q, k, v, mask, d_out, d_lse, options, **dropout)


@ALL
@pytest.mark.parametrize("family", ["dense", "document-causal", "dilated", "hash"])
def test_case_33_p_of_0_is_the_plain_result(target: Target, family: str) -> None:
    """To the bit, forward and backward, whatever the seed; also a p that rounds to 0."""
    q, k, v = make_qkv(target, 2, (4, 2), 130, 130, 64)
    mask = mask_for(family, 2, 130, 130)
    d_out, d_lse = grad_like(q, v)
    plain = run_backward(target, q, k, v, mask, d_out, d_lse, deterministic=True)
    for p in (0.0, 0):
        found = run_backward(target, q, k, v, mask, d_out, d_lse, dropout_p=p, seed=3, deterministic=True)
        assert all(torch.equal(found[name], want) for name, want in plain.items())
    d_out, d_lse = grad_like(q, v)
    found = run_backward(target, q, k, v, mask, d_out, d_lse, dropout_p=2.0**-18, seed=3)
    check_gradients(found, q, k, v, mask, d_out, d_lse)


@FEW
@pytest.mark.parametrize("p", [0.9, 1.0 - 2.0**-16, 1.0 - 2.0**-53])
def test_almost_all_dropped(target: Target, p: float) -> None:
    q, k, v = make_qkv(target, 1, (4, 2), 70, 90, 64)
    d_out, d_lse = grad_like(q, v)
    found = run_backward(target, q, k, v, CAUSAL, d_out, d_lse, dropout_p=p, seed=2)
    check_gradients(found, q, k, v, CAUSAL, d_out, d_lse, dropout_p=p, seed=2)


@FEW
def test_masked_nan_stays_untouched(target: Target) -> None:
    q, k, v = make_qkv(target, 2, (4, 2), 150, 200, 64)
    mask = document(0, 60, 150, kv=(0, 90, 150), causal=True)
    k[:, :, 150:], v[:, :, 150:] = math.nan, math.inf
    k[1, 0, 70] = math.nan
    # A dropped weight is 0, and 0 times a NaN that may be seen is NaN.
    v[0, 1, 20] = math.nan
    d_out, d_lse = grad_like(q, v)
    found = run_backward(target, q, k, v, mask, d_out, d_lse, dropout_p=0.5, seed=2)
    check_gradients(found, q, k, v, mask, d_out, d_lse, dropout_p=0.5, seed=2)


@FEW
def test_a_nan_among_values_is_not_dropped(target: Target) -> None:
    """Rows that drop its weight have it too: 0 times NaN."""
    q, k, v = make_qkv(target, 1, 2, 70, 90, 64)
    v[0, 1, 40] = math.nan
    out = flashmsa.attention(q, k, v, flashmsa.Causal(), dropout_p=0.5, seed=2, backend=target.backend)
    hit = torch.zeros(1, 2, 70, dtype=torch.bool, device=q.device)
    hit[0, 1, 20:] = True  # query i stands at key i + 20
    assert torch.equal(out.isnan().all(-1), hit) and torch.equal(out.isnan().any(-1), hit)


# ---------------------------------------------------------------------------------------------------------------------
# Seeds


def results(target: Target, seed: int | torch.Tensor | None, **kwargs) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, 60, 64, generator=generator).to(target.device, target.dtype) for _ in range(3))
    return flashmsa.attention(q, k, v, dropout_p=0.5, seed=seed, backend=target.backend, **kwargs)


@pytest.mark.parametrize("target", ONE_EACH)
def test_seeds(target: Target) -> None:
    """An int s is (s, 0); unsigned ones wrap; another seed or offset is another mask."""

    def pair(seed: int, offset: int) -> torch.Tensor:
        return torch.tensor([seed, offset], device=target.device)

    first = results(target, 7)
    for same in (7, pair(7, 0)):
        assert torch.equal(results(target, same), first)
    assert torch.equal(results(target, 2**64 - 1), results(target, -1))
    assert torch.equal(results(target, pair(-1, 0)), results(target, -1))
    for other in (8, 7 + 2**32, -7, pair(7, 1), pair(7, 2**32), pair(8, 0)):
        assert not torch.equal(results(target, other), first), other
    held = pair(7, 0)
    results(target, held)
    assert torch.equal(held, pair(7, 0)), "a seed is not advanced by a call"


@pytest.mark.parametrize("target", ONE_EACH)
def test_no_seed_draws_from_torchs_generator(target: Target) -> None:
    torch.manual_seed(3)
    first, second = results(target, None), results(target, None)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(results(target, None), first) and torch.equal(results(target, None), second)
    torch.manual_seed(4)
    assert not torch.equal(results(target, None), first)
    # A seed, or no dropout at all, leaves the generator alone.
    torch.manual_seed(3)
    results(target, 5)
    assert torch.equal(results(target, None), first)


@pytest.mark.parametrize("target", ONE_EACH)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed(target: Target, use_reentrant: bool) -> None:
    """What is computed again drops the same weights."""
    inputs = make_qkv(target, 2, (4, 2), 70, 70, 64)
    d_out, _ = grad_like(inputs[0], inputs[2])

    def call(q, k, v):
        options = {"dropout_p": 0.4, "backend": target.backend, "deterministic": True}
        return flashmsa.attention(q * 2, k, v, mask=flashmsa.Causal(), **options)

    found = []
    for checkpointed in (False, True):
        torch.manual_seed(9)
        leaves = [x.clone().requires_grad_() for x in inputs]
        if checkpointed:
            out = torch.utils.checkpoint.checkpoint(call, *leaves, use_reentrant=use_reentrant)
        else:
            out = call(*leaves)
        torch.rand(5, device=target.device)
        out.backward(d_out)
        found.append([x.grad for x in leaves])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("target", ONE_EACH)
def test_compiled(target: Target) -> None:
    torch._dynamo.reset()
    inputs = make_qkv(target, 2, (4, 2), 70, 90, 64)
    d_out, _ = grad_like(inputs[0], inputs[2])
    seed = torch.tensor([4, 9], device=target.device)

    def call(q, k, v, seed):
        return flashmsa.attention(q, k, v, dropout_p=0.3, seed=seed, backend=target.backend)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    found = []
    for each in (call, compiled):
        leaves = [x.clone().requires_grad_() for x in inputs]
        found.append(torch.autograd.grad(each(*leaves, seed), leaves, d_out))
    assert all(map(torch.equal, *found))
    draws = [compiled(*inputs, None) for _ in range(2)]
    assert not torch.equal(*draws)
    assert torch.equal(compiled(*inputs, 6), call(*inputs, 6))
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["sm90", "torch"])
def test_captured(backend: str) -> None:
    """Replays draw anew from the generator, forward and backward alike; a tensor of a seed is read by each."""
    target = Target(backend, "cuda", torch.bfloat16)
    q, k, v = (x.requires_grad_() for x in make_qkv(target, 2, (4, 2), 100, 100, 64, 200))
    d_out = torch.eye(200, device="cuda", dtype=torch.bfloat16).unflatten(0, (2, 100)).repeat(2, 1, 1)
    d_out = d_out.expand(2, -1, -1, -1)
    held = torch.tensor([1, 0], device="cuda")

    def step(seed: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        out = flashmsa.attention(q, k, v, dropout_p=0.5, seed=seed, backend=backend)
        return out, torch.autograd.grad(out, v, d_out)[0]

    for seed in (None, held):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step(seed)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, dv = step(seed)
        seen = []
        for n in range(3):
            if seed is not None:
                held.copy_(torch.tensor([5, n]))
            graph.replay()
            kept = (dv.mT.unflatten(2, (2, 100)).flatten(1, 2) != 0).clone()
            if seed is not None:
                assert torch.equal(kept, flashmsa.dropout_mask(2, 4, 100, 100, 0.5, held))
            weights = torch.softmax((q.double() @ k.double().repeat_interleave(2, 1).mT) / 8.0, -1)
            wanted = (weights * kept * 2.0) @ v.double().repeat_interleave(2, 1)
            assert (out.double() - wanted).abs().max() < 0.05, "forward dropped other weights than backward"
            seen.append(kept)
        assert not any(torch.equal(a, b) for a, b in itertools.combinations(seen, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [None, 3], ids=["generator", "int"])
def test_the_host_never_waits(seed: int | None) -> None:
    q, k, v = (x.requires_grad_() for x in make_qkv(Target("sm90", "cuda", torch.bfloat16), 2, 4, 300, 300, 64))
    d_out = torch.randn_like(q)

    def step() -> None:
        out = flashmsa.attention(q, k, v, dropout_p=0.1, seed=seed, backend="sm90")
        torch.autograd.grad(out, (q, k, v), d_out)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("target", NATIVE_ONE_EACH)
@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_same_bits_every_time(target: Target, family: str) -> None:
    q, k, v = make_qkv(target, 2, (4, 2), 150, 200, 64)
    mask = mask_for(family, 2, 150, 200)
    d_out, d_lse = grad_like(q, v)
    options = {"dropout_p": 0.3, "seed": 4, "deterministic": True}
    first = run_backward(target, q, k, v, mask, d_out, d_lse, **options)
    for _ in range(10):
        again = run_backward(target, q, k, v, mask, d_out, d_lse, **options)
        assert all(torch.equal(again[name], want) for name, want in first.items())


# ---------------------------------------------------------------------------------------------------------------------
# Packed sequences


@FEW
def test_varlen(target: Target) -> None:
    """Rows and keys are numbered as they are packed; the same seed, the same weights as in a whole call."""
    q, k, v = (x[0].transpose(0, 1) for x in make_qkv(target, 1, (4, 2), 130, 130, 64))
    cuts = torch.tensor([0, 37, 37, 90, 130], dtype=torch.int32, device=target.device)
    options = {"dropout_p": 0.3, "seed": 21, "backend": target.backend, "return_lse": True, "deterministic": True}
    packed = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    whole = [x.detach().clone()[None].transpose(1, 2).requires_grad_() for x in (q, k, v)]
    d_out = torch.randn_like(q)
    out, lse = flashmsa.attention_varlen(*packed, cuts, mask=flashmsa.Causal(), **options)
    want, want_lse = flashmsa.attention(*whole, mask=flashmsa.Document(cuts, causal=True), **options)
    assert torch.equal(out, want[0].transpose(0, 1)) and torch.equal(lse, want_lse[0])
    found = torch.autograd.grad(out, packed, d_out)
    wanted = torch.autograd.grad(want, whole, d_out[None].transpose(1, 2))
    assert all(torch.equal(a, b[0].transpose(0, 1)) for a, b in zip(found, wanted, strict=True))
    plain = flashmsa.attention_varlen(*packed, cuts, mask=flashmsa.Causal(), backend=target.backend)
    assert not torch.equal(out, plain)


# ---------------------------------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize(
    ("error", "match", "changed"),
    [
        (ValueError, r"dropout_p: 1\.0; must lie in \[0, 1\)", {"dropout_p": 1.0}),
        (ValueError, r"dropout_p: -0\.1; must lie in \[0, 1\)", {"dropout_p": -0.1}),
        (ValueError, r"dropout_p: nan", {"dropout_p": math.nan}),
        (TypeError, r"dropout_p: str", {"dropout_p": "0.1"}),
        (TypeError, r"dropout_p: Tensor", {"dropout_p": torch.tensor(0.1)}),
        (TypeError, r"seed: float; must be an int", {"seed": 1.0}),
        (TypeError, r"seed: bool; must be an int", {"seed": True}),
        (TypeError, r"seed: Generator; must be an int", {"seed": torch.Generator()}),
        (ValueError, rf"seed: {2**64}; must fit 64 bits", {"seed": 2**64}),
        (ValueError, rf"seed: {-(2**63) - 1}; must fit 64 bits", {"seed": -(2**63) - 1}),
        (TypeError, r"seed: dtype torch.int32.*torch.int64", {"seed": torch.zeros(2, dtype=torch.int32)}),
        (ValueError, r"seed: shape \(1,\).*\(2,\)", {"seed": torch.zeros(1, dtype=torch.int64)}),
        (ValueError, r"seed: on meta, q on cpu", {"seed": torch.zeros(2, dtype=torch.int64, device="meta")}),
    ],
)
def test_bad_input(error: type[Exception], match: str, changed: dict) -> None:
    q, k, v = make_qkv(Target(None, "cpu", torch.float32), 1, 2, 20, 20, 16)
    given = {"dropout_p": 0.1, "seed": 3, **changed}
    for backend in (None, "cpu", "torch"):
        with pytest.raises(error, match=match):
            flashmsa.attention(q, k, v, backend=backend, **given)
    with pytest.raises(error, match=match):
        flashmsa.reference(q, k, v, **given)


def test_bad_input_of_the_mask() -> None:
    with pytest.raises(ValueError, match=r"p: 1\.0; must lie in \[0, 1\)"):
        flashmsa.dropout_mask(1, 1, 4, 4, 1.0, 3)
    with pytest.raises(ValueError, match="len_q: -1; must be at least 0"):
        flashmsa.dropout_mask(1, 1, -1, 4, 0.1, 3)
    with pytest.raises(TypeError, match="seed: None; must be an int"):
        flashmsa.dropout_mask(1, 1, 4, 4, 0.1, None)


def test_without_dropout_a_seed_is_not_looked_at() -> None:
    q, k, v = make_qkv(Target(None, "cpu", torch.float32), 1, 2, 20, 20, 16)
    assert torch.equal(flashmsa.attention(q, k, v, seed=5), flashmsa.attention(q, k, v))
