"""A table larger than memory: python examples/larger_than_memory.py

10^9 rows of 64 float32 (238 GiB) train with 256 MiB of fast memory and a sparse file. One process; with torchrun every
rank holds its share.
"""

import tempfile

import torch

import flexd

with tempfile.TemporaryDirectory() as directory:
    embedding = flexd.EmbeddingCollection(
        [flexd.EmbeddingTable("item", 10**9, 64)], optimizer=flexd.RowWiseAdagrad(lr=0.05),
        layout=flexd.RankLayout(1, 1), fast_memory_bytes=256 * 2**20, slow_memory_dir=directory,
    )  # fmt: skip
    for step in range(5):
        items = torch.randint(10**9, (4_096,), generator=torch.Generator().manual_seed(step % 2))
        rows = embedding({"item": flexd.Jagged(items, torch.tensor([4_096]))})["item"].values
        loss = (rows - 1).square().mean()
        loss.backward()
        embedding.optimizer.step()
        print(f"step {step} loss {loss.item():.6f}")
    embedding.close()
