"""One case under Nsight Compute: selected counters of its longest kernel and a short reading of them.

The parent starts ncu on run.py itself with --ncu-child; the child launches the candidate a few times, then once between
cudaProfilerStart and cudaProfilerStop. Clocks are left alone (--clock-control none).
"""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import candidates
from benchmarks.cases import Case
from benchmarks.device import TENSOR_FLOPS_PER_CYCLE

STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALL_REASONS = {
    "gmma": "wgmma to accept the next one",
    "long_scoreboard": "global or local memory",
    "short_scoreboard": "shared memory, exp2 or shuffle results",
    "barrier": "a CTA or named barrier",
    "wait": "fixed instruction latency",
    "math_pipe_throttle": "a busy arithmetic pipe",
    "mio_throttle": "the shared-memory instruction queue",
    "lg_throttle": "the global-memory instruction queue",
    "branch_resolving": "a branch target",
    "no_instruction": "an instruction fetch",
    "not_selected": "nothing: another warp was chosen",
    "membar": "a memory barrier",
    "sleeping": "its own nanosleep",
    "dispatch_stall": "the dispatcher",
    "selected": "nothing: it issued",
}

TIME = "gpu__time_duration.sum"
CYCLES = "sm__cycles_elapsed.max"
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
ISSUE = "smsp__issue_active.avg.pct_of_peak_sustained_active"
XU = "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active"
INSTRUCTIONS = "smsp__inst_executed.sum"
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
L2_HIT = "lts__t_sector_hit_rate.pct"
L2_BYTES = "lts__t_bytes.sum"
DRAM_READ = "dram__bytes_read.sum"
DRAM_WRITE = "dram__bytes_write.sum"
LOCAL_LOADS = "smsp__inst_executed_op_local_ld.sum"
LOCAL_STORES = "smsp__inst_executed_op_local_st.sum"
REGISTERS = "launch__registers_per_thread"
SHARED = "launch__shared_mem_per_block_dynamic"

METRICS = [
    TIME, CYCLES, TENSOR, ISSUE, XU, INSTRUCTIONS, CONFLICTS, WAVEFRONTS, L2_HIT, L2_BYTES, DRAM_READ, DRAM_WRITE,
    LOCAL_LOADS, LOCAL_STORES, REGISTERS, SHARED, *(STALL.format(reason) for reason in STALL_REASONS),
]  # fmt: skip


# The child: what ncu watches


def child(case: Case, candidate: str) -> int:
    with torch.no_grad():
        call = candidates.FACTORIES[candidate](case)
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        call()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()
    return 0


# The parent


def known_metrics(program: str, wanted: list[str]) -> tuple[list[str], list[str]]:
    """Splits the wanted metrics into those that this ncu offers on this GPU and those that it does not."""
    done = subprocess.run([program, "--query-metrics"], capture_output=True, text=True, check=False)
    offered = {line.split()[0] for line in done.stdout.splitlines() if line.strip()}
    if not any(name.startswith("sm__") for name in offered):
        return wanted, []  # the query says nothing: ask for all
    # NOTE: launch facts belong to another collection, which the query leaves out.
    present = [m for m in wanted if m.startswith("launch__") or m.split(".")[0] in offered]
    return present, [m for m in wanted if m not in present]


def find_program() -> str:
    """ncu's path. Raises FileNotFoundError where there is none."""
    program = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
    if not Path(program).exists():
        raise FileNotFoundError("Nsight Compute (ncu) is not on the PATH")
    return program


def options(program: str, metrics: list[str], log: Path) -> list[str]:
    """ncu on what runs between cudaProfilerStart and cudaProfilerStop, to a CSV file."""
    command = [program, "--clock-control", "none", "--profile-from-start", "off", "--target-processes", "all"]
    return [*command, "--csv", "--print-units", "base", "--metrics", ",".join(metrics), "--log-file", str(log)]


def run_py(arguments: list[str]) -> list[str]:
    return [sys.executable, str(Path(__file__).resolve().parent / "run.py"), *arguments]


def command(program: str, metrics: list[str], log: Path, case: Case, candidate: str, added: list[str]) -> list[str]:
    extra = [part for spec in added for part in ("--candidate", spec)]
    inner = ["--ncu-child", case.name, "--ncu-candidate", candidate, *extra]
    return [*options(program, metrics, log), *run_py(inner)]


def profile(case: Case, candidate: str, added: list[str], out: Path) -> int:
    """Profiles one launch of the candidate and prints the reading; the CSV goes to `out` where that is a folder."""
    try:
        program = find_program()
    except FileNotFoundError as error:
        print(f"run.py --ncu: {error}", file=sys.stderr)
        return 2
    metrics, absent = known_metrics(program, METRICS)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        done = subprocess.run(
            command(program, metrics, log, case, candidate, added), capture_output=True, text=True, check=False
        )
        content = log.read_text() if log.exists() else ""
    launches = parse(content)
    if not launches:
        print(f"run.py --ncu: ncu measured no kernel (exit code {done.returncode})", file=sys.stderr)
        print(
            "\n".join([*content.splitlines()[-15:], *done.stdout.splitlines()[-15:], *done.stderr.splitlines()[-15:]])
        )
        return 1
    if out.suffix != ".json":
        out.mkdir(parents=True, exist_ok=True)
        (out / f"ncu-{case.name}-{candidate}.csv").write_text(content)
    print(reading(case, candidate, launches))
    if absent:
        print(f"  not offered by this ncu: {', '.join(absent)}")
    return 0


def parse(content: str) -> list[dict[str, Any]]:
    """Kernels of ncu's CSV in order: {"name": …, metric: value, …}, values in base units."""
    lines = content.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    kernels: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(line for line in lines[start:] if line.startswith('"')))):
        kernel = kernels.setdefault(row["ID"], {"name": row["Kernel Name"]})
        try:
            kernel[row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
        except ValueError:
            continue  # "n/a"
    return list(kernels.values())


def reading(case: Case, candidate: str, launches: list[dict[str, Any]]) -> str:
    """The counters of the longest kernel in words. Times in ncu's base unit, nanoseconds."""
    main = max(launches, key=lambda kernel: kernel.get(TIME, 0.0))
    lines = [f"{case.name}, {candidate}: {short(main['name'])}"]
    for kernel in launches:
        if kernel is not main:
            lines.append(f"  beside it: {short(kernel['name'])}, {kernel.get(TIME, 0.0) / 1e3:.1f} us")
    lines += [*_work(case, main), *_stalls(main), *_shared(main), *_memory(main), *_registers(main)]
    return "\n".join(lines)


def short(name: str) -> str:
    return name if len(name) <= 100 else name[:97] + "..."


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} %"


def _work(case: Case, kernel: dict[str, Any]) -> list[str]:
    nanoseconds = kernel.get(TIME)
    if not nanoseconds:
        return ["  no time measured"]
    lines = [f"  time {nanoseconds / 1e3:.1f} us, {case.flops / nanoseconds / 1e3:.0f} TFLOP/s under the profiler"]
    cycles = kernel.get(CYCLES)
    if cycles and torch.cuda.is_available():
        sms = torch.cuda.get_device_properties().multi_processor_count
        useful = case.flops / (sms * TENSOR_FLOPS_PER_CYCLE * cycles)
        lines.append(
            f"  useful tensor work {100 * useful:.1f} % of the SM cycles; clock {1e3 * cycles / nanoseconds:.0f} MHz"
        )
    lines.append(f"  tensor pipe active {_percent(kernel.get(TENSOR))} of the time")
    lines.append(
        f"  issue slots used {_percent(kernel.get(ISSUE))}, exp2 and conversions (XU) {_percent(kernel.get(XU))}, "
        f"{kernel.get(INSTRUCTIONS, 0.0) / 1e6:.1f} M warp instructions"
    )
    return lines


def _stalls(kernel: dict[str, Any]) -> list[str]:
    found = {reason: kernel.get(STALL.format(reason)) for reason in STALL_REASONS}
    known = {reason: value for reason, value in found.items() if value is not None}
    total = sum(known.values())
    if not total:
        return ["  stall reasons: not measured"]
    top = sorted(known, key=known.__getitem__, reverse=True)[:5]
    return [f"  warps wait for {STALL_REASONS[r]} ({r}): {100 * known[r] / total:.0f} % of warp cycles" for r in top]


def _shared(kernel: dict[str, Any]) -> list[str]:
    conflicts, wavefronts = kernel.get(CONFLICTS), kernel.get(WAVEFRONTS)
    if conflicts is None or not wavefronts:
        return ["  shared memory: not measured"]
    share = conflicts / wavefronts
    verdict = "look at the swizzle" if share > 0.05 else "no bank conflicts to speak of"
    return [f"  shared memory: {wavefronts / 1e6:.2f} M wavefronts, {100 * share:.1f} % of them conflicts: {verdict}"]


def _memory(kernel: dict[str, Any]) -> list[str]:
    nanoseconds = kernel.get(TIME) or 1.0
    lines = [f"  L2: hit rate {_percent(kernel.get(L2_HIT))}, {kernel.get(L2_BYTES, 0.0) / nanoseconds:.0f} GB/s"]
    moved = kernel.get(DRAM_READ, 0.0) + kernel.get(DRAM_WRITE, 0.0)
    lines.append(f"  device memory: {moved / 1e6:.1f} MB moved, {moved / nanoseconds:.0f} GB/s")
    return lines


def _registers(kernel: dict[str, Any]) -> list[str]:
    local = kernel.get(LOCAL_LOADS, 0.0) + kernel.get(LOCAL_STORES, 0.0)
    lines = [
        f"  {kernel.get(REGISTERS, 0.0):.0f} registers a thread at launch, shared memory "
        f"{kernel.get(SHARED, 0.0) / 1024:.0f} KB"
    ]
    if local:
        lines.append(f"  local memory is used: {local:.0f} warp instructions; look for spills")
    return lines
