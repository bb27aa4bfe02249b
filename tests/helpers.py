"""What the contract tests share: where they run, masks with their definitions, the oracle, and the tolerance rule.

Nothing here asks flashmsa for an answer. A mask is written down again from its definition, as a test on every
(query, key) pair, and the expected result is computed from that in float64.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import flashmsa

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


# ---------------------------------------------------------------------------------------------------------------------
# Where a test runs


@dataclass(frozen=True)
class Target:
    """A backend (None: let the dispatcher choose), the device of its tensors, and their dtype."""

    backend: str | None
    device: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.backend or 'auto'}@{self.device}-{NAMES[self.dtype]}"

    @property
    def native(self) -> bool:
        return self.backend in ("cpu", "sm90")


def targets(
    *,
    native: bool = True,
    composed: bool = True,
    auto: bool = False,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16, torch.float64),
) -> list:
    """pytest parameters: the native backends, the composed one (`torch`), and the dispatcher's own choice."""
    halves = (torch.bfloat16, torch.float16)
    found = []
    if native:
        found += [Target("cpu", "cpu", d) for d in dtypes] + [Target("sm90", "cuda", d) for d in dtypes if d in halves]
    if composed:
        # The same code for every dtype; float64, whose oracle is slow, has tests of its own.
        found += [Target("torch", "cpu", d) for d in dtypes if d != torch.float64]
        found += [Target("torch", "cuda", d) for d in dtypes if d in (torch.bfloat16, torch.float32)]
    if auto:
        found += [Target(None, "cuda", d) for d in dtypes if d in halves]
    return [pytest.param(t, id=str(t), marks=[pytest.mark.gpu] if t.device == "cuda" else []) for t in found]


# One dtype per backend, for what does not depend on the dtype.
ONE_EACH = [
    pytest.param(Target("cpu", "cpu", torch.float32), id="cpu@cpu"),
    pytest.param(Target("torch", "cpu", torch.float32), id="torch@cpu"),
    pytest.param(Target("sm90", "cuda", torch.bfloat16), id="sm90@cuda", marks=pytest.mark.gpu),
    pytest.param(Target("torch", "cuda", torch.bfloat16), id="torch@cuda", marks=pytest.mark.gpu),
    pytest.param(Target(None, "cuda", torch.bfloat16), id="auto@cuda", marks=pytest.mark.gpu),
]
NATIVE_ONE_EACH = [ONE_EACH[0], ONE_EACH[2]]


# ---------------------------------------------------------------------------------------------------------------------
# Masks and their definitions

Offsets = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class MaskCase:
    """A mask as data: what builds it, and which pairs it allows by definition.

    kind: dense, causal, top-left, window, window-top-left, prefix, prefix-window, document or document-causal. The
    offsets hold one row shared by the batch, or, where `batched`, one row per batch. kv_offsets None: the same offsets
    serve both sides.
    """

    kind: str
    q_offsets: Offsets = ()
    kv_offsets: Offsets | None = None
    batched: bool = False
    left: int = 0  # the windows' bounds and the prefix
    right: int = 0
    prefix: int = 0

    def __str__(self) -> str:
        """Short enough for a test's name."""
        parts = [self.kind]
        if "window" in self.kind or "prefix" in self.kind:
            parts.append(f"{self.left},{self.right},{self.prefix}")
        for offsets in (self.q_offsets, self.kv_offsets or ()):
            parts += [",".join(map(str, cuts if len(cuts) < 12 else (*cuts[:10], "...", cuts[-1]))) for cuts in offsets]
        return " ".join(parts)

    def build(self, device: str | torch.device = "cpu"):
        """The mask object of the package, its offsets on `device`."""
        if self.kind == "dense":
            return None
        if self.kind == "causal":
            return flashmsa.Causal()
        if self.kind == "top-left":
            return flashmsa.Causal(align="top-left")
        if self.kind.startswith("window"):
            align = "top-left" if self.kind == "window-top-left" else "bottom-right"
            return flashmsa.SlidingWindow(self.left, self.right, align=align)
        if self.kind.startswith("prefix"):
            prefix = flashmsa.PrefixLM(self.prefix)
            return prefix & flashmsa.SlidingWindow(self.left, self.right) if self.kind == "prefix-window" else prefix
        return flashmsa.Document(*self.tensors(device), causal=self.kind == "document-causal")

    def tensors(self, device: str | torch.device = "cpu") -> tuple[torch.Tensor, torch.Tensor | None]:
        """The offsets as int32 tensors: (n + 1,) or (B, n + 1)."""

        def tensor(offsets: Offsets | None) -> torch.Tensor | None:
            if offsets is None:
                return None
            return torch.tensor(offsets if self.batched else offsets[0], dtype=torch.int32, device=device)

        return tensor(self.q_offsets), tensor(self.kv_offsets)

    def allowed(
        self, len_q: int, len_kv: int, rows: torch.Tensor | None = None, device: str | torch.device = "cpu"
    ) -> torch.Tensor:
        """(B or 1, rows, len_kv) bool: may query i see key j? Straight from the definitions."""
        i = torch.arange(len_q, device=device) if rows is None else rows.to(device)
        i, j = i[:, None], torch.arange(len_kv, device=device)[None, :]
        if self.kind == "dense":
            return torch.ones(1, i.shape[0], len_kv, dtype=torch.bool, device=device)
        if self.kind == "causal":
            return (j <= i + len_kv - len_q)[None]
        if self.kind == "top-left":
            return (j <= i)[None]
        p = i if self.kind == "window-top-left" else i + len_kv - len_q
        if self.kind.startswith("window"):
            return ((j >= p - self.left) & (j <= p + self.right))[None]
        if self.kind.startswith("prefix"):
            seen = (j < self.prefix) | (j <= p)
            if self.kind == "prefix-window":
                seen &= (j >= p - self.left) & (j <= p + self.right)
            return seen[None]
        found = []
        for q_cuts, kv_cuts in zip(self.q_offsets, self.kv_offsets or self.q_offsets, strict=True):
            seen = torch.zeros(i.shape[0], len_kv, dtype=torch.bool, device=device)
            for d in range(len(q_cuts) - 1):
                inside = (i >= q_cuts[d]) & (i < q_cuts[d + 1]) & (j >= kv_cuts[d]) & (j < kv_cuts[d + 1])
                if self.kind == "document-causal":
                    # Counted back from the document's end, a key stands no later than its query.
                    inside &= kv_cuts[d + 1] - j >= q_cuts[d + 1] - i
                seen |= inside
            found.append(seen)
        return torch.stack(found)


DENSE, CAUSAL, TOP_LEFT = MaskCase("dense"), MaskCase("causal"), MaskCase("top-left")


def document(*offsets: int, kv: tuple[int, ...] | None = None, causal: bool = False) -> MaskCase:
    """Documents cut at `offsets` (and keys at `kv`), shared by the batch."""
    return MaskCase("document-causal" if causal else "document", (offsets,), None if kv is None else (kv,))


def random_cuts(rng: random.Random, length: int, documents: int) -> tuple[int, ...]:
    """documents + 1 offsets from 0 to `length`; some documents come out empty, some are one token long."""
    inner = sorted(rng.randint(0, length) for _ in range(documents - 1))
    if len(inner) >= 3:
        inner[1] = inner[0]
        inner[-1] = min(inner[-2] + 1, length)
    return (0, *inner, length)


FAMILIES = (
    "dense",
    "causal",
    "top-left",
    "window",
    "window-top-left",
    "prefix",
    "prefix-window",
    "document",
    "document-causal",
    "document-cross",
    "document-cross-causal",
    "document-batched",
    "document-batched-causal",
    "document-short",
    "document-short-causal",
)


def mask_for(family: str, batch: int, len_q: int, len_kv: int, seed: int = 0, documents: int = 5) -> MaskCase:
    """One mask of a family for these lengths.

    document: one set of cuts for both sides. cross: its own cuts for keys, empty documents on either side. batched:
    other cuts in every batch. short: the last cut lies before the end of both tensors.
    """
    rng = random.Random(f"{family} {batch} {len_q} {len_kv} {seed}")
    if "window" in family or "prefix" in family:
        longest = max(len_q, len_kv) + 2
        left, right = (rng.choice([0, rng.randint(0, 8), rng.randint(0, longest), longest]) for _ in range(2))
        return MaskCase(family, left=left, right=right, prefix=rng.choice([0, 1, rng.randint(0, longest), longest]))
    if not family.startswith("document"):
        return MaskCase(family)
    kind = "document-causal" if family.endswith("causal") else "document"
    short = min(len_q, len_kv)
    if "cross" in family:
        q_cuts, kv_cuts = random_cuts(rng, len_q, documents), random_cuts(rng, len_kv, documents)
        return MaskCase(kind, (q_cuts,), (kv_cuts,))
    if "batched" in family:
        q_cuts = tuple(random_cuts(rng, len_q, documents) for _ in range(batch))
        kv_cuts = tuple(random_cuts(rng, len_kv, documents) for _ in range(batch))
        return MaskCase(kind, q_cuts, kv_cuts, batched=True)
    if "short" in family:
        short = (2 * short) // 3
    return MaskCase(kind, (random_cuts(rng, short, documents),))


# ---------------------------------------------------------------------------------------------------------------------
# Inputs and calls


def make_qkv(
    target: Target,
    batch: int,
    heads: int | tuple[int, int],
    len_q: int,
    len_kv: int,
    dim: int,
    dim_v: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Standard normal q, k, v; `heads` is one number or (query heads, kv heads)."""
    heads_q, heads_kv = heads if isinstance(heads, tuple) else (heads, heads)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=target.device, dtype=torch.float32).to(target.dtype)

    return (
        normal(batch, heads_q, len_q, dim),
        normal(batch, heads_kv, len_kv, dim),
        normal(batch, heads_kv, len_kv, dim if dim_v is None else dim_v),
    )


def poisoned_out(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A contiguous output full of NaN: an element that nothing writes shows."""
    return torch.full((*q.shape[:3], v.shape[3]), math.nan, dtype=q.dtype, device=q.device)


def run(
    target: Target, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: MaskCase = DENSE, **kwargs
) -> tuple[torch.Tensor, torch.Tensor]:
    """attention() with lse into a poisoned output."""
    out = poisoned_out(q, v)
    got, lse = flashmsa.attention(
        q, k, v, mask=mask.build(q.device), backend=target.backend, return_lse=True, out=out, **kwargs
    )
    assert got.data_ptr() == out.data_ptr() and got.shape == out.shape, "out= must be what comes back"
    assert lse.shape == q.shape[:3] and lse.dtype == torch.float32 and lse.device == q.device
    return got, lse


@contextlib.contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Inside, torch fills every new tensor with NaN: also lse and outputs that the call allocates itself."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def copies_in(call: Callable[[], object]) -> int:
    """How many tensors `call` copies, counted at torch's own operators."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return sum(event.count for event in profile.key_averages() if event.key == "aten::copy_")


# ---------------------------------------------------------------------------------------------------------------------
# The oracle


def _heads_like(q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Query head h uses kv head h // (Hq / Hkv)."""
    group = q.shape[1] // x.shape[1]
    return x[:, torch.arange(q.shape[1], device=x.device) // group]


def oracle(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """softmax(scale q k^T over the allowed keys) v by the rules, as (out, rest, lse) in float64.

    `allowed` is (B or 1, len_q, len_kv). The result is out + rest: for float64 inputs it is computed in extended
    precision, since float64 cannot judge itself, and `rest` holds what float64 cannot; else rest is 0.
    A visible NaN gives NaN; a masked value of any kind does not count; a row without a visible finite logit is 0, -inf.
    """
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    if q.dtype == torch.float64:
        return _oracle_extended(q, k, v, allowed, scale)
    k, v = _heads_like(q, k).double(), _heads_like(q, v).double()
    bad_v = ~v.isfinite()
    clean_v = v.masked_fill(bad_v, 0.0)
    outs, lses = [], []
    # Chunks of rows keep the logits within 1 GiB.
    chunk = max(1, 2**27 // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    for begin in range(0, max(q.shape[2], 1), chunk):
        seen = allowed[:, None, begin : begin + chunk]
        s = (q[:, :, begin : begin + chunk].double() @ k.mT * scale).masked_fill(~seen, -math.inf)
        top = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:3], 1), -math.inf)
        top = top.masked_fill(top == -math.inf, 0.0)
        p = (s - top).exp()
        total = p.sum(-1, keepdim=True)
        out = (p @ clean_v / total).masked_fill(total == 0, 0.0)
        if bad_v.any():
            assert not (v.isinf() & (seen.any(dim=(1, 2))[:, None, :, None])).any(), "no oracle for a visible inf in v"
            out = out.masked_fill(seen.double() @ bad_v.double() > 0, math.nan)
        outs.append(out)
        lses.append((top + total.log())[..., 0])
    out, lse = torch.cat(outs, 2), torch.cat(lses, 2)
    return out, torch.zeros_like(out), lse


def _oracle_extended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The oracle in numpy's long double (64 or more bits of fraction), for float64 inputs; finite values only."""
    device = q.device
    k, v = _heads_like(q, k), _heads_like(q, v)
    q_, k_, v_ = (x.detach().cpu().numpy().astype(np.longdouble) for x in (q, k, v))
    # A masked value does not count: where no query sees a key it may be anything.
    dead = ~allowed.any(dim=1).cpu().numpy()[:, None, :, None]
    k_, v_ = np.where(dead, 0, k_), np.where(dead, 0, v_)
    with np.errstate(invalid="ignore", divide="ignore"):
        s = np.where(allowed.cpu().numpy()[:, None], q_ @ k_.swapaxes(-1, -2) * np.longdouble(scale), -np.inf)
        top = s.max(-1, keepdims=True, initial=-np.inf)
        top = np.where(top == -np.inf, 0, top)
        p = np.exp(s - top)
        total = p.sum(-1, keepdims=True)
        bad_v = ~np.isfinite(v_)
        out = np.where(total == 0, 0, p @ np.where(bad_v, 0, v_) / total)
        if bad_v.any():
            assert not (np.isinf(v_)).any(), "no oracle for a visible inf in v"
            out = np.where(allowed.cpu().numpy()[:, None].astype(float) @ bad_v > 0, np.nan, out)
        lse = (top + np.log(total))[..., 0]
        high = out.astype(np.float64)
        rest = (out - high).astype(np.float64)
    return tuple(torch.from_numpy(np.ascontiguousarray(x)).to(device) for x in (high, rest, lse.astype(np.float64)))


def composed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """The same from torch's operators in q's own dtype, nothing upcast: the yardstick of the tolerance rule."""
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    k, v = _heads_like(q, k), _heads_like(q, v)
    s = (torch.matmul(q, k.mT) * scale).masked_fill(~allowed[:, None], -math.inf)
    p = torch.softmax(s, dim=-1).masked_fill(~allowed.any(-1)[:, None, :, None], 0.0)
    return torch.matmul(p, v)


# ---------------------------------------------------------------------------------------------------------------------
# The tolerance rule


def ulp(value: float, dtype: torch.dtype) -> float:
    """The distance from |value| to the next larger number of dtype."""
    info = torch.finfo(dtype)
    value = abs(value)
    if value < info.tiny:
        return info.tiny * info.eps
    return info.eps * 2.0 ** math.floor(math.log2(value))


def rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item() if x.numel() else 0.0


def largest(x: torch.Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def assert_within_rule(
    got: torch.Tensor,
    expected: torch.Tensor,
    rest: torch.Tensor,
    yardstick: torch.Tensor,
    note: object = "",
    limit: float | None = None,
) -> None:
    """RMS and maximum error at most twice the yardstick's, plus one ulp of the largest expected value.

    expected + rest is the exact answer in float64; NaN must stand in the same places; all tensors of one shape.
    A `limit` given takes the place of the rule: a maximum error known from elsewhere.
    """
    assert torch.equal(got.isnan(), expected.isnan()), (
        f"{note}: NaN in {int(got.isnan().sum())} elements, expected in {int(expected.isnan().sum())}; first "
        f"difference at {(got.isnan() != expected.isnan()).nonzero()[0].tolist()} of {list(got.shape)}"
    )
    counted = ~expected.isnan() & expected.isfinite()
    error = ((got.double() - expected) - rest).masked_fill(~counted, 0.0)
    base = ((yardstick.double() - expected) - rest).masked_fill(~counted | ~yardstick.isfinite(), 0.0)
    slack = ulp(largest(expected.masked_fill(~counted, 0.0)), got.dtype)
    # NOTE: the maximum over few elements is a draw of chance. Of n errors of deviation s it is about s sqrt(2 ln n):
    # 4 s for 3000. Where the yardstick's few elements happened to err by less, it counts as four times its RMS.
    yardsticks = {"maximum": max(largest(base), 4.0 * rms(base) if base.numel() < 3000 else 0.0), "rms": rms(base)}
    for name, measure in (("maximum", largest), ("rms", rms)):
        found, most = measure(error), 2.0 * yardsticks[name] + slack if limit is None else limit
        if not found <= most:
            where = np.unravel_index(int(error.abs().argmax()), tuple(error.shape))
            raise AssertionError(
                f"{note}: {name} error {found:.4g} over the limit {most:.4g} "
                f"(composed operators {yardsticks[name]:.4g}, one ulp {slack:.4g}); "
                f"worst at {[int(w) for w in where]} of {list(got.shape)}: "
                f"{got[where].item()!r}, expected {expected[where].item()!r}"
            )


def limit_of_whole(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: MaskCase = DENSE, *, scale: float | None = None
) -> float:
    """The rule's limit on the maximum error of a call.

    The rule speaks of whole results: in a row or two the composed operators may happen to be exact. A part is judged by
    the limit of its whole.
    """
    allowed = mask.allowed(q.shape[2], k.shape[2], device=q.device)
    q, k, v = (torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0) for x in (q, k, v))
    expected, rest, _ = oracle(q, k, v, allowed, scale)
    base = (composed(q, k, v, allowed, scale).double() - expected) - rest
    return 2.0 * largest(base) + ulp(largest(expected), q.dtype)


def worst_case(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None) -> float:
    """What rounding can do at most, for tests that search for the worst input: there the rule's yardstick is by chance.

    Sums of n terms err by at most n u of the sum of magnitudes, u being the unit of the arithmetic (fp32 for half
    types). An error e of every logit changes a weight by a factor within exp(2 e); the rest is the weights' own sum,
    exp and division, and the result's last rounding.
    """
    unit = torch.finfo(torch.promote_types(q.dtype, torch.float32)).eps
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else abs(scale)
    logits = scale * largest(q.double().abs() @ _heads_like(q, k).double().abs().mT)
    in_logits = (q.shape[-1] + 4) * unit * logits
    return (2.0 * in_logits + (k.shape[2] + 16) * unit + torch.finfo(q.dtype).eps) * largest(v.double())


def assert_lse(got: torch.Tensor, expected: torch.Tensor, note: object = "") -> None:
    """|error| <= 1e-5 max(1, |lse|); -inf and NaN in exactly the expected places."""
    got = got.double()
    for name, same in (("NaN", torch.isnan), ("-inf", torch.isneginf), ("+inf", torch.isposinf)):
        differs = same(got) != same(expected)
        assert not differs.any(), (
            f"{note}: lse is {name} or not at {differs.nonzero()[0].tolist()} of {list(got.shape)}: "
            f"{got[differs][0].item()}, expected {expected[differs][0].item()}"
        )
    finite = expected.isfinite()
    error = (got[finite] - expected[finite]).abs() / expected[finite].abs().clamp(min=1.0)
    assert largest(error) <= 1e-5, f"{note}: lse error {largest(error):.3g} over 1e-5 max(1, |lse|)"


def check(
    got: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: MaskCase = DENSE,
    *,
    scale: float | None = None,
    rows: torch.Tensor | None = None,
    note: object = "",
    limit: float | None = None,
) -> None:
    """got and lse against the oracle by the tolerance rule; `rows` picks the query rows that are compared.

    A `limit` is the maximum error allowed instead: limit_of_whole for a part of a result, or worst_case.
    """
    allowed = mask.allowed(q.shape[2], k.shape[2], rows, q.device)
    if rows is not None:
        q, got = q[:, :, rows], got[:, :, rows]
        lse = None if lse is None else lse[:, :, rows]
    note = note or f"{mask} q {tuple(q.shape)} k {tuple(k.shape)}"
    assert got.dtype == q.dtype, f"{note}: out is {got.dtype}, q is {q.dtype}"
    expected, rest, expected_lse = oracle(q, k, v, allowed, scale)
    assert got.shape == expected.shape, f"{note}: out has shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    empty = expected_lse.isneginf()
    assert not got[empty].count_nonzero(), f"{note}: a row without a visible key is not 0"
    clean = (torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0) for x in (q, k, v))
    assert_within_rule(got, expected, rest, composed(*clean, allowed, scale), note, limit)
    if lse is not None:
        assert_lse(lse, expected_lse, note)


def run_and_check(
    target: Target,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: MaskCase = DENSE,
    *,
    rows: torch.Tensor | None = None,
    note: object = "",
    limit: float | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """run(), then check()."""
    out, lse = run(target, q, k, v, mask, **kwargs)
    check(out, lse, q, k, v, mask, scale=kwargs.get("scale"), rows=rows, note=note, limit=limit)
    return out, lse
