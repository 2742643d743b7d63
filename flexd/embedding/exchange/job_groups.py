"""Process groups that the collections of a job share, and the calls that make and destroy them.

``torch.distributed.new_group`` wants every rank to call it for every group: N + L calls on each of N x L ranks. A rank
is in one node and one rail, so here it makes those two alone, under names that all members derive equally: ranks agree
on a number when they make a collection, and every set of groups made since then is counted from it.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist
from torch.distributed import distributed_c10d


class GroupSet:
    """Node and rail of this rank, and on demand the world, for one thread that issues collectives.

    Args:
        name: unique in the job, equal on all ranks.
        world: the group of all ranks; None: one of this set, made when it is first used.
    """

    def __init__(self, name: str, timeout: timedelta | None, world: dist.ProcessGroup | None = None) -> None:
        self._name = name
        self._timeout = timeout
        self._made: dict[tuple[str, int], dist.ProcessGroup] = {}
        self._world = world

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The groups that were made for this set."""
        return list(self._made.values())

    def group(self, kind: str, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """Return the group of these ranks; the first time collective over them. None for a single rank.

        Args:
            kind: "world", "node" or "rail".
        """
        if len(ranks) < 2:
            return None
        if len(ranks) == dist.get_world_size():  # also a node or rail that has all ranks
            if self._world is not None:
                return self._world
            kind = "world"
        # Collections of another layout have nodes and rails of another size, on every rank.
        key = (kind, len(ranks))
        if key not in self._made:
            name = f"{self._name}/{kind}/{ranks[0]} and {len(ranks) - 1} more"
            self._made[key] = new_subgroup(ranks, name, self._timeout)
        return self._made[key]

    def destroy(self) -> None:
        """Destroy the groups. No rank may use them any more."""
        for group in self._made.values():
            if group in distributed_c10d._world.pg_map:
                dist.destroy_process_group(group)
        self._made.clear()


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
        self._unused: list[GroupSet] = []
        self._users = 0

    @staticmethod
    def current() -> JobGroups:
        """Return those of the present default process group."""
        default = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if _present[0].default is not default:
            # A collection of the group before keeps the object that counts it.
            _present[0] = JobGroups(default)
        return _present[0]

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """All groups that can be used again."""
        sets = [self._of_training, *self._unused]
        return [group for one in sets if one is not None for group in one.groups]

    def begin_use(self) -> None:
        """Count a collection that uses the groups until ``end_use``."""
        self._users += 1

    def end_use(self, *, destroy: bool) -> None:
        """End the use of a collection; destroy all groups with the last one, unless ``destroy`` is false."""
        self._users -= 1
        if self._users == 0 and destroy:
            for one in [self._of_training, *self._unused]:
                if one is not None:
                    one.destroy()
            self._of_training, self._unused = None, []

    def of_training(self, timeout: timedelta | None) -> GroupSet:
        """Return the set of the training thread."""
        if self._of_training is None:
            self._of_training = GroupSet(self._new_name(), timeout, self.default)
        return self._of_training

    def of_second_thread(self, timeout: timedelta) -> GroupSet:
        """Return a set that no other thread uses; give it back with ``give_back``."""
        return self._unused.pop() if self._unused else GroupSet(self._new_name(), timeout)

    def give_back(self, used: GroupSet) -> None:
        """Let another thread use a set."""
        self._unused.append(used)

    def _new_name(self) -> str:
        JobGroups.number += 1
        return f"flexd/{JobGroups.number}"


_GROUP_NAME: Any = getattr(distributed_c10d, "GroupName", str)
"""Torch 2.13 has a type for it, 2.8 takes a string."""
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
