"""Cases over a cache: few queries, or a chunk of them, against the keys and values of a batch of sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch

ELEMENT_BYTES = 2  # of bf16


@dataclass(frozen=True)
class CacheCase:
    """Queries (batch, heads, len_q, head_dim) at the ends of sequences of `length` keys in heads_kv heads.

    lengths: of each sequence, where they differ; length is then the longest.
    tag: a suffix of the name.
    """

    batch: int
    heads: int
    heads_kv: int
    length: int
    head_dim: int = 128
    len_q: int = 1
    lengths: tuple[int, ...] | None = None
    tag: str = ""
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        if self.heads % self.heads_kv != 0:
            raise ValueError(f"heads_kv: {self.heads_kv} does not divide heads, {self.heads}")
        if self.lengths is not None and (len(self.lengths) != self.batch or max(self.lengths) != self.length):
            raise ValueError(f"lengths: must be {self.batch} numbers, the largest {self.length}")
        if min(self.sequence_lengths) < self.len_q:
            raise ValueError(f"len_q: {self.len_q} is more than the {min(self.sequence_lengths)} keys of a sequence")

    @property
    def sequence_lengths(self) -> tuple[int, ...]:
        return self.lengths or (self.length,) * self.batch

    @property
    def value_dim(self) -> int:
        return self.head_dim

    @property
    def rows(self) -> int:
        """Length of the result."""
        return self.len_q

    @property
    def name(self) -> str:
        parts = [f"d{self.head_dim}", f"{self.batch}x{self.length}", f"{self.heads}of{self.heads_kv}"]
        parts += [f"q{self.len_q}"] if self.len_q > 1 else []
        parts += [self.tag] if self.tag else []
        return "-".join(parts)

    @property
    def pairs(self) -> int:
        """Allowed (query, key) pairs of one head, of all sequences: causal, the last query sees every key."""
        hidden = self.len_q * (self.len_q - 1) // 2
        return sum(self.len_q * length - hidden for length in self.sequence_lengths)

    @property
    def flops(self) -> int:
        return 4 * self.heads * self.head_dim * self.pairs

    @property
    def bytes(self) -> int:
        """K and V, once."""
        return 2 * sum(self.sequence_lengths) * self.heads_kv * self.head_dim * ELEMENT_BYTES

    def as_dict(self) -> dict:
        return {
            "name": self.name,
            "batch": self.batch,
            "heads": self.heads,
            "heads_kv": self.heads_kv,
            "length": self.length,
            "len_q": self.len_q,
            "head_dim": self.head_dim,
            "mask": "causal",
            "dtype": self.dtype,
            "uneven": self.lengths is not None,
            "pairs": self.pairs,
            "flops": self.flops,
            "bytes": self.bytes,
        }


def log_uniform_lengths(count: int, least: int, greatest: int, seed: int) -> tuple[int, ...]:
    """That many lengths, their logarithms uniform, the longest made `greatest`; drawn from the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(count, generator=generator, dtype=torch.float64)
    lengths = (least * (greatest / least) ** draws).round().long().clamp(least, greatest)
    lengths[lengths.argmax()] = greatest
    return tuple(lengths.tolist())
