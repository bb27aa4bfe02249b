"""Orders of buckets, runs of keys and lists of cells: from their definitions, and compiled against composed."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashmsa import _prepare

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def int32(*shape: int, low: int = -3, high: int = 4) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=torch.int32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(1, 1, 0), (1, 1, 1), (2, 3, 257), (1, 2, 5000)], ids=str)
def test_bucket_sort(shape: tuple[int, ...], device: str) -> None:
    for high in (4, 2**31 - 1):
        bucket = int32(*shape, low=-(2**31), high=high) if high > 4 else int32(*shape)
        order = _prepare.bucket_sort(bucket.to(device))
        assert order.dtype == torch.int32 and order.device.type == device
        for b, h in itertools.product(*map(range, shape[:2])):
            row = bucket[b, h].tolist()
            assert order[b, h].tolist() == sorted(range(shape[2]), key=row.__getitem__), "sorted, and stable"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(1, 1), (9, 9), (40, 70), (70, 40), (5, 0), (0, 5)], ids=str)
@pytest.mark.parametrize("leading", [((1, 1), (1, 1)), ((2, 4), (1, 2)), ((1, 4), (2, 1)), ((2, 1), (1, 2))], ids=str)
def test_bucket_rows(leading, lengths: tuple[int, int], causal: bool, device: str) -> None:
    len_q, len_kv = lengths
    q, kv = (int32(*shape, n) for shape, n in zip(leading, lengths, strict=True))
    q_order, kv_order = (_prepare.composed_bucket_sort(x) for x in (q, kv))
    arguments = (x.to(device) for x in (q, q_order, kv, kv_order))
    begin, end = (x.cpu() for x in _prepare.bucket_rows(*arguments, causal, len_q, len_kv))
    batch, heads = (max(x) for x in zip(*leading, strict=True))
    assert begin.shape == end.shape == (batch, heads, len_q) and begin.dtype == end.dtype == torch.int32
    assert (begin <= end).all() and (begin.diff() >= 0).all() and (end.diff() >= 0).all()
    for b, h, r in itertools.product(range(batch), range(heads), range(len_q)):

        def of(x: torch.Tensor, b: int = b, h: int = h) -> list[int]:
            return x[min(b, x.shape[0] - 1), h * x.shape[1] // heads].tolist()

        i = of(q_order)[r]
        seen = {j for j in range(len_kv) if of(kv)[j] == of(q)[i] and (not causal or j <= i + len_kv - len_q)}
        assert set(of(kv_order)[begin[b, h, r] : end[b, h, r]]) == seen


def cells_by_definition(seen: torch.Tensor, blocks_seen: torch.Tensor, with_bits: bool) -> list[list[list[tuple]]]:
    """For each batch-and-head and row of cells: [(column, detail or rows of bits)], whole cells first."""
    found = []
    for one in seen.flatten(0, 1):
        rows = []
        for r in range(0, one.shape[0], 128):
            whole, mixed = [], []
            for c in range(0, one.shape[1], 128):
                cell = one[r : r + 128, c : c + 128]
                if cell.all():
                    whole.append((c // 128, -1))
                elif cell.any() and with_bits:
                    mixed.append((c // 128, cell.tolist()))
                elif cell.any():
                    halves = [cell[64 * a : 64 * a + 64, 64 * b : 64 * b + 64] for a in range(2) for b in range(2)]
                    mixed.append(
                        (c // 128, sum(1 << n for n, half in enumerate(halves) if half.numel() and half.all()))
                    )
            rows.append(whole + mixed)
        found.append(rows)
    return found


def cells_of_list(listed: tuple[torch.Tensor, ...], len_q: int, len_kv: int) -> list[list[list[tuple]]]:
    row_start, whole_count, cells, detail, bits = (x.cpu() for x in listed)
    assert {x.dtype for x in listed} == {torch.int32}
    found = []
    for starts, wholes in zip(row_start.flatten(0, 1).tolist(), whole_count.flatten(0, 1).tolist(), strict=True):
        rows = []
        for r, (first, last) in enumerate(itertools.pairwise(starts)):
            row = []
            for n in range(first, last):
                assert (int(detail[n]) == -1) == (n - first < wholes[r]), "whole cells come first"
                column, said = int(cells[n]), int(detail[n])
                if said >= 0 and bits.shape[0]:
                    words = bits[said][: len_q - 128 * r, :, None] >> torch.arange(32, dtype=torch.int32) & 1
                    said = words.bool().flatten(1)[:, : len_kv - 128 * column].tolist()
                row.append((column, said))
            rows.append(row)
        found.append(rows)
    ends = row_start[..., -1].flatten()[:-1]
    assert torch.equal(row_start[..., 0].flatten()[1:], ends), "a row ends where the next begins"
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [(64, 64), (128, 128), (64, 192), (256, 64)], ids=str)
@pytest.mark.parametrize("lengths", [(1, 1), (130, 500), (257, 129), (70, 0), (0, 70)], ids=str)
@pytest.mark.parametrize("with_bits", [False, True])
def test_block_list(lengths: tuple[int, int], size: tuple[int, int], with_bits: bool, device: str) -> None:
    for leading, share in (((1, 1), 0.5), ((2, 3), 0.5), ((1, 2), 0.0), ((1, 2), 1.0)):
        counts = [-(-n // block) for n, block in zip(lengths, size, strict=True)]
        blocks = torch.rand(*leading, *counts) < share
        i, j = (torch.arange(n) // block for n, block in zip(lengths, size, strict=True))
        seen = blocks[:, :, i][..., j]
        bits = None
        if with_bits:
            bits = torch.rand(*leading, *lengths) < 0.5
            bits[..., :128, :128] |= torch.rand(*leading, 1, 1) < 0.5
            seen = seen & bits
        expected = cells_by_definition(seen, blocks, with_bits)
        entries = sum(len(row) for one in expected for row in one)
        given_bits = None if bits is None else bits.to(device)
        listed = _prepare.block_list(blocks.to(device), *size, *lengths, given_bits)
        assert cells_of_list(listed, *lengths) == expected
        assert listed[2].shape == listed[3].shape == (max(1, entries),)
        roomy = _prepare.block_list(blocks.to(device), *size, *lengths, given_bits, entries + 7, entries)
        assert cells_of_list(roomy, *lengths) == expected and roomy[2].shape == (entries + 7,)


@given(st.integers(1, 12))
def test_a_list_that_is_too_long_is_cut_off(capacity: int) -> None:
    blocks = torch.ones(1, 2, 3, 3, dtype=torch.bool)
    blocks[0, 0, 1, 1] = False
    listed = _prepare.block_list(blocks, 64, 64, 192, 192, None, capacity, 0)
    row_start, whole_count, cells, detail, _ = listed
    assert cells.shape == detail.shape == (capacity,) and int(row_start.max()) == min(capacity, 8)
    assert (row_start.diff() >= 0).all() and (whole_count <= row_start.diff()).all() and (whole_count >= 0).all()
