"""What limits each kernel: the shares of the machine's limits that it reaches, as one table. `run.py --limits`.

Shares of pipes and memories come from Nsight Compute: one launch of each row, all in one process, the caches flushed
and the clocks left alone. Power, and the clock that it leaves, come from launches back to back in this process, outside
the profiler, whose pauses let the card cool.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks import candidates, ncu, report, timing
from benchmarks.cache_cases import CacheCase
from benchmarks.cases import BACKWARD, HEAD_DIMS, HIDDEN, OTHER_DIMS, Case
from benchmarks.device import TENSOR_FLOPS_PER_CYCLE

# Parts of the names of the kernels that do the work; what runs ahead of them and behind them is left out.
MAIN_KERNELS = "attention_forward_kernel|attention_backward_kernel|paged_attention_kernel|decode_kernel"
STARTED = "row: "  # the child's word ahead of each row that it launches

# Limit to metric: percent of what the unit can do in the time that the kernel takes.
# Shared memory is the pipe of 128 bytes a cycle, which wgmma's operands and all loads and stores take; what TMA writes
# does not take it. L2 is the busiest of its units.
PERCENT = ".avg.pct_of_peak_sustained_elapsed"
METRICS = {
    "tensor pipe": f"sm__pipe_tensor_cycles_active{PERCENT}",
    "exp unit": f"sm__inst_executed_pipe_xu{PERCENT}",
    "shared memory": f"l1tex__data_pipe_lsu_wavefronts{PERCENT}",
    "issue slots": f"smsp__issue_active{PERCENT}",
    "L2": f"lts__throughput{PERCENT}",
    "memory": f"dram__throughput{PERCENT}",
}
# Recorded beside them. Of a bank's peak, of two accesses a cycle, TMA's writes are twice what they are of 128 bytes.
OTHERS = [
    *(f"sm__inst_executed_pipe_{pipe}{PERCENT}" for pipe in ("fma", "alu")),
    *(f"l1tex__data_bank_{way}{PERCENT}" for way in ("reads", "writes")),
    f"lts__t_bytes{PERCENT}",
    ncu.INSTRUCTIONS,
]
POWER = "power"
AT_ITS_LIMIT = 0.97  # of the power limit: the card lowers its clock to stay there


@dataclass(frozen=True)
class Row:
    """A kernel and the case that it runs. work: floating-point operations over those of the forward pass."""

    candidate: str
    case: Case | CacheCase
    work: float = 1.0

    @property
    def name(self) -> str:
        return f"{self.candidate} {self.case.name}"

    @property
    def flops(self) -> float:
        return self.case.flops * self.work


def rows() -> list[Row]:
    """The forward kernels of every head dim, the backward ones, and caches: dense, in pages, of one kv head."""
    masks = ("dense", "causal")
    plain = [Case(4, HIDDEN // dim, 4096, dim, mask) for dim, mask in product(HEAD_DIMS, masks)]
    found = [Row("flashmsa", case) for case in plain]
    for (dim, dim_v), mask in product(OTHER_DIMS, masks):
        found.append(Row("flashmsa", Case(4, 16, 4096, dim, mask, head_dim_v=0 if dim_v == dim else dim_v)))
    found.sort(key=lambda row: (row.case.head_dim, row.case.value_dim))
    found += [Row("flashmsa-backward", case, BACKWARD) for case in plain]
    found += [Row("flashmsa-cache-dense", CacheCase(32, 32, 8, 8192, dim)) for dim in HEAD_DIMS]
    found.append(Row("flashmsa-cache-page16", CacheCase(32, 32, 8, 8192)))
    found.append(Row("flashmsa-cache-dense", CacheCase(16, 16, 1, 16384)))
    return found


def chosen(pattern: str) -> list[Row]:
    found = [row for row in rows() if re.search(pattern, row.name)]
    if not found:
        raise ValueError(f"--limits: nothing matches {pattern!r} among {', '.join(row.name for row in rows())}")
    return found


# The child: what ncu watches


def child(pattern: str) -> int:
    """Launches each row twice, and once more where the profiler looks."""
    runtime = torch.cuda.cudart()
    with torch.no_grad():
        for row in chosen(pattern):
            call, _ = candidates.build(row.candidate, row.case)
            call()
            torch.cuda.synchronize()
            print(f"{STARTED}{row.name}", flush=True)
            runtime.cudaProfilerStart()
            call()
            torch.cuda.synchronize()
            runtime.cudaProfilerStop()
    return 0


# The parent


def profile(pattern: str) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """What ncu counted of each row's main kernel, and the metrics that this ncu does not offer.

    Raises RuntimeError, with ncu's last words, where rows and kernels do not match.
    """
    program = ncu.find_program()
    metrics, absent = ncu.known_metrics(program, [ncu.TIME, ncu.CYCLES, *METRICS.values(), *OTHERS])
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        inner = ["--limits-child", pattern]
        command = [*ncu.options(program, metrics, log), "--kernel-name", f"regex:{MAIN_KERNELS}", *ncu.run_py(inner)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        kernels = ncu.parse(log.read_text() if log.exists() else "")
    started = [line.removeprefix(STARTED) for line in done.stdout.splitlines() if line.startswith(STARTED)]
    if done.returncode != 0 or not kernels or len(kernels) != len(started):
        last = "\n".join([*done.stdout.splitlines()[-10:], *done.stderr.splitlines()[-10:]])
        raise RuntimeError(
            f"ncu: {len(kernels)} main kernels of {len(started)} rows, exit code {done.returncode}\n{last}"
        )
    return dict(zip(started, kernels, strict=True)), absent


def sustained(found: Sequence[Row], device: Any, nvml: Any, seconds: float) -> dict[str, dict[str, float | None]]:
    """Watts and SM clock of each row's launches back to back. NOTE: of whole calls, kernels before and behind too."""
    figures = {}
    for row in found:
        call, _ = candidates.build(row.candidate, row.case)
        ms = timing.spread(timing.interleaved(device, {"": call}, 3, warmup=2)[""].ms)["median"]
        result = timing.steady(device, {"": call}, {"": ms}, nvml, seconds, seconds)[""]
        figures[row.name] = {
            "watts": report.mean(result.watts),
            "sm_mhz": report.mean(result.mhz),
            "ms": result.ms_per_launch(),
        }
    return figures


def row_record(row: Row, kernel: dict[str, Any], steady: dict[str, Any], limits: dict[str, Any]) -> dict[str, Any]:
    """The shares of one row, 1 for all of a limit.

    limits: sm_count, and the card's power_limit_w and sm_max_mhz, where they are known.
    """
    cycles = kernel.get(ncu.CYCLES)
    shares = {limit: kernel[metric] / 100 for limit, metric in METRICS.items() if metric in kernel}
    watts, most_watts = steady.get("watts"), limits.get("power_limit_w")
    if watts and most_watts:
        shares[POWER] = watts / most_watts
    mhz, most_mhz = steady.get("sm_mhz"), limits.get("sm_max_mhz")
    useful = row.flops / (limits["sm_count"] * TENSOR_FLOPS_PER_CYCLE * cycles) if cycles else None
    return {
        "candidate": row.candidate,
        "case": row.case.as_dict(),
        "kernel": kernel["name"],
        "ns": kernel.get(ncu.TIME),
        "cycles": cycles,
        "counters": {name: value for name, value in kernel.items() if name != "name"},
        "useful_tensor": useful,
        "shares": shares,
        "steady": steady,
        "clock": mhz / most_mhz if mhz and most_mhz else None,
        "limited_by": limited_by(shares),
    }


def limited_by(shares: dict[str, float]) -> list[str]:
    """The limits that the kernel comes nearest to, the nearest first: power where it is reached, since then the clock
    goes down whatever else there is, and then the pipes and memories within a tenth of the fullest."""
    pipes = {limit: share for limit, share in shares.items() if limit != POWER}
    most = max(pipes.values(), default=0.0)
    near = sorted((limit for limit in pipes if pipes[limit] >= most - 0.1), key=pipes.__getitem__, reverse=True)
    return [POWER, *near] if shares.get(POWER, 0.0) >= AT_ITS_LIMIT else near


def markdown(records: Sequence[dict[str, Any]]) -> str:
    """A table for NOTES.md: shares of each limit, in percent."""

    def percent(value: float | None) -> str:
        return "–" if value is None else f"{100 * value:.0f}"

    limits = [*METRICS, POWER]
    lines = [
        f"| kernel | {' | '.join(limits)} | useful tensor work | clock | nearest limits |",
        f"|---|{'---|' * (len(limits) + 3)}",
    ]
    for record in records:
        label = f"{record['candidate'].removeprefix('flashmsa').strip('-') or 'forward'} {record['case']['name']}"
        cells = [percent(record["shares"].get(limit)) for limit in limits]
        cells += [percent(record["useful_tensor"]), percent(record["clock"]), ", ".join(record["limited_by"])]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)
