"""Measure the links of the running job: times of its collectives by message size, as a cluster for the planner."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from datetime import UTC, datetime

import numpy as np
import torch
import torch.distributed as dist

from flexd.core.arrays import Float64Array
from flexd.core.errors import TopologyError
from flexd.core.placement import RankLayout
from flexd.topology.cluster import Cluster, Collective, CollectiveTimes, Link, LinkModel, WorldModel, fit_curve
from flexd.topology.timing import ProbeGroups, make_collective

WARM_UPS = 3
MIN_REPEATS = 3
MAX_REPEATS = 31
SAMPLE_SECONDS = 5e-3
"""Small messages are sent in a row for this long, so that neither clock nor start matter."""
MAX_IN_A_ROW = 500


@dataclass(frozen=True)
class ProbeOptions:
    """Sizes and time budget of a probe, equal on all ranks.

    Attributes:
        min_bytes: smallest message, in bytes that a rank sends in one collective.
        max_bytes: largest message.
        growth: factor from one size to the next.
        budget_seconds: approximate time of the whole probe; large sizes that do not fit it are skipped.

    Raises:
        TopologyError: a value is out of range.
    """

    min_bytes: int = 1024
    max_bytes: int = 64 * 2**20
    growth: float = 4.0
    budget_seconds: float = 60.0

    def __post_init__(self) -> None:
        if not 1 <= self.min_bytes <= self.max_bytes <= 2**34:
            raise TopologyError(
                f"probe: sizes from {self.min_bytes} to {self.max_bytes} bytes",
                remedy="1 <= min_bytes <= max_bytes <= 2**34",
            )
        if not 1.1 <= self.growth <= 1024:
            raise TopologyError(f"probe: growth {self.growth!r}", remedy="a factor between 1.1 and 1024")
        if not (math.isfinite(self.budget_seconds) and 0 < self.budget_seconds <= 3600):
            raise TopologyError(
                f"probe: budget of {self.budget_seconds!r} s", remedy="give seconds above 0, at most 3600"
            )

    @property
    def sizes(self) -> list[int]:
        """Message sizes in bytes, log-spaced, including the largest."""
        steps = math.ceil(math.log(self.max_bytes / self.min_bytes) / math.log(self.growth) - 1e-9)
        return [*(round(self.min_bytes * self.growth**i) for i in range(steps)), self.max_bytes]


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
        world = CollectiveTimes(world.message_bytes * _share_between_nodes(groups.layout), world.seconds)
    seconds = float(groups.max_over_ranks(np.array([time.perf_counter() - started]))[0])
    conditions = _conditions(groups, options, times)
    return ProbeReport(times, started_unix_seconds, seconds, conditions, groups.layout, world)


def _share_between_nodes(layout: RankLayout) -> float:
    """Return the share of a rank's peers that are on other nodes."""
    return (layout.world_size - layout.local_ranks) / (layout.world_size - 1)


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
