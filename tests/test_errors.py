"""Bad input: a clear error before any launch, naming the argument, what it was, and what is allowed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers import (
    ALL_FAMILIES,
    NATIVE_ONE_EACH,
    ONE_EACH,
    Prefixes,
    Target,
    check,
    document,
    make_qkv,
    mask_for,
    poisoned_out,
)

import flashmsa

# A wrong kind of thing, a wrong value: Python's two words for it. Which of them is part of no promise here.
BAD = (TypeError, ValueError)
HALF = r"(?i)b?float16|half"


def int32(*values: int, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


class Call:
    """A good call, to be spoilt in one place."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.q, self.k, self.v = make_qkv(target, 2, (4, 2), 20, 30, 64)
        self.options: dict = {"backend": target.backend}

    def __call__(self):
        return flashmsa.attention(self.q, self.k, self.v, **self.options)

    def changed(self, **arguments) -> Call:
        for name, value in arguments.items():
            if name in ("q", "k", "v"):
                setattr(self, name, value)
            else:
                self.options[name] = value
        return self

    def raises(self, kinds: type | tuple[type, ...], *patterns: str) -> str:
        """The call raises one of `kinds`, and its message matches every pattern."""
        out = self.options.get("out")
        before = out.clone() if isinstance(out, torch.Tensor) and out.device.type != "meta" else None
        with pytest.raises(kinds) as caught:
            self()
        message = str(caught.value)
        assert not isinstance(caught.value, AssertionError)
        for pattern in patterns:
            assert re.search(pattern, message), f"nothing like {pattern!r} in: {message}"
        if before is not None:
            assert torch.equal(out.nan_to_num(), before.nan_to_num()), "out was written before the error"
        return message


@pytest.fixture
def call(target: Target) -> Call:
    return Call(target)


EVERYWHERE = pytest.mark.parametrize("target", ONE_EACH)


@EVERYWHERE
def test_the_good_call_is_good(call: Call) -> None:
    check(call(), None, call.q, call.k, call.v)


# ---------------------------------------------------------------------------------------------------------------------
# q, k, v


@EVERYWHERE
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_rank(call: Call, name: str) -> None:
    x = getattr(call, name)
    call.changed(**{name: x[0]}).raises(ValueError, rf"\b{name}\b", r"\b3\b|\(4, |\[4, |\(2, |\[2, ", r"\b4\b|batch")
    call.changed(**{name: x[None]}).raises(ValueError, rf"\b{name}\b", r"\b5\b|\(1, |\[1, ")


@EVERYWHERE
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_not_a_tensor(call: Call, name: str) -> None:
    call.changed(**{name: np.zeros((2, 2, 30, 64), np.float32)}).raises(TypeError, rf"\b{name}\b", "ndarray")
    call.changed(**{name: None}).raises(TypeError, rf"\b{name}\b", "None")


@EVERYWHERE
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.int8])
def test_dtype_that_no_backend_has(call: Call, dtype: torch.dtype) -> None:
    call.changed(**{n: getattr(call, n).to(dtype) for n in "qkv"})
    shown = {torch.int32: "(?i)int32|int", torch.int8: "(?i)int8|char", torch.bool: "(?i)bool"}
    call.raises((*BAD, NotImplementedError), r"\bq\b", shown.get(dtype, "(?i)complex"), HALF)


@EVERYWHERE
def test_fp8_is_a_gap(call: Call) -> None:
    call.changed(**{n: getattr(call, n).to(torch.float8_e4m3fn) for n in "qkv"})
    call.raises((*BAD, NotImplementedError), r"\bq\b", "(?i)float8", HALF)


@EVERYWHERE
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_layout_without_strides(call: Call, name: str) -> None:
    x = getattr(call, name)
    call.changed(**{name: x.to_sparse()}).raises(TypeError, rf"\b{name}\b", "(?i)sparse", r"\.to_dense\(\)")
    packed = torch.nested.nested_tensor(list(x), layout=torch.jagged)
    call.changed(**{name: packed}).raises(TypeError, rf"\b{name}\b", "nested", "Document")


@EVERYWHERE
@pytest.mark.parametrize("name", ["k", "v"])
def test_dtypes_differ(call: Call, name: str) -> None:
    call.changed(**{name: getattr(call, name).to(torch.float64)})
    message = call.raises(BAD, rf"\b{name}\b", "(?i)float64|double")
    own = {torch.float32: "(?i)float32|float", torch.bfloat16: "(?i)bfloat16"}[call.target.dtype]
    assert re.search(own, message)


@EVERYWHERE
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_devices_differ(call: Call, name: str) -> None:
    call.changed(**{name: getattr(call, name).to("meta")})
    call.raises((*BAD, RuntimeError), r"\b[kvq]\b", "meta", f"(?i){call.target.device}")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_one_tensor_on_the_cpu(name: str) -> None:
    call = Call(Target(None, "cuda", torch.bfloat16))
    call.changed(**{name: getattr(call, name).cpu()})
    call.raises((*BAD, RuntimeError), r"\b[kvq]\b", "cpu", "cuda")


@EVERYWHERE
@pytest.mark.parametrize("name", ["k", "v"])
def test_batches_differ(call: Call, name: str) -> None:
    call.changed(**{name: getattr(call, name)[:1]}).raises(ValueError, rf"\b{name}\b", r"\b1\b", r"\b2\b")


@EVERYWHERE
def test_heads_do_not_divide(call: Call) -> None:
    q, k, v = make_qkv(call.target, 2, (4, 3), 20, 30, 64)
    call.changed(q=q, k=k, v=v).raises(ValueError, r"\bk\b|heads", r"\b4\b", r"\b3\b")
    q, k, v = make_qkv(call.target, 2, (2, 4), 20, 30, 64)
    call.changed(q=q, k=k, v=v).raises(ValueError, r"\bk\b|heads", r"\b2\b", r"\b4\b")


@EVERYWHERE
def test_no_heads_at_all(call: Call) -> None:
    """Never a division by zero: an empty result where there is nothing to compute, an error where kv heads miss."""
    q, k, v = make_qkv(call.target, 2, (4, 0), 20, 30, 64)
    call.changed(q=q, k=k, v=v).raises(ValueError, r"\bk\b|heads", r"\b0\b")
    q, k, v = make_qkv(call.target, 2, (0, 2), 20, 30, 64)
    assert call.changed(q=q, k=k, v=v)().shape == (2, 0, 20, 64)


@EVERYWHERE
def test_heads_of_k_and_v_differ(call: Call) -> None:
    call.changed(v=call.v[:, :1]).raises(ValueError, r"\bv\b", r"\b1\b", r"\b2\b")


@EVERYWHERE
def test_lengths_of_k_and_v_differ(call: Call) -> None:
    call.changed(v=call.v[:, :, :29]).raises(ValueError, r"\bv\b", r"\b29\b", r"\b30\b")


@EVERYWHERE
def test_head_dims_of_q_and_k_differ(call: Call) -> None:
    call.changed(k=torch.cat([call.k, call.k], -1))
    assert call.raises(ValueError, r"\b128\b", r"\b64\b").startswith("k: head_dim 128 does not match q's 64")


@EVERYWHERE
@pytest.mark.parametrize("dim", [100, 264, 4, 12, 0])
def test_head_dim(call: Call, dim: int) -> None:
    limits = (r"multiple of 8|multiples of 8|steps? of 8", r"\b256\b")
    nearest = {100: r"\b96\b|\b104\b", 264: r"\b256\b", 4: r"\b8\b", 12: r"\b8\b|\b16\b", 0: r"\b8\b"}[dim]
    wrong = make_qkv(call.target, 2, (4, 2), 20, 30, dim)
    kinds = (ValueError, NotImplementedError)
    Call(call.target).changed(q=wrong[0], k=wrong[1]).raises(kinds, r"\bq\b", rf"\b{dim}\b", *limits, nearest)
    Call(call.target).changed(v=wrong[2]).raises(kinds, r"\bv\b", rf"\b{dim}\b", *limits, nearest)


@pytest.mark.gpu
def test_more_tiles_than_the_kernels_count() -> None:
    one = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16, device="cuda")
    k = one.expand(2**15, 1, 1, 8)
    with pytest.raises(ValueError, match=r"q: batch 32768 x 65536 heads .*above the limit"):
        flashmsa.attention(one.expand(2**15, 2**16, 1, 8), k, k)
    torch.cuda.empty_cache()


# scale, softcap, sinks, alibi_slopes, dropout_p, rng_state, deterministic, return_lse
NO_OPTIONS = (None, 0.0, None, None, 0.0, None, False, False)


def test_mask_kind_of_the_operator() -> None:
    """Of 64 bits: no kind is one of ours modulo 2^32."""
    call = Call(Target("cpu", "cpu", torch.float32))
    for kind in (-1, 7, 2**32, 2**32 + 1):
        with pytest.raises(ValueError, match=f"mask: kind {kind} is unknown"):
            torch.ops.flashmsa.attention(call.q, call.k, call.v, kind, [], [], *NO_OPTIONS)


@pytest.mark.parametrize(
    ("kind", "ints", "tensors", "message"),
    [
        (0, [1], [], "Dense takes 0 ints and 0 tensors, got 1 and 0"),
        (1, [2], [], "Causal's top_left flag is 2; must be 0 or 1"),
        (2, [0], [(0, 20)], "Document takes 1 ints and 2 tensors, got 1 and 1"),
        (3, [0] * 19, [], "Composite takes 20 ints"),
        (3, [-1] + [0] * 19, [], "Composite's bound is -1; must be from 0"),
        (3, [2**31] + [0] * 19, [], "Composite's bound is 2147483648; must be from 0"),
        (3, [0] * 18 + [256, 0], [], "Composite's flags are 256"),
        (3, [0] * 18 + [2, 0], [(3,)], "Composite's flags 2 need documents"),
        (3, [0] * 18 + [4, 0], [], "Composite takes 20 ints and 1 tensors, got 20 and 0"),
        (3, [0] * 18 + [4, 0], [(3,)], r"mask prefix: shape \[1\] does not match the batch of 2"),
        (3, [0] * 18 + [3, 0], [(0, 20), (0, 30), (1, 2)], r"mask seqused_k: shape \[2\] does not match the number of"),
        (4, [0, -1, 0, 2], [], "DilatedWindow's left is -1"),
        (4, [0, 1, 0, 0], [], "DilatedWindow's dilation is 0; must be from 1"),
        (5, [0], [], "HashBucket takes 1 ints and 4 tensors"),
        (6, [0] * 24, [], "BlockSparse takes 24 ints and 5 tensors"),
        (6, [0] * 20 + [64, 100, 1, 1], [(0,)] * 5, "BlockSparse's block_size is 64 x 100; must be multiples of 64"),
        (6, [0] * 20 + [128, 128, 1, 2], [(0,)] * 5, "1 x 2 blocks of 128 x 128 do not fit 20 queries and 30 keys"),
        (6, [0] * 20 + [128, 128, 1, 1], [(0,)] * 5, r"mask row_start: 1 dimensions"),
    ],
)
def test_lowered_masks_of_the_operator(kind: int, ints: list[int], tensors: list, message: str) -> None:
    """What the operator is handed without a mask object is checked as well, on the meta device too."""
    for device in ("cpu", "meta"):
        call = Call(Target("cpu", "cpu", torch.float32))
        held = [int32(*x, device=device) for x in tensors]
        q, k, v = (x.to(device) for x in (call.q, call.k, call.v))
        with pytest.raises(ValueError, match=message):
            torch.ops.flashmsa.attention(q, k, v, kind, ints, held, *NO_OPTIONS)


# ---------------------------------------------------------------------------------------------------------------------
# scale and the arguments whose features are not there yet


@EVERYWHERE
@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
def test_scale_is_not_finite(call: Call, scale: float) -> None:
    call.changed(scale=scale).raises(ValueError, r"\bscale\b", "nan" if math.isnan(scale) else "inf", "finite")


@EVERYWHERE
def test_scale_is_not_a_number(call: Call) -> None:
    call.changed(scale="0.1").raises(TypeError, r"\bscale\b")
    call.changed(scale=1j).raises(TypeError, r"\bscale\b", "complex")
    call.changed(scale=True).raises(TypeError, r"\bscale\b", "bool")
    call.changed(scale=np.ones(2)).raises(TypeError, r"\bscale\b", "ndarray")
    call.changed(scale=10**400).raises(ValueError, r"\bscale\b", "finite")


@EVERYWHERE
@pytest.mark.parametrize("requires_grad", [False, True])
def test_scale_is_no_tensor(call: Call, requires_grad: bool) -> None:
    """Reading one would wait for its device, and drop the gradient of a learnt one in silence."""
    scale = torch.tensor(0.125, device=call.q.device, requires_grad=requires_grad)
    call.changed(scale=scale).raises(TypeError, r"\bscale\b", "Tensor")


@EVERYWHERE
@pytest.mark.parametrize("scale", [np.float32(0.25), np.float64(0.25), np.int64(1), 1])
def test_scale_is_any_number(call: Call, scale: float) -> None:
    check(call.changed(scale=scale)(), None, call.q, call.k, call.v, scale=float(scale))


@pytest.mark.parametrize("target", NATIVE_ONE_EACH)
def test_a_gap_is_named(call: Call) -> None:
    device = call.q.device
    mask = flashmsa.HashBucket(*(torch.zeros(1, 1, n, dtype=torch.int32, device=device) for n in (20, 30)))
    call.changed(mask=mask, alibi_slopes=torch.zeros(4, device=device))
    call.raises(NotImplementedError, r"\balibi_slopes\b", "HashBucket")


@EVERYWHERE
def test_softcap(call: Call) -> None:
    for bad in (-1.0, -math.inf, math.inf, math.nan, -1):
        call.changed(softcap=bad).raises(ValueError, r"\bsoftcap\b", "positive|finite")
    if call.q.dtype != torch.float64:
        call.changed(softcap=1e39).raises(ValueError, r"\bsoftcap\b", "finite in fp32")
    for bad in ("30", True, 1j, None, torch.tensor(30.0), np.ones(2)):
        call.changed(softcap=bad).raises(TypeError, r"\bsoftcap\b", type(bad).__name__.removeprefix("None"))
    for good in (np.float32(2.0), np.int64(2), 2):
        assert torch.equal(call.changed(softcap=good)(), call.changed(softcap=2.0)())


@EVERYWHERE
@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
def test_sinks_and_slopes(call: Call, name: str) -> None:
    device = call.q.device

    def raises(value: object, kinds: type[Exception], *patterns: str) -> None:
        call.changed(**{name: value}).raises(kinds, rf"\b{name}\b", *patterns)

    raises(torch.zeros(3, device=device), ValueError, r"\b3\b", r"\b4\b")
    raises(torch.zeros((), device=device), ValueError, r"\b4\b")
    raises(torch.zeros(2, 4, 1, device=device), ValueError, r"\b4\b")
    raises(
        torch.zeros(2, 4, device=device) if name == "sinks" else torch.zeros(3, 4, device=device), ValueError, r"\b4\b"
    )
    for dtype in (torch.float64, torch.bfloat16, torch.int32):
        raises(torch.zeros(4, dtype=dtype, device=device), TypeError, str(dtype).removeprefix("torch."), "float32")
    other = "meta" if device.type == "cpu" else "cpu"
    raises(torch.zeros(4, device=other), (*BAD, RuntimeError), other)
    for bad in (0.5, [0.0] * 4, np.zeros(4, np.float32)):
        raises(bad, TypeError, type(bad).__name__)


@EVERYWHERE
@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
def test_sinks_and_slopes_that_require_grad(call: Call, name: str) -> None:
    value = torch.zeros(4, device=call.q.device, requires_grad=True)
    call.changed(**{name: value})
    if call.target.backend == "torch" or name == "sinks":
        assert call().requires_grad
    else:
        call.raises(NotImplementedError, rf"\b{name}\b", "no_grad", "torch")


@EVERYWHERE
def test_neutral_options_are_no_gap(call: Call) -> None:
    call.changed(softcap=0.0, sinks=None, alibi_slopes=None, dropout_p=0.0, deterministic=True, config=None)
    check(call(), None, call.q, call.k, call.v)


@EVERYWHERE
def test_options_are_keyword_only(call: Call) -> None:
    with pytest.raises(TypeError):
        flashmsa.attention(call.q, call.k, call.v, None, 0.1)
    with pytest.raises(TypeError, match="is_causal"):
        flashmsa.attention(call.q, call.k, call.v, is_causal=True)


# ---------------------------------------------------------------------------------------------------------------------
# Gradients, transforms


@EVERYWHERE
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_requires_grad_is_never_detached(call: Call, name: str) -> None:
    x = getattr(call, name).requires_grad_()
    (grad,) = torch.autograd.grad(call().sum(), x)
    assert grad.shape == x.shape and grad.dtype == x.dtype


@EVERYWHERE
def test_a_result_of_a_graph_is_never_detached(call: Call) -> None:
    weight = torch.ones((), device=call.q.device, dtype=call.q.dtype, requires_grad=True)
    assert call.changed(q=call.q * weight)().requires_grad


@EVERYWHERE
def test_out_has_no_gradient(call: Call) -> None:
    """out= is an overload without gradient: inputs that require one raise rather than lose it."""
    out = poisoned_out(call.q, call.v)
    call.q.requires_grad_()
    call.changed(out=out).raises((NotImplementedError, ValueError, RuntimeError), r"\bq\b|\bout\b", "no_grad|grad")


@EVERYWHERE
def test_vmap_raises(call: Call) -> None:
    with pytest.raises(NotImplementedError, match="vmap") as caught:
        torch.func.vmap(lambda q: flashmsa.attention(q, call.k, call.v, backend=call.target.backend))(call.q[None])
    assert "backend" not in str(caught.value), "no backend has it"


@EVERYWHERE
def test_vmap_of_gradients_raises(call: Call) -> None:
    q = call.q.clone().requires_grad_()
    out = flashmsa.attention(q, call.k, call.v, backend=call.target.backend)
    with pytest.raises(NotImplementedError, match="vmap is not supported"):
        torch.autograd.grad(out, q, torch.ones_like(out)[None], is_grads_batched=True)


@EVERYWHERE
def test_forward_mode_ad_raises(call: Call) -> None:
    with pytest.raises(NotImplementedError, match=r"forward-mode|jvp"):
        torch.func.jvp(
            lambda q: flashmsa.attention(q, call.k, call.v, backend=call.target.backend), (call.q,), (call.q,)
        )


# ---------------------------------------------------------------------------------------------------------------------
# mask


@EVERYWHERE
def test_mask_of_another_type(call: Call) -> None:
    call.changed(mask="causal").raises(TypeError, r"\bmask\b", "str", "Causal")
    call.changed(mask=True).raises(TypeError, r"\bmask\b", "bool", "Causal")
    call.changed(mask=flashmsa.Causal).raises(TypeError, r"\bmask\b", "type")
    with pytest.raises(TypeError, match=r"Mask: .*Causal\(\)"):
        flashmsa.Mask()
    dense = torch.ones(20, 30, dtype=torch.bool, device=call.q.device)
    call.changed(mask=dense).raises((TypeError, NotImplementedError), r"\bmask\b", "Tensor")


def test_align() -> None:
    with pytest.raises(ValueError, match="align") as caught:
        flashmsa.Causal(align="left")
    for part in ("left", "bottom-right", "top-left"):
        assert part in str(caught.value)
    with pytest.raises(BAD, match="align"):
        flashmsa.Causal(align=None)


def raises_offsets(patterns: tuple[str, ...], make: Callable[[], object], kinds: tuple = BAD) -> None:
    with pytest.raises(kinds) as caught:
        make()
    for pattern in patterns:
        assert re.search(pattern, str(caught.value)), f"nothing like {pattern!r} in: {caught.value}"


@pytest.mark.parametrize("name", ["offsets", "kv_offsets"])
def test_offsets(name: str) -> None:
    """Checked when the mask is made; of two tensors the bad one is named."""

    def make(offsets: object) -> Callable[[], object]:
        good = int32(0, 10, 20)
        return lambda: flashmsa.Document(offsets, good) if name == "offsets" else flashmsa.Document(good, offsets)

    word = rf"\b{name}\b"
    raises_offsets((word, "int64", "int32"), make(torch.tensor([0, 10, 20])))
    raises_offsets((word, "float32", "int32"), make(torch.tensor([0.0, 10.0, 20.0])))
    raises_offsets((word, "bool", "int32"), make(torch.tensor([False, True, True])))
    raises_offsets((word, r"\b5\b", r"\b0\b"), make(int32(5, 10, 20)))
    raises_offsets((word, r"-3\b", r"\b0\b"), make(int32(-3, 10, 20)))
    raises_offsets((word, "decreas", r"\b20\b", r"\b10\b"), make(int32(0, 20, 10)))
    raises_offsets((word, "decreas", r"-1\b"), make(int32(0, 0, -1)))
    raises_offsets((word, r"\b3\b|\(1, 1, 3\)|\[1, 1, 3\]"), make(int32(0, 10, 20)[None, None]))
    raises_offsets((word, r"\b0\b|\(\)|\[\]"), make(int32(0)[0]))
    raises_offsets((word,), make(int32()))
    if name == "offsets":
        raises_offsets((word, "None"), make(None))


def test_offsets_of_each_batch() -> None:
    good = torch.stack([int32(0, 10, 20), int32(0, 5, 20)])
    flashmsa.Document(good)
    raises_offsets(
        (r"\boffsets\b", "decreas", r"\b7\b"), lambda: flashmsa.Document(torch.stack([good[0], int32(0, 7, 5)]))
    )
    raises_offsets((r"\boffsets\b", r"\b1\b"), lambda: flashmsa.Document(torch.stack([good[0], int32(1, 7, 9)])))


def test_offsets_of_two_shapes() -> None:
    raises_offsets(("kv_offsets", r"\b2\b", r"\b3\b"), lambda: flashmsa.Document(int32(0, 10, 20), int32(0, 20)))
    raises_offsets(("kv_offsets",), lambda: flashmsa.Document(int32(0, 10, 20), int32(0, 10, 20).expand(2, 3)))


@EVERYWHERE
def test_offsets_of_another_batch(call: Call) -> None:
    offsets = torch.stack([int32(0, 10, 20)] * 3).to(call.q.device)
    call.changed(mask=flashmsa.Document(offsets)).raises(ValueError, r"\bmask\b|offsets", r"\b3\b", r"\b2\b")


@EVERYWHERE
def test_offsets_on_another_device(call: Call) -> None:
    other = "meta" if call.q.device.type == "cpu" else "cpu"
    mask = flashmsa.Document(int32(0, 10, 20)) if other == "cpu" else flashmsa.Document(int32(0, 10, 20).to("meta"))
    call.changed(mask=mask).raises((*BAD, RuntimeError), r"\bmask\b|offsets", other, call.q.device.type, r"\.to\(")


@pytest.mark.gpu
def test_mask_to_device() -> None:
    call = Call(Target("sm90", "cuda", torch.bfloat16))
    mask = flashmsa.Document(int32(0, 10, 20), int32(0, 25, 30), causal=True)
    check(
        call.changed(mask=mask.to("cuda"))(),
        None,
        call.q,
        call.k,
        call.v,
        document(0, 10, 20, kv=(0, 25, 30), causal=True),
    )


def masks_that_do_not_fit(device: torch.device | str) -> dict[str, tuple[flashmsa.Mask, str]]:
    """Each for other tensors than q (2, 4, 20, 64) and k (2, 2, 30, 64), and what the message must speak of."""

    def buckets(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    def blocks(*shape: int, size: tuple[int, int] = (128, 128)) -> flashmsa.BlockSparse:
        return flashmsa.BlockSparse(torch.ones(shape, dtype=torch.bool, device=device), size)

    def dense(*shape: int) -> flashmsa.BlockSparse:
        return flashmsa.BlockSparse.from_dense(torch.rand(shape, device=device) < 0.5)

    causal = flashmsa.Causal()
    return {
        "prefix": (flashmsa.PrefixLM(buckets(3)), "prefix"),
        "prefix in &": (flashmsa.PrefixLM(buckets(3)) & causal, "prefix"),
        "documents in &": (flashmsa.Document(buckets(3, 4)) & causal, r"offsets|\b3\b"),
        "q_bucket length": (flashmsa.HashBucket(buckets(1, 1, 21), buckets(1, 1, 30)), "q_bucket"),
        "kv_bucket length": (flashmsa.HashBucket(buckets(1, 1, 20), buckets(1, 1, 29)), "kv_bucket"),
        "one bucket for two lengths": (flashmsa.HashBucket(buckets(1, 1, 20)), "bucket"),
        "q_bucket batch": (flashmsa.HashBucket(buckets(3, 1, 20), buckets(1, 1, 30)), "q_bucket"),
        "q_bucket heads": (flashmsa.HashBucket(buckets(1, 2, 20), buckets(1, 1, 30)), "q_bucket"),
        "kv_bucket heads": (flashmsa.HashBucket(buckets(1, 1, 20), buckets(1, 3, 30)), "kv_bucket"),
        "block rows": (blocks(1, 1, 2, 1), "blocks"),
        "block columns": (blocks(1, 1, 1, 2), "blocks"),
        "block size": (blocks(1, 1, 1, 3, size=(64, 64)), "blocks"),
        "blocks batch": (blocks(3, 1, 1, 1), "blocks"),
        "blocks heads": (blocks(1, 2, 1, 1), "blocks"),
        "blocks in &": (blocks(1, 1, 2, 1) & causal, "blocks"),
        "bits of other lengths": (dense(20, 29), "dense bits"),
        "bits in &": (dense(21, 30) & causal, "dense bits"),
    }


@EVERYWHERE
@pytest.mark.parametrize("name", masks_that_do_not_fit("cpu"))
def test_masks_that_do_not_fit(call: Call, name: str) -> None:
    mask, word = masks_that_do_not_fit(call.q.device)[name]
    call.changed(mask=mask).raises(ValueError, r"\bmask\b", word)
    with pytest.raises(ValueError, match=word):
        flashmsa.reference(call.q, call.k, call.v, mask)
    with pytest.raises(ValueError, match=word):
        flashmsa.explain(call.q, call.k, call.v, mask)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [None, "sm90", "torch"])
@pytest.mark.parametrize("family", ["prefix-by-batch", "and-document-window", "hash-cross", "blocks", "blocks-bits"])
def test_masks_on_another_device(backend: str | None, family: str) -> None:
    call = Call(Target(backend, "cuda", torch.bfloat16))
    case = mask_for(family, 2, 20, 30)
    call.changed(mask=case.build("cpu")).raises(ValueError, r"\bmask\b", "cpu", r"mask\.to\(")
    check(call.changed(mask=case.build("cpu").to("cuda"))(), None, call.q, call.k, call.v, case)


@EVERYWHERE
@pytest.mark.parametrize("bad", [-1, -(2**31), 2**31 - 1])
def test_prefixes_gone_bad_are_clamped(call: Call, bad: int, request: pytest.FixtureRequest) -> None:
    """A negative prefix counts as 0, a huge one as all keys; checked mode names the negative one."""
    prefix = int32(5, 7, device=call.q.device)
    call.changed(mask=flashmsa.PrefixLM(prefix), return_lse=True)
    prefix[1] = bad
    out, lse = call()
    check(out, lse, call.q, call.k, call.v, Prefixes("prefix", prefixes=(5, min(max(bad, 0), 30))))
    request.getfixturevalue("checked_mode")
    if bad < 0:
        call.raises(ValueError, r"prefix\[1\]", str(bad))
    else:
        call()


@EVERYWHERE
def test_checked_mode_counts_the_cells(call: Call, checked_mode: None) -> None:
    """More cells than an update has room for: they are left out until checked."""
    blocks = torch.zeros(1, 1, 3, 1, dtype=torch.bool, device=call.q.device)
    call.q = torch.cat([call.q] * 15, 2)
    mask = flashmsa.BlockSparse(blocks, capacity=2)
    call.changed(mask=mask)()
    if call.q.device.type == "cpu":
        with pytest.raises(ValueError, match="capacity of 2"):
            mask.update(~blocks)
    else:
        mask.update(~blocks)
    call.raises(ValueError, "3 cells", "capacity of 2")
    for both in (mask & flashmsa.Causal(), flashmsa.SlidingWindow(9) & mask):
        call.changed(mask=both).raises(ValueError, "capacity of 2")
    mask.update(blocks)
    call()


@EVERYWHERE
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_checked_mode_lets_good_masks_pass(call: Call, family: str, checked_mode: None) -> None:
    case = mask_for(family, 2, 20, 30, heads=(4, 2))
    check(call.changed(mask=case.build(call.q.device))(), None, call.q, call.k, call.v, case)


BAD_LATER = [(5, 10, 20), (0, 15, 10), (0, -1, 20), (0, 10, 2**31 - 1), (-(2**31), 0, 20), (2**31 - 1, 0, -(2**31))]


@EVERYWHERE
@pytest.mark.parametrize("cuts", BAD_LATER, ids=str)
@pytest.mark.parametrize("side", ["offsets", "kv_offsets"])
def test_offsets_gone_bad_are_clamped(call: Call, cuts: tuple[int, ...], side: str) -> None:
    """Values that changed after the mask was made are not read back: nothing out of bounds is read or written."""
    for causal in (False, True):
        held = {n: int32(0, 10, 20, device=call.q.device) for n in ("offsets", "kv_offsets")}
        mask = flashmsa.Document(**held, causal=causal)
        held[side].copy_(int32(*cuts))
        big = torch.full((4, 6, 60, 64), 7.0, dtype=call.q.dtype, device=call.q.device)
        inner = big[1:3, 1:5, 20:40]
        call.changed(mask=mask, out=inner, return_lse=True)()
        outside = torch.ones_like(big, dtype=torch.bool)
        outside[1:3, 1:5, 20:40] = False
        assert (big[outside] == 7.0).all()
        held[side].copy_(int32(0, 10, 20))
        call()
        check(inner, None, call.q, call.k, call.v, document(0, 10, 20, causal=causal))


@EVERYWHERE
@pytest.mark.parametrize("cuts", [*BAD_LATER, (0, 10, 31)], ids=str)
@pytest.mark.parametrize("side", ["offsets", "kv_offsets"])
def test_checked_mode_reads_the_values(call: Call, cuts: tuple[int, ...], side: str, checked_mode: None) -> None:
    held = {n: int32(0, 10, 20, device=call.q.device) for n in ("offsets", "kv_offsets")}
    mask = flashmsa.Document(**held)
    call.changed(mask=mask)
    check(call(), None, call.q, call.k, call.v, document(0, 10, 20))
    held[side].copy_(int32(*cuts))
    wrong = next(str(c) for c in cuts if c not in (0, 10, 20) or cuts == (0, 15, 10))
    call.raises(ValueError, rf"\b{side}\b", re.escape(wrong))


@EVERYWHERE
def test_checked_mode_knows_both_lengths(call: Call, checked_mode: None) -> None:
    """20 queries, 30 keys: offsets up to 30 are right for keys and wrong for queries."""
    device = call.q.device
    call.changed(mask=flashmsa.Document(int32(0, 10, 20, device=device), int32(0, 10, 30, device=device)))()
    message = call.changed(mask=flashmsa.Document(int32(0, 10, 30, device=device))).raises(
        ValueError, "offsets", r"\b30\b"
    )
    assert re.search(r"\b20\b", message)


@pytest.mark.gpu
@pytest.mark.parametrize("cuts", BAD_LATER, ids=str)
def test_bad_values_on_the_device_pass_until_checked(cuts: tuple[int, ...]) -> None:
    """Offsets born on the device are not read when the mask is made."""
    call = Call(Target("sm90", "cuda", torch.bfloat16))
    torch.cuda.set_sync_debug_mode("error")
    try:
        mask = flashmsa.Document(int32(*cuts).to("cuda", non_blocking=True))
        call.changed(mask=mask)()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    flashmsa.check(True)
    try:
        call.raises(ValueError, "offsets")
    finally:
        flashmsa.check(False)


# ---------------------------------------------------------------------------------------------------------------------
# backend, out


@EVERYWHERE
def test_backend_of_another_name(call: Call) -> None:
    call.changed(backend="cudnn").raises(ValueError, r"\bbackend\b", "cudnn", "sm90", "cpu", "torch")
    call.changed(backend=3).raises(BAD, r"\bbackend\b", r"\b3\b|int")


def test_sm90_on_cpu_tensors() -> None:
    call = Call(Target("sm90", "cpu", torch.bfloat16))
    call.raises((ValueError, RuntimeError, NotImplementedError), "sm90", r"\bcpu\b")


@pytest.mark.gpu
def test_backend_that_cannot_run_the_case() -> None:
    call = Call(Target("cpu", "cuda", torch.bfloat16))
    call.raises((ValueError, RuntimeError), r"\bcpu\b", "cuda")
    call = Call(Target("sm90", "cuda", torch.float32))
    call.raises((ValueError, NotImplementedError), "sm90", "(?i)float32|float", HALF)


@EVERYWHERE
def test_out_of_another_shape_or_type(call: Call) -> None:
    shape, dtype, device = (2, 4, 20, 64), call.q.dtype, call.q.device

    def out(*shape: int, dtype: torch.dtype = dtype, device: torch.device | str = device) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    call.changed(out=out(2, 4, 21, 64)).raises(ValueError, r"\bout\b", r"\b21\b", r"\b20\b")
    call.changed(out=out(2, 4, 20, 72)).raises(ValueError, r"\bout\b", r"\b72\b", r"\b64\b")
    call.changed(out=out(4, 20, 64)).raises(ValueError, r"\bout\b")
    call.changed(out=out(*shape, dtype=torch.float64)).raises(BAD, r"\bout\b", "(?i)float64|double")
    call.changed(out=out(*shape, device="meta")).raises((*BAD, RuntimeError), r"\bout\b", "meta")
    call.changed(out=np.zeros(shape, np.float32)).raises(TypeError, r"\bout\b", "ndarray")


@EVERYWHERE
@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_out_that_overlaps_itself(call: Call, dim: int) -> None:
    """An expanded output has one place for several results."""
    shape = [2, 4, 20, 64]
    narrow = list(shape)
    narrow[dim] = 1
    out = torch.zeros(narrow, dtype=call.q.dtype, device=call.q.device).expand(shape)
    call.changed(out=out).raises((ValueError, RuntimeError), r"\bout\b|overlap|single memory location")


@EVERYWHERE
def test_out_that_requires_grad(call: Call) -> None:
    out = torch.zeros(2, 4, 20, 64, dtype=call.q.dtype, device=call.q.device, requires_grad=True)
    call.changed(out=out).raises((ValueError, RuntimeError, NotImplementedError), r"\bout\b|grad")


# ---------------------------------------------------------------------------------------------------------------------
# merge_states, reference


def test_merge_states_of_other_shapes() -> None:
    out, lse = torch.zeros(2, 4, 20, 64), torch.zeros(2, 4, 20)
    raises_offsets(
        ("out_b", r"\b21\b", r"\b20\b"), lambda: flashmsa.merge_states(out, lse, torch.zeros(2, 4, 21, 64), lse)
    )
    raises_offsets(("lse_b", r"\b19\b", r"\b20\b"), lambda: flashmsa.merge_states(out, lse, out, lse[:, :, 1:]))
    raises_offsets(("lse_a",), lambda: flashmsa.merge_states(out, lse[0], out, lse))


def test_reference_checks_like_attention() -> None:
    call = Call(Target(None, "cpu", torch.float32))
    with pytest.raises(ValueError, match="k: head_dim 128 does not match q's 64"):
        flashmsa.reference(call.q, torch.cat([call.k, call.k], -1), call.v)
    with pytest.raises(ValueError, match="scale"):
        flashmsa.reference(call.q, call.k, call.v, scale=math.nan)
    with pytest.raises(TypeError, match="mask"):
        flashmsa.reference(call.q, call.k, call.v, mask="causal")
