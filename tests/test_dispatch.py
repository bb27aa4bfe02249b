"""The choice of a backend, its warnings, checked mode; the composed backend's options; tracing."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import flashmsa
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
    dispatch,
    ops,
    reference,
    torch_backend,
)

MASKS = [
    None,
    Causal(),
    Causal(align="top-left"),
    SlidingWindow(5, 2, align="top-left"),
    PrefixLM(4) & SlidingWindow(9),
    Document([0, 3, 3, 17, 30]),
    Document([0, 3, 3, 17, 30], [0, 9, 10, 20, 40], causal=True),
    Document(torch.tensor([[0, 5, 30], [0, 0, 37]], dtype=torch.int32), causal=True),
]

# Of the lengths and heads that `make` has by default.
BUCKETS = HashBucket(
    torch.arange(6 * 37, dtype=torch.int32).view(1, 6, 37) % 5, torch.arange(80, dtype=torch.int32).view(1, 2, 40) % 7
)
EVERY_KIND = [
    *MASKS,
    DilatedWindow(3, 2, dilation=4),
    BUCKETS,
    BlockSparse(torch.rand(2, 6, 1, 1) < 0.8),
    BlockSparse(torch.ones(1, 1, 1, 1, dtype=torch.bool)) & Document([0, 10, 37], [0, 30, 40]) & PrefixLM(5),
    BlockSparse.from_dense(torch.rand(2, 1, 37, 40) < 0.5),
]


def make(
    batch: int = 2, heads: tuple[int, int] = (6, 2), len_q: int = 37, len_kv: int = 40, dim: int = 16, **kwargs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.randn(batch, heads[0], len_q, dim, **kwargs),
        torch.randn(batch, heads[1], len_kv, dim, **kwargs),
        torch.randn(batch, heads[1], len_kv, dim + 8, **kwargs),
    )


@pytest.fixture
def caught(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[warnings.WarningMessage]]:
    """The warnings of one test, none of them given before."""
    monkeypatch.setattr(dispatch, "_warned", set())
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        yield messages


# ---------------------------------------------------------------------------------------------------------------------
# Choice and warnings


def test_the_list_of_mask_kinds_is_whole() -> None:
    assert {(mask or Dense())._lower()[0] for mask in EVERY_KIND} == set(dispatch.MASK_KINDS)


def test_one_warning_per_reason(caught: list[warnings.WarningMessage]) -> None:
    q, k, v = make()
    for _ in range(3):
        attention(q, k, v, BUCKETS, alibi_slopes=torch.ones(6))
    assert len(caught) == 1 and "alibi_slopes" in str(caught[0].message) and "torch" in str(caught[0].message)
    assert caught[0].filename == __file__, "the warning points at the caller"
    for _ in range(2):
        dispatch.warn_once("another reason")
    assert len(caught) == 2 and "another reason" in str(caught[1].message)


def test_no_warning_where_the_backend_was_chosen_or_named(caught: list[warnings.WarningMessage]) -> None:
    q, k, v = make()
    attention(q, k, v)
    attention(q, k, v, Causal(), softcap=2.0, sinks=torch.zeros(6), alibi_slopes=torch.ones(6))
    attention(q, k, v, BUCKETS, alibi_slopes=torch.ones(6), backend="torch")
    assert not caught


def test_no_warning_before_an_error(caught: list[warnings.WarningMessage]) -> None:
    q, k, v = make()
    with pytest.raises(ValueError, match="k: head_dim 8 does not match q's 16"):
        attention(q, k[..., :8], v, BUCKETS, alibi_slopes=torch.ones(6))
    assert not caught


def test_a_native_backend_asked_for_by_name_names_the_gap() -> None:
    q, k, v = make()
    with pytest.raises(NotImplementedError, match=r"backend: 'cpu' cannot run this call: alibi_slopes: .*HashBucket"):
        attention(q, k, v, BUCKETS, backend="cpu", alibi_slopes=torch.ones(6))
    with pytest.raises(NotImplementedError, match=r"alibi_slopes: .*HashBucket.*torch"):
        kind, ints, tensors = BUCKETS._lower()
        options = (None, 0.0, None, torch.ones(6), 0.0, None, False, False)
        torch.ops.flashmsa.attention(q, k, v, kind, ints, tensors, *options)


def test_backends_of_other_devices() -> None:
    q, k, v = make()
    with pytest.raises(ValueError, match="backend: 'sm90' cannot run this call: q is on cpu; needs a CUDA device"):
        attention(q, k, v, backend="sm90")
    with pytest.raises(TypeError, match="backend: int"):
        attention(q, k, v, backend=1)


@pytest.mark.gpu
def test_backends_of_the_gpu(caught: list[warnings.WarningMessage]) -> None:
    q, k, v = (x.cuda() for x in make())
    with pytest.raises(
        ValueError, match="backend: 'cpu' cannot run this call: q is on cuda:0; needs tensors on the CPU"
    ):
        attention(q, k, v, backend="cpu")
    with pytest.raises(NotImplementedError, match="backend: 'sm90' cannot run this call: no kernel for float32"):
        attention(q, k, v, backend="sm90")
    for _ in range(2):
        attention(q, k, v)
        attention(q.half(), k.half(), v.half())
    assert len(caught) == 1 and "no kernel for float32" in str(caught[0].message)


def test_capability_and_build_are_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a machine lacks, as the dispatcher sees it: the build first, then a driver, then the capability."""
    build = {"cuda": False, "reason": "no nvcc found"}
    monkeypatch.setattr(dispatch._C, "build_info", lambda: build)
    assert dispatch.machine_reason(None) == "flashmsa was built without kernels: no nvcc found"
    build["cuda"] = True
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert dispatch.machine_reason(None) == "no CUDA device or driver was found"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (10, 0))
    assert dispatch.machine_reason(0) == "Some GPU has compute capability 10.0; the kernels need 9.0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    assert dispatch.machine_reason(0) is None


def test_gradients_do_not_change_the_backend() -> None:
    q, k, v = make()
    expected = attention(q, k, v, Causal())
    q.requires_grad_()
    out = attention(q, k, v, Causal())
    assert torch.equal(out, expected) and "FlashmsaAttention" in out.grad_fn.name()
    with pytest.raises(NotImplementedError, match=r"q: requires grad.* out="):
        attention(q, k, v, Causal(), return_lse=True, out=torch.empty(2, 6, 37, 24))


def test_meta_tensors_give_shapes() -> None:
    q, k, v = make(device="meta", dtype=torch.bfloat16)
    for backend in (None, "torch"):
        out, lse = attention(q, k, v, Causal(), return_lse=True, backend=backend)
        assert out.is_meta and out.shape == (2, 6, 37, 24) and out.dtype == torch.bfloat16
        assert lse.shape == (2, 6, 37) and lse.dtype == torch.float32


def test_arguments_that_change_nothing_yet() -> None:
    q, k, v = make()
    expected = attention(q, k, v, Causal())
    assert torch.equal(attention(q, k, v, Causal(), seed=3, deterministic=True, dropout_p=0.0, softcap=0), expected)


# ---------------------------------------------------------------------------------------------------------------------
# Checked mode


def test_checked_mode_as_a_context_manager() -> None:
    assert ops._checked is False
    with flashmsa.check(True):
        assert ops._checked is True
        with flashmsa.check(False):
            assert ops._checked is False
        assert ops._checked is True
    assert ops._checked is False
    with pytest.raises(RuntimeError, match="inside"), flashmsa.check(True):
        raise RuntimeError("inside")
    assert ops._checked is False
    with pytest.raises(TypeError, match="enabled: int"):
        flashmsa.check(1)
    assert ops._checked is False


@pytest.mark.parametrize("backend", [None, "cpu", "torch"])
def test_checked_mode_names_the_value(backend: str | None) -> None:
    q, k, v = make()
    offsets = torch.tensor([0, 5, 37], dtype=torch.int32)
    mask = Document(offsets)
    for bad, message in (
        ([1, 5, 37], r"offsets\[0\]: 1; the first offset must be 0"),
        ([0, 5, 4], r"offsets\[2\]: 4 is below the 5 before it"),
        ([0, 5, 38], r"offsets: the last value 38 lies past q's length 37"),
    ):
        offsets.copy_(torch.tensor(bad))
        attention(q, k, v, mask, backend=backend)
        with flashmsa.check(True), pytest.raises(ValueError, match=message):
            attention(q, k, v, mask, backend=backend)
    offsets.copy_(torch.tensor([0, 5, 37]))
    with flashmsa.check(True):
        attention(q, k, v, mask, backend=backend)
        with pytest.raises(ValueError, match=r"kv_offsets: the last value 41 lies past k's length 40"):
            attention(q, k, v, Document([0, 37], [0, 41]), backend=backend)


@pytest.mark.gpu
def test_checked_mode_leaves_captures_alone() -> None:
    q, k, v = (x.cuda().half() for x in make())
    mask = Document(torch.tensor([0, 5, 37], dtype=torch.int32, device="cuda"))
    attention(q, k, v, mask)
    torch.cuda.synchronize()
    with flashmsa.check(True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attention(q, k, v, mask)
        graph.replay()
        assert torch.equal(out, attention(q, k, v, mask))


# ---------------------------------------------------------------------------------------------------------------------
# The composed backend and its gradients


def options(name: str) -> dict:
    return {
        "none": {},
        "softcap": {"softcap": 1.5},
        "sinks": {"sinks": torch.randn(6)},
        "alibi": {"alibi_slopes": torch.rand(6)},
        "all": {"alibi_slopes": torch.rand(2, 6), "softcap": 2.0, "sinks": torch.randn(6), "scale": -0.3},
        "scale 0": {"scale": 0.0},
    }[name]


OPTIONS = ("none", "softcap", "sinks", "alibi", "all", "scale 0")


@pytest.fixture(params=["one block", "many"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows at once, or 16 at a time."""
    if request.param == "many":
        monkeypatch.setattr(torch_backend, "_BLOCK_ELEMENTS", 1)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize(("len_q", "len_kv"), [(37, 40), (40, 37), (1, 40), (5, 0)])
def test_torch_backend_and_its_gradients(blocks: None, name: str, mask: Mask | None, len_q: int, len_kv: int) -> None:
    """In float64 against the reference and autograd through it."""
    q, k, v = make(len_q=len_q, len_kv=len_kv, dtype=torch.float64)
    given = options(name)
    leaves = [q, k, v, *(x for x in given.values() if isinstance(x, torch.Tensor))]
    for x in leaves:
        x.requires_grad_()
    out, lse = attention(q, k, v, mask, return_lse=True, backend="torch", **given)
    expected, expected_lse = reference(q, k, v, mask, return_lse=True, **given)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse.float(), rtol=1e-6, atol=1e-6)
    weight, weight_lse = torch.randn_like(expected), torch.randn_like(expected_lse)

    def loss(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        return (out * weight).sum() + torch.where(lse == -math.inf, 0.0, lse.double() * weight_lse).sum()

    found = torch.autograd.grad(loss(out, lse), leaves)
    wanted = torch.autograd.grad(loss(expected, expected_lse), leaves, materialize_grads=True)
    for got, want in zip(found, wanted, strict=True):
        # lse goes through float32 on its way, its gradient too.
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_an_empty_row_with_a_sink() -> None:
    q, k, v = make(len_q=40, len_kv=10)
    sinks = torch.randn(6)
    out, lse = attention(q, k, v, Causal(), sinks=sinks, return_lse=True, backend="torch")
    assert not out[:, :, :30].count_nonzero()
    torch.testing.assert_close(lse[:, :, :30], sinks[:, None].expand(2, 6, 30))


@pytest.mark.parametrize("known_finite", [True, False], ids=["finite where it is", "as on a device"])
@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_non_finite_values_reach_the_rows_that_see_them(
    mask: Mask | None, known_finite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not known_finite:
        monkeypatch.setattr(torch_backend, "_known_finite", lambda x: False)
    q, k, v = make()
    k[:, :, 4], v[:, :, 20], v[:, :, 30, 3], k[:, 1, 36] = math.nan, math.nan, math.inf, math.inf
    v[0, 0, 7, 2], v[0, 0, 8, 2] = -math.inf, math.inf
    out, lse = attention(q, k, v, mask, return_lse=True, backend="torch")
    expected, expected_lse = reference(q, k, v, mask, return_lse=True)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("known_finite", [True, False], ids=["finite where it is", "as on a device"])
def test_a_poisoned_tail_leaves_results_and_gradients_bitwise_alone(
    poison: float, known_finite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not known_finite:
        monkeypatch.setattr(torch_backend, "_known_finite", lambda x: False)
    clean = [*make(len_q=40, len_kv=40), torch.randn(2, 6, 40, 24)]

    def run(tail: float) -> list[torch.Tensor]:
        q, k, v, grad = (x.clone() for x in clean)
        for x in (q, k, v, grad):
            x[:, :, 31:] = tail
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out, lse = attention(q, k, v, Document([0, 3, 20, 31], causal=True), return_lse=True, backend="torch")
        return [out, lse, *torch.autograd.grad(out, leaves, grad)]

    for got, want in zip(run(poison), run(0.0), strict=True):
        assert torch.equal(got, want) and (got.dim() == 3 or not got[:, :, 31:].count_nonzero())


def test_a_nan_row_of_q_gives_nan_gradients_to_what_it_sees_alone() -> None:
    q, k, v = make(len_q=40, len_kv=40)
    q[:, :, 5] = math.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention(q, k, v, Document([0, 3, 20, 40]), backend="torch")
    dq, dk, dv = torch.autograd.grad(out.sum(), leaves)
    inside = torch.arange(40)[(torch.arange(40) >= 3) & (torch.arange(40) < 20)]
    outside = [i for i in range(40) if i not in inside.tolist()]
    assert dq[:, :, 5].isnan().all() and not dq[:, :, [i for i in range(40) if i != 5]].isnan().any()
    for x in (dk, dv):
        assert x[:, :, inside].isnan().all() and x[:, :, outside].isfinite().all()


def test_double_backward_raises() -> None:
    """A second derivative is refused when it is taken, not left out of a sum."""
    q, k, v = (x.requires_grad_() for x in make())
    out = attention(q, k, v, backend="torch")
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    assert torch.equal(dq, torch.autograd.grad(out.sum(), q)[0])
    with pytest.raises(NotImplementedError, match="second derivatives are not supported"):
        (out.sum() + dq.square().sum()).backward()


def test_memory_of_the_torch_backend() -> None:
    """Rows taken at once shrink as keys, heads and batch grow; never below 16."""
    assert torch_backend.block_rows(1, 1, 1000) == 512
    assert torch_backend.block_rows(1, 32, 16384) == 32
    assert torch_backend.block_rows(64, 64, 2**20) == 16
    assert torch_backend.block_rows(0, 0, 0) == 512


# ---------------------------------------------------------------------------------------------------------------------
# Tracing (case 31)


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize(
    "mask",
    [
        None,
        Dense(),
        Causal(),
        Document([0, 50, 127], causal=True),
        SlidingWindow(5, 2, keep_first=3, align="top-left"),
        PrefixLM(torch.tensor([3, 90], dtype=torch.int32)) & SlidingWindow(50),
        Document([0, 50, 127]) & SlidingWindow(9, 0),
        DilatedWindow(9, 2, dilation=5),
    ],
    ids=repr,
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_case_31_compile_without_break_twice_at_most(mask: Mask | None, return_lse: bool, device: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    mask = None if mask is None else mask.to(device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        return attention(q, k, v, mask, return_lse=return_lse)

    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for length in (127, 128, 129):
        q, k, v = (x.to(device, dtype) for x in make(len_q=length, len_kv=length))
        torch.testing.assert_close(compiled(q, k, v), call(q, k, v), rtol=0, atol=0)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("with_options", [False, True], ids=["", "options"])
@pytest.mark.parametrize("mask", [mask or Dense() for mask in EVERY_KIND], ids=repr)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_compile_of_every_kind(mask: Mask, with_options: bool, device: str) -> None:
    """One operator without a break, equal to eager, for a mask given and options that are graph inputs; out= too."""
    torch._dynamo.reset()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (x.to(device, dtype) for x in make())
    moved = mask.to(device)
    given = {}
    if with_options:
        given = {"softcap": 2.0, "sinks": torch.randn(6, device=device), "scale": 0.3}
        given |= {} if mask is BUCKETS else {"alibi_slopes": torch.rand(2, 6, device=device)}
    operators: list[str] = []

    def compile_graph(graph: torch.fx.GraphModule, inputs: list) -> torch.fx.GraphModule:
        operators.extend(str(node.target) for node in graph.graph.nodes if "flashmsa" in str(node.target))
        return graph

    def call(q: torch.Tensor, out: torch.Tensor | None, **given) -> tuple[torch.Tensor, torch.Tensor]:
        return attention(q, k, v, moved, return_lse=True, out=out, **given)

    compiled = torch.compile(call, fullgraph=True, backend=compile_graph)
    want = call(q, None, **given)
    for out in (None, torch.empty_like(want[0])):
        for got, expected in zip(compiled(q, out, **given), want, strict=True):
            assert torch.equal(got, expected) and got.stride() == expected.stride()
    assert operators == ["flashmsa.attention.default", "flashmsa.attention.out"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", ["hash", "blocks", "window", "documents"])
def test_masks_made_inside_of_what_is_compiled(kind: str, device: str) -> None:
    """From graph inputs: sorting buckets and listing blocks are operators of the graph."""
    torch._dynamo.reset()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (x.to(device, dtype) for x in make())
    buckets = [x.to(device) for x in (BUCKETS.q_bucket, BUCKETS.kv_bucket)]
    blocks = torch.ones(1, 6, 1, 1, dtype=torch.bool, device=device)
    cuts = [torch.tensor(x, dtype=torch.int32, device=device) for x in ((0, 9, 37), (0, 20, 40))]

    def call(q: torch.Tensor) -> torch.Tensor:
        if kind == "hash":
            mask = HashBucket(*buckets, causal=True)
        elif kind == "blocks":
            mask = BlockSparse(blocks, capacity=6) & Causal()
        elif kind == "documents":
            mask = Document(*cuts, causal=True) & SlidingWindow(9)
        else:
            mask = SlidingWindow(9, 3, keep_first=2) & PrefixLM(4)
        return attention(q, k, v, mask)

    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(q), call(q))


@pytest.mark.parametrize("mask", [mask or Dense() for mask in EVERY_KIND], ids=repr)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_autocast_of_every_kind(mask: Mask, device: str) -> None:
    """q, k and v are cast; sinks and slopes stay what they are. Named and chosen backends do the same."""
    q, k, v = (x.to(device) for x in make())
    mask = mask.to(device)
    given = {"softcap": 2.0, "sinks": torch.randn(6, device=device)}
    given |= {} if isinstance(mask, HashBucket) else {"alibi_slopes": torch.rand(6, device=device)}
    want = attention(*(x.bfloat16() for x in (q, k, v)), mask, **given)
    for backend in (None, "cpu" if device == "cpu" else "sm90"):
        with torch.autocast(device, torch.bfloat16):
            out = attention(q, k, v, mask, backend=backend, **given)
        assert out.dtype == torch.bfloat16 and torch.equal(out, want)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_compile_with_the_default_backend(device: str) -> None:
    """A mask made inside from a graph input, an out= argument, arithmetic around."""
    torch._dynamo.reset()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (x.to(device, dtype) for x in make(len_q=40, len_kv=40))
    offsets = torch.tensor([0, 3, 38], dtype=torch.int32, device=device)

    def call(q: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        first = attention(q, k, v, Document(offsets, causal=True))
        return first + attention(q, k, v, Causal(), out=out)

    out = torch.empty(2, 6, 40, 24, device=device, dtype=dtype)
    got = torch.compile(call, fullgraph=True)(q, offsets, out)
    expected_out = attention(q, k, v, Causal())
    assert torch.equal(out, expected_out)
    torch.testing.assert_close(got, attention(q, k, v, Document(offsets, causal=True)) + expected_out)


def test_compile_of_the_torch_backend_with_gradients(caught: list[warnings.WarningMessage]) -> None:
    torch._dynamo.reset()
    slopes = torch.rand(6)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, BUCKETS, alibi_slopes=slopes)

    q, k, v = (x.requires_grad_() for x in make())
    got = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v)
    assert sum("alibi_slopes" in str(x.message) for x in caught) == 1, "a traced call warns as well"
    expected = call(q, k, v)
    torch.testing.assert_close(got, expected)
    grad = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad(got, (q, k, v), grad), torch.autograd.grad(expected, (q, k, v), grad), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("eager", torch.bfloat16),
        ("aot_eager", torch.float32),
        ("aot_eager", torch.float64),
        ("inductor", torch.bfloat16),
    ],
)
@pytest.mark.parametrize("mask", [None, Document([0, 3, 17, 30], causal=True)], ids=repr)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_compile_of_the_torch_backend_equals_eager(
    mask: Mask | None, backend: str, dtype: torch.dtype, device: str
) -> None:
    """Results, gradients and all strides, for tensors of several layouts, under autocast too."""
    torch._dynamo.reset()
    mask = None if mask is None else mask.to(device)
    packed = torch.randn(2, 40, 10, 16, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
    shared = torch.randn(2, 1, 40, 24, device=device, dtype=dtype, requires_grad=True)
    sinks = torch.randn(6, device=device, requires_grad=True)
    slopes = torch.rand(2, 6, device=device, requires_grad=True)
    leaves = [packed, shared, sinks, slopes]

    def call(packed: torch.Tensor, shared: torch.Tensor, **given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = packed[:, :6], packed[:, 6:8], shared.expand(2, 2, 40, 24)
        return attention(q * 2, k, v, mask, return_lse=True, backend="torch", softcap=2.0, **given)

    compiled = torch.compile(call, fullgraph=True, backend=backend)
    for autocast in (False, True):
        results = []
        for function in (compiled, call):
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                result = function(packed, shared, sinks=sinks, alibi_slopes=slopes)
                torch.manual_seed(0)
                weights = [torch.randn_like(x) for x in result]
                results.append([*result, *torch.autograd.grad(result, leaves, weights)])
        for got, want in zip(*results, strict=True):
            assert torch.equal(got, want) and got.stride() == want.stride() and got.dtype == want.dtype


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("mask", [Dense(), Causal(), Document([0, 50, 127], causal=True)], ids=repr)
def test_compile_of_the_torch_backend_shows_one_operator_for_all_lengths(mask: Mask, requires_grad: bool) -> None:
    """dynamic=True: what the first length compiled serves the others, whatever their number of blocks of rows."""
    torch._dynamo.reset()
    operators: list[list[str]] = []

    def compile_graph(graph: torch.fx.GraphModule, inputs: list) -> torch.fx.GraphModule:
        names = [str(node.target) for node in graph.graph.nodes]
        operators.append([x for x in names if x.startswith("flashmsa")])
        return graph

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return attention(q, k, v, mask, return_lse=True, backend="torch")

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=compile_graph)
    after_first = None
    for length in (127, 128, 700):
        q, k, v = (x.requires_grad_(requires_grad) for x in make(len_q=length, len_kv=length + 1))
        for got, want in zip(compiled(q, k, v), call(q, k, v), strict=True):
            assert torch.equal(got, want) and got.stride() == want.stride()
        # NOTE: torch may hand the first graph over more than once, when it looks at it again for symbolic numbers.
        after_first = after_first or len(operators)
    assert len(operators) == after_first and all(x == ["flashmsa.composed.default"] for x in operators)


def test_export_of_the_torch_backend() -> None:
    class Attend(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return attention(q, k, v, Causal(), backend="torch")

    q, k, v = make()
    program = torch.export.export(Attend(), (q, k, v), strict=False)
    assert [str(x.target) for x in program.graph.nodes if "flashmsa" in str(x.target)] == ["flashmsa.composed.default"]
    assert torch.equal(program.module()(q, k, v), Attend()(q, k, v))


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("strict", [False, True])
def test_export_with_lengths_that_vary(backend: str, strict: bool) -> None:
    """No bound has to be given for them."""

    class Attend(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            return attention(q, k, v, Document(offsets, causal=True), backend=backend)

    q, k, v = (x.detach() for x in make(len_q=20, len_kv=20))
    length, count = torch.export.Dim("length"), torch.export.Dim("count")
    shapes = ({2: length}, {2: length}, {2: length}, {0: count})
    offsets = torch.tensor([0, 5, 20], dtype=torch.int32)
    program = torch.export.export(Attend(), (q, k, v, offsets), dynamic_shapes=shapes, strict=strict)
    for length, cuts in ((20, [0, 5, 20]), (33, [0, 1, 1, 30]), (7, [0, 7])):
        inputs = (*(x.detach() for x in make(len_q=length, len_kv=length)), torch.tensor(cuts, dtype=torch.int32))
        assert torch.equal(program.module()(*inputs), Attend()(*inputs))


def test_second_derivatives_through_a_compiled_call_raise() -> None:
    torch._dynamo.reset()
    q, k, v = (x.requires_grad_() for x in make())
    out = torch.compile(lambda *x: attention(*x, backend="torch"), fullgraph=True, backend="eager")(q, k, v)
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives are not supported"):
        (out.sum() + dq.square().sum()).backward()


def test_compile_never_detaches() -> None:
    torch._dynamo.reset()
    q, k, v = (x.requires_grad_() for x in make())
    out = torch.compile(lambda *x: attention(*x), fullgraph=True, backend="aot_eager")(q, k, v)
    for got, want in zip(
        torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(attention(q, k, v).sum(), (q, k, v)), strict=True
    ):
        assert torch.equal(got, want)


@pytest.mark.parametrize("mask", [mask or Dense() for mask in EVERY_KIND], ids=repr)
@pytest.mark.parametrize("with_options", [False, True], ids=["", "options"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_opcheck(mask: Mask, with_options: bool, device: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (x.to(device, dtype) for x in make())
    slopes = None if mask is BUCKETS else torch.rand(2, 6, device=device)
    given = (-0.3, 2.0, torch.randn(6, device=device), slopes) if with_options else (None, 0.0, None, None)
    args = (q, k, v, *lowered(mask, device), *given, 0.0, None, False, with_options)
    torch.library.opcheck(torch.ops.flashmsa.attention.default, args)
    out = torch.empty(2, 6, 37, 24, device=device, dtype=dtype)
    torch.library.opcheck(torch.ops.flashmsa.attention.out, args, {"out": out})


def lowered(mask: Mask, device: str) -> tuple[int, list[int], list[torch.Tensor]]:
    kind, ints, tensors = mask.to(device)._lower()
    return kind, list(ints), list(tensors)


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("mask", [Dense(), Causal(), Document([0, 5, 30], causal=True)], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_opcheck_of_the_composed_operators(mask: Mask, dtype: torch.dtype, device: str) -> None:
    q, k, v = (transposed(x.to(device, dtype)) for x in make())
    sinks, slopes = torch.randn(6, device=device), torch.rand(2, 6, device=device)
    rules = lowered(mask, device)
    state = torch.tensor([3, 4], device=device)
    out, lse = torch.ops.flashmsa.composed(q, k, v, *rules, None, 2.0, sinks, slopes, 0.0, None)
    gradients = (torch.randn_like(out), torch.randn_like(lse))
    for given in ((None, 0.0, None, None, 0.0, None), (-0.3, 2.0, sinks, slopes, 0.1, state)):
        backward = (*gradients, out, lse, q, k, v, *rules, *given)
        torch.library.opcheck(torch.ops.flashmsa.composed_backward.default, backward)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        is_real = [isinstance(x, torch.Tensor) and x.is_floating_point() for x in given]
        options = [x.detach().requires_grad_() if real else x for x, real in zip(given, is_real, strict=True)]
        torch.library.opcheck(torch.ops.flashmsa.composed.default, (*leaves, *rules, *options))
