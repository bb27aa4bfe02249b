"""Bad input to the calls over paged caches: a clear error before anything is launched or written."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from helpers import ONE_EACH, Target
from paged_cases import make_cache, packed, queries

import flashmsa

BAD = (TypeError, ValueError)
EVERYWHERE = pytest.mark.parametrize("target", ONE_EACH)
NATIVE_GPU = pytest.mark.parametrize("target", [ONE_EACH[2]])


class Call:
    """A good call, to be spoilt in one place."""

    def __init__(self, target: Target, is_packed: bool = False) -> None:
        self.target = target
        cache = make_cache(target, [60, 37], 16, 2, 64)
        names = ("k_pages", "v_pages", "block_table", "kv_lens")
        self.arguments = {"q": queries(target, 2, 4, 20, 64), **dict(zip(names, cache.arguments(), strict=True))}
        self.options: dict = {"backend": target.backend}
        if is_packed:
            self.arguments["q"], self.options["cu_seqlens_q"] = packed(target, [5, 15], 4, 64)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.arguments[name]

    def __call__(self):
        return flashmsa.paged_attention(*self.arguments.values(), **self.options)

    def changed(self, **arguments) -> Call:
        for name, value in arguments.items():
            (self.arguments if name in self.arguments else self.options)[name] = value
        return self

    def raises(self, kinds: type | tuple[type, ...], *patterns: str) -> None:
        with pytest.raises(kinds) as caught:
            self()
        message = str(caught.value)
        assert not isinstance(caught.value, AssertionError)
        for pattern in patterns:
            assert re.search(pattern, message), f"nothing like {pattern!r} in: {message}"


@pytest.fixture
def call(target: Target) -> Call:
    return Call(target)


def int32(*values: int, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@EVERYWHERE
def test_the_good_calls_are_good(target: Target) -> None:
    assert Call(target)().shape == (2, 4, 20, 64)
    assert Call(target, is_packed=True)().shape == (20, 4, 64)


@EVERYWHERE
@pytest.mark.parametrize("name", ["q", "k_pages", "v_pages", "block_table", "kv_lens", "tree_mask", "query_pages"])
@pytest.mark.parametrize("wrong", [3, [[1]], np.zeros((2, 3))], ids=["int", "list", "numpy"])
def test_not_a_tensor(call: Call, name: str, wrong: object) -> None:
    call.changed(**{name: wrong}).raises(TypeError, name, "torch.Tensor")


@EVERYWHERE
@pytest.mark.parametrize("name", ["block_table", "kv_lens"])
def test_integers_of_another_type(call: Call, name: str) -> None:
    call.changed(**{name: call[name].long()}).raises(TypeError, name, "int64", "int32")


@EVERYWHERE
def test_dtypes_that_do_not_match(target: Target) -> None:
    other = torch.float16
    Call(target).changed(q=Call(target)["q"].to(other)).raises(TypeError, "q", "float16", r"k_pages")
    Call(target).changed(v_pages=Call(target)["v_pages"].to(other)).raises(TypeError, "v_pages", "float16")
    Call(target).changed(k_pages=Call(target)["k_pages"].int()).raises(TypeError, "k_pages", "int32")


@EVERYWHERE
def test_another_device(call: Call) -> None:
    for name in ("v_pages", "block_table", "kv_lens"):
        before = call[name]
        call.changed(**{name: before.to("meta")}).raises(ValueError, name, "meta")
        call.changed(**{name: before})


@EVERYWHERE
@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("q", (4, 20, 64), "cu_seqlens_q"),
        ("q", (2, 4, 20, 72), "head_dim 64 does not match q's 72"),
        ("q", (2, 3, 20, 64), "2 heads do not divide q's 3"),
        ("q", (3, 4, 20, 64), "batch of 3"),
        ("k_pages", (10, 16, 64), "pages, page_size, heads, head_dim"),
        ("v_pages", (10, 16, 1, 64), "v_pages"),
        ("v_pages", (10, 16, 2, 20), "multiple of 8"),
        ("block_table", (2,), "batch, max_pages"),
        ("block_table", (3, 4), "batch of 2"),
        ("kv_lens", (3,), "batch of 2"),
        ("kv_lens", (2, 1), "kv_lens"),
    ],
)
def test_shapes(call: Call, name: str, shape: tuple[int, ...], says: str) -> None:
    call.changed(**{name: call[name].new_zeros(shape)}).raises(ValueError, says)


@EVERYWHERE
@pytest.mark.parametrize(("size", "nearest"), [(0, "1, 8"), (2, "1"), (4, "8"), (12, "16"), (24, "32"), (100, "96")])
def test_page_sizes(call: Call, size: int, nearest: str) -> None:
    pools = {name: call[name].new_zeros(10, size, 2, 64) for name in ("k_pages", "v_pages")}
    call.changed(**pools).raises(ValueError, f"page_size {'is 0' if size == 0 else size}", nearest)


@EVERYWHERE
def test_a_cache_is_not_copied(call: Call) -> None:
    """A last stride that is not 1 raises, where q's is copied."""
    k = call["k_pages"]
    strided = torch.stack([k, k], -1)[..., 0]
    call.changed(q=torch.stack([call["q"]] * 2, -1)[..., 0])()
    call.changed(k_pages=strided).raises(ValueError, "k_pages", "strides", "never copied")


@NATIVE_GPU
@pytest.mark.gpu
def test_alignment_of_caches(call: Call) -> None:
    k = call["k_pages"]
    flat = torch.zeros(k.numel() + 1, dtype=k.dtype, device=k.device)
    call.changed(k_pages=flat[1:].view(k.shape)).raises(ValueError, "k_pages", "16 bytes")
    call.changed(k_pages=torch.zeros(*k.shape[:3], 68, dtype=k.dtype, device=k.device)[..., :64]).raises(
        ValueError, "k_pages", "strides"
    )


@NATIVE_GPU
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pages_of_a_dtype_without_kernels(call: Call, dtype: torch.dtype) -> None:
    """Moved by composed operators alone: no kernel is compiled for them."""
    k, v, *where = list(call.arguments.values())[1:]
    k, v = k.to(dtype), v.to(dtype)
    before = k.clone()
    new = torch.zeros(2, 2, 1, 64, dtype=dtype, device=k.device)
    for move in (
        lambda: flashmsa.append_kv(k, v, *where, new, new, backend="sm90"),
        lambda: flashmsa.gather_pages(k, v, *where, backend="sm90"),
    ):
        with pytest.raises((NotImplementedError, TypeError), match=r"float(32|64).*float16"):
            move()
    assert torch.equal(k.nan_to_num(), before.nan_to_num())
    assert flashmsa.gather_pages(k, v, *where, backend="torch")[0].dtype == dtype


@EVERYWHERE
def test_masks(call: Call) -> None:
    device = call["q"].device
    offsets = int32(0, 9, 20, device=device)
    for mask in (
        flashmsa.Document(offsets),
        flashmsa.Document(offsets) & flashmsa.Causal(),
        flashmsa.DilatedWindow(3, dilation=2),
    ):
        call.changed(mask=mask).raises(NotImplementedError, "mask")
    call.changed(mask=flashmsa.PrefixLM(int32(1, 2, 3, device=device))).raises(ValueError, "prefix")
    call.changed(mask="causal").raises(TypeError, "mask", "str")
    slopes = torch.rand(4, device=device)
    call.changed(mask=flashmsa.Causal("top-left"), alibi_slopes=slopes).raises(NotImplementedError, "alibi_slopes")


@EVERYWHERE
def test_query_pages(call: Call) -> None:
    device = call["q"].device
    call.changed(query_pages=int32(0, 1, device=device)).raises(ValueError, "query_pages", "query blocks")
    zeros = torch.zeros(2, 2, 3, dtype=torch.int32, device=device)
    call.changed(query_pages=zeros).raises(ValueError, "query_pages", "1 blocks of 128")
    call.changed(query_pages=zeros[:, :1].long()).raises(TypeError, "query_pages", "int32")
    call.changed(query_pages=zeros[:1, :1]).raises(ValueError, "query_pages", "batch of 2")
    call.changed(query_pages=zeros[:, :1], query_block=0).raises(ValueError, "query_block")
    call.changed(query_block=1.5).raises(TypeError, "query_block")


@EVERYWHERE
def test_trees(call: Call) -> None:
    device = call["q"].device
    good = torch.ones(2, 20, 20, dtype=torch.bool, device=device)
    call.changed(tree_mask=good.float()).raises(TypeError, "tree_mask", "float32")
    call.changed(tree_mask=good[:, :, :19]).raises(ValueError, "tree_mask", r"\(2, 20, 20\)")
    call.changed(tree_mask=torch.ones(2, 19, dtype=torch.int32, device=device)).raises(ValueError, "tree_mask", "20")
    long = queries(call.target, 2, 4, 40, 64)
    words = torch.ones(2, 40, dtype=torch.int32, device=device)
    call.changed(q=long, tree_mask=words).raises(ValueError, "tree_mask", "32")


@EVERYWHERE
def test_packed_queries(target: Target) -> None:
    def call() -> Call:
        return Call(target, is_packed=True)

    cuts = call().options["cu_seqlens_q"]
    call().changed(cu_seqlens_q=cuts.long()).raises(TypeError, "cu_seqlens_q", "int32")
    call().changed(cu_seqlens_q=cuts[:0]).raises(ValueError, "cu_seqlens_q")
    call().changed(cu_seqlens_q=cuts[:2]).raises(ValueError, "batch of 1")
    call().changed(q=queries(target, 2, 4, 20, 64)).raises(ValueError, "q", "packed")
    call().changed(max_seqlen_q="3").raises(TypeError, "max_seqlen_q")
    call().changed(max_seqlen_q=-1).raises(ValueError, "max_seqlen_q")
    call().changed(max_seqlen_q=cuts[1]).raises(TypeError, "max_seqlen_q", "Tensor")
    Call(target).changed(max_seqlen_q=20).raises(ValueError, "max_seqlen_q", "cu_seqlens_q")
    tree = torch.ones(1, 20, 20, dtype=torch.bool, device=target.device)
    call().changed(tree_mask=tree).raises(NotImplementedError, "tree_mask", "packed")


@EVERYWHERE
@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("scale", float("inf"), "finite"),
        ("scale", "1", "number"),
        ("softcap", -1.0, "softcap"),
        ("num_splits", -1, "num_splits"),
        ("num_splits", 2.0, "int"),
        ("batch_invariant", 1, "bool"),
        ("backend", "cuda", "does not exist"),
        ("sinks", torch.zeros(3), "sinks"),
        ("sinks", torch.zeros(4, dtype=torch.float64), "float32"),
        ("alibi_slopes", torch.zeros(3, 4), "alibi_slopes"),
    ],
    ids=str,
)
def test_options(call: Call, name: str, value: object, says: str) -> None:
    value = value.to(call["q"].device) if isinstance(value, torch.Tensor) else value
    call.changed(**{name: value}).raises(BAD, says)


@EVERYWHERE
def test_splits_of_an_invariant_call(call: Call) -> None:
    call.changed(num_splits=3, batch_invariant=True)
    call.raises(NotImplementedError if call.target.backend == "torch" else ValueError, "batch_invariant")


def test_the_composed_backend_is_not_batch_invariant() -> None:
    Call(Target("torch", "cpu", torch.float32)).changed(batch_invariant=True).raises(
        NotImplementedError, "batch_invariant"
    )


@EVERYWHERE
def test_caches_that_do_not_fit(call: Call) -> None:
    call.changed(kv_lens=None).raises(ValueError, "kv_lens")
    call.changed(block_table=None, kv_lens=None).raises(ValueError, "k_pages", "batch of 2")
    k = torch.zeros(2, 60, 2, 64, dtype=call["q"].dtype, device=call["q"].device)
    lists = torch.zeros(2, 1, 1, dtype=torch.int32, device=k.device)
    call.changed(k_pages=k, v_pages=k, query_pages=lists).raises(ValueError, "query_pages", "block_table")
    call.changed(k_pages=k[0]).raises(ValueError, "k_pages", "dense cache")


@NATIVE_GPU
@pytest.mark.gpu
def test_workspaces(call: Call) -> None:
    call.changed(q=call["q"][:, :, :1])
    k = torch.zeros(4096, 16, 2, 64, dtype=call["q"].dtype, device="cuda")
    table = torch.arange(4096, dtype=torch.int32, device="cuda").view(2, 2048)
    call.changed(k_pages=k, v_pages=k, block_table=table)
    need = flashmsa.paged_workspace(*list(call.arguments.values())[:4]).numel()
    assert need > 0
    call.changed(workspace=torch.empty(need, dtype=torch.uint8, device="cuda"))()
    call.changed(workspace=torch.empty(need - 1, dtype=torch.uint8, device="cuda")).raises(
        ValueError, "workspace", str(need)
    )
    call.changed(workspace=torch.empty(need, dtype=torch.uint8)).raises(ValueError, "workspace", "cpu")


# ---------------------------------------------------------------------------------------------------------------------
# Gradients, transforms


@EVERYWHERE
@pytest.mark.parametrize("name", ["q", "k_pages", "v_pages"])
def test_gradients_are_refused(call: Call, name: str) -> None:
    call.changed(**{name: call[name].requires_grad_()})
    call.raises(NotImplementedError, name, "requires grad", "no_grad")
    with torch.no_grad():
        assert call().shape == (2, 4, 20, 64)


@EVERYWHERE
def test_gradients_of_moved_tokens_are_refused(call: Call) -> None:
    cache = list(call.arguments.values())[1:]
    new = queries(call.target, 2, 2, 1, 64).requires_grad_()
    backend = call.target.backend
    with pytest.raises(NotImplementedError, match=r"k_new.*requires grad"):
        flashmsa.append_kv(*cache, new, new, backend=backend)
    cache[0] = cache[0].requires_grad_()
    with pytest.raises(NotImplementedError, match=r"k_pages.*requires grad"):
        flashmsa.gather_pages(*cache, backend=backend)


def test_vmap_is_refused() -> None:
    arguments = list(Call(Target("cpu", "cpu", torch.float32)).arguments.values())
    with pytest.raises(NotImplementedError, match="vmap"):
        torch.vmap(lambda q: flashmsa.paged_attention(q, *arguments[1:]))(arguments[0][None])


def test_written_caches_change_their_version() -> None:
    """Autograd must notice that a saved cache was overwritten."""
    call = Call(Target("cpu", "cpu", torch.float32))
    cache = list(call.arguments.values())[1:]
    before = cache[0]._version, cache[1]._version
    new = queries(call.target, 2, 2, 1, 64)
    flashmsa.append_kv(*cache, new, new)
    assert (cache[0]._version, cache[1]._version) > before and cache[1]._version > before[1]


# ---------------------------------------------------------------------------------------------------------------------
# append_kv, gather_pages


class Append(Call):
    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.arguments.pop("q")
        self.arguments["k_new"], self.arguments["v_new"] = (queries(target, 2, 2, 3, 64) for _ in range(2))
        self.arguments["rope"] = None

    def __call__(self) -> None:
        before = self["k_pages"].clone()
        try:
            flashmsa.append_kv(*self.arguments.values(), **self.options)
        except Exception:
            if self["k_pages"].device.type != "meta":
                assert torch.equal(before.nan_to_num(), self["k_pages"].nan_to_num()), "written before the error"
            raise


@EVERYWHERE
def test_append(target: Target) -> None:
    def call() -> Append:
        return Append(target)

    call()()
    dtype, device = call()["k_pages"].dtype, target.device
    new = call()["k_new"]
    call().changed(k_new=new[0]).raises(ValueError, "k_new", "cu_seqlens")
    call().changed(k_new=new[:, :1]).raises(ValueError, "k_new", "1 heads")
    call().changed(k_new=new[..., :32]).raises(ValueError, "k_new", "head_dim 32")
    call().changed(v_new=new[:, :, :2]).raises(ValueError, "v_new", "2 tokens")
    call().changed(k_new=new[:1], v_new=new[:1]).raises(ValueError, "k_new", "batch of 2")
    call().changed(k_new=new.double(), v_new=new.double()).raises(TypeError, "k_new", "float64")
    call().changed(k_new=new.to("meta")).raises(ValueError, "meta")
    call().changed(kv_lens=call()["kv_lens"].long()).raises(TypeError, "kv_lens", "int32")
    call().changed(cu_seqlens=int32(0, 3, device=device), k_new=new[0].transpose(0, 1)).raises(
        ValueError, "cu_seqlens", r"\(3,\)"
    )
    cos = torch.ones(100, 32, device=device)
    call().changed(rope=3).raises(TypeError, "rope", "cos, sin")
    call().changed(rope=(cos, None)).raises(TypeError, "rope sin")
    call().changed(rope=(cos, cos[:50])).raises(ValueError, "rope sin", "50, 32")
    call().changed(rope=(torch.ones(100, 40, device=device),) * 2).raises(ValueError, "rope cos", "80 columns")
    call().changed(rope=(cos[0], cos[0])).raises(ValueError, "rope cos", "positions")
    call().changed(rope=(cos.double(), cos.double())).raises(TypeError, "rope cos", "float64")
    call().changed(rope=(cos, cos, 1)).raises(TypeError, "interleaved", "bool")
    strided = torch.zeros(10, 16, 2, 64, 2, dtype=dtype, device=device)[..., 0]
    call().changed(k_pages=strided, v_pages=strided).raises(ValueError, "k_pages", "never copied")


@EVERYWHERE
def test_gather(call: Call) -> None:
    cache = list(call.arguments.values())[1:]
    backend = call.target.backend
    with pytest.raises(TypeError, match=r"block_table.*int32"):
        flashmsa.gather_pages(cache[0], cache[1], cache[2].long(), cache[3], backend=backend)
    with pytest.raises(ValueError, match="page_size 12"):
        flashmsa.gather_pages(*(x[:, :12] for x in cache[:2]), *cache[2:], backend=backend)
    with pytest.raises(ValueError, match="kv_lens"):
        flashmsa.gather_pages(*cache[:3], cache[3][:1], backend=backend)


# ---------------------------------------------------------------------------------------------------------------------
# Checked mode


@EVERYWHERE
def test_checked_mode(target: Target, checked_mode: None) -> None:
    device = target.device

    def changed(name: str, place: tuple[int, ...], value: int) -> Call:
        call = Call(target)
        x = call[name].clone()
        x[place] = value
        return call.changed(**{name: x})

    Call(target)()
    Call(target, is_packed=True)()
    pages = Call(target)["k_pages"].shape[0]
    capacity = Call(target)["block_table"].shape[1] * 16
    changed("kv_lens", (1,), capacity + 1).raises(ValueError, r"kv_lens\[1\]", str(capacity + 1), str(capacity))
    changed("kv_lens", (0,), -1).raises(ValueError, r"kv_lens\[0\]: -1")
    changed("block_table", (1, 2), pages).raises(ValueError, r"block_table\[1, 2\]", str(pages))
    changed("block_table", (1, 3), pages)()  # past the length
    lists = torch.tensor([[[0, -1]], [[99, 0]]], dtype=torch.int32, device=device)
    Call(target).changed(query_pages=lists).raises(ValueError, r"query_pages\[1, 0, 0\]: 99")
    for cuts, says in (((1, 5, 20), "start at 0"), ((0, 9, 3), "never decrease"), ((0, 5, 21), "20 tokens")):
        Call(target, is_packed=True).changed(cu_seqlens_q=int32(*cuts, device=device)).raises(ValueError, says)
    Call(target, is_packed=True).changed(max_seqlen_q=7).raises(ValueError, "max_seqlen_q", "15")


@EVERYWHERE
def test_checked_append(target: Target, checked_mode: None) -> None:
    call = Append(target).changed(kv_lens=int32(60, 37, device=target.device))
    call()
    capacity = call["block_table"].shape[1] * 16
    call.changed(kv_lens=int32(capacity - 1, 37, device=target.device)).raises(ValueError, r"kv_lens\[0\]", "room|more")
    call.changed(kv_lens=int32(60, 46, device=target.device)).raises(ValueError, r"block_table\[1, 3\]")
    cos = torch.ones(40, 32, device=target.device)
    call.changed(kv_lens=int32(20, 37, device=target.device), rope=(cos, cos))()
    call.changed(kv_lens=int32(20, 38, device=target.device)).raises(ValueError, "rope cos", "40 positions")
    bad = call["block_table"].clone()
    bad[0, 0] = -1
    with pytest.raises(ValueError, match=r"block_table\[0, 0\]: -1"):
        flashmsa.gather_pages(*(call[x] for x in ("k_pages", "v_pages")), bad, call["kv_lens"], backend=target.backend)
