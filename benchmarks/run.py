#!/usr/bin/env python3
"""Measures flashmsa beside SDPA's cuDNN and flash backends and flash-attn-4, on one GPU of compute capability 9.0.

    python benchmarks/run.py                         the forward grid, documents, one document, host time
    python benchmarks/run.py --group forward --quick fewer cases and launches
    python benchmarks/run.py --group masks,options,construction
                                                     every other mask, softcap, ALiBi and sinks, the making of masks
    python benchmarks/run.py --group backward,decode  the backward pass; caches: dense, in pages, uneven, gathered
    python benchmarks/run.py --group masks --peers cudnn,flash,fa4,flex,flex-fa4
                                                     with FlexAttention, by Triton and by flash-attn-4's kernel
    FLASHMSA_FA4_SITE=PATHS python benchmarks/run.py flash-attn-4 from where its wheels were unpacked
    python benchmarks/run.py --steady                also seconds of launches of six cases, with energy (or: all)
    python benchmarks/run.py --ncu d128-4x4096-dense one case under Nsight Compute
    python benchmarks/run.py --limits                shares of each limit that our kernels reach, as a table
    python benchmarks/run.py --dry-run               everything on the CPU with tiny shapes; the figures mean nothing

README.md beside this says how the figures are made.
"""

from __future__ import annotations

import argparse
import datetime
import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# NOTE: first for `benchmarks`, whose name other packages use too; then last, so that an installed flashmsa is measured
# rather than an unbuilt source tree.
sys.path.insert(0, str(ROOT))

import torch

from benchmarks import cache_candidates, candidates, cases, gradient_candidates, limits, ncu, report, timing  # noqa: F401
from benchmarks.cases import Case, Lane, Unit
from benchmarks.device import CudaDevice, HostDevice, environment, open_nvml

sys.path.remove(str(ROOT))
sys.path.append(str(ROOT))

RESULTS = Path(__file__).resolve().parent / "results"
WRONG = 0.02  # relative RMS difference between two bf16 kernels that compute the same: a few 1e-3
STEADY_CASES = tuple(f"d{dim}-4x4096-{mask}" for dim in cases.HEAD_DIMS for mask in ("dense", "causal"))
STEADY_GROUPS = ("forward", "documents")
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 16}
DRY_SHRINK = 64  # lengths and heads of a dry run are divided by this
CEILING_SIZE = {"cuda": 8192, "cpu": 64}


class UsageError(ValueError):
    """An argument that names nothing; the message says what there is."""


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--group", default=",".join(cases.DEFAULT_GROUPS), help=f"comma-separated, of {', '.join(cases.GROUPS)}, or all"
    )
    add("--cases", default="", help="regular expression that a unit's name must contain")
    add("--quick", action="store_true", help="the few cases that say most, 10 launches each")
    add("--launches", type=int, help="launches of each candidate and case (30)")
    add(
        "--peers",
        default=",".join(candidates.PEERS),
        help="comma-separated, of cudnn, flash, fa4, efficient, flex, flex-fa4",
    )
    add("--flex", action="store_true", help="FlexAttention too (compiles each case)")
    add("--candidate", action="append", default=[], metavar="NAME=MODULE:ATTR", help="add or replace a candidate")
    add("--layout", choices=("bhsd", "bshd"), default="bhsd", help="memory order of q, k, v")
    add("--steady", nargs="?", const=",".join(STEADY_CASES), default="", help="cases for the steady state, or all")
    add("--seconds", type=float, default=2.0, help="steady state: seconds of launches of each candidate")
    add("--out", type=Path, default=RESULTS, help="a .json file, or the folder for one")
    add("--commit", help="what to record as the commit, where this is no git checkout")
    add("--list", action="store_true", help="print the units of the chosen groups and stop")
    add("--dry-run", action="store_true", help="tiny shapes on the CPU")
    add("--ncu", metavar="CASE", help="profile one case under Nsight Compute and stop")
    add("--ncu-candidate", default="flashmsa")
    add("--limits", nargs="?", const="", metavar="ROWS", help="what limits each kernel, by Nsight Compute, and stop")
    add("--limits-child", metavar="ROWS", help=argparse.SUPPRESS)
    add("--ncu-child", metavar="CASE", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def chosen_candidates(args: argparse.Namespace) -> list[str]:
    peers = [name for name in args.peers.split(",") if name]
    added = [candidates.register(spec) for spec in args.candidate]
    names = dict.fromkeys(["flashmsa", *peers, *(["flex"] if args.flex else []), *added])
    unknown = [name for name in names if name not in candidates.FACTORIES]
    if unknown:
        raise UsageError(f"--peers: {', '.join(unknown)} not among {', '.join(candidates.FACTORIES)}")
    return list(names)


def chosen_units(args: argparse.Namespace, names: list[str]) -> list[Unit]:
    groups = list(cases.GROUPS) if args.group == "all" else args.group.split(",")
    unknown = [group for group in groups if group not in cases.GROUPS]
    if unknown:
        raise UsageError(f"--group: {', '.join(unknown)} not among {', '.join(cases.GROUPS)}")
    shrink = DRY_SHRINK if args.dry_run else 1
    units = [unit for group in groups for unit in cases.GROUPS[group](names, shrink)]
    units = [u for u in units if (u.quick or not args.quick) and re.search(args.cases, u.name)]
    if not units:
        raise UsageError(f"--cases: nothing in {', '.join(groups)} matches {args.cases!r}")
    return units


def named_case(name: str) -> Case:
    try:
        return cases.find_case(name)
    except ValueError as error:
        raise UsageError(f"--ncu: {error}") from error


# One unit


def prepare(unit: Unit) -> tuple[dict[str, timing.Call], dict[str, str], dict[str, float]]:
    """Builds and calls every lane once. Returns the calls, why lanes are left out, and how far each result is from the
    first peer's on the same case (relative RMS)."""
    calls: dict[str, timing.Call] = {}
    skipped: dict[str, str] = {}
    outputs: dict[str, torch.Tensor] = {}
    for lane in unit.lanes:
        try:
            calls[lane.label], result = candidates.build(lane.candidate, lane.case)
        except candidates.Unavailable as error:
            skipped[lane.label] = str(error)
            continue
        if lane.checked and not lane.extra_flops and unit.group != "construction":
            outputs[lane.label] = candidates.canonical(lane.case, result)
    return calls, skipped, differences(unit, outputs)


def differences(unit: Unit, outputs: dict[str, torch.Tensor]) -> dict[str, float]:
    found = {}
    for lane in unit.lanes:
        same = [other for other in unit.lanes if other.case == lane.case and other.label in outputs]
        reference = next((other for other in same if not other.candidate.startswith("flashmsa")), None)
        if reference is None or lane.label not in outputs or lane.label == reference.label:
            continue
        expected = outputs[reference.label].float()
        error = (outputs[lane.label].float() - expected).norm() / expected.norm()
        found[lane.label] = float(error)
    return found


def run_unit(unit: Unit, device: Any, nvml: Any, args: argparse.Namespace) -> dict[str, Any]:
    calls, skipped, errors = prepare(unit)
    record: dict[str, Any] = {"group": unit.group, "name": unit.name, "lanes": {}, "skipped": skipped, "derived": {}}
    record["differences"] = errors
    lanes = {lane.label: lane for lane in unit.lanes if lane.label in calls}
    launches = args.launches or (2 if args.dry_run else 10 if args.quick else 30)
    if unit.group == "construction":
        record["lanes"] = measure_construction(lanes, calls, device, launches)
        return record
    if unit.group == "host":
        record["lanes"] = measure_host(lanes, device, launches)
        report.add_host_ratio(record)
        record["derived"]["sdpa_backend"] = candidates.sdpa_choice(unit.lanes[-1].case)
        return record
    times = (
        timing.replayed(device, calls, launches)
        if unit.group == "small" or unit.graph
        else timing.interleaved(device, calls, launches)
    )
    for label, lane in lanes.items():
        record["lanes"][label] = report.lane_figures(lane, times[label], device.sm_count)
    report.add_ratios(record)
    if unit.group == "documents":
        case = unit.lanes[0].case
        report.add_document_target(record, candidates.kernel_efficiency(case))
    if unit.group == "one-document":
        report.add_document_cost(record)
    if unit.group == "masks":
        report.add_mask_figures(record, unit.lanes[0].case.name, unit.whole)
        add_visited_share(record, unit.lanes[0])
    if unit.group == "dims":
        report.add_width_figures(record, unit.whole)
    if unit.group == "options":
        report.add_option_costs(record)
    if unit.group == "backward":
        report.add_backward_figures(record, unit.lanes[0].case.name, unit.whole)
    if unit.group == "decode":
        report.add_cache_figures(record, unit.lanes, unit.whole)
        cache_candidates.release()
    if is_steady(unit, args):
        add_steady(record, lanes, calls, device, nvml, args)
    return record


def add_visited_share(record: dict[str, Any], lane: Lane) -> None:
    record["derived"]["tile_efficiency"] = None
    if lane.label not in record["lanes"]:
        return
    try:
        record["derived"]["tile_efficiency"] = candidates.visited_share(lane.case)
    except (RuntimeError, ValueError) as error:  # the times are what counts
        record["skipped"]["tile count"] = str(error)


def measure_host(lanes: dict[str, Lane], device: Any, launches: int) -> dict[str, Any]:
    calls = {label: candidates.host_call(lane.candidate, lane.case) for label, lane in lanes.items()}
    chunks, chunk = (2, 5) if device.kind == "cpu" else (max(2, launches * 2 // 3), 100)
    times = timing.host_times(device, calls, chunks, chunk)
    return {
        label: {"candidate": lane.candidate, "case": lane.case.as_dict(), "us": timing.spread(times[label])}
        for label, lane in lanes.items()
    }


def measure_construction(
    lanes: dict[str, Lane], calls: dict[str, timing.Call], device: Any, launches: int
) -> dict[str, Any]:
    """Calls from Python on an idle device, host time included; replays of a graph behind other work, without it."""
    graphs = {label for label, lane in lanes.items() if lane.candidate.endswith("graph")}
    times = timing.alone(device, {label: call for label, call in calls.items() if label not in graphs}, launches)
    times |= timing.interleaved(device, {label: calls[label] for label in calls if label in graphs}, launches)
    return {
        label: {
            "candidate": lane.candidate,
            "case": lane.case.as_dict(),
            "us": timing.spread([ms * 1e3 for ms in times[label].ms]),
        }
        for label, lane in lanes.items()
    }


def add_steady(
    record: dict[str, Any],
    lanes: dict[str, Lane],
    calls: dict[str, timing.Call],
    device: Any,
    nvml: Any,
    args: argparse.Namespace,
) -> None:
    estimate = {label: record["lanes"][label]["ms"]["median"] for label in lanes}
    results = timing.steady(device, calls, estimate, nvml, args.seconds, min(0.5, args.seconds))
    for label, lane in lanes.items():
        record["lanes"][label]["steady"] = report.steady_figures(lane, results[label], device.sm_count)
    report.add_steady_ratios(record)


# A run


def measure_ceiling(device: Any, launches: int = 20) -> float:
    """TFLOP/s of a square bf16 matrix product, timed as the candidates are."""
    size = CEILING_SIZE[device.kind]
    generator = torch.Generator(device.kind).manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator, device=device.kind).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    times = timing.interleaved(device, {"matmul": lambda: torch.matmul(a, b, out=out)}, launches)
    return 2 * size**3 / (timing.spread(times["matmul"].ms)["median"] * 1e9)


def measure_copy(device: Any, launches: int = 10) -> float:
    """GB/s of a copy, bytes read and written: the ceiling of what is limited by the memory bus."""
    size = COPY_BYTES[device.kind]
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device.kind) for _ in range(2))
    times = timing.interleaved(device, {"copy": lambda: target.copy_(source)}, launches)
    return 2 * size / (timing.spread(times["copy"].ms)["median"] * 1e6)


def new_results(args: argparse.Namespace, argv: list[str], device: Any, nvml: Any) -> dict[str, Any]:
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    return {
        "schema": report.SCHEMA,
        "command": shlex.join(["python", "benchmarks/run.py", *argv]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "dry_run": args.dry_run,
        "settings": settings,
        "environment": environment(nvml, args.commit),
        "clocks": {"source": device.clock_source, "before": nvml.state() if nvml else None, "after": None},
        "ceiling": {
            "size": CEILING_SIZE[device.kind],
            "dtype": "bf16",
            "measured": [],
            "tflops": None,
            "note": "",
            "copy_gbs": None,
        },
        "units": [],
        "summary": {},
    }


def finish(data: dict[str, Any], nvml: Any, path: Path) -> None:
    """Brings the derived figures up to date and writes the file; called after each group, so that little is lost."""
    ceiling = data["ceiling"]
    measured = ceiling["measured"]
    ceiling["tflops"] = sum(measured) / len(measured) if measured else None
    ceiling["note"] = "mean of " + ", ".join(f"{value:.0f}" for value in measured)
    report.add_ceiling(data["units"], ceiling["tflops"])
    report.add_floors(data["units"], ceiling["copy_gbs"])
    data["summary"] = report.summarise(data["units"])
    data["clocks"]["after"] = nvml.state() if nvml else None
    report.write_json(data, path)


def result_path(out: Path, data: dict[str, Any]) -> Path:
    if out.suffix == ".json":
        return out
    gpu = re.sub(r"[^a-z0-9]+", "-", (data["environment"]["gpu"] or "cpu").lower()).strip("-")
    stamp = re.sub(r"[^0-9]", "", data["date"])[:14]
    return out / f"{gpu}-{stamp}.json"


def is_steady(unit: Unit, args: argparse.Namespace) -> bool:
    return unit.group in STEADY_GROUPS and (args.steady == "all" or unit.name in args.steady.split(","))


def check_steady(units: list[Unit], args: argparse.Namespace) -> None:
    wanted = {name for name in args.steady.split(",") if name} - {"all"}
    strange = wanted - {unit.name for unit in units if unit.group in STEADY_GROUPS}
    if strange:
        raise UsageError(f"--steady: {', '.join(sorted(strange))} not among the chosen units; see --list")


def measure(
    units: list[Unit], data: dict[str, Any], device: Any, nvml: Any, args: argparse.Namespace, path: Path
) -> None:
    started = time.monotonic()
    for group in dict.fromkeys(unit.group for unit in units):
        data["ceiling"]["measured"].append(measure_ceiling(device))
        if group == "masks":
            data["ceiling"]["copy_gbs"] = measure_copy(device)
        for unit in (unit for unit in units if unit.group == group):
            data["units"].append(run_unit(unit, device, nvml, args))
        finish(data, nvml, path)
        print(f"{group}: done after {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    candidates.release()
    data["ceiling"]["measured"].append(measure_ceiling(device))
    finish(data, nvml, path)


def lacks_ours(unit: dict[str, Any]) -> bool:
    if unit["group"] == "construction":
        return bool(unit["skipped"])
    return any("flashmsa" in label or label in ("one document", "plain") for label in unit["skipped"])


def complaints(data: dict[str, Any]) -> list[str]:
    """What makes a run a failure: ours left out, or a result that differs from a peer's."""
    absent = [unit["name"] for unit in data["units"] if lacks_ours(unit)]
    found = [f"FAILED: flashmsa did not run in {len(absent)} units, {absent[0]} the first"] if absent else []
    for unit in data["units"]:
        for label, error in unit["differences"].items():
            if not error <= WRONG:  # NaN too
                found.append(f"WRONG: {unit['group']} {unit['name']}: {label} differs by {error:.3g} (relative RMS)")
    return found


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    given = sys.argv[1:] if argv is None else argv
    candidates.settings.device = "cpu" if args.dry_run else "cuda"
    candidates.settings.layout = args.layout
    candidates.release()
    candidates.add_fa4_site()
    if args.ncu_child:
        chosen_candidates(args)
        return ncu.child(named_case(args.ncu_child), args.ncu_candidate)
    if args.limits_child is not None:
        return limits.child(args.limits_child)
    if args.limits is not None:
        return report_limits(args, given)
    names = chosen_candidates(args)
    if args.ncu:
        return ncu.profile(named_case(args.ncu), args.ncu_candidate, args.candidate, args.out)
    units = chosen_units(args, names)
    check_steady(units, args)
    if args.list:
        print("\n".join(f"{u.group:14}{u.name:38}{', '.join(lane.label for lane in u.lanes)}" for u in units))
        return 0
    if not args.dry_run and not torch.cuda.is_available():
        print("run.py: no CUDA device here; --dry-run runs everything on the CPU", file=sys.stderr)
        return 2
    return benchmark(units, args, given)


def report_limits(args: argparse.Namespace, argv: list[str]) -> int:
    """Writes and prints the table of limits."""
    try:
        found = limits.chosen(args.limits)
        kernels, absent = limits.profile(args.limits)
    except ValueError as error:
        raise UsageError(str(error)) from error
    except (FileNotFoundError, RuntimeError) as error:
        print(f"run.py --limits: {error}", file=sys.stderr)
        return 2
    device, nvml = CudaDevice(), open_nvml()
    data = new_results(args, argv, device, nvml)
    card = {"sm_count": device.sm_count, **(nvml.state() if nvml else {})}
    with torch.no_grad():
        steady = limits.sustained(found, device, nvml, args.seconds)
    data["limits"] = [limits.row_record(row, kernels[row.name], steady[row.name], card) for row in found]
    data["clocks"]["after"] = nvml.state() if nvml else None
    path = result_path(args.out, data)
    report.write_json(data, path)
    table = limits.markdown(data["limits"])
    path.with_suffix(".md").write_text(f"`{data['command']}`, commit {data['environment']['commit']}\n\n{table}\n")
    print("\n".join([*(f"not offered by this ncu: {name}" for name in absent), f"written: {path}", "", table]))
    return 0


def benchmark(units: list[Unit], args: argparse.Namespace, argv: list[str]) -> int:
    device = HostDevice() if args.dry_run else CudaDevice()
    nvml = None if args.dry_run else open_nvml()
    data = new_results(args, argv, device, nvml)
    path = result_path(args.out, data)
    threads = torch.get_num_threads()
    try:
        if args.dry_run:
            torch.set_num_threads(1)  # tiny shapes: more threads only wait for each other
        with torch.no_grad():
            measure(units, data, device, nvml, args, path)
    finally:
        torch.set_num_threads(threads)
    wrong = complaints(data)
    print("\n".join([*wrong, f"written: {path}", "", report.text(data)]))
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UsageError as error:
        sys.exit(f"run.py: {error}")
