"""Co-DETR as a whole: sizes, settings, checkpointing, detections."""

from typing import Any

import pytest
import torch

from bucketrank.detectors import build
from bucketrank.detectors.co_detr.model import LevelProjection

from ..small_detectors import CLASSES, scene, small_detector


def train_step(model, images, targets):
    torch.manual_seed(5)  # for the draw of auxiliary queries
    losses = model(images, targets)
    sum(losses.values()).backward()
    return {name: term.detach() for name, term in losses.items()}


def test_the_published_sizes():
    """The numbers of Co-DETR's published configuration with ResNet-50."""
    model: Any = build("co_detr", num_classes=80)
    assert model.transform.size_divisible == 1
    assert len(model.encoder.layers) == len(model.decoder.layers) == 6
    assert model.selected.content.shape == (300, 256)
    assert [len(queries.encoding.norm.weight) for queries in model.auxiliary_queries.values()] == [512, 512]
    assert model.decoder.layers[0].attention.sampling_offsets.out_features == 8 * 4 * 4 * 2
    assert all(branch.out_features == 80 for branch in model.decoder.classes)
    rcnn, atss = model.auxiliary["faster_rcnn"], model.auxiliary["atss"]
    assert rcnn.rpn.head.cls_logits.out_channels == 9
    assert rcnn.rpn.anchor_generator.strides == (8, 16, 32, 64, 128)
    cell = rcnn.rpn.anchor_generator([torch.zeros(1, 1, 1, 1)] * 5)[0]
    sides = ((cell[:, 2:] - cell[:, :2]).prod(1).sqrt() / 8).reshape(3, 3)  # by ratio, then by scale
    torch.testing.assert_close(sides, torch.tensor([[4.0, 4 * 2 ** (1 / 3), 4 * 2 ** (2 / 3)]] * 3))
    assert rcnn.rpn.box_coder.weights == (1.0, 1.0, 1.0, 1.0)
    assert rcnn.roi.pool.scales == [1 / 8, 1 / 16, 1 / 32, 1 / 64]
    assert rcnn.roi.layers.fc6.out_features == 1024
    assert atss.head.boxes.out_channels == 4
    assert len(atss.head.box_tower) == 1
    model.train()
    assert [rcnn.rpn.pre_nms_top_n(), rcnn.rpn.post_nms_top_n()] == [4000, 1000]


def test_initial_biases_and_box_branches():
    model = small_detector("co_detr")
    prior = torch.tensor(0.01).logit()
    for branch in (*model.decoder.classes, model.proposer.classes, model.auxiliary["atss"].head.classes):
        torch.testing.assert_close(branch.bias, prior.expand_as(branch.bias))
    for branch in (*model.decoder.boxes, model.proposer.boxes):
        assert (branch[-1].weight == 0).all()
        assert (branch[-1].bias == 0).all()
    assert (model.auxiliary["faster_rcnn"].roi.classes.bias == 0).all()


def test_maps_of_strides_8_to_64():
    neck = LevelProjection([8, 16, 32, 64], 32)
    maps = [torch.rand(1, 8 * 2**n, -(-97 // 4 // 2**n), -(-131 // 4 // 2**n)) for n in range(4)]
    projected = neck(maps)
    assert [part.shape[-2:] for part in projected[:3]] == [part.shape[-2:] for part in maps[1:]]
    height, width = maps[-1].shape[-2:]
    assert projected[3].shape == (1, 32, (height + 1) // 2, (width + 1) // 2)


def test_checkpointing_changes_nothing():
    images, targets = scene()
    results = []
    for checkpointing in (False, True):
        model = small_detector("co_detr", transformer_checkpointing=checkpointing)
        losses = train_step(model, images, targets)
        results.append((losses, {name: p.grad for name, p in model.named_parameters()}))
    torch.testing.assert_close(results[0], results[1])


def test_checkpointing_stores_less():
    """Count the bytes that autograd stores for the backward pass."""
    images, targets = scene()
    kept = []
    for checkpointing in (False, True):
        model = small_detector("co_detr", transformer_checkpointing=checkpointing, encoder_layers=3)
        total = [0]

        def count(tensor, total=total):
            total[0] += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            model(images, targets)
        kept.append(total[0])
    assert kept[1] < 0.7 * kept[0]


@pytest.mark.parametrize("auxiliary", [(), ("atss",), ("faster_rcnn",)])
def test_each_auxiliary_head_can_be_left_out(auxiliary):
    model = small_detector("co_detr", auxiliary=auxiliary)
    losses = train_step(model, *scene())
    heads = {name.rsplit("_", 1)[0] for name in losses}
    own = {"atss": {"atss", "atss_queries"}, "faster_rcnn": {"rpn", "roi", "faster_rcnn_queries"}}
    assert heads == {"encoder", "decoder"}.union(*(own[name] for name in auxiliary))
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_only_the_decoder_detects():
    model = small_detector("co_detr").eval()
    images, _ = scene()
    with torch.no_grad():
        before = model(images)
        for part in (model.auxiliary, model.auxiliary_queries, model.fifth):
            for parameter in part.parameters():
                parameter.fill_(torch.nan)
        after = model(images)
    for one, two in zip(before, after, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_detections_are_the_best_pairs_of_query_and_class():
    """Without threshold and NMS: one query may give detections of several classes."""
    model = small_detector("co_detr", detections=50).eval()
    images, _ = scene()
    outputs = []
    model.decoder.register_forward_hook(lambda _, __, layers: outputs.append(layers[-1]))
    with torch.no_grad():
        results = model(images)
    for image, result in enumerate(results):
        expected = outputs[0].logits[image].sigmoid().flatten().sort(descending=True).values[:50]
        torch.testing.assert_close(result["scores"], expected)
        assert len(result["boxes"]) == 50


@pytest.mark.parametrize("size", [(40, 48), (33, 200)])
def test_images_with_fewer_tokens_than_queries(size):
    model = small_detector("co_detr", queries=300, min_size=min(size), max_size=max(size))
    image = torch.rand(3, *size)
    target = {"boxes": torch.tensor([[5.0, 5, 25, 30]]), "labels": torch.tensor([1])}
    losses = train_step(model, [image], [target])
    assert all(term.isfinite() for term in losses.values())
    with torch.no_grad():
        assert len(model.eval()([image])[0]["boxes"]) == 100


def test_more_objects_than_queries():
    images, targets = scene((12, 1))
    losses = train_step(small_detector("co_detr", queries=5), images, targets)
    assert all(term.isfinite() for term in losses.values())


def test_size_divisor_reaches_the_transform_and_the_anchors():
    model = small_detector("co_detr", size_divisor=32).eval()
    assert model.transform.size_divisible == 32
    assert model.auxiliary["atss"].anchors.size_divisor == 32


def test_logits_that_are_not_finite_raise():
    model = small_detector("co_detr")
    with torch.no_grad():
        model.decoder.classes[1].bias.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"assign_hungarian: expected finite costs.*logits of 40 of 40.*diverged"):
        model(*scene())


@pytest.mark.slow
def test_swin_gets_a_gradient_everywhere():
    """The norm after the first stage's map, which is not used, is frozen."""
    model = small_detector("co_detr", backbone="swin_tiny", min_size=64, max_size=96)
    train_step(model, *scene())
    assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
    assert "body.hidden_states_norms.stage1.weight" in model.backbone.frozen


def test_with_weights_the_affine_parameters_of_batch_norms_are_frozen(tmp_path):
    import timm
    from safetensors.torch import save_file

    path = tmp_path / "weights.safetensors"
    save_file(timm.create_model("test_resnet").state_dict(), path)
    for name, frozen in (("co_detr", True), ("atss", False)):
        body = small_detector(name, weights=str(path)).backbone.body
        norm = body.layer4[0].bn1
        assert norm.weight.requires_grad != frozen
        assert not norm.training
        assert body.layer4[0].conv1.weight.requires_grad


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "alrp"}, "loss.name for co_detr: expected one of rs, ap, .*, got 'alrp'"),
        ({"auxiliary": ("paa",)}, "detector.auxiliary: expected one of faster_rcnn, atss, got 'paa'"),
        ({"auxiliary": ("atss", "atss")}, "detector.auxiliary: expected each head at most once, got"),
        ({"queries": 0}, "detector.queries: expected at least 1, got 0"),
        ({"auxiliary_queries": 0}, "detector.auxiliary_queries: expected at least 1, got 0"),
        ({"decoder_layers": 0}, "detector.decoder_layers: expected at least 1, got 0"),
        ({"channels": 48}, "detector.channels: expected a multiple of 32"),
    ],
)
def test_invalid_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        small_detector("co_detr", **settings)


def test_labels_of_detections_start_at_1():
    model = small_detector("co_detr").eval()
    images, _ = scene()
    with torch.no_grad():
        labels = torch.cat([result["labels"] for result in model(images)])
    assert set(labels.tolist()) <= set(range(1, CLASSES + 1))
