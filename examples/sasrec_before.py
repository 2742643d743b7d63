"""A small SASRec trainer in plain PyTorch: torchrun --nproc-per-node 2 examples/sasrec_before.py"""

import argparse

import torch
import torch.distributed as dist
from sasrec_model import SASRec, batches, initial_items
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--samples", type=int, default=64)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    items = DistributedDataParallel(nn.Embedding.from_pretrained(initial_items(), freeze=False))
    model = DistributedDataParallel(SASRec())
    dense_optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    item_optimizer = torch.optim.Adagrad(items.parameters(), lr=0.1)

    for step, (ids, lengths) in enumerate(batches(rank, options.steps, options.samples)):
        rows = items(ids)
        loss = model(rows, lengths)
        dense_optimizer.zero_grad()
        item_optimizer.zero_grad()
        loss.backward()
        dense_optimizer.step()
        item_optimizer.step()

        total = loss.detach()
        dist.all_reduce(total)
        if rank == 0 and step % 10 == 0:
            print(f"step {step} loss {total.item() / ranks:.6f}", flush=True)
    dist.barrier()  # torch may abort a rank whose peers have already gone
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
