"""Refinement of boxes, and the gradients between layers."""

from typing import Any

import pytest
import torch

from bucketrank.detectors.co_detr.decoder import BoxEncoding, Decoder, Queries, SelectedQueries
from bucketrank.detectors.co_detr.transformer import Geometry, TransformerSettings, inverse_sigmoid, sine_encoding

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


def test_an_untrained_decoder_returns_the_initial_boxes():
    torch.manual_seed(0)
    layers, queries = decode(Decoder(SETTINGS, num_classes=2, score=0.01))
    for layer in layers:
        torch.testing.assert_close(layer.boxes, queries.boxes)
        assert layer.logits.shape == (1, 5, 2)


def test_each_layer_refines_the_boxes_of_the_previous_one(decoder):
    changes = []
    for branch in decoder.boxes:
        branch.register_forward_hook(lambda _, __, change: changes.append(change))
    layers, queries = decode(decoder)
    boxes = queries.boxes
    for layer, change in zip(layers, changes, strict=True):
        boxes = (inverse_sigmoid(boxes) + change).sigmoid()
        torch.testing.assert_close(layer.boxes, boxes)


@pytest.mark.parametrize("layer_index", range(3))
def test_the_box_of_a_layer_trains_that_layer_and_the_previous_one(decoder, layer_index):
    """DINO's "look forward twice", along the path of the boxes; the hooks cut every other path between the layers."""
    changes = []

    def cut(module, inputs, change):
        changes.append(change.detach().requires_grad_())
        return changes[-1]

    for branch in decoder.boxes:
        branch.register_forward_hook(cut)
    layers, _ = decode(decoder)
    layers[layer_index].boxes.sum().backward()
    trained = [change.grad is not None and bool((change.grad.abs() > 0).all()) for change in changes]
    assert trained == [each in (layer_index, layer_index - 1) for each in range(3)]


def test_attention_locations_pass_no_gradient_to_boxes(decoder):
    """The class logits of the last layer depend on earlier boxes only through locations, which are detached."""
    changes = []
    for branch in decoder.boxes:
        branch.register_forward_hook(lambda _, __, change: changes.append(change))
    layers, _ = decode(decoder)
    gradients = torch.autograd.grad(layers[-1].logits.sum(), changes, allow_unused=True)
    assert all(gradient is None for gradient in gradients)


def test_positions_are_the_first_half_of_the_box_encoding_and_content_is_learned():
    torch.manual_seed(0)
    selected = SelectedQueries(32, 7)
    boxes = torch.rand(2, 7, 4)
    queries = selected(boxes)
    encoding: Any = selected.encoding
    whole = encoding.norm(encoding.project(sine_encoding(boxes, 16)))
    torch.testing.assert_close(queries.positions, whole[..., :32])
    torch.testing.assert_close(queries.content, selected.content.expand(2, 7, 32))
    assert selected(boxes[:, :3]).content.shape == (2, 3, 32)  # fewer proposals than queries


def test_box_encoding_returns_positions_and_content():
    encoding = BoxEncoding(32)
    positions, content = encoding(torch.rand(1, 3, 4))
    assert positions.shape == content.shape == (1, 3, 32)
