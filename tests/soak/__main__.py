"""Long random tests, outside the test suite.

    python -m tests.soak annotations --count 100000 --seed 1
    python -m tests.soak losses --seconds 3600 --threads 8 --seed 1
    python -m tests.soak strikes --count 200 --seed 1
    python -m tests.soak strikes --named

``annotations`` checks mutated annotation files, ``losses`` compares the losses with their definitions, and ``strikes``
kills and stops runs at random moments, or at every named moment. Each prints its counts and ends with an exception at
the first failure.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    annotations = commands.add_parser("annotations", help="mutated annotation files against check-data")
    annotations.add_argument("--count", type=int, default=100_000, help="files to check (100000)")
    losses = commands.add_parser("losses", help="losses in several threads against their definitions")
    losses.add_argument("--seconds", type=float, default=3600, help="duration (3600)")
    losses.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="Python threads (one per core)")
    strikes = commands.add_parser("strikes", help="runs killed and stopped at random moments, then resumed")
    strikes.add_argument("--count", type=int, default=200, help="strikes (200)")
    strikes.add_argument("--first", type=int, default=0, help="number of the first run: continue an earlier call (0)")
    strikes.add_argument("--named", action="store_true", help="one strike at each named moment instead")
    for command in (annotations, losses, strikes):
        command.add_argument("--seed", type=int, default=0, help="of the random numbers (0)")
    chosen = parser.parse_args(words)
    start = time.monotonic()
    # Each command imports its own module only: torch, hypothesis and Lightning take seconds.
    if chosen.command == "annotations":
        from tests.soak.annotations import check_annotations

        results = check_annotations(chosen.count, chosen.seed)
    elif chosen.command == "losses":
        from tests.soak.loss_comparisons import compare_losses

        results = compare_losses(chosen.seconds, chosen.threads, chosen.seed)
    elif chosen.named:
        from tests.soak.named_strikes import strike_all_moments

        results = strike_all_moments()
    else:
        from tests.soak.random_strikes import strike_runs

        results = strike_runs(chosen.count, chosen.seed, first=chosen.first)
    lines = [f"{count:>10,} {name}" for name, count in sorted(results.items())]
    total = f"{sum(results.values()):,} in {time.monotonic() - start:.0f} s, seed {chosen.seed}"
    sys.stdout.write("\n".join([*lines, total, ""]))


if __name__ == "__main__":
    main()
