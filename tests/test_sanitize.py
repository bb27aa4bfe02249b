"""The calls that run under compute-sanitizer: that they reach every kernel, and that a finding is not overlooked."""

from __future__ import annotations

import re
import subprocess
import sys
import time

import kernel_calls
import pytest
import sanitize
from kernel_calls import Call

import flashmsa

CALLS = kernel_calls.all_calls()
TABLES = [
    *flashmsa._C.kernels(),
    *flashmsa._C.backward_kernels(),
    *flashmsa._C.paged_kernels(),
]

needs_kernels = pytest.mark.skipif(not TABLES, reason="this build has no kernels")


@needs_kernels
def test_every_kernel_of_the_tables_has_a_call() -> None:
    assert {row["name"] for row in TABLES} == {call.kernel for call in CALLS if call.kernel}


@needs_kernels
def test_each_call_runs_the_kernel_that_it_is_there_for() -> None:
    for call in CALLS:
        call.seed()
        assert call.explained() == call.kernel, call.name


@pytest.mark.parametrize("call", [c for c in CALLS if c.part == "prepare"], ids=lambda call: call.name)
def test_calls_of_preparation_run_on_the_cpu(call: Call) -> None:
    """A call whose arguments no backend takes would fail on the GPU alone."""
    call.seed()
    call.run("cpu")


def test_tiles_come_round_on_every_sm() -> None:
    """A CTA that has two tiles meets its own barriers and buffers again. 132 SMs."""
    for row in flashmsa._C.kernels():
        tiles = kernel_calls.many_heads(row["block_q"])["heads"] * -(-kernel_calls.LENGTH // row["block_q"])
        assert 132 < tiles < 2 * 132, row["name"]


def test_shards_share_out_the_calls() -> None:
    every = sanitize.chosen_calls(sanitize.parse([]))
    parts = [sanitize.chosen_calls(sanitize.parse(["--shard", f"{k}/3"])) for k in (1, 2, 3)]
    assert sorted(c.name for part in parts for c in part) == sorted(c.name for c in every)
    with pytest.raises(SystemExit):
        sanitize.parse(["--shard", "4/3"])
    with pytest.raises(SystemExit, match="sideways not among"):
        sanitize.chosen_calls(sanitize.parse(["--part", "sideways"]))


def test_jobs_share_out_a_shard() -> None:
    args = sanitize.parse(["--shard", "2/3", "--jobs", "2"])
    jobs = []
    for job in range(args.jobs):
        command = sanitize.child_command(args, job, float("inf"))
        jobs.append(sanitize.parse(command[2:]))
    assert all(job.child for job in jobs)
    names = sorted(call.name for job in jobs for call in sanitize.chosen_calls(job))
    assert names == sorted(call.name for call in sanitize.chosen_calls(args))


def test_parts_run_in_the_order_given() -> None:
    parts = [call.part for call in sanitize.chosen_calls(sanitize.parse(["--part", "prepare,forward"]))]
    assert parts == sorted(parts, reverse=True) and parts[0] == "prepare"


def test_calls_that_ran_are_left_out(tmp_path) -> None:
    file = tmp_path / "done.txt"
    options = ["--part", "prepare", "--skip", str(file)]
    every = [call.name for call in sanitize.chosen_calls(sanitize.parse(options))]  # no file yet
    file.write_text(f"{every[0]}\n{every[3]}\nanother call\n")
    left = [name for name in every if name not in (every[0], every[3])]
    args = sanitize.parse([*options, "--jobs", "2"])
    assert [call.name for call in sanitize.chosen_calls(args)] == left
    jobs = [sanitize.parse(sanitize.child_command(args, job, float("inf"))[2:]) for job in range(2)]
    assert sorted(call.name for job in jobs for call in sanitize.chosen_calls(job)) == sorted(left)


# ---------------------------------------------------------------------------------------------------------------------
# What the sanitizer says

CLEAN = """========= COMPUTE-SANITIZER
ran: first\t0.5
ran: second\t0.25
========= ERROR SUMMARY: 0 errors
"""
INVALID = """========= COMPUTE-SANITIZER
ran: first\t0.5
========= Invalid __global__ read of size 4 bytes
=========     at void flashmsa::append_kernel<__half>(Params)+0x1a0
=========     by thread (0,0,0) in block (0,0,0)
========= ERROR SUMMARY: 1 error
"""
HAZARD = """========= Error: Race reported between Write access at flashmsa::fwd::kernel()+0x10
=========     and Read access at flashmsa::fwd::kernel()+0x20 [16 hazards]
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
WARPGROUP = """========= Warpgroup MMA sequence error detected. Mismatching warpgroup instruction pc between warps.
=========     at void flashmsa::sm90::wgmma_wait_in_branch<(bool)1>()+0x59b0 in wgmma.cuh:72
=========     by thread (384,0,0) in block (44,0,0)
=========         Device Frame: void flashmsa::fwd::kernel()
=========
========= Target application returned an error
========= ERROR SUMMARY: 2 errors
"""
CUT_SHORT = "========= COMPUTE-SANITIZER\nran: first\t0.5\nSegmentation fault\n"


def findings_of(*outputs: str) -> sanitize.Findings:
    findings = sanitize.Findings()
    for output in outputs:
        findings.read(output)
    return findings


def test_clean_output_is_clean() -> None:
    racecheck = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
    findings = findings_of(CLEAN, racecheck)
    assert findings.clean and findings.ran == {"first": 0.5, "second": 0.25}


@pytest.mark.parametrize("output", [INVALID, HAZARD, WARPGROUP, CUT_SHORT, "failed: x: why\n" + CLEAN])
def test_a_finding_is_never_clean(output: str) -> None:
    assert not findings_of(CLEAN, output).clean


def test_a_process_that_was_stopped_tells_what_it_had_found() -> None:
    for output, clean in ((CUT_SHORT, True), (INVALID, False)):
        findings = sanitize.Findings()
        findings.read(output.split("========= ERROR SUMMARY")[0], stopped=True)
        assert findings.clean == clean and findings.ran == {"first": 0.5}


def test_processes_are_stopped_behind_the_limit() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    process = subprocess.Popen(command, start_new_session=True)
    assert not sanitize.ends(process, time.time() + 0.1) and process.returncode < 0
    assert sanitize.ends(subprocess.Popen([sys.executable, "-c", ""]), float("inf"))


def test_findings_are_told_once_with_their_place() -> None:
    ((line, count),) = findings_of(INVALID, INVALID).reports.items()
    assert count == 2 and line.startswith("Invalid __global__ read") and "append_kernel<__half>" in line
    ((line, count),) = findings_of(HAZARD).reports.items()
    assert line.startswith("Error: Race reported") and "and Read access at flashmsa::fwd::kernel()+0x20" in line


@pytest.mark.parametrize("first, second", [("Write", "Read"), ("Read", "Write")])
def test_a_known_report_is_counted_and_others_are_not_taken_for_it(first: str, second: str) -> None:
    places = {
        "Write": "flashmsa::fwd::Producer<flashmsa::mask::BlockSparse>::run()+0x18660 in producer.cuh:263",
        "Read": "flashmsa::fwd::Consumer<flashmsa::mask::BlockSparse>::key_block() const+0xbf0 in consumer.cuh:274",
    }
    report = HAZARD.replace("Write access at flashmsa::fwd::kernel()+0x10", f"{first} access at {places[first]}")
    report = report.replace("Read access at flashmsa::fwd::kernel()+0x20", f"{second} access at {places[second]}")
    findings = findings_of(report)
    assert findings.clean and sum(findings.known.values()) == 1
    assert not findings_of(report.replace("key_block()", "store()")).clean
    assert not findings_of(report, INVALID).clean


@pytest.mark.parametrize(
    "write, read",
    [
        (
            "void cuda::ptx::cp_async_bulk<void>(space_cluster)+0xd3a0",
            "Pairs<Config<A>>::statistic(unsigned int) const",
        ),
        ("flashmsa::bwd::DqWarpgroup<A, true>::load_step(const Step &)", "DqWarpgroup<A, true>::run()"),
    ],
)
def test_a_step_of_the_backward_pass_is_known(write: str, read: str) -> None:
    report = HAZARD.replace("flashmsa::fwd::kernel()+0x10", write)
    report = report.replace("flashmsa::fwd::kernel()+0x20", f"flashmsa::bwd::{read}")
    findings = findings_of(report)
    assert findings.clean and sum(findings.known.values()) == 1
    for other in ("store()", "send_some()"):
        assert not findings_of(report.replace(read, other)).clean


def test_synccheck_leaves_a_check_out_where_warps_wait_in_branches() -> None:
    left_out = ["--check-warpgroup-mma", "no"]
    assert sanitize.sanitizer_command("s", "synccheck", "in branches")[-2:] == left_out
    for tool, waits in (("synccheck", "at one place"), ("memcheck", None), ("racecheck", None)):
        assert left_out[0] not in sanitize.sanitizer_command("s", tool, waits)


@needs_kernels
def test_every_call_waits_in_one_of_the_ways() -> None:
    parts = [sanitize.chosen_calls(sanitize.parse(["--waits", waits])) for waits in sanitize.WAITS]
    assert sorted(c.name for part in parts for c in part) == sorted(c.name for c in CALLS)
    assert {c.kernel for c in parts[1]} == {
        row["name"] for row in TABLES if row["name"].startswith("fwd") and row["softcap"] and not row["alibi"]
    }
    command = sanitize.child_command(sanitize.parse([]), 0, float("inf"), "in branches")
    assert sanitize.parse(command[2:]).waits == "in branches"


@pytest.fixture
def two_calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    calls = [Call("prepare", name, "", lambda device: None) for name in ("first", "second")]
    monkeypatch.setattr(kernel_calls, "all_calls", lambda: calls)
    return calls


@pytest.mark.parametrize(
    "output, limit, seconds, code",
    [
        (CLEAN, float("inf"), 1.0, 0),
        (INVALID, float("inf"), 1.0, 1),
        (CLEAN.replace("ran: second\t0.25\n", ""), float("inf"), 1.0, 1),  # a call is missing, and time was left
        (CLEAN.replace("ran: second\t0.25\n", ""), 20.0, 21.0, 3),
    ],
)
def test_exit_codes(two_calls: list[Call], capsys, output: str, limit: float, seconds: float, code: int) -> None:
    args = sanitize.parse(["--limit", str(limit)])
    assert sanitize.report(args, two_calls, findings_of(output), seconds) == code
    assert "of 2 calls ran" in capsys.readouterr().out


def test_a_call_that_fails_does_not_hold_up_the_next(capsys) -> None:
    def fail(device: str) -> None:
        raise ValueError("q: no\nmore")

    calls = [Call("prepare", "a", "", fail), Call("prepare", "b", "", lambda device: None)]
    assert sanitize.run_calls(calls, "cpu", float("inf")) == 1
    assert re.fullmatch(r"failed: a: q: no\nran: b\t\d+\.\d\d\n", capsys.readouterr().out)
    assert sanitize.run_calls(calls[1:], "cpu", 0.0) == 0  # no time: nothing is said
    assert capsys.readouterr().out == ""


def test_names_agree_whoever_prints_them() -> None:
    by_filt = "void flashmsa::hash::(anonymous namespace)::sort_kernel<(int)2, A<B> >(flashmsa::hash::Params)"
    by_profiler = "void flashmsa::hash::(anonymous namespace)::sort_kernel<(int)2, A<B>>(flashmsa::hash::Params)"
    assert sanitize.plain(by_filt) == sanitize.plain(by_profiler) != sanitize.plain(by_filt.replace("A<B>", "A<C>"))
