"""The benchmarks on a CUDA or ROCm device: graphs, launches, memory, and both commands.

Run them with ``pytest tests/benchmarks/test_on_gpu.py``; without a device they are skipped.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.losses.contenders import draw_logits, loss_step, step_launches, why_unavailable
from benchmarks.timing import device_clock, peak_allocated, seconds_of

from ..device_waits import no_waits

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA or ROCm device", allow_module_level=True)
if reason := why_unavailable("exact-triton", "cuda"):
    pytest.skip(reason, allow_module_level=True)


def test_events_measure_the_device() -> None:
    matrix = torch.rand(4096, 4096, device="cuda")
    clock = device_clock("cuda")

    def multiply(times: int) -> None:
        for _ in range(times):
            matrix @ matrix

    seconds_of(lambda: multiply(2), clock)
    assert 0 < seconds_of(lambda: multiply(2), clock) < seconds_of(lambda: multiply(40), clock)


def test_the_allocator_counts_a_tensor() -> None:
    assert peak_allocated(lambda: torch.empty(1 << 20, device="cuda"), "cuda") == 4 << 20


@pytest.mark.parametrize(("name", "loss"), [("exact-triton", "ap"), ("exact-triton", "rs"), ("focal", None)])
@pytest.mark.parametrize("mode", ["compiled", "graph"])
def test_modes_agree_with_eager(mode, name: str, loss: str | None) -> None:
    data = draw_logits(50_000, 1.0, seed=0, device="cuda")
    eager, other = loss_step(name, loss, data), loss_step(name, loss, data, mode=mode)
    for _ in range(3):
        torch.testing.assert_close(other(), eager(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("loss", ["ap", "rs"])
def test_the_counted_waits_are_the_waits(loss: str) -> None:
    data = draw_logits(50_000, 1.0, seed=0, device="cuda")
    assert step_launches("exact-triton", loss, data, "eager").waits == 1
    assert step_launches("focal", None, data, "eager").waits == 0
    focal = loss_step("focal", None, data)
    focal()
    with no_waits():
        focal()


def test_bench_losses(tmp_path: Path) -> None:
    flags = "--device cuda --sizes 10K,100K --percent 1 --repeats 5 --max-seconds-per-cell 10"
    assert main(["losses", *flags.split(), "--out", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "losses.json").read_text(encoding="utf-8"))
    assert document["machine"]["gpu"] == torch.cuda.get_device_name()
    assert document["machine"]["gpu_details"]["runtime"]
    assert document["machine"]["versions"]["triton"]
    results = {(r["contender"], r["loss"], r["mode"], r["size"]): r for r in document["results"]}
    for size in (10_000, 100_000):
        for loss in ("ap", "rs"):
            for mode in ("eager", "compiled", "graph"):
                assert results["exact-triton", loss, mode, size]["skipped"] is None
            eager = results["exact-triton", loss, "eager", size]
            assert eager["waits"] == 1
            assert eager["launches"] <= 25
            assert eager["extra_bytes"] >= 4 * size, "the gradient"


def test_bench_detectors(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    flags = "--device cuda --detectors atss,faster_rcnn --backbone test_resnet --image-size 64x96 --rounds 3"
    assert main(["detectors", *flags.split(), "--out", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "detectors.json").read_text(encoding="utf-8"))
    for result in document["results"]:
        if result["skipped"] is None:
            assert result["costs"]["extra_bytes"] > 0
            assert result["costs"]["loss_launches"] < result["costs"]["launches"]
