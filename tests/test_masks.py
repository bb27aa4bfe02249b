"""Masks against their definitions, pair by pair; drawings, equality, conversions, and the errors of making one."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashmsa import Causal, Dense, Document, Mask

LENGTHS = [(1, 1), (5, 2), (2, 5), (8, 8), (0, 4), (4, 0), (0, 0), (31, 40), (40, 31)]


def by_definition(mask: Mask, batch: int, i: int, j: int, len_q: int, len_kv: int) -> bool:
    """May query i of this batch see key j? Plain integers, one pair at a time."""
    if isinstance(mask, Dense):
        return True
    if isinstance(mask, Causal):
        return j <= (i if mask.align == "top-left" else i + len_kv - len_q)
    assert isinstance(mask, Document)
    kv_offsets = mask.offsets if mask.kv_offsets is None else mask.kv_offsets
    q_cuts, kv_cuts = (x[batch].tolist() if x.dim() == 2 else x.tolist() for x in (mask.offsets, kv_offsets))
    for d in range(len(q_cuts) - 1):
        if q_cuts[d] <= i < q_cuts[d + 1] and kv_cuts[d] <= j < kv_cuts[d + 1]:
            # Aligned at the end: the last query of a document sees its last key, the one before the last but one, ...
            return not mask.causal or kv_cuts[d + 1] - j >= q_cuts[d + 1] - i
    return False


def batches(mask: Mask) -> int | None:
    return mask.offsets.shape[0] if isinstance(mask, Document) and mask.offsets.dim() == 2 else None


def brute_force(mask: Mask, len_q: int, len_kv: int) -> torch.Tensor:
    def one(batch: int) -> torch.Tensor:
        pairs = [[by_definition(mask, batch, i, j, len_q, len_kv) for j in range(len_kv)] for i in range(len_q)]
        return torch.tensor(pairs, dtype=torch.bool).reshape(len_q, len_kv)

    count = batches(mask)
    return one(0) if count is None else torch.stack([one(b) for b in range(count)])[:, None]


def check_all_views(mask: Mask, len_q: int, len_kv: int) -> None:
    """to_dense, the row intervals and sparsity say what the definition says."""
    expected = brute_force(mask, len_q, len_kv)
    dense = mask.to_dense(len_q, len_kv)
    assert dense.dtype == torch.bool and torch.equal(dense, expected)
    begin, end = mask._rows(len_q, len_kv, torch.device("cpu"))
    key = torch.arange(len_kv)
    inside = (key >= begin[..., None]) & (key < end[..., None])
    assert torch.equal(inside if batches(mask) is None else inside[:, None], expected)
    allowed = expected.double().mean().item() if expected.numel() else 1.0
    assert mask.sparsity(len_q, len_kv) == pytest.approx(1.0 - allowed, abs=1e-12)


@pytest.mark.parametrize("mask", [Dense(), Causal(), Causal(align="top-left")], ids=repr)
@pytest.mark.parametrize(("len_q", "len_kv"), LENGTHS)
def test_dense_and_causal(mask: Mask, len_q: int, len_kv: int) -> None:
    check_all_views(mask, len_q, len_kv)


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
    for mask in (Dense(), Causal(), Causal(align="top-left"), Document([0, 3], [0, 4], causal=True)):
        assert eval(repr(mask)) == mask


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


@pytest.mark.parametrize("mask", [Dense(), Causal(align="top-left"), Document([0, 3, 5], causal=True)], ids=repr)
def test_masks_do_not_change(mask: Mask) -> None:
    for name in ("align", "offsets", "causal", "_lowered", "other"):
        with pytest.raises(AttributeError):
            setattr(mask, name, 1)


@pytest.mark.parametrize("mask", [Dense(), Causal(align="top-left"), Document([0, 3, 5], [0, 1, 9], True)], ids=repr)
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


def test_lowering_is_made_once() -> None:
    for mask in (Dense(), Causal(), Document([0, 3])):
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


def test_from_ids_that_cannot_be_documents() -> None:
    with pytest.raises(NotImplementedError, match=r"ids: 0 at index 2 of row 0 comes back .*first at 0"):
        Document.from_ids(torch.tensor([0, 1, 0]))
    with pytest.raises(ValueError, match=r"ids: -1 \(padding\) at index 1 of row 1"):
        Document.from_ids(torch.tensor([[0, 0, 1], [0, -1, 1]]))
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
    ],
)
def test_errors(make, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


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
