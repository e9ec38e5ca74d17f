"""The queue of a study: how it ends its run when it is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

from bucketrank.study.run_queue import _wait


def test_sigterm_to_the_study_ends_its_run():
    sleeping = "import sys, time; print('ready', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", sleeping], stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        run.stdout.readline()
        before = signal.getsignal(signal.SIGTERM)
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()
        assert _wait(run) == -signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) == before
