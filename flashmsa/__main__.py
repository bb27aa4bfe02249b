"""python -m flashmsa info | masks | demo | bench | tune | check

info   device, driver, torch, build, and the compiled kernels with their tiles, registers and shared memory
masks  every kind of mask: its picture, what it allows, what it costs (--write FILE renews a document that holds them)
demo   search over the running Python's documentation: hundreds of texts packed into one sequence
bench  times the kernels beside others' (from a source checkout; arguments go to benchmarks/run.py)
tune   times every compiled kernel that can run a call, on a Hopper GPU, and says which is the fastest
check  a quick self-test of this machine's backends against the float64 reference
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def info(argv: list[str]) -> int:
    from .info import text

    _expect_none("info", argv)
    print(text())
    return 0


def masks(argv: list[str]) -> int:
    from . import gallery

    if not argv:
        print(gallery.text())
        return 0
    if len(argv) != 2 or argv[0] != "--write":
        print(f"masks: takes no arguments or --write FILE, got {' '.join(argv)}", file=sys.stderr)
        return 2
    try:
        changed = gallery.write(Path(argv[1]))
    except (OSError, ValueError) as error:
        print(f"masks: {error}", file=sys.stderr)
        return 1
    print(f"{argv[1]}: {'written' if changed else 'is current'}")
    return 0


def demo(argv: list[str]) -> int:
    from .demo import main as run

    return run(argv) or 0


def bench(argv: list[str]) -> int:
    script = Path(__file__).resolve().parent.parent / "benchmarks" / "run.py"
    if not script.exists():
        print(
            f"bench: the benchmarks belong to the source checkout, not to the package in {Path(__file__).parent}"
            "; there, run `python benchmarks/run.py`, or `make bench`",
            file=sys.stderr,
        )
        return 1
    sys.argv = [str(script), *argv]
    runpy.run_path(str(script), run_name="__main__")
    return 0


def tune(argv: list[str]) -> int:
    from .tune import main as run

    return run(argv)


def check(argv: list[str]) -> int:
    from .selftest import run

    _expect_none("check", argv)
    return 0 if run() else 1


def _expect_none(command: str, argv: list[str]) -> None:
    if argv:
        print(f"{command}: takes no arguments, got {' '.join(argv)}", file=sys.stderr)
        raise SystemExit(2)


COMMANDS = {"info": info, "masks": masks, "demo": demo, "bench": bench, "tune": tune, "check": check}


def main(argv: list[str] | None = None) -> int:
    """Runs one command; the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in COMMANDS:
        return COMMANDS[argv[0]](argv[1:])
    asked = not argv or argv[0] in ("-h", "--help")
    if not asked:
        print(f"flashmsa: {argv[0]!r} is no command; one of {', '.join(COMMANDS)}\n", file=sys.stderr)
    print(__doc__, file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


if __name__ == "__main__":
    raise SystemExit(main())
