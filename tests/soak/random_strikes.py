"""Signals into runs at random moments; each run is then resumed and compared with one that was not struck.

A run gets one to three strikes, each into a new start. Most starts fork a process with everything imported; some are
the command itself in new interpreters, whose imports and processes can then be struck too. Needs Linux's ``/proc``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple

import numpy as np

from bucketrank.data import write_shapes
from tests.training.strikes import CALLS, Strike, words_of
from tests.training.struck_runs import KILL, LIMIT, TERM, content, log_of, logs_of, require_same, run, start, wait

WRITES = ["before {}", "in {}", "before the rename of {}", "after {}"]
ROWS = ["before a row of {}", "in a row of {}", "after a row of {}"]
# How often each moment comes in a run; the others of CALLS come once.
MOMENTS = {
    **dict.fromkeys(CALLS, 1),
    "a training step": 6,
    "a batch of evaluation": 2,
    "gathering the detections": 2,
    "computing AP": 2,
    "closing an epoch": 2,
    "between the two renames of a checkpoint": 4,
    **dict.fromkeys([pattern.format("last.safetensors") for pattern in WRITES], 5),
    **{pattern.format(f"{name}.safetensors"): 1 for name in ("best", "data", "weights") for pattern in WRITES},
    **dict.fromkeys([pattern.format("recipe.yaml") for pattern in WRITES], 1),
    **dict.fromkeys([pattern.format("train.csv") for pattern in ROWS], 6),
    **dict.fromkeys([pattern.format("validation.csv") for pattern in ROWS], 2),
}
PATIENCE = 20.0  # seconds in which the other processes of a run must end after the first


class RandomStrike(NamedTuple):
    """One start of a run and the signal into it: by the run itself, or from outside at a ``share`` of its duration."""

    command: bool  # in new interpreters
    number: signal.Signals
    moment: Strike | None
    share: float
    victim: Literal["first", "last", "all"]  # of the run's processes
    grace: float | None  # seconds from SIGTERM to SIGKILL, as schedulers do

    def __str__(self) -> str:
        when = self.moment or f"{self.number.name} to {self.victim} after {self.share:.0%}"
        then = "" if self.grace is None else f", SIGKILL {self.grace:.2f} s later"
        return f"{when}{then}{' (command)' * self.command}"


def draw(rng: np.random.Generator, *, processes: int) -> RandomStrike:
    """Return a random strike into a run of ``processes`` processes."""
    number = KILL if rng.random() < 0.6 else TERM
    command = bool(rng.random() < 0.08)
    moment = None
    if not command and rng.random() < 0.5:
        delay = 0.0 if rng.random() < 0.3 else float(rng.exponential(0.1))
        name, times = [*MOMENTS.items()][rng.integers(len(MOMENTS))]
        moment = Strike(name, int(rng.integers(1, times + 1)), number, delay)
    victim: Literal["first", "last", "all"] = "first" if processes == 1 or moment or rng.random() < 0.5 else "all"
    if command and processes > 1 and number == KILL and rng.random() < 0.3:
        victim = "last"
    grace = float(rng.uniform(0, 0.5)) if number == TERM and moment is None and rng.random() < 0.2 else None
    return RandomStrike(command, number, moment, float(rng.random()), victim, grace)


class StruckRuns:
    """Runs on one small data set, and what undisturbed ones leave."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = write_shapes(folder / "shapes", train=12, val=3, size=64, seed=0)
        self._seconds: dict[tuple[bool, int], float] = {}
        run(folder / "first", self.data, strike=Strike("the lock", 1, KILL))  # starts the server of the forks
        self._expected: dict[int, dict[str, object]] = {}

    def undisturbed(self, *, command: bool, processes: int) -> tuple[float, dict[str, object]]:
        """Return the duration and the content of an undisturbed run, the same by the command as by forks."""
        key = command, processes
        if key not in self._seconds:
            folder = self.folder / f"whole-{processes}-{'command' if command else 'forks'}"
            began = time.monotonic()
            codes = self._start(folder, None, command=command, processes=processes)[0]
            self._seconds[key] = time.monotonic() - began
            require(set(codes) == {0}, f"an undisturbed run returned {codes}:\n{log_of(folder)}")
            require_same(folder, self._expected.setdefault(processes, content(folder)))
        return self._seconds[key], self._expected[processes]

    def strike(self, folder: Path, strike: RandomStrike, *, processes: int) -> str | None:
        """Start or resume a run and strike it; return how it ended, or None if it ended before."""
        for path in logs_of(folder):
            path.unlink()
        resumed = folder.exists()
        seconds, expected = self.undisturbed(command=strike.command, processes=processes)
        if resumed:  # fewer steps are left
            seconds /= 2
        began = time.monotonic()
        codes, handled = self._start(folder, strike, command=strike.command, processes=processes, seconds=seconds)
        log, first = log_of(folder), codes[0]
        done = "Done: " in log
        if first == 0:
            require(set(codes) <= {0}, f"the first process returned 0, all: {codes}")
            require_same(folder, expected)
            if not resumed:  # the machine is faster now
                key = strike.command, processes
                self._seconds[key] = min(self._seconds[key], time.monotonic() - began)
            return None
        if strike.number == TERM and strike.grace is None:
            require("Traceback" not in log, "a traceback")
            require(set(codes[1:]) <= {0, -KILL, -TERM}, f"the processes returned {codes}")
        if first == -KILL:
            require(strike.number == KILL or strike.grace is not None, "the run was killed by something else")
        elif first == 130:
            require(strike.number == TERM, "the run was not asked to stop")
            require(log.count("bucketrank: stopped; ") == 1, "expected one line that says how to resume")
            require(not done, "the run was finished")
        elif first == -TERM:
            require(strike.number == TERM and (not handled or done), "SIGTERM ended a run that handles it")
        else:
            require(strike.victim == "last", f"expected a status of {{0, 130, -9, -15}}, got {first}")
        return f"{strike.number.name}, {'one process' if processes == 1 else 'two processes'}"

    def _start(
        self,
        folder: Path,
        strike: RandomStrike | None,
        *,
        command: bool,
        processes: int,
        seconds: float = 0,
    ) -> tuple[list[int | None], bool]:
        """Start a run and wait for its end; return the exit codes, and whether it handled the signal sent to it."""
        if command:
            return self._start_command(folder, strike, processes=processes, seconds=seconds)
        moment = None if strike is None else strike.moment
        started = start(folder, self.data, strike=moment, processes=processes)
        handled = True
        if strike is not None and moment is None:
            started[0].join(strike.share * seconds)
            pids = [process.pid or 0 for process in started]
            handled = send(strike, pids if strike.victim == "all" else pids[:1], started[0].join)
        return wait(started, patience=PATIENCE), handled

    def _start_command(
        self, folder: Path, strike: RandomStrike | None, *, processes: int, seconds: float
    ) -> tuple[list[int | None], bool]:
        """Start a run by the command, in a session of its own whose processes must all end."""
        words = [sys.executable, "-m", "bucketrank.cli", *words_of(folder, self.data, processes=processes)]
        handled = True
        with (folder.parent / f"{folder.name}-rank0.log").open("a") as log:
            process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
            if strike is not None:
                wait_for(process, strike.share * seconds)
                pids = processes_of(process.pid)
                chosen = {"first": pids[:1], "last": pids[-1:], "all": pids}[strike.victim]
                handled = send(strike, chosen, lambda duration: wait_for(process, duration))
            process.wait(LIMIT)
        end = time.monotonic() + PATIENCE
        while (left := processes_of(process.pid)) and time.monotonic() < end:
            time.sleep(0.05)
        for pid in left:
            os.kill(pid, KILL)
        require(not left, f"processes {left} did not end with the first")
        return [process.returncode], handled


def send(strike: RandomStrike, pids: list[int], pause: Callable[[float], object]) -> bool:
    """Send the signal to processes; return whether the first has a handler for it or holds it back."""
    handled = not pids or handles(pids[0], strike.number)
    deliver(pids, strike.number)
    if strike.grace is not None:
        pause(strike.grace)
        deliver(pids, KILL)
    return handled


def deliver(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        if is_alive(pid):
            os.kill(pid, number)


def handles(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler for a signal, or holds it back."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError:
        return True
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigCgt:", "SigBlk:"))]
    return any(mask >> (number - 1) & 1 for mask in masks)


def processes_of(session: int) -> list[int]:
    """Return the processes of a session that have not ended, oldest first."""
    return sorted(
        int(path.name)
        for path in Path("/proc").iterdir()
        if path.name.isdigit() and (fields := stat(int(path.name))) and int(fields[3]) == session and fields[0] != "Z"
    )


def is_alive(pid: int) -> bool:
    fields = stat(pid)
    return bool(fields) and fields[0] != "Z"


def stat(pid: int) -> list[str]:
    """Return the fields of a process from its state on (state, parent, group, session), none if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def wait_for(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def require(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)


def strike_runs(count: int, seed: int, *, first: int = 0) -> Counter[str]:
    """Strike runs until ``count`` strikes have ended one; return the numbers of strikes.

    Run number n depends on ``seed`` and n alone: ``first`` continues an earlier call, or splits one.
    """
    results: Counter[str] = Counter()
    number, late = first, 0
    with TemporaryDirectory() as name:
        runs = StruckRuns(Path(name))
        while sum(results.values()) < count:
            rng = np.random.default_rng([seed, number])
            processes = 1 if rng.random() < 0.8 else 2
            folder = runs.folder / f"run-{number}"
            story = []
            try:
                for _ in range(rng.choice([1, 2, 3], p=[0.6, 0.25, 0.15])):
                    strike = draw(rng, processes=processes)
                    story.append(str(strike))
                    ending = runs.strike(folder, strike, processes=processes)
                    late += ending is None
                    story[-1] += ": too late" * (ending is None)
                    results.update([ending] if ending else [])
                for path in logs_of(folder):
                    path.unlink()
                codes = run(folder, runs.data, processes=processes)
                require(codes == [0] * processes, f"the resumed run returned {codes}")
                require_same(folder, runs.undisturbed(command=False, processes=processes)[1])
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, run {number}: {'; '.join(story)}\n{log_of(folder)}") from error
            sys.stderr.write(f"run {number}, {sum(results.values())} strikes: {'; '.join(story)}\n")
            number += 1
    sys.stderr.write(f"{number - first} runs ({first} to {number - 1}), {late} signals came too late\n")
    return results
