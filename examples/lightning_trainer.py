"""Lightning's trainer with flexd: torchrun --nproc-per-node 2 examples/lightning_trainer.py (after make frameworks)"""

import argparse
import os

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import flexd

ITEMS, BATCH = 500, 16


class Recommender(lightning.LightningModule):
    def __init__(self, plain: bool):
        super().__init__()
        self.plain, self.tables = plain, None
        self.items, self.dense = nn.Embedding(ITEMS, 16), nn.Linear(16, 16)

    def configure_model(self):  # the process group is there, and neither DDP nor an optimizer
        if not self.plain and self.tables is None:
            # Lightning writes rank 0's state_dict() and loads it on every rank.
            optimizer = flexd.DenseAdam(lr=1e-2)
            self.tables = flexd.embed_all(self, names=["items"], optimizer=optimizer, full_state_dict=True)

    def forward(self, history, liked):
        return nn.functional.cross_entropy(self.dense(self.items(history).mean(1)) @ self.items.weight.T, liked)

    def training_step(self, batch):
        return self(*batch)

    def validation_step(self, batch):
        self.log("loss", self(*batch), on_epoch=True, sync_dist=True)

    def configure_optimizers(self):
        dense = torch.optim.Adam(self.parameters(), lr=1e-2)
        return dense if self.plain else flexd.JoinedOptimizer(dense, self.tables.optimizer)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        if self.plain:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        else:
            optimizer.clip_grad_norm_(gradient_clip_val)  # torch's does not see rows

    def on_validation_end(self):  # the mean of all ranks is there
        if not self.trainer.sanity_checking and self.trainer.is_global_zero:
            print(f"epoch {self.current_epoch} loss {self.trainer.callback_metrics['loss'].item():.10f}")


def samples(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    liked = torch.randint(1, ITEMS, (count,), generator=generator) ** 2 // ITEMS  # small ids are popular
    return TensorDataset((liked[:, None] + torch.arange(5)) % ITEMS, liked)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--plain", action="store_true", help="one process without flexd")
    options.add_argument("--epochs", type=int, default=3)
    options.add_argument("--directory", default="lightning-checkpoints")
    options.add_argument("--resume", help="a checkpoint of the same or another number of ranks")
    given = options.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    lightning.seed_everything(1, verbose=False)
    torch.set_default_dtype(torch.float64)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto", max_epochs=given.epochs,
        accumulate_grad_batches=2, gradient_clip_val=0.05, logger=False,
        use_distributed_sampler=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[lightning.pytorch.callbacks.ModelCheckpoint(given.directory, "{epoch}", save_top_k=-1)],
    )  # fmt: skip
    loaders = []
    for seed, count in enumerate((256, 64)):
        data = samples(count, seed)  # Lightning's own sampler would shuffle them
        share = DistributedSampler(data, ranks, int(os.environ.get("RANK", "0")), shuffle=False)
        loaders.append(DataLoader(data, BATCH // ranks, sampler=share))
    trainer.fit(Recommender(given.plain), *loaders, ckpt_path=given.resume)


if __name__ == "__main__":
    main()
