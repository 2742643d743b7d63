"""Which rank processes there are, from their hellos. Pure: no clock, no network."""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from flexd.control.protocol.messages import Hello
from flexd.core.errors import ReplayedMessageError, TopologyError
from flexd.core.layout import RankLayout

MAX_RANKS = 65_536
MAX_ATTEMPTS = 8
"""Attempts whose hellos are kept at a time; the one longest unheard of is forgotten first."""
_MAX_ENDED_ATTEMPTS = 256
MAX_SESSIONS = 4 * MAX_RANKS
"""Rank processes whose newest hello is known, so that none of an older one is taken again after they are gone."""


@dataclass(frozen=True)
class Topology:
    """All ranks of one attempt, in rank order."""

    hellos: tuple[Hello, ...]

    @property
    def attempt(self) -> str:
        return self.hellos[0].attempt

    @property
    def layout(self) -> RankLayout:
        return RankLayout(self.hellos[0].nodes, self.hellos[0].local_ranks)

    @property
    def nonces(self) -> tuple[str, ...]:
        return tuple(hello.nonce for hello in self.hellos)

    @property
    def replica_slots(self) -> tuple[int, ...]:
        """For each dim-group, what every rank has (the minimum over ranks)."""
        return tuple(min(slots) for slots in zip(*(hello.replica_slots for hello in self.hellos), strict=True))

    @property
    def identity(self) -> str:
        """Equal exactly if these are the same processes with the same layout and slots."""
        parts = [self.attempt, str(self.layout)]
        parts += [f"{hello.session} {hello.replica_slots}" for hello in self.hellos]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


@dataclass
class _Member:
    hello: Hello
    heard_at: float


class RankPresence(NamedTuple):
    """Who of an attempt is here; empty without any attempt.

    Attributes:
        present, expected: numbers of ranks. missing: the ranks that are not here, in order.
    """

    attempt: str = ""
    present: int = 0
    expected: int = 0
    missing: tuple[int, ...] = ()


class Membership:
    """Collects hellos until an attempt is complete.

    Args:
        job, table_digest, groups: what every rank must agree with; ``groups`` is the number of dim-groups.
        silent_seconds: a rank not heard for so long is gone.
        replace_seconds: a new process may take a rank's place when the old one was silent for so long.
    """

    def __init__(
        self, job: str, table_digest: str, groups: int, silent_seconds: float, replace_seconds: float = 3.0
    ) -> None:
        self._job = job
        self._table_digest = table_digest
        self._groups = groups
        self._silent = silent_seconds
        self._replace = min(replace_seconds, silent_seconds)
        self._attempts: dict[str, dict[int, _Member]] = {}
        """In order of first hello."""
        self._ended: deque[str] = deque(maxlen=_MAX_ENDED_ATTEMPTS)
        self._newest: dict[str, int] = {}
        """Session -> sequence of its newest hello, the one longest silent first."""

    def accept(self, hello: Hello, now: float) -> bool:
        """Takes a hello in; True if it is a registration not seen before.

        Raises:
            TopologyError: it contradicts the daemon or its peers; the text is for the rank.
            ReplayedMessageError: not newer than what this process has said before, however long ago.
        """
        self._check(hello)
        members = self._attempts.get(hello.attempt, {})
        old = members.get(hello.rank)
        newest = self._newest.get(hello.session, -1)
        if hello.sequence <= newest:
            raise ReplayedMessageError(f"hello {hello.sequence} of rank {hello.rank} after {newest}")
        if old is not None and old.hello.session != hello.session and now - old.heard_at < self._replace:
            raise TopologyError(
                f"another process is rank {hello.rank} of attempt {hello.attempt!r}",
                remedy="give every launch of the job its own attempt id",
            )
        self._newest.pop(hello.session, None)
        self._newest[hello.session] = hello.sequence
        if len(self._newest) > MAX_SESSIONS:
            del self._newest[next(iter(self._newest))]
        self._attempts.setdefault(hello.attempt, {})[hello.rank] = _Member(hello, now)
        while len(self._attempts) > MAX_ATTEMPTS:
            quietest = min(self._attempts, key=lambda name: max(m.heard_at for m in self._attempts[name].values()))
            del self._attempts[quietest]
        return old is None or old.hello.nonce != hello.nonce

    def heard(self, attempt: str, rank: int, now: float) -> None:
        """A signed, fresh message of a rank has come."""
        member = self._attempts.get(attempt, {}).get(rank)
        if member is not None:
            member.heard_at = now

    def forgive(self, seconds: float) -> None:
        """The daemon itself did not listen for so long: nobody's silence counts for that time."""
        for members in self._attempts.values():
            for member in members.values():
                member.heard_at += seconds

    def expire(self, now: float) -> list[Hello]:
        """Forgets the silent ranks and returns their hellos."""
        gone = [
            member.hello
            for members in self._attempts.values()
            for member in members.values()
            if now - member.heard_at > self._silent
        ]
        for hello in gone:
            members = self._attempts[hello.attempt]
            del members[hello.rank]
            if not members:
                del self._attempts[hello.attempt]
        return gone

    def complete(self) -> Topology | None:
        """The newest attempt of which all ranks are here. Older attempts end with it, for good."""
        names = list(self._attempts)
        for at in range(len(names) - 1, -1, -1):
            members = self._attempts[names[at]]
            if len(members) == next(iter(members.values())).hello.world_size:
                for older in names[:at]:
                    del self._attempts[older]
                    self._ended.append(older)
                return Topology(tuple(members[rank].hello for rank in sorted(members)))
        return None

    def present(self) -> RankPresence:
        """Of the newest attempt."""
        if not self._attempts:
            return RankPresence()
        attempt, members = list(self._attempts.items())[-1]
        expected = next(iter(members.values())).hello.world_size
        missing = () if len(members) == expected else tuple(rank for rank in range(expected) if rank not in members)
        return RankPresence(attempt, len(members), expected, missing)

    def _check(self, hello: Hello) -> None:
        fault = ""
        if hello.job != self._job:
            fault = f"the daemon serves job {self._job!r}, not {hello.job!r}"
        elif hello.table_digest != self._table_digest:
            fault = f"the tables differ: digest {hello.table_digest} here, {self._table_digest} at the daemon"
        elif len(hello.replica_slots) != self._groups:
            fault = f"{len(hello.replica_slots)} replica slot counts for {self._groups} dim-groups"
        elif not 0 < hello.world_size <= MAX_RANKS or not 0 <= hello.rank < hello.world_size:
            fault = f"rank {hello.rank} of {hello.world_size} is not possible"
        elif min(hello.nodes, hello.local_ranks) < 1 or hello.nodes * hello.local_ranks != hello.world_size:
            fault = f"{hello.nodes} nodes x {hello.local_ranks} local ranks are not {hello.world_size} ranks"
        elif hello.attempt in self._ended:
            fault = f"attempt {hello.attempt!r} has been replaced by a newer one"
        else:
            peer = next((member.hello for member in self._attempts.get(hello.attempt, {}).values()), hello)
            if (peer.nodes, peer.local_ranks) != (hello.nodes, hello.local_ranks):
                fault = (
                    f"{hello.nodes} nodes x {hello.local_ranks} local ranks, but rank {peer.rank} of this attempt says "
                    f"{peer.nodes} x {peer.local_ranks}"
                )
        if fault:
            raise TopologyError(
                fault, remedy="make job name, tables (same order) and world size equal on daemon and all ranks"
            )
