"""What the tests of paged caches share: caches whose unused places are poisoned, and their results from the definition.

A sequence's expected result is that of `helpers.oracle` over its own tokens, dense and in float64; nothing here asks
flashmsa for an answer.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from helpers import (
    DENSE,
    PLAIN,
    MaskCase,
    Options,
    Pairs,
    Target,
    assert_lse,
    assert_within_rule,
    composed,
    largest,
    oracle,
)

import flashmsa

OUTSIDE = (-1, 2**31 - 1, -(2**31), 10**6)


@dataclass(eq=False)
class Cache:
    """A paged cache: k and v hold each sequence's tokens densely, as they were put into the pages."""

    k_pages: torch.Tensor
    v_pages: torch.Tensor
    table: torch.Tensor
    lens: torch.Tensor
    k: list[torch.Tensor] = field(default_factory=list)  # (tokens, Hkv, D)
    v: list[torch.Tensor] = field(default_factory=list)

    @property
    def page_size(self) -> int:
        return self.k_pages.shape[1]

    def arguments(self) -> tuple[torch.Tensor, ...]:
        return self.k_pages, self.v_pages, self.table, self.lens


def make_cache(
    target: Target,
    lens: list[int],
    page_size: int,
    heads: int,
    dim: int,
    dim_v: int | None = None,
    *,
    spare: int = 2,
    shared: int = 0,
    outside: tuple[int, ...] = OUTSIDE,
    seed: int = 0,
) -> Cache:
    """Sequences of these lengths over shuffled pages. The first `shared` pages are the same for all sequences that fill
    them. Whatever no sequence uses is NaN in K and inf in V; entries past a length are `outside` every pool."""
    rng = random.Random(f"{lens} {page_size} {seed}")
    dim_v = dim if dim_v is None else dim_v
    places = max((-(-n // page_size) for n in lens), default=0) + spare
    used = sum(-(-n // page_size) for n in lens) + 3
    free = list(range(used))
    rng.shuffle(free)
    k_pages = torch.full((used, page_size, heads, dim), math.nan)
    v_pages = torch.full((used, page_size, heads, dim_v), math.inf)
    table = torch.tensor([[rng.choice(outside) for _ in range(places)] for _ in lens], dtype=torch.int32)
    table = table.reshape(len(lens), places)
    prefix: list[int] = []
    for b, length in enumerate(lens):
        for n in range(-(-length // page_size)):
            whole = (n + 1) * page_size <= length
            if whole and n < min(shared, len(prefix)):
                table[b, n] = prefix[n]
                continue
            page, tokens = free.pop(), min(page_size, length - n * page_size)
            table[b, n] = page
            k_pages[page, :tokens] = torch.randn(tokens, heads, dim)
            v_pages[page, :tokens] = torch.randn(tokens, heads, dim_v)
            if whole and n == len(prefix) < shared:
                prefix.append(page)
    k_pages, v_pages = (x.to(target.dtype).to(target.device) for x in (k_pages, v_pages))
    k, v = [], []
    for b, length in enumerate(lens):
        pages = table[b, : -(-length // page_size)].long().to(target.device)
        k.append(k_pages[pages].flatten(0, 1)[:length])
        v.append(v_pages[pages].flatten(0, 1)[:length])
    device_lens = torch.tensor(lens, dtype=torch.int32, device=target.device)
    return Cache(k_pages, v_pages, table.to(target.device), device_lens, k, v)


def queries(target: Target, batch: int, heads: int, length: int, dim: int) -> torch.Tensor:
    return torch.randn(batch, heads, length, dim).to(target.dtype).to(target.device)


@dataclass
class Judge:
    """Collects the sequences of one call; the tolerance rule speaks of whole results."""

    cache: Cache
    options: Options = PLAIN
    scale: float | None = None
    parts: list[tuple[torch.Tensor, ...]] = field(default_factory=list)
    extra: float = 0.0  # fp32: the keys are added in an order that the backend or a library chooses

    def add(self, b: int, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, mask: MaskCase) -> None:
        """q, out (Hq, rows, D) and lse (Hq, rows) of sequence b."""
        k, v = (x[b].transpose(0, 1)[None] for x in (self.cache.k, self.cache.v))
        options, slopes = self.options, self.options.slopes
        if slopes is not None and slopes.dim() == 2:
            options = Options(options.softcap, options.sinks, slopes[b])
        q, rows, keys = q[None], q.shape[1], k.shape[2]
        allowed = mask.allowed(rows, keys, device=q.device)
        options = options.of(mask, rows, keys, None, q.device)
        note = f"sequence {b} of {keys} keys, {rows} queries, pages of {self.cache.page_size}, {mask}"
        expected, rest, expected_lse = oracle(q, k, v, allowed, self.scale, options)
        assert out[None].shape == expected.shape and out.dtype == q.dtype, note
        empty = ~allowed.any(-1)
        assert not out[None][empty[:, None].expand(out[None].shape[:3])].count_nonzero(), f"{note}: not 0"
        if lse is not None:
            assert_lse(lse[None], expected_lse, note)
        clean = [torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0) for x in (q, k, v)]
        self.parts.append((out[None], expected, rest, composed(*clean, allowed, self.scale, options)))
        if q.dtype == torch.float32:
            # n roundings by half a unit, that walk at random, of a sum of such magnitudes.
            sums = composed(*clean[:2], clean[2].abs(), allowed, self.scale, options)
            self.extra = max(self.extra, keys**0.5 * torch.finfo(q.dtype).eps / 2 * largest(sums))

    def decide(self, note: object = "") -> None:
        flat = [torch.cat([x.flatten() for x in column]) for column in zip(*self.parts, strict=True)]
        note = f"{note} {[len(x) for x in self.cache.k]} keys, pages of {self.cache.page_size}"
        assert_within_rule(*flat, note, extra=self.extra)


def run_and_check(
    target: Target,
    q: torch.Tensor,
    cache: Cache,
    mask: MaskCase = MaskCase("causal"),  # noqa: B008
    options: Options = PLAIN,
    note: object = "",
    allowed: list[torch.Tensor] | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """paged_attention of padded q (B, Hq, S, D), every sequence against the oracle.

    `allowed` holds, for each sequence, the pairs (S, keys) in place of the mask's: trees, listed pages.
    """
    out, lse = flashmsa.paged_attention(
        q,
        *cache.arguments(),
        mask=mask.build(q.device),
        backend=target.backend,
        return_lse=True,
        **options.call(),
        **kwargs,
    )
    assert lse.shape == q.shape[:3] and lse.dtype == torch.float32 and lse.device == q.device
    judge = Judge(cache, options, kwargs.get("scale"))
    for b in range(q.shape[0]):
        mine = mask.alone(b, 0, 1) if allowed is None else Pairs("pairs", pairs=allowed[b][None, None])
        judge.add(b, q[b], out[b], lse[b], mine)
    judge.decide(f"{note} {mask}")
    return out, lse


def packed(target: Target, counts: list[int], heads: int, dim: int, tail: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """q (T, Hq, D) whose last `tail` rows lie in no sequence and are NaN, and cu_seqlens_q."""
    q = torch.randn(sum(counts) + tail, heads, dim)
    q[sum(counts) :] = math.nan
    cuts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return q.to(target.dtype).to(target.device), cuts.to(target.device)


def run_packed_and_check(
    target: Target,
    q: torch.Tensor,
    cuts: torch.Tensor,
    cache: Cache,
    mask: MaskCase = MaskCase("causal"),  # noqa: B008
    options: Options = PLAIN,
    allowed: list[torch.Tensor] | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = flashmsa.paged_attention(
        q,
        *cache.arguments(),
        mask=mask.build(q.device),
        cu_seqlens_q=cuts,
        backend=target.backend,
        return_lse=True,
        **options.call(),
        **kwargs,
    )
    assert out.shape == (*q.shape[:2], cache.v_pages.shape[3]) and lse.shape == (q.shape[1], q.shape[0])
    offsets = cuts.tolist()
    judge = Judge(cache, options)
    for b, (begin, end) in enumerate(pairwise(offsets)):
        mine = mask.alone(b, 0, 1) if allowed is None else Pairs("pairs", pairs=allowed[b][None, None])
        rows = slice(begin, end)
        judge.add(b, q[rows].transpose(0, 1), out[rows].transpose(0, 1), lse[:, rows], mine)
    judge.decide(f"packed {mask}")
    assert not out[offsets[-1] :].count_nonzero(), "rows past the last sequence are not 0"
    assert lse[:, offsets[-1] :].isneginf().all()
    return out, lse


def listed_pairs(
    pages: torch.Tensor, query_block: int, page_size: int, rows: int, keys: int, mask: MaskCase = DENSE
) -> torch.Tensor:
    """bool (rows, keys): the mask's pairs whose key lies on a page listed for the row's block; pages (blocks, n)."""
    seen = mask.allowed(rows, keys)[0]
    listed = torch.zeros(rows, keys, dtype=torch.bool)
    for i in range(rows):
        for page in pages[i // query_block].tolist():
            if page >= 0:
                listed[i, page * page_size : (page + 1) * page_size] = True
    return seen & listed


def tree_pairs(tree: torch.Tensor, keys: int) -> torch.Tensor:
    """bool (rows, keys): all keys before the last `rows`, of those the tree's (rows, rows)."""
    rows = tree.shape[0]
    seen = torch.ones(rows, keys, dtype=torch.bool)
    for t in range(rows):
        if keys - rows + t >= 0:
            seen[:, keys - rows + t] = tree[:, t]
    return seen


def random_tree(rows: int, rng: random.Random) -> torch.Tensor:
    """Each node sees itself and its ancestors; node 0 is the root."""
    tree = torch.zeros(rows, rows, dtype=torch.bool)
    for i in range(rows):
        if i:
            tree[i] = tree[rng.randrange(i)]
        tree[i, i] = True
    return tree
