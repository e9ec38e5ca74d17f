"""The run on many logits, on fewer of them."""

from __future__ import annotations

import pytest

from bucketrank.bench.contenders import unavailable
from bucketrank.bench.large import run_large
from bucketrank.bench.memory import CLEAR_REFS
from bucketrank.bench.study import Settings
from tests.bench.test_losses import Listener


@pytest.mark.skipif(not CLEAR_REFS.exists(), reason="the record of the largest size can only be reset on Linux")
def test_time_growth_and_memory_of_exact() -> None:
    listener = Listener()
    results = run_large(Settings(), listener, size=400_000)
    names = ["exact-torch"] if unavailable("exact-fused", "cpu") else ["exact-torch", "exact-fused"]
    cells = [(positives, loss, name) for positives in (400, 2000) for loss in ("ap", "rs") for name in names]
    assert [(r.positives, r.loss, r.contender) for r in results] == cells
    for result in results:
        assert result.logit_bytes == 1_600_000
        # At least the gradient.
        assert 1_500_000 <= result.extra_bytes < 200_000_000
        assert result.seconds.median > 0
        assert min(each.median for each in (result.growth, result.growth_in_logits, result.to_focal)) > 0
        assert result.focal_growth.median > 0
    assert listener.done == pytest.approx([total for _, total in listener.stages])
