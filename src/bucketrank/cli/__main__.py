"""The command line: all commands by name."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from bucketrank.cli.arguments import Commands, run
from bucketrank.cli.data import check_data, convert_cityscapes, convert_voc, convert_yolo, split
from bucketrank.cli.model import calibrate, convert_weights, evaluate, export, predict, report
from bucketrank.cli.train import demo, recipes, train

COMMANDS: Commands = {  # in the order in which they are needed
    "train": train,
    "recipes": recipes,
    "report": report,
    "predict": predict,
    "eval": evaluate,
    "calibrate": calibrate,
    "export": export,
    "check-data": check_data,
    "split": split,
    "convert": {
        "yolo": convert_yolo,
        "voc": convert_voc,
        "cityscapes": convert_cityscapes,
    },
    "convert-weights": convert_weights,
    "demo": demo,
}


def main(words: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0, 1 if the work failed, 2 for wrong usage, 130 if interrupted."""
    if "torch" not in sys.modules:
        # OpenMP threads spin by default while they wait, and starve other programs on the same cores: two concurrent
        # runs take more than ten times as long. OpenMP reads the variable once, when torch is imported.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    return run(COMMANDS, words)


if __name__ == "__main__":
    sys.exit(main())
