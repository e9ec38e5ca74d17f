"""Reference outputs of the published code: ``published/*.npz``, and the checkpoints that they belong to.

The outputs come from the paper's own repository (MMDetection 2.25.3, mmcv 1.7.0) on a CPU, those of Co-DINO from
MMDetection 3.3.0; its padded case was computed in float64. The weights and images follow from a formula, so that no
checkpoint is stored. Arrays are sampled: ``x`` holds the values at ``x_index`` of a tensor of shape ``x_shape``.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.models.detection.image_list import ImageList

from bucketrank.detectors import Detector
from bucketrank.detectors.criterion import Criterion

from .published_formula import OBJECTS, SIZES, ellipses, fill, image

FOLDER = Path(__file__).with_name("published")
CASES = (
    "atss_brs",
    "atss_brs_padded",
    "atss_focal",
    "paa_brs",
    "retinanet_focal",
    "faster_rcnn_brs",
    "faster_rcnn_ce",
    "cascade_rcnn_brs",
    "mask_rcnn_brs",
    "co_deformable_detr_brs",
    "co_dino_5scale_r50",
    "co_dino_5scale_r50_padded",
)


@dataclass(frozen=True)
class Case:
    """The reference outputs of one model."""

    name: str
    arrays: Any  # numpy's archive

    @classmethod
    def read(cls, name: str) -> Case:
        return cls(name, np.load(FOLDER / f"{name}.npz"))

    def __contains__(self, name: str) -> bool:
        return name in self.arrays.files

    def __getitem__(self, name: str) -> Tensor:
        return torch.from_numpy(self.arrays[name])

    @property
    def settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = json.loads(str(self.arrays["settings"]))
        return settings

    def state(self) -> dict[str, Tensor]:
        """Return the weights by the formula, after a check that they are those of the reference."""
        salt, checksum = self.settings["salt"], 0
        arrays = {key: fill(key, shape, salt) for key, shape in json.loads(str(self.arrays["state_dict"]))}
        for key in sorted(arrays):
            checksum = zlib.crc32(arrays[key].astype(arrays[key].dtype.newbyteorder("<")).tobytes(), checksum)
        assert checksum == int(self.arrays["weights_crc32"])
        return {key: torch.from_numpy(array) for key, array in arrays.items()}

    def checkpoint(self, folder: Path, **meta: Any) -> Path:
        """Write the checkpoint as MMDetection 2 does."""
        path = folder / f"{self.name}.pth"
        torch.save({"meta": meta, "state_dict": self.state()}, path)
        return path

    def images(self) -> ImageList:
        """Return the normalised images, padded with zeros to the size of the first or of a canvas."""
        names = self.settings["images"]
        height, width = self.settings.get("canvas", SIZES[names[0]])
        batch = torch.zeros(len(names), 3, height, width)
        for number, name in enumerate(names):
            batch[number, :, : SIZES[name][0], : SIZES[name][1]] = torch.from_numpy(image(name, *SIZES[name]))
        return ImageList(batch, [SIZES[name] for name in names])

    def ground_truths(self, *names: str) -> list[dict[str, Tensor]]:
        """Return boxes, labels from 0 and elliptic masks of the images, or of the objects of these names."""
        found = []
        for name in names or self.settings["images"]:
            boxes, labels = zip(*OBJECTS[name], strict=True)
            masks = torch.from_numpy(ellipses(boxes, *SIZES["image0"]))
            found.append({"boxes": torch.tensor(boxes).float(), "labels": torch.tensor(labels), "masks": masks})
        return found

    def differs(self, name: str, actual: Tensor) -> float:
        """Return the largest difference of a tensor from the sampled reference of that name."""
        expected = self[name]
        if f"{name}_index" in self:
            assert tuple(self[f"{name}_shape"].tolist()) == tuple(actual.shape), name
            actual = actual[tuple(self[f"{name}_index"].long().T)]
        return float((actual - expected).abs().max())

    def deviates(self, name: str, actual: Tensor) -> float:
        """Return the same in units of the largest value of the reference, if that exceeds 1.

        The reference was computed on another CPU. Sums are rounded in another order there, and the error of a sum grows
        with its terms.
        """
        return self.differs(name, actual) / max(1.0, float(self[name].abs().max()))

    def losses(self) -> dict[str, float]:
        """Return the loss terms of the reference by name."""
        return dict(zip(json.loads(str(self.arrays["loss_names"])), self["losses"].tolist(), strict=True))


def use_bucketed_losses(model: Detector) -> None:
    """Let every ranking criterion use buckets, as in the models of the reference."""
    for criterion in (module for module in model.modules() if isinstance(module, Criterion)):
        if hasattr(criterion.settings, "method"):
            settings: Any = criterion.settings
            criterion.settings = replace(settings, method="bucketed")
