"""The documents, the tables and the figure, of results with fixed times."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from pathlib import Path

import pytest

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from rich.console import Console

from benchmarks.documents import format_size, target_row
from benchmarks.losses.report import notes, show_loss_bench, to_markdown, write_loss_bench
from benchmarks.losses.results import QUICK, LossBenchSettings, loss_targets, speedup
from benchmarks.timing import Spread
from tests.benchmarks.fixed_time_bench import fixed_time_bench


def test_four_files_are_written(tmp_path: Path) -> None:
    paths = write_loss_bench(fixed_time_bench(), tmp_path / "new" / "folder")
    assert [path.name for path in paths] == ["losses.json", "losses.md", "losses.png", "losses.svg"]
    assert paths[2].read_bytes().startswith(b"\x89PNG")
    assert "<svg" in paths[3].read_text(encoding="utf-8")
    assert "](losses.svg)" in paths[1].read_text(encoding="utf-8")


def test_json_holds_everything(tmp_path: Path) -> None:
    bench = fixed_time_bench()
    document = json.loads(write_loss_bench(bench, tmp_path)[0].read_text(encoding="utf-8"))
    assert document["command"] == "python -m benchmarks losses --sizes 10K,1M --percent 1,5 --repeats 3"
    assert document["machine"]["versions"]["torch"]
    assert {"commit", "modified", "processor", "date"} <= document["machine"].keys()
    assert len(document["results"]) == len(bench.results)
    by_name = {(r["contender"], r["loss"], r["size"], r["percent"]): r for r in document["results"]}
    assert by_name["exact-fused", "ap", 1_000_000, 5.0]["seconds"]["median"] == 0.012
    assert by_name["exact-fused", "ap", 1_000_000, 5.0]["samples"] == {"0": 0.012, "1": 0.024, "2": 0.012}
    assert by_name["exact-fused", "ap", 1_000_000, 5.0]["extra_bytes"] == 12_000_000
    skipped = by_name["pairwise", "rs", 1_000_000, 1.0]
    assert skipped["seconds"] is None
    assert skipped["estimated_seconds"] == 40.0
    assert skipped["skipped"] == "too long"
    assert document["large"][0]["size"] == 20_000_000
    assert all(isinstance(target["passed"], bool) for target in document["bars"])


def test_operations_beside_the_papers() -> None:
    (note,) = (line for line in notes(fixed_time_bench(sizes=(100_000,), percent=(0.1,))) if "Operations" in line)
    # 100 positives and 99,900 negatives: 8 operations per pair, and 6 per pair of positives.
    assert "76.0M for AP and 900K for BAP" in note
    assert "we count 80.2M for pairwise, 2.05M for bucketed and" in note
    assert "the 1.70M comparisons of the sort" in note  # 100,000 x 17
    assert not any("Operations" in line for line in notes(fixed_time_bench())), "other numbers of logits"


def test_nan_is_never_written(tmp_path: Path) -> None:
    bench = fixed_time_bench()
    bench.results[0] = dataclasses.replace(bench.results[0], value=float("nan"))
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_loss_bench(bench, tmp_path)


def test_bars_by_hand() -> None:
    targets = {(target.what, target.where): target for target in loss_targets(fixed_time_bench())}
    # exact-fused / focal = 0.012 / 0.010 = 1.2 in each round
    missed = targets["AP exact-fused / focal", "L = 10K, 5 %"]
    assert missed.value == pytest.approx(1.2)
    assert (missed.limit, missed.passed) == (1.0, False)
    passed = targets["RS exact-fused / focal", "L = 10K, 5 %"]
    assert passed.value == pytest.approx(1.2)
    assert (passed.limit, passed.passed) == (2.0, True)
    # an estimate of 40 s / 0.012 s, and in the slower round of 80 s / 0.024 s
    estimated = targets["AP pairwise / exact-fused", "L = 1M, 5 %"]
    assert estimated.value == pytest.approx(40 / 0.012)
    assert (estimated.limit, estimated.passed, estimated.estimated) == (1000.0, True, True)
    where = "L = 20M, 100,000 positives"
    memory = targets["RS exact-torch: peak extra memory / logits", where]
    assert (memory.value, memory.limit, memory.passed) == (5.0, 6.0, True)
    growth = targets["AP exact-fused: time / time at L = 1M, same share of positives (0.5 %)", where]
    assert (growth.value, growth.limit, growth.passed) == (25.0, 24.0, False)
    growth = targets["AP exact-fused: time / time at L = 1M, same number of positives", where]
    assert (growth.value, growth.limit, growth.passed) == (15.0, 24.0, True)
    assert not missed.estimated


def test_every_bar_of_the_study_is_there() -> None:
    per_loss = 2 + 2  # 10K and 1M at 1 and 5 %, against focal loss
    pairwise = 2  # 1M at 1 and 5 %
    large = 2 * 3  # memory and growth in two ways, of two backends
    assert len(loss_targets(fixed_time_bench())) == 2 * (per_loss + pairwise + large)
    assert loss_targets(fixed_time_bench(sizes=(5000,), large=False)) == []


def test_without_the_fused_kernel_the_bars_are_those_of_torch_ops() -> None:
    targets = loss_targets(fixed_time_bench(fused=False))
    assert targets
    assert not any("fused" in target.what for target in targets)
    assert "exact, fused kernel: numba is not installed." in notes(fixed_time_bench(fused=False))


def test_a_busy_machine_is_noted() -> None:
    bench = fixed_time_bench()
    bench.machine["cores"] = 4
    for load, noted in ((3.0, True), (1.0, False), (None, False)):
        bench.machine["load"] = load
        assert any("the times may be off" in line for line in notes(bench)) == noted


@pytest.mark.slow
def test_a_disturbed_cell_is_noted(tmp_path: Path) -> None:
    bench = fixed_time_bench()
    assert not any(target.disturbed for target in loss_targets(bench))
    assert not any("Disturbed" in line for line in notes(bench))
    for index, result in enumerate(bench.results):
        if (result.contender, result.size, result.percent) == ("focal", 1_000_000, 5.0):
            assert result.seconds is not None
            bench.results[index] = dataclasses.replace(result, seconds=Spread(0.31, 0.3, 0.32), estimated_seconds=0.1)
    assert {target.where for target in loss_targets(bench) if target.disturbed} == {"L = 1M, 5 %"}
    assert notes(bench)[0].startswith("Disturbed: L = 1M, 5 %. ")
    assert any(target_row(target)[4] == "passed (estimate, disturbed)" for target in loss_targets(bench))
    # The SVG repeats each of its texts as a comment.
    for results, noted in ((bench, True), (fixed_time_bench(), False)):
        figure = write_loss_bench(results, tmp_path)[3].read_text(encoding="utf-8")
        assert ("Other programs ran during the measurement: measure again. -->" in figure) is noted


def test_speedup_is_measured_where_it_can_be() -> None:
    faster = speedup(fixed_time_bench(), "ap", 10_000, 5.0)
    assert faster is not None
    assert faster[0].median == pytest.approx(4 / 0.012)
    assert not faster[1]
    assert speedup(fixed_time_bench(), "ap", 999, 5.0) is None


def test_tables_show_ratios_skips_and_verdicts() -> None:
    stream = io.StringIO()
    show_loss_bench(fixed_time_bench(), Console(file=stream, width=160))
    text = stream.getvalue()
    assert "12.0 ms ±25 % · 1.20\N{MULTIPLICATION SIGN}" in text
    assert "skipped, ≈ 40.0 s" in text
    assert "passed (estimate)" in text
    assert "missed" in text
    assert "20,000,000 logits with 100,000 positives: ran in 300 ms with 400 MB" in text


def test_a_narrow_terminal_goes_without_the_spread() -> None:
    stream = io.StringIO()
    show_loss_bench(fixed_time_bench(), Console(file=stream, width=80))
    assert "12.0 ms · 1.20\N{MULTIPLICATION SIGN}" in stream.getvalue()


def test_markdown_has_a_row_per_cell() -> None:
    text = to_markdown(fixed_time_bench(), "losses.svg")
    rows = [line for line in text.splitlines() if line.startswith(("| 10K |", "| 1M |"))]
    tables = 2 * 3  # time, memory and operations of two losses
    assert len(rows) == 4 * tables
    assert "| skipped, ≈ 40.0 s |" in text
    assert "12.0 ms [12.0, 18.0] · 1.20\N{MULTIPLICATION SIGN}" in text
    widths = {line.count("|") for line in rows}
    assert widths == {10}
    assert "the estimate was 1.00 (from 1.00 to 1.00) times the median" in text
    assert "## AP loss: launches" not in text, "on the CPU"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sizes", [(10_000,), (500, 10_000, 100_000, 1_000_000)])
def test_figure_of_any_grid(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    write_loss_bench(fixed_time_bench(sizes=sizes, fused=False, large=False), tmp_path)
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    texts = re.findall(r"<!-- (.*?) -->", (tmp_path / "losses.svg").read_text(encoding="utf-8"))
    # One panel per row (time and operations of two losses) and percentage; the panels of a column share an axis.
    assert [texts.count(format_size(size)) for size in sizes] == [2] * len(sizes)
    assert [text for text in texts if text.endswith(" % positives")] == ["1 % positives", "5 % positives"]
    # The backends of exact share a line of operations; without the fused kernel only that line is left.
    assert (texts.count("exact, torch ops"), texts.count("exact, fused"), texts.count("exact")) == (2, 0, 2)


@pytest.mark.slow
def test_the_same_study_gives_the_same_svg(tmp_path: Path) -> None:
    bench = fixed_time_bench()
    first, second = (write_loss_bench(bench, tmp_path / name)[3].read_bytes() for name in "ab")
    assert first == second


@pytest.mark.parametrize(
    ("settings", "command"),
    [
        (LossBenchSettings(), "python -m benchmarks losses"),
        (LossBenchSettings(**QUICK), "python -m benchmarks losses --quick"),
        (
            LossBenchSettings(**{**QUICK, "memory": True, "seed": 3}),
            "python -m benchmarks losses --percent 0.1,1,5 --repeats 20 --seed 3",
        ),
        (LossBenchSettings(large=True, device="cpu", memory=False), "python -m benchmarks losses --no-memory --large"),
    ],
)
def test_the_command_repeats_the_study(settings: LossBenchSettings, command: str) -> None:
    assert settings.command().startswith(command)
