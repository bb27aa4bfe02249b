"""The Autograd key of the native operators: gradcheck of every mask and option, tracing, checkpoints, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flashmsa import (
    BlockSparse,
    Causal,
    Dense,
    DilatedWindow,
    Document,
    HashBucket,
    Mask,
    PrefixLM,
    SlidingWindow,
    attention,
    attention_varlen,
)

LENGTH = 17
HEADS, HEADS_KV = 4, 2
CPU_OR_CUDA = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def buckets(heads: int) -> Tensor:
    return torch.arange(heads * LENGTH, dtype=torch.int32).view(1, heads, LENGTH) ** 2 % 5


def bits() -> Tensor:
    return (torch.arange(LENGTH)[:, None] * 7 + torch.arange(LENGTH) * 3) % 5 < 3


# All for LENGTH queries and as many keys; some leave rows without a key, and keys without a row.
MASKS: dict[str, Mask] = {
    "dense": Dense(),
    "causal": Causal(),
    "top-left": Causal(align="top-left"),
    "window": SlidingWindow(4, 2),
    "window-first": SlidingWindow(3, 0, keep_first=2),
    "prefix": PrefixLM(6),
    "dilated": DilatedWindow(2, 1, dilation=3),
    "dilated-wide": DilatedWindow(1, 0, dilation=20),
    "document": Document([0, 5, 5, 15]),
    "document-causal": Document([0, 5, 5, 15], [0, 3, 8, 17], causal=True),
    "document-window": Document([0, 5, 5, 15]) & SlidingWindow(3, 1),
    "hash": HashBucket(buckets(HEADS_KV).repeat_interleave(2, 1), buckets(HEADS_KV)),
    "hash-causal": HashBucket(buckets(1), causal=True),
    "hash-query-heads": HashBucket(buckets(HEADS)),
    "blocks": BlockSparse(torch.tensor([True]).view(1, 1, 1, 1), block_size=(64, 64)),
    "bits": BlockSparse.from_dense(bits()[None, None]) & Causal(),
}
EACH_MASK = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
SLOPES = torch.tensor([0.5, 0.25, 0.125, -0.1])

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 1.5},
    "scale": {"scale": -0.7},
    "alibi": {"alibi_slopes": SLOPES},
    "sinks": {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])},
    "dropout": {"dropout_p": 0.3, "seed": 11},
    "all": {"softcap": 2.0, "alibi_slopes": SLOPES, "sinks": SLOPES, "dropout_p": 0.2, "seed": -(2**62)},
}


def make(
    heads_kv: int = HEADS_KV, len_q: int = LENGTH, len_kv: int = LENGTH, dim_v: int = 24, batch: int = 1, **options: Any
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    device = options.pop("device", "cpu")
    options = {"dtype": torch.float64, **options}
    shapes = ((batch, HEADS, len_q, 16), (batch, heads_kv, len_kv, 16), (batch, heads_kv, len_kv, dim_v))
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, **options) for shape in shapes]
    return [x.requires_grad_() for x in made]


def gradcheck(call: Callable[..., Any], inputs: list[Tensor], *, fast: bool = False) -> None:
    """Every component of the Jacobian; fast: of random projections of it."""
    assert torch.autograd.gradcheck(call, inputs, eps=1e-6, atol=1e-7, rtol=1e-5, fast_mode=fast)


# ---------------------------------------------------------------------------------------------------------------------
# Finite differences


@EACH_MASK
@pytest.mark.parametrize("name", OPTIONS)
def test_gradcheck(mask: Mask, name: str) -> None:
    options = dict(OPTIONS[name])
    if isinstance(mask, HashBucket):
        options.pop("alibi_slopes", None)
    fast = name not in ("plain", "all")
    gradcheck(lambda q, k, v: attention(q, k, v, mask, backend="cpu", **options), make(), fast=fast)


@pytest.mark.parametrize("heads_kv", [1, 4])
def test_gradcheck_of_head_groups(heads_kv: int) -> None:
    gradcheck(lambda q, k, v: attention(q, k, v, Causal(), backend="cpu"), make(heads_kv))


@pytest.mark.parametrize(("len_q", "len_kv"), [(5, 17), (17, 5), (17, 1), (1, 17)])
@pytest.mark.parametrize("mask", [Dense(), Causal(), Causal(align="top-left"), SlidingWindow(3), PrefixLM(2)], ids=repr)
def test_gradcheck_of_cross_attention(mask: Mask, len_q: int, len_kv: int) -> None:
    gradcheck(lambda q, k, v: attention(q, k, v, mask, backend="cpu"), make(len_q=len_q, len_kv=len_kv, dim_v=8))


def test_gradcheck_of_packed_sequences() -> None:
    cuts, kv_cuts = (torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 5, 15], [0, 3, 8, 14]))
    inputs = [x.detach()[0].transpose(0, 1).contiguous().requires_grad_() for x in make()]
    options = {"mask": Causal(), "backend": "cpu", "dropout_p": 0.2, "seed": 1}
    gradcheck(lambda q, k, v: attention_varlen(q, k, v, cuts, kv_cuts, **options), inputs)


def composed(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Plain float64 operators: out and lse."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = (q @ k.mT / q.shape[3] ** 0.5).masked_fill(~allowed, -torch.inf)
    lse = torch.cat([s, sinks[:, None, None].expand(*s.shape[:-1], 1)], -1).logsumexp(-1)
    return torch.exp(s - lse[..., None]) @ v, lse


@EACH_MASK
def test_gradients_of_lse_and_sinks(mask: Mask) -> None:
    """lse and sinks are fp32, too coarse for finite differences: against autograd through plain operators."""
    inputs = make()
    sinks = torch.tensor([0.3, -1.0, 2.0, 0.0], requires_grad=True)
    dense = mask.to_dense(LENGTH, LENGTH)
    if dense.dim() == 4 and dense.shape[1] == HEADS_KV:
        dense = dense.repeat_interleave(HEADS // HEADS_KV, 1)
    generator = torch.Generator().manual_seed(5)
    for out_counts in (True, False):
        found, wanted = [], []
        for grads, (out, lse) in (
            (found, attention(*inputs, mask, sinks=sinks, return_lse=True, backend="cpu")),
            (wanted, composed(*inputs, dense, sinks.double())),
        ):
            generator.manual_seed(5)
            weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (out, lse)]
            loss = (lse.double() * weights[1]).sum() + ((out * weights[0]).sum() if out_counts else 0.0)
            grads += torch.autograd.grad(loss, [*inputs, sinks], materialize_grads=True)
        for got, want in zip(found, wanted, strict=True):
            # lse's own gradient passes through fp32.
            torch.testing.assert_close(got.double(), want.double(), rtol=2e-6, atol=2e-6)


def test_empty_calls_have_zero_gradients() -> None:
    for batch, len_q, len_kv in ((0, 5, 5), (2, 0, 5), (2, 5, 0)):
        inputs = make(batch=batch, len_q=len_q, len_kv=len_kv)
        sinks = torch.zeros(HEADS, requires_grad=True)
        out, lse = attention(*inputs, Causal(), sinks=sinks, return_lse=True)
        *grads, d_sinks = torch.autograd.grad(out.sum() + lse.sum(), [*inputs, sinks])
        assert all(g.shape == x.shape and not g.count_nonzero() for g, x in zip(grads, inputs, strict=True))
        # Without keys lse is the sink itself.
        assert torch.equal(d_sinks, torch.full((HEADS,), 10.0 if len_kv == 0 else 0.0))


# ---------------------------------------------------------------------------------------------------------------------
# What is saved, and where gradients go


def test_unused_results_and_inputs() -> None:
    q, k, v = make()
    out, lse = attention(q, k, v, Causal(), return_lse=True)
    only_lse = torch.autograd.grad(lse.sum(), (q, k), retain_graph=True)
    assert all(x.count_nonzero() for x in only_lse)
    assert not torch.autograd.grad(lse.sum(), v, retain_graph=True)[0].count_nonzero()
    whole = torch.autograd.grad(out.sum(), (q, k, v))
    for at in range(3):
        leaves = [x.detach().requires_grad_(i == at) for i, x in enumerate((q, k, v))]
        out = attention(*leaves, Causal())
        assert torch.equal(torch.autograd.grad(out.sum(), leaves[at])[0], whole[at])


def test_lse_that_was_not_asked_for_is_no_result() -> None:
    q, k, v = make()
    arguments = (q, k, v, 0, [], [], None, 0.0, None, None, 0.0, None, False)
    out, lse = torch.ops.flashmsa.attention(*arguments, False)
    assert out.requires_grad and not lse.requires_grad and lse.shape == (0,)
    with torch.no_grad():
        assert torch.equal(out, torch.ops.flashmsa.attention(*arguments, True)[0])


def test_gradients_keep_the_memory_order_of_their_inputs() -> None:
    packed = torch.randn(2, 30, HEADS + 2 * HEADS_KV, 16, requires_grad=True)
    q, k, v = packed.transpose(1, 2).split((HEADS, HEADS_KV, HEADS_KV), 1)
    out = attention(q, k, v)
    grads = torch.autograd.grad(out, (q, k, v), torch.ones(()).expand_as(out))
    assert all(x.transpose(1, 2).is_contiguous() for x in grads)


def test_a_change_of_what_was_saved_is_found() -> None:
    q, k, v = make()
    offsets = torch.tensor([0, 5, 17], dtype=torch.int32)
    out = attention(q * 1.0, k, v, Document(offsets))
    offsets.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_graph_is_freed_after_its_backward_pass() -> None:
    q, k, v = make()
    out = attention(q, k, v)
    out.sum().backward(retain_graph=True)
    first = q.grad.clone()
    out.sum().backward()
    assert torch.equal(q.grad, 2 * first)
    with pytest.raises(RuntimeError, match=r"second time|already been freed"):
        out.sum().backward()


@CPU_OR_CUDA
def test_checkpoint(device: str) -> None:
    """Recomputed with the generator's state of the first time, so that dropout draws the same."""
    q, k, v = make(device=device, dtype=torch.float32 if device == "cpu" else torch.bfloat16)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q * 2.0, k, v, Causal(), dropout_p=0.3, deterministic=True)

    results = []
    for reentrant in (None, False, True):
        for x in (q, k, v):
            x.grad = None
        torch.manual_seed(1)
        out = call(q, k, v) if reentrant is None else checkpoint(call, q, k, v, use_reentrant=reentrant)
        out.float().square().sum().backward()
        results.append((out, q.grad, k.grad, v.grad))
    for result in results[1:]:
        for got, want in zip(result, results[0], strict=True):
            assert torch.equal(got, want)


@CPU_OR_CUDA
def test_autocast(device: str) -> None:
    """Forward under autocast, backward inside and outside of it: gradients in the inputs' dtype."""
    q, k, v = make(device=device, dtype=torch.float32, len_q=70, len_kv=70)
    low = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    grad = torch.ones(1, HEADS, 70, 24, device=device, dtype=torch.bfloat16)
    expected = torch.autograd.grad(attention(*low, Causal(), deterministic=True), low, grad)
    with torch.autocast(device, torch.bfloat16):
        out = attention(q, k, v, Causal(), deterministic=True)
        assert out.dtype == torch.bfloat16
        inside = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
    outside = torch.autograd.grad(out, (q, k, v), grad)
    for a, b, want in zip(inside, outside, expected, strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b) and torch.equal(a, want.float())


def test_deterministic_algorithms_are_asked_for_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag of torch changes no result on the CPU, which has one order of sums for any number of threads."""
    q, k, v = make(len_q=300, len_kv=300, dtype=torch.float32)
    results = []
    for threads, flag in ((1, False), (3, True)):
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(flag)
        try:
            results.append(torch.autograd.grad(attention(q, k, v, Causal()).square().sum(), (q, k, v)))
        finally:
            torch.set_num_threads(1)
            torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, *results))


# ---------------------------------------------------------------------------------------------------------------------
# Tracing


@CPU_OR_CUDA
@EACH_MASK
@pytest.mark.parametrize("with_options", [False, True], ids=["", "options"])
def test_opcheck(mask: Mask, with_options: bool, device: str) -> None:
    q, k, v = make(device=device, dtype=torch.float32 if device == "cpu" else torch.bfloat16)
    kind, ints, tensors = mask.to(device)._lower()
    sinks = torch.randn(HEADS, device=device, requires_grad=True)
    state = torch.tensor([3, 4], device=device)
    given = (-0.3, 2.0, sinks, None, 0.2, state, True) if with_options else (None, 0.0, None, None, 0.0, None, False)
    args = (q, k, v, kind, list(ints), list(tensors), *given, with_options)
    torch.library.opcheck(torch.ops.flashmsa.attention.default, args)
    with torch.no_grad():
        out, lse = torch.ops.flashmsa.attention(*args[:-1], True)
    dlse = torch.randn_like(lse) if with_options else None
    plain = [x.detach() if isinstance(x, Tensor) else x for x in args[:-1]]
    backward = (torch.randn_like(out), dlse, *plain[:3], out, lse, *plain[3:])
    torch.library.opcheck(torch.ops.flashmsa.attention_backward.default, backward)


@CPU_OR_CUDA
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
def test_compile_with_lengths_of_its_own(device: str, dropout_p: float) -> None:
    """One graph, at most two compilations for three lengths, and the values of an eager call."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    seed = torch.tensor([5, 6], device=device)

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return attention(q, k, v, Causal(), dropout_p=dropout_p, seed=seed, return_lse=True, deterministic=True)

    compiled = torch.compile(call, fullgraph=True, backend=counter)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    for length in (127, 128, 129):
        results = []
        for run in (compiled, call):
            inputs = make(len_q=length, len_kv=length, device=device, dtype=dtype)
            out, lse = run(*inputs)
            grads = torch.autograd.grad(out.float().square().sum() + lse.sum(), inputs)
            results.append((out, lse, *grads))
        for got, want in zip(*results, strict=True):
            assert torch.equal(got, want) and got.stride() == want.stride()
    assert counter.frame_count <= 2
    torch._dynamo.reset()


def test_compile_draws_from_the_generator_of_torch() -> None:
    torch._dynamo.reset()
    q, k, v = make(dtype=torch.float32)
    compiled = torch.compile(lambda *x: attention(*x, dropout_p=0.5), fullgraph=True, backend="aot_eager")
    torch.manual_seed(0)
    first, second = compiled(q, k, v), compiled(q, k, v)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(compiled(q, k, v), first)
    torch._dynamo.reset()


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


def test_second_derivatives() -> None:
    q, k, v = make()
    out = attention(q, k, v)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    assert torch.equal(dq, torch.autograd.grad(attention(q, k, v).square().sum(), q)[0])
    for x in (q, k, v):
        with pytest.raises(NotImplementedError, match="second derivatives are not supported"):
            torch.autograd.grad(dq.sum(), x, retain_graph=True)


def test_forward_mode_and_vmap() -> None:
    q, k, v = (x.detach() for x in make())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match=r"q: .*forward-mode"):
            attention(dual, k, v)
    with pytest.raises(NotImplementedError, match="vmap"):
        torch.vmap(lambda x: attention(x, k, v))(q[None])


def test_slopes_have_no_gradient() -> None:
    q, k, v = make()
    slopes = torch.rand(HEADS, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"alibi_slopes: requires grad.*detach.*torch"):
        attention(q, k, v, alibi_slopes=slopes)


@pytest.mark.parametrize("backend", [None, "cpu"])
@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (ValueError, r"dropout_p: 1.0; must lie in \[0, 1\)", {"dropout_p": 1.0}),
        (ValueError, r"dropout_p: -0.1; must lie in \[0, 1\)", {"dropout_p": -0.1}),
        (ValueError, "dropout_p: nan", {"dropout_p": float("nan")}),
        (TypeError, "dropout_p: ", {"dropout_p": "0.1"}),
        (TypeError, "dropout_p: ", {"dropout_p": torch.tensor(0.1)}),
        (TypeError, "dropout_p: ", {"dropout_p": None}),
        (TypeError, "seed: float", {"dropout_p": 0.1, "seed": 1.5}),
        (TypeError, "seed: bool", {"dropout_p": 0.1, "seed": True}),
        (TypeError, "seed: dtype torch.int32", {"dropout_p": 0.1, "seed": torch.zeros(2, dtype=torch.int32)}),
        (ValueError, r"seed: shape \(3,\)", {"dropout_p": 0.1, "seed": torch.zeros(3, dtype=torch.int64)}),
        (ValueError, "seed: on meta", {"dropout_p": 0.1, "seed": torch.zeros(2, dtype=torch.int64, device="meta")}),
    ],
)
def test_bad_dropout(backend: str | None, error: type[Exception], match: str, options: dict[str, Any]) -> None:
    with pytest.raises(error, match=match):
        attention(*make(), backend=backend, **options)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_operator_checks_what_it_is_handed(device: str) -> None:
    q, k, v = (x.detach() for x in make(device=device))
    rules = (0, [], [], None, 0.0, None, None)
    op, backward = torch.ops.flashmsa.attention, torch.ops.flashmsa.attention_backward
    out, lse = op(q, k, v, *rules, 0.0, None, False, True)
    with pytest.raises(ValueError, match=r"rng_state: None with dropout_p 0.5"):
        op(q, k, v, *rules, 0.5, None, False, True)
    with pytest.raises(ValueError, match=r"dropout_p: 1; must lie in \[0, 1\)"):
        op(q, k, v, *rules, 1.0, None, False, True)
    no_dropout = (0.0, None, False)
    with pytest.raises(ValueError, match=r"dout: shape .* does not match the result's"):
        backward(out[..., :8], None, q, k, v, out, lse, *rules, *no_dropout)
    with pytest.raises(TypeError, match=r"dout: dtype torch.float32 does not match q's"):
        backward(out.float(), None, q, k, v, out, lse, *rules, *no_dropout)
    with pytest.raises(TypeError, match=r"dlse: dtype torch.float64"):
        backward(out, lse.double(), q, k, v, out, lse, *rules, *no_dropout)
    with pytest.raises(ValueError, match=r"lse: shape \[1, 4, 5\]; must be \[1, 4, 17\]"):
        backward(out, None, q, k, v, out, lse[..., :5], *rules, *no_dropout)
