"""One training rank in a process of its own: agrees on versions through a real gloo all-reduce.

Usage: python -m tests.support.rank_process CONTROL_PORT STORE_FILE RANK WORLD_SIZE ATTEMPT SECONDS
Ends when all ranks have stepped for SECONDS; prints {"steps", "history", "digest", "version"} as JSON.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from flexd.control.agent.agent import Agent
from flexd.control.agent.inbox import ChunkInbox
from flexd.core.homes import Homes
from flexd.core.layout import RankLayout
from flexd.core.placement import Placement
from tests.support.ranks_in_threads import SECRET, TABLES, identity, step_report


def main(port: int, store_file: str, rank: int, world_size: int, attempt: str, seconds: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store_file}", rank=rank, world_size=world_size, timeout=timedelta(seconds=30)
    )
    layout = RankLayout(world_size, 1)
    placement = Placement.empty()
    inbox = ChunkInbox(Homes(TABLES, layout), rank, (20_000, 20_000))
    agent = Agent(
        inbox, identity(rank, layout, attempt), f"127.0.0.1:{port}",
        lambda: (placement.keys, placement.tiers), SECRET, timeout_seconds=3.0,
    )  # fmt: skip
    agent.start()
    steps, history = 0, []
    started = time.monotonic()
    while True:
        over = int(time.monotonic() - started > seconds)
        exchange = torch.tensor([inbox.begin_exchange(), over])
        dist.all_reduce(exchange, dist.ReduceOp.MIN)
        inbox.end_exchange(int(exchange[0]))
        for version, delta in inbox.poll_agreed(1000, lambda delta: 8 * len(delta)):
            placement = placement.apply(delta)
            history.append([version, hashlib.sha256(delta.keys.tobytes() + delta.new_tiers.tobytes()).hexdigest()])
            inbox.applied(version)
        steps += 1
        agent.report(step_report(steps, placement))
        if exchange[1]:
            break
        time.sleep(0.002)
    result = {"steps": steps, "history": history, "digest": placement.digest(), "version": placement.version}
    print(json.dumps(result), flush=True)
    agent.stop(5)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5], float(sys.argv[6]))
