"""The cross-encoder example runs, with the smallest possible settings."""

import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers")

from examples import cross_encoder as example

pytestmark = pytest.mark.usefixtures("one_thread")


def test_prints_both_measures(capsys):
    example.main(steps=1, batch=2)
    before, after = capsys.readouterr().out.splitlines()
    for line, name in ((before, "before"), (after, "after")):
        assert line.startswith(f"{name}: NDCG ")
        assert 0 < float(line.split()[-1]) <= 1


def test_lists_have_different_lengths():
    lists = example.make_lists(20, torch.Generator().manual_seed(0))
    assert len({len(texts) for _, texts, _ in lists}) > 1
    for query, texts, relevance in lists:
        assert query in example.TOPICS
        assert relevance.shape == (len(texts),)
        assert relevance.max() <= 1


def test_ndcg():
    relevance = torch.tensor([0.0, 1.0])
    assert example.ndcg(torch.tensor([0.0, 1.0]), relevance) == 1
    torch.testing.assert_close(example.ndcg(torch.tensor([1.0, 0.0]), relevance), 1 / torch.tensor(3.0).log2())
