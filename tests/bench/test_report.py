"""What is written and printed, from a study that nobody measured."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from rich.console import Console

from bucketrank.bench.bars import bars, speedup
from bucketrank.bench.report import notes, show, to_markdown, write
from bucketrank.bench.study import QUICK, Settings
from bucketrank.bench.tables import bar_row
from bucketrank.bench.timing import Spread
from tests.bench.made_up import made_up


def test_four_files_are_written(tmp_path: Path) -> None:
    paths = write(made_up(), tmp_path / "new" / "place")
    assert [path.name for path in paths] == ["losses.json", "losses.md", "losses.png", "losses.svg"]
    assert paths[2].read_bytes().startswith(b"\x89PNG")
    assert "<svg" in paths[3].read_text(encoding="utf-8")
    assert "](losses.svg)" in paths[1].read_text(encoding="utf-8")


def test_json_holds_everything(tmp_path: Path) -> None:
    study = made_up()
    document = json.loads(write(study, tmp_path)[0].read_text(encoding="utf-8"))
    assert document["command"] == "bucketrank bench losses --sizes 10K,1M --percent 1,5 --repeats 3"
    assert document["machine"]["versions"]["torch"]
    assert {"commit", "modified", "processor", "date"} <= document["machine"].keys()
    assert len(document["results"]) == len(study.results)
    by_name = {(r["contender"], r["loss"], r["size"], r["percent"]): r for r in document["results"]}
    assert by_name["exact-fused", "ap", 1_000_000, 5.0]["seconds"]["median"] == 0.012
    assert by_name["exact-fused", "ap", 1_000_000, 5.0]["samples"] == {"0": 0.012, "1": 0.024, "2": 0.012}
    assert by_name["exact-fused", "ap", 1_000_000, 5.0]["extra_bytes"] == 12_000_000
    skipped = by_name["pairwise", "rs", 1_000_000, 1.0]
    assert skipped["seconds"] is None
    assert skipped["estimated_seconds"] == 40.0
    assert skipped["skipped"] == "too long"
    assert document["large"][0]["size"] == 20_000_000
    assert all(isinstance(bar["passed"], bool) for bar in document["bars"])


def test_nan_is_never_written(tmp_path: Path) -> None:
    study = made_up()
    study.results[0] = dataclasses.replace(study.results[0], value=float("nan"))
    with pytest.raises(ValueError, match="not JSON compliant"):
        write(study, tmp_path)


def test_bars_by_hand() -> None:
    judged = {(bar.what, bar.where): bar for bar in bars(made_up())}
    # exact-fused / focal = 0.012 / 0.010 = 1.2 in each round
    missed = judged["AP exact-fused / focal", "L = 10K, 5 %"]
    assert missed.value == pytest.approx(1.2)
    assert (missed.limit, missed.passed) == (1.0, False)
    passed = judged["RS exact-fused / focal", "L = 10K, 5 %"]
    assert passed.value == pytest.approx(1.2)
    assert (passed.limit, passed.passed) == (2.0, True)
    # an estimate of 40 s / 0.012 s, and in the slower round of 80 s / 0.024 s
    estimated = judged["AP pairwise / exact-fused", "L = 1M, 5 %"]
    assert estimated.value == pytest.approx(40 / 0.012)
    assert (estimated.limit, estimated.passed, estimated.estimated) == (1000.0, True, True)
    where = "L = 20M, 100,000 positives"
    memory = judged["RS exact-torch: peak extra memory / logits", where]
    assert (memory.value, memory.limit, memory.passed) == (5.0, 6.0, True)
    growth = judged["AP exact-fused: time / time at L = 1M, 0.5 % there, too", where]
    assert (growth.value, growth.limit, growth.passed) == (25.0, 24.0, False)
    growth = judged["AP exact-fused: time / time at L = 1M, as many positives", where]
    assert (growth.value, growth.limit, growth.passed) == (15.0, 24.0, True)
    assert not missed.estimated


def test_every_bar_of_the_study_is_there() -> None:
    per_loss = 2 + 2  # 10K and 1M at 1 and 5 %, against focal loss
    pairwise = 2  # 1M at 1 and 5 %
    large = 2 * 3  # memory and growth in two ways, of two backends
    assert len(bars(made_up())) == 2 * (per_loss + pairwise + large)
    assert bars(made_up(sizes=(5000,), large=False)) == []


def test_without_the_fused_kernel_the_bars_are_those_of_torch_ops() -> None:
    judged = bars(made_up(fused=False))
    assert judged
    assert not any("fused" in bar.what for bar in judged)
    assert "exact, fused kernel: numba is not installed." in notes(made_up(fused=False))


def test_a_busy_machine_is_told() -> None:
    study = made_up()
    study.machine["cores"] = 4
    for load, told in ((3.0, True), (1.0, False), (None, False)):
        study.machine["load"] = load
        assert any("the times may be off" in line for line in notes(study)) == told


def test_a_disturbed_cell_is_told(tmp_path: Path) -> None:
    study = made_up()
    assert not any(bar.disturbed for bar in bars(study))
    assert not any("Disturbed" in line for line in notes(study))
    for index, result in enumerate(study.results):
        if (result.contender, result.size, result.percent) == ("focal", 1_000_000, 5.0):
            assert result.seconds is not None
            study.results[index] = dataclasses.replace(result, seconds=Spread(0.31, 0.3, 0.32), estimated_seconds=0.1)
    assert {bar.where for bar in bars(study) if bar.disturbed} == {"L = 1M, 5 %"}
    assert notes(study)[0].startswith("Disturbed: L = 1M, 5 %. ")
    assert any(bar_row(bar)[4] == "passed (estimate, disturbed)" for bar in bars(study))
    undisturbed, disturbed = (write(s, tmp_path / name)[3].read_text() for name, s in (("a", made_up()), ("b", study)))
    assert len(disturbed) > len(undisturbed), "the figure says so too"


def test_speedup_is_measured_where_it_can_be() -> None:
    found = speedup(made_up(), "ap", 10_000, 5.0)
    assert found is not None
    assert found[0].median == pytest.approx(4 / 0.012)
    assert not found[1]
    assert speedup(made_up(), "ap", 999, 5.0) is None


def test_tables_show_ratios_skips_and_verdicts() -> None:
    stream = io.StringIO()
    show(made_up(), Console(file=stream, width=160))
    text = stream.getvalue()
    assert "12.0 ms ±25 % · 1.20\N{MULTIPLICATION SIGN}" in text
    assert "skipped, ≈ 40.0 s" in text
    assert "passed (estimate)" in text
    assert "missed" in text
    assert "20,000,000 logits with 100,000 positives: ran in 300 ms with 400 MB" in text


def test_a_narrow_terminal_goes_without_the_spread() -> None:
    stream = io.StringIO()
    show(made_up(), Console(file=stream, width=80))
    assert "12.0 ms · 1.20\N{MULTIPLICATION SIGN}" in stream.getvalue()


def test_markdown_has_a_row_per_cell() -> None:
    text = to_markdown(made_up(), "losses.svg")
    rows = [line for line in text.splitlines() if line.startswith(("| 10K |", "| 1M |"))]
    tables = 2 * 3  # time, memory and operations of two losses
    assert len(rows) == 4 * tables
    assert "| skipped, ≈ 40.0 s |" in text
    assert "12.0 ms [12.0, 18.0] · 1.20\N{MULTIPLICATION SIGN}" in text
    widths = {line.count("|") for line in rows}
    assert widths == {10}
    assert "the estimate was 1.00 (from 1.00 to 1.00) times the median" in text


@pytest.mark.parametrize("sizes", [(10_000,), (500, 10_000, 100_000, 1_000_000)])
def test_figure_of_any_grid(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    write(made_up(sizes=sizes, fused=False, large=False), tmp_path)
    assert (tmp_path / "losses.png").stat().st_size > 10_000


def test_the_same_study_gives_the_same_svg(tmp_path: Path) -> None:
    study = made_up()
    first, second = (write(study, tmp_path / name)[3].read_bytes() for name in "ab")
    assert first == second


@pytest.mark.parametrize(
    ("settings", "command"),
    [
        (Settings(), "bucketrank bench losses"),
        (Settings(**QUICK), "bucketrank bench losses --quick"),
        (
            Settings(**{**QUICK, "memory": True, "seed": 3}),
            "bucketrank bench losses --percent 0.1,1,5 --repeats 20 --seed 3",
        ),
        (Settings(large=True, device="cpu", memory=False), "bucketrank bench losses --no-memory --large"),
    ],
)
def test_the_command_repeats_the_study(settings: Settings, command: str) -> None:
    assert settings.command().startswith(command)
