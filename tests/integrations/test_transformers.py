"""The ranking losses in detection transformers of every family, with random weights."""

import copy
import importlib.util
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch
import transformers as hf
from accelerate import Accelerator
from torch import nn

import bucketrank.integrations.ranking as shared
import bucketrank.integrations.transformers as adapter
from bucketrank import rank_sort_loss
from bucketrank.integrations.transformers import library, undo, use_ranking_loss
from bucketrank.integrations.transformers.criterion import overlaps
from tests.integrations.detr_models import CLASSES, MODELS, QUERIES, batch, deformable_detr, make, rt_detr
from tests.integrations.detr_models import without_objects as empty_batch

every_model = pytest.mark.parametrize("name", MODELS)
# One of each way in which models hand over their layers.
each_layout = pytest.mark.parametrize("name", ["two_stage_deformable_detr", "d_fine", "lw_detr"])


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def calls(monkeypatch):
    """The calls of Rank & Sort loss: the shape of the logits, and how many of them are positives."""
    made = []

    def counted(logits, targets, **settings):
        made.append((tuple(logits.shape), int((targets > 0).sum())))
        return original(logits, targets, **settings)

    original = rank_sort_loss
    monkeypatch.setattr(shared, "rank_sort_loss", counted)
    return made


def step(model, data=None):
    images, labels = batch() if data is None else data
    torch.manual_seed(1)  # the noise of the denoising queries
    return model(pixel_values=images, labels=labels)


def layers(loss_dict, stem):
    return {key.removeprefix(stem) for key in loss_dict if key.startswith(stem)}


@every_model
class TestEveryModel:
    def test_every_layer_is_ranked(self, name, calls):
        model = make(name).train()
        own = step(model)
        assert calls == []
        ranked = step(use_ranking_loss(model))
        assert len(calls) == MODELS[name][1]
        assert len(layers(ranked.loss_dict, "loss_rank")) == MODELS[name][1]
        assert not any(word in key for key in ranked.loss_dict for word in ("_ce", "_vfl", "_mal"))
        # What is not classification keeps its names, and there are no names but those and the new ones.
        classification = {key for key in own.loss_dict if any(word in key for word in ("_ce", "_vfl", "_mal"))}
        assert set(own.loss_dict) - classification <= set(ranked.loss_dict) | {
            key for key in own.loss_dict if "_fgl" in key or "_ddf" in key
        }
        assert {key.split("_")[1] for key in own.loss_dict} - {"ce", "vfl", "mal"} | {"rank", "sort"} == {
            key.split("_")[1] for key in ranked.loss_dict
        }

    def test_boxes_are_balanced_layer_by_layer(self, name):
        output = step(use_ranking_loss(make(name).train()))
        terms = output.loss_dict
        for layer in layers(terms, "loss_rank"):
            ranked = terms[f"loss_rank{layer}"] + terms[f"loss_sort{layer}"]
            torch.testing.assert_close(terms[f"loss_bbox{layer}"], ranked)
            torch.testing.assert_close(terms[f"loss_giou{layer}"], ranked)
        trained = [value for key, value in terms.items() if key.startswith("loss_")]
        torch.testing.assert_close(output.loss, torch.stack(trained).sum())

    def test_overfits_one_batch(self, name):
        if name in ("conditional_detr", "dab_detr"):
            pytest.skip("these take hundreds of steps: see TestLongTraining")
        for ranking in (False, True):  # the model's own loss first, beside it
            model = trainable(name)
            if ranking:
                use_ranking_loss(model)
            first, last = train(model, steps=70 if name in ("lw_detr", "rf_detr") else 30)
            assert last.loss.item() < (0.6 if ranking else 0.8) * first.loss.item()
            if ranking:
                assert last.loss_dict["loss_rank"].item() < 0.6 * first.loss_dict["loss_rank"].item()

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

    def test_undo_restores_exactly(self, name):
        model = make(name).train()
        state, before = snapshot(model), step(model)
        use_ranking_loss(model)
        use_ranking_loss(model, loss="ap", class_cost=4)  # a second call changes the settings, not what undo restores
        step(model).loss.backward()
        model.zero_grad(set_to_none=True)
        assert undo(model) is model
        assert snapshot(model) == state
        after = step(model)
        assert list(after.loss_dict) == list(before.loss_dict)
        for key, value in before.loss_dict.items():
            torch.testing.assert_close(after.loss_dict[key], value, rtol=0, atol=0, msg=key)

    def test_inference_stays(self, name):
        model = make(name).eval()
        images, _ = batch()
        with torch.no_grad():
            before = model(pixel_values=images)
            after = use_ranking_loss(model)(pixel_values=images)
        assert after.loss is None
        torch.testing.assert_close(after.logits, before.logits, rtol=0, atol=0)
        torch.testing.assert_close(after.pred_boxes, before.pred_boxes, rtol=0, atol=0)

    def test_loss_in_evaluation(self, name, calls):
        model = use_ranking_loss(make(name).eval())
        with torch.no_grad():
            output = step(model)
        assert torch.isfinite(output.loss)
        assert output.loss_dict["loss_rank"] > 0
        assert calls[0] == ((2, QUERIES, CLASSES), 3)  # no groups, no denoising queries; three objects


@every_model
@pytest.mark.slow
class TestLongTraining:
    def test_ranking_and_boxes_are_learned(self, name):
        model = use_ranking_loss(trainable(name))
        slow = name in ("conditional_detr", "dab_detr")
        _, last = train(model, steps=500 if slow else 300, settle=True)
        assert last.loss_dict["loss_rank"].item() < 0.3
        images, labels = batch()
        with torch.no_grad():
            output = model.eval()(pixel_values=images)
        found = [
            overlaps(output.pred_boxes[image, output.logits[image, :, kind].argmax()][None], box[None]).item()
            for image, target in enumerate(labels)
            for kind, box in zip(target["class_labels"], target["boxes"], strict=True)
        ]
        assert sorted(found)[1] > 0.6, found  # of three objects


def snapshot(model):
    """All that the adapter might change: attributes, modules, hooks and weights."""
    attributes = {key: value for key, value in model.__dict__.items() if not isinstance(value, dict)}
    hooks = {name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()}
    return attributes, hooks, list(model.state_dict())


def trainable(name):
    model = make(name).train()
    for parameter in model.parameters():  # some of these freeze a backbone of random weights
        parameter.requires_grad_(requires_grad=True)
    return model


def train(model, steps, *, settle=False):
    """A constant rate is quickest; to ``settle``, steps are bounded and the rate goes to zero in the last third."""
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
    """One image, three queries of two classes, called as the model calls its loss."""

    CONFIG = hf.DeformableDetrConfig(num_labels=2, class_cost=2, bbox_cost=5, giou_cost=2)
    BOXES = ((0.25, 0.25, 0.5, 0.5), (0.25, 0.5, 0.5, 1.0), (0.9, 0.9, 0.1, 0.1))

    def loss(self, logits, objects, kinds, **settings):
        model = use_ranking_loss(deformable_detr(), delta=0, **settings)
        labels = [{"class_labels": torch.tensor(kinds), "boxes": torch.tensor(objects)}]
        boxes = torch.tensor([self.BOXES], requires_grad=True)
        logits = torch.tensor([logits], requires_grad=True)
        value, terms, _ = model.loss_function(logits, labels, logits.device, boxes, self.CONFIG)
        value.backward()
        assert logits.grad is not None
        assert boxes.grad is not None
        return terms, logits.grad[0], boxes.grad[0]

    def test_terms_are_those_of_the_list_of_all_pairs(self):
        # Matched: query 0 to object 0 (IoU 1) and query 1 to object 1 (IoU 1/2). Of the four negatives, one is above
        # the first positive, which is below the second: rank (1 / (2 + 1) + 0 / 1) / 2. The first positive sees the
        # second, of IoU 1/2, above itself: its sorting error is (1/2 + 0) / 2 - 0; the second's is 0.
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
        assert gradient[2, 1] < 0  # matched by its distance: the IoU is 0
        assert gradient[0, 1] > 0

    def test_boxes_are_trained_by_l1_and_giou_alone(self):
        # One object, matched to query 2: the ranking is perfect, so the balanced box losses are 0.
        _, _, boxes = self.loss([[0.0, 0.0], [0.0, 0.0], [0.0, 9.0]], [(0.8, 0.9, 0.1, 0.1)], [1])
        assert boxes.abs().sum() == 0
        _, _, boxes = self.loss([[0.0, 9.5], [0.0, 0.0], [0.0, 9.0]], [(0.8, 0.9, 0.1, 0.1)], [1])
        assert boxes[2].abs().sum() > 0
        assert boxes[:2].abs().sum() == 0

    def test_class_cost(self):
        # By its box the object belongs to query 0, by its class to query 1.
        logits, objects = [[0.0, -4.0], [0.0, 4.0], [0.0, -9.0]], [(0.25, 0.3, 0.5, 0.6)]
        _, gradient, _ = self.loss(logits, objects, [1], class_cost=0)
        assert gradient[0, 1] < 0
        _, gradient, _ = self.loss(logits, objects, [1], class_cost=4)
        assert gradient[0, 1] == 0

    def test_ap_has_no_sorting_term(self):
        terms, _, _ = self.loss([[1.0, 2.0], [0.0, 3.0], [-1.0, -2.0]], [self.BOXES[0]], [0], loss="ap")
        assert "loss_sort" not in terms
        assert terms["loss_rank"].item() == pytest.approx(2 / 3)  # two negatives above the one positive
        assert terms["loss_giou"] == 0  # its box is perfect: nothing to balance


class TestQueries:
    """Which queries are ranked together; the batch has two images, of two objects and of one."""

    def test_denoising_queries_are_ranked_apart(self, calls):
        step(use_ranking_loss(make("rt_detr").train()))
        queries = ((2, QUERIES, CLASSES), 3)
        # 8 denoising queries asked for, 2 objects at most: 4 groups, each of 2 positives and 2 negatives.
        denoised = ((2, 4 * (2 + 2), CLASSES), 4 * 3)
        assert calls == [queries] * 3 + [denoised] * 2

    def test_groups_are_ranked_together(self, calls):
        step(use_ranking_loss(make("lw_detr").train()))
        assert calls == [((2, 3 * QUERIES, CLASSES), 3 * 3)] * 3


class TestEncoder:
    def test_two_stage_proposals_get_a_gradient(self):
        """The library leaves the encoder's heads without one."""
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
        assert model.loss_function.proposals is None  # nothing kept between steps

    def test_distributions_are_those_of_their_layer(self):
        """D-FINE's prediction ahead of the first layer has no distributions of edges; every layer after it has."""
        terms = step(use_ranking_loss(make("d_fine").train())).loss_dict
        assert layers(terms, "loss_fgl") == {"_aux_1", "_dn_1", "_dn_2"}
        assert layers(terms, "loss_ddf") == layers(terms, "loss_fgl")


class TestCopies:
    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
    def test_a_copy_ranks_and_is_undone_by_itself(self, copied, calls):
        model = use_ranking_loss(make("two_stage_deformable_detr").train())
        twin = copied(model)
        torch.testing.assert_close(step(twin).loss, step(model).loss)
        assert len(calls) == 2 * MODELS["two_stage_deformable_detr"][1]
        undo(twin)
        assert "loss_rank" not in step(twin).loss_dict
        assert "loss_rank_enc" in step(model).loss_dict

    def test_a_loss_of_the_users_comes_back(self):
        model = make("rt_detr").train()
        model.loss_function = own = lambda *inputs, **more: (inputs[0].sum(), {"loss_own": inputs[0].sum()}, None)
        use_ranking_loss(model)
        assert "loss_rank" in step(model).loss_dict
        undo(model)
        assert model.loss_function is own
        assert list(step(model).loss_dict) == ["loss_own"]

    def test_nothing_is_saved(self, tmp_path):
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
        assert len(calls) == 2 * MODELS[name][1]
        after = [p for p in model.parameters() if p.requires_grad]
        assert any(not torch.equal(a, b) for a, b in zip(after, before, strict=True))

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
        assert len(calls) == 2 * MODELS[name][1]
        assert torch.isfinite(loss)

    @pytest.mark.slow
    def test_two_processes_one_without_objects(self):
        # RT-DETR does not use its embedding of denoised classes without objects, RF-DETR never its mask token: with
        # their own losses too, DistributedDataParallel has to look for unused parameters (the Trainer has it do so).
        models = ["two_stage_deformable_detr", "lw_detr", "rt_detr:unused", "rf_detr:unused"]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        done = subprocess.run(
            [*command, "-m", "tests.integrations.detr_distributed", *models],
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


def unbuilt(name):
    kind = getattr(hf, name)
    model = kind.__new__(kind)  # what it is suffices: it is refused before anything else is looked at
    nn.Module.__init__(model)
    return model


class TestErrors:
    @pytest.mark.parametrize("name", [n for n in adapter.adapter.REFUSED if hasattr(hf, n)])
    def test_refused_with_the_reason(self, name):
        reason = "softmax|words of a prompt|masks"
        with pytest.raises(TypeError, match=f"expected a detector with sigmoid scores, got {name}: .*({reason})"):
            use_ranking_loss(unbuilt(name))

    def test_softmax_and_text_are_told_apart(self):
        with pytest.raises(TypeError, match="softmax with a no-object class"):
            use_ranking_loss(unbuilt("DetrForObjectDetection"))
        with pytest.raises(TypeError, match="words of a prompt"):
            use_ranking_loss(unbuilt("GroundingDinoForObjectDetection"))

    def test_rt_detr_with_softmax(self):
        with pytest.raises(TypeError, match=r"expected config.use_focal_loss to be True, got False: .*softmax"):
            use_ranking_loss(rt_detr(use_focal_loss=False))

    @pytest.mark.parametrize("wrap", [lambda model: model.model, nn.DataParallel, nn.Sequential])
    def test_not_the_detector_itself(self, wrap):
        with pytest.raises(TypeError, match=r"expected one of DeformableDetr.*, got .*; call it on the transformers"):
            use_ranking_loss(wrap(deformable_detr()))

    @pytest.mark.parametrize("settings", [{"loss": "focal"}, {"method": "fast"}, {"delta": -1}, {"class_cost": -1}])
    def test_settings(self, settings):
        model = deformable_detr()
        with pytest.raises(ValueError, match=f"use_ranking_loss: expected {next(iter(settings))}"):
            use_ranking_loss(model, **settings)
        assert "_loss_function" not in model.__dict__

    def test_undo_of_nothing(self):
        with pytest.raises(TypeError, match="undo: expected a model with the loss of use_ranking_loss, got Deformable"):
            undo(deformable_detr())


class TestLibrary:
    def test_this_one_fits(self):
        library.check_library()

    @pytest.mark.parametrize(
        ("where", "what"),
        [
            ("loss_rt_detr.RTDetrForObjectDetectionLoss", lambda logits, labels, config: None),
            ("loss_deformable_detr.DeformableDetrImageLoss.get_loss", lambda self, loss, indices: None),
            ("loss_lw_detr.LwDetrImageLoss", None),
        ],
    )
    def test_a_changed_signature_is_refused_at_import(self, monkeypatch, where, what):
        monkeypatch.setattr(f"transformers.loss.{where}", what)
        with pytest.raises(
            ImportError, match=rf"expected {where}\(.*got .*in transformers 5.*supported: transformers 5"
        ):
            importlib.reload(adapter)

    def test_an_old_version_is_refused(self, monkeypatch):
        monkeypatch.setattr("transformers.__version__", "4.57.1")  # by name: transformers replaces its own module
        with pytest.raises(ImportError, match=r"got version 4.57.1 .*supported: transformers 5"):
            importlib.reload(adapter)

    def test_a_loss_that_cannot_be_set_is_refused(self, monkeypatch):
        monkeypatch.setattr(hf.PreTrainedModel, "loss_function", property(lambda self: None))
        with pytest.raises(ImportError, match="a property that can be set"):
            importlib.reload(adapter)

    def test_without_transformers(self, monkeypatch):
        monkeypatch.setattr(library, "find_spec", lambda name: None)
        with pytest.raises(ImportError, match=r"got none; install it with: pip install 'bucketrank\[transformers\]'"):
            library.check_library()

    def test_later_models_may_be_missing(self, monkeypatch):
        found = importlib.util.find_spec
        monkeypatch.setattr(library, "find_spec", lambda name: None if "deimv2" in name else found(name))
        library.check_library()
