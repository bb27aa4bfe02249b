"""python -m flashmsa, and importing the package where its compiled part is not."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashmsa
from flashmsa import _C, gallery, selftest
from flashmsa import __main__ as cli

PACKAGE = Path(flashmsa.__file__).parent


def command(*arguments: str, folder: Path = PACKAGE.parent) -> subprocess.CompletedProcess:
    """One command in its own process; `folder` is the first place to import from."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=300, encoding="utf-8"
    )


def test_info() -> None:
    done = command("-m", "flashmsa", "info")
    assert done.returncode == 0, done.stderr
    assert f"flashmsa  {flashmsa.__version__}" in done.stdout
    assert torch.__version__ in done.stdout and _C.build_info()["compiler"] in done.stdout
    for kernel in (*_C.kernels(), *_C.backward_kernels(), *_C.paged_kernels()):
        line = next(x for x in done.stdout.splitlines() if x.startswith(kernel["name"] + " "))
        tile = f"{kernel['block_q']} x {kernel['block_kv']}" if "block_q" in kernel else f"{kernel['block_kv']} keys"
        head_dims = {kernel["head_dim_bucket"], kernel.get("head_dim_v_bucket", kernel["head_dim_bucket"])}
        assert " / ".join(str(x) for x in sorted(head_dims, reverse=True)) in line
        assert tile in line and f"{kernel['shared_memory']:,} B" in line
    if not _C.kernels():
        assert f"kernels   none: {_C.build_info()['reason']}" in done.stdout


def test_check(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("ok ") for line in lines) == len(list(selftest.targets()))
    assert all(line.startswith(("ok ", "skipped sm90")) for line in lines)


@pytest.mark.parametrize("fault", ["out", "lse", "nan", "empty"])
def test_check_finds_a_wrong_backend(
    fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def wrong(*args, **kwargs):
        out, lse = flashmsa.attention(*args, **kwargs)
        if fault == "out":
            out[0, 0, -1, 0] += 0.1
        elif fault == "nan":
            out[0, 0, -1, 0] = float("nan")
        elif fault == "lse":
            lse[0, 0, -1] += 1e-3
        else:
            lse[0, 0, -1] = -float("inf")
        return out, lse

    monkeypatch.setattr(selftest, "attention", wrong)
    monkeypatch.setattr(selftest, "CASES", selftest.CASES[:2])
    assert cli.main(["check"]) == 1
    output = capsys.readouterr().out
    assert "FAILED  cpu on cpu, float32: 0 of 2 cases" in output
    assert ("lse" if fault in ("lse", "empty") else "maximum error") in output


def test_masks(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["masks"]) == 0
    shown = capsys.readouterr().out
    assert "HashBucket(" in shown and shown.count("█") > 1000
    document = tmp_path / "document.md"
    document.write_text(f"before\n{gallery.BEGIN}\nold\n{gallery.END}\nafter\n", encoding="utf-8")
    for said in ("written", "is current"):
        assert cli.main(["masks", "--write", str(document)]) == 0
        assert said in capsys.readouterr().out
    text = document.read_text(encoding="utf-8")
    assert shown.strip() in text and text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    document.write_text("without marks", encoding="utf-8")
    assert cli.main(["masks", "--write", str(document)]) == 1 and "does not hold" in capsys.readouterr().err
    assert cli.main(["masks", "--write", str(tmp_path / "missing.md")]) == 1
    assert cli.main(["masks", "--read"]) == 2
    assert document.read_text(encoding="utf-8") == "without marks"


def test_help_and_unknown_commands(capsys: pytest.CaptureFixture) -> None:
    for argv in ([], ["--help"]):
        assert cli.main(argv) == 0
        assert "info | masks | demo | bench | tune | check" in capsys.readouterr().out
    assert cli.main(["train"]) == 2
    assert "'train' is no command; one of info, masks, demo, bench, tune, check" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        cli.main(["info", "--all"])
    assert stopped.value.code == 2 and "info: takes no arguments, got --all" in capsys.readouterr().err


def test_arguments_reach_demo_and_bench() -> None:
    for name, word in (("demo", "demo"), ("bench", "--dry-run"), ("tune", "--head-dims")):
        done = command("-m", "flashmsa", name, "--help")
        assert done.returncode == 0, done.stderr
        assert "usage" in done.stdout and word in done.stdout


def installed_copy(folder: Path) -> Path:
    """The package alone, without the checkout and without its compiled part."""
    shutil.copytree(PACKAGE, folder / "flashmsa", ignore=shutil.ignore_patterns("*.so", "__pycache__", "demo"))
    return folder / "flashmsa"


def test_bench_outside_a_checkout_says_where(tmp_path: Path) -> None:
    copied = installed_copy(tmp_path)
    shutil.copy(_C.__file__, copied)
    done = command("-m", "flashmsa", "bench", folder=tmp_path)
    assert done.returncode == 1 and "belong to the source checkout" in done.stderr and "Traceback" not in done.stderr


def test_import_without_the_compiled_part(tmp_path: Path) -> None:
    installed_copy(tmp_path)
    done = command("-c", "import flashmsa", folder=tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: flashmsa: its compiled part is missing: flashmsa._C has not been built")
    assert "python setup.py build_ext --inplace" in last and "pip install --no-build-isolation ." in last


def test_import_of_a_compiled_part_that_does_not_load(tmp_path: Path) -> None:
    copied = installed_copy(tmp_path)
    (copied / Path(_C.__file__).name).write_bytes(b"not a library")
    done = command("-c", "import flashmsa", folder=tmp_path)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith("ImportError: flashmsa: its compiled part is missing")
    assert f"{Path(_C.__file__).name} does not load" in last and torch.__version__ in last


def test_import_is_quiet_and_starts_no_device() -> None:
    done = command("-W", "error", "-c", "import flashmsa, torch; assert not torch.cuda.is_initialized()")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
