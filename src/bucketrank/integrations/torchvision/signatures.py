"""Check, at import, the signatures of the torchvision methods that the adapter overrides or calls."""

from __future__ import annotations

import inspect

SUPPORTED = "0.21 to 0.29"


def check_signatures() -> None:
    """Raise ImportError, naming the supported versions, if a torchvision method has unexpected parameters."""
    try:
        import torchvision
        from torchvision.models.detection import _utils, fcos, retinanet, roi_heads, rpn, ssd
    except ImportError as error:
        raise ImportError(
            f"bucketrank.integrations.torchvision: expected torchvision {SUPPORTED}, got: {error}; "
            'install it with pip install "bucketrank[torchvision]"'
        ) from error

    dense_loss = ["self", "targets", "head_outputs", "anchors", "matched_idxs"]
    rpn_loss = ["self", "objectness", "pred_bbox_deltas", "labels", "regression_targets"]
    signatures = [
        (rpn.RegionProposalNetwork, "forward", ["self", "images", "features", "targets"]),
        (rpn.RegionProposalNetwork, "compute_loss", rpn_loss),
        (roi_heads.RoIHeads, "forward", ["self", "features", "proposals", "image_shapes", "targets"]),
        (roi_heads.RoIHeads, "select_training_samples", ["self", "proposals", "targets"]),
        (roi_heads.RoIHeads, "subsample", ["self", "labels"]),
        (retinanet.RetinaNetHead, "compute_loss", dense_loss),
        (fcos.FCOSHead, "compute_loss", dense_loss),
        (ssd.SSD, "compute_loss", dense_loss),
        (_utils.BoxCoder, "decode_single", ["self", "rel_codes", "boxes"]),
        (_utils.BoxLinearCoder, "decode", ["self", "rel_codes", "boxes"]),
    ]
    for owner, method, expected in signatures:
        function = getattr(owner, method, None)
        parameters = list(inspect.signature(function).parameters) if function else None
        if parameters != expected:
            raise ImportError(
                f"bucketrank.integrations.torchvision: expected torchvision {SUPPORTED}, in which "
                f"{owner.__name__}.{method} takes ({', '.join(expected)}), got {torchvision.__version__}, in which it "
                f"{'takes (' + ', '.join(parameters) + ')' if parameters else 'does not exist'}; "
                "install a supported version"
            )
