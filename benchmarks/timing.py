"""How the candidates are timed. The card is power-limited, so what is compared is launched in turn, A B C A B C …,
in one process, the same number of launches of each and no pause on one side.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from benchmarks.device import Nvml, mean_clock, monitored, watts

Call = Callable[[], Any]


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the two nearest values."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median with the 10th and 90th percentile."""
    return {
        "median": statistics.median(values),
        "p10": percentile(values, 10),
        "p90": percentile(values, 90),
        "count": len(values),
    }


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass
class Launches:
    """What the launches of one candidate took: milliseconds each, and the SM clock during each (None: not known)."""

    ms: list[float] = field(default_factory=list)
    mhz: list[float | None] = field(default_factory=list)

    def median_mhz(self) -> float | None:
        known = [mhz for mhz in self.mhz if mhz is not None]
        return statistics.median(known) if known else None


def interleaved(device: Any, calls: dict[str, Call], launches: int, warmup: int = 5) -> dict[str, Launches]:
    """Launches every call in turn, the L2 flushed before each and outside the events; one wait, at the end.

    The first `warmup` rounds are not counted, but follow without a pause: after them the host runs ahead of the device,
    and an event measures nothing but the launch. Where the device is found idle, it waits for twice as long as the
    host takes for a round, and the host is ahead again.
    """
    rounds: list[list[tuple[str, Any, Any, Any, Any]]] = []
    host_s = math.inf  # the fastest round's
    with no_garbage_collection():
        for _ in range(warmup + launches):
            if calls and rounds and device.done(rounds[-1][-1][2]):
                device.delay(2 * host_s)
            began = time.perf_counter()
            rounds.append([(name, *_launch(device, call)) for name, call in calls.items()])
            host_s = min(host_s, time.perf_counter() - began)
        device.synchronize()
    results = {name: Launches() for name in calls}
    for entry in rounds[warmup:]:
        for name, begin, end, probe0, probe1 in entry:
            results[name].ms.append(device.elapsed_ms(begin, end))
            results[name].mhz.append(device.mhz(probe0, probe1))
    return results


def _launch(device: Any, call: Call) -> tuple[Any, Any, Any, Any]:
    device.flush()
    probe0 = device.probe()
    begin = device.mark()
    call()
    end = device.mark()
    probe1 = device.probe()
    return begin, end, probe0, probe1


def alone(device: Any, calls: dict[str, Call], launches: int, warmup: int = 5) -> dict[str, Launches]:
    """Every call in turn on an idle device: the events enclose the whole call, the host's share too."""
    results = {name: Launches() for name in calls}
    with no_garbage_collection():
        for index in range(warmup + launches):
            for name, call in calls.items():
                device.flush()
                device.synchronize()
                begin = device.mark()
                call()
                end = device.mark()
                device.synchronize()
                if index >= warmup:
                    results[name].ms.append(device.elapsed_ms(begin, end))
                    results[name].mhz.append(None)
    return results


@dataclass
class Slice:
    """Launches of one candidate in a row. begin and end are time.monotonic() seconds."""

    launches: int
    ms: float
    begin: float
    end: float
    mhz: float | None


@dataclass
class Steady:
    """A candidate's slices, and what the monitor saw in them."""

    slices: list[Slice] = field(default_factory=list)
    watts: list[float] = field(default_factory=list)
    mhz: list[float] = field(default_factory=list)

    def ms_per_launch(self) -> float:
        return sum(s.ms for s in self.slices) / sum(s.launches for s in self.slices)


def steady(
    device: Any,
    calls: dict[str, Call],
    launch_ms: dict[str, float],
    nvml: Nvml | None = None,
    seconds: float = 2.0,
    slice_s: float = 0.5,
) -> dict[str, Steady]:
    """About `seconds` of launches of each candidate, back to back, in alternating slices.

    launch_ms: an estimate per candidate, from which a slice's launches are counted. A slice must outlast some steps of
    the energy counter (tens of milliseconds each), hence half a second.
    """
    results = {name: Steady() for name in calls}
    with monitored(nvml) as readings, no_garbage_collection():
        for _ in range(max(1, round(seconds / slice_s))):
            for name, call in calls.items():
                count = max(1, round(slice_s * 1e3 / launch_ms[name]))
                results[name].slices.append(_slice(device, call, count))
    for result in results.values():
        for part in result.slices:
            power = watts(readings.ticks, part.begin, part.end)
            clock = part.mhz if part.mhz is not None else mean_clock(readings.clocks, part.begin, part.end)
            result.watts += [power] if power is not None else []
            result.mhz += [clock] if clock is not None else []
    return results


def _slice(device: Any, call: Call, count: int, ahead: int = 32) -> Slice:
    """NOTE: the host stays at most 3 * `ahead` launches in front. A full launch queue would block it with the
    interpreter lock held, and the monitor would miss its readings."""
    pending: deque[Any] = deque()
    begin_s = time.monotonic()
    probe0 = device.probe()
    begin = device.mark()
    for index in range(1, count + 1):
        call()
        if index % ahead == 0:
            pending.append(device.mark())
            if len(pending) > 2:
                device.wait(pending.popleft())
    end = device.mark()
    probe1 = device.probe()
    device.synchronize()
    return Slice(count, device.elapsed_ms(begin, end), begin_s, time.monotonic(), device.mhz(probe0, probe1))


def replayed(device: Any, calls: dict[str, Call], rounds: int, launches: int = 20) -> dict[str, Launches]:
    """Milliseconds per launch inside a CUDA graph of `launches` in a row: short kernels without the host in the way.

    The graphs are replayed in turn. The L2 stays warm, as it is for a short sequence in a model.
    """
    replays = {name: device.capture(call, launches) for name, call in calls.items()}
    marks: list[tuple[str, Any, Any]] = []
    with no_garbage_collection():
        for _ in range(rounds + 1):
            for name, replay in replays.items():
                device.flush()  # keeps the device busy while the host prepares the replay
                replay()  # brings this candidate's data back
                begin = device.mark()
                replay()
                marks.append((name, begin, device.mark()))
        device.synchronize()
    results = {name: Launches() for name in calls}
    for name, begin, end in marks[len(replays) :]:
        results[name].ms.append(device.elapsed_ms(begin, end) / launches)
        results[name].mhz.append(None)
    return results


def host_times(
    device: Any, calls: dict[str, tuple[Callable[[], AbstractContextManager], Call]], chunks: int = 20, chunk: int = 100
) -> dict[str, list[float]]:
    """Microseconds of host time of each call, one perf_counter reading per call and none waited for.

    Candidates take turns in chunks with a wait between chunks, so that no launch queue fills up.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    with no_garbage_collection():
        for index in range(chunks + 1):
            for name, (context, call) in calls.items():
                with context():
                    taken = _host_chunk(call, chunk)
                device.synchronize()
                if index > 0:  # the first chunk warms up
                    times[name] += taken
    return times


def _host_chunk(call: Call, count: int) -> list[float]:
    clock = time.perf_counter_ns
    stamps = [clock()]
    for _ in range(count):
        call()
        stamps.append(clock())
    return [(after - before) / 1e3 for before, after in pairwise(stamps)]
