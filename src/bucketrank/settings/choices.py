"""Accepted values, defaults and constants that several packages share. Needs no torch."""

from typing import Literal

# Losses
Method = Literal["exact", "bucketed", "pairwise"]
ALRPMethod = Literal["exact", "pairwise"]  # aLRP loss has no bucketed form
Backend = Literal["auto", "fused", "torch", "triton"]
Reduction = Literal["mean", "none"]

# Two logits closer than delta count as partly tied. Keys are loss names; the defaults are those of the papers.
DEFAULT_DELTAS = {"ap": 1.0, "rs": 0.5, "alrp": 1.0}
# Label of a positive whose box does not overlap its object. A label of 0 would mark a negative.
MIN_LABEL = 1e-6

# Data sets
LayoutName = Literal["own", "coco", "lvis", "roboflow", "yolo", "voc"]
# Upper bound for images, also for resized ones and for weights files from others: Pillow refuses larger images, and as
# floats the pixels take 2.1 GB. 10,000 x 10,000 pixels fit.
MAX_PIXELS = 178_956_970
Augmentation = Literal["scale_jitter", "zoom_out", "iou_crop", "rotation", "vertical_flip", "grayscale", "blur"]
MASK_THRESHOLD = 0.5  # a pixel belongs to an object from this probability on, as in the published code

# Calibration: the target is the match probability (IoU 0.5 or higher) or the expected IoU
CalibrationTarget = Literal["match", "iou"]
CalibrationMethod = Literal["platt", "temperature"]

# Runs
Logger = Literal["tensorboard", "wandb", "mlflow", "csv"]
TRAIN_COLUMNS = ("step", "epoch", "loss", "lr", "seconds")  # columns of train.csv besides the terms of the loss
