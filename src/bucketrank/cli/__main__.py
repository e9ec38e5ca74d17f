"""The ``bucketrank`` command: its subcommands by name, and what it returns."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bucketrank.arguments import Commands, UsageError, call
from bucketrank.commands.bench_detectors import bench_detectors
from bucketrank.commands.bench_losses import bench_losses
from bucketrank.commands.bench_results import bench_results
from bucketrank.commands.calibrate import calibrate
from bucketrank.commands.check_data import check_data
from bucketrank.commands.convert import convert_cityscapes, convert_voc, convert_yolo
from bucketrank.commands.convert_weights import convert_weights
from bucketrank.commands.demo import demo
from bucketrank.commands.eval import evaluate
from bucketrank.commands.export import export
from bucketrank.commands.predict import predict
from bucketrank.commands.recipes import recipes
from bucketrank.commands.report import report
from bucketrank.commands.split import split
from bucketrank.commands.study import study
from bucketrank.commands.train import train
from bucketrank.data.problems import DataError
from bucketrank.suggestions import is_out_of_memory, printable

COMMANDS: Commands = {
    "bench": {
        "losses": bench_losses,
        "detectors": bench_detectors,
        "results": bench_results,
    },
    "calibrate": calibrate,
    "check-data": check_data,
    "convert": {
        "cityscapes": convert_cityscapes,
        "voc": convert_voc,
        "yolo": convert_yolo,
    },
    "convert-weights": convert_weights,
    "demo": demo,
    "eval": evaluate,
    "export": export,
    "predict": predict,
    "recipes": recipes,
    "report": report,
    "split": split,
    "study": study,
    "train": train,
}

TIMING = (["bench"], ["study"])  # commands that time torch as it is; the runs of a study are processes of their own


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status: 0, 1 if the work failed, 2 for wrong usage, 130 if interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] not in TIMING:
        _let_waiting_threads_sleep()
    try:
        with _sigterm_like_control_c():
            return call(COMMANDS, words)
    except UsageError as error:
        sys.stderr.write(f"bucketrank: {printable(error)}\n")
        return 2
    except (DataError, OSError) as error:  # an OSError names its file
        sys.stderr.write(f"bucketrank: {printable(error)}\n")
        return 1
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0] or "the system refused more"
        sys.stderr.write(f"bucketrank: not enough memory ({printable(reason):.200}); use smaller images or batches\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("bucketrank: interrupted\n")
        return 130


def _let_waiting_threads_sleep() -> None:
    """Let the threads of torch sleep while they wait for one another, unless the user has chosen.

    By default they spin. Where other programs use the cores, a thread that spins keeps away the one that it waits for,
    and a step takes more than ten times as long. OpenMP reads the variable once, when torch is imported.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@contextmanager
def _sigterm_like_control_c() -> Iterator[None]:
    """Raise KeyboardInterrupt at SIGTERM, so that a stopped command removes its temporary files.

    Outside the main thread, or if the process has a handler of its own, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main())
