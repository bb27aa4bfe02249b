"""attention_varlen: packed sequences, each with the mask of its own, against the oracle and against the texts alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from helpers import (
    CAUSAL,
    DENSE,
    NATIVE_ONE_EACH,
    ONE_EACH,
    PLAIN,
    TOP_LEFT,
    MaskCase,
    Options,
    Prefixes,
    Sequences,
    Target,
    both,
    check,
    limit_of_whole,
    poisoned_allocations,
    targets,
)
from torch._dynamo.testing import CompileCounterWithBackend

import flashmsa
from flashmsa import (
    BlockSparse,
    Causal,
    Dense,
    DilatedWindow,
    Document,
    HashBucket,
    PrefixLM,
    SlidingWindow,
    attention_varlen,
)

ALL = pytest.mark.parametrize("target", targets(auto=True))
FEW = pytest.mark.parametrize("target", targets(auto=True, dtypes=(torch.float32, torch.bfloat16)))
EACH = pytest.mark.parametrize("target", ONE_EACH)

# Case 4: either side of a sequence may be empty.
Q_CUTS, KV_CUTS, USED = (0, 0, 150, 150, 300), (0, 100, 100, 200, 300), (40, 0, 100, 3)


def int32(values, device: str | torch.device = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def make(
    target: Target, tokens_q: int, tokens_kv: int, heads: tuple[int, int] = (4, 2), dim: int = 64, dim_v: int = 40
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shapes = ((tokens_q, heads[0], dim), (tokens_kv, heads[1], dim), (tokens_kv, heads[1], dim_v))
    return tuple(torch.randn(shape, device=target.device).to(target.dtype) for shape in shapes)


def whole(x: torch.Tensor) -> torch.Tensor:
    """(T, H, D) as (1, H, T, D)."""
    return x.transpose(0, 1)[None]


def offsets_of(case: Sequences, device: str | torch.device) -> dict[str, torch.Tensor | None]:
    named = {"cu_seqlens_q": case.q_cuts, "cu_seqlens_k": case.kv_cuts, "seqused_k": case.used}
    return {name: None if x is None else int32(x, device) for name, x in named.items()}


def run(target: Target, q, k, v, case: Sequences, options: Options = PLAIN, **kwargs):
    """out (T, Hq, Dv) and lse (Hq, T), into a poisoned output."""
    out = torch.full((*q.shape[:2], v.shape[2]), math.nan, dtype=q.dtype, device=q.device)
    given = {**offsets_of(case, q.device), **options.call(), **kwargs}
    got, lse = attention_varlen(
        q, k, v, mask=case.inner.build(q.device), backend=target.backend, return_lse=True, out=out, **given
    )
    assert got is out and lse.shape == (q.shape[1], q.shape[0]) and lse.dtype == torch.float32
    return got, lse


def run_and_check(target: Target, q, k, v, case: Sequences, options: Options = PLAIN, **kwargs):
    out, lse = run(target, q, k, v, case, options, **kwargs)
    check(whole(out), lse[None], *map(whole, (q, k, v)), case, options=options)
    return out, lse


INNER = [
    DENSE,
    CAUSAL,
    TOP_LEFT,
    MaskCase("window", left=5, right=3),
    MaskCase("window-top-left", left=20, right=0, keep=3),
    MaskCase("prefix", prefix=30),
    Prefixes("prefix", prefixes=(3, 70, 0, 200)),
    both(MaskCase("prefix", prefix=9), MaskCase("window", left=30, right=10)),
    both(CAUSAL, TOP_LEFT, MaskCase("window", left=40, right=9, keep=5)),
]


@FEW
@pytest.mark.parametrize("inner", INNER, ids=str)
@pytest.mark.parametrize("used", [None, USED], ids=["whole", "used"])
def test_every_mask(target: Target, inner: MaskCase, used: tuple[int, ...] | None) -> None:
    """With a tail past the last sequence, on both sides, of NaN; every option."""
    q, k, v = make(target, 320, 310)
    case = Sequences("varlen", inner=inner, q_cuts=Q_CUTS, kv_cuts=KV_CUTS, used=used)
    q[300:], k[300:], v[300:] = math.nan, math.nan, math.inf
    for _, keys, _ in case.each():
        following = next(c for c in (*KV_CUTS, 310) if c >= keys.stop)
        k[keys.stop : following], v[keys.stop : following] = math.nan, math.nan
    sinks, slopes = torch.randn(4, device=q.device), torch.rand(4, device=q.device)
    for options in (PLAIN, Options(softcap=2.0, sinks=sinks), Options(slopes=slopes)):
        with poisoned_allocations():
            out, _ = run_and_check(target, q, k, v, case, options)
        assert not out[300:].count_nonzero() and not out.isnan().any()


@ALL
@pytest.mark.parametrize("inner", [DENSE, CAUSAL, MaskCase("window", left=20, right=0)], ids=str)
def test_case_4_empty_sequences_on_either_side(target: Target, inner: MaskCase) -> None:
    q, k, v = make(target, 300, 300)
    out, lse = run_and_check(target, q, k, v, Sequences("varlen", inner=inner, q_cuts=Q_CUTS, kv_cuts=KV_CUTS))
    assert not out[:150].count_nonzero() and lse[:, :150].isneginf().all()


@ALL
@pytest.mark.parametrize("inner", [DENSE, CAUSAL, MaskCase("window", left=3, right=3)], ids=str)
def test_case_5_more_sequences_than_tokens(target: Target, inner: MaskCase) -> None:
    q, k, v = make(target, 1, 1, (21, 7), 120, 120)
    out, _ = run_and_check(target, q, k, v, Sequences("varlen", inner=inner, q_cuts=(0, 0, 0, 0, 1)))
    torch.testing.assert_close(out, v.repeat_interleave(3, 1), rtol=torch.finfo(target.dtype).eps, atol=0)


@ALL
@pytest.mark.parametrize("causal", [False, True])
def test_case_6_tail_past_the_offsets(target: Target, causal: bool) -> None:
    q, k, v = make(target, 229, 229)
    case = Sequences("varlen", inner=CAUSAL if causal else DENSE, q_cuts=(0, 43, 43, 129))
    clean = run(target, q, k, v, case)
    for x in (q, k, v):
        x[129:] = math.nan
    out, lse = run_and_check(target, q, k, v, case)
    assert not out[129:].count_nonzero() and not out.isnan().any() and lse[:, 129:].isneginf().all()
    if target.backend == "cpu":
        assert torch.equal(out, clean[0]) and torch.equal(lse, clean[1])


@EACH
def test_nothing_at_all(target: Target) -> None:
    for tokens_q, tokens_kv, cuts in ((0, 0, (0,)), (7, 5, (0,)), (7, 0, (0, 7)), (0, 7, (0, 0))):
        q, k, v = make(target, tokens_q, tokens_kv)
        for inner in (DENSE, MaskCase("window", left=3, right=3)):
            kv_cuts = tuple(min(c, tokens_kv) for c in cuts)
            out, lse = run(target, q, k, v, Sequences("varlen", inner=inner, q_cuts=cuts, kv_cuts=kv_cuts))
            assert not out.count_nonzero() and not out.isnan().any() and lse.isneginf().all()


@EACH
@pytest.mark.parametrize("align", ["bottom-right", "top-left"])
def test_prefixes_of_no_sequences(target: Target, align: str) -> None:
    """Rows that belong to no sequence, whose mask holds no prefix."""
    q, k, v = make(target, 9, 9)
    mask = flashmsa.PrefixLM(int32((), target.device), align)
    cuts = int32((0,), target.device)
    out, lse = attention_varlen(q, k, v, cuts, mask=mask, return_lse=True, backend=target.backend)
    assert not out.count_nonzero() and lse.isneginf().all()


@EACH
@pytest.mark.parametrize("causal", [False, True])
def test_equals_a_document_mask(target: Target, causal: bool) -> None:
    """Plain sequences are documents: the same kernel, the same bits; and as windows of no bound."""
    q, k, v = make(target, 300, 300)
    case = Sequences("varlen", inner=CAUSAL if causal else DENSE, q_cuts=Q_CUTS, kv_cuts=KV_CUTS)
    out, lse = run(target, q, k, v, case)
    cuts = (int32(x, q.device) for x in (Q_CUTS, KV_CUTS))
    mask = Document(*cuts, causal=causal)
    want, want_lse = flashmsa.attention(*map(whole, (q, k, v)), mask=mask, backend=target.backend, return_lse=True)
    assert torch.equal(whole(out), want) and torch.equal(lse[None], want_lse)
    wide = MaskCase("window", left=1000, right=0 if causal else 1000)
    run_and_check(target, q, k, v, Sequences("varlen", inner=wide, q_cuts=Q_CUTS, kv_cuts=KV_CUTS))


@EACH
def test_sequences_equal_the_texts_alone(target: Target) -> None:
    q, k, v = make(target, 300, 300)
    case = Sequences("varlen", inner=MaskCase("window", left=9, right=2, keep=4), q_cuts=(0, 1, 129, 300))
    out, lse = run(target, q, k, v, case)
    limit = limit_of_whole(*map(whole, (q, k, v)), case)
    for mine, keys, inner in case.each():
        alone = (whole(x) for x in (q[mine], k[keys], v[keys]))
        check(whole(out[mine]), lse[None, :, mine], *alone, inner, limit=limit)


@EACH
def test_what_is_returned(target: Target) -> None:
    """Packed results in q's memory order, without copies of packed inputs."""
    q, k, v = make(target, 70, 70)
    cuts = int32((0, 30, 70), q.device)
    out = attention_varlen(q, k, v, cuts, mask=Causal(), backend=target.backend)
    assert out.shape == (70, 4, 40) and out.is_contiguous() and out.dtype == q.dtype
    same, lse = attention_varlen(q, k, v, cuts, cuts, mask=Causal(), backend=target.backend, return_lse=True)
    assert torch.equal(out, same) and lse.shape == (4, 70)
    given = attention_varlen(
        q, k, v, cuts, mask=Causal(), backend=target.backend, max_seqlen_q=40, max_seqlen_k=40, deterministic=True
    )
    assert torch.equal(out, given)
    wide = torch.full((70, 6, 40), 7.0, dtype=q.dtype, device=q.device)
    attention_varlen(q, k, v, cuts, mask=Causal(), backend=target.backend, out=wide[:, 1:5])
    assert torch.equal(wide[:, 1:5], out) and (wide[:, 0] == 7.0).all() and (wide[:, 5] == 7.0).all()


@EACH
def test_lengths_and_prefixes_are_read_at_every_call(target: Target) -> None:
    q, k, v = make(target, 300, 300)
    held = offsets_of(Sequences("varlen", q_cuts=(0, 300), kv_cuts=(0, 300), used=(0,)), q.device)
    held = {name: x.new_zeros(4 if name == "seqused_k" else 5) for name, x in held.items()}
    prefixes = int32((0, 0, 0, 0), q.device)
    mask = PrefixLM(prefixes)
    for inner in (Prefixes("prefix", prefixes=(3, 70, 0, 200)), Prefixes("prefix", prefixes=(0, 1, 2, 3))):
        case = Sequences("varlen", inner=inner, q_cuts=Q_CUTS, kv_cuts=KV_CUTS, used=USED)
        for name, x in offsets_of(case, q.device).items():
            held[name].copy_(x)
        prefixes.copy_(int32(inner.prefixes, q.device))
        out, lse = attention_varlen(q, k, v, mask=mask, backend=target.backend, return_lse=True, **held)
        check(whole(out), lse[None], *map(whole, (q, k, v)), case)


@pytest.mark.parametrize("target", NATIVE_ONE_EACH)
@pytest.mark.parametrize("inner", [CAUSAL, MaskCase("window", left=5, right=3, keep=2)], ids=str)
def test_same_bits_every_time(target: Target, inner: MaskCase) -> None:
    q, k, v = make(target, 300, 300)
    case = Sequences("varlen", inner=inner, q_cuts=Q_CUTS, kv_cuts=KV_CUTS, used=USED)
    out, lse = run(target, q, k, v, case)
    for _ in range(50):
        again, lse_again = run(target, q, k, v, case)
        assert torch.equal(out, again) and torch.equal(lse, lse_again)


@EACH
@pytest.mark.parametrize("inner", [CAUSAL, MaskCase("window", left=5, right=3)], ids=str)
@pytest.mark.parametrize("used", [None, USED], ids=["whole", "used"])
def test_compile(target: Target, inner: MaskCase, used: tuple[int, ...] | None) -> None:
    """One graph without a break, at most two compilations over three numbers of tokens."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    mask = inner.build()

    def call(q, k, v, offsets):
        return attention_varlen(q, k, v, mask=mask, backend=target.backend, return_lse=True, **offsets)

    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for tokens in (300, 301, 320):
        q, k, v = make(target, tokens, tokens)
        case = Sequences("varlen", inner=inner, q_cuts=Q_CUTS, kv_cuts=KV_CUTS, used=used)
        offsets = {name: x for name, x in offsets_of(case, q.device).items() if x is not None}
        for got, want in zip(compiled(q, k, v, offsets), call(q, k, v, offsets), strict=True):
            assert torch.equal(got, want) and got.stride() == want.stride()
    assert counter.frame_count <= 2
    torch._dynamo.reset()


def test_gradients_of_the_composed_backend() -> None:
    target = Target("torch", "cpu", torch.float64)
    inputs = make(target, 40, 30, dim=16, dim_v=8)
    case = Sequences(
        "varlen",
        inner=MaskCase("window", left=5, right=1),
        q_cuts=(0, 3, 3, 37),
        kv_cuts=(0, 10, 12, 30),
        used=(9, 2, 17),
    )
    q, k, v = (x.clone().requires_grad_() for x in inputs)
    out = attention_varlen(q, k, v, mask=case.inner.build(), backend="torch", **offsets_of(case, "cpu"))
    weight = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), weight)
    q, k, v = (x.clone().requires_grad_() for x in inputs)
    parts = [
        flashmsa.reference(whole(q[mine]), whole(k[keys]), whole(v[keys]), mask=inner.build())[0].transpose(0, 1)
        for mine, keys, inner in case.each()
    ]
    wanted = torch.autograd.grad(torch.cat(parts), (q, k, v), weight[:37])
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@EACH
def test_autocast(target: Target) -> None:
    full = make(Target(target.backend, target.device, torch.float32), 70, 70)
    cuts = int32((0, 30, 70), target.device)
    with torch.autocast(target.device, torch.bfloat16):
        out = attention_varlen(*full, cuts, mask=SlidingWindow(5), backend=target.backend)
    want = attention_varlen(*(x.bfloat16() for x in full), cuts, mask=SlidingWindow(5), backend=target.backend)
    assert out.dtype == torch.bfloat16 and torch.equal(out, want)


# ---------------------------------------------------------------------------------------------------------------------
# Bad input


def raises(error: type[Exception], match: str, **changed) -> None:
    q, k, v = torch.randn(40, 4, 16), torch.randn(30, 2, 16), torch.randn(30, 2, 8)
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": int32((0, 9, 40)), "cu_seqlens_k": int32((0, 9, 30))}
    for backend in (None, "cpu", "torch"):
        with pytest.raises(error, match=match):
            attention_varlen(**{**given, "backend": backend, **changed})


X = torch.randn(40, 4, 16)


@pytest.mark.parametrize(
    ("error", "match", "changed"),
    [
        (TypeError, "q: list; must be a torch.Tensor", {"q": [1]}),
        (
            ValueError,
            r"q: shape \(1, 4, 40, 16\); must be packed, .*flashmsa.attention",
            {"q": X[None].transpose(1, 2)},
        ),
        (ValueError, r"k: shape \(40, 16\); must be packed", {"k": X[:, 0]}),
        (ValueError, "head_dim 8 does not match q's 16", {"k": torch.randn(30, 2, 8)}),
        (ValueError, "length 29 does not match k's 30", {"v": torch.randn(29, 2, 8)}),
        (
            TypeError,
            r"cu_seqlens_q: dtype torch.int64; must be torch.int32.*\.to",
            {"cu_seqlens_q": torch.tensor([0, 40])},
        ),
        (TypeError, "cu_seqlens_q: list", {"cu_seqlens_q": [0, 9, 40]}),
        (ValueError, r"cu_seqlens_q: shape \(0,\); must be \(n \+ 1,\)", {"cu_seqlens_q": int32([])}),
        (ValueError, r"cu_seqlens_q: shape \(1, 3\)", {"cu_seqlens_q": int32([[0, 9, 40]])}),
        (
            ValueError,
            r"cu_seqlens_k: shape \(2,\) does not match cu_seqlens_q's \(3,\)",
            {"cu_seqlens_k": int32((0, 30))},
        ),
        (ValueError, "cu_seqlens_k: on meta, q on cpu", {"cu_seqlens_k": int32((0, 9, 30), "meta")}),
        (ValueError, r"cu_seqlens_q\[0\]: 1; the first offset must be 0", {"cu_seqlens_q": int32((1, 9, 40))}),
        (ValueError, r"cu_seqlens_q\[2\]: 5 is below the 9 before it", {"cu_seqlens_q": int32((0, 9, 5))}),
        (ValueError, "cu_seqlens_q: the last value 41 lies past the 40", {"cu_seqlens_q": int32((0, 9, 41))}),
        (ValueError, "cu_seqlens_k: the last value 31 lies past the 30", {"cu_seqlens_k": int32((0, 9, 31))}),
        (ValueError, "cu_seqlens_k: the last value 40 lies past the 30", {"cu_seqlens_k": None}),
        (ValueError, r"seqused_k: shape \(3,\); must be \(2,\)", {"seqused_k": int32((1, 2, 3))}),
        (TypeError, "seqused_k: dtype torch.float32", {"seqused_k": torch.zeros(2)}),
        (ValueError, r"seqused_k\[1\]: 22; must be from 0 to the sequence's 21 keys", {"seqused_k": int32((0, 22))}),
        (ValueError, r"seqused_k\[0\]: -1; must be", {"seqused_k": int32((-1, 2))}),
        (ValueError, "max_seqlen_q: 30, but the longest sequence has 31", {"max_seqlen_q": 30}),
        (ValueError, "max_seqlen_k: -1 is negative", {"max_seqlen_k": -1}),
        (TypeError, "max_seqlen_k: float", {"max_seqlen_k": 40.0}),
        (TypeError, "mask: str", {"mask": "causal"}),
        (NotImplementedError, "mask: DilatedWindow.* inside each sequence", {"mask": DilatedWindow(3, dilation=2)}),
        (NotImplementedError, "mask: Document.* inside each sequence", {"mask": Document([0, 30])}),
        (NotImplementedError, "mask: HashBucket.* inside", {"mask": HashBucket(int32([[[1, 2]]]))}),
        (NotImplementedError, "mask: BlockSparse.* inside", {"mask": BlockSparse(torch.ones(1, 1, 1, 1).bool())}),
        (
            NotImplementedError,
            "mask: BlockSparse.* inside",
            {"mask": BlockSparse(torch.ones(1, 1, 1, 1).bool()) & Causal()},
        ),
        (ValueError, "mask: prefix for 3 sequences does not match .* 2", {"mask": PrefixLM(int32((1, 2, 3)))}),
        (NotImplementedError, r"alibi_slopes: shape \(2, 4\)", {"alibi_slopes": torch.rand(2, 4)}),
        (ValueError, r"alibi_slopes: shape \(3,\)|alibi_slopes: shape \[3\]", {"alibi_slopes": torch.rand(3)}),
        (ValueError, r"sinks: shape", {"sinks": torch.rand(3)}),
        (ValueError, "softcap: -1", {"softcap": -1.0}),
        (ValueError, r"out: shape \(40, 4, 16\); must be \(40, 4, 8\)", {"out": torch.zeros(40, 4, 16)}),
        (TypeError, "out: dtype torch.float64|out: dtype", {"out": torch.zeros(40, 4, 8, dtype=torch.float64)}),
        (ValueError, r"dropout_p: 1\.0; must lie in \[0, 1\)", {"dropout_p": 1.0}),
        (NotImplementedError, "config", {"config": object()}),
    ],
)
def test_bad_input(error: type[Exception], match: str, changed: dict) -> None:
    raises(error, match, **changed)


def test_a_length_that_is_no_int_is_not_read() -> None:
    q, k, v = make(Target("cpu", "cpu", torch.float32), 40, 40)
    cuts = int32((0, 9, 40))
    want = attention_varlen(q, k, v, cuts)
    for longest in (torch.tensor(3), torch.tensor(40, device="meta"), None, 31, 1000):
        assert torch.equal(attention_varlen(q, k, v, cuts, max_seqlen_q=longest, max_seqlen_k=longest), want)


# ---------------------------------------------------------------------------------------------------------------------
# On a GPU


GPU = Target("sm90", "cuda", torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("inner", INNER, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("used", [None, USED], ids=["whole", "used"])
def test_every_kernel(inner: MaskCase, dtype: torch.dtype, dim: int, used: tuple[int, ...] | None) -> None:
    target = Target("sm90", "cuda", dtype)
    q, k, v = make(target, 320, 310, dim=dim, dim_v=dim)
    case = Sequences("varlen", inner=inner, q_cuts=Q_CUTS, kv_cuts=KV_CUTS, used=used)
    run_and_check(target, q, k, v, case)
    run_and_check(target, q, k, v, case, Options(slopes=torch.rand(4, device="cuda")))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [None, "sm90", "torch"])
@pytest.mark.parametrize("inner", INNER, ids=str)
def test_the_host_never_waits(backend: str | None, inner: MaskCase) -> None:
    q, k, v = make(GPU, 300, 300)
    offsets = offsets_of(Sequences("varlen", q_cuts=Q_CUTS, kv_cuts=KV_CUTS, used=USED), "cuda")
    mask = inner.build("cuda")

    def call() -> None:
        longest = torch.tensor(3, device="meta")
        attention_varlen(q, k, v, mask=mask, backend=backend, max_seqlen_q=150, max_seqlen_k=longest, **offsets)

    call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("inner", [CAUSAL, MaskCase("window", left=20, right=5, keep=3)], ids=str)
@pytest.mark.parametrize("with_used", [False, True])
def test_case_30_captured_with_other_lengths(inner: MaskCase, with_used: bool) -> None:
    q, k, v = make(GPU, 1000, 1000)
    held = {"cu_seqlens_q": int32((0, 200, 300, 500), "cuda"), "cu_seqlens_k": int32((0, 100, 300, 500), "cuda")}
    if with_used:
        held["seqused_k"] = int32((100, 100, 100), "cuda")
    mask = inner.build("cuda")
    attention_varlen(q, k, v, mask=mask, **held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attention_varlen(q, k, v, mask=mask, return_lse=True, **held)
    for q_cuts, kv_cuts, used in (
        ((0, 10, 20, 30), (0, 10, 20, 30), (10, 1, 0)),
        ((0, 1, 999, 1000), (0, 500, 501, 1000), (3, 1, 499)),
        ((0, 0, 0, 0), (0, 1000, 1000, 1000), (1000, 0, 0)),
        ((0, 64, 128, 640), (0, 64, 128, 640), (64, 64, 512)),
    ):
        for name, values in zip(held, (q_cuts, kv_cuts, used), strict=False):
            held[name].copy_(int32(values))
        out.fill_(math.nan)
        graph.replay()
        case = Sequences("varlen", inner=inner, q_cuts=q_cuts, kv_cuts=kv_cuts, used=used if with_used else None)
        check(whole(out), lse[None], *map(whole, (q, k, v)), case)


@pytest.mark.gpu
def test_bad_values_on_the_device_pass_until_checked() -> None:
    q, k, v = make(GPU, 40, 30)
    good = {"cu_seqlens_q": (0, 9, 40), "cu_seqlens_k": (0, 9, 30), "seqused_k": (3, 21)}
    bad: list[tuple[str, tuple[int, ...], str]] = [
        ("cu_seqlens_q", (0, 41, 40), r"cu_seqlens_q\[2\]"),
        ("cu_seqlens_k", (0, 9, 2**31 - 1), "cu_seqlens_k: the last"),
        ("cu_seqlens_k", (-5, 9, 30), r"cu_seqlens_k\[0\]"),
        ("seqused_k", (3, 2**31 - 1), r"seqused_k\[1\]"),
        ("seqused_k", (-(2**31), 3), r"seqused_k\[0\]"),
    ]
    call: Callable[..., torch.Tensor] = attention_varlen
    for mask in (None, Causal(), Dense(), SlidingWindow(5, keep_first=2), PrefixLM(int32((3, 4), "cuda"))):
        for name, values, message in bad:
            given = {n: int32(x, "cuda") for n, x in {**good, name: values}.items()}
            assert call(q, k, v, mask=mask, **given).shape == (40, 4, 40)
            with flashmsa.check(True), pytest.raises(ValueError, match=message):
                call(q, k, v, mask=mask, **given)
        with flashmsa.check(True):
            call(q, k, v, mask=mask, **{n: int32(x, "cuda") for n, x in good.items()})
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_the_fallback_points_at_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashmsa.dispatch, "_warned", set())
    q, k, v = make(Target(None, "cuda", torch.float32), 40, 40)
    with pytest.warns(UserWarning, match="no kernel for float32") as caught:
        attention_varlen(q, k, v, int32((0, 9, 40), "cuda"))
    assert caught[0].filename == __file__
