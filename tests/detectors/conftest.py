"""Fixtures for the tests of the detectors."""

from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

from bucketrank.detectors.backbone import Backbone, build_backbone
from bucketrank.settings import BackboneSettings

from .backbone_checks import randomise_constants


@pytest.fixture(scope="session")
def resnet18_file(tmp_path_factory) -> Path:
    """A weights file of a whole classifier; all its tensors are random."""
    torch.manual_seed(0)
    path: Path = tmp_path_factory.mktemp("weights") / "resnet18.safetensors"
    save_file(randomise_constants(timm.create_model("resnet18")).state_dict(), path)
    return path


@pytest.fixture(scope="session")
def swin_tiny() -> Backbone:
    torch.manual_seed(0)
    return randomise_constants(build_backbone(BackboneSettings("swin_tiny")))
