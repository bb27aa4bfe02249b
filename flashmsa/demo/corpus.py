"""Real text for the demo: the docstrings of the Python that runs it.

Source files are parsed, never imported, so no module of the standard library runs. Only builtins
and itertools, which are written in C and have no source to parse, are asked for their docstrings directly.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Modules that most programs use come first, so that a small corpus already answers everyday questions.
EVERYDAY_C = ("builtins", "itertools")
EVERYDAY = (
    *("bisect", "heapq", "random", "statistics", "textwrap", "shutil", "glob", "fnmatch", "tempfile", "subprocess"),
    *("json", "csv", "gzip", "base64", "hashlib", "re", "copy", "pickle", "calendar", "datetime", "urllib.parse"),
    *("posixpath", "functools", "contextlib", "collections", "fractions", "difflib", "secrets", "zipfile", "socket"),
)
SKIPPED_FOLDERS = frozenset(("test", "tests", "idlelib", "lib2to3", "ensurepip", "turtledemo", "site-packages"))
BUILTIN_TYPES = (str, list, dict, set)
MIN_WORDS = 4


class Entry(NamedTuple):
    """One text of the corpus."""

    name: str  # where it stands, e.g. "heapq.nlargest"
    doc: str  # the cleaned docstring

    @property
    def text(self) -> str:
        """What the encoder reads."""
        return f"{self.name}: {self.doc}"

    @property
    def title(self) -> str:
        """The first line of the docstring."""
        return self.doc.splitlines()[0]


def gather(limit: int | None = None) -> list[Entry]:
    """The first `limit` docstrings (None: all) of public functions, classes and methods.

    The same Python gives the same list, and a smaller limit gives a prefix of a larger one. A docstring that
    appears twice is taken once. Raises ValueError where limit is not positive, RuntimeError where this Python
    carries no docstrings and no source.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit: must be at least 1 or None, got {limit}")
    found: dict[str, Entry] = {}
    for entry in _every_entry():
        if len(entry.doc.split()) >= MIN_WORDS:
            found.setdefault(entry.doc, entry)
        if limit is not None and len(found) == limit:
            break
    if not found:
        raise RuntimeError(f"no docstrings found: {_library_root()} holds no source and the builtins have no __doc__")
    return list(found.values())


def _every_entry() -> Iterator[Entry]:
    for module_name in EVERYDAY_C:
        yield from _of_c_module(module_name)
    for module_name, path in _source_files():
        yield from _of_source(module_name, path)


def _library_root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _source_files() -> list[tuple[str, Path]]:
    """(module name, file) of each public module of the standard library, the everyday ones first."""
    root = _library_root()
    files: dict[str, Path] = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        public = parts and not any(part.startswith("_") for part in parts)
        if public and parts[0] in sys.stdlib_module_names and not SKIPPED_FOLDERS.intersection(parts):
            files[".".join(parts)] = path
    rank = {name: position for position, name in enumerate(EVERYDAY)}
    return sorted(files.items(), key=lambda item: (rank.get(item[0], len(rank)), item[0]))


def _of_source(module_name: str, path: Path) -> Iterator[Entry]:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # a file that this Python cannot read has no docstrings for us
        return
    yield from _of_body(module_name, tree.body)


def _of_body(prefix: str, body: list[ast.stmt]) -> Iterator[Entry]:
    """Public definitions of a module or of a class body, and those of its public classes."""
    for node in body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or node.name.startswith("_"):
            continue
        name = f"{prefix}.{node.name}"
        doc = ast.get_docstring(node)
        if doc:
            yield Entry(name, doc)
        if isinstance(node, ast.ClassDef):
            yield from _of_body(name, node.body)


def _of_c_module(module_name: str) -> Iterator[Entry]:
    """Public functions and classes of a module written in C, and the methods of the common built-in types.

    Only what a name's own `__doc__` holds counts. Exceptions are left out: their one-line texts say little.
    """
    module = importlib.import_module(module_name)
    for name, value in sorted(vars(module).items()):
        is_exception = isinstance(value, type) and issubclass(value, BaseException)
        if name.startswith("_") or is_exception or not (isinstance(value, type) or inspect.isbuiltin(value)):
            continue
        # NOTE: site adds exit, help and the like to the builtins of an interactive Python; they are not built in.
        if getattr(value, "__module__", module_name) != module_name:
            continue
        if value.__doc__:
            yield Entry(f"{module_name}.{name}", inspect.cleandoc(value.__doc__))
        for method_name, method in sorted(vars(value).items()) if value in BUILTIN_TYPES else ():
            doc = getattr(method, "__doc__", None)
            if not method_name.startswith("_") and doc:
                yield Entry(f"{name}.{method_name}", inspect.cleandoc(doc))
