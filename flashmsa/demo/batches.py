"""Three ways to hand a list of texts to the encoder. A batch knows its tokens, how they attend, and how they pool.

| batch  | tokens   | attention                                     | padding                      |
|--------|----------|-----------------------------------------------|------------------------------|
| Packed | (1, T)   | flashmsa under a Document mask                | none                         |
| Alone  | (1, S)   | flashmsa without a mask, one text             | none                         |
| Padded | (n, Smax)| torch's scaled_dot_product_attention, masked  | every text up to the longest |

Each is built once, on the host, and moved to the device; encoding it then launches device work only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import flashmsa

TokenIds = Sequence[Sequence[int]]  # one list of token ids per text, none of them empty
Device = torch.device | str


class Packed:
    """All texts end to end in one sequence of T tokens; text d is [offsets[d], offsets[d + 1])."""

    def __init__(self, texts: TokenIds, device: Device) -> None:
        lengths = torch.tensor([len(ids) for ids in texts])
        offsets = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        self.mask = flashmsa.Document(offsets).to(device)  # made on the CPU, where its values are checked
        self.lengths = lengths.to(device)
        self.tokens = torch.tensor([[token for ids in texts for token in ids]]).to(device)
        self.positions = torch.cat([torch.arange(len(ids)) for ids in texts])[None].to(device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashmsa.attention(q, k, v, mask=self.mask)

    def pool(self, states: Tensor) -> Tensor:
        """The mean over each text's tokens: states (1, T, hidden) to (n, hidden)."""
        return torch.segment_reduce(states[0], "mean", lengths=self.lengths, axis=0, unsafe=True)


class Alone:
    """One text of S tokens by itself."""

    def __init__(self, ids: Sequence[int], device: Device) -> None:
        self.tokens = torch.tensor([list(ids)]).to(device)
        self.positions = torch.arange(len(ids), device=device)[None]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashmsa.attention(q, k, v)

    def pool(self, states: Tensor) -> Tensor:
        return states.mean(1)


class Padded:
    """One text a row, filled up to the longest of the batch; `real` (n, Smax) marks the tokens that are no padding."""

    def __init__(self, texts: TokenIds, device: Device) -> None:
        longest = max(len(ids) for ids in texts)
        lengths = torch.tensor([len(ids) for ids in texts])
        self.tokens = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in texts]).to(device)
        self.positions = torch.arange(longest, device=device).expand(len(texts), longest)
        self.real = (torch.arange(longest) < lengths[:, None]).to(device)
        self.lengths = lengths.to(device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.real[:, None, None, :])

    def pool(self, states: Tensor) -> Tensor:
        return (states * self.real[..., None]).sum(1) / self.lengths[:, None]


Batch = Packed | Alone | Padded


def padded_batches(texts: TokenIds, device: Device, size: int, *, by_length: bool) -> tuple[list[Padded], Tensor]:
    """The texts in padded batches of `size`, and the index that puts their concatenated embeddings in order again.

    by_length sorts the texts first, so that neighbours need little padding: the usual remedy where nothing packs.
    """
    order = sorted(range(len(texts)), key=lambda i: len(texts[i])) if by_length else list(range(len(texts)))
    batches = [Padded([texts[i] for i in order[at : at + size]], device) for at in range(0, len(texts), size)]
    return batches, torch.tensor(order).argsort().to(device)
