"""Ranks of a gloo group: in an emulated cluster, answering questions, or forked on this machine for one function."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import selectors
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from subprocess import PIPE, TimeoutExpired
from typing import Any

from tools.bench.cluster import Cluster, ClusterError, torchrun_variables, why_not
from tools.bench.harness import ROOT, Skipped

_MAX_ANSWER_BYTES = 16 * 2**20
TIMEOUT = timedelta(seconds=120)


class Ranks:
    """A module's ranks, which wait for questions (``serve``). A context manager: they are gone afterwards."""

    def __init__(self, cluster: Cluster, module: str, argument: str) -> None:
        command = ["env", f"PYTHONPATH={ROOT}", "OMP_NUM_THREADS=1", sys.executable, "-m", module, argument]
        self._processes = cluster.start(command, stdin=PIPE, stdout=PIPE)
        self._unread = [b""] * len(self._processes)
        for process in self._processes:
            assert process.stdout is not None
            os.set_blocking(process.stdout.fileno(), False)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait(10)
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(BrokenPipeError):  # of a question that the rank did not read
                    pipe.close()

    def ask(self, seconds: float, name: str, **arguments: Any) -> list[Any]:
        """Return what the handler's method of this name returns, by rank.

        Raises:
            ClusterError: a rank ended or raised, with its traceback; or some have not answered within ``seconds``. The
                ranks are of no use after that.
        """
        line = json.dumps({"ask": name, **arguments}).encode() + b"\n"
        for rank, process in enumerate(self._processes):
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except BrokenPipeError as error:
                raise self._ended(rank) from error
        return [answer["answer"] for answer in self._lines(time.monotonic() + seconds, seconds)]

    def _lines(self, deadline: float, seconds: float) -> list[dict[str, Any]]:
        lines: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while len(lines) < len(self._processes):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready and time.monotonic() >= deadline:
                    silent = [rank for rank in range(len(self._processes)) if rank not in lines]
                    raise ClusterError(f"ranks {silent} have not answered in {seconds:g} s")
                for key, _ in ready:
                    rank = key.data
                    chunk = os.read(key.fd, 2**16)
                    if not chunk:
                        raise self._ended(rank)
                    self._unread[rank] += chunk
                    if len(self._unread[rank]) > _MAX_ANSWER_BYTES:
                        raise ClusterError(f"rank {rank}: an answer of more than {_MAX_ANSWER_BYTES} bytes")
                    line, newline, rest = self._unread[rank].partition(b"\n")
                    if newline:
                        lines[rank] = json.loads(line)
                        self._unread[rank] = rest
                        selector.unregister(key.fileobj)
                        # The others wait for a rank that failed: its error must not wait for them.
                        if "error" in lines[rank]:
                            raise ClusterError(f"rank {rank}: {lines[rank]['error']}")
        return [lines[rank] for rank in range(len(self._processes))]

    def _ended(self, rank: int) -> ClusterError:
        process = self._processes[rank]
        try:
            code: int | None = process.wait(5)
        except TimeoutExpired:
            code = None
        return ClusterError(f"rank {rank} ended with exit code {code}; its own output is above")


def answer_questions(handle: Callable[[dict[str, Any]], Any]) -> None:
    """The rank's side: until standard input ends. What the program prints goes to standard error meanwhile."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            try:
                answer = {"answer": handle(json.loads(line))}
            except Exception:
                answer = {"error": traceback.format_exc()}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def join_group(cuda: bool = False) -> None:
    """Start gloo with one thread of torch, as the environment says; of ``cuda`` also NCCL, on the rank's own GPU."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=TIMEOUT)


def serve(handler: Callable[[], object]) -> None:
    """Be a rank of ``Ranks``: join the group, and answer ``{"ask": NAME, ...}`` by the handler's method NAME."""
    join_group()
    made = handler()
    answer_questions(lambda question: getattr(made, question.pop("ask"))(**question))


def on_ranks(
    function: Callable[..., Any],
    nodes: int,
    local_ranks: int,
    *arguments: Any,
    seconds: float = 600.0,
    cuda: bool = False,
) -> list[Any]:
    """Call a module's function on every rank of a gloo group over loopback; return the results by rank.

    Raises:
        RuntimeError: a rank raised or ended, with its traceback; or some had no result within ``seconds``.
    """
    from flexd.demo.processes import free_ports

    (port,) = free_ports(1)
    variables = (
        torchrun_variables(rank, nodes, local_ranks, ("127.0.0.1", port), "lo") for rank in range(nodes * local_ranks)
    )
    ranks = [(of_rank, function, arguments, cuda) for of_rank in variables]
    with children(function.__module__, _one_rank, ranks) as pipes:
        return results_of(pipes, seconds)


@contextmanager
def children(
    module: str, target: Callable[..., None], arguments: Iterable[Sequence[Any]]
) -> Iterator[list[Connection]]:
    """Run ``target(pipe, *arguments)`` in a process for each entry, with ``module`` imported; kill them at the end."""
    context = preloaded(module)
    pipes, processes = [], []
    try:
        for of_child in arguments:
            here, there = context.Pipe()
            process = context.Process(target=target, args=(there, *of_child), daemon=True)
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        yield pipes
    finally:
        for process in processes:
            process.kill()
            process.join(10)


def results_of(pipes: Sequence[Connection], seconds: float) -> list[Any]:
    """Return what each child sends as (result, None).

    Raises:
        RuntimeError: one sent (None, error) or ended, or some have sent nothing within ``seconds``.
    """
    deadline = time.monotonic() + seconds
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RuntimeError(f"ranks {sorted(set(range(len(pipes))) - results.keys())} have no result in time")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                results[rank], error = pipes[rank].recv()
            except EOFError:
                error = "it ended"
            if error is not None:
                raise RuntimeError(f"rank {rank}: {error}")
    return [results[rank] for rank in range(len(pipes))]


def _one_rank(
    pipe: Connection, variables: Mapping[str, str], function: Callable[..., Any], arguments: Sequence[Any], cuda: bool
) -> None:
    os.environ.update(variables)
    try:
        join_group(cuda)
        pipe.send((function(*arguments), None))
    except Exception:
        pipe.send((None, traceback.format_exc()))
    pipe.close()


def preloaded(module: str) -> ForkServerContext:
    """Return a context whose server has imported ``module``. The first call of a process decides which."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([module])
    # Before Python 3.13 the server is not told where this process finds modules, and passes over what it cannot find.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


@contextmanager
def training_ranks(module: str, setting: Any) -> Iterator[tuple[Cluster, Ranks]]:
    """Start the ranks of a module on an emulated cluster; ``setting`` has its nodes, and is their argument.

    Raises:
        Skipped: this machine cannot emulate a cluster.
    """
    if (reason := why_not()) is not None:
        raise Skipped(reason)
    with (
        # 64 KiB is what the kernel hands to a link at once; a smaller burst would cut it up on the processors that the
        # ranks need.
        Cluster(setting.nodes, setting.local_ranks, burst_kib=64, mtu=9000) as cluster,
        Ranks(cluster, module, json.dumps(asdict(setting))) as ranks,
    ):
        yield cluster, ranks
