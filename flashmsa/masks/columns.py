"""FlashMask's column form of a mask, as interval masks: for each key the rows [begin, end) that see it."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Mask, check_tensor

_SHAPE = "(B, H or 1, S, 1 or 2 with causal, 2 or 4 without)"


def from_columns(indices: Tensor, causal: bool) -> Mask:
    """See ``Document.from_startend_row_indices``."""
    check_tensor("startend_row_indices", indices, torch.int32, (4,), _SHAPE)
    if indices.shape[3] not in ((1, 2) if causal else (2, 4)) or 0 in indices.shape[:2]:
        raise ValueError(f"startend_row_indices: shape {tuple(indices.shape)} with causal={causal}; must be {_SHAPE}")
    # NOTE: all of it on the CPU, whatever torch's default device is.
    with torch.device("cpu"):
        return _mask_of(indices.detach().cpu().long(), causal).to(indices.device)


def _mask_of(values: Tensor, causal: bool) -> Mask:
    if not torch.equal(values, values[:, :1].expand_as(values)):
        raise _no_interval("its heads differ")
    length = values.shape[2]
    begin, end = _visible_rows(values[:, 0].clamp(0, length), causal)
    # Keys that no row sees stand at the end only: padding.
    seen = (begin < end).sum(1)
    if ((begin < end) != (torch.arange(length) < seen[:, None])).any():
        raise _no_interval("keys that no row sees stand before others")
    for find in (_documents_and_window, _first_keys, _prefix):
        mask = find(begin, end, seen, length)
        if mask is not None:
            return mask
    raise _no_interval("no document, window or prefix mask has these columns")


def _visible_rows(values: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """[begin, end) of the rows that see each key, (B, S), of values (B, S, n)."""
    length = values.shape[1]
    zero, most = torch.zeros_like(values[..., 0]), torch.full_like(values[..., 0], length)
    if causal:
        above = (zero, torch.arange(length).expand_as(zero))
        hidden = [(values[..., 0], values[..., 1] if values.shape[2] == 2 else most), above]
    elif values.shape[2] == 2:
        hidden = [(values[..., 0], most), (zero, values[..., 1])]
    else:
        hidden = [(values[..., 0], values[..., 1]), (values[..., 2], values[..., 3])]
    begin, end = zero.clone(), most.clone()
    # Hidden rows at either end are taken off; twice, as one run may begin where the other one ends.
    for first, last in hidden * 2:
        some = first < last
        begin = torch.where(some & (first <= begin), torch.maximum(begin, last), begin)
        end = torch.where(some & (last >= end), torch.minimum(end, first), end)
    end = torch.maximum(begin, end)
    for first, last in hidden:
        if (torch.maximum(first, begin) < torch.minimum(last, end)).any():
            raise _no_interval("a key is seen by rows before and after those that do not see it")
    return begin, end


def _documents_and_window(begin: Tensor, end: Tensor, seen: Tensor, length: int) -> Mask | None:
    """Documents, a window, or both at once; positions count from the top, as many rows as keys."""
    from .bands import Causal, Dense, SlidingWindow
    from .document import Document

    place = torch.arange(length)
    inside = place < seen[:, None]
    # The farthest row below and above its key: the window, or as long as the longest document.
    left = int(torch.where(inside, end - 1 - place, 0).amax()) if length else 0
    right = int(torch.where(inside, place - begin, 0).amax()) if length else 0
    if left < 0 or right < 0:
        return None
    # Where the rows end before the window does, or begin after it, a document does.
    ends = torch.where(inside & (end < place + left + 1), end, 0)
    begins = torch.where(inside & (begin > place - right), begin, 0)
    cuts = []
    for b, row in enumerate(torch.cat([ends, begins, seen[:, None]], 1)):
        cuts.append([0, *(x for x in row.unique().tolist() if 0 < x <= int(seen[b]))])
    most = max(map(len, cuts))
    offsets = torch.tensor([row + row[-1:] * (most - len(row)) for row in cuts], dtype=torch.int64)
    document = torch.searchsorted(offsets[:, 1:].contiguous(), place.expand(len(cuts), -1).contiguous(), right=True)
    low = torch.take_along_dim(offsets, document.clamp(max=most - 1), 1)
    high = torch.take_along_dim(offsets, (document + 1).clamp(max=most - 1), 1)
    as_window = torch.maximum(low, place - right), torch.minimum(high, place + left + 1)
    if any(
        (torch.where(inside, x, 0) != torch.where(inside, y, 0)).any()
        for x, y in ((as_window[0], begin), (as_window[1], end))
    ):
        return None
    if (offsets == offsets[:1]).all():
        offsets = offsets[0]
    free_left, free_right = bool(((end == high) | ~inside).all()), bool(((begin == low) | ~inside).all())
    causal = right == 0 and free_left and not free_right
    if offsets.tolist() in ([0], [0, length]) and bool((seen == length).all()):
        masks = [Causal()] if causal else []
    else:
        masks = [Document(offsets.to(torch.int32), causal=causal)]
    if not (free_left and free_right) and not causal:
        masks.append(
            SlidingWindow(*(float("inf") if free else x for free, x in ((free_left, left), (free_right, right))))
        )
    mask: Mask = Dense()
    for part in masks:
        mask = mask & part
    return mask


def _first_keys(begin: Tensor, end: Tensor, seen: Tensor, length: int) -> Mask | None:
    """A causal window with always-visible first keys."""
    from .bands import SlidingWindow

    place = torch.arange(length)
    to_the_end = end == length
    keep = int((~to_the_end).int().argmax(1)[0])
    left = int((end - 1 - place)[:, keep:].amax())
    expected = torch.where(place < keep, length, (place + left + 1).clamp(max=length))
    same = (begin == place).all() and (end == expected).all() and left >= 0
    return SlidingWindow(left, 0, keep_first=keep) if same else None


def _prefix(begin: Tensor, end: Tensor, seen: Tensor, length: int) -> Mask | None:
    """Keys that every row sees, then a causal part; a prefix for each batch."""
    from .bands import PrefixLM

    place = torch.arange(length)
    prefix = ((begin == 0) & (place > 0)).sum(1)
    prefix = torch.where(prefix > 0, prefix + 1, 0)
    if (end != length).any() or (begin != torch.where(place < prefix[:, None], 0, place)).any():
        return None
    return PrefixLM(int(prefix[0]) if bool((prefix == prefix[0]).all()) else prefix.to(torch.int32))


def _no_interval(why: str) -> NotImplementedError:
    return NotImplementedError(
        f"startend_row_indices: {why}; only what Document, Causal, SlidingWindow and PrefixLM say is supported. Its "
        "dense form runs as BlockSparse.from_dense(mask)"
    )
