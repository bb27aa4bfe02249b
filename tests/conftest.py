"""Shared test set-up: the gpu marker, seeds, and a clean state after every test."""

from __future__ import annotations

import argparse
import os
import re
import zlib
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

KEPT_BYTES = 1 << 30  # of device memory that a worker keeps from one test to the next

# A fixed run of examples keeps one tree's result the same everywhere; HYPOTHESIS_PROFILE=explore looks for new ones.
_COMMON = {"deadline": None, "database": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("fixed", derandomize=True, max_examples=60, **_COMMON)
settings.register_profile("explore", max_examples=300, print_blob=True, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


def gpu_skip_reason() -> str | None:
    """Why tests marked gpu cannot run here; None where they can."""
    if not torch.cuda.is_available():
        return "needs a GPU of compute capability 9.0; torch sees no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"needs a GPU of compute capability 9.0; this one has {capability[0]}.{capability[1]}"
    import flashmsa

    info = flashmsa._C.build_info()
    if not info["cuda"]:
        return f"needs the sm_90a kernels; this build left them out: {info.get('reason', info)}"
    return None


def shard(text: str) -> tuple[int, int]:
    """(k, n) of "k/n"."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is no part of the tests: K/N with 1 <= K <= N, as 2/3")
    return int(found[1]), int(found[2])


def in_shard(name: str, part: tuple[int, int]) -> bool:
    """Whether a test is in the k-th of n parts: by its name, so in one part whatever else is selected."""
    k, n = part
    return zlib.crc32(name.encode()) % n == k - 1


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="K/N", type=shard, help="only the K-th of N parts of the tests, by their names")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a GPU of compute capability 9.0 and the compiled kernels")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("--shard")
    if part is not None:
        sorted_out: dict[bool, list[pytest.Item]] = {True: [], False: []}
        for item in items:
            sorted_out[in_shard(item.nodeid, part)].append(item)
        config.hook.pytest_deselected(items=sorted_out[False])
        items[:] = sorted_out[True]
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = gpu_skip_reason() if marked else None
    if reason is not None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tensors here are small: on a busy machine threads wait for each other longer than they work.

    test_number_of_threads runs the CPU backend with several.
    """
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """A seed from the test's own name: a test alone sees the data it sees in a full run."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(autouse=True)
def _memory_returned() -> Iterator[None]:
    """Workers side by side share one card: what a large test leaves in the cache of memory is lost to them."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > KEPT_BYTES:
        torch.cuda.empty_cache()


@pytest.fixture
def checked_mode():
    """flashmsa.check(True) for one test."""
    import flashmsa

    flashmsa.check(True)
    try:
        yield
    finally:
        flashmsa.check(False)
