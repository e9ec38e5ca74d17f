"""What Fabric must not change: ground-truth boxes in mixed precision, gradients of shared layers, torch's settings."""

from __future__ import annotations

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from bucketrank.training.fabric import any_process, deterministic_algorithms
from bucketrank.training.loop import DetectorLoss, HiddenBatch


class SharedLayer(nn.Module):
    """Applies one layer to two inputs, like a head to two feature maps, and keeps the boxes that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.layer.weight)
        self.boxes = torch.empty(0)
        self.dtype = torch.float64

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        self.boxes = targets[0]["boxes"]
        outputs = [self.layer(image) for image in images]
        self.dtype = outputs[0].dtype
        return {"first": outputs[0].float().sum(), "second": outputs[1].float().sum()}


@pytest.fixture
def mixed() -> Fabric:
    return Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")


def test_mixed_precision_does_not_round_boxes_or_sums_of_gradients(mixed: Fabric) -> None:
    detector = SharedLayer()
    model = mixed.setup(DetectorLoss(detector))  # type: ignore[arg-type]
    boxes = torch.tensor([[1001.25, 1002.5, 1003.75, 1005.0]])  # bfloat16 has 8 bits: steps of 4 at 1000
    assert not torch.equal(boxes.bfloat16().float(), boxes)
    # The gradient of the shared weight is 256 + 1, which bfloat16 cannot represent.
    images = [torch.tensor([[256.0]]), torch.tensor([[1.0]])]
    loss, terms = model(HiddenBatch((images, [{"boxes": boxes}])))
    mixed.backward(loss)
    assert detector.dtype == torch.bfloat16, "the layers run in half precision"
    assert detector.boxes is boxes
    assert detector.layer.weight.grad is not None
    assert detector.layer.weight.grad.item() == 257
    assert (loss.item(), {name: term.item() for name, term in terms.items()}) == (257, {"first": 256, "second": 1})


@pytest.mark.parametrize(("enabled", "warn_only"), [(False, False), (True, False), (True, True)])
def test_the_deterministic_mode_is_set_and_restored(enabled, warn_only):
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    try:
        with deterministic_algorithms(enabled=not enabled):
            assert torch.are_deterministic_algorithms_enabled() == (not enabled)
        assert torch.are_deterministic_algorithms_enabled() == enabled
        assert torch.is_deterministic_algorithms_warn_only_enabled() == (enabled and warn_only)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("flag", [False, True])
def test_one_process_decides_alone(flag, mixed):
    assert any_process(mixed, flag=flag) is flag
