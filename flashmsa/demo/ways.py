"""The ways of encoding the whole corpus that the demo compares: what each computes, gives and takes."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .batches import Alone, Batch, Packed, Padded, TokenIds, padded_batches
from .encoder import Encoder


@dataclass
class Plan:
    """Where and how much: what the options and the machine come to."""

    device: torch.device
    dtype: torch.dtype
    texts: int | None  # None: all of them
    pack: int | None  # texts per packed sequence, None: all in one
    batch: int  # texts per padded batch
    rounds: int  # timed passes of each way but the last


@dataclass(eq=False)
class Way:
    """One way of encoding all texts, and what came of it."""

    name: str
    encode: Callable[[], Tensor]
    computed: int  # tokens that the encoder computes, padding included
    embeddings: Tensor = field(default_factory=lambda: torch.empty(0))  # (texts, hidden)
    seconds: float = 0.0


@dataclass
class Ways:
    """The four of them, in the order in which they are run and printed."""

    packed: Way
    sorted: Way
    padded: Way
    alone: Way

    def __iter__(self) -> Iterator[Way]:
        return iter((self.packed, self.sorted, self.padded, self.alone))


def prepare(plan: Plan, encoder: Encoder, ids: TokenIds) -> Ways:
    """Build every batch now, so that timing sees the encoder only."""

    def way(name: str, batches: list[Batch], restore: Tensor | None = None) -> Way:
        def encode() -> Tensor:
            embeddings = torch.cat([encoder(batch) for batch in batches])
            return embeddings if restore is None else embeddings[restore]

        return Way(name, encode, sum(batch.tokens.numel() for batch in batches))

    step = plan.pack or len(ids)
    return Ways(
        packed=way("packed, flashmsa", [Packed(ids[at : at + step], plan.device) for at in range(0, len(ids), step)]),
        sorted=way("padded after sorting, SDPA", *padded_batches(ids, plan.device, plan.batch, by_length=True)),
        padded=way("padded, SDPA", *padded_batches(ids, plan.device, plan.batch, by_length=False)),
        alone=way("one at a time, flashmsa", [Alone(text, plan.device) for text in ids]),
    )


def measure(ways: Ways, plan: Plan) -> None:
    """Fill in embeddings and the median seconds. The ways take turns, so that a slow moment hits them alike.

    One at a time has a single pass: on a GPU it takes longer than all the others together, and waits on the host.
    """

    def wait() -> None:
        if plan.device.type == "cuda":
            torch.cuda.synchronize(plan.device)

    # A GPU's first pass loads kernels and grows the allocator. On the CPU a warm-up would cost as much as it measures.
    warm_up = 0 if plan.device.type == "cpu" else 1
    seconds: dict[str, list[float]] = {way.name: [] for way in ways}
    for turn in range(warm_up + plan.rounds):
        for way in ways:
            if way is ways.alone and turn != warm_up:
                continue
            wait()
            start = time.perf_counter()
            way.embeddings = way.encode()
            wait()
            seconds[way.name].append(time.perf_counter() - start)
    for way in ways:
        way.seconds = statistics.median(seconds[way.name][-plan.rounds :])


def float64_embeddings(encoder: Encoder, texts: TokenIds) -> Tensor:
    """Embeddings of `texts` by torch's SDPA in float64 on the CPU.

    The weights are the encoder's own, rounded to its dtype: what is compared is the arithmetic of a pass, not the
    loss of storing weights in 16 bits.
    """
    return copy.deepcopy(encoder).to("cpu", torch.float64)(Padded(texts, "cpu"))


def error(found: Tensor, exact: Tensor) -> Tensor:
    """(root mean square, largest) absolute error of embeddings against float64 ones."""
    off = (found.double().cpu() - exact).abs()
    return torch.stack((off.square().mean().sqrt(), off.max()))


def error_limit(sdpa_error: Tensor, exact: Tensor, dtype: torch.dtype) -> Tensor:
    """What `error` may be: twice what torch's own operators lose in that dtype, plus one ulp of the largest value."""
    return 2 * sdpa_error + torch.finfo(dtype).eps * exact.abs().max()
