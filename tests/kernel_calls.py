"""A small call for every compiled kernel: what sanitize.py runs. Calls are made from the tables of kernels, so that a
new kernel has one too.

Rows number 333, so that the last tile of queries and of keys is cut, and heads are so many that some SMs get a second
tile: a kernel's buffers and barriers come round, and a tile's end meets the next one's beginning.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor

import flashmsa

LENGTH = 333
SMS = 132
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
Fill = Callable[..., Tensor]  # torch.randn, or where values do not count torch.empty
PARTS = ("forward", "backward", "paged", "prepare")


@dataclass(frozen=True)
class Call:
    """kernel: the row of a table that it runs; "" where it is there for kernels that no table lists."""

    part: str
    name: str
    kernel: str
    run: Callable[[str], Any]  # on that device
    explained: Callable[[], str | None] = field(default=lambda: "")  # the kernel's name, as the library tells it

    def seed(self) -> None:
        """What is drawn depends on the call alone, not on those before it."""
        torch.manual_seed(zlib.crc32(self.name.encode()))


def all_calls() -> list[Call]:
    calls = [*forward_calls(), *backward_calls(), *paged_calls(), *prepare_calls()]
    names = [call.name for call in calls]
    assert len(set(names)) == len(names), sorted(name for name in names if names.count(name) > 1)
    return calls


# ---------------------------------------------------------------------------------------------------------------------
# attention


def document_offsets(device: str) -> Tensor:
    """An empty document, short ones, long ones, and rows behind the last, which see nothing."""
    return torch.tensor([0, 10, 10, 130, LENGTH - 5], dtype=torch.int32, device=device)


def _longest_documents(device: str, causal: bool) -> flashmsa.Document:
    """Longer on average than those that kernels of short ones take, and rows behind the last."""
    return flashmsa.Document(torch.tensor([0, 1090, 2190], dtype=torch.int32, device=device), causal=causal)


def _buckets(heads: int, device: str) -> Tensor:
    return torch.randint(0, 3, (1, heads, LENGTH), dtype=torch.int32, device=device)


def _blocks(device: str) -> Tensor:
    count = -(-LENGTH // 128)
    return (torch.rand(1, 1, count, count) < 0.5).to(device)


def _pairs(columns: int, device: str) -> flashmsa.BlockSparse:
    """Pairs by bits, in rows of so many columns in memory."""
    pairs = torch.rand(1, 1, LENGTH, columns)[..., :LENGTH] < 0.9
    pairs[..., 128:256] = True
    return flashmsa.BlockSparse.from_dense(pairs.to(device))


# By name: of (query heads, device).
MASKS: dict[str, Callable[[int, str], flashmsa.Mask | None]] = {
    "dense": lambda heads, device: None,
    "causal": lambda heads, device: flashmsa.Causal(),
    "documents": lambda heads, device: flashmsa.Document(document_offsets(device)),
    "causal documents": lambda heads, device: flashmsa.Document(document_offsets(device), causal=True),
    "window": lambda heads, device: flashmsa.SlidingWindow(50, 0),
    "window of a prefix": lambda heads, device: flashmsa.SlidingWindow(50, 0) & flashmsa.PrefixLM(20),
    "window and first keys": lambda heads, device: flashmsa.SlidingWindow(50, 0, keep_first=7),
    "window in documents": lambda heads, device: (
        flashmsa.SlidingWindow(50, 3) & flashmsa.Document(document_offsets(device))
    ),
    "dilated": lambda heads, device: flashmsa.DilatedWindow(20, 0, dilation=3),
    "blocks": lambda heads, device: flashmsa.BlockSparse(_blocks(device), (128, 128)),
    "blocks of 64, causal": lambda heads, device: (
        flashmsa.BlockSparse(torch.rand(1, 1, 6, 6).lt(0.5).to(device), (64, 64)) & flashmsa.Causal()
    ),
    "pairs": lambda heads, device: _pairs(LENGTH, device),
    "buckets": lambda heads, device: flashmsa.HashBucket(_buckets(heads, device)),
    "buckets of keys, causal": lambda heads, device: flashmsa.HashBucket(
        _buckets(heads, device), _buckets(heads, device), causal=True
    ),
    "long documents": lambda heads, device: flashmsa.Document(
        torch.tensor([0, 280, 600], dtype=torch.int32, device=device), causal=True
    ),
    "longest documents": lambda heads, device: _longest_documents(device, causal=False),
    "longest documents, causal": lambda heads, device: _longest_documents(device, causal=True),
}
# Of a row's mask: those that its kernel runs.
MASKS_OF = {
    "dense": ("dense",),
    "causal": ("causal",),
    "document": ("documents", "causal documents"),
    "band": ("window", "window of a prefix"),
    "composite": ("window in documents", "window and first keys", "dilated"),
    "block_sparse": ("blocks", "pairs"),
    "hash": ("buckets", "buckets of keys, causal"),
}


@dataclass(frozen=True)
class Attention:
    """One call to ``flashmsa.attention``."""

    mask: str
    dtype: str
    head_dim: int
    head_dim_v: int
    heads: int
    heads_kv: int
    length: int = LENGTH
    softcap: bool = False
    alibi: bool = False
    sinks: bool = False
    dropout_p: float = 0.0
    gradients: bool = False
    deterministic: bool = False

    def arguments(self, device: str, fill: Fill = torch.randn) -> tuple[list[Any], dict[str, Any]]:
        def make(heads: int, head_dim: int) -> Tensor:
            x = fill(1, heads, self.length, head_dim, device=device, dtype=DTYPES[self.dtype])
            return x.requires_grad_(self.gradients)

        q, k, v = (
            make(self.heads, self.head_dim),
            make(self.heads_kv, self.head_dim),
            make(self.heads_kv, self.head_dim_v),
        )
        options: dict[str, Any] = {"dropout_p": self.dropout_p, "deterministic": self.deterministic}
        options |= {"softcap": 20.0} if self.softcap else {}
        options |= {"alibi_slopes": torch.rand(self.heads, device=device)} if self.alibi else {}
        options |= {"sinks": torch.randn(self.heads, device=device)} if self.sinks else {}
        return [q, k, v, MASKS[self.mask](self.heads, device)], options

    def run(self, device: str) -> None:
        arguments, options = self.arguments(device)
        out, lse = flashmsa.attention(*arguments, return_lse=True, **options)
        if self.gradients:
            torch.autograd.grad((out, lse), arguments[:3], (torch.randn_like(out), torch.randn_like(lse)))

    def explained(self) -> str | None:
        arguments, options = self.arguments("cpu", torch.empty)
        told = flashmsa.explain(*arguments, backend="sm90", **options)
        return told.backward_kernel if self.gradients else told.kernel


def _attention_call(part: str, kernel: str, attention: Attention, note: str = "") -> Call:
    name = ", ".join(filter(None, [kernel, attention.mask, note]))
    return Call(part, name, kernel, attention.run, attention.explained)


def many_heads(block_q: int) -> dict[str, int]:
    """So many that there are more tiles than SMs."""
    heads_kv = SMS // (2 * -(-LENGTH // block_q)) + 1
    return {"heads": 2 * heads_kv, "heads_kv": heads_kv}


def forward_calls() -> Iterator[Call]:
    """Of fp16, which is the same code but for the conversions, a call each."""
    for row in flashmsa._C.kernels():
        widths = row["head_dim_bucket"], row["head_dim_v_bucket"]
        every = row["dtype"] == "bfloat16"
        options = many_heads(row["block_q"]) | {"softcap": row["softcap"], "alibi": row["alibi"]}
        options["dropout_p"] = 0.2 if row["dropout"] else 0.0
        # What no kernel of its own serves beside dropout is the general ones'.
        options["alibi"] = options["alibi"] or (row["general"] and row["mask"] != "block_sparse")
        masks = MASKS_OF[row["mask"]]
        if row["name"].startswith("fwd_document_d128"):
            masks = ("longest documents", "longest documents, causal")
            options |= {"heads": 16, "heads_kv": 8, "length": 2200}
        for mask in masks[: None if every else 1]:
            if mask == "dilated" and row["dropout"] and not row["general"]:
                continue  # its draws are not in order: the general kernel's
            yield _attention_call("forward", row["name"], Attention(mask, row["dtype"], *widths, **options))
        if row["mask"] == "dense" and every:
            narrow = Attention("dense", row["dtype"], *(width - 8 for width in widths), **options)
            yield _attention_call("forward", row["name"], narrow, "narrower")
        if row["mask"] == "causal" and every:
            sinks = Attention("causal", row["dtype"], *widths, sinks=True, **options)
            yield _attention_call("forward", row["name"], sinks, "sinks")
    if flashmsa._C.kernels():
        # Sorted copies, moved by a kernel of their own.
        attention = Attention("buckets", "bfloat16", 128, 128, **many_heads(128), softcap=True)
        yield _attention_call("forward", "fwd_composite_softcap_d128_bf16", attention)


def _short(dtype: str) -> str:
    return {"bfloat16": "bf16", "float16": "fp16"}[dtype]


def backward_calls() -> Iterator[Call]:
    """A CTA has one tile of keys, so few heads do."""
    few = {"heads": 4, "heads_kv": 2, "gradients": True}
    for row in flashmsa._C.backward_kernels():
        width, every = row["head_dim_bucket"], row["dtype"] == "bfloat16"
        options = few | {"dropout_p": 0.2 if row["dropout"] else 0.0, "softcap": row["general"]}
        if row["packed"]:
            attention = Attention("long documents", row["dtype"], width, width, length=610, **options)
            yield _attention_call("backward", row["name"], attention)
            continue
        if row["band"]:
            # Key tiles of two CTAs are for masks without edges, or long ones.
            few_masks = row["block_kv"] > 128
            for mask in ("dense",) if few_masks else ("dense", "causal", "window"):
                for deterministic in (False,) if few_masks else (False, True):
                    more = {"length": 500, "sinks": every, "deterministic": deterministic}
                    attention = Attention(mask, row["dtype"], width, width, **more, **options)
                    yield _attention_call("backward", row["name"], attention, "deterministic" if deterministic else "")
            continue
        plain = not (row["dropout"] or row["general"])
        masks = ("window of a prefix", "causal", "dense", "causal documents", "blocks")[: 5 if plain and every else 1]
        for mask, deterministic in product(masks, (False, True)):
            if plain and width == 64 and mask in ("causal", "dense"):
                continue  # a band's
            attention = Attention(mask, row["dtype"], width, width, deterministic=deterministic, **options)
            yield _attention_call("backward", row["name"], attention, "deterministic" if deterministic else "")
        if plain and every:
            others = {"buckets": {}, "dilated": {}, "pairs": {}, "window of a prefix": {"sinks": True}}
            for mask, more in others.items():
                attention = Attention(mask, row["dtype"], width - 8, width - 8, **more, **options)
                yield _attention_call("backward", row["name"], attention, "narrower")
        if row["general"]:
            attention = Attention("window", row["dtype"], width, width, alibi=True, **options)
            yield _attention_call("backward", row["name"], attention, "ALiBi")


# ---------------------------------------------------------------------------------------------------------------------
# Caches


@dataclass(frozen=True)
class Paged:
    """One call to ``flashmsa.paged_attention``. page: 0 for a dense cache, whose sequences are of one length."""

    dtype: str
    head_dim: int
    batch: int = 1
    heads: int = 8
    heads_kv: int = 2
    len_q: int = 1
    length: int = 1000
    page: int = 0
    chosen: bool = False  # by query_pages
    packed: bool = False
    tree: bool = False
    softcap: bool = False
    sinks: bool = False
    alibi: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    def arguments(self, device: str, fill: Fill = torch.randn) -> tuple[list[Any], dict[str, Any]]:
        shape = (self.batch, self.heads, self.len_q, self.head_dim)
        if self.packed:
            shape = (self.batch * self.len_q, self.heads, self.head_dim)
        q = fill(shape, device=device, dtype=DTYPES[self.dtype])
        options = dict(self.options)
        options |= {"softcap": 20.0} if self.softcap else {}
        options |= {"sinks": torch.randn(self.heads, device=device)} if self.sinks else {}
        options |= {"alibi_slopes": torch.rand(self.heads, device=device)} if self.alibi else {}
        if self.packed:
            cuts = torch.arange(self.batch + 1, dtype=torch.int32, device=device) * self.len_q
            options |= {"cu_seqlens_q": cuts, "max_seqlen_q": self.len_q}
        if self.tree:
            options["tree_mask"] = torch.ones(1, self.len_q, self.len_q, dtype=torch.bool, device=device).tril()
        cache, lens = self._cache(device, fill)
        if self.chosen:
            blocks = -(-self.len_q // 128)
            shape = (self.batch, blocks, 5)
            options["query_pages"] = torch.randint(-1, cache[2].shape[1], shape, dtype=torch.int32).to(device)
        return [q, *cache, lens], options

    def _cache(self, device: str, fill: Fill) -> tuple[list[Tensor | None], Tensor | None]:
        def pools(*shape: int) -> list[Tensor]:
            return [fill(*shape, self.heads_kv, self.head_dim, device=device, dtype=DTYPES[self.dtype]) for _ in "kv"]

        if self.page == 0:
            return [*pools(self.batch, self.length), None], None
        count = -(-self.length // self.page)
        table = torch.randperm(self.batch * count, dtype=torch.int32).view(self.batch, count)
        lens = torch.randint(min(self.len_q, self.length), self.length + 1, (self.batch,), dtype=torch.int32)
        return [*pools(self.batch * count, self.page), table.to(device)], lens.to(device)

    def run(self, device: str) -> None:
        arguments, options = self.arguments(device)
        flashmsa.paged_attention(*arguments, return_lse=True, **options)

    def explained(self) -> str | None:
        arguments, options = self.arguments("cpu", torch.empty)
        return flashmsa.explain_paged(*arguments, backend="sm90", **options).kernel


MANY_ROWS: dict[str, Any] = {
    "batch": 3,
    "heads": 16,
    "heads_kv": 1,
    "len_q": 7,
    "length": LENGTH,
    "options": (("num_splits", 2),),
}
# Every way in which keys are dealt out, see csrc/decode/launch.cuh; by the plain kernels and, with sinks, the others.
DECODE_PLANS: dict[str, dict[str, Any]] = {
    "clusters, two an SM": {"length": 1000},
    "clusters of twice the warps": {"length": 2500},
    "clusters of 16": {"heads": 16, "heads_kv": 8, "length": 8300},
    "shares": {"batch": 70, "heads": 4, "length": 300},
    # NOTE: a causal mask of several queries is none of the plain kernels'.
    "shares of twice the warps": {
        "batch": 3,
        "heads": 16,
        "heads_kv": 1,
        "len_q": 2,
        "length": 9000,
        "options": (("mask", None),),
    },
    "shares of twice the warps, causal": {"batch": 3, "heads": 16, "heads_kv": 1, "len_q": 2, "length": 9000},
    # Up to head dim 128 by wgmma: of a warpgroup's rows, and of two's, the last of which is not full.
    "shares of 64 rows": {"batch": 4, "heads": 64, "heads_kv": 4, "len_q": 4, "length": 9000},
    "parts of 64 rows": {
        "batch": 3,
        "heads": 16,
        "heads_kv": 1,
        "len_q": 4,
        "length": 3000,
        "options": (("mask", None), ("num_splits", 3)),
    },
    "parts of 112 rows": MANY_ROWS | {"page": 16},
    "parts of 112 rows, pages of 1": MANY_ROWS | {"page": 1},
    "shares, pages of 16": {"batch": 70, "heads": 4, "length": 300, "page": 16},
    "shares, pages of 1": {"batch": 70, "heads": 4, "length": 300, "page": 1},
    "shares, pages of 128": {"batch": 9, "heads": 16, "len_q": 4, "length": 9000, "page": 128},
    "clusters, pages of 8": {"length": 2500, "page": 8},
    "parts of one number": {"batch": 2, "length": 3000, "options": (("num_splits", 3),)},
    "parts that no batch changes": {"batch": 2, "length": 3000, "page": 64, "options": (("batch_invariant", True),)},
    "chosen pages": {"batch": 3, "length": 3000, "page": 64, "chosen": True},
}
OWN_KERNELS = (
    "clusters, two an SM",
    "clusters of twice the warps",
    "shares",
    "shares of twice the warps",
    "parts of 64 rows",
)
# Where the general kernels alone serve.
DECODE_OPTIONS: dict[str, dict[str, Any]] = {
    "softcap": {"length": 2500, "softcap": True},
    "ALiBi": {"batch": 70, "heads": 4, "length": 300, "alibi": True},
    "a tree": {"len_q": 7, "length": 2500, "tree": True},
    "packed queries": {"batch": 5, "len_q": 3, "length": 700, "page": 16, "packed": True},
    "a tree of 112 rows": MANY_ROWS | {"tree": True},
    "ALiBi of 112 rows": MANY_ROWS | {"alibi": True},
    "a window": {"len_q": 4, "length": 2500, "options": (("mask", flashmsa.SlidingWindow(100, 0)),)},
}


def paged_calls() -> Iterator[Call]:
    for row in flashmsa._C.paged_kernels():
        for note, paged in _paged_of(row):
            yield Call("paged", f"{row['name']}, {note}", row["name"], paged.run, paged.explained)
    # Gathered, then the forward kernel.
    paged = Paged("bfloat16", 128, batch=2, len_q=300, length=700, page=16, softcap=True)
    yield Call("paged", "two stages", "", paged.run)


def _dtype_of(row: dict[str, Any]) -> str:
    return "float16" if row["name"].endswith("fp16") else "bfloat16"


def _paged_of(row: dict[str, Any]) -> Iterator[tuple[str, Paged]]:
    dtype, dim = _dtype_of(row), row["head_dim_bucket"]
    every = dtype == "bfloat16"
    if row["path"] == "decode":
        plans = DECODE_PLANS if every else {note: DECODE_PLANS[note] for note in OWN_KERNELS}
        for (note, plan), sinks in product(plans.items(), (False, True)):
            yield f"{note}, sinks" if sinks else note, Paged(dtype, dim, sinks=sinks, **plan)
        if not every:
            return
        for note, plan in DECODE_OPTIONS.items():
            yield note, Paged(dtype, dim, **plan)
        yield "narrower", Paged(dtype, dim - 8, **DECODE_PLANS["shares, pages of 16"])
        return
    # More rows of a kv head than decode takes, and more tiles than SMs.
    chunk = many_heads(128) | {"len_q": 300, "length": 700}
    lists = {"chosen": "pages" in row["name"], "softcap": "score" in row["name"]}
    for page in (16, 8, 128) if every else (16,):
        yield f"pages of {page}", Paged(dtype, dim, page=page, **chunk, **lists)
    if every:
        yield "packed queries", Paged(dtype, dim, page=16, packed=True, sinks=True, **chunk | {"batch": 2}, **lists)


# ---------------------------------------------------------------------------------------------------------------------
# What comes before: orders of buckets, lists of blocks; and pages, written and gathered


def prepare_calls() -> Iterator[Call]:
    # One CTA, clusters with 2, 4 and 8 keys a thread, and passes over all of memory.
    for length in (LENGTH, 5000, 20000, 40000, 70000):
        yield Call("prepare", f"sort {length} buckets", "", lambda device, n=length: _sort(n, device))
    yield Call("prepare", "blocks of 64", "", lambda device: MASKS["blocks of 64, causal"](1, device))
    yield Call("prepare", "pairs, aligned", "", lambda device: _aligned_pairs(device))
    yield Call("prepare", "pairs, not aligned", "", lambda device: _pairs(LENGTH, device))
    # The half of 24 columns is no multiple of 8: element by element.
    for dtype, dim, page in product(DTYPES, (128, 24), (1, 16)):
        name = f"{_short(dtype)}, head dim {dim}, pages of {page}"
        for rope in (False, True):
            note = ", rotary" if rope else ""
            made = Pool(dtype, dim, page)
            yield Call("prepare", f"append, {name}{note}", "", lambda device, m=made, r=rope: m.append(r, device))
        yield Call("prepare", f"gather, {name}", "", lambda device, m=Pool(dtype, dim, page): m.gather(device))
    small = Pool("bfloat16", 8, 1, heads=1)
    yield Call("prepare", "gather rows too short for boxes", "", lambda device: small.gather(device))


def _sort(length: int, device: str) -> None:
    buckets = torch.randint(-5, 1000, (1, 2, length), dtype=torch.int32, device=device)
    flashmsa.HashBucket(buckets, causal=True)
    flashmsa.HashBucket(buckets, buckets.flip(2))


def _aligned_pairs(device: str) -> flashmsa.Mask:
    return flashmsa.BlockSparse.from_dense((torch.rand(1, 2, 256, 256) < 0.9).to(device))


@dataclass(frozen=True)
class Pool:
    """Pages of three sequences, the last one empty."""

    dtype: str
    head_dim: int
    page: int
    heads: int = 2

    def tensors(self, device: str) -> tuple[Tensor, ...]:
        places = -(-200 // self.page)
        shape = (3 * places, self.page, self.heads, self.head_dim)
        k, v = (torch.randn(shape, device=device, dtype=DTYPES[self.dtype]) for _ in "kv")
        table = torch.randperm(3 * places, dtype=torch.int32).view(3, places).to(device)
        return k, v, table, torch.tensor([150, 33, 0], dtype=torch.int32, device=device)

    def gather(self, device: str) -> None:
        flashmsa.gather_pages(*self.tensors(device))

    def append(self, rope: bool, device: str) -> None:
        k, v, table, lens = self.tensors(device)
        new = [torch.randn(3, self.heads, 9, self.head_dim, device=device, dtype=k.dtype) for _ in range(2)]
        angles = torch.randn(200, self.head_dim // 2, device=device)
        flashmsa.append_kv(k, v, table, lens, *new, (angles.cos(), angles.sin()) if rope else None)
