"""The examples run, small, and say what they say."""

from __future__ import annotations

import importlib.util
import itertools
import math
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import flashmsa

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = ("--steps", "8", "--rows", "2", "--length", "160", "--layers", "1", "--width", "32")


@pytest.fixture(scope="module")
def training() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_language_model", EXAMPLES / "train_language_model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_training_coincides(training: ModuleType, device: str, capsys: pytest.CaptureFixture) -> None:
    assert training.main([*TINY, "--device", device]) == 0
    printed = capsys.readouterr().out
    assert "the curves coincide" in printed and "step 1 to 8" in printed
    first, last = map(float, re.search(r"flashmsa +loss ([\d.]+) to ([\d.]+)", printed).groups())
    # Untrained it guesses among 257 tokens.
    assert abs(first - math.log(257)) < 1.0 and last < first


def test_as_a_program() -> None:
    script = EXAMPLES / "train_language_model.py"
    done = subprocess.run(
        [sys.executable, script, *TINY, "--steps", "2", "--device", "cpu"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "the curves coincide" in done.stdout


def test_curves_that_part_are_told(
    training: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A mask that leaks one document into the next is noticed."""
    real = flashmsa.nn.SelfAttention.forward

    def leaking(self, x, mask, *, position):
        return real(self, x, flashmsa.Causal(), position=position)

    monkeypatch.setattr(flashmsa.nn.SelfAttention, "forward", leaking)
    assert training.main([*TINY, "--device", "cpu"]) == 1
    assert re.search(r"step \d: .* apart, more than", capsys.readouterr().err)


def test_batches_are_whole_documents(training: ModuleType) -> None:
    """Every document begins with its mark and goes on to the end of it, or of the row; targets are the next bytes."""
    batch = training.pack(2, 300, torch.device("cpu"), torch.Generator().manual_seed(1))()
    texts = [entry.text.encode() for entry in training.corpus.gather()]
    offsets = batch.mask.offsets
    assert offsets.shape[0] == 2
    for row in range(2):
        cuts = offsets[row].unique().tolist()
        assert cuts[0] == 0 and cuts[-1] == 300 and len(cuts) > 2
        for a, b in itertools.pairwise(cuts):
            document = batch.tokens[row, a:b]
            assert document[0] == training.START and batch.position[row, a:b].tolist() == list(range(b - a))
            text = bytes(document[1:].tolist())
            assert text in texts or (b == 300 and any(other.startswith(text) for other in texts))
            assert batch.targets[row, a : b - 1].tolist() == document[1:].tolist() and batch.targets[row, b - 1] == -100


def test_pictures(training: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    curves = {"flashmsa": [3.0, 2.0, 1.0], "sdpa": [3.0, 2.5, 1.0]}
    assert training.plot(curves, tmp_path / "curves.png") and (tmp_path / "curves.png").stat().st_size > 1000
    lines = training.draw_text(curves, height=5, width=3).splitlines()
    assert lines[0].endswith("|*  ") and lines[1].endswith("| s ") and lines[2].endswith("| f ")
    assert lines[4].endswith("|  *")


def test_bounds(training: ModuleType) -> None:
    """Four times the farthest so far, and four roundings of the loss."""
    assert training.bounds([1.0, 2.0, 4.0], [1.0, 2.5, 4.25], 0.125) == [0.5, 3.0, 4.0]
