"""A ranking model of TorchRec's own modules with two pooled and two sequence collections, and jobs that train it."""

from typing import Any

import numpy as np
import torch
import torchrec
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DenseArch, InteractionArch, SparseArch

from flexd.core.placement import Delta

ROWS = {"user": 41, "shop": 17, "tag": 23, "item": 61, "word": 29}
KEYS = ["user", "shops", "tags", "history", "clicked", "words"]
ROWS_OF_KEY = dict(zip(KEYS, (41, 17, 23, 61, 61, 29), strict=True))
DIM = 8
DENSE = 3
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "rowwise_adagrad": (torchrec.optim.RowWiseAdagrad, {"lr": 0.05, "eps": 1e-6}),
}


class Ranker(nn.Module):
    """DLRM with a second collection of bags, with weights, and two collections of sequences.

    ``DistributedModelParallel`` multiplies the rows of every bag by the weights of the input, also of collections
    that are not weighted; the plain modules do not. Jobs that compare with it have no weights.
    """

    def __init__(self, device: str = "cpu", weighted: bool = True) -> None:
        super().__init__()
        on: dict[str, Any] = {"device": torch.device(device)}
        self.sparse = SparseArch(
            torchrec.EmbeddingBagCollection(
                tables=[
                    EmbeddingBagConfig(name="user", num_embeddings=41, embedding_dim=DIM, feature_names=["user"]),
                    EmbeddingBagConfig(
                        name="shop", num_embeddings=17, embedding_dim=DIM, feature_names=["shops"],
                        pooling=torchrec.PoolingType.MEAN,
                    ),
                ],
                **on,
            )
        )  # fmt: skip
        self.tags = torchrec.EmbeddingBagCollection(
            tables=[EmbeddingBagConfig(name="tag", num_embeddings=23, embedding_dim=4, feature_names=["tags"])],
            is_weighted=weighted,
            **on,
        )
        self.items = torchrec.EmbeddingCollection(
            tables=[
                EmbeddingConfig(name="item", num_embeddings=61, embedding_dim=DIM, feature_names=["history", "clicked"])
            ],
            **on,
        )
        self.words = torchrec.EmbeddingCollection(
            tables=[EmbeddingConfig(name="word", num_embeddings=29, embedding_dim=4, feature_names=["words"])],
            need_indices=True,
            **on,
        )
        self.dense = DenseArch(DENSE, [DIM])
        self.interaction = InteractionArch(2)
        self.over = nn.Linear(DIM + 3 + 4, 1)

    def forward(self, dense: torch.Tensor, kjt: KeyedJaggedTensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss, and beside it a term of the sequences."""
        joined = torch.cat([self.interaction(self.dense(dense), self.sparse(kjt)), self.tags(kjt).values()], dim=1)
        of_samples = nn.functional.binary_cross_entropy_with_logits(self.over(joined).squeeze(1), labels)
        rows, words = self.items(kjt), self.words(kjt)["words"]
        of_words = (words.values().sum(dim=1) * (1 + words.weights() % 3)).square().sum()
        sums = [
            torch.segment_reduce(rows[k].values(), "sum", lengths=rows[k].lengths()) for k in ("history", "clicked")
        ]
        return of_samples + (sums[0] * sums[1]).sum(dim=1).sigmoid().mean() + of_words / 8


def batch(step: int, rank: int, weighted: bool = True) -> tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]:
    rng = np.random.default_rng([11, step, rank])
    samples = 4
    lengths = {key: rng.integers(0, 5, samples) for key in KEYS}
    ids = [(rng.zipf(1.3, lengths[key].sum()) - 1) % ROWS_OF_KEY[key] for key in KEYS]
    values = torch.from_numpy(np.concatenate(ids))
    kjt = KeyedJaggedTensor.from_lengths_sync(
        keys=KEYS,
        values=values,
        lengths=torch.from_numpy(np.concatenate([lengths[key] for key in KEYS])),
        weights=torch.from_numpy(rng.random(len(values), dtype=np.float32)) if weighted else None,
    )
    dense, labels = rng.random((samples, DENSE), dtype=np.float32), rng.integers(0, 2, samples)
    return torch.from_numpy(dense), kjt, torch.from_numpy(labels).float()


def every_second_row() -> Delta:
    keys = np.arange(0, sum(ROWS.values()), 2)
    return Delta(keys, np.zeros(len(keys), np.uint8), (np.arange(len(keys)) % 2 + 1).astype(np.uint8))


def collections(model: Any) -> list[Any]:
    return [model.sparse.embedding_bag_collection, model.tags, model.items, model.words]


def plain_tables(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: table.weight.detach().clone()
        for module in collections(model)
        for name, table in getattr(module, "embedding_bags", getattr(module, "embeddings", None)).items()
    }


def make(optimizer: str | None = None, weighted: bool = True, kind: type[Ranker] = Ranker) -> Ranker:
    torch.manual_seed(3)
    model = kind(weighted=weighted)
    if optimizer is not None:
        rule, settings = OPTIMIZERS[optimizer]
        for module in collections(model):
            apply_optimizer_in_backward(rule, module.parameters(), dict(settings))  # DMP adds to it
    return model
