"""``python -m flashmsa info``: this machine, this build, and the kernels in it."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

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
        counts = ", ".join(f"{len(kernels)} {name}" for name, kernels in _kernels().items())
        facts.append(("kernels", f"{counts}, for {build['arch']}, by CUDA {build['cuda_version']}"))
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


def _kernels() -> dict[str, list[dict[str, Any]]]:
    paged = _C.paged_kernels()
    return {
        "forward": _C.kernels(),
        "backward": _C.backward_kernels(),
        **{path: [x for x in paged if x["path"] == path] for path in ("decode", "prefill")},
    }


def _head_dims(kernel: dict[str, Any]) -> str:
    """The widest that a kernel serves: of q and k, and where v's differs, of v."""
    head_dim = kernel["head_dim_bucket"]
    head_dim_v = kernel.get("head_dim_v_bucket", head_dim)
    return str(head_dim) if head_dim == head_dim_v else f"{head_dim} / {head_dim_v}"


def _kernel_table() -> list[str]:
    kernels = [x for group in _kernels().values() for x in group]
    if not kernels:
        return []
    rows = [("kernel", "head dims to", "tile", "stages", "threads", "registers", "shared memory")]
    rows += [
        (
            x["name"],
            _head_dims(x),
            f"{x['block_q']} x {x['block_kv']}" if "block_q" in x else f"{x['block_kv']} keys",
            str(x.get("stages", "-")),
            str(x["threads"]),
            f"{x['registers_producer']} / {x['registers_consumer']}" if "registers_producer" in x else "-",
            f"{x['shared_memory']:,} B",
        )
        for x in kernels
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
