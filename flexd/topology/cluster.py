"""Model of a cluster: for each link and collective the time of a message as a function of its size.

A curve is fitted to measured times: latency from the small messages, then bandwidth at each size from the rest.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, get_type_hints

import numpy as np

from flexd.core.arrays import Float64Array
from flexd.core.bounds import Range
from flexd.core.errors import TopologyError

_MOST = sys.float_info.max
_Bandwidth = Annotated[float, Range(5e-324, _MOST), "give bytes per second above 0"]
_Seconds = Annotated[float, Range(0.0, _MOST), "give a number of seconds, at least 0"]
_Share = Annotated[float, Range(0.0, 1.0), "give a share between 0 and 1"]
_Several = Annotated[int, Range(2, _MOST), "give a number of at least 2"]


@cache
def _hints(kind: type) -> dict[str, Any]:
    """Return the types of a class's fields, with bounds. Kept, because a daemon makes a cluster for each status."""
    return get_type_hints(kind, include_extras=True)


def _check(value: Any, where: str) -> None:
    """Raise TopologyError that names ``where`` and the key of a figure outside its bounds, of this or a part of it.

    Types of figures state their bounds, and what to give instead.
    """
    hints = _hints(value.__class__)
    for name, given in vars(value).items():
        if is_dataclass(given):
            _check(given, f"{where}{name}.")
        elif hasattr(hints[name], "__metadata__"):
            bounds, remedy = hints[name].__metadata__
            # NaN is in none.
            if not bounds.low <= given <= bounds.high:
                raise TopologyError(f"{where}{name}: {given!r}", remedy=remedy)
    if isinstance(value, CollectiveCurve):
        value.check_points(f"{where}points")


class Link(StrEnum):
    """Class of the link between two ranks."""

    INTRA_NODE = "intra_node"
    INTER_NODE = "inter_node"


INTRA, INTER = range(len(Link))
"""Indices of the links in arrays."""


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

    latency_seconds: _Seconds
    points: tuple[tuple[float, float], ...]

    def check_points(self, where: str) -> None:
        """Raise TopologyError that names ``where`` and the invalid point: a value is NaN, zero or negative, sizes do
        not increase, or a larger message would be faster."""
        if not self.points:
            raise TopologyError(f"{where}: empty", remedy="give at least one [message bytes, bytes per second]")
        for i, (size, bandwidth) in enumerate(self.points):
            if not (math.isfinite(size) and size > 0 and math.isfinite(bandwidth) and bandwidth > 0):
                raise TopologyError(
                    f"{where}[{i}]: [{size!r}, {bandwidth!r}]",
                    remedy="message bytes and bytes per second must be finite and above 0",
                )
            if i and size <= self.points[i - 1][0]:
                raise TopologyError(f"{where}[{i}]: size {size:g} does not increase", remedy="sort by size")
            if i and size / bandwidth < self.points[i - 1][0] / self.points[i - 1][1]:
                raise TopologyError(
                    f"{where}[{i}]: {size:g} bytes would take less time than {self.points[i - 1][0]:g}",
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

    wire_bytes_per_second: _Bandwidth
    all_to_all: CollectiveCurve
    all_reduce: CollectiveCurve
    all_gather: CollectiveCurve

    def curve(self, collective: Collective) -> CollectiveCurve:
        curve: CollectiveCurve = getattr(self, collective.value)
        return curve

    def with_curves(self, change: Callable[[CollectiveCurve], CollectiveCurve]) -> LinkModel:
        """Return the same link with every curve changed."""
        return LinkModel(self.wire_bytes_per_second, **{c.value: change(self.curve(c)) for c in Collective})


@dataclass(frozen=True)
class WorldModel:
    """All-to-all over all ranks of a job with several nodes and several ranks per node, which uses both links at once.

    Attributes:
        nodes, local_ranks: of the job that it was measured on; it holds for this layout only.
        all_to_all: curve by the bytes that one rank sends to other nodes. Bytes to the ranks of its node travel beside.
    """

    nodes: _Several
    local_ranks: _Several
    all_to_all: CollectiveCurve


@dataclass(frozen=True)
class Exposed:
    """The communication that a step waits for: a share (0-1) of each of its parts, which cannot run beside compute, and
    of the rest what is longer than the compute beside it.

    The shares of a file hold until ranks have reported theirs (``flexd.operations.training_monitor``).

    Attributes:
        forward: the forward exchange: 1, because compute needs the rows, unless rows are fetched ahead.
        backward: the exchange of gradients to the home ranks.
        sync: the replica synchronisation.
        cover_seconds: compute of a step beside which the rest can run.
    """

    forward: _Share = 1.0
    backward: _Share = 1.0
    sync: _Share = 1.0
    cover_seconds: Annotated[float, Range(0.0, math.inf), "give seconds, at least 0"] = math.inf


@dataclass(frozen=True)
class StepCosts:
    """The cost of a step of flexd's exchange beside the bytes on its links: launches, processor time, memory.

    ``flexd probe`` measures it on the ranks and device that train. Plans of tables are priced by it.

    Attributes:
        sums_seconds: of a step with tables of both pooling places, over one whose tables all are pooled at the
            requester.
        copies_seconds: of a step with tables that every rank has, over one without.
        row_bytes_per_second: at which look-ups and updates read and write rows, of one rank while all others do so.
    """

    sums_seconds: _Seconds
    copies_seconds: _Seconds
    row_bytes_per_second: _Bandwidth


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
        _check(self, f"cluster {self.name!r}: ")

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


# Messages that take at most this many times as long as the smallest one determine the latency.
_LATENCY_BOUND = 2.0
# Below this share of the latency the time of the bytes cannot be distinguished from noise.
_RESOLVED = 0.05
# Least relative increase of the bytes' time from one size to the next: keeps curves valid when figures are rounded.
_STEP = 1e-5
_DIGITS = 7
_LEAST_SECONDS = 1e-9


@dataclass(frozen=True)
class CollectiveTimes:
    """Measured times of one collective on one link.

    Attributes:
        message_bytes: float64[k], bytes that a rank sends over the link, ascending.
        seconds: k arrays float64[r], of one collective in each repetition; r may differ from size to size.
    """

    message_bytes: Float64Array
    seconds: tuple[Float64Array, ...]

    @property
    def medians(self) -> Float64Array:
        """float64[k] seconds."""
        return np.array([float(np.median(times)) for times in self.seconds])

    @property
    def spread(self) -> Float64Array:
        """float64[k]: distance of the quartiles as a share of the median."""
        quartiles = np.array([np.percentile(times, (25, 75)) for times in self.seconds])
        share: Float64Array = (quartiles[:, 1] - quartiles[:, 0]) / self.medians
        return share


def fit_curve(times: CollectiveTimes) -> CollectiveCurve:
    """Return the curve through the medians.

    - A size that took longer than a larger one was disturbed (a disturbance only adds time), so it gets the larger
      one's time.
    - Latency: the intercept at zero bytes of the times of the small messages, up to twice the smallest one's time
      (Theil-Sen: the median of the slopes between all pairs, so that one bad size does not tilt it).
    - Bandwidth at a size: its bytes over its time without the latency. A size at which that time cannot be
      distinguished from noise gives no point; the first point's bandwidth applies to it.
    """
    sizes = times.message_bytes
    seconds = np.minimum.accumulate(times.medians[::-1])[::-1]
    latency = _latency(sizes, seconds)
    moving = seconds - latency
    resolved = moving > np.maximum(_RESOLVED * latency, _LEAST_SECONDS)
    if not resolved.any():
        # All of it is latency. The largest size bounds the bandwidth from below.
        sizes, moving = sizes[-1:], np.array([max(moving[-1], _RESOLVED * latency, _LEAST_SECONDS)])
    else:
        first = int(np.argmax(resolved))
        sizes, moving = sizes[first:], moving[first:]
    rise = (1.0 + _STEP) ** np.arange(len(sizes))
    moving = np.maximum.accumulate(moving / rise) * rise
    points = tuple((float(size), _rounded(size / time)) for size, time in zip(sizes, moving, strict=True))
    return CollectiveCurve(_rounded(latency), points)


def _latency(sizes: Float64Array, seconds: Float64Array) -> float:
    """Return the seconds of an empty message, between 0 and the smallest message's time."""
    count = max(int(np.searchsorted(seconds, _LATENCY_BOUND * seconds[0], side="right")), min(2, len(sizes)))
    size, time = sizes[:count], seconds[:count]
    if count == 1:
        return float(time[0])
    i, j = np.triu_indices(count, 1)
    slope = float(np.median((time[j] - time[i]) / (size[j] - size[i])))
    return float(np.clip(np.median(time - slope * size), 0.0, seconds[0]))


def _rounded(value: float) -> float:
    """Round to a number of digits that is readable in a file."""
    return float(f"{value:.{_DIGITS}g}")
