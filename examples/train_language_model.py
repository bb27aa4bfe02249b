"""Train a byte-level language model on the running Python's own documentation, with flashmsa and with torch's SDPA.

    python examples/train_language_model.py                 # on the GPU where there is one, else on the CPU in a minute
    python examples/train_language_model.py --steps 20 --plot curves.png

The docstrings of the standard library are packed one after another, without padding, into rows of one length. Under
Document(causal=True) each byte sees the bytes before it in its own docstring, and no other's: flashmsa skips what the
mask forbids. The same model, from the same weights over the same batches, is trained on SDPA, which takes the mask as a
dense matrix. Both losses are printed and plotted, and have to coincide.

How close? The two differ by rounding alone, which training amplifies. By how much is measured: a third run is on SDPA
as well, but its first weights are off by one rounding. At every step the distance of flashmsa's curve from SDPA's may
be at most FACTOR times the farthest that the third curve has been so far, and ROUNDINGS of the loss.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# A checkout built in place; an installed package comes first.
sys.path.append(str(Path(__file__).resolve().parent.parent))

import flashmsa
from flashmsa.demo import corpus

# What a CPU trains in a minute, and a GPU.
SMALL = {"steps": 60, "rows": 2, "length": 512, "layers": 2, "width": 128}
LARGE = {"steps": 300, "rows": 8, "length": 4096, "layers": 4, "width": 256}
START = 256  # the token before each document; the others are its bytes
# One run disturbed at its start is one draw of how far rounding carries; ours, disturbed in every step, is another. Two
# draws of the same spread are more than 4 times apart in few of a hundred cases, and the farthest so far is kept.
FACTOR = 4.0
# Of the logits, of their log-sum, of the mean over the bytes, and of that into the loss.
ROUNDINGS = 4.0


class Batch(NamedTuple):
    """Rows of packed documents."""

    tokens: Tensor  # int64 (B, S)
    targets: Tensor  # int64 (B, S): the token after each in its document; -100 where a document ends
    position: Tensor  # int64 (B, S): of each token in its document
    mask: flashmsa.Document


class SdpaAttention(flashmsa.nn.SelfAttention):
    """The same layer and parameters on torch's scaled_dot_product_attention, with the mask as a dense matrix."""

    def forward(self, x: Tensor, mask: Tensor, *, position: Tensor) -> Tensor:
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        q, k, v = self.qkv(x).unflatten(-1, (sum(heads), self.head_dim)).transpose(1, 2).split(heads, dim=1)
        rope = flashmsa.Rope(self.rope_cos, self.rope_sin, self.interleaved)
        q, k = flashmsa.apply_rope(q, rope, position), flashmsa.apply_rope(k, rope, position)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, attention: nn.Module, width: int) -> None:
        super().__init__()
        self.attention = attention
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: flashmsa.Mask | Tensor, position: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x), mask, position=position)
        return x + self.mlp(self.norms[1](x))


class LanguageModel(nn.Module):
    """Logits (B, S, 257) of the next byte."""

    def __init__(self, attention: type[flashmsa.nn.SelfAttention], layers: int, width: int, length: int) -> None:
        super().__init__()
        rope = flashmsa.rope_tables(length, width // 4)
        self.embedding = nn.Embedding(START + 1, width)
        self.blocks = nn.ModuleList(Block(attention(width, 4, 2, rope=rope), width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, START + 1)

    def forward(self, tokens: Tensor, mask: flashmsa.Mask | Tensor, position: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, mask, position)
        return self.head(self.norm(x))


def pack(rows: int, length: int, device: torch.device, generator: torch.Generator) -> Callable[[], Batch]:
    """A function that draws batches: documents in random order, the last one of each row cut at its end."""
    texts = [entry.text.encode() for entry in corpus.gather()]

    def draw() -> Batch:
        tokens, targets, position, cuts = [], [], [], []
        for _ in range(rows):
            row: list[int] = []
            cuts.append([0])
            while len(row) < length:
                text = texts[int(torch.randint(len(texts), (), generator=generator))]
                piece = [START, *text][: length - len(row)]
                targets += [*piece[1:], -100]
                position += range(len(piece))
                row += piece
                cuts[-1].append(len(row))
            tokens += row
        # Rows of fewer documents have empty ones at their end.
        most = max(map(len, cuts))
        offsets = torch.tensor([cut + [length] * (most - len(cut)) for cut in cuts], dtype=torch.int32)
        mask = flashmsa.Document(offsets.to(device), causal=True)
        return Batch(*(torch.tensor(x).view(rows, length).to(device) for x in (tokens, targets, position)), mask)

    return draw


def train(
    model: LanguageModel, batches: list[Batch], dense: bool, rate: float, dtype: torch.dtype
) -> tuple[list[float], float]:
    """The loss of every step, in nats a byte, and the seconds that all took."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    device = batches[0].tokens.device
    losses = []
    begin = time.perf_counter()
    for batch in batches:
        mask = batch.mask.to_dense(*batch.tokens.shape[1:] * 2) if dense else batch.mask
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            logits = model(batch.tokens, mask, batch.position)
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch.targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    losses = torch.stack(losses).tolist()
    return losses, time.perf_counter() - begin


def disturbed(model: LanguageModel, eps: float, generator: torch.Generator) -> LanguageModel:
    """A copy whose weights are each off by up to one rounding, up or down."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            noise = torch.rand(weight.shape, generator=generator) * 2.0 - 1.0
            weight.mul_(1.0 + eps * noise.to(weight.device))
    return other


def bounds(sdpa: list[float], third: list[float], eps: float) -> list[float]:
    """How far a curve may be from SDPA's at each step."""
    found, farthest = [], 0.0
    for loss, other in zip(sdpa, third, strict=True):
        farthest = max(farthest, abs(other - loss))
        found.append(FACTOR * farthest + ROUNDINGS * eps * loss)
    return found


def draw_text(curves: dict[str, list[float]], height: int = 12, width: int = 64) -> str:
    """The curves in characters: f is flashmsa's, s is SDPA's, and * both."""
    every = [loss for curve in curves.values() for loss in curve]
    low, high = min(every), max(every)
    cells = [[" "] * width for _ in range(height)]
    for name, curve in curves.items():
        for column in range(width):
            loss = curve[column * (len(curve) - 1) // max(1, width - 1)]
            row = round((high - loss) / max(high - low, 1e-9) * (height - 1))
            cells[row][column] = name[0] if cells[row][column] in (" ", name[0]) else "*"
    lines = [f"{high - (high - low) * n / (height - 1):6.2f} |{''.join(row)}" for n, row in enumerate(cells)]
    return "\n".join([*lines, " " * 7 + "+" + "-" * width, f"{'':8}step 1 to {len(next(iter(curves.values())))}"])


def plot(curves: dict[str, list[float]], path: Path) -> bool:
    """Writes a picture; False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for (name, curve), style in zip(curves.items(), ("-", "--"), strict=True):
        axes.plot(range(1, len(curve) + 1), curve, style, label=name)
    axes.set(xlabel="step", ylabel="loss, nats a byte", title="A byte-level language model of Python's docstrings")
    axes.legend()
    figure.savefig(path, dpi=150)
    return True


def main(argv: list[str] | None = None) -> int:
    """Trains, prints and plots. Returns 0, or 1 where the curves part."""
    options = parse(argv)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    for name, size in (SMALL if device.type == "cpu" else LARGE).items():
        if getattr(options, name) is None:
            setattr(options, name, size)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    draw = pack(options.rows, options.length, device, generator)
    batches = [draw() for _ in range(options.steps)]
    shape = (options.layers, options.width, options.length)
    ours = LanguageModel(flashmsa.nn.SelfAttention, *shape).to(device)
    theirs = LanguageModel(SdpaAttention, *shape).to(device)
    theirs.load_state_dict(ours.state_dict())
    third = disturbed(theirs, torch.finfo(dtype).eps, generator)
    seen = 1.0 - batches[0].mask.sparsity(options.length, options.length)
    print(
        f"{sum(p.numel() for p in ours.parameters()):,} parameters on {device} in {dtype}; {options.steps} steps of "
        f"{options.rows} x {options.length} bytes; {seen:.1%} of all pairs are visible"
    )
    curves = {}
    for name, model, dense in (("flashmsa", ours, False), ("sdpa", theirs, True), ("disturbed", third, True)):
        curves[name], seconds = train(model, batches, dense, options.rate, dtype)
        print(f"{name:9}  loss {curves[name][0]:.4f} to {curves[name][-1]:.4f}, {seconds:.1f} s")
    allowed = bounds(curves["sdpa"], curves.pop("disturbed"), torch.finfo(dtype).eps)
    apart = [abs(a - b) for a, b in zip(curves["flashmsa"], curves["sdpa"], strict=True)]
    if options.plot is None or not plot(curves, options.plot):
        print(draw_text(curves))
    parted = [n for n, (distance, most) in enumerate(zip(apart, allowed, strict=True)) if not distance <= most]
    if parted:
        n = parted[0]
        print(f"step {n + 1}: {apart[n]:.3g} apart, more than the {allowed[n]:.3g} of rounding", file=sys.stderr)
        return 1
    print(f"the curves coincide: at most {max(apart):.3g} apart; rounding alone may make {max(allowed):.3g}")
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"rows": "rows of a batch", "length": "bytes of a row", "width": "features; a multiple of 32: four heads"}
    for name in SMALL:
        defaults = f"default: {SMALL[name]}, on a GPU {LARGE[name]}"
        parser.add_argument(f"--{name}", type=int, help=f"{sizes[name]}; {defaults}" if name in sizes else defaults)
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument("--plot", type=Path, help="write the curves to this picture; needs matplotlib")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
