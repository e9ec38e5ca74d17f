"""The adapter for criteria with the package rfdetr: a small RF-DETR with random weights, without downloads."""

import copy
import json
import os
import pickle
import warnings

import pytest
import torch
from PIL import Image
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.process_settings import restored_process_settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
with warnings.catch_warnings(), restored_process_settings():
    warnings.simplefilter("ignore")  # rfdetr uses torch.jit.script, which is deprecated, when it is imported
    pytest.importorskip("rfdetr")
    from rfdetr.config import RFDETRNanoConfig, TrainConfig
    from rfdetr.models.criterion import SetCriterion
    from rfdetr.models.lwdetr import build_criterion_from_config
    from rfdetr.training import RFDETRDataModule, RFDETRModelModule, build_trainer
    from rfdetr.utilities.tensors import nested_tensor_from_tensor_list

from bucketrank import rank_sort_loss
from bucketrank.integrations import set_criterion as adapter
from bucketrank.integrations.ranking_loss import centre_size_iou
from bucketrank.integrations.set_criterion import undo, use_ranking_loss

CLASSES, QUERIES, GROUPS, SIDE = 3, 20, 2, 64

pytestmark = [
    pytest.mark.filterwarnings("ignore:RFDETRNanoConfig was instantiated with pretrain_weights=None"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script"),
]


@pytest.fixture(autouse=True)
def _restored_settings():
    with restored_process_settings():
        yield


def configs(folder, **settings):
    model_config = RFDETRNanoConfig(
        pretrain_weights=None,
        resolution=SIDE,
        positional_encoding_size=SIDE // 16,  # other than DINOv2's, so that no weights are downloaded
        num_queries=QUERIES,
        num_select=QUERIES,
        group_detr=GROUPS,
        num_classes=CLASSES,
        hidden_dim=32,
        sa_nheads=2,
        ca_nheads=2,
        device="cpu",
    )
    return model_config, TrainConfig(dataset_dir=str(folder), output_dir=str(folder / "out"), **settings)


@pytest.fixture
def criterion(tmp_path):
    return build_criterion_from_config(*configs(tmp_path))[0].train()


def outputs_and_targets(seed=0):
    """Return the outputs of the last layer, one more layer and the encoder, of all groups, and targets."""
    generator = torch.Generator().manual_seed(seed)

    def layer():
        boxes = 0.2 + 0.6 * torch.rand(2, GROUPS * QUERIES, 4, generator=generator)
        return {
            "pred_logits": torch.randn(2, GROUPS * QUERIES, CLASSES + 1, generator=generator),
            "pred_boxes": boxes.requires_grad_(),
        }

    targets = [
        {"labels": torch.tensor([2, 0]), "boxes": torch.tensor([[0.3, 0.4, 0.2, 0.3], [0.7, 0.6, 0.3, 0.2]])},
        {"labels": torch.tensor([1]), "boxes": torch.tensor([[0.5, 0.5, 0.4, 0.4]])},
    ]
    return layer() | {"aux_outputs": [layer()], "enc_outputs": layer()}, targets


def expected_ranking(criterion, layer, targets):
    """Return the ranking loss of one layer by the criterion's own matcher, object by object."""
    labels = torch.zeros_like(layer["pred_logits"])
    for image, (queries, objects) in enumerate(criterion.matcher(layer, targets, group_detr=GROUPS)):
        for query, index in zip(queries.tolist(), objects.tolist(), strict=True):
            overlap = centre_size_iou(layer["pred_boxes"][image, query][None], targets[image]["boxes"][index][None])
            if targets[image].get("valid", torch.ones(9))[index]:
                labels[image, query, targets[image]["labels"][index]] = max(overlap.item(), 1e-6)
    return labels, sum(rank_sort_loss(layer["pred_logits"], labels))


class TestCriterion:
    @pytest.mark.sampled(3)
    def test_all_groups_share_one_ranking_in_every_layer(self, criterion):
        outputs, targets = outputs_and_targets()
        losses = use_ranking_loss(criterion)(outputs, targets)
        for suffix, layer in {"": outputs, "_0": outputs["aux_outputs"][0], "_enc": outputs["enc_outputs"]}.items():
            labels, ranking = expected_ranking(criterion, layer, targets)
            assert (labels > 0).sum() == GROUPS * 3
            for key in ("loss_ce", "loss_bbox", "loss_giou"):
                torch.testing.assert_close(losses[key + suffix], ranking)
                assert criterion.weight_dict[key + suffix] == 1
        assert {"class_error", "cardinality_error"} <= set(losses)

    def test_padded_targets_stay_negative(self, criterion):
        outputs, targets = outputs_and_targets()
        targets[1] = {"labels": torch.tensor([1, 2]), "boxes": torch.tensor([[0.5, 0.5, 0.4, 0.4]] * 2)}
        targets[0]["valid"], targets[1]["valid"] = torch.tensor([True, True]), torch.tensor([True, False])
        losses = use_ranking_loss(criterion)(outputs, targets)
        labels, ranking = expected_ranking(criterion, outputs, targets)
        assert (labels > 0).sum() == GROUPS * 3
        torch.testing.assert_close(losses["loss_ce"], ranking)

    def test_undo_and_copies(self, criterion):
        outputs, targets = outputs_and_targets()
        own = criterion(outputs, targets)
        weights = dict(criterion.weight_dict)
        use_ranking_loss(criterion)
        ranked = criterion(outputs, targets)
        for copied in (copy.deepcopy(criterion), pickle.loads(pickle.dumps(criterion))):
            torch.testing.assert_close(copied(outputs, targets), ranked)
        assert type(undo(criterion)) is SetCriterion
        assert criterion.weight_dict == weights
        torch.testing.assert_close(criterion(outputs, targets), own)

    def test_the_compiled_losses_are_not_used(self, criterion):
        # On CUDA, a compiled model of rfdetr computes all layers in one function, without calling loss_labels.
        criterion.enable_compiled_detection_losses()
        with FakeTensorMode():
            layer = {
                "pred_logits": torch.empty(2, 4, 3, device="cuda"),
                "pred_boxes": torch.empty(2, 4, 4, device="cuda"),
            }
            targets = [{"labels": torch.zeros(1, dtype=torch.int64), "boxes": torch.zeros(1, 4)}] * 2
            matched = [criterion._get_matched_targets(targets, [(torch.tensor([0]), torch.tensor([0]))] * 2)] * 2
            assert criterion._can_batch_detection_losses([layer, layer], matched)
            use_ranking_loss(criterion)
            assert not criterion._can_batch_detection_losses([layer, layer], matched)

    def test_mask_losses_stay(self, criterion):
        criterion.losses.append("masks")
        assert type(use_ranking_loss(criterion)).loss_masks is SetCriterion.loss_masks

    def test_keypoints_are_refused(self, criterion):
        criterion.losses.append("keypoints")
        with pytest.raises(TypeError, match="use_ranking_loss: expected losses without keypoints"):
            use_ranking_loss(criterion)

    @pytest.mark.parametrize("version", ["1.7.1", "2.0.0"])
    def test_other_versions_are_refused(self, criterion, monkeypatch, version):
        monkeypatch.setattr(adapter, "version", lambda name: version)
        with pytest.raises(TypeError, match=rf"expected rfdetr 1.8 or newer, below 2 .*, got {version}; see docs"):
            use_ranking_loss(criterion)


@pytest.mark.slow
class TestTraining:
    def test_a_few_steps_lower_the_loss(self, tmp_path):
        torch.manual_seed(0)
        module = RFDETRModelModule(*configs(tmp_path)).train()
        criterion = use_ranking_loss(module.criterion)
        optimiser = torch.optim.AdamW(module.model.parameters(), 1e-3)
        images = nested_tensor_from_tensor_list(list(torch.rand(2, 3, SIDE, SIDE)))
        _, targets = outputs_and_targets()
        totals = []
        for _ in range(8):
            losses = criterion(module.model(images, targets), targets)
            total = sum(losses[key] * weight for key, weight in criterion.weight_dict.items())
            optimiser.zero_grad()
            total.backward()
            optimiser.step()
            totals.append(total.item())
        assert totals[-1] < 0.9 * totals[0]

    @pytest.mark.filterwarnings("ignore")  # of Lightning and rfdetr
    def test_a_run_of_the_trainer(self, tmp_path):
        for split in ("train", "valid"):
            (tmp_path / split).mkdir()
            for index in range(2):
                Image.new("RGB", (SIDE, SIDE), (40 * index, 90, 40)).save(tmp_path / split / f"{index}.png")
            images = [{"id": i, "file_name": f"{i}.png", "width": SIDE, "height": SIDE} for i in range(2)]
            box = {"category_id": 1, "bbox": [8, 8, 30, 30], "area": 900, "iscrowd": 0}
            annotations = [{"id": i, "image_id": i} | box for i in range(2)]
            categories = [{"id": i + 1, "name": f"class {i}", "supercategory": "all"} for i in range(CLASSES)]
            content = {"images": images, "annotations": annotations, "categories": categories}
            (tmp_path / split / "_annotations.coco.json").write_text(json.dumps(content))
        model_config, train_config = configs(
            tmp_path,
            dataset_file="roboflow",
            epochs=1,
            batch_size=2,
            grad_accum_steps=1,
            num_workers=0,
            multi_scale=False,
            tensorboard=False,
            accelerator="cpu",
            run_test=False,
            eval_backend="faster_coco_eval",
            progress_bar=None,
        )
        module = RFDETRModelModule(model_config, train_config)
        use_ranking_loss(module.criterion)
        trainer = build_trainer(train_config, model_config, limit_train_batches=2)
        trainer.fit(module, RFDETRDataModule(model_config, train_config))
        losses = {name: trainer.callback_metrics[f"train/{name}"] for name in ("loss_ce", "loss_bbox", "loss_giou")}
        assert 0 < losses["loss_ce"] < 2
        torch.testing.assert_close(losses["loss_bbox"], losses["loss_ce"])
        torch.testing.assert_close(losses["loss_giou"], losses["loss_ce"])
