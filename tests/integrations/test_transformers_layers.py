"""One call ranks all layers of a step: equal to a loop over the layers, with few operations and no wait."""

import gc
import weakref
from typing import get_args

import pytest

pytest.importorskip("transformers")

import torch

from benchmarks.launches import count_launches
from bucketrank.integrations.ranking_loss import LossName, RankingLoss, centre_size_iou
from bucketrank.integrations.transformers import criterion, use_ranking_loss
from bucketrank.integrations.transformers.criterion import Layer, matching_on, rank_layers
from tests.integrations.transformers_models import MODELS, batch, make

ONLY_FLOAT32 = ("dab_detr", "d_fine", "deimv2")  # the models of transformers, with any loss
every_model = pytest.mark.parametrize("name", MODELS)


def step(model, images, labels):
    torch.manual_seed(1)  # the noise of the denoising queries
    return model(pixel_values=images, labels=labels)


def rank_in_a_loop(ranking_loss, layers):
    """Rank each layer by a call of its own, and match its queries to classes and boxes image by image."""
    terms = []
    for logits, boxes, targets, matching in layers:
        labels = torch.zeros_like(logits)
        for image, (target, (queries, objects)) in enumerate(zip(targets, matching, strict=True)):
            ious = centre_size_iou(boxes[image, queries].detach(), target["boxes"][objects])
            labels[image, queries, target["class_labels"][objects]] = ranking_loss.labels(ious)
        terms.append(ranking_loss.terms(logits, labels))
    return {name: torch.stack([term[name] for term in terms]) for name in terms[0]}


@pytest.mark.sampled(7)
@every_model
@pytest.mark.parametrize("loss", get_args(LossName))
def test_rankings_are_those_of_a_loop(name, loss, monkeypatch):
    """Compare the values, and the gradients at the logits, for the layers of a step of every family in float64."""
    layers = []

    def recording(ranking_loss, inputs):
        layers.extend(inputs)
        return rank_layers(ranking_loss, inputs)

    monkeypatch.setattr(criterion, "rank_layers", recording)
    step(use_ranking_loss(make(name).train()), *batch())
    upstream = torch.rand(len(layers), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    results = []
    for rank in (rank_layers, rank_in_a_loop):
        wide = [
            layer._replace(logits=layer.logits.detach().double().requires_grad_(), boxes=layer.boxes.double())
            for layer in layers
        ]
        terms = rank(RankingLoss(loss), wide)
        sum((number + 1) * (upstream * term).sum() for number, term in enumerate(terms.values())).backward()
        results.append((terms, [layer.logits.grad for layer in wide]))
    (terms, gradients), (loop_terms, loop_gradients) = results
    assert all(term.shape == (MODELS[name][1],) for term in terms.values())
    torch.testing.assert_close(terms, loop_terms, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradients, loop_gradients, rtol=1e-12, atol=1e-14)
    assert all(gradient.abs().sum() > 0 for gradient in gradients)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ONLY_FLOAT32])
@pytest.mark.parametrize("loss", get_args(LossName))
def test_a_step_is_that_of_a_loop(name, loss, monkeypatch):
    """Compare all terms, self-balanced boxes among them, and the gradients of all parameters in float64."""
    images, labels = batch()
    labels = [{**target, "boxes": target["boxes"].double()} for target in labels]
    model = use_ranking_loss(make(name).double().train(), loss=loss)
    results = []
    for rank in (rank_layers, rank_in_a_loop):
        monkeypatch.setattr(criterion, "rank_layers", rank)
        model.zero_grad(set_to_none=True)
        output = step(model, images.double(), labels)
        assert output.loss.dtype == torch.float64
        output.loss.backward()
        gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        results.append((dict(output.loss_dict), gradients))
    (terms, gradients), (loop_terms, loop_gradients) = results
    assert list(terms) == list(loop_terms)
    torch.testing.assert_close(terms, loop_terms, rtol=1e-12, atol=1e-14)
    scale = max(gradient.abs().max().item() for gradient in loop_gradients.values())
    torch.testing.assert_close(gradients, loop_gradients, rtol=1e-10, atol=1e-12 * scale)


@pytest.mark.sampled(4)
@every_model
def test_launches_and_waits_besides_the_loss_itself(name, monkeypatch):
    """Any number of layers takes one call of the loss, at most 54 other operations, and no wait."""
    counts, calls = [], []

    def counting(ranking_loss, layers):
        with count_launches() as counted:
            terms = rank_layers(ranking_loss, layers)
        counts.append(counted)
        return terms

    def without_ranking(self, logits, targets, *, sizes):
        calls.append(len(sizes))
        return {"rank": logits.new_ones(len(sizes)), "sort": logits.new_ones(len(sizes))}

    monkeypatch.setattr(criterion, "rank_layers", counting)
    monkeypatch.setattr(RankingLoss, "terms", without_ranking)
    step(use_ranking_loss(make(name).train()), *batch())
    assert calls == [MODELS[name][1]]
    (counted,) = counts
    assert counted.launches <= 54, counted.operations
    assert counted.waits == 0, counted.waiting


def test_the_number_of_operations_does_not_depend_on_layers_and_images():
    def launches(layers, images):
        targets = [{"class_labels": torch.tensor([1]), "boxes": torch.tensor([[0.5, 0.5, 0.2, 0.2]])}] * images
        matching = [(torch.tensor([2]), torch.tensor([0]))] * images
        layer = Layer(torch.randn(images, 6, 3), torch.rand(images, 6, 4), targets, matching)
        with count_launches() as counted:
            rank_layers(SumLoss(), [layer] * layers)
        return counted.launches

    assert launches(1, 1) == launches(7, 4)


class SumLoss(RankingLoss):
    """A loss of few operations, whose number does not depend on the sizes."""

    def terms(self, logits, targets, *, sizes=None):
        return {"rank": (logits * targets).sum().expand(len(sizes))}


def test_a_matching_moves_in_one_transfer():
    matching = [(torch.tensor([4, 2]), torch.tensor([0, 1])), (torch.zeros(0, dtype=torch.int64),) * 2]
    assert matching_on(torch.device("cpu"), matching) is matching
    moved = matching_on(torch.device("meta"), matching)
    assert [[part.shape for part in pair] for pair in moved] == [[(2,), (2,)], [(0,), (0,)]]
    assert all(part.device.type == "meta" for pair in moved for part in pair)


def test_a_step_is_freed_without_garbage_collection(monkeypatch):
    references: list[weakref.ref[torch.Tensor]] = []

    def recording(ranking_loss, layers):
        references.extend(weakref.ref(layer.logits) for layer in layers)
        return rank_layers(ranking_loss, layers)

    monkeypatch.setattr(criterion, "rank_layers", recording)
    model = use_ranking_loss(make("rt_detr").train())
    gc.disable()
    try:
        output = step(model, *batch())
        output.loss.backward()
        del output
        assert references
        assert all(reference() is None for reference in references)
    finally:
        gc.enable()
