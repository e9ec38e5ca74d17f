"""A data set for the trainings."""

from pathlib import Path

import pytest

from bucketrank.data import write_shapes


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shapes(tmp_path_factory.mktemp("data") / "shapes", train=12, val=3, size=64, seed=0)
