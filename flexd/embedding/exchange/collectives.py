"""Collectives over one group of ranks, and counters of the bytes they send."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from functools import partial
from types import MappingProxyType

import torch
import torch.distributed as dist

from flexd.core.errors import CollectiveError, TopologyError
from flexd.core.placement import RankLayout
from flexd.core.step_phases import StepPhase
from flexd.embedding.exchange.calls import PhaseMeter
from flexd.embedding.exchange.fault_notices import FIRST_LOOK, FaultNotices
from flexd.embedding.exchange.waits import Waits

# torch 2.13 renamed it and warns of the old name.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TrafficKind(StrEnum):
    ALL_TO_ALL = "all_to_all"
    SYNC = "sync"
    MIGRATION = "migration"


@dataclass
class Traffic:
    """Running totals of one rank: payload bytes sent to other ranks, by link class, and lookups by tier.

    An all-reduce of n bytes over m ranks is counted as the 2 n (m-1)/m bytes each rank sends in it and an all-gather
    as the n (m-1) it forwards; gloo's wire counters agree (``tools.bench cluster``).
    """

    all_to_all_intra_bytes: int = 0
    all_to_all_inter_bytes: int = 0
    sync_intra_bytes: int = 0
    sync_inter_bytes: int = 0
    migration_intra_bytes: int = 0
    migration_inter_bytes: int = 0
    home_accesses: int = 0
    node_accesses: int = 0
    device_accesses: int = 0
    phases: PhaseMeter = field(default_factory=PhaseMeter, repr=False, compare=False)
    """Meter of the thread whose collectives are counted here."""

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave out collectives inside that are not part of training (checks, exports)."""
        before = self.totals()
        try:
            with self.phases.uncounted():
                yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)

    def sent(self, intra_bytes: int, inter_bytes: int, kind: TrafficKind = TrafficKind.ALL_TO_ALL) -> None:
        """Add sent bytes."""
        intra, inter = (f"{kind}_{link}_bytes" for link in ("intra", "inter"))
        setattr(self, intra, getattr(self, intra) + intra_bytes)
        setattr(self, inter, getattr(self, inter) + inter_bytes)

    def add(self, other: Traffic) -> None:
        """Add the totals of ``other``."""
        for name, value in other.totals().items():
            setattr(self, name, getattr(self, name) + value)

    def reset(self) -> None:
        """Set all totals to 0."""
        for name in self.totals():
            setattr(self, name, 0)

    def totals(self) -> dict[str, int]:
        return {name: value for name, value in vars(self).items() if isinstance(value, int)}


# Share of a group's timeout: NCCL's watchdog ends the process when all of it has passed, without an error.
_SHARE = 0.9
_SPIN_SECONDS = 1e-3
_POLL_SECONDS = 1e-4
_LOOK_SECONDS = 1.0
DEFAULT_TIMEOUT = timedelta(minutes=10)


class DeviceWait:
    """The last collective that was queued on the device, and the deadline for it.

    Each collective is queued after the one before, so when the last is done all are. Without it the host would wait
    for a rank that has died in whatever it reads next from the device, until the watchdog ends the process.

    Args:
        timeout: of the process groups.
        notices: looked at once a second of waiting.
    """

    def __init__(
        self,
        timeout: timedelta,
        notices: FaultNotices,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds = _SHARE * timeout.total_seconds()
        self._notices = notices
        self._clock = clock
        self._last: tuple[dist.Work, str, float, Callable[[], None]] | None = None

    def started(self, work: dist.Work, what: str, look: Callable[[], None]) -> None:
        """Record a collective that the device runs.

        Args:
            what: rank, collective and other ranks, for the error.
            look: called about once a second of waiting; see ``Waits.look``.
        """
        self._last = work, what, self._clock(), look

    def finish(self) -> None:
        """Wait until the device has run every collective; the host may read its results then.

        Raises:
            CollectiveError: it takes longer than the group's timeout allows, or another rank had an error.
        """
        if self._last is None:
            return
        (work, what, started, look_at_others), self._last = self._last, None
        since = look = self._clock()
        while not work.is_completed():
            now = self._clock()
            if now - look >= _LOOK_SECONDS:
                look = now
                if (notice := self._notices.find()) is not None:
                    raise CollectiveError(
                        f"{what}: {notice}",
                        remedy="see the log of the rank named last, then restart the job from a checkpoint",
                    )
                look_at_others()
            if now - started >= self._seconds:
                raise CollectiveError(
                    f"{what}: not done on the device after {now - started:.1f} s",
                    remedy="one of them has died, hangs, or makes other calls than this one: see its log, then restart "
                    "the job from a checkpoint; if they are only slow, give init_process_group a longer timeout",
                )
            if now - since >= _SPIN_SECONDS:
                time.sleep(_POLL_SECONDS)


_LOOKS_UP = StepPhase.IDS, StepPhase.ROWS
_DOING = {
    StepPhase.IDS: "looks rows up",
    StepPhase.ROWS: "looks rows up",
    StepPhase.DENSE: "reads, loads, saves or compares tables",
    StepPhase.PUSH: "steps, clips or unscales",
    StepPhase.SYNC: "steps, clips or unscales",
    StepPhase.UPDATE: "steps",
    StepPhase.APPLY: "applies a migration",
}


def _cause_of(error: RuntimeError) -> str:
    """Return in words why a collective failed. Gloo's texts name files of its source."""
    text = str(error).strip().partition("\n")[0] or type(error).__name__
    if "imed out" in text or "timeout" in text:
        return "no answer within the timeout of the process group"
    if any(word in text for word in ("losed by peer", "reset by peer", "Broken pipe", "Read error")):
        return "a connection was closed"
    return text.rpartition("] ")[2] if text.startswith("[") else text


def _referenced(group: weakref.ref[dist.ProcessGroup] | None) -> dist.ProcessGroup | None:
    found = None if group is None else group()
    if found is None and group is not None:
        raise RuntimeError("the process group has been destroyed")
    return found


class Peers:
    """One group of ranks that a rank exchanges with; collectives over a single rank are skipped.

    Attributes:
        ranks: ascending global ranks of the group, this rank among them.
        index: place of this rank in ``ranks``.
        far: for each member, whether a message to it leaves the node.

    Args:
        notices: where a rank that waits for others looks for their errors.
        device_wait: shared by all groups whose collectives are queued on one stream.
        waits: shared by all groups of a thread.
        first_group: of the first message of a look-up. On gloo a message that is longer than the one that its receiver
            waits for ends the process: ranks in different calls then wait in different groups. None: ``group``.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        ranks: Sequence[int],
        rank: int,
        layout: RankLayout,
        traffic: Traffic,
        notices: FaultNotices,
        device_wait: DeviceWait,
        waits: Waits,
        first_group: dist.ProcessGroup | None = None,
    ) -> None:
        # Weak: the set of groups holds them. What uses rows is in reference cycles, and a group that is collected in a
        # forked child waits there for threads that only its parent has.
        self._group, self._first_group = (None if one is None else weakref.ref(one) for one in (group, first_group))
        self.rank = rank
        self.ranks = list(ranks)
        self.size = len(self.ranks)
        self.index = self.ranks.index(rank)
        node = layout.node_of(rank)
        self.far = [layout.node_of(peer) != node for peer in self.ranks]
        self._leaves_node = any(self.far)
        self._traffic = traffic
        self._notices = notices
        self._device_wait = device_wait
        self._waits = waits
        self._name = f"{self.ranks[0]} to {self.ranks[-1]} of {self.size}"

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; None: there is one rank, and none is needed.

        Raises:
            RuntimeError: it has been destroyed.
        """
        return _referenced(self._group)

    def all_to_all(
        self,
        send: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        of_kinds: Mapping[TrafficKind, Sequence[int]] = MappingProxyType({}),
        *,
        is_first: bool = False,
    ) -> torch.Tensor:
        """Flat ``send`` split by peer -> flat received, split by ``receive_counts``.

        Args:
            of_kinds: the part of each peer's ``send_counts`` that is counted as synchronisation or migration.
            is_first: it begins a look-up, so that it may meet another call of another rank.
        """
        if self.size == 1:
            return send
        received = send.new_empty(sum(receive_counts))
        group, name = self.group, self._name
        if is_first and self._first_group is not None:
            group, name = _referenced(self._first_group), f"{name}, first"
        with self._measured("all_to_all", name):
            self._wait(
                dist.all_to_all_single(
                    received, send, list(receive_counts), list(send_counts), group=group, async_op=True
                ),
                send,
                "all_to_all",
                name,
            )
        width = send.element_size()
        others = list(send_counts)
        for kind, counts in of_kinds.items():
            others = [count - part for count, part in zip(others, counts, strict=True)]
            self._count([part * width for part in counts], kind)
        self._count([count * width for count in others])
        return received

    def all_reduce(
        self,
        flat: torch.Tensor,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        kind: TrafficKind = TrafficKind.ALL_TO_ALL,
    ) -> None:
        """All-reduce in place; the result is bit-equal on every member."""
        if self.size == 1 or flat.numel() == 0:
            return
        with self._measured("all_reduce", self._name):
            work = dist.all_reduce(flat, op=op, group=self.group, async_op=True)
            self._wait(work, flat, "all_reduce", self._name)
        self._count_even(2 * flat.numel() * flat.element_size() * (self.size - 1) // self.size, kind)

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        """[n, ...] on every member (equal shapes) -> [size, n, ...]."""
        if self.size == 1:
            return part.unsqueeze(0)
        parts = part.new_empty((self.size, *part.shape))
        if part.numel():
            with self._measured("all_gather", self._name):
                work = all_gather_flat(parts.view(-1), part.reshape(-1), group=self.group, async_op=True)
                self._wait(work, part, "all_gather", self._name)
            self._count_even(part.numel() * part.element_size() * (self.size - 1))
        return parts

    def check_world_unchanged(self) -> None:
        """Raise TopologyError if this group of one process was made before the default process group."""
        if self._group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise TopologyError(
                f"the tables are older than the process group of {dist.get_world_size()} ranks: each rank has its own",
                remedy="call torch.distributed.init_process_group before constructing the collection",
            )

    @contextmanager
    def _measured(self, collective: str, name: str) -> Iterator[None]:
        """Measure a collective, and raise errors of the process group as CollectiveError that names ranks and
        collective."""
        phases = self._traffic.phases
        phases.begin_collective()
        self._waits.begin(name)
        try:
            yield
            self._waits.end()
            phases.end_collective(leaves_node=self._leaves_node)
        except CollectiveError:
            raise
        except RuntimeError as error:
            notice = self._notices.find()  # why the collective fails or does not return
            cause = notice or _cause_of(error)
            raise CollectiveError(
                f"rank {self.rank}: {collective} with ranks {self._named_others()}: {cause}",
                remedy="one of them has died, hangs, or makes other calls than this one: see its log, then restart the "
                "job from a checkpoint"
                if notice is None
                else "see the log of the rank named last, then restart the job from a checkpoint",
            ) from error

    def finish_on_device(self) -> None:
        """Wait, with a deadline, until an accelerator has run all collectives. Call it before the host reads anything.

        Raises:
            CollectiveError: a rank has died, hangs or had an error.
        """
        self._device_wait.finish()

    def _wait(self, work: dist.Work, sent: torch.Tensor, collective: str, name: str) -> None:
        """Wait for a collective. A rank that waits for long looks for the error of another one meanwhile."""
        if sent.device.type != "cpu":
            work.wait()  # the device waits, not the host
            what = f"rank {self.rank}: {collective} with ranks {self._named_others()}"
            self._device_wait.started(work, what, partial(self._look, name))
            if not sent.is_floating_point() and sent.dtype != torch.uint8:
                # Ids and sizes: the host reads them, or how many are distinct, next. Rows are read by the device alone.
                self._device_wait.finish()
            return
        while True:
            try:
                work.wait(FIRST_LOOK)
            except RuntimeError:
                if work.is_completed():  # with an error of its own, or just now
                    work.wait()
                    return
                if self._notices.find() is not None:
                    raise
                self._look(name)
            else:
                return

    def _look(self, name: str) -> None:
        phase = self._traffic.phases.in_progress
        for_evaluation = " for evaluation" if phase in _LOOKS_UP and not torch.is_grad_enabled() else ""
        self._waits.look(name, self.ranks, _DOING[phase] + for_evaluation)

    def _named_others(self) -> str:
        return ", ".join(str(rank) for rank in self.ranks if rank != self.rank)

    def _count(self, bytes_by_peer: Sequence[int], kind: TrafficKind = TrafficKind.ALL_TO_ALL) -> None:
        intra = inter = 0
        for peer, sent in enumerate(bytes_by_peer):
            if peer == self.index:
                continue
            if self.far[peer]:
                inter += sent
            else:
                intra += sent
        self._sent(intra, inter, kind)

    def _count_even(self, total: int, kind: TrafficKind = TrafficKind.ALL_TO_ALL) -> None:
        """Count a collective whose sent bytes spread evenly over the other members."""
        others = self.size - 1
        far = sum(self.far)
        self._sent(total * (others - far) // others, total * far // others, kind)

    def _sent(self, intra_bytes: int, inter_bytes: int, kind: TrafficKind) -> None:
        self._traffic.sent(intra_bytes, inter_bytes, kind)
        self._traffic.phases.sent(intra_bytes, inter_bytes)
