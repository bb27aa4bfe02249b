"""all-MiniLM-L6-v2 in plain torch: a BERT encoder that leaves attention and pooling to the batch it is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import weights
from .batches import Batch


class Layer(nn.Module):
    """One transformer layer, normalised after each residual: x = LN(x + attention(x)); x = LN(x + mlp(x))."""

    def __init__(self, hidden: int, heads: int, intermediate: int, eps: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.attention_out = nn.Linear(hidden, hidden)
        self.attention_norm = nn.LayerNorm(hidden, eps)
        self.mlp_in = nn.Linear(hidden, intermediate)
        self.mlp_out = nn.Linear(intermediate, hidden)
        self.mlp_norm = nn.LayerNorm(hidden, eps)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        # q, k and v (B, heads, S, head_dim) are strided views of one projection: flashmsa reads them in place.
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        attended = batch.attend(q, k, v).transpose(1, 2).flatten(2)
        # The residual is added in place: on the CPU, fresh memory for thousands of tokens costs as much as the sum.
        x = self.attention_norm(self.attention_out(attended).add_(x))
        return self.mlp_norm(self.mlp_out(F.gelu(self.mlp_in(x))).add_(x))


class Encoder(nn.Module):
    """A batch of token ids to one unit vector per text. The parameters are frozen: this is inference only."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["layer_norm_eps"]
        self.heads = config["num_attention_heads"]
        self.head_dim = hidden // self.heads
        self.words = nn.Embedding(config["vocab_size"], hidden)
        self.positions = nn.Embedding(config["max_position_embeddings"], hidden)
        self.segments = nn.Embedding(config["type_vocab_size"], hidden)
        self.norm = nn.LayerNorm(hidden, eps)
        self.layers = nn.ModuleList(
            Layer(hidden, self.heads, config["intermediate_size"], eps) for _ in range(config["num_hidden_layers"])
        )
        self.requires_grad_(False)

    @classmethod
    def load(cls, folder: Path) -> Encoder:
        """The published weights in `folder` (see weights.model_directory), fp32 on the CPU."""
        encoder = cls(weights.load_config(folder))
        encoder.load_state_dict(_renamed(weights.load_tensors(folder), len(encoder.layers)))
        return encoder.eval()

    def forward(self, batch: Batch) -> Tensor:
        """Embeddings (texts, hidden) of L2 norm 1, in fp32, or in fp64 where the parameters are fp64.

        Pooling and normalising are not done in 16 bits: they would add rounding after the last layer.
        """
        x = self.words(batch.tokens) + self.positions(batch.positions) + self.segments.weight[0]
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x, batch)
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.normalize(batch.pool(x.to(wide)), dim=-1)


def _renamed(published: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """The checkpoint's tensors under Encoder's names, with q, k and v joined. Its unused pooler is left out."""
    names = {
        "embeddings.word_embeddings.weight": "words.weight",
        "embeddings.position_embeddings.weight": "positions.weight",
        "embeddings.token_type_embeddings.weight": "segments.weight",
    }
    modules = {"embeddings.LayerNorm": "norm"}
    for i in range(layers):
        modules |= {
            f"encoder.layer.{i}.attention.output.dense": f"layers.{i}.attention_out",
            f"encoder.layer.{i}.attention.output.LayerNorm": f"layers.{i}.attention_norm",
            f"encoder.layer.{i}.intermediate.dense": f"layers.{i}.mlp_in",
            f"encoder.layer.{i}.output.dense": f"layers.{i}.mlp_out",
            f"encoder.layer.{i}.output.LayerNorm": f"layers.{i}.mlp_norm",
        }
    names |= {f"{theirs}.{kind}": f"{ours}.{kind}" for theirs, ours in modules.items() for kind in ("weight", "bias")}
    renamed = {ours: published[theirs] for theirs, ours in names.items()}
    for i in range(layers):
        for kind in ("weight", "bias"):
            parts = [published[f"encoder.layer.{i}.attention.self.{part}.{kind}"] for part in ("query", "key", "value")]
            renamed[f"layers.{i}.qkv.{kind}"] = torch.cat(parts)
    return renamed
