"""``python -m flashmsa masks``: every kind of mask with its picture, what it allows and what it costs.

README.md holds the same between two marks; ``python -m flashmsa masks --write README.md`` renews it, and a test tells
when it is out of date.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch

from .masks import (
    BlockSparse,
    Causal,
    Dense,
    DilatedWindow,
    Document,
    HashBucket,
    Mask,
    PerSequence,
    PrefixLM,
    SlidingWindow,
)

BEGIN = "<!-- masks: written by `python -m flashmsa masks --write README.md` -->"
END = "<!-- masks: end -->"
_CELLS = 12
_IN_A_ROW = 4
_SEE_BENCHMARKS = "see benchmarks"


@dataclass(frozen=True)
class Entry:
    """A line of the table, and a picture of 12 x 12 cells."""

    title: str  # over the picture; at most as wide as it
    code: str
    allows: str
    cost: str
    mask: Mask
    size: int = _CELLS  # queries, and keys, of the picture
    figure: str = _SEE_BENCHMARKS  # what was measured


def entries() -> Iterator[Entry]:
    """Every kind, in the order of ``flashmsa.masks``."""
    yield Entry(
        "dense",
        "Dense()",
        "every key; the same as no mask",
        "`fwd_dense`: all tiles, none tested",
        Dense(),
        figure="d128 1×16384: 804 TFLOP/s, 1.21 × cuDNN",
    )
    yield Entry(
        "causal",
        "Causal()",
        "j ≤ p",
        "`fwd_causal`: half of the tiles; those on the diagonal are tested",
        Causal(),
        figure="d128 1×16384: 807 TFLOP/s, 1.27 × cuDNN",
    )
    yield Entry(
        "window",
        "SlidingWindow(3, 1)",
        "p − left ≤ j ≤ p + right",
        "`fwd_band`: the tiles of the band; those on its two edges are tested",
        SlidingWindow(3, 1),
        figure="±4096 in 32768: 734 TFLOP/s, 0.98 of dense",
    )
    yield Entry(
        "first keys kept",
        "SlidingWindow(3, 0, keep_first=2)",
        "the window's, and the first keys from everywhere (up to p + right)",
        "`fwd_composite`: the band's tiles, and those of the first keys, tested",
        SlidingWindow(3, 0, keep_first=2),
    )
    yield Entry(
        "prefix",
        "PrefixLM(5)",
        "j < prefix or j ≤ p; the prefix an int, or one for each batch",
        "`fwd_band`, with one for each batch `fwd_composite`: causal's tiles and the prefix's; those on the diagonal "
        "and at the prefix's end are tested",
        PrefixLM(5),
        figure="4096 in 16384: 785 TFLOP/s, 0.98 of causal",
    )
    yield Entry(
        "dilated",
        "DilatedWindow(2, 1, dilation=3)",
        "j = p + t · dilation for t from −left to right",
        "`fwd_composite` on strided rows, in at most four launches: the tiles of a window of left + right + 1 keys, "
        "residue by residue; none is spent on keys between",
        DilatedWindow(2, 1, dilation=3),
        figure="every 4th of ±4096: 663 TFLOP/s, 1.00 of a window",
    )
    yield Entry(
        "documents",
        "Document([0, 3, 4, 9, 12], causal=True)",
        "keys of the same document; with causal, aligned at its end",
        "`fwd_document`, `fwd_short_document` up to a mean length of 384 at head dim 128, after a small kernel that "
        "orders the blocks of rows, each in one document unless these are short: the tiles of the documents; those at "
        "their edges are tested",
        Document([0, 3, 4, 9, 12], causal=True),
        figure="16 in 16384: 605 … 705 TFLOP/s, causal 514 … 572",
    )
    sequences = (torch.tensor(x, dtype=torch.int32) for x in ([0, 4, 4, 12], [0, 5, 6, 12]))
    yield Entry(
        "in each sequence",
        "attention_varlen(…, mask=SlidingWindow(2, 0))",
        "the mask inside each packed sequence, of any lengths of queries and keys",
        "plain or `Causal()`: a document mask's; others and `seqused_k`: `fwd_composite`, ordered alike",
        PerSequence(SlidingWindow(2, 0), *sequences),
        figure="plain: as documents",
    )
    buckets = torch.tensor([[[0, 2, 1, 0, 1, 2, 2, 0, 1, 0, 2, 1]]], dtype=torch.int32)
    yield Entry(
        "buckets",
        "HashBucket(bucket, causal=True)",
        "keys of the same bucket; with causal, j ≤ p",
        "`fwd_hash`: the tiles of the buckets, whose rows of q, k and v are read one by one where they lie, as the "
        "result is written. Sorted when the mask is made",
        HashBucket(buckets, causal=True),
        figure="64 of 16384, causal: 160 TFLOP/s",
    )
    blocks = torch.tensor([[0, 1, 1], [1, 0, 0], [0, 1, 0]], dtype=torch.bool)[None, None]
    yield Entry(
        "blocks",
        "BlockSparse(blocks, (128, 128))",
        "keys whose block is set",
        "`fwd_block_sparse`: the tiles of the set blocks; tested only where a cell of 128 × 128 is set in part. Listed "
        "when the mask is made, 8 bytes for each cell",
        BlockSparse(blocks),
        size=384,
        figure="10 % of 16384²: 689 TFLOP/s, 0.85 of dense",
    )
    yield Entry(
        "any pairs",
        "BlockSparse.from_dense(attn_mask)",
        "the pairs set in a bool matrix",
        "`fwd_block_sparse`: whole cells without a test, mixed ones by one bit for each pair",
        BlockSparse.from_dense(torch.ones(384, 384, dtype=torch.bool).tril() & ~_diamond(384)),
        size=384,
    )
    yield Entry(
        "both",
        "BlockSparse(blocks) & Causal(), SlidingWindow(…) & Document(…), …",
        "what both allow",
        "`fwd_composite`, one interval a row whatever the masks; with blocks `fwd_block_sparse`, whose cells at the "
        "interval's edges are tested",
        BlockSparse(torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 1]], dtype=torch.bool)[None, None]) & Causal(),
        size=384,
        figure="blocks & causal: 506 TFLOP/s",
    )


def _diamond(size: int) -> torch.Tensor:
    """bool (size, size): pairs around the middle of the lower left half."""
    i = torch.arange(size)
    return (i[:, None] - 5 * size // 8).abs() + (i - 3 * size // 8).abs() < size // 6


def text() -> str:
    """The pictures, and the table under them, as Markdown."""
    found = list(entries())
    pictures = "\n\n".join(_side_by_side(found[n : n + _IN_A_ROW]) for n in range(0, len(found), _IN_A_ROW))
    rows = [f"| {x.title} | `{x.code}` | {x.allows} | {x.cost} | {x.figure} |" for x in found]
    head = ["| | mask | query at p sees key j | cost: kernel and tiles | figure |", "|---|---|---|---|---|"]
    return f"```\n{pictures}\n```\n\n" + "\n".join([*head, *rows])


def _side_by_side(found: list[Entry]) -> str:
    columns = [[x.title, *x.mask.draw(x.size, x.size, _CELLS).splitlines()] for x in found]
    lines = zip_longest(*columns, fillvalue="")
    return "\n".join("   ".join(cell.ljust(2 * _CELLS) for cell in line).rstrip() for line in lines)


def renewed(document: str) -> str:
    """``document`` with what stands between the marks written anew. Raises ValueError where a mark is missing."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"document: does not hold the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{text()}\n\n{END}{after}"


def write(path: Path) -> bool:
    """Renews a file. Returns whether that changed it."""
    old = path.read_text(encoding="utf-8")
    new = renewed(old)
    if new != old:
        path.write_text(new, encoding="utf-8")
    return new != old
