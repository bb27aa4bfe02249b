"""Dropout of attention weights: which of them are kept, for any backend and tile shape.

Each weight has 16 random bits of its own, drawn by Philox4x32 with 7 rounds (Salmon et al., Parallel random numbers: as
easy as 1, 2, 3, 2011) from a counter that says where the weight stands. Query i, key j, head h of Hq, batch b:

    counter = ((i / 16) * 8 + i % 8,  (j / 16) * 4 + j % 8 / 2,  b * Hq + h,  low 32 bits of the offset)
    key     = (low 32 bits of the seed,  high 32 bits of the seed ^ high 32 bits of the offset)
    draw    = half j % 2 (0: the low one) of word (i % 16 / 8) * 2 + j % 16 / 8

So one call serves the rows i and i + 8 in the keys of two pairs: what one thread of a tensor core's fragment holds. A
weight is kept where its draw is at least ``threshold(p)``. The native backends have the same in csrc/core/philox.h.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checks import check_dropout

DRAWS = 2**16
ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 2**32 - 1
# Rows and keys that share their Philox calls.
_GROUP = 16


def dropout_mask(
    batch: int,
    heads: int,
    len_q: int,
    len_kv: int,
    p: float,
    seed: int | Tensor,
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    """Which weights ``attention(..., dropout_p=p, seed=seed)`` keeps: bool (batch, heads, len_q, len_kv).

    batch, heads, len_q, len_kv   of q (B, Hq, Sq, D) and k (B, Hkv, Sk, D). For ``attention_varlen`` batch is 1 and the
                                  lengths are those of the packed tensors: rows and keys are numbered as they lie there
    p                             the probability that a weight is dropped, in [0, 1); rounded to 1/65536
    seed                          an int, or an int64 tensor (seed, offset)
    device                        of the result; None: the seed's where that is a tensor, else the CPU

    Kept weights count ``keep_scale(p)`` times. Raises TypeError and ValueError for a p or seed that attention would not
    take, ValueError for a negative size.
    """
    check_dropout(p, "p")
    for name, size in (("batch", batch), ("heads", heads), ("len_q", len_q), ("len_kv", len_kv)):
        if size < 0:
            raise ValueError(f"{name}: {size}; must be at least 0")
    if device is None:
        device = seed.device if isinstance(seed, Tensor) else "cpu"
    if seed is None:
        raise TypeError("seed: None; must be an int or an int64 tensor (seed, offset), as attention was given")
    state = rng_state(seed, torch.empty(0, device=device).device)
    return kept_rows(state, p, batch, heads, slice(0, len_q), len_kv)


def threshold(p: float) -> int:
    """Draws below this are dropped: round(65536 p), at most 65535."""
    return min(int(p * DRAWS + 0.5), DRAWS - 1)


def keep_scale(p: float) -> float:
    """How many times a kept weight counts: 1 over the share of draws that keep one, which is 1 - p to 1/131072."""
    return DRAWS / (DRAWS - threshold(p))


def rng_state(seed: int | Tensor | None, device: torch.device) -> Tensor:
    """(seed, offset) as an int64 tensor (2,) on ``device``. None is drawn from torch's generator of that device.

    Never waits for the device, so that a captured graph may hold it; with None each replay draws anew.
    """
    if seed is None:
        # Both numbers: streams of calls that share a seed by chance still differ.
        return torch.randint(2**63 - 1, (2,), device=device, dtype=torch.int64)
    if isinstance(seed, Tensor):
        return _checked_state(seed, device)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(
            f"seed: {type(seed).__name__}; must be an int, an int64 tensor (seed, offset), or None: torch's generator"
        )
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed: {seed}; must fit 64 bits")
    state = torch.zeros(2, device=device, dtype=torch.int64)
    # NOTE: a fill is a launch; a tensor of host numbers would be a copy that waits.
    state[:1].fill_(seed if seed < 2**63 else seed - 2**64)
    return state


def _checked_state(seed: Tensor, device: torch.device) -> Tensor:
    if seed.dtype != torch.int64:
        raise TypeError(f"seed: dtype {seed.dtype}; a tensor must be torch.int64, of (seed, offset)")
    if seed.shape != (2,):
        raise ValueError(f"seed: shape {tuple(seed.shape)}; a tensor must be (2,), of (seed, offset)")
    if seed.device != device:
        raise ValueError(f"seed: on {seed.device}, q on {device}; use seed.to({str(device)!r})")
    return seed


def kept_rows(state: Tensor, p: float, batch: int, heads: int, rows: slice, len_kv: int) -> Tensor:
    """The query rows ``rows`` of the mask, bool (batch, heads, rows, len_kv), on the state's device."""
    device = state.device
    first, last = rows.start // _GROUP, -(-rows.stop // _GROUP)
    columns = -(-len_kv // _GROUP)
    seed, offset = state[0], state[1]
    counter = (
        torch.arange(first * 8, last * 8, device=device)[:, None],
        torch.arange(columns * 4, device=device),
        torch.arange(batch * heads, device=device).view(batch, heads, 1, 1),
        offset & _WORD,
    )
    key = (seed & _WORD, ((seed >> 32) ^ (offset >> 32)) & _WORD)
    words = philox(counter, key)
    # Halves j % 2, then words by j % 16 / 8 and i % 16 / 8.
    least = threshold(p)
    kept = [torch.stack([(word & 0xFFFF) >= least, (word >> 16) >= least], -1) for word in words]
    kept = torch.stack([torch.stack(kept[:2], -4), torch.stack(kept[2:], -4)], -5)
    # (B, H, i half, j half, i group and i % 8, j group and pair, j % 2) to rows and keys in their order.
    kept = kept.unflatten(-3, (last - first, 8)).unflatten(-2, (columns, 4))
    kept = kept.permute(0, 1, 4, 2, 5, 6, 3, 7, 8).reshape(batch, heads, (last - first) * _GROUP, columns * _GROUP)
    top = rows.start - first * _GROUP
    return kept[:, :, top : top + rows.stop - rows.start, :len_kv]


def philox(counter: tuple[Any, ...], key: tuple[Any, ...], rounds: int = ROUNDS) -> tuple[Any, ...]:
    """The 4 words of Philox4x32 for 4 words of counter and 2 of key: int64 tensors, or ints, from 0 to 2^32 - 1."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def _product(a: Any, multiplier: int) -> tuple[Any, Any]:
    """The high and the low 32 bits of a product of 32-bit numbers, in halves of a: int64 does not hold all 64."""
    low, high = (a & 0xFFFF) * multiplier, (a >> 16) * multiplier
    return (high + (low >> 16)) >> 16, (((high & 0xFFFF) << 16) + low) & _WORD
