"""A rank of two that trains until rank 1 ends in some way: ``python -m tests.support.ending_rank RANK PORT END DONE``.

The process of rank 1 stays alive after an error until the file DONE exists, as one with a busy thread does, so that
rank 0 cannot learn of the end from a closed connection.
"""

from __future__ import annotations

import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import flexd
from flexd.core.layout import RankLayout

GROUP_SECONDS = 400.0
"""Timeout of the process group, far longer than the test waits."""
STAYS_SECONDS = 300.0


def stay_alive(done: Path) -> None:
    deadline = time.monotonic() + STAYS_SECONDS
    while not done.exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def train(rank: int, end: str) -> None:
    layout = RankLayout(1, 2)
    tables = [flexd.EmbeddingTable("item", 40, 4)]
    collection = flexd.EmbeddingCollection(tables, optimizer=flexd.SGD(0.1), layout=layout)
    for step in range(4):
        rows = collection({"item": flexd.Jagged(torch.tensor([1, 2]), torch.tensor([2]))})["item"].values
        if step == 2 and rank == 1:
            if end in ("error", "error of a thread"):
                raise ValueError("batch 7 is broken")
            if end == "exit in a step":
                sys.exit(3)
        rows.sum().backward()
        collection.optimizer.step()
        if step == 2 and rank == 1 and end == "exit between steps":
            sys.exit(3)


def main(rank: int, port: str, end: str, done: Path) -> None:
    timeout = timedelta(seconds=GROUP_SECONDS)
    store = dist.TCPStore("127.0.0.1", int(port), is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    if rank == 1 and end.startswith("error"):
        threading.Thread(target=stay_alive, args=(done,)).start()
    if rank == 1 and end == "error of a thread":
        trainer = threading.Thread(target=train, args=(rank, end))
        trainer.start()
        trainer.join()
    else:
        train(rank, end)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]))
