"""Settings and fixtures for all tests."""

import gc
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings

from tests.threads import one_thread, two_threads

__all__ = ["one_thread", "two_threads"]

# No deadline: the first call of a kernel compiles it. The same examples every time: what failed once fails again.
settings.register_profile("house", deadline=None, derandomize=True)
settings.register_profile("sample", settings.get_profile("house"), max_examples=20)
settings.load_profile("house")


def pytest_configure(config: pytest.Config) -> None:
    """Draw fewer examples in a run that leaves out the slow tests."""
    if "not slow" in config.getoption("markexpr"):
        settings.load_profile("sample")


@pytest.hookimpl(tryfirst=True)  # before pytest selects tests by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of a sampled test as slow, but every n-th; run the long tests first, the others in their order."""
    cases: Counter[str] = Counter()
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled is not None:
            function = item.nodeid.partition("[")[0]
            if cases[function] % sampled.args[0]:
                item.add_marker("slow")
            cases[function] += 1
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish() -> None:
    """Leave the imported modules out of every later garbage collection, which otherwise takes half a second."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Let Python delete the modules at its end; Triton would otherwise report leaks."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small data set of drawn shapes: 12 training images and 3 validation images."""
    from bucketrank.data import write_shapes  # here: the tests of the losses run without the packages for images

    return write_shapes(tmp_path_factory.mktemp("data") / "shapes", train=12, val=3, size=64, seed=0)
