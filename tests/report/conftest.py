"""A small data set, a run on it, a synthetic report page, and a browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from bucketrank.data import write_shapes
from bucketrank.report.page import render_page

from ..training import tiny
from .browser import Browser, started
from .synthetic_reports import synthetic_run, write_data


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shapes(tmp_path_factory.mktemp("data") / "shapes", train=8, val=3, size=64, seed=0)


@pytest.fixture(scope="session")
def run(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with masks."""
    folder = tmp_path_factory.mktemp("runs") / "masks"
    flags = "--detector.hidden 32 --detector.proposals 50 --schedule.epochs 1"
    tiny.run(folder, shapes, flags, name="mask-rcnn-laptop")
    return folder


@pytest.fixture
def run_copy(run: Path, tmp_path: Path) -> Path:
    """Return a copy of the run folder that a test may change."""
    return Path(shutil.copytree(run, tmp_path / "copy", ignore=shutil.ignore_patterns("checkpoints", "pictures")))


@pytest.fixture(scope="session")
def synthetic_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "synthetic")


@pytest.fixture(scope="session")
def synthetic_page(synthetic_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a page about two runs: one with masks and a ranking loss, one with focal loss."""
    runs = [
        synthetic_run(synthetic_data, "ranked", masks=True),
        synthetic_run(synthetic_data, "scored <i>&", "--loss focal", seed=1),
    ]
    path = tmp_path_factory.mktemp("pages") / "page.html"
    path.write_text(render_page(runs), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with started(tmp_path_factory.mktemp("profile")) as process:
        yield process
