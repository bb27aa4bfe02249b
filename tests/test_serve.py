"""examples/serve.py: its tokens are those of the same model run one sequence at a time, without pages."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

_PATH = Path(__file__).resolve().parent.parent / "examples" / "serve.py"
_SPEC = importlib.util.spec_from_file_location("serve_example", _PATH)
serve = importlib.util.module_from_spec(_SPEC)
# NOTE: dataclasses look their module up.
sys.modules[_SPEC.name] = serve
_SPEC.loader.exec_module(serve)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serve, "PAGE", 16)
    torch.manual_seed(0)
    return serve.Model(positions=512)


@pytest.mark.parametrize("window", [None, 1, 2])
@pytest.mark.parametrize("pages", [18, 60])
def test_tokens_equal_those_without_pages(model, window: int | None, pages: int) -> None:
    """With room for all requests at once, and with a pool in which they have to wait for each other."""
    requests = serve.make_requests(9, 97, 150)
    answers, counts, server = serve.serve(model, requests, pages, window)
    expected = [serve.answer_alone(model, *request, window) for request in requests]
    assert answers == expected
    assert len({tuple(x) for x in expected}) > 4, "the answers are too much alike to tell anything"
    assert counts.shared > 0, "no prefix was shared"
    assert (counts.evicted > 0) == (window is not None)
    assert counts.most_pages <= pages
    assert counts.largest_batch > (3 if pages == 60 else 1)
    assert sorted(server.pool.free) == list(range(pages)), "pages were lost"


def test_sharing_saves_pages_and_work(model) -> None:
    prompt = [*range(90), 7]
    _, alone, _ = serve.serve(model, [(prompt, 20)], 60)
    # The second comes when the first one's pages are known.
    server = serve.Server(model, 60)
    server.submit(0, prompt, 20)
    server._admit()
    for _ in range(4):
        server._step()
    server.submit(1, [*prompt[:80], 3, 4], 5)
    answers = dict(server.run())
    assert server.counts.shared == 5
    assert server.counts.tokens == alone.tokens + 82 - 80 + 4
    assert answers[1] == serve.answer_alone(model, [*prompt[:80], 3, 4], 5)


def test_a_request_larger_than_the_pool(model) -> None:
    with pytest.raises(RuntimeError, match="request 0"):
        serve.serve(model, [(list(range(90)), 5)], 3)
