"""The report command: pages of complete, incomplete and damaged run folders."""

from __future__ import annotations

import math
import re
import signal
from pathlib import Path

import pytest

from bucketrank.cli import main
from bucketrank.data import write_shapes
from bucketrank.inference.evaluation import evaluate
from bucketrank.report.page import GENERATOR, write_report
from bucketrank.weights.files import read_weights, save_weights


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_the_page_of_a_run(run, shapes, tmp_path, capsys):
    out = tmp_path / "new" / "page.html"
    assert main(["report", str(run), "--out", str(out), "--images", "1", "--device", "cpu"]) == 0
    assert f"wrote {out} (" in capsys.readouterr().out.replace("\n", "")
    text = text_of(out)
    measured = evaluate(run / "weights.safetensors", shapes)
    for result in (measured.boxes, measured.masks):
        assert result is not None
        assert f"<td>{100 * result.metrics['AR100']:.1f}</td>" in text
    assert "<h3>Masks</h3>" in text
    assert "<h3>Masks per class</h3>" in text
    assert len(re.findall('<figure class="image">', text)) == 2, "the best and the worst"
    assert "triangle" in text
    assert "weights.safetensors on 3 of 3 images" in text
    assert ">box_head: class outputs</th><td>" in text
    assert "Confusion at the stored threshold" in text
    assert write_report(run, tmp_path / "one.html", max_images=1).is_file(), "one run needs no list"
    assert main(["report", str(run), str(run), "--out", str(out), "--max-images", "1"]) == 0, "a report may be replaced"
    assert "All runs have the same settings." in text_of(out)
    assert "weights.safetensors on 1 of 3 images" in text_of(out)


def test_a_run_is_measured_on_the_images_it_held_out(run_copy, shapes, tmp_path, monkeypatch):
    recipe = run_copy / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("holdout: null", "holdout: 0.5"))
    out = tmp_path / "page.html"
    assert main(["report", str(run_copy), "--out", str(out), "--images", "1", "--device", "cpu"]) == 0
    assert "weights.safetensors on 4 of 4 images" in text_of(out), "half of the 8 training images"
    monkeypatch.chdir(shapes.parent)
    assert main(["report", str(run_copy), "--out", str(out), "--images", "1", "--data", shapes.name]) == 0
    assert "weights.safetensors on 4 of 4 images" in text_of(out), "the same folder under another path"


def test_without_data_the_rest_is_shown(run_copy, tmp_path, capsys):
    environment = run_copy / "environment.json"
    environment.write_text(re.sub(r'"data": "[^"]+"', '"data": "/no/such/place"', environment.read_text()))
    out = tmp_path / "page.html"
    assert main(["report", str(run_copy), "--out", str(out)]) == 0
    text = text_of(out)
    assert "The data is no longer at /no/such/place: give its folder with --data" in text
    assert "step 2 in validation.csv, as logged during training" in text
    assert '<figure class="chart">' in text
    assert '<figure class="image">' not in text
    assert "--data" in capsys.readouterr().out


def test_the_data_flag_overrides_the_data_of_the_run(run_copy, shapes, tmp_path):
    environment = run_copy / "environment.json"
    environment.write_text(re.sub(r'"data": "[^"]+"', '"data": "/no/such/place"', environment.read_text()))
    assert main(["report", str(run_copy), "--out", str(tmp_path / "page.html"), "--data", str(shapes)]) == 0
    assert '<figure class="image">' in text_of(tmp_path / "page.html")


@pytest.mark.parametrize("damaged", ["weights", "diverged", "classes", "image", "annotations"])
def test_the_page_says_why_a_run_cannot_be_measured(run_copy, tmp_path, damaged):
    data = write_shapes(tmp_path / "data", train=2, val=2, size=64, seed=1)
    if damaged == "weights":
        (run_copy / "weights.safetensors").write_bytes(b"not weights")
        message = "not a safetensors file"
    elif damaged == "diverged":
        state, meta = read_weights(run_copy / "weights.safetensors")
        save_weights(run_copy / "weights.safetensors", {name: value * math.nan for name, value in state.items()}, meta)
        message = "The weights could not be measured"
    elif damaged == "classes":
        (data / "val.json").write_text((data / "val.json").read_text().replace('"circle"', '"ring"'))
        message = "expected the classes of"
    elif damaged == "image":
        next(
            path for path in sorted((data / "images").rglob("*.*")) if path.name in (data / "val.json").read_text()
        ).unlink()
        message = "The weights could not be measured"
    else:
        (data / "val.json").write_text("{")
        message = "not JSON"
    out = tmp_path / "page.html"
    assert main(["report", str(run_copy), "--out", str(out), "--data", str(data)]) == 0
    assert message in text_of(out)
    assert '<figure class="chart">' in text_of(out)


def test_a_run_without_results(run_copy, tmp_path):
    for name in ("weights.safetensors", "best.safetensors", "train.csv", "validation.csv"):
        (run_copy / name).unlink()
    assert main(["report", str(run_copy), "--out", str(tmp_path / "page.html")]) == 0
    text = text_of(tmp_path / "page.html")
    assert "The run has no weights yet" in text
    assert "No curves" in text
    assert "No numbers yet" in text


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["--images", "-1"], 2, "report: --images: expected at least 1, got -1"),
        (["--max-images", "0"], 2, "report: --max-images: expected at least 1, got 0"),
        (["--out", "."], 1, "expected a file to write, got a folder"),
    ],
)
def test_wrong_values_are_refused(run, words, status, message, capsys):
    assert main(["report", str(run), *words]) == status
    assert message in capsys.readouterr().err


def test_an_unknown_device_is_refused(run, capsys):
    assert main(["report", str(run), "--device", "abacus"]) == 2
    assert "report: --device: expected auto, cpu, " in capsys.readouterr().err


def test_an_output_that_cannot_be_written(run, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["report", str(run), "--out", str(tmp_path / "file" / "page.html"), "--max-images", "1"]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_other_files_are_not_overwritten(run, tmp_path, capsys):
    thesis = tmp_path / "thesis.html"
    thesis.write_text("<p>years of work")
    assert main(["report", str(run), "--out", str(thesis)]) == 1
    assert "already exists and is not a bucketrank report" in capsys.readouterr().err
    assert thesis.read_text() == "<p>years of work"


def test_other_folders_are_refused(tmp_path, capsys):
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 1
    assert "expected a run folder" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("place", ["measure_run", "render_page"])
def test_a_signal_keeps_the_earlier_report(place, number, run, tmp_path, monkeypatch, capsys):
    out = tmp_path / "report.html"
    out.write_text(f"<meta {GENERATOR}> earlier")

    def stopped(*_: object, **__: object) -> None:
        signal.raise_signal(number)

    monkeypatch.setattr(f"bucketrank.report.page.{place}", stopped)
    assert main(["report", str(run), "--out", str(out), "--max-images", "1"]) == 130
    assert capsys.readouterr().err == "bucketrank: interrupted\n"
    assert out.read_text().endswith(" earlier")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
