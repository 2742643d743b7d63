"""RecBole's SASRec and trainer in one process: python examples/recbole_before.py"""

from recbole_data import parsed, prepared  # isort: skip
from recbole.model.sequential_recommender import SASRec
from recbole.trainer import Trainer


def main() -> None:
    config, train, valid, test = prepared(SASRec, parsed())
    trainer = Trainer(config, SASRec(config, train.dataset))
    best, _ = trainer.fit(train, valid, saved=False, verbose=False)
    for epoch, loss in trainer.train_loss_dict.items():
        print(f"epoch {epoch} loss {loss:.10f}")
    print(f"ndcg@10 valid {best:.10f} test {trainer.evaluate(test, load_best_model=False)['ndcg@10']:.10f}")


if __name__ == "__main__":
    main()
