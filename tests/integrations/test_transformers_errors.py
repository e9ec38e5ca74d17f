"""Models, settings and versions of transformers that the adapter refuses."""

import importlib.util
import math

import pytest

pytest.importorskip("transformers")

import torch
import transformers as hf
from torch import nn

import bucketrank.integrations.transformers as adapter
from bucketrank.integrations.transformers import calibrate, library, undo, use_ranking_loss
from tests.integrations.transformers_models import batch, d_fine, deformable_detr, lw_detr, rt_detr


def unbuilt(name):
    model_class = getattr(hf, name)
    model = model_class.__new__(model_class)  # only the class matters: it is refused before its attributes are read
    nn.Module.__init__(model)
    return model


class TestErrors:
    @pytest.mark.parametrize("name", [n for n in adapter.adapter.REFUSED if hasattr(hf, n)])
    def test_refused_with_the_reason(self, name):
        reason = "softmax|words of a prompt|masks"
        with pytest.raises(TypeError, match=f"expected a detector with sigmoid scores, got {name}: .*({reason})"):
            use_ranking_loss(unbuilt(name))

    def test_softmax_and_text_have_different_reasons(self):
        with pytest.raises(TypeError, match="softmax with a no-object class"):
            use_ranking_loss(unbuilt("DetrForObjectDetection"))
        with pytest.raises(TypeError, match="words of a prompt"):
            use_ranking_loss(unbuilt("GroundingDinoForObjectDetection"))

    @pytest.mark.parametrize("change", [use_ranking_loss, lambda model: calibrate(model, [])])
    def test_rt_detr_with_softmax(self, change):
        with pytest.raises(TypeError, match=r"expected config.use_focal_loss to be True, got False: .*softmax"):
            change(rt_detr(use_focal_loss=False))

    @pytest.mark.parametrize("wrap", [lambda model: model.model, nn.DataParallel, nn.Sequential])
    def test_not_the_detector_itself(self, wrap):
        with pytest.raises(TypeError, match=r"expected one of DeformableDetr.*, got .*; pass the transformers"):
            use_ranking_loss(wrap(deformable_detr()))

    @pytest.mark.parametrize(
        "settings",
        [
            *({"loss": "focal"}, {"method": "fast"}, {"delta": -1}, {"box_weight": -1}),
            *({name: 10**400} for name in ("delta", "box_weight", "class_cost")),
            *({"class_cost": value} for value in (-1, "4", float("inf"), True)),
        ],
    )
    def test_settings(self, settings):
        model = deformable_detr()
        with pytest.raises(ValueError, match=f"use_ranking_loss: expected {next(iter(settings))}"):
            use_ranking_loss(model, **settings)
        assert "_loss_function" not in model.__dict__

    def test_undo_of_a_supported_model_with_its_own_loss_is_a_value_error(self):
        message = "undo: expected a model with a ranking loss, got DeformableDetr.* with its own loss"
        model = deformable_detr()
        with pytest.raises(ValueError, match=message):
            undo(model)
        with pytest.raises(ValueError, match=message):
            undo(undo(use_ranking_loss(model)))

    @pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: model.model, lambda model: None])
    def test_undo_of_an_unsupported_model_is_a_type_error(self, wrap):
        model = wrap(use_ranking_loss(deformable_detr()))
        with pytest.raises(TypeError, match=rf"undo: expected one of DeformableDetr.*, got {type(model).__name__};"):
            undo(model)

    def test_undo_of_a_refused_model_is_a_type_error(self):
        with pytest.raises(
            TypeError, match="undo: expected a detector with sigmoid scores, got DetrForObjectDetection"
        ):
            undo(unbuilt("DetrForObjectDetection"))


class TestTargets:
    """Targets with which the library's own losses end in an IndexError, or train on NaN without a word."""

    @pytest.mark.sampled(5)
    @pytest.mark.parametrize("family", [deformable_detr, d_fine, lw_detr])  # d_fine makes denoising queries of them
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"class_labels": torch.tensor([0, 3])}, r"\['class_labels'\] from 0 to 2, got 3; correct them"),
            ({"class_labels": torch.tensor([-1, 0])}, r"\['class_labels'\] from 0 to 2, got -1; correct them"),
            ({"class_labels": torch.tensor([0.0, 1])}, r"of an integer dtype, got torch.float32; convert them"),
            ({"class_labels": torch.tensor([0])}, r"got \(1,\) and \(2, 4\); give every box one class label"),
            ({"boxes": torch.tensor([[0.5, 0.5, 0.1, 0.1], [0.5, math.nan, 0.1, 0.1]])}, r"finite, .* got \[0.5, nan"),
            ({"boxes": torch.tensor([[0.5, 0.5, 0.1, 0.1], [0.5, math.inf, 0.1, 0.1]])}, r"finite, .* got \[0.5, inf"),
            ({"boxes": torch.tensor([[0.5, 0.5, 0.1, 0.1], [0.5, 0.5, -0.5, 0.1]])}, r"sizes of at least 0, got \[0.5"),
            ({"boxes": None}, r"a dict with the tensors class_labels and boxes, got NoneType; add boxes"),
        ],
    )
    def test_wrong_values_are_named(self, family, change, message):
        images, labels = batch()
        labels[0] |= change
        with pytest.raises((TypeError, ValueError), match=rf"use_ranking_loss: expected labels\[0\].*{message}"):
            use_ranking_loss(family())(pixel_values=images, labels=labels)

    @pytest.mark.parametrize("labels", [[], batch()[1][:1], {"class_labels": torch.tensor([0])}])
    def test_one_target_for_each_image(self, labels):
        with pytest.raises(ValueError, match="expected labels with one target for each of 2 images, got "):
            use_ranking_loss(deformable_detr())(pixel_values=batch()[0], labels=labels)

    @pytest.mark.sampled(5)
    @pytest.mark.parametrize("family", [deformable_detr, d_fine, lw_detr])
    @pytest.mark.parametrize(
        "box", [(0.5, 0.5, 0.0, 0.0), (0.5, 0.5, 1e-30, 1e-30), (0.5, 0.5, 1.0, 1.0), (3.0, -2.0, 0.1, 0.1)]
    )
    def test_extreme_boxes_keep_loss_and_gradients_finite(self, family, box):
        images, labels = batch()
        labels[0]["boxes"][0] = torch.tensor(box)
        model = use_ranking_loss(family())
        loss = model(pixel_values=images, labels=labels).loss
        loss.backward()
        assert loss.isfinite()
        assert all(each.grad.isfinite().all() for each in model.parameters() if each.grad is not None)


class TestLibrary:
    def test_the_installed_version_fits(self):
        library.check_library()

    @pytest.mark.parametrize(
        ("name", "replacement"),
        [
            ("loss_rt_detr.RTDetrForObjectDetectionLoss", lambda logits, labels, config: None),
            ("loss_deformable_detr.DeformableDetrImageLoss.get_loss", lambda self, loss, indices: None),
            ("loss_lw_detr.LwDetrImageLoss", None),
        ],
    )
    def test_a_changed_signature_is_refused_at_import(self, monkeypatch, name, replacement):
        monkeypatch.setattr(f"transformers.loss.{name}", replacement)
        with pytest.raises(
            ImportError, match=rf"expected {name}\(.*got .*in transformers 5.*supported: transformers 5"
        ):
            importlib.reload(adapter)

    def test_an_old_version_is_refused(self, monkeypatch):
        monkeypatch.setattr("transformers.__version__", "4.57.1")  # by name, as transformers replaces its own module
        with pytest.raises(ImportError, match=r"got version 4.57.1 .*supported: transformers 5"):
            importlib.reload(adapter)

    def test_a_loss_function_without_a_setter_is_refused(self, monkeypatch):
        monkeypatch.setattr(hf.PreTrainedModel, "loss_function", property(lambda self: None))
        with pytest.raises(ImportError, match="a property with a setter"):
            importlib.reload(adapter)

    def test_without_transformers(self, monkeypatch):
        monkeypatch.setattr(library, "find_spec", lambda name: None)
        with pytest.raises(ImportError, match=r'got none; install it with: pip install "bucketrank\[transformers\]"'):
            library.check_library()

    def test_later_models_may_be_missing(self, monkeypatch):
        find_spec = importlib.util.find_spec
        monkeypatch.setattr(library, "find_spec", lambda name: None if "deimv2" in name else find_spec(name))
        library.check_library()
