"""Average precision by COCO and LVIS rules, optimal LRP, the best-F1 threshold, calibration errors, and bootstrap."""

from typing import TYPE_CHECKING

from bucketrank.lazy import import_on_use

if TYPE_CHECKING:
    from bucketrank.evaluation.bootstrap import BootstrapAP as BootstrapAP
    from bucketrank.evaluation.bootstrap import Difference as Difference
    from bucketrank.evaluation.bootstrap import ImageAP as ImageAP
    from bucketrank.evaluation.bootstrap import paired_difference as paired_difference
    from bucketrank.evaluation.evaluator import EvaluationResult as EvaluationResult
    from bucketrank.evaluation.evaluator import Evaluator as Evaluator
    from bucketrank.evaluation.evaluator import coco_records as coco_records
    from bucketrank.evaluation.metrics import CalibrationErrors as CalibrationErrors
    from bucketrank.evaluation.metrics import Curve as Curve
    from bucketrank.evaluation.metrics import MatchedDetections as MatchedDetections
    from bucketrank.evaluation.metrics import OptimalLRP as OptimalLRP
    from bucketrank.evaluation.metrics import Reliability as Reliability
    from bucketrank.evaluation.metrics import best_threshold as best_threshold

__all__, __getattr__ = import_on_use(
    __name__,
    {
        "bucketrank.evaluation.bootstrap": "BootstrapAP Difference ImageAP paired_difference",
        "bucketrank.evaluation.evaluator": "EvaluationResult Evaluator coco_records",
        "bucketrank.evaluation.metrics": "CalibrationErrors Curve MatchedDetections OptimalLRP Reliability "
        "best_threshold",
    },
)
