"""Timing the compiled kernels, and having the faster ones run."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch

import flashmsa
from flashmsa import _C, tune
from flashmsa import __main__ as cli
from flashmsa.tune import Measured, Timing

kernels_built = pytest.mark.skipif(not _C.kernels(), reason="needs a build with kernels")
DEFAULT, WIDER, SMALL = "fwd_dense_d64_bf16", "fwd_dense_d128_bf16", "fwd_dense_small_d64_bf16"


def kernel_of(head_dim: int = 64, mask: flashmsa.Mask | None = None, dtype: torch.dtype = torch.bfloat16) -> str:
    q = torch.empty(4, 32, 4096, head_dim, dtype=dtype, device="meta")
    return flashmsa.explain(q, q, q, mask, backend="sm90").kernel


@pytest.fixture
def untuned() -> Iterator[None]:
    yield
    flashmsa.use_tuning(None)


@kernels_built
def test_a_tuning_is_used_where_it_serves(untuned: None, tmp_path) -> None:
    before = {
        name: kernel_of(*x) for name, x in {"d64": (64,), "d96": (96,), "causal": (64, flashmsa.Causal())}.items()
    }
    assert before["d64"] == DEFAULT
    for other in (WIDER, SMALL):
        path = tmp_path / "tuning.json"
        path.write_text(json.dumps({"kernels": {DEFAULT: other}}))
        flashmsa.use_tuning(path)
        assert kernel_of() == other
        assert kernel_of(96) == before["d96"] and kernel_of(64, flashmsa.Causal()) == before["causal"]
        assert kernel_of(dtype=torch.float16) == DEFAULT.replace("bf16", "fp16")
    # A kernel of another mask or dtype, or of fewer head dims, cannot run the call.
    for other in ("fwd_causal_d64_bf16", "fwd_dense_d64_fp16", "fwd_composite_softcap_d64_bf16"):
        flashmsa.use_tuning({"kernels": {DEFAULT: other}})
        assert kernel_of() == DEFAULT
    flashmsa.use_tuning({"kernels": {WIDER: DEFAULT}})
    assert kernel_of(128) == WIDER and kernel_of() == DEFAULT
    flashmsa.use_tuning({"kernels": {DEFAULT: WIDER}})
    flashmsa.use_tuning(None)
    assert kernel_of() == DEFAULT


@kernels_built
def test_a_tuning_of_another_build_is_refused(untuned: None) -> None:
    flashmsa.use_tuning({"kernels": {DEFAULT: WIDER}})
    for kernels in ({DEFAULT: "fwd_none"}, {"fwd_none": DEFAULT}):
        with pytest.raises(ValueError, match="kernel 'fwd_none' is not in this build"):
            flashmsa.use_tuning({"kernels": kernels})
        with pytest.raises(ValueError, match="no forward kernel is named fwd_none"):
            _C.replace_kernel(*next(iter(kernels.items())))
    assert kernel_of() == WIDER
    for wrong in ({}, {"kernels": [DEFAULT]}, 3, [DEFAULT]):
        with pytest.raises(TypeError, match="tuning: must be what autotune returns"):
            flashmsa.use_tuning(wrong)


def timing(name: str, ms: float, agrees: bool = True) -> Timing:
    return Timing(name, (128, 128), ms, 1.0, agrees)


def test_a_replacement_is_faster_at_every_length() -> None:
    def calls(*rows: tuple[float, ...], agrees: bool = True) -> list[Measured]:
        return [Measured("", (timing("a", x), timing("b", y, agrees), timing("c", z))) for x, y, z in rows]

    assert tune.replacements(calls((1.0, 0.9, 1.1), (1.0, 0.9, 1.1))) == {"a": "b"}
    assert tune.replacements(calls((1.0, 0.9, 0.8), (1.0, 0.9, 0.9))) == {"a": "c"}
    assert tune.replacements(calls((1.0, 0.9, 1.1), (1.0, 0.99, 1.1))) == {}
    assert tune.replacements(calls((1.0, 0.9, 1.1), agrees=False)) == {}
    # Few rows may have another default: each is replaced by what beats it wherever it is the default.
    few = Measured("", (timing("c", 1.0), timing("a", 0.5)))
    assert tune.replacements([*calls((1.0, 0.9, 0.5)), few]) == {"a": "c", "c": "a"}


def test_the_fastest_is_marked() -> None:
    text = str(Measured("a call", (timing("a", 1.0), timing("b", 0.5, agrees=False), timing("c", 0.7))))
    first, *rows = text.splitlines()
    assert first == "a call" and [row[0] for row in rows] == [" ", " ", "*"]
    assert "1000.0 µs" in rows[0] and "never taken" in rows[1]


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "machine_reason", lambda index: "no CUDA device or driver was found")
    assert cli.main(["tune"]) == 1
    assert capsys.readouterr().err == (
        "tune: needs a GPU of compute capability 9.0: no CUDA device or driver was found\n"
    )
    with pytest.raises(RuntimeError, match="no CUDA device"):
        flashmsa.autotune()


@pytest.mark.gpu
def test_every_kernel_that_serves_agrees(untuned: None, tmp_path, capsys: pytest.CaptureFixture) -> None:
    seen = []
    flashmsa.use_tuning({"kernels": {DEFAULT: WIDER}})
    tuning = flashmsa.autotune(
        head_dims=(64, 192), dtypes=(torch.bfloat16,), lengths=(1000,), launches=2, report=seen.append
    )
    assert kernel_of() == WIDER  # as before
    assert len(seen) == 2 * len(tune.MASKS)
    for call in seen:
        assert all(x.agrees and x.ms > 0 for x in call.timings), str(call)
    assert {DEFAULT, WIDER, SMALL} <= {x.kernel for x in seen[0].timings}
    flashmsa.use_tuning(tuning)
    path = tmp_path / "tuning.json"
    options = ["--masks", "causal", "--head-dims", "128", "--lengths", "512", "--launches", "2", "--write", str(path)]
    assert cli.main(["tune", *options]) == 0
    assert "fwd_causal_d128_bf16" in capsys.readouterr().out
    flashmsa.use_tuning(path)


@pytest.mark.gpu
def test_an_unknown_mask_is_named() -> None:
    with pytest.raises(ValueError, match="masks: 'none' is not known; must be of dense"):
        flashmsa.autotune(masks=["none"])
