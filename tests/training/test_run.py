"""A run from beginning to end: what it writes, and how it refuses and stops."""

import csv
import errno
import json
import math
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants
from PIL import Image

from bucketrank.cli import main
from bucketrank.detectors import Detector
from bucketrank.errors import DataError, NonFiniteLossError, RecipeError, WeightsError
from bucketrank.settings import load_recipe
from bucketrank.training import log
from bucketrank.training.loop import Loop
from bucketrank.weights import sources as hub_download
from bucketrank.weights.load import build_detector, load_matching_weights, load_model

from . import tiny


@pytest.fixture(scope="module")
def run(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "masks"
    flags = "--detector.hidden 32 --detector.proposals 50 --trainer.pictures 2"
    result = tiny.run(folder, shapes, flags, name="mask-rcnn-laptop")
    assert (result.folder, result.steps) == (folder, 6)
    return folder


def test_the_folder_holds_the_run(run):
    assert sorted(path.name for path in run.iterdir()) == [
        ".bucketrank.lock",
        "best.safetensors",
        "checkpoints",
        "curves.png",
        "data.safetensors",
        "environment.json",
        "pictures",
        "recipe.yaml",
        "train.csv",
        "validation.csv",
        "weights.safetensors",
    ]
    assert load_recipe(run / "recipe.yaml").flat()["detector.proposals"] == 50
    environment = json.loads((run / "environment.json").read_text())
    assert environment["versions"]["torch"] == torch.__version__.partition("+")[0]
    with Image.open(run / "curves.png") as curves:
        assert curves.size == (1500, 540)
    assert len(list((run / "pictures").glob("*.jpg"))) == 2


def test_the_tables_have_the_terms_and_the_metrics(run):
    with (run / "train.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4, 5, 6]
    assert {"rpn_rank", "roi_sort", "mask", "lr", "seconds", "loss"} <= set(rows[0])
    terms = [key for key in rows[0] if key not in ("step", "epoch", "loss", "lr", "seconds")]
    for row in rows:
        assert float(row["loss"]) == pytest.approx(sum(float(row[term]) for term in terms), rel=1e-5)
    with (run / "validation.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["epoch"]) for row in rows] == [("3", "1"), ("6", "2")]
    assert {"boxes/AP", "masks/AP", "masks/AP50", "threshold"} <= set(rows[0])


def test_the_weights_are_all_that_is_needed(run, shapes, capsys):
    model, meta = load_model(run / "weights.safetensors")
    assert meta.classes == ["circle", "square", "triangle", "star"]
    assert {"boxes/AP", "masks/AP"} <= set(meta.metrics)
    assert model.masks
    assert (
        main(["eval", str(run / "weights.safetensors"), str(shapes), "--detections", str(run.parent / "found.json")])
        == 0
    )
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()[1:4]] == ["AP", "AP50", "AP75"]
    with (run / "validation.csv").open() as file:
        last = list(csv.DictReader(file))[-1]
    shown = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if line.startswith("AP50")}
    assert shown["AP50"] == [f"{100 * float(last[f'{kind}/AP50']):.1f}" for kind in ("boxes", "masks")]
    assert json.loads((run.parent / "found.json").read_text())[0].keys() == {
        "image_id",
        "category_id",
        "bbox",
        "score",
        "segmentation",
    }


def test_eval_wants_the_same_classes(run, shapes, tmp_path, capsys):
    folder = shutil.copytree(shapes, tmp_path / "other")
    document = json.loads((folder / "val.json").read_text())
    document["categories"][0]["name"] = "disc"
    (folder / "val.json").write_text(json.dumps(document))
    assert main(["eval", str(run / "weights.safetensors"), str(folder)]) == 1
    error = capsys.readouterr().err
    assert f"val.json: expected the classes of {run / 'weights.safetensors'}, circle, square, triangle, star" in error
    assert "got disc, square, triangle, star" in error
    assert main(["eval", str(run / "weights.safetensors"), str(shapes), "--max-images", "1"]) == 0


def test_a_run_is_not_overwritten(run, shapes):
    with pytest.raises(RecipeError, match="already holds a run; continue it with --resume"):
        tiny.run(run, shapes)
    with pytest.raises(RecipeError, match=r"the run began with detector\.name 'mask_rcnn', got 'atss'"):
        tiny.run(run, shapes, resume=True)


def test_resume_without_a_run(tmp_path, capsys):
    assert main(["train", "--resume", "--out", str(tmp_path)]) == 2
    assert "there is no run to resume" in capsys.readouterr().err


def test_ctrl_c_and_on_with_it_from_the_command_line(shapes, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        tiny.stop_in(patch, step=4)
        assert main(["train", "atss-laptop", "--data", str(shapes), "--out", str(folder), *tiny.USUAL.split()]) == 130
    assert f"resume with: bucketrank train {folder} --resume" in capsys.readouterr().err
    assert main(["train", "--resume", "--out", str(folder), "--schedule.lr", "7"]) == 2
    assert "the run began with schedule.lr 0.001, got 7.0; a resumed run keeps its settings" in capsys.readouterr().err
    assert main(["train", "--resume", "--out", str(folder), "--trainer.log_every", "3"]) == 0
    assert load_recipe(folder / "recipe.yaml").trainer.log_every == 3
    printed = capsys.readouterr().out
    assert "resuming after step 5 (epoch 2)" in printed
    assert "epoch 2/2  AP " in printed
    ending = [f"Done: {folder}/weights.safetensors", f"Next: bucketrank report {folder}"]
    assert printed.splitlines()[-2:] == ending


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError("Tried to allocate 2.00 GiB.\nmore"), "a smaller --batch"),
        (
            RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "),
            "Lower --workers; resume with",
        ),
    ],
)
def test_lack_of_memory_is_reported(error, message, shapes, tmp_path, monkeypatch, capsys):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr(Loop, "compute_loss", fails)
    words = ["train", "atss-laptop", "--data", str(shapes), "--out", str(tmp_path / "run"), *tiny.USUAL.split()]
    assert main(words) == 1
    printed = capsys.readouterr().err
    assert message in printed
    assert str(error).split("\n")[0].strip() in printed
    assert "Traceback" not in printed


def test_a_mistake_is_told_before_anything_is_loaded(shapes, tmp_path, capsys):
    words = ["train", "atss-laptop", "--data", str(shapes), "--out", str(tmp_path / "run")]
    for mistake, nearest in [
        (["--loss.dleta", "1"], "--loss.delta"),
        (["--momentum", "1"], "--schedule.momentum"),
        (["--dta", "x"], "--data"),
        (["--loss", "focl"], "focal"),
    ]:
        assert main([*words, *mistake]) == 2
        assert f'the nearest is "{nearest}"' in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_without_a_network_it_says_what_to_do(shapes, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(hub_download, "is_reachable", lambda address: False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    words = ["train", "atss-laptop", "--data", str(shapes), "--out", str(tmp_path / "run"), *tiny.USUAL.split()]
    assert main([*words, "--backbone", "resnet18", "--backbone.weights", "pretrained"]) == 1
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == 1
    assert "the pretrained weights of resnet18 cannot be downloaded (no connection to huggingface.co)" in said.err
    assert "--backbone.weights FILE.safetensors" in said.err
    assert "--backbone.weights null" in said.err
    assert not (tmp_path / "run").exists(), "so that the same command can be given again"


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        ("--backbone.weights no.safetensors", 1, "expected null, pretrained or an existing .safetensors file"),
        ("--backbone.weights pickle.pth", 2, "backbone.weights: expected a .safetensors file"),
        ("--detector.channels 33", 2, "detector.channels: expected a multiple of 32"),
        ("--backbone resnet81", 2, "backbone.name: expected a timm model"),
    ],
)
def test_what_cannot_be_built_is_told(flags, status, message, shapes, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("pickle.pth").touch()
    assert (
        main(["train", "atss-laptop", "--data", str(shapes), "--out", "run", *tiny.USUAL.split(), *flags.split()])
        == status
    )
    assert message in capsys.readouterr().err
    assert not Path("run").exists()


def test_broken_data_is_refused_with_the_messages_of_check_data(shapes, tmp_path):
    folder = shutil.copytree(shapes, tmp_path / "broken")
    document = json.loads((folder / "train.json").read_text())
    document["annotations"][0]["category_id"] = 77
    (folder / "train.json").write_text(json.dumps(document))
    with pytest.raises(DataError, match="annotation 1: has category 77, which is not listed"):
        tiny.run(tmp_path / "run", folder)
    assert not (tmp_path / "run").exists()


def test_validation_must_have_the_same_classes(shapes, tmp_path):
    folder = shutil.copytree(shapes, tmp_path / "other")
    document = json.loads((folder / "val.json").read_text())
    document["categories"][0]["name"] = "disc"
    (folder / "val.json").write_text(json.dumps(document))
    with pytest.raises(
        DataError, match=r"the categories of .*, but this lacks \[\(1, 'circle'\)\] and adds \[\(1, 'disc'\)\]"
    ):
        tiny.run(tmp_path / "run", folder)


def test_a_loss_that_is_not_finite_stops_with_the_images(shapes, tmp_path, monkeypatch):
    seen: list[list[int]] = []
    usual = Loop.compute_loss

    def poisoned(loop, batch):
        seen.append([int(target["image_id"]) for target in batch[1]])
        if loop.progress.step == 3:
            next(loop.detector.parameters()).data.fill_(float("nan"))
        return usual(loop, batch)

    monkeypatch.setattr(Loop, "compute_loss", poisoned)
    with pytest.raises(NonFiniteLossError, match=r"step 4: the loss is not finite \(.*rank nan") as caught:
        tiny.run(tmp_path / "run", shapes)
    assert f"ids {', '.join(map(str, seen[-1]))};" in str(caught.value)


def test_a_gradient_that_is_not_finite_stops_before_the_weights_change(shapes, tmp_path, monkeypatch):
    usual = Loop.compute_loss

    def poisoned(loop, batch):
        loss = usual(loop, batch)
        if loop.progress.step == 2:
            loss.register_hook(lambda gradient: gradient * math.nan)
        return loss

    monkeypatch.setattr(Loop, "compute_loss", poisoned)
    with pytest.raises(NonFiniteLossError, match=r"step 3: the gradient is not finite; lower schedule.lr, or"):
        tiny.run(tmp_path / "run", shapes, "--schedule.clip 1")


def test_a_batch_that_does_not_divide_names_the_nearest(shapes, tmp_path):
    with pytest.raises(RecipeError, match=r"expected a multiple of 3 .*, got 4; the nearest is 3"):
        tiny.run(tmp_path / "run", shapes, "--schedule.accumulate 3")


@pytest.mark.parametrize("strategy", ["fsdp", "ddp_spawn", "ddp_fork", "ddp_notebook"])
def test_other_strategies_are_refused(strategy, shapes, tmp_path):
    with pytest.raises(
        RecipeError, match=rf"trainer\.strategy: expected one of auto, ddp, ddp_find_.*, got '{strategy}'"
    ):
        tiny.run(tmp_path / "run", shapes, f"--trainer.strategy {strategy}")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--trainer.accelerator tpuu", r"expected trainer\.accelerator, .* that Lightning accepts .*tpuu"),
        ("--trainer.strategy ddp_x", r"expected trainer\.accelerator, .* that Lightning accepts .*ddp_x"),
        ("--data.style lvis", "expected the frequency of every category for style='lvis'"),
        ('--schedule.factors {"bakcbone":0.1}', r"schedule\.factors: expected a part of a parameter name"),
    ],
)
def test_settings_that_do_not_fit_end_with_a_message(flags, message, shapes, tmp_path):
    with pytest.raises(RecipeError, match=message):
        tiny.run(tmp_path / "run", shapes, flags)


def test_training_can_start_from_other_weights(run):
    recipe = load_recipe(run / "recipe.yaml")
    model = build_detector(recipe, num_classes=7)
    left = load_matching_weights(model, str(run / "weights.safetensors"))
    assert left
    assert all("box_head" in name or "mask_head" in name for name in left), "only what knows the classes is left"
    other: Detector = build_detector(tiny.recipe("--backbone resnet18"), num_classes=7)
    with pytest.raises(WeightsError, match="init needs a run with the same backbone"):
        load_matching_weights(other, str(run / "weights.safetensors"))


def test_a_run_that_starts_from_weights_does_not_read_those_of_the_backbone(run, shapes, tmp_path, caplog):
    init = f"--init {run / 'weights.safetensors'} --backbone.weights missing.safetensors --schedule.max_steps 1"
    tiny.run(tmp_path / "run", shapes, init, name="faster-rcnn-laptop")
    assert "init: 6 tensors keep their initial values: box_head.layers.fc6.weight, box_head" in caplog.text


def test_torchvisions_weights_of_another_architecture_are_refused(shapes, tmp_path):
    with pytest.raises(WeightsError, match=r"init: expected one of the detectors faster_rcnn, mask_rcnn, retinanet"):
        tiny.run(tmp_path / "run", shapes, "--init torchvision:fasterrcnn_resnet50_fpn")


@pytest.mark.slow
def test_evaluation_every_other_epoch_and_at_the_end(shapes, tmp_path):
    tiny.run(tmp_path / "run", shapes, "--schedule.epochs 3 --trainer.validate_every 2 --schedule.max_steps 8")
    with (tmp_path / "run" / "validation.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["6", "8"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("split", ["train", "val"])
def test_an_image_deleted_in_mid_run_is_named(split, workers, shapes, tmp_path, monkeypatch, capsys):
    data = shutil.copytree(shapes, tmp_path / "data")
    image = json.loads((data / f"{split}.json").read_text())["images"][-1]["file_name"]
    usual = Loop.evaluate_batch if split == "train" else Loop.compute_loss

    def deletes(loop, batch):
        (data / "images" / image).unlink(missing_ok=True)
        return usual(loop, batch)

    monkeypatch.setattr(Loop, usual.__name__, deletes)
    words = ["train", "atss-laptop", "--data", str(data), "--out", str(tmp_path / "run"), *tiny.USUAL.split()]
    assert main([*words, "--data.workers", str(workers)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"bucketrank: {data / 'images' / image}: the image does not exist; ")
    assert len(error.splitlines()) == 1


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_the_run_can_be_resumed(shapes, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    usual = os.fsync

    def full(descriptor):
        if (folder / "checkpoints" / "previous.safetensors").exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        usual(descriptor)

    words = ["train", "atss-laptop", "--data", str(shapes), "--out", str(folder), *tiny.USUAL.split()]
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert main([*words, "--trainer.checkpoint_steps", "1"]) == 1
    error = capsys.readouterr().err
    path = folder / "checkpoints" / "last.safetensors"
    assert error == (
        f"bucketrank: train: {path}: cannot be written, the disk or the quota is full; free some space; "
        f"resume with: bucketrank train {folder} --resume\n"
    )
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "last.safetensors",
        "previous.safetensors",
    ]
    assert main(["train", "--resume", "--out", str(folder)]) == 0


def test_all_files_of_a_run_have_the_same_mode(run):
    files = [path for path in run.rglob("*") if path.is_file()]
    assert len({path.stat().st_mode & 0o777 for path in files}) == 1


@pytest.mark.slow
def test_workers_read_the_same(shapes, tmp_path):
    one, other = (
        tiny.run(
            tmp_path / str(workers), shapes, f"--data.workers {workers} --schedule.epochs 1 --inputs.min_size 48,64"
        )
        for workers in (0, 2)
    )
    assert one.metrics == pytest.approx(other.metrics, nan_ok=True, rel=0, abs=0)
    mine, theirs = (load_model(result.weights)[0].state_dict() for result in (one, other))
    for key, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[key], rtol=0, atol=0)


@pytest.mark.slow
def test_evaluations_do_not_count_as_time_of_the_steps(shapes, tmp_path, monkeypatch):
    """On this clock a step takes one second and the evaluation of an image a hundred."""
    clock = 0.0

    def taking(seconds, method):
        def taken(*arguments):
            nonlocal clock
            clock += seconds
            return method(*arguments)

        return taken

    monkeypatch.setattr(Loop, "compute_loss", taking(1, Loop.compute_loss))
    monkeypatch.setattr(Loop, "evaluate_batch", taking(100, Loop.evaluate_batch))
    monkeypatch.setattr(log, "time", SimpleNamespace(monotonic=lambda: clock))
    folder = tiny.run(tmp_path / "run", shapes).folder
    assert clock == 6 + 2 * 3 * 100, "six steps, and two evaluations of three images"
    with (folder / "train.csv").open() as file:
        assert [float(row["seconds"]) for row in csv.DictReader(file)] == [1] * 6
