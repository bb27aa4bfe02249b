"""Paged caches by torch operators: the ``torch`` backend of ``flashmsa.paged``, on any device, with the kernels' rules.

Nothing is read on the host. Arguments have been checked.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .masks.base import ALIGNMENTS, CAUSAL, COMPOSITE, Band, Lowered
from .masks.intersection import PREFIX_BR, PREFIX_TL
from .masks.visible import _runs
from .torch_backend import (
    _compute_dtype,
    _empty_out,
    _group,
    _known_finite,
    _per_head,
    _weighted_sum,
    block_rows,
    without_autocast,
)


def gather(k_pages: Tensor, v_pages: Tensor, block_table: Tensor, kv_lens: Tensor) -> tuple[Tensor, Tensor]:
    """k (B, Hkv, max_pages * page_size, D) and v; rows past a length are 0."""
    page_size = k_pages.shape[1]
    inside = torch.arange(block_table.shape[1] * page_size, device=kv_lens.device) < kv_lens[:, None]
    return tuple(
        torch.where(inside[:, :, None, None], _tokens(pages, block_table), 0).transpose(1, 2)
        for pages in (k_pages, v_pages)
    )


def _tokens(pages: Tensor, block_table: Tensor) -> Tensor:
    """(B, max_pages * page_size, Hkv, D), whatever the table holds."""
    batch, places = block_table.shape
    if pages.shape[0] == 0:
        return pages.new_zeros(batch, places * pages.shape[1], *pages.shape[2:])
    return pages[block_table.clamp(0, pages.shape[0] - 1).long()].flatten(1, 2)


def append(
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    kv_lens: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    cu_seqlens: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
) -> None:
    pages, page_size = k_pages.shape[:2]
    if 0 in (k_pages.numel(), block_table.numel(), k_new.numel()):
        return
    if cu_seqlens is None:
        count = k_new.shape[2]
        k_new, v_new = (x.transpose(1, 2).flatten(0, 1) for x in (k_new, v_new))
        number = torch.arange(k_new.shape[0], device=k_new.device)
        batch, index = number // count, number % count
        kept = torch.ones_like(number, dtype=torch.bool)
    else:
        batch, index, kept = _sequence_of(cu_seqlens, k_new.shape[0])
    position = kv_lens.long().clamp(min=0)[batch] + index
    logical = position // page_size
    kept = kept & (logical < block_table.shape[1])
    page = block_table[batch, logical.clamp(max=block_table.shape[1] - 1)].long()
    kept = kept & (page >= 0) & (page < pages)
    if cos is not None:
        k_new = rotate(k_new, cos, sin, position, interleaved)
    # NOTE: tokens without a place write what the first one with a place does, there; where there is none, what was
    # there before. So nothing has to be left out, which would take a look at the device.
    leader = kept.byte().argmax()
    source = torch.where(kept, torch.arange(kept.shape[0], device=kept.device), leader)
    any_kept = kept.any()
    page = torch.where(any_kept, page[source], 0)
    slot = torch.where(any_kept, (position % page_size)[source], 0)
    # NOTE: all is read before any is written, because the new tokens may lie in the caches.
    both = ((k_pages, k_new), (v_pages, v_new))
    rows = [torch.where(any_kept, new[source], cache[0, 0]) for cache, new in both]
    for (cache, _), row in zip(both, rows, strict=True):
        cache[page, slot] = row


def rotate(k: Tensor, cos: Tensor, sin: Tensor, position: Tensor, interleaved: bool) -> Tensor:
    """k (T, Hkv, D) turned by each token's angles, rounded once."""
    dtype = _compute_dtype(k)
    row = position.clamp(0, cos.shape[0] - 1)
    cos, sin = (x[row].to(dtype)[:, None] for x in (cos, sin))
    half = cos.shape[-1]
    turned, rest = k[..., : 2 * half].to(dtype), k[..., 2 * half :]
    pairs = turned.unflatten(-1, (half, 2)) if interleaved else turned.unflatten(-1, (2, half)).transpose(-1, -2)
    x, y = pairs.unbind(-1)
    pairs = torch.stack([x * cos - y * sin, y * cos + x * sin], -1)
    turned = pairs.flatten(-2) if interleaved else pairs.transpose(-1, -2).flatten(-2)
    return torch.cat([turned.to(k.dtype), rest], -1)


def _sequence_of(offsets: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each of ``count`` packed tokens its sequence, its place in it, and whether it lies in one at all."""
    offsets = offsets.long()
    number = torch.arange(count, device=offsets.device)
    batch = torch.searchsorted(offsets[1:].contiguous(), number, right=True)
    inside = batch < offsets.shape[0] - 1
    batch = batch.clamp(max=max(0, offsets.shape[0] - 2))
    return batch, number - offsets[batch], inside & (number >= offsets[batch])


class _Rows(NamedTuple):
    """Which keys the rows (B, len_q) of a padded batch see."""

    position: Tensor  # (B, len_q): p
    runs: list[Tensor]  # [begin, end), and with first keys a second pair
    lengths: Tensor  # (B,) of keys
    tree: Tensor | None  # (B, len_q) words
    pages: Tensor | None  # bool (B, query blocks, max_pages)
    query_block: int
    page_size: int

    def allowed(self, rows: slice, len_kv: int) -> Tensor:
        """bool (B, rows, len_kv)."""
        key = torch.arange(len_kv, device=self.lengths.device)
        begin, end, *first = (x[:, rows, None] for x in self.runs)
        seen = (key >= begin) & (key < end)
        if first:
            seen |= (key >= first[0]) & (key < first[1])
        if self.tree is not None:
            bit = key - (self.lengths[:, None] - self.position.shape[1])
            set_bits = (self.tree[:, rows, None].long() >> bit[:, None].clamp(0, 31)) & 1
            seen = torch.where((bit >= 0)[:, None], set_bits.bool(), seen)
        if self.pages is not None:
            block = torch.arange(rows.start, rows.stop, device=key.device) // self.query_block
            seen = seen & self.pages[:, block][..., key // self.page_size]
        return seen & (key < self.lengths[:, None])[:, None]


def attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor | None,
    kv_lens: Tensor | None,
    *,
    lowered: Lowered,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int,
    query_pages: Tensor | None,
    query_block: int,
    tree_mask: Tensor | None,
    scale: float | None,
    softcap: float,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) as ``flashmsa.paged_attention`` returns them."""
    with without_autocast(q.device.type):
        if block_table is None:
            k, v, page_size = k_pages, v_pages, max(1, k_pages.shape[2])
        else:
            k, v = (_tokens(x, block_table).transpose(1, 2) for x in (k_pages, v_pages))
            page_size = k_pages.shape[1]
        packed = cu_seqlens_q is not None
        if packed:
            empty = q.new_zeros(*q.shape[:2], v.shape[3]), q.new_full(q.shape[1::-1], -math.inf, dtype=torch.float32)
            if q.shape[0] == 0 or k.shape[0] == 0:
                return empty
            length = q.shape[0] if max_seqlen_q < 0 else max_seqlen_q
            original, (q, counts) = q, _pad(q, cu_seqlens_q, length)
        else:
            counts = torch.full((q.shape[0],), q.shape[2], device=q.device)
        lengths = torch.full((k.shape[0],), k.shape[2], device=q.device)
        if kv_lens is not None:
            lengths = kv_lens.long().clamp(0, k.shape[2])
        if block_table is not None and k_pages.shape[0] == 0:
            lengths = torch.zeros_like(lengths)
        rows = _find_rows(q, lengths, counts, lowered, tree_mask, query_pages, query_block, page_size, block_table)
        scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else float(scale)
        out, lse = _attend(q, k, v, rows, scale, float(softcap), sinks, alibi_slopes)
        if packed:
            return _unpad(out, lse, cu_seqlens_q, original)
        result = _empty_out(q, v.shape[3])
        return result.copy_(out), lse.float()


def _pad(q: Tensor, offsets: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """q (B, Hq, length, D), rows past a sequence's end any, and the queries of each sequence (B,)."""
    offsets = offsets.long().clamp(0, q.shape[0])
    begin, end = offsets[:-1], torch.maximum(offsets[1:], offsets[:-1])
    index = (begin[:, None] + torch.arange(length, device=q.device)).clamp(max=q.shape[0] - 1)
    return q[index].transpose(1, 2), end - begin


def _unpad(out: Tensor, lse: Tensor, offsets: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    batch, index, inside = _sequence_of(offsets, q.shape[0])
    inside = inside & (index < out.shape[2])
    index = index.clamp(0, max(0, out.shape[2] - 1))
    out = torch.where(inside[:, None, None], out[batch, :, index], 0.0)
    lse = torch.where(inside[:, None], lse[batch, :, index], -math.inf)
    return out.to(q.dtype), lse.float().T.contiguous()


def _find_rows(
    q: Tensor,
    lengths: Tensor,
    counts: Tensor,
    lowered: Lowered,
    tree: Tensor | None,
    query_pages: Tensor | None,
    query_block: int,
    page_size: int,
    block_table: Tensor | None,
) -> _Rows:
    kind, ints, tensors = lowered
    band, prefixes = Band(), list(Band()[4:6])
    if kind == CAUSAL:
        band = Band.aligned(ALIGNMENTS[ints[0]], right=0)
    elif kind == COMPOSITE:
        band, rest = Band(*ints[:9]), iter(tensors)
        pairs = zip((PREFIX_BR, PREFIX_TL), band[4:6], strict=True)
        prefixes = [next(rest).long()[:, None] if ints[18] & flag else number for flag, number in pairs]
    row = torch.arange(q.shape[2], device=q.device)[None].expand(lengths.shape[0], -1)
    position = row + (lengths - counts)[:, None]
    low = torch.zeros_like(position)
    runs = _runs(band, position, row, prefixes, low, low, low + lengths[:, None])
    pages = None if query_pages is None else _selected(query_pages, lengths, page_size, block_table.shape[1])
    return _Rows(position, runs, lengths, tree, pages, query_block, page_size)


def _selected(query_pages: Tensor, lengths: Tensor, page_size: int, max_pages: int) -> Tensor:
    """bool (B, query blocks, max_pages): is the page listed?"""
    used = (lengths + page_size - 1) // page_size
    good = (query_pages >= 0) & (query_pages < used[:, None, None])
    # NOTE: one more place, for entries that name no page in use.
    found = torch.zeros(*query_pages.shape[:2], max_pages + 1, dtype=torch.bool, device=query_pages.device)
    return found.scatter_(2, torch.where(good, query_pages, max_pages).long(), True)[..., :max_pages]


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: _Rows,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    slopes: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """out (B, Hq, len_q, Dv) and lse (B, Hq, len_q), in the dtype of the computation; the steps of torch_backend."""
    dtype = _compute_dtype(q)
    k, v = k.to(dtype), v.to(dtype)
    # NOTE: a broadcast product would make a copy like this by itself, but transposed, and sum single rows less exactly.
    keys = k[:, :, None].expand(-1, -1, q.shape[1] // max(1, k.shape[1]), -1, -1).contiguous()
    # NOTE: a trace cannot look.
    finite = not torch.compiler.is_compiling() and _known_finite(v)
    out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=dtype)
    lse = q.new_full(q.shape[:3], -math.inf, dtype=dtype)
    sink = None if sinks is None else _per_head(sinks, k.shape[1]).to(dtype)
    step = block_rows(q.shape[0], q.shape[1], k.shape[2])
    for first in range(0, q.shape[2], step):
        part = slice(first, min(first + step, q.shape[2]))
        allowed = rows.allowed(part, k.shape[2])[:, None, None]
        s = (_group(q[:, :, part].to(dtype), k) @ keys.mT) * scale
        s = softcap * torch.tanh(s / softcap) if softcap > 0.0 else s
        if slopes is not None:
            key = torch.arange(k.shape[2], device=q.device)
            distance = (rows.position[:, part, None] - key).abs()[:, None, None]
            s = s - _per_head(slopes, k.shape[1]).to(dtype) * distance.to(dtype)
        s = torch.where(allowed, s, -math.inf)
        # NOTE: amax has no value over no key; a row of -inf alone has no maximum to subtract.
        m = s.amax(-1, keepdim=True) if k.shape[2] else s.new_full((*s.shape[:-1], 1), -math.inf)
        empty = m == -math.inf
        m = m if sink is None else torch.maximum(m, sink)
        m = torch.where(m == -math.inf, 0.0, m)
        p = torch.where(allowed, torch.exp(s - m), 0.0)
        total = p.sum(-1, keepdim=True)
        total = total if sink is None else total + torch.exp(sink - m)
        o = p @ v[:, :, None] if finite else _weighted_sum(p, allowed, v[:, :, None])
        out[:, :, part] = torch.where(empty, 0.0, o / total).flatten(1, 2)
        of_empty = -math.inf if sink is None else sink
        lse[:, :, part] = torch.where(empty, of_empty, m + torch.log(total)).squeeze(-1).flatten(1, 2)
    return out, lse
