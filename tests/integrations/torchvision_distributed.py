"""The function that each process of the distributed torchvision test runs.

It has its own module, so that a new process can import it.
"""

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from bucketrank.integrations.torchvision import use_ranking_loss
from tests.integrations.coloured_squares import batch
from tests.integrations.torchvision_models import build
from tests.integrations.torchvision_training import train


def train_in_process(rank: int, folder: str, names: list[str]) -> None:
    """Train each model for two steps, the second process without objects, and save the weights in ``folder``."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    objects = (2, 1) if rank == 0 else (0, 0)
    for name in names:
        model = use_ranking_loss(build(name))
        parallel = DistributedDataParallel(model)
        train(parallel, 2, lambda step: batch(*objects, seed=step))
        torch.save(model.state_dict(), f"{folder}/{name}{rank}.pt")
    distributed.destroy_process_group()
