"""A small DLRM trainer with TorchRec and flexd: torchrun --nproc-per-node 2 examples/dlrm.py"""

import argparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dlrm_model import Ranker, batches
from torch.nn.parallel import DistributedDataParallel
from torchrec.optim import RowWiseAdagrad, apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter

from flexd.torchrec import FusedOptimizerState, ModelState, replace


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--load")
    parser.add_argument("--save")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    model = Ranker()
    apply_optimizer_in_backward(RowWiseAdagrad, model.tables(), {"lr": 0.1})
    tables = replace(model)
    model = DistributedDataParallel(model)
    state = {"model": ModelState(model, tables), "optimizer": FusedOptimizerState(tables)}
    dense = torch.optim.SGD(dict(in_backward_optimizer_filter(model.named_parameters())).values(), lr=0.5)
    if options.load:
        dcp.load(state, checkpoint_id=options.load)

    steps = range(options.first, options.first + options.steps)
    for step, batch in zip(steps, batches(rank, steps, options.samples), strict=True):
        loss, _ = model(batch)
        dense.zero_grad()
        loss.backward()
        dense.step()
        tables.optimizer.step()

        total = loss.detach()
        dist.all_reduce(total)
        if rank == 0 and step % 10 == 0:
            print(f"step {step} loss {total.item() / ranks:.6f}", flush=True)
    if options.save:
        dcp.save(state, checkpoint_id=options.save)
    dist.barrier()  # torch may abort a rank whose peers have already gone
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
