"""A ranking loss for the detection transformers of transformers 5, in one line and in place.

The loss of these models is ``model.loss_function``; :func:`use_ranking_loss` puts Rank & Sort or AP loss there, for
every decoder layer, the encoder's proposals and the denoising queries. Weights, inference and the training script,
with the Trainer, Accelerate or a plain loop, stay as they are.
"""

from bucketrank.integrations.transformers.library import check_library

check_library()  # before anything else reads from transformers: a library that does not fit should say so itself

from bucketrank.integrations.transformers.adapter import undo, use_ranking_loss  # noqa: E402

__all__ = ["undo", "use_ranking_loss"]
