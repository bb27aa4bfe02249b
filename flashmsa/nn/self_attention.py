"""A self-attention layer: packed projection, grouped heads, rotary embedding, any mask."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..checks import MAX_HEAD_DIM, check_dropout, check_mask
from ..masks import Mask
from ..ops import attention
from ..rope import Rope, apply_rope


class SelfAttention(nn.Module):
    """y = attention(x W_q, x W_k, x W_v) W_out, the three projections in one, for x (B, S, embed_dim).

    embed_dim      features of x and y
    num_heads      query heads
    num_kv_heads   key and value heads, a divisor of num_heads; None: num_heads
    head_dim       of each head, a multiple of 8 from 8 to 256; None: embed_dim / num_heads
    mask           of every call that names none: a flashmsa mask, or None for every key. It moves with the module
    rope           ``rope_tables(...)``: queries and keys turn by their positions; None: they do not
    bias           whether the two projections add one
    dropout_p      of the attention weights while training; drawn from torch's generator
    softcap        > 0: logits become softcap * tanh(logit / softcap)
    sinks          whether each query head learns a sink, one more term in its denominators
    scale          of the logits; None: 1/sqrt(head_dim)
    backend        as in ``flashmsa.attention``

    Parameters, whose names stay: ``qkv.weight`` ((num_heads + 2 num_kv_heads) head_dim, embed_dim), rows of all query
    heads first, then of keys, then of values, as in ``torch.nn.MultiheadAttention``'s in_proj_weight; ``out.weight``
    (embed_dim, num_heads head_dim); ``qkv.bias`` and ``out.bias``; ``sinks`` (num_heads,). The rotary tables are no
    part of the state and stay float32, whatever the module is cast to.

    Raises ValueError and TypeError for sizes that do not fit.
    """

    rope_cos: Tensor | None
    rope_sin: Tensor | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        mask: Mask | None = None,
        rope: Rope | None = None,
        bias: bool = True,
        dropout_p: float = 0.0,
        softcap: float = 0.0,
        sinks: bool = False,
        scale: float | None = None,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.head_dim = _checked_head_dim(embed_dim, num_heads, num_kv_heads, head_dim)
        check_mask(mask)
        check_dropout(dropout_p)
        if rope is not None and rope.rotary_dim > self.head_dim:
            raise ValueError(f"rope: rotary_dim {rope.rotary_dim} is more than the head_dim {self.head_dim}")
        self.mask, self.dropout_p, self.softcap, self.scale, self.backend = mask, dropout_p, softcap, scale, backend
        self.interleaved = rope is not None and rope.interleaved
        for name in ("cos", "sin"):
            table = None if rope is None else getattr(rope, name).to(device)
            self.register_buffer(f"rope_{name}", table, persistent=False)
        self.qkv = nn.Linear(embed_dim, self._width(num_heads + 2 * num_kv_heads), bias, device, dtype)
        self.out = nn.Linear(self._width(num_heads), embed_dim, bias, device, dtype)
        self.sinks = nn.Parameter(torch.zeros(num_heads, device=device)) if sinks else None
        self._move_mask()

    def forward(self, x: Tensor, mask: Mask | None = None, *, position: int | Tensor = 0) -> Tensor:
        """(B, S, embed_dim) for x of that shape.

        mask        instead of the module's
        position    where rope is: the first token's position, or an integer tensor (S,) or (B, S), for packed
                    documents their own positions

        Raises ValueError for an x of another shape, and what ``flashmsa.attention`` and ``apply_rope`` raise.
        """
        if x.dim() != 3 or x.shape[2] != self.embed_dim:
            raise ValueError(f"x: shape {tuple(x.shape)}; must be (batch, length, {self.embed_dim})")
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        # Views (B, S, H, D) of one projection, read in place.
        q, k, v = self.qkv(x).unflatten(-1, (sum(heads), self.head_dim)).split(heads, dim=2)
        if self.rope_cos is not None:
            rope = Rope(self.rope_cos, self.rope_sin, self.interleaved)
            q, k = (apply_rope(part, rope, position, length_dim=1) for part in (q, k))
        attended = attention(
            *(part.transpose(1, 2) for part in (q, k, v)),
            self.mask if mask is None else mask,
            scale=self.scale,
            softcap=self.softcap,
            sinks=None if self.sinks is None else self.sinks.float(),
            dropout_p=self.dropout_p if self.training else 0.0,
            backend=self.backend,
        )
        return self.out(attended.transpose(1, 2).flatten(2))

    def extra_repr(self) -> str:
        parts = [f"{self.embed_dim}, {self.num_heads}, {self.num_kv_heads}, head_dim={self.head_dim}"]
        if self.mask is not None:
            parts.append(f"mask={self.mask!r}")
        if self.rope_cos is not None:
            style = ", interleaved" if self.interleaved else ""
            parts.append(f"rope={self.rope_cos.shape[0]} positions of {2 * self.rope_cos.shape[1]} features{style}")
        parts += [f"{name}={getattr(self, name)}" for name in ("dropout_p", "softcap") if getattr(self, name)]
        return ", ".join(parts)

    def _width(self, heads: int) -> int:
        return heads * self.head_dim

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SelfAttention:
        tables = self.rope_cos, self.rope_sin
        super()._apply(fn, recurse)
        if self.rope_cos is not None:
            # NOTE: angles in half precision are wrong by whole turns at far positions: a cast moves the tables only.
            device = self.rope_cos.device
            self.rope_cos, self.rope_sin = (table.to(device) for table in tables)
        self._move_mask()
        return self

    def _move_mask(self) -> None:
        if self.mask is not None and self.mask.device is not None:
            self.mask = self.mask.to(self.qkv.weight.device)


def _checked_head_dim(embed_dim: int, num_heads: int, num_kv_heads: int, head_dim: int | None) -> int:
    for name, value in (("embed_dim", embed_dim), ("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
        if value < 1:
            raise ValueError(f"{name}: {value}; must be at least 1")
    if num_heads % num_kv_heads:
        divisors = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
        nearest = min(divisors, key=lambda n: abs(n - num_kv_heads))
        raise ValueError(
            f"num_kv_heads: {num_kv_heads} does not divide num_heads {num_heads}; the nearest is {nearest}"
        )
    if head_dim is None:
        if embed_dim % num_heads:
            raise ValueError(f"num_heads: {num_heads} does not divide embed_dim {embed_dim}; give head_dim")
        head_dim = embed_dim // num_heads
    if head_dim % 8 or not 8 <= head_dim <= MAX_HEAD_DIM:
        nearest = min(max(-(-head_dim // 8) * 8, 8), MAX_HEAD_DIM)
        raise ValueError(
            f"head_dim: {head_dim}; must be a multiple of 8 from 8 to {MAX_HEAD_DIM}, the nearest is {nearest}"
        )
    return head_dim
