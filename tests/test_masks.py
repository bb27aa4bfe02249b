"""Masks against their definitions, pair by pair; drawings, equality, conversions, and the errors of making one."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flashmsa
from flashmsa import (
    BlockSparse,
    Causal,
    Dense,
    DilatedWindow,
    Document,
    HashBucket,
    Intersection,
    Mask,
    PrefixLM,
    SlidingWindow,
)
from flashmsa.masks import PerSequence

LENGTHS = [(1, 1), (5, 2), (2, 5), (8, 8), (0, 4), (4, 0), (0, 0), (31, 40), (40, 31)]

# May query i of this batch and head see key j? (batch, head, i, j, len_q, len_kv), plain integers, one pair at a time.
See = Callable[[int, int, int, int, int, int], bool]


def position(align: str, i: int, len_q: int, len_kv: int) -> int:
    return i if align == "top-left" else i + len_kv - len_q


def sees(mask: Mask) -> See:
    """The definition of a mask whose fields say all of it."""
    if isinstance(mask, Dense):
        return lambda b, h, i, j, m, n: True
    if isinstance(mask, Causal):
        return lambda b, h, i, j, m, n: j <= position(mask.align, i, m, n)
    if isinstance(mask, SlidingWindow):

        def in_window(b: int, h: int, i: int, j: int, m: int, n: int) -> bool:
            p = position(mask.align, i, m, n)
            return p - mask.left <= j <= p + mask.right or (j < mask.keep_first and j <= p + mask.right)

        return in_window
    if isinstance(mask, PrefixLM):
        prefix = mask.prefix.tolist() if isinstance(mask.prefix, torch.Tensor) else [mask.prefix] * 99
        return lambda b, h, i, j, m, n: j < prefix[b] or j <= position(mask.align, i, m, n)
    if isinstance(mask, DilatedWindow):

        def on_a_step(b: int, h: int, i: int, j: int, m: int, n: int) -> bool:
            away = j - position(mask.align, i, m, n)
            return away % mask.dilation == 0 and -mask.left <= away // mask.dilation <= mask.right

        return on_a_step
    if isinstance(mask, HashBucket):
        kv = mask.q_bucket if mask.kv_bucket is None else mask.kv_bucket
        heads = max(mask.q_bucket.shape[1], kv.shape[1])

        def bucket(x: torch.Tensor, b: int, h: int, n: int) -> int:
            return int(x[min(b, x.shape[0] - 1), h * x.shape[1] // heads, n])

        return lambda b, h, i, j, m, n: (
            bucket(mask.q_bucket, b, h, i) == bucket(kv, b, h, j) and (not mask.causal or j <= i + n - m)
        )
    if isinstance(mask, Intersection):
        parts = [sees(part) for part in mask.masks]
        return lambda *pair: all(part(*pair) for part in parts)
    assert isinstance(mask, Document)
    kv_offsets = mask.offsets if mask.kv_offsets is None else mask.kv_offsets

    def in_document(b: int, h: int, i: int, j: int, m: int, n: int) -> bool:
        q_cuts, kv_cuts = (x[b].tolist() if x.dim() == 2 else x.tolist() for x in (mask.offsets, kv_offsets))
        for d in range(len(q_cuts) - 1):
            if q_cuts[d] <= i < q_cuts[d + 1] and kv_cuts[d] <= j < kv_cuts[d + 1]:
                # Aligned at the end: the last query of a document sees its last key, the one before the last but one.
                return not mask.causal or kv_cuts[d + 1] - j >= q_cuts[d + 1] - i
        return False

    return in_document


def brute_force(mask: Mask, len_q: int, len_kv: int, see: See | None = None) -> torch.Tensor:
    """The shape of to_dense, filled pair by pair."""
    see = see or sees(mask)
    shape = mask.to_dense(len_q, len_kv).shape
    batch, heads = shape[:2] if len(shape) == 4 else (1, 1)
    pairs = [
        see(b, h, i, j, len_q, len_kv)
        for b in range(batch)
        for h in range(heads)
        for i in range(len_q)
        for j in range(len_kv)
    ]
    return torch.tensor(pairs, dtype=torch.bool).reshape(shape)


def check_all_views(mask: Mask, len_q: int, len_kv: int, see: See | None = None) -> None:
    """to_dense, the lowered form and sparsity say what the definition says."""
    expected = brute_force(mask, len_q, len_kv, see)
    dense = mask.to_dense(len_q, len_kv)
    assert dense.dtype == torch.bool and torch.equal(dense, expected)
    visible = mask._visible(len_q, len_kv)
    lowered = visible.rows(slice(0, len_q))
    whole = expected if expected.dim() == 4 else expected[None, None]
    assert torch.equal(lowered.expand(torch.broadcast_shapes(lowered.shape, whole.shape)), whole)
    middle = slice(len_q // 3, len_q - len_q // 4)
    assert torch.equal(visible.rows(middle), lowered[:, :, middle]), "blocks of rows are those rows"
    allowed = expected.double().mean().item() if expected.numel() else 1.0
    assert mask.sparsity(len_q, len_kv) == pytest.approx(1.0 - allowed, abs=1e-12)


@pytest.mark.parametrize("mask", [Dense(), Causal(), Causal(align="top-left")], ids=repr)
@pytest.mark.parametrize(("len_q", "len_kv"), LENGTHS)
def test_dense_and_causal(mask: Mask, len_q: int, len_kv: int) -> None:
    check_all_views(mask, len_q, len_kv)


ALIGNMENTS = st.sampled_from(["bottom-right", "top-left"])
BOUNDS = st.one_of(st.integers(0, 12), st.just(math.inf))


@st.composite
def interval_parts(draw: st.DrawFn, batch: int) -> Mask:
    """An interval mask other than a document; a prefix for each batch among them."""
    kind = draw(st.sampled_from(["causal", "window", "keep", "prefix", "prefixes"]))
    align = draw(ALIGNMENTS)
    if kind == "causal":
        return Causal(align)
    if kind == "prefix":
        return PrefixLM(draw(st.integers(0, 14)), align)
    if kind == "prefixes":
        return PrefixLM(int32(draw(st.lists(st.integers(0, 14), min_size=batch, max_size=batch))), align)
    keep = 3 if kind == "keep" else 0
    return SlidingWindow(draw(BOUNDS), draw(BOUNDS), keep_first=keep, align=align)


@given(st.data(), st.integers(0, 20), st.integers(0, 20))
def test_windows_and_prefixes(data: st.DataObject, len_q: int, len_kv: int) -> None:
    check_all_views(data.draw(interval_parts(2)), len_q, len_kv)


@given(st.data(), st.integers(0, 20), st.integers(0, 20))
def test_intersections(data: st.DataObject, len_q: int, len_kv: int) -> None:
    """Both alignments, first keys of one number, and a document mask among them, by batch too."""
    parts = data.draw(st.lists(interval_parts(3), min_size=1, max_size=4))
    if data.draw(st.booleans()):
        parts.insert(data.draw(st.integers(0, len(parts))), data.draw(documents()))
    tensors = [part for part in parts if isinstance(part, PrefixLM)]
    if any(x.align == y.align for n, x in enumerate(tensors) for y in tensors[:n]):
        # A prefix tensor goes with no other prefix of its alignment: test_bad_intersections.
        parts = [part for part in parts if part not in tensors[1:]]
    batches = {part.device and part.to_dense(1, 1).shape[:-2] for part in parts} - {None, ()}
    if len({shape[0] for shape in batches} - {1}) > 1:
        parts = parts[:1]
    mask = Dense()
    for part in parts:
        mask = mask & part
    check_all_views(mask, len_q, len_kv)


@given(BOUNDS, BOUNDS, st.integers(1, 9), ALIGNMENTS, st.integers(0, 20), st.integers(0, 20))
def test_dilated(left: float, right: float, dilation: int, align: str, len_q: int, len_kv: int) -> None:
    check_all_views(DilatedWindow(left, right, dilation=dilation, align=align), len_q, len_kv)


@given(st.data(), st.integers(0, 12), st.integers(0, 12), st.booleans())
def test_buckets(data: st.DataObject, len_q: int, len_kv: int, causal: bool) -> None:
    heads = data.draw(st.sampled_from([(1, 1), (4, 2), (4, 1), (1, 2), (4, 4)]))
    batches = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]))

    def buckets(batch: int, head: int, length: int) -> torch.Tensor:
        values = st.sampled_from([-(2**31), -7, 0, 1, 2**31 - 1])
        count = batch * head * length
        return int32(data.draw(st.lists(values, min_size=count, max_size=count))).reshape(batch, head, length)

    q_bucket = buckets(batches[0], heads[0], len_q)
    if len_q == len_kv and data.draw(st.booleans()):
        mask = HashBucket(q_bucket, causal=causal)
    else:
        mask = HashBucket(q_bucket, buckets(batches[1], heads[1], len_kv), causal=causal)
    check_all_views(mask, len_q, len_kv)


@pytest.mark.parametrize("block_size", [(64, 64), (128, 128), (192, 64), (64, 320), (256, 128)], ids=str)
@pytest.mark.parametrize(("len_q", "len_kv"), [(1, 1), (130, 65), (65, 257), (64, 192), (0, 70), (70, 0)])
@pytest.mark.parametrize("leading", [(1, 1), (2, 3)], ids=str)
def test_blocks(block_size: tuple[int, int], len_q: int, len_kv: int, leading: tuple[int, int]) -> None:
    (block_q, block_kv), shape = block_size, (*leading, -(-len_q // block_size[0]), -(-len_kv // block_size[1]))
    blocks = torch.rand(shape) < 0.5
    table = blocks.tolist()

    def set_block(b: int, h: int, i: int, j: int, m: int, n: int) -> bool:
        return table[b][h][i // block_q][j // block_kv]

    mask = BlockSparse(blocks, block_size)
    check_all_views(mask, len_q, len_kv, set_block)
    if len_q * len_kv < 9000:
        documents = Document([0, len_q // 3, len_q], [0, len_kv // 2, len_kv])
        for part in (Causal(), SlidingWindow(40, 3, keep_first=5, align="top-left"), documents):
            other = sees(part)
            see = lambda *pair, other=other: set_block(*pair) and other(*pair)  # noqa: E731
            check_all_views(mask & part, len_q, len_kv, see)
            check_all_views(part & mask, len_q, len_kv, see)


@pytest.mark.parametrize(("len_q", "len_kv"), [(1, 1), (65, 130), (129, 70), (0, 5), (5, 0)])
@pytest.mark.parametrize("leading", [(), (1, 1), (2, 1), (1, 2)], ids=str)
def test_dense_bits(len_q: int, len_kv: int, leading: tuple[int, ...]) -> None:
    dense = torch.rand(*leading, len_q, len_kv) < 0.5
    dense[..., :64, :64] = True
    mask = BlockSparse.from_dense(dense)
    table = (dense if leading else dense[None, None]).tolist()
    check_all_views(mask, len_q, len_kv, lambda b, h, i, j, m, n: table[b][h][i][j])
    check_all_views(mask & Causal(), len_q, len_kv, lambda b, h, i, j, m, n: table[b][h][i][j] and j <= i + n - m)


@given(st.data(), st.integers(0, 20), st.integers(0, 20))
def test_inside_each_sequence(data: st.DataObject, len_q: int, len_kv: int) -> None:
    """Positions, prefixes and first keys count from each sequence's own start or end, of the keys that are used."""
    count = data.draw(st.integers(1, 4))
    lengths = st.lists(st.integers(0, 8), min_size=count, max_size=count)
    q_cuts, kv_cuts = offsets_of(data.draw(lengths)), offsets_of(data.draw(lengths))
    used = data.draw(st.one_of(st.none(), lengths))
    inner = data.draw(interval_parts(count))
    if data.draw(st.booleans()):
        inner = inner & SlidingWindow(5, 4, align=data.draw(ALIGNMENTS))
    mask = PerSequence(inner, int32(q_cuts), int32(kv_cuts), None if used is None else int32(used))
    one = sees(inner)

    def see(b: int, h: int, i: int, j: int, m: int, n: int) -> bool:
        for d in range(count):
            keys = kv_cuts[d + 1] - kv_cuts[d] if used is None else min(used[d], kv_cuts[d + 1] - kv_cuts[d])
            if q_cuts[d] <= i < q_cuts[d + 1] and kv_cuts[d] <= j < kv_cuts[d] + keys:
                return one(d, 0, i - q_cuts[d], j - kv_cuts[d], q_cuts[d + 1] - q_cuts[d], keys)
        return False

    check_all_views(mask, len_q, len_kv, see)


def offsets_of(lengths: list[int]) -> list[int]:
    return [sum(lengths[:d]) for d in range(len(lengths) + 1)]


@st.composite
def documents(draw: st.DrawFn) -> Document:
    """Empty documents and none at all, shared or by batch, the same or other lengths for the keys."""
    count, batch = draw(st.integers(0, 5)), draw(st.sampled_from([None, 1, 3]))

    def offsets() -> torch.Tensor:
        rows = [
            offsets_of(draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))) for _ in range(batch or 1)
        ]
        return torch.tensor(rows if batch else rows[0], dtype=torch.int32)

    return Document(offsets(), draw(st.sampled_from([None, offsets()])), causal=draw(st.booleans()))


@given(documents(), st.integers(0, 30), st.integers(0, 30))
def test_documents(mask: Document, len_q: int, len_kv: int) -> None:
    """Also lengths that end before the last document, or go on after it."""
    check_all_views(mask, len_q, len_kv)


def test_document_in_figures() -> None:
    """One document mask written out by hand."""
    mask = Document([0, 2, 2, 3], [0, 1, 3, 5], causal=True)
    expected = torch.tensor([[0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 1, 1], [0, 0, 0, 0, 0]], dtype=torch.bool)
    assert torch.equal(mask.to_dense(4, 5), expected)


def test_causal_case_2() -> None:
    """Two queries, five keys: bottom-right sees 4 and 5 of them, top-left 1 and 2."""
    assert Causal().to_dense(2, 5).sum(1).tolist() == [4, 5]
    assert Causal(align="top-left").to_dense(2, 5).sum(1).tolist() == [1, 2]


# ---------------------------------------------------------------------------------------------------------------------
# Text


def test_causal_drawing() -> None:
    lines = str(Causal()).splitlines()
    assert lines[0].startswith("Causal(), 8 queries")
    assert lines[1:] == ["██" * (i + 1) + "··" * (7 - i) for i in range(8)]


def test_document_drawing() -> None:
    lines = str(Document([0, 2, 3], causal=True)).splitlines()
    assert lines == [
        "Document([0, 2, 3], causal=True), 3 queries (down) x 3 keys (across)",
        "██····",
        "████··",
        "····██",
    ]


def test_a_cell_of_many_pairs_says_all_some_or_none() -> None:
    """Document [0, 5) meets the cells [0, 4) wholly, [4, 8) in part."""
    assert Document([0, 5]).draw(8, 8, cells=2).splitlines() == ["██▒▒", "▒▒▒▒"]
    assert Document([0, 4]).draw(8, 8, cells=2).splitlines() == ["██··", "····"]


@given(documents(), st.integers(1, 30), st.integers(1, 30), st.integers(1, 8))
def test_drawing_agrees_with_the_pairs(mask: Document, len_q: int, len_kv: int, cells: int) -> None:
    dense = mask.to_dense(len_q, len_kv)
    dense = dense[0, 0] if dense.dim() == 4 else dense
    lines = mask.draw(len_q, len_kv, cells).splitlines()
    rows, columns = min(cells, len_q), min(cells, len_kv)
    assert len(lines) == rows and {len(line) for line in lines} == {2 * columns}
    for r in range(rows):
        for c in range(columns):
            part = dense[
                r * len_q // rows : (r + 1) * len_q // rows, c * len_kv // columns : (c + 1) * len_kv // columns
            ]
            assert lines[r][2 * c] == ("█" if part.all() else "▒" if part.any() else "·")


@pytest.mark.parametrize(
    "mask",
    [
        SlidingWindow(3, 0, keep_first=2),
        DilatedWindow(1, dilation=3),
        HashBucket(torch.arange(40, dtype=torch.int32)[None, None] % 3),
        BlockSparse(torch.tensor([[True, False], [False, True]])[None, None], (64, 64)),
        BlockSparse(torch.ones(1, 1, 2, 3, dtype=torch.bool), (64, 64)) & Causal(),
    ],
    ids=repr,
)
def test_drawings_of_other_masks(mask: Mask) -> None:
    len_q, len_kv = mask._natural_size()
    dense = mask.to_dense(len_q, len_kv)
    dense = dense[0, 0] if dense.dim() == 4 else dense
    assert str(mask).splitlines()[1:] == mask.draw(len_q, len_kv).splitlines()
    for cells in (3, 8):
        for r, line in enumerate(mask.draw(len_q, len_kv, cells).splitlines()):
            for c in range(cells):
                rows = slice(r * len_q // cells, (r + 1) * len_q // cells)
                part = dense[rows, c * len_kv // cells : (c + 1) * len_kv // cells]
                assert line[2 * c] == ("█" if part.all() else "▒" if part.any() else "·")


def test_masks_of_many_pairs_are_drawn_when_asked() -> None:
    large = BlockSparse(torch.eye(100, dtype=torch.bool)[None, None])
    assert str(large) == repr(large) and large.draw(12800, 12800, 2).splitlines() == ["▒▒··", "··▒▒"]


def test_text_of_masks_without_rows_or_values() -> None:
    assert "nothing to draw" in str(Document([0]))
    meta = Document(torch.zeros(3, dtype=torch.int32, device="meta"))
    assert str(meta) == repr(meta) == "Document(<int32 (3,) on meta>)"


def test_repr() -> None:
    assert repr(Dense()) == "Dense()"
    assert repr(Causal()) == "Causal()"
    assert repr(Causal(align="top-left")) == "Causal(align='top-left')"
    assert repr(Document([0, 3], [0, 4], causal=True)) == "Document([0, 3], kv_offsets=[0, 4], causal=True)"
    assert repr(Document(list(range(40)))) == "Document(<int32 (40,) on cpu>)"
    assert repr(HashBucket(int32([[[3, 1]]]), causal=True)) == "HashBucket([[[3, 1]]], causal=True)"
    assert repr(HashBucket(int32([[[3, 1]]]), int32([[[1]]]))) == "HashBucket([[[3, 1]]], kv_bucket=[[[1]]])"
    blocks = torch.ones(2, 1, 3, 4, dtype=torch.bool)
    assert repr(BlockSparse(blocks)) == "BlockSparse(<bool (2, 1, 3, 4) on cpu>)"
    assert repr(BlockSparse(blocks, (64, 192)) & Causal()) == (
        "BlockSparse(<bool (2, 1, 3, 4) on cpu>, (64, 192)) & Causal()"
    )
    assert (
        repr(BlockSparse.from_dense(torch.eye(3).bool())) == "BlockSparse(<bool (1, 1, 1, 1) on cpu, with dense bits>)"
    )
    assert repr(PrefixLM(int32([1, 2]))) == "PrefixLM([1, 2])"
    inf = math.inf
    for mask in (
        Dense(),
        Causal(),
        Causal(align="top-left"),
        Document([0, 3], [0, 4], causal=True),
        SlidingWindow(3, inf, keep_first=2, align="top-left"),
        DilatedWindow(2, inf, dilation=4, align="top-left"),
        PrefixLM(4) & SlidingWindow(2) & Document([0, 3]),
    ):
        assert eval(repr(mask), {**vars(flashmsa), "inf": inf}) == mask


# ---------------------------------------------------------------------------------------------------------------------
# Values: equality, hash, immutability, copies


def test_equality_and_hash_without_tensors() -> None:
    assert Dense() == Dense() and Causal() == Causal(align="bottom-right")
    assert Causal() != Causal(align="top-left") and Causal() != Dense() and Dense() != Document([0])
    assert {Dense(): 1, Causal(): 2, Causal(align="top-left"): 3}[Causal()] == 2


def test_equality_of_documents() -> None:
    mask = Document([0, 3, 5])
    assert mask == Document(torch.tensor([0, 3, 5], dtype=torch.int32))
    assert mask == Document([0, 3, 5], [0, 3, 5]), "the same offsets serve both when none are given for the keys"
    others = [
        Document([0, 3, 6]),
        Document([0, 3, 5, 5]),
        Document([0, 3, 5], causal=True),
        Document([0, 3, 5], [0, 3, 6]),
    ]
    for other in others:
        assert mask != other
    assert mask != Document(torch.tensor([[0, 3, 5]], dtype=torch.int32))
    with pytest.raises(TypeError, match="unhashable"):
        hash(mask)


def one_of_each() -> list[Mask]:
    blocks = torch.eye(2).bool()[None, None]
    buckets = torch.arange(6, dtype=torch.int32)[None, None] % 2
    return [
        Dense(),
        Causal(align="top-left"),
        SlidingWindow(2, 1, keep_first=1),
        PrefixLM(2),
        PrefixLM(torch.tensor([1, 3], dtype=torch.int32)),
        DilatedWindow(1, dilation=2),
        Document([0, 3, 5], [0, 1, 9], True),
        HashBucket(buckets),
        HashBucket(buckets, buckets + 1, causal=True),
        BlockSparse(blocks[..., :1, :1]),
        BlockSparse.from_dense(torch.ones(6, 6).tril().bool()),
        BlockSparse(blocks[..., :1, :1], capacity=3) & Causal(),
        Document([0, 3, 5]) & PrefixLM(torch.tensor([1], dtype=torch.int32)),
    ]


@pytest.mark.parametrize("mask", one_of_each(), ids=repr)
def test_masks_do_not_change(mask: Mask) -> None:
    for name in ("align", "offsets", "causal", "left", "prefix", "block_size", "q_bucket", "_lowered", "other"):
        with pytest.raises(AttributeError):
            setattr(mask, name, 1)


@pytest.mark.parametrize("mask", one_of_each(), ids=repr)
def test_copies_are_equal(mask: Mask) -> None:
    for other in (copy.copy(mask), copy.deepcopy(mask), pickle.loads(pickle.dumps(mask)), mask.to("cpu")):
        assert other == mask and other._lower()[:2] == mask._lower()[:2]
        assert torch.equal(other.to_dense(6, 6), mask.to_dense(6, 6))


def test_to_moves_the_offsets() -> None:
    mask = Document([0, 3, 5], [0, 1, 9], causal=True)
    assert mask.to("cpu") is mask and Causal().to("meta") == Causal()
    moved = mask.to("meta")
    assert moved.causal and {x.device.type for x in (moved.offsets, moved.kv_offsets, *moved._lower()[2])} == {"meta"}
    assert moved.device.type == "meta" and mask.device.type == "cpu" and Causal().device is None


@pytest.mark.parametrize("mask", [mask for mask in one_of_each() if mask.device is not None], ids=repr)
def test_to_moves_all_tensors(mask: Mask) -> None:
    assert mask.to("cpu") is mask
    moved = mask.to("meta")
    assert type(moved) is type(mask) and moved._lower()[:2] == mask._lower()[:2]
    assert {x.device.type for x in moved._lower()[2]} == {"meta"} and moved.device.type == "meta"
    assert [x.shape for x in moved._lower()[2]] == [x.shape for x in mask._lower()[2]]


def test_equality_of_masks_with_tensors() -> None:
    masks = one_of_each()
    for n, mask in enumerate(masks):
        assert [mask == other for other in one_of_each()] == [n == m for m in range(len(masks))]
        if mask.device is None:
            assert hash(mask) == hash(one_of_each()[n])
        else:
            with pytest.raises(TypeError, match="unhashable"):
                hash(mask)


def test_the_mask_holds_the_tensor_itself() -> None:
    """A captured call must see offsets that are written later."""
    offsets = torch.tensor([0, 3, 5], dtype=torch.int32)
    mask = Document(offsets)
    assert mask.offsets is offsets and mask._lower()[2] == (offsets, offsets)
    offsets.copy_(torch.tensor([0, 1, 5]))
    assert torch.equal(mask.to_dense(5, 5), brute_force(mask, 5, 5)) and mask.to_dense(5, 5)[0].sum() == 1


# ---------------------------------------------------------------------------------------------------------------------
# What the native operator takes


def test_lowering() -> None:
    assert Dense()._lower() == (0, (), ())
    assert Causal()._lower() == (1, (0,), ())
    assert Causal(align="top-left")._lower() == (1, (1,), ())
    mask = Document([0, 3], [0, 4], causal=True)
    assert mask._lower() == (2, (1,), (mask.offsets, mask.kv_offsets))
    assert Document([0, 3])._lower()[1] == (0,)
    assert DilatedWindow(2, math.inf, dilation=3, align="top-left")._lower() == (4, (1, 2, NONE, 3), ())


NONE = 2**31 - 1
FREE = (NONE,) * 6 + (0, NONE, NONE)


def band(**bounds: int) -> tuple[int, ...]:
    names = ("left_br", "left_tl", "right_br", "right_tl", "prefix_br", "prefix_tl", "keep", "outer_br", "outer_tl")
    return tuple(bounds.get(name, free) for name, free in zip(names, FREE, strict=True))


def test_lowering_of_composites() -> None:
    """The numbers one by one: global band, local band, flags, 0."""
    assert SlidingWindow(3, 1)._lower() == (3, (*band(left_br=3, right_br=1), *FREE, 0, 0), ())
    top_left = SlidingWindow(3, math.inf, keep_first=2, align="top-left")
    assert top_left._lower() == (3, (*band(left_tl=3, keep=2), *FREE, 128, 0), ())
    assert PrefixLM(5)._lower() == (3, (*band(prefix_br=5), *FREE, 0, 0), ())
    prefix = int32([1, 2])
    assert PrefixLM(prefix)._lower() == (3, (*band(prefix_br=0), *FREE, 4, 0), (prefix,))
    assert PrefixLM(prefix, "top-left")._lower() == (3, (*band(prefix_tl=0), *FREE, 8 + 128, 0), (prefix,))
    mask = Document([0, 3], [0, 4], causal=True)
    both = (mask & SlidingWindow(3, 1, keep_first=2) & PrefixLM(prefix) & SlidingWindow(7, align="top-left"))._lower()
    bounds = band(left_br=3, right_br=1, left_tl=7, right_tl=7, prefix_br=0, keep=2, outer_tl=7)
    assert both == (3, (*bounds, *band(right_br=0), 1 + 4, 0), (mask.offsets, mask.kv_offsets, prefix))
    used, prefix = int32([1]), int32([2])
    packed = PerSequence(PrefixLM(prefix, "top-left") & Causal("top-left"), mask.offsets, mask.kv_offsets, used)
    local = band(prefix_tl=0, right_tl=0)
    assert packed._lower() == (
        3, (*FREE, *local, 1 + 2 + 32 + 64 + 128, 0), (mask.offsets, mask.kv_offsets, used, prefix)
    )  # fmt: skip


def test_lowering_of_buckets() -> None:
    q_order, kv_order, begin, end = HashBucket(int32([[[5, -1, 5, 2]]]), int32([[[5, 5, 9, -1, 5]]]), True)._lower()[2]
    assert q_order.tolist() == [[[1, 3, 0, 2]]] and kv_order.tolist() == [[[3, 0, 1, 4, 2]]]
    # Sorted keys: -1 at 3; 5 at 0, 1, 4; 9 at 2. Query 1 stands at 2, before its key.
    assert begin.tolist() == [[[0, 1, 1, 1]]] and end.tolist() == [[[0, 1, 3, 3]]]
    assert {x.dtype for x in (q_order, kv_order, begin, end)} == {torch.int32}


def test_lowering_of_blocks() -> None:
    """Cells of 128 x 128: whole ones first, then mixed ones with a bit per 64 x 64."""
    blocks = torch.tensor([[1, 0, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 1]], dtype=torch.bool)[None, None]
    kind, ints, tensors = BlockSparse(blocks, (64, 64))._lower()
    assert kind == 6 and ints == (*FREE, *FREE, 0, 0, 64, 64, 3, 5)
    row_start, whole_count, cells, detail, bits = tensors
    assert row_start.tolist() == [[[0, 3, 4]]] and whole_count.tolist() == [[[2, 1]]]
    assert cells.tolist() == [1, 2, 0, 2] and detail.tolist() == [-1, -1, 1, -1]
    assert bits.shape == (0, 128, 4) and {x.dtype for x in tensors} == {torch.int32}
    prefix = int32([4])
    both = (BlockSparse(blocks, (64, 64)) & PrefixLM(prefix))._lower()
    assert both[1] == (*band(prefix_br=0), *FREE, 4, 0, 64, 64, 3, 5) and both[2][0] is prefix and len(both[2]) == 6


def test_lowering_of_dense_bits() -> None:
    dense = torch.zeros(130, 129, dtype=torch.bool)
    dense[:128, :128] = True
    dense[129, 3] = dense[128, 31] = dense[128, 32] = True
    row_start, whole_count, cells, detail, bits = BlockSparse.from_dense(dense)._lower()[2]
    assert row_start.tolist() == [[[0, 1, 2]]] and whole_count.tolist() == [[[1, 0]]]
    assert cells.tolist() == [0, 0] and detail.tolist() == [-1, 0]
    assert bits.shape == (1, 128, 4) and bits[0, :2].tolist() == [[-(2**31), 1, 0, 0], [8, 0, 0, 0]]
    assert not bits[0, 2:].count_nonzero()


def test_lowering_is_made_once() -> None:
    for mask in one_of_each():
        assert mask._lower() is mask._lower()


# ---------------------------------------------------------------------------------------------------------------------
# Conversions


def test_from_ids() -> None:
    """Case 19's ids."""
    assert Document.from_ids(torch.tensor([0, 0, 1, 1, 1, 2])) == Document([0, 2, 5, 6])
    assert Document.from_ids(torch.tensor([7, 7, 3]), causal=True) == Document([0, 2, 3], causal=True)
    assert Document.from_ids(torch.tensor([0, 0, 4, -1, -1])) == Document([0, 2, 3]), "a tail of padding"
    assert Document.from_ids(torch.tensor([-1, -1])) == Document([0])
    assert Document.from_ids(torch.tensor([], dtype=torch.int64)) == Document([0])


def test_from_ids_by_batch() -> None:
    """Rows with fewer documents get empty ones at their end, which see nothing."""
    mask = Document.from_ids(torch.tensor([[0, 0, 1, 2], [5, 5, 5, -1]], dtype=torch.int32))
    assert mask.offsets.tolist() == [[0, 2, 3, 4], [0, 3, 3, 3]] and mask.offsets.dtype == torch.int32


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=3), st.booleans())
def test_from_ids_allows_equal_ids(lengths: list[list[int]], causal: bool) -> None:
    rows = [[d for d, n in enumerate(row) for _ in range(n)] for row in lengths]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [-1] * (longest - len(row)) for row in rows], dtype=torch.int64).reshape(
        len(rows), longest
    )
    expected = (ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, :, None]
    if causal:
        expected &= torch.ones(longest, longest, dtype=torch.bool).tril()
    assert torch.equal(Document.from_ids(ids, causal=causal).to_dense(longest, longest)[:, 0], expected)


@given(st.lists(st.lists(st.integers(-2, 3), min_size=6, max_size=6), min_size=1, max_size=3), st.booleans())
def test_from_ids_in_any_order(rows: list[list[int]], causal: bool) -> None:
    """Unsorted ids, and padding anywhere: grouped by bucket."""
    ids = torch.tensor(rows) * 2**40
    mask = Document.from_ids(ids, causal=causal)
    expected = (ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, :, None]
    if causal:
        expected &= torch.ones(6, 6, dtype=torch.bool).tril()
    assert torch.equal(mask.to_dense(6, 6)[:, 0], expected)
    # Documents wherever neighbours allow it.
    for row in rows:
        text = [x for x, following in zip(row, [*row[1:], None], strict=True) if x != following]
        while text and text[-1] < 0:
            text.pop()
        if len(set(text)) < len(text) or any(x < 0 for x in text):
            assert isinstance(mask, HashBucket)
            return
    assert isinstance(mask, Document)


def test_from_ids_that_cannot_be_documents() -> None:
    assert isinstance(Document.from_ids(torch.tensor([0, 1, 0])), HashBucket)
    padded = Document.from_ids(torch.tensor([[-1, 0, 1]]), causal=True)
    assert isinstance(padded, HashBucket) and padded.causal and padded.to_dense(3, 3).sum() == 2
    with pytest.raises(TypeError, match=r"ids: dtype torch.float32"):
        Document.from_ids(torch.tensor([0.0, 1.0]))
    with pytest.raises(ValueError, match=r"ids: shape \(1, 1, 2\)"):
        Document.from_ids(torch.zeros(1, 1, 2, dtype=torch.int64))


def test_from_cu_seqlens() -> None:
    narrow = torch.tensor([0, 3, 5], dtype=torch.int32)
    mask = Document.from_cu_seqlens(narrow)
    assert mask.offsets is narrow and mask.kv_offsets is None
    wide = Document.from_cu_seqlens(torch.tensor([0, 3, 5]), torch.tensor([0, 4, 4]), causal=True)
    assert wide == Document([0, 3, 5], [0, 4, 4], causal=True)
    with pytest.raises(ValueError, match="cu_seqlens_q: 4294967296 does not fit into int32"):
        Document.from_cu_seqlens(torch.tensor([0, 2**32]))
    with pytest.raises(ValueError, match="cu_seqlens_k: -4294967296 does not fit into int32"):
        Document.from_cu_seqlens(torch.tensor([0, 5]), torch.tensor([0, -(2**32)]))


def test_from_window_size() -> None:
    assert SlidingWindow.from_window_size(4) == SlidingWindow(3, 0)
    assert SlidingWindow.from_window_size(1).to_dense(5, 5).equal(torch.eye(5).bool())
    with pytest.raises(ValueError, match="window_size: 0 is too small; must be an int >= 1"):
        SlidingWindow.from_window_size(0)


def columns_to_dense(indices: torch.Tensor, causal: bool) -> torch.Tensor:
    """FlashMask's definition: for each key the rows that do not see it. (B, 1, S, S)."""
    batch, _, length, count = indices.shape
    dense = torch.ones(batch, 1, length, length, dtype=torch.bool)
    for b in range(batch):
        for j in range(length):
            values = indices[b, 0, j].tolist()
            if causal:
                hidden = [(values[0], values[1] if count == 2 else length), (0, j)]
            else:
                hidden = [(values[0], length), (0, values[1])] if count == 2 else [tuple(values[:2]), tuple(values[2:])]
            for begin, end in hidden:
                dense[b, 0, begin:end, j] = False
    return dense


def to_columns(dense: torch.Tensor, causal: bool) -> torch.Tensor:
    """(B, S, S), each column one run of rows, as FlashMask's one or two numbers for each key."""
    length = dense.shape[-1]
    # One row more than there are: amax has no value over none.
    dense = torch.nn.functional.pad(dense, (0, 0, 0, 1))
    row = torch.arange(length + 1)[:, None]
    end = torch.where(dense, row + 1, 0).amax(1)
    begin = torch.where(dense, row, length).amin(1)
    return (end[..., None] if causal else torch.stack([end, begin], -1)).to(torch.int32)[:, None]


def assert_columns(indices: torch.Tensor, causal: bool) -> Mask:
    mask = Document.from_startend_row_indices(indices, causal=causal)
    length = indices.shape[2]
    dense = mask.to_dense(length, length)
    expected = columns_to_dense(indices, causal)
    dense = dense if dense.dim() == 4 else dense[None, None]
    assert torch.equal(dense.expand_as(expected), expected), repr(mask)
    return mask


@given(st.data(), st.booleans())
def test_from_columns_of_documents_and_windows(data: st.DataObject, causal: bool) -> None:
    """Documents, padding after them, and a window across: each alone and both at once, for one batch or two."""
    lengths = st.lists(st.integers(1, 6), min_size=1, max_size=4)
    rows = [offsets_of(data.draw(lengths)) for _ in range(data.draw(st.integers(1, 2)))]
    most, length = max(map(len, rows)), max(row[-1] for row in rows) + data.draw(st.integers(0, 2))
    mask = Document(int32([row + row[-1:] * (most - len(row)) for row in rows]), causal=causal)
    if data.draw(st.booleans()):
        mask = mask & SlidingWindow(data.draw(BOUNDS), data.draw(BOUNDS))
    found = assert_columns(to_columns(mask.to_dense(length, length)[:, 0], causal), causal)
    assert isinstance(found, (Document, SlidingWindow, Causal, Dense, Intersection))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [0, 1, 2, 9])
@pytest.mark.parametrize("left", [0, 1, 3, math.inf])
def test_from_columns_of_windows(left: float, length: int, causal: bool) -> None:
    for right in [0] if causal else [0, 1, 2, math.inf]:
        for keep in (0, 1, 3) if causal else (0,):
            mask = SlidingWindow(left, right, keep_first=keep)
            assert_columns(to_columns(mask.to_dense(length, length)[None], causal), causal)
    for prefix in (0, 1, 4, 9, 20):
        if not causal:
            assert_columns(to_columns(PrefixLM(prefix).to_dense(length, length)[None], False), False)


def test_from_columns_by_kind() -> None:
    def find(values: list, causal: bool) -> Mask:
        return assert_columns(int32(values)[None, None], causal)

    assert find([[6]] * 6, True) == Causal()
    assert find([[2], [2], [5], [5], [5], [6]], True) == Document([0, 2, 5, 6], causal=True)
    assert find([[2, 0], [2, 0], [5, 2], [5, 2], [5, 2]], False) == Document([0, 2, 5])
    assert find([[3], [4], [5], [5], [5]], True) == SlidingWindow(2, 0)
    both = find([[3], [4], [4], [4], [7], [8], [8], [8]], True)
    assert both == Document([0, 4, 8]) & SlidingWindow(2, 0)
    assert find([[5, 5]] * 5, True) == Causal(), "nothing hidden below"
    assert find([[5, 5, 0, 0]] * 5, False) == Dense()
    assert find([[2, 5, 0, 0], [2, 5, 0, 0], [5, 9, 0, 2], [7, 7, 0, 2], [5, 5, 0, 2]], False) == Document([0, 2, 5])
    assert find([[6], [4], [5], [6], [6], [6]], True) == SlidingWindow(2, 0, keep_first=1)
    two = int32([[[2], [2], [4], [4]], [[4], [4], [4], [4]]])[:, None]
    assert assert_columns(two, True) == Document(int32([[0, 2, 4], [0, 4, 4]]), causal=True)
    prefixes = torch.stack([PrefixLM(n).to_dense(6, 6) for n in (2, 4)])
    assert assert_columns(to_columns(prefixes, False), False) == PrefixLM(int32([2, 4]))


@pytest.mark.parametrize(
    ("values", "causal", "why"),
    [
        ([[6, 6], [3, 4], [6, 6], [6, 6], [6, 6], [6, 6]], True, "before and after"),
        ([[6], [6], [6], [4], [6], [6]], True, "no document, window or prefix"),
        ([[6], [0], [6], [6], [6], [6]], True, "keys that no row sees stand before"),
        ([[6, 3], [6, 0], [6, 0], [6, 0], [6, 0], [6, 0]], False, "no document, window or prefix"),
    ],
)
def test_columns_that_are_no_interval(values: list, causal: bool, why: str) -> None:
    with pytest.raises(NotImplementedError, match=why):
        Document.from_startend_row_indices(int32(values)[None, None], causal=causal)


def test_bad_columns() -> None:
    good = int32([[6]] * 6)[None, None]
    with pytest.raises(TypeError, match=r"startend_row_indices: dtype torch\.int64"):
        Document.from_startend_row_indices(good.long(), causal=True)
    with pytest.raises(ValueError, match=r"startend_row_indices: shape \(1, 1, 6, 1\) with causal=False"):
        Document.from_startend_row_indices(good)
    with pytest.raises(NotImplementedError, match="its heads differ"):
        Document.from_startend_row_indices(torch.cat([good, good - 2], 1), causal=True)


# ---------------------------------------------------------------------------------------------------------------------
# FlexAttention's block masks, snapshots and updates


def flex_mask(mask_mod: Callable, batch: int, heads: int, length_q: int, length_kv: int, block: int = 128):
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(mask_mod, batch, heads, length_q, length_kv, device="cpu", BLOCK_SIZE=block)


@pytest.mark.parametrize("block", [64, 128, 256])
@pytest.mark.parametrize(("len_q", "len_kv"), [(300, 300), (130, 513)])
def test_from_flex(block: int, len_q: int, len_kv: int) -> None:
    def mod(b, h, i, j):
        return (j <= i + len_kv - len_q) & (j >= i + len_kv - len_q - 150 - 20 * h)

    block_mask = flex_mask(mod, 1, 2, len_q, len_kv, block)
    i, j = torch.arange(len_q)[:, None], torch.arange(len_kv)
    dense = torch.stack([mod(0, h, i, j) for h in range(2)])[None]
    mask = BlockSparse.from_flex(block_mask, partial=dense)
    assert torch.equal(mask.to_dense(len_q, len_kv), dense)
    with pytest.raises(ValueError, match=r"partial: None, but the block mask has \d+ partial blocks"):
        BlockSparse.from_flex(block_mask)
    both = BlockSparse.from_flex(
        flex_mask(lambda b, h, i, j: j <= i + len_kv - len_q, 2, 1, len_q, len_kv, block), Causal()
    )
    assert isinstance(both, Intersection) and torch.equal(
        both.to_dense(len_q, len_kv), Causal().to_dense(len_q, len_kv).expand(2, 1, -1, -1)
    )


def test_from_flex_takes_full_blocks_as_they_are() -> None:
    """Dense bits speak of partial blocks alone; the indices after the count mean nothing."""

    class Lists:
        BLOCK_SIZE = (64, 64)
        kv_num_blocks, kv_indices = int32([[[1, 0]]]), int32([[[[1, 0, 2], [2, 2, 2]]]])
        full_kv_num_blocks, full_kv_indices = int32([[[1, 2]]]), int32([[[[0, 1, 1], [2, 0, 1]]]])

    bits = torch.rand(100, 190) < 0.5
    expected = torch.zeros(100, 190, dtype=torch.bool)
    expected[:64, :64] = expected[64:, 128:] = expected[64:, :64] = True
    expected[:64, 64:128] = bits[:64, 64:128]
    assert torch.equal(BlockSparse.from_flex(Lists, bits).to_dense(100, 190)[0, 0], expected)
    Lists.kv_num_blocks = int32([[[0, 0]]])
    expected[:64, 64:128] = False
    whole = BlockSparse.from_flex(Lists)
    assert torch.equal(whole.to_dense(100, 190)[0, 0], expected) and whole.block_size == (64, 64)


def test_snapshots_and_updates_of_blocks() -> None:
    blocks = torch.rand(1, 2, 3, 3) < 0.5
    mask = BlockSparse(blocks, capacity=18)
    both = mask & Causal()
    before = mask.to_dense(300, 300)
    tensors = [x.data_ptr() for x in mask._lower()[2]]
    new = ~blocks
    blocks.copy_(new)
    assert torch.equal(mask.to_dense(300, 300), before), "the caller's tensor was read when the mask was made"
    mask.update(new)
    wide = new.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :300, :300]
    assert torch.equal(mask.to_dense(300, 300), wide) and [x.data_ptr() for x in mask._lower()[2]] == tensors
    assert torch.equal(both.to_dense(300, 300), wide & Causal().to_dense(300, 300)), "an & shares the list"
    mask.update(torch.zeros_like(new))
    assert not mask.to_dense(300, 300).any()
    mask.update(torch.ones_like(new))
    assert mask.to_dense(300, 300).all()


def test_updates_that_do_not_fit() -> None:
    one, two = (torch.tensor([[[[True, more]]]]) for more in (False, True))
    for capacity in (None, 1):
        mask = BlockSparse(one, capacity=capacity)
        mask.update(torch.tensor([[[[False, True]]]]))
        assert mask.to_dense(1, 130).tolist() == [[[[False] * 128 + [True] * 2]]]
        with pytest.raises(ValueError, match="2 cells of 128 x 128 are set"):
            mask.update(two)
    with pytest.raises(ValueError, match="capacity of 1"):
        BlockSparse(two, capacity=1)
    with pytest.raises(ValueError, match=r"blocks: shape \(1, 1, 1, 3\) on cpu; must be \(1, 1, 1, 2\) on cpu"):
        mask.update(torch.ones(1, 1, 1, 3, dtype=torch.bool))
    with pytest.raises(NotImplementedError, match="dense bits"):
        BlockSparse.from_dense(torch.eye(3).bool()).update(torch.ones(1, 1, 1, 1, dtype=torch.bool))


def test_snapshots_and_updates_of_buckets() -> None:
    buckets = int32([[[0, 1, 0, 2]]])
    mask = HashBucket(buckets, causal=True)
    tensors = [x.data_ptr() for x in mask._lower()[2]]
    old = mask.to_dense(4, 4)
    buckets.copy_(int32([[[3, 3, 3, 0]]]))
    assert torch.equal(mask.to_dense(4, 4), old) and torch.equal(mask._visible(4, 4).rows(slice(0, 4)), old)
    mask.update(buckets)
    assert [x.data_ptr() for x in mask._lower()[2]] == tensors
    check_all_views(mask, 4, 4)
    assert mask.to_dense(4, 4).sum() == 7
    with pytest.raises(ValueError, match=r"q_bucket: shape \(1, 1, 3\) on cpu; must be \(1, 1, 4\)"):
        mask.update(buckets[..., :3])
    with pytest.raises(ValueError, match="made with q_bucket alone"):
        mask.update(buckets, buckets)


# ---------------------------------------------------------------------------------------------------------------------
# Sizes against q and k, and values in checked mode


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (lambda: PrefixLM(int32([1, 2, 3])), "prefix for a batch of 3 does not match q's batch 2"),
        (lambda: Document(int32([[0, 1]] * 3)), "offsets for a batch of 3"),
        (lambda: Causal() & PrefixLM(int32([1])), "prefix for a batch of 1"),
        (lambda: HashBucket(int32([[[1] * 99]])), "q_bucket for a length of 99 does not match q's 100"),
        (
            lambda: HashBucket(int32([[[1] * 100]])),
            "kv_bucket for a length of 100 does not match k's 200; without kv_b",
        ),
        (lambda: buckets((3, 1), (1, 1)), "q_bucket for a batch of 3"),
        (lambda: buckets((1, 3), (1, 1)), "q_bucket for 3 heads; must be 1 or 4"),
        (lambda: buckets((1, 1), (1, 3)), "kv_bucket for 3 heads; must be 1 or 2 or 4"),
        (lambda: blocks(1, 1, 2, 2), "2 blocks of 128 do not match q's length 100; must be 1"),
        (lambda: blocks(1, 1, 1, 3), "3 blocks of 128 do not match k's length 200; must be 2"),
        (lambda: blocks(3, 1, 1, 2), "blocks of batch 3 do not match q's batch 2"),
        (lambda: blocks(1, 2, 1, 2) & Causal(), "blocks of heads 2 do not match q's heads 4"),
        (lambda: BlockSparse.from_dense(torch.ones(100, 199).bool()), r"dense bits for \(100, 199\)"),
    ],
)
def test_sizes_that_do_not_fit(mask: Callable[[], Mask], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mask()._check_shapes(2, 4, 2, 100, 200)


def buckets(q: tuple[int, int], kv: tuple[int, int]) -> HashBucket:
    return HashBucket(torch.zeros(*q, 100, dtype=torch.int32), torch.zeros(*kv, 200, dtype=torch.int32))


def blocks(*shape: int) -> BlockSparse:
    return BlockSparse(torch.ones(shape, dtype=torch.bool))


def test_sizes_that_fit() -> None:
    for mask in (
        PrefixLM(int32([1, 2])),
        buckets((2, 4), (1, 2)),
        buckets((1, 4), (2, 4)),
        buckets((1, 1), (2, 2)),
        blocks(2, 4, 1, 2) & Causal(),
        BlockSparse.from_dense(torch.ones(2, 1, 100, 200).bool()),
    ):
        mask._check_shapes(2, 4, 2, 100, 200)


def test_checked_values() -> None:
    prefix = int32([3, 4])
    mask = PrefixLM(prefix) & Causal()
    prefix[1] = -4
    with pytest.raises(ValueError, match=r"prefix\[1\]: -4 is negative"):
        mask._check_values(8, 8)
    assert mask.to_dense(3, 3).shape == (2, 1, 3, 3)
    assert torch.equal(mask._visible(3, 3).rows(slice(0, 3))[1, 0], Causal().to_dense(3, 3)), "counts as 0"


# ---------------------------------------------------------------------------------------------------------------------
# Errors of making one


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Causal(align="middle"), ValueError, r"align: 'middle'.*'bottom-right', 'top-left'"),
        (lambda: Document([1, 3]), ValueError, r"offsets\[0\]: 1; the first offset must be 0"),
        (lambda: Document([0, 5, 3, 4]), ValueError, r"offsets\[2\]: 3 is below the 5 before it"),
        (lambda: Document([0, -1]), ValueError, r"offsets\[1\]: -1 is below the 0 before it"),
        (lambda: Document([0, 2], [0, -2]), ValueError, r"kv_offsets\[1\]: -2 is below"),
        (lambda: Document(int32([[0, 2], [0, -3]])), ValueError, r"offsets\[1, 1\]: -3 is below"),
        (lambda: Document(int32([[0, 2], [4, 5]])), ValueError, r"offsets\[1, 0\]: 4; the first"),
        (lambda: Document(torch.tensor([0, 3])), TypeError, r"offsets: dtype torch.int64; must be torch.int32"),
        (lambda: Document(torch.tensor([0.0, 3.0])), TypeError, r"offsets: dtype torch.float32"),
        (lambda: Document([0, 2.5]), TypeError, r"offsets\[1\]: 2.5 is a float; must be an int"),
        (lambda: Document([0, True]), TypeError, r"offsets\[1\]: True is a bool"),
        (lambda: Document([0, 2**31]), ValueError, r"offsets\[1\]: 2147483648 does not fit into int32"),
        (lambda: Document([]), ValueError, r"offsets: shape \(0,\)"),
        (lambda: Document(int32([[[0]]])), ValueError, r"offsets: shape \(1, 1, 1\)"),
        (lambda: Document(3), TypeError, r"offsets: int; must be an int32 tensor"),
        (lambda: Document("012"), TypeError, r"offsets: str"),
        (lambda: Document([0, 3], [0, 3, 4]), ValueError, r"kv_offsets: shape \(3,\) does not match offsets' \(2,\)"),
        (lambda: Document(int32([0, 3]), int32([0, 3]).to("meta")), ValueError, r"kv_offsets: on meta, offsets on cpu"),
        (lambda: DilatedWindow(3, dilation=0), ValueError, r"dilation: 0 is too small; must be an int >= 1"),
        (lambda: DilatedWindow(3, dilation=-2), ValueError, r"dilation: -2 is negative; must be an int >= 1"),
        (lambda: DilatedWindow(3, dilation=1.5), TypeError, r"dilation: 1.5 is a float"),
        (lambda: DilatedWindow(-1, dilation=2), ValueError, r"left: -1 is negative"),
        (lambda: DilatedWindow(3, dilation=2, align="top"), ValueError, r"align: 'top'"),
        (
            lambda: HashBucket([1, 2]),
            TypeError,
            r"q_bucket: list; must be a tensor of torch.int32, \(B or 1, H or 1, S\)",
        ),
        (lambda: HashBucket(torch.zeros(1, 1, 4)), TypeError, r"q_bucket: dtype torch.float32; must be torch.int32"),
        (lambda: HashBucket(int32([1, 2])), ValueError, r"q_bucket: shape \(2,\)"),
        (lambda: HashBucket(int32([[[1]]]), int32([[1]])), ValueError, r"kv_bucket: shape \(1, 1\)"),
        (lambda: HashBucket(int32([[[1]]]), int32([[[1]]]).to("meta")), ValueError, r"kv_bucket: on meta, q_bucket on"),
        (lambda: HashBucket(int32([[[1]]] * 2), int32([[[1]]] * 3)), ValueError, r"kv_bucket: a batch of 3"),
        (lambda: HashBucket(int32([[[1]] * 3]), int32([[[1]] * 2])), ValueError, r"kv_bucket: 2 heads do not divide"),
        (lambda: BlockSparse(torch.ones(2, 2).bool()), ValueError, r"blocks: shape \(2, 2\)"),
        (lambda: BlockSparse(torch.ones(1, 1, 2, 2)), TypeError, r"blocks: dtype torch.float32; must be torch.bool"),
        (lambda: BlockSparse(ONE_BLOCK, (128, 100)), ValueError, r"block_size: 100 is no multiple of 64; .*: 128"),
        (lambda: BlockSparse(ONE_BLOCK, (0, 64)), ValueError, r"block_size: 0 is no multiple of 64; .*: 64"),
        (lambda: BlockSparse(ONE_BLOCK, (64, 64.0)), TypeError, r"block_size: \(64, 64.0\); must be two ints"),
        (lambda: BlockSparse(ONE_BLOCK, 2**31), ValueError, r"block_size: 2147483648; .* 64 to 2147418048"),
        (lambda: BlockSparse(ONE_BLOCK, 2**70), ValueError, r"block_size: 1180591620717411303424; must be"),
        (lambda: BlockSparse(ONE_BLOCK, 2**70 + 1), ValueError, r"is no multiple of 64; .*: 2147418048"),
        (lambda: BlockSparse(ONE_BLOCK, "64"), TypeError, r"block_size: '64'"),
        (lambda: BlockSparse(ONE_BLOCK, capacity=0), ValueError, r"capacity: 0; must be an int >= 1"),
        (lambda: BlockSparse(ONE_BLOCK, capacity=True), TypeError, r"capacity: True"),
        (
            lambda: BlockSparse.from_dense(torch.zeros(4, 4)),
            NotImplementedError,
            r"attn_mask: dtype torch.float32, a bias",
        ),
        (lambda: BlockSparse.from_dense(torch.zeros(4, 4).int()), TypeError, r"attn_mask: dtype torch.int32"),
        (lambda: BlockSparse.from_dense(torch.zeros(4).bool()), ValueError, r"attn_mask: shape \(4,\)"),
        (lambda: PerSequence(Document([0, 3]), int32([0, 3]), int32([0, 3])), NotImplementedError, "inside each seq"),
        (lambda: PerSequence(BlockSparse(ONE_BLOCK), int32([0, 3]), int32([0, 3])), NotImplementedError, "inside each"),
        (lambda: PerSequence(BlockSparse(ONE_BLOCK) & Causal(), int32([0]), int32([0])), NotImplementedError, "inside"),
    ],
)
def test_errors(make, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


ONE_BLOCK = torch.ones(1, 1, 1, 1, dtype=torch.bool)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Causal() & HashBucket(int32([[[1]]])), NotImplementedError, "& with HashBucket is not supported"),
        (lambda: HashBucket(int32([[[1]]])) & HashBucket(int32([[[1]]])), NotImplementedError, "& with HashBucket"),
        (lambda: DilatedWindow(3, dilation=2) & Causal(), NotImplementedError, "& with DilatedWindow is not supported"),
        (lambda: BlockSparse(ONE_BLOCK) & DilatedWindow(3, dilation=2), NotImplementedError, "& with DilatedWindow"),
        (
            lambda: DilatedWindow(3, dilation=2) & DilatedWindow(3, dilation=3),
            NotImplementedError,
            "of one dilation and alignment are",
        ),
        (lambda: BlockSparse(ONE_BLOCK) & BlockSparse(ONE_BLOCK), NotImplementedError, "& of two BlockSparse"),
        (lambda: Document([0, 3]) & Document([0, 3]), NotImplementedError, "& of two Document masks with different"),
        (lambda: PrefixLM(int32([1])) & PrefixLM(2), NotImplementedError, r"PrefixLM\(torch.minimum"),
        (lambda: PrefixLM(2) & Causal() & PrefixLM(int32([1])), NotImplementedError, r"PrefixLM\(torch.minimum"),
        (lambda: PrefixLM(int32([1])) & PrefixLM(int32([1])), NotImplementedError, r"PrefixLM\(torch.minimum"),
        (
            lambda: SlidingWindow(3, keep_first=2) & SlidingWindow(4, keep_first=1),
            NotImplementedError,
            "keep_first 2 and 1 and different left bounds",
        ),
        (
            lambda: Document([0, 3]) & PrefixLM(int32([1]).to("meta")),
            ValueError,
            "& of masks on cpu and meta; use mask.to",
        ),
        (lambda: Causal() & 3, TypeError, "unsupported operand"),
        (lambda: Intersection(()), ValueError, "no masks"),
    ],
)
def test_bad_intersections(make, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_intersections_that_are_one_mask() -> None:
    window = DilatedWindow(3, 1, dilation=2)
    assert window & Dense() == window == Dense() & window
    assert window & DilatedWindow(2, 5, dilation=2) == DilatedWindow(2, 1, dilation=2)
    buckets = HashBucket(int32([[[1]]]))
    assert (buckets & Dense()) is buckets and (Dense() & buckets) is buckets
    document = Document([0, 3])
    assert (document & document)._lower()[2] == document._lower()[2]
    for keeps in ((2, 1), (1, 2), (2, 2)):
        a, b = (SlidingWindow(3, keep_first=keep) for keep in keeps)
        check_all_views(a & b, 9, 9)
    check_all_views(SlidingWindow(5, 2, keep_first=3) & SlidingWindow(1, 4, keep_first=3), 9, 12)


def int32(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_values_off_the_cpu_are_not_read() -> None:
    Document(torch.empty(3, dtype=torch.int32, device="meta"))


@pytest.mark.gpu
def test_values_on_the_gpu_are_not_read_but_can_be_drawn() -> None:
    bad = Document(torch.tensor([5, 3, 9], dtype=torch.int32, device="cuda"))
    good = Document([0, 3, 9], causal=True)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert repr(Document(bad.offsets)) == "Document(<int32 (3,) on cuda:0>)"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    moved = good.to("cuda")
    assert moved.draw(9, 9) == good.draw(9, 9) and moved.sparsity(9, 9) == good.sparsity(9, 9)
    assert moved.to_dense(9, 9).is_cuda and torch.equal(moved.to_dense(9, 9, "cpu"), good.to_dense(9, 9))
    ids = torch.tensor([[0, 0, 1], [2, 2, -1]], device="cuda")
    assert Document.from_ids(ids).offsets.is_cuda and Document.from_ids(ids).to("cpu") == Document.from_ids(ids.cpu())


@pytest.mark.parametrize(
    "mask",
    [
        PrefixLM(int32([])),
        PrefixLM(int32([])) & SlidingWindow(3),
        Document(torch.zeros(0, 3, dtype=torch.int32)),
        Document(torch.zeros(0, 3, dtype=torch.int32)) & Causal(),
    ],
    ids=repr,
)
def test_masks_of_a_batch_of_0(mask: Mask, checked_mode: None) -> None:
    assert str(mask).startswith(repr(mask)) and "nothing to draw" in mask.draw(4, 4)
    q = torch.zeros(0, 2, 5, 8)
    assert flashmsa.attention(q, q, q, mask).shape == (0, 2, 5, 8)


def test_drawings_of_blocks_with_another_mask() -> None:
    """Of the blocks' lengths, whatever the other mask asks for."""
    blocks = BlockSparse(torch.ones(1, 1, 0, 3, dtype=torch.bool))
    assert "0 queries (down) x 384 keys" in str(blocks & PrefixLM(int32([300]))).splitlines()[0]
    bits = BlockSparse.from_dense(torch.ones(5, 7, dtype=torch.bool))
    assert "5 queries (down) x 7 keys" in str(PrefixLM(int32([9])) & bits).splitlines()[0]


def test_no_drawing_where_it_would_fill_the_memory() -> None:
    mask = Document([0, 2**31 - 1])
    assert str(mask) == repr(mask) and str(mask & Causal()) == repr(mask & Causal())


def test_the_default_device_is_that_of_lists_alone() -> None:
    """What is made of CPU tensors stays on the CPU, whatever torch.device is in effect."""
    ids = torch.tensor([[0, 0, 1], [2, 2, -1]])
    mixed = torch.tensor([[0, 1, 0]])
    columns = int32([2, 2, 5, 5, 5]).view(1, 1, 5, 1)
    q = torch.randn(2, 2, 3, 8)
    cuts, used = int32([0, 2, 3]), int32([2, 0])
    made: dict[str, Callable[[], object]] = {
        "ids": lambda: Document.from_ids(ids),
        "ids as buckets": lambda: Document.from_ids(mixed),
        "columns": lambda: Document.from_startend_row_indices(columns, causal=True),
        "pairs": lambda: BlockSparse.from_dense(torch.ones_like(ids, dtype=torch.bool)),
        "sequences": lambda: PerSequence(Causal(), cuts, cuts, used),
    }
    for name, make in made.items():
        expected = make()
        with torch.device("meta"):
            mask = make()
            assert mask.device == torch.device("cpu"), name
            dense = mask.to_dense(*mask._natural_size())
            assert mask == expected and str(mask) == str(expected)
        assert torch.equal(dense, expected.to_dense(*mask._natural_size()))
    with torch.device("meta"):
        assert Document([0, 2, 3]).device == torch.device("meta")
        with pytest.raises(ValueError, match=r"offsets\[2\]: 1 is below the 2 before it"):
            Document([0, 2, 1])
        for mask in (Causal(), Document.from_ids(ids)):
            for backend in ("cpu", "torch"):
                assert flashmsa.attention(q, q, q, mask, backend=backend).device == q.device


def test_a_moved_mask_still_knows_how_many_cells_are_set() -> None:
    mask = BlockSparse(torch.zeros(1, 1, 2, 2, dtype=torch.bool), capacity=1).to("meta")
    assert mask._used is not None


def test_numpys_integers_are_ints() -> None:
    numpy = pytest.importorskip("numpy")
    cuts = numpy.cumsum([0, 2, 3])
    assert Document(list(cuts)) == Document([0, 2, 5])
    assert SlidingWindow(numpy.int64(3), numpy.int32(0), keep_first=numpy.uint8(2)) == SlidingWindow(3, 0, keep_first=2)
    assert PrefixLM(cuts[1]) == PrefixLM(2) and DilatedWindow(cuts[1], dilation=cuts[2]) == DilatedWindow(2, dilation=5)
    assert type(PrefixLM(cuts[1]).prefix) is int
    for wrong in (numpy.bool_(True), numpy.float64(2.0), torch.tensor(2)):
        with pytest.raises(TypeError, match="must be an int"):
            SlidingWindow(wrong)
        with pytest.raises(TypeError, match="must be an int"):
            Document([0, wrong])
