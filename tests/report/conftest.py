"""A small data set, a run on it, and pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bucketrank.data import write_shapes
from bucketrank.report.page import page

from ..training import tiny
from . import made_up
from .browser import Browser, started


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shapes(tmp_path_factory.mktemp("data") / "shapes", train=8, val=3, size=64, seed=0)


@pytest.fixture(scope="session")
def run(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with masks."""
    folder = tmp_path_factory.mktemp("runs") / "masks"
    flags = "--detector.hidden 32 --detector.proposals 50 --schedule.epochs 1"
    tiny.run(folder, shapes, flags, name="mask-rcnn-laptop")
    return folder


@pytest.fixture(scope="session")
def made_up_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_up.data(tmp_path_factory.mktemp("data") / "nasty")


@pytest.fixture(scope="session")
def made_up_page(made_up_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, one with masks and one with a loss that is not a ranking."""
    subjects = [
        made_up.subject(made_up_data, "ranked", masks=True),
        made_up.subject(made_up_data, "scored <i>&", "--loss focal", seed=1),
    ]
    path = tmp_path_factory.mktemp("pages") / "page.html"
    path.write_text(page(subjects), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with started(tmp_path_factory.mktemp("profile")) as found:
        yield found
