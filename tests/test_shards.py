"""Parts of the tests, for machines that have no time for all of them at once."""

from __future__ import annotations

import argparse

import pytest
from conftest import in_shard, shard

NAMES = [f"tests/test_{file}.py::test_{name}[{case}]" for file in "abc" for name in "de" for case in range(50)]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_every_test_is_in_one_part(count: int) -> None:
    parts = [[name for name in NAMES if in_shard(name, (k, count))] for k in range(1, count + 1)]
    assert sorted(name for part in parts for name in part) == sorted(NAMES)
    assert all(len(part) > len(NAMES) / count / 2 for part in parts)


@pytest.mark.parametrize(("text", "part"), [("1/1", (1, 1)), ("2/3", (2, 3)), ("10/10", (10, 10))])
def test_parts_as_they_are_written(text: str, part: tuple[int, int]) -> None:
    assert shard(text) == part


@pytest.mark.parametrize("text", ["", "1", "0/3", "4/3", "-1/3", "1/0", "1/3/5", "a/b"])
def test_what_is_no_part(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="no part of the tests: K/N"):
        shard(text)
