"""Candidates of training: `NAME-backward` for every one of the forward pass, both passes with dropout, and forward
passes that are recorded.

Importing this adds them to candidates.FACTORIES.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from benchmarks import candidates
from benchmarks.candidates import FACTORIES, RECORDED, Call, Factory, Gradients, leaves
from benchmarks.cases import Case

DROPOUT = 0.1


def gradient_of_out(case: Case, out: torch.Tensor) -> torch.Tensor:
    """The same random values for every candidate, in its layout of out."""
    shape = (case.batch, case.heads, case.length, case.value_dim)
    generator = torch.Generator(out.device).manual_seed(1)
    values = torch.randn(shape, generator=generator, device=out.device, dtype=torch.float32).to(out.dtype)
    if tuple(out.shape) != shape:
        values = values.transpose(1, 2).contiguous()
    return values.reshape(out.shape)


def _first(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple | list) else result


def backward_of(forward: Callable[[Case], Call]) -> Factory:
    """The backward pass alone, all of its kernels: the forward pass is recorded once, ahead."""

    def build(case: Case) -> Call:
        with torch.enable_grad(), leaves() as inputs:
            out = _first(forward(case)())
        dout = gradient_of_out(case, out)
        return lambda: Gradients(*torch.autograd.grad(out, inputs, dout, retain_graph=True))

    return build


def both_passes_of(forward: Callable[[Case], Call]) -> Factory:
    def build(case: Case) -> Call:
        with torch.enable_grad(), leaves() as inputs:
            call = forward(case)
            dout = gradient_of_out(case, _first(call()))

        def both() -> Gradients:
            with torch.enable_grad():
                return Gradients(*torch.autograd.grad(_first(call()), inputs, dout))

        return both

    return build


def recorded(forward: Callable[[Case], Call]) -> Factory:
    """The forward pass of inputs that want gradients: called where gradients are enabled, it is recorded."""

    def build(case: Case) -> Call:
        with leaves():
            return forward(case)

    return build


def _flash_dropout(case: Case) -> Call:
    """SDPA's flash backend. A dry run lets torch choose."""
    q, k, v = candidates.inputs(case)

    def call() -> torch.Tensor:
        with candidates._pin("flash"):
            return functional.scaled_dot_product_attention(q, k, v, dropout_p=DROPOUT, is_causal=case.is_causal)

    return call


def _forward(name: str) -> Callable[[Case], Call]:
    """Looked up when it is wanted, so that a replaced candidate is measured."""
    return lambda case: FACTORIES[name](case)


_ours = candidates.flashmsa_native

FACTORIES |= {f"{name}-backward": backward_of(_forward(name)) for name in ("flashmsa", "cudnn", "flash", "fa4", "flex")}
FACTORIES |= {
    "flashmsa-backward-deterministic": backward_of(partial(_ours, deterministic=True)),
    "flashmsa-both": both_passes_of(_forward("flashmsa")),
    "flashmsa-both-dropout": both_passes_of(partial(_ours, dropout_p=DROPOUT)),
    **{f"{name}{RECORDED}": recorded(_forward(name)) for name in ("flashmsa-eager", "sdpa")},
    "flash-both-dropout": both_passes_of(_flash_dropout),
}
