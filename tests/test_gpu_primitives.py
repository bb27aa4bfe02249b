"""The device code's primitives, each by itself, against their definitions: tests/gpu/*.cu.

The programs know no torch. They are compiled and run once; every GPU_TEST in them is one test here.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import pytest

T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 120  # of a program that takes seconds: a wrong barrier hangs for ever

PROGRAMS = sorted((ROOT / "tests" / "gpu").glob("*.cu"))
PRIMITIVES = [
    (path.stem, name) for path in PROGRAMS for name in re.findall(r"^GPU_TEST\((\w+)\)", path.read_text(), re.MULTILINE)
]


def load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


TOOLKIT = load("flashmsa_setup", ROOT / "setup.py").find_toolkit()
needs_nvcc = pytest.mark.skipif(isinstance(TOOLKIT, str), reason=f"needs nvcc of CUDA 12.8 to 13.x: {TOOLKIT}")


@dataclass
class Build:
    """One program: what nvcc said and returned."""

    program: Path
    returncode: int
    log: str


@dataclass
class Run:
    """What a program said: one line for each test, and how it ended."""

    lines: dict[str, str]  # by test name: "ok" or what failed
    end: str


def compile_program(source: Path, folder: Path) -> Build:
    sources = [source]
    if "sm90/tensor_map.h" in source.read_text():
        sources.append(ROOT / "csrc" / "sm90" / "tensor_map.cpp")
    program = folder / source.stem
    command = [TOOLKIT.home / "bin" / "nvcc", "-std=c++20", "-O3", "-gencode=arch=compute_90a,code=sm_90a"]
    command += ["-Xptxas=-v,-warn-spills", "-cudart=static", f"-I{ROOT / 'csrc'}", *sources, "-o", program]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return Build(program, result.returncode, result.stdout)


def run_program(build: Build) -> Run:
    if build.returncode != 0:
        return Run({}, f"it does not compile:\n{build.log}")
    try:
        result = subprocess.run(
            [build.program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S
        )
        output, end = result.stdout, f"returned {result.returncode}"
    except subprocess.TimeoutExpired as expired:
        # NOTE: bytes here, whatever `text` says.
        output, end = (expired.stdout or b"").decode(), f"was stopped after {TIMEOUT_S} s"
    lines = {}
    for line in output.splitlines():
        if match := re.match(r"ok (\w+)$|FAILED (\w+): (.*)", line):
            lines[match[1] or match[2]] = match[3] or "ok"
    last = output.splitlines()[-1] if output.strip() else "nothing"
    return Run(lines, f"the program {end}; its last line: {last}")


def once(folder: Path, name: str, make: Callable[[], T]) -> T:
    """make(), by the first of pytest-xdist's workers that asks; the others wait for it and read what it returned."""
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = folder / f"{name}.pickle"
        if not made.exists():
            made.write_bytes(pickle.dumps(make()))
        return pickle.loads(made.read_bytes())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all workers."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "primitives"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def builds(folder: Path) -> dict[str, Build]:
    def compile_all() -> dict[str, Build]:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            made = pool.map(lambda path: compile_program(path, folder), PROGRAMS)
            return {path.stem: build for path, build in zip(PROGRAMS, made, strict=True)}

    return once(folder, "builds", compile_all)


@pytest.fixture(scope="module")
def runs(folder: Path, builds: dict[str, Build]) -> dict[str, Run]:
    def run_all() -> dict[str, Run]:
        with ThreadPoolExecutor(len(builds)) as pool:
            return dict(zip(builds, pool.map(run_program, builds.values()), strict=True))

    return once(folder, "runs", run_all)


def test_every_program_has_tests_of_its_own_names() -> None:
    assert {program for program, _ in PRIMITIVES} == {path.stem for path in PROGRAMS} != set()
    names = [name for _, name in PRIMITIVES]
    assert sorted(set(names)) == sorted(names)


@needs_nvcc
@pytest.mark.parametrize("program", [path.stem for path in PROGRAMS])
def test_compiles_for_sm_90a(builds: dict[str, Build], program: str) -> None:
    """Without spills, and without a word of ptxas on wgmma (C75xx): then what is tested is what the kernels use."""
    build = builds[program]
    assert build.returncode == 0, build.log
    assert [line for line in build.log.splitlines() if re.search(r"\bC75\d\d\b", line)] == []
    assert load("flashmsa_nvcc", ROOT / "csrc" / "nvcc.py").faults(build.log) == []
    assert "for 'sm_90a'" in build.log


@pytest.mark.gpu
@needs_nvcc
@pytest.mark.parametrize(("program", "name"), PRIMITIVES, ids=[name for _, name in PRIMITIVES])
def test_primitive(runs: dict[str, Run], program: str, name: str) -> None:
    run = runs[program]
    assert run.lines.get(name, f"no result: {run.end}") == "ok"


@pytest.mark.gpu
@needs_nvcc
def test_programs_say_how_it_went(runs: dict[str, Run]) -> None:
    """ctest goes by the exit status, and this file by the lines: they agree, and no test is left out."""
    for program, run in runs.items():
        names = {name for stem, name in PRIMITIVES if stem == program}
        assert set(run.lines) == names, f"{program}: {run.end}"
        good = set(run.lines.values()) == {"ok"}
        assert ("returned 0;" in run.end) == good, f"{program}: {run.end}"
