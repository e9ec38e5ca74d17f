"""``bucketrank demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from bucketrank.arguments import UsageError, require


def demo(
    *,
    out: Annotated[Path, "folder for the images, the weights and the numbers"] = Path("runs/demo"),
    steps: Annotated[int, "training steps with each loss"] = 500,
    seed: Annotated[int, "seed of weights, order and flips"] = 0,
) -> None:
    """Train a small detector with a ranking loss and with focal loss, side by side (minutes on two cores)."""
    require("rich", "matplotlib", "PIL", "torchvision", "timm", "safetensors", extra="detect")
    from bucketrank.demo.runs import DemoSettings
    from bucketrank.demo.show import run_demo

    try:
        settings = DemoSettings(steps=steps, seed=seed)
    except ValueError as error:
        raise UsageError(f"demo: {error}") from error
    run_demo(settings, out)
