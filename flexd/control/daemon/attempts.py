"""The attempts of a job: the one that holds it, those that wait, and those that ended. Pure: no clock, no network.

::

    (unknown) --all ranks registered, none holds--> HOLDS --no rank heard for silent_seconds--> ENDED
        |                                           ^   `--an operator prefers another-------'   |
        `--refused: another holds--> WAITING -------'   (its ranks register again) <-------------'

An attempt whose ranks are alive is replaced by ``prefer`` only. No attempt is excluded for good: one that has ended and
whose ranks are heard again gets the job again once no other holds it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import Enum

from flexd.control.protocol.messages import Hello
from flexd.core.errors import TopologyError

ENDED_SECONDS = 3600.0
"""Time for which an ended attempt is listed."""
PREFERRED_SECONDS = 60.0
"""Time for which the job is kept for a preferred attempt of which no rank is heard."""
MAX_LISTED = 64
"""Waiting and ended attempts that are stored; beyond that, the one heard longest ago is dropped."""
MAX_NAME_CHARACTERS = 200
_MAX_HOSTS = 1024
_NAMED_HOSTS = 3


class AttemptState(Enum):
    HOLDS = "holds"
    WAITING = "waiting"
    ENDED = "ended"


@dataclass(frozen=True)
class Attempt:
    """An attempt as it is listed.

    Attributes:
        name: at most ``MAX_NAME_CHARACTERS``.
        world_size: ranks that it states to have; 0 if not known.
        ranks: ranks heard lately.
        hosts: addresses of its ranks, sorted.
        since_unix_seconds: when it got the job, or was first heard, or ended.
        preferred: an operator keeps the job for it.
        reason: why it waits or has ended; empty if it holds the job.
    """

    name: str
    state: AttemptState
    world_size: int
    ranks: int
    hosts: tuple[str, ...]
    since_unix_seconds: float
    preferred: bool = False
    reason: str = ""

    @property
    def words(self) -> str:
        """Size, start and hosts, for messages."""
        since = datetime.fromtimestamp(self.since_unix_seconds, UTC)
        more = len(self.hosts) - _NAMED_HOSTS
        hosts = ", ".join(self.hosts[:_NAMED_HOSTS]) + (f" and {more} more" if more > 0 else "")
        size = f"{self.world_size} rank{'s' * (self.world_size != 1)}, " if self.world_size else ""
        return f"{size}since {since:%Y-%m-%dT%H:%M:%SZ}{f', on {hosts}' if hosts else ''}"


@dataclass
class _Record:
    """The stored part of an attempt."""

    name: str
    since_unix_seconds: float
    heard_at: float
    world_size: int = 0
    heard: dict[int, float] = field(default_factory=dict)
    """Rank -> time at which it was heard last."""
    hosts: set[str] = field(default_factory=set)
    reason: str = ""

    def hear(self, hello: Hello, now: float) -> None:
        self.heard_at = now
        self.world_size = hello.world_size
        self.heard[hello.rank] = now
        if len(self.hosts) < _MAX_HOSTS:
            self.hosts.add(hello.address[:100])

    def listed(self, state: AttemptState, ranks: int, preferred: bool) -> Attempt:
        hosts = tuple(sorted(self.hosts))
        return Attempt(self.name, state, self.world_size, ranks, hosts, self.since_unix_seconds, preferred, self.reason)


class Attempts:
    """Decides which attempt holds the job. The caller holds a lock, and reports every hello and the silence of ranks.

    Args:
        job: named in messages.
        silent_seconds: an attempt of which nothing is heard for so long has ended.
        wall_clock: Unix seconds.
    """

    def __init__(self, job: str, silent_seconds: float, wall_clock: Callable[[], float]) -> None:
        self._job = job
        self._silent = silent_seconds
        self._wall_clock = wall_clock
        self._holder: _Record | None = None
        self._expected = False
        """The holder is the one of an earlier daemon, and none of its ranks has registered yet."""
        self._preferred: tuple[str, float] | None = None
        """Name, and the time at which an operator chose it or it was heard last."""
        self._waiting: dict[str, _Record] = {}
        self._ended: dict[str, tuple[_Record, float]] = {}
        """With the time at which each ended, in that order."""

    @property
    def holder(self) -> str | None:
        return None if self._holder is None else self._holder.name

    def expect(self, name: str, now: float) -> None:
        """Keep the job for an attempt that held it under an earlier daemon, for ``silent_seconds``."""
        self._holder = _Record(name, self._wall_clock(), now)
        self._expected = True

    def check(self, hello: Hello, now: float) -> None:
        """Record a hello. Raises TopologyError if another attempt holds the job or is preferred."""
        name = hello.attempt[:MAX_NAME_CHARACTERS]
        preferred = None if self._preferred is None else self._preferred[0]
        if name == preferred:
            self._preferred = (name, now)
        if self._holder is not None and name == self._holder.name:
            self._holder.hear(hello, now)
            self._expected = False
            return
        fault = self._fault(preferred, name, now)
        if not fault:
            self._record(self._waiting, name, now).hear(hello, now)
            self._waiting[name].reason = "its ranks are registering"
            return
        record = self._record(self._waiting, name, now)
        record.hear(hello, now)
        record.reason = fault
        raise TopologyError(
            fault,
            remedy=f"it gets the job once no rank of the other has been heard for {self._silent:g} s; to replace the "
            f"other now, run: flexd prefer {shlex.quote(name)}; give a trial run a job name of its own",
        )

    def hold(self, hellos: Iterable[Hello], now: float) -> None:
        """Give the job to the attempt of these hellos, which are all of its ranks."""
        if self._holder is not None:
            return
        for hello in hellos:
            if self._holder is None:
                name = hello.attempt[:MAX_NAME_CHARACTERS]
                self._waiting.pop(name, None)
                self._ended.pop(name, None)
                self._holder = _Record(name, self._wall_clock(), now)
                self._expected = False
                if self._preferred is not None and self._preferred[0] == name:
                    self._preferred = None
            self._holder.hear(hello, now)

    def excuse_silence(self, seconds: float) -> None:
        """Do not count ``seconds`` as silence of any attempt."""
        for record in (*self._waiting.values(), *([self._holder] if self._holder is not None else [])):
            record.heard_at += seconds
            record.heard = {rank: at + seconds for rank, at in record.heard.items()}
        if self._preferred is not None:
            self._preferred = (self._preferred[0], self._preferred[1] + seconds)

    def expire(self, registered: int, now: float) -> None:
        """End a holder of which nothing is heard, and drop what has been silent for too long.

        Args:
            registered: ranks of the holder that are registered and not silent.
        """
        holder = self._holder
        if holder is not None and not registered and (not self._expected or now - holder.heard_at > self._silent):
            self._end(
                "none of its ranks came back after the daemon's start" if self._expected else "its ranks are silent",
                now,
            )
        for name in [name for name, record in self._waiting.items() if now - record.heard_at > self._silent]:
            del self._waiting[name]
        for name in [name for name, (_, at) in self._ended.items() if now - at > ENDED_SECONDS]:
            del self._ended[name]
        if self._preferred is not None and now - self._preferred[1] > PREFERRED_SECONDS:
            self._preferred = None

    def prefer(self, name: str, now: float) -> bool:
        """Keep the job for this attempt and end the holder; False if it holds the job already.

        Raises:
            KeyError: it is not known.
        """
        if name == self.holder:
            changed = self._preferred is not None
            self._preferred = None
            return changed
        if name not in self._waiting and name not in self._ended:
            raise KeyError(name)
        self._end(f"an operator preferred attempt {name!r}", now)
        changed = self._preferred is None or self._preferred[0] != name
        self._preferred = (name, now)
        return changed

    def forget(self, name: str) -> None:
        """Drop what is known of an attempt. The caller has checked that none of its ranks holds the job.

        Raises:
            KeyError: it is not known.
        """
        if name not in self._waiting and name not in self._ended and name != self.holder:
            raise KeyError(name)
        self._waiting.pop(name, None)
        self._ended.pop(name, None)
        if name == self.holder:
            self._holder = None
        if self._preferred is not None and self._preferred[0] == name:
            self._preferred = None

    def listed(self, registered: int, now: float) -> tuple[Attempt, ...]:
        """Return the holder, then the waiting attempts, then those that ended, the newest of each first."""
        preferred = None if self._preferred is None else self._preferred[0]
        found: list[Attempt] = []
        if self._holder is not None:
            found.append(self._holder.listed(AttemptState.HOLDS, registered, False))
            if self._expected:
                found[0] = replace(found[0], reason="its ranks have not come back since the daemon's start")
        for record in sorted(self._waiting.values(), key=lambda record: -record.since_unix_seconds):
            heard = sum(now - at <= self._silent for at in record.heard.values())
            found.append(record.listed(AttemptState.WAITING, heard, record.name == preferred))
        for record, _ in reversed(self._ended.values()):
            if record.name not in self._waiting and record.name != self.holder:
                found.append(record.listed(AttemptState.ENDED, 0, record.name == preferred))
        return tuple(found)

    def _fault(self, preferred: str | None, name: str, now: float) -> str:
        if self._holder is not None and self._expected:
            left = max(0.0, self._silent - (now - self._holder.heard_at))
            return (
                f"attempt {self._holder.name!r} held job {self._job!r} when the daemon started; its ranks have "
                f"{left:.0f} s to come back"
            )
        if self._holder is not None:
            words = self._holder.listed(AttemptState.HOLDS, 0, False).words
            return f"attempt {self._holder.name!r} holds job {self._job!r}: {words}"
        if preferred is not None and name != preferred:
            return f"an operator keeps job {self._job!r} for attempt {preferred!r}"
        return ""

    def _end(self, reason: str, now: float) -> None:
        holder, self._holder = self._holder, None
        if holder is None:
            return
        self._expected = False
        self._ended.pop(holder.name, None)
        self._ended[holder.name] = (replace(holder, since_unix_seconds=self._wall_clock(), reason=reason), now)
        if len(self._ended) > MAX_LISTED:
            del self._ended[next(iter(self._ended))]

    def _record(self, records: dict[str, _Record], name: str, now: float) -> _Record:
        record = records.get(name)
        if record is None:
            record = records[name] = _Record(name, self._wall_clock(), now)
            if len(records) > MAX_LISTED:
                quietest = min((each for each in records if each != name), key=lambda each: records[each].heard_at)
                del records[quietest]
        return record
