"""Dropout of attention weights: which of them are kept, for any backend and tile shape.

Each weight has a draw of 16 random bits. A call of Philox4x32 with 7 rounds (Salmon et al., Parallel random numbers: as
easy as 1, 2, 3, 2011) makes those of 64 weights; its counter says where they stand. Query i, key j, head h of Hq,
batch b:

    counter = (low 32 bits of the offset,  (j / 64) * 4 + j % 8 / 2,  b * Hq + h,  (i / 32) * 8 + i % 8)
    key     = (low 32 bits of the seed,  high 32 bits of the seed ^ high 32 bits of the offset)
    word    = w[n] M[i % 32 / 8] + w[n + 1] (+ w[n + 2] where n >= 4)  modulo 2^32;  w: the call's four words,
              numbered modulo 4;  n = j % 64 / 8;  M = 0x9E37F2D1, 0x7F4A805B, 0xC2B2A6DD, 0x85EB8C27
    draw    = half j % 2 of the word (0: the low one)

So one call serves what a thread of a tensor core's fragment holds, of the scores or of their transpose. Each draw is
uniform and any two are independent, as far as the generator's words are: exactly, but for the lowest bit or two of the
draws of one key for two queries that share a call.

A weight is kept where its draw's ``rank`` is at least ``threshold(p)``: the draw's place in the order of the bfloat16
numbers, as a GPU compares them two at a time. The native backends have the same in csrc/core/philox.h.
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
_ROWS, _KEYS = 32, 64
_MIX = (0x9E37F2D1, 0x7F4A805B, 0xC2B2A6DD, 0x85EB8C27)
_INFINITY = 0x7F80  # bits of bfloat16's


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
    """Draws whose rank is below this are dropped: round(65536 p), at most 65535, and 32642 in place of 32641.

    The latter because the draws at these places are the two zeros, which compare equal.
    """
    nearest = min(int(p * DRAWS + 0.5), DRAWS - 1)
    return nearest + 1 if nearest == _INFINITY + 1 else nearest


def rank(draws: Tensor) -> Tensor:
    """The places of 16-bit draws among all: by value as bfloat16, -0 before 0, and at last what is no number."""
    magnitude, sign = draws & 0x7FFF, draws >> 15
    number = torch.where(sign != 0, _INFINITY - magnitude, _INFINITY + 1 + magnitude)
    return torch.where(magnitude > _INFINITY, 2 * magnitude + sign, number)


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
    first, last = rows.start // _ROWS, -(-rows.stop // _ROWS)
    columns = -(-len_kv // _KEYS)
    seed, offset = state[0], state[1]
    counter = (
        offset & _WORD,
        torch.arange(columns * 4, device=device),
        torch.arange(batch * heads, device=device).view(batch, heads, 1, 1),
        torch.arange(first * 8, last * 8, device=device)[:, None],
    )
    key = (seed & _WORD, ((seed >> 32) ^ (offset >> 32)) & _WORD)
    least = threshold(p)
    kept = [
        torch.stack([rank(word & 0xFFFF) >= least, rank(word >> 16) >= least], -1)
        for word in mixed(philox(counter, key))
    ]
    # (i % 32 / 8, j % 64 / 8, B, H, i / 32 and i % 8, j / 64 and j % 8 / 2, j % 2) to rows and keys in order.
    kept = torch.stack(kept).unflatten(0, (4, 8)).unflatten(4, (last - first, 8)).unflatten(6, (columns, 4))
    kept = kept.permute(2, 3, 4, 0, 5, 6, 1, 7, 8)
    kept = kept.reshape(batch, heads, (last - first) * _ROWS, columns * _KEYS)
    top = rows.start - first * _ROWS
    return kept[:, :, top : top + rows.stop - rows.start, :len_kv]


def mixed(words: tuple[Any, ...]) -> list[Any]:
    """The words of draws that a call's four words make: of four queries, eight pairs of keys each."""
    sums = [words[(n + 1) % 4] + (words[(n + 2) % 4] if n >= 4 else 0) for n in range(8)]
    return [(_product(words[n % 4], factor)[1] + sums[n]) & _WORD for factor in _MIX for n in range(8)]


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
