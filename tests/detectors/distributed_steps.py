"""The training steps that the processes of a distributed test run; in a module that a new process can import."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bucketrank.settings import detectors

from .small_detectors import scene, small_detector

CASES = [
    ("atss", "rs"),
    ("atss", "alrp"),
    ("faster_rcnn", "rs"),
    ("mask_rcnn", "rs"),
    ("retinanet", "focal"),
    ("paa", "ap"),
]
EVERY_DETECTOR = list(detectors())


def model(name: str, loss: str) -> Any:
    """Build a detector with frozen batch norms: trained ones see only the images of their own process."""
    built = small_detector(name, loss=loss, ranking_scope="global", batch_norm="frozen")
    # The initial box weight of aLRP, 50, would multiply the rounding differences between the two sums.
    for module in built.modules():
        if hasattr(module, "balance"):
            module.balance.fill_(1.0)
    return built


def whole_batch() -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Return two images of one size, so that padding is the same alone; the second has no objects."""
    images, targets = scene((3, 0, 0))
    return [images[0], images[2]], [targets[0], targets[2]]


def _join(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)


def train(rank: int, folder: str) -> None:
    """Save the losses and the averaged gradients of each case."""
    _join(rank, folder)
    images, targets = whole_batch()
    for name, loss in CASES:
        one = model(name, loss)
        parallel = DistributedDataParallel(one)
        losses = parallel(images[rank : rank + 1], targets[rank : rank + 1])
        sum(losses.values()).backward()
        gradients = {key: parameter.grad for key, parameter in one.named_parameters()}
        detached = {key: term.detach() for key, term in losses.items()}
        torch.save({"losses": detached, "gradients": gradients}, f"{folder}/{name}-{loss}-{rank}.pt")
    dist.destroy_process_group()


AVERAGED = [("atss", "focal"), ("atss", "qfl"), ("co_detr", "focal")]  # the baselines that divide by averaged counts


def averaged_model(name: str, loss: str) -> Any:
    """Build a detector of which only the terms with averaged counts are random-free: no sampled auxiliary heads."""
    settings: dict[str, Any] = {"auxiliary": ()} if name == "co_detr" else {}
    return small_detector(name, loss=loss, batch_norm="frozen", **settings)


def train_averaged(rank: int, folder: str) -> None:
    """Save the averaged gradients of each baseline."""
    _join(rank, folder)
    images, targets = scene((3, 0, 1))
    images, targets = [images[0], images[2]], [targets[0], targets[2]]
    for name, loss in AVERAGED:
        one = averaged_model(name, loss)
        parallel = DistributedDataParallel(one)
        sum(parallel(images[rank : rank + 1], targets[rank : rank + 1]).values()).backward()
        gradients = {key: parameter.grad for key, parameter in one.named_parameters()}
        torch.save(gradients, f"{folder}/{name}-{loss}-{rank}.pt")
    dist.destroy_process_group()


def train_alone(rank: int, folder: str) -> None:
    """Train every detector for two steps; the second process has no objects. Save the parameters."""
    _join(rank, folder)
    for name in EVERY_DETECTOR:
        one = small_detector(name, batch_norm="frozen")
        parallel = DistributedDataParallel(one)
        optimiser = torch.optim.SGD(one.parameters(), lr=1e-3)
        for step in range(2):
            optimiser.zero_grad()
            sum(parallel(*scene((3, 2) if rank == 0 else (0, 0), seed=step)).values()).backward()
            optimiser.step()
        torch.save(dict(one.named_parameters()), f"{folder}/{name}-{rank}.pt")
    dist.destroy_process_group()
