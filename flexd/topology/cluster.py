"""Model of a cluster: for each link and collective the time of a message as a function of its size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from flexd.core.errors import TopologyError

Float64Array = npt.NDArray[np.float64]


class Link(StrEnum):
    """Class of the link between two ranks."""

    INTRA_NODE = "intra_node"
    INTER_NODE = "inter_node"


class Collective(StrEnum):
    """The collectives a training step uses. A reduce-scatter is priced as an all-gather, its reverse."""

    ALL_TO_ALL = "all_to_all"
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"


@dataclass(frozen=True)
class CollectiveCurve:
    """Time of one collective on one link: ``latency + bytes / bandwidth(bytes)``.

    ``bytes`` are those that one rank sends over the link during the collective, so the bandwidth is the *bus bandwidth*
    of nccl-tests (doc/PERFORMANCE.md there), which can be compared with the wire for every collective.

    Attributes:
        latency_seconds: time of an empty message.
        points: (message bytes, bytes per second) by increasing size; between two points the bandwidth is a power of the
            size (a straight line on log-log axes), beyond the ends it is constant.
    """

    latency_seconds: float
    points: tuple[tuple[float, float], ...]

    def check(self, where: str) -> None:
        """Raise TopologyError that names ``where`` and the invalid key: a value is NaN, zero or negative, sizes do not
        increase, or a larger message would be faster."""
        if not (math.isfinite(self.latency_seconds) and self.latency_seconds >= 0):
            raise TopologyError(
                f"{where}.latency_seconds: {self.latency_seconds!r}", remedy="give a number of seconds, at least 0"
            )
        if not self.points:
            raise TopologyError(f"{where}.points: empty", remedy="give at least one [message bytes, bytes per second]")
        for i, (size, bandwidth) in enumerate(self.points):
            if not (math.isfinite(size) and size > 0 and math.isfinite(bandwidth) and bandwidth > 0):
                raise TopologyError(
                    f"{where}.points[{i}]: [{size!r}, {bandwidth!r}]",
                    remedy="message bytes and bytes per second must be finite and above 0",
                )
            if i and size <= self.points[i - 1][0]:
                raise TopologyError(f"{where}.points[{i}]: size {size:g} does not increase", remedy="sort by size")
            if i and size / bandwidth < self.points[i - 1][0] / self.points[i - 1][1]:
                raise TopologyError(
                    f"{where}.points[{i}]: {size:g} bytes would take less time than {self.points[i - 1][0]:g}",
                    remedy="measure this size again",
                )

    @property
    def is_affine(self) -> bool:
        """True if the bandwidth is the same at every size."""
        return len({bandwidth for _, bandwidth in self.points}) == 1

    def bandwidth(self, message_bytes: float) -> float:
        """Return bytes per second at this message size."""
        sizes, bandwidths = np.array(self.points, dtype=np.float64).T
        at = math.log(max(message_bytes, float(sizes[0])))
        return float(np.exp(np.interp(at, np.log(sizes), np.log(bandwidths))))

    def seconds_per_byte(self, message_bytes: float) -> float:
        return 1.0 / self.bandwidth(message_bytes)

    def seconds(self, message_bytes: float) -> float:
        """Return the time of one collective in which each rank sends ``message_bytes`` over the link."""
        return self.latency_seconds + message_bytes / self.bandwidth(message_bytes)

    def divide_latency(self, factor: float) -> CollectiveCurve:
        """Return the same curve with the latency divided by ``factor``."""
        return replace(self, latency_seconds=self.latency_seconds / factor)

    def scale_seconds(self, factor: float) -> CollectiveCurve:
        """Return the same curve with all seconds multiplied."""
        points = tuple((size, bandwidth / factor) for size, bandwidth in self.points)
        return CollectiveCurve(self.latency_seconds * factor, points)


@dataclass(frozen=True)
class LinkModel:
    """Model of one class of links. A collective on it has one rank's share of the wire.

    Attributes:
        wire_bytes_per_second: hardware bandwidth in one direction, per rank.
        all_to_all, all_reduce, all_gather: measured curves.
    """

    wire_bytes_per_second: float
    all_to_all: CollectiveCurve
    all_reduce: CollectiveCurve
    all_gather: CollectiveCurve

    def curve(self, collective: Collective) -> CollectiveCurve:
        curve: CollectiveCurve = getattr(self, collective.value)
        return curve

    def with_curves(self, change: Callable[[CollectiveCurve], CollectiveCurve]) -> LinkModel:
        """Return the same link with every curve changed."""
        return LinkModel(self.wire_bytes_per_second, **{c.value: change(self.curve(c)) for c in Collective})

    def check(self, where: str) -> None:
        if not (math.isfinite(self.wire_bytes_per_second) and self.wire_bytes_per_second > 0):
            raise TopologyError(
                f"{where}.wire_bytes_per_second: {self.wire_bytes_per_second!r}", remedy="give bytes per second above 0"
            )
        for collective in Collective:
            self.curve(collective).check(f"{where}.{collective}")


@dataclass(frozen=True)
class WorldModel:
    """All-to-all over all ranks of a job with several nodes and several ranks per node, which uses both links at once.

    Attributes:
        nodes, local_ranks: of the job that it was measured on; it holds for this layout only.
        all_to_all: curve by the bytes that one rank sends to other nodes. Bytes to the ranks of its node travel beside.
    """

    nodes: int
    local_ranks: int
    all_to_all: CollectiveCurve

    def check(self, where: str) -> None:
        for key in ("nodes", "local_ranks"):
            if getattr(self, key) < 2:
                raise TopologyError(f"{where}.{key}: {getattr(self, key)}", remedy="give a number of at least 2")
        self.all_to_all.check(f"{where}.all_to_all")


@dataclass(frozen=True)
class Exposed:
    """What a step waits for: a share (0-1) of each part of the communication, which cannot run beside compute, and of
    the rest what is longer than the compute beside it.

    The shares of a file hold until ranks have reported theirs (``flexd.operations.phase_averages``).

    Attributes:
        forward: the forward exchange: 1, because compute needs the rows, unless rows are fetched ahead.
        backward: the exchange of gradients to the home ranks.
        sync: the replica synchronisation.
        cover_seconds: compute of a step beside which the rest can run.
    """

    forward: float = 1.0
    backward: float = 1.0
    sync: float = 1.0
    cover_seconds: float = math.inf

    def check(self, where: str) -> None:
        for key in ("forward", "backward", "sync"):
            value = getattr(self, key)
            if not (math.isfinite(value) and 0 <= value <= 1):
                raise TopologyError(f"{where}.{key}: {value!r}", remedy="give a share between 0 and 1")
        if not self.cover_seconds >= 0:
            raise TopologyError(f"{where}.cover_seconds: {self.cover_seconds!r}", remedy="give seconds, at least 0")


@dataclass(frozen=True)
class StepCosts:
    """What a step of flexd's exchange takes beside the bytes on its links: launches, processor time, memory.

    ``flexd probe`` measures it on the ranks and device that train. Plans of tables are priced by it.

    Attributes:
        sums_seconds: of a step with tables of both pooling places, over one whose tables all are pooled at the
            requester.
        copies_seconds: of a step with tables that every rank has, over one without.
        row_bytes_per_second: at which look-ups and updates read and write rows, of one rank while all others do so.
    """

    sums_seconds: float
    copies_seconds: float
    row_bytes_per_second: float

    def check(self, where: str) -> None:
        for key in ("sums_seconds", "copies_seconds"):
            value = getattr(self, key)
            if not (math.isfinite(value) and value >= 0):
                raise TopologyError(f"{where}.{key}: {value!r}", remedy="give seconds, at least 0")
        if not (math.isfinite(self.row_bytes_per_second) and self.row_bytes_per_second > 0):
            raise TopologyError(
                f"{where}.row_bytes_per_second: {self.row_bytes_per_second!r}", remedy="give bytes per second above 0"
            )


@dataclass(frozen=True)
class Cluster:
    """Bandwidths and latencies of a cluster; ``RankLayout`` has the numbers of nodes and ranks.

    Attributes:
        name: name of the file or preset.
        source: origin of the figures, in words.
        intra_node: links between ranks of one node.
        inter_node: links between ranks of equal local rank (a rail), with all rails in use.
        exposed: shares of the communication that compute cannot hide.
        world: all-to-all over all ranks, where measured; a direct exchange is priced with it.
        step_costs: of a step beside its links, where measured.

    Raises:
        TopologyError: a figure is missing or invalid; the text names its key.
    """

    name: str
    source: str
    intra_node: LinkModel
    inter_node: LinkModel
    exposed: Exposed = Exposed()
    world: WorldModel | None = None
    step_costs: StepCosts | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise TopologyError("name: empty", remedy="name the cluster")
        if not self.source.strip():
            raise TopologyError(f"cluster {self.name!r}: source: empty", remedy="state the origin of the figures")
        for link in Link:
            self.link(link).check(f"cluster {self.name!r}: {link}")
        self.exposed.check(f"cluster {self.name!r}: exposed")
        if self.world is not None:
            self.world.check(f"cluster {self.name!r}: world")
        if self.step_costs is not None:
            self.step_costs.check(f"cluster {self.name!r}: step_costs")

    def link(self, link: Link) -> LinkModel:
        model: LinkModel = getattr(self, link.value)
        return model

    def curve(self, link: Link, collective: Collective) -> CollectiveCurve:
        return self.link(link).curve(collective)

    @property
    def is_affine(self) -> bool:
        """True if no bandwidth depends on the message size, so that prices are the same for every placement."""
        curves = [self.curve(link, collective) for link in Link for collective in Collective]
        return all(curve.is_affine for curve in (*curves, *([self.world.all_to_all] if self.world else [])))

    def of_layout(self, nodes: int, local_ranks: int) -> Cluster:
        """Return the cluster as a job of this layout uses it: without the all-to-all over another one's ranks."""
        world = self.world
        if world is None or (world.nodes, world.local_ranks) == (nodes, local_ranks):
            return self
        return replace(self, world=None)

    def with_curves(self, change: Callable[[Link, CollectiveCurve], CollectiveCurve]) -> Cluster:
        """Return the same cluster with every curve changed; that of the world counts as one between nodes."""
        intra = self.intra_node.with_curves(lambda curve: change(Link.INTRA_NODE, curve))
        inter = self.inter_node.with_curves(lambda curve: change(Link.INTER_NODE, curve))
        world = self.world
        if world is not None:
            world = replace(world, all_to_all=change(Link.INTER_NODE, world.all_to_all))
        return replace(self, intra_node=intra, inter_node=inter, world=world)

    def scale_seconds(self, factors: Mapping[Link, float]) -> Cluster:
        """Return the same cluster with the seconds of all collectives of links multiplied; those of all ranks take the
        factor between nodes."""

        return self.with_curves(lambda link, curve: curve.scale_seconds(factors.get(link, 1.0)))

    def with_exposed(self, exposed: Exposed, name: str = "") -> Cluster:
        """Return the same cluster with other exposed shares, and another name if one is given."""
        return replace(self, exposed=exposed, name=name or self.name)

    def bandwidth_only(self) -> Cluster:
        """Return the same cluster without latencies and step costs, for a small rehearsal of a job whose messages are
        large.

        They are fixed costs of a step, small beside the time of the bytes in a large job, and would dominate in a
        rehearsal with thousandths of the bytes.
        """
        return replace(self.with_curves(lambda link, curve: curve.divide_latency(math.inf)), step_costs=None)
