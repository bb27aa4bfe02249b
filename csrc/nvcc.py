"""Runs nvcc, and fails where ptxas says that a kernel would be slow or would use local memory.

    python csrc/nvcc.py /usr/local/cuda/bin/nvcc ARGUMENTS...

setup.py and CMake compile every .cu file through this. A wgmma that ptxas serialises costs 30 to 50 % of a kernel's
speed, and a spill nearly as much; both only show as a line among others, in a build that succeeds.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

# "Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...", one code per cause.
SERIALISED = {f"C{code}" for code in (7507, 7508, 7510, 7511, 7512, 7514, 7515, 7517, 7519, 7520)}
# Kernels with one of these in their name may not have a stack frame.
NO_STACK = ("attention", "paged_decode", "cluster_decode")

_FUNCTION = re.compile(r"(?:Function properties for|Compiling entry function) '?([\w$.]+)'?")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_CODE = re.compile(r"\((C\d+)\)")
# What -v adds to every compilation; said once a kernel it drowns the rest.
_VERBOSE = re.compile(
    r"^\s*(ptxas info\s*: (\d+ bytes gmem|Compiling entry|Function properties|Used \d+|Compile time)|\d+ bytes stack)"
)


def faults(log: str) -> list[str]:
    """What in nvcc's output must fail the build, one line each."""
    found = []
    function = "a kernel"
    for line in log.splitlines():
        match = _FUNCTION.search(line)
        if match:
            function = match[1]
        code = _CODE.search(line)
        if code and code[1] in SERIALISED:
            found.append(f"serialised wgmma: {line.strip()}")
        stack = _STACK.search(line)
        if not stack:
            continue
        frame, stores, loads = map(int, stack.groups())
        if stores or loads:
            found.append(f"{function}: spills registers, {stores} bytes stored and {loads} loaded")
        elif frame and any(name in function for name in NO_STACK):
            found.append(f"{function}: {frame} bytes of local memory")
    return found


def main(command: list[str]) -> int:
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    found = faults(result.stdout)
    shown = result.stdout if found else "\n".join(x for x in result.stdout.splitlines() if not _VERBOSE.match(x))
    if shown.strip():
        print(shown.rstrip(), file=sys.stderr)
    if result.returncode != 0 or not found:
        return result.returncode
    if "-o" in command:
        # NOTE: a next build would take an object left here for a good one.
        Path(command[command.index("-o") + 1]).unlink(missing_ok=True)
    for fault in found:
        print(f"flashmsa: build failed: {fault}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
