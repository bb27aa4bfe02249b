"""Prints what has to be installed before flashmsa can be built here: its dependencies, and those of the extras named.

    python .ci/requirements.py test lint

Read from pyproject.toml, so that they are listed once. `lint` alone needs no torch: see `--only`.
"""

from __future__ import annotations

import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib


def main(arguments: list[str]) -> None:
    text = (Path(__file__).resolve().parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)
    extras = table["project"]["optional-dependencies"]
    wanted = [] if "--only" in arguments else [*table["build-system"]["requires"], *table["project"]["dependencies"]]
    for name in arguments:
        if name != "--only":
            wanted += extras[name]
    print("\n".join(dict.fromkeys(wanted)))


if __name__ == "__main__":
    main(sys.argv[1:])
