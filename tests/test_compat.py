"""flashmsa.compat: other libraries' argument names, layouts and alignments, against the definition."""

from __future__ import annotations

import inspect
import math
import sys
import types

import pytest
import torch
from helpers import (
    CAUSAL,
    DENSE,
    TOP_LEFT,
    MaskCase,
    Options,
    Pairs,
    Sequences,
    Target,
    check,
    make_qkv,
)
from paged_cases import Cache, Judge, make_cache, packed, queries

from flashmsa import compat

F32, BF16 = torch.float32, torch.bfloat16
# What runs is the dispatcher's choice.
EVERYWHERE = pytest.mark.parametrize(
    "target",
    [
        pytest.param(Target(None, "cpu", F32), id="cpu"),
        pytest.param(Target(None, "cpu", BF16), id="cpu-bf16"),
        pytest.param(Target(None, "cuda", BF16), id="cuda", marks=pytest.mark.gpu),
    ],
)
WINDOWS = {
    (False, (-1, -1)): DENSE,
    (True, (-1, -1)): CAUSAL,
    (True, (9, -1)): MaskCase("window", left=9, right=0),
    (True, (9, 5)): MaskCase("window", left=9, right=0),
    (False, (9, 5)): MaskCase("window", left=9, right=5),
    (False, (-1, 5)): MaskCase("window", left=10**6, right=5),
}


def outside(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """(B, H, S, D) as (B, S, H, D), and back."""
    return [x.transpose(1, 2) for x in tensors]


@EVERYWHERE
@pytest.mark.parametrize(("causal", "window"), WINDOWS, ids=str)
def test_flash_attn_func(target: Target, causal: bool, window: tuple[int, int]) -> None:
    q, k, v = make_qkv(target, 2, (4, 2), 40, 70, 64, 32)
    slopes = torch.rand(2, 4, device=target.device)
    out, lse, nothing = compat.flash_attn_func(
        *(x.contiguous() for x in outside(q, k, v)),
        *(0.0, 0.2, causal, window),
        softcap=3.0,
        alibi_slopes=slopes,
        return_attn_probs=True,
    )
    assert out.shape == (2, 40, 4, 32) and out.is_contiguous() and nothing is None
    options = Options(softcap=3.0, slopes=slopes)
    check(*outside(out), lse, q, k, v, WINDOWS[causal, window], scale=0.2, options=options)
    plain = compat.flash_attn_func(*outside(q, k, v), causal=causal, window_size=window)
    check(*outside(plain), None, q, k, v, WINDOWS[causal, window])


@EVERYWHERE
@pytest.mark.parametrize("causal", [False, True])
def test_flash_attn_varlen_func(target: Target, causal: bool) -> None:
    q_cuts, kv_cuts = (0, 30, 30, 77), (0, 41, 60, 140)
    q, k, v = make_qkv(target, 1, (4, 2), 77, 140, 64)
    cuts = [torch.tensor(x, dtype=torch.int32, device=target.device) for x in (q_cuts, kv_cuts)]
    out, lse, _ = compat.flash_attn_varlen_func(
        *(x[0].transpose(0, 1) for x in (q, k, v)), *cuts, 47, 80, causal=causal, return_attn_probs=True
    )
    mask = Sequences("varlen", inner=CAUSAL if causal else DENSE, q_cuts=q_cuts, kv_cuts=kv_cuts)
    check(out.transpose(0, 1)[None], lse[None], q, k, v, mask)


@EVERYWHERE
def test_flash_attn_varlen_func_over_pages(target: Target) -> None:
    cache = make_cache(target, [80, 33], 16, 2, 64)
    q, cuts = packed(target, [20, 1], 4, 64)
    k_cuts = torch.tensor([0, 80, 113], dtype=torch.int32, device=target.device)
    pools = (cache.k_pages, cache.v_pages)
    out, lse, _ = compat.flash_attn_varlen_func(
        q, *pools, cuts, k_cuts, 20, 80, causal=True, return_attn_probs=True, block_table=cache.table
    )
    judge = Judge(cache)
    for b, rows in enumerate((slice(0, 20), slice(20, 21))):
        judge.add(b, q[rows].transpose(0, 1), out[rows].transpose(0, 1), lse[:, rows], CAUSAL)
    judge.decide()
    again = compat.flash_attn_varlen_func(
        q, *pools, cuts, None, 20, 80, causal=True, block_table=cache.table, seqused_k=cache.lens
    )
    assert torch.equal(again, out)


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, interleaved: bool):
    """x (S, H, D) by its positions, pair by pair in float64, rounded to x's dtype."""
    out, half = x.double().clone(), cos.shape[1]
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        c, s = (t[positions, i].double()[:, None] for t in (cos, sin))
        out[..., a], out[..., b] = (
            x[..., a].double() * c - x[..., b].double() * s,
            (x[..., b].double() * c + x[..., a].double() * s),
        )
    return out.to(x.dtype)


@EVERYWHERE
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rotary", ["none", "interleaved", "half"])
@pytest.mark.parametrize("kind", ["dense", "rows", "pages"])
def test_flash_attn_with_kvcache(target: Target, kind: str, rotary: str, causal: bool) -> None:
    """Appends behind each sequence, turns keys and queries, attends to all of them: every kind of cache."""
    lens, new = [30, 0, 47], 3
    cache = make_cache(target, [n + new for n in lens], 16, 2, 64)
    k_cache, v_cache, table, _ = cache.arguments()
    options: dict = {"block_table": table}
    if kind != "pages":
        rows = [2, 0, 1] if kind == "rows" else [0, 1, 2]
        k_cache, v_cache = (torch.full((3, 64, 2, 64), x, device=target.device) for x in (math.nan, math.inf))
        k_cache, v_cache = k_cache.to(target.dtype), v_cache.to(target.dtype)
        for b, n in enumerate(lens):
            k_cache[rows[b], :n], v_cache[rows[b], :n] = cache.k[b][:n], cache.v[b][:n]
        index = torch.tensor(rows, dtype=torch.int32, device=target.device)
        options = {"cache_batch_idx": index} if kind == "rows" else {}
    q = queries(target, 3, new, 4, 64)  # (B, S, H, D)
    k, v = (queries(target, 3, new, 2, 64) for _ in range(2))
    lengths = torch.tensor(lens, dtype=torch.int32, device=target.device)
    angle = torch.rand(80, 16, device=target.device) * 6
    tables = (None, None) if rotary == "none" else (angle.cos(), angle.sin())
    interleaved = rotary == "interleaved"
    out, lse = compat.flash_attn_with_kvcache(
        *(q, k_cache, v_cache, k, v, *tables),
        cache_seqlens=lengths,
        causal=causal,
        rotary_interleaved=interleaved,
        return_softmax_lse=True,
        **options,
    )
    assert out.shape == q.shape and lse.shape == (3, 4, new)
    judge = Judge(cache)
    for b, n in enumerate(lens):
        positions = n + torch.arange(new)
        new_k, new_q = k[b], q[b]
        if rotary != "none":
            new_k = turn(new_k, *tables, positions, interleaved)
            new_q = turn(new_q, *tables, positions if causal else torch.full((new,), n), interleaved)
        cache.k[b] = torch.cat([cache.k[b][:n], new_k])
        cache.v[b] = torch.cat([cache.v[b][:n], v[b]])
        mask = CAUSAL if causal else DENSE
        judge.add(b, new_q.transpose(0, 1), out[b].transpose(0, 1), lse[b], mask)
    judge.decide()


@EVERYWHERE
def test_flash_attn_with_kvcache_of_a_whole_cache(target: Target) -> None:
    """Without lengths, with one length for all, and under FlashAttention-3's name of the table."""
    q = queries(target, 2, 1, 4, 64)
    k, v = (queries(target, 2, 50, 2, 64) for _ in range(2))
    for seqlens, n in ((None, 50), (13, 13)):
        out, lse = compat.flash_attn_with_kvcache(q, k, v, cache_seqlens=seqlens, return_softmax_lse=True)
        judge = Judge(Cache(k, v, None, None, list(k[:, :n]), list(v[:, :n])))
        for b in range(2):
            judge.add(b, q[b].transpose(0, 1), out[b].transpose(0, 1), lse[b], DENSE)
        judge.decide()
    cache = make_cache(target, [40, 33], 16, 2, 64)
    options = {"cache_seqlens": cache.lens, "window_size": (9, 0), "num_splits": 1}
    pools = (cache.k_pages, cache.v_pages)
    a = compat.flash_attn_with_kvcache(q, *pools, page_table=cache.table, **options)
    assert torch.equal(a, compat.flash_attn_with_kvcache(q, *pools, block_table=cache.table, **options))
    judge = Judge(cache)
    for b in range(2):
        judge.add(b, q[b].transpose(0, 1), a[b].transpose(0, 1), None, MaskCase("window", left=9, right=0))
    judge.decide()


def test_gaps_and_mistakes_of_kvcache() -> None:
    target = Target(None, "cpu", F32)
    cache = make_cache(target, [40, 33], 16, 2, 64)
    q, k = queries(target, 2, 1, 4, 64), queries(target, 2, 1, 2, 64)
    lens = torch.zeros(2, dtype=torch.int32)
    dense = torch.zeros(2, 50, 2, 64)
    cos = torch.ones(60, 16)

    def raises(error: type, says: str, *cache: torch.Tensor, **options) -> None:
        with pytest.raises(error, match=says):
            compat.flash_attn_with_kvcache(q, *cache, **options)

    raises(NotImplementedError, "cache_leftpad", dense, dense, cache_leftpad=lens)
    raises(NotImplementedError, r"cache_batch_idx.*multiple of 16", dense, dense, cache_batch_idx=lens)
    pages = (cache.k_pages, cache.v_pages)
    raises(ValueError, "page_table", *pages, block_table=cache.table, page_table=cache.table)
    raises(ValueError, "cache_batch_idx", *pages, block_table=cache.table, cache_batch_idx=lens)
    raises(ValueError, "cache_seqlens", dense, dense, k=k, v=k)
    raises(ValueError, "v: one of k and v", dense, dense, k=k, cache_seqlens=0)
    raises(ValueError, "rotary_cos", dense, dense, rotary_cos=cos, rotary_sin=cos, cache_seqlens=0)
    raises(ValueError, "rotary_sin", dense, dense, k=k, v=k, rotary_cos=cos, cache_seqlens=0)
    raises(TypeError, "cache_seqlens", dense, dense, cache_seqlens=1.5)
    raises(TypeError, "window_size", dense, dense, window_size=3)
    raises(ValueError, "k_cache", dense[0], dense)
    with pytest.raises(ValueError, match=r"q: shape.*batch, sequence, heads"):
        compat.flash_attn_func(q[0], dense, dense)
    with pytest.raises(NotImplementedError, match="dropout_p"):
        compat.flash_attn_varlen_func(q[0], *pages, lens, lens, dropout_p=0.5, block_table=cache.table)


def test_argument_names_of_flash_attn() -> None:
    """In flash-attn 2's order, so that calls by position mean the same."""
    orders = {
        "flash_attn_func": "q k v dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic "
        "return_attn_probs",
        "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale "
        "causal window_size softcap alibi_slopes deterministic return_attn_probs block_table",
        "flash_attn_with_kvcache": "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx "
        "cache_leftpad block_table softmax_scale causal window_size softcap rotary_interleaved alibi_slopes num_splits "
        "return_softmax_lse",
    }
    for name, order in orders.items():
        names = list(inspect.signature(getattr(compat, name)).parameters)
        assert names[: len(order.split())] == order.split()


# ---------------------------------------------------------------------------------------------------------------------
# scaled_dot_product_attention


@EVERYWHERE
@pytest.mark.parametrize("causal", [False, True])
def test_sdpa(target: Target, causal: bool) -> None:
    """Causal aligned at the start, as torch's, with more and with fewer keys than queries."""
    for len_q, len_kv in ((40, 70), (70, 40)):
        q, k, v = make_qkv(target, 2, 4, len_q, len_kv, 64, 32)
        out = compat.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3)
        check(out, None, q, k, v, TOP_LEFT if causal else DENSE, scale=0.3)
    q, k, v = make_qkv(target, 2, (4, 2), 30, 30, 64)
    check(compat.scaled_dot_product_attention(q, k, v, enable_gqa=True), None, q, k, v)


@EVERYWHERE
@pytest.mark.parametrize("shape", [(40, 70), (1, 70), (4, 40, 70), (2, 1, 40, 70), (2, 4, 40, 70), (2, 1, 1, 70)])
def test_sdpa_masks(target: Target, shape: tuple[int, ...]) -> None:
    """A bool mask of every shape that broadcasts, with a row that sees nothing."""
    q, k, v = make_qkv(target, 2, 4, 40, 70, 64)
    seen = torch.rand(shape, device=target.device) < 0.6
    if shape[-2] == 40:
        seen[..., 7, :] = False
    out = compat.scaled_dot_product_attention(q, k, v, seen)
    whole = seen.expand(2, 4, 40, 70) if seen.dim() != 3 else seen[None].expand(2, 4, 40, 70)
    check(out, None, q, k, v, Pairs("pairs", pairs=whole))


@EVERYWHERE
def test_sdpa_of_other_ranks(target: Target) -> None:
    """(heads, length, D), and two leading dimensions, with masks that broadcast over them."""
    q, k, v = make_qkv(target, 6, 4, 40, 70, 64)
    one = compat.scaled_dot_product_attention(q[0], k[0], v[0], is_causal=True)
    check(one[None], None, q[:1], k[:1], v[:1], TOP_LEFT)
    split = [x.unflatten(0, (2, 3)) for x in (q, k, v)]
    seen = torch.rand(2, 1, 1, 40, 70, device=target.device) < 0.5
    out = compat.scaled_dot_product_attention(*split, seen)
    assert out.shape == (2, 3, 4, 40, 64)
    whole = seen.expand(2, 3, 4, 40, 70).flatten(0, 1)
    check(out.flatten(0, 1), None, q, k, v, Pairs("pairs", pairs=whole))
    shared = compat.scaled_dot_product_attention(*split, seen[0, 0, 0])
    check(shared.flatten(0, 1), None, q, k, v, Pairs("pairs", pairs=seen[0, 0, 0].expand(6, 4, 40, 70)))


@EVERYWHERE
@pytest.mark.parametrize("leading", [(), (2,), (0,), (2, 3), (2, 0)], ids=str)
@pytest.mark.parametrize(("heads", "len_q", "len_kv"), [(2, 0, 5), (2, 5, 0), (0, 5, 5), (2, 5, 5)])
def test_sdpa_of_nothing(target: Target, leading: tuple[int, ...], heads: int, len_q: int, len_kv: int) -> None:
    q, k = (
        torch.randn(*leading, heads, n, 16, device=target.device).to(target.dtype).requires_grad_()
        for n in (len_q, len_kv)
    )
    for mask in (None, torch.ones(len_q, len_kv, dtype=torch.bool), torch.ones(*leading, 1, len_q, len_kv).bool()):
        mask = None if mask is None else mask.to(q.device)
        out = compat.scaled_dot_product_attention(q, k, k, mask)
        assert out.shape == q.shape
        out.sum().backward()
        assert q.grad.shape == q.shape and k.grad.shape == k.shape
        if len_kv == 0:
            assert not out.count_nonzero()


def test_sdpa_refuses() -> None:
    q, k, v = make_qkv(Target(None, "cpu", F32), 2, (4, 2), 40, 70, 64)
    sdpa = compat.scaled_dot_product_attention
    with pytest.raises(ValueError, match="enable_gqa"):
        sdpa(q, k, v)
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    with pytest.raises(NotImplementedError, match=r"attn_mask.*bias"):
        sdpa(q, k, v, torch.zeros(40, 70))
    with pytest.raises(ValueError, match=r"attn_mask.*\(2, 4, 40, 70\)"):
        sdpa(q, k, v, torch.ones(40, 71, dtype=torch.bool))
    with pytest.raises(ValueError, match="is_causal"):
        sdpa(q, k, v, torch.ones(40, 70, dtype=torch.bool), is_causal=True)
    with pytest.raises(TypeError, match="query"):
        sdpa([1], k, v)
    with pytest.raises(ValueError, match="value"):
        sdpa(q, k, v[0, 0])


# ---------------------------------------------------------------------------------------------------------------------
# transformers


def test_transformers_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"transformers 4\.53"):
        compat.register_transformers()


def test_transformers_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under both of its registries, by the name that is returned."""
    known: dict = {}

    class Registry:
        @classmethod
        def register(cls, name: str, function: object) -> None:
            known[cls.__name__, name] = function

    fake = types.ModuleType("transformers")
    fake.AttentionInterface, fake.AttentionMaskInterface = (
        type(name, (Registry,), {}) for name in ("AttentionInterface", "AttentionMaskInterface")
    )
    utils = types.ModuleType("transformers.masking_utils")
    utils.sdpa_mask = object()
    monkeypatch.setitem(sys.modules, "transformers", fake)
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", utils)
    assert compat.register_transformers("mine") == "mine"
    assert known["AttentionInterface", "mine"] is compat.transformers_attention
    assert known["AttentionMaskInterface", "mine"] is utils.sdpa_mask


@EVERYWHERE
def test_transformers_attention(target: Target) -> None:
    """As its models call it: causal by the module, a window, a padding mask, softcap, sinks, one query to a cache."""

    class Module:
        is_causal = True

    def run(q, k, v, attention_mask=None, **options) -> torch.Tensor:
        out, weights = compat.transformers_attention(Module(), q, k, v, attention_mask, position_ids=None, **options)
        assert weights is None and out.is_contiguous()
        return out.transpose(1, 2)

    q, k, v = make_qkv(target, 2, (4, 2), 40, 40, 64)
    check(run(q, k, v, scaling=0.2), None, q, k, v, CAUSAL, scale=0.2)
    check(run(q, k, v, is_causal=False), None, q, k, v)
    check(run(q, k, v, sliding_window=8), None, q, k, v, MaskCase("window", left=7, right=0))
    one = q[:, :, :1]
    check(run(one, k, v), None, one, k, v, CAUSAL)
    sinks = torch.randn(4, device=target.device).to(target.dtype)
    options = Options(softcap=5.0, sinks=sinks.float())
    check(run(q, k, v, softcap=5.0, s_aux=sinks), None, q, k, v, CAUSAL, options=options)
    seen = CAUSAL.allowed(40, 40, device=target.device)[None] & (torch.arange(40, device=target.device) >= 5)
    seen = torch.cat([seen, CAUSAL.allowed(40, 40, device=target.device)[None]])
    check(run(q, k, v, seen), None, q, k, v, Pairs("pairs", pairs=seen))
