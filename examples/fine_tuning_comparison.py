"""Pretrain a torchvision RetinaNet on one data set, fine-tune it on another with its own loss and with RS loss."""
# python examples/fine_tuning_comparison.py PRETRAINING_FOLDER FOLDER [BACKBONE.safetensors [own,rs]]  (COCO format)

import copy
import statistics
import sys

import timm
import torch
from safetensors.torch import load_file
from torch import nn
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.retinanet import RetinaNetClassificationHead
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelP6P7

from bucketrank.data import CocoDataset, eval_transform, find_splits, train_transform
from bucketrank.evaluation import Evaluator
from bucketrank.integrations.torchvision import use_ranking_loss


class Backbone(nn.Module):
    """EfficientNet-Lite with a feature pyramid; its batch norms keep their statistics."""

    def __init__(self, name, weights, channels=64):
        super().__init__()
        self.body = timm.create_model(name, features_only=True, pretrained=False, out_indices=(2, 3, 4))
        if weights:
            self.body.load_state_dict(load_file(weights), strict=False)
        pyramid = LastLevelP6P7(channels, channels)
        widths = self.body.feature_info.channels()  # type: ignore[operator, union-attr]
        self.fpn = FeaturePyramidNetwork(widths, channels, extra_blocks=pyramid)
        self.out_channels = channels

    def train(self, mode=True):  # noqa: FBT002 (the signature of nn.Module)
        super().train(mode)
        for module in self.body.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self

    def forward(self, images):
        return self.fpn({str(level): features for level, features in enumerate(self.body(images))})


def build(classes, size, name, weights):
    sizes = tuple((side, int(side * 2**0.5)) for side in (16, 32, 64, 128, 256))
    anchors = AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * 5)
    return RetinaNet(Backbone(name, weights), classes, size, size, anchor_generator=anchors, score_thresh=0.0)


def images_of(folder, part, transform=None):
    split = getattr(find_splits(folder), part)
    if split is None:
        raise SystemExit(f"{folder}: expected annotations for {part}, got none")
    return CocoDataset(split, keep_empty=part == "val", transform=transform)


def train(model, folder, steps, lr, seed, batch=4):
    torch.manual_seed(seed)
    data = images_of(folder, "train", train_transform())
    optimiser = torch.optim.AdamW(model.parameters(), lr, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, lr, total_steps=steps)
    for _ in range(steps):
        images, targets = zip(*(data[index] for index in torch.randint(len(data), (batch,)).tolist()), strict=True)
        # Labels count from 1 in the data, and from 0 in a RetinaNet without an unused class.
        losses = model.train()(images, [target | {"labels": target["labels"] - 1} for target in targets])
        loss = sum(losses.values())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimiser.step()
        schedule.step()


@torch.inference_mode()
def evaluate(model, folder):
    images = images_of(folder, "val", eval_transform())
    evaluator = Evaluator(images.split)
    for index in range(len(images)):
        image, target = images[index]
        (detections,) = model.eval()([image])
        evaluator.add([int(target["image_id"])], [detections | {"labels": detections["labels"] + 1}])
    return 100 * evaluator.result().metrics["AP"]


def main(first, second, weights=None, losses="own,rs", *, steps=150, size=256, name="tf_efficientnet_lite0", seeds=3):
    classes = [len(images_of(folder, "train").class_names) for folder in (first, second)]
    torch.manual_seed(0)
    pretrained = build(classes[0], size, name, weights)
    train(pretrained, first, steps, 1e-3, seed=0)
    print(f"pretrained: AP {evaluate(pretrained, first):.1f}", flush=True)
    for loss in losses.split(","):
        for rate in (5e-4, 1e-3):
            aps = []
            for seed in range(seeds):
                torch.manual_seed(seed)
                model = copy.deepcopy(pretrained)
                old = model.head.classification_head
                model.head.classification_head = RetinaNetClassificationHead(64, old.num_anchors, classes[1])
                if loss == "rs":
                    use_ranking_loss(model)
                train(model, second, steps, rate, seed=seed)
                aps.append(evaluate(model, second))
            mean, deviation = statistics.fmean(aps), statistics.stdev(aps) if seeds > 1 else 0.0
            print(f"{loss} at {rate:g}: AP {mean:.1f} +- {deviation:.1f} of", *(f"{ap:.1f}" for ap in aps), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
