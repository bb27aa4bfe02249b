"""``python -m flashmsa check``: every backend of this machine against the float64 reference, in a few seconds.

The rule is that of the tests: RMS and maximum error at most twice that of the composed operators in the same dtype,
nothing upcast, plus one unit in the last place of the largest reference value; lse to 1e-5 * max(1, |lse|).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .dispatch import dtype_name, machine_reason
from .masks import (
    BlockSparse,
    Causal,
    Dense,
    DilatedWindow,
    Document,
    HashBucket,
    Mask,
    PerSequence,
    PrefixLM,
    SlidingWindow,
)
from .ops import attention
from .reference import reference


@dataclass(frozen=True)
class Case:
    """Shapes, a mask and options. The lengths divide no tile, and heads are shared."""

    name: str
    mask: Mask
    len_q: int
    len_kv: int
    head_dim: int
    head_dim_v: int
    softcap: float = 0.0
    sinks: bool = False
    alibi: bool = False


def _int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _buckets(length: int, step: int) -> Tensor:
    return (torch.arange(length, dtype=torch.int32) * step % 7)[None, None]


def _blocks(rows: int, columns: int) -> Tensor:
    return (torch.arange(rows * columns) % 3 > 0).view(1, 1, rows, columns)


CASES = (
    Case("dense", Dense(), 200, 333, 64, 64),
    Case("causal", Causal(), 257, 257, 128, 128),
    Case("causal, more queries than keys", Causal(), 150, 70, 40, 72),
    Case("causal, top-left", Causal(align="top-left"), 129, 300, 256, 256),
    Case("window", SlidingWindow(40, 90), 300, 400, 64, 64),
    Case("causal window with a prefix", SlidingWindow(100, 0) & PrefixLM(50), 260, 260, 128, 128),
    Case("window with first keys", SlidingWindow(30, 0, keep_first=5), 260, 300, 64, 64),
    Case("a prefix for each batch", PrefixLM(_int32(3, 200)), 200, 300, 128, 64),
    Case("dilated window", DilatedWindow(20, 5, dilation=3), 259, 300, 64, 64),
    Case("hash buckets, causal", HashBucket(_buckets(200, 3), _buckets(300, 5), causal=True), 200, 300, 128, 128),
    Case("blocks", BlockSparse(_blocks(3, 5), (128, 64)), 300, 300, 256, 256),
    Case("blocks and a window", BlockSparse(_blocks(3, 3)) & SlidingWindow(150, 9), 300, 300, 64, 64),
    Case("dense bits", BlockSparse.from_dense(torch.arange(300 * 260).view(300, 260) % 7 > 2), 300, 260, 64, 64),
    Case("causal, values shorter than keys", Causal(), 200, 270, 192, 128),
    Case("causal window at another head dim", SlidingWindow(90, 0), 300, 400, 192, 192),
    Case("documents, one empty, a tail", Document([0, 1, 1, 100, 230]), 257, 257, 64, 128),
    Case("documents, causal", Document([0, 60, 61, 200], [0, 100, 160, 170], causal=True), 200, 170, 96, 96),
    Case(
        "documents with a window", Document([0, 60, 61, 200], [0, 100, 160, 170]) & SlidingWindow(40), 200, 170, 64, 64
    ),
    Case(
        "sequences, a window in each",
        PerSequence(SlidingWindow(20, 3), _int32(0, 90, 90, 190), _int32(0, 60, 70, 200), _int32(60, 3, 111)),
        200,
        210,
        64,
        64,
    ),
    Case("softcap and sinks", Causal(), 200, 260, 64, 64, softcap=2.0, sinks=True),
    Case("ALiBi", Dense(), 200, 260, 128, 128, alibi=True),
    Case("ALiBi and softcap over documents", Document([0, 60, 200], [0, 100, 260]), 200, 260, 64, 64, 3.0, alibi=True),
)


@dataclass(frozen=True)
class Target:
    backend: str
    device: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.backend} on {self.device}, {dtype_name(self.dtype)}"


def targets() -> Iterator[Target]:
    """What this machine can run. Not float64: the reference's own rounding is as large as the error it would judge."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield Target("cpu", "cpu", dtype)
    yield Target("torch", "cpu", torch.float32)
    if torch.cuda.is_available():
        yield Target("torch", "cuda", torch.bfloat16)
        if machine_reason(None) is None:
            yield Target("sm90", "cuda", torch.bfloat16)
            yield Target("sm90", "cuda", torch.float16)


def run() -> bool:
    """Prints a line for each backend, and one for each case that fails. Returns whether all passed."""
    passed = True
    for target in targets():
        faults = [f"    {case.name}: {fault}" for case in CASES if (fault := fault_of(target, case)) is not None]
        passed &= not faults
        print(f"{'FAILED' if faults else 'ok':<8}{target}: {len(CASES) - len(faults)} of {len(CASES)} cases")
        for fault in faults:
            print(fault)
    reason = machine_reason(None)
    if reason is not None:
        print(f"skipped sm90: {reason}")
    return passed


def fault_of(target: Target, case: Case) -> str | None:
    """What is wrong with a case on a backend; None where its errors lie within the rule."""
    generator = torch.Generator().manual_seed(0)

    def normal(heads: int, length: int, head_dim: int) -> Tensor:
        return torch.randn(2, heads, length, head_dim, generator=generator).to(target.device, target.dtype)

    q = normal(4, case.len_q, case.head_dim)
    k, v = normal(2, case.len_kv, case.head_dim), normal(2, case.len_kv, case.head_dim_v)
    mask = case.mask.to(target.device)
    some = torch.tensor([0.5, -1.0, 0.1, 0.0], device=target.device)
    options = {"softcap": case.softcap, "sinks": some if case.sinks else None}
    options["alibi_slopes"] = some.abs() if case.alibi else None
    out, lse = attention(q, k, v, mask, return_lse=True, backend=target.backend, **options)
    expected, expected_lse = reference(q, k, v, mask, return_lse=True, **options)
    return _error_fault(out, expected, _composed(q, k, v, mask, **options)) or _lse_fault(lse, expected_lse)


def _composed(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, softcap: float, sinks: Tensor | None, alibi_slopes: Tensor | None
) -> Tensor:
    """The same from torch's operators in q's dtype: how far off one may be."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    s = (q @ k.mT) / math.sqrt(q.shape[3])
    if softcap > 0.0:
        s = softcap * torch.tanh(s / softcap)
    if alibi_slopes is not None:
        p = torch.arange(q.shape[2], device=q.device) + (k.shape[2] - q.shape[2])
        distance = (p[:, None] - torch.arange(k.shape[2], device=q.device)).abs()
        s = s - alibi_slopes.to(s.dtype)[:, None, None] * distance.to(s.dtype)
    s = s.masked_fill(~mask.to_dense(q.shape[2], k.shape[2], q.device), -math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.to(s.dtype)[:, None, None].expand(*s.shape[:3], 1)], dim=-1)
    return torch.nan_to_num(torch.softmax(s, dim=-1)[..., : k.shape[2]]) @ v


def _error_fault(out: Tensor, expected: Tensor, composed: Tensor) -> str | None:
    largest = expected.abs().max().item()
    ulp = torch.finfo(out.dtype).eps * 2.0 ** math.floor(math.log2(largest))
    for name, measure in (("maximum", torch.amax), ("RMS", lambda x: x.square().mean().sqrt())):
        error = measure((out.double() - expected).abs()).item()
        allowed = 2.0 * measure((composed.double() - expected).abs()).item() + ulp
        if not error <= allowed:
            return f"{name} error {error:.3g}, at most {allowed:.3g} is allowed"
    return None


def _lse_fault(lse: Tensor, expected: Tensor) -> str | None:
    finite = expected.isfinite()
    if not torch.equal(lse.isneginf(), ~finite):
        return "lse is not -inf for exactly the rows that see nothing"
    error = ((lse.double() - expected).abs() / expected.abs().clamp(min=1.0))[finite].max().item()
    return None if error <= 1e-5 else f"lse error {error:.3g}, at most 1e-5 is allowed"
