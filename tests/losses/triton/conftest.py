"""Run the Triton kernels on CPU tensors: Triton compiles them for a GPU, and ``tests/ptx`` interprets their PTX.

The daily loop takes one target; the slow tests take the others.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from unittest import mock

import pytest

from bucketrank.losses import triton as kernels

from ...ptx.program import has_compiler

CAPABILITIES = [80, pytest.param(75, marks=pytest.mark.slow), pytest.param(90, marks=pytest.mark.slow)]

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="package", params=CAPABILITIES, ids="sm_{}".format)
def device(request: pytest.FixtureRequest) -> Iterator[object]:
    """An emulated GPU of one capability."""
    if not has_compiler():
        pytest.skip("needs g++, which compiles the interpreter of PTX")
    from ...ptx.device import emulate

    with (
        emulate(request.param) as emulated,
        mock.patch.object(kernels, "unavailable_reason", return_value=None),
        mock.patch.object(kernels, "import_problem", return_value=None),
    ):
        yield emulated


@pytest.fixture(autouse=True)
def _three_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every program adds up all copies of the buckets; three copies show what more would."""
    if importlib.util.find_spec("triton"):
        from bucketrank.losses.triton import ranking

        monkeypatch.setattr(ranking, "COPIES", 3)
