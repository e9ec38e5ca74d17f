"""Train models in two processes, the second without objects, and print one line per model and process.

Run by torchrun.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bucketrank.integrations.transformers import use_ranking_loss
from tests.integrations.transformers_models import batch, empty_batch, make


def train(name: str, *, find_unused_parameters: bool) -> str:
    model = use_ranking_loss(make(name).train())
    parallel = DistributedDataParallel(model, find_unused_parameters=find_unused_parameters)
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)
    images, labels = batch() if dist.get_rank() == 0 else empty_batch()
    values = []
    for _ in range(2):
        loss = parallel(pixel_values=images, labels=labels).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        values.append(loss.item())
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    gathered = [torch.empty_like(weights) for _ in range(2)]
    dist.all_gather(gathered, weights)
    same = torch.equal(*gathered)
    return f"{name} rank={dist.get_rank()} loss={values[-1]:.4f} gradient={norm:.4f} same={same}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for argument in sys.argv[1:]:
        name, _, unused = argument.partition(":")
        lines: list[str | None] = [None, None]
        dist.all_gather_object(lines, train(name, find_unused_parameters=unused == "unused"))
        if dist.get_rank() == 0:  # one process prints for both: two could mix their lines
            print(*lines, sep="\n", flush=True)
    dist.destroy_process_group()
