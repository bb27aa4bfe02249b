"""Rotary position embedding: tables of angles, and the rotation of queries and keys by them.

Feature pair i of a token at position t turns by t / base^(2 i / rotary_dim) (Su et al., RoFormer, 2021). Pairs are
(i, i + rotary_dim / 2), as in GPT-NeoX and Llama, or interleaved, (2 i, 2 i + 1), as in GPT-J.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rope(NamedTuple):
    """Angles of the positions 0, 1, 2, ...: what ``rope_tables`` makes, and ``apply_rope`` and ``append_kv`` take."""

    cos: Tensor  # (positions, rotary_dim / 2), float32
    sin: Tensor
    interleaved: bool = False

    @property
    def rotary_dim(self) -> int:
        """Features that turn; those after them stay."""
        return 2 * self.cos.shape[-1]

    def to(self, device: torch.device | str) -> Rope:
        """The same tables on ``device``."""
        return Rope(self.cos.to(device), self.sin.to(device), self.interleaved)


def rope_tables(
    positions: int,
    rotary_dim: int,
    *,
    base: float = 10000.0,
    interleaved: bool = False,
    device: torch.device | str | None = None,
) -> Rope:
    """Tables for positions 0 ... positions - 1, computed in float64 and rounded to float32 once.

    positions     the longest sequence that will be rotated
    rotary_dim    features that turn, even; the head dim, or less: the rest of each head stays as it is
    base          the slowest pair turns by nearly 1/base a position
    interleaved   whether pairs are neighbours

    Raises ValueError for a size or base that is not positive, or an odd rotary_dim.
    """
    for name, value in (("positions", positions), ("rotary_dim", rotary_dim), ("base", base)):
        if value <= 0:
            raise ValueError(f"{name}: {value}; must be positive")
    if rotary_dim % 2:
        raise ValueError(f"rotary_dim: {rotary_dim}; features turn in pairs, must be even, as {rotary_dim + 1}")
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / rotary_dim
    angle = torch.arange(positions, dtype=torch.float64, device=device)[:, None] * base**-exponent
    return Rope(angle.cos().float(), angle.sin().float(), interleaved)


def apply_rope(x: Tensor, rope: Rope, position: int | Tensor = 0, *, length_dim: int = -2) -> Tensor:
    """x with each token's first ``rope.rotary_dim`` features turned by its position; differentiable.

    x           (B, H, S, D), or with the length elsewhere, as (B, S, H, D) with ``length_dim=1``
    position    an int: the first token's position, the others following; or an integer tensor (S,) or (B, S)
    returns     x's shape and dtype; computed in float32, for float64 in float64

    Raises ValueError for positions beyond the tables (those in a tensor are not looked at), or fewer features than
    rotary_dim.
    """
    length_dim = length_dim % x.dim()
    length, turned = x.shape[length_dim], rope.rotary_dim
    if turned > x.shape[-1]:
        raise ValueError(f"rope: rotary_dim {turned} is more than the {x.shape[-1]} features of x")
    tables = [_at(table, position, length) for table in (rope.cos, rope.sin)]
    # (S, pairs) or (B, S, pairs) against x: one axis for each of x's.
    shape = [1] * x.dim()
    shape[length_dim], shape[-1] = length, turned // 2
    if tables[0].dim() == 3:
        shape[0] = tables[0].shape[0]
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (table.to(dtype).view(shape) for table in tables)
    first, second = _pairs(x[..., :turned].to(dtype), rope.interleaved)
    a, b = first * cos - second * sin, second * cos + first * sin
    result = torch.stack([a, b], -1).flatten(-2) if rope.interleaved else torch.cat([a, b], -1)
    return torch.cat([result.to(x.dtype), x[..., turned:]], -1) if turned < x.shape[-1] else result.to(x.dtype)


def _at(table: Tensor, position: int | Tensor, length: int) -> Tensor:
    """The rows of a table for each token."""
    if isinstance(position, Tensor):
        if position.dim() not in (1, 2) or position.shape[-1] != length:
            raise ValueError(f"position: shape {tuple(position.shape)}; must be ({length},) or (batch, {length})")
        return table[position]
    if position < 0 or position + length > table.shape[0]:
        raise ValueError(
            f"rope: tables of {table.shape[0]} positions, but tokens stand at {position} ... {position + length - 1}"
        )
    return table[position : position + length]


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    return (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
