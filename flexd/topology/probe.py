"""Measure the links of the running job: run and time collectives over given groups, on the CPU or a CUDA device, as a
cluster for the planner. Every wait has a deadline."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from datetime import UTC, datetime, timedelta

import numpy as np
import torch
import torch.distributed as dist

from flexd.core.arrays import Float64Array
from flexd.core.errors import TopologyError
from flexd.core.placement import RankLayout
from flexd.topology.cluster import Cluster, Collective, CollectiveTimes, Link, LinkModel, WorldModel, fit_curve

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
        return shared.cpu().numpy()

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


WARM_UPS = 3
MIN_REPEATS = 3
MAX_REPEATS = 31
SAMPLE_SECONDS = 5e-3
"""Small messages are sent in a row for this long, so that neither clock nor start matter."""
MAX_IN_A_ROW = 500
# Factor from one message size to the next.
_GROWTH = 4.0


@dataclass(frozen=True)
class ProbeOptions:
    """Sizes and time budget of a probe, equal on all ranks.

    Attributes:
        min_bytes: smallest message, in bytes that a rank sends in one collective.
        max_bytes: largest message.
        budget_seconds: approximate time of the whole probe; large sizes that do not fit it are skipped.

    Raises:
        TopologyError: a value is out of range.
    """

    min_bytes: int = 1024
    max_bytes: int = 64 * 2**20
    budget_seconds: float = 60.0

    def __post_init__(self) -> None:
        if not 1 <= self.min_bytes <= self.max_bytes <= 2**34:
            raise TopologyError(
                f"probe: sizes from {self.min_bytes} to {self.max_bytes} bytes",
                remedy="1 <= min_bytes <= max_bytes <= 2**34",
            )
        if not (math.isfinite(self.budget_seconds) and 0 < self.budget_seconds <= 3600):
            raise TopologyError(
                f"probe: budget of {self.budget_seconds!r} s", remedy="give seconds above 0, at most 3600"
            )

    @property
    def sizes(self) -> list[int]:
        """Message sizes in bytes, log-spaced, including the largest."""
        steps = math.ceil(math.log(self.max_bytes / self.min_bytes) / math.log(_GROWTH) - 1e-9)
        return [*(round(self.min_bytes * _GROWTH**i) for i in range(steps)), self.max_bytes]


@dataclass(frozen=True)
class ProbeReport:
    """Result of a probe, equal on all ranks.

    Attributes:
        times: measured times by (link, collective), for the links that this job has.
        started_unix_seconds: start, by rank 0's clock.
        seconds: duration of the measurement.
        conditions: backend, world and sizes, in words.
        layout: of the job.
        world: times of the all-to-all over all ranks, by the bytes that a rank sends to other nodes; None if it is that
            of a node or of a rail.
    """

    times: dict[tuple[Link, Collective], CollectiveTimes]
    started_unix_seconds: float
    seconds: float
    conditions: str
    layout: RankLayout
    world: CollectiveTimes | None

    def cluster(self, name: str = "probed") -> Cluster:
        """Return the cluster for pricing plans; its ``source`` states the conditions of the measurement.

        The wire is the largest bandwidth that a collective reached at its largest size, a lower bound (buffers on the
        way can make smaller sizes look faster than the wire). Nothing is hidden until ranks report what is. For a class
        of links that this job does not have (one node, or one rank a node) the other link's figures stand in; no plan
        of this layout uses them.
        """
        curves = {key: fit_curve(times) for key, times in self.times.items()}
        notes = ["wires: estimated as the most that a collective reached at its largest size"]
        links: dict[Link, LinkModel] = {}
        for link in Link:
            if (link, Collective.ALL_TO_ALL) not in curves:
                continue
            reached = max(curves[link, c].points[-1][1] for c in Collective)
            links[link] = LinkModel(reached, **{c.value: curves[link, c] for c in Collective})
        for link, other in ((Link.INTRA_NODE, Link.INTER_NODE), (Link.INTER_NODE, Link.INTRA_NODE)):
            if link not in links:
                links[link] = links[other]
                notes.append(f"{link}: not measured, the job has no such link; figures of {other} stand in")
        notes.append("exposed shares: 1, nothing hidden (no measurement)")
        when = datetime.fromtimestamp(self.started_unix_seconds, UTC).isoformat(timespec="seconds")
        spread = ", ".join(
            f"{link} {collective} {times.spread.max():.0%}" for (link, collective), times in self.times.items()
        )
        source = (
            f"flexd probe at {when}, {self.seconds:.0f} s: {self.conditions}. Medians of the slowest rank's time; "
            f"largest distance of the quartiles over the median: {spread}. {'; '.join(notes)}."
        )
        world = None
        if self.world is not None:
            world = WorldModel(self.layout.nodes, self.layout.local_ranks, fit_curve(self.world))
        return Cluster(name, source, links[Link.INTRA_NODE], links[Link.INTER_NODE], world=world)


def probe(groups: ProbeGroups, options: ProbeOptions | None = None) -> ProbeReport:
    """Collective. Measure the links of the job and return the same report on every rank.

    Each class of links is measured over the groups that use it alone: the ranks of a node (all nodes at once), and the
    ranks of equal local rank (all rails at once), because a training step loads them like that. The all-to-all of a
    direct exchange is measured over all ranks, if that is another group. The number of repetitions follows from values
    that are equal on all ranks, so that every rank runs the same collectives.

    Raises:
        TopologyError: the job has one rank, ranks were given different options, or a rank did not answer in time.
    """
    options = options or ProbeOptions()
    groups.check_equal("probe options", [float(value) for value in astuple(options)])
    links = [
        link
        for link, ranks in ((Link.INTRA_NODE, groups.layout.local_ranks), (Link.INTER_NODE, groups.layout.nodes))
        if ranks > 1
    ]
    if not links:
        raise TopologyError("probe: one rank has no link to measure", remedy="launch at least two ranks")
    started_unix_seconds = groups.from_rank0(time.time())
    started = time.perf_counter()

    def measured(group: dist.ProcessGroup, collective: Collective, shares: int) -> CollectiveTimes:
        """Measure in one of so many equal shares of the time that is left."""
        spent = float(groups.max_over_ranks(np.array([time.perf_counter() - started]))[0])
        budget_seconds = max(options.budget_seconds - spent, 0.0) / shares
        return _measure_one(groups, group, collective, options.sizes, budget_seconds)

    wanted = [(link, collective) for link in links for collective in Collective]
    has_world = len(links) == len(Link)
    times: dict[tuple[Link, Collective], CollectiveTimes] = {}
    for index, (link, collective) in enumerate(wanted):
        group = groups.group_of(link)
        if group is None:
            raise TopologyError(f"probe: rank {groups.rank} has no {link} peers", remedy="use ProbeGroups.create")
        times[link, collective] = measured(group, collective, len(wanted) + has_world - index)
    world = None
    if has_world:
        world = measured(groups.world, Collective.ALL_TO_ALL, 1)
        layout = groups.layout
        # Of a rank's peers that are on other nodes.
        share = (layout.world_size - layout.local_ranks) / (layout.world_size - 1)
        world = CollectiveTimes(world.message_bytes * share, world.seconds)
    seconds = float(groups.max_over_ranks(np.array([time.perf_counter() - started]))[0])
    conditions = _conditions(groups, options, times)
    return ProbeReport(times, started_unix_seconds, seconds, conditions, groups.layout, world)


def _measure_one(
    groups: ProbeGroups,
    group: dist.ProcessGroup,
    collective: Collective,
    sizes: Sequence[int],
    budget_seconds: float,
) -> CollectiveTimes:
    """Measure one collective over one group at ascending sizes until the budget ends, the smallest in any case."""
    started = time.perf_counter()
    sent_bytes: list[float] = []
    seconds: list[Float64Array] = []
    for index, size in enumerate(sizes):
        left = budget_seconds - float(groups.max_over_ranks(np.array([time.perf_counter() - started]))[0])
        if seconds:
            expected = float(np.median(seconds[-1])) * size / sent_bytes[-1]
            if (WARM_UPS + MIN_REPEATS) * expected > left:
                break
        sent, work = make_collective(collective, size, group, groups.device)
        if sent_bytes and sent <= sent_bytes[-1]:
            continue  # rounded up to the same size
        began = time.perf_counter()
        one = float(groups.max_over_ranks(np.array([groups.seconds(work, 1) for _ in range(WARM_UPS)])).min())
        # Includes the barrier, which on a slow machine takes longer than a small message.
        with_barrier = float(groups.max_over_ranks(np.array([time.perf_counter() - began]))[0]) / WARM_UPS
        in_a_row = min(max(math.ceil(SAMPLE_SECONDS / one), 1), MAX_IN_A_ROW)
        left = budget_seconds - float(groups.max_over_ranks(np.array([time.perf_counter() - started]))[0])
        allotted = left / (len(sizes) - index + 1)
        repeats = min(max(int(allotted / (one * (in_a_row - 1) + with_barrier)), MIN_REPEATS), MAX_REPEATS)
        samples = np.array([groups.seconds(work, in_a_row) for _ in range(repeats)])
        # A step waits for its slowest rank, so the slowest rank determines the time.
        seconds.append(groups.max_over_ranks(samples))
        sent_bytes.append(sent)
    return CollectiveTimes(np.array(sent_bytes), tuple(seconds))


def _conditions(
    groups: ProbeGroups, options: ProbeOptions, times: dict[tuple[Link, Collective], CollectiveTimes]
) -> str:
    layout = groups.layout
    repeats = [len(samples) for measured in times.values() for samples in measured.seconds]
    largest = [measured.message_bytes[-1] for measured in times.values()]
    device = "cpu" if groups.device.type == "cpu" else torch.cuda.get_device_name(groups.device)
    truncated = "" if min(largest) >= options.max_bytes else f" (up to {min(largest):.0f} and more within the budget)"
    return (
        f"{dist.get_backend(groups.world)} on {device}, torch {torch.__version__}, {layout.nodes} nodes x "
        f"{layout.local_ranks} ranks, {options.min_bytes} to {options.max_bytes} bytes per rank and "
        f"collective{truncated}, {min(repeats)} to {max(repeats)} repetitions; inter_node over rails, all at once"
        f"{', an all-to-all over all ranks' if layout.nodes > 1 and layout.local_ranks > 1 else ''}"
    )
