"""The ``bucketrank`` command: a dict from names to functions.

What is heavy is imported by the command that needs it, so that asking for help does not wait for torch.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from bucketrank.arguments import Commands, SettingFlags, UsageError, call, listed, require
from bucketrank.data.problems import DataError


def bench_losses(
    *,
    quick: Annotated[bool, "a smaller grid and tighter limits: less than a minute on two cores"] = False,
    out: Annotated[Path, "directory for the JSON, the Markdown and the figure"] = Path("runs/bench-losses"),
    sizes: Annotated[str, "numbers of logits"] = "10K,100K,1M",
    percent: Annotated[str | None, "percentages of positives (0.1,1,2,5; --quick: 0.1,1,5)"] = None,
    repeats: Annotated[int | None, "rounds in which the contenders take turns (40; --quick: 20)"] = None,
    seed: Annotated[int, "of the synthetic logits"] = 0,
    device: Annotated[str, "a torch device, like cpu or cuda:0"] = "cpu",
    max_seconds_per_cell: Annotated[float | None, "skip what an estimate says takes longer (30; --quick: 1)"] = None,
    memory: Annotated[bool | None, "measure peak memory, in fresh processes (not by default with --quick)"] = None,
    large: Annotated[bool, "also run exact on 20 million logits: time, growth and memory"] = False,
) -> None:
    """Time, memory and operations of every ranking loss, by method and backend, against focal loss."""
    require("rich", "matplotlib")
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
        settings = LossBenchSettings(seed=seed, device=device, large=large, **chosen)
    except ValueError as error:
        raise UsageError(f"bench losses: {error}") from error
    present(settings, out, measure=measure_losses, show=show_loss_bench, write=write_loss_bench)


def bench_detectors(
    *,
    quick: Annotated[bool, "smaller images and fewer rounds: less than two minutes on two cores"] = False,
    out: Annotated[Path, "directory for the JSON, the Markdown and the figure"] = Path("runs/bench-detectors"),
    detectors: Annotated[str | None, "names with commas between (all)"] = None,
    backbone: Annotated[str, "a model of timm, swin_tiny or swin_large"] = "resnet18",
    image_size: Annotated[str | None, "height x width in pixels (256x320; --quick: 128x160)"] = None,
    batch: Annotated[int | None, "images (2; --quick: 1)"] = None,
    classes: Annotated[int, "kinds of objects"] = 20,
    objects: Annotated[int, "in each image"] = 8,
    channels: Annotated[int, "of the pyramid and the heads"] = 64,
    proposals: Annotated[int | None, "that reach the box heads of the R-CNNs, an image (1000; --quick: 600)"] = None,
    rounds: Annotated[int | None, "in which the contenders take turns (12; --quick: 4)"] = None,
    seed: Annotated[int, "of images, objects and weights"] = 0,
    device: Annotated[str, "a torch device, like cpu or cuda:0"] = "cpu",
    threads: Annotated[int | None, "of torch on the CPU (as many as it takes by itself)"] = None,
    max_seconds_per_step: Annotated[float | None, "skip what an estimate says takes longer (20; --quick: 5)"] = None,
) -> None:
    """Seconds per iteration of each detector with Rank & Sort loss by every method, against score-based losses."""
    given: dict[str, Any] = {name: value for name, value in locals().items() if value is not None}
    require("rich", "matplotlib", "timm", "torchvision", extra="detect")
    from bucketrank.bench.detectors.detector_report import show_detector_bench, write_detector_bench
    from bucketrank.bench.detectors.detector_results import QUICK, DetectorBenchSettings, parse_image_size
    from bucketrank.bench.detectors.detector_timing import measure_detectors
    from bucketrank.bench.session import present

    del given["quick"], given["out"]
    try:
        if detectors is not None:
            given["detectors"] = tuple(detectors.split(","))
        if image_size is not None:
            given["image_size"] = parse_image_size(image_size)
        settings = DetectorBenchSettings(**(QUICK if quick else {}) | given)
    except ValueError as error:
        raise UsageError(f"bench detectors: {error}") from error
    present(settings, out, measure=measure_detectors, show=show_detector_bench, write=write_detector_bench)


def check_data(
    folder: Annotated[Path, "of the data set: its own layout, COCO's, LVIS's or Roboflow's"],
    *,
    layout: Annotated[str | None, "own, coco, lvis or roboflow (the first that fits)"] = None,
    masks: Annotated[bool, "ask for a mask of every object"] = False,
    decode: Annotated[bool, "decode every image; otherwise only its header is read"] = True,
    show: Annotated[int, "problems of each kind that are listed"] = 10,
    workers: Annotated[int | None, "threads that decode (one for each core)"] = None,
) -> int:
    """Read a whole data set; list what is wrong, where, and what to do (exit status 1 if training would refuse it)."""
    require("rich", "PIL", "faster_coco_eval", extra="detect")
    from bucketrank.data.summary import check_folder

    return check_folder(folder, layout=layout, masks=masks, decode=decode, show=show, workers=workers)


Source = Annotated[Path, "folder to convert"]
Destination = Annotated[Path, "new folder, in COCO's format"]
Copy = Annotated[bool, "copy the images instead of linking to them"]


def convert_cityscapes(source: Source, destination: Destination, *, copy: Copy = False) -> None:
    """Cityscapes (gtFine and leftImg8bit) to COCO's format: eight classes, boxes and masks."""
    _convert("convert_cityscapes", source, destination, copy=copy)


def convert_voc(source: Source, destination: Destination, *, copy: Copy = False) -> None:
    """Pascal VOC (Annotations, JPEGImages, ImageSets) to COCO's format; what is difficult becomes a crowd."""
    _convert("convert_voc", source, destination, copy=copy)


def convert_yolo(source: Source, destination: Destination, *, copy: Copy = False) -> None:
    """YOLO (data.yaml, images, labels) to COCO's format: boxes and polygons."""
    _convert("convert_yolo", source, destination, copy=copy)


def _convert(name: str, source: Path, destination: Path, *, copy: bool) -> None:
    require("rich", "PIL", "faster_coco_eval", "yaml", extra="detect")
    from bucketrank.data import convert
    from bucketrank.data.summary import convert_folder

    convert_folder(getattr(convert, name), source, destination, copy=copy)


def demo(
    *,
    out: Annotated[Path, "folder for the picture, the weights and the numbers"] = Path("runs/demo"),
    steps: Annotated[int, "of each training"] = 500,
    seed: Annotated[int, "of weights, order and mirroring"] = 0,
) -> None:
    """Train a small detector with a ranking loss and with focal loss, side by side (minutes on two cores)."""
    require("rich", "matplotlib", "PIL", "torchvision", "timm", "safetensors", extra="detect")
    from bucketrank.demo.contest import Settings
    from bucketrank.demo.run import run

    try:
        settings = Settings(steps=steps, seed=seed)
    except ValueError as error:
        raise UsageError(f"demo: {error}") from error
    run(settings, out)


Weights = Annotated[Path, "weights.safetensors of a run"]


def predict(
    weights: Weights,
    images: Annotated[list[Path], "pictures, or folders to be read with all below them"],
    *,
    out: Annotated[Path, "folder for the drawn pictures and predictions.json"] = Path("predictions"),
    threshold: Annotated[
        float | None, "score from which on detections are shown (that stored with the weights)"
    ] = None,
    device: Annotated[str | None, "a torch device, like cpu or cuda:0 (cuda if there is one)"] = None,
    batch: Annotated[int, "pictures at once"] = 1,
) -> int:
    """Draw what a trained detector finds in pictures, and write it as JSON (exit status 1 if some cannot be read)."""
    require("rich", "PIL", "torchvision", "safetensors", "matplotlib", extra="detect")
    import torch

    from bucketrank.deploy.files import predict_files
    from bucketrank.training.weights import WeightsError

    if batch < 1:
        raise UsageError(f"predict: --batch: expected at least 1, got {batch}")
    try:
        torch.zeros(1, device=device)
    except (AssertionError, RuntimeError) as error:
        raise UsageError(f"predict: --device: {error}") from error
    try:
        return int(predict_files(weights, images, out, threshold=threshold, device=device, batch=batch) > 0)
    except WeightsError as error:
        raise DataError(str(error)) from error


def export(
    weights: Weights,
    *,
    out: Annotated[Path, "the file to write"] = Path("model.onnx"),
    size: Annotated[str | None, "HEIGHTxWIDTH of the images it will get (the picture's; a square of min_size)"] = None,
    image: Annotated[Path | None, "picture to compare on (drawn shapes)"] = None,
) -> None:
    """Write a trained detector as ONNX, if onnxruntime then detects the same as torch."""
    require("onnx", "onnxruntime", extra="export")
    from bucketrank.deploy.onnx import ExportError, export_weights
    from bucketrank.training.weights import WeightsError

    try:
        chosen = None if size is None else tuple(int(side) for side in size.lower().split("x"))
    except ValueError:
        chosen = ()
    if chosen is not None and (len(chosen) != 2 or min(chosen) < 1):
        raise UsageError(f"export: --size: expected HEIGHTxWIDTH like 480x640, got {size!r}")
    try:
        agreement = export_weights(weights, out, size=chosen, image=image)
    except (ExportError, WeightsError) as error:
        raise DataError(str(error)) from error
    print(f"{agreement}\nwrote {out}")


def train(
    recipe: Annotated[str | None, "name or file of a recipe (see bucketrank recipes)"] = None,
    *,
    data: Annotated[Path | None, "folder of the data set"] = None,
    out: Annotated[Path | None, "folder for everything the run writes (runs/RECIPE)"] = None,
    resume: Annotated[bool, "go on with the run in --out, or start it if there is none"] = False,
    settings: Annotated[SettingFlags, "of the recipe"],
) -> int:
    """Train a detector by a recipe on a data set; any setting is a flag, like --loss.delta 0.25."""
    require("rich", "PIL", "faster_coco_eval", "yaml", "lightning", "timm", "matplotlib", extra="detect")
    from bucketrank.training.recipe import RecipeError, load

    if recipe is None and (out is None or not resume):
        raise UsageError("train: expected a recipe (see bucketrank recipes), or --resume and the --out of a run")
    if data is None and not resume:
        raise UsageError("train: expected --data, the folder of the data set")
    out = out or Path("runs") / Path(str(recipe)).stem
    if recipe is None and settings and (out / "recipe.yaml").is_file():  # a change to what the run began with
        recipe = str(out / "recipe.yaml")
    try:
        chosen = None if recipe is None else load(recipe, settings)
    except RecipeError as error:
        raise UsageError(f"train: {error}") from error
    from bucketrank.training.command import run

    return run(chosen, data, out, resume=resume)


def evaluate(
    weights: Weights,
    data: Annotated[Path, "folder of the data set"],
    *,
    split: Annotated[str, "val or train"] = "val",
    layout: Annotated[str | None, "own, coco, lvis or roboflow (the first that fits)"] = None,
    batch: Annotated[int, "images at once"] = 1,
    workers: Annotated[int, "processes that read images"] = 0,
    device: Annotated[str, "a torch device, like cpu or cuda:0; auto is cuda if there is one"] = "auto",
    most: Annotated[int | None, "evaluate on the first so many images only"] = None,
    detections: Annotated[Path | None, "file for what is found, in COCO's result format"] = None,
) -> None:
    """AP of a trained detector on a data set, as COCO (or LVIS) measures it."""
    require("rich", "PIL", "faster_coco_eval", "yaml", "timm", extra="detect")
    from rich.console import Console

    from bucketrank.training.evaluate import evaluate as measured
    from bucketrank.training.show import show_evaluation
    from bucketrank.training.weights import WeightsError

    options: dict[str, Any] = {"split": split, "layout": layout, "batch_size": batch, "workers": workers}
    try:
        found = measured(weights, data, **options, device=device, most=most, detections=detections)
    except WeightsError as error:
        raise DataError(str(error)) from error
    show_evaluation(Console(), found)


def recipes(
    recipe: Annotated[str | None, "show this one, with all its settings"] = None,
    *,
    markdown: Annotated[bool, "the list as a table in Markdown"] = False,
    settings: Annotated[SettingFlags, "of the recipe"],
) -> None:
    """List the recipes of the package with the paper's AP, or show one with all settings."""
    require("yaml", extra="detect")
    from bucketrank.training import show
    from bucketrank.training.recipe import RecipeError

    try:
        if recipe is not None:
            print(show.show_recipe(recipe, settings), end="")
        elif markdown:
            print(show.markdown(), end="")
        else:
            show.list_recipes()
    except RecipeError as error:
        raise UsageError(f"recipes: {error}") from error


def report(
    runs: Annotated[list[Path], "folders of runs, as train writes them"],
    *,
    out: Annotated[Path, "the page to write"] = Path("report.html"),
    data: Annotated[Path | None, "folder of the data set (that each run was trained on)"] = None,
    images: Annotated[int, "how many of the best and of the worst images are shown"] = 6,
    most: Annotated[int | None, "measure on the first so many images only"] = None,
    device: Annotated[str, "a torch device, like cpu or cuda:0; auto is cuda if there is one"] = "auto",
) -> None:
    """Write one page about runs: curves, AP, precision and recall, best and worst images, the ranked list."""
    require("rich", "PIL", "faster_coco_eval", "yaml", "timm", "matplotlib", extra="detect")
    import torch

    from bucketrank.report.write import write_report

    try:
        torch.zeros(1, device=None if device == "auto" else device)
    except (AssertionError, RuntimeError) as error:
        raise UsageError(f"report: --device: {error}") from error
    write_report(runs, out, data=data, images=images, most=most, device=device)


def study(
    name: Annotated[str, "detectors, segmentation, budget, detr, baselines or synthetic"],
    *,
    data: Annotated[Path | None, "folder of the data set (synthetic needs none)"] = None,
    out: Annotated[Path | None, "folder for the trainings, tables and figures (runs/study-NAME)"] = None,
    seeds: Annotated[int, "trainings of each row, with seeds 0, 1, ..."] = 3,
    budget: Annotated[str, "small: laptop recipes; paper: the paper's recipes, for its hardware"] = "small",
    only: Annotated[str | None, "rows to train, with commas between, like atss-rs-*,atss-focal (all)"] = None,
    rates: Annotated[str | None, "learning rates that are tried, as factors of the recipe's (1,2,4; paper: 1)"] = None,
    rounds: Annotated[int, "steps that are timed, the losses of a detector in turn"] = 12,
    dry_run: Annotated[bool, "print the trainings' commands instead of running them"] = False,
    settings: Annotated[SettingFlags, "of every training"],
) -> int:
    """Train the grid behind a table of the paper, and write ours beside it; what is done is not done again."""
    require("rich", "PIL", "faster_coco_eval", "yaml", "lightning", "timm", "matplotlib", extra="detect")
    from bucketrank.study.grid import STUDIES, SYNTHETIC
    from bucketrank.training.recipe import RecipeError
    from bucketrank.training.settings import choose

    out = out or Path("runs") / f"study-{name}"
    try:
        choose("study", name, (*STUDIES, SYNTHETIC))
        choose("--budget", budget, ("small", "paper"))
        factors = listed("--rates", rates or ("1" if budget == "paper" else "1,2,4"), float)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if seeds < 1 or rounds < 2 or min(factors) <= 0:
        wanted = "--seeds of at least 1, --rounds of at least 2 and --rates above 0"
        raise UsageError(f"study: expected {wanted}, got {seeds}, {rounds} and {rates}")
    if name == SYNTHETIC:
        from bucketrank.study.synthetic_study import run_synthetic_study

        given = {"data": data, "seeds": seeds, "budget": budget, "only": only, "rates": rates, "rounds": rounds}
        given |= {"dry_run": dry_run}
        known = inspect.signature(study).parameters
        unused = ["--" + flag.replace("_", "-") for flag in given if given[flag] != known[flag].default]
        if unused := unused + ["settings"] * bool(list(settings)):
            raise UsageError(f"study: synthetic trains nothing and takes --out alone; remove {', '.join(unused)}")
        run_synthetic_study(out)
        return 0
    if data is None:
        raise UsageError("study: expected --data, the folder of the data set")
    from bucketrank.study.study_command import plan_study, run_study, training_commands
    from bucketrank.study.study_run import StudyError

    chosen: dict[str, Any] = {
        "seeds": seeds,
        "paper": budget == "paper",
        "factors": factors,
        "only": only,
        "flags": tuple(settings),
    }
    try:
        plan = plan_study(name, data=data, out=out, **chosen)
        if dry_run:
            print("\n".join(training_commands(plan)))
            return 0
        return run_study(plan, rounds=rounds)
    except RecipeError as error:
        raise UsageError(f"study: {error}") from error
    except StudyError as error:
        raise DataError(f"study: {error}") from error


COMMANDS: Commands = {
    "bench": {
        "losses": bench_losses,
        "detectors": bench_detectors,
    },
    "check-data": check_data,
    "convert": {
        "cityscapes": convert_cityscapes,
        "voc": convert_voc,
        "yolo": convert_yolo,
    },
    "demo": demo,
    "eval": evaluate,
    "export": export,
    "predict": predict,
    "recipes": recipes,
    "report": report,
    "study": study,
    "train": train,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return call(COMMANDS, words)
    except UsageError as error:
        sys.stderr.write(f"bucketrank: {error}\n")
        return 2
    except (DataError, OSError) as error:  # the system's own words name the file, too
        sys.stderr.write(f"bucketrank: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("bucketrank: interrupted\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
