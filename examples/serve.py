"""Serving with a paged cache: continuous batching, chunked prefill, shared prefixes, eviction by page subset.

A small causal transformer with random weights answers requests that come and go. Every step is one packed batch: the
next pages of some prompts, one token of each sequence that is being answered. Whole pages of a prompt that another
sequence has in its cache are shared. With ``window`` a sequence keeps its first pages and its last ones;
``query_pages`` says so for each page of queries, and what nobody will look at again goes back to the pool.

    python examples/serve.py                  # on the CPU, checked token by token against the model without a cache
    python examples/serve.py --device cuda    # bfloat16, on an H100 or H200

A page of the cache is also a block of queries here: what a prompt's token sees depends on its position and on nothing
that the scheduler decides, and so does what is shared.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

# A checkout built in place; an installed package comes first.
sys.path.append(str(Path(__file__).resolve().parent.parent))

import flashmsa

PAGE = 64  # tokens of a page, and queries of a block
FIRST_PAGES = 1  # that a windowed sequence keeps

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


# ---------------------------------------------------------------------------------------------------------------------
# The model


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, heads_kv: int, head_dim: int) -> None:
        super().__init__()
        self.heads = (heads, heads_kv, heads_kv)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, sum(self.heads) * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (sum(self.heads), -1)).split(self.heads, 1)
        x = x + self.out(attend(q, k, v).flatten(1))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """Tokens (T,) to logits (T, vocabulary). ``attend(layer, q, k, v)`` mixes them: q (T, Hq, D) turned by its
    positions, k and v (T, Hkv, D) as they come."""

    def __init__(
        self,
        vocabulary: int = 97,
        layers: int = 2,
        heads: int = 4,
        heads_kv: int = 2,
        head_dim: int = 32,
        positions: int = 2048,
    ) -> None:
        super().__init__()
        width = heads * head_dim
        self.heads_kv, self.head_dim = heads_kv, head_dim
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, heads, heads_kv, head_dim) for _ in range(layers))
        self.head = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False))
        angle = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(head_dim // 2) / (head_dim // 2))
        self.register_buffer("cos", angle.cos().float())
        self.register_buffer("sin", angle.sin().float())

    def turn(self, x: Tensor, position: Tensor) -> Tensor:
        """Rotary embedding of x (T, H, D), halves paired: what append_kv does to k."""
        cos, sin = (table[position][:, None] for table in (self.cos, self.sin))
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

    def forward(self, tokens: Tensor, position: Tensor, attend: Attend) -> Tensor:
        x = self.embedding(tokens)
        for n, layer in enumerate(self.layers):
            x = layer(x, lambda q, k, v, n=n: attend(n, self.turn(q, position), k, v))
        return self.head(x)


# ---------------------------------------------------------------------------------------------------------------------
# What a query sees


def block_end(position: int, prompt: int) -> int:
    """One past the last position of a query's block: of its page of the prompt, or itself."""
    return min((position // PAGE + 1) * PAGE, prompt) if position < prompt else position + 1


def seen_pages(end: int, window: int) -> list[int]:
    """The pages that a block of queries which ends there may see: the first ones, and the last ``window``."""
    last = (end - 1) // PAGE
    return [page for page in range(last + 1) if page < FIRST_PAGES or page > last - window]


# ---------------------------------------------------------------------------------------------------------------------
# Pages


class Pool:
    """Which pages are free, how often each is in use, and which tokens the whole ones of prompts hold."""

    def __init__(self, pages: int) -> None:
        self.free = list(range(pages))
        self.users = [0] * pages
        self._page_of: dict[tuple[int, ...], int] = {}  # by all tokens up to the page's end
        self._tokens_of: dict[int, tuple[int, ...]] = {}

    def take(self) -> int:
        page = self.free.pop()
        self.users[page] = 1
        return page

    def release(self, page: int) -> None:
        self.users[page] -= 1
        if self.users[page] == 0:
            self._page_of.pop(self._tokens_of.pop(page, ()), None)
            self.free.append(page)

    def publish(self, page: int, tokens: tuple[int, ...]) -> None:
        """Its keys and values are there: others may share it."""
        if tokens not in self._page_of:
            self._page_of[tokens], self._tokens_of[page] = page, tokens

    def share(self, tokens: list[int]) -> int | None:
        """The page whose tokens end these, for one more user."""
        page = self._page_of.get(tuple(tokens))
        if page is not None:
            self.users[page] += 1
        return page


@dataclass
class Sequence:
    number: int
    prompt: int  # its length
    tokens: list[int]  # prompt and answer
    most: int  # tokens, at the end
    pages: list[int] = field(default_factory=list)  # -1: evicted
    cached: int = 0  # tokens whose keys and values are in the cache
    reserved: int = 0  # pages that it may still take


@dataclass
class Counts:
    """What a run did."""

    steps: int = 0
    tokens: int = 0  # computed
    shared: int = 0  # pages taken over from others
    evicted: int = 0
    most_pages: int = 0  # in use at once
    largest_batch: int = 0


class Server:
    """Answers requests greedily, many at once."""

    def __init__(self, model: Model, pages: int, *, window: int | None = None, prefill_pages: int = 2) -> None:
        self.model, self.window, self.prefill_pages = model, window, prefill_pages
        weight = model.embedding.weight
        shape = (len(model.layers), pages, PAGE, model.heads_kv, model.head_dim)
        self.k_pages, self.v_pages = (torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in range(2))
        self.pool = Pool(pages)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.counts = Counts()

    def submit(self, number: int, prompt: list[int], new_tokens: int) -> None:
        self.waiting.append(Sequence(number, len(prompt), list(prompt), len(prompt) + new_tokens))

    def run(self) -> Iterator[tuple[int, list[int]]]:
        """(number, answer) of each request when it is done."""
        while self.waiting or self.running:
            self._admit()
            if not self.running:
                raise RuntimeError(f"pages: request {self.waiting[0].number} needs more than the pool has")
            self._step()
            for s in [s for s in self.running if len(s.tokens) == s.most]:
                self.running.remove(s)
                for page in s.pages:
                    if page >= 0:
                        self.pool.release(page)
                yield s.number, s.tokens[s.prompt :]

    def _admit(self) -> None:
        """The next one, if it is sure to get its pages. One a step: it finds the pages of those before it."""
        if not self.waiting:
            return
        s = self.waiting[0]
        s.reserved = -(-s.most // PAGE)
        if self.window is not None:
            s.reserved = min(s.reserved, FIRST_PAGES + self.window + self.prefill_pages)
        self._adopt(s)
        if s.reserved <= len(self.pool.free) - sum(x.reserved for x in self.running):
            self.counts.shared += len(s.pages)
            self.running.append(self.waiting.popleft())
            return
        for page in s.pages:
            self.pool.release(page)
        s.pages, s.cached = [], 0

    def _adopt(self, s: Sequence) -> int:
        """Takes over what others have computed of its prompt; the last token stays to be computed. How many pages."""
        before = len(s.pages)
        while s.cached == len(s.pages) * PAGE and s.cached + PAGE < s.prompt:
            page = self.pool.share(s.tokens[: s.cached + PAGE])
            if page is None:
                break
            s.pages.append(page)
            s.cached, s.reserved = s.cached + PAGE, max(0, s.reserved - 1)
        return len(s.pages) - before

    @torch.no_grad()
    def _step(self) -> None:
        self.counts.shared += sum(map(self._adopt, self.running))
        counts = [min(len(s.tokens) - s.cached, self.prefill_pages * PAGE) for s in self.running]
        for s, count in zip(self.running, counts, strict=True):
            self._evict(s)
            while len(s.pages) * PAGE < s.cached + count:
                s.pages.append(self.pool.take())
                s.reserved = max(0, s.reserved - 1)
        logits = self._compute(counts)
        # The one look at the device in a step.
        best = logits.argmax(-1).tolist()
        for s, count, token in zip(self.running, counts, best, strict=True):
            for page in range(s.cached // PAGE, min(s.cached + count, s.prompt) // PAGE):
                self.pool.publish(s.pages[page], tuple(s.tokens[: (page + 1) * PAGE]))
            s.cached += count
            if s.cached == len(s.tokens):
                s.tokens.append(token)
        used = len(self.pool.users) - len(self.pool.free)
        c = self.counts
        c.steps, c.tokens, c.most_pages = c.steps + 1, c.tokens + sum(counts), max(c.most_pages, used)
        c.largest_batch = max(c.largest_batch, len(counts))

    def _evict(self, s: Sequence) -> None:
        """Gives back what neither the next block of queries nor a later one may see."""
        if self.window is None:
            return
        kept = set(seen_pages(block_end(s.cached, s.prompt), self.window))
        for n, page in enumerate(s.pages):
            if page >= 0 and n not in kept:
                self.pool.release(page)
                s.pages[n], s.reserved = -1, s.reserved + 1
                self.counts.evicted += 1

    def _compute(self, counts: list[int]) -> Tensor:
        """Logits (sequences, vocabulary) behind the new tokens of each sequence."""
        device = self.k_pages.device

        def ints(values: list, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        new = [range(s.cached, s.cached + count) for s, count in zip(self.running, counts, strict=True)]
        tokens = ints([s.tokens[p] for s, places in zip(self.running, new, strict=True) for p in places], torch.int64)
        position = ints([p for places in new for p in places], torch.int64)
        cuts = ints([0, *counts]).cumsum(0, dtype=torch.int32)
        before = ints([s.cached for s in self.running])
        after = before + ints(counts)
        width = max(len(s.pages) for s in self.running)
        table = ints([s.pages + [-1] * (width - len(s.pages)) for s in self.running])
        lists = None if self.window is None else ints(self._lists(new))
        rope = (self.model.cos, self.model.sin)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            pages = self.k_pages[layer], self.v_pages[layer], table
            flashmsa.append_kv(*pages, before, k, v, rope, cu_seqlens=cuts)
            return flashmsa.paged_attention(
                *(q, *pages, after),
                cu_seqlens_q=cuts,
                max_seqlen_q=max(counts),
                query_pages=lists,
                query_block=PAGE,
            )

        return self.model(tokens, position, attend)[cuts[1:].long() - 1]

    def _lists(self, new: list[range]) -> list[list[list[int]]]:
        """query_pages: for each sequence and block of its new queries the pages that they may see."""
        blocks, most = -(-max(map(len, new)) // PAGE), FIRST_PAGES + self.window
        lists = []
        for s, places in zip(self.running, new, strict=True):
            ends = [block_end(first, s.prompt) for first in places[::PAGE]]
            seen = [seen_pages(end, self.window) for end in ends] + [[]] * (blocks - len(ends))
            lists.append([pages + [-1] * (most - len(pages)) for pages in seen])
        return lists


# ---------------------------------------------------------------------------------------------------------------------
# The same model, one sequence at a time, without a cache


@torch.no_grad()
def answer_alone(model: Model, prompt: list[int], new_tokens: int, window: int | None = None) -> list[int]:
    """Computes the whole sequence again for each token, by torch's dense attention."""
    tokens = list(prompt)
    device = model.cos.device
    while len(tokens) < len(prompt) + new_tokens:
        position = torch.arange(len(tokens), device=device)
        seen = position <= position[:, None]
        if window is not None:
            for i in range(len(tokens)):
                pages = torch.tensor(seen_pages(block_end(i, len(prompt)), window), device=device)
                seen[i] &= torch.isin(position // PAGE, pages)

        def attend(_: int, q: Tensor, k: Tensor, v: Tensor, position=position, seen=seen) -> Tensor:
            q, k, v = (x.transpose(0, 1)[None] for x in (q, model.turn(k, position), v))
            out = nn.functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
            return out[0].transpose(0, 1)

        tokens.append(int(model(torch.tensor(tokens, device=device), position, attend)[-1].argmax()))
    return tokens[len(prompt) :]


def make_requests(number: int, vocabulary: int, longest: int, seed: int = 0) -> list[tuple[list[int], int]]:
    """Prompts of which half begin alike, and how many tokens each wants."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, count: int = 1) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    system = draw(0, vocabulary, longest // 2)
    requests = []
    for n in range(number):
        own = draw(0, vocabulary, draw(1, longest // 2)[0])
        requests.append(((system if n % 2 == 0 else []) + own, draw(1, 12)[0]))
    return requests


def serve(
    model: Model, requests: list[tuple[list[int], int]], pages: int, window: int | None = None
) -> tuple[list[list[int]], Counts, Server]:
    """Answers in the order of the requests, and what it took."""
    server = Server(model, pages, window=window)
    for n, (prompt, new_tokens) in enumerate(requests):
        server.submit(n, prompt, new_tokens)
    answers = dict(server.run())
    return [answers[n] for n in range(len(requests))], server.counts, server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--longest", type=int, default=600, help="tokens of a prompt")
    parser.add_argument("--pages", type=int, default=48, help="of the pool")
    options = parser.parse_args()
    torch.manual_seed(0)
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    model = Model().to(options.device)
    for module in (model.embedding, model.layers, model.head):
        module.to(dtype)
    requests = make_requests(options.requests, model.embedding.num_embeddings, options.longest)
    for window in (None, 2):
        start = time.perf_counter()
        answers, counts, _ = serve(model, requests, options.pages, window)
        seconds = time.perf_counter() - start
        expected = [answer_alone(model, *request, window) for request in requests]
        same = sum(a == b for x, y in zip(answers, expected, strict=True) for a, b in zip(x, y, strict=True))
        print(f"{'all pages seen' if window is None else f'first page and last {window} seen'}: {counts.steps} steps")
        print(f"  {counts.tokens} tokens computed in {seconds:.2f} s, up to {counts.largest_batch} sequences at once")
        print(f"  {counts.most_pages} pages in use at most, {counts.shared} shared, {counts.evicted} evicted")
        print(f"  {same} of {sum(map(len, expected))} tokens are those of the model by itself, without pages")
        if options.device == "cpu" and answers != expected:
            raise SystemExit("the answers differ")


if __name__ == "__main__":
    main()
