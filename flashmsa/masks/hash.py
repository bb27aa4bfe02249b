"""HashBucket: queries see the keys of their own bucket, wherever these stand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _prepare
from .base import HASH, Mask, check_tensor, describe, same_tensors, set_fields

_SHAPE = "(B or 1, H or 1, S)"


@dataclass(frozen=True, eq=False, repr=False)
class HashBucket(Mask):
    """Query i sees key j where their buckets are equal, and with ``causal`` j <= i + len_kv - len_q.

    q_bucket   int32 (B or 1, Hq or 1, Sq): any numbers, negative ones too
    kv_bucket  int32 (B or 1, Hq, Hkv or 1, Sk); None: the same buckets for the keys, Sq = Sk. With Hkv heads, query
               head h has the keys' buckets of head h // (Hq / Hkv).
    causal     by the original positions, aligned at the end

    A snapshot: buckets are sorted when the mask is made, on their device and without waiting for it, and later changes
    of the tensors do not show. ``update`` reads new ones. It goes (``&``) with no other mask but Dense.

    Raises TypeError for a dtype other than int32, ValueError for shapes that do not fit together.

    Buckets of queries and keys: Kitaev et al., Reformer (2020); Pagliardini et al., Faster Causal Attention Over Large
    Sequences Through Sparse Flash Attention (2023).
    """

    q_bucket: Tensor
    kv_bucket: Tensor | None = None
    causal: bool = False

    def __post_init__(self) -> None:
        q_bucket, kv_bucket = self.q_bucket, self.kv_bucket
        _check_bucket("q_bucket", q_bucket)
        if kv_bucket is not None:
            _check_bucket("kv_bucket", kv_bucket)
            if kv_bucket.device != q_bucket.device:
                raise ValueError(f"kv_bucket: on {kv_bucket.device}, q_bucket on {q_bucket.device}; both on one device")
            _check_pair(q_bucket, kv_bucket)
        # NOTE: contiguous copies of its own, shared heads and batches (stride 0) written out.
        q_bucket = q_bucket.detach().clone(memory_format=torch.contiguous_format)
        kv_bucket = None if kv_bucket is None else kv_bucket.detach().clone(memory_format=torch.contiguous_format)
        set_fields(self, q_bucket=q_bucket, kv_bucket=kv_bucket, causal=bool(self.causal))
        set_fields(self, _lowered=(HASH, (int(self.causal),), self._sorted()))

    def _sorted(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(q_order, kv_order, row_begin, row_end) of the buckets it holds."""
        q_bucket, kv_bucket = self._buckets()
        q_order = _prepare.bucket_sort(q_bucket)
        kv_order = q_order if self.kv_bucket is None else _prepare.bucket_sort(kv_bucket)
        lengths = q_bucket.shape[2], kv_bucket.shape[2]
        begin, end = _prepare.bucket_rows(q_bucket, q_order, kv_bucket, kv_order, self.causal, *lengths)
        return q_order, kv_order, begin, end

    def _buckets(self) -> tuple[Tensor, Tensor]:
        return self.q_bucket, self.q_bucket if self.kv_bucket is None else self.kv_bucket

    def update(self, q_bucket: Tensor, kv_bucket: Tensor | None = None) -> None:
        """Takes new buckets of the same shapes, dtype and device, in place.

        Waits for nothing, so a CUDA graph can capture it. Raises TypeError or ValueError for others, and where
        kv_bucket is given for a mask that was made without, or the other way round.
        """
        if (kv_bucket is None) != (self.kv_bucket is None):
            raise ValueError(
                "kv_bucket: this mask was made "
                + ("with q_bucket alone; update it so" if self.kv_bucket is None else "with one; update it with one")
            )
        for name, old, new in (("q_bucket", self.q_bucket, q_bucket), ("kv_bucket", self.kv_bucket, kv_bucket)):
            if old is not None:
                _check_bucket(name, new)
                if new.shape != old.shape or new.device != old.device:
                    raise ValueError(
                        f"{name}: shape {tuple(new.shape)} on {new.device}; must be {tuple(old.shape)} on "
                        f"{old.device}, as when the mask was made"
                    )
        for old, new in ((self.q_bucket, q_bucket), (self.kv_bucket, kv_bucket)):
            if old is not None:
                old.copy_(new.detach())
        # NOTE: into the tensors that a captured call reads. Without buckets for keys, both orders are one tensor.
        for old, new in zip(self._lowered[2], self._sorted(), strict=True):
            old.copy_(new)

    def to_dense(self, len_q: int, len_kv: int, device: torch.device | str | None = None) -> Tensor:
        """(B or 1, H or 1, len_q, len_kv), for the lengths of the buckets only (ValueError for others)."""
        self._check_lengths(len_q, len_kv)
        q_bucket, kv_bucket = self._buckets()
        heads = _prepare.common_size(q_bucket.shape[1], kv_bucket.shape[1])
        q_bucket, kv_bucket = (_prepare.per_head(x, heads) for x in (q_bucket, kv_bucket))
        dense = q_bucket[..., :, None] == kv_bucket[..., None, :]
        if self.causal:
            i, j = (torch.arange(n, device=q_bucket.device) for n in (len_q, len_kv))
            dense &= j <= (i + len_kv - len_q)[:, None]
        return dense if device is None else dense.to(device)

    def to(self, device: torch.device | str) -> HashBucket:
        moved = [None if x is None else x.to(device) for x in (self.q_bucket, self.kv_bucket)]
        if moved[0] is self.q_bucket:
            return self
        mask = object.__new__(HashBucket)
        lowered = (*self._lowered[:2], tuple(x.to(device) for x in self._lowered[2]))
        set_fields(mask, q_bucket=moved[0], kv_bucket=moved[1], causal=self.causal, _lowered=lowered)
        return mask

    def _check_shapes(self, batch: int, heads_q: int, heads_kv: int, len_q: int, len_kv: int) -> None:
        self._check_lengths(len_q, len_kv)
        q_bucket, kv_bucket = self._buckets()
        for name, x, heads in (("q_bucket", q_bucket, {heads_q}), ("kv_bucket", kv_bucket, {heads_q, heads_kv})):
            if x.shape[0] not in (1, batch):
                raise ValueError(f"mask: {name} for a batch of {x.shape[0]} does not match q's batch {batch}; or 1")
            if x.shape[1] not in heads | {1}:
                allowed = " or ".join(map(str, sorted(heads | {1})))
                raise ValueError(f"mask: {name} for {x.shape[1]} heads; must be {allowed}")

    def _check_lengths(self, len_q: int, len_kv: int) -> None:
        for name, x, length, whose in zip(
            ("q_bucket", "kv_bucket"), self._buckets(), (len_q, len_kv), ("q", "k"), strict=True
        ):
            if x.shape[2] != length:
                hint = "; without kv_bucket q and k are of one length" if self.kv_bucket is None else ""
                raise ValueError(f"mask: {name} for a length of {x.shape[2]} does not match {whose}'s {length}{hint}")

    def _natural_size(self) -> tuple[int, int]:
        return tuple(x.shape[2] for x in self._buckets())

    def __eq__(self, other: object) -> bool:
        """Equal buckets, causal and device. Reads the buckets, so it waits for their device."""
        if not isinstance(other, HashBucket):
            return NotImplemented
        return self.causal == other.causal and same_tensors(self._buckets(), other._buckets())

    __hash__ = None  # type: ignore[assignment]  # it holds tensors

    def __repr__(self) -> str:
        fields = [describe(self.q_bucket)]
        if self.kv_bucket is not None:
            fields.append(f"kv_bucket={describe(self.kv_bucket)}")
        if self.causal:
            fields.append("causal=True")
        return f"HashBucket({', '.join(fields)})"


def _check_bucket(name: str, bucket: Tensor) -> None:
    check_tensor(name, bucket, torch.int32, (3,), _SHAPE)


def _check_pair(q_bucket: Tensor, kv_bucket: Tensor) -> None:
    if q_bucket.shape[0] != kv_bucket.shape[0] and 1 not in (q_bucket.shape[0], kv_bucket.shape[0]):
        raise ValueError(f"kv_bucket: a batch of {kv_bucket.shape[0]} does not match q_bucket's {q_bucket.shape[0]}")
    heads_q, heads_kv = q_bucket.shape[1], kv_bucket.shape[1]
    # NOTE: no head at all goes with none, and with one for all.
    if heads_q != 1 and (heads_q % heads_kv if heads_kv else heads_q):
        raise ValueError(f"kv_bucket: {heads_kv} heads do not divide q_bucket's {heads_q}")
