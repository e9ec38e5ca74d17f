"""The whole demo."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console

from bucketrank.demo.contest import LOSSES, Contender, Material, Settings, prepare, recipe_of
from bucketrank.demo.detections import look
from bucketrank.demo.figure import draw_demo
from bucketrank.demo.terminal import Board, found_table, side_by_side, summary
from bucketrank.drawing import grid
from bucketrank.provenance.machine import describe
from bucketrank.training.progress import in_words

PICTURES = 4


def run(settings: Settings, out: Path, console: Console | None = None) -> list[Contender]:
    """Train, evaluate, show and write everything to ``out``; returns both contenders as they ended."""
    console = console or Console()
    began = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    with console.status(f"drawing {settings.pictures + settings.new_pictures} pictures"):
        material = prepare(out / "shapes", settings)
    recipes = [recipe_of(loss, settings) for loss in LOSSES]
    contenders = [Contender(loss, recipe, settings, material) for loss, recipe in zip(LOSSES, recipes, strict=True)]
    console.print(explained(contenders, settings), highlight=False)
    with console.status("compiling the loss"):
        for contender in contenders:
            contender.warm_up()
    with Board(contenders, settings, console) as board:
        for first in range(0, settings.steps, settings.every):
            for contender in contenders:
                contender.train(min(settings.every, settings.steps - first), partial(board.told, contender))
                board.evaluated(contender)

    seen = look(contenders, material, PICTURES)
    console.print(summary(contenders))
    console.print(found_table(seen, contenders))
    titles = ["truth", *(contender.loss.label for contender in contenders)]
    if console.is_terminal and console.color_system in ("truecolor", "256"):
        console.print(side_by_side(seen[0], titles, width=console.width))
    written = write(contenders, settings, material, out)
    page = grid([picture for each in seen for picture in each.pictures], titles, columns=len(titles))
    page.save(out / "detections.png")
    title = "One small detector, trained twice: only the loss differs"
    note = f"{told(settings)} Dashed: true boxes. {caution(settings)}"
    draw_demo(contenders, seen, out / "demo.png", title=title, note=note)
    for path in (out / "demo.png", out / "detections.png", *written):
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    console.print(f"{caution(settings)} All in {in_words(time.monotonic() - began)}.", highlight=False)
    return contenders


def write(contenders: Sequence[Contender], settings: Settings, material: Material, out: Path) -> list[Path]:
    """The weights of both, and the numbers as JSON."""
    paths = []
    for contender in contenders:
        paths.append(out / f"{contender.loss.name}.safetensors")
        contender.save(paths[-1])
    document = {
        "settings": asdict(settings),
        "classes": material.classes,
        "contenders": {contender.loss.name: contender.to_dict() for contender in contenders},
        "machine": describe(),
    }
    paths.append(out / "demo.json")
    paths[-1].write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return paths


def explained(contenders: Sequence[Contender], settings: Settings) -> str:
    """What is compared."""
    names = " and ".join(contender.loss.label for contender in contenders)
    return f"{told(settings)}\nTrained twice: {names}. Boxes by GIoU in both; same seed, data, steps and rate.\n"


def told(settings: Settings) -> str:
    """The detector and the training, in words."""
    return (
        f"RetinaNet with {settings.backbone} from random weights, {settings.pictures} drawn pictures of "
        f"{settings.side} pixels, {settings.steps} steps of {settings.batch}, evaluated on {settings.new_pictures} new "
        f"pictures, seed {settings.seed}."
    )


def caution(settings: Settings) -> str:
    """How much the numbers mean."""
    return (
        f"One seed ({settings.seed}) and one small task; backbone, steps and learning rate were chosen on runs of "
        "the ranking loss: an indication, not a result."
    )
