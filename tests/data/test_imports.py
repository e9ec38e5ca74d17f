"""The data package imports torch only where it needs it."""

from __future__ import annotations

import subprocess
import sys

import bucketrank.data


def test_checking_converting_and_drawing_need_no_torch() -> None:
    code = """
import sys
from bucketrank.data import check, find_splits, require_sound, write_shapes, Split
import bucketrank.data.convert, bucketrank.data.summary
print("torch" in sys.modules)
"""
    command = [sys.executable, "-W", "error", "-c", code]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "False\n"


def test_every_exported_name_exists() -> None:
    assert all(callable(getattr(bucketrank.data, name)) for name in bucketrank.data.__all__)
    assert not hasattr(bucketrank.data, "no_such_name")
