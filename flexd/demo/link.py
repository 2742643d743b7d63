"""An emulated link between nodes, without root: token buckets around the collectives that leave a node."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from flexd.demo.setup import EmulatedCluster
from flexd.embedding.exchange.collectives import Peers
from flexd.topology.cluster import Cluster, CollectiveCurve, LinkModel


class EmulatedLink:
    """This rank's share of its node's link, in both directions. Thread-safe; all threads share it.

    Bytes leave one after the other at the rate, and so arrive: a collective ends when the bytes of this rank have left
    and those for it have arrived. A share that a neighbour does not use is not lent.

    Args:
        bytes_per_second: in each direction.
    """

    def __init__(
        self,
        bytes_per_second: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._seconds_per_byte = 1 / bytes_per_second
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._free_at = [0.0, 0.0]
        self._open = True

    @contextmanager
    def carry(self, sent_bytes: float, received_bytes: float) -> Iterator[None]:
        """Carry one collective, which runs inside: it begins when the bytes have left, and ends when others arrived."""
        if not self._open:
            yield
            return
        with self._lock:
            left_at, arrived_at = (self._reserve(*each) for each in enumerate((sent_bytes, received_bytes)))
        # Ranks that receive wait for this rank's call by themselves.
        self._wait_until(left_at)
        yield
        self._wait_until(arrived_at)

    @contextmanager
    def unlimited(self) -> Iterator[None]:
        """Carry nothing inside: checks and exports are not part of training."""
        before, self._open = self._open, False
        try:
            yield
        finally:
            self._open = before

    def _reserve(self, direction: int, count: float) -> float:
        """Return when so many bytes have passed, after those of earlier calls; now if there are none."""
        now = self._clock()
        if count:
            self._free_at[direction] = now = max(now, self._free_at[direction]) + count * self._seconds_per_byte
        return now

    def _wait_until(self, at: float) -> None:
        left = at - self._clock()
        if left > 0:
            self._sleep(left)


def limit_collectives(link: EmulatedLink) -> None:
    """Let ``link`` carry all collectives of this process's collections from now on.

    Waits fall inside the laps of the phase meter, so that phases and exposed time are those of the emulated link.
    """
    due = threading.local()
    kept = {name: getattr(Peers, name) for name in ("all_to_all", "all_reduce", "all_gather", "_measured")}

    def all_to_all(
        self: Peers,
        send: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        *rest: Any,
        **more: Any,
    ) -> torch.Tensor:
        width = send.element_size()
        due.bytes = tuple(
            width * sum(count for count, far in zip(counts, self.far, strict=True) if far)
            for counts in (send_counts, receive_counts)
        )
        received: torch.Tensor = kept["all_to_all"](self, send, send_counts, receive_counts, *rest, **more)
        return received

    def all_reduce(self: Peers, flat: torch.Tensor, *rest: Any, **more: Any) -> None:
        # Each byte goes round the ring twice, less the part that a rank keeps.
        count = (
            2 * flat.numel() * flat.element_size() * (self.size - 1) / self.size * sum(self.far) / max(1, self.size - 1)
        )
        due.bytes = (count, count)
        kept["all_reduce"](self, flat, *rest, **more)

    def all_gather(self: Peers, part: torch.Tensor) -> torch.Tensor:
        count = part.numel() * part.element_size() * sum(self.far)
        due.bytes = (count, count)
        parts: torch.Tensor = kept["all_gather"](self, part)
        return parts

    @contextmanager
    def measured(self: Peers, *call: str) -> Iterator[None]:
        sent, received = getattr(due, "bytes", (0.0, 0.0))
        due.bytes = (0.0, 0.0)
        with kept["_measured"](self, *call), link.carry(sent, received):
            yield

    limited = {"all_to_all": all_to_all, "all_reduce": all_reduce, "all_gather": all_gather, "_measured": measured}
    for name, function in limited.items():
        setattr(Peers, name, function)


LATENCY_SECONDS = 1e-3
"""Of a collective of ranks that share a machine's cores, roughly."""


def link_cluster(emulated: EmulatedCluster) -> Cluster:
    """Return the emulated cluster for pricing plans."""

    def link(bytes_per_second: float) -> LinkModel:
        curve = CollectiveCurve(LATENCY_SECONDS, ((1.0, bytes_per_second),))
        return LinkModel(bytes_per_second, curve, curve, curve)

    source = f"given: {emulated.link_mbit:g} Mbit/s per node and direction, shared by its ranks"
    # Processes on one machine exchange bytes of this order.
    return Cluster("emulated", source, link(1e9), link(rank_bytes_per_second(emulated)))


def rank_bytes_per_second(emulated: EmulatedCluster) -> float:
    """Return a rank's share of its node's link."""
    return emulated.link_mbit * 1e6 / 8 / emulated.local_ranks
