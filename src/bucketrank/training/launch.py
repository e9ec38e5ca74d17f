"""The processes of one run, as far as the environment describes them before Lightning starts."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

# The ranks that Lightning, torchrun, SLURM and LSF set, of the process or of its machine.
RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK", "NODE_RANK", "GROUP_RANK")
PARENT = "BUCKETRANK_PARENT"  # environment variable: the process that starts the others of its machine
POLL_SECONDS = 1.0


def is_first_process() -> bool:
    """Return whether this process is the first of its run: the one that writes the files."""
    return all(os.environ.get(name, "0") in ("", "0") for name in RANKS)


@contextmanager
def parent_of_others() -> Iterator[None]:
    """Tell the processes that this one starts meanwhile who started them."""
    before = os.environ.get(PARENT)
    os.environ[PARENT] = str(os.getpid())
    try:
        yield
    finally:
        if before is None:
            del os.environ[PARENT]
        else:
            os.environ[PARENT] = before


def end_with_parent() -> None:
    """End this process soon after the one that started it, also if that one has ended during the imports of this one.

    If the first process is killed, the others would wait for it, up to half an hour in the start-up.
    """
    parent = int(os.environ.get(PARENT, os.getppid()))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
