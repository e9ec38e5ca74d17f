"""The comparison of losses in one head: its protocol, its results from finished runs, and its page."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.figures import LOSS_COLOURS
from benchmarks.study.grid import COMPARED, LOSS_TITLES, ONE_HEAD
from benchmarks.study.losses import (
    bootstrap_at,
    class_names,
    class_rows,
    collect_losses,
    headline_rows,
    loss_rows,
    mask_and_box_rows,
    record_of,
    step_rows,
    to_json,
    to_markdown,
    write_losses,
)
from benchmarks.study.plan import LossPlan, read_choices
from benchmarks.study.runs import StudyError, StudyRun, portable_command, read_records
from benchmarks.study.steps import measure_steps
from bucketrank.data import find_splits
from bucketrank.data.labels import encode_mask
from bucketrank.detectors.dense import DenseDetector
from bucketrank.evaluation import Evaluator
from bucketrank.weights.load import build_detector
from tests.benchmarks.study.finished_runs import finish


def comparison(data: Path, out: Path, **settings: Any) -> LossPlan:
    defaults = {"losses": ("rs", "focal", "qfl"), "seeds": 2, "steps": 292, "trial_steps": 73, "factors": (1.0, 2.0)}
    settings.setdefault("detector", COMPARED["atss-laptop"])
    return LossPlan(data=(data,), out=out, **{**defaults, **settings})


def finish_trials(plan: LossPlan, data: Path, loss: str, *aps: float) -> None:
    """Finish the trials of the learning rates, then that of the other box balance."""
    for trial, ap in zip(plan.rate_trials(plan.arm(data, loss)), aps, strict=False):
        finish(trial, ap)
    finish(plan.trials(plan.arm(data, loss))[-1], aps[-1])


@pytest.mark.slow
def test_trials_never_see_the_validation_images_and_all_losses_have_as_many(shapes, tmp_path):
    plan = comparison(shapes, tmp_path, losses=ONE_HEAD)
    for loss in ONE_HEAD:
        finish_trials(plan, shapes, loss, 20.0, 30.0, 25.0)
        trials = plan.trials(plan.arm(shapes, loss))
        assert all(trial.load().data.holdout == 0.2 for trial in trials)
        usual = loss in {"rs", "rsq"}
        tried = [(trial.choice.rate, trial.load().loss.box_balance) for trial in trials]
        assert tried == [(0.001, usual), (0.002, usual), (0.002, not usual)]


def test_every_loss_that_can_be_compared_has_a_colour():
    assert set(LOSS_COLOURS) == set(LOSS_TITLES)


def test_final_runs_differ_by_the_loss_alone(shapes, tmp_path):
    plan = comparison(shapes, tmp_path)
    for loss in plan.losses:
        finish_trials(plan, shapes, loss, 20.0, 20.0, 20.0)
    recipes = [plan.runs(plan.arm(shapes, loss))[0].load() for loss in plan.losses]
    assert all(recipe.data.holdout is None for recipe in recipes)
    for recipe in recipes[1:]:
        assert recipe.detector == recipes[0].detector
        assert recipe.schedule == recipes[0].schedule
        assert (recipe.loss.box_loss, recipe.loss.box_confidence) == ("giou", True)


def test_the_best_trial_decides_rate_and_boxes_once_all_are_finished(shapes, tmp_path):
    plan = comparison(shapes, tmp_path)
    for trial, ap in zip(plan.trials(plan.arm(shapes, "qfl")), (10.0, 30.0), strict=True):
        finish(trial, ap)
    assert plan.runs(plan.arm(shapes, "qfl")) == []
    finish(plan.trials(plan.arm(shapes, "qfl"))[-1], 40.0)
    runs = plan.runs(plan.arm(shapes, "qfl"))
    assert [(run.choice.rate, run.choice.balanced, run.seed) for run in runs] == [(0.002, True, 0), (0.002, True, 1)]
    assert runs[0].name == f"{shapes.name}-qfl-lr0.002-balanced-seed0"


def test_a_failed_trial_leaves_the_choice_to_the_others(shapes, tmp_path):
    plan = comparison(shapes, tmp_path, losses=("rs",))
    low, high = plan.rate_trials(plan.arm(shapes, "rs"))
    finish(low, 20.0)
    assert plan.trials(plan.arm(shapes, "rs")) == [low, high]
    plan = replace(plan, failed=frozenset({high.name}))
    *_, other = plan.trials(plan.arm(shapes, "rs"))
    assert (other.choice.rate, other.choice.balanced) == (low.choice.rate, False)
    assert plan.chosen(plan.arm(shapes, "rs")) is None
    finish(other, 10.0)
    assert [run.choice.rate for run in plan.runs(plan.arm(shapes, "rs"))] == [low.choice.rate] * 2
    page = to_markdown(plan, collect_losses(plan), failed={high.name: "failed: the loss is not finite"})
    assert f"## Failed\n\n- {high.name}: failed: the loss is not finite" in page
    assert "ap_over_steps.svg" not in page, "no run is finished, so there is no such figure"
    assert replace(plan, out=tmp_path / "all", failed=frozenset({low.name, high.name})).runs(plan.arms[0]) == []


@pytest.mark.parametrize("ap", [0.0, float("nan")])
def test_trials_that_detect_nothing_choose_the_rate_of_the_recipe(ap, shapes, tmp_path):
    plan = comparison(shapes, tmp_path, losses=("rs",), factors=(0.25, 0.5, 1.0, 2.0), head="published")
    for trial in plan.trials(plan.arm(shapes, "rs")):
        finish(trial, ap)
    chosen = plan.chosen(plan.arm(shapes, "rs"))
    assert chosen is not None
    assert chosen.rate == plan.recipe.schedule.lr
    assert "No trial of RS on shapes detected an object" in to_markdown(plan, [])
    for run in plan.runs(plan.arm(shapes, "rs")):
        finish_with_detections(run, 1.0, 0.0, 0.0)
    (outcome,) = collect_losses(plan)
    assert outcome.results[0].steps_to(0.5 * outcome.best_ap) is None


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [name for name, detector in COMPARED.items() if detector.same_head])
def test_one_head_means_the_same_model_for_every_loss(name, shapes, tmp_path):
    plan = comparison(shapes, tmp_path, detector=COMPARED[name], losses=ONE_HEAD, flags=("--backbone.weights", "null"))
    built = {}
    for loss in ONE_HEAD:
        detector = build_detector(plan.rate_trials(plan.arm(shapes, loss))[0].load(), num_classes=3)
        assert isinstance(detector, DenseDetector)
        tensors = {key: tuple(value.shape) for key, value in detector.state_dict().items()}
        built[loss] = (tensors, detector.criterion.box_loss, vars(detector.anchors)["_buffers"])
    assert len({str(each) for each in built.values()}) == 1


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", COMPARED)
def test_as_published_the_trials_choose_the_rate_alone(name, shapes, tmp_path):
    detector = COMPARED[name]
    losses = detector.default_losses("published")
    plan = comparison(shapes, tmp_path, detector=detector, head="published", losses=losses)
    for loss in losses:
        for trial, ap in zip(plan.trials(plan.arm(shapes, loss)), (30.0, 20.0), strict=True):
            finish(trial, ap)
        first, _ = plan.runs(plan.arm(shapes, loss))
        assert first.choice.rate == plan.rates(plan.arms[0])[0]
        assert first.load().loss.box_balance is None
        assert first.name == f"{shapes.name}-{loss}-lr{first.choice.rate:g}-published-seed0"
    assert plan.total == len(losses) * 4


def detections_of(data: Path, *, missing: float, seed: int) -> list[dict[str, Any]]:
    """Return the true boxes of the validation images as detections, without a random share of them."""
    split = find_splits(data).val
    assert split is not None
    evaluator = Evaluator(split)
    generator = torch.Generator().manual_seed(seed)
    for image in split.read()["images"]:
        entries = [each for each in split.read()["annotations"] if each["image_id"] == image["id"]]
        entries = [each for each in entries if torch.rand(1, generator=generator) >= missing]
        boxes = torch.tensor([each["bbox"] for each in entries]).reshape(-1, 4)
        labels = torch.tensor([evaluator.categories.index(each["category_id"]) + 1 for each in entries])
        detections = {"boxes": boxes, "labels": labels.long(), "scores": torch.rand(len(entries), generator=generator)}
        detections["boxes"] = torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], 1)
        evaluator.add([image["id"]], [detections])
    return evaluator.detections


def finish_with_detections(run: StudyRun, missing: float, *aps: float, metric: str = "boxes") -> None:
    finish(run, *aps, metric=metric)
    (run.folder / "detections").mkdir()
    for epoch in range(1, len(aps) + 1):
        records = detections_of(run.data, missing=missing, seed=run.seed)
        run.detections(73 * epoch).write_text(json.dumps(records))


def empty_masks(run: StudyRun) -> None:
    """Give every detection of a run a mask without pixels."""
    split = find_splits(run.data).val
    assert split is not None
    sizes = {image["id"]: (image["height"], image["width"]) for image in split.read()["images"]}
    for step in run.curve()[0]:
        records = json.loads(run.detections(step).read_text())
        for record in records:
            record["segmentation"] = encode_mask(np.zeros(sizes[record["image_id"]], dtype=bool))
        run.detections(step).write_text(json.dumps(records))


@pytest.fixture
def finished(shapes, tmp_path) -> LossPlan:
    plan = comparison(shapes, tmp_path)
    for loss in plan.losses:
        finish_trials(plan, shapes, loss, 20.0, 20.0, 20.0)
    for run in plan.runs(plan.arm(shapes, "rs")):
        finish_with_detections(run, 0.0, 20.0, 30.0, 38.0, 40.0)
    for run in plan.runs(plan.arm(shapes, "focal")):
        finish_with_detections(run, 0.7, 4.0, 10.0, 20.0, 30.0)
    for run in plan.runs(plan.arm(shapes, "qfl")):
        finish_with_detections(run, 0.0, 10.0, 25.0, 36.0, 40.0)
    return plan


def test_differences_and_steps(finished, shapes):
    (outcome,) = collect_losses(finished)
    assert outcome.best_ap == pytest.approx(40)
    assert outcome.compared == ["focal", "qfl"]
    differences = outcome.differences(1.0)
    assert differences["focal"].verdict == "ahead"
    assert (differences["qfl"].value, differences["qfl"].verdict) == (0, "level")
    ours = outcome.of("rs")
    assert ours is not None
    step, mean = ours.mean_at(0.25)
    assert step == 73
    assert mean == pytest.approx(20)
    assert ours.steps_to(20) == pytest.approx(73)
    assert ours.steps_to(32) == pytest.approx(73 * (2 + 2 / 8))
    assert ours.steps_to(41) is None


@pytest.mark.slow
def test_ap_by_class(finished, shapes):
    split = find_splits(shapes).val
    assert split is not None
    (outcome,) = collect_losses(finished)
    names, rows = class_names(outcome), class_rows(outcome)
    assert set(names) <= {category["name"] for category in split.read()["categories"]}
    assert [row[0] for row in rows] == ["RS", "focal", "QFL"]
    run = finished.runs(finished.arm(shapes, "focal"))[0]
    evaluator = Evaluator(split)
    evaluator.add_records(json.loads(run.detections(292).read_text()))
    per_class = evaluator.result().per_class
    assert record_of(run).class_ap == pytest.approx({name: 100 * per_class[name] for name in names})
    assert rows[1][1:] != rows[0][1:]
    assert "AP by class:" in to_markdown(finished, [outcome])


@pytest.mark.slow
def test_losses_are_compared_on_the_seeds_that_both_have(finished, shapes):
    first, _ = finished.runs(finished.arm(shapes, "rs"))
    first.detections(292).write_text("[]")  # the seeds of RS differ
    (before,) = collect_losses(finished)
    ours = before.of("rs")
    assert ours is not None
    for loss in ("focal", "qfl"):
        (finished.runs(finished.arm(shapes, loss))[0].folder / "weights.safetensors").unlink()
    (outcome,) = collect_losses(finished)
    usual = outcome.of("focal")
    assert usual is not None
    expected = bootstrap_at(ours.runs[1], 1.0).ap - bootstrap_at(usual.runs[0], 1.0).ap
    assert outcome.differences(1.0)["focal"].value == pytest.approx(expected)
    assert expected > 0
    assert [row[:2] for row in loss_rows(outcome)] == [["RS", "2"], ["focal", "1"], ["QFL", "1"]]


def test_the_best_rival_is_chosen_among_those_with_the_most_seeds(shapes, tmp_path):
    plan = comparison(shapes, tmp_path, losses=("qfl", "vfl"))
    for loss, ap in (("qfl", 30.0), ("vfl", 40.0)):
        finish_trials(plan, shapes, loss, 20.0, 20.0, 20.0)
        for run in plan.runs(plan.arm(shapes, loss))[: 2 if loss == "qfl" else 1]:
            finish(run, ap)
    (outcome,) = collect_losses(plan)
    best = outcome.best_rival()
    assert best is not None
    assert best.loss == "qfl"


def test_differences_of_a_detector_with_masks_are_those_of_its_masks(shapes, tmp_path):
    """The boxes of the detections are right, and their masks are empty."""
    plan = comparison(shapes, tmp_path, detector=COMPARED["mask-rcnn-laptop"], head="published", losses=("rs", "ce"))
    for trial in plan.rate_trials(plan.arm(shapes, "rs")):
        finish(trial, 20.0, metric="masks")
    run, other = plan.runs(plan.arm(shapes, "rs"))
    for each in (run, other):
        finish_with_detections(each, 0.0, 20.0)
    assert bootstrap_at(run, 1.0).ap == pytest.approx(100)
    empty_masks(other)
    assert bootstrap_at(other, 1.0).ap == pytest.approx(0)
    assert bootstrap_at(other, 1.0, boxes=True).ap == pytest.approx(100)


@pytest.mark.slow
def test_masks_and_boxes_are_compared_at_every_evaluation(shapes, tmp_path):
    """All masks are empty, so they are level; RS finds all boxes, cross-entropy misses most at first."""
    plan = comparison(shapes, tmp_path, detector=COMPARED["mask-rcnn-laptop"], head="published", losses=("rs", "ce"))
    for loss, missing, aps in (("rs", 0.0, (10.0, 20.0, 30.0)), ("ce", 0.7, (5.0, 15.0, 25.0))):
        for trial in plan.rate_trials(plan.arm(shapes, loss)):
            finish(trial, 20.0, metric="masks")
        for run in plan.runs(plan.arm(shapes, loss)):
            finish_with_detections(run, missing, *aps, metric="masks")
            run.detections(219).write_text(json.dumps(detections_of(shapes, missing=0.0, seed=run.seed)))
            empty_masks(run)
    outcomes = collect_losses(plan)
    page = to_markdown(plan, outcomes)
    assert (
        "| steps | masks: RS | masks: cross-entropy | masks: RS minus cross-entropy | boxes: RS | boxes: cross-entropy "
        "| boxes: RS minus cross-entropy |"
    ) in page
    first, second, last = mask_and_box_rows(outcomes[0])
    assert first[:6] == ["73", "10.0", "5.0", "+0.0 (+0.0 to +0.0) level", "20.0", "10.0"]
    assert second[:3] == ["146", "20.0", "15.0"]
    assert first[6].endswith("ahead")
    assert second[6] == first[6]
    assert last[6] == "+0.0 (+0.0 to +0.0) level"
    elsewhere = merged(plan, tmp_path / "elsewhere")
    assert mask_and_box_rows(collect_losses(elsewhere)[0]) == [first, second, last]
    older = {name: replace(record, box_bootstrap={}) for name, record in elsewhere.records.items()}
    assert mask_and_box_rows(collect_losses(replace(elsewhere, records=older))[0]) == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (("--data.style", "lvis"), r"expected the frequency of every category for style='lvis'"),
        (("--data.layout", "roboflow"), r"no annotations found"),
    ],
)
def test_intervals_follow_the_data_settings_of_the_run(flags, error, finished, shapes):
    run = finished.runs(finished.arm(shapes, "rs"))[0]
    with pytest.raises(ValueError, match=error):
        bootstrap_at(replace(run, flags=(*run.flags, *flags)), 1.0)


def test_the_layout_decides_how_many_training_images_there_are(shapes, tmp_path):
    """Ten evaluations in 300 steps: every 30 steps, which are 10 epochs of 12 images or 30 epochs of 4."""
    both = tmp_path / "both"
    both.mkdir()
    for file in shapes.iterdir():
        (both / file.name).symlink_to(file)
    document = json.loads((shapes / "train.json").read_text())
    for folder, images in (("train", document["images"][:4]), ("valid", document["images"][4:6])):
        (both / folder).mkdir()
        ids = {image["id"] for image in images}
        kept = [each for each in document["annotations"] if each["image_id"] in ids]
        fewer = {**document, "images": images, "annotations": kept}
        (both / folder / "_annotations.coco.json").write_text(json.dumps(fewer))
    for layout, epochs in (("own", 10), ("roboflow", 30)):
        plan = comparison(both, tmp_path, steps=300, flags=("--data.layout", layout))
        for trial in plan.rate_trials(plan.arm(both, "rs")):
            finish(trial, 20.0)
        finish(plan.trials(plan.arm(both, "rs"))[-1], 20.0)
        assert plan.runs(plan.arm(both, "rs"))[0].load().trainer.validate_every == epochs
        shutil.rmtree(tmp_path / "runs")


def test_the_page_has_the_verdicts_and_says_what_is_missing(finished, shapes):
    outcomes = collect_losses(finished)
    (usual, rival) = headline_rows(outcomes[0])
    assert usual[1] == "focal"
    assert usual[-1] == "ahead"
    assert (rival[1], rival[-1]) == ("QFL", "level")
    assert [row[0] for row in loss_rows(outcomes[0])] == ["RS", "focal", "QFL"]
    write_losses(finished, outcomes)
    assert {"losses.md", "losses.json", "ap_over_steps.svg", "ap_over_rates.svg"} <= {
        path.name for path in finished.out.iterdir()
    }
    assert "Not complete" not in to_markdown(finished, outcomes)
    document = json.loads((finished.out / "losses.json").read_text())
    assert document["sets"][0]["rs_minus"]["end"]["focal"]["value"] > 0
    assert len(document["trials"]) == 9
    shorter = replace(finished, seeds=3)
    assert "Not complete: 3 of 18 runs" in to_markdown(shorter, collect_losses(shorter))


def test_commands_of_the_trials_can_be_printed(shapes, tmp_path, capsys):
    flags = ["--only", "rs,qfl", "--rates", "1", "--dry-run", "--out", str(tmp_path), "--inputs.min_size", "64"]
    assert main(["study", "losses", "--data", str(shapes), *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all("--inputs.min_size 64" in line and "--data.holdout 0.2" in line for line in lines)
    assert all("--schedule.max_steps 125" in line for line in lines)
    assert main(["study", "losses", "--data", str(shapes), *flags, "--steps", "600", "--trial-steps", "150"]) == 0
    assert capsys.readouterr().out.count("--schedule.max_steps 150") == 2
    assert main(["study", "losses", "--data", str(shapes), "--only", "qfx"]) == 2
    assert (
        "--only: expected one of rs, focal, ce, qfl, vfl, bce, mal, iabce, rsq, ap, dr, alrp, got 'qfx'"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["losses", "--budget", "paper", "--dry-run"], "losses does not use --budget"),
        (["detectors", "--steps", "30", "--head", "published", "--dry-run"], "detectors does not use --head, --steps"),
        (["losses", "--recipe", "paa-laptop", "--dry-run"], "--head: expected published for paa-laptop"),
        (["losses", "--recipe", "yolo", "--dry-run"], "--recipe: expected"),
        (["losses", "--steps", "7", "--dry-run"], "expected --steps of at least 8"),
        (["losses", "--data.holdout", "0.3", "--dry-run"], "losses sets --data.holdout itself; remove the flag"),
        (["detectors", "--data.holdout", "0.3", "--dry-run"], "detectors sets --data.holdout itself; remove the flag"),
        (
            ["losses", "--loss", "qfl", "--schedule.early_stop=2", "--dry-run"],
            "losses sets --loss.name, --schedule.early_stop itself; remove the flags",
        ),
        (
            ["losses", "--steps", "30", "--trial-steps", "31", "--dry-run"],
            "--trial-steps from 1 to --steps, got 30 and 31",
        ),
    ],
)
def test_flags_that_a_study_does_not_use_are_refused(flags, message, shapes, capsys):
    assert main(["study", flags[0], "--data", str(shapes), *flags[1:]]) == 2
    assert message in capsys.readouterr().err


def test_all_data_sets_are_looked_at_before_the_first_run(shapes, capsys):
    for data, message in (
        ("none", "none: the folder does not exist"),
        (str(shapes), "expected folders with different names"),
    ):
        assert main(["study", "losses", "--data", f"{shapes},{data}", "--dry-run"]) == 2
        assert message in capsys.readouterr().err


def merged(plan: LossPlan, out: Path, **changed: Any) -> LossPlan:
    """Return the same plan in an empty folder, with the records of the first one's JSON file."""
    return replace(plan, out=out, records=read_records(write_json(plan)), **changed)


def write_json(plan: LossPlan) -> Path:
    """Write the JSON file of a study without its page and figures, and return its path."""
    path = plan.out / "losses.json"
    path.write_text(json.dumps(to_json(plan, collect_losses(plan))))
    return path


@pytest.mark.slow
def test_a_study_continues_on_another_machine_with_the_same_results(finished, shapes, tmp_path):
    elsewhere = merged(finished, tmp_path / "elsewhere")
    assert all(run.finished for loss in elsewhere.losses for run in elsewhere.runs(elsewhere.arm(shapes, loss)))
    assert to_markdown(elsewhere, collect_losses(elsewhere)) == to_markdown(finished, collect_losses(finished))
    (before,), (after,) = collect_losses(finished), collect_losses(elsewhere)
    for loss, difference in before.differences(0.25).items():
        kept = after.differences(0.25)[loss]
        assert vars(kept) == pytest.approx(vars(difference), abs=2e-3), "draws are stored with three digits"
    more_seeds = replace(elsewhere, seeds=3)
    missing = [run.seed for run in more_seeds.runs(more_seeds.arm(shapes, "rs")) if not run.finished]
    assert missing == [2]


def test_a_record_holds_no_path_of_the_machine(shapes, tmp_path):
    plan = comparison(shapes, tmp_path, flags=("--backbone.weights", str(tmp_path / "lite0.safetensors")))
    command = portable_command(plan.rate_trials(plan.arm(shapes, "rs"))[0])
    assert str(tmp_path) not in command
    assert f"--data {shapes.name} --out runs/{shapes.name}-rs-lr0.001" in command
    assert "--backbone.weights lite0.safetensors" in command


def test_records_of_another_study_are_refused(finished, shapes, tmp_path, capsys):
    same = merged(finished, tmp_path / "other")
    other = replace(same, flags=("--inputs.max_size", "640"))
    with pytest.raises(StudyError, match=r"--merge: .*: expected a run with inputs.max_size 640, got one with 320"):
        other.trials(other.arm(shapes, "rs"))
    for flag, value, before in (("backbone.weights", "null", "pretrained"), ("trainer.precision", "bf16-mixed", "32")):
        other = replace(same, flags=(f"--{flag}", value))
        with pytest.raises(StudyError, match=rf"expected a run with {flag} .*, got one with '{before}"):
            other.trials(other.arm(shapes, "rs"))
    wrong = tmp_path / "wrong.json"
    for content, message in (("[]", "expected the JSON file of a study"), (None, "cannot be read")):
        if content is not None:
            wrong.write_text(content)
        file = wrong if content else tmp_path / "none.json"
        assert main(["study", "losses", "--data", str(shapes), "--merge", str(file), "--dry-run"]) == 1
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_damaged_records_are_refused(finished, shapes, tmp_path):
    document = json.loads(write_json(finished).read_text())
    damaged = tmp_path / "damaged.json"
    trial = document["trials"][0]
    draws = {"292": {"AP": 30.0, "draws": [30.0] * 100}}
    curves: list[Any] = [[[], []], [[73], [20.0, 30.0]], [[146, 73], [20.0, 30.0]], [[73], [None]]]
    for change in (
        *({"command": "rm -r /"}, {"class_ap": 3}, {"bootstrap": draws}, {"metrics": {"AP50": 30.0}}),
        *({"metrics": trial["metrics"] | {"AP": None}},),
        *({"curve": curve} for curve in curves),
    ):
        damaged.write_text(json.dumps(document | {"trials": [document["trials"][0] | change]}))
        with pytest.raises(StudyError, match=r"damaged.json: expected the JSON file of a study"):
            read_records(damaged)
    damaged.write_text(json.dumps(document | {"runs": [document["runs"][0] | {"metrics": {"AP": 30.0}}]}))
    with pytest.raises(StudyError, match=r"damaged.json: expected the JSON file of a study"):
        read_records(damaged)
    damaged.write_text(json.dumps(document | {"trials": [document["trials"][0] | {"command": "bucketrank train 'x"}]}))
    cut = replace(finished, records=read_records(damaged))
    with pytest.raises(StudyError, match=r"--merge: .*-trial: No closing quotation"):
        cut.rate_trials(cut.arm(shapes, "rs"))
    damaged.write_text(json.dumps(document | {"runs": [run | {"bootstrap": {}} for run in document["runs"]]}))
    without_draws = replace(finished, records=read_records(damaged))
    with pytest.raises(StudyError, match=r"expected bootstrap draws after step 292, got none; train it again"):
        bootstrap_at(without_draws.runs(without_draws.arm(shapes, "rs"))[0], 1.0)


@pytest.mark.slow
def test_merged_trials_are_not_printed_again(finished, shapes, tmp_path, capsys):
    flags = [
        "--only",
        "rs",
        "--steps",
        str(8 * finished.trial_steps),
        "--rates",
        "1,2,4",
        "--out",
        str(tmp_path / "new"),
    ]
    merge = ["--merge", str(write_json(finished)), "--dry-run"]
    assert main(["study", "losses", "--data", str(shapes), *flags, *merge]) == 0
    (left,) = capsys.readouterr().out.splitlines()
    assert "--schedule.lr 0.004" in left


def test_runs_at_the_rates_of_another_study_need_no_trials(finished, shapes, tmp_path, capsys):
    document = write_json(finished)
    flags = ["study", "losses", "--data", str(shapes), "--seeds", "2", "--out", str(tmp_path / "new"), "--dry-run"]
    rates = ["--rates-of", f"{document}:{shapes.name}"]
    assert main([*flags, "--only", "qfl,rs", *rates]) == 0
    commands = capsys.readouterr().out.splitlines()
    plan = replace(finished, choices=read_choices(document, shapes.name))
    assert len(commands) == plan.trials_per_family + 4 == 4
    for loss, line in zip(("qfl", "rs", "qfl", "rs"), sorted(commands, key=lambda each: each[-1]), strict=True):
        chosen = finished.chosen(finished.arm(shapes, loss))
        assert chosen is not None
        assert chosen == plan.chosen(plan.arm(shapes, loss))
        assert f"--loss.box_balance {str(chosen.balanced).lower()}" in line
        assert f"--schedule.lr {chosen.rate:g} " in line
    assert "chosen by the trials of another study" in to_markdown(plan, [])
    for wrong, status, message in (
        (["--only", "mal", *rates], 2, "--rates-of: expected a rate for mal, got none"),
        (["--rates-of", str(document)], 2, "--rates-of: expected FILE:SET"),
        (["--rates-of", f"{document}:bccd"], 1, f"expected a set among {shapes.name}, got 'bccd'"),
        (["--rates-of", f"{shapes / 'train.json'}:bccd"], 1, "expected the losses.json of a study"),
        (["--rates-of", f"{tmp_path / 'none.json'}:bccd"], 1, "cannot be read"),
        (["--rates", "1,2", *rates], 2, "expected --rates to try or --rates-of another study, got both"),
    ):
        assert main([*flags, *wrong]) == status
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_steps_of_all_losses_are_timed_in_turn(shapes, tmp_path):
    flags = ("--backbone.weights", "null", "--inputs.min_size", "64", "--inputs.max_size", "64")
    plan = comparison(shapes, tmp_path, losses=("rs", "focal"), flags=flags)
    runs = plan.first_runs()
    timed = measure_steps(tmp_path, runs, rounds=2, say=lambda _: None)["ATSS"]
    ours, usual = step_rows(plan, timed)
    assert (ours[0], usual[0]) == ("RS", "focal")
    assert usual[2] == "1.00 (1.00 to 1.00)"
    assert "## Seconds per step" in to_markdown(plan, [], timed)
    assert "## Seconds per step" not in to_markdown(plan, [])
    again = measure_steps(tmp_path, runs, rounds=2, say=lambda _: pytest.fail("measured twice"))
    assert again["ATSS"].samples == timed.samples
    assert str(tmp_path) not in json.dumps(timed.commands)
    assert len(measure_steps(tmp_path, runs, rounds=3, say=lambda _: None)["ATSS"].samples["atss-rs"]) == 3
    larger = replace(plan, flags=(*flags[:-1], "96"))
    assert not timed.covers(larger.first_runs()["ATSS"], rounds=2), "the steps of other settings are timed anew"
