"""The set of rank processes, collected from their hellos, and the attempt that holds the job. No network.

::

    (unknown) --all ranks registered, none holds--> HOLDS --no rank heard for silent_seconds--> (unknown)
        `--another holds--> refused; its ranks register again

No attempt is excluded for good: one whose ranks are heard again gets the job once no other holds it.
"""

import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from flexd.control.protocol.messages import Bytes, Hello, TableList
from flexd.control.protocol.report import TrainerSettings, table_differences, tables_of_body
from flexd.core.errors import TopologyError
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.placement import RankLayout

MAX_NAME_CHARACTERS = 200
MAX_RANKS = 65_536
MAX_ATTEMPTS = 8
"""Attempts whose hellos are kept; beyond that, the attempt whose newest message is oldest is dropped."""
MAX_REFUSALS = 64
"""Refused ranks that are listed in the status, and attempts that are counted as waiting."""
# Lists and attempts that are kept; beyond that, the oldest is dropped.
_MAX_LISTS = 4
# Hosts of the attempt that holds the job in the refusal of another.
_NAMED_HOSTS = 3


@dataclass(frozen=True)
class Topology:
    """All ranks of one attempt, in rank order."""

    hellos: tuple[Hello, ...]

    @property
    def attempt(self) -> str:
        return self.hellos[0].identity.attempt

    @property
    def layout(self) -> RankLayout:
        return RankLayout(self.hellos[0].identity.nodes, self.hellos[0].identity.local_ranks)

    @property
    def nonces(self) -> tuple[str, ...]:
        return tuple(hello.nonce for hello in self.hellos)

    @property
    def replica_slots(self) -> tuple[int, ...]:
        """Replica slots that every rank has (the minimum over ranks), for each dim-group."""
        return tuple(min(slots) for slots in zip(*(hello.identity.replica_slots for hello in self.hellos), strict=True))

    @property
    def copies_memory_bytes(self) -> int | None:
        """Memory for copies that every rank has (the minimum over ranks); None if none says."""
        known = [hello.identity.copies_memory_bytes for hello in self.hellos]
        return min((each for each in known if each is not None), default=None)

    @property
    def trainer(self) -> TrainerSettings | None:
        """Return how the trainer constructed its collections; None if rank 0 does not say."""
        return self.hellos[0].identity.trainer

    @property
    def identity(self) -> str:
        """A digest that is equal exactly if these are the same processes with the same layout and slots."""
        parts = [self.attempt, str(self.layout)]
        parts += [f"{hello.session} {hello.identity.replica_slots}" for hello in self.hellos]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


@dataclass
class _Member:
    hello: Hello
    heard_at: float
    connected: bool = True


class RankPresence(NamedTuple):
    """The ranks of an attempt that are registered; empty without any attempt.

    Attributes:
        present: number of registered ranks.
        expected: number of all ranks.
        missing: the ranks that are not registered, in order.
    """

    attempt: str = ""
    present: int = 0
    expected: int = 0
    missing: tuple[int, ...] = ()


class RefusedRank(NamedTuple):
    """A rank whose newest hello was refused."""

    attempt: str
    rank: int
    reason: str

    def __str__(self) -> str:
        return f"rank {self.rank} of attempt {self.attempt!r} is refused: {self.reason}"


@dataclass(frozen=True)
class ProposedTables:
    """Tables that all ranks of an attempt have."""

    attempt: str
    tables: tuple[TableSpec, ...]


class TableProposals:
    """Collects hellos of ranks with other tables than the daemon has. Thread-safe.

    Args:
        fresh_seconds: a rank counts for so long after its hello.
    """

    def __init__(self, fresh_seconds: float) -> None:
        self._fresh = fresh_seconds
        self._lock = threading.Lock()
        # By digest.
        self._tables: dict[str, tuple[TableSpec, ...]] = {}
        # By attempt and rank, with the time of each.
        self._hellos: dict[str, dict[int, tuple[Hello, float]]] = {}

    def record_tables(self, message: TableList, body: Bytes) -> None:
        """Record the list of a rank. Raises ControlError: it cannot be read."""
        digest = message.digest
        tables = self.tables_of(digest) or tables_of_body(body, digest)
        with self._lock:
            self._tables.pop(digest, None)
            self._tables[digest] = tables
            if len(self._tables) > _MAX_LISTS:
                del self._tables[next(iter(self._tables))]

    def tables_of(self, digest: str) -> tuple[TableSpec, ...]:
        """Return the tables of a digest; none if no rank has sent them."""
        with self._lock:
            return self._tables.get(digest, ())

    def record_hello(self, hello: Hello, now: float) -> None:
        with self._lock:
            of_attempt = self._hellos.pop(hello.identity.attempt, {})
            self._hellos[hello.identity.attempt] = of_attempt
            of_attempt[hello.identity.rank] = (hello, now)
            if len(self._hellos) > _MAX_LISTS:
                del self._hellos[next(iter(self._hellos))]

    def proposed(self, now: float) -> ProposedTables | None:
        """Return the tables of an attempt whose ranks have all said hello lately, with equal tables; the newest."""
        with self._lock:
            for attempt, of_rank in reversed(self._hellos.items()):
                fresh = [hello for hello, at in of_rank.values() if now - at <= self._fresh]
                digests = {hello.identity.table_digest for hello in fresh}
                if len(digests) == 1 and len(fresh) == fresh[0].identity.world_size:
                    tables = self._tables.get(fresh[0].identity.table_digest)
                    if tables is not None:
                        return ProposedTables(attempt, tables)
            return None

    def waits_for(self, now: float) -> str:
        """Return what is missing, in words."""
        with self._lock:
            if not self._hellos:
                return "no rank has registered"
            attempt, of_rank = next(reversed(self._hellos.items()))
            fresh = [hello for hello, at in of_rank.values() if now - at <= self._fresh]
            if not fresh:
                return f"the ranks of attempt {attempt!r} have left"
            if len({hello.identity.table_digest for hello in fresh}) > 1:
                return f"ranks of attempt {attempt!r} have different tables"
            if len(fresh) < fresh[0].identity.world_size:
                return f"{len(fresh)} of {fresh[0].identity.world_size} ranks of attempt {attempt!r} have registered"
            return f"no rank of attempt {attempt!r} has sent its tables"


class Membership:
    """Collects hellos until an attempt is complete; it then holds the job while one of its ranks is heard. Thread-safe.

    Args:
        job, keyspace: every rank must have the same. Without a key space none has been learnt yet, and any will do.
        silent_seconds: a rank that sends nothing for so long is lost.
        replace_seconds: a new process may replace a rank that has sent nothing for so long.
        wall_clock: Unix seconds.
        max_ranks: of a job; a rank of a larger one is refused.
        takes_tables: tables of ranks may replace the daemon's.

    Attributes:
        tables: tables of ranks that have others than the daemon.
        problem: why no rank is accepted while there is no key space; empty if there is none.
        refusal_is_known: the rank that ``accept`` refused last had been refused shortly before.
    """

    def __init__(
        self,
        job: str,
        keyspace: KeySpace | None,
        silent_seconds: float,
        replace_seconds: float = 3.0,
        wall_clock: Callable[[], float] = time.time,
        max_ranks: int = MAX_RANKS,
        takes_tables: bool = False,
    ) -> None:
        self.tables = TableProposals(silent_seconds)
        self._takes_tables = takes_tables
        self._lock = threading.RLock()
        self._wall_clock = wall_clock
        # The attempt that holds the job.
        self._holder: str | None = None
        self._held_since = 0.0
        # Set while the holder is the one of an earlier daemon and none of its ranks has registered.
        self._expected_until: float | None = None
        # Attempts that were refused because another holds the job, with the time of each newest hello.
        self._waiting: dict[str, float] = {}
        self.refusal_is_known = False
        self.problem = ""
        self._job = job
        self._keyspace = keyspace
        self._max_ranks = max_ranks
        self._silent = silent_seconds
        self._replace = min(replace_seconds, silent_seconds)
        # In order of first hello.
        self._attempts: dict[str, dict[int, _Member]] = {}
        # (attempt, rank) -> refusal and its time, in order of their newest refusals.
        self._refused: dict[tuple[str, int], tuple[RefusedRank, float]] = {}

    def accept(self, hello: Hello, now: float) -> bool:
        """Register a hello; True if it is a new registration.

        Raises:
            TopologyError: it contradicts the daemon or its peers, or another attempt holds the job; the text is for the
                rank.
        """
        me = hello.identity
        with self._lock:
            old = self._attempts.get(me.attempt, {}).get(me.rank)
            try:
                self._check(hello, now)
                if old is not None and old.hello.session != hello.session and now - old.heard_at < self._replace:
                    raise TopologyError(
                        f"another process is rank {me.rank} of attempt {me.attempt!r}",
                        remedy="give every launch of the job its own attempt id",
                    )
                self._check_holder(me.attempt, now)
            except TopologyError as error:
                self._record_refusal(me.attempt, me.rank, error.message, now)
                raise
            self._refused.pop((me.attempt[:200], me.rank), None)
            self._attempts.setdefault(me.attempt, {})[me.rank] = _Member(hello, now)
            while len(self._attempts) > MAX_ATTEMPTS:
                quietest = min(self._attempts, key=lambda name: max(m.heard_at for m in self._attempts[name].values()))
                del self._attempts[quietest]
            return old is None or old.hello.nonce != hello.nonce

    def mark_heard(self, attempt: str, rank: int, now: float) -> None:
        """Note that a signed, fresh message of a rank has arrived."""
        with self._lock:
            member = self._attempts.get(attempt, {}).get(rank)
            if member is not None:
                member.heard_at = now

    def mark_disconnected(self, hello: Hello, now: float) -> bool:
        """Note that the connection of this registration has closed; False if the registration does not count any more.

        The rank is absent from now on, and lost unless it registers again within ``replace_seconds``.
        """
        with self._lock:
            member = self._attempts.get(hello.identity.attempt, {}).get(hello.identity.rank)
            if member is not None and member.hello.nonce == hello.nonce:
                member.heard_at = min(member.heard_at, now - self._silent + self._replace)
                member.connected = False
                return True
        return False

    def excuse_silence(self, seconds: float) -> None:
        """Do not count ``seconds``, during which the daemon itself did not receive, as silence of any rank."""
        with self._lock:
            if self._expected_until is not None:
                self._expected_until += seconds
            self._waiting = {name: heard_at + seconds for name, heard_at in self._waiting.items()}
            for members in self._attempts.values():
                for member in members.values():
                    member.heard_at += seconds

    def expire(self, now: float) -> list[Hello]:
        """Remove the silent ranks and return their hellos; drop refusals as old. A holder without ranks ends."""
        with self._lock:
            self._refused = {key: each for key, each in self._refused.items() if now - each[1] <= self._silent}
            silent = [
                member.hello
                for members in self._attempts.values()
                for member in members.values()
                if now - member.heard_at > self._silent
            ]
            for hello in silent:
                del self._attempts[hello.identity.attempt][hello.identity.rank]
            self._attempts = {name: members for name, members in self._attempts.items() if members}
            expected = self._expected_until is not None and now <= self._expected_until
            if self._holder not in self._attempts and not expected:
                self._holder = self._expected_until = None
            self._waiting = {name: heard for name, heard in self._waiting.items() if now - heard <= self._silent}
            return silent

    def complete(self) -> Topology | None:
        """Return the attempt that holds the job if its ranks are all registered. If none holds it, the newest attempt
        whose ranks are all registered gets it, and the others must register again.
        """
        with self._lock:
            holder = self._holder
            names = list(reversed(self._attempts)) if holder is None else [holder] * (holder in self._attempts)
            for name in names:
                members = self._attempts[name]
                connected = all(member.connected for member in members.values())
                if connected and len(members) == next(iter(members.values())).hello.identity.world_size:
                    if holder is None:
                        self._holder, self._held_since = name, self._wall_clock()
                        self._waiting.pop(name, None)
                    self._attempts = {name: members}
                    return Topology(tuple(members[rank].hello for rank in sorted(members)))
            return None

    def expect(self, attempt: str, now: float) -> None:
        """Keep the job for an attempt that held it under an earlier daemon, until its ranks had time to come back."""
        with self._lock:
            self._holder, self._held_since = attempt, self._wall_clock()
            self._expected_until = now + self._silent

    def waiting(self) -> int:
        """Return the number of attempts that were refused lately because another one holds the job."""
        with self._lock:
            return len(self._waiting) if self._holder is not None else 0

    def present(self) -> RankPresence:
        """Return the presence of the ranks of the attempt that holds the job, or else of the newest one."""
        with self._lock:
            if not self._attempts:
                return RankPresence()
            attempt, members = list(self._attempts.items())[-1]
            expected = next(iter(members.values())).hello.identity.world_size
            here = {rank for rank, member in members.items() if member.connected}
            missing = () if len(here) == expected else tuple(rank for rank in range(expected) if rank not in here)
            return RankPresence(attempt, len(here), expected, missing)

    def refused(self) -> tuple[RefusedRank, ...]:
        """Return the ranks that were refused lately and have not been accepted since, newest first."""
        with self._lock:
            return tuple(refusal for refusal, _ in reversed(self._refused.values()))

    def _record_refusal(self, attempt: str, rank: int, reason: str, now: float) -> None:
        refusal = RefusedRank(attempt[:200], rank, reason[:2000])
        self.refusal_is_known = self._refused.pop(refusal[:2], None) is not None
        self._refused[refusal[:2]] = (refusal, now)
        if len(self._refused) > MAX_REFUSALS:
            del self._refused[next(iter(self._refused))]

    def _check(self, hello: Hello, now: float) -> None:
        me, keyspace = hello.identity, self._keyspace
        remedy = "make job name and world size equal on daemon and all ranks"
        fault = ""
        if me.job != self._job:
            fault = f"the daemon serves job {self._job!r}, not {me.job!r}"
        elif not 0 < len(me.attempt) <= MAX_NAME_CHARACTERS:
            fault = f"an attempt's name of {len(me.attempt)} characters (1 to {MAX_NAME_CHARACTERS})"
            remedy = "pass flexd.connect(..., attempt=...) a shorter name, or none"
        elif min(me.nodes, me.local_ranks) < 1 or not 0 <= me.rank < me.world_size <= MAX_RANKS:
            fault = f"rank {me.rank} of {me.nodes} nodes x {me.local_ranks} local ranks is not possible"
        elif me.world_size > self._max_ranks:
            fault = f"the job has {me.world_size} ranks, and the daemon serves {self._max_ranks} at most"
            remedy = f"train with at most {self._max_ranks} ranks"
        elif keyspace is None:
            self.tables.record_hello(hello, now)
            fault, remedy = self.problem, "correct the daemon's configuration and run flexd reload"
        elif me.table_digest != keyspace.digest:
            tables = self.tables.tables_of(me.table_digest)
            differences = table_differences(tables, keyspace.tables) if tables else ""
            digests = f"digest {me.table_digest} here, {keyspace.digest} at the daemon"
            fault = f"the tables differ: {differences or digests}"
            remedy = "list the same tables, in the same order, in the trainer and in the daemon's configuration"
            if self._takes_tables:
                fault = fault.replace("the daemon's configuration", "the daemon's state")
                remedy = "nothing, if the job has new tables: the daemon takes them once all ranks have registered"
                self._check_holder(me.attempt, now)
                self.tables.record_hello(hello, now)
        elif len(me.replica_slots) != len(keyspace.groups):
            fault = f"{len(me.replica_slots)} replica slot counts for {len(keyspace.groups)} dim-groups"
        elif me.trainer is not None and not me.trainer.fits(len(keyspace.tables)):
            fault = (
                f"its pooling {me.trainer.pooling[:40]!r} or read-only tables {me.trainer.read_only[:40]!r} are not of "
                f"{len(keyspace.tables)} tables"
            )
            remedy = "run the same version of flexd on all ranks"
        else:
            peer = next((member.hello.identity for member in self._attempts.get(me.attempt, {}).values()), me)
            if (peer.nodes, peer.local_ranks) != (me.nodes, me.local_ranks):
                fault = (
                    f"{me.nodes} nodes x {me.local_ranks} local ranks, but rank {peer.rank} of this attempt has "
                    f"{peer.nodes} x {peer.local_ranks}"
                )
        if fault:
            raise TopologyError(fault, remedy=remedy)

    def _check_holder(self, attempt: str, now: float) -> None:
        """Raise TopologyError if another attempt holds the job."""
        holder = self._holder
        if holder is None or attempt == holder:
            self._expected_until = None
            return
        self._waiting.pop(attempt, None)
        self._waiting[attempt] = now
        if len(self._waiting) > MAX_REFUSALS:
            del self._waiting[next(iter(self._waiting))]
        fault = f"attempt {holder!r} holds job {self._job!r}: {self._words(holder)}"
        if self._expected_until is not None:
            left = max(0.0, self._expected_until - now)
            fault = (
                f"attempt {holder!r} held job {self._job!r} when the daemon started; its ranks have {left:.0f} s to "
                "come back"
            )
        raise TopologyError(
            fault,
            remedy=f"it gets the job once no rank of the other has been heard for {self._silent:g} s: end the "
            "processes of the other if they hang; give a trial run a job name of its own",
        )

    def _words(self, attempt: str) -> str:
        """Return size, start and hosts of an attempt in words."""
        members = self._attempts.get(attempt, {})
        hosts = sorted({member.hello.address[:100] for member in members.values()} - {""})
        size = max((member.hello.identity.world_size for member in members.values()), default=0)
        more = len(hosts) - _NAMED_HOSTS
        named = ", ".join(hosts[:_NAMED_HOSTS]) + (f" and {more} more" if more > 0 else "")
        since = f"{datetime.fromtimestamp(self._held_since, UTC):%Y-%m-%dT%H:%M:%SZ}"
        return f"{size} rank{'s' * (size != 1)}, since {since}{f', on {named}' if named else ''}"
