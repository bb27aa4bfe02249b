"""Other libraries' names and layouts: flash-attn's, torch's scaled_dot_product_attention, Hugging Face's interface.

Drop-in in the sense of argument names, order, layouts and alignment; what has no counterpart here raises
NotImplementedError rather than being ignored. Unlike their originals a row without a key gives 0, and not NaN.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from .checks import check_tensor
from .masks import BlockSparse, Causal, Mask, SlidingWindow
from .ops import attention
from .paged import append_kv, paged_attention
from .varlen import attention_varlen

_Window = tuple[int, int]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: _Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """``flash_attn.flash_attn_func``: q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv).

    causal is aligned at the end; window_size (left, right), -1 for no bound; alibi_slopes (Hq,) or (B, Hq) float32.
    Returns out (B, Sq, Hq, Dv), with ``return_attn_probs`` (out, lse (B, Hq, Sq), None).
    """
    _check_rank(4, "(batch, sequence, heads, head_dim)", q=q, k=k, v=v)
    out, lse = attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        _mask(causal, window_size),
        scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        deterministic=deterministic,
        return_lse=True,
    )
    out = out.transpose(1, 2)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: _Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> Any:
    """``flash_attn.flash_attn_varlen_func``: packed q (T, Hq, D), k (Tk, Hkv, D), v (Tk, Hkv, Dv).

    With ``block_table`` int32 (B, max_pages) k and v are pages (pages, page_size, Hkv, D), and the lengths are
    ``seqused_k``, or the differences of ``cu_seqlens_k``. Returns out (T, Hq, Dv), with ``return_attn_probs``
    (out, lse (Hq, T), None).
    """
    mask = _mask(causal, window_size)
    options = {"scale": softmax_scale, "softcap": softcap, "alibi_slopes": alibi_slopes, "return_lse": True}
    if block_table is None:
        out, lse = attention_varlen(
            *(q, k, v, cu_seqlens_q, cu_seqlens_k),
            mask=mask,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            seqused_k=seqused_k,
            dropout_p=dropout_p,
            deterministic=deterministic,
            **options,
        )
    else:
        if dropout_p:
            raise NotImplementedError(f"dropout_p: {dropout_p} with block_table; caches are for inference, use 0.0")
        if seqused_k is None and cu_seqlens_k is None:
            raise ValueError("seqused_k: None, and no cu_seqlens_k; one of them must say how long the sequences are")
        lengths = cu_seqlens_k.diff() if seqused_k is None else seqused_k
        out, lse = paged_attention(
            *(q, k, v, block_table, lengths),
            mask=mask,
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q,
            **options,
        )
    return (out, lse, None) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: _Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Tensor | None = None,
) -> Any:
    """``flash_attn.flash_attn_with_kvcache``: append k and v to the caches, in place, then attend to all of them.

    q                 (B, Sq, Hq, D)
    k_cache, v_cache  (B_cache, S, Hkv, D), or with ``block_table`` (pages, page_size, Hkv, D); never copied
    k, v              (B, n, Hkv, D): written behind each sequence's cache_seqlens tokens; None: nothing is appended
    rotary_cos, _sin  (positions, rotary_dim / 2), float32 or of k's dtype; turns k at its positions, and q at the same
                      ones where causal or under a window, else all of q at the first. Needs k and v
    cache_seqlens     int, or int32 (B,): the lengths before the append; None: the whole cache, without k and v only
    cache_batch_idx   int32 (B,): the row of a dense cache that belongs to each sequence, S a multiple of 16
    block_table       int32 (B, max_pages); ``page_table`` is FlashAttention-3's name for it

    Returns out (B, Sq, Hq, Dv), with ``return_softmax_lse`` (out, lse (B, Hq, Sq)). Not differentiable.
    """
    if cache_leftpad is not None:
        raise NotImplementedError(
            "cache_leftpad: not supported; start each sequence at its page's first slot, use None"
        )
    if page_table is not None:
        if block_table is not None:
            raise ValueError("page_table: given together with block_table; they are one argument")
        block_table = page_table
    _check_rank(4, "(batch, sequence, heads, head_dim)", q=q, k_cache=k_cache, v_cache=v_cache)
    batch = q.shape[0]
    lengths = _cache_lengths(cache_seqlens, q, k is not None)
    table, places = _cache_table(q, k_cache, block_table, cache_batch_idx)
    mask = _mask(causal, window_size)
    q = q.transpose(1, 2)
    if (k is None) != (v is None):
        raise ValueError("v: one of k and v without the other; give both, or none")
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("rotary_sin: one of rotary_cos and rotary_sin without the other; give both, or none")
    if rotary_cos is not None and k is None:
        raise ValueError("rotary_cos: without k and v; it turns new keys, and the queries alike")
    if k is not None:
        _check_rank(4, "(batch, sequence, heads, head_dim)", k=k, v=v)
        rope = None if rotary_cos is None else (rotary_cos, rotary_sin, rotary_interleaved)
        append_kv(k_cache, v_cache, places, lengths, k.transpose(1, 2), v.transpose(1, 2), rope)
        if rope is not None:
            q = _rotate_queries(q, lengths, *rope, moving=mask is not None)
        lengths = lengths + k.shape[1]
    if table is None:
        k_cache, v_cache = k_cache[:batch], v_cache[:batch]
    out, lse = paged_attention(
        *(q, k_cache, v_cache, table, lengths),
        mask=mask,
        scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        num_splits=num_splits,
        return_lse=True,
    )
    out = out.transpose(1, 2)
    return (out, lse) if return_softmax_lse else out


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention``: query (..., Hq, L, E), key and value (..., H, S, E or Ev).

    attn_mask  bool, broadcastable to (N, Hq, L, S), True where the query may see the key: kept as blocks and bits, for
               which the device is waited for; build a ``BlockSparse.from_dense`` once instead where it stays the same.
               A float one, a bias, raises NotImplementedError
    is_causal  aligned at the start, as torch's: query i sees the keys j <= i

    Returns (..., Hq, L, Ev).
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x)
        if x.dim() < 3:
            raise ValueError(f"{name}: shape {tuple(x.shape)}; must be (..., heads, length, head_dim)")
    if attn_mask is not None and is_causal:
        raise ValueError("is_causal: True together with attn_mask; one of them must say what is seen")
    if not enable_gqa and query.shape[-3] != key.shape[-3]:
        raise ValueError(
            f"key: {key.shape[-3]} heads do not match query's {query.shape[-3]}; enable_gqa=True shares them among "
            "query heads"
        )
    leading = query.shape[:-3]
    # NOTE: not -1, which torch cannot tell of a tensor without elements.
    q, k, v = (x.reshape(prod(x.shape[:-3]), *x.shape[-3:]) if x.dim() != 4 else x for x in (query, key, value))
    mask: Mask | None = Causal(align="top-left") if is_causal else None
    if attn_mask is not None:
        mask = _dense_mask(attn_mask, (*leading, *query.shape[-3:-1], key.shape[-2]))
    out = attention(q, k, v, mask, scale=scale, dropout_p=dropout_p)
    return out if query.dim() == 4 else out.reshape(*leading, *out.shape[1:])


def register_transformers(name: str = "flashmsa") -> str:
    """Makes ``attn_implementation=name`` known to Hugging Face's transformers; returns the name.

        flashmsa.compat.register_transformers()
        model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="flashmsa")

    Causal models without padding run as ``Causal()``, with a window as ``SlidingWindow``; any other mask is the bool
    one that transformers makes for SDPA, as ``BlockSparse.from_dense``. Softcap and sinks of models that have them,
    grouped heads without copies. Raises ImportError without transformers >= 4.53.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise ImportError(
            f"register_transformers: needs transformers 4.53 or later ({error}); pip install -U transformers"
        ) from error
    AttentionInterface.register(name, transformers_attention)
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


def transformers_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """An attention function as transformers calls it: query (B, Hq, Sq, D), key and value of Hkv heads; returns
    (B, Sq, Hq, Dv) and no weights."""
    mask: Mask | None = None
    if attention_mask is not None:
        heads = attention_mask.shape[1] if attention_mask.dim() == 4 else query.shape[1]
        shape = (query.shape[0], heads, query.shape[2], key.shape[2])
        mask = _dense_mask(attention_mask[..., : key.shape[2]], shape)
    elif is_causal if is_causal is not None else getattr(module, "is_causal", True):
        # A window in transformers' sense counts the query's own key.
        mask = Causal() if sliding_window is None else SlidingWindow.from_window_size(sliding_window)
    out = attention(
        query,
        key,
        value,
        mask,
        scale=scaling,
        dropout_p=dropout,
        softcap=softcap or 0.0,
        sinks=None if s_aux is None else s_aux.float(),
    )
    return out.transpose(1, 2).contiguous(), None


# ---------------------------------------------------------------------------------------------------------------------


def _check_rank(rank: int, shape: str, **tensors: Any) -> None:
    for name, x in tensors.items():
        check_tensor(name, x)
        if x.dim() != rank:
            raise ValueError(f"{name}: shape {tuple(x.shape)}; must be {shape}")


def _mask(causal: bool, window: _Window) -> Mask | None:
    """flash-attn's causal and window_size; None where every key is seen."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window_size: {window!r}; must be (left, right), -1 for no bound")
    left, right = (float("inf") if x is None or x == -1 else x for x in window)
    if causal:
        right = 0
    if left == right == float("inf"):
        return None
    return Causal() if left == float("inf") and right == 0 else SlidingWindow(left, right)


def _cache_lengths(cache_seqlens: Any, q: Tensor, appends: bool) -> Tensor | None:
    if isinstance(cache_seqlens, Tensor) or cache_seqlens is None:
        if cache_seqlens is None and appends:
            raise ValueError("cache_seqlens: None, but k and v are appended; must be how many tokens there are before")
        return cache_seqlens
    if isinstance(cache_seqlens, bool) or not isinstance(cache_seqlens, int):
        raise TypeError(f"cache_seqlens: {type(cache_seqlens).__name__}; must be an int or an int32 tensor (batch,)")
    return torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)


def _cache_table(
    q: Tensor, k_cache: Tensor, block_table: Tensor | None, rows: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """The table to attend by, None for a dense cache row by row; and the one to append by, where a row is a page."""
    if block_table is not None:
        if rows is not None:
            raise ValueError("cache_batch_idx: given together with block_table; it is for dense caches")
        return block_table, block_table
    if rows is not None:
        check_tensor("cache_batch_idx", rows)
        if k_cache.shape[1] % 16:
            raise NotImplementedError(
                f"cache_batch_idx: with a cache of length {k_cache.shape[1]}; must be a multiple of 16, allocate a "
                f"longer one, {-(-k_cache.shape[1] // 16) * 16}"
            )
        return rows[:, None], rows[:, None]
    return None, torch.arange(q.shape[0], dtype=torch.int32, device=q.device)[:, None]


def _rotate_queries(q: Tensor, lengths: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *, moving: bool) -> Tensor:
    """q (B, Hq, Sq, D) turned at the positions of the new keys, or all at the first of them."""
    from .paged_composed import rotate

    batch, heads, rows, dim = q.shape
    position = lengths.long()[:, None].expand(batch, rows)
    if moving:
        position = position + torch.arange(rows, device=q.device)
    tokens = q.transpose(1, 2).reshape(batch * rows, heads, dim)
    turned = rotate(tokens, cos, sin, position.reshape(-1), interleaved)
    return turned.view(batch, rows, heads, dim).transpose(1, 2)


def _dense_mask(mask: Tensor, shape: tuple[int, ...]) -> Mask:
    """A bool tensor that broadcasts to ``shape`` (..., Hq, L, S) as blocks and bits."""
    check_tensor("attn_mask", mask)
    if mask.dtype != torch.bool:
        return BlockSparse.from_dense(mask)  # says what is wrong
    try:
        whole = torch.broadcast_shapes(mask.shape, shape)
    except RuntimeError:
        whole = None
    if whole != torch.Size(shape):
        raise ValueError(f"attn_mask: shape {tuple(mask.shape)}; must broadcast to {tuple(shape)}")
    mask = mask[(None,) * (len(shape) - mask.dim())]
    mask = mask.expand(*mask.shape[:-2], *shape[-2:])
    if len(shape) != 4:
        leading = mask.shape[:-3] if all(n == 1 for n in mask.shape[:-3]) else shape[:-3]
        mask = mask.expand(*leading, *mask.shape[-3:]).reshape(prod(leading), *mask.shape[-3:])
    return BlockSparse.from_dense(mask)
