"""The parts of torchvision that the adapters are built on, checked when they are imported."""

from __future__ import annotations

import inspect

SUPPORTED = "0.21 to 0.29"


def check_signatures() -> None:
    """Raise ImportError, naming the supported versions, unless torchvision's methods take what the adapters expect."""
    try:
        import torchvision
        from torchvision.models.detection import _utils, fcos, retinanet, roi_heads, rpn, ssd
    except ImportError as error:
        raise ImportError(
            f"bucketrank.integrations.torchvision: expected torchvision {SUPPORTED}, got: {error}; "
            'install it with pip install "bucketrank[torchvision]"'
        ) from error

    dense = ["self", "targets", "head_outputs", "anchors", "matched_idxs"]
    proposal = ["self", "objectness", "pred_bbox_deltas", "labels", "regression_targets"]
    expected = [
        (rpn.RegionProposalNetwork, "forward", ["self", "images", "features", "targets"]),
        (rpn.RegionProposalNetwork, "compute_loss", proposal),
        (roi_heads.RoIHeads, "forward", ["self", "features", "proposals", "image_shapes", "targets"]),
        (roi_heads.RoIHeads, "select_training_samples", ["self", "proposals", "targets"]),
        (roi_heads.RoIHeads, "subsample", ["self", "labels"]),
        (retinanet.RetinaNetHead, "compute_loss", dense),
        (fcos.FCOSHead, "compute_loss", dense),
        (ssd.SSD, "compute_loss", dense),
        (_utils.BoxCoder, "decode_single", ["self", "rel_codes", "boxes"]),
        (_utils.BoxLinearCoder, "decode", ["self", "rel_codes", "boxes"]),
    ]
    for owner, method, wanted in expected:
        function = getattr(owner, method, None)
        got = list(inspect.signature(function).parameters) if function else None
        if got != wanted:
            raise ImportError(
                f"bucketrank.integrations.torchvision: expected torchvision {SUPPORTED}, in which "
                f"{owner.__name__}.{method} takes ({', '.join(wanted)}), got {torchvision.__version__}, in which it "
                f"{'takes (' + ', '.join(got) + ')' if got else 'does not exist'}; install a supported version"
            )
