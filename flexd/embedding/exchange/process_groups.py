"""The process groups of the exchange: world, node and rail of each rank, and what ranks that form them compare.

``torch.distributed.new_group`` wants every rank to call it for every group: N + L calls on each of N x L ranks. A rank
is in one node and one rail, so here it makes those two alone, under names that all members derive equally: ranks agree
on a number when they make a collection, and every set of groups made since then is counted from it.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from flexd.core.errors import TopologyError
from flexd.core.placement import RankLayout
from flexd.core.usage_warnings import USAGE_WARNINGS, UsageWarningKind
from flexd.embedding.exchange.collectives import DEFAULT_TIMEOUT, DeviceWait, Peers, Traffic
from flexd.embedding.exchange.fault_notices import FaultNotices
from flexd.embedding.exchange.waits import Waits

_NAMED_TABLES = 5
MAX_BROADCAST_BYTES = 512
"""Of ``ChainGroups.broadcast``."""


@dataclass(frozen=True)
class Setting:
    """Something that is equal on all ranks.

    Attributes:
        subject: what it is, in the plural.
        value: whose ``repr`` is compared.
        kind: of the mistake, if it is one that is counted.
        here: this rank's value, for the error.
    """

    subject: str
    value: object
    kind: UsageWarningKind | None = None
    here: str = ""


def rows_of_tables(rows: Sequence[tuple[str, int]]) -> Setting:
    """Return the setting of the names of tables and their numbers of rows."""
    more = f" and {len(rows) - _NAMED_TABLES} more" if len(rows) > _NAMED_TABLES else ""
    shown = ", ".join(f"{name!r} with {number} rows" for name, number in rows[:_NAMED_TABLES])
    return Setting("names or row counts of tables", list(rows), UsageWarningKind.ROW_COUNTS, shown + more)


def seed_of_tables(seed: int) -> Setting:
    """Return the setting of the seed of initial values."""
    return Setting("seeds", seed, UsageWarningKind.DIFFERING_SEEDS, f"seed={seed}")


def check_same_settings(world: Peers, settings: Sequence[Setting], device: torch.device) -> None:
    """Collective. Compare settings by digest, in their order.

    Raises:
        TopologyError: on every rank: the first that differs, and the ranks whose setting is not rank 0's.
    """
    digests = [int(hashlib.sha256(repr(one.value).encode()).hexdigest()[:15], 16) for one in settings]
    mine = torch.tensor(digests, dtype=torch.int64, device=device)
    for one, everyone in zip(settings, world.all_gather(mine).T.tolist(), strict=True):
        odd = [rank for rank, digest in enumerate(everyone) if digest != everyone[0]]
        if odd:
            text = f"ranks {odd} have other {one.subject} than rank 0" + (f", here {one.here}" if one.here else "")
            if one.kind is not None:
                USAGE_WARNINGS.note(one.kind, text)
            raise TopologyError(text, remedy="construct the collection with the same arguments on every rank")


class ChainGroups:
    """World, node and rail of one rank.

    Collective: every rank of the default process group constructs it at the same point of the program. Without
    ``torch.distributed`` the world is one rank. Collectives have the timeout of the default process group.

    Args:
        device: device of the tensors in collectives.
        own: no other thread uses the process groups: a second thread needs groups of its own, because collectives of
            one group must not overtake each other. Else groups are shared by all collections.
        notices: of errors of ranks; by default new ones, in which the ranks of these groups share theirs. With those of
            other groups of the job, the layout is not compared again.

    Raises:
        TopologyError: on every rank, if the layout does not have as many ranks as the default process group, or the
            ranks were given different ones.
        CollectiveError: some ranks did not construct it within the timeout of the default process group.
    """

    def __init__(
        self,
        layout: RankLayout,
        traffic: Traffic,
        device: torch.device,
        notices: FaultNotices | None = None,
        *,
        own: bool = False,
    ) -> None:
        live = dist.is_available() and dist.is_initialized()
        world_size = dist.get_world_size() if live else 1
        self.rank = dist.get_rank() if live else 0
        timeout = (_timeout(device) if live else None) or DEFAULT_TIMEOUT
        self.notices = notices or FaultNotices()
        self._job = JobGroups.current()
        self._traffic = traffic
        self._wait = DeviceWait(timeout, self.notices)
        self._waits = Waits(self.notices, self.rank, "ahead" if own else "main")
        self.timeout_seconds = timeout.total_seconds()
        """Timeout of the default process group."""
        if world_size > 1 and notices is None:
            self.layout = RankLayout(1, world_size)
            self._meet("flexd.EmbeddingCollection()")
            everyone = Peers(
                self._job.default, range(world_size), self.rank, self.layout, traffic, self.notices, self._wait,
                self._waits,
            )  # fmt: skip
            with traffic.uncounted():
                JobGroups.number = _agree_on_layout(everyone, layout, device, JobGroups.number)
        if layout.world_size != world_size:
            raise TopologyError(
                f"layout of {layout.nodes} nodes x {layout.local_ranks} local ranks, but the process group has "
                f"{world_size} ranks",
                remedy="pass the layout of this job, or launch as many ranks as it has",
            )
        self.layout = layout
        self._own = own
        self.on_host = device.type == "cpu"
        """True if the groups are on gloo."""
        self._set = (
            self._job.of_second_thread(timeout) if own else self._job.of_training(timeout, shares=not self.on_host)
        )
        self._counted = notices is None
        if self._counted:
            self._job.begin_use()
        node_ranks = layout.node_ranks(layout.node_of(self.rank))
        rail_ranks = layout.rail_ranks(layout.local_rank_of(self.rank))
        self.node = self._peers("node", node_ranks)
        self.rail = self._peers("rail", rail_ranks)

    @cached_property
    def world(self) -> Peers:
        """All ranks. Collective at its first use in a second thread's groups, whose chain does not need it."""
        everyone = range(self.layout.world_size)
        return self._peers("world", everyone)

    def broadcast(self, text: str, device: torch.device, what: str) -> str:
        """Collective. Return the text of rank 0, without what it has beyond ``MAX_BROADCAST_BYTES`` in UTF-8.

        Args:
            what: the call that ranks make here, for the error.

        Raises:
            CollectiveError: some ranks did not make it within the timeout of the default process group.
        """
        self._meet(what)
        mine = list(text.encode()[:MAX_BROADCAST_BYTES].ljust(MAX_BROADCAST_BYTES, b"\0"))
        with self._traffic.uncounted():
            everyone = self.world.all_gather(torch.tensor(mine, dtype=torch.int64, device=device))
        return bytes(everyone[0].tolist()).rstrip(b"\0").decode(errors="ignore")

    def close(self, *, destroy: bool = True) -> None:
        """End the use of the groups.

        Collective with ``destroy`` for the last collection of a job: its groups are destroyed when no rank uses them.
        """
        if self._own:
            self._job.give_back(self._set)
        if not self._counted:
            return
        if destroy and self.layout.world_size > 1:
            self.notices.leave(self.rank, "has closed its collection")
            self._meet("EmbeddingCollection.close()")
        self._job.end_use(destroy=destroy)

    def _meet(self, what: str) -> None:
        self.notices.named_barrier(self.rank, self.layout.world_size, what, self.timeout_seconds)

    def _peers(self, kind: str, ranks: Sequence[int]) -> Peers:
        """Collective over the ranks the first time."""
        group = self._set.group(kind, ranks)
        first = self._set.group(kind, ranks, is_first=True) if self.on_host else None
        return Peers(group, ranks, self.rank, self.layout, self._traffic, self.notices, self._wait, self._waits, first)


def _timeout(device: torch.device) -> timedelta | None:
    """Return the timeout of the default process group. New groups would have torch's half an hour without it."""
    options = getattr(dist.group.WORLD._get_backend(device), "options", None)  # type: ignore[union-attr]
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


def _agree_on_layout(world: Peers, layout: RankLayout, device: torch.device, number: int) -> int:
    """Collective. Check that all ranks have the same layout; return the highest ``number`` of all ranks."""
    mine = torch.tensor([layout.nodes, layout.local_ranks, number], dtype=torch.int64, device=device)
    gathered = world.all_gather(mine).tolist()
    layouts = [shape[:2] for shape in gathered]
    odd = [rank for rank, shape in enumerate(layouts) if shape != layouts[0]]
    if odd:
        raise TopologyError(
            f"rank {odd[0]} has a layout of {layouts[odd[0]][0]} nodes x {layouts[odd[0]][1]} local ranks, rank 0 of "
            f"{layouts[0][0]} x {layouts[0][1]}",
            remedy="pass the same layout on every rank, or launch equally many ranks on every node",
        )
    return max(int(shape[2]) for shape in gathered)


def layout_from_environment() -> RankLayout:
    """Read nodes and local ranks from torchrun's ``LOCAL_WORLD_SIZE``; one node without it.

    Raises:
        TopologyError: the world size is no multiple of ``LOCAL_WORLD_SIZE``, or the process is one of several that have
            no process group yet.
    """
    live = dist.is_available() and dist.is_initialized()
    if not live and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise TopologyError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}, but there is no process group: each rank would train alone",
            remedy="call torch.distributed.init_process_group first, or pass layout=RankLayout(1, 1)",
        )
    world_size = dist.get_world_size() if live else 1
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if local < 1 or world_size % local:
        raise TopologyError(
            f"LOCAL_WORLD_SIZE={local} does not divide the world size {world_size}",
            remedy="pass layout=RankLayout(nodes, local_ranks)",
        )
    return RankLayout(world_size // local, local)


class GroupSet:
    """Node and rail of this rank, and on demand the world, for one thread that issues collectives.

    Args:
        name: unique in the job, equal on all ranks.
        world: the group of all ranks; None: one of this set, made when it is first used.
    """

    def __init__(self, name: str, timeout: timedelta | None, world: dist.ProcessGroup | None = None) -> None:
        self._name = name
        self._timeout = timeout
        self._made: dict[tuple[str, int, bool], dist.ProcessGroup] = {}
        self._world = world

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The groups that were made for this set."""
        return list(self._made.values())

    def group(self, kind: str, ranks: Sequence[int], *, is_first: bool = False) -> dist.ProcessGroup | None:
        """Return the group of these ranks; the first time collective over them. None for a single rank.

        Args:
            kind: "world", "node" or "rail".
            is_first: of the first messages of look-ups, see ``Peers``.
        """
        if len(ranks) < 2:
            return None
        if len(ranks) == dist.get_world_size():  # also a node or rail that has all ranks
            if self._world is not None:
                return self._world
            kind = "world"
        # Collections of another layout have nodes and rails of another size, on every rank.
        key = (kind, len(ranks), is_first)
        if key not in self._made:
            name = f"{self._name}/{kind}{'/first' * is_first}/{ranks[0]} and {len(ranks) - 1} more"
            self._made[key] = new_subgroup(ranks, name, self._timeout)
        return self._made[key]

    def destroy(self) -> None:
        """Destroy the groups. No rank may use them any more."""
        for group in self._made.values():
            if group in distributed_c10d._world.pg_map:
                dist.destroy_process_group(group)
        self.forget()

    def forget(self) -> None:
        """Let go of groups that are destroyed: what was made of this set may be in a reference cycle."""
        self._made.clear()
        self._world = None


class JobGroups:
    """The sets of groups of a default process group: one of all training threads, and one of each second thread.

    Every rank makes and closes its collections, and begins loops, in the same order, so either all ranks find a set
    here or none does.
    """

    number: ClassVar[int] = 0
    """Sets made so far in this process; the highest of all ranks once they have agreed on it. Names are never used
    twice: the store keeps the addresses of destroyed groups."""

    def __init__(self, default: dist.ProcessGroup | None = None) -> None:
        self.default = default
        self._of_training: GroupSet | None = None
        self._of_second_threads: list[GroupSet] = []  # and those that are not in use now
        self._unused: list[GroupSet] = []
        self._users = 0

    @staticmethod
    def current() -> JobGroups:
        """Return those of the present default process group."""
        default = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if _present[0].default is not default:
            # A collection of the group before keeps the object that counts it.
            for one in _present[0].sets:  # torch has destroyed the groups
                one.forget()
            _present[0].default = None
            _present[0] = JobGroups(default)
        return _present[0]

    @property
    def sets(self) -> list[GroupSet]:
        """All sets."""
        return [*([] if self._of_training is None else [self._of_training]), *self._of_second_threads]

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """All groups."""
        return [group for one in self.sets for group in one.groups]

    def begin_use(self) -> None:
        """Count a collection that uses the groups until ``end_use``."""
        self._users += 1

    def end_use(self, *, destroy: bool) -> None:
        """End the use of a collection; destroy all groups with the last one, unless ``destroy`` is false."""
        self._users -= 1
        if self._users == 0 and destroy:
            used = [one for one in self._of_second_threads if one not in self._unused]  # by threads that did not end
            for one in self.sets:
                if one not in used:
                    one.destroy()
            self._of_training, self._of_second_threads, self._unused = None, used, []

    def of_training(self, timeout: timedelta | None, *, shares: bool) -> GroupSet:
        """Return the set of the training thread.

        Args:
            shares: the group of all ranks is the default one, on which the trainer's other collectives are.
        """
        if self._of_training is None:
            self._of_training = GroupSet(self._new_name(), timeout, self.default if shares else None)
        return self._of_training

    def of_second_thread(self, timeout: timedelta) -> GroupSet:
        """Return a set that no other thread uses; give it back with ``give_back``."""
        if self._unused:
            return self._unused.pop()
        self._of_second_threads.append(GroupSet(self._new_name(), timeout))
        return self._of_second_threads[-1]

    def give_back(self, used: GroupSet) -> None:
        """Let another thread use a set."""
        self._unused.append(used)

    def _new_name(self) -> str:
        JobGroups.number += 1
        return f"flexd/{JobGroups.number}"


# Torch 2.13 has a type for it, 2.8 takes a string.
_GROUP_NAME: Any = getattr(distributed_c10d, "GroupName", str)
_present = [JobGroups()]
_RELEASE_SECONDS = 2.0
_THREADS = Path("/proc/self/task")


@atexit.register
def _release() -> None:
    """Release the groups while threads can still end: one that is destroyed with the modules aborts the process.

    So does a thread of gloo that frees the tensors of the last collective while the interpreter ends (PyTorch pull
    request 179291): it gets time for that here, also where the trainer does not destroy its process group.
    """
    _present[0] = JobGroups()
    deadline = time.monotonic() + _RELEASE_SECONDS
    while True:
        time.sleep(0.001)  # others need the interpreter's lock
        if not _gloo_runs(_THREADS) or time.monotonic() > deadline:
            return


def _gloo_runs(threads: Path) -> bool:
    """Return whether a thread of gloo does something; false where the system does not say."""
    for thread in threads.glob("*/stat"):
        with suppress(OSError):  # it has ended
            name, _, state = thread.read_text().partition("(")[2].rpartition(") ")
            if name.startswith("pt_gloo") and state.startswith("R"):
                return True
    return False


def new_subgroup(ranks: Sequence[int], name: str, timeout: timedelta | None) -> dist.ProcessGroup:
    """Make a process group. Its members alone call it, with equal arguments; every rank of the job makes one at the
    same point, or none does (NCCL may split the default group's communicator).

    Args:
        ranks: ascending, this rank among them.
        name: unique in the job.
    """
    default = dist.group.WORLD
    assert default is not None  # noqa: S101
    backend, store = distributed_c10d._world.pg_map[default]
    group: dist.ProcessGroup
    group, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        list(ranks).index(dist.get_rank()),
        list(ranks),
        dist.Backend(backend),
        store,
        _GROUP_NAME(name),
        timeout=timeout or distributed_c10d._get_default_timeout(dist.Backend(backend)),
        device_id=default.bound_device_id,
    )
    distributed_c10d._world.pg_group_ranks[group] = {member: index for index, member in enumerate(ranks)}
    return group
