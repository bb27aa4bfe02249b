"""Dilated windows, hash buckets and block-sparse masks: cases with a known answer; every family of masks as well."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from gradients import run_backward
from helpers import (
    ALL_FAMILIES,
    CAUSAL,
    DENSE,
    ONE_EACH,
    Blocks,
    Buckets,
    Dilated,
    MaskCase,
    Pairs,
    Target,
    both,
    check,
    document,
    make_qkv,
    mask_for,
    poisoned_allocations,
    run,
    run_and_check,
    targets,
)
from torch.utils._python_dispatch import TorchDispatchMode

import flashmsa
import flashmsa.compat
from flashmsa import Causal, Document, HashBucket

ALL = pytest.mark.parametrize("target", targets(auto=True))
FEW = pytest.mark.parametrize("target", targets(auto=True, dtypes=(torch.float32, torch.bfloat16)))


def dilated(left: int, right: int, dilation: int, align: str = "") -> Dilated:
    return Dilated(f"dilated{align}", left=left, right=right, dilation=dilation)


def same_bits(target: Target, a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> None:
    """Two masks of the same pairs; the composed backend computes all pairs alike, so its bits are the same too."""
    if target.backend == "torch":
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


# ---------------------------------------------------------------------------------------------------------------------
# Every family


@pytest.mark.parametrize("family", ALL_FAMILIES)
@FEW
def test_every_family(target: Target, family: str) -> None:
    """Grouped heads, q and k of other lengths, one row, one key, none of either."""
    for batch, heads, (len_q, len_kv) in (
        (2, (4, 2), (150, 300)),
        (2, (4, 2), (300, 150)),
        (3, (3, 3), (130, 130)),
        (1, (4, 1), (1, 257)),
        (2, (4, 2), (129, 1)),
        (2, (2, 1), (0, 70)),
        (2, (2, 1), (70, 0)),
    ):
        q, k, v = make_qkv(target, batch, heads, len_q, len_kv, 64, 40)
        with poisoned_allocations():
            run_and_check(target, q, k, v, mask_for(family, batch, len_q, len_kv, heads=heads))


def masks_of(batch: int, heads: int, device: str) -> dict[str, flashmsa.Mask]:
    """Each mask whose tensors have a batch or heads, for 70 queries and 130 keys."""
    offsets = torch.zeros(batch, 6, dtype=torch.int32, device=device)
    q_bucket, kv_bucket = (torch.zeros(batch, heads, n, dtype=torch.int32, device=device) for n in (70, 130))
    blocks = torch.ones(batch, heads, 2, 3, dtype=torch.bool, device=device)
    pairs = torch.ones(batch, heads, 70, 130, dtype=torch.bool, device=device)
    listed = flashmsa.BlockSparse(blocks, 64)
    return {
        "documents": Document(offsets, offsets, causal=True),
        "documents and a window": Document(offsets, offsets) & flashmsa.SlidingWindow(3),
        "prefixes": flashmsa.PrefixLM(torch.zeros(batch, dtype=torch.int32, device=device)),
        "buckets": HashBucket(q_bucket, kv_bucket, causal=True),
        "blocks": listed,
        "blocks with a capacity": flashmsa.BlockSparse(blocks, 64, capacity=9),
        "causal blocks": listed & Causal(),
        "pairs": flashmsa.BlockSparse.from_dense(pairs),
    }


WITHOUT_HEADS = ("documents", "documents and a window", "prefixes")


@pytest.mark.parametrize("target", ONE_EACH)
@pytest.mark.parametrize(
    ("batch", "heads", "of_mask"),
    [
        (0, (4, 2), (0, 4)),
        (0, (4, 2), (0, 1)),
        (0, (4, 2), (1, 4)),
        (2, (0, 0), (2, 0)),
        (2, (0, 0), (1, 0)),
        (2, (0, 2), (2, 0)),
        (0, (0, 0), (0, 0)),
    ],
)
def test_case_3_masks_of_no_batch_or_no_head(target: Target, batch: int, heads, of_mask: tuple[int, int]) -> None:
    q, k, v = make_qkv(target, batch, heads, 70, 130, 64, 40)
    d_out, d_lse = q.new_zeros(batch, heads[0], 70, 40), torch.zeros(batch, heads[0], 70, device=q.device)
    for name, mask in masks_of(*of_mask, target.device).items():
        if name in WITHOUT_HEADS and of_mask[0] != batch:
            continue
        found = run_backward(target, q, k, v, mask, d_out, d_lse)
        assert found["out"].shape == (batch, heads[0], 70, 40) and found["lse"].shape == (batch, heads[0], 70)
        for gradient, like in (("dq", q), ("dk", k), ("dv", v)):
            assert found[gradient].shape == like.shape and not found[gradient].count_nonzero(), (name, gradient)
        expected = flashmsa.reference(q, k, v, mask)
        assert expected.shape == (batch, heads[0], 70, 40)


@pytest.mark.parametrize("of_mask", [(0, 4), (0, 1), (2, 0), (1, 0), (0, 0)])
def test_what_masks_of_no_batch_or_no_head_can_do(of_mask: tuple[int, int]) -> None:
    for name, mask in masks_of(*of_mask, "cpu").items():
        assert copy.deepcopy(mask) == mask, name
        dense = mask.to_dense(70, 130)
        assert dense.shape[-2:] == (70, 130)
        if name not in WITHOUT_HEADS:
            assert dense.shape[:2] == of_mask, name
        if not dense.numel():
            assert mask.sparsity(70, 130) == 0.0
            assert mask.draw(70, 130) == "(nothing to draw: no batch or no head)"
            assert "nothing to draw" in str(mask)
        heads = 2 if name in WITHOUT_HEADS else of_mask[1]
        q, k = (torch.randn(of_mask[0], heads, n, 16) for n in (70, 130))
        told = flashmsa.explain(q, k, k, mask)
        if not q.numel():
            assert (told.full, told.partial, told.pairs) == (0, 0, 0), name
        for other, what, mine in (((2, heads), "batch", of_mask[0]), ((of_mask[0], 4), "heads", heads)):
            if mine == 0:
                q, k = (torch.randn(*other, n, 16) for n in (70, 130))
                for backend in ("cpu", "torch"):
                    with pytest.raises(ValueError, match=what):
                        flashmsa.attention(q, k, k, mask, backend=backend)


def test_masks_of_no_batch_take_new_values() -> None:
    buckets = torch.zeros(0, 4, 70, dtype=torch.int32)
    mask = HashBucket(buckets)
    mask.update(buckets)
    blocks = torch.ones(0, 4, 2, 3, dtype=torch.bool)
    for capacity in (None, 3):
        listed = flashmsa.BlockSparse(blocks, 64, capacity=capacity)
        listed.update(~blocks)
        assert listed == flashmsa.BlockSparse(blocks, 64)
    with pytest.raises(ValueError, match="kv_bucket: 0 heads do not divide q_bucket's 4"):
        HashBucket(torch.zeros(1, 4, 70, dtype=torch.int32), torch.zeros(1, 0, 70, dtype=torch.int32))


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_the_reference_is_the_definition(family: str) -> None:
    """flashmsa.reference against the composed backend in float64, with every option."""
    q, k, v = make_qkv(Target("torch", "cpu", torch.float64), 2, (4, 2), 70, 150, 16)
    mask = mask_for(family, 2, 70, 150, heads=(4, 2)).build()
    options = {"softcap": 2.0, "sinks": torch.randn(4), "alibi_slopes": torch.rand(2, 4), "return_lse": True}
    for kwargs in ({"return_lse": True}, options):
        out, lse = flashmsa.attention(q, k, v, mask=mask, backend="torch", **kwargs)
        expected, expected_lse = flashmsa.reference(q, k, v, mask=mask, **kwargs)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_gradients(family: str) -> None:
    """The composed backend's own backward pass against autograd through the reference, float64."""
    inputs = make_qkv(Target("torch", "cpu", torch.float64), 2, (4, 2), 140, 70, 16)
    mask = mask_for(family, 2, 140, 70, heads=(4, 2)).build()
    slopes = torch.rand(4)
    found = []
    for call in (lambda *x, **kw: flashmsa.attention(*x, backend="torch", **kw), flashmsa.reference):
        q, k, v = (x.clone().requires_grad_() for x in inputs)
        bias = slopes.clone().requires_grad_()
        out = call(q, k, v, mask=mask, alibi_slopes=bias)
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        found.append(torch.autograd.grad(out, (q, k, v, bias), weight))
    for name, mine, expected in zip(("q", "k", "v", "slopes"), *found, strict=True):
        torch.testing.assert_close(
            mine, expected, rtol=1e-6, atol=1e-4 if name == "slopes" else 1e-11, msg=lambda m, n=name: f"d{n}: {m}"
        )


@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_the_traced_operator(family: str, dropout_p: float) -> None:
    """The lowered form alone is the mask: what a traced call passes gives what an eager one does, bit for bit."""
    q, k, v = make_qkv(Target("torch", "cpu", torch.float32), 2, (4, 2), 140, 150, 16)
    mask = mask_for(family, 2, 140, 150, heads=(4, 2)).build()
    kind, ints, tensors = flashmsa.masks.lower(mask)
    state = torch.tensor([5, 0]) if dropout_p else None
    out, lse = torch.ops.flashmsa.composed(q, k, v, kind, ints, tensors, None, 0.0, None, None, dropout_p, state)
    options = {"backend": "torch", "return_lse": True, "dropout_p": dropout_p, "seed": 5}
    eager, eager_lse = flashmsa.attention(q, k, v, mask=mask, **options)
    assert torch.equal(out, eager) and torch.equal(lse, eager_lse)


@pytest.mark.parametrize("family", ["and-documents-by-batch", "dilated", "hash-heads", "and-bits-prefix"])
def test_compiled_calls(family: str) -> None:
    q, k, v = make_qkv(Target("torch", "cpu", torch.float32), 2, (4, 2), 40, 50, 16)
    mask = mask_for(family, 2, 40, 50, heads=(4, 2)).build()

    def call(q, k, v):
        return flashmsa.attention(q, k, v, mask=mask, backend="torch")

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), call(q, k, v))


@pytest.mark.parametrize("shape", [(1, 1), (2, 4)], ids=["shared", "each its own"])
@pytest.mark.parametrize("kind", ["blocks", "causal blocks", "pairs", "sdpa"])
def test_lists_made_in_a_trace(kind: str, shape: tuple[int, int]) -> None:
    """Nothing can be counted there, so the list has room for every cell."""
    q, k, v = (torch.randn(2, 4, n, 16) for n in (300, 333, 333))
    counts = (300, 333) if kind in ("pairs", "sdpa") else (5, 6)
    table = torch.rand(*shape, *counts) < 0.5
    table[..., :64, :64] = True

    def call(table: torch.Tensor) -> torch.Tensor:
        if kind == "sdpa":
            return flashmsa.compat.scaled_dot_product_attention(q, k, v, attn_mask=table)
        if kind == "pairs":
            return flashmsa.attention(q, k, v, flashmsa.BlockSparse.from_dense(table))
        mask = flashmsa.BlockSparse(table, (64, 64))
        return flashmsa.attention(q, k, v, mask & flashmsa.Causal() if kind == "causal blocks" else mask)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert torch.equal(compiled(table), call(table))
        table = table.logical_not()
    torch._dynamo.reset()


@pytest.mark.parametrize("family", ALL_FAMILIES)
@FEW
def test_what_is_masked_is_never_touched(target: Target, family: str) -> None:
    """Keys and values that no query of their batch and head sees hold NaN."""
    q, k, v = make_qkv(target, 2, (4, 2), 150, 300, 64)
    mask = mask_for(family, 2, 150, 300, heads=(4, 2))
    allowed = mask.allowed(150, 300, device=q.device)
    seen = (allowed if allowed.dim() == 4 else allowed[:, None]).any(2)  # (B or 1, H or 1, Sk)
    if seen.shape[1] > 2:
        seen = seen.unflatten(1, (2, -1)).any(2)
    unseen = ~seen.expand(2, 2, -1)[..., None]
    k, v = k.masked_fill(unseen, math.nan), v.masked_fill(unseen, math.nan)
    run_and_check(target, q, k, v, mask)


# ---------------------------------------------------------------------------------------------------------------------
# Case 18: dilated windows


@ALL
def test_case_18_known_answers(target: Target) -> None:
    q, k, v = make_qkv(target, 2, (4, 2), 150, 150, 64)
    same_bits(
        target,
        run_and_check(target, q, k, v, dilated(20, 7, 1)),
        run(target, q, k, v, MaskCase("window", left=20, right=7)),
    )
    out, _ = run_and_check(target, q, k, v, dilated(0, 0, 5))
    assert torch.equal(out, v.repeat_interleave(2, 1)), "each query sees itself"
    out, _ = run_and_check(target, q, k, v, dilated(3, 3, 200))
    assert torch.equal(out, v.repeat_interleave(2, 1)), "the dilation is longer than the sequence"


@FEW
@pytest.mark.parametrize("align", ["", "-top-left"])
@pytest.mark.parametrize("dilation", [2, 3, 4, 7, 64, 127])
@pytest.mark.parametrize("lengths", [(1, 1), (200, 200), (255, 257), (100, 300), (300, 100), (3, 5)], ids=str)
def test_case_18_lengths(target: Target, lengths: tuple[int, int], dilation: int, align: str) -> None:
    """Lengths that the dilation does not divide, and shorter than it; causal, one-sided and wide windows."""
    q, k, v = make_qkv(target, 1, (4, 2), *lengths, 64)
    for left, right in ((5, 0), (0, 3), (40, 40), (1000, 1000)):
        run_and_check(target, q, k, v, dilated(left, right, dilation, align))


# ---------------------------------------------------------------------------------------------------------------------
# Case 20: buckets


def random_buckets(batch: int, heads: int, length: int, count: int) -> torch.Tensor:
    return torch.randint(-3, count - 3, (batch, heads, length), dtype=torch.int32)


@ALL
def test_case_20_all_equal_is_dense_and_none_shared_is_empty(target: Target) -> None:
    q, k, v = make_qkv(target, 2, (4, 2), 150, 300, 64)
    sevens, eights = torch.full((1, 1, 150), 7, dtype=torch.int32), torch.full((1, 1, 300), 8, dtype=torch.int32)
    out, lse = run_and_check(target, q, k, v, Buckets("hash", q=sevens, kv=eights - 1))
    same_bits(target, (out, lse), run(target, q, k, v, DENSE))
    same_bits(
        target,
        run_and_check(target, q, k, v, Buckets("hash", q=sevens, kv=eights - 1, causal=True)),
        run(target, q, k, v, CAUSAL),
    )
    out, lse = run(target, q, k, v, Buckets("hash", q=sevens, kv=eights))
    assert not out.count_nonzero() and lse.isneginf().all()


@FEW
def test_case_20_permuting_keys_with_their_buckets(target: Target) -> None:
    q, k, v = make_qkv(target, 1, (4, 2), 150, 300, 64)
    mine, theirs = random_buckets(1, 4, 150, 9), random_buckets(1, 2, 300, 9)
    order = torch.randperm(300)
    mask = Buckets("hash", q=mine, kv=theirs[..., order])
    out, lse = run(target, q, *(x[:, :, order.to(x.device)] for x in (k, v)), mask)
    check(out, lse, q, k, v, Buckets("hash", q=mine, kv=theirs))


@FEW
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(1, 1), (130, 130), (70, 260), (260, 70)], ids=str)
@pytest.mark.parametrize("count", [2, 16, 200])
def test_buckets_of_any_heads_and_batches(target: Target, lengths: tuple[int, int], count: int, causal: bool) -> None:
    q, k, v = make_qkv(target, 2, (4, 2), *lengths, 64)
    for q_leading in ((1, 1), (2, 4), (1, 4), (2, 1)):
        for kv_leading in ((1, 1), (2, 2), (1, 2), (2, 1), (1, 4)):
            mine, theirs = (
                random_buckets(*leading, length, count)
                for leading, length in zip((q_leading, kv_leading), lengths, strict=True)
            )
            run_and_check(target, q, k, v, Buckets("hash", q=mine, kv=theirs, causal=causal))


@FEW
def test_ids_in_any_order_are_the_sorted_documents(target: Target) -> None:
    """from_ids of shuffled tokens gives each token what sorting the tokens first does."""
    q, k, v = make_qkv(target, 1, (4, 2), 200, 200, 64)
    ids = torch.tensor([0] * 50 + [1] * 1 + [2] * 100 + [-1] * 49)
    order = torch.randperm(200)
    mask = Document.from_ids(ids[order])
    assert isinstance(mask, HashBucket)
    shuffled = Buckets("hash", q=mask.q_bucket, kv=mask.kv_bucket)
    out, lse = run(target, *(x[:, :, order.to(x.device)] for x in (q, k, v)), shuffled)
    back = order.argsort().to(out.device)
    check(out[:, :, back], lse[:, :, back], q, k, v, document(0, 50, 51, 151))


# ---------------------------------------------------------------------------------------------------------------------
# Case 21: blocks


@ALL
@pytest.mark.parametrize("block", [64, 128, (64, 192), (256, 64)], ids=str)
@pytest.mark.parametrize("length", [1, 128, 257, 300])
def test_case_21_lower_triangular_blocks_and_causal(target: Target, length: int, block) -> None:
    """The diagonal blocks in part, by Causal: all of Causal; S 257 has a last block of one row."""
    q, k, v = make_qkv(target, 1, (4, 2), length, length, 64)
    size = block if isinstance(block, tuple) else (block, block)
    first_key = torch.arange(-(-length // size[1])) * size[1]
    last_row = (torch.arange(-(-length // size[0])) + 1) * size[0] - 1
    triangle = Blocks("blocks", blocks=(first_key <= last_row[:, None])[None, None], size=size)
    same_bits(target, run_and_check(target, q, k, v, both(triangle, CAUSAL)), run(target, q, k, v, CAUSAL))


@FEW
@pytest.mark.parametrize("dims", [(8, 8), (72, 40), (128, 128), (192, 128), (200, 256)], ids=str)
def test_head_dims(target: Target, dims: tuple[int, int]) -> None:
    """Case 21 in every width of head, and one mask of each of the other kinds."""
    q, k, v = make_qkv(target, 1, (4, 2), 257, 257, *dims)
    for block in (64, 128):
        count = -(-257 // block)
        triangle = Blocks("blocks", blocks=torch.ones(count, count).tril().bool()[None, None], size=(block, block))
        same_bits(target, run_and_check(target, q, k, v, both(triangle, CAUSAL)), run(target, q, k, v, CAUSAL))
    for family in ("window-keep", "and-document-window", "dilated", "hash-causal", "hash-kv-heads", "blocks-bits"):
        run_and_check(target, q, k, v, mask_for(family, 1, 257, 257, heads=(4, 2)))


@pytest.mark.parametrize("dim", [8, 64, 96, 256])
@pytest.mark.parametrize("block", [64, 128])
def test_case_21_backward(block: int, dim: int) -> None:
    inputs = make_qkv(Target("torch", "cpu", torch.float32), 1, (4, 2), 257, 257, dim)
    count = -(-257 // block)
    blocks = flashmsa.BlockSparse(torch.ones(count, count).tril().bool()[None, None], (block, block))
    found = []
    for mask in (blocks & Causal(), Causal()):
        q, k, v = (x.clone().requires_grad_() for x in inputs)
        out = flashmsa.attention(q, k, v, mask=mask, backend="torch")
        found.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    assert all(map(torch.equal, *found))


def test_case_21_empty_rows_and_columns_have_no_gradient() -> None:
    q, k, v = (x.requires_grad_() for x in make_qkv(Target("torch", "cpu", torch.float32), 1, (4, 2), 300, 300, 16))
    blocks = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    blocks[:, :, 1], blocks[:, :, :, 0] = False, False
    out, lse = flashmsa.attention(q, k, v, mask=flashmsa.BlockSparse(blocks), backend="torch", return_lse=True)
    dq, dk, dv = torch.autograd.grad(out.sum() + lse[:, :, :128].sum(), (q, k, v))
    row, column = slice(128, 256), slice(0, 128)
    assert not out[:, :, row].count_nonzero() and lse[:, :, row].isneginf().all() and not dq[:, :, row].count_nonzero()
    assert not dk[:, :, column].count_nonzero() and not dv[:, :, column].count_nonzero()
    assert dk[:, :, 128:].count_nonzero() and dq[:, :, :128].count_nonzero()


@ALL
def test_case_21_empty_block_rows(target: Target) -> None:
    q, k, v = make_qkv(target, 2, (4, 2), 300, 300, 64)
    blocks = torch.rand(2, 4, 3, 3) < 0.5
    blocks[:, :, 1] = False
    blocks[0, 2] = False
    out, lse = run_and_check(target, q, k, v, Blocks("blocks", blocks=blocks))
    assert not out[:, :, 128:256].count_nonzero() and not out[0, 2].count_nonzero() and lse[0, 2].isneginf().all()


@FEW
@pytest.mark.parametrize("size", [(64, 64), (64, 128), (128, 64), (192, 320), (256, 256)], ids=str)
@pytest.mark.parametrize("lengths", [(300, 500), (257, 129), (64, 1000), (1, 65)], ids=str)
def test_blocks_of_any_size(target: Target, lengths: tuple[int, int], size: tuple[int, int]) -> None:
    q, k, v = make_qkv(target, 2, (4, 2), *lengths, 64)
    counts = [-(-n // block) for n, block in zip(lengths, size, strict=True)]
    for leading in ((1, 1), (2, 1), (1, 4), (2, 4)):
        mask = Blocks("blocks", blocks=torch.rand(*leading, *counts) < 0.4, size=size)
        run_and_check(target, q, k, v, mask)
        run_and_check(target, q, k, v, both(mask, MaskCase("window", left=100, right=30, keep=70)))


@FEW
@pytest.mark.parametrize("lengths", [(300, 500), (257, 129), (1, 65)], ids=str)
def test_dense_bool_masks(target: Target, lengths: tuple[int, int]) -> None:
    q, k, v = make_qkv(target, 2, (4, 2), *lengths, 64)
    for leading in ((1, 1), (2, 1), (2, 4)):
        pairs = torch.rand(*leading, *lengths) < 0.3
        pairs[..., :128] |= torch.rand(*leading, lengths[0], 1) < 0.5
        run_and_check(target, q, k, v, Pairs("blocks-bits", pairs=pairs))
        run_and_check(target, q, k, v, both(Pairs("blocks-bits", pairs=pairs), CAUSAL))


class LargestTensor(TorchDispatchMode):
    """The most elements of any tensor that is made inside."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return made


@pytest.mark.parametrize(
    "make",
    [
        lambda: flashmsa.BlockSparse(torch.eye(128).bool()[None, None]) & Causal(),
        lambda: HashBucket(torch.arange(16384, dtype=torch.int32)[None, None] % 64, causal=True),
        lambda: flashmsa.DilatedWindow(9, dilation=64),
        lambda: flashmsa.SlidingWindow(9, keep_first=4) & Document([0, 9, 16000]),
    ],
    ids=["blocks", "hash", "dilated", "window"],
)
def test_no_matrix_of_pairs_is_written_out(make) -> None:
    """Making a mask, counting its pairs and a block of its rows take less than a fiftieth of all pairs at once."""
    with LargestTensor() as largest:
        mask = make()
        share = 1.0 - mask.sparsity(16384, 16384)
        seen = mask._visible(16384, 16384).rows(slice(5000, 5200))
    assert 0.0 < share < 0.1 and 0 < int(seen.sum()) < seen.numel()
    assert seen.numel() <= largest.elements < 16384**2 // 50


# ---------------------------------------------------------------------------------------------------------------------
# On a GPU: no waiting, and snapshots that a graph renews


@pytest.fixture
def no_waiting():
    """Inside, torch raises where it waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_making_and_renewing_a_mask_does_not_wait(causal: bool, request: pytest.FixtureRequest) -> None:
    q_bucket, kv_bucket = (random_buckets(2, 4, n, 9).cuda() for n in (300, 500))
    blocks = (torch.rand(2, 4, 5, 8) < 0.5).cuda()
    request.getfixturevalue("no_waiting")
    buckets = HashBucket(q_bucket, kv_bucket, causal=causal)
    listed = flashmsa.BlockSparse(blocks, (64, 64), capacity=120)
    buckets.update(kv_bucket[..., :300], q_bucket.repeat(1, 1, 2)[..., :500])
    listed.update(~blocks)
    assert repr(listed & Causal()).startswith("BlockSparse(<bool (2, 4, 5, 8) on cuda:0>, (64, 64))")


@pytest.mark.gpu
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_the_composed_backend_does_not_wait(family: str, request: pytest.FixtureRequest) -> None:
    q, k, v = make_qkv(Target("torch", "cuda", torch.bfloat16), 2, (4, 2), 150, 300, 64)
    mask = mask_for(family, 2, 150, 300, heads=(4, 2)).build("cuda")
    flashmsa.attention(q, k, v, mask=mask, backend="torch")
    request.getfixturevalue("no_waiting")
    flashmsa.attention(q, k, v, mask=mask, backend="torch")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["sm90", "torch"])
@pytest.mark.parametrize("kind", ["hash", "blocks"])
def test_a_captured_update_renews_the_mask(kind: str, backend: str) -> None:
    """Case 30 for snapshots: capture update and call once, replay with other buckets or blocks."""
    target = Target(backend, "cuda", torch.bfloat16)
    q, k, v = make_qkv(target, 2, (4, 2), 300, 500, 64)
    if kind == "hash":

        def cases(seed: int) -> tuple[MaskCase, tuple[torch.Tensor, ...]]:
            torch.manual_seed(seed)
            case = Buckets("hash", q=random_buckets(2, 4, 300, 5), kv=random_buckets(2, 2, 500, 5), causal=True)
            return case, (case.q, case.kv)
    else:

        def cases(seed: int) -> tuple[MaskCase, tuple[torch.Tensor, ...]]:
            torch.manual_seed(seed)
            blocks = torch.rand(2, 4, 3, 4) < 0.2 * (1 + seed)
            return Blocks("blocks", blocks=blocks), (blocks,)

    first, tensors = cases(0)
    held = [x.cuda() for x in tensors]
    mask = HashBucket(*held, causal=True) if kind == "hash" else flashmsa.BlockSparse(*held, capacity=96)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        mask.update(*held)
        flashmsa.attention(q, k, v, mask=mask, backend=backend)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mask.update(*held)
        out, lse = flashmsa.attention(q, k, v, mask=mask, backend=backend, return_lse=True)
    for seed in (0, 1, 2, 3, 4):
        case, tensors = cases(seed)
        for mine, new in zip(held, tensors, strict=True):
            mine.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        check(out, lse, q, k, v, case, note=f"seed {seed}")
    assert first.kind == kind


@pytest.mark.gpu
def test_a_captured_update_needs_a_capacity() -> None:
    blocks = torch.ones(1, 1, 2, 2, dtype=torch.bool, device="cuda")
    mask = flashmsa.BlockSparse(blocks)
    with pytest.raises(RuntimeError, match="make the mask with a capacity"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        mask.update(blocks)
