"""`attention` with few queries against many keys, which the decode kernels run on a GPU: results by the same rules.

csrc/binding/few_queries.h says which calls these are. The CPU backend goes through the same tests.
"""

from __future__ import annotations

import math

import pytest
import torch
from helpers import (
    CAUSAL,
    DENSE,
    TOP_LEFT,
    MaskCase,
    Options,
    Prefixes,
    Target,
    both,
    check,
    document,
    make_qkv,
    poisoned_allocations,
    run,
    run_and_check,
    targets,
)

import flashmsa

TARGETS = targets(composed=False, dtypes=(torch.bfloat16, torch.float16))
ONE_EACH = targets(composed=False, dtypes=(torch.bfloat16,))
# (query heads, kv heads), queries: 1 to 256 rows of a kv head, and more. With few keys some are the forward kernels'.
ROWS = [
    ((4, 4), 1),
    ((8, 2), 1),
    ((8, 2), 3),
    ((16, 1), 1),
    ((3, 3), 16),
    ((8, 1), 2),
    ((8, 2), 5),
    ((16, 2), 4),
    ((4, 2), 24),
    ((2, 2), 65),
    ((4, 1), 64),
    ((4, 1), 65),
]

WINDOW = MaskCase("window", left=300)
MASKS = [
    DENSE,
    CAUSAL,
    TOP_LEFT,
    WINDOW,
    MaskCase("window", left=100, right=40, keep=70),
    MaskCase("window-top-left", left=2, right=700),
    MaskCase("prefix", prefix=600),
    MaskCase("prefix-top-left", prefix=900),
    MaskCase("prefix-window", prefix=900, left=1000),
    Prefixes("prefixes", prefixes=(0, 1010)),
    both(WINDOW, MaskCase("prefix-top-left", prefix=1000)),
]


@pytest.mark.parametrize("len_kv", [1024, 1100, 5003])
@pytest.mark.parametrize(("heads", "len_q"), ROWS, ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("target", ONE_EACH)
def test_masks(target: Target, mask: MaskCase, heads: tuple[int, int], len_q: int, len_kv: int) -> None:
    run_and_check(target, *make_qkv(target, 2, heads, len_q, len_kv, 64), mask)


@pytest.mark.parametrize(("dim", "dim_v"), [(8, 8), (64, 40), (72, 72), (128, 128), (192, 128), (96, 256), (256, 256)])
@pytest.mark.parametrize("mask", [DENSE, WINDOW], ids=str)
@pytest.mark.parametrize("target", TARGETS)
def test_head_dims(target: Target, mask: MaskCase, dim: int, dim_v: int) -> None:
    run_and_check(target, *make_qkv(target, 2, (4, 2), 3, 1300, dim, dim_v), mask)


@pytest.mark.parametrize("batch", [1, 2, 70])
@pytest.mark.parametrize("target", ONE_EACH)
def test_batches(target: Target, batch: int) -> None:
    """Few sequences are cut into many parts, many into few."""
    run_and_check(target, *make_qkv(target, batch, (2, 1), 1, 2048, 32), CAUSAL)


@pytest.mark.parametrize("len_kv", [1024, 1025, 8192, 8193, 20000])
@pytest.mark.parametrize(("batch", "heads_kv"), [(1, 1), (1, 8), (2, 8), (16, 1), (15, 1), (3, 8), (17, 1)])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("target", ONE_EACH)
def test_clusters(target: Target, dim: int, batch: int, heads_kv: int, len_kv: int) -> None:
    """Clusters of 8 and of 16 CTAs, one or two CTAs an SM, and where a CTA's share is whole sequences or not."""
    run_and_check(target, *make_qkv(target, batch, (4 * heads_kv, heads_kv), 1, len_kv, dim))


@pytest.mark.parametrize("len_q", [1, 4])
@pytest.mark.parametrize(("batch", "len_kv"), [(8, 2048), (32, 4096), (33, 4096), (130, 1024)])
@pytest.mark.parametrize("target", ONE_EACH)
def test_whole_sequences(target: Target, batch: int, len_kv: int, len_q: int) -> None:
    """Equal sequences that no share cuts have no parts in memory; one more sequence, and some are cut."""
    q, k, v = make_qkv(target, batch, (8, 8), len_q, len_kv, 64)
    cache = (x.transpose(1, 2) for x in (k, v))
    with poisoned_allocations():
        out, lse = flashmsa.paged_attention(q, *cache, None, None, mask=None, backend=target.backend, return_lse=True)
    check(out, lse, q, k, v)


@pytest.mark.parametrize("scale", [None, 0.0, -0.3, 2.0])
@pytest.mark.parametrize("option", ["plain", "softcap", "sinks", "slopes", "slopes-by-batch", "all"])
@pytest.mark.parametrize("mask", [CAUSAL, TOP_LEFT, WINDOW], ids=str)
@pytest.mark.parametrize("target", ONE_EACH)
def test_options(target: Target, mask: MaskCase, option: str, scale: float | None) -> None:
    """ALiBi under a mask aligned at the start is the forward kernels'."""
    made = {
        "softcap": {"softcap": 3.0},
        "sinks": {"sinks": torch.randn(8, device=target.device)},
        "slopes": {"slopes": torch.rand(8, device=target.device) / 64},
        "slopes-by-batch": {"slopes": torch.rand(2, 8, device=target.device) / 64},
    }
    made["all"] = {name: x for each in list(made.values())[:3] for name, x in each.items()}
    options = Options(**made.get(option, {}))
    run_and_check(target, *make_qkv(target, 2, (8, 2), 4, 1200, 64), mask, options=options, scale=scale)


def in_sequence_order(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def in_a_wider_tensor(x: torch.Tensor) -> torch.Tensor:
    wide = torch.full((*x.shape[:3], 3 * x.shape[3]), math.nan, dtype=x.dtype, device=x.device)
    wide[..., x.shape[3] : 2 * x.shape[3]] = x
    return wide[..., x.shape[3] : 2 * x.shape[3]]


def off_alignment(x: torch.Tensor) -> torch.Tensor:
    flat = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    flat[1:] = x.flatten()
    return flat[1:].view(x.shape)


@pytest.mark.parametrize("layout", [in_sequence_order, in_a_wider_tensor, off_alignment])
@pytest.mark.parametrize("target", ONE_EACH)
def test_layouts(target: Target, layout) -> None:
    q, k, v = make_qkv(target, 2, (4, 2), 2, 1500, 64)
    run_and_check(target, *(layout(x) for x in (q, k, v)), WINDOW)


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("target", ONE_EACH)
def test_expanded_keys(target: Target, dims: tuple[int, ...]) -> None:
    """Strides of 0, which no tensor map takes."""
    q, k, v = make_qkv(target, 3, (4, 2), 2, 1500, 64)
    shape = [1 if d in dims else -1 for d in range(4)]
    first = tuple(slice(0, 1) if d in dims else slice(None) for d in range(4))
    k, v = (x[first].expand([n if s == 1 else -1 for n, s in zip(x.shape, shape, strict=True)]) for x in (k, v))
    assert all(k.stride(d) == 0 for d in dims)
    run_and_check(target, q, k, v, CAUSAL)


@pytest.mark.parametrize("mask", [CAUSAL, WINDOW, MaskCase("window", left=100, right=40, keep=70)], ids=str)
@pytest.mark.parametrize("target", ONE_EACH)
def test_hidden_keys_are_not_touched(target: Target, mask: MaskCase) -> None:
    q, k, v = make_qkv(target, 2, (8, 2), 4, 1400, 64)
    seen = mask.allowed(4, 1400, device=q.device)[0].any(0)
    clean, lse = run(target, q, k, v, mask)
    k[:, :, ~seen], v[:, :, ~seen] = math.nan, math.inf
    out, poisoned_lse = run(target, q, k, v, mask)
    assert torch.isfinite(out.float()).all()
    check(out, poisoned_lse, q, k.masked_fill(~seen[:, None], 0), v.masked_fill(~seen[:, None], 0), mask)
    assert (poisoned_lse - lse).abs().max() <= 1e-5 * lse.abs().max().clamp(min=1)
    assert (out.float() - clean.float()).abs().max() <= 0.02 * clean.float().abs().max()


@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("target", ONE_EACH)
def test_nan_in_a_key_is_seen_by_its_rows_alone(target: Target, where: str) -> None:
    q, k, v = make_qkv(target, 2, (8, 2), 4, 1400, 64)
    for key in (0, 1200, 1397, 1399):
        poisoned = {"k": k, "v": v}[where].clone()
        poisoned[1, 0, key] = math.nan
        out, lse = run(target, q, *((poisoned, v) if where == "k" else (k, poisoned)), CAUSAL)
        hit = torch.zeros(2, 8, 4, dtype=torch.bool, device=q.device)
        hit[1, :4] = CAUSAL.allowed(4, 1400, device=q.device)[0, :, key]
        assert torch.equal(out.isnan().all(-1), hit) and torch.equal(out.isnan().any(-1), hit), f"key {key}"
        assert torch.equal(lse.isnan(), hit & (where == "k"))


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("target", ONE_EACH)
def test_rows_without_a_key(target: Target, with_sinks: bool) -> None:
    """No key is near both ends."""
    nothing = both(MaskCase("window", left=3), MaskCase("window-top-left", left=3))
    q, k, v = make_qkv(target, 2, (4, 2), 2, 1100, 64)
    options = Options(sinks=torch.randn(4, device=q.device)) if with_sinks else Options()
    out, lse = run_and_check(target, q, k, v, nothing, options=options)
    assert not out.count_nonzero()
    if with_sinks:
        sinks = options.sinks[None, :, None].expand_as(lse)
        assert ((lse - sinks).abs() <= 1e-5 * sinks.abs().clamp(min=1.0)).all()
    else:
        assert lse.isneginf().all()


@pytest.mark.parametrize("target", ONE_EACH)
def test_gradients_follow(target: Target) -> None:
    """The backward pass takes out and lse as decode leaves them."""
    q, k, v = (x.requires_grad_() for x in make_qkv(target, 2, (4, 2), 3, 1100, 64))
    dout = torch.randn(2, 4, 3, 64, device=q.device).to(q.dtype)
    out, lse = flashmsa.attention(q, k, v, flashmsa.Causal(), backend=target.backend, return_lse=True)
    got = torch.autograd.grad((out.float() * dout).sum() + lse.sum(), (q, k, v))
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, lse = flashmsa.reference(*wide, mask=flashmsa.Causal(), return_lse=True)
    expected = torch.autograd.grad((out * dout).sum() + lse.sum(), wide)
    for x, y in zip(got, expected, strict=True):
        assert (x.double() - y).norm() <= 0.01 * y.norm()


# ---------------------------------------------------------------------------------------------------------------------
# On the GPU alone


def kernels_of(call) -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    names = ("paged_decode_kernel", "cluster_decode_kernel", "attention_forward_kernel")
    return {name for name in names for event in profile.key_averages() if name in event.key}


@pytest.mark.gpu
def test_which_kernels_run() -> None:
    target = Target("sm90", "cuda", torch.bfloat16)
    for mask, len_q, len_kv, heads, name in (
        (DENSE, 1, 1024, (16, 1), "cluster_decode_kernel"),
        (WINDOW, 4, 4096, (8, 2), "cluster_decode_kernel"),
        (WINDOW, 4, 8200, (8, 2), "paged_decode_kernel"),
        (DENSE, 1, 1023, (16, 1), "attention_forward_kernel"),
        (DENSE, 16, 60000, (16, 1), "paged_decode_kernel"),
        (DENSE, 4, 1024, (16, 1), "attention_forward_kernel"),
        (DENSE, 17, 9000, (16, 1), "attention_forward_kernel"),
        (document(0, 1, kv=(0, 2000)), 1, 2000, (4, 4), "attention_forward_kernel"),
    ):
        q, k, v = make_qkv(target, 2, heads, len_q, len_kv, 64)
        built = mask.build("cuda")
        flashmsa.attention(q, k, v, built)
        assert kernels_of(lambda q=q, k=k, v=v, built=built: flashmsa.attention(q, k, v, built)) == {name}
        assert flashmsa.explain(q, k, v, built).kernel.startswith(
            "fwd_" if name == "attention_forward_kernel" else "decode_"
        )


@pytest.mark.gpu
def test_the_same_bits_again_and_in_a_graph() -> None:
    target = Target("sm90", "cuda", torch.bfloat16)
    q, k, v = make_qkv(target, 3, (8, 2), 2, 20000, 128)
    first = flashmsa.attention(q, k, v, flashmsa.Causal())
    assert all(torch.equal(flashmsa.attention(q, k, v, flashmsa.Causal()), first) for _ in range(20))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashmsa.attention(q, k, v, flashmsa.Causal())
    others = make_qkv(target, 3, (8, 2), 2, 20000, 128)
    expected = flashmsa.attention(*others, flashmsa.Causal())
    for x, y in zip((q, k, v), others, strict=True):
        x.copy_(y)
    graph.replay()
    assert torch.equal(out, expected) and not torch.equal(out, first)


@pytest.mark.gpu
@pytest.mark.parametrize("len_kv", [1024, 4096, 20000])
def test_calls_that_follow_each_other(len_kv: int) -> None:
    """A kernel may begin before the one ahead of it ends, and sees what that one wrote all the same."""
    target = Target("sm90", "cuda", torch.bfloat16)
    q, k, v = make_qkv(target, 1, (32, 8), 1, len_kv, 128)
    caches = [make_qkv(target, 1, (32, 8), 1, len_kv, 128)[1:] for _ in range(6)]

    def chain(between) -> list[torch.Tensor]:
        """Each call's queries are the result of the one before; its keys and values are written between the two."""
        outs = [q]
        for keys, values in caches:
            torch.add(keys, 0, out=k)
            torch.add(values, 0, out=v)
            for _ in range(3):
                between()
                outs.append(flashmsa.attention(outs[-1], k, v))
        return outs

    expected = chain(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(lambda: None)
    for _ in range(20):
        assert all(map(torch.equal, chain(lambda: None), expected))
        graph.replay()
        assert all(map(torch.equal, captured, expected))
        for x in captured[1:]:
            x.fill_(math.nan)
