"""``losses --device cuda`` from the measurement to the documents, with a stand-in for ``torch.cuda``."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from rich.console import Console

from benchmarks.__main__ import main
from benchmarks.documents import BenchFileError, read_document, restore_bench
from benchmarks.losses import contenders, measure, results
from benchmarks.losses.estimate import estimate_step
from benchmarks.losses.measure import measure_losses
from benchmarks.losses.report import notes, show_loss_bench, to_markdown, write_loss_bench
from benchmarks.losses.results import LossBench, LossBenchSettings, loss_targets
from benchmarks.session import present
from benchmarks.timing import Spread
from bucketrank.provenance import GpuDescription, Machine, describe, format_machine
from tests.benchmarks.fake_cuda import FakeCuda
from tests.benchmarks.progress_recorder import ProgressRecorder

GPU = GpuDescription(name="Stand-in", memory_gb=8.0, architecture="sm_00", driver="1.2", runtime="CUDA 99.0")
draw_logits = contenders.draw_logits


def describe_stand_in(*_: object) -> Machine:
    return Machine(**{**describe(), "gpu": GPU["name"], "gpu_details": GPU})


def install(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Pretend a GPU whose tensors live on the CPU, where the Triton kernels are replaced by torch operations."""
    fake = FakeCuda(tick=1.0)
    fake.install(monkeypatch)

    def draw_on_cpu(size: int, percent: float, *, seed: int, device: str) -> contenders.SyntheticLogits:
        assert device == "cuda"
        return draw_logits(size, percent, seed=seed)

    def compile_nothing(function: Any, *, fullgraph: bool, dynamic: bool) -> Any:
        assert fullgraph
        assert not dynamic
        return function

    for module in (measure, measure, contenders):
        monkeypatch.setattr(module, "draw_logits", draw_on_cpu)
    monkeypatch.setattr(results, "check_device", lambda _: None)
    monkeypatch.setattr(measure, "describe", describe_stand_in)
    monkeypatch.setattr(contenders, "unavailable_reason", lambda _: None)
    monkeypatch.setitem(contenders.BACKENDS, "exact-triton", "torch")
    monkeypatch.setattr(torch, "compile", compile_nothing)
    monkeypatch.setattr(contenders, "_compiled", {})
    return fake


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return install(monkeypatch)


def tiny_settings(**changes: Any) -> LossBenchSettings:
    return LossBenchSettings(
        **{"sizes": (300,), "percent": (5.0,), "repeats": 3, "device": "cuda", "compiled": True, **changes}
    )


@pytest.fixture(scope="module")
def bench() -> LossBench:
    with pytest.MonkeyPatch.context() as monkeypatch:
        install(monkeypatch)
        return measure_losses(tiny_settings(), ProgressRecorder())


@pytest.mark.slow
def test_every_contender_is_measured_in_its_modes(cuda: FakeCuda) -> None:
    progress = ProgressRecorder()
    bench = measure_losses(tiny_settings(sizes=(300, 900)), progress)
    modes: dict[str, set[str]] = {}
    for result in bench.results:
        assert result.skipped is None
        assert result.seconds == Spread(0.001, 0.001, 0.001), "by events"
        assert result.to_focal == Spread(1.0, 1.0, 1.0)
        assert (result.extra_bytes is None) == (result.mode == "graph")
        modes.setdefault(result.contender, set()).add(result.mode)
    assert modes == {
        "focal": {"eager", "compiled", "graph"},
        "bce": {"eager", "compiled", "graph"},
        "sort": {"eager"},
        "pairwise": {"eager"},
        "bucketed": {"eager", "compiled"},
        "exact-torch": {"eager", "compiled"},
        "exact-triton": {"eager", "compiled", "graph"},
    }
    assert progress.done == pytest.approx([total for _, total in progress.stages])
    assert "replay" in cuda.log
    assert cuda.log.count("clear cache") >= 3 * len(bench.results), "before every timed call"
    assert [(r.contender, r.mode) for r in bench.results[:2]] == [("focal", "compiled"), ("focal", "eager")]


def test_ratios_are_to_compiled_focal_loss(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_slowly(function: Any, *, fullgraph: bool, dynamic: bool) -> Any:
        def slow(*arguments: Any) -> Any:
            cuda.work(3.0)
            return function(*arguments)

        return slow

    monkeypatch.setattr(torch, "compile", compile_slowly)
    bench = measure_losses(tiny_settings(), ProgressRecorder())
    ratios = {(r.contender, r.mode): r.to_focal for r in bench.results if r.loss != "ap"}
    assert ratios["focal", "eager"] == ratios["exact-triton", "graph"] == Spread(0.25, 0.25, 0.25)
    assert ratios["focal", "compiled"] == ratios["exact-triton", "compiled"] == Spread(1.0, 1.0, 1.0)
    assert "ratio to compiled focal loss" in to_markdown(bench, "losses.svg")

    def fail(function: Any, **options: Any) -> Any:
        raise RuntimeError("no compiler")

    contenders._compiled.clear()
    monkeypatch.setattr(torch, "compile", fail)
    bench = measure_losses(tiny_settings(), ProgressRecorder())
    assert {r.to_focal for r in bench.results if r.skipped is None} == {Spread(1.0, 1.0, 1.0)}
    assert "ratio to eager focal loss" in to_markdown(bench, "losses.svg")


def test_every_mode_reports_the_value_of_the_loss(bench: LossBench) -> None:
    for loss in ("ap", "rs"):
        values = [bench.find("exact-triton", loss, 300, 5.0, mode) for mode in ("eager", "compiled", "graph")]
        eager, *others = [None if result is None else result.value for result in values]
        assert eager is not None
        assert others == pytest.approx([eager, eager])


def test_launches_and_waits(bench: LossBench) -> None:
    launches = {(r.contender, r.mode): (r.launches, r.waits) for r in bench.results if r.loss != "rs"}
    assert launches["focal", "graph"] == launches["exact-triton", "graph"] == (1, 0)
    assert launches["focal", "compiled"] == (None, None)
    assert launches["sort", "eager"] == (1, 0)
    focal, waits = launches["focal", "eager"]
    assert focal is not None
    assert 20 < focal < 40
    assert waits == 0


@pytest.mark.usefixtures("cuda")
def test_a_captured_ranking_has_a_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    capacities: list[int | None] = []
    function = contenders.loss_function

    def record(name: str, loss: str | None, max_positives: int | None = None) -> Any:
        capacities.append(max_positives)
        return function(name, loss, max_positives)

    monkeypatch.setattr(contenders, "loss_function", record)
    data = draw_logits(400, 5.0, seed=0)
    for name, loss in (("exact-triton", "rs"), ("exact-triton", "ap"), ("focal", None)):
        contenders.loss_step(name, loss, data, mode="graph")
    contenders.loss_step("exact-triton", "rs", data)
    assert capacities == [20, 20, None, None]


@pytest.mark.usefixtures("cuda")
def test_what_cannot_be_captured_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(step: object) -> None:
        raise RuntimeError("no capture today\nand a long trace")

    monkeypatch.setattr(contenders, "capture", fail)
    bench = measure_losses(tiny_settings(), ProgressRecorder())
    skipped = {(r.contender, r.mode) for r in bench.results if r.skipped}
    assert skipped == {(name, "graph") for name in ("focal", "bce", "exact-triton")}
    assert "exact, Triton kernels, graph: it failed: no capture today." in notes(bench)


@pytest.mark.slow
@pytest.mark.usefixtures("cuda")
def test_what_does_not_fit_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:

    def estimate(name: str, *arguments: Any, **settings: Any) -> Any:
        if name == "bucketed":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate everything.")
        return estimate_step(name, *arguments, **settings)

    monkeypatch.setattr(measure, "estimate_step", estimate)
    skipped = {
        (r.contender, r.mode, r.skipped)
        for r in measure_losses(tiny_settings(), ProgressRecorder()).results
        if r.skipped is not None
    }
    assert skipped == {
        ("bucketed", "eager", "the device has too little memory"),
        ("bucketed", "compiled", "the eager step is skipped, too"),
    }


def test_tables_have_columns_for_the_modes(bench: LossBench) -> None:
    markdown = to_markdown(bench, "losses.svg")
    (head, *_) = [line for line in markdown.splitlines() if line.startswith("| logits |")]
    titles = [title.strip() for title in head.strip("|").split("|")]
    assert titles == [
        "logits",
        "positives",
        "focal loss, compiled",
        "focal loss",
        "focal loss, graph",
        "pairwise (definition)",
        "bucketed (paper)",
        "bucketed (paper), compiled",
        "exact, torch ops",
        "exact, torch ops, compiled",
        "exact, Triton kernels",
        "exact, Triton kernels, compiled",
        "exact, Triton kernels, graph",
        "binary cross-entropy",
        "binary cross-entropy, compiled",
        "binary cross-entropy, graph",
        "torch.sort",
    ]
    assert "## RS loss: launches / host waits" in markdown
    _, summary = markdown.split("## RS loss at 300 logits, 5 % positives")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in summary.splitlines() if line[:1] == "|"]
    assert rows[0] == ["", "eager", "compiled", "graph", "launches / waits", "memory"]
    times = "1.00 ms · 1.00\N{MULTIPLICATION SIGN}"
    cells = {row[0]: row[1:4] for row in rows[:9]}
    assert cells["exact, Triton kernels"] == cells["focal loss"] == [times] * 3
    assert cells["bucketed (paper)"] == [times, times, ""]
    assert "Stand-in (8 GB, sm_00, driver 1.2, CUDA 99.0)" in format_machine(bench.machine)
    assert format_machine(bench.machine) in markdown
    assert "## Targets" not in markdown
    assert loss_targets(bench) == [], "the limits are for the CPU"
    stream = io.StringIO()
    show_loss_bench(bench, Console(file=stream, width=160))
    assert "exact, Triton kernels, graph" in stream.getvalue()
    assert "1 / 0" in stream.getvalue()


def test_a_file_from_another_machine_gives_the_same_documents(
    bench: LossBench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = write_loss_bench(bench, tmp_path / "theirs")
    assert restore_bench(LossBench, read_document(first[0])) == bench
    assert main(["results", str(first[0]), "--out", str(tmp_path / "ours")]) == 0
    assert "Triton kernels, graph" in capsys.readouterr().out
    for path in (first[0], first[1], first[3]):
        assert (tmp_path / "ours" / path.name).read_bytes() == path.read_bytes()


def test_a_file_without_results_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "losses.json"
    for text, message in (
        ("{", "expected the JSON of a benchmark, got "),
        ("[" * 100_000, "expected the JSON of a benchmark, got values nested too deeply"),
        ("[1]", "expected the results of a benchmark of losses or detectors, got other content"),
        ('{"benchmark": "losses", "results": [{}]}', "expected the results of LossBench, got wrong fields"),
    ):
        file.write_text(text, encoding="utf-8")
        assert main(["results", str(file)]) == 2
        printed = capsys.readouterr().err
        assert message in printed
        assert printed.count("\n") == 1
    with pytest.raises(BenchFileError, match=r"none\.json"):
        read_document(tmp_path / "none.json")


def test_fields_that_an_older_file_lacks_have_their_defaults(bench: LossBench) -> None:
    from benchmarks.losses.report import to_json

    document = json.loads(to_json(bench))
    for result in document["results"]:
        del result["launches"], result["estimated_samples"]
    restored = restore_bench(LossBench, document)
    assert {result.launches for result in restored.results} == {None}
    assert restored.results[0].estimated_samples == {}


@pytest.mark.usefixtures("cuda")
def test_the_command_says_where_to_send_the_file(
    bench: LossBench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "losses.json"
    for device, sent in (("cuda", True), ("cpu", False)):
        settings = LossBenchSettings(device=device)
        present(settings, tmp_path, measure=lambda *_: bench, show=lambda *_: None, write=lambda *_: [file])
        printed = capsys.readouterr().out
        assert f"wrote {file}" in printed
        assert (f"please open an issue and attach {file}" in printed) == sent
