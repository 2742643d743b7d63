"""A trainer of one rank that logs as trainers do, trains until it is told to stop, and prints its steps.

Usage: python -m tests.support.logging_trainer CONTROL_ADDRESS STOP_FILE
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import flexd
from flexd.core.layout import RankLayout
from flexd.embedding.jagged import Jagged


def main() -> None:
    address, stop = sys.argv[1], Path(sys.argv[2])
    logging.basicConfig(level=logging.INFO)
    dist.init_process_group("gloo", rank=0, world_size=1)
    tables = flexd.EmbeddingCollection([flexd.EmbeddingTable("item", 50, 4)], layout=RankLayout(1, 1))
    connection = flexd.connect(tables, address, job="test", timeout_seconds=2.0)
    step = 0
    while not stop.exists():
        tables({"item": Jagged(torch.arange(4) + step % 40, torch.tensor([4]))})["item"].values.sum().backward()
        tables.optimizer.step()
        step += 1
        print(step, connection.agent.state, flush=True)
        time.sleep(0.01)
    connection.close(5.0)


if __name__ == "__main__":
    main()
