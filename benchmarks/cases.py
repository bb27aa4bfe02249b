"""What is measured: attention cases, their floating-point operations, and the groups they form."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

MASKS = ("dense", "causal", "document", "document-causal", "window", "window-causal", "prefix")
HIDDEN = 2048  # heads * head_dim of the grid
HEAD_DIMS = (64, 128, 256)
SHAPES = ((16, 1024), (4, 4096), (2, 8192), (1, 16384))  # (batch, length): 16384 tokens each
SEEDS = (1, 2, 3, 4, 5)
DOCUMENTS = 16
DOCUMENT_TOKENS = 16384


@dataclass(frozen=True)
class Case:
    """One self-attention call: q, k, v of shape (batch, heads, length, head_dim).

    offsets: cumulative document offsets (n + 1), for the document masks only.
    width: keys to either side (window), to the left (window-causal), or of the prefix; for these masks only.
    tag: a suffix of the name, such as the seed of the draw.
    """

    batch: int
    heads: int
    length: int
    head_dim: int
    mask: str = "dense"
    dtype: str = "bf16"
    offsets: tuple[int, ...] | None = None
    tag: str = ""
    width: int | None = None

    def __post_init__(self) -> None:
        if self.mask not in MASKS:
            raise ValueError(f"mask: {self.mask!r} is not one of {MASKS}")
        if self.is_document != (self.offsets is not None):
            raise ValueError(f"offsets: needed by the document masks and by no other, mask is {self.mask!r}")
        if self.is_band != (self.width is not None):
            raise ValueError(f"width: needed by window and prefix masks and by no other, mask is {self.mask!r}")

    @property
    def is_band(self) -> bool:
        return self.mask.startswith(("window", "prefix"))

    @property
    def bounds(self) -> tuple[int, int]:
        """Keys to the left and to the right that a window lets a query see."""
        return self.width, 0 if self.is_causal else self.width

    @property
    def is_document(self) -> bool:
        return self.mask.startswith("document")

    @property
    def is_causal(self) -> bool:
        return self.mask.endswith("causal")

    @property
    def name(self) -> str:
        parts = [f"d{self.head_dim}", f"{self.batch}x{self.length}", self.mask]
        parts += [str(self.width)] if self.is_band else []
        parts += [f"h{self.heads}"] if self.heads * self.head_dim != HIDDEN else []
        parts += [self.dtype] if self.dtype != "bf16" else []
        parts += [self.tag] if self.tag else []
        return "-".join(parts)

    @property
    def document_lengths(self) -> tuple[int, ...]:
        """Lengths of the documents; without a document mask one document spans everything."""
        offsets = self.offsets or (0, self.length)
        return tuple(end - begin for begin, end in pairwise(offsets))

    @property
    def pairs(self) -> int:
        """Allowed (query, key) pairs of one head of one batch entry."""
        if self.is_band:
            row = torch.arange(self.length)
            if self.mask == "prefix":
                return int((row + 1).clamp(min=min(self.width, self.length)).sum())
            left, right = self.bounds
            return int(((row + right + 1).clamp(max=self.length) - (row - left).clamp(min=0)).sum())
        if self.is_causal:
            return sum(n * (n + 1) // 2 for n in self.document_lengths)
        return sum(n * n for n in self.document_lengths)

    @property
    def flops(self) -> int:
        """4 * batch * heads * head_dim * allowed pairs: one multiply and one add for each of QK^T and PV."""
        return 4 * self.batch * self.heads * self.head_dim * self.pairs

    def as_dict(self) -> dict:
        return {
            "name": self.name,
            "batch": self.batch,
            "heads": self.heads,
            "length": self.length,
            "head_dim": self.head_dim,
            "mask": self.mask,
            "dtype": self.dtype,
            "documents": len(self.document_lengths) if self.is_document else 0,
            "pairs": self.pairs,
            "flops": self.flops,
        }


@dataclass(frozen=True)
class Lane:
    """One candidate on one case. extra_flops: work beside attention (a projection)."""

    label: str
    candidate: str
    case: Case
    extra_flops: int = 0

    @property
    def flops(self) -> int:
        return self.case.flops + self.extra_flops


@dataclass(frozen=True)
class Unit:
    """Lanes that are launched in turn in one loop, so that they meet the same card in the same state."""

    group: str
    name: str
    lanes: tuple[Lane, ...]
    quick: bool = False  # also part of a quick run


def document_offsets(tokens: int, documents: int, seed: int) -> tuple[int, ...]:
    """Offsets of `documents` random documents over `tokens`: distinct cuts, uniform, drawn from the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.randperm(tokens - 1, generator=generator)[: documents - 1] + 1
    return (0, *sorted(cuts.tolist()), tokens)


def grid(shrink: int = 1, masks: Iterable[str] = ("dense", "causal"), dtype: str = "bf16") -> list[Case]:
    """The 24 forward cases: 16384 tokens, heads * head_dim = 2048. shrink divides lengths and heads (dry runs)."""
    return [
        Case(batch, max(1, HIDDEN // head_dim // shrink), max(16, length // shrink), head_dim, mask, dtype)
        for head_dim in HEAD_DIMS
        for batch, length in SHAPES
        for mask in masks
    ]


def lanes(case: Case, candidates: Iterable[str]) -> tuple[Lane, ...]:
    return tuple(Lane(name, name, case) for name in candidates)


def is_quick(case: Case) -> bool:
    return case.batch == 4  # 4x4096


def forward(candidates: list[str], shrink: int = 1) -> list[Unit]:
    """Dense and causal attention over the grid."""
    return [Unit("forward", case.name, lanes(case, candidates), is_quick(case)) for case in grid(shrink)]


def documents(candidates: list[str], shrink: int = 1) -> list[Unit]:
    """Random documents, several named draws. Two dense lanes say what the same tokens cost without documents."""
    units = []
    head_dim = 128
    tokens = DOCUMENT_TOKENS // shrink
    for seed in SEEDS:
        offsets = document_offsets(tokens, DOCUMENTS, seed)
        for mask in ("document", "document-causal"):
            dense = Case(1, max(1, HIDDEN // head_dim // shrink), tokens, head_dim)
            case = replace(dense, mask=mask, offsets=offsets, tag=f"seed{seed}")
            own = tuple(lane for lane in lanes(case, candidates) if lane.candidate != "cudnn")
            extra = tuple(Lane(f"{name} dense", name, dense) for name in ("flashmsa", "cudnn") if name in candidates)
            units.append(Unit("documents", case.name, own + extra, seed == SEEDS[0]))
    return units


def windows(candidates: list[str], shrink: int = 1) -> list[Unit]:
    """Windows and a prefix beside the whole mask of the same length: what skipping and testing tiles costs."""
    units = []
    for mask, whole, length in (
        ("window", "dense", 32768),
        ("window-causal", "dense", 32768),
        ("prefix", "causal", 16384),
    ):
        plain = Case(1, max(1, 16 // shrink), length // shrink, 128, whole)
        case = replace(plain, mask=mask, width=max(1, 4096 // shrink))
        names = [name for name in candidates if name in ("flashmsa", "fa4", "flex")]
        own = lanes(case, names) + tuple(
            Lane(f"{name} {whole}", name, plain) for name in ("flashmsa", "cudnn") if name in candidates
        )
        units.append(Unit("windows", case.name, own, True))
    return units


def one_document(candidates: list[str], shrink: int = 1) -> list[Unit]:
    """One document over everything against the same attention without a document mask: the price of the mask."""
    units = []
    for case in grid(shrink):
        mask = "document-causal" if case.is_causal else "document"
        document = replace(case, mask=mask, offsets=(0, case.length))
        pair = (Lane("one document", "flashmsa", document), Lane("plain", "flashmsa", case))
        units.append(Unit("one-document", case.name, pair, is_quick(case)))
    return units


def small(candidates: list[str], shrink: int = 1) -> list[Unit]:
    """Short sequences: where does another kernel win? Decides from which length the dispatcher uses ours."""
    names = [name for name in candidates if name in ("flashmsa", "cudnn", "flash")]
    cases = [
        Case(batch, max(1, HIDDEN // head_dim // shrink), max(16, length // min(shrink, 4)), head_dim)
        for head_dim in HEAD_DIMS
        for batch in (1, 8)
        for length in (64, 128, 256, 512, 1024)
    ]
    return [Unit("small", case.name, lanes(case, names), case.head_dim == 64 and case.batch == 1) for case in cases]


def host(candidates: list[str], shrink: int = 1) -> list[Unit]:
    """Host time of one eager call, on shapes so small that the device is never what one waits for."""
    units = []
    for head_dim, length in ((64, 128), (128, 128), (128, 512)):
        dense = Case(1, 8, length, head_dim)
        cases = (dense, replace(dense, mask="causal"))
        names = ["flashmsa-eager", "sdpa", *(name for name in candidates if name not in ("flashmsa", "flex"))]
        units += [Unit("host", case.name, lanes(case, names), length == 128) for case in cases]
        half = dense.length // 2
        document = replace(dense, mask="document", offsets=(0, half, dense.length))
        own = (Lane("flashmsa-eager", "flashmsa-eager", document), Lane("sdpa", "sdpa", dense))
        units.append(Unit("host", document.name, own, length == 128))
    return units


def dtype(candidates: list[str], shrink: int = 1) -> list[Unit]:
    """fp16 beside bf16."""
    units = []
    names = [name for name in candidates if name in ("flashmsa", "cudnn")]
    for case in grid(shrink):
        if not is_quick(case):
            continue
        pairs = [(name, replace(case, dtype=kind)) for name in names for kind in ("bf16", "fp16")]
        units.append(Unit("dtype", case.name, tuple(Lane(f"{n} {c.dtype}", n, c) for n, c in pairs), True))
    return units


def table(candidates: list[str], shrink: int = 1) -> list[Unit]:
    """Length 8192, head_dim 128, 32 heads, batch 1 and 4: attention alone, and after its QKV projection."""
    units = []
    for batch in (1, 4):
        case = Case(batch, max(1, 32 // shrink), max(16, 8192 // shrink), 128)
        width = case.heads * case.head_dim
        projection = 2 * batch * case.length * width * 3 * width
        names = [*(name for name in candidates if name != "flex"), "efficient"]
        fused = [f"qkv+{name}" for name in ("flashmsa", "cudnn") if name in candidates]
        rows = lanes(case, names) + tuple(Lane(name, name, case, projection) for name in fused)
        units.append(Unit("table", case.name, rows, batch == 1))
    return units


GROUPS: dict[str, Callable[..., list[Unit]]] = {
    "forward": forward,
    "documents": documents,
    "one-document": one_document,
    "windows": windows,
    "small": small,
    "host": host,
    "dtype": dtype,
    "table": table,
}
DEFAULT_GROUPS = ("forward", "documents", "one-document", "host")


def find_case(name: str) -> Case:
    """The case of that name in any group; ValueError lists what is near."""
    known = {
        lane.case.name: lane.case for build in GROUPS.values() for unit in build(["flashmsa"]) for lane in unit.lanes
    }
    if name in known:
        return known[name]
    near = sorted(known, key=lambda other: -len(set(name.split("-")) & set(other.split("-"))))[:4]
    raise ValueError(f"case: no case is called {name!r}; near it: {', '.join(near)}")
