"""What is measured: attention cases, their floating-point operations, and the groups they form."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, product

import torch

from benchmarks.cache_cases import CacheCase, log_uniform_lengths

MASKS = (
    *("dense", "causal", "document", "document-causal", "window", "window-causal", "prefix", "dilated"),
    *("blocks", "blocks-causal", "hash", "hash-causal"),
)
OPTIONS = ("softcap", "alibi", "sinks")
HIDDEN = 2048  # heads * head_dim of the grid
HEAD_DIMS = (64, 128, 256)
# (head_dim, head_dim_v) of kernels of their own between these, and the head dim that would serve them otherwise.
OTHER_DIMS = {(96, 96): 128, (192, 192): 256, (192, 128): 256}
SHAPES = ((16, 1024), (4, 4096), (2, 8192), (1, 16384))  # (batch, length): 16384 tokens each
SEEDS = (1, 2, 3, 4, 5)
DOCUMENTS = 16
DOCUMENT_TOKENS = 16384
SHORT_DOCUMENTS = (512, 32, 256)  # how many, and their least and greatest length
BLOCK = 128  # rows and keys of a block of the block masks
SOFTCAP = 50.0
ELEMENT_BYTES = 2  # of bf16 and fp16


@dataclass(frozen=True)
class Draw:
    """What a random mask is drawn from. count: the number of buckets, or how many percent of the blocks are set."""

    count: int
    seed: int = 1
    per_head: bool = False  # a draw for each head; else one for all


def draw_blocks(draw: Draw, heads: int, length: int) -> torch.Tensor:
    """bool (heads or 1, n, n): blocks of 128 x 128, each set with that probability, and those on the diagonal."""
    count = -(-length // BLOCK)
    generator = torch.Generator().manual_seed(draw.seed)
    random = torch.rand(heads if draw.per_head else 1, count, count, generator=generator)
    return (random < draw.count / 100) | torch.eye(count, dtype=torch.bool)


def draw_buckets(draw: Draw, heads: int, length: int) -> torch.Tensor:
    """int32 (heads or 1, length): a bucket for each token, uniform; the same for queries and keys."""
    generator = torch.Generator().manual_seed(draw.seed)
    return torch.randint(0, draw.count, (heads if draw.per_head else 1, length), generator=generator).int()


@dataclass(frozen=True)
class Case:
    """One self-attention call: q, k, v of shape (batch, heads, length, head_dim).

    head_dim_v: of v where it is shorter; 0: head_dim.
    offsets: cumulative document offsets (n + 1), for the document masks only.
    width: keys to either side (window), to the left (window-causal), or of the prefix, or steps to either side
        (dilated); for these masks only.
    dilation: keys between two steps (dilated).
    draw: of the block and hash masks.
    option: of the call, one of OPTIONS; "": none.
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
    dilation: int | None = None
    draw: Draw | None = None
    option: str = ""
    head_dim_v: int = 0

    def __post_init__(self) -> None:
        if self.mask not in MASKS:
            raise ValueError(f"mask: {self.mask!r} is not one of {MASKS}")
        if self.is_document != (self.offsets is not None):
            raise ValueError(f"offsets: needed by the document masks and by no other, mask is {self.mask!r}")
        if (self.is_band or self.is_dilated) != (self.width is not None):
            raise ValueError(f"width: needed by window and prefix masks and by no other, mask is {self.mask!r}")
        if self.is_dilated != (self.dilation is not None):
            raise ValueError(f"dilation: needed by the dilated mask and by no other, mask is {self.mask!r}")
        if (self.is_blocks or self.is_hash) != (self.draw is not None):
            raise ValueError(f"draw: needed by block and hash masks and by no other, mask is {self.mask!r}")
        if not 0 <= self.head_dim_v <= self.head_dim:
            raise ValueError(f"head_dim_v: {self.head_dim_v} is not at most head_dim = {self.head_dim}")
        if self.option and self.option not in OPTIONS:
            raise ValueError(f"option: {self.option!r} is not one of {OPTIONS}")

    @property
    def value_dim(self) -> int:
        """head_dim of v and of the result."""
        return self.head_dim_v or self.head_dim

    @property
    def is_band(self) -> bool:
        return self.mask.startswith(("window", "prefix"))

    @property
    def is_dilated(self) -> bool:
        return self.mask == "dilated"

    @property
    def is_blocks(self) -> bool:
        return self.mask.startswith("blocks")

    @property
    def is_hash(self) -> bool:
        return self.mask.startswith("hash")

    @property
    def bounds(self) -> tuple[int, int]:
        """Keys to the left and to the right that a window lets a query see."""
        return self.width, 0 if self.is_causal else self.width

    @property
    def rows(self) -> int:
        """Length of the result."""
        return self.length

    @property
    def is_document(self) -> bool:
        return self.mask.startswith("document")

    @property
    def is_causal(self) -> bool:
        return self.mask.endswith("causal")

    @property
    def name(self) -> str:
        width = f"d{self.head_dim}" + (f"x{self.head_dim_v}" if self.value_dim != self.head_dim else "")
        parts = [width, f"{self.batch}x{self.length}", self.mask]
        parts += [str(self.width)] if self.width is not None else []
        parts += [f"by{self.dilation}"] if self.is_dilated else []
        parts += [f"{self.draw.count}" + ("-per-head" if self.draw.per_head else "")] if self.draw else []
        parts += [f"h{self.heads}"] if self.heads * self.head_dim != HIDDEN else []
        parts += [self.dtype] if self.dtype != "bf16" else []
        parts += [self.option] if self.option else []
        parts += [self.tag] if self.tag else []
        return "-".join(parts)

    @property
    def document_lengths(self) -> tuple[int, ...]:
        """Lengths of the documents; without a document mask one document spans everything."""
        offsets = self.offsets or (0, self.length)
        return tuple(end - begin for begin, end in pairwise(offsets))

    def blocks(self) -> torch.Tensor:
        """bool (heads or 1, n, n), of the block masks."""
        return draw_blocks(self.draw, self.heads, self.length)

    def buckets(self) -> torch.Tensor:
        """int32 (heads or 1, length), of the hash masks."""
        return draw_buckets(self.draw, self.heads, self.length)

    @property
    def pairs(self) -> int | float:
        """Allowed (query, key) pairs of one head of one batch entry; where heads differ, their mean."""
        if self.is_blocks or self.is_hash:
            of_heads = _drawn_pairs(self)
            return of_heads[0] if len(of_heads) == 1 else sum(of_heads) / len(of_heads)
        row = torch.arange(self.length)
        if self.is_dilated:
            sides = (row, self.length - 1 - row)
            return self.length + sum(int((side // self.dilation).clamp(max=self.width).sum()) for side in sides)
        if self.is_band:
            if self.mask == "prefix":
                return int((row + 1).clamp(min=min(self.width, self.length)).sum())
            left, right = self.bounds
            return int(((row + right + 1).clamp(max=self.length) - (row - left).clamp(min=0)).sum())
        if self.is_causal:
            return sum(n * (n + 1) // 2 for n in self.document_lengths)
        return sum(n * n for n in self.document_lengths)

    @property
    def flops(self) -> int:
        """2 * batch * heads * (head_dim + head_dim_v) * allowed pairs: multiply and add for each of QK^T, PV."""
        return round(2 * self.batch * self.heads * (self.head_dim + self.value_dim) * self.pairs)

    @property
    def bytes(self) -> int:
        """What has to cross the memory bus at least: q, k and v once, and the output."""
        return 2 * self.batch * self.heads * self.length * (self.head_dim + self.value_dim) * ELEMENT_BYTES

    def as_dict(self) -> dict:
        return {
            "name": self.name,
            "batch": self.batch,
            "heads": self.heads,
            "length": self.length,
            "head_dim": self.head_dim,
            "head_dim_v": self.value_dim,
            "mask": self.mask,
            "dtype": self.dtype,
            "documents": len(self.document_lengths) if self.is_document else 0,
            "pairs": self.pairs,
            "flops": self.flops,
            "bytes": self.bytes,
        }


@lru_cache(maxsize=64)
def _drawn_pairs(case: Case) -> list[int]:
    """Allowed pairs of each head, or of all at once. Kept: large draws take a while."""
    return _block_pairs(case) if case.is_blocks else _bucket_pairs(case)


def _block_pairs(case: Case) -> list[int]:
    blocks = case.blocks().long()
    sizes = torch.full((blocks.shape[-1],), BLOCK)
    sizes[-1] = case.length - BLOCK * (len(sizes) - 1)
    area = sizes[:, None] * sizes
    if case.is_causal:
        area = area.tril(-1) + torch.diag(sizes * (sizes + 1) // 2)
    return (blocks * area).sum((1, 2)).tolist()


def _bucket_pairs(case: Case) -> list[int]:
    counts = torch.stack([torch.bincount(row, minlength=case.draw.count) for row in case.buckets()])
    return (counts * (counts + 1) // 2 if case.is_causal else counts * counts).sum(1).tolist()


@dataclass(frozen=True)
class Lane:
    """One candidate on one case.

    extra_flops: work beside attention (a projection).
    work: floating-point operations over those of the forward pass.
    share: bytes moved over those of the case.
    checked: whether its result is that of the other lanes of the case.
    """

    label: str
    candidate: str
    case: Case | CacheCase
    extra_flops: int = 0
    work: float = 1.0
    share: float = 1.0
    checked: bool = True

    @property
    def flops(self) -> int:
        return round(self.case.flops * self.work) + self.extra_flops


@dataclass(frozen=True)
class Unit:
    """Lanes that are launched in turn in one loop, so that they meet the same card in the same state."""

    group: str
    name: str
    lanes: tuple[Lane, ...]
    quick: bool = False  # also part of a quick run
    whole: str = ""  # label of the lane that others are measured by: ours where no tile is cut, no page is small
    graph: bool = False  # timed inside CUDA graphs, the L2 warm


def document_offsets(tokens: int, documents: int, seed: int) -> tuple[int, ...]:
    """Offsets of `documents` random documents over `tokens`: distinct cuts, uniform, drawn from the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.randperm(tokens - 1, generator=generator)[: documents - 1] + 1
    return (0, *sorted(cuts.tolist()), tokens)


def short_document_offsets(documents: int, least: int, greatest: int, seed: int) -> tuple[int, ...]:
    """Offsets of that many documents, their lengths uniform in [least, greatest], drawn from the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(least, greatest + 1, (documents,), generator=generator)
    return (0, *lengths.cumsum(0).tolist())


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


def masks(candidates: list[str], shrink: int = 1) -> list[Unit]:
    """Every other mask beside what its tiles cost where none is cut or skipped, and beside its peers."""
    heads = max(1, 16 // shrink)
    long, plain = (Case(1, heads, length // shrink, 128) for length in (32768, 16384))
    causal = replace(plain, mask="causal")
    width = max(1, 4096 // shrink)
    # NOTE: the tokens of one residue class see a window of as many steps, so these are the same pairs.
    steps, dilation = max(1, width // 4), 4
    classes = replace(plain, batch=dilation, length=plain.length // dilation, mask="window", width=steps)
    blocks, buckets = Draw(10, per_head=True), Draw(64)
    units = [
        _masked(replace(long, mask="window", width=width), long, candidates),
        _masked(replace(long, mask="window-causal", width=width), long, candidates),
        _masked(replace(plain, mask="prefix", width=width), causal, candidates),
        _masked(replace(plain, mask="blocks", draw=blocks), plain, candidates),
        _masked(replace(plain, mask="blocks-causal", draw=blocks), causal, candidates),
        _masked(replace(plain, mask="dilated", width=steps, dilation=dilation), classes, candidates),
        _masked(replace(plain, mask="hash-causal", draw=buckets), causal, candidates, HASH_LANES),
    ]
    for seed in SEEDS:
        offsets = document_offsets(plain.length, DOCUMENTS, seed)
        packed = replace(plain, mask="document", offsets=offsets, tag=f"seed{seed}")
        for case, whole in ((packed, plain), (replace(packed, mask="document-causal"), causal)):
            units.append(_masked(case, whole, candidates, VARLEN_LANES, seed == SEEDS[0]))
    documents, *lengths = SHORT_DOCUMENTS
    offsets = short_document_offsets(max(2, documents // shrink), *lengths, SEEDS[0])
    short = Case(1, heads, offsets[-1], 128, "document", offsets=offsets, tag="short")
    for case in (short, replace(short, mask="document-causal")):
        units.append(_masked(case, None, candidates, VARLEN_LANES))
    return units


# Further candidates of ours, and what their lanes are called.
HASH_LANES = {
    "flashmsa graph": "flashmsa-graph",  # the mask made before, in a CUDA graph
    "flashmsa built": "flashmsa-built",  # the mask made in each call
    "flashmsa built graph": "flashmsa-updated-graph",  # mask.update and the call in a CUDA graph
}
VARLEN_LANES = {"flashmsa varlen": "flashmsa-varlen"}


def _peers(case: Case, candidates: list[str]) -> list[str]:
    """The candidates that know such a mask."""
    known = {"flex", "flex-fa4"}
    if case.is_document:
        known |= {"fa4", "flash"}
    if case.mask.startswith("window"):
        known.add("fa4")
    return [name for name in candidates if name in known or name not in KNOWN]


KNOWN = ("flashmsa", "cudnn", "flash", "efficient", "sdpa", "fa4", "flex", "flex-fa4")


def _masked(
    case: Case, whole: Case | None, candidates: list[str], more: dict[str, str] | None = None, quick: bool = True
) -> Unit:
    own = [Lane("flashmsa", "flashmsa", case)] if "flashmsa" in candidates else []
    own += [Lane(label, name, case) for label, name in (more or {}).items()] if own else []
    own += lanes(case, _peers(case, candidates))
    if whole is None:
        return Unit("masks", case.name, tuple(own), quick)
    names = [name for name in ("flashmsa", "cudnn") if name in candidates and (name == "flashmsa" or not whole.is_band)]
    own += [Lane(f"{name} {whole.mask}", name, whole) for name in names]
    return Unit("masks", case.name, tuple(own), quick, f"flashmsa {whole.mask}")


def options(candidates: list[str], shrink: int = 1) -> list[Unit]:
    """A soft cap, ALiBi and sinks, each beside the same call without."""
    units = []
    for head_dim in HEAD_DIMS:
        plain = Case(4, max(1, HIDDEN // head_dim // shrink), max(16, 4096 // shrink), head_dim, "causal")
        own = []
        for name in (name for name in candidates if name in ("flashmsa", "cudnn", "fa4", "flex", "flex-fa4")):
            own.append(Lane(name, name, plain))
            served = OPTION_SUPPORT.get(name, OPTIONS)
            own += [Lane(f"{name} {option}", name, replace(plain, option=option)) for option in served]
        units.append(Unit("options", plain.name, tuple(own), head_dim == 128))
    return units


# What the peers know of softcap, ALiBi and sinks; ours knows all.
OPTION_SUPPORT = {"cudnn": (), "fa4": ("softcap", "sinks"), "flex": ("softcap", "alibi"), "flex-fa4": ("softcap",)}


def construction(candidates: list[str], shrink: int = 1) -> list[Unit]:
    """How long masks take that are prepared on the device: made anew, and updated inside a CUDA graph."""
    units = []
    for length, heads in ((131072, 1), (131072, 16)):
        case = Case(1, heads, length // shrink, 128, "blocks", draw=Draw(10, per_head=True))
        own = (
            Lane("made, counted", "mask-made", case),
            Lane("made, capacity", "mask-made-capacity", case),
            Lane("updated, graph", "mask-updated-graph", case),
        )
        units.append(Unit("construction", case.name, own, True))
    for length, heads in ((16384, 1), (16384, 16)):
        case = Case(1, heads, length // shrink, 128, "hash-causal", draw=Draw(64, per_head=True))
        own = (Lane("made", "mask-made", case), Lane("updated, graph", "mask-updated-graph", case))
        units.append(Unit("construction", case.name, own, True))
    return units if "flashmsa" in candidates else []


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
    names = [name for name in candidates if name in ("flashmsa", "cudnn", "flash", "efficient")]
    cases = [
        Case(batch, max(1, HIDDEN // head_dim // shrink), max(16, length // min(shrink, 4)), head_dim)
        for head_dim in HEAD_DIMS
        for batch in (1, 8)
        for length in (64, 128, 256, 512, 1024)
    ]
    return [Unit("small", case.name, lanes(case, names), case.head_dim == 64 and case.batch == 1) for case in cases]


def host(candidates: list[str], shrink: int = 1) -> list[Unit]:
    """Host time of one eager call, on shapes so small that the device is never what one waits for, and of one that is
    recorded for a backward pass."""
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
        trained = replace(dense, mask="causal", tag="recorded")
        own = tuple(Lane(name, f"{name}-recorded", trained) for name in ("flashmsa-eager", "sdpa"))
        units.append(Unit("host", trained.name, own, length == 128))
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


def dims(candidates: list[str], shrink: int = 1) -> list[Unit]:
    """Head dims with kernels of their own, beside the same call padded to the next wider kernel and beside that one."""
    units = []
    for (head_dim, head_dim_v), next_dim in OTHER_DIMS.items():
        for kind, (batch, length), mask in product(("bf16", "fp16"), ((4, 4096), (1, 16384)), ("dense", "causal")):
            heads, length = max(1, 16 // shrink), max(16, length // shrink)
            case = Case(batch, heads, length, head_dim, mask, kind, head_dim_v=head_dim_v)
            own = list(lanes(case, (name for name in candidates if name in ("flashmsa", "cudnn", "flash"))))
            if "flashmsa" in candidates:
                own.append(Lane("flashmsa padded", f"flashmsa-padded-{next_dim}", case))
                wide = replace(case, head_dim=next_dim, head_dim_v=0)
                own.append(Lane(NEXT_WIDTH, "flashmsa", wide))
            units.append(Unit("dims", case.name, tuple(own), batch == 4 and kind == "bf16", NEXT_WIDTH))
    return units


NEXT_WIDTH = "flashmsa next width"


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


BACKWARD = 2.5  # work of a backward pass
BOTH_PASSES = 3.5
BACKWARD_SHAPES = {64: (0, 1, 3), 128: (0, 1, 3), 256: (1, 3)}  # of SHAPES
TRAINED_PEERS = ("cudnn", "flash", "fa4")


def _backward_lanes(case: Case, names: Iterable[str]) -> list[Lane]:
    return [Lane(name, f"{name}-backward", case, work=BACKWARD) for name in names]


def backward(candidates: list[str], shrink: int = 1) -> list[Unit]:
    """The backward pass alone over dense and causal cases and under masks; both passes with dropout and without."""
    ours = ["flashmsa"] if "flashmsa" in candidates else []
    peers = [name for name in candidates if name in TRAINED_PEERS]
    units = []
    for head_dim, chosen in BACKWARD_SHAPES.items():
        for batch, length in (SHAPES[index] for index in chosen):
            heads = max(1, HIDDEN // head_dim // shrink)
            for mask in ("dense", "causal"):
                case = Case(batch, heads, max(16, length // shrink), head_dim, mask)
                own = _backward_lanes(case, ours)
                own += [
                    Lane(f"{name} deterministic", f"{name}-backward-deterministic", case, work=BACKWARD)
                    for name in ours
                ]
                units.append(Unit("backward", case.name, tuple(own + _backward_lanes(case, peers)), is_quick(case)))
    return units + _backward_masks(ours, peers, shrink) + _dropout_units(ours, peers, shrink)


def _backward_masks(ours: list[str], peers: list[str], shrink: int) -> list[Unit]:
    """Beside the dense case of the same length."""
    heads = max(1, 16 // shrink)
    long, plain = (Case(1, heads, length // shrink, 128) for length in (32768, 16384))
    offsets = document_offsets(plain.length, DOCUMENTS, SEEDS[0])
    documents = replace(plain, mask="document-causal", offsets=offsets, tag=f"seed{SEEDS[0]}")
    window = replace(long, mask="window-causal", width=max(1, 4096 // shrink))
    blocks = replace(plain, mask="blocks", draw=Draw(10, per_head=True))
    units = []
    for case, whole in ((documents, plain), (window, long), (blocks, plain)):
        known = [name for name in peers if name in _peers(case, peers)]
        own = _backward_lanes(case, ours) + _backward_lanes(case, known)
        own += [Lane(f"{name} dense", f"{name}-backward", whole, work=BACKWARD) for name in ours]
        units.append(Unit("backward", case.name, tuple(own), case is documents, "flashmsa dense"))
    return units


def _dropout_units(ours: list[str], peers: list[str], shrink: int) -> list[Unit]:
    """Both passes. Results differ by their draws."""
    units = []
    for head_dim in (64, 128):
        for mask in ("dense", "causal"):
            heads, length = max(1, HIDDEN // head_dim // shrink), max(16, 4096 // shrink)
            case = Case(4, heads, length, head_dim, mask, tag="dropout")
            own = [Lane(f"{name} without", f"{name}-both", case, work=BOTH_PASSES) for name in ours]
            known = [*ours, *(name for name in peers if name == "flash")]
            own += [Lane(name, f"{name}-both-dropout", case, work=BOTH_PASSES, checked=False) for name in known]
            units.append(Unit("backward", case.name, tuple(own), head_dim == 128, "flashmsa without"))
    return units


PAGES = (128, 64, 16, 8, 1)
STREAMS = ((32, 8192, 32, 8), (128, 4096, 64, 8), (1, 131072, 32, 8), (16, 16384, 16, 1))  # batch, length, heads
# By how many query heads a kv head has; half a gibibyte of K and V at least.
RATIOS = {1: (8, 8192, 32, 32), 4: (32, 8192, 32, 8), 8: (32, 8192, 64, 8), 16: (128, 16384, 16, 1)}
QUERIES = (1, 2, 4, 8)
UNEVEN = (64, 128, 65536)  # sequences, their least and greatest length


def _cache(batch: int, length: int, heads: int, heads_kv: int, shrink: int, **more: object) -> CacheCase:
    """A dry run has few and short sequences; whole pages all the same, and as many query heads for a kv head."""
    if shrink > 1:
        heads, heads_kv = heads // heads_kv, 1
        batch, length = min(batch, 2), max(256, length // shrink // 128 * 128)
    return CacheCase(batch, heads, heads_kv, length, **more)


def _read(case: CacheCase) -> Lane:
    return Lane("plain read", "plain-read", case, checked=False)


def _dense(case: CacheCase, label: str = "flashmsa dense") -> Lane:
    return Lane(label, "flashmsa-cache-dense", case)


def _paged(case: CacheCase, page: int) -> Lane:
    return Lane(f"flashmsa page {page}", f"flashmsa-cache-page{page}", case)


def decode(candidates: list[str], shrink: int = 1) -> list[Unit]:
    """Caches: one query and several, pages of every size, uneven batches, chunks, gathering, chosen pages, latency."""
    if "flashmsa" not in candidates:
        return []
    cudnn = "cudnn" in candidates
    units = []

    def add(case: CacheCase, own: list[Lane], whole: str = "", quick: bool = False, graph: bool = False) -> None:
        units.append(Unit("decode", case.name, tuple(own), quick, whole, graph))

    for index, shape in enumerate(STREAMS):
        case = _cache(*shape, shrink, tag="pages")
        own = [_read(case), _dense(case), *(_paged(case, page) for page in PAGES)]
        own += [Lane("cudnn", "cudnn-cache", case)] if cudnn else []
        add(case, own, "flashmsa page 128", index == 0)
    for ratio, shape in RATIOS.items():
        many = [_cache(*shape, shrink, len_q=len_q, tag="queries") for len_q in QUERIES]
        own = [_dense(case, f"flashmsa q{case.len_q}") for case in many]
        own += [Lane(f"flashmsa attention q{x.len_q}", "flashmsa-cache-attention", x) for x in many]
        add(replace(many[0], tag=f"ratio{ratio}"), [_read(many[0]), *own])
    units += _uneven(shrink)
    chunk = _cache(1, 32768, 32, 8, shrink, len_q=max(16, 2048 // shrink), tag="chunk")
    attention = Lane("flashmsa dense", "flashmsa-cache-attention", chunk)
    add(chunk, [attention, _paged(chunk, 64), _paged(chunk, 16)], attention.label, True)
    copied = _cache(32, 8192, 32, 8, shrink, tag="gather")
    moves = [("copy", "copy"), *((f"flashmsa gather page {page}", f"flashmsa-gather-page{page}") for page in (64, 16))]
    add(copied, [Lane(label, name, copied, share=2.0, checked=False) for label, name in moves], "copy")
    some = _cache(32, 8192, 32, 8, shrink, tag="chosen")
    quarter = Lane("flashmsa 25 % of the pages", "flashmsa-cache-quarter", some, share=0.25, checked=False)
    add(some, [_read(some), _paged(some, 64), quarter], "flashmsa page 64")
    for length in (1024, 4096):
        case = _cache(1, length, 32, 8, shrink, tag=f"latency{length}")
        asked = Lane("flashmsa attention", "flashmsa-cache-attention", case)
        own = [_dense(case), asked, _paged(case, 64), *([Lane("cudnn", "cudnn-cache", case)] if cudnn else [])]
        add(case, own, graph=True, quick=True)
    return units


def _uneven(shrink: int) -> list[Unit]:
    """Sequences of very different lengths beside as many of one length, the same bytes in all."""
    count, least, greatest = UNEVEN
    if shrink > 1:
        count, least, greatest = 4, 16, 512
    lengths = log_uniform_lengths(count, least, greatest, SEEDS[0])
    heads = (32, 8) if shrink == 1 else (4, 1)
    case = CacheCase(count, *heads, greatest, lengths=lengths, tag="uneven")
    total = sum(lengths)
    same = tuple(total // count + (b < total % count) for b in range(count))
    even = CacheCase(count, *heads, max(same), lengths=same, tag="even")
    own = (_read(case), _paged(case, 128), replace(_paged(even, 128), label="flashmsa even"))
    return [Unit("decode", case.name, own, False, "flashmsa even")]


GROUPS: dict[str, Callable[..., list[Unit]]] = {
    "forward": forward,
    "documents": documents,
    "one-document": one_document,
    "masks": masks,
    "options": options,
    "construction": construction,
    "small": small,
    "host": host,
    "dtype": dtype,
    "dims": dims,
    "table": table,
    "backward": backward,
    "decode": decode,
}
DEFAULT_GROUPS = ("forward", "documents", "one-document", "host")


def find_case(name: str) -> Case | CacheCase:
    """The case of that name in any group; ValueError lists what is near."""
    known = {
        lane.case.name: lane.case for build in GROUPS.values() for unit in build(["flashmsa"]) for lane in unit.lanes
    }
    if name in known:
        return known[name]
    near = sorted(known, key=lambda other: -len(set(name.split("-")) & set(other.split("-"))))[:4]
    raise ValueError(f"case: no case is called {name!r}; near it: {', '.join(near)}")
