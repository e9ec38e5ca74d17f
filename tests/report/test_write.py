"""The command: from folders to a page, with what is missing told."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path

import pytest

from bucketrank.cli import main
from bucketrank.data import write_shapes
from bucketrank.training.evaluate import evaluate
from bucketrank.training.weights import read_weights, save_weights


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy", ignore=shutil.ignore_patterns("checkpoints", "pictures")))


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_from_a_run_to_the_page(run, shapes, tmp_path, capsys):
    out = tmp_path / "new" / "page.html"
    assert main(["report", str(run), "--out", str(out), "--images", "1", "--device", "cpu"]) == 0
    assert f"wrote {out} (" in capsys.readouterr().out.replace("\n", "")
    text = text_of(out)
    measured = evaluate(run / "weights.safetensors", shapes)
    for kind in (measured.boxes, measured.masks):
        assert kind is not None
        assert f"<td>{100 * kind.metrics['AR100']:.1f}</td>" in text
    assert "Mask" in text or "masks" in text
    assert len(re.findall('<figure class="picture">', text)) == 2, "the best and the worst"
    assert "triangle" in text
    assert "weights.safetensors on 3 of 3 images" in text
    assert main(["report", str(run), str(run), "--out", str(out), "--most", "1"]) == 0, "a report may be written anew"
    assert "All settings of the runs are the same." in text_of(out)
    assert "weights.safetensors on 1 of 3 images" in text_of(out)


def test_where_the_data_is_gone_the_rest_is_shown(copy, tmp_path, capsys):
    environment = copy / "environment.json"
    environment.write_text(re.sub(r'"data": "[^"]+"', '"data": "/no/such/place"', environment.read_text()))
    out = tmp_path / "page.html"
    assert main(["report", str(copy), "--out", str(out)]) == 0
    text = text_of(out)
    assert "The data is not at /no/such/place any more: give its folder by --data" in text
    assert "step 2 in validation.csv, not measured anew" in text
    assert '<figure class="chart">' in text
    assert '<figure class="picture">' not in text
    assert "--data" in capsys.readouterr().out


def test_data_given_by_hand_goes_before_the_runs_own(copy, shapes, tmp_path):
    environment = copy / "environment.json"
    environment.write_text(re.sub(r'"data": "[^"]+"', '"data": "/no/such/place"', environment.read_text()))
    assert main(["report", str(copy), "--out", str(tmp_path / "page.html"), "--data", str(shapes)]) == 0
    assert '<figure class="picture">' in text_of(tmp_path / "page.html")


@pytest.mark.parametrize("spoil", ["weights", "diverged", "classes", "picture", "annotations"])
def test_what_cannot_be_measured_is_told(copy, tmp_path, spoil):
    data = write_shapes(tmp_path / "data", train=2, val=2, size=64, seed=1)
    if spoil == "weights":
        (copy / "weights.safetensors").write_bytes(b"no weights")
        told = "not a safetensors file"
    elif spoil == "diverged":
        state, meta = read_weights(copy / "weights.safetensors")
        save_weights(copy / "weights.safetensors", {name: value * math.nan for name, value in state.items()}, meta)
        told = "The weights could not be measured"
    elif spoil == "classes":
        (data / "val.json").write_text((data / "val.json").read_text().replace('"circle"', '"ring"'))
        told = "expected the classes of"
    elif spoil == "picture":
        next(
            path for path in sorted((data / "images").rglob("*.*")) if path.name in (data / "val.json").read_text()
        ).unlink()
        told = "The weights could not be measured"
    else:
        (data / "val.json").write_text("{")
        told = "not JSON"
    out = tmp_path / "page.html"
    assert main(["report", str(copy), "--out", str(out), "--data", str(data)]) == 0
    assert told in text_of(out)
    assert '<figure class="chart">' in text_of(out)


def test_a_run_that_has_only_begun(copy, tmp_path):
    for name in ("weights.safetensors", "best.safetensors", "train.csv", "validation.csv"):
        (copy / name).unlink()
    assert main(["report", str(copy), "--out", str(tmp_path / "page.html")]) == 0
    text = text_of(tmp_path / "page.html")
    assert "There are no weights yet" in text
    assert "There are no curves" in text
    assert "There are no numbers yet" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--images", "0"], "report: --images: expected at least 1, got 0"),
        (["--most", "0"], "report: --most: expected at least 1, got 0"),
        (["--out", "."], "expected a file to write, got a folder"),
    ],
)
def test_what_cannot_be_asked(run, words, message, capsys):
    assert main(["report", str(run), *words]) == 1
    assert message in capsys.readouterr().err


def test_a_device_that_is_not_there(run, capsys):
    assert main(["report", str(run), "--device", "abacus"]) == 2
    assert "report: --device:" in capsys.readouterr().err


def test_a_place_that_cannot_be_written(run, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["report", str(run), "--out", str(tmp_path / "file" / "page.html"), "--most", "1"]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_another_file_is_not_written_over(run, tmp_path, capsys):
    precious = tmp_path / "thesis.html"
    precious.write_text("<p>years of work")
    assert main(["report", str(run), "--out", str(precious)]) == 1
    assert "is there already and is no report" in capsys.readouterr().err
    assert precious.read_text() == "<p>years of work"


def test_a_folder_that_is_no_run(tmp_path, capsys):
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 1
    assert "expected the folder of a run" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()
