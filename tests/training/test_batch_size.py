"""The batch size that fills a GPU, measured on a pretended one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bucketrank.errors import OutOfMemoryError, RecipeError
from bucketrank.settings import load_recipe
from bucketrank.training import batch_size
from bucketrank.training.batch_size import CudaMeter, build_meter, largest_batch
from bucketrank.training.loop import DetectorLoss, HiddenBatch

from . import tiny


@pytest.mark.parametrize("limit", [1, 2, 3, 64])
@pytest.mark.parametrize("budget", [400, 499, 500, 600, 1000, 5000])
def test_the_largest_batch_of_a_linear_memory(budget: int, limit: int) -> None:
    fits = min(limit, (budget - 300) // 100)
    assert largest_batch(lambda images: 300 + 100 * images, budget=budget, limit=limit) == fits


def test_memory_that_grows_faster_than_its_first_images_say() -> None:
    calls = []

    def peak(images: int) -> int | None:
        calls.append(images)
        return None if images > 20 else 10 * images + images**2

    assert largest_batch(peak, budget=400, limit=64) == 15, "24 images run out of memory, and 19 need 551 bytes"
    assert calls == [1, 2, 30, 24, 19, 15]
    assert peak(15) == 375


@pytest.mark.parametrize("memory", [None, 401])
def test_not_even_one_image_fits(memory: int | None) -> None:
    with pytest.raises(OutOfMemoryError, match=r"not even one image fits into 0\.0 GiB; use a smaller --imgsz"):
        largest_batch(lambda _: memory, budget=400, limit=8)


class PretendedGPU:
    """A meter whose steps need 100 bytes per image."""

    def __init__(self, patch: pytest.MonkeyPatch, free: int) -> None:
        self.bytes, self.images = free, 0
        usual = DetectorLoss.forward

        def counted(module: DetectorLoss, hidden: HiddenBatch) -> object:
            self.images = len(hidden.batch[0])
            return usual(module, hidden)

        patch.setattr(DetectorLoss, "forward", counted)
        patch.setattr(batch_size, "build_meter", lambda _: self)

    def free(self) -> int:
        return self.bytes

    def peak(self, step: Callable[[], None]) -> int:
        step()
        return 100 * self.images


def test_a_run_measures_its_batch_size_once(shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_size, "MIN_STEPS", 2)
    PretendedGPU(monkeypatch, free=400)
    flags = "--data.batch_size -1 --schedule.accumulate 2 --schedule.ema 0.9 --inputs.min_size 48,64"
    result = tiny.run(tmp_path / "run", shapes, flags)
    stored = load_recipe(result.folder / "recipe.yaml")
    assert stored.data.batch_size == 6, "three images fit, and a step has two such batches"
    PretendedGPU(monkeypatch, free=1000)
    assert tiny.run(tmp_path / "run", shapes, flags, resume=True).steps == result.steps
    assert load_recipe(result.folder / "recipe.yaml") == stored


def test_a_measured_run_equals_one_with_the_number(
    shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    PretendedGPU(monkeypatch, free=400)
    measured = tiny.run(tmp_path / "measured", shapes, "--data.batch_size -1")
    size = load_recipe(measured.folder / "recipe.yaml").data.batch_size
    given = tiny.run(tmp_path / "given", shapes, f"--data.batch_size {size}")
    assert measured.weights.read_bytes() == given.weights.read_bytes()


def test_only_the_memory_of_one_gpu_is_measured(shapes: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"data\.batch_size: expected a number of images on a cpu device, got -1"):
        tiny.run(tmp_path / "run", shapes, "--data.batch_size -1")
    two = SimpleNamespace(world_size=2)
    with pytest.raises(RecipeError, match=r"expected a number of images for 2 devices.*--trainer\.devices 1"):
        batch_size.fill_gpu(tiny.recipe("--data.batch_size -1"), SimpleNamespace(), two)  # type: ignore[arg-type]


def test_the_meter_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = build_meter(torch.device("cuda", 0))
    assert isinstance(meter, CudaMeter)
    for name, value in {
        "empty_cache": None,
        "synchronize": None,
        "reset_peak_memory_stats": None,
        "memory_allocated": 50,
        "max_memory_allocated": 250,
        "mem_get_info": (700, 800),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    assert meter.free() == 700
    assert meter.peak(lambda: None) == 200

    def too_much() -> None:
        raise torch.OutOfMemoryError

    assert meter.peak(too_much) is None
