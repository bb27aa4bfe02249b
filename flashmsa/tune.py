"""``python -m flashmsa tune``: which compiled kernel is the fastest for a call on this GPU.

Each kind of mask, head dim and dtype has a kernel that runs it, and most have others that could: wider ones, and those
of small tiles. ``autotune`` times them beside each other, ``use_tuning`` has calls run by the faster ones from then on.
The key is the kernel that would run a call, so mask kind, head dim, dtype and options, and never a length: a
replacement has to be faster at every length that was timed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import _C
from .dispatch import dtype_name, machine_reason
from .explain import explain
from .masks import BlockSparse, Causal, Dense, Document, Mask, SlidingWindow
from .ops import attention

TOKENS = 16384
CHANNELS = 2048  # of all heads
# A replacement has to win by more than what two timings of one kernel differ by.
LEAST_GAIN = 0.02
_FLUSHED = 256 * 2**20  # bytes written between two launches: several times the L2

HEAD_DIMS = (64, 96, 128, 192, 256)
LENGTHS = (1024, 4096, 16384)
MASKS: dict[str, Callable[[int], Mask]] = {
    "dense": lambda length: Dense(),
    "causal": lambda length: Causal(),
    "window": lambda length: SlidingWindow(length // 8, 0),
    "documents": lambda length: Document([length * n // 8 for n in range(9)]).to("cuda"),
    "blocks": lambda length: BlockSparse(torch.rand(1, 1, *2 * [-(-length // 128)], device="cuda") < 0.25),
}

_used: Mapping[str, str] = {}


@dataclass(frozen=True)
class Timing:
    """One kernel's time for one call."""

    kernel: str
    tile: tuple[int, int]  # rows, keys
    ms: float
    tflops: float  # useful operations
    agrees: bool  # with the result of the kernel that is the default

    def __str__(self) -> str:
        tile = f"{self.tile[0]} x {self.tile[1]}"
        wrong = "" if self.agrees else "  another result: never taken"
        return f"{self.kernel:<36}{tile:<12}{1e3 * self.ms:>9.1f} µs{self.tflops:>8.0f} TFLOP/s{wrong}"


@dataclass(frozen=True)
class Measured:
    """One call, and its kernels: the default one first."""

    call: str
    timings: tuple[Timing, ...]

    @property
    def default(self) -> str:
        return self.timings[0].kernel

    def __str__(self) -> str:
        best = min((x.ms for x in self.timings if x.agrees), default=0.0)
        lines = [f"{'*' if x.ms == best and x.agrees else ' '} {x}" for x in self.timings]
        return "\n".join([self.call, *lines])


def autotune(
    masks: Iterable[str] = tuple(MASKS),
    head_dims: Iterable[int] = HEAD_DIMS,
    dtypes: Iterable[torch.dtype] = (torch.bfloat16, torch.float16),
    *,
    lengths: Sequence[int] = LENGTHS,
    launches: int = 9,
    report: Callable[[Measured], Any] | None = None,
) -> dict[str, Any]:
    """Times the kernels that can run each mask of MASKS, head dim and dtype on the current GPU, forward pass.

    Calls have 16384 tokens in all and 2048 channels. Kernels are launched in turn, in random order, the L2 flushed
    before each; the medians of ``launches`` are compared. ``report`` gets each ``Measured`` call as it is done.

    Returns what ``use_tuning`` takes: {"device", "flashmsa", "kernels": {kernel: the faster one in its place}}. A
    replacement is at least 2 % faster at every length, with the same result. Nothing is changed for later calls.

    Raises RuntimeError where no sm90 kernel can run, ValueError for a mask or head dim that does not exist.
    """
    from . import __version__

    reason = machine_reason(None)
    if reason is not None:
        raise RuntimeError(f"tune: needs a GPU of compute capability 9.0: {reason}")
    asked = list(product(dtypes, head_dims, masks))
    for *_, mask in asked:
        if mask not in MASKS:
            raise ValueError(f"masks: {mask!r} is not known; must be of {', '.join(MASKS)}")
    faster: dict[str, str] = {}
    used = _used
    use_tuning(None)
    try:
        for dtype, head_dim, mask in asked:
            calls = []
            for length in lengths:
                calls.append(measure(mask, head_dim, dtype, length, launches))
                if report is not None:
                    report(calls[-1])
            faster |= replacements(calls)
    finally:
        use_tuning({"kernels": used})
    return {"device": torch.cuda.get_device_name(), "flashmsa": __version__, "kernels": faster}


def replacements(calls: Sequence[Measured]) -> dict[str, str]:
    """For each default kernel the one that is faster in all of its calls, and the fastest in the mean; of one dtype,
    head dim and kind of mask."""
    found = {}
    for default in {call.default for call in calls}:
        gains: dict[str, list[float]] = {}
        mine = [call for call in calls if call.default == default]
        for call in mine:
            for other in call.timings[1:]:
                if other.agrees and other.ms < (1 - LEAST_GAIN) * call.timings[0].ms:
                    gains.setdefault(other.kernel, []).append(other.ms / call.timings[0].ms)
        always = {name: statistics.geometric_mean(x) for name, x in gains.items() if len(x) == len(mine)}
        if always:
            found[default] = min(always, key=always.__getitem__)
    return found


def measure(mask: str, head_dim: int, dtype: torch.dtype, length: int, launches: int) -> Measured:
    """The time of every kernel that serves this call on the current GPU."""
    heads, batch = max(1, CHANNELS // head_dim), max(1, TOKENS // length)
    q, k, v = (torch.randn(batch, heads, length, head_dim, device="cuda", dtype=dtype) for _ in range(3))
    built = MASKS[mask](length)
    told = explain(q, k, v, built, backend="sm90")
    kernels = dict(_serving(told.kernel, (q, k, v), built))
    results: dict[str, Tensor] = {}
    times: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in kernels}
    order = random.Random(0)
    flush = torch.empty(_FLUSHED, dtype=torch.int8, device="cuda")
    for round_ in range(launches + 2):
        for name in order.sample(list(kernels), len(kernels)):
            with _in_place_of(told.kernel, name):
                flush.zero_()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                out = attention(q, k, v, built, backend="sm90")
                end.record()
            if round_ == 0:
                results[name] = out
            elif round_ > 1:
                times[name].append((begin, end))
    torch.cuda.synchronize()
    rows = []
    for name, tile in kernels.items():
        ms = statistics.median(begin.elapsed_time(end) for begin, end in times[name])
        agrees = _same_result(results[name], results[told.kernel])
        rows.append(Timing(name, tile, ms, told.flops / ms / 1e9, agrees))
    text = f"{mask} {dtype_name(dtype)}, head dim {head_dim}, {batch} x {heads} heads x {length}"
    return Measured(text, tuple(rows))


def _serving(default: str, inputs: tuple[Tensor, Tensor, Tensor], mask: Mask) -> Iterator[tuple[str, tuple[int, int]]]:
    """Names and tiles of the kernels that would run this call in place of ``default``, which comes first."""
    names = [default, *(x["name"] for x in _C.kernels() if x["name"] != default)]
    for name in names:
        with _in_place_of(default, name):
            told = explain(*inputs, mask, backend="sm90")
        if told.kernel == name:
            yield name, told.tile


def _same_result(a: Tensor, b: Tensor) -> bool:
    """Within the roundings of two sums in another order, to the dtype of the result."""
    limit = 4 * torch.finfo(b.dtype).eps * b.float().abs().max()
    return bool(a.isfinite().all()) and bool((a.float() - b.float()).abs().max() <= limit)


@contextmanager
def _in_place_of(default: str, name: str) -> Iterator[None]:
    _C.replace_kernel(default, name)
    try:
        yield
    finally:
        _C.replace_kernel(default, default)


def use_tuning(tuning: Mapping[str, Any] | str | Path | None) -> None:
    """Has calls run by the kernels that ``autotune`` found faster: by its result, or the JSON file that holds it.

    For all threads of the process, in place of what was used before; None: the kernels as the dispatcher chooses them.
    Not while calls are launched from other threads. A call that a replacement does not serve keeps its kernel.

    Raises TypeError for what is no tuning, ValueError for a kernel that this build does not have; nothing changes then.
    """
    global _used
    if isinstance(tuning, (str, Path)):
        tuning = json.loads(Path(tuning).read_text(encoding="utf-8"))
    kernels = {} if tuning is None else tuning.get("kernels") if isinstance(tuning, Mapping) else None
    if not isinstance(kernels, Mapping):
        raise TypeError("tuning: must be what autotune returns, the path of a JSON file that holds it, or None")
    built = {x["name"] for x in _C.kernels()}
    for name in (*kernels, *kernels.values()):
        if name not in built:
            raise ValueError(f"tuning: kernel {name!r} is not in this build; tune again, as by python -m flashmsa tune")
    for name in built:
        _C.replace_kernel(name, kernels.get(name, name))
    _used = dict(kernels)


def main(argv: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m flashmsa tune",
        description="Times every compiled forward kernel that can run a call; * marks the fastest. The first of each "
        "call is the one that the dispatcher takes.",
    )
    parser.add_argument("--masks", nargs="+", choices=list(MASKS), default=list(MASKS))
    parser.add_argument("--head-dims", nargs="+", type=int, default=list(HEAD_DIMS), metavar="D")
    parser.add_argument("--dtypes", nargs="+", choices=["bfloat16", "float16"], default=["bfloat16"])
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS), metavar="S")
    parser.add_argument("--launches", type=int, default=9, metavar="N")
    parser.add_argument("--write", type=Path, metavar="FILE", help="JSON that flashmsa.use_tuning(FILE) takes")
    asked = parser.parse_args(argv)
    try:
        tuning = autotune(
            asked.masks,
            asked.head_dims,
            [getattr(torch, x) for x in asked.dtypes],
            lengths=asked.lengths,
            launches=asked.launches,
            report=lambda call: print(call, flush=True),
        )
        if asked.write is not None:
            asked.write.write_text(json.dumps(tuning, indent=2) + "\n", encoding="utf-8")
    except (OSError, RuntimeError, ValueError) as error:
        print(error if str(error).startswith("tune") else f"tune: {error}", file=sys.stderr)
        return 1
    changes = [f"{name} by {by}" for name, by in tuning["kernels"].items()]
    print(f"to replace: {', '.join(changes) or 'nothing; the dispatcher takes the fastest kernel of each call'}")
    return 0
