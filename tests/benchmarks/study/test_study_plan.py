"""The runs of a study, their order and their learning rates."""

import json
from dataclasses import replace

import pytest

from benchmarks.__main__ import main
from benchmarks.study.command import dataset_of
from benchmarks.study.grid import STUDIES
from benchmarks.study.plan import choose_rows
from benchmarks.study.runs import Choice, StudyError
from bucketrank.errors import DataError
from tests.benchmarks.study.finished_runs import finish, plan

CITYSCAPES = ("person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle")


def test_the_best_rate_of_the_first_row_is_that_of_all_methods(tmp_path):
    study = plan(tmp_path, factors=(1.0, 2.0, 4.0), seeds=2)
    arms = {arm.row.key: arm for arm in study.arms}
    assert [arm.row.key for arm in study.families()] == ["atss-rs-exact", "atss-ap-exact", "atss-focal"]
    trials = study.trials(arms["atss-rs-bucketed"])
    assert [trial.name for trial in trials] == [f"atss-rs-exact-lr{rate}-trial" for rate in ("0.001", "0.002", "0.004")]
    assert all(trial.load().data.holdout == 0.2 for trial in trials)
    for trial, ap in zip(trials, (30.0, 40.0, 35.0), strict=True):
        finish(trial, 10.0, ap)
    results = study.runs(arms["atss-rs-bucketed"])
    assert [run.name for run in results] == ["atss-rs-bucketed-lr0.002-seed0", "atss-rs-bucketed-lr0.002-seed1"]
    assert study.chosen(arms["atss-focal"]) is None
    assert study.runs(arms["atss-focal"]) == []


def test_a_rate_whose_run_failed_is_not_chosen(tmp_path):
    study = plan(tmp_path, factors=(1.0, 2.0), only="atss-focal")
    low, high = study.trials(study.arms[0])
    finish(low, 12.0)
    assert study.chosen(study.arms[0]) is None, "the other trial may still end"
    study = replace(study, failed=frozenset({high.name}))
    assert study.chosen(study.arms[0]) == Choice(0.001)


def test_the_number_of_runs(tmp_path):
    study = plan(tmp_path, factors=(1.0, 2.0, 4.0), seeds=3)
    assert len(study.rows) == 7
    # Three trials for each of three losses.
    assert study.total == 7 * 3 + 3 * 3
    one = plan(tmp_path, only="atss-rs-*", seeds=2)
    assert one.total == len(one.commands()) == 6
    assert one.commands()[0].startswith("bucketrank train atss-laptop --data cells --out ")


def test_settings_of_the_user_override_those_of_the_study(tmp_path):
    study = plan(tmp_path, flags=("--schedule.epochs", "7", "--schedule.lr", "0.01"), factors=(0.5, 1.0))
    arm = study.arms[0]
    assert study.rates(arm) == [0.005, 0.01]
    assert study.trials(arm)[0].load().schedule.epochs == 7


def test_the_time_saved_is_spent_on_epochs(tmp_path):
    seconds = {"cascade-rcnn-rs-pairwise": 3.0, "cascade-rcnn-rs-exact-longer": 1.1}
    study = plan(tmp_path, name="budget", only="cascade-*", seconds=seconds)
    epochs = {arm.row.key: study.run(arm, Choice(1e-3)).load().schedule.epochs for arm in study.arms}
    # 2 epochs x 3.0 / 1.1, rounded down; the time of bucketed is not known.
    assert epochs == {
        "cascade-rcnn-rs-pairwise": 2,
        "cascade-rcnn-rs-exact-longer": 5,
        "cascade-rcnn-rs-bucketed-longer": 2,
    }
    paper = plan(tmp_path, name="budget", only="cascade-*", paper=True)
    assert [paper.run(arm, Choice(1e-3)).load().schedule.epochs for arm in paper.arms] == [12, 36, 36]


def test_a_folder_with_other_settings_is_refused(tmp_path):
    study = plan(tmp_path, only="atss-focal")
    finish(study.runs(study.arms[0])[0], 12.0)
    other = replace(study, flags=("--schedule.epochs", "9"))
    with pytest.raises(StudyError, match=r"expected a run with schedule.epochs 9, got one with 2; choose another"):
        assert other.runs(study.arms[0])[0].finished


def test_rows_by_pattern():
    study = STUDIES["detectors"]
    assert [row.key for row in choose_rows(study, paper=False, only="paa-focal,atss-rs-e*")] == [
        "atss-rs-exact",
        "paa-focal",
    ]
    with pytest.raises(StudyError, match="no row matches 'atss-sr'; the rows are faster-rcnn-rs-exact, "):
        choose_rows(study, paper=False, only="atss-sr")


def test_the_papers_rows_are_those_of_the_data_set():
    segmentation = STUDIES["segmentation"]
    assert {row.paper for row in choose_rows(segmentation, paper=True, dataset="LVIS")} == {
        "mask-rcnn-r50-lvis-rs",
        "mask-rcnn-r50-lvis-rs-pairwise",
        "mask-rcnn-r50-lvis-brs",
    }
    assert len(choose_rows(segmentation, paper=True)) == 6
    with pytest.raises(StudyError, match="detr: the paper has no rows on LVIS, only on COCO"):
        choose_rows(STUDIES["detr"], paper=True, dataset="LVIS")


@pytest.mark.parametrize(
    ("categories", "expected"),
    [
        ([{"id": 1, "name": "cell"}], "COCO"),
        ([{"id": 1, "name": "cell", "frequency": "r"}], "LVIS"),
        ([{"id": n, "name": name} for n, name in enumerate(CITYSCAPES)], "Cityscapes"),
    ],
)
def test_which_data_set(tmp_path, categories, expected):
    document = {"images": [], "annotations": [], "categories": categories}
    (tmp_path / "val.json").write_text(json.dumps(document))
    assert dataset_of(tmp_path) == expected


def test_the_layout_decides_between_coco_and_lvis_in_one_folder(tmp_path, capsys):
    """LVIS annotates the images of COCO, so both files are often in one folder."""
    (tmp_path / "annotations").mkdir()
    for name, category in (("instances_val2017", {}), ("lvis_v1_val", {"frequency": "r"})):
        document = {"images": [], "annotations": [], "categories": [{"id": 1, "name": "cell", **category}]}
        (tmp_path / "annotations" / f"{name}.json").write_text(json.dumps(document))
    command = ["study", "segmentation", "--budget", "paper", "--data", str(tmp_path), "--dry-run"]
    assert main(command) != 0
    assert "fits several layouts" in capsys.readouterr().err
    assert main([*command, "--data.layout", "coco"]) == 0
    assert "lvis" not in capsys.readouterr().out
    assert main([*command, "--data.layout", "lvis"]) == 0
    assert all(" mask-rcnn-r50-lvis-" in line for line in capsys.readouterr().out.splitlines())
    assert main([*command, "--data.layout", "kitti"]) != 0
    assert "--data.layout: expected one of auto, own, coco, lvis, roboflow, yolo, voc" in capsys.readouterr().err


def write_classes(folder, names):
    document = {
        "images": [],
        "annotations": [],
        "categories": [{"id": n, "name": name} for n, name in enumerate(names)],
    }
    (folder / "val.json").write_text(json.dumps(document))


def test_cityscapes_runs_start_from_a_coco_run(tmp_path, capsys):
    write_classes(tmp_path, CITYSCAPES)
    command = ["study", "segmentation", "--budget", "paper", "--data", str(tmp_path), "--dry-run"]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "mask-rcnn-r50-cityscapes-rs: init: expected the weights of a mask_rcnn trained on COCO" in error
    assert main([*command, "--init", "runs/coco/weights.safetensors"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3, "one seed"
    assert all("--init runs/coco/weights.safetensors" in line for line in lines)


def test_the_papers_budget_has_one_seed(tmp_path, capsys):
    write_classes(tmp_path, ("cell",))
    command = ["study", "detr", "--data", str(tmp_path), "--dry-run", "--only", "co-detr-rs-pairwise", "--rates", "1"]
    for words, seeds in (([], 3), (["--budget", "paper"], 1), (["--budget", "paper", "--seeds", "2"], 2)):
        assert main([*command, *words]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == seeds
    assert lines[0].startswith("bucketrank train rs-detr-r50-pairwise ")


def test_settings_of_the_chosen_rows_are_accepted_in_the_papers_budget(tmp_path, capsys):
    """The first row of the study, Faster R-CNN, does not have this setting."""
    document = {"images": [], "annotations": [], "categories": [{"id": 1, "name": "cell"}]}
    (tmp_path / "val.json").write_text(json.dumps(document))
    command = ["study", "detectors", "--budget", "paper", "--data", str(tmp_path), "--dry-run"]
    assert main([*command, "--only", "atss-*", "--detector.topk", "9"]) == 0
    assert all("--detector.topk 9" in line for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("categories", [{"1": "cell"}, ["cell"], None])
def test_classes_that_cannot_be_read(tmp_path, categories):
    (tmp_path / "val.json").write_text(json.dumps({"images": [], "annotations": [], "categories": categories}))
    with pytest.raises(DataError, match="check-data"):
        dataset_of(tmp_path)


def test_the_final_runs_are_printed_once_the_trials_have_chosen(tmp_path):
    study = plan(tmp_path, only="atss-focal", factors=(1.0, 2.0), seeds=2)
    assert ["--data.holdout" in command for command in study.commands()] == [True, True]
    for trial, ap in zip(study.trials(study.arms[0]), (10.0, 20.0), strict=True):
        finish(trial, ap)
    *_, first, second = study.commands()
    assert "--schedule.lr 0.002 --trainer.seed 0" in first
    assert "--schedule.lr 0.002 --trainer.seed 1" in second
    assert "holdout" not in first + second


def test_one_rate_needs_no_trials(tmp_path):
    study = plan(tmp_path, only="atss-focal")
    assert (study.trials_per_family, study.trials(study.arms[0])) == (0, [])
    assert study.chosen(study.arms[0]) == Choice(0.001)
