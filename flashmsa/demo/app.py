"""Embed Python's own docstrings with all-MiniLM-L6-v2: packed without padding by flashmsa, and padded by torch's SDPA.

Checks that the embeddings agree, answers search queries over them, and compares tokens per second.
"""

from __future__ import annotations

import argparse
import sys

import torch

from ..dispatch import machine_reason
from . import corpus, weights
from .batches import Alone
from .encoder import Encoder
from .report import print_agreement, print_search, print_setting, print_speed
from .ways import Plan, measure, prepare

QUERIES = (
    "sort a list",
    "pick a random element",
    "create a temporary folder that removes itself",
    "run another program and capture its output",
    "find the largest numbers of a sequence",
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(argv: list[str] | None = None) -> int:
    """Run the demo. Returns 0, or 1 where a package or a device is missing or the embeddings do not agree."""
    options = _parse(argv)
    try:
        plan = _plan(options)
        folder = weights.model_directory()
    except RuntimeError as error:
        print(f"flashmsa demo: {error}", file=sys.stderr)
        return 1
    encoder = Encoder.load(folder).to(plan.device, plan.dtype)
    tokenize = weights.Tokenizer(folder)
    entries = corpus.gather(plan.texts)
    ids = tokenize([entry.text for entry in entries])

    print_setting(plan, encoder, ids)
    ways = prepare(plan, encoder, ids)
    measure(ways, plan)
    agreed = print_agreement(ways, plan, encoder, ids)
    print_search(
        options.query or QUERIES,
        lambda query: encoder(Alone(tokenize([query])[0], plan.device))[0],
        entries,
        ways.packed.embeddings,
    )
    print_speed(ways, plan, ids)
    return 0 if agreed else 1


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m flashmsa demo", description=__doc__)
    parser.add_argument("--texts", type=_positive, metavar="N", help="docstrings to encode (CPU: 300, GPU: all)")
    parser.add_argument("--device", help="a torch device (default: a Hopper GPU where kernels are built, else cpu)")
    parser.add_argument("--dtype", choices=DTYPES, help="CPU: float32, GPU: bfloat16")
    parser.add_argument("--pack", type=_positive, metavar="N", help="texts per packed sequence (default: all in one)")
    parser.add_argument("--batch", type=_positive, metavar="N", help="texts per padded batch (CPU: 32, GPU: 256)")
    parser.add_argument("--rounds", type=_positive, metavar="N", help="timed passes (CPU: 1, GPU: 5)")
    parser.add_argument("--query", action="append", metavar="TEXT", help="search for TEXT; may be given repeatedly")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _plan(options: argparse.Namespace) -> Plan:
    """The options with the machine's defaults filled in. Raises RuntimeError where the device is not there."""
    device = torch.device(options.device or ("cuda" if machine_reason(None) is None else "cpu"))
    if device.type not in ("cpu", "cuda"):
        raise RuntimeError(f"--device {device}: the demo runs on cpu and cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise RuntimeError(f"--device {device}: torch sees {torch.cuda.device_count()} CUDA devices; try --device cpu")
    gpu = device.type == "cuda"
    return Plan(
        device=device,
        dtype=DTYPES[options.dtype or ("bfloat16" if gpu else "float32")],
        texts=options.texts or (None if gpu else 300),
        pack=options.pack,
        batch=options.batch or (256 if gpu else 32),
        rounds=options.rounds or (5 if gpu else 1),
    )
