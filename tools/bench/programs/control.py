"""The rank processes of ``cases.control``: many agents and inboxes without training."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from multiprocessing.connection import Connection

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from flexd.control.agent.agent import Agent
from flexd.control.agent.inbox import ChunkInbox
from flexd.control.protocol.messages import RankIdentity
from flexd.control.protocol.report import PlacementState, StepReport
from flexd.core.keyspace import Homes, KeySpace, TableSpec
from flexd.core.placement import RankLayout
from tools.bench.harness import resident_bytes

JOB, ATTEMPT = "bench", "a1"


def simulated_ranks(
    pipe: Connection, number: int, processes: int, store_port: int, control_port: int, ranks: int, rows: int
) -> None:
    """Agents of every ``processes``-th rank: send (versions, digest, chunks, the process's resources) on request."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    keyspace, layout = big_keyspace(rows), RankLayout(ranks // 8, 8)
    mine = range(number, ranks, processes)
    inboxes = [ChunkInbox(
        Homes(keyspace, layout), rank, (rows,), lambda keys, _: np.ones(len(keys), np.bool_), lambda *_: np.empty(0),
    ) for rank in mine]  # fmt: skip
    agents = [
        Agent(
            inbox,
            RankIdentity(JOB, ATTEMPT, rank, layout.nodes, layout.local_ranks, (rows,), keyspace.digest),
            f"127.0.0.1:{control_port}", lambda: (np.empty(0, np.int64), np.empty(0, np.uint8)), timeout_seconds=60.0,
        )
        for rank, inbox in zip(mine, inboxes, strict=True)
    ]  # fmt: skip
    store = TCPStore("127.0.0.1", store_port, processes, is_master=number == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=number, world_size=processes)
    for agent in agents:
        agent.start()
    digest, step = 0, 0
    while True:
        lowest = torch.tensor([min(inbox.begin_exchange() for inbox in inboxes), -int(pipe.poll())])
        dist.all_reduce(lowest, dist.ReduceOp.MIN)
        for inbox in inboxes:
            inbox.end_exchange(int(lowest[0]))
        step += 1
        for at, (agent, inbox) in enumerate(zip(agents, inboxes, strict=True)):
            for version, delta, _ in inbox.poll_agreed(2**40, len):
                digest = (digest + delta.digest_change()) % 2**64 if at == 0 else digest
                inbox.applied(version)
            version = inbox.applied_version
            agent.report(StepReport(step, 1, PlacementState(version, digest), 0.01, 0.0, (1, 0, 0)))
        if lowest[1]:
            break
        time.sleep(0.01)
    versions = [inbox.applied_version for inbox in inboxes]
    chunks = sum(agent.counters.get("chunks", 0) for agent in agents)
    resources = {
        "rss_bytes": resident_bytes(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }
    pipe.send(((versions, digest, chunks, resources), None))
    for agent in agents:
        agent.stop(5.0)


def big_keyspace(rows: int) -> KeySpace:
    return KeySpace([TableSpec("item", 4 * rows, 8, "float32", "sgd")])
