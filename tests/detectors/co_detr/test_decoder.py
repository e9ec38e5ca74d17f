"""Refinement of boxes, and who learns from whom."""

from typing import Any

import pytest
import torch

from bucketrank.detectors.co_detr.decoder import BoxEncoding, Decoder, Queries, SelectedQueries
from bucketrank.detectors.co_detr.geometry import Geometry, inverse_sigmoid, sine_encoding
from bucketrank.detectors.co_detr.transformer import TransformerSettings

SETTINGS = TransformerSettings(width=32, heads=2, points=2, levels=1, feedforward=16, decoder_layers=3)


@pytest.fixture
def decoder():
    torch.manual_seed(0)
    built: Any = Decoder(SETTINGS, num_classes=2, score=0.01)
    for branch in built.boxes:
        torch.nn.init.normal_(branch[-1].weight, std=0.2)
    return built


def decode(decoder, queries=None):
    torch.manual_seed(1)
    geometry = Geometry.of([torch.zeros(1, 32, 4, 4)], (32, 32), [(32, 32)])
    queries = queries or Queries(torch.randn(1, 5, 32), torch.randn(1, 5, 32), torch.rand(1, 5, 4) * 0.8 + 0.1)
    return decoder(queries, torch.randn(1, 16, 32), geometry), queries


def test_a_fresh_decoder_leaves_the_boxes_where_they_begin():
    torch.manual_seed(0)
    layers, queries = decode(Decoder(SETTINGS, num_classes=2, score=0.01))
    for layer in layers:
        torch.testing.assert_close(layer.boxes, queries.boxes)
        assert layer.logits.shape == (1, 5, 2)


def test_each_layer_moves_the_boxes_of_the_one_before(decoder):
    steps = []
    for branch in decoder.boxes:
        branch.register_forward_hook(lambda _, __, step: steps.append(step))
    layers, queries = decode(decoder)
    boxes = queries.boxes
    for layer, step in zip(layers, steps, strict=True):
        boxes = (inverse_sigmoid(boxes) + step).sigmoid()
        torch.testing.assert_close(layer.boxes, boxes)


@pytest.mark.parametrize("judged", range(3))
def test_the_box_of_a_layer_teaches_that_layer_and_the_one_before(decoder, judged):
    """Look forward twice: by the path of the boxes, not one layer more; the steps are cut off from each other here."""
    steps = []

    def cut(module, inputs, step):
        steps.append(step.detach().requires_grad_())
        return steps[-1]

    for branch in decoder.boxes:
        branch.register_forward_hook(cut)
    layers, _ = decode(decoder)
    layers[judged].boxes.sum().backward()
    taught = [step.grad is not None and bool((step.grad.abs() > 0).all()) for step in steps]
    assert taught == [layer in (judged, judged - 1) for layer in range(3)]


def test_where_a_layer_looks_teaches_no_box(decoder):
    """The class of the last layer depends on the boxes before only through places, which are detached."""
    steps = []
    for branch in decoder.boxes:
        branch.register_forward_hook(lambda _, __, step: steps.append(step))
    layers, _ = decode(decoder)
    gradients = torch.autograd.grad(layers[-1].logits.sum(), steps, allow_unused=True)
    assert all(gradient is None for gradient in gradients)


def test_positions_are_the_first_half_of_what_a_box_says_and_content_is_learned():
    torch.manual_seed(0)
    selected = SelectedQueries(32, 7)
    boxes = torch.rand(2, 7, 4)
    queries = selected(boxes)
    encoding = selected.encoding
    whole = encoding.norm(encoding.project(sine_encoding(boxes, 16)))
    torch.testing.assert_close(queries.positions, whole[..., :32])
    torch.testing.assert_close(queries.content, selected.content.expand(2, 7, 32))
    assert selected(boxes[:, :3]).content.shape == (2, 3, 32)  # fewer proposals than queries


def test_the_second_half_belongs_to_the_content():
    encoding = BoxEncoding(32)
    positions, content = encoding(torch.rand(1, 3, 4))
    assert positions.shape == content.shape == (1, 3, 32)
