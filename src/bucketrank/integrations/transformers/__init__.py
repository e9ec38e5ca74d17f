"""Replace the loss of a detection transformer of transformers 5 by a ranking loss, in place.

These models call ``model.loss_function``. :func:`use_ranking_loss` puts Rank & Sort or AP loss there, for every decoder
layer, the encoder's proposals and the denoising queries. Weights, inference and the training script (Trainer,
Accelerate or a plain loop) stay as they are. :func:`calibrate` makes the scores of the trained model probabilities.
"""

from bucketrank.integrations.transformers.library import check_library

check_library()  # before the import below, which relies on what is checked

from bucketrank.integrations.transformers.adapter import undo, use_ranking_loss  # noqa: E402
from bucketrank.integrations.transformers.scores import calibrate, score_head  # noqa: E402

__all__ = ["calibrate", "score_head", "undo", "use_ranking_loss"]
