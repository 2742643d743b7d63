"""Seconds of collectives: the cluster's curves at the size of the busiest rank's message."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from flexd.simulate.byte_counter import INTER, INTRA, CollectiveBytes, StepPart
from flexd.topology.cluster import Cluster, Collective, CollectiveCurve, Link

Float64Array = npt.NDArray[np.float64]

_LINKS = {INTRA: Link.INTRA_NODE, INTER: Link.INTER_NODE}


def exposed_share(cluster: Cluster) -> Float64Array:
    """Return float64 [parts]: share that compute does not hide. A migration runs between steps and is never hidden."""
    exposed = cluster.exposed
    return np.array([exposed.forward, exposed.forward, exposed.backward, exposed.sync, exposed.sync, 1.0])


class CollectivePricer:
    """Prices collectives on a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.exposed_share = exposed_share(cluster)

    def seconds(self, collectives: Sequence[CollectiveBytes]) -> Float64Array:
        """float64 [parts]: collectives follow one another; each waits for its busiest rank."""
        total = np.zeros(len(StepPart))
        for one in collectives:
            total[one.part] += self._one(one)
        return total

    def _one(self, one: CollectiveBytes) -> float:
        """Latency, and the transfer. A collective over both links uses them at the same time: the slower counts."""
        over_world = one.collective is Collective.ALL_TO_ALL and bool(one.sent.any(axis=0).all())
        curves = {link: self._cluster.curve(of_link, one.collective) for link, of_link in _LINKS.items()}
        if over_world and self._cluster.world is not None:
            curves[INTER] = self._cluster.world.all_to_all
        latency = 0.0 if one.piggybacked else curves[one.link].latency_seconds
        return latency + max(_transfer(curve, float(one.peak[link])) for link, curve in curves.items())


def _transfer(curve: CollectiveCurve, message_bytes: float) -> float:
    return message_bytes / curve.bandwidth(message_bytes) if message_bytes else 0.0
