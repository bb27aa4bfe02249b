"""Checked mode."""

from __future__ import annotations

from types import TracebackType

from . import ops


class check:
    """Turns checked mode on (``check(True)``) or off: every call then validates the values its mask holds.

    Offsets must start at 0, never decrease, and end within q's and k's lengths; prefixes must not be negative; the
    lengths in use of ``attention_varlen`` must lie within their sequences; the blocks of a BlockSparse must fit into
    its capacity. Over paged caches lengths must lie within their tables, entries up to a length name pages that exist,
    listed pages be places of the table, and new tokens have room. Hash buckets may be any numbers. ValueError names the
    first value that is wrong. Reading them waits for the device, so it is meant for finding a fault, not for
    production. Inside torch.compile and CUDA graph capture values cannot be read, and are not checked.

    As a context manager, ``with flashmsa.check(True):``, the mode before it returns at the end. Holds for the process.
    """

    def __init__(self, enabled: bool = True) -> None:
        if not isinstance(enabled, bool):
            raise TypeError(f"enabled: {type(enabled).__name__}; must be a bool")
        self._before = ops._checked
        ops._checked = enabled

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        ops._checked = self._before
