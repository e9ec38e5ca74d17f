"""Average precision of boxes and masks by COCO's and LVIS's rules, and the score threshold of the best F1."""

from typing import TYPE_CHECKING

from bucketrank.lazy import import_on_use

if TYPE_CHECKING:
    from bucketrank.evaluation.coco_records import coco_records as coco_records
    from bucketrank.evaluation.evaluator import EvaluationResult as EvaluationResult
    from bucketrank.evaluation.evaluator import Evaluator as Evaluator
    from bucketrank.evaluation.threshold import Curve as Curve
    from bucketrank.evaluation.threshold import best_threshold as best_threshold

__all__, __getattr__ = import_on_use(
    __name__,
    {
        "bucketrank.evaluation.coco_records": ("coco_records",),
        "bucketrank.evaluation.evaluator": ("EvaluationResult", "Evaluator"),
        "bucketrank.evaluation.threshold": ("Curve", "best_threshold"),
    },
)
