"""Tables, claims and figures of runs that were not trained."""

import csv
import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.study.command import show_study, write_study
from benchmarks.study.grid import STUDIES
from benchmarks.study.plan import PaperPlan, choose_rows
from benchmarks.study.runs import RunRecord, StudyError, read_records
from benchmarks.study.steps import StepMeasurements
from benchmarks.study.tables import (
    SeedMean,
    StudyOutcome,
    claims,
    collect,
    column_names,
    row_cells,
    to_csv,
    to_latex,
    to_markdown,
)
from tests.benchmarks.study.finished_runs import MACHINE, finish, plan

SECONDS = {"atss-rs-exact": 1.02, "atss-rs-pairwise": 1.5, "atss-rs-bucketed": 1.0, "atss-focal": 1.0}


def outcome(out, *, seeds=2, apart=1e-7, missing=()) -> StudyOutcome:
    study = plan(out, seeds=seeds, only="atss-rs-*,atss-focal")
    ends = {"atss-rs-exact": 40.0, "atss-rs-pairwise": 40.5, "atss-rs-bucketed": 39.0, "atss-focal": 35.0}
    for arm in study.arms:
        for run in study.runs(arm):
            if run.name not in missing:
                finish(run, 20.0, ends[arm.row.key] + run.seed)
    samples = {key: dict.fromkeys(range(3), value) for key, value in SECONDS.items()}
    # A detector that is not part of the study, measured at another commit.
    other = StepMeasurements({}, {}, MACHINE | {"commit": "fedcba9876"})
    return collect(study, {"ATSS": StepMeasurements(samples, {"rs": apart}, MACHINE), "PAA": other}, {})


def test_table(tmp_path):
    results = outcome(tmp_path)
    table = to_markdown(results, [("t_iter.svg", "Seconds")])
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    rows = {line[1]: line for line in lines}
    assert rows["RS"][2:] == ["2", "0.001", "1.50", "1.50", "41.0 ± 0.7", "82.0 ± 1.4", "20.5 ± 0.4", "0.36", "39.8", "58.9", "42.6"]  # fmt: skip # noqa: E501
    assert rows["RS, exact"][-4:] == ["\N{EN DASH}"] * 4
    assert rows["focal"][5] == "1.00"
    assert "![Seconds](t_iter.svg)" in table
    assert "Trained on abacus, 2 cores, 1 thread; commit 0123456. Steps timed with 1 thread, commit 0123456." in table
    assert "mean ± deviation over 2 seeds" in table
    assert "Not complete" not in table


def test_unfinished_runs_are_counted(tmp_path):
    results = outcome(tmp_path, missing=("atss-focal-lr0.001-seed0", "atss-focal-lr0.001-seed1"))
    assert results.missing == 2
    table = to_markdown(results, [])
    assert "Not complete: 2 runs are not finished." in table
    assert "| ATSS | focal | - | 0.001 | 1.00 | 1.00 | - | - | - |" in table.replace("\N{EN DASH}", "-")


def test_csv_and_latex(tmp_path):
    results = outcome(tmp_path, seeds=1)
    rows = {row["method"] or row["loss"]: row for row in csv.DictReader(io.StringIO(to_csv(results)))}
    assert float(rows["exact"]["AP mean"]) == 40.0
    assert rows["exact"]["AP deviation"] == ""
    assert float(rows["pairwise"]["paper_AP"]) == 39.8
    latex = to_latex(results)
    assert r"ATSS & RS, exact & 2 & 0.001 & 1.02 & 1.02 & 40.0 & 80.0 & 20.0 & -- & -- & -- & -- \\" in latex
    assert latex.count("&") == 12 * 5


def test_claims_that_hold(tmp_path):
    answers = {claim.claim: claim for claim in claims(outcome(tmp_path))}
    assert len(answers) == 4
    assert all(claim.holds is True for claim in answers.values())
    assert answers["the ranking loss ends with more AP than the score-based one"].measured == (
        "40.5 against 35.5 AP (focal); ahead with 2 of 2 seeds"
    )


def test_claims_that_do_not_hold(tmp_path):
    study = plan(tmp_path, seeds=2, only="atss-rs-*,atss-focal")
    ends = {"atss-rs-exact": 30.0, "atss-rs-pairwise": 45.0, "atss-rs-bucketed": 39.0, "atss-focal": 30.5}
    for arm in study.arms:
        for run in study.runs(arm):
            finish(run, ends[arm.row.key] + 0.1 * run.seed)
    samples = {key: dict.fromkeys(range(3), 1.2 if key == "atss-rs-exact" else 1.0) for key in SECONDS}
    answers = claims(collect(study, {"ATSS": StepMeasurements(samples, {"rs": 0.01}, MACHINE)}, {}))
    assert [claim.holds for claim in answers] == [False] * 4


def test_claims_about_one_seed_are_inconclusive(tmp_path):
    answers = {claim.claim: claim for claim in claims(outcome(tmp_path, seeds=1))}
    same = answers["RS: exact and pairwise end with the same AP, within seed noise"]
    assert same.holds is None
    assert same.measured == "40.0 and 40.5 AP: -0.5; a single seed has no deviation"
    more = answers["the ranking loss ends with more AP than the score-based one"]
    assert more.holds is None
    assert more.measured == "40.0 against 35.0 AP (focal); ahead with 1 of 1 seeds"


@pytest.mark.slow
def test_files_and_terminal(tmp_path):
    results = outcome(tmp_path)
    write_study(results)
    names = {path.name for path in tmp_path.iterdir()} - {"runs"}
    assert names == {
        *(f"detectors.{ending}" for ending in ("md", "csv", "tex", "json")),
        *(f"{name}.{ending}" for name in ("t_iter", "ap_over_steps", "ap_over_time") for ending in ("png", "svg")),
    }
    document = json.loads((tmp_path / "detectors.json").read_text())
    records = read_records(tmp_path / "detectors.json")
    assert records[document["rows"][0]["runs"][1]].metrics["AP"] == 41.0
    console = Console(width=160, record=True, file=io.StringIO())
    show_study(results, console)
    printed = console.export_text()
    assert "RS, exact" in printed
    assert "yes  ATSS: RS: the gradients of exact equal those of pairwise: largest difference 1.0e-07 of " in printed


def test_seconds_that_the_runs_logged(tmp_path):
    study = plan(tmp_path, only="atss-focal")
    finish(study.runs(study.arms[0])[0], 12.0)
    # The first step is left out; 9 steps of 0.5 s, 10 of 0.7 s and 10 of 0.6 s.
    assert collect(study, {}, {}).results[0].seconds == 0.6


def test_masks_go_before_boxes(tmp_path):
    study = plan(tmp_path, name="segmentation", only="mask-rcnn-ce")
    run = study.runs(study.arms[0])[0]
    finish(run, 5.0, 9.0, metric="masks")
    assert run.metric("AP75") == pytest.approx(4.5)
    assert run.curve() == ([73, 146], [5.0, 9.0])
    assert run.box_curve() == pytest.approx([10, 18])
    assert RunRecord.of(run).metrics["box AP"] == pytest.approx(18)
    boxes_only = plan(tmp_path / "boxes", only="atss-focal")
    without_masks = boxes_only.runs(boxes_only.arms[0])[0]
    finish(without_masks, 5.0)
    assert without_masks.box_curve() == []


def test_cityscapes_has_the_ap_of_boxes_like_the_paper(tmp_path):
    rows = choose_rows(STUDIES["segmentation"], paper=True, dataset="Cityscapes")
    study = PaperPlan(
        study=STUDIES["segmentation"],
        rows=rows,
        paper=True,
        data=Path("city"),
        out=tmp_path,
        flags=("--init", "mmdet:files/coco.pth"),
    )
    for arm, ap in zip(study.arms, (19.0, 19.1, 19.2), strict=True):
        finish(study.runs(arm)[0], ap, metric="masks")
    results = collect(study, {}, {})
    pairwise = results.results[1]
    cells = dict(zip(column_names(results), row_cells(results, pairwise), strict=True))
    assert (cells["AP"], cells["paper's AP"]) == ("38.2", "43.5"), "the boxes have twice the AP"
    assert "Mask AP: RS, exact 19.0, RS 19.1, BRS 19.2." in to_markdown(results, [])
    record = RunRecord.of(pairwise.runs[0])
    assert (record.metrics["AP"], record.metrics["mask AP"]) == pytest.approx((38.2, 19.1))
    assert "--init mmdet:coco.pth" in record.command
    record.require_same_settings(pairwise.runs[0])


def test_ap_by_size(tmp_path):
    study = plan(tmp_path, name="detr", only="co-detr-focal")
    run = study.runs(study.arms[0])[0]
    finish(run, 20.0, boxes={"APs": 0.1, "APm": 0.3})
    results = collect(study, {}, {})
    cells = dict(zip(column_names(results), row_cells(results, results.results[0]), strict=True))
    assert [cells[name] for name in ("APs", "APm", "APl", "paper's APl")] == ["10.0", "30.0", "\N{EN DASH}", "63.8"]
    record = RunRecord.from_json(RunRecord.of(run).to_json())
    assert record.metrics["APm"] == pytest.approx(30)
    assert "APl" not in record.metrics, "there is no large object"
    assert math.isnan(replace(run, record=record).metric("APl"))


def test_mean_of_one():
    assert math.isnan(SeedMean.of([3.0]).deviation)


def test_seeds_are_compared_with_each_other_and_not_by_position(tmp_path):
    study = plan(tmp_path, seeds=3, only="atss-rs-exact,atss-focal")
    ends = {"atss-rs-exact": {1: 30.0, 2: 50.0}, "atss-focal": {0: 40.0, 1: 20.0, 2: 45.0}}
    for arm in study.arms:
        for run in study.runs(arm):
            if run.seed in ends[arm.row.key]:
                finish(run, ends[arm.row.key][run.seed])
    (more,) = (claim for claim in claims(collect(study, {}, {})) if claim.claim.startswith("the ranking loss ends"))
    assert more.holds is True
    assert more.measured.endswith("ahead with 2 of 2 seeds")


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000])
def test_an_environment_that_describes_no_run_is_named(text, tmp_path):
    study = plan(tmp_path)
    run = study.runs(study.arms[0])[0]
    finish(run, 10.0)
    (run.folder / "environment.json").write_text(text)
    with pytest.raises(StudyError, match=r"environment\.json: expected .*; remove the folder to train it again"):
        _ = run.environment


@pytest.mark.slow
def test_a_table_continues_on_another_machine(tmp_path):
    before = outcome(tmp_path)
    write_study(before)
    records = read_records(tmp_path / "detectors.json")
    elsewhere = replace(before.plan, out=tmp_path / "elsewhere", records=records, seeds=3)
    after = collect(elsewhere, before.measured, {})
    assert [row_cells(after, result) for result in after.results] == [
        row_cells(before, result) for result in before.results
    ]
    assert after.missing == len(after.results), "the third seed of each row"
    assert "Trained on abacus; commit 0123456." in to_markdown(after, [])
    with pytest.raises(StudyError, match=r"--merge: .*: expected a run with schedule.epochs 9, got one with 2"):
        collect(replace(elsewhere, flags=("--schedule.epochs", "9")), {}, {})
