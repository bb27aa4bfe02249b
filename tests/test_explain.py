"""explain() tells the truth: counts against brute force, the backend against what runs, facts against the build."""

from __future__ import annotations

import itertools
import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ALL_FAMILIES, Dilated, MaskCase, Sequences, mask_for
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import flashmsa
from flashmsa import _C, Causal, Dense, DilatedWindow, Document, HashBucket, Mask, PrefixLM, SlidingWindow, explain
from flashmsa.masks import PerSequence

needs_kernels = pytest.mark.skipif(not _C.kernels(), reason="this build has no sm_90a kernels")


def make(
    batch: int = 2, heads: tuple[int, int] = (4, 2), len_q: int = 100, len_kv: int = 130, dim: int = 64, **kwargs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dim_v = kwargs.pop("dim_v", dim)
    return (
        torch.randn(batch, heads[0], len_q, dim, **kwargs),
        torch.randn(batch, heads[1], len_kv, dim, **kwargs),
        torch.randn(batch, heads[1], len_kv, dim_v, **kwargs),
    )


def buckets(len_q: int = 100, len_kv: int = 130) -> HashBucket:
    return HashBucket(*(torch.arange(n, dtype=torch.int32)[None, None] % 3 for n in (len_q, len_kv)))


# ---------------------------------------------------------------------------------------------------------------------
# Counts


def brute_force(allowed: torch.Tensor, tile: tuple[int, int], from_begin: bool = False) -> tuple[int, int, int]:
    """(all allowed, some, none) tiles of one (len_q, len_kv) mask; a tile that the keys do not fill is never whole.

    ``from_begin``: a block's tiles are counted from the first key that one of its rows may see.
    """
    len_q, len_kv = allowed.shape
    counts = [0, 0, 0]
    for row in range(0, len_q, tile[0]):
        block = allowed[row : row + tile[0]]
        visible = block.any(0).nonzero()
        origin = int(visible[0]) if from_begin and visible.numel() else 0
        for key in range(origin, len_kv, tile[1]):
            part = block[:, key : key + tile[1]]
            counts[0 if part.all() and part.shape[1] == tile[1] else 1 if part.any() else 2] += 1
        # There are as many tiles to a block as the keys fill; a later origin only leaves fewer to visit.
        counts[2] += -(-len_kv // tile[1]) - len(range(origin, len_kv, tile[1]))
    return tuple(counts)


def from_begin(mask: Mask | None, len_q: int, len_kv: int) -> bool:
    """Whether a block's tiles begin where its keys do: where the rows' last keys do not move with the row."""
    if mask is None:
        return False
    kind, ints, _ = mask._lower()
    if kind == 3:
        bands = ints[:9], ints[9:18]
        none = 2**31 - 1
        fixed = bands[0][2] >= len_q - 1 and bands[0][3] >= len_kv - 1 and bands[1][2] == bands[1][3] == none
        prefixes = [x for band in bands for x in band[4:6]]
        return fixed and all(x == none for x in prefixes) and bands[0][6] == bands[1][6] == 0
    return kind == 5 or (kind == 2 and not ints[0])


def layers(mask: Mask, batch: int, len_q: int, len_kv: int) -> list[torch.Tensor]:
    return list(mask.to_dense(len_q, len_kv).expand(batch, 1, len_q, len_kv)[:, 0])


SELF_MASKS = [
    Dense(),
    Causal(),
    Causal(align="top-left"),
    Document([0, 3, 3, 100, 180]),
    Document([0, 3, 3, 100, 180], causal=True),
    Document(torch.tensor([[0, 64, 128], [0, 1, 200]], dtype=torch.int32), causal=True),
]


@pytest.mark.parametrize("mask", SELF_MASKS, ids=repr)
@pytest.mark.parametrize(("len_q", "len_kv"), [(200, 200), (129, 320), (320, 70), (64, 64), (0, 9), (9, 0)])
def test_counts(mask: Mask, len_q: int, len_kv: int) -> None:
    q, k, v = make(2, (4, 2), len_q, len_kv, 64, dim_v=40)
    got = explain(q, k, v, mask)
    assert got.backend == "cpu" and got.tile is not None
    begin = from_begin(mask, len_q, len_kv)
    per_batch = [brute_force(x, got.tile, begin) for x in layers(mask, 2, len_q, len_kv)]
    whole, some, none = (4 * sum(x) for x in zip(*per_batch, strict=True))
    assert got.full == whole
    assert got.full + got.partial + got.skipped == whole + some + none
    # What documents do for len_q = len_kv holds in general only as a bound: see test_counts_of_any_documents.
    if not isinstance(mask, Document) or len_q == len_kv:
        assert (got.partial, got.skipped) == (some, none)
    pairs = 4 * sum(int(x.sum()) for x in layers(mask, 2, len_q, len_kv))
    assert got.pairs == pairs and got.flops == pairs * 2 * (64 + 40)
    area = (got.full + got.partial) * got.tile[0] * got.tile[1]
    assert got.efficiency == (pairs / area if area else None)


@given(st.lists(st.tuples(st.integers(0, 150), st.integers(0, 150)), max_size=5), st.booleans(), st.integers(0, 70))
def test_counts_of_any_documents(lengths: list[tuple[int, int]], causal: bool, tail: int) -> None:
    """A block of rows visits one run of tiles, so it may pass tiles that no row of it may see; never fewer."""
    cuts = [[sum(x[side] for x in lengths[:d]) for d in range(len(lengths) + 1)] for side in (0, 1)]
    mask = Document(cuts[0], cuts[1], causal=causal)
    q, k, v = make(1, (1, 1), cuts[0][-1] + tail, cuts[1][-1] + tail, 8)
    got = explain(q, k, v, mask)
    allowed = mask.to_dense(q.shape[2], k.shape[2])
    whole, some, none = brute_force(allowed, got.tile, from_begin=not causal)
    assert got.full == whole and got.partial >= some
    assert got.full + got.partial + got.skipped == whole + some + none
    assert got.pairs == int(allowed.sum())


def in_order_of_buckets(mask: HashBucket, allowed: torch.Tensor) -> torch.Tensor:
    """(B, H, len_q, len_kv) with the rows and keys of each head sorted by bucket, in a stable order."""
    kv_bucket = mask.q_bucket if mask.kv_bucket is None else mask.kv_bucket
    for dim, bucket in ((2, mask.q_bucket), (3, kv_bucket)):
        order = bucket.argsort(stable=True).repeat_interleave(allowed.shape[1] // bucket.shape[1], 1)
        order = order.expand(*allowed.shape[:2], -1)
        order = (order[..., None] if dim == 2 else order[:, :, None]).expand_as(allowed)
        allowed = allowed.gather(dim, order)
    return allowed


@pytest.mark.parametrize(("len_q", "len_kv"), [(150, 300), (300, 300), (300, 150)])
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_counts_of_every_mask(family: str, len_q: int, len_kv: int) -> None:
    """Pairs are exact. Of the tiles none is called full that is not, and none is skipped that a row may see; a dilated
    window's tiles are those of its residues, hash buckets' those of sorted rows and keys."""
    q, k, v = make(2, (4, 2), len_q, len_kv, 16)
    case = mask_for(family, 2, len_q, len_kv, heads=(4, 2))
    mask = case.build()
    got = explain(q, k, v, mask)
    allowed = case.allowed(len_q, len_kv)
    allowed = allowed if allowed.dim() == 4 else allowed[:, None]
    allowed = allowed.repeat_interleave(4 // allowed.shape[1], 1).expand(2, 4, -1, -1)
    assert got.pairs == int(allowed.sum()) and got.flops == got.pairs * 2 * (16 + 16)
    if isinstance(mask, HashBucket):
        allowed = in_order_of_buckets(mask, allowed)
        assert any("order of the buckets" in note for note in got.notes)
    layers = list(allowed.flatten(0, 1))
    if isinstance(case, Dilated):
        assert any(f"modulo {case.dilation}" in note for note in got.notes)
        p = case.positions(len_q, len_kv) % case.dilation
        keys = torch.arange(len_kv) % case.dilation
        residues = p[: case.dilation].tolist()
        layers = [x[p == r][:, keys == r] for x in layers for r in residues]
    begin = from_begin(mask, len_q, len_kv)
    whole, some, none = (sum(x) for x in zip(*(brute_force(x, got.tile, begin) for x in layers), strict=True))
    assert got.full <= whole and got.full + got.partial >= whole + some
    assert got.full + got.partial + got.skipped == whole + some + none
    if family in ("window", "window-top-left", "prefix", "prefix-window", "prefix-by-batch", "dilated"):
        assert got.full == whole, "an interval's full tiles are all known"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("used", [None, (20, 0, 30)])
def test_counts_of_packed_sequences(device: str, used: tuple[int, ...] | None) -> None:
    q, k, v = (x.to(device) for x in make(1, (4, 2), 100, 130, 16))
    case = Sequences(
        "varlen", inner=MaskCase("window", left=9, right=0), q_cuts=(0, 40, 40, 90), kv_cuts=(0, 40, 60, 130), used=used
    )
    cuts = [
        None if x is None else torch.tensor(x, dtype=torch.int32, device=device) for x in (case.q_cuts, case.kv_cuts)
    ]
    mask = PerSequence(SlidingWindow(9, 0), *cuts, None if used is None else cuts[0].new_tensor(used))
    assert explain(q, k, v, mask).pairs == 4 * int(case.allowed(100, 130).sum())


# ---------------------------------------------------------------------------------------------------------------------
# The backend it names is the one that runs


def runs_natively(call) -> bool:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return any(event.key == "flashmsa::attention" for event in profile.key_averages())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 2.0}, {"alibi_slopes": torch.ones(4)}, {"backend": "torch"}], ids=str
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_named_backend_runs(dtype: torch.dtype, options: dict, device: str) -> None:
    q, k, v = (x.to(device, dtype) for x in make())
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    got = explain(q, k, v, Causal(), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        native = runs_natively(lambda: flashmsa.attention(q, k, v, Causal(), **options))
    assert got.runs and native == (got.backend != "torch")
    others = {"sm90", "cpu", "torch"} - {got.backend}
    assert set(got.rejected) == (others | {"sdpa"} if got.backend == "sm90" else others)
    assert all(got.rejected.values())


@pytest.mark.parametrize("name", ["plain", "softcap", "alibi"])
@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_named_backend_runs_every_mask(family: str, name: str, device: str) -> None:
    q, k, v = (x.to(device, torch.bfloat16) for x in make())
    mask = mask_for(family, 2, 100, 130, heads=(4, 2)).build(device)
    options = {"softcap": {"softcap": 2.0}, "alibi": {"alibi_slopes": torch.ones(4, device=device)}}.get(name, {})
    got = explain(q, k, v, mask, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        native = runs_natively(lambda: flashmsa.attention(q, k, v, mask, **options))
    assert got.runs and native == (got.backend != "torch") == (name != "alibi" or "hash" not in family)
    assert "mask" in got.call and all(option in got.call for option in options)


def test_reasons() -> None:
    q, k, v = make()
    assert "q is on cpu" in explain(q, k, v).rejected["sm90"]
    gap = explain(q, k, v, buckets(), alibi_slopes=torch.ones(4))
    assert gap.backend == "torch" and "alibi_slopes" in gap.rejected["cpu"]
    assert explain(q, k, v, softcap=2.0, sinks=torch.zeros(4), alibi_slopes=torch.ones(4)).backend == "cpu"
    assert "by name" in explain(q, k, v, backend="torch").reason


def test_a_backend_that_cannot_run_is_described_all_the_same() -> None:
    q, k, v = make(dtype=torch.bfloat16)
    options = {"backend": "sm90", "alibi_slopes": torch.ones(4)}
    got = explain(q, k, v, buckets(), **options)
    assert got.backend == "sm90" and not got.runs and "q is on cpu" in got.reason
    assert any("alibi_slopes" in note for note in got.notes)
    assert "sm90 cannot run: q is on cpu" in str(got)
    with pytest.raises(ValueError, match="backend: 'sm90' cannot run this call: q is on cpu"):
        flashmsa.attention(q, k, v, buckets(), **options)


def test_autocast_is_described() -> None:
    """What runs is the call on the cast tensors, of several dtypes before the cast too."""
    q, k, v = make()
    with torch.autocast("cpu", torch.bfloat16):
        assert "bfloat16" in explain(q, k.to(torch.float16), v).call
        assert (
            explain(q, k, v, backend="sm90").notes
            == explain(*(x.bfloat16() for x in (q, k, v)), backend="sm90").notes
            != explain(*(x.double() for x in (q, k, v)), backend="sm90").notes
        )
        assert "float64" in explain(q.double(), k.double(), v.double()).call


def test_offsets_without_values() -> None:
    q, k, v = make()
    on_meta = [x.to("meta") for x in (q, k, v)]
    got = explain(*on_meta, Document(torch.zeros(3, dtype=torch.int32, device="meta")))
    assert got.pairs is None and any("tensors" in note for note in got.notes)
    with FakeTensorMode() as mode:
        mask = Document(torch.tensor([0, 50, 100], dtype=torch.int32))
        got = explain(*map(mode.from_tensor, (q, k, v)), mask)
        assert str(mask) == repr(mask)
    assert got.pairs is None and any("tensors" in note for note in got.notes)


def test_keys_beyond_any_tile() -> None:
    """The composed backend takes all keys at once, however many: its tile is not one that the counts could walk."""
    q, k = torch.empty(1, 1, 3, 8, device="meta"), torch.empty(1, 1, 2**31 - 65537, 8, device="meta")
    assert explain(q, k, k, backend="torch").pairs == 3 * (2**31 - 65537)
    for block in ((1, 65537), (65537, 1), (0, 1), (1, -1)):
        with pytest.raises(ValueError, match=r"block_q, block_kv: .*at most 65536"):
            _C.tile_counts(0, [], [], 1, 1, 10, 10, *block)


def test_gradients_change_nothing_on_the_cpu() -> None:
    q, k, v = make()
    expected = str(explain(q, k, v))
    k.requires_grad_()
    assert str(explain(q, k, v)) == expected


# ---------------------------------------------------------------------------------------------------------------------
# Kernel facts


def test_the_cpu_tile_is_the_one_compiled() -> None:
    header = Path(__file__).parent.parent / "csrc" / "cpu" / "block.h"
    if not header.exists():
        pytest.skip("needs the source checkout")
    text = header.read_text()
    q, k, v = make()
    compiled = tuple(int(re.search(rf"{name} = (\d+);", text)[1]) for name in ("kBlockQ", "kBlockKv"))
    assert explain(q, k, v).tile == compiled


def test_the_torch_tile_is_the_block_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashmsa import torch_backend

    q, k, v = make(len_q=700)
    blocks = []
    logits = torch_backend._logits
    monkeypatch.setattr(torch_backend, "_logits", lambda *a: blocks.append(a[0].shape[3]) or logits(*a))
    flashmsa.attention(q, k, v, backend="torch")
    got = explain(q, k, v, backend="torch")
    assert got.tile == (max(blocks), 130) and got.full is None and got.pairs == 2 * 4 * 700 * 130


KERNELS = {0: "dense", 1: "causal", 2: "document", 3: "composite", 4: "composite", 5: "hash", 6: "block_sparse"}
BANDS = ("window", "window-top-left", "prefix", "prefix-window", "and-alignments")


@needs_kernels
@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("alibi", [False, True])
def test_the_kernel_of_every_mask(family: str, softcap: float, alibi: bool) -> None:
    """Softcap and ALiBi are in the kernels of composite masks and lists, one of the two in those of causal ones; other
    masks are run by composite kernels. Of the composite masks, bands have kernels of their own.
    """
    q, k, v = make(dtype=torch.bfloat16)
    mask = mask_for(family, 2, 100, 130, heads=(4, 2)).build()
    got = explain(q, k, v, mask, backend="sm90", softcap=softcap, alibi_slopes=torch.ones(4) if alibi else None)
    kernel = next(x for x in _C.kernels() if x["name"] == got.kernel)
    kind = 0 if mask is None else mask._lower()[0]
    options = softcap > 0 or alibi
    own = not options or kind == 6 or (kind == 1 and not (softcap and alibi))
    wanted = "composite" if not own else "band" if family in BANDS else KERNELS[kind]
    assert (kernel["mask"], kernel["softcap"], kernel["alibi"]) == (wanted, softcap > 0.0, alibi)
    assert any("kernels of intersections" in note for note in got.notes) == (kind < 3 and wanted == "composite")
    assert got.full + got.partial > 0 or got.pairs == 0


@needs_kernels
@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_the_kernels_of_a_training_step(family: str, dropout_p: float, softcap: float) -> None:
    q, k, v = make(dtype=torch.bfloat16)
    mask = mask_for(family, 2, 100, 130, heads=(4, 2)).build()
    options = {"backend": "sm90", "dropout_p": dropout_p, "softcap": softcap}
    got = explain(q, k, v, mask, **options)
    assert got.backward_kernel is None and "backward" not in str(got), "nothing wants a gradient"
    forward = next(x for x in _C.kernels() if x["name"] == got.kernel)
    assert forward["dropout"] == (dropout_p > 0.0) and (forward["softcap"] or not softcap)
    assert ("dropout_p 0.1" in got.call) == (dropout_p > 0.0)
    v.requires_grad_()
    with torch.no_grad():
        assert explain(q, k, v, mask, **options).backward_kernel is None
    trained = explain(q, k, v, mask, **options)
    backward = next(x for x in _C.backward_kernels() if x["name"] == trained.backward_kernel)
    assert backward["dropout"] or not dropout_p
    assert backward["general"] or not softcap
    assert trained.backward_tile == (backward["block_q"], backward["block_kv"])
    assert trained.kernel == got.kernel and f"backward    {backward['name']}: tiles of" in str(trained)


@needs_kernels
def test_the_kernel_of_short_documents() -> None:
    """At head dim 128 the forward pass has one of its own for documents of a mean length up to 384."""

    def name(documents: int, dim: int = 128, **options: Any) -> str:
        q, k, v = make(1, (1, 1), 4096, 4096, dim, dtype=torch.bfloat16)
        offsets = torch.linspace(0, 4096, documents + 1).int()
        return explain(q, k, v, Document(offsets), backend="sm90", **options).kernel

    assert name(10) == "fwd_document_d128_bf16" and name(11) == "fwd_short_document_d128_bf16"
    assert name(11, dim=104) == "fwd_short_document_d128_bf16"
    assert [name(11, dim=dim) for dim in (64, 96, 256)] == [f"fwd_document_d{dim}_bf16" for dim in (64, 96, 256)]
    assert name(11, softcap=2.0) == "fwd_composite_softcap_d128_bf16"


@needs_kernels
@pytest.mark.parametrize("dim", [64, 128])
def test_counts_of_packed_documents(dim: int) -> None:
    """Blocks of rows begin where long documents do, and their tiles where the documents' keys do."""
    lengths = [300, 0, 1, 500, 199]
    mask = Document(torch.tensor([0, *lengths]).cumsum(0).int())
    q, k, v = make(1, (3, 3), 1000, 1000, dim, dtype=torch.bfloat16)
    got = explain(q, k, v, mask, backend="sm90")
    rows, keys = got.tile
    blocks = [-(-length // rows) for length in lengths]
    assert got.full == 3 * sum(n * (length // keys) for n, length in zip(blocks, lengths, strict=True))
    assert got.partial == 3 * sum(n * (length % keys > 0) for n, length in zip(blocks, lengths, strict=True))
    assert got.pairs == 3 * sum(length * length for length in lengths)
    short = Document(torch.arange(0, 1001, 50).int())
    counts = explain(q, k, v, short, backend="sm90")
    allowed = short.to_dense(1000, 1000)
    whole, some, _ = brute_force(allowed, got.tile, from_begin=True)
    assert (counts.full, counts.partial) == (3 * whole, 3 * some), "on a fixed grid"


@needs_kernels
def test_the_kernel_of_packed_documents() -> None:
    """The backward pass has one of its own for long documents: not for short ones, nor in deterministic mode."""
    q, k, v = (x.requires_grad_() for x in make(dtype=torch.bfloat16, len_q=1024, len_kv=1024))

    def packed(documents: int, causal: bool = False, **options: Any) -> bool:
        offsets = torch.linspace(0, 1024, documents + 1).int()
        name = explain(q, k, v, Document(offsets, causal=causal), backend="sm90", **options).backward_kernel
        return next(x for x in _C.backward_kernels() if x["name"] == name)["packed"]

    assert packed(1) and packed(8) and not packed(9), "documents of 128 tokens"
    assert packed(4, causal=True) and not packed(5, causal=True), "at head dim 64 of 256 under a causal mask"
    assert not packed(3, deterministic=True)
    torch.use_deterministic_algorithms(True)
    try:
        assert not packed(3)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not packed(3, dropout_p=0.1)
    assert not packed(3, softcap=2.0)


@needs_kernels
def test_the_kernel_of_bands() -> None:
    """Dense, causal and windows. At head dim 128 its key tiles are twice as large: for long lengths alone."""

    def band(len_q: int, len_kv: int, mask: Mask | None = None, dim: int = 128, **options: Any) -> bool:
        x = make(dtype=torch.bfloat16, len_q=len_q, len_kv=len_kv, dim=dim)
        q, k, v = (part.requires_grad_() for part in x)
        name = explain(q, k, v, mask, backend="sm90", **options).backward_kernel
        return next(x for x in _C.backward_kernels() if x["name"] == name)["band"]

    assert band(100, 1024) and not band(100, 1100), "an odd number of tiles of 128 keys"
    assert band(100, 1100, dim=64) and band(50, 50, Causal(), dim=40) and not band(100, 1024, dim=256)
    assert band(3072, 3072, Causal()) and not band(2048, 2048, Causal())
    assert band(300, 4000, Causal()) and not band(300, 4000, Causal(align="top-left")), "rows see the end, or not"
    assert band(3072, 3072, SlidingWindow(math.inf, 0)) and not band(3072, 3072, SlidingWindow(1000, 0))
    assert band(4096, 4096, SlidingWindow(3000, 3000))
    others = (PrefixLM(5), SlidingWindow(3000, 0, keep_first=2), Document(torch.tensor([0, 50, 4096]).int()))
    for mask in (*others, SlidingWindow(3000, 0) & others[-1], DilatedWindow(3000, 0, dilation=2)):
        assert not band(4096, 4096, mask), mask
    for options in ({"dropout_p": 0.1}, {"softcap": 2.0}):
        assert not band(1024, 1024, **options) and not band(1024, 1024, dim=64, **options), options
    assert not band(1024, 1024, deterministic=True) and band(1024, 1024, dim=64, deterministic=True)


BAND_OR_NOT = {
    "window": (SlidingWindow(9, 0), True),
    "top-left": (SlidingWindow(9, 3, align="top-left"), True),
    "prefix": (PrefixLM(5), True),
    "both": (PrefixLM(5) & SlidingWindow(9, 9), True),
    "right-alone": (SlidingWindow(math.inf, 4), True),
    "ends-stay": (SlidingWindow(9, math.inf), False),
    "sees-all": (SlidingWindow(math.inf, math.inf), False),
    "first-keys": (SlidingWindow(9, 0, keep_first=2), False),
    "by-batch": (PrefixLM(torch.tensor([5, 9], dtype=torch.int32)), False),
    "documents": (SlidingWindow(9, 0) & Document(torch.tensor([0, 40, 130], dtype=torch.int32)), False),
}


@needs_kernels
@pytest.mark.parametrize("name", BAND_OR_NOT)
def test_which_masks_are_bands(name: str) -> None:
    """Those whose rows see one run of keys that ends further right from row to row, the same in every batch."""
    q, k, v = make(dtype=torch.bfloat16, len_q=130, len_kv=130)
    mask, is_band = BAND_OR_NOT[name]
    got = explain(q, k, v, mask, backend="sm90")
    assert got.kernel == f"fwd_{'band' if is_band else 'composite'}_d64_bf16"
    assert got.pairs == int(mask.to_dense(130, 130).expand(2, 1, 130, 130).sum()) * q.shape[1]


def test_dropout_is_described_on_the_cpu() -> None:
    q, k, v = make()
    assert "dropout_p 0.25" in explain(q, k, v, dropout_p=0.25).call
    assert "dropout_p" not in explain(q, k, v).call


FEW = [None, Causal(), Causal(align="top-left"), SlidingWindow(300, 0), PrefixLM(5), SlidingWindow(9, 9) & Causal()]


@needs_kernels
@pytest.mark.parametrize("mask", FEW, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_few_queries_are_run_by_decode_kernels(mask: Mask | None, dtype: torch.dtype) -> None:
    """As csrc/binding/few_queries.h has it: 1024 keys at least, and more for more rows of a kv head, up to 256."""
    shape = {"heads": (8, 2), "len_q": 4, "len_kv": 1024, "dtype": dtype, "dim": 72, "dim_v": 64}
    kernel = next(
        x
        for x in _C.paged_kernels()
        if x["name"] == "decode_d128_" + {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    )
    got = explain(*make(**shape), mask, backend="sm90")
    assert (got.kernel, got.threads, got.shared_memory) == (kernel["name"], kernel["threads"], kernel["shared_memory"])
    assert got.tile is None and got.full is None and got.registers is None and got.pairs > 0
    assert "keys dealt out" in " ".join(str(got).split()) and any("few queries" in note for note in got.notes)
    for more in ({"len_q": 16}, {"heads": (34, 2)}, {"len_q": 64}):
        assert explain(*make(**{**shape, **more, "len_kv": 20000}), mask, backend="sm90").kernel == kernel["name"]
    for other in ({"len_q": 16}, {"len_kv": 1023}, {"heads": (34, 2)}, {"len_q": 65, "len_kv": 20000}):
        assert explain(*make(**{**shape, **other}), mask, backend="sm90").kernel.startswith("fwd_")
    assert explain(*make(**shape), mask, backend="sm90", dropout_p=0.5).kernel.startswith("fwd_")
    assert explain(*make(**shape), mask, backend="sm90", softcap=3.0).kernel == kernel["name"]
    from_start = isinstance(mask, Causal) and mask.align == "top-left"
    slopes = explain(*make(**shape), mask, backend="sm90", alibi_slopes=torch.ones(8))
    assert slopes.kernel.startswith("fwd_" if from_start else "decode_")


FEW_ROWS = [
    # dim, batch, heads, length; whether small tiles run, dense and causal
    (64, 1, 32, 512, True, True),  # tiles of 64 rows: 396 run at a time at 64, 264 at 128
    (64, 1, 99, 256, True, True),
    (64, 1, 100, 256, False, False),
    (64, 1, 33, 1024, False, True),  # up to 4/3 of that where most end early
    (64, 1, 34, 1024, False, False),
    (64, 16, 32, 64, True, True),  # three quarters of a larger tile would be empty
    (64, 16, 32, 129, False, False),
    (128, 1, 16, 512, True, True),
    (128, 8, 16, 128, True, True),
    (128, 2, 16, 529, False, True),
    (128, 3, 16, 512, False, False),
    (128, 16, 16, 65, False, False),
    (128, 64, 16, 64, True, True),
    (96, 1, 1, 64, False, False),  # other widths have none
    (256, 1, 1, 64, False, False),
]


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mask", [None, Causal(), Causal(align="top-left")], ids=repr)
@pytest.mark.parametrize(("dim", "batch", "heads", "length", "dense", "causal"), FEW_ROWS)
def test_few_rows_have_small_tiles(
    dim: int, batch: int, heads: int, length: int, dense: bool, causal: bool, mask: Mask | None, dtype: torch.dtype
) -> None:
    """As csrc/fwd/few_rows.h has it, under masks without a plan and without options."""
    q, k, v = (x.to(dtype) for x in make(batch, (heads, heads), length, length, dim, device="meta"))
    got = explain(q, k, v, mask, backend="sm90")
    small = dense if mask is None else causal
    assert got.kernel.startswith(f"fwd_{'dense' if mask is None else 'causal'}{'_small' if small else ''}_d{dim}_")
    assert got.tile[0] == 64 if small else got.tile[0] > 64
    assert any("small ones" in note for note in got.notes) == small
    for options in ({"softcap": 2.0}, {"alibi_slopes": torch.ones(heads, device="meta")}):
        assert "_small_" not in explain(q, k, v, mask, backend="sm90", **options).kernel
    assert "_small_" not in explain(q, k, v, Document([0, 5, length]).to("meta"), backend="sm90").kernel


@needs_kernels
def test_few_queries_under_other_masks_are_not() -> None:
    q, k, v = make(len_q=4, len_kv=1024, dtype=torch.bfloat16)
    documents = Document([0, 2, 4], [0, 500, 1024])
    for mask in (documents, documents & SlidingWindow(9), buckets(4, 1024)):
        assert explain(q, k, v, mask, backend="sm90").kernel.startswith("fwd_")


@needs_kernels
@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_the_kernel_of_every_mask_with_dropout(family: str, softcap: float) -> None:
    """Dropout is in kernels of composite masks and lists; where nothing else is asked for, and rows and keys are in the
    caller's order, in a faster one."""
    q, k, v = make(dtype=torch.bfloat16)
    mask = mask_for(family, 2, 100, 130, heads=(4, 2)).build()
    got = explain(q, k, v, mask, backend="sm90", softcap=softcap, dropout_p=0.1)
    kernel = next(x for x in _C.kernels() if x["name"] == got.kernel)
    kind = 0 if mask is None else mask._lower()[0]
    assert kernel["mask"] == ("block_sparse" if kind == 6 else "composite") and kernel["dropout"]
    assert kernel["general"] == (kind >= 4 or softcap > 0.0)
    assert any("kernels of intersections" in note for note in got.notes) == (kind < 3)
    assert got.full + got.partial > 0 or got.pairs == 0


@needs_kernels
@pytest.mark.parametrize("mask", [None, Causal(), Document([0, 50, 100])], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("dim", "dim_v"), [(8, 8), (64, 64), (72, 64), (192, 128), (160, 104), (128, 192), (64, 256)])
@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_kernel_a_hopper_gpu_would_run(mask: Mask | None, dtype: torch.dtype, dim: int, dim_v: int, device) -> None:
    q, k, v = (x.to(device, dtype) for x in make(dim=dim, dim_v=dim_v))
    mask = None if mask is None else mask.to(device)
    got = explain(q, k, v, mask, backend="sm90")
    kernel = next(x for x in _C.kernels() if x["name"] == got.kernel)
    assert kernel["dtype"] == str(dtype).removeprefix("torch.")
    assert kernel["mask"] == ("dense" if mask is None else type(mask).__name__.lower())
    assert kernel["head_dim_bucket"] == got.head_dim_bucket >= dim
    assert kernel["head_dim_v_bucket"] == got.head_dim_v_bucket >= dim_v
    assert got.tile == (kernel["block_q"], kernel["block_kv"])
    assert (got.stages, got.threads, got.shared_memory) == (
        kernel["stages"],
        kernel["threads"],
        kernel["shared_memory"],
    )
    assert got.registers == (kernel["registers_producer"], kernel["registers_consumer"])
    assert got.runs == (device == "cuda")
    if device == "meta" and isinstance(mask, Document):
        assert got.full is None and any("meta" in note for note in got.notes)
    else:
        assert got.full + got.partial > 0
    for text in (got.kernel, f"{got.tile[0]} rows x {got.tile[1]} keys", f"{got.stages} stages"):
        assert text in " ".join(str(got).split())


# (head_dim, head_dim_v) of the kernels: of the plain ones for masks of intervals, and of all others.
WIDTHS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
FEW_WIDTHS = [(64, 64), (128, 128), (256, 256)]


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", list(itertools.product([False, True], repeat=3)), ids=str)
@pytest.mark.parametrize("kind", KERNELS)
def test_the_narrowest_kernel_that_is_wide_enough(kind: int, options: tuple[bool, ...], dtype: torch.dtype) -> None:
    """Options: softcap, ALiBi, dropout."""
    widths = FEW_WIDTHS if any(options) or KERNELS[kind] in ("block_sparse", "hash") else WIDTHS
    for dims in itertools.product(range(8, 257, 8), repeat=2):
        kernel = _C.find_kernel(kind, dtype, *dims, *options)
        fitting = [x for x in widths if x[0] >= dims[0] and x[1] >= dims[1]]
        assert (kernel["head_dim_bucket"], kernel["head_dim_v_bucket"]) == min(fitting, key=sum), dims


@needs_kernels
def test_the_widths_of_a_kernel_are_printed() -> None:
    q, k, v = make(dtype=torch.bfloat16, dim=192, dim_v=128)
    for causal, kernel in ((None, "fwd_dense_d192x128_bf16"), (Causal(), "fwd_causal_d192x128_bf16")):
        got = explain(q, k, v, causal, backend="sm90")
        assert got.kernel == kernel
        assert "head dims up to 192, of v up to 128" in " ".join(str(got).split())


@pytest.mark.skipif(bool(_C.kernels()), reason="this build has sm_90a kernels")
def test_a_build_without_kernels_says_so() -> None:
    q, k, v = make(dtype=torch.bfloat16)
    got = explain(q, k, v, backend="sm90")
    assert got.kernel is None and got.tile is None and any("built without kernels" in note for note in got.notes)


# ---------------------------------------------------------------------------------------------------------------------
# Text, errors


def test_text() -> None:
    q, k, v = make(1, (2, 1), 128, 128, 64)
    lines = str(explain(q, k, v, Causal())).splitlines()
    assert (
        lines[0] == "call        q (1, 2, 128, 64), k (1, 1, 128, 64), v (1, 1, 128, 64), float32 on cpu, mask Causal()"
    )
    text = " ".join("\n".join(lines).split())
    assert "backend cpu: q is on the CPU" in text
    assert "tiles 2 full, 4 partial, 2 skipped; 67.2% of the visited area is allowed" in text
    assert "work 4.227 MFLOP useful, 16,512 allowed pairs" in text
    assert all(len(line) <= 116 for line in lines)


def test_errors_are_those_of_attention() -> None:
    q, k, v = make()
    for bad, error in (
        ({"mask": torch.ones(3)}, TypeError),
        ({"backend": "cuda"}, ValueError),
        ({"dropout_p": 1.0}, ValueError),
        ({"config": object()}, NotImplementedError),
        ({"scale": float("nan")}, ValueError),
    ):
        with pytest.raises(error):
            explain(q, k, v, **bad)
        with pytest.raises(error):
            flashmsa.attention(q, k, v, **bad)
    with pytest.raises(ValueError, match="k: head_dim 56 does not match q's 64"):
        explain(q, k[..., :56], v)
