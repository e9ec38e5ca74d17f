"""The Ultralytics example trains small YOLOs from their configurations, without downloads."""

import copy
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

# Read when ultralytics is imported: it writes its settings to a folder and looks for a connection.
os.environ.setdefault("YOLO_CONFIG_DIR", tempfile.mkdtemp(prefix="ultralytics"))
os.environ.setdefault("YOLO_OFFLINE", "1")
os.environ.setdefault("YOLO_VERBOSE", "0")

from bucketrank import calibrate_scores, rank_sort_loss
from tests.evaluation.calibration.labelled_detections import objects_among
from tests.process_settings import restored_process_settings

with restored_process_settings():
    pytest.importorskip("ultralytics")
    from ultralytics import YOLO
    from ultralytics.cfg import get_cfg
    from ultralytics.nn.tasks import DetectionModel

    from examples import ultralytics_yolo as example

SIDE = 64
MODELS = ["yolov8n.yaml", "yolo11n.yaml", "yolo26n.yaml"]
every_model = pytest.mark.parametrize("name", MODELS)
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _restored_settings():
    with restored_process_settings():
        yield


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Write a data set of coloured squares and return settings for a run of two epochs of one step."""
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    for split in ("train", "val"):
        for kind in ("images", "labels"):
            (tmp_path / kind / split).mkdir(parents=True)
        for index in range(4):
            image, lines = np.full((SIDE, SIDE, 3), 40, np.uint8), []
            for label in (0, 1):
                side = int(generator.integers(14, 24))
                x, y = (int(v) for v in generator.integers(0, SIDE - side, 2))
                image[y : y + side, x : x + side, 2 * label] = 220
                lines.append(f"{label} {(x + side / 2) / SIDE} {(y + side / 2) / SIDE} {side / SIDE} {side / SIDE}")
            Image.fromarray(image).save(tmp_path / "images" / split / f"{index}.png")
            (tmp_path / "labels" / split / f"{index}.txt").write_text("\n".join(lines))
    (tmp_path / "data.yaml").write_text(f"path: {tmp_path}\ntrain: images/train\nval: images/val\nnames: [red, blue]\n")
    return {
        "data": str(tmp_path / "data.yaml"),
        "epochs": 2,
        "imgsz": SIDE,
        "batch": 4,
        "device": "cpu",
        "plots": False,
        "project": str(tmp_path / "runs"),
    }


def loss_and_batch(name):
    """Return a new model, and a batch of two images with three objects."""
    torch.manual_seed(0)
    model = DetectionModel(name, nc=2, verbose=False).train()
    model.args = get_cfg()
    batch = {
        "img": torch.rand(2, 3, SIDE, SIDE),
        "batch_idx": torch.tensor([0.0, 0, 1]),
        "cls": torch.tensor([[0.0], [1], [1]]),
        "bboxes": torch.tensor([[0.3, 0.3, 0.4, 0.3], [0.7, 0.6, 0.3, 0.4], [0.5, 0.5, 0.5, 0.5]]),
    }
    return model, batch


def parts(model):
    """Return the detection losses of a criterion: of both heads in YOLO26, the criterion itself otherwise."""
    criterion = model.criterion
    return [criterion.one2many, criterion.one2one] if hasattr(criterion, "one2one") else [criterion]


def rank(model):
    example.use_ranking_loss(SimpleNamespace(model=model, ema=SimpleNamespace(ema=copy.deepcopy(model))))
    return [part.bce.__self__ for part in parts(model)]


def recorded(rank_logits, logits):
    """Return the function, which also appends the logits of each call to a list."""

    def record_and_rank(logit, soft_scores):
        logits.append(logit)
        return rank_logits(logit, soft_scores)

    return record_and_rank


@every_model
def test_the_losses_are_those_of_the_ranking(name):
    model, batch = loss_and_batch(name)
    rankings = rank(model)
    logits: list[torch.Tensor] = []
    for ranking in rankings:
        ranking.loss.bce = recorded(ranking.rank, logits)
    total, items = model.loss(batch)
    total.sum().backward()
    for ranking, logit in zip(rankings, logits, strict=True):
        assert (ranking.targets > 0).any()
        assert ranking.targets.max() <= 1
        expected = sum(rank_sort_loss(logit.detach(), ranking.targets))
        torch.testing.assert_close(ranking.ranking, expected)
    ranking, gains = rankings[-1], model.args  # the items are those of the last head
    torch.testing.assert_close(items["cls_loss"], gains.cls * ranking.ranking)
    torch.testing.assert_close(items["box_loss"], gains.cls * ranking.ranking)
    if "dfl_loss" in items:
        torch.testing.assert_close(items["dfl_loss"], gains.cls * ranking.ranking)


def test_the_labels_are_the_ious_of_the_positives():
    model, _ = loss_and_batch("yolo11n.yaml")
    (ranking,) = rank(model)
    boxes = torch.tensor([[[0.0, 0, 10, 10], [0, 0, 10, 20], [90, 90, 95, 95], [50, 50, 60, 60]]])
    objects = torch.tensor([[[0.0, 0, 10, 10]] * 4])
    positive = torch.tensor([[True, True, True, False]])
    soft_scores = torch.tensor([[[0.9, 0.0], [0, 0], [0, 0.2], [0, 0]]])
    ranking.assigner = lambda *args: (torch.tensor([[0, 0, 1, 2]]), objects, soft_scores, positive, None)
    ranking.assign(torch.zeros(1, 4, 2), boxes)
    # A positive without overlap, or with a soft score of 0, stays a positive.
    torch.testing.assert_close(ranking.targets, torch.tensor([[[1, 0], [0.5, 0], [0, 1e-6], [0, 0]]]))
    assert ranking.divisor == 1.1


def test_yolo26_scales_both_box_losses_by_one_factor():
    model, _ = loss_and_batch("yolo26n.yaml")
    ranking = rank(model)[0]
    ranking.ranking, gains = torch.tensor(0.8), model.args
    ranking.box_loss = lambda: (torch.tensor(0.4), torch.tensor(0.01))
    factor = 0.8 * gains.cls / gains.box / 0.4
    torch.testing.assert_close(ranking.weigh(), (torch.tensor(0.4 * factor), torch.tensor(0.01 * factor)))
    ranking.box_loss = lambda: (torch.tensor(0.0), torch.tensor(0.01))
    torch.testing.assert_close(ranking.weigh(), (torch.tensor(0.0), torch.tensor(0.01)))


@every_model
def test_without_objects(name):
    model, batch = loss_and_batch(name)
    rank(model)
    empty = {"img": batch["img"], "batch_idx": torch.zeros(0), "cls": torch.zeros(0, 1), "bboxes": torch.zeros(0, 4)}
    total, _ = model.loss(empty)
    total.sum().backward()
    assert total.sum() == 0


@pytest.mark.slow
@every_model
def test_a_run_and_its_checkpoint(name, settings):
    model = YOLO(name)
    example.train(model, **settings)
    for trained in (model.trainer.model, model.trainer.ema.ema):  # the moving average computes the validation loss
        assert all(isinstance(part.bce.__self__, example.RankingLoss) for part in parts(trained))
    header, *rows = (line.split(",") for line in model.trainer.csv.read_text().splitlines())
    for row in rows:
        values = dict(zip(header, map(float, row), strict=True))
        for split in ("train", "val"):
            assert 0 < values[f"{split}/cls_loss"] < 2
            assert values[f"{split}/box_loss"] == pytest.approx(values[f"{split}/cls_loss"], rel=1e-3)
    YOLO(model.trainer.best).predict(np.zeros((SIDE, SIDE, 3), np.uint8), imgsz=SIDE)


@pytest.mark.slow
def test_resuming_without_the_callbacks_is_refused(settings):
    model = YOLO("yolo26n.yaml")

    def interrupt(trainer):
        raise KeyboardInterrupt

    model.add_callback("on_fit_epoch_end", interrupt)
    with pytest.raises(KeyboardInterrupt):
        example.train(model, **settings)
    last = model.trainer.last
    with pytest.raises(RuntimeError, match=f'Unexpected key.*"{example.MARK}"'):
        YOLO(last).train(resume=True)
    resumed = YOLO(last)
    example.train(resumed, resume=True)
    assert resumed.trainer.start_epoch == 1
    assert all(isinstance(part.bce.__self__, example.RankingLoss) for part in parts(resumed.trainer.model))


class MeasuredYOLO(YOLO):  # type: ignore[misc]
    """A YOLO whose validation finds detections with scores of sigmoid(z) that are right with sigmoid(2 z + 3)."""

    def val(self, **settings):
        z = np.random.default_rng(0).normal(-2, 1, 40_000)
        right = np.random.default_rng(1).random(40_000) < 1 / (1 + np.exp(-(2 * z + 3)))
        half = {"conf": 1 / (1 + np.exp(-z)), "tp": np.stack([right, ~right], 1)}
        stats = {name: np.array_split(values, 7) for name, values in half.items()}
        for callback in self.callbacks["on_val_batch_end"]:
            callback(SimpleNamespace(metrics=SimpleNamespace(stats=stats)))


@pytest.mark.parametrize("name", ["yolo11n.yaml", "yolo26n.yaml"])
def test_the_calibration_is_folded_into_every_class_layer(name, monkeypatch):
    monkeypatch.setattr(example, "YOLO", MeasuredYOLO)
    torch.manual_seed(0)
    before = YOLO(name).model.eval()
    torch.manual_seed(0)
    after = example.calibrate(name, "data.yaml").model.eval()
    image = torch.rand(1, 3, SIDE, SIDE)
    heads = ["one2many", "one2one"] if "26" in name else [None]
    outputs = [model(image)[1] for model in (before, after)]
    for head in heads:
        z, calibrated = (output[head]["scores"] if head else output["scores"] for output in outputs)
        torch.testing.assert_close(calibrated, 2 * z + 3, rtol=0.05, atol=0.3)  # as well as 40,000 detections tell
        in_order = z.flatten()[calibrated.flatten().argsort()]
        assert (in_order.diff() > -1e-4).all()


@pytest.mark.slow
def test_the_command(settings, capsys, monkeypatch):
    monkeypatch.setattr(example, "require_both", lambda right: None)  # one epoch ranks nothing yet, so none would fit
    monkeypatch.setattr(example, "fit_platt", lambda *_: (1.0, 0.0))
    example.main("yolo11n.yaml", settings.pop("data"), *(f"{name}={value}" for name, value in settings.items()))
    line = capsys.readouterr().out.splitlines()[-1]
    path = Path(line.removeprefix("calibrated model: "))
    assert path.name == "calibrated.pt"
    YOLO(path).predict(np.zeros((SIDE, SIDE, 3), np.uint8), imgsz=SIDE)


@pytest.mark.parametrize(
    "stats",
    [
        {"conf": [], "tp": []},
        {"conf": [np.zeros(0)], "tp": [np.zeros((0, 10), bool)]},
        {"conf": [np.full(12, 0.1)], "tp": [np.zeros((12, 10), bool)]},
    ],
    ids=["no image", "no detection", "none is right"],
)
def test_nothing_to_calibrate_is_said(stats, monkeypatch, tmp_path, capsys):
    class UntrainedYOLO(YOLO):  # type: ignore[misc]
        def val(self, **settings):
            for callback in self.callbacks["on_val_batch_end"]:
                callback(SimpleNamespace(metrics=SimpleNamespace(stats=stats)))

    def train(model, **settings):
        model.trainer = SimpleNamespace(best=tmp_path / "best.pt", args=SimpleNamespace(imgsz=SIDE))
        model.save(model.trainer.best)

    monkeypatch.setattr(example, "YOLO", UntrainedYOLO)
    monkeypatch.setattr(example, "train", train)
    example.main("yolo11n.yaml", "data.yaml")
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(f"{tmp_path / 'best.pt'} is trained but not calibrated: expected at least 10 detections")
    assert not (tmp_path / "calibrated.pt").exists()


def test_the_scores_of_a_yolo_with_its_own_loss_are_calibrated():
    torch.manual_seed(0)
    model = YOLO("yolo11n.yaml")
    for branch in model.model.model[-1].cv3:
        torch.nn.init.normal_(branch[-1].weight, std=0.5)
        torch.nn.init.constant_(branch[-1].bias, -3.0)
    images = list(torch.randint(256, (8, SIDE, SIDE, 3), dtype=torch.uint8).numpy())
    results = model.predict(images, imgsz=SIDE, conf=1e-6, iou=0.99, verbose=False)
    calibration = calibrate_scores(results, objects_among(results))
    assert calibration.detections == sum(len(each.boxes) for each in results) > 100
    assert calibration.d_ece[1] < 0.5 * calibration.d_ece[0]
    assert calibration(results[0].boxes.conf).shape == results[0].boxes.conf.shape


@pytest.mark.parametrize("installed", ["8.3.200", "8.5.0", "9.0.0"])
def test_other_versions_are_refused(monkeypatch, installed):
    monkeypatch.setattr(example, "version", lambda name: installed)
    with pytest.raises(ImportError, match=f"expected ultralytics 8.4, got {installed}; install 8.4"):
        example.train(YOLO("yolo11n.yaml"))


def test_several_devices_are_refused():
    with pytest.raises(ValueError, match="expected one device, got 0,1; others get no callbacks"):
        example.train(YOLO("yolo11n.yaml"), device="0,1")


@pytest.mark.parametrize("name", ["yolo11n-seg.yaml", "yolo11n.yaml"])
def test_other_losses_are_refused(name):
    model = YOLO(name).model
    model.args = get_cfg()
    if "seg" not in name:
        model.class_weights = torch.ones(80)
    with pytest.raises(TypeError, match=r"expected a detector with cls_pw=0, got another v8\w+Loss"):
        example.use_ranking_loss(SimpleNamespace(model=model, ema=SimpleNamespace(ema=copy.deepcopy(model))))


def test_later_tests_keep_the_settings_of_the_process():
    before, save, pillow = os.environ.copy(), torch.save, (Image.open, Image.MAX_IMAGE_PIXELS)
    with restored_process_settings():
        os.environ["NUMEXPR_MAX_THREADS"] = "99"
        np.set_printoptions(formatter={"float_kind": "{:11.5g}".format})
        torch.set_printoptions(linewidth=320)
        torch.use_deterministic_algorithms(True)
        vars(torch)["save"] = print
        vars(Image)["open"] = print
        Image.MAX_IMAGE_PIXELS = None
    assert os.environ == before
    assert torch.save is save
    assert (Image.open, Image.MAX_IMAGE_PIXELS) == pillow
    assert str(np.array([0.5])) == "[0.5]"
    assert torch._tensor_str.PRINT_OPTS.linewidth == 80
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_licence_is_stated_and_the_example_is_short():
    lines = Path(example.__file__).read_text().splitlines()
    assert "AGPL-3.0" in "".join(lines[:6])
    assert len(lines) <= 120
