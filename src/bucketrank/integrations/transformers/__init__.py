"""Switch a detection transformer from transformers 5 to a ranking loss, in place, and calibrate its scores.

These models call ``model.loss_function``. :func:`use_ranking_loss` puts Rank & Sort or AP loss there, for every decoder
layer, the encoder proposals and the denoising queries. Weights, inference and the training script (Trainer, Accelerate
or a plain loop) stay the same. :func:`calibrate` turns the scores of the trained model into probabilities.
"""

from bucketrank.integrations.transformers.library import check_library

check_library()  # must run before the imports below, which rely on it

from bucketrank.integrations.transformers.adapter import undo, use_ranking_loss  # noqa: E402
from bucketrank.integrations.transformers.scores import calibrate, score_head  # noqa: E402

__all__ = ["calibrate", "score_head", "undo", "use_ranking_loss"]
