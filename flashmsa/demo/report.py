"""What the demo prints."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import flashmsa

from ..dispatch import dtype_name
from .batches import Packed, TokenIds
from .corpus import Entry
from .encoder import Encoder
from .ways import Plan, Ways, error, error_limit, float64_embeddings

HITS = 3  # per query
SAMPLE = 16  # texts that are also encoded in float64


def print_setting(plan: Plan, encoder: Encoder, ids: TokenIds) -> None:
    """The texts, the model, and which backend flashmsa takes for the first packed sequence."""
    lengths = [len(text) for text in ids]
    on_cpu = plan.device.type == "cpu"
    machine = f"{torch.get_num_threads()} threads" if on_cpu else torch.cuda.get_device_name(plan.device)
    first = Packed(ids[: plan.pack], plan.device)
    shape = (1, first.tokens.numel(), 3, encoder.heads, encoder.head_dim)
    q, k, v = torch.empty(shape, dtype=plan.dtype, device=plan.device).transpose(1, 3).unbind(2)
    print("Searching Python's own documentation with packed embeddings\n")
    print(f"texts    {len(ids)} docstrings of Python {platform.python_version()}, {sum(lengths)} tokens,")
    print(f"         {min(lengths)} to {max(lengths)} each")
    print(f"model    all-MiniLM-L6-v2: {len(encoder.layers)} layers, {encoder.heads} heads of {encoder.head_dim},")
    print(f"         {dtype_name(plan.dtype)} on {plan.device} ({machine})")
    print(f"packed   {len(first.lengths)} texts to a sequence of {first.tokens.numel()} tokens, no padding,")
    print("         kept apart by a Document mask. Its attention:\n")
    print(flashmsa.explain(q, k, v, first.mask), flush=True)


def print_agreement(ways: Ways, plan: Plan, encoder: Encoder, ids: TokenIds) -> bool:
    """Packed against alone and against SDPA over all texts, and a sample against float64. False where it is off."""
    packed = ways.packed.embeddings.double()
    print(f"\n{'packed embeddings against':<34}{'largest difference':>20}{'smallest cosine':>18}")
    for name, way in (("each text encoded alone", ways.alone), ("the padded ones of torch's SDPA", ways.padded)):
        other = way.embeddings.double()
        largest, cosine = (packed - other).abs().max().item(), F.cosine_similarity(packed, other).min().item()
        print(f"  {name:<32}{largest:>20.1e}{cosine:>18.7f}")

    rows = range(0, len(ids), -(-len(ids) // SAMPLE))
    exact = float64_embeddings(encoder, [ids[i] for i in rows])
    errors = [(way.name, error(way.embeddings[list(rows)], exact)) for way in (ways.padded, ways.packed, ways.alone)]
    limit = error_limit(errors[0][1], exact, plan.dtype)
    print(f"\n{f'error of {len(rows)} texts against float64':<34}{'root mean square':>20}{'largest':>18}")
    for name, (rms, largest) in (*errors, ("limit: twice SDPA's and one ulp", limit)):
        print(f"  {name:<32}{rms:>20.1e}{largest:>18.1e}")
    agreed = all(bool((found <= limit).all()) for _, found in errors)
    print("Packing changes nothing beyond rounding." if agreed else "OVER THE LIMIT: the embeddings do not agree.")
    return agreed


def print_search(queries: Sequence[str], embed: Callable[[str], Tensor], entries: list[Entry], found: Tensor) -> None:
    """The best hits of each query: cosine similarity, name, first line. `found` (texts, hidden) are unit vectors."""
    for query in queries:
        print(f"\n? {query}")
        best = (found @ embed(query)).topk(min(HITS, len(entries)))
        for score, i in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            print(f"  {score:.2f}  {entries[i].name:<34} {entries[i].title[:72]}")


def print_speed(ways: Ways, plan: Plan, ids: TokenIds) -> None:
    """Seconds and tokens per second of each way. Padding is work, but it is not counted as tokens."""
    tokens = sum(map(len, ids))
    passes = "one pass" if plan.rounds == 1 else f"median of {plan.rounds} passes"
    print(f"\n{f'{tokens} tokens, {passes}':<34}{'padding':>10}{'seconds':>12}{'tokens/s':>12}{'relative':>10}")
    for way in ways:
        padding, relative = 1 - tokens / way.computed, ways.packed.seconds / way.seconds
        name = f"{way.name} ({plan.batch})" if way in (ways.sorted, ways.padded) else way.name
        print(f"  {name:<32}{padding:>10.0%}{way.seconds:>12.3f}{tokens / way.seconds:>12.0f}{relative:>10.2f}")
