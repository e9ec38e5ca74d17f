"""What each process of a distributed test runs; a module of its own, so that a new process can import it."""

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from bucketrank.integrations.torchvision import use_ranking_loss

from . import tiny


def train_in_process(rank: int, folder: str, names: list[str]) -> None:
    """Two steps of each model, the second process without an object; the weights are left in ``folder``."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    objects = (2, 1) if rank == 0 else (0, 0)
    for name in names:
        model = use_ranking_loss(tiny.build(name))
        parallel = DistributedDataParallel(model)
        tiny.train(parallel, 2, lambda step: tiny.batch(*objects, seed=step))
        torch.save(model.state_dict(), f"{folder}/{name}{rank}.pt")
    distributed.destroy_process_group()
