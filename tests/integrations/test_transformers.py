"""The transformers adapter, on a small model of every family with random weights."""

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

pytest.importorskip("transformers")

import torch
import transformers as hf
from accelerate import Accelerator

from bucketrank import rank_sort_loss
from bucketrank.integrations.ranking_loss import LossName, centre_size_iou
from bucketrank.integrations.transformers import undo, use_ranking_loss
from tests.integrations.transformers_models import (
    CLASSES,
    MODELS,
    QUERIES,
    batch,
    deformable_detr,
    empty_batch,
    make,
)

every_model = pytest.mark.parametrize("name", MODELS)
SLOW_LEARNERS = ("conditional_detr", "dab_detr")  # they need hundreds of steps
# One model per layout of layer outputs.
each_layout = pytest.mark.parametrize("name", ["two_stage_deformable_detr", "d_fine", "lw_detr"])


@pytest.fixture
def calls(monkeypatch):
    """Record the calls of Rank & Sort loss: the numbers of logits and of positives of each ranking."""
    recorded = []

    def counted(logits, targets, *, sizes, **settings):
        recorded.append([(len(part), int((part > 0).sum())) for part in targets.split(sizes)])
        return original(logits, targets, sizes=sizes, **settings)

    original = rank_sort_loss
    monkeypatch.setattr("bucketrank.integrations.ranking_loss.rank_sort_loss", counted)
    return recorded


def step(model, data=None):
    images, labels = batch() if data is None else data
    torch.manual_seed(1)  # the noise of the denoising queries
    return model(pixel_values=images, labels=labels)


def layers(loss_dict, stem):
    return {key.removeprefix(stem) for key in loss_dict if key.startswith(stem)}


@every_model
class TestEveryModel:
    @pytest.mark.sampled(5)
    def test_every_layer_is_ranked(self, name, calls):
        model = make(name).train()
        own = step(model)
        assert calls == []
        ranked = step(use_ranking_loss(model))
        assert [len(rankings) for rankings in calls] == [MODELS[name][1]]
        assert len(layers(ranked.loss_dict, "loss_rank")) == MODELS[name][1]
        assert not any(word in key for key in ranked.loss_dict for word in ("_ce", "_vfl", "_mal"))
        # All other terms keep their names, and the only new names are rank and sort.
        classification = {key for key in own.loss_dict if any(word in key for word in ("_ce", "_vfl", "_mal"))}
        assert set(own.loss_dict) - classification <= set(ranked.loss_dict) | {
            key for key in own.loss_dict if "_fgl" in key or "_ddf" in key
        }
        assert {key.split("_")[1] for key in own.loss_dict} - {"ce", "vfl", "mal"} | {"rank", "sort"} == {
            key.split("_")[1] for key in ranked.loss_dict
        }

    @pytest.mark.sampled(5)
    def test_boxes_are_balanced_per_layer(self, name):
        output = step(use_ranking_loss(make(name).train()))
        terms = output.loss_dict
        for layer in layers(terms, "loss_rank"):
            ranked = terms[f"loss_rank{layer}"] + terms[f"loss_sort{layer}"]
            torch.testing.assert_close(terms[f"loss_bbox{layer}"], ranked)
            torch.testing.assert_close(terms[f"loss_giou{layer}"], ranked)
        trained = [value for key, value in terms.items() if key.startswith("loss_")]
        torch.testing.assert_close(output.loss, torch.stack(trained).sum())

    @pytest.mark.sampled(7)
    @pytest.mark.parametrize("loss", get_args(LossName))
    def test_a_box_weight_multiplies_the_weights_of_the_model(self, name, loss):
        """At 1, L1 and GIoU loss of the last layer are the model's own; at 3, all layers have 3 times the weight."""
        model = make(name).train()
        own, fixed = step(model), step(use_ranking_loss(model, loss=loss, box_weight=1))
        triple = step(use_ranking_loss(model, loss=loss, box_weight=3))
        weighs_terms = "weight_loss_bbox" in vars(model.config)  # RT-DETR, D-FINE, DEIMv2: the terms carry the weights
        for term in ("loss_bbox", "loss_giou"):
            torch.testing.assert_close(fixed.loss_dict[term], own.loss_dict[term])
        boxes = torch.tensor(0.0)
        for layer in layers(fixed.loss_dict, "loss_bbox"):
            for term, default in (("loss_bbox", 5), ("loss_giou", 2)):
                value = fixed.loss_dict[term + layer]
                boxes = boxes + (1 if weighs_terms else default) * value
                torch.testing.assert_close(triple.loss_dict[term + layer], (3 if weighs_terms else 1) * value)
        torch.testing.assert_close(triple.loss - fixed.loss, 2 * boxes)

    @pytest.mark.sampled(5)
    def test_without_objects(self, name):
        model = use_ranking_loss(make(name).train())
        output = step(model, empty_batch())
        terms = [value for key, value in output.loss_dict.items() if key.startswith(("loss_rank", "loss_sort"))]
        assert terms
        assert all(value == 0 for value in terms)
        assert torch.isfinite(output.loss)
        output.loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert len(gradients) > 20
        assert all(torch.isfinite(gradient).all() for gradient in gradients)

    @pytest.mark.sampled(5)
    def test_bfloat16_autocast(self, name):
        model = use_ranking_loss(make(name).train())
        expected = step(model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = step(model)
        assert got.logits.dtype == torch.bfloat16
        assert got.loss.dtype == torch.float32
        torch.testing.assert_close(got.loss, expected.loss, rtol=0.15, atol=0.1)
        got.loss.backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)

    @pytest.mark.sampled(5)
    def test_undo_restores_exactly(self, name):
        model = make(name).train()
        state, before = snapshot(model), step(model)
        use_ranking_loss(model)
        use_ranking_loss(model, loss="ap", class_cost=4)  # a second call must not change what undo restores
        step(model).loss.backward()
        model.zero_grad(set_to_none=True)
        assert undo(model) is model
        structure, parameters = snapshot(model)
        assert structure == state[0]
        torch.testing.assert_close(parameters, state[1], rtol=0, atol=0)
        after = step(model)
        assert list(after.loss_dict) == list(before.loss_dict)
        for key, value in before.loss_dict.items():
            torch.testing.assert_close(after.loss_dict[key], value, rtol=0, atol=0, msg=key)

    @pytest.mark.sampled(5)
    def test_inference_does_not_change(self, name):
        model = make(name).eval()
        images, _ = batch()
        with torch.no_grad():
            before = model(pixel_values=images)
            after = use_ranking_loss(model)(pixel_values=images)
        assert after.loss is None
        torch.testing.assert_close(after.logits, before.logits, rtol=0, atol=0)
        torch.testing.assert_close(after.pred_boxes, before.pred_boxes, rtol=0, atol=0)

    @pytest.mark.sampled(5)
    def test_loss_in_evaluation(self, name, calls):
        model = use_ranking_loss(make(name).eval())
        with torch.no_grad():
            output = step(model)
        assert torch.isfinite(output.loss)
        assert output.loss_dict["loss_rank"] > 0
        assert calls[0][0] == (2 * QUERIES * CLASSES, 3)  # no groups, no denoising queries; three objects


class TestShortTraining:
    @pytest.mark.slow
    @pytest.mark.parametrize("name", [name for name in MODELS if name not in SLOW_LEARNERS])
    def test_overfits_one_batch(self, name):
        first, last = train(use_ranking_loss(trainable(name)), steps=70 if name in ("lw_detr", "rf_detr") else 30)
        assert last.loss.item() < 0.6 * first.loss.item()
        assert last.loss_dict["loss_rank"].item() < 0.6 * first.loss_dict["loss_rank"].item()


# The other models overfit in tests/detectors/test_overfit_libraries.py, through the same adapter.
@pytest.mark.parametrize("name", ["two_stage_deformable_detr", "rt_detr_v2"])
@pytest.mark.slow
class TestLongTraining:
    def test_ranking_and_boxes_are_learned(self, name):
        model = use_ranking_loss(trainable(name))
        _, last = train(model, steps=500, settle=True)
        assert last.loss_dict["loss_rank"].item() < 0.3
        images, labels = batch()
        with torch.no_grad():
            output = model.eval()(pixel_values=images)
        ious = [
            centre_size_iou(output.pred_boxes[image, output.logits[image, :, label].argmax()][None], box[None]).item()
            for image, target in enumerate(labels)
            for label, box in zip(target["class_labels"], target["boxes"], strict=True)
        ]
        assert sorted(ious)[1] > 0.6, ious  # two of the three objects


def snapshot(model):
    """Return everything that the adapter might change: attributes, hooks and parameters."""
    attributes = {key: value for key, value in model.__dict__.items() if not isinstance(value, dict)}
    hooks = {name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()}
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return (attributes, hooks, list(model.state_dict())), parameters


def trainable(name):
    model = make(name).train()
    for parameter in model.parameters():  # some models freeze their backbone, which has random weights here
        parameter.requires_grad_(requires_grad=True)
    return model


def train(model, steps, *, settle=False):
    """Train at a constant rate; with ``settle``, clip gradients and lower the rate to 0 over the last third."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min(1.0, 3 * (1 - step / steps)))
    images, labels = batch()
    torch.manual_seed(0)
    outputs = []
    for _ in range(steps):
        output = model(pixel_values=images, labels=labels)
        optimiser.zero_grad()
        output.loss.backward()
        if settle:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimiser.step()
        if settle:
            schedule.step()
        outputs.append(output)
    return outputs[0], outputs[-1]


class TestHandWorked:
    """One image and three queries of two classes, with the loss called as the model calls it."""

    CONFIG = hf.DeformableDetrConfig(num_labels=2, class_cost=2, bbox_cost=5, giou_cost=2)
    BOXES = ((0.25, 0.25, 0.5, 0.5), (0.25, 0.5, 0.5, 1.0), (0.9, 0.9, 0.1, 0.1))

    def loss(self, logits, objects, classes, **settings):
        model = use_ranking_loss(deformable_detr(), delta=0, **settings)
        labels = [{"class_labels": torch.tensor(classes), "boxes": torch.tensor(objects)}]
        boxes = torch.tensor([self.BOXES], requires_grad=True)
        logits = torch.tensor([logits], requires_grad=True)
        value, terms, _ = model.loss_function(logits, labels, logits.device, boxes, self.CONFIG)
        value.backward()
        assert logits.grad is not None
        assert boxes.grad is not None
        return terms, logits.grad[0], boxes.grad[0]

    def test_all_pairs_of_query_and_class_form_one_ranking(self):
        # Matched: query 0 to object 0 (IoU 1) and query 1 to object 1 (IoU 1/2). Of the four negatives, one is above
        # the first positive, which is below the second: rank (1 / (2 + 1) + 0 / 1) / 2. The second positive has IoU 1/2
        # and is above the first, so the sorting error of the first is (1/2 + 0) / 2 - 0; that of the second is 0.
        objects = [self.BOXES[0], (0.25, 0.75, 0.5, 0.5)]
        terms, gradient, _ = self.loss([[1.0, 2.0], [0.0, 3.0], [-1.0, -2.0]], objects, [0, 1])
        assert terms["loss_rank"].item() == pytest.approx(1 / 6)
        assert terms["loss_sort"].item() == pytest.approx(1 / 8)
        assert terms["loss_bbox"].item() == pytest.approx(1 / 6 + 1 / 8)
        assert gradient[0, 0] < 0 < gradient[0, 1]
        assert gradient[2].abs().sum() == 0

    def test_a_match_without_overlap_stays_a_positive(self):
        terms, gradient, _ = self.loss([[0.0, 2.0], [0.0, 1.0], [0.0, 1.0]], [(0.6, 0.9, 0.1, 0.1)], [1])
        assert terms["loss_rank"] > 0
        assert gradient[2, 1] < 0  # matched by its L1 distance, as the IoU is 0
        assert gradient[0, 1] > 0

    def test_boxes_are_trained_by_l1_and_giou_alone(self):
        # One object, matched to query 2: the ranking is perfect, so the balanced box losses are 0.
        _, _, boxes = self.loss([[0.0, 0.0], [0.0, 0.0], [0.0, 9.0]], [(0.8, 0.9, 0.1, 0.1)], [1])
        assert boxes.abs().sum() == 0
        _, _, boxes = self.loss([[0.0, 9.5], [0.0, 0.0], [0.0, 9.0]], [(0.8, 0.9, 0.1, 0.1)], [1])
        assert boxes[2].abs().sum() > 0
        assert boxes[:2].abs().sum() == 0

    def test_class_cost(self):
        # The box cost matches the object to query 0, the class cost to query 1.
        logits, objects = [[0.0, -4.0], [0.0, 4.0], [0.0, -9.0]], [(0.25, 0.3, 0.5, 0.6)]
        _, gradient, _ = self.loss(logits, objects, [1], class_cost=0)
        assert gradient[0, 1] < 0
        _, gradient, _ = self.loss(logits, objects, [1], class_cost=4)
        assert gradient[0, 1] == 0

    def test_ap_has_no_sorting_term(self):
        terms, _, _ = self.loss([[1.0, 2.0], [0.0, 3.0], [-1.0, -2.0]], [self.BOXES[0]], [0], loss="ap")
        assert "loss_sort" not in terms
        assert terms["loss_rank"].item() == pytest.approx(2 / 3)  # two negatives above the one positive
        assert terms["loss_giou"] == 0  # its box is exact, so there is nothing to balance


class TestClassWeight:
    """The model's weight for its classification loss multiplies the ranking terms and the balanced box terms."""

    @pytest.mark.parametrize(
        ("name", "setting"), [("rt_detr", "weight_loss_vfl"), ("lw_detr", "class_loss_coefficient")]
    )
    @pytest.mark.parametrize("loss", get_args(LossName))
    def test_the_loss_is_proportional_to_it(self, name, setting, loss):
        model = use_ranking_loss(make(name).train(), loss=loss)
        before = step(model).loss
        setattr(model.config, setting, 3 * getattr(model.config, setting))
        torch.testing.assert_close(step(model).loss, 3 * before)


class TestQueries:
    """Queries that are ranked together, in a batch of two images with two objects and one object."""

    def test_denoising_queries_have_their_own_ranking(self, calls):
        step(use_ranking_loss(make("rt_detr").train()))
        queries = (2 * QUERIES * CLASSES, 3)
        # num_denoising is 8 and an image has at most 2 objects: 4 groups, each of 2 positives and 2 negatives.
        denoised = (2 * 4 * (2 + 2) * CLASSES, 4 * 3)
        assert calls == [[queries] * 3 + [denoised] * 2]

    def test_groups_are_ranked_together(self, calls):
        step(use_ranking_loss(make("lw_detr").train()))
        assert calls == [[(2 * 3 * QUERIES * CLASSES, 3 * 3)] * 3]


class TestEncoder:
    def test_two_stage_proposals_get_a_gradient(self):
        """With the library's own loss the heads of the encoder get no gradient."""
        heads = ("model.enc_output.weight", "class_embed.2.weight", "bbox_embed.2.layers.0.weight")
        for ranking in (False, True):
            model = make("two_stage_deformable_detr").train()
            if ranking:
                use_ranking_loss(model)
            step(model).loss.backward()
            for head in heads:
                gradient = model.get_parameter(head).grad
                assert (gradient is not None) == ranking
            assert not ranking or model.get_parameter("class_embed.2.weight").grad[0].abs().sum() > 0
        assert model.loss_function.proposals is None  # released after each step

    def test_distributions_are_those_of_their_layer(self):
        """D-FINE's prediction before the first layer has no distributions of box edges; every layer after it has."""
        terms = step(use_ranking_loss(make("d_fine").train())).loss_dict
        assert layers(terms, "loss_fgl") == {"_aux_1", "_dn_1", "_dn_2"}
        assert layers(terms, "loss_ddf") == layers(terms, "loss_fgl")


class TestCopies:
    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
    def test_a_copy_ranks_and_is_undone_by_itself(self, copied, calls):
        model = use_ranking_loss(make("two_stage_deformable_detr").train())
        twin = copied(model)
        torch.testing.assert_close(step(twin).loss, step(model).loss)
        assert [len(rankings) for rankings in calls] == 2 * [MODELS["two_stage_deformable_detr"][1]]
        undo(twin)
        assert "loss_rank" not in step(twin).loss_dict
        assert "loss_rank_enc" in step(model).loss_dict

    def test_undo_restores_a_loss_set_by_the_user(self):
        model = make("rt_detr").train()
        model.loss_function = own = lambda *inputs, **more: (inputs[0].sum(), {"loss_own": inputs[0].sum()}, None)
        use_ranking_loss(model)
        assert "loss_rank" in step(model).loss_dict
        undo(model)
        assert model.loss_function is own
        assert list(step(model).loss_dict) == ["loss_own"]

    def test_the_loss_is_not_saved(self, tmp_path):
        model = use_ranking_loss(make("rt_detr"))
        model.save_pretrained(tmp_path)
        loaded = hf.RTDetrForObjectDetection.from_pretrained(tmp_path).train()
        assert "loss_vfl" in step(loaded).loss_dict
        assert "loss_rank" in step(use_ranking_loss(loaded)).loss_dict


class Squares(torch.utils.data.Dataset[dict[str, object]]):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        images, labels = batch()
        return {"pixel_values": images[index % 2], "labels": labels[index % 2]}


def collate(items):
    images = torch.stack([item["pixel_values"] for item in items])
    return {"pixel_values": images, "labels": [item["labels"] for item in items]}


class TestTraining:
    @pytest.mark.slow
    @each_layout
    def test_trainer(self, name, tmp_path, calls):
        model = use_ranking_loss(make(name))
        arguments = hf.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=2,
            per_device_train_batch_size=2,
            report_to=[],
            use_cpu=True,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
            save_strategy="no",
            disable_tqdm=True,
        )
        before = [p.detach().clone() for p in model.parameters() if p.requires_grad]
        trainer = hf.Trainer(model, arguments, train_dataset=Squares(), data_collator=collate)
        assert trainer.train().training_loss > 0
        assert [len(rankings) for rankings in calls] == 2 * [MODELS[name][1]]
        after = [p for p in model.parameters() if p.requires_grad]
        assert any(not torch.equal(a, b) for a, b in zip(after, before, strict=True))

    @pytest.mark.sampled(3)
    @each_layout
    def test_accelerate(self, name, calls):
        accelerator = Accelerator(cpu=True)
        model = use_ranking_loss(make(name).train())
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loader = torch.utils.data.DataLoader(Squares(), batch_size=2, collate_fn=collate)
        model, optimiser, loader = accelerator.prepare(model, optimiser, loader)
        for inputs in loader:
            loss = model(**inputs).loss
            accelerator.backward(loss)
            optimiser.step()
            optimiser.zero_grad()
        assert [len(rankings) for rankings in calls] == 2 * [MODELS[name][1]]
        assert torch.isfinite(loss)

    @pytest.mark.slow
    def test_two_processes_one_without_objects(self):
        # With any loss, RT-DETR does not use its embedding of denoised classes in a batch without objects, and RF-DETR
        # never uses its mask token. DistributedDataParallel needs find_unused_parameters=True for both.
        models = ["two_stage_deformable_detr", "lw_detr", "rt_detr:unused", "rf_detr:unused"]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        done = subprocess.run(
            [*command, "-m", "tests.integrations.transformers_distributed", *models],
            cwd=Path(__file__).parents[2],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        for model in models:
            name = model.removesuffix(":unused")
            lines = sorted(line for line in done.stdout.splitlines() if line.startswith(f"{name} "))
            fields = [dict(field.split("=") for field in line.split()[1:]) for line in lines]
            assert [field["same"] for field in fields] == ["True", "True"]
            assert float(fields[0]["loss"]) > 0 == float(fields[1]["loss"])
            assert float(fields[0]["gradient"]) == float(fields[1]["gradient"]) > 0
