"""Calibration: fit a map from scores to probabilities, and fold it into the last classification layer."""

from typing import TYPE_CHECKING

from bucketrank.lazy import import_on_use

if TYPE_CHECKING:
    from bucketrank.errors import CannotCalibrateError as CannotCalibrateError
    from bucketrank.evaluation.calibration.fitting import calibrate as calibrate
    from bucketrank.evaluation.calibration.mapping import Calibration as Calibration
    from bucketrank.evaluation.calibration.mapping import ScoreHead as ScoreHead
    from bucketrank.evaluation.calibration.mapping import ScoreMap as ScoreMap
    from bucketrank.evaluation.calibration.mapping import fold as fold
    from bucketrank.evaluation.calibration.scores import calibrate_scores as calibrate_scores

__all__, __getattr__ = import_on_use(
    __name__,
    {
        "bucketrank.errors": "CannotCalibrateError",
        "bucketrank.evaluation.calibration.fitting": "calibrate",
        "bucketrank.evaluation.calibration.mapping": "Calibration ScoreHead ScoreMap fold",
        "bucketrank.evaluation.calibration.scores": "calibrate_scores",
    },
)
