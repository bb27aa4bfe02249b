"""README.md is true: its examples run and print what it shows; what it names exists, or is missing where it says so."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import flashmsa
from flashmsa import dispatch, gallery, masks
from flashmsa.__main__ import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
READMES = [ROOT / name for name in ("README.md", "csrc/README.md", "tests/README.md", "benchmarks/README.md")]
TEXT = READMES[0].read_text(encoding="utf-8")
# What a build or a run makes.
MADE = ("build/", ".venv", "benchmarks/results", "results/")


@dataclass(frozen=True)
class Block:
    line: int  # of the file, where its text begins
    language: str
    text: str
    follows: bool  # right after another block, with an empty line at most between


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a Markdown file."""
    found, start, last_end = [], None, -2
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
            continue
        between = "".join(lines[last_end + 1 : start]).strip()
        language = lines[start].strip("`\n")
        found.append(Block(start + 2, language, "".join(lines[start + 1 : number]), bool(found) and not between))
        start, last_end = None, number
    return found


def prose(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def shell_lines(text: str) -> list[str]:
    """The commands in blocks without a language, without their remarks."""
    lines = [line.split(" #")[0].strip() for x in blocks(text) if not x.language for line in x.text.splitlines()]
    return [line for line in lines if line]


def commands_starting(prefix: str) -> list[list[str]]:
    """The arguments of every command of that beginning, in README.md's blocks and in its prose."""
    spans = re.findall(r"`([^`\n]+)`", prose(TEXT))
    parts = [part.strip() for line in [*shell_lines(TEXT), *spans] for part in line.split("&&")]
    return [shlex.split(part)[len(prefix.split()) :] for part in parts if part.startswith(prefix + " ")]


def section(title: str) -> str:
    """What stands under a heading, up to the next one."""
    found = re.search(rf"^#+ {title}\n(.*?)(?=^#+ |\Z)", TEXT, re.DOTALL | re.MULTILINE)
    assert found is not None, f"README.md has no section {title!r}"
    return found[1]


# ---------------------------------------------------------------------------------------------------------------------
# Examples


def run_examples(compare: bool) -> None:
    """All in one namespace, as they follow one another. A text block right after code shows what that code prints."""
    namespace: dict[str, object] = {"__name__": "readme"}
    everything = blocks(TEXT)
    for block, after in zip(everything, [*everything[1:], None], strict=True):
        if block.language != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            # Tracebacks show README.md's own lines.
            exec(compile("\n" * (block.line - 1) + block.text, str(READMES[0]), "exec"), namespace)
        if compare:
            shown = after.text if after is not None and after.language == "text" and after.follows else ""
            assert printed.getvalue() == shown, f"README.md:{block.line} prints something else"


def test_examples_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    torch._dynamo.reset()
    run_examples(compare=True)


@pytest.mark.gpu
def test_examples_on_the_gpu() -> None:
    torch._dynamo.reset()
    run_examples(compare=False)


def test_there_are_examples() -> None:
    code = "\n".join(block.text for block in blocks(TEXT) if block.language == "python")
    left_out = {"Explanation", "PagedExplanation", "Mask", "Dense", "Intersection", "Rope", "compat", "nn", "reference"}
    for name in set(flashmsa.__all__) - left_out:
        assert re.search(rf"\b{name}\(", code), f"no example of {name}"


# ---------------------------------------------------------------------------------------------------------------------
# The table of masks


def test_the_table_of_masks_is_current() -> None:
    assert gallery.renewed(TEXT) == TEXT, "run `python -m flashmsa masks --write README.md`"


def test_every_mask_has_a_picture() -> None:
    shown = list(gallery.entries())
    kinds = {part._lower()[0] for entry in shown for part in (entry.mask, *getattr(entry.mask, "masks", ()))}
    assert kinds == set(dispatch.MASK_KINDS)
    classes = {type(entry.mask).__name__ for entry in shown}
    assert classes >= set(flashmsa.__all__) & {
        name for name in dir(masks) if isinstance(getattr(masks, name), type)
    } - {"Mask"}
    for entry in shown:
        picture = entry.mask.draw(entry.size, entry.size, 12)
        assert len(entry.title) <= 24 and [len(line) for line in picture.splitlines()] == [24] * 12
        if entry.size == 12:
            assert picture == "\n".join(
                "".join("██" if seen else "··" for seen in row)
                for row in entry.mask.to_dense(12, 12).view(12, 12).tolist()
            )


def test_kernels_of_the_table_exist() -> None:
    named = set(re.findall(r"`(fwd_\w+)`", gallery.text()))
    kinds = ("dense", "causal", "document", "short_document", "band", "composite", "block_sparse", "hash")
    assert named == {f"fwd_{name}" for name in kinds}
    traits = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "csrc/mask").glob("*.h"))
    assert named == {f"fwd_{name}" for name in re.findall(r'kName = "(\w+)"', traits)}


# ---------------------------------------------------------------------------------------------------------------------
# Names


@pytest.mark.parametrize("name", sorted(set(re.findall(r"\bflashmsa\.([A-Za-z_]\w*)", TEXT))))
def test_public_names_exist(name: str) -> None:
    assert name in flashmsa.__all__


def test_gaps_are_gaps() -> None:
    names = re.findall(r"`([A-Za-z_]\w*)`", section("Not there yet"))
    assert {"Custom", "quantize_fp8", "config"} <= set(names)
    assert [name for name in names if hasattr(flashmsa, name)] == []


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    calls = commands_starting("make")
    assert {call[0] for call in calls} >= {"demo", "test", "bench", "lint", "format"}
    for call in calls:
        for word in call:
            name, is_variable, _ = word.partition("=")
            if is_variable:
                assert re.search(rf"\b{name}\b", makefile), f"the Makefile knows no {name}"
            else:
                assert name in targets, f"the Makefile has no target {name}"


def test_commands_of_the_package_exist() -> None:
    calls = commands_starting("python -m flashmsa")
    assert calls
    assert [call for call in calls if call[0] not in COMMANDS] == []


def test_benchmark_commands_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr(sys, "path", list(sys.path))  # run.py moves the root about
    from benchmarks import run

    calls = commands_starting("python benchmarks/run.py")
    assert calls
    for call in calls:
        options = run.parse(call)
        if options.ncu:
            run.named_case(options.ncu)
        else:
            run.chosen_units(options, run.chosen_candidates(options))


def test_kernel_name_for_ncu() -> None:
    names = re.findall(r"--kernel-name regex:(\w+)", TEXT)
    assert names
    kernel = (ROOT / "csrc/fwd/kernel.cuh").read_text(encoding="utf-8")
    assert [name for name in names if f"{name}(" not in kernel] == []


# ---------------------------------------------------------------------------------------------------------------------
# Files


def named_paths(readme: Path) -> list[str]:
    """What looks like a path of this repository: in code spans, and as words of its blocks."""
    text = readme.read_text(encoding="utf-8")
    spans = re.findall(r"`([^`\n]+)`", prose(text))
    words = [word for part in [*spans, *shell_lines(text)] for word in part.split()]
    tops = {path.name for path in [*ROOT.iterdir(), *readme.parent.iterdir()]}
    suffix = re.compile(r"\w\.(py|md|h|cuh|cu|cpp|toml|txt)$")
    paths = [word for word in words if suffix.search(word) or ("/" in word and word.split("/")[0] in tops)]
    return sorted({path for path in paths if re.fullmatch(r"[\w./-]+", path) and not path.startswith(MADE)})


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_exist(readme: Path) -> None:
    named = [path for path in named_paths(readme) if path != "script.py"]  # the reader's own
    assert len(named) > 3
    missing = [path for path in named if not any((base / path).exists() for base in (ROOT, readme.parent))]
    assert missing == []


def test_every_folder_of_the_sources_is_described() -> None:
    for folder in sorted(path for path in (ROOT / "csrc").iterdir() if path.is_dir() and path.name != "__pycache__"):
        line = f"csrc/{folder.name}/"
        assert re.search(rf"^{re.escape(line)}\s+\S", TEXT, re.MULTILINE), f"README.md says nothing of {line}"
        assert f"`{folder.name}/`" in READMES[1].read_text(encoding="utf-8"), f"csrc/README.md says nothing of {line}"


def test_supported_versions() -> None:
    """The versions that README.md names are those that the build asks for."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    python = re.search(r'requires-python = ">=([\d.]+)"', project)[1]
    torch_version = re.search(r'dependencies = \["torch>=([\d.]+)"\]', project)[1]
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    first, last = re.search(r"SUPPORTED_CUDA = \(\((\d+, \d+)\), \((\d+), 99\)\)", setup).groups()
    text = " ".join(TEXT.split())
    assert f"Python ≥ {python}" in text
    assert f"torch ≥ {torch_version}" in text
    assert f"CUDA {first.replace(', ', '.')} to {last}.x" in text
