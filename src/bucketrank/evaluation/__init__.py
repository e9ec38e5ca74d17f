"""Average precision of boxes and masks, by COCO's and LVIS's rules."""

from bucketrank.evaluation.coco import Evaluator, Result
from bucketrank.evaluation.threshold import Curve, best_threshold

__all__ = ["Curve", "Evaluator", "Result", "best_threshold"]
