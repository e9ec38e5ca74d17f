"""Average precision of boxes and masks by COCO's and LVIS's rules, and the score threshold of the best F1."""

from bucketrank.evaluation.coco_records import coco_records
from bucketrank.evaluation.evaluator import EvaluationResult, Evaluator
from bucketrank.evaluation.threshold import Curve, best_threshold

__all__ = ["Curve", "EvaluationResult", "Evaluator", "best_threshold", "coco_records"]
