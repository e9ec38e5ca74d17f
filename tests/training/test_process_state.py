"""The state of the process is restored after a run."""

from __future__ import annotations

import pytest
import torch

from bucketrank.training.process_state import deterministic_restored


@pytest.mark.parametrize(("enabled", "warn_only"), [(False, False), (True, False), (True, True)])
def test_the_deterministic_mode_is_restored(enabled, warn_only):
    """Lightning sets the mode of the whole process and never resets it."""
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    try:
        with deterministic_restored():
            torch.use_deterministic_algorithms(not enabled, warn_only=not warn_only)
        assert torch.are_deterministic_algorithms_enabled() == enabled
        assert torch.is_deterministic_algorithms_warn_only_enabled() == (enabled and warn_only)
    finally:
        torch.use_deterministic_algorithms(False)
