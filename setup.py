"""Builds flashmsa._C: the binding, the CPU backend and, where nvcc is found, the sm_90a kernels.

FLASHMSA_CUDA=auto (the default) builds the kernels where an nvcc of a supported version and a CUDA build of torch are
found; 1 demands them, 0 leaves them out. One line says which it was. MAX_JOBS bounds the parallel compilers.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
SUPPORTED_CUDA = ((12, 8), (13, 99))  # first and last (major, minor)

# Folders of csrc whose .cpp files need no CUDA. Everything else is built with the kernels only.
PORTABLE = ("binding", "blocks", "cpu", "core", "hash", "mask", "sched")
WITH_KERNELS = tuple(f"csrc/binding/{name}_cuda.cpp" for name in ("backend", "paged", "prepare"))

CXX_FLAGS = ["-O3", "-g0", "-std=c++20", "-fvisibility=hidden", "-Wall"]
NVCC_FLAGS = [
    *("-O3", "-std=c++20", "-lineinfo", "-gencode=arch=compute_90a,code=sm_90a"),
    *("-Xcompiler=-fvisibility=hidden", "-Xptxas=-v,-warn-spills"),
]


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit that can build the kernels."""

    home: Path
    version: tuple[int, int]

    def __str__(self) -> str:
        return f"CUDA {self.version[0]}.{self.version[1]} in {self.home}"


def cuda_mode(value: str | None) -> str:
    """FLASHMSA_CUDA as "auto", "0" or "1"; ValueError for anything else."""
    mode = (value or "auto").strip().lower()
    if mode not in ("auto", "0", "1"):
        raise ValueError(f"FLASHMSA_CUDA: {value!r} is not a choice; must be auto, 0 or 1")
    return mode


def candidate_homes() -> list[Path]:
    """Where a toolkit may be, likeliest first."""
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    on_path = shutil.which("nvcc")
    if on_path:
        homes.append(Path(on_path).resolve().parent.parent)
    return [*homes, Path("/usr/local/cuda")]


def find_toolkit() -> Toolkit | str:
    """The first complete toolkit of a supported version, or why there is none."""
    reason = "no nvcc found (looked at CUDA_HOME, CUDA_PATH, PATH and /usr/local/cuda)"
    for home in candidate_homes():
        nvcc = home / "bin" / "nvcc"
        if not nvcc.exists():
            continue
        if not (home / "include" / "cuda_runtime_api.h").exists() or not list(home.glob("lib*/libcudart_static.a")):
            reason = f"{home} has nvcc, but not the runtime's headers and libcudart_static.a"
            continue
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
        found = re.search(r"release (\d+)\.(\d+)", text)
        if found is None:
            reason = f"{nvcc} does not run"
            continue
        version = (int(found[1]), int(found[2]))
        if SUPPORTED_CUDA[0] <= version <= SUPPORTED_CUDA[1]:
            return Toolkit(home, version)
        reason = f"{nvcc} is CUDA {version[0]}.{version[1]}; 12.8 to 13.x can build the kernels"
    return reason


def kernels_or_reason(mode: str, torch_cuda: str | None) -> Toolkit | str:
    """The toolkit to build the kernels with, or why they are left out. RuntimeError where mode "1" cannot be met."""
    if mode == "0":
        return "FLASHMSA_CUDA=0"
    result = find_toolkit()
    if isinstance(result, Toolkit):
        if torch_cuda is None:
            result = "this torch is built without CUDA"
        elif int(torch_cuda.split(".")[0]) != result.version[0]:
            result = f"torch is built for CUDA {torch_cuda}, nvcc is {result}; their major versions must match"
    if mode == "1" and isinstance(result, str):
        raise RuntimeError(f"FLASHMSA_CUDA=1, but the sm_90a kernels cannot be built: {result}")
    return result


def announcement(kernels: Toolkit | str) -> str:
    """One line for whoever builds."""
    if isinstance(kernels, Toolkit):
        return f"building the sm_90a kernels with {kernels}"
    return (
        f"leaving out the sm_90a kernels ({kernels}); the CPU backend is whole, CUDA tensors run on composed operators"
    )


def sources(with_kernels: bool) -> list[str]:
    """Every source of the extension, relative to the root."""
    files = [path.relative_to(ROOT) for path in sorted((ROOT / "csrc").rglob("*")) if path.suffix in (".cpp", ".cu")]
    if with_kernels:
        return [str(path) for path in files]
    return [
        str(path)
        for path in files
        if path.suffix == ".cpp" and path.parts[1] in PORTABLE and str(path) not in WITH_KERNELS
    ]


def shared_cxx_runtime() -> list[str]:
    """Link flags for a compiler that has the C++ runtime as an archive alone.

    Such a compiler would put a second libstdc++ beside the one that torch has loaded, and the first C++ error, which
    formats a number, would mix the two and crash. The machine's own shared libraries, torch's, come first instead.
    """
    command = shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++")[0]
    flags = []
    for linked, loaded in (("libstdc++.so", "libstdc++.so.6"), ("libgcc_s.so", "libgcc_s.so.1")):
        found = subprocess.run([command, f"-print-file-name={linked}"], capture_output=True, text=True).stdout.strip()
        # NOTE: gcc prints a bare name for a file that it does not have.
        if not Path(found).is_absolute():
            flags.append(f"-l:{loaded}")
    return flags


def extension():
    """The extension module and the command that builds it."""
    toolkit = find_toolkit()
    if isinstance(toolkit, Toolkit):
        # torch takes the folder above whatever `nvcc` is on PATH, a wrapper script too.
        os.environ["CUDA_HOME"] = str(toolkit.home)
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    kernels = kernels_or_reason(cuda_mode(os.environ.get("FLASHMSA_CUDA")), torch.version.cuda)
    with_kernels = isinstance(kernels, Toolkit)
    print(f"flashmsa: {announcement(kernels)}", file=sys.stderr)

    macros = [("FLASHMSA_TORCH_VERSION", f'"{torch.__version__}"')]
    options = {"include_dirs": [str(ROOT / "csrc")], "libraries": [], "library_dirs": []}
    link = ["-Wl,--as-needed", "-s", *shared_cxx_runtime()]
    if with_kernels:
        version = "{}.{}".format(*kernels.version)
        macros += [("FLASHMSA_WITH_CUDA", "1"), ("FLASHMSA_CUDA_VERSION", f'"{version}"')]
        options["include_dirs"].append(str(kernels.home / "include"))
        options["libraries"].append("c10_cuda")
        options["library_dirs"] += [str(path.parent) for path in kernels.home.glob("lib*/libcudart_static.a")]
        # NOTE: hidden, so that the loader cannot bind our calls to the libcudart.so that torch has loaded.
        link += ["-l:libcudart_static.a", "-Wl,--exclude-libs,libcudart_static.a", "-ldl", "-lrt", "-lpthread"]
        os.environ["PYTORCH_NVCC"] = shlex.join(
            [sys.executable, str(ROOT / "csrc" / "nvcc.py"), str(kernels.home / "bin" / "nvcc")]
        )
    else:
        macros.append(("FLASHMSA_CUDA_LEFT_OUT", '"{}"'.format(kernels.replace("\\", "/").replace('"', "'"))))
    module = CppExtension(
        "flashmsa._C",
        sources(with_kernels),
        define_macros=macros,
        extra_compile_args={"cxx": CXX_FLAGS, "nvcc": NVCC_FLAGS},
        extra_link_args=link,
        **options,
    )
    return module, BuildExtension


if __name__ == "__main__":
    ext_module, build_ext = extension()
    setup(ext_modules=[ext_module], cmdclass={"build_ext": build_ext})
