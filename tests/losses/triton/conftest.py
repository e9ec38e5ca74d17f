"""These tests run the Triton kernels on CPU tensors, in Triton's interpreter, in a process of their own.

The interpreter has to be chosen before Triton is imported: ``TRITON_INTERPRET=1 pytest tests/losses/triton``.
``tests/losses/test_triton.py`` does so; without the variable nothing is collected here.
"""

import os
from collections.abc import Iterator

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
else:
    import pytest

    from bucketrank.losses.triton import ranking as triton_ranking

    from .fast_interpreter import fast_interpreter

    @pytest.fixture(autouse=True, scope="session")
    def _fast_interpreter() -> Iterator[None]:
        with fast_interpreter():
            yield

    @pytest.fixture(autouse=True)
    def _three_copies(monkeypatch: pytest.MonkeyPatch) -> None:
        """Every program adds up all copies of the buckets; three copies show what more would."""
        monkeypatch.setattr(triton_ranking, "COPIES", 3)
