"""Files too large for the repository, beside it."""

from pathlib import Path

import pytest

SHARED = Path(__file__).parents[2] / "shared"


def shared(path: str) -> Path:
    """Return the path of a shared file; skip the test if the file does not exist."""
    file = SHARED / path
    if not file.exists():
        pytest.skip(f"needs ../shared/{path} beside the repository")
    return file
