"""Hugging Face's Trainer with flexd: torchrun --nproc-per-node 2 examples/transformers_trainer.py (make frameworks)"""

import argparse
import os

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

import flexd

ITEMS, MICRO_BATCH, MICRO_BATCHES = 500, 8, 4


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.items, self.dense = nn.Embedding(ITEMS, 16), nn.Linear(16, 16)

    def forward(self, history, labels):
        scores = self.dense(self.items(history).mean(1)) @ self.items.weight.T
        return {"loss": nn.functional.cross_entropy(scores, labels)}


class ClipRows(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **more):
        getattr(optimizer, "optimizer", optimizer).clip_grad_norm_(0.05)  # torch's does not see rows


class FlexdTrainer(Trainer):
    def save_model(self, output_dir=None, _internal_call=False):
        state = self.accelerator.unwrap_model(self.model).state_dict()  # on every rank; rank 0 has the rows
        if self.args.should_save:
            self._save(output_dir, state_dict=state)


class Losses(TrainerCallback):
    def on_evaluate(self, args, state, control, metrics, **more):
        if state.is_world_process_zero:
            print(f"epoch {state.epoch:.0f} loss {metrics['eval_loss']:.10f}")


def samples(count: int, seed: int) -> list[dict]:
    generator = torch.Generator().manual_seed(seed)
    liked = torch.randint(1, ITEMS, (count,), generator=generator) ** 2 // ITEMS  # small ids are popular
    return [{"history": (one + torch.arange(5)) % ITEMS, "labels": one} for one in liked]


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--plain", action="store_true", help="one process without flexd")
    options.add_argument("--epochs", type=int, default=3)
    options.add_argument("--directory", default="transformers-checkpoints")
    options.add_argument("--resume", help="a checkpoint of the same or another number of ranks")
    given = options.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    arguments = TrainingArguments(  # makes the process group
        given.directory, use_cpu=True, ddp_backend="gloo" if ranks > 1 else None, num_train_epochs=given.epochs,
        lr_scheduler_type="constant", eval_strategy="epoch", save_strategy="epoch", report_to=[], disable_tqdm=True,
        logging_strategy="no", per_device_train_batch_size=MICRO_BATCH, per_device_eval_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=MICRO_BATCHES // ranks, learning_rate=1e-2,
        max_grad_norm=0.05 if given.plain else 0.0, dataloader_pin_memory=False,
    )  # fmt: skip
    set_seed(1)
    torch.set_default_dtype(torch.float64)
    model = Recommender()
    if given.plain:
        kind, optimizer, callbacks = Trainer, torch.optim.Adam(model.parameters(), 1e-2), [Losses()]
    else:
        tables = flexd.embed_all(model, names=["items"], optimizer=flexd.DenseAdam(1e-2), full_state_dict=True)
        optimizer = flexd.JoinedOptimizer(torch.optim.Adam(model.parameters(), 1e-2), tables.optimizer)
        kind, callbacks = FlexdTrainer, [Losses(), ClipRows()]
    trainer = kind(
        model, arguments, train_dataset=samples(256, 0), eval_dataset=samples(64, 1), callbacks=callbacks,
        optimizers=(optimizer, None),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=given.resume)


if __name__ == "__main__":
    main()
