"""The contract of attention(): every shape, mask, layout and way to call it, on every backend, against the oracle."""

from __future__ import annotations

import ast
import gc
import math
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from helpers import (
    ALL_FAMILIES,
    CAUSAL,
    DENSE,
    FAMILIES,
    NATIVE_ONE_EACH,
    ONE_EACH,
    TOP_LEFT,
    MaskCase,
    Target,
    by_family,
    check,
    copies_in,
    document,
    limit_of_whole,
    make_qkv,
    mask_for,
    oracle,
    poisoned_allocations,
    poisoned_out,
    run,
    run_and_check,
    targets,
)

import flashmsa

# ---------------------------------------------------------------------------------------------------------------------
# Shapes


@pytest.mark.parametrize("target", targets(auto=True))
@pytest.mark.parametrize("dim", range(8, 257, 8))
def test_head_dim(target: Target, dim: int) -> None:
    q, k, v = make_qkv(target, 1, (2, 1), 65, 131, dim)
    for family in ("causal", "document-cross"):
        run_and_check(target, q, k, v, mask_for(family, 1, 65, 131))


@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize(
    "dims", [(192, 128), (64, 128), (128, 64), (8, 256), (256, 8), (72, 40), (40, 72), (136, 16), (96, 88), (56, 200)]
)
def test_value_dim_differs(target: Target, dims: tuple[int, int]) -> None:
    q, k, v = make_qkv(target, 1, (4, 2), 77, 130, *dims)
    for family in ("dense", "document-cross-causal"):
        run_and_check(target, q, k, v, mask_for(family, 1, 77, 130))


LENGTHS = [
    (1, 1),
    (1, 257),
    (129, 1),
    (15, 15),
    (15, 128),
    (63, 65),
    (64, 64),
    (65, 63),
    (127, 129),
    (128, 128),
    (129, 127),
    (128, 193),
    (191, 64),
    (192, 191),
    (193, 192),
    (257, 257),
]


@pytest.mark.parametrize(("target", "family"), by_family(targets()))
@pytest.mark.parametrize("lengths", LENGTHS, ids="{0[0]}x{0[1]}".format)
def test_lengths(target: Target, lengths: tuple[int, int], family: str) -> None:
    # Of one row each, so many heads that the rule's yardstick is no draw of chance; and no two that share keys, because
    # a matrix of two rows is summed in another order than the yardstick's of one.
    heads = (2, 1) if lengths[0] > 1 else (32, 32)
    q, k, v = make_qkv(target, 2, heads, *lengths, 64)
    run_and_check(target, q, k, v, mask_for(family, 2, *lengths))


@pytest.mark.parametrize(
    ("target", "family"), by_family(targets(dtypes=(torch.float32, torch.bfloat16, torch.float16)))
)
@pytest.mark.parametrize("lengths", [(1000, 1000), (1000, 257), (193, 1000)], ids="{0[0]}x{0[1]}".format)
def test_longer_lengths(target: Target, lengths: tuple[int, int], family: str) -> None:
    q, k, v = make_qkv(target, 2, 1, *lengths, 40)
    run_and_check(target, q, k, v, mask_for(family, 2, *lengths, documents=9))


@pytest.mark.parametrize("family", FAMILIES)
def test_float64_of_the_torch_backend(family: str) -> None:
    target = Target("torch", "cpu", torch.float64)
    for lengths in ((1, 1), (65, 40), (40, 129), (150, 150)):
        q, k, v = make_qkv(target, 2, (2, 1), *lengths, 24, 16)
        run_and_check(target, q, k, v, mask_for(family, 2, *lengths))


@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (6, 3), (8, 1), (5, 5), (21, 7)], ids="{0[0]}q{0[1]}kv".format)
@pytest.mark.parametrize(
    "family",
    [
        "dense",
        "causal",
        "document-batched-causal",
        "window-keep",
        "dilated",
        "hash-heads-shared-keys-causal",
        "hash-kv-heads",
        "and-blocks-heads-causal",
    ],
)
def test_grouped_heads(target: Target, heads: tuple[int, int], family: str) -> None:
    q, k, v = make_qkv(target, 3, heads, 33, 70, 32)
    run_and_check(target, q, k, v, mask_for(family, 3, 33, 70, heads=heads))


@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize("causal", [False, True])
def test_many_documents(target: Target, causal: bool) -> None:
    """More documents than rows of a tile, most of them a token or two long, some empty."""
    cuts = [0]
    for n in range(400):
        cuts.append(cuts[-1] + (0, 1, 2, 1, 0, 3)[n % 6])
    q, k, v = make_qkv(target, 1, (2, 1), cuts[-1], cuts[-1], 64)
    run_and_check(target, q, k, v, document(*cuts, causal=causal))


@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize("causal", [False, True])
def test_documents_one_sided(target: Target, causal: bool) -> None:
    """Documents with queries but no keys, with keys but no queries, with more queries than keys and the reverse."""
    mask = document(0, 0, 70, 140, 150, 150, 290, kv=(0, 40, 40, 60, 200, 230, 300), causal=causal)
    q, k, v = make_qkv(target, 2, 2, 300, 310, 64)
    run_and_check(target, q, k, v, mask)


@pytest.mark.parametrize("target", targets(auto=True))
@pytest.mark.parametrize(
    "mask", [DENSE, CAUSAL, document(0, 20, 20, 90), document(0, 20, 20, 90, causal=True)], ids=str
)
def test_nothing_stays_unwritten(target: Target, mask: MaskCase) -> None:
    """Outputs that the call allocates itself, lse included, hold no leftover; with and without lse they agree."""
    q, k, v = make_qkv(target, 2, (4, 2), 100, 100, 72)
    with poisoned_allocations():
        out, lse = flashmsa.attention(q, k, v, mask=mask.build(q.device), backend=target.backend, return_lse=True)
        alone = flashmsa.attention(q, k, v, mask=mask.build(q.device), backend=target.backend)
    check(out, lse, q, k, v, mask)
    check(alone, None, q, k, v, mask)
    if target.native:
        assert torch.equal(alone, out)


@pytest.mark.parametrize("target", targets(composed=False))
def test_same_call_same_bits(target: Target) -> None:
    q, k, v = make_qkv(target, 2, (4, 2), 150, 300, 64)
    for family in ALL_FAMILIES:
        mask = mask_for(family, 2, 150, 300, heads=(4, 2))
        out, lse = run(target, q, k, v, mask)
        again, lse_again = run(target, q, k, v, mask, deterministic=True)
        assert torch.equal(out, again) and torch.equal(lse, lse_again), family


@pytest.mark.parametrize("target", NATIVE_ONE_EACH)
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_fifty_calls_same_bits(target: Target, family: str) -> None:
    lengths = (130, 150) if target.device == "cpu" else (700, 1300)
    q, k, v = make_qkv(target, 2, (4, 2), *lengths, 64)
    mask = mask_for(family, 2, *lengths, heads=(4, 2)).build(q.device)
    first, first_lse = flashmsa.attention(q, k, v, mask=mask, backend=target.backend, return_lse=True)
    for _ in range(50):
        out, lse = flashmsa.attention(q, k, v, mask=mask, backend=target.backend, return_lse=True)
        assert torch.equal(out, first) and torch.equal(lse, first_lse)


# ---------------------------------------------------------------------------------------------------------------------
# Scale


@pytest.mark.parametrize("target", targets(auto=True))
@pytest.mark.parametrize("scale", [1.0, 0.01, 0.0, -0.125, -1.0, 1e-30])
@pytest.mark.parametrize("family", ["dense", "causal", "document-short-causal"])
def test_scale(target: Target, scale: float, family: str) -> None:
    q, k, v = make_qkv(target, 1, (2, 1), 90, 140, 64)
    run_and_check(target, q, k, v, mask_for(family, 1, 90, 140), scale=scale)


@pytest.mark.parametrize("target", targets())
def test_default_scale(target: Target) -> None:
    q, k, v = make_qkv(target, 1, 2, 40, 50, 80)
    out, lse = run(target, q, k, v)
    same, lse_same = run(target, q, k, v, scale=1.0 / math.sqrt(80))
    assert torch.equal(out, same) and torch.equal(lse, lse_same)


# ---------------------------------------------------------------------------------------------------------------------
# Layouts (a transposed view, a packed slice, ...): as contiguous


def as_bshd(x: torch.Tensor) -> torch.Tensor:
    """The view of (B, S, H, D) memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def as_hbsd(x: torch.Tensor) -> torch.Tensor:
    """Heads outermost."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def with_strides(x: torch.Tensor, pad: int) -> torch.Tensor:
    """Rows `pad` elements apart from each other."""
    base = torch.full((*x.shape[:3], x.shape[3] + pad), math.nan, dtype=x.dtype, device=x.device)
    base[..., : x.shape[3]] = x
    return base[..., : x.shape[3]]


def every_second(x: torch.Tensor) -> torch.Tensor:
    base = torch.full((*x.shape[:3], 2 * x.shape[3]), math.nan, dtype=x.dtype, device=x.device)
    base[..., ::2] = x
    return base[..., ::2]


def dim_before_length(x: torch.Tensor) -> torch.Tensor:
    return x.mT.contiguous().mT


def within_longer(x: torch.Tensor) -> torch.Tensor:
    """Rows of a longer tensor: NaN before and after them."""
    base = torch.full((*x.shape[:2], x.shape[2] + 40, x.shape[3]), math.nan, dtype=x.dtype, device=x.device)
    base[:, :, 8 : 8 + x.shape[2]] = x
    return base[:, :, 8 : 8 + x.shape[2]]


def off_by(x: torch.Tensor, elements: int) -> torch.Tensor:
    base = torch.full((x.numel() + elements,), math.nan, dtype=x.dtype, device=x.device)
    base[elements:] = x.flatten()
    return base[elements:].view(x.shape)


LAYOUTS = {
    "bshd": as_bshd,
    "hbsd": as_hbsd,
    "row stride + 8": lambda x: with_strides(x, 8),
    "within longer rows": within_longer,
    "row stride + 1": lambda x: with_strides(x, 1),
    "last stride 2": every_second,
    "head_dim before length": dim_before_length,
    "base off by one": lambda x: off_by(x, 1),
    "base off by eight": lambda x: off_by(x, 8),
}
# Free on both native backends: a unit last stride, rows and base 16-byte aligned.
FREE_LAYOUTS = ("bshd", "hbsd", "within longer rows", "row stride + 8", "base off by eight")


def assert_same(
    target: Target, got: torch.Tensor, contiguous: torch.Tensor, q, k, v, mask: MaskCase, note: str
) -> None:
    """A layout changes no arithmetic of a native backend; operators of torch may choose another kernel."""
    check(got, None, q, k, v, mask, note=note)
    if target.native:
        assert torch.equal(got, contiguous), f"{note}: not the bits of the contiguous call"


@pytest.mark.parametrize("target", targets(auto=True))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["causal", "document-batched"])
def test_layout(target: Target, layout: str, family: str) -> None:
    q, k, v = make_qkv(target, 2, (4, 2), 70, 135, 64, 40)
    mask = mask_for(family, 2, 70, 135)
    plain, plain_lse = run(target, q, k, v, mask)
    change = LAYOUTS[layout]
    for name in ("q", "k", "v", "all"):
        views = {n: change(x) if name in (n, "all") else x for n, x in zip("qkv", (q, k, v), strict=True)}
        for n, x in views.items():
            assert torch.equal(x, {"q": q, "k": k, "v": v}[n])
        out, lse = run(target, views["q"], views["k"], views["v"], mask)
        assert_same(target, out, plain, q, k, v, mask, f"{name} as {layout}")
        if target.native:
            assert torch.equal(lse, plain_lse)


@pytest.mark.parametrize("target", targets())
def test_packed_qkv_slices(target: Target) -> None:
    """q, k, v as slices of one projection (B, S, (Hq + 2 Hkv) D), grouped heads included."""
    batch, length, heads_q, heads_kv, dim = 2, 130, 4, 2, 64
    widths = [heads_q * dim, heads_kv * dim, heads_kv * dim]
    packed = torch.randn(batch, length, sum(widths), device=target.device).to(target.dtype)
    q, k, v = (part.unflatten(-1, (-1, dim)).transpose(1, 2) for part in packed.split(widths, dim=-1))
    contiguous = [x.contiguous() for x in (q, k, v)]
    for family in ("dense", "causal", "document-causal"):
        mask = mask_for(family, batch, length, length)
        plain, _ = run(target, *contiguous, mask)
        out, _ = run(target, q, k, v, mask)
        assert_same(target, out, plain, *contiguous, mask, family)


@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1), (2,)], ids=["batches", "heads", "both", "rows"])
def test_expanded(target: Target, dims: tuple[int, ...]) -> None:
    """Stride 0 over batches, heads, both, or even the length, of each tensor in turn."""
    q, k, v = make_qkv(target, 3, 4, 70, 70, 64)
    for changed in ("q", "k", "v", "kv"):
        views = {"q": q, "k": k, "v": v}
        for n in changed:
            x = views[n]
            for d in dims:
                x = x.narrow(d, 0, 1)
            views[n] = x.expand(views[n].shape)
        contiguous = [x.contiguous() for x in views.values()]
        plain, _ = run(target, *contiguous, CAUSAL)
        out, _ = run(target, *views.values(), CAUSAL)
        assert_same(target, out, plain, *contiguous, CAUSAL, f"{changed} expanded over {dims}")


@pytest.mark.parametrize("target", targets())
def test_singleton_dimensions_with_odd_strides(target: Target) -> None:
    """A dimension of one may carry any stride; nothing depends on it."""
    q, k, v = make_qkv(target, 1, 1, 1, 40, 64)
    plain, _ = run(target, q, k, v)
    odd = q.as_strided(q.shape, (7, 3, 5, 1))
    out, _ = run(target, odd, k.as_strided(k.shape, (1, 1, 64, 1)), v)
    assert_same(target, out, plain, q, k, v, DENSE, "odd strides")


@pytest.mark.parametrize("target", NATIVE_ONE_EACH)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies(target: Target, layout: str) -> None:
    """The free layouts are read in place; a layout that needs a copy is copied once."""
    q, k, v = make_qkv(target, 2, 4, 70, 70, 64)
    views = [LAYOUTS[layout](x) for x in (q, k, v)]
    out = poisoned_out(q, v)

    def call() -> None:
        flashmsa.attention(*views, backend=target.backend, out=out)

    call()
    found = copies_in(call)
    if layout in FREE_LAYOUTS:
        assert found == 0
    else:
        assert found <= 3


@pytest.mark.parametrize("target", targets(auto=True))
@pytest.mark.parametrize("mask", [DENSE, CAUSAL, document(0, 30, 70)], ids=str)
def test_out_has_the_memory_order_of_q(target: Target, mask: MaskCase) -> None:
    q, k, v = make_qkv(target, 2, 3, 70, 70, 64, 40)
    built = mask.build(q.device)
    out = flashmsa.attention(q, k, v, mask=built, backend=target.backend)
    assert out.is_contiguous()
    out = flashmsa.attention(as_bshd(q), k, v, mask=built, backend=target.backend)
    assert out.transpose(1, 2).is_contiguous()
    check(out, None, q, k, v, mask)
    packed = torch.stack([q, q, q], dim=0).permute(1, 3, 0, 2, 4).contiguous()  # (B, S, 3, H, D)
    sliced = packed[:, :, 1].transpose(1, 2)
    out = flashmsa.attention(sliced, k, v, mask=built, backend=target.backend)
    assert out.transpose(1, 2).is_contiguous()
    check(out, None, q, k, v, mask)


# ---------------------------------------------------------------------------------------------------------------------
# out=, lse


@pytest.mark.parametrize("target", targets(auto=True))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", [CAUSAL, document(0, 30, 50)], ids=str)
def test_out_in_any_layout(target: Target, layout: str, mask: MaskCase) -> None:
    """out= is written in place and nothing beside it; strides that a backend cannot write raise, and name out."""
    q, k, v = make_qkv(target, 2, 4, 70, 70, 64)
    given = LAYOUTS[layout](poisoned_out(q, v))
    storage = torch.empty(0, dtype=q.dtype, device=q.device).set_(given.untyped_storage())
    marker = 7.0
    storage.fill_(marker)
    built = mask.build(q.device)
    try:
        got = flashmsa.attention(q, k, v, mask=built, backend=target.backend, out=given)
    except ValueError as error:
        assert layout not in FREE_LAYOUTS and target.backend != "torch"
        assert str(error).startswith("out: ")
        assert (storage == marker).all(), "out was written before the error"
        return
    assert got.data_ptr() == given.data_ptr() and got.stride() == given.stride()
    check(got, None, q, k, v, mask)
    given.fill_(marker)
    assert (storage == marker).all(), "written outside out"


@pytest.mark.parametrize("target", targets())
def test_out_between_neighbours(target: Target) -> None:
    """Rows before and after out, and neighbouring batches and heads, keep their content."""
    q, k, v = make_qkv(target, 2, 2, 129, 129, 40)
    big = torch.full((4, 4, 200, 56), 7.0, dtype=q.dtype, device=q.device)
    inner = big[1:3, 1:3, 30:159, 8:48]
    for mask in (DENSE, CAUSAL, document(0, 1, 64, 129), document(0, 100, causal=True)):
        inner.fill_(math.nan)
        flashmsa.attention(q, k, v, mask=mask.build(q.device), backend=target.backend, out=inner)
        check(inner, None, q, k, v, mask)
        outside = torch.ones_like(big, dtype=torch.bool)
        outside[1:3, 1:3, 30:159, 8:48] = False
        assert (big[outside] == 7.0).all()


@pytest.mark.parametrize("target", ONE_EACH)
def test_out_may_stand_beside_q(target: Target) -> None:
    """q and out interleaved in one tensor share no element."""
    q, k, v = make_qkv(target, 2, 2, 70, 70, 64)
    both = torch.stack([q, torch.full_like(q, math.nan)], dim=3)  # (B, H, S, 2, D)
    left, right = both.unbind(3)
    flashmsa.attention(left, k, v, backend=target.backend, out=right)
    check(right, None, q, k, v)
    assert torch.equal(left, q)


@pytest.mark.parametrize("target", ONE_EACH)
def test_out_that_shares_memory_lazily(target: Target) -> None:
    """A lazy clone takes memory of its own when it is written to: its source keeps its values."""
    q, k, v = make_qkv(target, 2, 2, 70, 70, 64)
    source = torch.full_like(q, 7.0)
    out = torch._lazy_clone(source)
    flashmsa.attention(q, k, v, backend=target.backend, out=out)
    assert (source == 7.0).all()
    check(out, None, q, k, v)
    own = torch._lazy_clone(q)
    before = q.clone()
    flashmsa.attention(q, k, v, backend=target.backend, out=own)
    assert torch.equal(q, before)
    check(own, None, q, k, v)


@pytest.mark.parametrize("target", ONE_EACH)
def test_views_that_negate(target: Target) -> None:
    """Such a view holds the negated values. As an input it is read as what it stands for."""
    q, k, v = make_qkv(target, 2, 2, 70, 70, 64)
    views = [torch._neg_view(-x) for x in (q, k, v)]
    assert all(x.is_neg() for x in views)
    check(flashmsa.attention(*views, backend=target.backend), None, q, k, v)
    memory = torch.full_like(q, 7.0)
    out = torch._neg_view(memory)
    if target.backend == "torch":
        flashmsa.attention(q, k, v, backend=target.backend, out=out)
        check(out, None, q, k, v)
    else:
        with pytest.raises(ValueError, match=r"out: a view that negates .*resolve_neg"):
            flashmsa.attention(q, k, v, backend=target.backend, out=out)
        assert (memory == 7.0).all()


@pytest.mark.parametrize("target", ONE_EACH)
def test_what_is_returned(target: Target) -> None:
    q, k, v = make_qkv(target, 2, 4, 10, 20, 16, 24)
    only = flashmsa.attention(q, k, v, backend=target.backend)
    assert isinstance(only, torch.Tensor) and only.shape == (2, 4, 10, 24)
    out, lse = flashmsa.attention(q, k, v, backend=target.backend, return_lse=True)
    assert out.dtype == q.dtype and out.device == q.device
    assert lse.shape == (2, 4, 10) and lse.dtype == torch.float32 and lse.device == q.device
    given = poisoned_out(q, v)
    assert flashmsa.attention(q, k, v, backend=target.backend, out=given).data_ptr() == given.data_ptr()


@pytest.mark.parametrize("target", ONE_EACH)
def test_inputs_are_left_alone(target: Target) -> None:
    q, k, v = make_qkv(target, 2, 2, 70, 70, 64)
    before = [x.clone() for x in (q, k, v)]
    offsets = torch.tensor([0, 3, 70], dtype=torch.int32, device=q.device)
    for scale in (None, 0.0, -0.5):
        flashmsa.attention(q, k, v, mask=flashmsa.Document(offsets), backend=target.backend, scale=scale)
    for x, y in zip((q, k, v), before, strict=True):
        assert torch.equal(x, y)
    assert offsets.tolist() == [0, 3, 70]


@pytest.mark.parametrize("target", ONE_EACH)
def test_offsets_are_read_at_every_call(target: Target) -> None:
    """A mask holds its offsets, not a copy: the next call sees their new values."""
    q, k, v = make_qkv(target, 1, 2, 100, 100, 64)
    offsets = torch.tensor([0, 30, 100], dtype=torch.int32, device=q.device)
    mask = flashmsa.Document(offsets, causal=True)
    for cuts in ((0, 30, 100), (0, 64, 65), (0, 0, 0), (0, 1, 100)):
        offsets.copy_(torch.tensor(cuts, dtype=torch.int32))
        out, lse = flashmsa.attention(q, k, v, mask=mask, backend=target.backend, return_lse=True)
        check(out, lse, q, k, v, document(*cuts, causal=True))


# ---------------------------------------------------------------------------------------------------------------------
# Choice of backend


def test_cpu_tensors_run_on_the_cpu_backend() -> None:
    q, k, v = make_qkv(Target("cpu", "cpu", torch.float32), 1, 2, 100, 100, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen = flashmsa.attention(q, k, v, mask=flashmsa.Causal())
    assert torch.equal(chosen, flashmsa.attention(q, k, v, mask=flashmsa.Causal(), backend="cpu"))


def test_fallback_is_warned_once() -> None:
    """The dispatcher's choice of the composed backend names its reason, the first time only."""
    program = """
import warnings, torch, flashmsa
warnings.simplefilter("always")
x = torch.randn(1, 1, 8, 8)
mask = flashmsa.HashBucket(torch.zeros(1, 1, 8, dtype=torch.int32))
with warnings.catch_warnings(record=True) as caught:
    for _ in range(3):
        flashmsa.attention(x, x, x, mask, alibi_slopes=torch.ones(1))
print([str(w.message) for w in caught if "flashmsa" in str(w.message) or "alibi" in str(w.message)])
"""
    root = str(Path(flashmsa.__file__).resolve().parent.parent)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root, check=True)
    messages = ast.literal_eval(done.stdout.strip().splitlines()[-1])
    assert len(messages) == 1 and "alibi_slopes" in messages[0] and "torch" in messages[0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gap_on_the_gpu_falls_back(dtype: torch.dtype) -> None:
    """A dtype without a kernel still runs, composed of torch's operators, and says so."""
    target = Target(None, "cuda", dtype)
    q, k, v = make_qkv(target, 1, (4, 2), 100, 130, 64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_and_check(target, q, k, v, CAUSAL)
    assert all("torch" in str(w.message) for w in caught)


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(Target("torch", "cpu", torch.float32), id="fp32"),
        pytest.param(Target("torch", "cpu", torch.float64), id="fp64"),
        pytest.param(Target("torch", "cuda", torch.float32), id="fp32@cuda", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("family", ["dense", "causal", "document-cross-causal", "document-short"])
def test_torch_backend_has_gradients(target: Target, family: str) -> None:
    """Gradients equal those of the composed operators in float64; rows that see nothing give exactly 0."""
    q, k, v = (x.requires_grad_() for x in make_qkv(target, 2, (4, 2), 30, 20, 16))
    mask = mask_for(family, 2, 30, 20)
    out = flashmsa.attention(q, k, v, mask=mask.build(q.device), backend="torch")
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), grad)
    q64, k64, v64 = (x.detach().double().requires_grad_() for x in (q, k, v))
    allowed = mask.allowed(30, 20, device=q.device)
    group = torch.arange(4, device=q.device) // 2
    s = (q64 @ k64[:, group].mT / 4.0).masked_fill(~allowed[:, None], -math.inf)
    alive = allowed.any(-1)[:, None, :, None]
    p = torch.softmax(s.masked_fill(~alive, 0.0), -1).masked_fill(~alive, 0.0)
    wanted = torch.autograd.grad(p @ v64[:, group], (q64, k64, v64), grad.double())
    for name, got, expected in zip("qkv", found, wanted, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"d{n}: {m}")
    assert not found[0][~alive.expand(2, 4, 30, 1).expand_as(found[0])].count_nonzero()


@pytest.mark.parametrize("target", ONE_EACH)
def test_no_grad_runs_inputs_that_require_grad(target: Target) -> None:
    q, k, v = (x.requires_grad_() for x in make_qkv(target, 1, 2, 20, 20, 16))
    with torch.no_grad():
        out = flashmsa.attention(q, k, v, backend=target.backend)
    assert not out.requires_grad
    with torch.inference_mode():
        inferred = flashmsa.attention(q, k, v, backend=target.backend)
    check(out.detach(), None, q.detach(), k.detach(), v.detach())
    assert torch.equal(out, inferred)


@pytest.mark.parametrize("target", ONE_EACH)
def test_inference_tensors(target: Target) -> None:
    with torch.inference_mode():
        q, k, v = make_qkv(target, 1, 2, 20, 20, 16)
        out = poisoned_out(q, v)
        flashmsa.attention(q, k, v, backend=target.backend, out=out)
        check(out, None, q, k, v)


# ---------------------------------------------------------------------------------------------------------------------
# autocast


@pytest.mark.parametrize("target", ONE_EACH)
@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kinds", [("f", "f", "f"), ("f", "h", "h"), ("h", "f", "h"), ("h", "h", "h"), ("o", "o", "o")])
def test_autocast_casts_as_sdpa_does(target: Target, cast: torch.dtype, kinds: tuple[str, str, str]) -> None:
    """f: fp32, h: the autocast dtype, o: the other half type. The dtype is SDPA's, the bits those of the cast call."""
    other = torch.float16 if cast == torch.bfloat16 else torch.bfloat16
    dtypes = {"f": torch.float32, "h": cast, "o": other}
    full = make_qkv(Target(target.backend, target.device, torch.float32), 1, 2, 40, 50, 64)
    q, k, v = (x.to(dtypes[n]) for x, n in zip(full, kinds, strict=True))
    with torch.autocast(target.device, dtype=cast):
        out, lse = flashmsa.attention(q, k, v, mask=flashmsa.Causal(), backend=target.backend, return_lse=True)
        sdpa = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert out.dtype == sdpa.dtype
    q, k, v = (x.to(sdpa.dtype) for x in (q, k, v))
    expected, expected_lse = flashmsa.attention(
        q, k, v, mask=flashmsa.Causal(), backend=target.backend, return_lse=True
    )
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


def test_autocast_leaves_float64_alone() -> None:
    q, k, v = make_qkv(Target("cpu", "cpu", torch.float64), 1, 2, 40, 50, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert flashmsa.attention(q, k, v).dtype == torch.float64
        assert torch.nn.functional.scaled_dot_product_attention(q, k, v).dtype == torch.float64


def test_autocast_off_inside() -> None:
    q, k, v = make_qkv(Target("cpu", "cpu", torch.float32), 1, 2, 40, 50, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert flashmsa.attention(q, k, v).dtype == torch.float32


# ---------------------------------------------------------------------------------------------------------------------
# The package's own oracle, and joining two key sets


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("family", FAMILIES)
def test_reference_is_the_oracle(dtype: torch.dtype, family: str) -> None:
    for lengths in ((60, 90), (90, 60), (1, 7), (7, 0), (0, 7)):
        q, k, v = make_qkv(Target("cpu", "cpu", dtype), 2, (4, 2), *lengths, 24, 16)
        mask = mask_for(family, 2, *lengths)
        for scale in (None, 0.0, -0.3):
            out, lse = flashmsa.reference(q, k, v, mask=mask.build(), scale=scale, return_lse=True)
            expected, _, expected_lse = oracle(q, k, v, mask.allowed(*lengths), scale)
            assert out.dtype == torch.float64
            torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
            torch.testing.assert_close(
                lse.double(), expected_lse, rtol=0, atol=1e-13 if lse.dtype == torch.float64 else 1e-5
            )
            assert torch.equal(flashmsa.reference(q, k, v, mask=mask.build(), scale=scale), out)


def test_reference_ignores_what_is_masked() -> None:
    q, k, v = make_qkv(Target("cpu", "cpu", torch.float32), 1, 2, 20, 20, 16)
    k[:, :, 12:], v[:, :, 12:] = math.nan, math.inf
    out = flashmsa.reference(q, k, v, mask=flashmsa.Document(torch.tensor([0, 12, 12], dtype=torch.int32)))
    expected, _, _ = oracle(q, k, v, document(0, 12, 12).allowed(20, 20))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("target", targets(dtypes=(torch.float32, torch.bfloat16, torch.float16)))
@pytest.mark.parametrize("cut", [0, 1, 64, 100, 150])
def test_merge_states(target: Target, cut: int) -> None:
    """Attention over [K1; K2] is the joined attention over the parts, one of them empty too."""
    q, k, v = make_qkv(target, 2, (4, 2), 70, 150, 64)
    parts = [run(target, q, k[:, :, a:b], v[:, :, a:b]) for a, b in ((0, cut), (cut, 150))]
    # The weights come from two lse, each right to 1e-5 max(1, |lse|); here |lse| < 10.
    limit = limit_of_whole(q, k, v) + 4e-4 * v.abs().max().item()
    for one, other in (parts, parts[::-1]):
        out, lse = flashmsa.merge_states(*one, *other)
        check(out, lse, q, k, v, limit=limit)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_merge_states_alone(device: str, dtype: torch.dtype) -> None:
    """Parts of every relative weight: out = (e^a A + e^b B) / (e^a + e^b), and lse is the log of that sum."""
    out_a, out_b = (torch.randn(2, 3, 500, 24, device=device).to(dtype) for _ in range(2))
    lse_a, lse_b = (20 * torch.randn(2, 3, 500, device=device) for _ in range(2))
    lse_b[..., :50] = lse_a[..., :50]
    lse_a[..., 50:60], lse_b[..., 55:70] = -math.inf, -math.inf
    out, lse = flashmsa.merge_states(out_a, lse_a, out_b, lse_b)
    assert out.dtype == dtype and lse.dtype == torch.float32
    expected_lse = torch.logaddexp(lse_a.double(), lse_b.double())
    weight_a, weight_b = ((x.double() - expected_lse).exp().nan_to_num(0.0)[..., None] for x in (lse_a, lse_b))
    expected = weight_a * out_a.double() + weight_b * out_b.double()
    # One rounding to dtype; the weights in fp32: an exponent below 100 in magnitude is right to half its ulp, 4e-6.
    bound = (torch.finfo(dtype).eps / 2 + 8e-6) * max(out_a.abs().max().item(), out_b.abs().max().item())
    assert (out.double() - expected).abs().max().item() <= bound
    assert not out[..., 55:60, :].count_nonzero() and lse[..., 55:60].isneginf().all()
    finite = expected_lse.isfinite()
    assert torch.equal(lse.isfinite(), finite)
    assert ((lse.double() - expected_lse)[finite].abs() <= 2e-7 * expected_lse[finite].abs().clamp(min=1.0)).all()


@pytest.mark.parametrize("target", targets())
def test_merge_states_of_masked_parts(target: Target) -> None:
    """Rows that see keys in one part only, in both, or in none; both parts of very different weight."""
    q, k, v = make_qkv(target, 1, 2, 80, 80, 64)
    k[:, :, :40] *= 30
    parts = []
    for a, b in ((0, 40), (40, 80)):
        mask = document(0, 20, 60, kv=(0, 0, b - a), causal=False)
        if a:
            mask = document(0, 40, 70, kv=(0, b - a, b - a))
        parts.append((run(target, q, k[:, :, a:b], v[:, :, a:b], mask), mask.allowed(80, 40)))
    allowed = torch.cat([parts[0][1], parts[1][1]], dim=-1).to(q.device)
    out, lse = flashmsa.merge_states(*parts[0][0], *parts[1][0])
    expected, _, expected_lse = oracle(q, k, v, allowed)
    assert torch.equal(lse.isneginf(), expected_lse.isneginf())
    assert not out[expected_lse.isneginf()].count_nonzero() and not out.isnan().any()
    finite = expected_lse.isfinite()
    torch.testing.assert_close(lse.double()[finite], expected_lse[finite], rtol=1e-5, atol=1e-5)
    eps = max(torch.finfo(target.dtype).eps, torch.finfo(torch.float32).eps)
    # Two rounded parts, one more rounding, and weights from two lse that may each be off by 1e-5 |lse|.
    bound = (3 * eps + 4e-5 * max(1.0, expected_lse[finite].abs().max().item())) * v.abs().max().item()
    assert (out.double() - expected).abs().max().item() <= bound


@pytest.mark.parametrize("target", ONE_EACH)
def test_merge_states_of_nothing(target: Target) -> None:
    q, k, v = make_qkv(target, 1, 2, 10, 0, 64)
    part = run(target, q, k, v)
    out, lse = flashmsa.merge_states(*part, *part)
    assert not out.count_nonzero() and not out.isnan().any()
    assert lse.isneginf().all()


# ---------------------------------------------------------------------------------------------------------------------
# torch.compile and the operator's registration


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def counting_backend(graphs: list) -> object:
    """aot_eager, noting every graph that it is given."""
    from torch._dynamo.backends.debugging import aot_eager

    def compile_graph(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    return compile_graph


@pytest.mark.parametrize("target", [p for p in ONE_EACH if p.values[0].backend != "torch"])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("family", ["dense", "causal", "document", "document-batched-causal"])
def test_compile(target: Target, dynamic: bool | None, family: str, fresh_dynamo: None) -> None:
    """One graph without a break, at most two compilations over three lengths, equal to eager, strides included."""
    graphs: list = []

    def call(q, k, v, mask):
        out, lse = flashmsa.attention(q * 1, k, v, mask=mask, backend=target.backend, return_lse=True)
        return out + 0, lse

    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend=counting_backend(graphs))
    for length in (127, 128, 129):
        q, k, v = make_qkv(target, 2, 4, length, length, 64)
        mask = mask_for(family, 2, length, length).build(q.device)
        for got, expected in zip(compiled(q, k, v, mask), call(q, k, v, mask), strict=True):
            assert torch.equal(got, expected) and got.stride() == expected.stride()
    assert 1 <= len(graphs) <= 2


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", ["causal", "document-batched-causal"])
def test_compile_of_the_torch_backend(device: str, family: str, fresh_dynamo: None) -> None:
    """It is Python, traced as such: one graph for each number of blocks of rows, without a break."""
    compiled = torch.compile(flashmsa.attention, fullgraph=True, backend="aot_eager")
    for length in (100, 129):
        q, k, v = make_qkv(Target("torch", device, torch.float32), 2, 4, length, length, 64)
        mask = mask_for(family, 2, length, length)
        check(compiled(q, k, v, mask=mask.build(device), backend="torch"), None, q, k, v, mask)


@pytest.mark.parametrize("target", NATIVE_ONE_EACH)
def test_compile_keeps_memory_order(target: Target, fresh_dynamo: None) -> None:
    """The strides that the fake implementation promises are those of the result."""
    compiled = torch.compile(
        lambda q, k, v: flashmsa.attention(q, k, v, backend=target.backend).transpose(1, 2).reshape(2, 70, -1),
        fullgraph=True,
        backend="aot_eager",
    )
    q, k, v = make_qkv(target, 2, 4, 70, 70, 64)
    for view in (q, as_bshd(q)):
        got = compiled(view, k, v).unflatten(-1, (4, 64)).transpose(1, 2)
        check(got, None, q, k, v)


@pytest.mark.parametrize("target", ONE_EACH)
def test_compile_reads_offsets_at_every_call(target: Target, fresh_dynamo: None) -> None:
    """Other offsets in the same tensor, or another mask of the same shape, are no reason to compile again."""
    graphs: list = []

    def call(q, k, v, mask):
        return flashmsa.attention(q, k, v, mask=mask, backend=target.backend)

    compiled = torch.compile(call, fullgraph=True, backend=counting_backend(graphs))
    q, k, v = make_qkv(target, 1, 2, 100, 100, 64)
    offsets = torch.tensor([0, 30, 100], dtype=torch.int32, device=q.device)
    mask = flashmsa.Document(offsets)
    check(compiled(q, k, v, mask), None, q, k, v, document(0, 30, 100))
    offsets.copy_(torch.tensor([0, 77, 90], dtype=torch.int32))
    check(compiled(q, k, v, mask), None, q, k, v, document(0, 77, 90))
    again = flashmsa.Document(torch.tensor([0, 5, 100], dtype=torch.int32, device=q.device))
    check(compiled(q, k, v, again), None, q, k, v, document(0, 5, 100))
    assert len(graphs) == 1


@pytest.mark.parametrize("target", NATIVE_ONE_EACH)
def test_compile_shows_one_operator(target: Target, fresh_dynamo: None) -> None:
    graphs: list = []
    compiled = torch.compile(
        lambda q, k, v: flashmsa.attention(q, k, v, mask=flashmsa.Causal(), backend=target.backend),
        fullgraph=True,
        backend=counting_backend(graphs),
    )
    q, k, v = make_qkv(target, 1, 2, 100, 100, 64)
    check(compiled(q, k, v), None, q, k, v, CAUSAL)
    called = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert len([name for name in called if "flashmsa" in name and "attention" in name]) == 1, called


@pytest.mark.parametrize("target", NATIVE_ONE_EACH)
def test_compile_with_out(target: Target, fresh_dynamo: None) -> None:
    compiled = torch.compile(
        lambda q, k, v, out: flashmsa.attention(q, k, v, mask=flashmsa.Causal(), backend=target.backend, out=out),
        fullgraph=True,
        backend="aot_eager",
    )
    q, k, v = make_qkv(target, 1, 2, 100, 100, 64)
    out = poisoned_out(q, v)
    compiled(q, k, v, out)
    check(out, None, q, k, v, CAUSAL)


@pytest.mark.gpu
def test_compile_by_inductor(fresh_dynamo: None) -> None:
    pytest.importorskip("triton")
    target = Target("sm90", "cuda", torch.bfloat16)

    def call(q, k, v):
        return torch.relu(flashmsa.attention(q + 1, k, v, mask=flashmsa.Causal())) * 2

    compiled = torch.compile(call, fullgraph=True)
    q, k, v = make_qkv(target, 2, 4, 128, 128, 64)
    assert torch.equal(compiled(q, k, v), call(q, k, v))


def op_arguments(mask: MaskCase, device: str) -> tuple[int, list[int], list[torch.Tensor]]:
    """The mask as the operator takes it."""
    if mask.kind.startswith("document"):
        q_offsets, kv_offsets = mask.tensors(device)
        return 2, [int(mask.kind == "document-causal")], [q_offsets, q_offsets if kv_offsets is None else kv_offsets]
    return (0, [], []) if mask.kind == "dense" else (1, [int(mask.kind == "top-left")], [])


# softcap, sinks, alibi_slopes, dropout_p, rng_state, deterministic
NO_OPTIONS = (0.0, None, None, 0.0, None, False)


@pytest.mark.parametrize("target", targets(composed=False, dtypes=(torch.float32, torch.bfloat16)))
@pytest.mark.parametrize(
    "mask", [DENSE, CAUSAL, TOP_LEFT, document(0, 10, 33), document(0, 9, 33, causal=True)], ids=str
)
@pytest.mark.parametrize("return_lse", [False, True])
def test_opcheck(target: Target, mask: MaskCase, return_lse: bool) -> None:
    q, k, v = make_qkv(target, 2, (4, 2), 33, 40, 64, 32)
    arguments = op_arguments(mask, target.device)
    for q_view in (q, as_bshd(q)):
        torch.library.opcheck(
            torch.ops.flashmsa.attention.default, (q_view, k, v, *arguments, None, *NO_OPTIONS, return_lse)
        )
    torch.library.opcheck(torch.ops.flashmsa.attention.default, (q, k, v, *arguments, 0.25, *NO_OPTIONS, return_lse))


@pytest.mark.parametrize("target", NATIVE_ONE_EACH)
def test_opcheck_out(target: Target) -> None:
    q, k, v = make_qkv(target, 2, (4, 2), 33, 40, 64, 32)
    torch.library.opcheck(
        torch.ops.flashmsa.attention.out,
        (q, k, v, *op_arguments(CAUSAL, target.device), None, *NO_OPTIONS, True),
        {"out": torch.zeros(2, 4, 33, 32, dtype=q.dtype, device=q.device)},
    )


def test_fake_tensors() -> None:
    """Shapes, dtypes and strides come out without data, on a device that is not there."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        for dtype in (torch.float32, torch.bfloat16):
            q, k, v = (torch.empty(2, 4, 33, d, dtype=dtype) for d in (64, 64, 40))
            for q_view in (q, q.transpose(1, 2).contiguous().transpose(1, 2)):
                out, lse = torch.ops.flashmsa.attention(q_view, k, v, 0, [], [], None, *NO_OPTIONS, True)
                assert out.shape == (2, 4, 33, 40) and out.dtype == dtype
                assert out.is_contiguous() == (q_view is q)
                assert lse.shape == (2, 4, 33) and lse.dtype == torch.float32


def test_meta_tensors() -> None:
    q, k, v = (torch.empty(2, 4, 33, d, device="meta") for d in (64, 64, 40))
    out, lse = torch.ops.flashmsa.attention(q, k, v, 1, [0], [], None, *NO_OPTIONS, False)
    assert out.shape == (2, 4, 33, 40) and out.device.type == "meta"
    assert lse.shape == (0,)


# ---------------------------------------------------------------------------------------------------------------------
# Calls from several threads, and memory


@pytest.mark.parametrize("target", ONE_EACH)
def test_threads(target: Target) -> None:
    """No state is shared between calls: four threads at once get the bits that one gets."""
    from concurrent.futures import ThreadPoolExecutor

    q, k, v = make_qkv(target, 1, 2, 200, 200, 64)
    masks = [mask_for(family, 1, 200, 200) for family in ("dense", "causal", "document", "document-causal")]
    expected = [run(target, q, k, v, mask) for mask in masks]
    if target.device == "cuda":
        torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for (out, lse), got in zip(expected, pool.map(lambda m: run(target, q, k, v, m), masks), strict=True):
                if target.device == "cuda":
                    torch.cuda.synchronize()
                assert torch.equal(got[0], out) and torch.equal(got[1], lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("family", FAMILIES)
def test_number_of_threads(dtype: torch.dtype, family: str) -> None:
    """The CPU backend gives the same bits however many threads share the work."""
    target = Target("cpu", "cpu", dtype)
    q, k, v = make_qkv(target, 2, (6, 3), 130, 150, 40)
    mask = mask_for(family, 2, 130, 150)
    results = []
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        try:
            results.append(run(target, q, k, v, mask))
        finally:
            torch.set_num_threads(1)
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_cpu_memory_is_not_quadratic(backend: str) -> None:
    """Peak resident memory of a long call stays far under one matrix of logits (1 GiB here)."""
    import resource

    q, k, v = make_qkv(Target(backend, "cpu", torch.float32), 1, 1, 16384, 16384, 8)
    mask = flashmsa.Document(torch.arange(0, 16385, 512, dtype=torch.int32))
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    flashmsa.attention(q, k, v, mask=mask, backend=backend)
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert grown < 2**28, f"{grown / 2**20:.0f} MiB more"
