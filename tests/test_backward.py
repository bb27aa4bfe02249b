"""Gradients of attention(): every mask, head dim, option, layout and way to call it, against float64 autograd."""

from __future__ import annotations

import math

import pytest
import torch
from gradients import (
    Gradients,
    check_gradients,
    composed_gradients,
    expected_gradients,
    grad_like,
    magnitudes,
    run_and_check_backward,
    run_backward,
)
from helpers import (
    ALL_FAMILIES,
    CAUSAL,
    DENSE,
    NATIVE_ONE_EACH,
    ONE_EACH,
    ONE_OF_EACH,
    PLAIN,
    MaskCase,
    Options,
    Target,
    by_family,
    document,
    largest,
    make_qkv,
    mask_for,
    poisoned_allocations,
    targets,
)

import flashmsa

ALL = pytest.mark.parametrize("target", targets(auto=True))
FEW = pytest.mark.parametrize("target", targets(auto=True, dtypes=(torch.float32, torch.bfloat16)))
HALVES = [pytest.param(torch.bfloat16, id="bf16"), pytest.param(torch.float16, id="fp16")]
DIMS = [(d, d) for d in (8, 40, 64, 72, 96, 128, 160, 192, 256)] + [(192, 128)]
OPTIONS = ("softcap", "sinks", "alibi", "alibi by batch", "all")


def options_for(name: str, device: str, heads: int, batch: int, family: str = "") -> Options | None:
    """None: a combination that native backends lack, ALiBi with sorted rows."""
    sinks = torch.randn(heads, device=device)
    slopes = torch.rand(heads, device=device)
    if "hash" in family and ("alibi" in name or name == "all"):
        return None
    return {
        "softcap": Options(softcap=1.5),
        "sinks": Options(sinks=sinks),
        "alibi": Options(slopes=slopes),
        "alibi by batch": Options(slopes=torch.rand(batch, heads, device=device)),
        "all": Options(softcap=2.0, sinks=sinks, slopes=slopes),
    }[name]


def assert_same(target: Target, found: Gradients, wanted: Gradients, note: object = "") -> None:
    """The same bits of a native backend, whose arithmetic does not change; torch may choose another kernel."""
    for name, want in wanted.items():
        if target.native:
            assert torch.equal(found[name], want), f"{note}: {name} differs"


# ---------------------------------------------------------------------------------------------------------------------
# The oracle itself


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_reference_by_other_means(family: str) -> None:
    """Autograd through flashmsa.reference against autograd through plain operators and the mask's own definition."""
    target = Target("torch", "cpu", torch.float64)
    for options in (PLAIN, Options(softcap=2.0, sinks=torch.randn(4), slopes=torch.rand(4))):
        q, k, v = make_qkv(target, 2, (4, 2), 40, 70, 16, 24)
        mask = mask_for(family, 2, 40, 70, heads=(4, 2))
        d_out, d_lse = grad_like(q, v)
        found = expected_gradients(q, k, v, mask, d_out, d_lse, options)
        wanted = composed_gradients(q, k, v, mask, d_out, d_lse, options)
        sums = magnitudes((q, k, v, d_out), mask, d_lse, options, None, 1.0)
        for name in ("out", "dq", "dk", "dv"):
            limit = 1000 * torch.finfo(torch.float64).eps * largest(sums[name])
            assert largest(found[name] - wanted[name]) <= limit, name


# ---------------------------------------------------------------------------------------------------------------------
# Masks, head dims, heads, lengths


@pytest.mark.parametrize(("target", "family"), by_family(targets(auto=True), ALL_FAMILIES))
def test_every_mask(target: Target, family: str) -> None:
    """Lengths and head dims that fill no tile; grouped heads."""
    for len_q, len_kv in ((90, 150), (150, 90)):
        q, k, v = make_qkv(target, 2, (4, 2), len_q, len_kv, 40, 24)
        run_and_check_backward(target, q, k, v, mask_for(family, 2, len_q, len_kv, heads=(4, 2)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dims", DIMS, ids=lambda x: f"{x[0]}-{x[1]}")
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_every_kernel(dtype: torch.dtype, dims: tuple[int, int], family: str) -> None:
    """Every mask, head dim and dtype, heads grouped and not."""
    target = Target("sm90", "cuda", dtype)
    for heads, lengths in (((4, 2), (257, 190)), ((2, 2), (130, 300))):
        q, k, v = make_qkv(target, 2, heads, *lengths, *dims)
        run_and_check_backward(target, q, k, v, mask_for(family, 2, *lengths, heads=heads))


@pytest.mark.parametrize("target", targets(auto=True, composed=False))
@pytest.mark.parametrize("dim", range(8, 257, 8))
def test_head_dim(target: Target, dim: int) -> None:
    q, k, v = make_qkv(target, 1, (2, 1), 65, 131, dim)
    for family in ("causal", "document-cross"):
        run_and_check_backward(target, q, k, v, mask_for(family, 1, 65, 131))


@ALL
@pytest.mark.parametrize(
    "dims", [(192, 128), (64, 128), (128, 64), (8, 256), (256, 8), (72, 40), (40, 72), (136, 16), (56, 200)], ids=str
)
def test_value_dim_differs(target: Target, dims: tuple[int, int]) -> None:
    q, k, v = make_qkv(target, 1, (4, 2), 77, 130, *dims)
    for family in ("dense", "document-cross-causal"):
        run_and_check_backward(target, q, k, v, mask_for(family, 1, 77, 130))


LENGTHS = [(1, 257), (129, 1), (15, 128), (63, 65), (64, 64), (65, 63), (127, 129), (128, 128), (129, 127), (193, 192)]


@pytest.mark.parametrize(
    ("target", "family"), by_family(targets(composed=False, dtypes=(torch.float32, torch.bfloat16)))
)
@pytest.mark.parametrize("lengths", LENGTHS, ids="{0[0]}x{0[1]}".format)
def test_lengths(target: Target, lengths: tuple[int, int], family: str) -> None:
    # Of one row or key each, so many heads that the rule's yardstick is no draw of chance.
    heads = (2, 1) if min(lengths) > 1 else (32, 32)
    q, k, v = make_qkv(target, 2, heads, *lengths, 64)
    run_and_check_backward(target, q, k, v, mask_for(family, 2, *lengths))


@FEW
@pytest.mark.parametrize("heads", [(6, 2), (6, 3), (8, 1), (5, 5), (21, 7)], ids="{0[0]}q{0[1]}kv".format)
@pytest.mark.parametrize(
    "family", ["causal", "document-batched-causal", "dilated", "hash-heads-shared-keys-causal", "hash-kv-heads"]
)
def test_grouped_heads(target: Target, heads: tuple[int, int], family: str) -> None:
    q, k, v = make_qkv(target, 3, heads, 33, 70, 32)
    run_and_check_backward(target, q, k, v, mask_for(family, 3, 33, 70, heads=heads))


@FEW
@pytest.mark.parametrize("causal", [False, True])
def test_many_documents(target: Target, causal: bool) -> None:
    """More documents than rows of a tile, most of them a token or two long, some empty."""
    cuts = [0]
    for n in range(400):
        cuts.append(cuts[-1] + (0, 1, 2, 1, 0, 3)[n % 6])
    q, k, v = make_qkv(target, 1, (2, 1), cuts[-1], cuts[-1], 64)
    run_and_check_backward(target, q, k, v, document(*cuts, causal=causal))


@FEW
@pytest.mark.parametrize("scale", [1.0, 0.01, 0.0, -0.125, 1e-30])
def test_scale(target: Target, scale: float) -> None:
    q, k, v = make_qkv(target, 1, (2, 1), 90, 140, 64)
    for family in ("causal", "document-short-causal"):
        run_and_check_backward(target, q, k, v, mask_for(family, 1, 90, 140), scale=scale)


# ---------------------------------------------------------------------------------------------------------------------
# Options


@FEW
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_options_with_every_mask(target: Target, family: str) -> None:
    for name in OPTIONS if target.device == "cuda" else OPTIONS[::2]:
        options = options_for(name, target.device, 4, 2, family)
        if options is not None:
            q, k, v = make_qkv(target, 2, (4, 2), 90, 130, 40, 24)
            mask = mask_for(family, 2, 90, 130, heads=(4, 2))
            run_and_check_backward(target, q, k, v, mask, options=options, note=f"{mask} {name}")


@FEW
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dims", DIMS[::3] + DIMS[-2:], ids=lambda x: f"{x[0]}-{x[1]}")
def test_options_with_head_dims(target: Target, name: str, dims: tuple[int, int]) -> None:
    q, k, v = make_qkv(target, 2, (4, 2), 70, 150, *dims)
    for mask in (DENSE, CAUSAL, document(0, 40, 70, kv=(0, 100, 150), causal=True)):
        run_and_check_backward(target, q, k, v, mask, options=options_for(name, target.device, 4, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_options_of_every_kernel(dtype: torch.dtype, name: str, dim: int, family: str) -> None:
    target = Target("sm90", "cuda", dtype)
    options = options_for(name, "cuda", 4, 2, family)
    if options is not None:
        q, k, v = make_qkv(target, 2, (4, 2), 257, 300, dim)
        run_and_check_backward(target, q, k, v, mask_for(family, 2, 257, 300, heads=(4, 2)), options=options)


@FEW
@pytest.mark.parametrize("family", ["dense", "causal", "document-short", "window"])
def test_sinks_of_rows_without_keys(target: Target, family: str) -> None:
    """Their lse is the sink: dlse goes to it whole, and dO not at all, NaN included."""
    q, k, v = make_qkv(target, 2, (4, 2), 150, 40, 64)
    mask = mask_for(family, 2, 150, 40)
    options = Options(sinks=torch.randn(4, device=q.device))
    d_out, d_lse = grad_like(q, v)
    empty = ~mask.allowed(150, 40, device=q.device).any(-1)
    d_out = d_out.masked_fill(empty[:, None, :, None], math.nan)
    found = run_backward(target, q, k, v, mask, d_out, d_lse, options)
    check_gradients(found, q, k, v, mask, d_out, d_lse, options)
    assert not found["dq"].masked_fill(~empty[:, None, :, None], 0.0).count_nonzero()


@FEW
def test_slopes_that_require_grad(target: Target) -> None:
    """The composed backend has their gradient; a native one says that it has not."""
    q, k, v = make_qkv(target, 1, 2, 30, 30, 16)
    slopes = torch.rand(2, device=q.device, requires_grad=True)

    def call() -> torch.Tensor:
        return flashmsa.attention(q, k, v, alibi_slopes=slopes, backend=target.backend)

    if target.native:
        with pytest.raises(NotImplementedError, match="alibi_slopes"):
            call()
    elif target.backend == "torch":
        d_out = torch.randn_like(q)
        (found,) = torch.autograd.grad(call(), slopes, d_out)
        wide = [x.double() for x in (q, k, v)]
        (wanted,) = torch.autograd.grad(flashmsa.reference(*wide, alibi_slopes=slopes), slopes, d_out.double())
        # 30 rows of 30 pairs of distance up to 29: that many roundings of the dtype.
        assert largest(found - wanted) <= 30 * torch.finfo(target.dtype).eps * max(1.0, largest(wanted))


# ---------------------------------------------------------------------------------------------------------------------
# What is asked for


@ALL
@pytest.mark.parametrize("with_lse", [False, True])
def test_with_and_without_the_gradient_of_lse(target: Target, with_lse: bool) -> None:
    q, k, v = make_qkv(target, 2, (4, 2), 90, 130, 64, 40)
    for family in ("causal", "hash", "dilated", "blocks"):
        run_and_check_backward(target, q, k, v, mask_for(family, 2, 90, 130), with_lse=with_lse)


@pytest.mark.parametrize("target", ONE_EACH)
@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_gradient_of_lse_alone(target: Target, family: str) -> None:
    q, k, v = make_qkv(target, 2, (4, 2), 90, 130, 64, 40)
    mask = mask_for(family, 2, 90, 130)
    _, d_lse = grad_like(q, v)
    nothing = torch.zeros(2, 4, 90, 40, device=q.device, dtype=q.dtype)
    q_, k_ = (x.clone().requires_grad_() for x in (q, k))
    _, lse = flashmsa.attention(q_, k_, v, mask=mask.build(q.device), backend=target.backend, return_lse=True)
    dq, dk = torch.autograd.grad(lse, (q_, k_), d_lse)
    found = run_backward(target, q, k, v, mask, nothing, d_lse)
    assert_same(target, {"dq": dq, "dk": dk}, {"dq": found["dq"], "dk": found["dk"]})
    check_gradients(found, q, k, v, mask, nothing, d_lse)
    assert not found["dv"].count_nonzero()


@pytest.mark.parametrize("target", ONE_EACH)
@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_some_inputs_alone(target: Target, family: str) -> None:
    """Whatever requires grad, it gets the gradient that it gets with all the others."""
    inputs = make_qkv(target, 2, (4, 2), 70, 90, 64)
    sinks = torch.randn(4, device=target.device)
    mask = mask_for(family, 2, 70, 90)
    d_out, _ = grad_like(inputs[0], inputs[2])
    whole = run_backward(target, *inputs, mask, d_out, None, Options(sinks=sinks))
    for names in (("dq",), ("dk",), ("dv",), ("dsinks",), ("dq", "dv"), ("dk", "dsinks")):
        leaves = dict(zip(("dq", "dk", "dv", "dsinks"), (x.clone() for x in (*inputs, sinks)), strict=True))
        for name in names:
            leaves[name].requires_grad_()
        q, k, v, given = leaves.values()
        out = flashmsa.attention(q, k, v, mask=mask.build(q.device), sinks=given, backend=target.backend)
        found = torch.autograd.grad(out, [leaves[name] for name in names], d_out)
        assert_same(target, dict(zip(names, found, strict=True)), {name: whole[name] for name in names}, names)
        for name, got in zip(names, found, strict=True):
            torch.testing.assert_close(got, whole[name])


@pytest.mark.parametrize("target", ONE_EACH)
def test_no_gradient_where_none_is_wanted(target: Target) -> None:
    q, k, v = (x.requires_grad_() for x in make_qkv(target, 1, 2, 40, 40, 64))
    with torch.no_grad():
        assert not flashmsa.attention(q, k, v, backend=target.backend).requires_grad
    with torch.inference_mode():
        assert not flashmsa.attention(q, k, v, backend=target.backend).requires_grad
    assert not flashmsa.attention(*(x.detach() for x in (q, k, v)), backend=target.backend).requires_grad
    out, lse = flashmsa.attention(q, k, v, backend=target.backend, return_lse=True)
    assert out.requires_grad and lse.requires_grad


@pytest.mark.parametrize("target", ONE_EACH)
@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_the_forward_result_is_that_without_grad(target: Target, family: str) -> None:
    inputs = make_qkv(target, 2, (4, 2), 70, 90, 64)
    mask = mask_for(family, 2, 70, 90).build(target.device)
    plain = flashmsa.attention(*inputs, mask=mask, backend=target.backend, return_lse=True)
    leaves = [x.clone().requires_grad_() for x in inputs]
    for got, want in zip(
        flashmsa.attention(*leaves, mask=mask, backend=target.backend, return_lse=True), plain, strict=True
    ):
        assert torch.equal(got, want) and got.stride() == want.stride()


@pytest.mark.parametrize("target", ONE_EACH)
def test_double_backward_raises(target: Target) -> None:
    q, k, v = (x.requires_grad_() for x in make_qkv(target, 1, 2, 40, 40, 64))
    out = flashmsa.attention(q, k, v, backend=target.backend)
    (dq,) = torch.autograd.grad(out.float().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"second derivatives|[dD]ouble backward|twice"):
        (out.float().sum() + dq.float().square().sum()).backward()


@pytest.mark.parametrize("target", ONE_EACH)
def test_backward_twice_through_one_graph(target: Target) -> None:
    """retain_graph: the same gradients again; without it torch's own error."""
    q, k, v = (x.requires_grad_() for x in make_qkv(target, 1, 2, 40, 40, 64))
    out = flashmsa.attention(q, k, v, backend=target.backend).float().sum()
    first = torch.autograd.grad(out, (q, k, v), retain_graph=True)
    again = torch.autograd.grad(out, (q, k, v))
    assert all(map(torch.equal, first, again))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, (q, k, v))


@pytest.mark.parametrize("target", ONE_EACH)
@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_inputs_changed_in_place_are_noticed(target: Target, name: str) -> None:
    leaves = [x.requires_grad_() for x in make_qkv(target, 1, 2, 40, 40, 64)]
    q, k, v = (x * 1 for x in leaves)
    out = flashmsa.attention(q, k, v, backend=target.backend)
    with torch.no_grad():
        {"q": q, "k": k, "v": v, "out": out}[name].zero_()
    # A backend may have kept a copy of its own of the output alone.
    if name == "out" and target.backend == "torch":
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), leaves)


# ---------------------------------------------------------------------------------------------------------------------
# Layouts (case 28)


@ALL
@pytest.mark.parametrize("mask", [DENSE, CAUSAL, document(0, 30, 70)], ids=str)
def test_case_28_layout_of_the_gradient(target: Target, mask: MaskCase) -> None:
    """Expanded, transposed, sliced or misaligned: as contiguous."""
    q, k, v = make_qkv(target, 2, (4, 2), 70, 70, 64)
    d_out, d_lse = grad_like(q, v)
    plain = run_backward(target, q, k, v, mask, d_out, d_lse)
    check_gradients(plain, q, k, v, mask, d_out, d_lse)
    wide = torch.full((*d_out.shape[:3], 2 * 64 + 1), math.nan, dtype=q.dtype, device=q.device)
    wide[..., 1:65] = d_out
    second = torch.full((*d_out.shape[:3], 128), math.nan, dtype=q.dtype, device=q.device)
    second[..., ::2] = d_out
    layouts = {
        "(B, S, H, D)": d_out.transpose(1, 2).contiguous().transpose(1, 2),
        "length last": d_out.mT.contiguous().mT,
        "sliced, odd stride and base": wide[..., 1:65],
        "last stride 2": second[..., ::2],
    }
    for name, layout in layouts.items():
        assert torch.equal(layout, d_out)
        strided_lse = d_lse.mT.contiguous().mT
        found = run_backward(target, q, k, v, mask, layout, strided_lse)
        assert_same(target, found, plain, name)
        check_gradients(found, q, k, v, mask, d_out, d_lse, note=name)


@ALL
@pytest.mark.parametrize("mask", [DENSE, CAUSAL, document(0, 30, 70)], ids=str)
def test_case_28_expanded_gradient(target: Target, mask: MaskCase) -> None:
    """out.sum().backward(), and a mean over the heads."""
    q, k, v = make_qkv(target, 2, (4, 2), 70, 70, 64)
    for reduce in (lambda x: x.sum(), lambda x: x.sum(1).square().sum()):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = flashmsa.attention(*leaves, mask=mask.build(q.device), backend=target.backend)
        out.retain_grad()
        reduce(out).backward()
        given = out.grad.contiguous()
        wanted = run_backward(target, q, k, v, mask, given)
        found = dict(zip(("dq", "dk", "dv"), (x.grad for x in leaves), strict=True))
        assert_same(target, found, {name: wanted[name] for name in found})
        check_gradients({**wanted, **found}, q, k, v, mask, given)


def as_bshd(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def with_strides(x: torch.Tensor, pad: int) -> torch.Tensor:
    base = torch.full((*x.shape[:3], x.shape[3] + pad), math.nan, dtype=x.dtype, device=x.device)
    base[..., : x.shape[3]] = x
    return base[..., : x.shape[3]]


LAYOUTS = {
    "bshd": as_bshd,
    "row stride + 8": lambda x: with_strides(x, 8),
    "row stride + 1": lambda x: with_strides(x, 1),
    "last stride 2": lambda x: torch.stack([x, torch.full_like(x, math.nan)], -1).flatten(-2)[..., ::2],
    "head_dim before length": lambda x: x.mT.contiguous().mT,
}


@FEW
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["causal", "document-batched", "hash", "dilated"])
def test_layout_of_inputs(target: Target, layout: str, family: str) -> None:
    q, k, v = make_qkv(target, 2, (4, 2), 70, 90, 64, 40)
    mask = mask_for(family, 2, 70, 90)
    d_out, d_lse = grad_like(q, v)
    plain = run_backward(target, q, k, v, mask, d_out, d_lse)
    views = [LAYOUTS[layout](x) for x in (q, k, v)]
    found = run_backward(target, *views, mask, d_out, d_lse)
    assert_same(target, found, plain, layout)
    check_gradients(found, q, k, v, mask, d_out, d_lse, note=layout)


@FEW
def test_packed_projection(target: Target) -> None:
    """One gradient for a packed (B, S, (Hq + 2 Hkv) D), whose slices q, k and v are."""
    batch, length, heads_q, heads_kv, dim = 2, 130, 4, 2, 64
    widths = [heads_q * dim, heads_kv * dim, heads_kv * dim]
    packed = torch.randn(batch, length, sum(widths), device=target.device).to(target.dtype).requires_grad_()
    q, k, v = (part.unflatten(-1, (-1, dim)).transpose(1, 2) for part in packed.split(widths, dim=-1))
    mask = document(0, 50, 130, causal=True)
    out = flashmsa.attention(q, k, v, mask=mask.build(q.device), backend=target.backend)
    d_out, _ = grad_like(q, v)
    (found,) = torch.autograd.grad(out, packed, d_out)
    wanted = run_backward(target, *(x.detach().contiguous() for x in (q, k, v)), mask, d_out)
    joined = torch.cat([wanted[n].transpose(1, 2).flatten(2) for n in ("dq", "dk", "dv")], -1)
    assert_same(target, {"packed": found}, {"packed": joined})
    torch.testing.assert_close(found, joined)


@FEW
@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)], ids=["batches", "heads", "both"])
def test_expanded_inputs(target: Target, dims: tuple[int, ...]) -> None:
    """Keys and values of stride 0: the gradient of each copy, which autograd then adds up."""
    q, k, v = make_qkv(target, 3, 4, 70, 70, 64)
    for d in dims:
        k, v = (x.narrow(d, 0, 1) for x in (k, v))
    d_out, _ = grad_like(q, v)
    whole = run_backward(target, q, *(x.expand(q.shape).contiguous() for x in (k, v)), CAUSAL, d_out)
    leaves = [x.clone().requires_grad_() for x in (k, v)]
    out = flashmsa.attention(q, *(x.expand(q.shape) for x in leaves), flashmsa.Causal(), backend=target.backend)
    for got, name in zip(torch.autograd.grad(out, leaves, d_out), ("dk", "dv"), strict=True):
        wanted = whole[name].float().sum(dims, keepdim=True)
        # The sum of 12 gradients at most, rounded once more in the dtype or in each addition.
        assert largest(got.float() - wanted) <= 12 * torch.finfo(q.dtype).eps * largest(whole[name]) * len(dims) * 4


@ALL
@pytest.mark.parametrize("family", ALL_FAMILIES[::2])
def test_nothing_stays_unwritten(target: Target, family: str) -> None:
    """Gradients hold no leftover of the memory that they were given: fresh memory is NaN."""
    q, k, v = make_qkv(target, 2, (4, 2), 100, 90, 72, 40)
    mask = mask_for(family, 2, 100, 90, heads=(4, 2))
    d_out, d_lse = grad_like(q, v)
    options = Options(sinks=torch.randn(4, device=q.device))
    with poisoned_allocations():
        found = run_backward(target, q, k, v, mask, d_out, d_lse, options)
    check_gradients(found, q, k, v, mask, d_out, d_lse, options)


# ---------------------------------------------------------------------------------------------------------------------
# The same bits


@pytest.mark.parametrize("target", NATIVE_ONE_EACH)
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_deterministic_by_argument_and_by_torch(target: Target, family: str) -> None:
    """deterministic=True, and torch.use_deterministic_algorithms, give the same bits again and again."""
    q, k, v = make_qkv(target, 2, (4, 2), 300, 260, 64)
    mask = mask_for(family, 2, 300, 260, heads=(4, 2))
    d_out, d_lse = grad_like(q, v)
    first = run_backward(target, q, k, v, mask, d_out, d_lse, deterministic=True)
    check_gradients(first, q, k, v, mask, d_out, d_lse)
    for _ in range(5):
        assert_same(target, run_backward(target, q, k, v, mask, d_out, d_lse, deterministic=True), first)
    with poisoned_allocations():
        assert_same(target, run_backward(target, q, k, v, mask, d_out, d_lse), first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_number_of_threads(dtype: torch.dtype, family: str) -> None:
    """The CPU backend gives the same bits however many threads share the work."""
    target = Target("cpu", "cpu", dtype)
    q, k, v = make_qkv(target, 2, (6, 3), 130, 150, 40)
    mask = mask_for(family, 2, 130, 150, heads=(6, 3))
    d_out, d_lse = grad_like(q, v)
    results = []
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        try:
            results.append(run_backward(target, q, k, v, mask, d_out, d_lse))
        finally:
            torch.set_num_threads(1)
    for found in results[1:]:
        assert_same(target, found, results[0])


# ---------------------------------------------------------------------------------------------------------------------
# Ways to call it


@pytest.mark.parametrize("target", ONE_EACH)
@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_compiled(target: Target, family: str) -> None:
    """One graph without a break; the gradients of the eager call."""
    torch._dynamo.reset()
    inputs = make_qkv(target, 2, (4, 2), 70, 90, 64)
    mask = mask_for(family, 2, 70, 90).build(target.device)
    d_out, d_lse = grad_like(inputs[0], inputs[2])

    def call(q, k, v):
        return flashmsa.attention(q, k, v, mask=mask, backend=target.backend, return_lse=True)

    results = []
    for each in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        leaves = [x.clone().requires_grad_() for x in inputs]
        results.append(torch.autograd.grad(each(*leaves), leaves, (d_out, d_lse)))
    assert all(map(torch.equal, *results))
    torch._dynamo.reset()


@pytest.mark.parametrize("target", ONE_EACH)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed(target: Target, use_reentrant: bool) -> None:
    inputs = make_qkv(target, 2, (4, 2), 70, 70, 64)
    d_out, _ = grad_like(inputs[0], inputs[2])

    def call(q, k, v):
        return flashmsa.attention(q * 2, k, v, mask=flashmsa.Causal(), backend=target.backend, deterministic=True)

    results = []
    for checkpointed in (False, True):
        leaves = [x.clone().requires_grad_() for x in inputs]
        if checkpointed:
            out = torch.utils.checkpoint.checkpoint(call, *leaves, use_reentrant=use_reentrant)
        else:
            out = call(*leaves)
        out.backward(d_out)
        results.append([x.grad for x in leaves])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("target", ONE_EACH)
def test_autocast(target: Target) -> None:
    """Gradients come back in the dtype of the leaves; backward runs outside autocast as torch does it."""
    inputs = make_qkv(Target(None, target.device, torch.float32), 2, (4, 2), 70, 70, 64)
    d_out = torch.randn(2, 4, 70, 64, device=target.device).bfloat16()
    leaves = [x.clone().requires_grad_() for x in inputs]
    with torch.autocast(target.device, torch.bfloat16):
        out = flashmsa.attention(*leaves, mask=flashmsa.Causal(), backend=target.backend)
    assert out.dtype == torch.bfloat16
    found = torch.autograd.grad(out, leaves, d_out)
    half = run_backward(target, *(x.bfloat16() for x in inputs), CAUSAL, d_out)
    for got, name in zip(found, ("dq", "dk", "dv"), strict=True):
        assert got.dtype == torch.float32 and torch.equal(got, half[name].float())


@pytest.mark.parametrize("target", ONE_EACH)
@pytest.mark.parametrize("dim", [64, 128])
def test_a_chain_of_layers(target: Target, dim: int) -> None:
    """Gradients flow on through several calls, as through the same calls of the composed operators."""
    inputs = make_qkv(target, 1, 2, 80, 80, dim)
    d_out, _ = grad_like(inputs[0], inputs[2])
    masks = [DENSE, CAUSAL, document(0, 33, 80, causal=True)]

    def chain(call, q, k, v):
        for n in range(3):
            q = q + call(q, k, v, masks[n].build(q.device))
        return q

    calls = {
        "found": lambda *x: flashmsa.attention(*x, backend=target.backend),
        "wanted": lambda q, k, v, m: flashmsa.reference(q, k, v, m),
        "yardstick": lambda q, k, v, m: torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=(m or flashmsa.Dense()).to_dense(80, 80, q.device)
        ),
    }
    grads = {}
    for name, call in calls.items():
        leaves = [(x.double() if name == "wanted" else x.clone()).requires_grad_() for x in inputs]
        grads[name] = torch.autograd.grad(chain(call, *leaves), leaves, d_out.double() if name == "wanted" else d_out)
    for got, want, base in zip(*grads.values(), strict=True):
        # Three layers, each of at most twice the operators' error, feed on each other.
        limit = 2.0**3 * largest(base.double() - want) + 4 * torch.finfo(target.dtype).eps * largest(want)
        assert largest(got.double() - want) <= limit
