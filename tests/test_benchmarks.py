"""What the benchmarks do without a GPU: case lists, FLOP counts, turn-taking, derived figures, files and pictures."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import (
    cache_candidates,
    candidates,
    cases,
    device,
    gradient_candidates,
    limits,
    ncu,
    plot,
    report,
    run,
    timing,
)
from benchmarks.cache_cases import CacheCase, log_uniform_lengths
from benchmarks.cases import Case, Draw, Lane, Unit


@pytest.fixture(autouse=True)
def _candidates() -> Iterator[None]:
    """Each test finds the candidates and settings that the module starts with, on the CPU."""
    factories, settings = dict(candidates.FACTORIES), replace(candidates.settings)
    candidates.settings.device = "cpu"
    candidates.release()
    cache_candidates.release()
    yield
    candidates.FACTORIES.clear()
    candidates.FACTORIES.update(factories)
    candidates.settings.device, candidates.settings.layout = settings.device, settings.layout
    candidates.release()
    cache_candidates.release()


# Cases


def allowed(case: Case) -> torch.Tensor:
    """The mask of a case from its definition, (length, length), or (heads, length, length) where heads differ."""
    i = torch.arange(case.length)
    result = torch.ones(case.length, case.length, dtype=torch.bool)
    if case.offsets is not None:
        document = torch.bucketize(i, torch.tensor(case.offsets), right=True)
        result &= document[:, None] == document[None, :]
    if case.is_causal:
        result &= i[None, :] <= i[:, None]
    if case.mask.startswith("window"):
        result &= (i[None, :] - i[:, None]).abs() <= case.width
    if case.mask == "prefix":
        result &= (i[None, :] < case.width) | (i[None, :] <= i[:, None])
    if case.mask == "dilated":
        steps = (i[None, :] - i[:, None]) / case.dilation
        result &= (steps == steps.round()) & (steps.abs() <= case.width)
    if case.is_blocks:
        block = i // 128
        result = result & case.blocks()[:, block][:, :, block]
    if case.is_hash:
        buckets = case.buckets()
        result = result & (buckets[:, :, None] == buckets[:, None, :])
    return result[0] if result.dim() == 3 and len(result) == 1 else result


DOCUMENTS = (0, 3, 3, 40, 41, 97)
SMALL_CASES = [
    Case(
        *(2, 3, 300 if mask.startswith("blocks") else 97, 64, mask),
        offsets=DOCUMENTS if mask.startswith("document") else None,
        width=20 if mask.startswith(("window", "prefix", "dilated")) else None,
        dilation=3 if mask == "dilated" else None,
        draw=Draw({"blocks": 30, "hash": 7}[mask.split("-")[0]], per_head=per_head) if drawn else None,
    )
    for mask in cases.MASKS
    for drawn in (mask.startswith(("blocks", "hash")),)
    for per_head in ((False, True) if drawn else (False,))
]


@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.name)
def test_flops_count_every_allowed_pair(case: Case) -> None:
    of_heads = allowed(case).expand(3, -1, -1).sum((1, 2))
    assert case.pairs == pytest.approx(float(of_heads.double().mean()))
    assert case.flops == 4 * 2 * 64 * int(of_heads.sum())


@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.name)
def test_our_mask_allows_the_pairs_that_are_counted(case: Case) -> None:
    flashmsa = pytest.importorskip("flashmsa")
    mask = candidates._our_mask(case) or flashmsa.Dense()
    dense = torch.as_tensor(mask.to_dense(case.length, case.length))
    assert torch.equal(dense.expand(1, 3, -1, -1)[0], allowed(case).expand(3, -1, -1))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.name)
def test_flex_attends_to_the_pairs_that_are_counted(case: Case) -> None:
    assert_close(candidates.FACTORIES["flex"](case)(), exact(case)())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("option", cases.OPTIONS)
def test_options_are_the_same_for_ours_and_for_the_peers(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flashmsa = pytest.importorskip("flashmsa")
    monkeypatch.setattr(candidates, "SOFTCAP", 2.0)  # one that logits of random inputs feel
    case = Case(2, 3, 97, 64, "causal", option=option)
    q, k, v = (x.double() for x in candidates.inputs(case))
    named = {
        "softcap": {"softcap": 2.0}, "alibi": {"alibi_slopes": candidates.alibi_slopes(case)},
        "sinks": {"sinks": candidates.sinks(case)},
    }  # fmt: skip
    expected = flashmsa.reference(q, k, v, mask=flashmsa.Causal(), **named[option])
    plain = flashmsa.reference(q, k, v, mask=flashmsa.Causal())
    assert (expected - plain).norm() > 0.05 * plain.norm(), "the option must be seen in the result"
    ours = flashmsa.attention(*candidates.inputs(case), mask=flashmsa.Causal(), backend="torch",
                              **candidates._our_options(case))  # fmt: skip
    assert_close(ours, expected)
    if option in cases.OPTION_SUPPORT["flex"]:
        assert_close(candidates.FACTORIES["flex"](case)(), expected)
    else:
        with pytest.raises(candidates.Unavailable, match="has no sinks"):
            candidates.FACTORIES["flex"](case)
    with pytest.raises(candidates.Unavailable, match="SDPA has no such mask or option"):
        candidates.FACTORIES["sdpa"](case)


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    """To the rounding of bf16, of the inputs' dtype."""
    assert (out.double() - expected.double()).norm() < 0.01 * expected.double().norm()


def test_forward_grid_is_16384_tokens_of_2048_features() -> None:
    units = cases.forward(["flashmsa", "cudnn"])
    assert len(units) == 24
    found = {(lane.case.head_dim, lane.case.batch, lane.case.length, lane.case.mask) for u in units for lane in u.lanes}
    shapes = [(16, 1024), (4, 4096), (2, 8192), (1, 16384)]
    assert found == {(d, b, s, m) for d, (b, s), m in itertools.product((64, 128, 256), shapes, ("dense", "causal"))}
    assert all(lane.case.heads * lane.case.head_dim == 2048 for unit in units for lane in unit.lanes)


@pytest.mark.parametrize("group", cases.GROUPS)
def test_names_identify_cases_and_units(group: str) -> None:
    units = cases.GROUPS[group](["flashmsa", "cudnn", "flash", "fa4"])
    assert len({unit.name for unit in units}) == len(units)
    by_name: dict[str, Case] = {}
    for lane in (lane for unit in units for lane in unit.lanes):
        assert by_name.setdefault(lane.case.name, lane.case) == lane.case
    assert all(len({lane.label for lane in unit.lanes}) == len(unit.lanes) for unit in units)
    assert any(unit.quick for unit in units)
    assert cases.find_case(units[0].lanes[0].case.name) == units[0].lanes[0].case


def test_document_draws_are_the_named_ones() -> None:
    generator = torch.Generator().manual_seed(1)
    cuts = torch.sort(torch.randperm(16383, generator=generator)[:15] + 1).values.tolist()
    assert cases.document_offsets(16384, 16, 1) == (0, *cuts, 16384)
    assert cuts[:5] == [252, 1744, 4453, 5268, 5324]  # the draw must not move with the library
    for seed in cases.SEEDS:
        offsets = cases.document_offsets(16384, 16, seed)
        assert len(offsets) == 17
        assert all(low < high for low, high in itertools.pairwise(offsets))
    assert len({cases.document_offsets(16384, 16, seed) for seed in cases.SEEDS}) == len(cases.SEEDS)


def test_documents_are_compared_with_dense_in_the_same_loop() -> None:
    units = cases.documents(["flashmsa", "cudnn", "fa4"])
    assert len(units) == 10
    for unit in units:
        assert [lane.label for lane in unit.lanes] == ["flashmsa", "fa4", "flashmsa dense", "cudnn dense"]
        assert {lane.case.length for lane in unit.lanes} == {16384}


def test_blocks_and_buckets_are_drawn_as_named() -> None:
    generator = torch.Generator().manual_seed(1)
    expected = (torch.rand(128, 128, generator=generator) < 0.1) | torch.eye(128, dtype=torch.bool)
    assert torch.equal(cases.draw_blocks(Draw(10), 16, 16384)[0], expected)
    assert int(expected.sum()) == 1755  # the draw must not move with the library
    heads = cases.draw_blocks(Draw(10, per_head=True), 16, 16384)
    assert heads.shape == (16, 128, 128) and not torch.equal(heads[0], heads[1])
    buckets = cases.draw_buckets(Draw(64), 16, 16384)
    assert buckets.shape == (1, 16384) and buckets.dtype == torch.int32
    assert buckets.unique().tolist() == list(range(64)) and buckets[0, :3].tolist() == [37, 43, 12]


def test_short_documents_have_the_lengths_asked_for() -> None:
    offsets = cases.short_document_offsets(512, 32, 256, 1)
    lengths = [end - begin for begin, end in itertools.pairwise(offsets)]
    assert len(lengths) == 512 and min(lengths) == 32 and max(lengths) == 256
    assert offsets[-1] == 74329


def test_masks_stand_beside_what_is_whole_and_beside_peers_that_know_them() -> None:
    units = {unit.name: unit for unit in cases.masks(["flashmsa", "cudnn", "flash", "fa4", "flex"])}
    labels = {name: [lane.label for lane in unit.lanes] for name, unit in units.items()}
    assert labels["d128-1x32768-window-4096"] == ["flashmsa", "fa4", "flex", "flashmsa dense", "cudnn dense"]
    assert labels["d128-1x16384-prefix-4096"] == ["flashmsa", "flex", "flashmsa causal", "cudnn causal"]
    assert labels["d128-1x16384-dilated-1024-by4"] == ["flashmsa", "flex", "flashmsa window"]
    varlen = ["flashmsa", "flashmsa varlen", "flash", "fa4", "flex"]
    assert labels["d128-1x16384-document-causal-seed5"] == [*varlen, "flashmsa causal", "cudnn causal"]
    assert labels["d128-1x74329-document-short"] == varlen
    assert sum(label in ("flashmsa", *cases.HASH_LANES) for label in labels["d128-1x16384-hash-causal-64"]) == 4
    assert all(unit.whole in labels[name] for name, unit in units.items() if unit.whole)
    dilated = units["d128-1x16384-dilated-1024-by4"].lanes
    assert dilated[0].flops == dilated[-1].flops, "the window has the same pairs"


def test_bad_cases_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="dilation: needed by the dilated mask"):
        Case(1, 1, 8, 64, "dilated", width=2)
    with pytest.raises(ValueError, match="draw: needed by block and hash masks"):
        Case(1, 1, 8, 64, "hash")
    with pytest.raises(ValueError, match="option: 'dropout'"):
        Case(1, 1, 8, 64, option="dropout")
    with pytest.raises(ValueError, match="mask: 'windows'"):
        Case(1, 1, 8, 64, "windows")
    with pytest.raises(ValueError, match="width: needed by window and prefix masks"):
        Case(1, 1, 8, 64, "window")
    with pytest.raises(ValueError, match="offsets: needed by the document masks"):
        Case(1, 1, 8, 64, "document")
    with pytest.raises(ValueError, match=r"'d128-4x4096-densely'; near it: .*d128-4x4096-"):
        cases.find_case("d128-4x4096-densely")


def test_backward_cases_are_those_of_the_table() -> None:
    units = {unit.name: unit for unit in cases.backward(["flashmsa", "cudnn", "flash", "flex"])}
    grid = {name: unit for name, unit in units.items() if not unit.whole}
    both = ("dense", "causal")
    expected = {f"d{d}-{s}-{m}" for d in (64, 128) for s in ("16x1024", "4x4096", "1x16384") for m in both}
    assert set(grid) == expected | {f"d256-{s}-{m}" for s in ("4x4096", "1x16384") for m in both}
    for unit in grid.values():
        assert [lane.label for lane in unit.lanes] == ["flashmsa", "flashmsa deterministic", "cudnn", "flash"]
        assert all(
            lane.flops == 2.5 * lane.case.flops and lane.candidate.startswith(lane.label.split()[0])
            for lane in unit.lanes
        )
    for name in ("document-causal-seed1", "blocks-10-per-head"):
        unit = units[f"d128-1x16384-{name}"]
        assert unit.whole == unit.lanes[-1].label == "flashmsa dense" and unit.lanes[-1].case.mask == "dense"
        assert unit.lanes[-1].case.length == unit.lanes[0].case.length
    assert units["d128-1x32768-window-causal-4096"].lanes[-1].case.length == 32768
    dropped = units["d128-4x4096-causal-dropout"].lanes
    assert [(lane.label, lane.checked) for lane in dropped] == [
        ("flashmsa without", True), ("flashmsa", False), ("flash", False),
    ]  # fmt: skip
    assert all(lane.flops == 3.5 * lane.case.flops for lane in dropped)


def test_caches_are_counted_by_definition() -> None:
    case = CacheCase(3, 8, 2, 9, 64, len_q=2, lengths=(5, 9, 2))
    allowed = [[j <= i + length - 2 for i in range(2) for j in range(length)] for length in (5, 9, 2)]
    assert case.pairs == sum(map(sum, allowed)) and case.flops == 4 * 8 * 64 * case.pairs
    assert case.bytes == 2 * (5 + 9 + 2) * 2 * 64 * 2
    assert case.name == "d64-3x9-8of2-q2"
    even = CacheCase(2, 4, 4, 7)
    assert even.pairs == 14 and even.sequence_lengths == (7, 7)
    for bad, says in (
        ({"heads": 3}, "heads_kv: 2 does not divide"), ({"lengths": (9, 5)}, "lengths: must be 3"),
        ({"lengths": (5, 8, 2)}, "the largest 9"), ({"len_q": 3}, "len_q: 3 is more than the 2 keys"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            replace(case, **bad)


def test_caches_are_those_of_the_table() -> None:
    units = {unit.name: unit for unit in cases.decode(["flashmsa", "cudnn"])}
    mebibytes = {name: unit.lanes[0].case.bytes >> 20 for name, unit in units.items()}
    assert [mebibytes[f"d128-{name}-pages"] for name in (
        "32x8192-32of8", "128x4096-64of8", "1x131072-32of8", "16x16384-16of1",
    )] == [1024, 2048, 512, 128]  # fmt: skip
    assert all(size >= 512 for name, size in mebibytes.items() if "ratio" in name)
    assert {lane.case.len_q for lane in units["d128-32x8192-64of8-ratio8"].lanes} == {1, 2, 4, 8}
    uneven, even = (units["d128-64x65536-32of8-uneven"].lanes[at].case for at in (1, 2))
    assert uneven.bytes == even.bytes and max(even.lengths) - min(even.lengths) <= 1
    assert {unit.name for unit in units.values() if unit.graph} == {
        "d128-1x1024-32of8-latency1024", "d128-1x4096-32of8-latency4096",
    }  # fmt: skip
    chunk = units["d128-1x32768-32of8-q2048-chunk"].lanes[0].case
    assert chunk.pairs == sum(30720 + 1 + i for i in range(2048))
    assert cases.decode(["cudnn"]) == []


def test_log_uniform_lengths_are_the_named_ones() -> None:
    lengths = log_uniform_lengths(64, 128, 65536, 1)
    assert len(lengths) == 64 and max(lengths) == 65536 and min(lengths) >= 128
    assert lengths[:3] == (187, 520, 552)  # the draw must not move with the library
    logs = [math.log(length / 128) / math.log(512) for length in lengths]
    assert 0.35 < sum(logs) / 64 < 0.65


# Candidates


def gradients(case: Case) -> torch.Tensor:
    """Of q, k and v by the definition, (3, B, H, S, D) in float64."""
    q, k, v = (x.double().requires_grad_() for x in candidates.inputs(case))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed(case))
    dout = gradient_candidates.gradient_of_out(case, torch.empty(out.shape, dtype=torch.bfloat16))
    return torch.stack(torch.autograd.grad(out, (q, k, v), dout.double()))


@pytest.mark.parametrize("case", SMALL_CASES[:6] + SMALL_CASES[-8:-4], ids=lambda case: case.name)
def test_backward_candidates_give_the_gradients_of_the_case(case: Case) -> None:
    pytest.importorskip("flashmsa")
    peers = ["cudnn", "flash"] if case.mask in ("dense", "causal") else []
    for name in (
        "flashmsa-backward",
        "flashmsa-backward-deterministic",
        "flashmsa-both",
        *(f"{x}-backward" for x in peers),
    ):
        with torch.no_grad():  # as a run has it
            got = candidates.canonical(case, candidates.FACTORIES[name](case)())
        assert (got.double() - gradients(case)).norm() < 0.02 * gradients(case).norm(), name


def test_the_forward_pass_is_no_part_of_the_backward_passs_time() -> None:
    case, calls = Case(1, 2, 8, 16), []

    def forward(case: Case) -> candidates.Call:
        inputs = candidates.inputs_bshd(case)  # a candidate of the other layout

        def call() -> tuple[torch.Tensor, None]:
            calls.append(torch.is_grad_enabled())
            return torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in inputs)).transpose(
                1, 2
            ), None

        return call

    candidates.FACTORIES["other"] = forward
    with torch.no_grad():
        backward = gradient_candidates.backward_of(gradient_candidates._forward("other"))(case)
        found = [candidates.canonical(case, backward()) for _ in range(3)]
        assert calls == [True]
        both = gradient_candidates.both_passes_of(forward)(case)
        found += [candidates.canonical(case, both()) for _ in range(2)]
    assert calls == [True] * 4  # the first call says what shape out has
    assert all((x.double() - gradients(case)).norm() < 0.02 * gradients(case).norm() for x in found)
    assert not candidates.inputs(case)[0].requires_grad, "other candidates run without gradients"


def test_dropout_is_drawn_anew_by_each_call() -> None:
    pytest.importorskip("flashmsa")
    case = Case(1, 2, 64, 16, "causal")
    for name in ("flashmsa-both-dropout", "flash-both-dropout"):
        with torch.no_grad():
            call = candidates.FACTORIES[name](case)
            first, second = (candidates.canonical(case, call()) for _ in range(2))
        assert torch.isfinite(first).all() and not torch.equal(first, second), name


@pytest.mark.parametrize("page", [1, 8, 16, 128])
@pytest.mark.parametrize("length", [256, 250])
def test_a_pool_holds_the_keys_of_the_dense_cache(page: int, length: int) -> None:
    case = CacheCase(2, 4, 2, length, 16)
    pool = cache_candidates.pool(case, page)
    pages = -(-length // page)
    assert pool.table.shape == (2, pages) and sorted(pool.table.flatten().tolist()) == list(range(2 * pages))
    assert pool.lengths.tolist() == [length] * 2
    for pages_of, dense in zip((pool.k, pool.v), cache_candidates.dense_cache(case), strict=True):
        found = pages_of[pool.table.long()].flatten(1, 2).transpose(1, 2)[:, :, :length]
        assert torch.equal(found, dense) == (length % page == 0)
    assert page == 1 or pool.table.flatten().tolist() != list(range(2 * pages)), "pages lie in no order"


def test_pools_of_several_lengths() -> None:
    case = CacheCase(3, 4, 2, 40, 16, lengths=(40, 3, 17))
    pool = cache_candidates.pool(case, 16)
    assert pool.k.shape == (3 + 1 + 2, 16, 2, 16) and pool.table.shape == (3, 3)
    used = [pool.table[b, : -(-length // 16)].tolist() for b, length in enumerate(case.lengths)]
    assert sorted(itertools.chain(*used)) == list(range(6))
    with pytest.raises(candidates.Unavailable, match="several lengths"):
        cache_candidates.dense_cache(case)


@pytest.mark.parametrize("len_q", [1, 4])
def test_candidates_of_a_cache_agree(len_q: int) -> None:
    flashmsa = pytest.importorskip("flashmsa")
    case = CacheCase(2, 4, 2, 256, 64, len_q=len_q)
    q, (k, v) = cache_candidates.queries(case), cache_candidates.dense_cache(case)
    expected = flashmsa.reference(q, k, v, mask=flashmsa.Causal())
    names = [
        "flashmsa-cache-dense",
        "flashmsa-cache-attention",
        *(f"flashmsa-cache-page{page}" for page in cases.PAGES),
    ]
    for name in [*names, "cudnn-cache"] if len_q == 1 else names:
        assert_close(candidates.canonical(case, candidates.FACTORIES[name](case)()), expected)
    if len_q > 1:
        with pytest.raises(candidates.Unavailable, match="aligns a causal mask at the first key"):
            candidates.FACTORIES["cudnn-cache"](case)


def test_a_quarter_of_the_pages_is_seen() -> None:
    pytest.importorskip("flashmsa")
    case = CacheCase(2, 4, 2, 512, 16)
    k, v = cache_candidates.dense_cache(case)
    # Values that say which page they are of, and keys that weigh all alike.
    k.zero_()
    v.copy_((torch.arange(512) // 64).view(1, 1, 512, 1).expand_as(v))
    seen = candidates.FACTORIES["flashmsa-cache-quarter"](case)().float().mean((1, 2, 3))
    pairs = {(a + b) / 2 for a, b in itertools.combinations(range(8), 2)}
    assert all(round(x, 3) in pairs for x in seen.tolist()), seen


def test_bytes_are_read_and_copied() -> None:
    case = CacheCase(2, 4, 2, 32, 16)
    assert int(candidates.FACTORIES["plain-read"](case)()) == case.bytes // 4  # ones of 4 bytes
    copied = candidates.FACTORIES["copy"](case)()
    assert all(torch.equal(x, y) for x, y in zip(copied, cache_candidates.dense_cache(case), strict=True))


def test_layouts_hold_the_same_values() -> None:
    case = Case(2, 3, 5, 8)
    q, k, v = candidates.inputs(case)
    assert q.is_contiguous() and q.shape == (2, 3, 5, 8)
    assert not torch.equal(q, k) and not torch.equal(k, v)
    for x, y in zip((q, k, v), candidates.inputs_bshd(case), strict=True):
        assert y.is_contiguous() and torch.equal(x, y.transpose(1, 2))
    candidates.settings.layout = "bshd"
    assert candidates.inputs(case)[0].transpose(1, 2).is_contiguous()


def test_canonical_takes_each_layout_and_refuses_others() -> None:
    case = Case(1, 3, 5, 8)
    out = torch.randn(1, 3, 5, 8)
    for form in (out, out.transpose(1, 2), (out, None), out.transpose(1, 2)[0]):
        assert torch.equal(candidates.canonical(case, form), out)
    with pytest.raises(ValueError, match="out: shape"):
        candidates.canonical(case, torch.randn(1, 3, 5, 4))


def test_build_reports_any_failure_of_a_candidate() -> None:
    def broken(case: Case) -> candidates.Call:
        assert case.head_dim == 64, "head_dim 64 only"
        return lambda: None

    candidates.FACTORIES["broken"] = broken
    with pytest.raises(candidates.Unavailable, match="AssertionError: head_dim 64 only"):
        candidates.build("broken", Case(1, 1, 8, 128))


def test_register_needs_name_module_and_attribute() -> None:
    with pytest.raises(ValueError, match="NAME=module:attribute"):
        candidates.register("mine=module")


def test_tile_efficiency_is_pairs_over_visited_area() -> None:
    pytest.importorskip("flashmsa")
    for case in (case for case in SMALL_CASES if case.is_document):
        mask = allowed(case)
        rows, keys = 32, 16
        visited = 0
        for i in range(0, case.length, rows):
            block = mask[i : i + rows]
            # Without a causal mask the tiles begin where the block's first document does.
            origin = 0 if case.is_causal else int(block.any(0).nonzero()[0])
            visited += rows * keys * sum(block[:, j : j + keys].any() for j in range(origin, case.length, keys))
        assert candidates.tile_efficiency(case, (rows, keys)) == pytest.approx(case.pairs / visited)


# Timing, with a device whose clock is the list of what was asked of it


class Recorder:
    """A device that notes each request; work takes as long as its name says and the flush one hour."""

    kind = "recorder"
    sm_count = 132
    clock_source = "none"

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []
        self.idle = False  # the host is never ahead
        self.delays: list[float] = []

    def work(self, name: str, ms: float) -> timing.Call:
        def call() -> None:
            self.log.append(name)
            self.now += ms

        return call

    def flush(self) -> None:
        self.log.append("flush")
        self.now += 3.6e6

    def mark(self) -> float:
        self.log.append("mark")
        return self.now

    def wait(self, mark: float) -> None:
        self.log.append("wait")

    def done(self, mark: float) -> bool:
        return self.idle

    def delay(self, seconds: float) -> None:
        self.log.append("delay")
        self.delays.append(seconds)

    def elapsed_ms(self, begin: float, end: float) -> float:
        return end - begin

    def probe(self) -> float:
        return self.now

    def mhz(self, begin: float, end: float) -> float:
        return 1000.0 + (end - begin)

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def capture(self, call: timing.Call, launches: int) -> timing.Call:
        return lambda: [call() for _ in range(launches)]


def test_candidates_take_turns_and_the_flush_is_outside_the_events() -> None:
    recorder = Recorder()
    calls = {"a": recorder.work("a", 2.0), "b": recorder.work("b", 5.0), "c": recorder.work("c", 7.0)}
    times = timing.interleaved(recorder, calls, launches=4, warmup=2)
    one_round = [step for name in calls for step in ("flush", "mark", name, "mark")]
    assert recorder.log == one_round * 6 + ["synchronize"]
    assert {name: found.ms for name, found in times.items()} == {"a": [2.0] * 4, "b": [5.0] * 4, "c": [7.0] * 4}
    assert times["c"].median_mhz() == 1007.0


def test_a_device_ahead_of_the_host_waits_between_rounds() -> None:
    recorder = Recorder()
    recorder.idle = True
    calls = {"a": lambda: time.sleep(0.001), "b": recorder.work("b", 5.0)}
    times = timing.interleaved(recorder, calls, launches=3, warmup=1)
    one_round = ["flush", "mark", "mark", "flush", "mark", "b", "mark"]
    assert recorder.log == one_round + (["delay", *one_round]) * 3 + ["synchronize"]
    assert all(seconds >= 0.002 for seconds in recorder.delays) and times["b"].ms == [5.0] * 3


def test_calls_alone_begin_on_an_idle_device() -> None:
    recorder = Recorder()
    calls = {"a": recorder.work("a", 2.0), "b": recorder.work("b", 5.0)}
    times = timing.alone(recorder, calls, launches=3, warmup=1)
    one_round = [x for name in calls for x in ("flush", "synchronize", "mark", name, "mark", "synchronize")]
    assert recorder.log == one_round * 4
    assert {name: found.ms for name, found in times.items()} == {"a": [2.0] * 3, "b": [5.0] * 3}


def test_warmup_rounds_are_not_counted() -> None:
    recorder = Recorder()
    durations = iter([100.0, 50.0, 1.0, 2.0, 3.0])

    def call() -> None:
        recorder.now += next(durations)

    assert timing.interleaved(recorder, {"a": call}, launches=3, warmup=2)["a"].ms == [1.0, 2.0, 3.0]


def test_steady_slices_alternate_and_last_as_long_as_asked() -> None:
    recorder = Recorder()
    calls = {"a": recorder.work("a", 2.0), "b": recorder.work("b", 5.0)}
    results = timing.steady(recorder, calls, {"a": 2.0, "b": 5.0}, seconds=1.0, slice_s=0.25)
    order = [name for name, _ in itertools.groupby(step for step in recorder.log if step in calls)]
    assert order == ["a", "b"] * 4
    assert [part.launches for part in results["a"].slices] == [125] * 4
    assert [part.launches for part in results["b"].slices] == [50] * 4
    assert results["a"].ms_per_launch() == 2.0
    assert results["b"].ms_per_launch() == 5.0
    assert recorder.log.count("wait") > 0 and not results["a"].watts


def test_graph_times_are_per_launch_and_skip_the_first_round() -> None:
    recorder = Recorder()
    calls = {"a": recorder.work("a", 0.5), "b": recorder.work("b", 0.25)}
    times = timing.replayed(recorder, calls, rounds=3, launches=10)
    assert {name: found.ms for name, found in times.items()} == {"a": [0.5] * 3, "b": [0.25] * 3}


@pytest.mark.parametrize("name", ["flashmsa-eager", "sdpa"])
def test_recorded_calls_are_recorded_and_others_are_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flashmsa")
    monkeypatch.setattr(candidates.settings, "device", "cpu")
    case = Case(1, 2, 16, 64, "causal")
    with torch.no_grad():
        context, call = candidates.host_call(name + candidates.RECORDED, case)
        with context():
            recorded = call()
        context, call = candidates.host_call(name, case)
        with context():
            plain = call()
    assert recorded.requires_grad and not plain.requires_grad and torch.equal(recorded, plain)


def test_host_times_give_one_figure_per_call_and_enter_the_context() -> None:
    recorder, entered = Recorder(), []

    class Context:
        def __enter__(self) -> None:
            entered.append(True)

        def __exit__(self, *exc: object) -> None:
            entered.append(False)

    times = timing.host_times(recorder, {"a": (Context, recorder.work("a", 1.0))}, chunks=3, chunk=7)
    assert len(times["a"]) == 21 and min(times["a"]) > 0
    assert entered == [True, False] * 4
    assert recorder.log.count("a") == 28 and recorder.log.count("synchronize") == 4


def test_percentiles_are_numpys() -> None:
    values = [5.0, 1.0, 9.0, 2.5, 2.5, 7.0]
    for percent in (0, 10, 37, 50, 90, 100):
        assert timing.percentile(values, percent) == pytest.approx(np.percentile(values, percent))
    assert timing.spread([3.0]) == {"median": 3.0, "p10": 3.0, "p90": 3.0, "count": 1}


# Clock and energy


def test_clock_between_probes_is_the_median_of_the_sms_seen_twice() -> None:
    begin = [[1000, 500], [2000, 500], [0, 0], [7000, 500]]
    end = [[1000 + 1_800_000, 1_000_500], [2000 + 1_500_000, 1_000_500], [9, 9], [7000 + 1_700_000, 1_000_500]]
    assert device.probe_mhz(begin, end) == pytest.approx(1700.0)
    assert device.probe_mhz([[0, 0]], [[5, 5]]) is None
    assert device.probe_mhz([[1, 1]], [[2, 1_000_000]]) is None  # a clock that stood still


def test_power_is_read_from_tick_to_tick() -> None:
    # 700 W: the counter advances by 14 J every 20 ms; the reading begins after the settling time.
    ticks = [(0.02 * i, 14_000 * i) for i in range(50)]
    assert device.watts(ticks, 0.011, 0.789) == pytest.approx(700.0)
    jump = [(t, e if t > 0.09 else 0) for t, e in ticks]  # what came before it settled does not count
    assert device.watts(jump, 0.0, 0.7) == pytest.approx(700.0)
    assert device.watts(ticks, 0.0, 0.115) is None  # one tick
    assert device.watts([], 0.0, 1.0) is None


def test_monitor_notes_changes_of_the_counter_only() -> None:
    class Counter:
        readings = itertools.chain([5, 5, 5, 8, 8], itertools.repeat(9))

        def energy_mj(self) -> int:
            return next(self.readings)

        def sm_mhz(self) -> int:
            return 1500

    limit = time.monotonic() + 60
    with device.monitored(Counter(), period_s=0.001) as readings:
        while len(readings.ticks) < 3 and time.monotonic() < limit:
            time.sleep(0.001)
    assert [energy for _, energy in readings.ticks] == [5, 8, 9]
    assert device.mean_clock(readings.clocks, 0.0, math.inf) == 1500.0
    with device.monitored(None) as nothing:
        pass
    assert not nothing.ticks and not nothing.clocks


def test_steady_figures_turn_power_into_energy_per_flop() -> None:
    case = Case(1, 16, 1024, 128)
    parts = [timing.Slice(10, 10 * case.flops / 600e9, 0.0, 1.0, 1500.0)]  # 600 TFLOP/s
    figures = report.steady_figures(Lane("x", "x", case), timing.Steady(parts, [690.0, 710.0], [1500.0]), 132)
    assert figures["tflops"] == pytest.approx(600.0)
    assert figures["joules_per_tflop"] == pytest.approx(700.0 / 600.0)
    assert report.steady_figures(Lane("x", "x", case), timing.Steady(parts), 132)["joules_per_tflop"] is None


def steady_unit(case: Case, **lanes: tuple[float, float | None]) -> dict:
    """A forward unit whose lanes ran steadily at (TFLOP/s, watts)."""
    records = {}
    for name, (tflops, power) in lanes.items():
        part = timing.Slice(10, 10 * case.flops / (tflops * 1e9), 0.0, 1.0, 1500.0)
        result = timing.Steady([part], [] if power is None else [power], [1500.0])
        records[name] = lane_record(name, case, tflops)
        records[name]["steady"] = report.steady_figures(Lane(name, name, case), result, 132)
    unit = unit_record("forward", case.name, records)
    report.add_steady_ratios(unit)
    return unit


def test_steady_state_is_judged_by_the_fastest_peer_and_by_the_one_that_needs_least_energy() -> None:
    dense, causal = Case(4, 16, 4096, 128), Case(4, 16, 4096, 128, "causal")
    units = [
        steady_unit(dense, flashmsa=(660.0, 660.0), cudnn=(500.0, 450.0), fa4=(600.0, 690.0)),
        steady_unit(causal, flashmsa=(500.0, 600.0), cudnn=(500.0, 500.0), fa4=(400.0, None)),
    ]
    assert units[0]["derived"]["steady"] == {
        "best_peer": "fa4",
        "of_peer": pytest.approx(1.1),
        "energy_of_peer": pytest.approx(1.0 / 0.9),  # cuDNN's 0.9 J
    }
    summary = report.summarise(units)["steady"]
    assert summary["geometric_mean"] == pytest.approx(1.1**0.5) and summary["by_head_dim"] == {
        "128": summary["geometric_mean"]
    }
    assert summary["minimum_case"] == causal.name and summary["minimum"] == pytest.approx(1.0)
    assert summary["most_energy_case"] == causal.name and summary["most_energy"] == pytest.approx(1.2)
    alone = steady_unit(dense, flashmsa=(660.0, 660.0))
    assert alone["derived"]["steady"] == {"best_peer": None, "of_peer": None, "energy_of_peer": None}
    assert report.summarise([alone])["steady"] is None


# Figures


def test_utilisation_is_one_at_4096_flops_per_sm_and_cycle() -> None:
    seconds, mhz = 0.002, 1600.0
    flops = 132 * 4096 * mhz * 1e6 * seconds
    assert report.tensor_utilisation(flops, seconds, mhz, 132) == pytest.approx(1.0)
    assert report.tensor_utilisation(flops, seconds, None, 132) is None


def lane_record(name: str, case: Case, tflops: float) -> dict:
    ms = case.flops / (tflops * 1e9)
    launches = timing.Launches([ms * 0.95, ms, ms * 1.05], [1500.0] * 3)
    return report.lane_figures(Lane(name, name, case), launches, 132)


def unit_record(group: str, name: str, lanes: dict[str, dict]) -> dict:
    unit = {"group": group, "name": name, "lanes": lanes, "skipped": {}, "derived": {}, "differences": {}}
    report.add_ratios(unit)
    return unit


@pytest.fixture
def results() -> dict:
    """A result file as a run on a GPU would leave it: the forward grid and one draw of documents."""
    units = []
    for index, case in enumerate(cases.grid()):
        ours = 600.0 * (1.2 if index else 0.9)
        units.append(unit_record("forward", case.name, {
            "flashmsa": lane_record("flashmsa", case, ours),
            "cudnn": lane_record("cudnn", case, 600.0),
        }))  # fmt: skip
    dense = Case(1, 16, 16384, 128)
    document = replace(dense, mask="document", offsets=cases.document_offsets(16384, 16, 1), tag="seed1")
    lanes = {"flashmsa": lane_record("flashmsa", document, 540.0)}
    lanes["flashmsa dense"] = lane_record("flashmsa", dense, 750.0)
    units.append(unit_record("documents", document.name, lanes))
    report.add_document_target(units[-1], 0.8)
    report.add_ceiling(units, 800.0)
    return {
        "schema": report.SCHEMA, "command": "python benchmarks/run.py", "date": "2026-01-01T00:00:00+00:00",
        "dry_run": False, "settings": {}, "environment": {"gpu": "H200", "torch": "2", "cudnn": 1, "commit": "c"},
        "clocks": {"source": "none"}, "ceiling": {"size": 8192, "tflops": 800.0, "note": "", "measured": [800.0]},
        "units": units, "summary": report.summarise(units),
    }  # fmt: skip


def test_summary_gives_geometric_means_and_the_worst_case(results: dict) -> None:
    forward = results["summary"]["forward"]["flashmsa"]
    assert forward["cases"] == 24
    assert forward["geometric_mean"] == pytest.approx((1.2**23 * 0.9) ** (1 / 24))
    assert forward["by_head_dim"]["64"] == pytest.approx((1.2**7 * 0.9) ** (1 / 8))
    assert forward["by_head_dim"]["256"] == pytest.approx(1.2)
    assert (forward["minimum"], forward["minimum_case"]) == (pytest.approx(0.9), "d64-16x1024-dense")
    assert results["summary"]["documents_of_target"]["geometric_mean"] == pytest.approx(540 / (750 * 0.8))
    assert results["units"][1]["lanes"]["flashmsa"]["of_matmul"] == pytest.approx(720 / 800)


def mask_record() -> dict:
    """A window at 600 TFLOP/s of a dense 750, flash-attn-4 at 500 and FlexAttention at 400."""
    dense = Case(1, 16, 16384, 128)
    case = replace(dense, mask="window", width=512)
    lanes = {
        name: lane_record(name, case, rate) for name, rate in (("flashmsa", 600.0), ("flex", 400.0), ("fa4", 500.0))
    }
    lanes["flashmsa dense"] = lane_record("flashmsa", dense, 750.0)
    unit = unit_record("masks", case.name, lanes)
    report.add_mask_figures(unit, case.name, "flashmsa dense")
    unit["derived"]["tile_efficiency"] = 0.9
    return unit


def test_masks_are_judged_by_the_whole_mask_the_fastest_peer_and_the_memory_floor() -> None:
    unit = mask_record()
    ours = unit["lanes"]["flashmsa"]
    assert unit["derived"]["best_peer"] == "fa4"
    assert (ours["of_peer"], ours["of_whole"]) == (pytest.approx(1.2), pytest.approx(0.8))
    assert "of_peer" not in unit["lanes"]["flashmsa dense"] and "of_peer" not in unit["lanes"]["fa4"]
    report.add_floors([unit], 4000.0)
    seconds = 4 * 16 * 16384 * 128 * 2 / 4000e9  # q, k, v and the output of 2 bytes an element
    assert ours["of_floor"] == pytest.approx(seconds / (ours["ms"]["median"] / 1e3))
    summary = report.summarise([unit])["masks"][unit["name"]]
    assert summary["best_peer"] == "fa4" and list(summary["lanes"]) == ["flashmsa"]
    table = report._mask_table([unit])
    assert "1.20" in table and "0.800" in table and "0.900" in table and "flashmsa dense" not in table
    alone = unit_record("masks", "x", {"flashmsa": lane_record("flashmsa", Case(1, 1, 64, 64), 1.0)})
    report.add_mask_figures(alone, "d64-1x64-dense-h1", "")
    assert alone["lanes"]["flashmsa"]["of_peer"] is None and alone["derived"]["whole"] is None


def test_options_cost_what_they_add_to_the_same_candidate() -> None:
    case = Case(4, 16, 4096, 128, "causal")
    capped = replace(case, option="softcap")
    unit = unit_record("options", case.name, {
        "flashmsa": lane_record("flashmsa", case, 600.0), "flashmsa softcap": lane_record("flashmsa", capped, 500.0),
        "fa4": lane_record("fa4", case, 550.0), "fa4 softcap": lane_record("fa4", capped, 275.0),
    })  # fmt: skip
    report.add_option_costs(unit)
    assert unit["lanes"]["flashmsa softcap"]["slower"] == pytest.approx(0.2)
    assert unit["lanes"]["fa4 softcap"]["slower"] == pytest.approx(1.0)
    assert "slower" not in unit["lanes"]["flashmsa"]
    assert "+20.0%" in report._option_table([unit])


def test_backward_is_judged_by_the_fastest_peer_and_by_what_determinism_costs() -> None:
    case = Case(4, 16, 4096, 128)
    rates = {"flashmsa": 600.0, "flashmsa deterministic": 500.0, "cudnn": 400.0, "flash": 480.0}
    lanes = {label: lane_record(f"{label.split()[0]}-backward", case, rate) for label, rate in rates.items()}
    unit = unit_record("backward", case.name, lanes)
    report.add_backward_figures(unit, case.name, "")
    wide_case = Case(4, 8, 4096, 256)
    wide = unit_record("backward", wide_case.name, {"flashmsa": lane_record("flashmsa-backward", wide_case, 450.0)})
    report.add_backward_figures(wide, wide_case.name, "")
    assert unit["derived"]["best_peer"] == "flash"
    assert lanes["flashmsa"]["of_peer"] == pytest.approx(1.25) and "slower" not in lanes["flashmsa"]
    assert lanes["flashmsa deterministic"]["slower"] == pytest.approx(0.2)
    summary = report.summarise([unit, wide])["backward"]
    assert summary["of_peer"] == {"128": pytest.approx(1.25), "256": None}
    assert summary["d256_of_d128"] == pytest.approx(0.75) and summary["minimum_case"] == case.name
    assert summary["deterministic_slower"] == pytest.approx(0.2) and summary["others"] == {}
    table = report._backward_table([unit, wide])
    assert "+20.0%" in table and "1.25" in table
    assert "d128 1.250" in report._backward_lines(summary)[0]


def test_caches_are_judged_by_the_plain_read_and_by_the_lane_named() -> None:
    case = CacheCase(32, 32, 8, 8192)
    times = {"plain read": 0.25, "flashmsa page 64": 0.2, "flashmsa 25 % of the pages": 0.1}
    lanes = [Lane(label, label, case, share=0.25 if "%" in label else 1.0) for label in times]
    records = {x.label: report.lane_figures(x, timing.Launches([times[x.label]] * 3, [None] * 3), 132) for x in lanes}
    unit = unit_record("decode", case.name, records)
    report.add_cache_figures(unit, lanes, "flashmsa page 64")
    assert records["plain read"]["gbs"] == pytest.approx((1 << 30) / 0.25e6)
    assert records["flashmsa page 64"]["of_read"] == pytest.approx(1.25)
    quarter = records["flashmsa 25 % of the pages"]
    assert (quarter["time_of_base"], quarter["of_base"]) == (pytest.approx(0.5), pytest.approx(0.5))
    assert report.summarise([unit])["decode"][case.name]["flashmsa page 64"]["us"] == pytest.approx(200.0)
    table = report._cache_table([unit])
    assert "4295" in table and "1.250" in table
    del records["flashmsa page 64"]
    report.add_cache_figures(unit, lanes, "flashmsa page 64")
    assert quarter["of_base"] is None and unit["derived"]["whole"] is None


def test_ratio_is_taken_on_the_same_case_only() -> None:
    bf16, fp16 = Case(1, 16, 1024, 128), Case(1, 16, 1024, 128, dtype="fp16")
    unit = unit_record("dtype", bf16.name, {
        "flashmsa bf16": lane_record("flashmsa", bf16, 500.0), "flashmsa fp16": lane_record("flashmsa", fp16, 600.0),
        "cudnn bf16": lane_record("cudnn", bf16, 400.0), "cudnn fp16": lane_record("cudnn", fp16, 300.0),
    })  # fmt: skip
    assert unit["lanes"]["flashmsa bf16"]["ratio"] == pytest.approx(1.25)
    assert unit["lanes"]["flashmsa fp16"]["ratio"] == pytest.approx(2.0)


def test_text_shows_every_case_and_the_verdict(results: dict) -> None:
    text = report.text(results)
    for unit in results["units"]:
        assert unit["name"] in text
    assert "geometric mean 1.186" in text and "minimum 0.900 at d64-16x1024-dense" in text
    assert max(len(line) for line in text.splitlines()) < 200


def test_short_sequences_name_where_sdpa_is_faster() -> None:
    case = Case(1, 16, 64, 128)
    lanes = {
        name: lane_record(name, case, rate) for name, rate in (("flashmsa", 10.0), ("cudnn", 20.0), ("flash", 5.0))
    }
    summary = report.summarise([unit_record("small", case.name, lanes)])
    assert summary["small"] == [{"case": case.name, "best": "cudnn", "time_ratio": pytest.approx(2.0)}]


def test_result_files_are_checked(results: dict, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "r.json"
    report.write_json(results, path)
    assert report.read_json(path)["summary"] == json.loads(json.dumps(results["summary"]))
    with pytest.raises(ValueError, match="ceiling missing"):
        report.check_results({key: value for key, value in results.items() if key != "ceiling"})
    with pytest.raises(ValueError, match="schema 7"):
        report.check_results({**results, "schema": 7})
    del results["units"][0]["lanes"]["cudnn"]["ms"]
    with pytest.raises(ValueError, match="d64-16x1024-dense, cudnn: ms missing"):
        report.check_results(results)


# Pictures


def test_plot_draws_what_was_measured(results: dict, tmp_path: Path) -> None:
    points = plot.curves(results["units"], "causal", 128)
    assert [length for length, *_ in points["flashmsa"]] == [1024, 4096, 8192, 16384]
    assert points["flashmsa"][0][1] == pytest.approx(720.0)
    report.write_json(results, tmp_path / "r.json")
    assert plot.main([str(tmp_path / "r.json")]) == 0
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    report.write_json({**results, "units": [*results["units"], mask_record()]}, tmp_path / "masks.json")
    assert plot.main([str(tmp_path / "masks.json")]) == 0
    assert (tmp_path / "masks.png").stat().st_size > (tmp_path / "r.png").stat().st_size
    with pytest.raises(ValueError, match="nothing to draw"):
        plot.plot({**results, "units": []}, tmp_path / "none.png")


# Nsight Compute

NCU_HEADER = '"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'


def ncu_output(kernels: dict[str, dict[str, str]]) -> str:
    rows = [
        f'"{index}","1","{name}","{metric}","","{value}"'
        for index, (name, metrics) in enumerate(kernels.items())
        for metric, value in metrics.items()
    ]
    return "\n".join(["==PROF== Connected to process 1", NCU_HEADER, *rows, "==PROF== Disconnected"])


def test_ncu_reading_is_about_the_longest_kernel() -> None:
    main = {
        ncu.TIME: "1,000,000", ncu.CYCLES: "1500000", ncu.TENSOR: "92.5", ncu.ISSUE: "27.0", ncu.XU: "n/a",
        ncu.INSTRUCTIONS: "156000000", ncu.CONFLICTS: "1000", ncu.WAVEFRONTS: "10000", ncu.L2_HIT: "95.0",
        ncu.L2_BYTES: "3000000000", ncu.DRAM_READ: "100000000", ncu.DRAM_WRITE: "50000000", ncu.LOCAL_LOADS: "12",
        ncu.STALL.format("gmma"): "6.0", ncu.STALL.format("barrier"): "2.0", ncu.STALL.format("selected"): "2.0",
    }  # fmt: skip
    launches = ncu.parse(ncu_output({"plan_documents": {ncu.TIME: "3000"}, "fwd_dense": main}))
    assert [kernel["name"] for kernel in launches] == ["plan_documents", "fwd_dense"]
    assert launches[1][ncu.TIME] == 1e6 and ncu.XU not in launches[1]
    text = ncu.reading(Case(4, 16, 4096, 128), "flashmsa", launches)
    assert "flashmsa: fwd_dense" in text and "plan_documents, 3.0 us" in text
    assert "550 TFLOP/s" in text and "tensor pipe active 92.5 %" in text
    assert "(gmma): 60 % of warp cycles" in text and "10.0 % of them conflicts: look at the swizzle" in text
    assert "3000 GB/s" in text and "150.0 MB moved, 150 GB/s" in text and "look for spills" in text


def test_ncu_leaves_the_clocks_alone_and_calls_the_child() -> None:
    case = cases.find_case("d128-4x4096-causal")
    command = ncu.command("ncu", ["a", "b"], Path("log"), case, "cudnn", ["x=m:f"])
    assert command[command.index("--clock-control") + 1] == "none"
    assert command[command.index("--metrics") + 1] == "a,b"
    child = run.parse(command[command.index(str(ROOT / "benchmarks" / "run.py")) + 1 :])
    assert (child.ncu_child, child.ncu_candidate, child.candidate) == (case.name, "cudnn", ["x=m:f"])
    assert ncu.parse("==ERROR== no kernels") == []


# Limits


def test_limits_have_a_row_for_each_kind_of_kernel() -> None:
    names = [row.name for row in limits.rows()]
    assert len(set(names)) == len(names)
    dims = {(row.case.head_dim, row.case.value_dim) for row in limits.rows() if row.candidate == "flashmsa"}
    assert dims == {(dim, dim) for dim in cases.HEAD_DIMS} | set(cases.OTHER_DIMS)
    for mask in ("dense", "causal"):
        assert f"flashmsa d192x128-4x4096-{mask}-h16" in names and f"flashmsa-backward d64-4x4096-{mask}" in names
    assert all(row.candidate in candidates.FACTORIES for row in limits.rows())
    assert [row.name for row in limits.chosen("page16")] == ["flashmsa-cache-page16 d128-32x8192-32of8"]
    with pytest.raises(ValueError, match=r"--limits: nothing matches 'd512'"):
        limits.chosen("d512")


def test_a_kernel_is_limited_by_power_where_it_is_reached_and_by_its_fullest_units() -> None:
    shares = {"tensor pipe": 0.92, "shared memory": 0.84, "exp unit": 0.46}
    assert limits.limited_by(shares) == ["tensor pipe", "shared memory"]
    assert limits.limited_by(shares | {limits.POWER: 0.99}) == ["power", "tensor pipe", "shared memory"]
    assert limits.limited_by(shares | {limits.POWER: 0.8}) == ["tensor pipe", "shared memory"]
    assert limits.limited_by({}) == []


def profiled(
    monkeypatch: pytest.MonkeyPatch, names: list[str], kernels: dict[str, dict[str, str]], code: int = 0
) -> list:
    """In place of ncu: writes those kernels to its log and calls those rows started. Returns the commands."""
    commands = []

    def run_ncu(command: list[str], **_: object) -> subprocess.CompletedProcess:
        commands.append(command)
        Path(command[command.index("--log-file") + 1]).write_text(ncu_output(kernels))
        printed = "".join(f"==PROF==\n{limits.STARTED}{name}\n" for name in names)
        return subprocess.CompletedProcess(command, code, printed, "its last words")

    monkeypatch.setattr(ncu, "find_program", lambda: "ncu")
    monkeypatch.setattr(ncu, "known_metrics", lambda program, wanted: (wanted, []))
    monkeypatch.setattr(limits.subprocess, "run", run_ncu)
    return commands


def test_limits_pair_rows_with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, shared = limits.METRICS["tensor pipe"], limits.METRICS["shared memory"]
    kernels = {"fwd": {ncu.CYCLES: "1000000", tensor: "92.5"}, "bwd": {ncu.CYCLES: "2,000,000", shared: "n/a"}}
    commands = profiled(monkeypatch, ["a", "b"], kernels)
    found, absent = limits.profile("x")
    assert list(found) == ["a", "b"] and found["a"][tensor] == 92.5 and found["b"]["name"] == "bwd" and absent == []
    ((program, *rest),) = commands
    assert program == "ncu" and rest[-2:] == ["--limits-child", "x"] and f"regex:{limits.MAIN_KERNELS}" in rest
    assert rest[rest.index("--clock-control") + 1] == "none"


@pytest.mark.parametrize("names, code", [(["a", "b", "c"], 0), ([], 0), (["a", "b"], 1)])
def test_limits_refuse_what_does_not_match(monkeypatch: pytest.MonkeyPatch, names: list[str], code: int) -> None:
    profiled(monkeypatch, names, {"fwd": {ncu.CYCLES: "1"}, "bwd": {ncu.CYCLES: "1"}}, code)
    with pytest.raises(RuntimeError, match=r"2 main kernels of \d rows(.|\n)*its last words"):
        limits.profile("x")


def test_limits_take_power_and_clock_from_launches_back_to_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flashmsa")
    monkeypatch.setattr(candidates.settings, "device", "cpu")
    row = limits.Row("flashmsa", Case(1, 1, 16, 64))
    with torch.no_grad():
        (figures,) = limits.sustained([row], device.HostDevice(), None, 0.01).values()
    assert figures["ms"] > 0 and figures["watts"] is None and figures["sm_mhz"] is None


def test_limits_as_a_table() -> None:
    (row,) = limits.chosen("^flashmsa d128-4x4096-dense$")
    cycles = row.flops / (132 * 4096) / 0.9  # nine tenths of them useful
    tensor, shared = limits.METRICS["tensor pipe"], limits.METRICS["shared memory"]
    kernel = {"name": "k", ncu.CYCLES: cycles, ncu.TIME: 1e6, tensor: 92.4, shared: 67.6}
    card = {"sm_count": 132, "power_limit_w": 700.0, "sm_max_mhz": 1980}
    record = limits.row_record(row, kernel, {"watts": 693.0, "sm_mhz": 1485.0, "ms": 1.0}, card)
    assert record["useful_tensor"] == pytest.approx(0.9) and record["clock"] == pytest.approx(0.75)
    assert record["shares"] == {
        "tensor pipe": pytest.approx(0.924),
        "shared memory": pytest.approx(0.676),
        "power": pytest.approx(0.99),
    }
    head, _, line = limits.markdown([record]).splitlines()
    assert line == "| forward d128-4x4096-dense | 92 | – | 68 | – | – | – | 99 | 90 | 75 | power, tensor pipe |"
    assert head.count("|") == line.count("|")
    unknown = limits.row_record(row, kernel, {"watts": None, "sm_mhz": None, "ms": 1.0}, {"sm_count": 132})
    assert unknown["clock"] is None and limits.POWER not in unknown["shares"]


# Whole runs, dry


def plug(monkeypatch: pytest.MonkeyPatch, factory: candidates.Factory) -> list[str]:
    module = types.ModuleType("plugged_candidate")
    module.factory = factory
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return ["--candidate", f"flashmsa={module.__name__}:factory"]


def exact(case: Case) -> candidates.Call:
    q, k, v = candidates.inputs(case)
    mask = allowed(case)
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def dry_run(out: Path, *arguments: str) -> tuple[int, dict]:
    code = run.main(["--dry-run", "--quick", "--launches", "2", "--peers", "cudnn", "--out", str(out), *arguments])
    return code, report.read_json(out)


def test_dry_run_goes_through_every_device_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    groups = "forward,documents,one-document,small,dtype"
    steady = ["--steady", "d64-4x64-causal-h1", "--seconds", "0.02"]
    code, data = dry_run(
        tmp_path / "r.json",
        *plug(monkeypatch, exact),
        "--group",
        groups,
        "--cases",
        "d64|document",
        *steady,
    )
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert {unit["group"] for unit in data["units"]} == set(groups.split(","))
    assert data["dry_run"] and data["ceiling"]["tflops"] > 0
    forward = {unit["name"]: unit for unit in data["units"] if unit["group"] == "forward"}
    assert forward["d64-4x64-causal-h1"]["differences"]["flashmsa"] < run.WRONG
    assert "steady" in forward["d64-4x64-causal-h1"]["lanes"]["flashmsa"]
    assert "steady" not in forward["d64-4x64-dense-h1"]["lanes"]["flashmsa"]
    assert forward["d64-4x64-causal-h1"]["derived"]["steady"]["best_peer"] == "cudnn"
    assert data["summary"]["steady"]["cases"] == 1 and "steady state / best peer" in printed
    assert data["summary"]["one_document_of_plain"]["geometric_mean"] > 0
    assert "these figures say nothing" in printed and "d128-1x256-document-h1-seed1" in printed


def test_dry_run_of_head_dims(tmp_path: Path, capsys) -> None:
    pytest.importorskip("flashmsa")
    code, data = dry_run(tmp_path / "r.json", "--group", "dims")
    printed = capsys.readouterr().out
    assert code == 0, printed
    units = {unit["name"]: unit for unit in data["units"]}
    assert set(units) == {
        f"{dims}-4x64-{mask}-h1" for dims in ("d96", "d192", "d192x128") for mask in ("dense", "causal")
    }
    for unit in units.values():
        assert unit["differences"]["flashmsa"] < run.WRONG and unit["differences"]["flashmsa padded"] < run.WRONG
        assert unit["derived"]["of_whole"] > 0 and unit["derived"]["of_padded"] > 0
    wide = units["d192x128-4x64-dense-h1"]["lanes"]["flashmsa next width"]["case"]
    assert (wide["head_dim"], wide["head_dim_v"]) == (256, 256)
    assert data["summary"]["dims_of_next_width"]["geometric_mean"] > 0 and "of next width" in printed


def test_dry_run_with_the_cpu_backend(tmp_path: Path) -> None:
    pytest.importorskip("flashmsa")
    arguments = ["--group", "forward,host,table", "--cases", "d64-4x64|d64-1x128|d128-1x128-dense-h1"]
    code, data = dry_run(tmp_path / "r.json", *arguments)
    assert code == 0
    assert [unit["group"] for unit in data["units"]] == ["forward", "forward", *["host"] * 4, "table"]
    assert all(unit["derived"]["of_sdpa"] > 0 for unit in data["units"] if unit["group"] == "host")
    assert "qkv+flashmsa" in data["units"][-1]["lanes"]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_dry_run_of_masks_options_and_construction(tmp_path: Path, capsys) -> None:
    pytest.importorskip("flashmsa")
    code, data = dry_run(tmp_path / "r.json", "--group", "masks,options,construction", "--peers", "cudnn,flex")
    printed = capsys.readouterr().out
    assert code == 0, printed
    units = {unit["name"]: unit for unit in data["units"]}
    checked = [unit for unit in data["units"] if unit["group"] == "masks"]
    assert len(checked) == 11 and all(unit["differences"]["flashmsa"] < run.WRONG for unit in checked)
    assert data["ceiling"]["copy_gbs"] > 0 and all(unit["lanes"]["flashmsa"]["of_floor"] > 0 for unit in checked)
    assert set(cases.HASH_LANES) <= set(units["d128-1x256-hash-causal-64-h1"]["lanes"])
    assert units["d128-1x256-dilated-16-by4-h1"]["lanes"]["flashmsa"]["of_whole"] > 0
    costs = data["summary"]["options"]["d128-4x64-causal-h1"]
    assert set(costs) == {*(f"flashmsa {option}" for option in cases.OPTIONS), "flex softcap", "flex alibi"}
    made = data["summary"]["construction_us"]["d128-1x2048-blocks-10-per-head-h1"]
    assert set(made) == {"made, counted", "made, capacity", "updated, graph"} and min(made.values()) > 0
    assert "flashmsa built graph" in printed and "making a mask" in printed


def test_dry_run_of_gradients_and_caches(tmp_path: Path, capsys) -> None:
    pytest.importorskip("flashmsa")
    code, data = dry_run(tmp_path / "r.json", "--group", "backward,decode")
    printed = capsys.readouterr().out
    assert code == 0, printed
    units = {unit["name"]: unit for unit in data["units"]}
    plain = units["d128-4x64-causal-h1"]
    assert set(plain["differences"]) == {"flashmsa", "flashmsa deterministic"}
    assert max(plain["differences"].values()) < run.WRONG
    assert plain["lanes"]["flashmsa"]["flops"] == 2.5 * plain["lanes"]["flashmsa"]["case"]["flops"]
    assert units["d128-1x256-document-causal-h1-seed1"]["lanes"]["flashmsa"]["of_whole"] > 0
    assert "slower" in units["d128-4x64-causal-h1-dropout"]["lanes"]["flashmsa"]
    pages = units["d128-2x256-4of1-pages"]
    assert len(pages["differences"]) == 1 + len(cases.PAGES) and max(pages["differences"].values()) < run.WRONG
    assert all(lane["of_base"] > 0 and lane["of_read"] > 0 for lane in pages["lanes"].values())
    assert units["d128-1x256-4of1-latency1024"]["differences"]["flashmsa attention"] < run.WRONG
    assert "backward / best peer: geometric means d64" in printed and "flashmsa page 16" in printed


def test_a_mask_that_cannot_be_made_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def broken(case: Case) -> candidates.Call:
        raise candidates.Unavailable("no such mask")

    monkeypatch.setitem(candidates.FACTORIES, "mask-made", broken)
    code, _ = dry_run(tmp_path / "r.json", "--group", "construction", "--cases", "hash")
    assert code == 1 and "left out: made in 2 units: no such mask" in capsys.readouterr().out


def test_flash_attn_4_is_looked_for_where_the_variable_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "flash_attn"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "cute.py").write_text("def flash_attn_func(q, k, v, **options):\n    return options, q.shape\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(candidates.FA4_SITE, f"{tmp_path / 'none'}:{tmp_path / 'site'}")
    candidates._fa4.cache_clear()
    try:
        candidates.add_fa4_site()
        assert sys.path[-1] == str(tmp_path / "site")
        case = Case(1, 2, 8, 64, "window", width=3)
        assert candidates.fa4(case)() == ({"window_size": (3, 3)}, (1, 8, 2, 64))
        capped = Case(1, 2, 8, 64, "causal", option="softcap")
        assert candidates.fa4(capped)()[0] == {"causal": True, "softcap": 50.0}
        sink = candidates.fa4(replace(capped, option="sinks"))()[0]["learnable_sink"]
        assert torch.equal(sink.float(), candidates.sinks(capped))
        for other in (replace(capped, option="alibi"), Case(1, 2, 8, 64, "hash", draw=Draw(2))):
            with pytest.raises(candidates.Unavailable, match="flash-attn-4 has no"):
                candidates.fa4(other)
    finally:
        candidates._fa4.cache_clear()
        for name in ("flash_attn", "flash_attn.cute"):
            sys.modules.pop(name, None)


def test_a_wrong_result_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def wrong(case: Case) -> candidates.Call:
        right = exact(case)
        return lambda: right() * 1.1

    code, _ = dry_run(tmp_path / "r.json", *plug(monkeypatch, wrong), "--group", "forward", "--cases", "d64-4x64-dense")
    assert code == 1
    assert "WRONG: forward d64-4x64-dense-h1: flashmsa differs by 0.1" in capsys.readouterr().out


def test_a_missing_candidate_fails_the_run_and_keeps_the_rest(tmp_path: Path, monkeypatch, capsys) -> None:
    def absent(case: Case) -> candidates.Call:
        raise candidates.Unavailable("not built here")

    code, data = dry_run(tmp_path / "r.json", *plug(monkeypatch, absent), "--group", "forward", "--cases", "d64")
    printed = capsys.readouterr().out
    assert code == 1
    assert (
        "FAILED: flashmsa did not run in 2 units" in printed
        and "left out: flashmsa in 2 units: not built here" in printed
    )
    assert all(list(unit["lanes"]) == ["cudnn"] for unit in data["units"])


def test_bad_arguments_name_the_choices(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--group: sideways not among forward"):
        run.main(["--dry-run", "--group", "sideways"])
    with pytest.raises(ValueError, match=r"--peers: fa9 not among"):
        run.main(["--dry-run", "--peers", "fa9"])
    with pytest.raises(ValueError, match=r"--cases: nothing in forward"):
        run.main(["--dry-run", "--group", "forward", "--cases", "d512"])
    with pytest.raises(ValueError, match=r"--limits: nothing matches 'd512'"):
        run.main(["--limits", "d512"])
    with pytest.raises(ValueError, match=r"--steady: d128-nowhere"):
        run.main(["--dry-run", "--group", "forward", "--steady", "d128-nowhere"])


def test_steady_state_of_all_units_or_some() -> None:
    units = run.chosen_units(run.parse(["--group", "forward,host"]), ["flashmsa"])
    every, six = run.parse(["--steady", "all"]), run.parse(["--steady"])
    run.check_steady(units, every)
    assert sum(run.is_steady(unit, every) for unit in units) == 24
    assert sum(run.is_steady(unit, six) for unit in units) == 6
    assert not any(run.is_steady(unit, run.parse([])) for unit in units)


def test_list_prints_units_without_running_them(capsys) -> None:
    assert run.main(["--group", "all", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(len(build(["flashmsa", *candidates.PEERS])) for build in cases.GROUPS.values())
    assert any("d128-4x4096-causal" in line and "fa4" in line for line in lines)


def test_differences_compare_equal_cases_only() -> None:
    case, other = Case(1, 2, 8, 16), Case(1, 2, 8, 16, "causal")
    lanes = tuple(Lane(name, name, c) for name, c in (("flashmsa", case), ("cudnn", case), ("fa4", other)))
    outputs = {lane.label: torch.ones(1, 2, 8, 16) for lane in lanes}
    outputs["flashmsa"] = outputs["flashmsa"] * 1.5
    assert run.differences(Unit("g", "u", lanes), outputs) == {"flashmsa": pytest.approx(0.5)}
    outputs["flashmsa"][0, 0, 0, 0] = math.nan
    assert math.isnan(run.differences(Unit("g", "u", lanes), outputs)["flashmsa"])
