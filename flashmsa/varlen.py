"""``attention_varlen``: sequences of different lengths packed one after another, in flash-attn's form."""

from __future__ import annotations

from operator import le
from typing import Any

import torch
from torch import Tensor

from . import ops
from .checks import check_mask, check_tensor
from .masks import Causal, Dense, Document, Mask, PerSequence
from .masks.base import ALIGNMENTS, DOCUMENT, on_cpu
from .masks.intersection import check_sequences, lower_in_sequences


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    mask: Mask | None = None,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    seqused_k: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
    config: Any = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``attention`` inside each of n sequences that are packed one after another, without padding.

    q              (T, Hq, D); sequence d has the rows [cu_seqlens_q[d], cu_seqlens_q[d + 1])
    k, v           (Tk, Hkv, D), (Tk, Hkv, Dv), cut by cu_seqlens_k
    cu_seqlens_q   int32 (n + 1,) on q's device: starts at 0 and never decreases; sequences may be empty
    cu_seqlens_k   the same for keys; None: cu_seqlens_q
    mask           applies inside each sequence, positions counted there: Dense, Causal, SlidingWindow, PrefixLM (its
                   prefix an int, or a tensor (n,) with one for each sequence), an ``&`` of these, or None
    max_seqlen_q   not needed. Where they are ints and the offsets lie on the CPU, shorter ones than the longest
    max_seqlen_k   sequence raise
    seqused_k      int32 (n,): of the keys of sequence d only the first seqused_k[d] are there
    alibi_slopes   (Hq,) float32; distances are counted inside each sequence
    dropout_p      rows and keys are numbered as they are packed: dropout_mask(1, Hq, T, Tk, dropout_p, seed)
    out            write the result here: (T, Hq, Dv)

    The other arguments, and what has gradients, are those of ``attention``: rows and keys past the last sequence get
    gradients of 0. Returns out (T, Hq, Dv), and with ``return_lse`` lse (Hq, T)
    float32. Rows past the last sequence are 0, their lse -inf (with sinks: the sink). Offsets, lengths and prefixes on
    a device are read by every launch and never on the host, so that a captured graph replays with others.

    Raises what ``attention`` does; NotImplementedError for a mask that is none of the above.
    """
    _check_packed(q, k, v)
    kv_offsets = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    _check_offsets(q, cu_seqlens_q, kv_offsets, seqused_k)
    check_mask(mask)
    if alibi_slopes is not None and isinstance(alibi_slopes, Tensor) and alibi_slopes.dim() == 2:
        raise NotImplementedError(
            f"alibi_slopes: shape {tuple(alibi_slopes.shape)}; slopes for each sequence are not supported, must be "
            f"({q.shape[1]},)"
        )
    _check_longest("max_seqlen_q", max_seqlen_q, cu_seqlens_q)
    _check_longest("max_seqlen_k", max_seqlen_k, kv_offsets)
    if on_cpu(cu_seqlens_q) or (ops._checked and ops.can_read(q)):
        _check_values(cu_seqlens_q, kv_offsets, seqused_k, q.shape[0], k.shape[0])
    packed = [x.unsqueeze(0).transpose(1, 2) for x in (q, k, v)]
    whole = None if out is None else _whole_out(q, v, out)
    # NOTE: ALiBi's positions are those inside each sequence, which a document mask does not count.
    causal = _causality(mask)
    plain = seqused_k is None and alibi_slopes is None and causal is not None
    if backend is None and out is None and config is None and ops.runs_at_once(q):
        offsets = (cu_seqlens_q, kv_offsets)
        lowered = (DOCUMENT, (int(causal),), offsets) if plain else lower_in_sequences(mask, *offsets, seqused_k)
        state = ops.dropout_state(dropout_p, seed, q)
        options = (scale, softcap, sinks, alibi_slopes, dropout_p, state, deterministic, return_lse)
        result, lse = ops._native(*packed, *lowered, *options)
    else:
        if plain:
            inside = Document(cu_seqlens_q, cu_seqlens_k, causal=causal)
        else:
            inside = PerSequence(Dense() if mask is None else mask, cu_seqlens_q, kv_offsets, seqused_k)
        options = (scale, softcap, sinks, alibi_slopes, dropout_p, seed, True, deterministic, backend, config, whole)
        result, lse = ops._attention(*packed, inside, *options)
    result = result.transpose(1, 2).squeeze(0) if out is None else out
    return (result, lse.squeeze(0)) if return_lse else result


def _causality(mask: Mask | None) -> bool | None:
    """Whether sequences are causal where that is all a mask says; None where it says more."""
    if mask is None or type(mask) is Dense:
        return False
    return True if type(mask) is Causal and mask.align == ALIGNMENTS[0] else None


def _check_packed(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.is_nested:
            raise TypeError(f"{name}: a nested tensor is not supported; give its values() and offsets()")
        if x.dim() != 3:
            hint = "; flashmsa.attention takes (batch, heads, length, head_dim)" if x.dim() == 4 else ""
            raise ValueError(f"{name}: shape {tuple(x.shape)}; must be packed, (tokens, heads, head_dim){hint}")


def _check_offsets(q: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, seqused_k: Tensor | None) -> None:
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k), ("seqused_k", seqused_k)):
        if x is None:
            continue
        check_tensor(name, x)
        if x.dtype != torch.int32:
            raise TypeError(f"{name}: dtype {x.dtype}; must be torch.int32, as by {name}.to(torch.int32)")
        if x.device != q.device:
            raise ValueError(f"{name}: on {x.device}, q on {q.device}; all on one device")
    if cu_seqlens_q.dim() != 1 or cu_seqlens_q.shape[0] == 0:
        raise ValueError(f"cu_seqlens_q: shape {tuple(cu_seqlens_q.shape)}; must be (n + 1,) for n sequences")
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        raise ValueError(
            f"cu_seqlens_k: shape {tuple(cu_seqlens_k.shape)} does not match cu_seqlens_q's {tuple(cu_seqlens_q.shape)}"
        )
    count = cu_seqlens_q.shape[0] - 1
    if seqused_k is not None and seqused_k.shape != (count,):
        raise ValueError(f"seqused_k: shape {tuple(seqused_k.shape)}; must be ({count},), one length per sequence")


def _check_values(q_offsets: Tensor, kv_offsets: Tensor, used: Tensor | None, len_q: int, len_kv: int) -> None:
    # PERF: for the usual number of sequences a tenth of what the same costs as operators, which find what is wrong.
    right = used is None
    for offsets, length in ((q_offsets, len_q), (kv_offsets, len_kv)):
        values = offsets.tolist()
        right = right and values[0] == 0 and values[-1] <= length and all(map(le, values, values[1:]))
    if not right:
        check_sequences(q_offsets, kv_offsets, used, len_q, len_kv)


def _check_longest(name: str, longest: Any, offsets: Tensor) -> None:
    """A length on a device, or in a trace, stays unread."""
    if not isinstance(longest, int) or isinstance(longest, bool):
        if longest is None or isinstance(longest, (Tensor, torch.SymInt)):
            return
        raise TypeError(f"{name}: {type(longest).__name__}; must be an int, or None")
    if longest < 0:
        raise ValueError(f"{name}: {longest} is negative; must be the length of the longest sequence, or None")
    if on_cpu(offsets) and offsets.shape[0] > 1 and longest < int(offsets.diff().max()):
        raise ValueError(f"{name}: {longest}, but the longest sequence has {int(offsets.diff().max())}; None will do")


def _whole_out(q: Tensor, v: Tensor, out: Tensor) -> Tensor:
    check_tensor("out", out)
    shape = (*q.shape[:2], v.shape[2])
    if out.shape != shape:
        raise ValueError(f"out: shape {tuple(out.shape)}; must be {tuple(shape)}")
    return out.unsqueeze(0).transpose(1, 2)
