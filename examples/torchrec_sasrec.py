"""A small SASRec trainer with flexd and TorchRec's types: torchrun --nproc-per-node 2 examples/torchrec_sasrec.py"""

import argparse
import atexit
import os

import torch
import torch.distributed as dist
from sasrec_model import DIM, ITEMS, SASRec, batches, initial_items
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingConfig, KeyedJaggedTensor

import flexd
from flexd.torchrec import FlexEmbeddingCollection


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--samples", type=int, default=64)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    table = EmbeddingConfig(num_embeddings=ITEMS, embedding_dim=DIM, name="items", feature_names=["items"])
    items = FlexEmbeddingCollection([table], optimizer=flexd.Adagrad(lr=0.1))
    items.load_rows("items", 0, initial_items())
    if "FLEXD_CONTROL" in os.environ:
        connection = flexd.connect(items, job="sasrec", tap=flexd.Tap(items))
        atexit.register(connection.close)
    model = DistributedDataParallel(SASRec())
    dense_optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    item_optimizer = items.optimizer

    for step, (ids, lengths) in enumerate(batches(rank, options.steps, options.samples)):
        batch = KeyedJaggedTensor.from_lengths_sync(["items"], ids, lengths.repeat(3))
        rows = items(batch)["items"].values()
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
