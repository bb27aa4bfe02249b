#!/usr/bin/env python3
"""Every compiled kernel on small shapes under compute-sanitizer, on a Hopper GPU.

    python tests/sanitize.py --tool memcheck                        all calls; so racecheck, synccheck, initcheck
    python tests/sanitize.py --tool racecheck --part forward --shard 1/4
    python tests/sanitize.py --limit 60 --ran done.txt --skip done.txt    what earlier runs of this line left
    python tests/sanitize.py --names                                which kernels of the extension the calls launch
    python tests/sanitize.py --list

The calls are those of kernel_calls.py. They are dealt out to `--jobs` processes side by side, each under a sanitizer of
its own. Exit code 1: the sanitizer found something, or a call failed or did not run. `--limit` is for a machine at hand
for minutes: calls that found no time make it 3.

memcheck runs without torch's caching allocator, so that a tensor's end is where its memory ends.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import kernel_calls  # noqa: E402
from kernel_calls import PARTS, Call  # noqa: E402

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
RAN, FAILED = "ran: ", "failed: "
GRACE = 8.0  # seconds for the calls in flight at the limit
OURS = "flashmsa"  # part of every kernel's name
# First lines of what is no finding.
HARMLESS = ("COMPUTE-SANITIZER", r"\w* ?SUMMARY:", "Target application returned", "LEAK SUMMARY")
# Findings that are none, by what their text holds, each with its reason.
KNOWN = {
    r"(?s)(?=.*Producer<.*::run\(\))(?=.*Consumer<.*::key_block\(\))": (
        "a key block's place: all lanes read it, the warp meets (__syncwarp), and lane 0 alone arrives where the "
        "producer waits before it writes; racecheck follows the lane that arrives, and not those that it met"
    ),
    (
        r"(?s)(?=.*(cp_async_bulk|DqWarpgroup<.*::load_step\())"
        r"(?=.*(Pairs<.*::(statistic|hide|weigh)\(|DqWarpgroup<.*::run\())"
    ): (
        "a step's numbers in the backward pass: all lanes read them, the warp meets at a wgmma wait a step later or "
        "at __syncwarp, and lane 0 alone arrives; where all lanes arrive racecheck is silent, and registers spill"
    ),
}

# Calls by how their kernels' warps wait for wgmma. PTX asks the four of a warpgroup for one and the same
# wgmma.wait_group, and synccheck ends a kernel where they wait at several. With a soft cap they do:
# sm90::wgmma_wait_in_branch says why. So these calls have processes of their own, without that check.
WAITS = {"at one place": r"^(?!fwd_\w*_softcap_d\d)", "in branches": r"^fwd_\w*_softcap_d\d"}


def shard(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r}: must be K/N with 1 <= K <= N, as 2/3")
    return int(found[1]), int(found[2])


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tool", choices=TOOLS, default="memcheck")
    add("--part", default=",".join(PARTS), help=f"comma-separated, of {', '.join(PARTS)}; they run in this order")
    add("--calls", default="", help="regular expression that a call's name must contain")
    add("--skip", type=Path, metavar="FILE", help="leave out the calls whose names are lines of this file")
    add("--ran", type=Path, metavar="FILE", help="add the names of the calls that ran to this file")
    add("--shard", type=shard, default=(1, 1), metavar="K/N", help="the K-th of N parts of the calls")
    add("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="processes beside each other")
    add("--limit", type=float, default=float("inf"), metavar="SECONDS", help="no call starts later than that")
    add("--logs", type=Path, metavar="FOLDER", help="keep there what the processes print")
    add("--names", action="store_true", help="compare the kernels that the calls launch with those of the extension")
    add("--list", action="store_true", help="print the calls and stop")
    add("--child", action="store_true", help=argparse.SUPPRESS)
    add("--waits", choices=WAITS, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def chosen_calls(args: argparse.Namespace) -> list[Call]:
    """Of a shard every N-th call, so that all shards have some of every kind."""
    parts = args.part.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        raise SystemExit(f"--part: {', '.join(unknown)} not among {', '.join(PARTS)}")
    calls = [c for c in kernel_calls.all_calls() if c.part in parts and re.search(args.calls, c.name)]
    if args.skip is not None and args.skip.exists():
        done = set(args.skip.read_text(encoding="utf-8").splitlines())
        calls = [c for c in calls if c.name not in done]
    calls.sort(key=lambda call: parts.index(call.part))
    if args.waits:
        calls = [c for c in calls if re.search(WAITS[args.waits], c.kernel)]
    index, count = args.shard
    return calls[index - 1 :: count]


# ---------------------------------------------------------------------------------------------------------------------
# The child


def run_calls(calls: list[Call], device: str, deadline: float) -> int:
    """Runs the calls and says of each that it ran; a call that fails does not hold up the others."""
    failures = 0
    for call in calls:
        if time.time() > deadline:
            break
        call.seed()
        began = time.time()
        try:
            call.run(device)
            if device == "cuda":
                torch.cuda.synchronize()
        except (RuntimeError, TypeError, ValueError) as error:
            failures += 1
            print(f"{FAILED}{call.name}: {str(error).splitlines()[0]}", flush=True)
        else:
            print(f"{RAN}{call.name}\t{time.time() - began:.2f}", flush=True)
    return 1 if failures else 0


# ---------------------------------------------------------------------------------------------------------------------
# The sanitizer's processes


@dataclass
class Findings:
    """What the processes said."""

    ran: dict[str, float] = field(default_factory=dict)  # call to seconds
    failed: list[str] = field(default_factory=list)
    reports: Counter[str] = field(default_factory=Counter)  # what the sanitizer found, and where
    known: Counter[str] = field(default_factory=Counter)  # the reasons of what is none of it
    noise: list[str] = field(default_factory=list)  # the last lines of a process that ended without a summary

    def read(self, output: str, stopped: bool = False) -> None:
        """Takes in what a process printed. stopped: it was, so that there is no summary."""
        lines = output.splitlines()
        for line in (line for line in lines if line.startswith(RAN)):
            name, _, seconds = line.removeprefix(RAN).partition("\t")
            self.ran[name] = float(seconds)
        self.failed += [line.removeprefix(FAILED) for line in lines if line.startswith(FAILED)]
        said = [line.removeprefix("=========") for line in lines if line.startswith("=========")]
        for text in reports(said):
            reason = next((reason for pattern, reason in KNOWN.items() if re.search(pattern, text)), None)
            if reason is None:
                self.reports[text] += 1
            else:
                self.known[reason] += 1
        if not stopped and not any("SUMMARY" in line for line in said):
            self.noise += lines[-6:]

    @property
    def clean(self) -> bool:
        return not (self.failed or self.reports or self.noise)


def reports(said: list[str]) -> Iterator[str]:
    """The findings among a sanitizer's lines: whatever is not indented and not known to be harmless begins one, and the
    lines "at" and "and" below say where."""
    texts: list[list[str]] = []
    for line in said:
        if re.match(r" \S", line):
            texts.append([line.strip()])
        elif texts and re.match(r"\s+(at|and) ", line):
            texts[-1].append(line.strip())
    return (" | ".join(text) for text in texts if not re.match("|".join(HARMLESS), text[0]))


def sanitizer_command(program: str, tool: str, waits: str | None = None) -> list[str]:
    """Only our kernels are looked at, and not torch's own, which fill the tensors."""
    command = [program, "--tool", tool, "--kernel-name", f"kns={OURS}", "--error-exitcode", "9"]
    if tool == "synccheck" and waits == "in branches":
        command += ["--check-warpgroup-mma", "no"]
    return command


def child_command(args: argparse.Namespace, job: int, deadline: float, waits: str | None = None) -> list[str]:
    index, count = args.shard
    part = f"{index + count * job}/{count * args.jobs}"  # every jobs-th call of this shard
    options = ["--part", args.part, "--calls", args.calls, "--shard", part, "--limit", repr(deadline)]
    if args.skip is not None:
        options += ["--skip", str(args.skip)]
    if waits is not None:
        options += ["--waits", waits]
    return [sys.executable, str(Path(__file__).resolve()), "--child", *options]


def sanitize(args: argparse.Namespace, program: str) -> int:
    calls = chosen_calls(args)
    args.jobs = max(1, min(args.jobs, len(calls)))
    deadline = time.time() + args.limit
    findings, started = Findings(), time.time()
    with tempfile.TemporaryDirectory() as unkept:
        folder = args.logs or Path(unkept)
        folder.mkdir(parents=True, exist_ok=True)
        for waits in WAITS if args.tool == "synccheck" else (None,):
            run_jobs(args, program, waits, deadline, folder, findings)
    status = report(args, calls, findings, time.time() - started)
    if args.ran is not None:
        # NOTE: behind the last process, since one file may be for both.
        with open(args.ran, "a", encoding="utf-8") as file:
            file.writelines(f"{name}\n" for name in findings.ran)
    return status


def run_jobs(
    args: argparse.Namespace, program: str, waits: str | None, deadline: float, folder: Path, findings: Findings
) -> None:
    """`--jobs` processes side by side, and what they find. waits: only calls of that kind."""
    environment = dict(os.environ)
    if args.tool == "memcheck":
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    jobs = []
    for job in range(args.jobs):
        name = "-".join([args.tool, *filter(None, [waits and waits.replace(" ", "-")]), str(job)])
        log = open(folder / f"{name}.txt", "w+")  # noqa: SIM115
        command = [*sanitizer_command(program, args.tool, waits), *child_command(args, job, deadline, waits)]
        options = {"stdout": log, "stderr": subprocess.STDOUT, "env": environment, "start_new_session": True}
        jobs.append((log, subprocess.Popen(command, **options)))
    for log, process in jobs:
        stopped = not ends(process, deadline + GRACE)
        log.seek(0)
        findings.read(log.read(), stopped)
        log.close()


def ends(process: subprocess.Popen, deadline: float) -> bool:
    """Whether the process ends by itself. Later it is stopped, with what it started."""
    try:
        process.wait(None if deadline == float("inf") else max(0.0, deadline - time.time()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return False
    return True


def report(args: argparse.Namespace, calls: list[Call], findings: Findings, seconds: float) -> int:
    """Prints what was found. 0: nothing, and every call ran; 1: something; 3: time ran out."""
    kernels = {call.kernel for call in calls if call.name in findings.ran and call.kernel}
    counts = f"{len(findings.ran)} of {len(calls)} calls ran, {len(kernels)} kernels of the tables"
    print(f"{args.tool}: {counts}, {seconds:.0f} s")
    for line, count in findings.reports.most_common():
        print(f"  {count} x {line}")
    for reason, count in findings.known.items():
        print(f"  {count} known: {reason}")
    for line in [*findings.failed, *findings.noise]:
        print(f"  {line}")
    if slow := sorted(findings.ran.items(), key=lambda item: -item[1])[:3]:
        print(f"  slowest: {', '.join(f'{name} {taken:.1f} s' for name, taken in slow)}")
    left = [call.name for call in calls if call.name not in findings.ran]
    if left:
        print(f"  not run: {len(left)}, {left[0]} the first")
    if not findings.clean or (left and seconds < args.limit):
        return 1
    return 3 if left else 0


# ---------------------------------------------------------------------------------------------------------------------
# Names


def compiled_kernels(cuobjdump: str) -> set[str]:
    """Names of the extension's device functions as a C++ programmer writes them."""
    library = kernel_calls.flashmsa._C.__file__
    done = subprocess.run([cuobjdump, "-res-usage", library], capture_output=True, text=True, check=True)
    mangled = sorted(set(re.findall(r"Function (\S+):", done.stdout)))
    shown = subprocess.run(["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True)
    return {plain(name) for name in shown.stdout.splitlines()}


def plain(name: str) -> str:
    """A kernel's name without its arguments, its return type and blanks, in which those who print it differ."""
    name = name.replace("(anonymous namespace)", "{anonymous}").removeprefix("void ")
    name = re.sub(r"\s*([<>,*&])\s*", r"\1", name)
    depth = 0
    for at, letter in enumerate(name):
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if letter == "(" and depth == 0:
            return name[:at]
    return name


def launched_kernels(calls: list[Call]) -> set[str]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run_calls(calls, "cuda", float("inf"))
    return {plain(event.name) for event in profiler.events() if OURS in event.name}


def compare_names(calls: list[Call]) -> int:
    cuobjdump = shutil.which("cuobjdump") or "/usr/local/cuda/bin/cuobjdump"
    compiled, launched = compiled_kernels(cuobjdump), launched_kernels(calls)
    missing = sorted(compiled - launched)
    print(f"{len(calls)} calls launch {len(launched & compiled)} of {len(compiled)} kernels")
    print("\n".join(f"  never launched: {name}" for name in missing))
    return 1 if missing else 0


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    calls = chosen_calls(args)
    if args.list:
        print("\n".join(f"{call.part:10}{call.name}" for call in calls))
        return 0
    if not torch.cuda.is_available():
        print("sanitize.py: needs a GPU of compute capability 9.0", file=sys.stderr)
        return 2
    if args.child:
        return run_calls(calls, "cuda", args.limit)
    if args.names:
        return compare_names(calls)
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(program).exists():
        print("sanitize.py: compute-sanitizer is not on the PATH", file=sys.stderr)
        return 2
    return sanitize(args, program)


if __name__ == "__main__":
    sys.exit(main())
