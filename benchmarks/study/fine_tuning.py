"""The study ``fine-tuning``: a pretrained torchvision RetinaNet, fine-tuned with its own loss and with RS.

The detector is pretrained with its own loss on one data set. Trials on held-out training images choose each loss's
learning rate on each further data set.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor, nn
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.retinanet import RetinaNetClassificationHead
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelP6P7

from benchmarks.documents import markdown_table
from benchmarks.study.data import read_splits
from benchmarks.study.losses import difference_cells
from benchmarks.study.plan import HOLDOUT
from benchmarks.study.tables import DASH, SeedMean, with_deviation
from bucketrank.data import CocoDataset, eval_transform, train_transform
from bucketrank.data.annotations import Split
from bucketrank.evaluation import BootstrapAP, Evaluator, ImageAP, paired_difference
from bucketrank.integrations.torchvision import use_ranking_loss
from bucketrank.provenance import describe, format_machine
from bucketrank.weights.atomic import write_text

CHANNELS = 64
BATCH = 4
CLIP = 5.0  # gradient norm
WEIGHT_DECAY = 1e-4
PRETRAINING_RATE = 1e-3
LOSSES = {"own": "own (focal and L1)", "rs": "RS"}
COLUMNS = ("data", "loss", "lr", "AP", "RS minus own")


@dataclass(frozen=True)
class FineTuningSettings:
    """What is compared, and for how long."""

    pretraining: Path
    data: tuple[Path, ...]
    backbone: Path | None = None  # ImageNet weights
    name: str = "tf_efficientnet_lite0"  # timm model
    rates: tuple[float, ...] = (2.5e-4, 5e-4, 1e-3)
    seeds: int = 3
    pretraining_steps: int = 1000
    steps: int = 300
    size: int = 256


class Backbone(nn.Module):
    """A timm model with a feature pyramid; its batch norms keep their statistics."""

    def __init__(self, name: str, weights: Path | None) -> None:
        super().__init__()
        self.body = timm.create_model(name, features_only=True, pretrained=False, out_indices=(2, 3, 4))
        if weights is not None:
            self.body.load_state_dict(load_file(weights), strict=False)
        levels: Any = self.body.feature_info
        extra = LastLevelP6P7(CHANNELS, CHANNELS)
        self.fpn = FeaturePyramidNetwork(levels.channels(), CHANNELS, extra_blocks=extra)
        self.out_channels = CHANNELS

    def train(self, mode: bool = True) -> Backbone:  # noqa: FBT001, FBT002 (the signature of nn.Module)
        super().train(mode)
        for module in self.body.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        levels: dict[str, Tensor] = self.fpn({str(level): each for level, each in enumerate(self.body(images))})
        return levels


def build_retinanet(classes: int, settings: FineTuningSettings) -> RetinaNet:
    """Build a small RetinaNet that keeps detections of every score."""
    sizes = tuple((side, int(side * 2**0.5)) for side in (16, 32, 64, 128, 256))
    anchors = AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * 5)
    backbone = Backbone(settings.name, settings.backbone)
    size = settings.size
    return RetinaNet(backbone, classes, min_size=size, max_size=size, anchor_generator=anchors, score_thresh=0.0)


def start_model(pretrained: RetinaNet, classes: int, loss: str, seed: int) -> RetinaNet:
    """Copy the pretrained detector, with new class layers and the loss to train with."""
    torch.manual_seed(seed)
    model = copy.deepcopy(pretrained)
    anchors = model.head.classification_head.num_anchors
    model.head.classification_head = RetinaNetClassificationHead(CHANNELS, anchors, classes)
    if loss == "rs":
        use_ranking_loss(model)
    return model


def train(model: RetinaNet, split: Split, *, steps: int, lr: float, seed: int) -> None:
    """Train with AdamW and a one-cycle schedule, as torchvision users do."""
    torch.manual_seed(seed)
    data = CocoDataset(split, transform=train_transform())
    optimiser = torch.optim.AdamW(model.parameters(), lr, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, lr, total_steps=steps)
    for _ in range(steps):
        images, targets = zip(*(data[index] for index in torch.randint(len(data), (BATCH,)).tolist()), strict=True)
        # Labels count from 1 in the data, and from 0 in a RetinaNet without an unused class.
        losses = model.train()(images, [target | {"labels": target["labels"] - 1} for target in targets])
        optimiser.zero_grad()
        sum(losses.values()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimiser.step()
        schedule.step()


@torch.inference_mode()
def evaluate(model: RetinaNet, split: Split) -> BootstrapAP:
    """Compute the AP on all images of a split, with bootstrap draws."""
    images = CocoDataset(split, transform=eval_transform())
    evaluator = Evaluator(split)
    for index in range(len(images)):
        image, target = images[index]
        (detections,) = model.eval()([image])
        evaluator.add([int(target["image_id"])], [detections | {"labels": detections["labels"] + 1}])
    return BootstrapAP.of(ImageAP.of(evaluator))


def run_fine_tuning(settings: FineTuningSettings, out: Path, *, console: Console) -> Path:
    """Run the whole study, and write ``fine-tuning.json`` and ``fine-tuning.md`` to ``out`` after each data set."""

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    path = out / "fine-tuning.md"
    first, val = read_splits(settings.pretraining)
    torch.manual_seed(0)
    pretrained = build_retinanet(num_classes(first), settings)
    train(pretrained, first, steps=settings.pretraining_steps, lr=PRETRAINING_RATE, seed=0)
    say(f"pretrained on {settings.pretraining.name}: AP {evaluate(pretrained, val).ap:.1f}")
    results: list[dict[str, Any]] = []
    for folder in settings.data:
        results.append(compare_losses(folder, pretrained, settings, say))
        write_results(results, settings, path)
    say(f"wrote {path} and {path.with_suffix('.json').name}")
    return path


def num_classes(split: Split) -> int:
    """Return the number of classes of a data set."""
    return len(CocoDataset(split).class_names)


def compare_losses(
    folder: Path, pretrained: RetinaNet, settings: FineTuningSettings, say: Callable[[str], None]
) -> dict[str, Any]:
    """Choose each loss's rate on held-out training images, and fine-tune with every seed."""

    def fine_tune(loss: str, rate: float, seed: int, holdout: float | None = None) -> BootstrapAP:
        images, val = read_splits(folder, holdout=holdout)
        model = start_model(pretrained, num_classes(images), loss, seed)
        train(model, images, steps=settings.steps, lr=rate, seed=seed)
        return evaluate(model, val)

    result: dict[str, Any] = {"data": folder.name}
    for loss in LOSSES:
        trials = {rate: fine_tune(loss, rate, 0, HOLDOUT).ap for rate in settings.rates}
        rate = max(trials, key=trials.__getitem__)
        runs = [fine_tune(loss, rate, seed) for seed in range(settings.seeds)]
        result[loss] = {"trials": trials, "lr": rate, "runs": runs}
        tried = ", ".join(f"{ap:.1f} at {each:g}" for each, ap in trials.items())
        say(f"{folder.name}, {loss}: AP {', '.join(f'{run.ap:.1f}' for run in runs)} at {rate:g} (trials: {tried})")
    return result


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return one row per data set and loss."""
    rows = []
    for result in results:
        difference = paired_difference(result["rs"]["runs"], result["own"]["runs"])
        for loss, title in LOSSES.items():
            mean = SeedMean.of([run.ap for run in result[loss]["runs"]])
            compared = DASH if loss == "own" else " ".join(difference_cells(difference))
            name = result["data"] if loss == "own" else ""
            rows.append([name, title, f"{result[loss]['lr']:g}", with_deviation(mean.mean, mean.deviation), compared])
    return markdown_table(COLUMNS, rows)


def write_results(results: Sequence[dict[str, Any]], settings: FineTuningSettings, path: Path) -> None:
    """Write the table as Markdown, and every number as JSON beside it."""
    machine = describe()
    chosen = {
        **asdict(settings),
        "pretraining": settings.pretraining.name,
        "data": [each.name for each in settings.data],
        "backbone": settings.backbone and settings.backbone.name,
    }
    plain = [
        {"data": each["data"]}
        | {loss: each[loss] | {"runs": [round(run.ap, 3) for run in each[loss]["runs"]]} for loss in LOSSES}
        for each in results
    ]
    document = {"settings": chosen, "results": plain, "machine": machine, "table": table(results)}
    write_text(path, f"# Own loss against RS\n\n{table(results)}\n\n{format_machine(machine)}\n")
    write_text(path.with_suffix(".json"), json.dumps(document, indent=1) + "\n")
