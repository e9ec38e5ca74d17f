"""The benchmark of the detectors, on tiny ones; no test asserts a time."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path

import pytest
import torch

from tests.cli.test_commands import without

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
pytest.importorskip("timm")
pytest.importorskip("torchvision")

from rich.console import Console

from benchmarks.__main__ import main
from benchmarks.detectors import measure, report
from benchmarks.detectors.contenders import (
    EXACT,
    FOCAL,
    NAMES,
    PAIRWISE,
    TITLES,
    USUAL,
    DetectorContender,
    detector_contenders,
    draw_scene,
)
from benchmarks.detectors.measure import (
    BenchDetector,
    Stopwatch,
    cost_steps,
    criteria,
    measure_detectors,
    record_inputs,
    split_losses,
    step_costs,
)
from benchmarks.detectors.results import (
    QUICK,
    DetectorBench,
    DetectorBenchSettings,
    DetectorResult,
    Head,
    StepCosts,
    with_ratios,
)
from benchmarks.documents import read_document, restore_bench
from benchmarks.launches import count_launches
from benchmarks.session import MeasurementError
from benchmarks.timing import WallClock, device_clock
from bucketrank.detectors.mask_rcnn import MaskLoss
from bucketrank.provenance import describe
from tests.benchmarks.fake_cuda import FakeCuda
from tests.benchmarks.progress_recorder import ProgressRecorder

TINY = DetectorBenchSettings(
    detectors=("faster_rcnn", "atss"),
    backbone="test_resnet",
    image_size=(64, 96),
    classes=3,
    objects=3,
    channels=32,
    proposals=20,
    rounds=3,
)
STAGES = ("building", "measuring")
FLAGS = "--backbone test_resnet --image-size 64x96 --classes 3 --objects 3 --channels 32 --proposals 20 --rounds 3"


@pytest.fixture(scope="module")
def progress() -> ProgressRecorder:
    """Return what the measurement of ``bench`` announced and did."""
    return ProgressRecorder()


@pytest.fixture(scope="module")
def bench(progress: ProgressRecorder) -> DetectorBench:
    return measure_detectors(TINY, progress)


def bench_detector(detector: str, name: str) -> BenchDetector:
    contender = next(contender for contender in detector_contenders(detector) if contender.name == name)
    masks = detector == "mask_rcnn"
    return BenchDetector(
        contender, draw_scene(TINY.image_size, batch=2, objects=3, classes=3, masks=masks, seed=0), TINY
    )


@pytest.mark.slow
def test_every_contender_is_measured_on_every_detector(bench: DetectorBench) -> None:
    assert [(r.detector, r.contender) for r in bench.results] == [(d, n) for d in TINY.detectors for n in NAMES]
    for result in bench.results:
        assert result.skipped is None
        assert sorted(result.samples) == sorted(result.loss_samples) == sorted(result.split_samples) == [0, 1, 2]
        assert result.value is not None
        assert math.isfinite(result.value)
        assert result.seconds is not None
        assert result.share is not None
        assert 0 < result.share.low <= result.share.median <= result.share.high < 1
        assert (result.to_focal is not None) is (result.to_usual is not None) is True
        costs = result.costs
        assert costs is not None
        assert 0 < costs.loss_launches < costs.launches
        assert 0 <= costs.loss_waits <= costs.waits
        assert costs.extra_bytes is None, "the CPU has no statistics"


@pytest.mark.slow
def test_the_methods_see_the_same_step(bench: DetectorBench) -> None:
    for detector in TINY.detectors:
        exact, others = bench.find(detector, EXACT), [bench.find(detector, n) for n in NAMES[1:3]]
        for other in others:
            assert other.heads == exact.heads
            torch.testing.assert_close(other.value, exact.value, rtol=1e-3, atol=0)
        focal = bench.find(detector, FOCAL)
        assert [(head.name, head.candidates) for head in focal.heads] == [
            (head.name, head.candidates) for head in exact.heads
        ]


def test_candidates_by_hand(bench: DetectorBench) -> None:
    # 64 x 96 pixels, two images, levels from P3 to P7: 8 x 12 + 4 x 6 + 2 x 3 + 1 x 2 + 1 x 1 places.
    places = 96 + 24 + 6 + 2 + 1
    (head,) = bench.find("atss", EXACT).heads
    assert (head.name, head.candidates, head.classes) == ("head", 2 * 3 * places, 3)
    (head,) = bench.find("atss", USUAL).heads
    assert (head.name, head.candidates, head.classes) == ("head", 2 * places, 3)
    rpn, box = bench.find("faster_rcnn", EXACT).heads
    assert (rpn.name, rpn.classes) == ("rpn", 1)
    # All proposals, and the objects.
    assert (box.name, box.candidates, box.classes) == ("box_head", 2 * (20 + 3), 3)
    sampled, softmax = bench.find("faster_rcnn", USUAL).heads
    assert sampled.candidates <= 2 * 256 < rpn.candidates
    assert softmax.classes == 4


@pytest.mark.usefixtures("bench")
def test_progress_is_what_was_announced(progress: ProgressRecorder) -> None:
    stages = [f"{title}: {what}" for title in ("Faster R-CNN (1 of 2)", "ATSS (2 of 2)") for what in STAGES]
    assert [text for text, _ in progress.stages] == stages
    assert progress.done == pytest.approx([total for _, total in progress.stages])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("detector", TITLES)
def test_contenders_differ_in_the_loss_only(detector: str) -> None:
    first, *others = (bench_detector(detector, name) for name in NAMES)
    weights = first.model.state_dict()
    for other in others:
        other.copy_weights(first)
        own = other.model.state_dict()
        same = [
            name
            for name in own
            if name.endswith("weight") and name in weights and own[name].shape == weights[name].shape
        ]
        assert same
        for name in same:
            torch.testing.assert_close(own[name], weights[name], rtol=0, atol=0)
        if other.contender.name == FOCAL:
            extra = [name for name in own if name not in weights]
            assert all("head.quality" in name for name in extra)
            assert all(weights[name].shape == own[name].shape for name in weights)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", [EXACT, PAIRWISE, FOCAL, USUAL])
@pytest.mark.parametrize("detector", ["mask_rcnn", "cascade_rcnn", "retinanet", "paa"])
def test_a_split_step_does_the_same(detector: str, name: str) -> None:
    whole, parts = bench_detector(detector, name), bench_detector(detector, name)
    watch = Stopwatch(WallClock())
    torch.manual_seed(1)  # cross-entropy samples
    whole.step()
    torch.manual_seed(1)
    with split_losses(parts.model, watch):
        parts.step()
    assert watch.seconds > 0
    torch.testing.assert_close(parts.value, whole.value, rtol=1e-6, atol=0)
    expected = dict(whole.model.named_parameters())
    for key, parameter in parts.model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[key].grad, rtol=1e-4, atol=1e-6, msg=key)
    for _, criterion in criteria(parts.model):
        assert "forward" not in vars(criterion), "put back"
    if detector == "mask_rcnn":
        assert isinstance(parts.model.mask_loss, MaskLoss), "put back"


def test_steps_leave_the_weights() -> None:
    one = bench_detector("faster_rcnn", EXACT)
    before = {name: value.clone() for name, value in one.model.named_parameters()}
    with record_inputs(one.model) as first:
        one.step()
    with record_inputs(one.model) as second:
        one.step()
    for name, value in one.model.named_parameters():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
        assert value.grad is not None or not value.requires_grad
    assert [name for name, _ in first] == ["rpn", "box_head"]
    for (_, a), (_, b) in zip(first, second, strict=True):
        torch.testing.assert_close(a.logits, b.logits, rtol=0, atol=0)
        torch.testing.assert_close(a.labels, b.labels, rtol=0, atol=0)


@pytest.mark.slow
def test_a_contender_that_is_slow_by_estimate_is_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def loss_seconds(contender: DetectorContender, *_: object) -> float:
        return 100.0 if contender.name == PAIRWISE else 0.0

    monkeypatch.setattr(measure, "quadratic_loss_seconds", loss_seconds)
    bench = measure_detectors(dataclasses.replace(TINY, detectors=("atss",)), ProgressRecorder())
    skipped = bench.find("atss", PAIRWISE)
    assert skipped.skipped == "by estimate a step takes more than 20 s"
    assert skipped.estimated_seconds is not None
    assert skipped.estimated_seconds > 100
    assert (skipped.seconds, skipped.to_focal, skipped.share, skipped.value) == (None, None, None, None)
    assert skipped.heads == bench.find("atss", EXACT).heads
    assert [r.contender for r in bench.results if r.skipped is None] == [name for name in NAMES if name != PAIRWISE]
    assert "ATSS, rs/pairwise: skipped, by estimate a step takes more than 20 s." in report.notes(bench)
    markdown = report.to_markdown(bench, "detectors.svg")
    assert "skipped, ≈ 10" in markdown
    assert [path.name for path in report.write_detector_bench(bench, tmp_path)] == [
        "detectors.json",
        "detectors.md",
        "detectors.png",
        "detectors.svg",
    ]


def test_a_step_without_positives_is_estimated_too() -> None:
    one = bench_detector("atss", EXACT)
    with record_inputs(one.model) as inputs:
        one.step()
    (name, assigned), *_ = inputs
    nothing = dataclasses.replace(assigned, labels=torch.full_like(assigned.labels, -1))
    detached = measure._detached(assigned)
    pairwise = detector_contenders("atss")[2]
    assert measure.quadratic_loss_seconds(pairwise, [(name, nothing)], WallClock()) == 0
    assert measure.quadratic_loss_seconds(pairwise, [(name, detached)], WallClock()) > 0


def test_a_failure_names_the_contender(monkeypatch: pytest.MonkeyPatch) -> None:
    one = bench_detector("atss", FOCAL)
    one.value = torch.tensor(math.inf)
    with pytest.raises(MeasurementError, match="ATSS, focal, 3 anchors: expected a finite loss, got inf"):
        one.finite_value()
    monkeypatch.setattr(one.model, "forward", lambda *_: 1 / 0)
    with pytest.raises(MeasurementError, match="ATSS, focal, 3 anchors: division by zero"):
        one.step()


@pytest.mark.slow
def test_on_a_gpu_events_and_the_allocator_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(tick=3.0)
    cuda.install(monkeypatch)
    monkeypatch.setattr(measure, "device_clock", lambda _: device_clock("cuda"))
    settings = dataclasses.replace(TINY, detectors=("atss",))
    for result in measure_detectors(settings, ProgressRecorder()).results:
        assert set(result.samples.values()) == {0.003}
        # Both events of the loss lie between those of the step.
        assert set(result.loss_samples.values()) == {0.003}
        assert set(result.split_samples.values()) == {0.009}
    one = bench_detector("atss", EXACT)
    gradients: list[bool] = []

    def step() -> None:
        gradients.append(any(parameter.grad is not None for parameter in one.model.parameters()))
        one.step()
        cuda.work(1.0, bytes_=5_000_000)

    costs = step_costs(one.model, step, one.optimizer.zero_grad, "cuda")
    assert costs.extra_bytes == 5_000_000
    assert gradients == [False, True, False], "the gradients count as memory of the step"
    assert cost_steps("cuda") == len(gradients)
    assert cost_steps("cpu") == 2


def test_launches_of_the_losses_are_part_of_the_step() -> None:
    one = bench_detector("atss", PAIRWISE)
    one.step()  # the optimiser makes its buffers
    costs = step_costs(one.model, one.step, one.optimizer.zero_grad, "cpu")
    with count_launches() as counted:
        one.step()
    assert (costs.launches, costs.waits) == (counted.launches, counted.waits)
    assert 0 < costs.loss_launches < costs.launches


@pytest.mark.slow
def test_a_file_from_another_machine_gives_the_same_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = fixed_time_bench()
    costs = StepCosts(launches=4321, waits=12, loss_launches=321, loss_waits=1, extra_bytes=7_000_000)
    bench.results[0] = dataclasses.replace(bench.results[0], costs=costs)
    gpu = dataclasses.replace(bench.settings)
    object.__setattr__(gpu, "device", "cuda")  # which this machine need not have
    bench = dataclasses.replace(bench, settings=gpu)
    first = report.write_detector_bench(bench, tmp_path / "theirs")
    assert restore_bench(DetectorBench, read_document(first[0])) == bench
    assert main(["results", str(first[0]), "--out", str(tmp_path / "ours")]) == 0
    assert "4,321 / 12" in capsys.readouterr().out
    row = "| Faster R-CNN | rs/exact | 4,321 / 12 | 321 / 1 | 7.00 MB |"
    assert row in (tmp_path / "ours" / "detectors.md").read_text(encoding="utf-8")
    assert (tmp_path / "ours" / "detectors.json").read_bytes() == first[0].read_bytes()


def test_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    with measure._threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    with measure._threads(None):
        assert torch.get_num_threads() == before


def fixed_time_bench(*, slow: bool = True) -> DetectorBench:
    """Return results that were not measured: focal 1 s, exact 1.02 s (ATSS: 1.1 s), the loss a tenth of every step."""
    seconds = dict(zip(NAMES, (1.02, 1.2, 4.0, 1.0, 0.8), strict=True))
    results = []
    for detector in TITLES:
        of_detector = []
        for contender in detector_contenders(detector):
            heads = [Head("rpn", 38_174, 1, 57), Head("box_head", 2016, 20, 31)]
            result = DetectorResult(detector, contender.name, contender.title, heads)
            time = 1.1 if (detector, contender.name) == ("atss", EXACT) else seconds[contender.name]
            if contender.name == PAIRWISE and slow:
                result = dataclasses.replace(result, estimated_seconds=40.0, skipped="too long")
            else:
                samples = {0: time, 1: 2 * time, 2: time}
                loss = {turn: x / 10 for turn, x in samples.items()}
                result = dataclasses.replace(
                    result, value=1.0, samples=samples, split_samples=samples, loss_samples=loss
                )
            of_detector.append(result)
        results += with_ratios(of_detector)
    return DetectorBench(describe(), DetectorBenchSettings(), results)


def test_bars_by_hand() -> None:
    judged = {target.where: target for target in report.detector_targets(fixed_time_bench())}
    assert list(judged) == list(TITLES.values())
    assert judged["Faster R-CNN"].value == pytest.approx(1.02)
    assert (judged["Faster R-CNN"].limit, judged["Faster R-CNN"].passed) == (1.05, True)
    assert judged["ATSS"].value == pytest.approx(1.1)
    assert not judged["ATSS"].passed


def test_a_busy_machine_is_noted() -> None:
    bench = fixed_time_bench()
    bench.machine["load"], bench.machine["cores"] = 3.0, 4
    assert all(target.disturbed for target in report.detector_targets(bench))
    assert "the times may be off" in report.notes(bench)[0]
    bench.machine["load"] = 1.0
    assert not any(target.disturbed for target in report.detector_targets(bench))


def test_json_holds_everything(tmp_path: Path) -> None:
    document = json.loads(report.write_detector_bench(fixed_time_bench(), tmp_path)[0].read_text(encoding="utf-8"))
    assert document["benchmark"] == "detectors"
    assert document["command"] == "python -m benchmarks detectors"
    assert {"commit", "modified", "processor", "date"} <= document["machine"].keys()
    assert len(document["results"]) == len(TITLES) * 5
    exact = document["results"][0]
    assert (exact["detector"], exact["contender"]) == ("faster_rcnn", EXACT)
    assert exact["samples"] == {"0": 1.02, "1": 2.04, "2": 1.02}
    assert exact["to_usual"]["median"] == pytest.approx(1.02 / 0.8)
    assert exact["share"]["median"] == pytest.approx(0.1)
    # A tenth of 1.02 s instead of a tenth of 1 s, in a step of 1 s.
    assert exact["loss_to_focal"]["median"] == pytest.approx(1.002)
    assert exact["heads"][1] == {"name": "box_head", "candidates": 2016, "classes": 20, "positives": 31}
    assert document["results"][2]["skipped"] == "too long"
    assert [target["passed"] for target in document["bars"]] == [True, True, True, True, False, True, True]


def test_markdown_has_the_numbers_of_the_paper() -> None:
    text = report.to_markdown(fixed_time_bench(), "detectors.svg")
    times = "\N{MULTIPLICATION SIGN}"
    assert (
        f"| Faster R-CNN | 1.02 s · 1.020{times} · 10.0 % | 1.20 s · 1.200{times} · 10.0 % | skipped, ≈ 40.0 s |"
        in text
    )
    assert f"| Faster R-CNN | 0.50 | 0.17 | 0.14 | 1.21{times} | aLRP 0.28 | ≈ 40.0 | 1.20 | 1.02 | 0.800 |" in text
    assert f"| ATSS | 0.36 | 0.15 | 0.14 | 1.07{times} |" in text
    assert f"38,174 + 2,016{times}20 | 57 + 31 |" in text
    assert "](detectors.svg)" in text
    for table in text.split("\n\n"):
        if table.startswith("|"):
            assert len({line.count(" | ") for line in table.splitlines()}) == 1, table


@pytest.mark.parametrize("width", [80, 160])
def test_the_table_shows_ratios_and_skips(width: int) -> None:
    stream = io.StringIO()
    report.show_detector_bench(fixed_time_bench(), Console(file=stream, width=width))
    text = stream.getvalue()
    assert "1.020" in text
    assert "40.0 s" in text
    assert "missed" in text
    assert ("38,174" in text) == (width == 160)


@pytest.mark.slow
@pytest.mark.parametrize("slow", [True, False])
def test_the_same_study_gives_the_same_svg(tmp_path: Path, slow: bool) -> None:
    bench = fixed_time_bench(slow=slow)
    first, second = (report.write_detector_bench(bench, tmp_path / name)[3].read_bytes() for name in "ab")
    assert first == second
    assert b"<svg" in first


@pytest.mark.parametrize(
    ("settings", "command"),
    [
        (DetectorBenchSettings(), "python -m benchmarks detectors"),
        (DetectorBenchSettings(**QUICK), "python -m benchmarks detectors --quick"),
        (
            DetectorBenchSettings(
                detectors=("atss",), backbone="resnet50", image_size=(800, 1333), batch=4, channels=256
            ),
            "python -m benchmarks detectors --detectors atss --backbone resnet50 --image-size 800x1333 --batch 4"
            " --channels 256",
        ),
    ],
)
def test_the_command_repeats_the_study(settings: DetectorBenchSettings, command: str) -> None:
    assert settings.command() == command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--detectors atss,yolo",
            "--detectors: expected some of faster_rcnn, mask_rcnn, cascade_rcnn, retinanet, atss",
        ),
        ("--detectors atss,atss", "each once, got 'atss,atss'"),
        ("--backbone resnet19", "--backbone: expected a timm model, swin_tiny or swin_large, got 'resnet19'"),
        ("--image-size 256", "--image-size: expected height x width, like 256x320, got '256'"),
        ("--image-size 32x320", "--image-size: expected height x width of at least 64 pixels each, got 32x320"),
        ("--batch 0", "--batch: expected at least 1, got 0"),
        ("--objects 0", "--objects: expected at least 1, got 0"),
        ("--channels 48", "--channels: expected a multiple of 32, got 48"),
        ("--rounds 1", "--rounds: expected at least 3, got 1"),
        ("--threads 0", "--threads: expected at least 1, got 0"),
        ("--device abacus", "--device: expected a device that torch can use here, got 'abacus'"),
        ("--max-seconds-per-step 0", "--max-seconds-per-step: expected more than 0, got 0.0"),
    ],
)
def test_wrong_values_name_the_flag(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["detectors", *words.split()]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("python -m benchmarks: detectors: --")
    assert message in printed
    assert printed.count("\n") == 1


def test_a_missing_package_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without(monkeypatch, "timm")
    assert main(["detectors"]) == 2
    assert 'needs timm; install with: pip install "bucketrank[detect]"' in capsys.readouterr().err


@pytest.mark.slow
def test_from_the_command_to_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "results"
    assert main(["detectors", "--detectors", "mask_rcnn", *FLAGS.split(), "--out", str(out)]) == 0
    names = ["detectors.json", "detectors.md", "detectors.png", "detectors.svg"]
    assert sorted(path.name for path in out.iterdir()) == names
    document = json.loads((out / "detectors.json").read_text(encoding="utf-8"))
    assert document["settings"]["image_size"] == [64, 96]
    assert document["command"] == f"python -m benchmarks detectors --detectors mask_rcnn {FLAGS}"
    assert [r["title"] for r in document["results"]] == [e.title for e in detector_contenders("mask_rcnn")]
    assert str(tmp_path) not in (out / "detectors.json").read_text(encoding="utf-8")
    printed = capsys.readouterr().out
    assert "Mask R-CNN" in printed
    assert "detectors.png" in printed


def test_scene_is_drawn_by_seed() -> None:
    first, again, other = (
        draw_scene((96, 128), batch=2, objects=4, classes=5, masks=True, seed=seed) for seed in (0, 0, 1)
    )
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert not torch.equal(first.images[0], other.images[0])
    for target in first.targets:
        x1, y1, x2, y2 = target["boxes"].unbind(1)
        assert bool((x1 >= 0).all() and (y1 >= 0).all() and (x2 <= 128).all() and (y2 <= 96).all())
        assert bool(((x2 - x1) >= 96 / 12 - 1e-3).all() and ((y2 - y1) <= 48 + 1e-3).all())
        assert bool((target["labels"] >= 1).all() and (target["labels"] <= 5).all())
        # An ellipse fills pi / 4 of its box.
        filled = target["masks"].sum((1, 2)) / ((x2 - x1) * (y2 - y1))
        torch.testing.assert_close(filled, torch.full_like(filled, math.pi / 4), rtol=0.2, atol=0)
