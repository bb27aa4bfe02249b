"""The machine under measurement: its timers, its SM clock, its energy counter, and what identifies it.

CudaDevice times a GPU; HostDevice has the same methods on the CPU and serves dry runs and tests only.
"""

from __future__ import annotations

import ctypes
import platform
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

SM_COUNT = 132  # of an H100 or H200; the figure of another card is read from it
TENSOR_FLOPS_PER_CYCLE = 4096  # of one Hopper SM, dense bf16 or fp16: 4 tensor cores of 1024 FLOPs
_MOST_HZ = 1.98e9  # of an SM of these cards
FLUSH_BYTES = 256 << 20  # what triton.testing.do_bench overwrites; five times the L2

_PROBE_SOURCE = r"""
extern "C" __global__ void clock_probe(long long* slots) {
  if (threadIdx.x != 0) return;
  unsigned sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  long long nanoseconds;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
  slots[2 * sm] = clock64();
  slots[2 * sm + 1] = nanoseconds;
}
"""


def probe_mhz(begin: list[list[int]], end: list[list[int]]) -> float | None:
    """Mean SM clock between two probes, each a list per SM of (cycles, nanoseconds); 0 0 where a probe missed the SM.

    The median over the SMs that both probes reached; None where there is none or the clock is not believable.
    """
    rates = []
    for (cycles0, ns0), (cycles1, ns1) in zip(begin, end, strict=True):
        if cycles0 and cycles1 and ns1 > ns0:
            rates.append(1e3 * (cycles1 - cycles0) / (ns1 - ns0))
    if not rates:
        return None
    rate = sorted(rates)[len(rates) // 2]
    return rate if 100.0 < rate < 4000.0 else None


class ClockProbe:
    """Reads the SM clock inside a stream: a tiny kernel notes each SM's cycle counter and the global timer.

    Two probes around work give the mean clock while it ran, without touching the work's kernel. Compiled by the NVRTC
    that torch carries; `reason` says why it is not there.
    """

    SLOTS = 2048  # probes kept on the device until read; older ones are overwritten

    def __init__(self, sm_count: int) -> None:
        self.reason = ""
        self._next = 0
        self._sms = sm_count
        try:
            self._kernel = torch.cuda._compile_kernel(_PROBE_SOURCE, "clock_probe")
            # NOTE: SM numbers may have gaps; twice the count leaves room.
            self._slots = torch.zeros(self.SLOTS, 2 * sm_count, 2, dtype=torch.int64, device="cuda")
            if not self._selftest():
                self.reason = "cycle counters do not run on between kernels"
        except (RuntimeError, OSError, AttributeError, TypeError, ValueError) as error:  # a private function of torch
            self.reason = f"{type(error).__name__}: {error}"

    def _selftest(self) -> bool:
        cycles = 2_000_000
        begin = self.launch()
        torch.cuda._sleep(cycles)
        end = self.launch()
        torch.cuda.synchronize()
        counted = self._slots[end, :, 0] - self._slots[begin, :, 0]
        seen = (self._slots[begin, :, 0] != 0) & (self._slots[end, :, 0] != 0)
        return (
            bool(seen.any())
            and bool((counted[seen].float().median() > 0.9 * cycles).item())
            and self.mhz(begin, end) is not None
        )

    def launch(self) -> int:
        index = self._next % self.SLOTS
        self._next += 1
        self._kernel(grid=(4 * self._sms, 1, 1), block=(32, 1, 1), args=[self._slots[index]])
        return index

    def mhz(self, begin: int, end: int) -> float | None:
        return probe_mhz(self._slots[begin].tolist(), self._slots[end].tolist())

    @property
    def ok(self) -> bool:
        return not self.reason


class CudaDevice:
    """Timing on the current CUDA device and stream."""

    kind = "cuda"

    def __init__(self, use_probe: bool = True) -> None:
        properties = torch.cuda.get_device_properties()
        self.sm_count = properties.multi_processor_count
        self._flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
        self._clock = ClockProbe(self.sm_count) if use_probe else None

    @property
    def clock_source(self) -> str:
        if self._clock is None:
            return "none"
        return "cycle counters" if self._clock.ok else f"nvml ({self._clock.reason})"

    def flush(self) -> None:
        """Replaces the L2's content, as do_bench does."""
        self._flush.zero_()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def done(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    def delay(self, seconds: float) -> None:
        """What is launched next waits so long, at least; the host does not. At most 50 ms."""
        torch.cuda._sleep(int(min(seconds, 0.05) * _MOST_HZ))

    def elapsed_ms(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return begin.elapsed_time(end)

    def probe(self) -> int | None:
        return self._clock.launch() if self._clock is not None and self._clock.ok else None

    def mhz(self, begin: int | None, end: int | None) -> float | None:
        return None if begin is None or end is None else self._clock.mhz(begin, end)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def capture(self, call: Callable[[], Any], launches: int) -> Callable[[], None]:
        """A CUDA graph of that many launches in a row; the returned function replays it."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(launches):
                call()
        return graph.replay


class HostDevice:
    """The same methods on the CPU. Its figures say nothing about any kernel."""

    kind = "cpu"
    sm_count = SM_COUNT
    clock_source = "none"

    def flush(self) -> None:
        pass

    def mark(self) -> float:
        return time.perf_counter()

    def wait(self, mark: float) -> None:
        pass

    def done(self, mark: float) -> bool:
        return False

    def delay(self, seconds: float) -> None:
        pass

    def elapsed_ms(self, begin: float, end: float) -> float:
        return (end - begin) * 1e3

    def probe(self) -> None:
        return None

    def mhz(self, begin: None, end: None) -> None:
        return None

    def synchronize(self) -> None:
        pass

    def capture(self, call: Callable[[], Any], launches: int) -> Callable[[], None]:
        def replay() -> None:
            for _ in range(launches):
                call()

        return replay


# NVML, by the library that comes with the driver: no Python package is needed.


class Nvml:
    """The few NVML counters in use. Every reading is None where the driver has none."""

    _SM_CLOCK = 1
    _MEMORY_CLOCK = 2

    def __init__(self, uuid: str | None) -> None:
        """uuid: of the GPU, as torch's device properties print it. Raises OSError where NVML is not there."""
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._handle = ctypes.c_void_p()
        if self._library.nvmlInit_v2() != 0:
            raise OSError("nvmlInit failed")
        name = f"GPU-{uuid}".encode() if uuid else b""
        found = uuid and self._library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(self._handle)) == 0
        if not found and self._library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self._handle)) != 0:
            raise OSError("NVML finds no device")

    def _read(self, function: str, kind: type, *arguments: Any) -> int | None:
        value = kind()
        code = getattr(self._library, function)(self._handle, *arguments, ctypes.byref(value))
        return value.value if code == 0 else None

    def energy_mj(self) -> int | None:
        """Energy since the driver was loaded, millijoules. The counter advances in steps of tens of milliseconds."""
        return self._read("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong)

    def sm_mhz(self) -> int | None:
        return self._read("nvmlDeviceGetClockInfo", ctypes.c_uint, self._SM_CLOCK)

    def state(self) -> dict[str, Any]:
        """Clocks, power and temperature at this moment."""
        power = self._read("nvmlDeviceGetPowerUsage", ctypes.c_uint)
        limit = self._read("nvmlDeviceGetEnforcedPowerLimit", ctypes.c_uint)
        return {
            "sm_mhz": self.sm_mhz(),
            "sm_max_mhz": self._read("nvmlDeviceGetMaxClockInfo", ctypes.c_uint, self._SM_CLOCK),
            "memory_mhz": self._read("nvmlDeviceGetClockInfo", ctypes.c_uint, self._MEMORY_CLOCK),
            "power_w": None if power is None else power / 1e3,
            "power_limit_w": None if limit is None else limit / 1e3,
            "temperature_c": self._read("nvmlDeviceGetTemperature", ctypes.c_uint, 0),
        }

    def driver(self) -> str:
        text = ctypes.create_string_buffer(96)
        return text.value.decode() if self._library.nvmlSystemGetDriverVersion(text, 96) == 0 else "unknown"


def open_nvml() -> Nvml | None:
    try:
        uuid = getattr(torch.cuda.get_device_properties(), "uuid", None) if torch.cuda.is_available() else None
        return Nvml(str(uuid) if uuid else None)
    except (OSError, AttributeError):
        return None


@dataclass
class Readings:
    """What NVML said while work ran, at time.monotonic() seconds."""

    ticks: list[tuple[float, int]] = field(default_factory=list)  # each change of the energy counter, millijoules
    clocks: list[tuple[float, int]] = field(default_factory=list)  # SM clock, MHz

    def take(self, nvml: Nvml) -> None:
        now = time.monotonic()
        energy, clock = nvml.energy_mj(), nvml.sm_mhz()
        if energy is not None and (not self.ticks or self.ticks[-1][1] != energy):
            self.ticks.append((now, energy))
        if clock is not None:
            self.clocks.append((now, clock))


@contextmanager
def monitored(nvml: Nvml | None, period_s: float = 0.004) -> Iterator[Readings]:
    """Readings, taken by a thread until the block ends; empty without NVML."""
    readings = Readings()
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(period_s):
            readings.take(nvml)

    thread = threading.Thread(target=watch, daemon=True)
    if nvml is not None:
        thread.start()
    try:
        yield readings
    finally:
        stop.set()
        if thread.is_alive():
            thread.join()


def watts(ticks: list[tuple[float, int]], begin: float, end: float, settle: float = 0.1) -> float | None:
    """Mean power between the first and the last tick of the energy counter inside [begin + settle, end].

    From tick to tick, so that the counter's coarse steps cost nothing; `settle` seconds are left out: the counter
    lags behind the work. None with fewer than two ticks there.
    """
    inside = [tick for tick in ticks if begin + settle <= tick[0] <= end]
    if len(inside) < 2:
        return None
    (time0, energy0), (time1, energy1) = inside[0], inside[-1]
    return (energy1 - energy0) / 1e3 / (time1 - time0)


def mean_clock(clocks: list[tuple[float, int]], begin: float, end: float) -> float | None:
    inside = [mhz for moment, mhz in clocks if begin <= moment <= end]
    return sum(inside) / len(inside) if inside else None


# What identifies a run


def _git(*arguments: str) -> str | None:
    root = Path(__file__).resolve().parent
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _version(distribution: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _flashmsa_build() -> dict | None:
    try:
        from flashmsa import _C
    except ImportError:
        return None
    return _C.build_info()


def environment(nvml: Nvml | None, commit: str | None = None) -> dict[str, Any]:
    """GPU, driver and library versions, and the commit that was measured."""
    gpu = torch.cuda.is_available()
    status = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "sm_count": torch.cuda.get_device_properties().multi_processor_count if gpu else None,
        "driver": nvml.driver() if nvml else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if gpu else None,
        "flash_attn_4": _version("flash-attn-4"),
        "flashmsa": _version("flashmsa"),
        "flashmsa_build": _flashmsa_build(),
        "python": platform.python_version(),
        "commit": commit or _git("rev-parse", "HEAD") or "unknown",
        "modified": None if status is None else bool(status),
    }
