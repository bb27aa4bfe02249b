"""``python -m flashmsa info``: this machine, this build, and the kernels in it."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from . import _C, __version__
from .dispatch import machine_reason


def text() -> str:
    """Device, driver, torch, build, and a table of the compiled kernels."""
    lines = [f"{name:<10}{value}" for name, value in _facts()]
    return "\n".join([*lines, "", *_kernel_table()])


def _facts() -> list[tuple[str, str]]:
    build = _C.build_info()
    facts = [
        ("flashmsa", f"{__version__} in {Path(__file__).parent}"),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        (
            "torch",
            f"{torch.__version__}, for CUDA {torch.version.cuda or '(none)'}, {torch.get_num_threads()} CPU threads",
        ),
        ("driver", _driver()),
    ]
    facts += [("device", _device(index)) for index in range(torch.cuda.device_count())] or [
        ("device", "no CUDA device")
    ]
    facts.append(("build", f"{build['compiler']}, for torch {build['torch']}"))
    if build["cuda"]:
        facts.append(("kernels", f"{len(_C.kernels())} for {build['arch']}, by CUDA {build['cuda_version']}"))
    else:
        facts.append(("kernels", f"none: {build['reason']}"))
    reason = machine_reason(None)
    facts.append(("backends", "sm90, cpu, torch" if reason is None else f"cpu, torch (not sm90: {reason})"))
    return facts


def _driver() -> str:
    """The NVIDIA driver's version, as the kernel module gives it."""
    version = Path("/proc/driver/nvidia/version")
    if version.exists():
        return version.read_text().splitlines()[0].removeprefix("NVRM version: ").strip()
    return "loaded, version unknown" if torch.cuda.is_available() else "none found"


def _device(index: int) -> str:
    p = torch.cuda.get_device_properties(index)
    return (
        f"cuda:{index} {p.name}, compute capability {p.major}.{p.minor}, {p.multi_processor_count} SMs, "
        f"{p.total_memory / 2**30:.0f} GiB"
    )


def _kernel_table() -> list[str]:
    kernels = _C.kernels()
    if not kernels:
        return []
    rows = [("kernel", "head dims to", "tile", "stages", "threads", "registers", "shared memory")]
    for x in kernels:
        rows.append(
            (
                x["name"],
                str(x["head_dim_bucket"]),
                f"{x['block_q']} x {x['block_kv']}",
                str(x["stages"]),
                str(x["threads"]),
                f"{x['registers_producer']} / {x['registers_consumer']}",
                f"{x['shared_memory']:,} B",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
