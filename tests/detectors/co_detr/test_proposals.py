"""The first stage: proposals of the tokens."""

import torch

from bucketrank.detectors.co_detr.decoder import Proposals, Proposer, initial_boxes
from bucketrank.detectors.co_detr.transformer import Geometry


def geometry():
    """Return a level of 20 x 10 cells, of which the second image covers 15 x 10, and a coarser level."""
    maps = [torch.zeros(2, 1, 10, 20), torch.zeros(2, 1, 5, 10)]
    return Geometry.of(maps, (80, 160), [(80, 160), (80, 120)])


def test_the_initial_box_of_a_token_is_centred_on_its_cell():
    token_geometry = geometry()
    boxes, valid = initial_boxes(token_geometry)
    torch.testing.assert_close(boxes[0, 0], torch.tensor([0.5 / 20, 0.5 / 10, 0.05, 0.05]))
    torch.testing.assert_close(boxes[0, 200], torch.tensor([0.5 / 10, 0.5 / 5, 0.1, 0.1]))
    torch.testing.assert_close(boxes[1, 0], torch.tensor([0.5 / 15, 0.5 / 10, 0.05, 0.05]))
    assert valid[0].all()
    assert (valid[1] == token_geometry.valid[1]).all()


def test_tokens_at_the_border_do_not_propose():
    fine = Geometry.of([torch.zeros(1, 1, 2, 100)], (16, 800), [(16, 800)])
    _, valid = initial_boxes(fine)
    # Of 100 columns the first and the last have their centres within 0.01 of the border.
    assert valid.reshape(2, 100).int().tolist() == [[0] + [1] * 98 + [0]] * 2
    large = Geometry.of([torch.zeros(1, 1, 2, 2)] * 6, (64, 64), [(64, 64)])
    assert initial_boxes(large)[1].reshape(6, 4).all(1).tolist() == [True] * 5 + [False]  # 0.05 * 2^5 > 1


def test_best_is_detached_and_ignores_padding():
    logits = torch.tensor([[[0.1], [0.9], [0.5], [9.0]]], requires_grad=True)
    boxes = torch.arange(16.0).reshape(1, 4, 4).requires_grad_()
    best = Proposals(logits, boxes, torch.tensor([[True, True, True, False]])).best(2)
    torch.testing.assert_close(best, boxes.detach()[:, [1, 2]])
    assert not best.requires_grad
    assert Proposals(logits, boxes, torch.tensor([[True, True, True, False]])).best(9).shape == (1, 4, 4)


def test_an_untrained_proposer_returns_the_initial_boxes():
    torch.manual_seed(0)
    token_geometry = geometry()
    proposals = Proposer(32, score=0.01)(torch.randn(2, 250, 32), token_geometry)
    torch.testing.assert_close(proposals.boxes, initial_boxes(token_geometry)[0], rtol=1e-4, atol=1e-5)
    assert proposals.logits.shape == (2, 250, 1)
    assert abs(proposals.logits.sigmoid().mean().item() - 0.01) < 1e-3


def test_tokens_that_do_not_propose_get_no_gradient():
    torch.manual_seed(0)
    token_geometry, proposer = geometry(), Proposer(32, score=0.01)
    memory = torch.randn(2, 250, 32, requires_grad=True)
    proposer(memory, token_geometry).logits.square().sum().backward()
    assert memory.grad is not None
    has_gradient = memory.grad.abs().sum(-1) > 0
    assert (has_gradient == initial_boxes(token_geometry)[1]).all()
