"""Run and time collectives over given groups, on the CPU or a CUDA device. Every wait has a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from flexd.core.arrays import Float64Array
from flexd.core.errors import TopologyError
from flexd.core.placement import RankLayout
from flexd.topology.cluster import Collective, Link

_POLL_SECONDS = 1e-4
_REMEDY = "see the first error among the other ranks; a slow network needs a longer timeout"
# torch 2.13 renamed it and warns of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class ProbeGroups:
    """The process groups of one rank that a probe measures.

    Attributes:
        layout: nodes x local ranks of the job.
        rank: rank of this process.
        world: group of all ranks, for agreement and barriers.
        node: group of the ranks of this node; None if this rank is the only one.
        rail: group of the ranks of this local rank; None if this rank is the only one.
        device: device of the tensors.
        timeout: longest wait of a collective for another rank.
    """

    layout: RankLayout
    rank: int
    world: dist.ProcessGroup
    node: dist.ProcessGroup | None
    rail: dist.ProcessGroup | None
    device: torch.device
    timeout: timedelta

    @classmethod
    def create(cls, layout: RankLayout, device: torch.device | str, timeout: timedelta) -> ProbeGroups:
        """Collective over the default process group. Make the groups, with its backend.

        Raises:
            TopologyError: on every rank, if the layouts differ between ranks or do not fit the world size; or if a
                rank did not answer in time.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise TopologyError("no process group to measure over", remedy="call init_process_group first")
        try:
            world = dist.new_group(timeout=timeout)
        except RuntimeError as error:
            raise _failed("the ranks do not all join", error) from error
        rank, device = dist.get_rank(), torch.device(device)
        alone = cls(layout, rank, world, None, None, device, timeout)
        alone.check_equal("layout", [layout.nodes, layout.local_ranks])
        if layout.world_size != dist.get_world_size():
            raise TopologyError(
                f"layout of {layout.nodes} nodes x {layout.local_ranks} local ranks, but the process group has "
                f"{dist.get_world_size()} ranks",
                remedy="every node needs equally many ranks; give the ranks of a node",
            )
        try:
            nodes = [_group(layout.node_ranks(node), timeout) for node in range(layout.nodes)]
            rails = [_group(layout.rail_ranks(local), timeout) for local in range(layout.local_ranks)]
        except RuntimeError as error:
            raise _failed("the ranks do not all join", error) from error
        node, rail = nodes[layout.node_of(rank)], rails[layout.local_rank_of(rank)]
        return cls(layout, rank, world, node, rail, device, timeout)

    def close(self) -> None:
        """Destroy the groups; the default process group stays."""
        for group in (self.node, self.rail, self.world):
            if group is not None:
                dist.destroy_process_group(group)

    def group_of(self, link: Link) -> dist.ProcessGroup | None:
        """Return the group whose members communicate over this class of links only."""
        return self.node if link is Link.INTRA_NODE else self.rail

    def check_equal(self, what: str, values: list[float]) -> None:
        """Collective. Raise TopologyError on every rank if ranks passed different numbers."""
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        size = dist.get_world_size(self.world)
        gathered = mine.new_empty(size * len(values))
        self.run(lambda: _all_gather(gathered, mine, group=self.world))
        everyone = gathered.view(size, len(values)).tolist()
        odd = [rank for rank, given in enumerate(everyone) if given != everyone[0]]
        if odd:
            raise TopologyError(
                f"{what} of rank {odd[0]} is {everyone[odd[0]]}, of rank 0 {everyone[0]}",
                remedy="give all ranks the same, and launch equally many on every node",
            )

    def max_over_ranks(self, values: Float64Array) -> Float64Array:
        """Collective. Return the element-wise maximum of float64[n] over all ranks, on every rank."""
        shared = torch.tensor(values, dtype=torch.float64, device=self.device)
        self.run(lambda: dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self.world))
        result: Float64Array = shared.cpu().numpy()
        return result

    def from_rank0(self, value: float) -> float:
        """Collective. Return rank 0's value."""
        return float(self.max_over_ranks(np.array([value if self.rank == 0 else -np.inf]))[0])

    def run(self, work: Callable[[], object]) -> None:
        """Run ``work`` and wait until the device is done. Raises TopologyError past the deadline."""
        try:
            work()
            if self.device.type == "cuda":
                self._wait(self._record_event())
        except RuntimeError as error:
            raise _failed(f"rank {self.rank}: a collective failed", error) from error

    def seconds(self, work: Callable[[], object], times: int) -> float:
        """Return the mean seconds of ``work`` over ``times`` calls in a row, started on all ranks together."""
        self.max_over_ranks(np.zeros(1))
        try:
            if self.device.type != "cuda":
                started = time.perf_counter()
                for _ in range(times):
                    work()
                return (time.perf_counter() - started) / times
            first = self._record_event()
            for _ in range(times):
                work()
            last = self._record_event()
            self._wait(last)
            return float(first.elapsed_time(last)) / 1e3 / times
        except RuntimeError as error:
            raise _failed(f"rank {self.rank}: a collective failed", error) from error

    def _record_event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _wait(self, event: torch.cuda.Event) -> None:
        # synchronize() has no deadline and never returns if a peer is dead.
        deadline = time.monotonic() + self.timeout.total_seconds()
        while not event.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > deadline:
                raise RuntimeError(f"not done within {self.timeout.total_seconds():g} s")
            time.sleep(_POLL_SECONDS)


def make_collective(
    collective: Collective, message_bytes: int, group: dist.ProcessGroup, device: torch.device
) -> tuple[float, Callable[[], None]]:
    """Return the bytes that a rank sends in a collective of about this size, and a function that runs it.

    Sizes round up to whole float32 for each peer. An all-reduce of s bytes over g ranks sends 2 s (g-1)/g a rank, an
    all-gather of parts of s bytes (g-1) s (nccl-tests, doc/PERFORMANCE.md: the bus bandwidth).

    Raises:
        TopologyError: there is not enough memory.
    """
    ranks, width = dist.get_world_size(group), torch.float32.itemsize
    try:
        if collective is Collective.ALL_REDUCE:
            count = max(1, -(-message_bytes * ranks // (2 * (ranks - 1) * width)))
            flat = torch.zeros(count, device=device)
            return 2 * count * width * (ranks - 1) / ranks, lambda: dist.all_reduce(flat, group=group)
        count = max(1, -(-message_bytes // ((ranks - 1) * width)))
        sent, received = float(count * width * (ranks - 1)), torch.zeros(count * ranks, device=device)
        if collective is Collective.ALL_GATHER:
            part = torch.zeros(count, device=device)
            return sent, lambda: _all_gather(received, part, group=group)
        send = torch.zeros_like(received)
    except RuntimeError as error:
        raise TopologyError(
            f"probe: no memory for messages of {message_bytes} bytes on {device}: {str(error).splitlines()[0]}",
            remedy="measure up to a smaller size",
        ) from error
    splits = [count] * ranks  # as in the training's exchange: torch has another code path without splits
    return sent, lambda: dist.all_to_all_single(received, send, splits, splits, group=group)


def _group(ranks: list[int], timeout: timedelta) -> dist.ProcessGroup | None:
    return dist.new_group(ranks, timeout=timeout) if len(ranks) > 1 else None


def _failed(what: str, error: RuntimeError) -> TopologyError:
    return TopologyError(f"probe: {what}: {str(error).splitlines()[0]}", remedy=_REMEDY)
