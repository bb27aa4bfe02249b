"""Which backend runs a call, and why the others do not."""

from __future__ import annotations

import warnings
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import _C
from .checks import DTYPES, MAX_HEAD_DIM
from .masks.base import HASH

BACKENDS = ("sm90", "cpu", "torch")
SM90_DTYPES = (torch.float16, torch.bfloat16)
CPU_DTYPES = DTYPES
# Query length below which SDPA would be taken instead of the sm90 kernels: never. `benchmarks/run.py --group small`: at
# lengths from 64 to 1024, batch 1 and 8, head dims 64, 128 and 256, its cuDNN backend takes 1.07 to 2.07 times as long.
SDPA_BELOW = 0
MASK_KINDS = range(7)  # MaskKind in csrc/core/params.h


class Wanted(NamedTuple):
    """What a call needs a kernel for, beside its dtype and head dims."""

    mask_kind: int
    softcap: bool
    alibi: bool
    dropout: bool = False
    backward: bool = False


class Rejection(NamedTuple):
    """Why a backend cannot run a call, and the error that says so when it was asked for by name."""

    backend: str
    reason: str
    error: type[Exception]


def choose(q: Tensor, wanted: Wanted) -> tuple[str, tuple[Rejection, ...]]:
    """The backend that ``backend=None`` picks for ``q``, and the rejections of those before it.

    Meta tensors go to the op's fake implementation, under the name of the cpu backend.
    """
    rejections = []
    for backend in BACKENDS[:2]:
        rejection = reject(backend, q, wanted)
        if rejection is None:
            return backend, tuple(rejections)
        rejections.append(rejection)
    return "torch", tuple(rejections)


def reject(backend: str, q: Tensor, wanted: Wanted) -> Rejection | None:
    """Why ``backend`` cannot run a call on ``q``'s device and dtype with this mask and options; None where it can."""
    if backend == "torch":
        return None
    device = q.device.type
    if backend == "sm90":
        if device != "cuda":
            return Rejection(backend, f"q is on {q.device}; needs a CUDA device of compute capability 9.0", ValueError)
        reason = machine_reason(q.device.index)
        if reason is not None:
            return Rejection(backend, reason, RuntimeError)
    elif device not in ("cpu", "meta"):
        return Rejection(backend, f"q is on {q.device}; needs tensors on the CPU", ValueError)
    gap = gap_reason(backend, q.dtype, wanted)
    # NOTE: not while tracing: with dynamic=True the mask kind is a symbol there. The operator itself would raise.
    if gap is None and backend == "sm90" and not is_compiling() and not kernel_exists(wanted, q.dtype):
        gap = f"no {_passes(wanted)} compiled for {_describe(wanted)} in {dtype_name(q.dtype)}"
    return None if gap is None else Rejection(backend, gap, NotImplementedError)


def gap_reason(backend: str, dtype: torch.dtype, wanted: Wanted) -> str | None:
    """What a native backend lacks for this dtype and these options, on any machine; None where nothing."""
    dtypes = SM90_DTYPES if backend == "sm90" else CPU_DTYPES
    if dtype not in dtypes:
        return f"no kernel for {dtype_name(dtype)}, only for {', '.join(map(dtype_name, dtypes))}"
    if wanted.alibi and wanted.mask_kind == HASH:
        return "alibi_slopes: not in the native backends with HashBucket, whose rows are sorted"
    return None


def _passes(wanted: Wanted) -> str:
    return "forward and backward kernels were" if wanted.backward else "kernel was"


def _describe(wanted: Wanted) -> str:
    names = {"softcap": wanted.softcap, "alibi_slopes": wanted.alibi, "dropout_p": wanted.dropout}
    options = " and ".join(name for name, used in names.items() if used)
    return f"mask kind {wanted.mask_kind}{' with ' + options if options else ''}"


def dtype_name(dtype: torch.dtype) -> str:
    """Without the ``torch.`` in front."""
    return str(dtype).removeprefix("torch.")


def kernel_exists(wanted: Wanted, dtype: torch.dtype) -> bool:
    """Whether kernels serve every head dim of this mask kind, these options and this dtype."""
    kind, *options, backward = wanted
    passes = (False, True) if backward else (False,)
    return all(_C.find_kernel(kind, dtype, MAX_HEAD_DIM, MAX_HEAD_DIM, *options, x) is not None for x in passes)


def all_kernels_exist(dtype: torch.dtype, *, training: bool = False) -> bool:
    """Whether kernels serve every mask kind with every option; for training with dropout and backward too."""
    both = (False, True)
    every = product(MASK_KINDS, both, both, both if training else (False,))
    return all(kernel_exists(Wanted(*x, backward=training), dtype) for x in every)


@torch.compiler.assume_constant_result
def machine_reason(index: int | None) -> str | None:
    """Why the sm90 kernels cannot run on CUDA device ``index`` (None: the current one); None where they can."""
    build = build_reason()
    if build is not None:
        return build
    if not torch.cuda.is_available():
        return "no CUDA device or driver was found"
    major, minor = torch.cuda.get_device_capability(index)
    if (major, minor) != (9, 0):
        return f"{torch.cuda.get_device_name(index)} has compute capability {major}.{minor}; the kernels need 9.0"
    return None


def build_reason() -> str | None:
    """Why this build has no sm90 kernels; None where it has them."""
    info = _C.build_info()
    if info["cuda"]:
        return None
    why = info.get("reason")
    return f"flashmsa was built without kernels{f': {why}' if why else ''}"


def named_error(rejection: Rejection) -> Exception:
    """The error for a backend asked for by name."""
    return rejection.error(
        f"backend: {rejection.backend!r} cannot run this call: {rejection.reason}; backend=None picks one that can"
    )


_warned: set[str] = set()


@torch.compiler.assume_constant_result
def warn_once(reason: str) -> None:
    """One warning per reason and process that the composed backend runs instead of a native one."""
    if reason in _warned:
        return
    _warned.add(reason)
    warnings.warn(
        f"flashmsa runs its composed 'torch' backend, slower than a native one: {reason}. flashmsa.explain() tells "
        "more; backend='torch' asks for it without a warning",
        UserWarning,
        stacklevel=4,
    )
