"""What the cost model knows of a cluster: for each link and collective, how long a message takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from flexd.core.errors import TopologyError

Float64Array = npt.NDArray[np.float64]


class Link(StrEnum):
    """Where bytes travel between two ranks."""

    INTRA_NODE = "intra_node"
    INTER_NODE = "inter_node"


class Collective(StrEnum):
    """The collectives a training step uses. A reduce-scatter is an all-gather backwards and priced as one."""

    ALL_TO_ALL = "all_to_all"
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"


@dataclass(frozen=True)
class CollectiveCurve:
    """Time of one collective on one link: ``latency + bytes / bandwidth(bytes)``.

    ``bytes`` are those that one rank sends over the link during the collective, so the bandwidth is the *bus bandwidth*
    of nccl-tests (doc/PERFORMANCE.md there), which compares with the wire whatever the collective.

    Attributes:
        latency_seconds: of an empty message.
        points: (message bytes, bytes per second) by increasing size; between two points the bandwidth is a power of the
            size (a straight line on log-log axes), beyond the ends it is constant.

    Raises:
        TopologyError: a value is NaN, zero or negative, sizes do not increase, or a larger message would be faster.
    """

    latency_seconds: float
    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        self.check("curve")

    def check(self, where: str) -> None:
        """Raises TopologyError that names ``where`` and the key at fault."""
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
        """One bandwidth at every size."""
        return len({bandwidth for _, bandwidth in self.points}) == 1

    def bandwidth(self, message_bytes: float) -> float:
        """Bytes per second at this message size."""
        sizes, bandwidths = np.array(self.points, dtype=np.float64).T
        at = math.log(max(message_bytes, float(sizes[0])))
        return float(np.exp(np.interp(at, np.log(sizes), np.log(bandwidths))))

    def seconds_per_byte(self, message_bytes: float) -> float:
        return 1.0 / self.bandwidth(message_bytes)

    def seconds(self, message_bytes: float) -> float:
        """Time of one collective in which each rank sends ``message_bytes`` over the link."""
        return self.latency_seconds + message_bytes / self.bandwidth(message_bytes)


@dataclass(frozen=True)
class LinkModel:
    """One link class. Collectives on it have one rank's share of the wire.

    Attributes:
        wire_bytes_per_second: what the hardware moves in one direction, per rank.
        all_to_all, all_reduce, all_gather: measured curves.
    """

    wire_bytes_per_second: float
    all_to_all: CollectiveCurve
    all_reduce: CollectiveCurve
    all_gather: CollectiveCurve

    def curve(self, collective: Collective) -> CollectiveCurve:
        curve: CollectiveCurve = getattr(self, collective.value)
        return curve

    def bandwidth_only(self) -> LinkModel:
        """The same link without latencies."""
        return LinkModel(
            self.wire_bytes_per_second,
            all_to_all=replace(self.all_to_all, latency_seconds=0.0),
            all_reduce=replace(self.all_reduce, latency_seconds=0.0),
            all_gather=replace(self.all_gather, latency_seconds=0.0),
        )

    def check(self, where: str) -> None:
        if not (math.isfinite(self.wire_bytes_per_second) and self.wire_bytes_per_second > 0):
            raise TopologyError(
                f"{where}.wire_bytes_per_second: {self.wire_bytes_per_second!r}", remedy="give bytes per second above 0"
            )
        for collective in Collective:
            self.curve(collective).check(f"{where}.{collective}")


@dataclass(frozen=True)
class Exposed:
    """Share (0-1) of each part of the communication that compute cannot hide, so that a step waits for it.

    Attributes:
        forward: the forward exchange. Nothing computes before the rows are there: 1, unless rows are fetched ahead.
        backward: the gradients on their way to the home ranks.
        sync: the replica synchronisation.
    """

    forward: float = 1.0
    backward: float = 1.0
    sync: float = 1.0

    def check(self, where: str) -> None:
        for key in ("forward", "backward", "sync"):
            value = getattr(self, key)
            if not (math.isfinite(value) and 0 <= value <= 1):
                raise TopologyError(f"{where}.{key}: {value!r}", remedy="give a share between 0 and 1")


@dataclass(frozen=True)
class Cluster:
    """Bandwidths and latencies of a cluster. How many nodes and ranks there are is ``RankLayout``'s matter.

    Attributes:
        name: of the file or preset.
        source: where the figures come from, in words.
        intra_node: between ranks of one node.
        inter_node: between ranks of equal local rank (a rail), all rails at work.
        exposed: what compute cannot hide.

    Raises:
        TopologyError: a figure is missing or not possible; the text names its key.
    """

    name: str
    source: str
    intra_node: LinkModel
    inter_node: LinkModel
    exposed: Exposed = Exposed()

    def __post_init__(self) -> None:
        if not self.name:
            raise TopologyError("name: empty", remedy="name the cluster")
        if not self.source.strip():
            raise TopologyError(f"cluster {self.name!r}: source: empty", remedy="say where the figures come from")
        for link in Link:
            self.link(link).check(f"cluster {self.name!r}: {link}")
        self.exposed.check(f"cluster {self.name!r}: exposed")

    def link(self, link: Link) -> LinkModel:
        model: LinkModel = getattr(self, link.value)
        return model

    def curve(self, link: Link, collective: Collective) -> CollectiveCurve:
        return self.link(link).curve(collective)

    @property
    def is_affine(self) -> bool:
        """No bandwidth depends on the message size, so prices are the same for every placement."""
        return all(self.curve(link, collective).is_affine for link in Link for collective in Collective)

    def with_exposed(self, exposed: Exposed) -> Cluster:
        """The same cluster under another runtime, which hides more or less."""
        return replace(self, exposed=exposed)

    def bandwidth_only(self) -> Cluster:
        """The same cluster without latencies: for a small rehearsal of a job whose messages are large.

        Latency is a fixed cost of a step. In a large job it is small beside the bytes; in a rehearsal with thousandths
        of the bytes it would be all there is.
        """
        return replace(self, intra_node=self.intra_node.bandwidth_only(), inter_node=self.inter_node.bandwidth_only())
