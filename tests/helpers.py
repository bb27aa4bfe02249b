"""What the contract tests share: where they run, masks with their definitions, the oracle, and the tolerance rule.

Nothing here asks flashmsa for an answer. A mask is written down again from its definition, as a test on every
(query, key) pair, and the expected result is computed from that in float64.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import operator
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import flashmsa

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


# ---------------------------------------------------------------------------------------------------------------------
# Where a test runs


@dataclass(frozen=True)
class Target:
    """A backend (None: let the dispatcher choose), the device of its tensors, and their dtype."""

    backend: str | None
    device: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.backend or 'auto'}@{self.device}-{NAMES[self.dtype]}"

    @property
    def native(self) -> bool:
        return self.backend in ("cpu", "sm90")


def targets(
    *,
    native: bool = True,
    composed: bool = True,
    auto: bool = False,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16, torch.float64),
) -> list:
    """pytest parameters: the native backends, the composed one (`torch`), and the dispatcher's own choice."""
    halves = (torch.bfloat16, torch.float16)
    found = []
    if native:
        found += [Target("cpu", "cpu", d) for d in dtypes] + [Target("sm90", "cuda", d) for d in dtypes if d in halves]
    if composed:
        # The same code for every dtype; float64, whose oracle is slow, has tests of its own.
        found += [Target("torch", "cpu", d) for d in dtypes if d != torch.float64]
        found += [Target("torch", "cuda", d) for d in dtypes if d in (torch.bfloat16, torch.float32)]
    if auto:
        found += [Target(None, "cuda", d) for d in dtypes if d in halves]
    return [pytest.param(t, id=str(t), marks=[pytest.mark.gpu] if t.device == "cuda" else []) for t in found]


# One dtype per backend, for what does not depend on the dtype.
ONE_EACH = [
    pytest.param(Target("cpu", "cpu", torch.float32), id="cpu@cpu"),
    pytest.param(Target("torch", "cpu", torch.float32), id="torch@cpu"),
    pytest.param(Target("sm90", "cuda", torch.bfloat16), id="sm90@cuda", marks=pytest.mark.gpu),
    pytest.param(Target("torch", "cuda", torch.bfloat16), id="torch@cuda", marks=pytest.mark.gpu),
    pytest.param(Target(None, "cuda", torch.bfloat16), id="auto@cuda", marks=pytest.mark.gpu),
]
NATIVE_ONE_EACH = [ONE_EACH[0], ONE_EACH[2]]


# ---------------------------------------------------------------------------------------------------------------------
# Masks and their definitions

Offsets = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class MaskCase:
    """A mask as data: what builds it, and which pairs it allows by definition.

    kind: dense, causal, top-left, window, window-top-left, prefix, prefix-top-left, prefix-window, document or
    document-causal; the classes below have others. The offsets hold one row shared by the batch, or, where `batched`,
    one row per batch. kv_offsets None: the same offsets serve both sides.
    """

    kind: str
    q_offsets: Offsets = ()
    kv_offsets: Offsets | None = None
    batched: bool = False
    left: int = 0  # the windows' bounds and the prefix
    right: int = 0
    prefix: int = 0
    keep: int = 0

    def __str__(self) -> str:
        """Short enough for a test's name."""
        parts = [self.kind]
        if "window" in self.kind or "prefix" in self.kind:
            parts.append(f"{self.left},{self.right},{self.prefix},{self.keep}")
        for offsets in (self.q_offsets, self.kv_offsets or ()):
            parts += [",".join(map(str, cuts if len(cuts) < 12 else (*cuts[:10], "...", cuts[-1]))) for cuts in offsets]
        return " ".join(parts)

    def build(self, device: str | torch.device = "cpu"):
        """The mask object of the package, its offsets on `device`."""
        if self.kind == "dense":
            return None
        if self.kind == "causal":
            return flashmsa.Causal()
        if self.kind == "top-left":
            return flashmsa.Causal(align="top-left")
        if self.kind.startswith("window"):
            align = "top-left" if self.kind == "window-top-left" else "bottom-right"
            return flashmsa.SlidingWindow(self.left, self.right, keep_first=self.keep, align=align)
        if self.kind.startswith("prefix"):
            prefix = flashmsa.PrefixLM(self.prefix, "top-left" if self.kind == "prefix-top-left" else "bottom-right")
            return prefix & flashmsa.SlidingWindow(self.left, self.right) if self.kind == "prefix-window" else prefix
        return flashmsa.Document(*self.tensors(device), causal=self.kind == "document-causal")

    def tensors(self, device: str | torch.device = "cpu") -> tuple[torch.Tensor, torch.Tensor | None]:
        """The offsets as int32 tensors: (n + 1,) or (B, n + 1)."""

        def tensor(offsets: Offsets | None) -> torch.Tensor | None:
            if offsets is None:
                return None
            return torch.tensor(offsets if self.batched else offsets[0], dtype=torch.int32, device=device)

        return tensor(self.q_offsets), tensor(self.kv_offsets)

    def allowed(
        self, len_q: int, len_kv: int, rows: torch.Tensor | None = None, device: str | torch.device = "cpu"
    ) -> torch.Tensor:
        """May query i see key j? Straight from the definitions; bool, (B or 1, rows, len_kv).

        (B or 1, H, rows, len_kv) where heads differ; H is that of q, or that of k where its heads share a mask.
        """
        i = torch.arange(len_q, device=device) if rows is None else rows.to(device)
        i, j = i[:, None], torch.arange(len_kv, device=device)[None, :]
        if self.kind == "dense":
            return torch.ones(1, i.shape[0], len_kv, dtype=torch.bool, device=device)
        if self.kind == "causal":
            return (j <= i + len_kv - len_q)[None]
        if self.kind == "top-left":
            return (j <= i)[None]
        p = i if self.kind.endswith("top-left") else i + len_kv - len_q
        if self.kind.startswith("window"):
            return (((j >= p - self.left) | (j < self.keep)) & (j <= p + self.right))[None]
        if self.kind.startswith("prefix"):
            seen = (j < self.prefix) | (j <= p)
            if self.kind == "prefix-window":
                seen &= (j >= p - self.left) & (j <= p + self.right)
            return seen[None]
        found = []
        for q_cuts, kv_cuts in zip(self.q_offsets, self.kv_offsets or self.q_offsets, strict=True):
            seen = torch.zeros(i.shape[0], len_kv, dtype=torch.bool, device=device)
            for d in range(len(q_cuts) - 1):
                inside = (i >= q_cuts[d]) & (i < q_cuts[d + 1]) & (j >= kv_cuts[d]) & (j < kv_cuts[d + 1])
                if self.kind == "document-causal":
                    # Counted back from the document's end, a key stands no later than its query.
                    inside &= kv_cuts[d + 1] - j >= q_cuts[d + 1] - i
                seen |= inside
            found.append(seen)
        return torch.stack(found)

    def align(self) -> str | None:
        """Where this mask counts its queries' positions from; None: it does not count any."""
        if self.kind.endswith("top-left"):
            return "top-left"
        return "bottom-right" if self.kind == "causal" or "window" in self.kind or "prefix" in self.kind else None

    def positions(self, len_q: int, len_kv: int, device: str | torch.device = "cpu") -> torch.Tensor:
        """The place p of each query among the keys, from which ALiBi counts."""
        return torch.arange(len_q, device=device) + (0 if self.align() == "top-left" else len_kv - len_q)

    def alone(self, b: int, h: int, heads: int) -> MaskCase:
        """The mask of batch b and query head h of `heads`, for one batch and head."""
        return (
            MaskCase(self.kind, self.q_offsets[b : b + 1], self.kv_offsets[b : b + 1], True) if self.batched else self
        )


def _by_batch_and_head(x: torch.Tensor, b: int, h: int, heads: int) -> torch.Tensor:
    """x (B or 1, H or 1, ...), heads shared by neighbours, as (1, 1, ...)."""
    b, h = min(b, x.shape[0] - 1), h * x.shape[1] // heads
    return x[b : b + 1, h : h + 1]


def _squeezed(seen: torch.Tensor) -> torch.Tensor:
    return seen[:, 0] if seen.shape[1] == 1 else seen


@dataclass(frozen=True, eq=False)
class Prefixes(MaskCase):
    """PrefixLM with one prefix per batch."""

    prefixes: tuple[int, ...] = ()

    def build(self, device: str | torch.device = "cpu"):
        return flashmsa.PrefixLM(torch.tensor(self.prefixes, dtype=torch.int32, device=device))

    def allowed(self, len_q, len_kv, rows=None, device="cpu") -> torch.Tensor:
        each = [MaskCase("prefix", prefix=x).allowed(len_q, len_kv, rows, device) for x in self.prefixes]
        return torch.cat(each) if each else torch.ones(0, len_q, len_kv, dtype=torch.bool, device=device)

    def alone(self, b: int, h: int, heads: int) -> MaskCase:
        return MaskCase("prefix", prefix=self.prefixes[b])


@dataclass(frozen=True, eq=False)
class Dilated(MaskCase):
    """DilatedWindow: kind dilated or dilated-top-left; left and right count steps."""

    dilation: int = 1

    def build(self, device: str | torch.device = "cpu"):
        align = "top-left" if self.kind == "dilated-top-left" else "bottom-right"
        return flashmsa.DilatedWindow(self.left, self.right, dilation=self.dilation, align=align)

    def allowed(self, len_q, len_kv, rows=None, device="cpu") -> torch.Tensor:
        i = torch.arange(len_q, device=device) if rows is None else rows.to(device)
        p = (i if self.kind == "dilated-top-left" else i + len_kv - len_q)[:, None]
        away = torch.arange(len_kv, device=device) - p
        reached = (away >= -self.left * self.dilation) & (away <= self.right * self.dilation)
        return (reached & (away % self.dilation == 0))[None]


@dataclass(frozen=True, eq=False)
class Buckets(MaskCase):
    """HashBucket: int32 (B or 1, H or 1, S); kv None: those of q."""

    q: torch.Tensor | None = None
    kv: torch.Tensor | None = None
    causal: bool = False

    def build(self, device: str | torch.device = "cpu"):
        kv = None if self.kv is None else self.kv.to(device)
        return flashmsa.HashBucket(self.q.to(device), kv, causal=self.causal)

    def allowed(self, len_q, len_kv, rows=None, device="cpu") -> torch.Tensor:
        i = torch.arange(len_q, device=device) if rows is None else rows.to(device)
        q, kv = (x.to(device) for x in (self.q, self.q if self.kv is None else self.kv))
        heads = max(q.shape[1], kv.shape[1])
        # Of more heads on one side, neighbours share one of the other.
        q, kv = (x[:, torch.arange(heads, device=device) * x.shape[1] // heads] for x in (q, kv))
        seen = q[:, :, i, None] == kv[:, :, None]
        if self.causal:
            seen = seen & (torch.arange(len_kv, device=device) <= i[:, None] + len_kv - len_q)
        return _squeezed(seen)

    def alone(self, b: int, h: int, heads: int) -> MaskCase:
        q, kv = (None if x is None else _by_batch_and_head(x, b, h, heads) for x in (self.q, self.kv))
        return Buckets(self.kind, q=q, kv=kv, causal=self.causal)


@dataclass(frozen=True, eq=False)
class Blocks(MaskCase):
    """BlockSparse: bool (B or 1, H or 1, rows, columns)."""

    blocks: torch.Tensor | None = None
    size: tuple[int, int] = (128, 128)

    def build(self, device: str | torch.device = "cpu"):
        return flashmsa.BlockSparse(self.blocks.to(device), self.size)

    def allowed(self, len_q, len_kv, rows=None, device="cpu") -> torch.Tensor:
        i = torch.arange(len_q, device=device) if rows is None else rows.to(device)
        j = torch.arange(len_kv, device=device)
        return _squeezed(self.blocks.to(device)[:, :, i // self.size[0]][..., j // self.size[1]])

    def alone(self, b: int, h: int, heads: int) -> MaskCase:
        return Blocks(self.kind, blocks=_by_batch_and_head(self.blocks, b, h, heads), size=self.size)


@dataclass(frozen=True, eq=False)
class Pairs(MaskCase):
    """BlockSparse.from_dense: bool (B or 1, H or 1, len_q, len_kv)."""

    pairs: torch.Tensor | None = None

    def build(self, device: str | torch.device = "cpu"):
        return flashmsa.BlockSparse.from_dense(self.pairs.to(device))

    def allowed(self, len_q, len_kv, rows=None, device="cpu") -> torch.Tensor:
        pairs = self.pairs.to(device)
        return _squeezed(pairs if rows is None else pairs[:, :, rows.to(device)])

    def alone(self, b: int, h: int, heads: int) -> MaskCase:
        return Pairs(self.kind, pairs=_by_batch_and_head(self.pairs, b, h, heads))


@dataclass(frozen=True, eq=False)
class Both(MaskCase):
    """a & b & ..."""

    parts: tuple[MaskCase, ...] = ()

    def __str__(self) -> str:
        return " and ".join(map(str, self.parts))

    def build(self, device: str | torch.device = "cpu"):
        return functools.reduce(operator.and_, (part.build(device) for part in self.parts))

    def allowed(self, len_q, len_kv, rows=None, device="cpu") -> torch.Tensor:
        seen = [_by_head(part.allowed(len_q, len_kv, rows, device)) for part in self.parts]
        return _squeezed(functools.reduce(operator.and_, seen))

    def alone(self, b: int, h: int, heads: int) -> MaskCase:
        return Both(self.kind, parts=tuple(part.alone(b, h, heads) for part in self.parts))


def both(*parts: MaskCase) -> MaskCase:
    return Both("both", parts=parts)


@dataclass(frozen=True, eq=False)
class Sequences(MaskCase):
    """attention_varlen: `inner` inside each sequence, of whose keys the first used[d] are there (None: all)."""

    inner: MaskCase | None = None
    q_cuts: tuple[int, ...] = (0,)
    kv_cuts: tuple[int, ...] | None = None  # None: q_cuts
    used: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return f"{self.inner} in {self.q_cuts} {self.kv_cuts} {self.used}"

    def each(self) -> Iterator[tuple[slice, slice, MaskCase]]:
        """Rows, keys and mask of every sequence."""
        kv_cuts = self.q_cuts if self.kv_cuts is None else self.kv_cuts
        for d in range(len(self.q_cuts) - 1):
            end = kv_cuts[d + 1] if self.used is None else kv_cuts[d] + self.used[d]
            inner = self.inner.alone(d, 0, 1) if isinstance(self.inner, Prefixes) else self.inner
            yield slice(self.q_cuts[d], self.q_cuts[d + 1]), slice(kv_cuts[d], end), inner

    def allowed(self, len_q, len_kv, rows=None, device="cpu") -> torch.Tensor:
        seen = torch.zeros(len_q, len_kv, dtype=torch.bool, device=device)
        for mine, keys, inner in self.each():
            seen[mine, keys] = inner.allowed(mine.stop - mine.start, keys.stop - keys.start, device=device)[0]
        return seen[None] if rows is None else seen[None, rows.to(device)]

    def positions(self, len_q, len_kv, device="cpu") -> torch.Tensor:
        p = torch.zeros(len_q, dtype=torch.int64, device=device)
        for mine, keys, inner in self.each():
            p[mine] = keys.start + inner.positions(mine.stop - mine.start, keys.stop - keys.start, device)
        return p


def _by_head(allowed: torch.Tensor, heads: int | None = None) -> torch.Tensor:
    """allowed (B or 1, rows, len_kv) or with heads, as (B or 1, H or 1, rows, len_kv) for `heads` query heads."""
    allowed = allowed[:, None] if allowed.dim() == 3 else allowed
    if heads is None or allowed.shape[1] in (1, heads):
        return allowed
    return allowed[:, torch.arange(heads, device=allowed.device) * allowed.shape[1] // heads]


DENSE, CAUSAL, TOP_LEFT = MaskCase("dense"), MaskCase("causal"), MaskCase("top-left")


def document(*offsets: int, kv: tuple[int, ...] | None = None, causal: bool = False) -> MaskCase:
    """Documents cut at `offsets` (and keys at `kv`), shared by the batch."""
    return MaskCase("document-causal" if causal else "document", (offsets,), None if kv is None else (kv,))


def random_cuts(rng: random.Random, length: int, documents: int) -> tuple[int, ...]:
    """documents + 1 offsets from 0 to `length`; some documents come out empty, some are one token long."""
    inner = sorted(rng.randint(0, length) for _ in range(documents - 1))
    if len(inner) >= 3:
        inner[1] = inner[0]
        inner[-1] = min(inner[-2] + 1, length)
    return (0, *inner, length)


# Each family of masks and the kind that it lowers to (MaskKind in csrc/core/params.h).
FAMILY_KINDS = {
    "dense": 0,
    "causal": 1,
    "top-left": 1,
    "document": 2,
    "document-causal": 2,
    "document-cross": 2,
    "document-cross-causal": 2,
    "document-batched": 2,
    "document-batched-causal": 2,
    "document-short": 2,
    "document-short-causal": 2,
    "window": 3,
    "window-top-left": 3,
    "window-keep": 3,
    "prefix": 3,
    "prefix-window": 3,
    "prefix-by-batch": 3,
    "and-alignments": 3,
    "and-document-window": 3,
    "and-documents-by-batch": 3,
    "dilated": 4,
    "dilated-top-left": 4,
    "hash": 5,
    "hash-causal": 5,
    "hash-cross": 5,
    "hash-cross-causal": 5,
    "blocks": 6,
    "blocks-64x192": 6,
    "blocks-bits": 6,
    "and-blocks-causal": 6,
    "and-blocks-window-document": 6,
    "and-bits-prefix": 6,
}
# Those whose heads differ: mask_for has to be told the heads.
HEAD_FAMILY_KINDS = {
    "hash-heads": 5,
    "hash-heads-shared-keys-causal": 5,
    "hash-kv-heads": 5,
    "hash-same-heads-causal": 5,
    "blocks-heads": 6,
    "blocks-bits-heads": 6,
    "and-blocks-heads-causal": 6,
}
ALL_FAMILIES = (*FAMILY_KINDS, *HEAD_FAMILY_KINDS)
FAMILIES = tuple(FAMILY_KINDS)
# One of each kind.
ONE_OF_EACH = ("dense", "causal", "document-cross-causal", "window-keep", "dilated", "hash-causal", "blocks-64x192")


def by_family(found: list, families: tuple[str, ...] = FAMILIES) -> list:
    """pytest parameters (target, family): every family on a GPU and in float32 on the CPU backend; one of each kind in
    its other dtypes, whose arithmetic is apart from the masks, and on the composed backend, which reads them all from
    one lowered form."""
    pairs = []
    for param in found:
        (target,) = param.values
        every = target.device == "cuda" or (target.backend == "cpu" and target.dtype == torch.float32)
        for family in families if every else ONE_OF_EACH:
            pairs.append(pytest.param(target, family, id=f"{param.id}-{family}", marks=param.marks))
    return pairs


def mask_for(
    family: str,
    batch: int,
    len_q: int,
    len_kv: int,
    seed: int = 0,
    documents: int = 5,
    heads: tuple[int, int] = (1, 1),
) -> MaskCase:
    """One mask of a family for these lengths, and (query heads, kv heads) where heads differ.

    document: one set of cuts for both sides. cross: its own cuts for keys, empty documents on either side. batched:
    other cuts in every batch. short: the last cut lies before the end of both tensors.
    """
    rng = random.Random(f"{family} {batch} {len_q} {len_kv} {seed}")
    if family.startswith("and-"):
        return _intersection_for(family, batch, len_q, len_kv, seed, documents, heads, rng)
    if family.startswith("hash"):
        return _buckets_for(family, batch, len_q, len_kv, documents, heads, rng)
    if family.startswith("blocks"):
        return _blocks_for(family, batch, len_q, len_kv, heads, rng)
    longest = max(len_q, len_kv) + 2
    if family == "prefix-by-batch":
        some = [0, 1, rng.randint(0, longest), longest, len_kv]
        return Prefixes("prefix", prefixes=tuple(rng.choice(some) for _ in range(batch)))
    if family.startswith("dilated"):
        dilation = rng.choice([1, 2, 3, 4, 7, rng.randint(1, longest)])
        left, right = (rng.choice([0, rng.randint(0, 8), longest // dilation, longest]) for _ in range(2))
        return Dilated(family, left=left, right=right, dilation=dilation)
    if "window" in family or "prefix" in family:
        left, right = (rng.choice([0, rng.randint(0, 8), rng.randint(0, longest), longest]) for _ in range(2))
        keep = rng.choice([1, 4, rng.randint(1, longest)]) if "keep" in family else 0
        kind = family.removesuffix("-keep")
        prefix = rng.choice([0, 1, rng.randint(0, longest), longest])
        return MaskCase(kind, left=left, right=right, prefix=prefix, keep=keep)
    if not family.startswith("document"):
        return MaskCase(family)
    kind = "document-causal" if family.endswith("causal") else "document"
    short = min(len_q, len_kv)
    if "cross" in family:
        q_cuts, kv_cuts = random_cuts(rng, len_q, documents), random_cuts(rng, len_kv, documents)
        return MaskCase(kind, (q_cuts,), (kv_cuts,))
    if "batched" in family:
        q_cuts = tuple(random_cuts(rng, len_q, documents) for _ in range(batch))
        kv_cuts = tuple(random_cuts(rng, len_kv, documents) for _ in range(batch))
        return MaskCase(kind, q_cuts, kv_cuts, batched=True)
    if "short" in family:
        short = (2 * short) // 3
    return MaskCase(kind, (random_cuts(rng, short, documents),))


def _intersection_for(
    family: str,
    batch: int,
    len_q: int,
    len_kv: int,
    seed: int,
    documents: int,
    heads: tuple[int, int],
    rng: random.Random,
) -> MaskCase:
    def part(name: str) -> MaskCase:
        return mask_for(name, batch, len_q, len_kv, seed, documents, heads)

    if family == "and-alignments":
        # Wide enough that something is left between the two diagonals.
        away = abs(len_q - len_kv) + rng.randint(0, 20)
        wide = MaskCase("window-top-left", left=away, right=away + rng.randint(0, 9))
        return both(part("window"), wide, MaskCase("prefix-top-left", prefix=rng.randint(0, len_kv + away)))
    if family == "and-document-window":
        return both(part("document-cross-causal"), part("window-keep"))
    if family == "and-documents-by-batch":
        # Offsets for no batch at all are no mask.
        cuts = part("document-batched") if batch else part("document")
        return both(cuts, MaskCase("top-left"), part("prefix-by-batch"))
    if family == "and-blocks-causal":
        return both(part("blocks"), CAUSAL)
    if family == "and-blocks-window-document":
        return both(part("blocks-64x192"), part("document-cross"), part("window-keep"))
    if family == "and-bits-prefix":
        return both(part("prefix-by-batch"), part("blocks-bits"))
    assert family == "and-blocks-heads-causal", family
    return both(CAUSAL, part("blocks-heads"))


def _buckets_for(
    family: str, batch: int, len_q: int, len_kv: int, buckets: int, heads: tuple[int, int], rng: random.Random
) -> MaskCase:
    heads_q = heads[0] if "heads" in family and "kv-heads" not in family else 1
    heads_kv = 1 if "heads" not in family or "shared-keys" in family else heads[1]
    generator = torch.Generator().manual_seed(rng.randrange(2**31))

    def draw(number: int, length: int) -> torch.Tensor:
        shape = (rng.choice([1, max(1, batch)]), number, length)
        return torch.randint(-(buckets // 2), buckets, shape, generator=generator, dtype=torch.int32)

    # One side's buckets serve both only where lengths, and heads, are the same.
    same = len_q == len_kv and ("same" in family or ("cross" not in family and "heads" not in family))
    q = draw(heads_q, len_q)
    return Buckets(family, q=q, kv=None if same else draw(heads_kv, len_kv), causal=family.endswith("causal"))


def _blocks_for(
    family: str, batch: int, len_q: int, len_kv: int, heads: tuple[int, int], rng: random.Random
) -> MaskCase:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    leading = (rng.choice([1, max(1, batch)]), heads[0] if "heads" in family else 1)
    size = (64, 192) if "64x192" in family else (128, 128)
    counts = [-(-n // block) for n, block in zip((len_q, len_kv), size, strict=True)]
    blocks = torch.rand(*leading, *counts, generator=generator) < rng.choice([0.3, 0.6, 0.9])
    if "bits" not in family:
        return Blocks(family, blocks=blocks, size=size)
    # Some cells empty, some whole, some in part.
    pairs = torch.rand(*leading, len_q, len_kv, generator=generator) < 0.5
    whole = torch.rand(*leading, *counts, generator=generator) < 0.3
    blocks, whole = (Blocks(family, blocks=x).blocks[:, :, torch.arange(len_q) // 128] for x in (blocks, whole))
    blocks, whole = (x[..., torch.arange(len_kv) // 128] for x in (blocks, whole))
    return Pairs(family, pairs=blocks & (pairs | whole))


# ---------------------------------------------------------------------------------------------------------------------
# Inputs and calls


def make_qkv(
    target: Target,
    batch: int,
    heads: int | tuple[int, int],
    len_q: int,
    len_kv: int,
    dim: int,
    dim_v: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Standard normal q, k, v; `heads` is one number or (query heads, kv heads)."""
    heads_q, heads_kv = heads if isinstance(heads, tuple) else (heads, heads)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=target.device, dtype=torch.float32).to(target.dtype)

    return (
        normal(batch, heads_q, len_q, dim),
        normal(batch, heads_kv, len_kv, dim),
        normal(batch, heads_kv, len_kv, dim if dim_v is None else dim_v),
    )


def poisoned_out(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A contiguous output full of NaN: an element that nothing writes shows."""
    return torch.full((*q.shape[:3], v.shape[3]), math.nan, dtype=q.dtype, device=q.device)


def run(
    target: Target, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: MaskCase = DENSE, **kwargs
) -> tuple[torch.Tensor, torch.Tensor]:
    """attention() with lse into a poisoned output."""
    out = poisoned_out(q, v)
    built = mask.build(q.device)
    got, lse = flashmsa.attention(q, k, v, mask=built, backend=target.backend, return_lse=True, out=out, **kwargs)
    assert got.data_ptr() == out.data_ptr() and got.shape == out.shape, "out= must be what comes back"
    assert lse.shape == q.shape[:3] and lse.dtype == torch.float32 and lse.device == q.device
    return got, lse


@contextlib.contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Inside, torch fills every new tensor with NaN: also lse and outputs that the call allocates itself."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def copies_in(call: Callable[[], object]) -> int:
    """How many tensors `call` copies, counted at torch's own operators."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return sum(event.count for event in profile.key_averages() if event.key == "aten::copy_")


# ---------------------------------------------------------------------------------------------------------------------
# Softcap, sinks, ALiBi


@dataclass(frozen=True, eq=False)
class Options:
    """What a call does to its logits beside the scale, and the term that it adds to each row."""

    softcap: float = 0.0
    sinks: torch.Tensor | None = None  # (Hq,) fp32
    slopes: torch.Tensor | None = None  # (Hq,) or (B, Hq) fp32
    distance: torch.Tensor | None = None  # (len_q, len_kv): |p - j|, set by `of`

    def of(self, mask: MaskCase, len_q: int, len_kv: int, rows: torch.Tensor | None, device) -> Options:
        """With the distances of this mask's positions."""
        p = mask.positions(len_q, len_kv, device)
        p = p if rows is None else p[rows]
        return dataclasses.replace(self, distance=(p[:, None] - torch.arange(len_kv, device=device)).abs())

    def bend(self, s: torch.Tensor, begin: int = 0) -> torch.Tensor:
        """The logits (B, H, rows, len_kv) of the query rows from `begin` on, in their own dtype."""
        if self.softcap:
            s = self.softcap * torch.tanh(s / self.softcap)
        if self.slopes is not None:
            distance = self.distance[begin : begin + s.shape[2]].to(s.dtype)
            s = s - self.slopes.to(s.dtype)[..., None, None] * distance
        return s

    def call(self) -> dict:
        """As attention() takes them."""
        named = {"softcap": self.softcap or None, "sinks": self.sinks, "alibi_slopes": self.slopes}
        return {name: value for name, value in named.items() if value is not None}


PLAIN = Options()


def with_sinks(s: torch.Tensor, options: Options) -> torch.Tensor:
    """One more key that has the sink for its logit, where there are sinks."""
    if options.sinks is None:
        return s
    return torch.cat([s, options.sinks.to(s.dtype)[:, None, None].expand(*s.shape[:3], 1)], -1)


# ---------------------------------------------------------------------------------------------------------------------
# The oracle


def _heads_like(q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Query head h uses kv head h // (Hq / Hkv)."""
    group = q.shape[1] // x.shape[1]
    return x[:, torch.arange(q.shape[1], device=x.device) // group]


def oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    allowed: torch.Tensor,
    scale: float | None = None,
    options: Options = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """softmax(scale q k^T over the allowed keys) v by the rules, as (out, rest, lse) in float64.

    `allowed` is (B or 1, len_q, len_kv), or with heads. The result is out + rest: for float64 inputs it is computed in
    extended precision, since float64 cannot judge itself, and `rest` holds what float64 cannot; else rest is 0.
    A visible NaN gives NaN; a masked value of any kind does not count; a row without a visible finite logit is 0, -inf.
    """
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    allowed = _by_head(allowed, q.shape[1])
    if q.dtype == torch.float64:
        return _oracle_extended(q, k, v, allowed, scale, options)
    k, v = _heads_like(q, k).double(), _heads_like(q, v).double()
    bad_v = ~v.isfinite()
    clean_v = v.masked_fill(bad_v, 0.0)
    outs, lses = [], []
    # Chunks of rows keep the logits within 1 GiB.
    chunk = max(1, 2**27 // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    for begin in range(0, max(q.shape[2], 1), chunk):
        seen = allowed[:, :, begin : begin + chunk]
        s = options.bend(q[:, :, begin : begin + chunk].double() @ k.mT * scale, begin)
        s = with_sinks(s.masked_fill(~seen, -math.inf), options)
        top = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:3], 1), -math.inf)
        top = top.masked_fill(top == -math.inf, 0.0)
        p = (s - top).exp()
        total = p.sum(-1, keepdim=True)
        out = (p[..., : k.shape[2]] @ clean_v / total).masked_fill(total == 0, 0.0)
        if bad_v.any():
            assert not (v.isinf() & seen.any(dim=2)[..., None]).any(), "no oracle for a visible inf in v"
            out = out.masked_fill(seen.double() @ bad_v.double() > 0, math.nan)
        outs.append(out)
        lses.append((top + total.log())[..., 0])
    out, lse = torch.cat(outs, 2), torch.cat(lses, 2)
    return out, torch.zeros_like(out), lse


def _oracle_extended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor, scale: float, options: Options
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The oracle in numpy's long double (64 or more bits of fraction), for float64 inputs; finite values only."""
    device = q.device
    k, v = _heads_like(q, k), _heads_like(q, v)
    q_, k_, v_ = (x.detach().cpu().numpy().astype(np.longdouble) for x in (q, k, v))
    # A masked value does not count: where no query sees a key it may be anything.
    dead = ~allowed.any(dim=2).cpu().numpy()[..., None]
    k_, v_ = np.where(dead, 0, k_), np.where(dead, 0, v_)
    with np.errstate(invalid="ignore", divide="ignore"):
        s = q_ @ k_.swapaxes(-1, -2) * np.longdouble(scale)
        if options.softcap:
            s = options.softcap * np.tanh(s / np.longdouble(options.softcap))
        if options.slopes is not None:
            slopes = options.slopes.cpu().numpy().astype(np.longdouble)
            s = s - slopes[..., None, None] * options.distance.cpu().numpy()
        s = np.where(allowed.cpu().numpy(), s, -np.inf)
        if options.sinks is not None:
            sinks = options.sinks.cpu().numpy().astype(np.longdouble)[:, None, None]
            s = np.concatenate([s, np.broadcast_to(sinks, (*s.shape[:3], 1))], -1)
        top = s.max(-1, keepdims=True, initial=-np.inf)
        top = np.where(top == -np.inf, 0, top)
        p = np.exp(s - top)
        total = p.sum(-1, keepdims=True)
        p = p[..., : k.shape[2]]
        bad_v = ~np.isfinite(v_)
        out = np.where(total == 0, 0, p @ np.where(bad_v, 0, v_) / total)
        if bad_v.any():
            assert not (np.isinf(v_)).any(), "no oracle for a visible inf in v"
            out = np.where(allowed.cpu().numpy().astype(float) @ bad_v > 0, np.nan, out)
        lse = (top + np.log(total))[..., 0]
        high = out.astype(np.float64)
        rest = (out - high).astype(np.float64)
    return tuple(torch.from_numpy(np.ascontiguousarray(x)).to(device) for x in (high, rest, lse.astype(np.float64)))


def composed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    allowed: torch.Tensor,
    scale: float | None = None,
    options: Options = PLAIN,
) -> torch.Tensor:
    """The same from torch's operators in q's own dtype, nothing upcast: the yardstick of the tolerance rule."""
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    k, v = _heads_like(q, k), _heads_like(q, v)
    allowed = _by_head(allowed, q.shape[1])
    s = with_sinks(options.bend(torch.matmul(q, k.mT) * scale).masked_fill(~allowed, -math.inf), options)
    p = torch.softmax(s, dim=-1)[..., : k.shape[2]].masked_fill(~allowed.any(-1, keepdim=True), 0.0)
    return torch.matmul(p, v)


# ---------------------------------------------------------------------------------------------------------------------
# The tolerance rule


def ulp(value: float, dtype: torch.dtype) -> float:
    """The distance from |value| to the next larger number of dtype."""
    info = torch.finfo(dtype)
    value = abs(value)
    if value < info.tiny:
        return info.tiny * info.eps
    return info.eps * 2.0 ** math.floor(math.log2(value))


def rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item() if x.numel() else 0.0


def largest(x: torch.Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def assert_within_rule(
    got: torch.Tensor,
    expected: torch.Tensor,
    rest: torch.Tensor,
    yardstick: torch.Tensor,
    note: object = "",
    limit: float | None = None,
    extra: float = 0.0,
    known: torch.Tensor | None = None,
) -> None:
    """RMS and maximum error at most twice the yardstick's, plus one ulp of the largest expected value.

    expected + rest is the exact answer in float64; NaN must stand in the same places; all tensors of one shape.
    A `limit` given takes the place of the rule: a maximum error known from elsewhere. `extra` is added to the rule, and
    so are RMS and maximum of `known`, an error that the contract itself makes and the yardstick does not have.
    """
    assert torch.equal(got.isnan(), expected.isnan()), (
        f"{note}: NaN in {int(got.isnan().sum())} elements, expected in {int(expected.isnan().sum())}; first "
        f"difference at {(got.isnan() != expected.isnan()).nonzero()[0].tolist()} of {list(got.shape)}"
    )
    counted = ~expected.isnan() & expected.isfinite()
    error = ((got.double() - expected) - rest).masked_fill(~counted, 0.0)
    base = ((yardstick.double() - expected) - rest).masked_fill(~counted | ~yardstick.isfinite(), 0.0)
    slack = ulp(largest(expected.masked_fill(~counted, 0.0)), got.dtype)
    # NOTE: the maximum over few elements is a draw of chance. Of n errors of deviation s it is about s sqrt(2 ln n):
    # 4 s for 3000. Where the yardstick's few elements happened to err by less, it counts as four times its RMS.
    yardsticks = {"maximum": max(largest(base), 4.0 * rms(base) if base.numel() < 3000 else 0.0), "rms": rms(base)}
    for name, measure in (("maximum", largest), ("rms", rms)):
        most = 2.0 * yardsticks[name] + slack + extra + (0.0 if known is None else measure(known))
        found, most = measure(error), most if limit is None else limit
        if not found <= most:
            where = np.unravel_index(int(error.abs().argmax()), tuple(error.shape))
            raise AssertionError(
                f"{note}: {name} error {found:.4g} over the limit {most:.4g} "
                f"(composed operators {yardsticks[name]:.4g}, one ulp {slack:.4g}); "
                f"worst at {[int(w) for w in where]} of {list(got.shape)}: "
                f"{got[where].item()!r}, expected {expected[where].item()!r}"
            )


def limit_of_whole(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: MaskCase = DENSE,
    *,
    scale: float | None = None,
    options: Options = PLAIN,
) -> float:
    """The rule's limit on the maximum error of a call.

    The rule speaks of whole results: in a row or two the composed operators may happen to be exact. A part is judged by
    the limit of its whole.
    """
    allowed = mask.allowed(q.shape[2], k.shape[2], device=q.device)
    q, k, v = (torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0) for x in (q, k, v))
    options = options.of(mask, q.shape[2], k.shape[2], None, q.device)
    expected, rest, _ = oracle(q, k, v, allowed, scale, options)
    base = (composed(q, k, v, allowed, scale, options).double() - expected) - rest
    return 2.0 * largest(base) + ulp(largest(expected), q.dtype)


def worst_case(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None) -> float:
    """What rounding can do at most, for tests that search for the worst input: there the rule's yardstick is by chance.

    Sums of n terms err by at most n u of the sum of magnitudes, u being the unit of the arithmetic (fp32 for half
    types). An error e of every logit changes a weight by a factor within exp(2 e); the rest is the weights' own sum,
    exp and division, and the result's last rounding.
    """
    unit = torch.finfo(torch.promote_types(q.dtype, torch.float32)).eps
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else abs(scale)
    logits = scale * largest(q.double().abs() @ _heads_like(q, k).double().abs().mT)
    in_logits = (q.shape[-1] + 4) * unit * logits
    return (2.0 * in_logits + (k.shape[2] + 16) * unit + torch.finfo(q.dtype).eps) * largest(v.double())


def assert_lse(got: torch.Tensor, expected: torch.Tensor, note: object = "") -> None:
    """|error| <= 1e-5 max(1, |lse|); -inf and NaN in exactly the expected places."""
    got = got.double()
    for name, same in (("NaN", torch.isnan), ("-inf", torch.isneginf), ("+inf", torch.isposinf)):
        differs = same(got) != same(expected)
        assert not differs.any(), (
            f"{note}: lse is {name} or not at {differs.nonzero()[0].tolist()} of {list(got.shape)}: "
            f"{got[differs][0].item()}, expected {expected[differs][0].item()}"
        )
    finite = expected.isfinite()
    error = (got[finite] - expected[finite]).abs() / expected[finite].abs().clamp(min=1.0)
    assert largest(error) <= 1e-5, f"{note}: lse error {largest(error):.3g} over 1e-5 max(1, |lse|)"


def check(
    got: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: MaskCase = DENSE,
    *,
    scale: float | None = None,
    options: Options = PLAIN,
    rows: torch.Tensor | None = None,
    note: object = "",
    limit: float | None = None,
) -> None:
    """got and lse against the oracle by the tolerance rule; `rows` picks the query rows that are compared.

    A `limit` is the maximum error allowed instead: limit_of_whole for a part of a result, or worst_case.
    """
    allowed = mask.allowed(q.shape[2], k.shape[2], rows, q.device)
    options = options.of(mask, q.shape[2], k.shape[2], rows, q.device)
    if rows is not None:
        q, got = q[:, :, rows], got[:, :, rows]
        lse = None if lse is None else lse[:, :, rows]
    note = note or f"{mask} q {tuple(q.shape)} k {tuple(k.shape)}"
    assert got.dtype == q.dtype, f"{note}: out is {got.dtype}, q is {q.dtype}"
    expected, rest, expected_lse = oracle(q, k, v, allowed, scale, options)
    assert got.shape == expected.shape, f"{note}: out has shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    sees_nothing = ~_by_head(allowed, q.shape[1]).any(-1).expand(expected_lse.shape)
    empty = expected_lse.isneginf() | sees_nothing
    assert not got[empty].count_nonzero(), f"{note}: a row without a visible key is not 0"
    clean = (torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0) for x in (q, k, v))
    assert_within_rule(got, expected, rest, composed(*clean, allowed, scale, options), note, limit)
    if lse is not None:
        assert_lse(lse, expected_lse, note)


def run_and_check(
    target: Target,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: MaskCase = DENSE,
    *,
    options: Options = PLAIN,
    rows: torch.Tensor | None = None,
    note: object = "",
    limit: float | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """run(), then check()."""
    out, lse = run(target, q, k, v, mask, **options.call(), **kwargs)
    check(out, lse, q, k, v, mask, scale=kwargs.get("scale"), options=options, rows=rows, note=note, limit=limit)
    return out, lse
