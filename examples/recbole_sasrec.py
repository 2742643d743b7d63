"""RecBole's SASRec and trainer with flexd: torchrun --nproc-per-node 2 examples/recbole_sasrec.py"""

from recbole_data import parsed, prepared  # isort: skip
import torch
import torch.distributed as dist
from recbole.model.sequential_recommender import SASRec
from recbole.trainer import Trainer

import flexd


class FlexdTrainer(Trainer):
    def _build_optimizer(self, **settings):
        kind = flexd.DenseAdam if self.learner == "adam" else flexd.SGD
        tables = flexd.embed_all(self.model, names=["item_embedding"], optimizer=kind(self.learning_rate))
        optimizer = flexd.JoinedOptimizer(super()._build_optimizer(**settings), tables.optimizer)
        optimizer.register_step_pre_hook(self._average_dense)  # RecBole's own DDP needs GPUs
        return optimizer

    def _average_dense(self, *_):
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad.div_(dist.get_world_size()))

    def _train_epoch(self, batches, *args, **more):
        share = (batch[dist.get_rank() :: dist.get_world_size()] for batch in batches)
        loss = torch.tensor(super()._train_epoch(share, *args, **more))
        dist.all_reduce(loss)
        return loss.item() / dist.get_world_size()


def main() -> None:
    dist.init_process_group("gloo")
    config, train, valid, test = prepared(SASRec, parsed())
    trainer = FlexdTrainer(config, SASRec(config, train.dataset))
    best, _ = trainer.fit(train, valid, saved=False, verbose=False)
    for epoch, loss in trainer.train_loss_dict.items():
        print(f"epoch {epoch} loss {loss:.10f}")
    print(f"ndcg@10 valid {best:.10f} test {trainer.evaluate(test, load_best_model=False)['ndcg@10']:.10f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
