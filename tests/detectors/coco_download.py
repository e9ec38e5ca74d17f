"""torchvision's COCO weights without a download: random ones of the right shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchvision
from torchvision.models import get_model, get_model_weights

from bucketrank.settings.library_specs import TORCHVISION_MODELS

from ..weights.test_torchvision_init import old_name


def coco_weights(model: str) -> dict[str, torch.Tensor]:
    """Return random weights of torchvision's model for COCO, as its weights file holds them."""
    torch.manual_seed(1)
    state = get_model(model, weights=None, weights_backbone=None, num_classes=91).state_dict()
    generator = torch.Generator().manual_seed(2)
    return {
        name: tensor + 0.01 * torch.rand(tensor.shape, generator=generator)
        for name, tensor in state.items()
        if tensor.is_floating_point()
    }


@pytest.fixture
def download(monkeypatch):
    """Replace torchvision's download by random weights; return the addresses, and whether only tensors are read.

    As in the real files, the tensors of the first versions have names from before torchvision 0.13.
    """
    addresses: list[tuple[str, bool]] = []

    def load(url: str, **options: Any) -> dict[str, torch.Tensor]:
        assert options["check_hash"]
        addresses.append((url, options.get("weights_only", False)))
        (model,) = [name for name in TORCHVISION_MODELS if get_model_weights(name).DEFAULT.url == url]
        state = coco_weights(model)
        return state if model.endswith("v2") else {old_name(name): tensor for name, tensor in state.items()}

    monkeypatch.setattr(torchvision.models._api, "load_state_dict_from_url", load)
    monkeypatch.setattr("bucketrank.weights.sources.is_reachable", lambda address: True)
    return addresses
