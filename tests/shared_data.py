"""Files too large for the repository, beside it."""

from pathlib import Path

import pytest

SHARED = Path(__file__).parents[2] / "shared"


def shared(path: str) -> Path:
    """Where ``path`` is among the shared files; the test is skipped where it is not."""
    found = SHARED / path
    if not found.exists():
        pytest.skip(f"needs ../shared/{path} beside the repository")
    return found
