"""Settings and fixtures for all tests."""

from pathlib import Path

import pytest
from hypothesis import settings

from tests.threads import one_thread, two_threads

__all__ = ["one_thread", "two_threads"]

# No deadline: the first call of a kernel compiles it. The same examples every time: what failed once fails again.
settings.register_profile("house", deadline=None, derandomize=True)
settings.load_profile("house")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the long tests first; the others keep their order."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small data set of drawn shapes: 12 training images and 3 validation images."""
    from bucketrank.data import write_shapes  # here: the tests of the losses run without the packages for images

    return write_shapes(tmp_path_factory.mktemp("data") / "shapes", train=12, val=3, size=64, seed=0)
