"""``bucketrank bench losses``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from bucketrank.cli.arguments import listed, require
from bucketrank.errors import UsageError


def bench_losses(
    *,
    quick: Annotated[bool, "use a smaller grid and tighter limits: less than a minute on two cores"] = False,
    out: Annotated[Path, "folder for the JSON, the Markdown and the figure"] = Path("runs/bench-losses"),
    sizes: Annotated[str, "numbers of logits"] = "10K,100K,1M",
    percent: Annotated[str | None, "percentages of positives (0.1,1,2,5; --quick: 0.1,1,5)"] = None,
    repeats: Annotated[int | None, "rounds in which the contenders take turns (40; --quick: 20)"] = None,
    seed: Annotated[int, "seed of the synthetic logits"] = 0,
    device: Annotated[str, "a torch device, like cpu or cuda:0"] = "cpu",
    max_seconds_per_cell: Annotated[float | None, "skip cells estimated to take longer (30; --quick: 1)"] = None,
    memory: Annotated[bool | None, "measure peak memory (default: not with --quick)"] = None,
    compiled: Annotated[bool | None, "also measure with torch.compile (default: not on the CPU)"] = None,
    large: Annotated[bool, "also run exact on 20 million logits: time, growth and memory"] = False,
) -> None:
    """Measure time, memory and launches of every ranking loss, by method and backend, against focal loss."""
    require("rich", "matplotlib")
    from bucketrank.bench.flags import device_type
    from bucketrank.bench.losses.loss_report import show_loss_bench, write_loss_bench
    from bucketrank.bench.losses.loss_results import QUICK, LossBenchSettings
    from bucketrank.bench.losses.loss_timing import measure_losses
    from bucketrank.bench.session import present
    from bucketrank.bench.units import parse_size

    given: dict[str, Any] = {"repeats": repeats, "max_seconds_per_cell": max_seconds_per_cell, "memory": memory}
    try:
        given["sizes"] = listed("--sizes", sizes, parse_size)
        given["percent"] = None if percent is None else listed("--percent", percent, float)
        chosen = (QUICK if quick else {}) | {name: value for name, value in given.items() if value is not None}
        if compiled is None:
            compiled = device_type(device) != "cpu"
        settings = LossBenchSettings(seed=seed, device=device, compiled=compiled, large=large, **chosen)
    except ValueError as error:
        raise UsageError(f"bench losses: {error}") from error
    present(settings, out, measure=measure_losses, show=show_loss_bench, write=write_loss_bench)
