"""The build: what setup.py decides, what the extension links to, and which machine code it refuses."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import flashmsa

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = Path(flashmsa._C.__file__)
INFO = flashmsa._C.build_info()


def load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


setup = load("flashmsa_setup", ROOT / "setup.py")
nvcc = load("flashmsa_nvcc", ROOT / "csrc" / "nvcc.py")


# ---------------------------------------------------------------------------------------------------------------------
# The extension


def test_build_info() -> None:
    assert set(INFO) == {"cuda", "cuda_version", "arch", "compiler", "torch", "reason"}
    assert INFO["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert bool(INFO["reason"]) != INFO["cuda"], "a build says why it has no kernels, and only then"
    for listed in (flashmsa._C.kernels, flashmsa._C.backward_kernels, flashmsa._C.paged_kernels):
        assert bool(listed()) == INFO["cuda"]
    if INFO["cuda"]:
        assert INFO["arch"] == "sm_90a" and re.fullmatch(r"1[23]\.\d+", INFO["cuda_version"])


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf (binutils)")
def test_links_to_no_driver_and_no_runtime() -> None:
    """cudart is static and the driver is looked up at run time: the extension itself asks for neither."""
    text = subprocess.run(["readelf", "-dW", LIBRARY], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", text)
    assert any(name.startswith("libtorch") for name in needed)
    assert [name for name in needed if name.startswith(("libcuda", "libcudart", "libnvrtc"))] == []
    assert any(name.startswith("libc10_cuda") for name in needed) == INFO["cuda"]
    assert "libstdc++.so.6" in needed, "a second, static libstdc++ crashes where C++ errors are formatted"


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf (binutils)")
def test_exports_no_cuda_runtime() -> None:
    """A visible cudart symbol could be bound to the libcudart.so that torch has loaded."""
    text = subprocess.run(["readelf", "-W", "--dyn-syms", LIBRARY], capture_output=True, text=True, check=True).stdout
    names = [line.split()[-1] for line in text.splitlines() if " GLOBAL " in line or " WEAK " in line]
    assert "PyInit__C" in names
    assert [name for name in names if re.match(r"(__)?cuda[A-Z]|cu[A-Z]", name)] == []


def test_imports_and_runs_without_a_driver() -> None:
    """With every device hidden, as on a machine without a driver: import, facts, and a call on the CPU."""
    code = (
        "import torch, flashmsa\n"
        "flashmsa._C.build_info(), flashmsa._C.kernels()\n"
        "q = torch.ones(1, 1, 4, 8)\n"
        "assert torch.equal(flashmsa.attention(q, q, q), q)\n"
        "print('ran')\n"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(LIBRARY.parent.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "ran", done.stderr


@pytest.mark.skipif(INFO["cuda"], reason="this build has kernels")
def test_a_build_without_kernels_knows_none() -> None:
    assert flashmsa._C.kernels() == flashmsa._C.backward_kernels() == flashmsa._C.paged_kernels() == []
    for backward in (False, True):
        assert flashmsa._C.find_kernel(0, torch.bfloat16, 64, 64, backward=backward) is None
    assert flashmsa._C.few_queries_kernel(0, torch.bfloat16, 1, 8, 8, 1, 4096, 64, 64) is None


@pytest.mark.skipif(not INFO["cuda"], reason="this build has no kernels")
def test_kernels_have_names_of_their_own() -> None:
    """A name says which kernel a profile, explain() or a table speaks of."""
    c = flashmsa._C
    names = [x["name"] for x in (*c.kernels(), *c.backward_kernels(), *c.paged_kernels())]
    assert len(set(names)) == len(names)


# ---------------------------------------------------------------------------------------------------------------------
# setup.py


@pytest.mark.parametrize(
    "value, mode", [(None, "auto"), ("", "auto"), ("auto", "auto"), ("AUTO", "auto"), ("0", "0"), (" 1 ", "1")]
)
def test_cuda_mode(value: str | None, mode: str) -> None:
    assert setup.cuda_mode(value) == mode


@pytest.mark.parametrize("value", ["2", "yes", "on", "-1"])
def test_cuda_mode_of_another_name(value: str) -> None:
    with pytest.raises(ValueError, match=f"FLASHMSA_CUDA.*{value}.*auto, 0 or 1"):
        setup.cuda_mode(value)


def fake_toolkit(folder: Path, version: str, *, complete: bool = True) -> Path:
    """A folder that looks like a CUDA toolkit; its nvcc knows its version."""
    for name in ("bin", "include", "lib64"):
        (folder / name).mkdir(parents=True)
    tool = folder / "bin" / "nvcc"
    tool.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.1'\n")
    tool.chmod(0o755)
    (folder / "include" / "cuda_runtime_api.h").touch()
    if complete:
        (folder / "lib64" / "libcudart_static.a").touch()
    return folder


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch):
    """Makes the given folders the only places where a toolkit is looked for."""
    return lambda *homes: monkeypatch.setattr(setup, "candidate_homes", lambda: list(homes))


@pytest.mark.parametrize("version", ["12.8", "12.9", "13.0", "13.3"])
@pytest.mark.parametrize("mode", ["auto", "1"])
def test_supported_toolkits(tmp_path: Path, only, version: str, mode: str) -> None:
    only(tmp_path / "absent", fake_toolkit(tmp_path / "cuda", version))
    found = setup.kernels_or_reason(mode, version)
    assert found == setup.Toolkit(tmp_path / "cuda", tuple(map(int, version.split("."))))
    assert version in setup.announcement(found) and "building" in setup.announcement(found)


@pytest.mark.parametrize(
    "version, torch_cuda, names",
    [
        (None, "13.0", "no nvcc"),
        ("12.6", "12.6", r"12\.6.*12\.8 to 13"),
        ("14.0", "14.0", r"14\.0.*12\.8 to 13"),
        ("13.0", None, "torch is built without CUDA"),
        ("13.0", "12.8", r"12\.8.*13\.0.*major"),
    ],
)
def test_left_out_with_a_reason(tmp_path: Path, only, version: str | None, torch_cuda: str | None, names: str) -> None:
    only(fake_toolkit(tmp_path / "cuda", version) if version else tmp_path / "absent")
    reason = setup.kernels_or_reason("auto", torch_cuda)
    assert isinstance(reason, str) and re.search(names, reason), reason
    line = setup.announcement(reason)
    assert "leaving out" in line and reason in line and "\n" not in line
    with pytest.raises(RuntimeError, match="FLASHMSA_CUDA=1"):
        setup.kernels_or_reason("1", torch_cuda)


def test_an_incomplete_toolkit_is_passed_over(tmp_path: Path, only) -> None:
    """A compiler from a package without the static runtime does not hide the toolkit behind it."""
    broken = fake_toolkit(tmp_path / "broken", "13.0", complete=False)
    only(broken)
    assert "libcudart_static.a" in setup.find_toolkit()
    only(broken, fake_toolkit(tmp_path / "good", "13.0"))
    assert setup.find_toolkit() == setup.Toolkit(tmp_path / "good", (13, 0))


def test_zero_looks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "find_toolkit", lambda: pytest.fail("looked for a toolkit"))
    assert setup.kernels_or_reason("0", "13.0") == "FLASHMSA_CUDA=0"


def test_sources() -> None:
    """A build without kernels compiles nothing that includes a CUDA header; one with them compiles everything."""
    everything = setup.sources(with_kernels=True)
    portable = setup.sources(with_kernels=False)
    assert set(portable) < set(everything)
    assert any(name.endswith(".cu") for name in everything) and not any(name.endswith(".cu") for name in portable)
    for name in portable:
        text = (ROOT / name).read_text(encoding="utf-8")
        outside = re.sub(r"#ifdef FLASHMSA_WITH_CUDA\n.*?#endif", "", text, flags=re.DOTALL)
        assert not re.search(r'#include [<"](cuda|c10/cuda|sm90/|fwd/|attn/|bwd/|decode/|prefill/)', outside), name


# ---------------------------------------------------------------------------------------------------------------------
# csrc/nvcc.py

KERNEL = "_ZN8flashmsa3fwd24attention_forward_kernelEv"
ATTENTION = (
    KERNEL,
    "_ZN8flashmsa3bwd25attention_backward_kernelEv",
    "_ZN8flashmsa7prefill22paged_attention_kernelEv",
    "_ZN8flashmsa6decode19paged_decode_kernelEv",
)
OTHER = "_ZN8flashmsa5sched11plan_kernelEv"


def log(function: str, frame: int = 0, stores: int = 0, loads: int = 0) -> str:
    return (
        f"ptxas info    : Compiling entry function '{function}' for 'sm_90a'\n"
        f"ptxas info    : Function properties for {function}\n"
        f"    {frame} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 16 barriers\n"
    )


def test_clean_logs_pass() -> None:
    assert nvcc.faults("") == []
    assert nvcc.faults(log(KERNEL) + log(OTHER, frame=32)) == [], "only attention kernels are held to no stack frame"


@pytest.mark.parametrize("code", [7507, 7508, 7510, 7511, 7512, 7514, 7515, 7517, 7519, 7520])
def test_serialised_wgmma_fails(code: int) -> None:
    line = f"ptxas info    : (C{code}) Potential Performance Loss: wgmma.mma_async instructions are serialized due to x"
    assert nvcc.faults(log(KERNEL) + line) == [f"serialised wgmma: {line}"]


def test_another_code_passes() -> None:
    assert nvcc.faults(log(KERNEL) + "ptxas info    : (C7600) something else") == []


@pytest.mark.parametrize("spill", [{"stores": 8}, {"loads": 4}])
@pytest.mark.parametrize("function", [KERNEL, OTHER])
def test_spills_fail(spill: dict[str, int], function: str) -> None:
    (fault,) = nvcc.faults(log(KERNEL) + log(function, frame=8, **spill))
    assert function in fault and "spill" in fault


@pytest.mark.parametrize("function", ATTENTION)
def test_local_memory_fails(function: str) -> None:
    (fault,) = nvcc.faults(log(OTHER) + log(function, frame=24))
    assert function in fault and "24 bytes" in fault


def test_kernels_have_the_names_that_are_looked_for() -> None:
    """A kernel by another name would be held to less."""
    for source in sorted((ROOT / "csrc").glob("*/kernel.cuh")):
        names = re.findall(
            r"^\s*(?:__global__ void .*?|)(\w+_kernel)\(", source.read_text(encoding="utf-8"), re.MULTILINE
        )
        assert names and all(any(part in name for part in nvcc.NO_STACK) for name in names), source


@pytest.fixture(scope="module")
def real_toolkit():
    toolkit = setup.find_toolkit()
    if isinstance(toolkit, str):
        pytest.skip(toolkit)
    return toolkit


@pytest.mark.parametrize(
    "name, good", [("attention_indexed", False), ("other_indexed", True), ("attention_plain", True)]
)
def test_a_real_compilation(tmp_path: Path, real_toolkit, name: str, good: bool) -> None:
    """An array indexed at run time lives in local memory: nvcc succeeds, the build of an attention kernel does not."""
    index = "(which >> i) & 31" if "indexed" in name else "i & 31"
    source = tmp_path / "kernel.cu"
    source.write_text(
        f'extern "C" __global__ void {name}(float* data, int which) {{\n'
        "  float held[32] = {};\n"
        f"  for (int i = 0; i < 64; ++i) held[{index}] += data[i];\n"
        "  for (int i = 0; i < 32; ++i) data[i] = held[i];\n"
        "}\n"
    )
    made = tmp_path / "kernel.o"
    compiler = [str(real_toolkit.home / "bin" / "nvcc"), *setup.NVCC_FLAGS, "-c", str(source), "-o", str(made)]
    done = subprocess.run([sys.executable, ROOT / "csrc" / "nvcc.py", *compiler], capture_output=True, text=True)
    assert (done.returncode == 0) == good, done.stderr
    assert made.exists() == good, "an object that failed must not be taken for a good one by the next build"
    assert (f"build failed: {name}" in done.stderr) != good
    if good:
        assert done.stderr == "", "a good build is a quiet one"


def test_errors_of_the_compiler_come_through(tmp_path: Path) -> None:
    broken = tmp_path / "broken.cu"
    broken.write_text("this is no program\n")
    done = subprocess.run(
        [sys.executable, ROOT / "csrc" / "nvcc.py", "c++", "-x", "c++", "-c", str(broken), "-o", str(tmp_path / "x.o")],
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0 and "broken.cu" in done.stderr
