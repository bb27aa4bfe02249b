"""flashmsa.nn.SelfAttention and the rotary embedding, against plain torch in float64."""

from __future__ import annotations

import copy
import itertools
import math
import re

import pytest
import torch
from helpers import ALL_FAMILIES, ONE_EACH, Target, largest, mask_for, rms

import flashmsa
from flashmsa import Causal, Document, SlidingWindow, apply_rope, rope_tables
from flashmsa.nn import SelfAttention

EACH = pytest.mark.parametrize("target", ONE_EACH)
CPU_ONE_EACH = pytest.mark.parametrize("target", ONE_EACH[:2])


# ---------------------------------------------------------------------------------------------------------------------
# Rotary embedding


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("turned", [2, 16, 24])
def test_rope_turns_pairs_as_complex_numbers(interleaved: bool, turned: int) -> None:
    x = torch.randn(2, 3, 50, 24, dtype=torch.float64)
    found = apply_rope(x, rope_tables(50, turned, base=500.0, interleaved=interleaved))
    first = x[..., :turned:2] if interleaved else x[..., : turned // 2]
    second = x[..., 1:turned:2] if interleaved else x[..., turned // 2 : turned]
    frequency = torch.tensor([500.0 ** (-2.0 * i / turned) for i in range(turned // 2)], dtype=torch.float64)
    angle = torch.arange(50, dtype=torch.float64)[:, None] * frequency
    z = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)
    wanted = torch.stack([z.real, z.imag], -1).flatten(-2) if interleaved else torch.cat([z.real, z.imag], -1)
    torch.testing.assert_close(found[..., :turned], wanted, rtol=0, atol=1e-6)  # tables in float32
    assert torch.equal(found[..., turned:], x[..., turned:])


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_logits_depend_on_distances_alone(interleaved: bool) -> None:
    tables = rope_tables(200, 32, interleaved=interleaved)
    q, k = torch.randn(2, 1, 1, 40, 32, dtype=torch.float64)
    logits = [apply_rope(q, tables, p) @ apply_rope(k, tables, p).mT for p in (0, 7, 150)]
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0], rtol=0, atol=1e-4)
    assert not torch.allclose(apply_rope(q, tables, 3) @ apply_rope(k, tables, 0).mT, logits[0], atol=1e-2)


def test_rope_positions() -> None:
    """An int, one row for all, one row for each batch; the length in another place; dtypes."""
    tables = rope_tables(100, 16)
    x = torch.randn(2, 3, 10, 24)
    whole = apply_rope(x, tables, 5)
    row = torch.arange(5, 15)
    assert torch.equal(apply_rope(x, tables, row), whole)
    assert torch.equal(apply_rope(x, tables, row.expand(2, -1)), whole)
    assert torch.equal(apply_rope(x.transpose(1, 2), tables, 5, length_dim=1).transpose(1, 2), whole)
    rows = torch.stack([row, row.flip(0)])
    mixed = apply_rope(x, tables, rows)
    assert torch.equal(mixed[0], whole[0])
    assert torch.equal(mixed[1], apply_rope(x.flip(2), tables, 5).flip(2)[1])
    half = apply_rope(x.bfloat16(), tables, 5)
    assert half.dtype == torch.bfloat16 and torch.equal(half, apply_rope(x.bfloat16().float(), tables, 5).bfloat16())
    assert tables.to("meta").cos.device.type == "meta" and tables.rotary_dim == 16


def test_rope_at_far_positions() -> None:
    """Angles of a million radians: computed in float64."""
    tables = rope_tables(10**6 + 1, 2)
    assert tables.cos[10**6, 0].item() == pytest.approx(math.cos(1e6), abs=1e-7)


def test_rope_gradients() -> None:
    x = torch.randn(1, 2, 5, 8, dtype=torch.float64, requires_grad=True)
    for interleaved in (False, True):
        tables = rope_tables(9, 6, interleaved=interleaved)
        assert torch.autograd.gradcheck(lambda y, t=tables: apply_rope(y, t, 3), x)


def test_rope_errors() -> None:
    x = torch.randn(1, 1, 10, 16)
    for call, message in (
        (lambda: rope_tables(0, 8), "positions: 0; must be positive"),
        (lambda: rope_tables(8, 7), r"rotary_dim: 7; .*must be even, as 8"),
        (lambda: rope_tables(8, 8, base=0.0), r"base: 0\.0; must be positive"),
        (lambda: apply_rope(x, rope_tables(10, 24)), "rotary_dim 24 is more than the 16 features"),
        (lambda: apply_rope(x, rope_tables(9, 8)), r"tables of 9 positions, but tokens stand at 0 \.\.\. 9"),
        (lambda: apply_rope(x, rope_tables(20, 8), -1), r"tokens stand at -1"),
        (lambda: apply_rope(x, rope_tables(20, 8), torch.arange(9)), r"position: shape \(9,\); must be \(10,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


# ---------------------------------------------------------------------------------------------------------------------
# The layer


def plain(layer: SelfAttention, x: torch.Tensor, mask, position=0) -> torch.Tensor:
    """The layer in float64 from torch's operators, from a float64 copy of its parameters."""
    batch, length, _ = x.shape
    heads, kv_heads, dim = layer.num_heads, layer.num_kv_heads, layer.head_dim
    projected = torch.nn.functional.linear(x, layer.qkv.weight, layer.qkv.bias)
    q, k, v = projected.view(batch, length, -1, dim).transpose(1, 2).split((heads, kv_heads, kv_heads), 1)
    if layer.rope_cos is not None:
        rope = flashmsa.Rope(layer.rope_cos, layer.rope_sin, layer.interleaved)
        q, k = apply_rope(q, rope, position), apply_rope(k, rope, position)
    k, v = (y.repeat_interleave(heads // kv_heads, 1) for y in (k, v))
    allowed = (mask or flashmsa.Dense()).to_dense(length, length, x.device)
    s = (q @ k.mT) * (1.0 / math.sqrt(dim) if layer.scale is None else layer.scale)
    s = layer.softcap * torch.tanh(s / layer.softcap) if layer.softcap else s
    s = s.masked_fill(~allowed, -math.inf)
    if layer.sinks is not None:
        s = torch.cat([s, layer.sinks[:, None, None].expand(batch, -1, length, 1)], -1)
    y = torch.softmax(s, -1)[..., :length] @ v
    return torch.nn.functional.linear(y.transpose(1, 2).flatten(2), layer.out.weight, layer.out.bias)


def make(target: Target, *args, **kwargs) -> SelfAttention:
    return SelfAttention(*args, backend=target.backend, device=target.device, dtype=target.dtype, **kwargs)


def check_layer(layer: SelfAttention, x: torch.Tensor, mask, position=0) -> None:
    """Output and the gradients of x and of every parameter, against plain torch in float64 and in the same dtype."""
    weight = torch.randn(x.shape, device=x.device)
    runs = {}
    for name, dtype in (("found", x.dtype), ("wanted", torch.float64), ("yardstick", x.dtype)):
        one = copy.deepcopy(layer).to(dtype)
        if one.sinks is not None and name == "yardstick":
            one.sinks = torch.nn.Parameter(one.sinks.to(dtype))
        leaf = x.detach().to(dtype).requires_grad_()
        y = one(leaf, mask, position=position) if name == "found" else plain(one, leaf, mask, position)
        y.backward(weight.to(dtype))
        grads = [parameter.grad for parameter in one.parameters()]
        runs[name] = [y, leaf.grad, *grads]
    for n, (got, want, base) in enumerate(zip(*runs.values(), strict=True)):
        slack = torch.finfo(x.dtype).eps * largest(want)
        error = base.double() - want
        # The rule, with its measure of few elements, for results that went on through a projection: twice.
        yardstick = max(largest(error), 4.0 * rms(error) if error.numel() < 3000 else 0.0)
        limit = 2.0 * (2.0 * yardstick + slack)
        assert largest(got.double() - want) <= limit, n


@EACH
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("options", ["plain", "rope", "all"])
def test_as_plain_torch(target: Target, heads: tuple[int, int], options: str) -> None:
    given = {
        "plain": {},
        "rope": {"rope": rope_tables(80, 16)},
        "all": {"rope": rope_tables(80, 8, interleaved=True), "sinks": True, "softcap": 3.0, "scale": 0.3},
    }[options]
    layer = make(target, 48, *heads, head_dim=16, bias=options != "rope", **given)
    if layer.sinks is not None:
        torch.nn.init.normal_(layer.sinks)
    x = torch.randn(2, 60, 48, device=target.device).to(target.dtype)
    for mask in (
        None,
        Causal(),
        SlidingWindow(9, 0) & Document(torch.tensor([0, 25, 60], dtype=torch.int32)).to(x.device),
    ):
        check_layer(layer, x, mask)


@EACH
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_any_mask_at_construction(target: Target, family: str) -> None:
    mask = mask_for(family, 2, 70, 70, heads=(4, 2)).build()
    layer = make(target, 32, 4, 2, head_dim=8, mask=mask)
    x = torch.randn(2, 70, 32, device=target.device).to(target.dtype)
    assert layer.mask is None or layer.mask.device is None or layer.mask.device.type == target.device
    found = layer(x)
    again = layer(x, mask=None if mask is None else mask.to(x.device))
    assert torch.equal(found, again)


@EACH
def test_positions_of_packed_documents(target: Target) -> None:
    """With positions counted inside each document a packed row equals the documents alone."""
    layer = make(target, 32, 4, 2, head_dim=16, rope=rope_tables(60, 16))
    x = torch.randn(1, 60, 32, device=target.device).to(target.dtype)
    cuts = [0, 13, 45, 60]
    offsets = torch.tensor(cuts, dtype=torch.int32, device=target.device)
    position = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(cuts)]).to(target.device)
    whole = layer(x, Document(offsets, causal=True), position=position)
    check_layer(layer, x, Document(offsets, causal=True), position)
    for a, b in itertools.pairwise(cuts):
        alone = layer(x[:, a:b], Causal())
        limit = 8 * torch.finfo(target.dtype).eps * max(1.0, largest(alone))
        assert largest(whole[:, a:b].double() - alone.double()) <= limit


@CPU_ONE_EACH
def test_weights_of_torchs_own_layer(target: Target) -> None:
    """in_proj_weight and out_proj of nn.MultiheadAttention fit as they are, and give the same result."""
    theirs = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    ours = SelfAttention(32, 4, backend=target.backend)
    state = theirs.state_dict()
    names = {"qkv.weight": "in_proj_weight", "qkv.bias": "in_proj_bias"}
    names |= {"out.weight": "out_proj.weight", "out.bias": "out_proj.bias"}
    assert set(names) == set(ours.state_dict())
    ours.load_state_dict({mine: state[name] for mine, name in names.items()})
    x = torch.randn(2, 30, 32)
    causal = torch.ones(30, 30).tril() == 0
    wanted, _ = theirs(x, x, x, attn_mask=causal, need_weights=False)
    torch.testing.assert_close(ours(x, Causal()), wanted)


def test_state_is_the_parameters_alone() -> None:
    layer = SelfAttention(64, 4, 2, rope=rope_tables(90, 16), sinks=True, mask=Document([0, 9, 40]))
    shapes = {name: tuple(x.shape) for name, x in layer.state_dict().items()}
    assert shapes == {
        "sinks": (4,),
        "qkv.weight": (128, 64),
        "qkv.bias": (128,),
        "out.weight": (64, 64),
        "out.bias": (64,),
    }
    other = SelfAttention(64, 4, 2, rope=rope_tables(200, 16), sinks=True)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(1, 30, 64)
    assert torch.equal(other(x, Causal()), layer(x, Causal()))


def test_casts_leave_the_angles() -> None:
    layer = SelfAttention(64, 4, rope=rope_tables(3000, 16), sinks=True)
    half = copy.deepcopy(layer).to(torch.bfloat16)
    assert half.qkv.weight.dtype == torch.bfloat16
    assert half.rope_cos.dtype == torch.float32 and torch.equal(half.rope_cos, layer.rope_cos)
    assert half(torch.randn(1, 20, 64).bfloat16(), Causal(), position=2900).dtype == torch.bfloat16
    assert layer.double().rope_sin.dtype == torch.float32


@pytest.mark.gpu
def test_moves_whole() -> None:
    layer = SelfAttention(64, 4, rope=rope_tables(90, 16), mask=Document([0, 9, 40]), dtype=torch.bfloat16).cuda()
    assert layer.rope_cos.is_cuda and layer.mask.device.type == "cuda"
    out = layer(torch.randn(1, 40, 64, device="cuda", dtype=torch.bfloat16))
    out.float().sum().backward()
    assert layer.qkv.weight.grad.isfinite().all()
    back = layer.cpu()
    assert back.mask.device.type == "cpu" and back.rope_cos.device.type == "cpu"


@EACH
def test_dropout_while_training_alone(target: Target) -> None:
    layer = make(target, 32, 4, head_dim=16, dropout_p=0.5)
    x = torch.randn(2, 30, 32, device=target.device).to(target.dtype)
    assert not torch.equal(layer(x), layer(x))
    torch.manual_seed(3)
    first = layer(x)
    torch.manual_seed(3)
    assert torch.equal(layer(x), first)
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    same = make(target, 32, 4, head_dim=16)
    same.load_state_dict(layer.state_dict())
    assert torch.equal(same(x), layer(x))


@EACH
def test_autocast(target: Target) -> None:
    layer = SelfAttention(32, 4, 2, rope=rope_tables(40, 8), backend=target.backend, device=target.device, sinks=True)
    x = torch.randn(2, 30, 32, device=target.device)
    with torch.autocast(target.device, torch.bfloat16):
        y = layer(x, Causal())
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16 and all(p.grad.dtype == torch.float32 for p in layer.parameters())


@EACH
def test_compiled(target: Target) -> None:
    torch._dynamo.reset()
    layer = make(target, 32, 4, 2, head_dim=16, rope=rope_tables(80, 16), mask=Causal(), sinks=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for length in (30, 40):
        x = torch.randn(2, length, 32, device=target.device).to(target.dtype)
        results = []
        for one in (layer, compiled):
            layer.zero_grad()
            y = one(x)
            y.float().square().sum().backward()
            results.append([y, *(p.grad.clone() for p in layer.parameters())])
        for got, want in zip(*results, strict=True):
            assert torch.equal(got, want)
    torch._dynamo.reset()


@CPU_ONE_EACH
def test_it_learns(target: Target) -> None:
    """To copy the token before: a task that attention by position solves, and a mean over all keys does not."""
    torch.manual_seed(0)
    layer = SelfAttention(32, 2, head_dim=16, mask=Causal(), rope=rope_tables(40, 16), backend=target.backend)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(150):
        x = torch.randn(8, 40, 32)
        loss = (layer(x)[:, 1:] - x[:, :-1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    # The mean of the targets' squares is 1, and their best guess without the token before gives no less.
    assert losses[0] > 0.9 and losses[-1] < 0.6


def test_what_it_prints() -> None:
    layer = SelfAttention(64, 4, 2, rope=rope_tables(90, 16, interleaved=True), mask=SlidingWindow(8, 0), dropout_p=0.1)
    text = repr(layer)
    for part in ("64, 4, 2, head_dim=16", "SlidingWindow(8, 0)", "90 positions of 16 features, interleaved", "0.1"):
        assert re.search(re.escape(part), text), text


@pytest.mark.parametrize(
    ("error", "match", "given"),
    [
        (ValueError, "num_heads: 0; must be at least 1", {"num_heads": 0}),
        (ValueError, "num_heads: 5 does not divide embed_dim 64; give head_dim", {"num_heads": 5}),
        (ValueError, "num_kv_heads: 3 does not divide num_heads 4; the nearest is 2", {"num_kv_heads": 3}),
        (ValueError, "head_dim: 20; .* the nearest is 24", {"head_dim": 20}),
        (ValueError, "head_dim: 264; .* the nearest is 256", {"head_dim": 264}),
        (ValueError, "rope: rotary_dim 32 is more than the head_dim 16", {"rope": rope_tables(9, 32)}),
        (TypeError, "mask: str; must be a flashmsa mask", {"mask": "causal"}),
        (ValueError, r"dropout_p: 1\.0; must lie in", {"dropout_p": 1.0}),
    ],
)
def test_bad_arguments(error: type[Exception], match: str, given: dict) -> None:
    with pytest.raises(error, match=match):
        SelfAttention(**{"embed_dim": 64, "num_heads": 4, **given})


def test_bad_input() -> None:
    layer = SelfAttention(64, 4)
    for shape in ((30, 64), (2, 30, 32), (1, 2, 30, 64)):
        with pytest.raises(ValueError, match=r"x: shape .*; must be \(batch, length, 64\)"):
            layer(torch.randn(shape))
    with pytest.raises(TypeError, match="mask: str"):
        layer(torch.randn(1, 30, 64), "causal")
