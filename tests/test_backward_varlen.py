"""Gradients of attention_varlen and merge_states: packed sequences, and key sets joined."""

from __future__ import annotations

import math

import pytest
import torch
from gradients import (
    Gradients,
    assert_gradients,
    check_gradients,
    composed_gradients,
    expected_gradients,
    extra_limit,
    grad_like,
    gradients_of,
    magnitudes,
)
from helpers import (
    CAUSAL,
    DENSE,
    ONE_EACH,
    PLAIN,
    TOP_LEFT,
    MaskCase,
    Options,
    Prefixes,
    Sequences,
    Target,
    assert_within_rule,
    both,
    largest,
    make_qkv,
    poisoned_allocations,
    targets,
    ulp,
)

import flashmsa

FEW = pytest.mark.parametrize("target", targets(auto=True, dtypes=(torch.float32, torch.bfloat16)))
# Either side of a sequence may be empty.
Q_CUTS, KV_CUTS, USED = (0, 0, 150, 150, 300), (0, 100, 100, 200, 300), (40, 0, 100, 3)
INNER = [
    DENSE,
    CAUSAL,
    TOP_LEFT,
    MaskCase("window", left=5, right=3),
    MaskCase("window-top-left", left=20, right=0, keep=3),
    MaskCase("prefix", prefix=30),
    Prefixes("prefix", prefixes=(3, 70, 0, 200)),
    both(MaskCase("prefix", prefix=9), MaskCase("window", left=30, right=10)),
]


def int32(values, device: str | torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def run_varlen(target: Target, q, k, v, case: Sequences, d_out, d_lse, options: Options = PLAIN, **kwargs) -> Gradients:
    """As for a whole call, from (1, H, T, D): attention_varlen takes the same memory as (T, H, D)."""
    rest = {name: value for name, value in options.call().items() if name != "sinks"}
    named = {"cu_seqlens_q": case.q_cuts, "cu_seqlens_k": case.kv_cuts, "seqused_k": case.used}
    rest |= {name: None if x is None else int32(x, q.device) for name, x in named.items()}
    mask = case.inner.build(q.device)

    def call(q, k, v, sinks):
        packed = (x[0].transpose(0, 1) for x in (q, k, v))
        given = {**rest, "mask": mask, "sinks": sinks, "backend": target.backend, "return_lse": True, **kwargs}
        out, lse = flashmsa.attention_varlen(*packed, **given)
        return out.transpose(0, 1)[None], lse[None]

    return gradients_of(call, (q, k, v), options.sinks, d_out, d_lse)


@FEW
@pytest.mark.parametrize("inner", INNER, ids=str)
@pytest.mark.parametrize("used", [None, USED], ids=["whole", "used"])
def test_every_mask(target: Target, inner: MaskCase, used: tuple[int, ...] | None) -> None:
    """Cases 4 and 6: empty sequences; NaN past the last one, and in keys past those in use; every option."""
    q, k, v = make_qkv(target, 1, (4, 2), 320, 310, 64, 40)
    case = Sequences("varlen", inner=inner, q_cuts=Q_CUTS, kv_cuts=KV_CUTS, used=used)
    d_out, d_lse = grad_like(q, v)
    for x in (q, k, v, d_out, d_lse):
        x[:, :, 300:] = math.nan
    for _, keys, _ in case.each():
        stop = next(cut for cut in KV_CUTS if (cut >= keys.stop and cut > keys.start) or cut == KV_CUTS[-1])
        k[:, :, keys.stop : stop], v[:, :, keys.stop : stop] = math.nan, math.inf
    clean = [torch.nan_to_num(x, nan=0.0, posinf=0.0) for x in (q, k, v, d_out, d_lse)]
    sinks, slopes = torch.randn(4, device=q.device), torch.rand(4, device=q.device)
    for options in (PLAIN, Options(softcap=2.0, sinks=sinks, slopes=slopes)):
        # With sinks the lse of a row past the end is its sink, which dlse reaches.
        given_lse = d_lse if options.sinks is None else clean[4]
        with poisoned_allocations():
            found = run_varlen(target, q, k, v, case, d_out, given_lse, options)
        wide = [x.double() for x in clean[:3]]
        expected = composed_gradients(*wide, case, clean[3], clean[4], options)
        # A row without a key has its sink for lse, so that dlse is its sink's.
        if options.sinks is not None:
            seen = case.allowed(320, 310, device=q.device).any(-1)
            expected["dsinks"] = expected["dsinks"] + (clean[4] * ~seen[:, None]).sum((0, 2))
        assert_gradients(found, expected, *clean[:3], case, clean[3], clean[4], options)
        for name in ("dq", "dk", "dv"):
            assert not found[name][:, :, 300:].count_nonzero(), name
        assert not found["dq"][:, :, :150].count_nonzero() and not found["dk"][:, :, :100].count_nonzero()


@pytest.mark.parametrize("target", ONE_EACH)
@pytest.mark.parametrize("causal", [False, True])
def test_same_as_documents(target: Target, causal: bool) -> None:
    """The gradients of a call with the same cuts as a mask, to the bit where nothing else runs."""
    q, k, v = make_qkv(target, 1, (4, 2), 200, 200, 64)
    d_out, d_lse = grad_like(q, v)
    cuts = (0, 37, 37, 90, 200)
    case = Sequences("varlen", inner=CAUSAL if causal else DENSE, q_cuts=cuts)
    found = run_varlen(target, q, k, v, case, d_out, d_lse, deterministic=True)
    document = MaskCase("document-causal" if causal else "document", (cuts,))
    check_gradients(found, q, k, v, document, d_out, d_lse)
    again = run_varlen(target, q, k, v, case, d_out, d_lse, deterministic=True)
    assert all(torch.equal(found[name], want) for name, want in again.items())


# ---------------------------------------------------------------------------------------------------------------------
# merge_states


@FEW
@pytest.mark.parametrize("split", [0, 1, 64, 99, 100], ids=lambda x: f"split at {x}")
@pytest.mark.parametrize("sinks", [False, True])
def test_case_35_merged(target: Target, split: int, sinks: bool) -> None:
    """The gradients of attention over all keys from two calls over a part of them each, one of them empty too."""
    q, k, v = make_qkv(target, 2, (4, 2), 33, 100, 64)
    d_out, d_lse = grad_like(q, v)
    options = Options(sinks=torch.randn(4, device=q.device)) if sinks else PLAIN

    def call(q, k, v, sinks):
        parts = []
        for n, part in enumerate((slice(split), slice(split, None))):
            given = {"sinks": sinks if n == 0 else None, "backend": target.backend, "return_lse": True}
            parts += flashmsa.attention(q, k[:, :, part], v[:, :, part], **given)
        return flashmsa.merge_states(*parts)

    found = gradients_of(call, (q, k, v), options.sinks, d_out, d_lse)
    expected = expected_gradients(q, k, v, DENSE, d_out, d_lse, options)
    yardstick = composed_gradients(q, k, v, DENSE, d_out, d_lse, options)
    sums = magnitudes((q, k, v, d_out), DENSE, d_lse, options, None, 1.0)
    for name, want in expected.items():
        if name == "lse":
            continue
        # Each call by the rule, and the merge: its two results are rounded to the dtype, and so is the sum of theirs.
        slack = ulp(largest(want), found[name].dtype) + extra_limit(name, expected, sums, q, k, v)[0]
        limit = 3.0 * (2.0 * largest(yardstick[name].double() - want) + slack)
        assert_within_rule(found[name], want, torch.zeros_like(want), yardstick[name], f"{name}", limit)


@pytest.mark.parametrize("target", ONE_EACH)
def test_merged_rows_without_keys(target: Target) -> None:
    """Rows that see nothing on one side get the other side's gradients; on both sides, none: NaN nowhere."""
    q, k, v = make_qkv(target, 1, 2, 60, 60, 64)
    masks = [
        flashmsa.Document(*(int32(x, q.device) for x in cuts)) for cuts in (([0, 10], [0, 40]), ([0, 20], [0, 20]))
    ]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    parts = []
    for mask, keys in zip(masks, (slice(40), slice(40, None)), strict=True):
        given = {"backend": target.backend, "return_lse": True}
        parts += flashmsa.attention(leaves[0], leaves[1][:, :, keys], leaves[2][:, :, keys], mask, **given)
    out, lse = flashmsa.merge_states(*parts)
    d_out = torch.randn_like(out)
    found = torch.autograd.grad((out, lse), leaves, (d_out, torch.ones_like(lse)))
    assert all(x.isfinite().all() for x in found)
    assert not found[0][:, :, 20:].count_nonzero()
    # Rows 10 .. 19 see the second side alone.
    alone = [q[:, :, 10:20], k[:, :, 40:], v[:, :, 40:]]
    again = [x.clone().requires_grad_() for x in alone]
    results = flashmsa.attention(*again, backend=target.backend, return_lse=True)
    wanted = torch.autograd.grad(results, again, (d_out[:, :, 10:20], torch.ones_like(results[1])))
    torch.testing.assert_close(found[0][:, :, 10:20], wanted[0], rtol=2e-2, atol=4 * torch.finfo(target.dtype).eps)
