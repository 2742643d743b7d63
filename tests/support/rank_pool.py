"""Real gloo ranks for tests: processes that stay up and run one function after another, each with a deadline."""

import os
import pickle
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from flexd.demo.processes import free_ports
from tools.bench.ranks import preloaded

Job = Callable[..., Any]
"""Called with the rank and the arguments of ``RankPool.run``; of any module of the tests."""


def _serve(rank: int, world_size: int, port: int, pipe: Connection) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size),
        GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    pipe.send(("ready", None))
    while True:
        try:
            pickled = pipe.recv_bytes()
        except EOFError:
            return
        try:
            function, args = pickle.loads(pickled)  # noqa: S301
            pipe.send(("ok", function(rank, *args)))
        except BaseException:
            pipe.send(("error", traceback.format_exc()))
        _end_groups_of_the_job()


def _end_groups_of_the_job() -> None:
    """Destroy the groups that a job made, those of its loops of ``flexd.prefetch`` too: each has threads that poll 100
    times per second, and a rank runs 100 jobs."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world

    from flexd.embedding.exchange.process_groups import JobGroups

    job = JobGroups.current()
    for of_loop in job._of_second_threads:
        of_loop.destroy()
    job._of_second_threads, job._unused = [], []
    kept_groups = [dist.group.WORLD, *job.groups]
    for group in [made for made in _world.pg_map if all(made is not keep for keep in kept_groups)]:
        dist.destroy_process_group(group)


class RankPool:
    """``world_size`` processes in one gloo process group.

    ``run`` calls ``function(rank, *args)`` on each.
    """

    def __init__(self, world_size: int) -> None:
        context = preloaded("tests.support.rank_preload")
        (port,) = free_ports(1)
        self.world_size = world_size
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world_size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._collect(120)

    def run(self, function: Job, *args: Any, timeout: float = 120) -> list[Any]:
        """Return the results by rank, None for a rank that has died.

        Raises:
            AssertionError: with the tracebacks of the ranks that failed.
            TimeoutError: past the deadline.
        """
        pickled = pickle.dumps((function, args))
        for pipe in self._pipes:
            pipe.send_bytes(pickled)
        return self._collect(timeout)

    def _collect(self, timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        results, errors = [], []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                self.close()
                raise TimeoutError(f"rank {rank} of {self.world_size} did not answer in {timeout} s: {errors}")
            try:
                kind, value = pipe.recv()
            except EOFError:
                kind, value = "died", None
            results.append(value)
            if kind == "error":
                errors.append(f"rank {rank}: {value}")
        if errors:
            raise AssertionError("\n".join(errors))
        return results

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)


Ranks = Callable[[int], RankPool]
"""The fixture of that name: by their number."""


def error_of(call: Callable[..., object], *args: Any, **named: Any) -> str:
    """Return the type and the text of the error that ends a call; "" if none does."""
    try:
        call(*args, **named)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
