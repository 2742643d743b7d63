"""A small data set for RecBole 1.2.1, and its configuration, for recbole_before.py and recbole_sasrec.py."""

import argparse
import sys
import tempfile
import types
import warnings
from pathlib import Path

import numpy as np
import torch

USERS, ITEMS, EVENTS, DIM = 64, 90, 11, 16

# RecBole 1.2.1 was written for numpy 1, and imports TensorBoard.
for _name, _kind in {"float_": np.float64, "complex_": np.complex128, "unicode_": np.str_, "bool8": np.bool_}.items():
    setattr(np, _name, _kind)
if "torch.utils.tensorboard" not in sys.modules:
    sys.modules["torch.utils.tensorboard"] = types.ModuleType("torch.utils.tensorboard")
    sys.modules["torch.utils.tensorboard"].SummaryWriter = type(
        "SummaryWriter",
        (),
        {"__init__": lambda self, log_dir: None, "__getattr__": lambda self, _: lambda *_, **__: None},
    )
warnings.filterwarnings("ignore", module=r"recbole\..*")

from recbole.config import Config  # noqa: E402
from recbole.data import create_dataset, data_preparation  # noqa: E402
from recbole.utils import init_seed  # noqa: E402


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--loss", choices=("BPR", "CE"), default="BPR", help="CE: a softmax over all items")
    parser.add_argument("--learner", choices=("adam", "sgd"), default="adam")
    return parser.parse_args()


def prepared(model: type, options: argparse.Namespace) -> tuple:
    """Return RecBole's configuration, and its loaders of training, validation and test.

    Without dropout, whose masks on two ranks are not those of one process, and in float64, to compare losses to 1e-9.
    """
    folder = Path(tempfile.mkdtemp(prefix="recbole-"))
    (folder / "small").mkdir()
    draw = np.random.default_rng(0)
    lines = ["user_id:token\titem_id:token\ttimestamp:float"]
    for user in range(USERS):
        first = draw.integers(0, ITEMS)
        steps = (draw.zipf(1.5, EVENTS) % 7).cumsum()
        lines += [f"u{user}\ti{(first + step) % ITEMS}\t{time}" for time, step in enumerate(steps)]
    (folder / "small" / "small.inter").write_text("\n".join(lines) + "\n")
    settings = {
        "data_path": str(folder), "checkpoint_dir": str(folder / "saved"), "use_gpu": False, "state": "ERROR",
        "load_col": {"inter": ["user_id", "item_id", "timestamp"]}, "MAX_ITEM_LIST_LENGTH": 8,
        "hidden_size": DIM, "inner_size": DIM, "hidden_dropout_prob": 0.0, "attn_dropout_prob": 0.0,
        "epochs": options.epochs, "train_batch_size": 32, "eval_batch_size": 32, "learner": options.learner,
        "learning_rate": 0.01 if options.learner == "adam" else 0.5, "loss_type": options.loss,
        "train_neg_sample_args": {"distribution": "uniform", "sample_num": 1} if options.loss == "BPR" else None,
        "eval_args": {"split": {"LS": "valid_and_test"}, "order": "TO", "mode": "full", "group_by": "user"},
        "metrics": ["NDCG"], "topk": [10], "valid_metric": "NDCG@10", "metric_decimal_place": 12,
    }  # fmt: skip
    sys.argv = sys.argv[:1]  # RecBole reads them too
    config = Config(model=model, dataset="small", config_dict=settings)
    init_seed(config["seed"], config["reproducibility"])
    loaders = data_preparation(config, create_dataset(config))
    torch.set_default_dtype(torch.float64)
    return config, *loaders
