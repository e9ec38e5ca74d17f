"""Switch an existing torchvision detector to a ranking loss, in place, and calibrate its scores.

>>> import torch
>>> from torchvision.models.detection import retinanet_resnet50_fpn
>>> model = retinanet_resnet50_fpn(weights=None, weights_backbone=None, num_classes=4, min_size=64)
>>> model = use_ranking_loss(model, loss="rs")
>>> losses = model([torch.rand(3, 64, 64)], [{"boxes": torch.tensor([[8.0, 8, 40, 40]]), "labels": torch.tensor([1])}])
>>> sorted(losses)
['bbox_regression', 'classification_rank', 'classification_sort']
>>> _ = undo(model)
"""

from bucketrank.integrations.torchvision.signatures import check_signatures

check_signatures()  # must run before the imports below, which subclass the checked classes

from bucketrank.integrations.torchvision.scores import calibrate, score_head  # noqa: E402
from bucketrank.integrations.torchvision.switch import undo, use_ranking_loss  # noqa: E402

__all__ = ["calibrate", "score_head", "undo", "use_ranking_loss"]
