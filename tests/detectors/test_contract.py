"""Every detector with every loss has the interface of torchvision's detectors."""

import pytest
import torch

from bucketrank.settings import detectors, loss_names, losses

from .small_detectors import CLASSES, SIZES, scene, small_detector

# Every detector with the losses that choose its head (ranked, sigmoid, softmax), and one detector with every loss: a
# loss depends on the head alone, which the criterion's own tests cover for each. Co-DINO is published with qfl.
HEAD_LOSSES = ("rs", "focal", "ce")
PAIRS = [(name, loss) for name in detectors() for loss in loss_names(name) if name == "atss" or loss in HEAD_LOSSES]
PAIRS += [("co_dino", "qfl")]
every_pair = pytest.mark.parametrize(("name", "loss"), PAIRS)
HEADS = {
    "faster_rcnn": ("rpn", "roi"),
    "mask_rcnn": ("rpn", "roi"),
    "cascade_rcnn": ("rpn", "stage1", "stage2", "stage3"),
    "retinanet": ("",),
    "atss": ("",),
    "paa": ("",),
    "co_detr": ("encoder", "decoder", "rpn", "roi", "faster_rcnn_queries", "atss", "atss_queries"),
    "co_dino": ("encoder", "decoder", "denoising", "rpn", "roi", "faster_rcnn_queries", "atss", "atss_queries"),
}
SCORED = ("focal", "ce", "qfl", "vfl", "bce", "mal", "iabce")
TERMS = dict.fromkeys(SCORED, ("cls", "box")) | {
    "rs": ("rank", "sort", "box"),
    "rsq": ("rank", "sort", "qfl", "box"),
}


def expected_terms(name, loss):
    terms = TERMS.get(loss, ("rank", "box"))
    if loss in ("focal", "ce") and name in ("atss", "paa"):
        terms = (*terms, "quality")
    names = {f"{head}_{term}" if head else term for head in HEADS[name] for term in terms}
    if name.startswith("co_"):
        names |= {f"{head}_l1" for head in HEADS[name] if head not in ("rpn", "roi", "atss")}
        names |= {"atss_quality"} if loss in ("focal", "qfl") else set()
    return names | ({"mask"} if name == "mask_rcnn" else set())


def train_step(model, images, targets):
    losses = model(images, targets)
    sum(losses.values()).backward()
    return losses


def assert_all_have_gradients(model):
    missing = [
        name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None
    ]
    assert missing == []
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.sampled(5)
@every_pair
def test_training_and_evaluation(name, loss):
    model = small_detector(name, loss=loss)
    losses = train_step(model, *scene())
    assert set(losses) == expected_terms(name, loss)
    assert all(term.isfinite() and term.dim() == 0 for term in losses.values())
    assert_all_have_gradients(model)
    assert all(has_nonzero_gradient(child) for child in model.children() if list(child.parameters()))
    check_detections(model.eval(), masks=name == "mask_rcnn")


def has_nonzero_gradient(module):
    return any(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())


def check_detections(model, *, masks):
    """Check that detections are in pixels of the input images, best first, within the image and the classes."""
    images, _ = scene()
    with torch.no_grad():
        results = model(images)
    assert len(results) == len(images)
    for result, (height, width) in zip(results, SIZES, strict=True):
        assert set(result) == {"boxes", "labels", "scores"} | ({"masks"} if masks else set())
        boxes, labels, scores = result["boxes"], result["labels"], result["scores"]
        assert 1 <= len(boxes) <= 100
        assert boxes.shape == (len(boxes), 4)
        assert labels.shape == scores.shape == (len(boxes),)
        assert labels.dtype == torch.int64
        assert labels.min() >= 1
        assert labels.max() <= CLASSES
        assert (scores.diff() <= 0).all()
        assert scores.min() >= 0
        assert scores.max() <= 1
        assert boxes.min() >= 0
        assert boxes[:, [0, 2]].max() <= width + 1e-3
        assert boxes[:, [1, 3]].max() <= height + 1e-3
        if masks:
            assert result["masks"].shape == (len(boxes), 1, height, width)


@pytest.mark.sampled(5)
@every_pair
def test_images_without_objects(name, loss):
    model = small_detector(name, loss=loss)
    losses = train_step(model, *scene((3, 0)))
    assert all(term.isfinite() for term in losses.values())
    assert_all_have_gradients(model)
    model.zero_grad()
    losses = train_step(model, *scene((0, 0)))
    assert all(term.isfinite() for term in losses.values())
    assert_all_have_gradients(model)
    assert all(term == 0 for key, term in losses.items() if key.endswith(("box", "l1", "sort", "mask", "quality")))
    if loss in ("rs", "ap", "alrp"):
        assert sum(losses.values()) == 0


@pytest.mark.slow
# aLRP has a counter of its own.
@pytest.mark.parametrize(("name", "loss"), [*((name, "rs") for name in detectors()), ("atss", "alrp")])
def test_the_state_dict_carries_everything(name, loss):
    model = small_detector(name, loss=loss, seed=0)
    images, targets = scene()
    train_step(model, images, targets)  # changes the statistics of batch norms and the counter of aLRP
    other = small_detector(name, loss=loss, seed=1)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        first, second = model.eval()(images), other.eval()(images)
    for one, two in zip(first, second, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


@pytest.mark.slow
@every_pair
def test_bfloat16_autocast(name, loss):
    model = small_detector(name, loss=loss)
    images, targets = scene()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = model(images, targets)
    sum(losses.values()).backward()
    assert all(term.isfinite() and term.dtype == torch.float32 for term in losses.values())
    assert_all_have_gradients(model)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        results = model.eval()(images)
    assert all(result["boxes"].isfinite().all() for result in results)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", detectors())
@pytest.mark.parametrize("method", ["exact", "bucketed"])
def test_methods_agree_with_the_definition(name, method):
    """Exact equals pairwise up to rounding; bucketed is the paper's approximation."""
    images, targets = scene()
    torch.manual_seed(3)  # for the draw of mask RoIs
    losses = small_detector(name, method=method)(images, targets)
    torch.manual_seed(3)
    reference = small_detector(name, method="pairwise")(images, targets)
    tolerance = 1e-2 if method == "bucketed" else 1e-5
    torch.testing.assert_close(losses, reference, rtol=tolerance, atol=1e-6)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", detectors())
def test_detections_do_not_depend_on_the_other_images_of_a_batch(name):
    model = small_detector(name, batch_norm="frozen").eval()
    images, _ = scene()
    images = [image[:, :80, :120] for image in images]
    with torch.no_grad():
        together = model(images)
        alone = [model([image])[0] for image in images]
    for one, two in zip(together, alone, strict=True):
        torch.testing.assert_close(one["scores"], two["scores"], rtol=1e-4, atol=1e-5)


def _with_value(key, value):
    def change(targets):
        targets[1][key] = value
        return targets

    return change


INVALID_TARGETS = {
    "no area": (
        _with_value("boxes", torch.tensor([[5.0, 5, 9, 9], [4, 4, 4, 9]])),
        ValueError,
        r"image 1: expected boxes .*x1 < x2 .*for box 1",
    ),
    "NaN": (
        _with_value("boxes", torch.tensor([[5.0, 5, 9, float("nan")], [4, 4, 9, 9]])),
        ValueError,
        "image 1: expected finite boxes, got .*nan.*for box 0",
    ),
    "outside": (
        _with_value("boxes", torch.tensor([[5.0, 5, 9, 9], [300, 4, 340, 9]])),
        ValueError,
        r"image 1: expected boxes that overlap the image of 128 x 80 .*for box 1",
    ),
    "integer boxes": (
        _with_value("boxes", torch.tensor([[5, 5, 9, 9], [4, 4, 9, 9]])),
        ValueError,
        "image 1: .*floats.*int64",
    ),
    "box shape": (_with_value("boxes", torch.rand(2, 5)), ValueError, r"image 1: .*\(objects, 4\).*\(2, 5\)"),
    "label 0": (_with_value("labels", torch.tensor([1, 0])), ValueError, "image 1: .*from 1 to 3, got 0 for box 1"),
    "label 4": (_with_value("labels", torch.tensor([4, 1])), ValueError, "image 1: .*from 1 to 3, got 4 for box 0"),
    "float labels": (_with_value("labels", torch.tensor([1.0, 2.0])), ValueError, "image 1: .*integers.*float32"),
    "too few labels": (_with_value("labels", torch.tensor([1])), ValueError, r"image 1: .*\(2,\).*\(1,\)"),
    "no boxes": (_with_value("boxes", None), TypeError, "image 1: .*'boxes'.*NoneType"),
    "one target": (lambda targets: targets[:1], ValueError, "targets: expected one for each of 2 images, got 1"),
    "no targets": (lambda targets: None, ValueError, "targets: expected a list in training mode, got None"),
}


@pytest.mark.parametrize("case", INVALID_TARGETS)
def test_invalid_targets_are_named(case):
    change, error, message = INVALID_TARGETS[case]
    images, targets = scene()
    with pytest.raises(error, match=message):
        small_detector("atss")(images, change(targets))


@pytest.mark.parametrize("name", detectors())
def test_every_detector_checks_its_targets(name):
    change, error, message = INVALID_TARGETS["label 4"]
    images, targets = scene()
    with pytest.raises(error, match=message):
        small_detector(name)(images, change(targets))


def test_invalid_targets_name_the_image_id():
    images, targets = scene()
    targets[1] |= {"image_id": torch.tensor(4711), "labels": torch.tensor([9, 9])}
    with pytest.raises(ValueError, match=r"image 1 \(image_id 4711\)"):
        small_detector("atss")(images, targets)


def test_masks_must_fit_the_image():
    images, targets = scene()
    targets[0]["masks"] = targets[0]["masks"][:, :-1]
    with pytest.raises(ValueError, match=r"image 0: expected masks of shape \(3, 96, 120\).*got \(3, 95, 120\)"):
        small_detector("mask_rcnn")(images, targets)


def test_images_must_be_floats_of_three_channels():
    with pytest.raises(TypeError, match="image 0: expected floats"):
        small_detector("atss").eval()([torch.zeros(3, 64, 64, dtype=torch.uint8)])
    with pytest.raises(ValueError, match=r"image 1: .*\(3, height, width\), got \(1, 64, 64\)"):
        small_detector("atss").eval()([torch.zeros(3, 64, 64), torch.zeros(1, 64, 64)])


@pytest.mark.parametrize("name", detectors())
def test_a_loss_that_a_detector_does_not_support_is_refused(name):
    refused = set(losses()) - set(loss_names(name))
    assert "own" in refused, "our detectors have no loss of another library"
    for loss in refused:
        expected = ", ".join(loss_names(name))
        with pytest.raises(ValueError, match=f"loss.name for {name}: expected one of {expected}, got '{loss}'"):
            small_detector(name, loss=loss)
