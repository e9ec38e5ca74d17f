"""Train YOLOv8, YOLO11 or YOLO26 of Ultralytics with Rank & Sort loss instead of BCE, then calibrate its scores."""
# python examples/ultralytics_yolo.py yolo11n.yaml data.yaml epochs=25 imgsz=192  (and other settings of Ultralytics)
# Licence: Ultralytics is AGPL-3.0 or commercial. A program that imports it, like this one, must follow that licence
# when you distribute or serve it. bucketrank is Apache-2.0, does not import Ultralytics and copies nothing from it.

import sys
from importlib.metadata import version

import numpy as np
import torch
import yaml
from ultralytics import YOLO
from ultralytics.utils.torch_utils import unwrap_model

from bucketrank import rank_sort_loss, self_balance
from bucketrank.boxes import paired_iou
from bucketrank.errors import CannotCalibrateError
from bucketrank.evaluation.calibration.mapping import fit_platt, require_both

MARK = "resume_with_examples_ultralytics_yolo"  # a buffer: Ultralytics refuses to resume with one that its model lacks


class RankingLoss:
    """Rank & Sort in one detection loss of Ultralytics, which calls ``assign``, ``rank`` and ``weigh`` in turn."""

    def __init__(self, loss):
        if type(loss).__name__ != "v8DetectionLoss" or getattr(loss, "class_weights", None) is not None:
            raise TypeError(f"ultralytics_yolo: expected a detector with cls_pw=0, got another {type(loss).__name__}")
        self.loss, self.assigner, self.box_loss = loss, loss.assigner, loss.bbox_loss
        loss.assigner, loss.bce, loss.bbox_loss = self.assign, self.rank, self.weigh

    def assign(self, scores, boxes, *args, **kwargs):
        """Keep the targets of the ranking: for a positive the IoU of its box with its object, for a negative 0."""
        classes, objects, soft_scores, positive, indices = self.assigner(scores, boxes, *args, **kwargs)
        ious = paired_iou(boxes[positive], objects[positive]).clamp(min=1e-6)
        self.targets = torch.zeros_like(scores, dtype=torch.float32)
        self.targets[positive, classes[positive].long()] = ious.float()
        self.divisor = soft_scores.sum().clamp(min=1)
        return classes, objects, soft_scores, positive, indices

    def rank(self, logits, _soft_scores):
        """Return the loss of the ranking of all locations and classes, times the number that Ultralytics divides by."""
        ranking = torch.stack(rank_sort_loss(logits.float(), self.targets)).sum()
        self.ranking = ranking.detach()
        return ranking * self.divisor

    def weigh(self, *args):
        """Balance IoU loss and DFL: each, times its gain, has the value of the ranking loss times its gain."""
        (iou_loss, edge_loss), gains = self.box_loss(*args), self.loss.hyp
        balanced = self_balance(iou_loss, to=self.ranking * gains.cls / gains.box)
        if self.loss.use_dfl:
            return balanced, self_balance(edge_loss, to=self.ranking * gains.cls / gains.dfl)
        # YOLO26 has L1 loss in place of DFL. It is tiny, so it gets the factor of the IoU loss.
        return balanced, edge_loss * (balanced / iou_loss).detach().nan_to_num(1)


def mark_models(trainer):
    """Mark every model of the run, because a run resumed without these callbacks would continue with BCE."""
    build = trainer.get_model

    def build_marked(*args, **kwargs):
        model = build(*args, **kwargs)
        model.register_buffer(MARK, torch.ones((), dtype=torch.bool))
        return model

    trainer.get_model = build_marked


def use_ranking_loss(trainer):
    """Put the ranking loss into the model and its EMA, which computes the validation loss."""
    for model in (unwrap_model(trainer.model), trainer.ema.ema):
        model.criterion = getattr(model, "criterion", None) or model.init_criterion()
        heads = [getattr(model.criterion, name, None) for name in ("one2many", "one2one")]  # YOLO26 has both
        for loss in heads if all(heads) else [model.criterion]:
            RankingLoss(loss)


def train(model, **settings):
    """Train ``model``, a ``YOLO``, with Rank & Sort loss; ``settings`` are those of ``model.train``."""
    if not version("ultralytics").startswith("8.4."):  # patches undocumented attributes
        raise ImportError(f"ultralytics_yolo: expected ultralytics 8.4, got {version('ultralytics')}; install 8.4")
    if "," in str(settings.get("device")):
        raise ValueError(f"ultralytics_yolo: expected one device, got {settings['device']}; others get no callbacks")
    for event, callback in (("on_pretrain_routine_start", mark_models), ("on_train_start", use_ranking_loss)):
        if callback not in model.callbacks[event]:
            model.add_callback(event, callback)
    model.train(**settings)


def calibrate(weights, data, **settings):
    """Return the model with sigmoid(a logit + b) as scores, fitted on the training images, in its last class layers."""
    outcomes, measured, model = {}, YOLO(weights), YOLO(weights)

    def keep_outcomes(validator):
        outcomes.update({name: np.concatenate(each) for name, each in validator.metrics.stats.items() if each})

    measured.add_callback("on_val_batch_end", keep_outcomes)
    measured.val(data=data, split="train", conf=1e-6, plots=False, **settings)
    require_both(right := outcomes.get("tp", np.zeros((0, 1)))[:, 0].astype(bool))  # right at an IoU of 0.5
    a, b = fit_platt(torch.as_tensor(outcomes["conf"]).double().logit(eps=1e-9).numpy(), right.astype(float))
    head = model.model.model[-1]
    for branch in [*head.cv3, *(getattr(head, "one2one_cv3", None) or [])]:
        branch[-1].weight.data.mul_(a)
        branch[-1].bias.data.mul_(a).add_(b)
    return model


def main(weights, data, *settings):
    model = YOLO(weights)
    train(model, **{"data": data, "plots": False} | yaml.safe_load("{" + ",".join(settings).replace("=", ": ") + "}"))
    path = model.trainer.best.with_name("calibrated.pt")
    try:
        calibrate(model.trainer.best, data, imgsz=model.trainer.args.imgsz).save(path)
        print(f"calibrated model: {path}")
    except CannotCalibrateError as error:
        print(f"{model.trainer.best} is trained but not calibrated: {str(error).removeprefix('calibrate: ')}")


if __name__ == "__main__":
    main(*sys.argv[1:])
