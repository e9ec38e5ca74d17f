"""The torchvision adapter, on small models with random weights."""

import copy
import pickle
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torchvision.models.detection.roi_heads import RoIHeads

from bucketrank.integrations.ranking_loss import LossName, RankingLoss
from bucketrank.integrations.torchvision import undo, use_ranking_loss
from bucketrank.losses import ap_loss, rank_sort_loss
from bucketrank.losses.backend import METHODS
from bucketrank.settings.choices import Method
from tests.integrations.coloured_squares import batch
from tests.integrations.gradients import gradient_of
from tests.integrations.torchvision_distributed import train_in_process
from tests.integrations.torchvision_models import CLASSES, MODELS, build
from tests.integrations.torchvision_training import average_precision, train

ROI = ["loss_classifier_rank", "loss_classifier_sort", "loss_box_reg"]
RPN = ["loss_objectness_rank", "loss_objectness_sort", "loss_rpn_box_reg"]
DENSE = ["classification_rank", "classification_sort", "bbox_regression"]
KEYS = {
    "faster_rcnn": [*ROI, *RPN],
    "mask_rcnn": [*ROI, *RPN, "loss_mask"],
    "keypoint_rcnn": [*ROI, *RPN, "loss_keypoint"],
    "retinanet": DENSE,
    "fcos": [*DENSE, "bbox_ctrness"],
    "ssd": DENSE,
}
SOFTMAX = ["faster_rcnn", "ssd"]
every_model = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(scope="module")
def trained() -> dict[str, nn.Module]:
    """Softmax models trained with their own loss."""
    torch.set_num_threads(1)
    models = {}
    for name in SOFTMAX:
        models[name] = build(name)
        train(models[name], 60, lambda step: batch(2, 1, 2, seed=100 + step))
    return models


def thresholds(model: nn.Module) -> dict[str, float]:
    return {name: vars(part)["score_thresh"] for name, part in model.named_modules() if hasattr(part, "score_thresh")}


def snapshot(model: nn.Module) -> dict[str, object]:
    """Return everything that undo has to restore, except the values of the parameters."""
    attributes = {
        name: {key for key in vars(part) if not key.startswith("_backward") and not key.startswith("_forward")}
        for name, part in model.named_modules()
    }
    return {
        "classes": {name: type(part) for name, part in model.named_modules()},
        "attributes": attributes,
        "thresholds": thresholds(model),
        "keys": list(model.state_dict()),
        "identities": {name: id(parameter) for name, parameter in model.named_parameters()},
    }


def assert_same_detections(first: list[dict[str, Tensor]], second: list[dict[str, Tensor]]) -> None:
    for one, other in zip(first, second, strict=True):
        assert list(one) == list(other)
        for key in one:
            torch.testing.assert_close(one[key], other[key], rtol=0, atol=0)


class TestTraining:
    @pytest.mark.slow
    @pytest.mark.parametrize("ranked", [True, False], ids=["ranking", "own"])
    @every_model
    def test_overfits_one_batch(self, name, ranked):
        model = build(name)
        if ranked:
            use_ranking_loss(model)
        images, targets = batch(2, 1, 2)
        untrained = average_precision(model, images, targets)["AP50"]
        totals = train(model, 50, lambda step: (images, targets))
        assert totals[-1] < 0.6 * totals[0]
        trained = average_precision(model, images, targets)["AP50"]
        assert trained > untrained + 0.3
        assert trained > (0.8 if ranked else 0.4)

    @pytest.mark.parametrize("loss", ["rs", "ap"])
    @every_model
    def test_the_loss_dict_names_the_terms(self, name, loss):
        model = use_ranking_loss(build(name), loss=loss)
        losses = model(*batch(2, 1))
        assert set(losses) == {key for key in KEYS[name] if loss == "rs" or not key.endswith("_sort")}
        boxes = [("loss_box_reg", "loss_classifier"), ("loss_rpn_box_reg", "loss_objectness")]
        for box, scores in [*boxes, ("bbox_regression", "classification")]:
            if box in losses:  # self-balanced per head
                terms = [losses[f"{scores}_{term}"] for term in ("rank", "sort") if f"{scores}_{term}" in losses]
                torch.testing.assert_close(losses[box], torch.stack(terms).sum())

    @pytest.mark.sampled(5)
    @pytest.mark.parametrize("loss", ["rs", "ap"])
    @every_model
    def test_the_ranking_loss_is_called_with_the_settings(self, name, loss, monkeypatch):
        calls = []

        def counted(logits, targets, *, delta, method):
            calls.append((targets, delta, method))
            return original(logits, targets, delta=delta, method=method)

        original = rank_sort_loss if loss == "rs" else ap_loss
        monkeypatch.setattr(f"bucketrank.integrations.ranking_loss.{original.__name__}", counted)
        model = use_ranking_loss(build(name), loss=loss, method="pairwise", delta=0.25)
        images, targets = batch(2, 1)
        model(images, targets)
        assert len(calls) == (2 if "rcnn" in name else 1)
        for ranked_targets, delta, method in calls:
            assert (ranked_targets > 0).any()
            assert (ranked_targets == 0).any()
            assert (delta, method) == (0.25, "pairwise")
        undo(model)(images, targets)
        assert len(calls) == (2 if "rcnn" in name else 1)

    @pytest.mark.parametrize("part", ["rpn", "roi_heads"])
    def test_nothing_is_sampled(self, part, monkeypatch):
        """Samplers for fewer candidates per image than there are do not change the ranking."""
        shapes, values = [], []

        def counted(logits, targets, **settings):
            shapes.append((len(logits), int((targets >= 0).sum())))
            return rank_sort_loss(logits, targets, **settings)

        monkeypatch.setattr("bucketrank.integrations.ranking_loss.rank_sort_loss", counted)
        for size in (512, 4):
            model = use_ranking_loss(build("faster_rcnn"))
            getattr(model, part).fg_bg_sampler.batch_size_per_image = size
            values.append(sum(model(*batch(2, 1)).values()))
        assert shapes[:2] == shapes[2:]
        assert all(ranked > 2 * 2 * 4 for _, ranked in shapes)  # images, classes, the smaller sampler
        torch.testing.assert_close(*values, rtol=0, atol=0)

    @pytest.mark.sampled(3)
    @every_model
    def test_every_parameter_that_had_a_gradient_has_one(self, name):
        trained = []
        for model in (build(name), use_ranking_loss(build(name))):
            sum(model(*batch(2, 1)).values()).backward()
            trained.append({key for key, value in model.named_parameters() if value.grad is not None})
            assert all(value.grad.isfinite().all() for value in model.parameters() if value.grad is not None)
        assert trained[0] == trained[1]

    @pytest.mark.sampled(5)
    @pytest.mark.parametrize("objects", [(0, 0), (0, 2)], ids=["batch", "image"])
    @every_model
    def test_without_objects(self, name, objects):
        model = use_ranking_loss(build(name))
        losses = model(*batch(*objects))
        assert set(losses) == set(KEYS[name])
        sum(losses.values()).backward()
        gradients = [gradient_of(value) for value in model.parameters()]
        assert all(gradient.isfinite().all() for gradient in gradients)
        values = {key: loss.item() for key, loss in losses.items() if key not in {"loss_mask", "loss_keypoint"}}
        if any(objects):
            assert all(value > 0 for value in values.values())
        else:
            assert set(values.values()) == {0.0}
            assert not any(gradient.any() for gradient in gradients)

    @pytest.mark.sampled(5)
    @pytest.mark.parametrize("loss", get_args(LossName))
    @every_model
    def test_the_box_weight_reaches_every_head(self, name, loss):
        one, three = (use_ranking_loss(build(name), loss=loss, box_weight=weight)(*batch(2, 1)) for weight in (1, 3))
        boxes = [key for key in one if key in {"loss_box_reg", "loss_rpn_box_reg", "bbox_regression"}]
        assert len(boxes) == (2 if "rcnn" in name else 1)
        for key in one:
            if key not in {"loss_mask", "loss_keypoint"}:  # these sample at random
                torch.testing.assert_close(three[key], (3 if key in boxes else 1) * one[key])

    @pytest.mark.parametrize("method", get_args(Method))
    def test_every_method_of_the_type_is_accepted(self, method):
        losses = use_ranking_loss(build("ssd"), method=method)(*batch(2, 1))
        assert losses["classification_rank"] > 0

    def test_the_type_names_every_method_of_the_losses(self):
        assert set(get_args(Method)) == set(METHODS)

    @pytest.mark.sampled(4)
    @every_model
    def test_bf16_autocast(self, name):
        images, targets = batch(2, 1)
        expected = use_ranking_loss(build(name))(images, targets)
        model = use_ranking_loss(build(name))
        with torch.autocast("cpu", torch.bfloat16):
            losses = model(images, targets)
        sum(losses.values()).backward()
        assert {loss.dtype for loss in losses.values()} == {torch.float32}
        for key in losses:
            if key.endswith("_rank"):  # the other terms depend on the order of the proposals
                torch.testing.assert_close(losses[key], expected[key], rtol=0.05, atol=0.01)
        assert all(gradient_of(value).isfinite().all() for value in model.parameters())
        assert any(gradient_of(value).any() for value in model.parameters())

    @pytest.mark.parametrize("name", ["retinanet", "fcos"])
    def test_labels_of_32_bits(self, name):
        """These two models take them with their own loss."""
        values = []
        for dtype in (torch.int64, torch.int32):
            model = use_ranking_loss(build(name))
            images, targets = batch(2, 1)
            values.append(model(images, [{**each, "labels": each["labels"].to(dtype)} for each in targets]))
        torch.testing.assert_close(values[0], values[1])

    @pytest.mark.sampled(3)
    @every_model
    def test_labels_outside_the_classes_are_refused(self, name):
        model = use_ranking_loss(build(name))
        images, targets = batch(2, 1)
        first = 0 if name in {"retinanet", "fcos"} else 1
        for label in (first - 1, -7, CLASSES, 1000):
            targets[1]["labels"][-1] = label  # one of all objects
            with pytest.raises(ValueError, match=rf"expected labels from {first} to 2.*, got {label}; correct the"):
                model(images, targets)
        for label in (first, CLASSES - 1):
            targets[1]["labels"][-1] = label
            assert all(loss.isfinite() for loss in model(images, targets).values())

    @every_model
    def test_every_box_has_a_label(self, name):
        model = use_ranking_loss(build(name))
        images, targets = batch(2, 1)
        for wrong, shape in ((torch.ones(0, dtype=torch.int64), r"\(0,\)"), (torch.tensor(1), r"\(\)")):
            targets[1]["labels"] = wrong
            with pytest.raises(ValueError, match=rf"expected labels of shape \(.,\), .* got {shape}"):
                model(images, targets)
        del targets[1]["labels"]
        with pytest.raises(ValueError, match=r"expected labels in every target, got boxes, .* in target 1; add them"):
            model(images, targets)

    def test_the_rpn_has_a_weight_of_a_fifth(self, monkeypatch):
        values: list[Tensor] = []

        def noted(logits, targets, **settings):
            terms = rank_sort_loss(logits, targets, **settings)
            values.append(terms.ranking)
            return terms

        monkeypatch.setattr("bucketrank.integrations.ranking_loss.rank_sort_loss", noted)
        losses = use_ranking_loss(build("faster_rcnn"))(*batch(2, 1))
        torch.testing.assert_close(losses["loss_objectness_rank"], 0.2 * values[0])
        torch.testing.assert_close(losses["loss_classifier_rank"], values[1])

    def test_centre_ness_keeps_its_own_loss(self):
        images, targets = batch(2, 1, 0)
        own, ranked = build("fcos"), use_ranking_loss(build("fcos"))
        losses = [model(images, targets)["bbox_ctrness"] for model in (own, ranked)]
        torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=0)
        branches = [model.head.regression_head.bbox_ctrness.weight for model in (own, ranked)]
        gradients = [torch.autograd.grad(loss, branch)[0] for loss, branch in zip(losses, branches, strict=True)]
        torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)
        assert gradients[0].any()

    def test_the_mask_head_sees_no_more_proposals_than_before(self):
        model = build("mask_rcnn")
        model.roi_heads.fg_bg_sampler.batch_size_per_image = 4  # a quarter of them positive: 1 per image
        use_ranking_loss(model)
        seen: list[int] = []
        model.roi_heads.mask_head.register_forward_hook(lambda _module, _inputs, output: seen.append(len(output)))
        images, targets = batch(2, 2)
        model(images, targets)
        assert seen == [2]  # of at least 2 positives per image, as the objects are proposals too


class TestSeveralProcesses:
    @pytest.mark.slow
    def test_ddp_with_a_process_without_objects(self, tmp_path):
        spawn(train_in_process, (str(tmp_path), list(MODELS)), nprocs=2)
        for name in MODELS:
            first, second = (torch.load(tmp_path / f"{name}{rank}.pt", weights_only=True) for rank in range(2))
            before = build(name).state_dict()
            for key in before:
                torch.testing.assert_close(first[key], second[key], rtol=0, atol=0)
            moved = [key for key in before if not torch.equal(first[key], before[key])]
            assert len(moved) > 0.9 * len(before)  # not all: the boxes of a level without positives get no gradient


class TestUndo:
    @pytest.mark.sampled(4)
    @every_model
    def test_restores_the_model_exactly(self, name):
        model = build(name).eval()
        images, targets = batch(2, 1, seed=3)
        before, weights = snapshot(model), copy.deepcopy(model.state_dict())
        with torch.no_grad():
            detections = model(images)

        use_ranking_loss(model)
        assert snapshot(model) != before
        model.train()(images, targets)  # must leave no attributes
        model.eval()(images)
        assert undo(model) is model

        assert snapshot(model) == before
        for key, value in model.state_dict().items():
            torch.testing.assert_close(value, weights[key], rtol=0, atol=0)
        with torch.no_grad():
            assert_same_detections(model(images), detections)
        own = model.train()(images, targets)
        assert not any(key.endswith(("_rank", "_sort")) for key in own)

    @pytest.mark.sampled(4)
    @every_model
    def test_state_dict_round_trip(self, name):
        source = use_ranking_loss(build(name))
        train(source, 2, lambda step: batch(2, 1))
        ranked, plain = use_ranking_loss(build(name, seed=1)), build(name, seed=1)
        images, _ = batch(2, 1, seed=5)
        for target in (ranked, plain):
            target.load_state_dict(source.state_dict())
        for part in thresholds(plain):
            plain.get_submodule(part).score_thresh = 0.0
        with torch.no_grad():
            expected = source.eval()(images)
            assert_same_detections(ranked.eval()(images), expected)
            assert_same_detections(plain.eval()(images), expected)  # a stock model loads the weights too

    @pytest.mark.sampled(4)
    @pytest.mark.parametrize(
        "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"]
    )
    @every_model
    def test_a_copy_is_undone_by_itself(self, name, duplicate):
        model = use_ranking_loss(build(name), loss="ap")
        twin = undo(duplicate(model))
        assert "_rank" in str(list(model(*batch(1, 1))))
        assert "_rank" not in str(list(twin(*batch(1, 1))))

    def test_a_second_call_replaces_the_settings(self):
        model = build("retinanet")
        before = snapshot(model)
        use_ranking_loss(model, loss="rs")
        model.score_thresh = 0.3
        use_ranking_loss(model, loss="ap", delta=0.1)
        assert "classification_sort" not in model(*batch(1, 1))
        assert model.head.ranking_loss == RankingLoss(loss="ap", delta=0.1)
        assert model.score_thresh == 0
        assert snapshot(undo(model)) == before

    def test_a_second_call_reaches_a_new_part(self):
        model = use_ranking_loss(build("retinanet"))
        model.head = build("retinanet").head
        assert "classification" in model(*batch(1, 1))
        assert "classification_rank" in use_ranking_loss(model)(*batch(1, 1))

    def test_a_supported_model_with_its_own_loss_is_a_value_error(self):
        model = build("ssd")
        before = snapshot(model)
        with pytest.raises(ValueError, match="undo: expected a model with a ranking loss, got SSD with its own loss"):
            undo(model)
        with pytest.raises(ValueError, match="undo: expected a model with a ranking loss"):
            undo(undo(use_ranking_loss(model)))
        assert snapshot(model) == before

    @pytest.mark.parametrize("unsupported", [nn.Linear(2, 2), nn.DataParallel(build("ssd")), None], ids=type)
    def test_an_unsupported_model_is_a_type_error(self, unsupported):
        with pytest.raises(TypeError, match=f"undo: expected torchvision's .*got {type(unsupported).__name__};"):
            undo(unsupported)


class TestDetections:
    @pytest.mark.slow
    @pytest.mark.parametrize("name", SOFTMAX)
    def test_ap_is_the_same_right_after_the_call(self, name, trained):
        images, targets = batch(*[2] * 16, seed=7)
        own = average_precision(trained[name], images, targets)
        ranked = average_precision(use_ranking_loss(copy.deepcopy(trained[name])), images, targets)
        assert own["AP50"] > 0.2
        assert ranked["AP"] >= own["AP"] - 1e-6  # detections below the old thresholds can only add recall
        assert ranked["AP"] <= own["AP"] + 0.05

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("name", SOFTMAX)
    def test_detections_above_the_old_threshold_are_the_same(self, name, trained):
        images, _ = batch(2, 2, seed=8)
        own, ranked = trained[name].eval(), use_ranking_loss(copy.deepcopy(trained[name])).eval()
        cut = max(thresholds(own).values())
        with torch.no_grad():
            before, after = own(images), ranked(images)
        assert sum(len(one["scores"]) for one in before) > 0
        kept = [{key: value[other["scores"] > cut] for key, value in other.items()} for other in after]
        assert_same_detections(before, kept)

    @pytest.mark.parametrize("name", SOFTMAX)
    def test_the_ranked_logits_are_the_scores(self, name, trained, monkeypatch):
        """The sigmoid of the ranked logits is the probability that detections are sorted by."""
        seen: list[Tensor] = []
        model = use_ranking_loss(copy.deepcopy(trained[name])).train()
        outputs: list[Any] = []
        part = model.roi_heads.box_predictor if name == "faster_rcnn" else model.head
        part.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))

        def noted(logits, targets, **settings):
            seen.append(logits)
            return rank_sort_loss(logits, targets, **settings)

        monkeypatch.setattr("bucketrank.integrations.ranking_loss.rank_sort_loss", noted)
        model(*batch(2, 2))
        raw = outputs[0][0] if name == "faster_rcnn" else outputs[0]["cls_logits"].flatten(0, 1)
        ranked = next(logits for logits in seen if logits.shape == raw[:, 1:].shape)
        torch.testing.assert_close(ranked.sigmoid(), raw.softmax(-1)[:, 1:])

    @every_model
    def test_no_score_is_too_low_to_be_kept(self, name):
        model = build(name).eval()
        images, _ = batch(2)
        use_ranking_loss(model)
        assert set(thresholds(model).values()) == {0.0}
        with torch.no_grad():
            detections = model(images)[0]
        assert len(detections["scores"]) >= 50
        assert detections["scores"].min() < 0.4


class TestErrors:
    @pytest.mark.parametrize("unsupported", [nn.Linear(2, 2), None], ids=type)
    def test_an_unsupported_model(self, unsupported):
        name = type(unsupported).__name__
        with pytest.raises(TypeError, match=rf"FasterRCNN.*RetinaNet.*got {name};.*docs/any-model.md"):
            use_ranking_loss(unsupported)

    def test_a_part_with_a_loss_of_its_own(self):
        class Own(RoIHeads):  # type: ignore[misc]
            pass

        model = build("faster_rcnn")
        before = snapshot(model)
        model.roi_heads.__class__ = Own
        with pytest.raises(
            TypeError, match=r"expected the losses of FasterRCNN in one of torchvision's own .* got Own"
        ):
            use_ranking_loss(model)
        model.roi_heads.__class__ = RoIHeads
        assert snapshot(model) == before

    @pytest.mark.parametrize(
        "settings", [{"loss": "focal"}, {"method": "guess"}, {"delta": -1.0}, {"box_weight": -1}, {"box_weight": "2"}]
    )
    def test_wrong_settings_leave_the_model_alone(self, settings):
        model = build("ssd")
        before = snapshot(model)
        with pytest.raises(ValueError, match=f"use_ranking_loss: expected {next(iter(settings))} "):
            use_ranking_loss(model, **settings)
        assert snapshot(model) == before
