"""``python -m benchmarks``: loss and detector benchmarks, and studies that train detectors."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from bucketrank.cli.arguments import Changes, Commands, require, run
from bucketrank.errors import DataError, UsageError

if TYPE_CHECKING:
    from benchmarks.study.plan import LossPlan, PaperPlan, StudyPlan
    from benchmarks.study.runs import Choice, RunRecord


def losses(
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
    from benchmarks.documents import parse_size
    from benchmarks.losses.measure import measure_losses
    from benchmarks.losses.report import show_loss_bench, write_loss_bench
    from benchmarks.losses.results import QUICK, LossBenchSettings
    from benchmarks.session import device_type, present

    given: dict[str, Any] = {"repeats": repeats, "max_seconds_per_cell": max_seconds_per_cell, "memory": memory}
    try:
        given["sizes"] = _listed("--sizes", sizes, parse_size)
        given["percent"] = None if percent is None else _listed("--percent", percent, float)
        chosen = (QUICK if quick else {}) | {name: value for name, value in given.items() if value is not None}
        if compiled is None:
            compiled = device_type(device) != "cpu"
        settings = LossBenchSettings(seed=seed, device=device, compiled=compiled, large=large, **chosen)
    except ValueError as error:
        raise UsageError(str(error)) from error
    present(settings, out, measure=measure_losses, show=show_loss_bench, write=write_loss_bench)


def detectors(
    *,
    quick: Annotated[bool, "use smaller images and fewer rounds: less than two minutes on two cores"] = False,
    out: Annotated[Path, "folder for the JSON, the Markdown and the figure"] = Path("runs/bench-detectors"),
    detectors: Annotated[str | None, "names separated by commas (default: all)"] = None,
    backbone: Annotated[str, "a timm model, swin_tiny or swin_large"] = "resnet18",
    image_size: Annotated[str | None, "HEIGHTxWIDTH in pixels (256x320; --quick: 128x160)"] = None,
    batch: Annotated[int | None, "images per step (2; --quick: 1)"] = None,
    classes: Annotated[int, "number of classes"] = 20,
    objects: Annotated[int, "objects per image"] = 8,
    channels: Annotated[int, "channels of the pyramid and the heads"] = 64,
    proposals: Annotated[int | None, "proposals per image that reach the R-CNN box heads (1000; --quick: 600)"] = None,
    rounds: Annotated[int | None, "rounds in which the contenders take turns (12; --quick: 4)"] = None,
    seed: Annotated[int, "seed of images, objects and weights"] = 0,
    device: Annotated[str, "a torch device, like cpu or cuda:0"] = "cpu",
    threads: Annotated[int | None, "CPU threads for torch (default: torch's choice)"] = None,
    max_seconds_per_step: Annotated[float | None, "skip steps estimated to take longer (20; --quick: 5)"] = None,
) -> None:
    """Measure seconds per iteration of each detector with RS loss, by method, against score-based losses."""
    given: dict[str, Any] = {name: value for name, value in locals().items() if value is not None}
    require("detect")
    from benchmarks.detectors.measure import measure_detectors
    from benchmarks.detectors.report import show_detector_bench, write_detector_bench
    from benchmarks.detectors.results import QUICK, DetectorBenchSettings, parse_image_size
    from benchmarks.session import present

    del given["quick"], given["out"]
    try:
        if detectors is not None:
            given["detectors"] = tuple(detectors.split(","))
        if image_size is not None:
            given["image_size"] = parse_image_size(image_size)
        settings = DetectorBenchSettings(**(QUICK if quick else {}) | given)
    except ValueError as error:
        raise UsageError(str(error)) from error
    present(settings, out, measure=measure_detectors, show=show_detector_bench, write=write_detector_bench)


def results(
    file: Annotated[Path, "losses.json or detectors.json, as a benchmark writes them"],
    *,
    out: Annotated[Path | None, "folder for the Markdown and the figure (default: none are written)"] = None,
) -> None:
    """Show the results in a benchmark's JSON file, from this or another machine."""
    from benchmarks.documents import BenchFileError, read_document, restore_bench
    from benchmarks.session import wide_console

    console = wide_console()
    paths: list[Path] = []
    try:
        document = read_document(file)
        if document["benchmark"] == "losses":
            from benchmarks.losses.report import show_loss_bench, write_loss_bench
            from benchmarks.losses.results import LossBench

            losses = restore_bench(LossBench, document)
            show_loss_bench(losses, console)
            paths = [] if out is None else write_loss_bench(losses, out)
        else:
            require("detect")
            from benchmarks.detectors.report import show_detector_bench, write_detector_bench
            from benchmarks.detectors.results import DetectorBench

            detectors = restore_bench(DetectorBench, document)
            show_detector_bench(detectors, console)
            paths = [] if out is None else write_detector_bench(detectors, out)
    except BenchFileError as error:
        raise UsageError(str(error)) from error
    for path in paths:
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)


def study(
    name: Annotated[str, "losses, regret, detectors, segmentation, budget, detr, baselines or synthetic"],
    *,
    data: Annotated[str | None, "folder of the data set; losses takes several, separated by commas"] = None,
    out: Annotated[Path | None, "folder for the runs, tables and figures (default: runs/study-NAME)"] = None,
    seeds: Annotated[int | None, "runs per row, with seeds 0, 1, ... (3; --budget paper: 1)"] = None,
    budget: Annotated[
        str, "small (laptop recipes) or paper (the paper's recipes, for its hardware; not for losses)"
    ] = "small",
    only: Annotated[str | None, "rows to train, separated by commas, like atss-rs-*,atss-focal (default: all)"] = None,
    rates: Annotated[
        str | None, "learning rates to try, as factors of the recipe's (1,2,4; losses: 0.25,0.5,1,2,4,8; paper: 1)"
    ] = None,
    recipe: Annotated[
        str,
        "losses: atss-laptop, retinanet-laptop, paa-laptop, faster-rcnn-laptop, cascade-rcnn-laptop, mask-rcnn-laptop "
        "or brs-detr-laptop",
    ] = "atss-laptop",
    head: Annotated[
        str, "losses: same (only the loss differs; atss-laptop and retinanet-laptop) or published"
    ] = "same",
    steps: Annotated[int, "losses: steps of a run"] = 1000,
    trial_steps: Annotated[int | None, "losses: steps of a trial (default: an eighth of --steps)"] = None,
    merge: Annotated[
        str | None,
        "JSON files of this study from other machines, separated by commas; their runs count. regret: the losses.json "
        "files to summarise, later runs replace earlier ones",
    ] = None,
    rates_of: Annotated[
        str | None,
        "losses: train at the rates that another study's trials chose on a data set, as FILE:SET, separated by commas",
    ] = None,
    rounds: Annotated[int, "timed steps, in which the losses of a detector take turns"] = 12,
    dry_run: Annotated[bool, "print the commands of the runs instead of running them"] = False,
    settings: Annotated[Changes, "settings of every run"],
) -> int:
    """Reproduce a table of the paper, with our numbers next to the paper's. Finished runs are skipped."""
    require("detect")
    from benchmarks.study.grid import LOSSES, REGRET, STUDIES, SYNTHETIC
    from bucketrank.errors import require_choice

    try:
        require_choice("study", name, (LOSSES, REGRET, *STUDIES, SYNTHETIC))
        require_choice("--budget", budget, ("small", "paper"))
        usual = "0.25,0.5,1,2,4,8" if name == LOSSES else "1" if budget == "paper" else "1,2,4"
        factors = _listed("--rates", rates or usual, float)
    except ValueError as error:
        raise UsageError(str(error)) from error
    chosen_seeds = (1 if budget == "paper" else 3) if seeds is None else seeds
    if chosen_seeds < 1 or rounds < 2 or min(factors) <= 0:
        expected = "--seeds of at least 1, --rounds of at least 2 and --rates above 0"
        raise UsageError(f"expected {expected}, got {chosen_seeds}, {rounds} and {rates}")
    given = {"data": data, "seeds": seeds, "budget": budget, "only": only, "rates": rates, "rounds": rounds}
    given |= {"dry_run": dry_run, "merge": merge}
    given |= {"recipe": recipe, "head": head, "steps": steps, "trial_steps": trial_steps, "rates_of": rates_of}
    if name in (SYNTHETIC, REGRET):
        taken, words = (("merge",), "--merge and --out") if name == REGRET else ((), "--out alone")
        unused = _changed(given, tuple(each for each in given if each not in taken)) + ["settings"] * bool(settings)
        if unused:
            raise UsageError(f"{name} trains nothing and takes {words}; remove {', '.join(unused)}")
        out = out or Path("runs") / f"study-{name}"
        return _regret(merge, out) if name == REGRET else _synthetic(out)
    if data is None:
        raise UsageError("expected --data, the folder of the data set")
    if unused := _changed(
        given, ("budget",) if name == LOSSES else ("recipe", "head", "steps", "trial_steps", "rates_of")
    ):
        raise UsageError(f"{name} does not use {', '.join(unused)}; remove it")
    if rates and rates_of:
        raise UsageError("expected --rates to try or --rates-of another study, got both; remove one")
    _require_free_settings(name, settings, SET_BY_LOSSES if name == LOSSES else SET_BY_STUDIES)
    with _named_errors():
        shared: dict[str, Any] = {
            "seeds": chosen_seeds,
            "factors": factors,
            "flags": _words(settings),
        }
        shared["records"] = _records(merge)
        plan: StudyPlan
        if name == LOSSES:
            shared |= {"steps": steps, "trial_steps": steps // 8 if trial_steps is None else trial_steps}
            shared["choices"] = _choices(rates_of)
            out = out or Path("runs") / f"study-losses-{recipe}-{head}"
            plan = _loss_plan(tuple(map(Path, data.split(","))), recipe, head, only, out=out, **shared)
        else:
            out = out or Path("runs") / f"study-{name}"
            plan = _paper_plan(name, Path(data), only, paper=budget == "paper", out=out, **shared)
        if dry_run:
            sys.stdout.write("".join(f"{command}\n" for command in plan.commands()))
            return 0
        from benchmarks.study.command import run_study

        return run_study(plan, rounds=rounds)


def _synthetic(out: Path) -> int:
    from benchmarks.study.synthetic import run_synthetic_study

    run_synthetic_study(out)
    return 0


def _regret(merge: str | None, out: Path) -> int:
    """Summarise the files after ``--merge``."""
    from benchmarks.study.regret import run_regret

    if merge is None:
        raise UsageError("regret: expected --merge, the losses.json files of study losses, separated by commas")
    with _named_errors():
        paths = run_regret([Path(file) for file in merge.split(",")], out)
    sys.stdout.write(paths[0].read_text(encoding="utf-8") + "".join(f"wrote {path}\n" for path in paths))
    return 0


def _records(merge: str | None) -> dict[str, RunRecord]:
    """Read the records in the files after ``--merge``, by run name."""
    from benchmarks.study.runs import read_records

    records: dict[str, RunRecord] = {}
    for file in merge.split(",") if merge else ():
        records |= read_records(Path(file))
    return records


def _choices(rates_of: str | None) -> dict[str, Choice]:
    """Read the settings in the files after ``--rates-of``, by loss; later files win."""
    from benchmarks.study.plan import read_choices

    choices: dict[str, Choice] = {}
    for word in rates_of.split(",") if rates_of else ():
        file, colon, name = word.rpartition(":")
        if not colon:
            raise UsageError(f"--rates-of: expected FILE:SET, like losses.json:bccd, got {word}")
        choices |= read_choices(Path(file), name)
    return choices


def _paper_plan(name: str, data: Path, only: str | None, *, paper: bool, out: Path, **shared: Any) -> PaperPlan:
    """Plan a paper table; UsageError if it has no rows to train."""
    from benchmarks.study.command import dataset_of
    from benchmarks.study.grid import STUDIES
    from benchmarks.study.plan import PaperPlan, choose_rows
    from benchmarks.study.runs import StudyError
    from bucketrank.errors import require_choice
    from bucketrank.settings.choices import LayoutName
    from bucketrank.settings.flags import parse_flags

    layout = parse_flags(shared["flags"]).get("data.layout")
    try:
        if layout is not None:
            require_choice("--data.layout", layout, ("auto", *get_args(LayoutName)))
        dataset = dataset_of(data, layout=None if layout == "auto" else layout) if paper else "COCO"
        rows = choose_rows(STUDIES[name], paper=paper, dataset=dataset, only=only)
    except DataError:
        raise
    except (StudyError, ValueError) as error:
        raise UsageError(str(error)) from error
    plan = PaperPlan(study=STUDIES[name], rows=rows, data=data, paper=paper, out=out, **shared)
    plan.require_init()
    return plan


def _loss_plan(data: tuple[Path, ...], recipe: str, head: str, only: str | None, **shared: Any) -> LossPlan:
    """Plan a loss comparison; UsageError for an invalid flag or data set."""
    from benchmarks.study.grid import COMPARED, LOSS_TITLES, Head
    from benchmarks.study.plan import LossPlan
    from bucketrank.errors import require_choice

    steps, trial_steps = shared["steps"], shared["trial_steps"]
    if not 1 <= trial_steps <= steps:
        expected = "--steps of at least 8 and --trial-steps from 1 to --steps"
        raise UsageError(f"expected {expected}, got {steps} and {trial_steps}")
    try:
        require_choice("--recipe", recipe, tuple(COMPARED))
        require_choice("--head", head, ("same", "published"))
        compared = COMPARED[recipe]
        chosen: Head = "same" if head == "same" else "published"
        if head == "same" and not compared.same_head:
            raise UsageError(f"--head: expected published for {recipe}, whose head depends on the loss, got same")
        losses = compared.default_losses(chosen) if only is None else tuple(only.split(","))
        for loss in losses:
            require_choice("--only", loss, tuple(LOSS_TITLES))
        if missing := [loss for loss in losses if shared["choices"] and loss not in shared["choices"]]:
            raise UsageError(f"--rates-of: expected a rate for {', '.join(missing)}, got none; name another file too")
        plan = LossPlan(data=data, detector=compared, losses=losses, head=chosen, **shared)
        plan.require_data()
    except ValueError as error:
        raise UsageError(str(error)) from error
    return plan


@contextmanager
def _named_errors() -> Iterator[None]:
    """Turn the errors of a running study into command errors that name the command."""
    from benchmarks.study.runs import StudyError
    from bucketrank.errors import RecipeError

    try:
        yield
    except RecipeError as error:
        raise UsageError(str(error)) from error
    except StudyError as error:
        raise DataError(f"study: {error}") from error


# Protocol settings, which a study sets for each of its runs.
SET_BY_STUDIES = ("data.holdout", "trainer.seed")
SET_BY_LOSSES = (
    *SET_BY_STUDIES,
    *("loss.name", "loss.box_balance", "schedule.max_steps", "schedule.epochs", "schedule.early_stop"),
    *("trainer.validate_every", "trainer.keep_detections"),
)


def _listed(flag: str, text: str, parse: Callable[[str], Any]) -> tuple[Any, ...]:
    """Parse the comma-separated values of a flag; ValueError names the flag."""
    try:
        return tuple(parse(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"{flag}: expected numbers separated by commas, got {text!r}") from error


def _words(changes: Changes) -> tuple[str, ...]:
    """Convert changes to flags and values."""
    return tuple(word for key, text in changes.items() for word in (f"--{key}", text))


def _require_free_settings(name: str, changes: Changes, taken: tuple[str, ...]) -> None:
    """Raise UsageError if a flag changes a setting that the study itself sets for each run."""
    if both := [key for key in changes if key in taken]:
        flag = "flags" if len(both) > 1 else "flag"
        raise UsageError(f"{name} sets {', '.join(f'--{key}' for key in both)} itself; remove the {flag}")


def _changed(values: dict[str, Any], names: tuple[str, ...]) -> list[str]:
    """Find the flags among ``names`` whose values are not the defaults."""
    known = inspect.signature(study).parameters
    return ["--" + name.replace("_", "-") for name in names if values[name] != known[name].default]


def empty_images(
    source: Annotated[Path, "folder of the data set"],
    destination: Annotated[Path, "new folder, in COCO format"],
    *,
    share: Annotated[float, "share of the training images without objects, like 0.9"],
    seed: Annotated[int, "seed of the crops"] = 0,
    copy: Annotated[bool, "copy the images instead of linking to them"] = False,
) -> None:
    """Add training images without objects, cropped from the others; train with --data.keep_empty true."""
    require("detect")
    from benchmarks.study.data import add_empty_images
    from bucketrank.data.summary import convert_folder

    convert_folder(partial(add_empty_images, share=share, seed=seed), source, destination, copy=copy)


def one_class(
    source: Annotated[Path, "folder of the data set"],
    destination: Annotated[Path, "new folder, in COCO format"],
    *,
    name: Annotated[str, "name of the class to keep"],
    copy: Annotated[bool, "copy the images instead of linking to them"] = False,
) -> None:
    """Keep the objects of one class; the others stay in the images as look-alikes."""
    require("detect")
    from benchmarks.study.data import keep_one_class
    from bucketrank.data.summary import convert_folder

    convert_folder(partial(keep_one_class, name=name), source, destination, copy=copy)


def fine_tuning(
    pretraining: Annotated[Path, "folder of the data set to pretrain on"],
    *,
    data: Annotated[str, "folders of the data sets to fine-tune on, separated by commas"],
    backbone: Annotated[Path | None, "safetensors file with ImageNet weights of tf_efficientnet_lite0"] = None,
    rates: Annotated[str, "learning rates to try"] = "2.5e-4,5e-4,1e-3",
    seeds: Annotated[int, "runs per loss, with seeds 0, 1, ..."] = 3,
    pretraining_steps: Annotated[int, "steps before fine-tuning, of 4 images"] = 1000,
    steps: Annotated[int, "steps of each run, of 4 images"] = 300,
    size: Annotated[int, "pixels of the sides of an image"] = 256,
    out: Annotated[Path, "folder for the JSON and the Markdown"] = Path("runs/fine-tuning"),
) -> None:
    """Fine-tune a pretrained torchvision RetinaNet with its own loss and with RS."""
    require("detect")
    from benchmarks.session import wide_console
    from benchmarks.study.fine_tuning import FineTuningSettings, run_fine_tuning

    try:
        chosen = _listed("--rates", rates, float)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if min(seeds, pretraining_steps, steps, size) < 1 or min(chosen) <= 0:
        expected = "--seeds, --pretraining-steps, --steps and --size of at least 1 and --rates above 0"
        raise UsageError(f"expected {expected}, got {seeds}, {pretraining_steps}, {steps}, {size} and {rates}")
    settings = FineTuningSettings(
        pretraining,
        tuple(map(Path, data.split(","))),
        backbone,
        rates=chosen,
        seeds=seeds,
        pretraining_steps=pretraining_steps,
        steps=steps,
        size=size,
    )
    run_fine_tuning(settings, out, console=wide_console())


COMMANDS: Commands = {
    "losses": losses,
    "detectors": detectors,
    "results": results,
    "study": study,
    "fine-tuning": fine_tuning,
    "data": {"empty": empty_images, "one-class": one_class},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark or a study; return its exit status like ``bucketrank``."""
    return run(COMMANDS, arguments, program="python -m benchmarks", extra="bench")


if __name__ == "__main__":
    sys.exit(main())
