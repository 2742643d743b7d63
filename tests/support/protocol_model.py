"""The migration protocol as a finite model: a daemon, its ranks, a network that loses, repeats and reorders, faults.

Every possible next event is tried from every state (breadth first), so the checks hold in every order of events within
the bounds. It models the code, with the names of the code:

- a *rank* has received chunks (``ChunkInbox.offer``), of which a prefix is agreed, of which a prefix is applied. A step
  applies what is agreed, then announces its received version to the peers; the exchange gives every rank the minimum
  (``begin_exchange``, ``end_exchange``), each at its own time. ``settle`` waits for the exchange and drops the rest;
- the *daemon* journals a chunk, then sends it (``ChunkPusher.next_chunk``); numbers again from the agreed version
  when all have settled in a new epoch; its migrations go by the code's own transition table;
- the *network* may deliver any chunk that was ever sent, to any rank, at any time, any number of times, or never;
- *faults*, as many as the budget: an epoch ends, a rank loses its link, the daemon dies (before, between and after
  journal and network) and restarts with its journal, the job is restarted from a checkpoint.

Plan A is on its way, plan B may be submitted at any time, A may be aborted at any time. Ranks are interchangeable, so
states that differ by a permutation of ranks are one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from flexd.control.daemon.migration_states import FINAL_STATES, MigrationState, TransitionEvent, next_state

S, E = MigrationState, TransitionEvent
Chunk = tuple[str, int]
"""(plan, number of the chunk in its plan)."""


class Rank(NamedTuple):
    """A rank.

    Attributes:
        epoch: number of its epoch; 0 without one.
        announced, ending: versions of the running exchange; -1 outside of it.
        settled: the version in its settled message; -1 without one.
    """

    epoch: int = 0
    received: tuple[Chunk, ...] = ()
    agreed: int = 0
    applied: int = 0
    announced: int = -1
    ending: int = -1
    settled: int = -1
    reported: bool = False
    """True once the daemon has received its settled message."""

    @property
    def exchanging(self) -> bool:
        return self.announced >= 0 or self.ending >= 0


class Outstanding(NamedTuple):
    version: int
    chunk: Chunk
    agreed: bool = False


class Daemon(NamedTuple):
    """The daemon.

    Attributes:
        epoch: number of the epoch; 0 without one.
        live: all ranks have settled.
        journal: the chunks of versions 1, 2, ...
    """

    epoch: int = 0
    live: bool = False
    journal: tuple[Chunk, ...] = ()
    version: int = 0
    active: str = ""
    waiting: str = ""
    next_chunk: int = 0
    applied: int = 0
    """Chunks of the active plan, by all ranks, as far as the daemon has received it."""
    again: tuple[Chunk, ...] = ()
    outstanding: tuple[Outstanding, ...] = ()
    abort: bool = False
    """An abort of plan A is requested and not yet executed."""
    new_job: bool = False
    """The ranks are another attempt than the journal's."""


class State(NamedTuple):
    ranks: tuple[Rank, ...]
    daemon: Daemon
    sent: frozenset[tuple[int, int, Chunk]]
    """(epoch, version, chunk)."""
    migrations: tuple[tuple[str, MigrationState, int], ...]
    """(plan, state, chunks that it recorded were applied when it ended; -1 if nothing)."""
    faults: int
    may_abort: bool


@dataclass(frozen=True)
class Bounds:
    """Bounds of the model.

    Attributes:
        window: largest number of outstanding chunks.
        chunks: number of chunks by plan, in the order in which the plans are submitted.
    """

    ranks: int = 2
    faults: int = 2
    window: int = 2
    chunks: dict[str, int] = field(default_factory=lambda: {"A": 2, "B": 1})


@dataclass(frozen=True)
class Outcome:
    """The result of a search.

    Attributes:
        violation: the violated rule, or "" after all ``states`` were checked.
        trace: the events that lead to the violation.
        reached: transitions of the code's table that occurred.
        stuck: states without further faults from which the migrations cannot all end.
    """

    states: int
    edges: int
    violation: str
    trace: tuple[str, ...]
    reached: frozenset[tuple[MigrationState, TransitionEvent]]
    stuck: int


class Violation(Exception):
    """The model has reached a forbidden state."""


class Model:
    """The protocol within bounds.

    Args:
        mutation: a rule of the protocol to break, "" for none (see ``MUTATIONS``).
    """

    def __init__(self, bounds: Bounds, mutation: str = "") -> None:
        self.bounds = bounds
        self.mutation = mutation
        self.reached: set[tuple[MigrationState, TransitionEvent]] = set()

    def first(self) -> State:
        plans = tuple((plan, S.PENDING, -1) for plan in list(self.bounds.chunks)[:1])
        return State((Rank(),) * self.bounds.ranks, Daemon(waiting=plans[0][0]), frozenset(), plans,
                     self.bounds.faults, True)  # fmt: skip

    # Events ---------------------------------------------------------------------------------------------------------

    def successors(self, state: State) -> Iterator[tuple[str, State]]:
        yield from self._daemon_acts(state)
        for number, rank in enumerate(state.ranks):
            if number and rank == state.ranks[number - 1]:
                continue
            for what, moved, *faults in self._rank_acts(state, rank):
                ranks = (*state.ranks[:number], moved, *state.ranks[number + 1 :])
                yield f"rank: {what}", state._replace(ranks=ranks, faults=state.faults - sum(faults))
        if all(rank.announced >= 0 and rank.ending < 0 for rank in state.ranks):
            yield "the exchange completes", self._exchanged(state)
        if state.faults:
            yield from self._faults(state)

    def _rank_acts(self, state: State, rank: Rank) -> Iterator[tuple]:
        daemon = state.daemon
        if rank.announced < 0 and rank.ending < 0:
            applied = len(rank.received) if self.mutation == "apply without agreement" else rank.agreed
            yield "begins a step", rank._replace(applied=applied, announced=len(rank.received))
        if rank.ending >= 0:
            agreed = max(rank.agreed, rank.ending)
            yield "ends the exchange", rank._replace(agreed=agreed, ending=-1)
        may_settle = not rank.exchanging or self.mutation == "settle in the exchange"
        kept = rank.received if self.mutation == "settle keeps chunks" else rank.received[: rank.agreed]
        # An announcement names the registrations that it is for: none of another attempt's.
        if daemon.epoch > rank.epoch and may_settle and not daemon.new_job:
            yield "settles", rank._replace(epoch=daemon.epoch, received=kept, settled=rank.agreed, reported=False)
        if state.faults and rank.epoch and may_settle:
            yield "loses its link", rank._replace(epoch=0, received=kept, settled=-1, reported=False), 1
        for epoch, version, chunk in state.sent:
            fenced = epoch != rank.epoch and self.mutation != "no fence"
            if not fenced and rank.epoch and version == len(rank.received) + 1:
                yield f"receives {chunk} as {version}", rank._replace(received=(*rank.received, chunk))

    def _exchanged(self, state: State) -> State:
        first = state.ranks[0]
        for rank in state.ranks:
            if rank.received[: rank.applied] != first.received[: first.applied]:
                raise Violation(f"ranks run one step at versions {first.applied} and {rank.applied} of other content")
        lowest = min(rank.announced for rank in state.ranks)
        return state._replace(ranks=tuple(rank._replace(announced=-1, ending=lowest) for rank in state.ranks))

    def _faults(self, state: State) -> Iterator[tuple[str, State]]:
        left = state._replace(faults=state.faults - 1)
        daemon = state.daemon
        if daemon.epoch:
            yield "fault: the epoch ends", left._replace(daemon=daemon._replace(epoch=0, live=False))
        died = Daemon(journal=daemon.journal, new_job=daemon.new_job)
        yield "fault: the daemon dies", self._failed_with(left, died)
        pushed = self._turn(state)
        if pushed is not None and len(pushed.daemon.journal) > len(daemon.journal):
            journal = pushed.daemon.journal
            if self.mutation == "journal after sending":
                yield "fault: the daemon dies after sending", self._failed_with(
                    left._replace(sent=pushed.sent), died
                )  # fmt: skip
            else:
                yield "fault: the daemon dies after journalling", self._failed_with(
                    left, died._replace(journal=journal)
                )  # fmt: skip
        if any(rank.received for rank in state.ranks):
            # Records of ended migrations refer to the placement before.
            yield "fault: the job starts again", left._replace(
                ranks=(Rank(),) * len(state.ranks), daemon=daemon._replace(new_job=True),
                migrations=tuple((plan, now, -1) for plan, now, _ in state.migrations),
            )  # fmt: skip

    def _failed_with(self, state: State, daemon: Daemon) -> State:
        for plan, now, _ in state.migrations:
            if now not in FINAL_STATES:
                state = self._fire(state, plan, E.FAIL)
        return state._replace(daemon=daemon)

    # The daemon -----------------------------------------------------------------------------------------------------

    def _daemon_acts(self, state: State) -> Iterator[tuple[str, State]]:
        daemon, bounds = state.daemon, self.bounds
        plans = list(bounds.chunks)
        if len(state.migrations) < len(plans):
            plan = plans[len(state.migrations)]
            newer = state._replace(migrations=(*state.migrations, (plan, S.PENDING, -1)))
            if daemon.waiting:
                newer = self._fire(newer, daemon.waiting, E.SUPERSEDE)
            yield f"{plan} is submitted", newer._replace(daemon=daemon._replace(waiting=plan))
        if state.may_abort and self._state_of(state, "A") not in FINAL_STATES:
            yield "A is to be aborted", state._replace(daemon=daemon._replace(abort=True), may_abort=False)
        # Ranks that are in no epoch register again, which ends the one there is.
        if daemon.epoch and (daemon.new_job or (daemon.live and any(rank.epoch == 0 for rank in state.ranks))):
            yield "the epoch ends", state._replace(daemon=daemon._replace(epoch=0, live=False))
        if not daemon.epoch:
            yield "an epoch begins", self._begin_epoch(state)
        elif not daemon.live:
            for number, rank in enumerate(state.ranks):
                if rank.epoch == daemon.epoch and not rank.reported:
                    ranks = (*state.ranks[:number], rank._replace(reported=True), *state.ranks[number + 1 :])
                    yield "a settled message arrives", state._replace(ranks=ranks)
            if all(rank.reported for rank in state.ranks) or (
                self.mutation == "live before all settled" and state.ranks[0].reported
            ):
                yield "the epoch is live", self._go_live(state)
        else:
            if all(rank.epoch == daemon.epoch for rank in state.ranks):
                reported = self._acknowledge(state)
                if reported != state:
                    yield "progress arrives", reported
            acted = self._turn(state)
            if acted is not None:
                yield "the daemon acts", acted
        if not daemon.live:
            early = self._end_early(state)
            if early is not None:
                yield "the daemon ends a migration early", early

    def _begin_epoch(self, state: State) -> State:
        daemon = state.daemon
        if daemon.new_job:
            if daemon.active:
                state = self._fire(state, daemon.active, E.FAIL)
            daemon = daemon._replace(journal=(), active="", again=(), outstanding=(), applied=0, new_job=False)
        newest = max([rank.epoch for rank in state.ranks] + [epoch for epoch, _, _ in state.sent])
        ranks = tuple(rank._replace(reported=False) for rank in state.ranks)
        return state._replace(ranks=ranks, daemon=daemon._replace(epoch=newest + 1, live=False))

    def _go_live(self, state: State) -> State:
        """Model ``ChunkPusher.begin_epoch``."""
        daemon = state.daemon
        first = state.ranks[0]
        version, agreed = first.settled, first.received[: first.settled]
        for rank in state.ranks:
            if self.mutation != "live before all settled" and rank.received[: rank.settled] != agreed:
                raise Violation("the ranks have settled at different placements")
        if daemon.journal[:version] != agreed:
            raise Violation(f"the daemon does not have the placement that the ranks agreed on, version {version}")
        kept = tuple(each._replace(agreed=True) for each in daemon.outstanding if each.version <= version)
        void = [each.chunk for each in daemon.outstanding if each.version > version]
        again = tuple(chunk for chunk in void if chunk[0] == daemon.active)
        now = self._state_of(state, daemon.active) if daemon.active else None
        daemon = daemon._replace(live=True, version=version, outstanding=kept)
        if self.mutation == "number from the newest pushed":
            daemon = daemon._replace(version=len(daemon.journal))
        if again and now is not S.ABORTING:
            daemon = daemon._replace(again=(*again, *daemon.again))
            if now is S.APPLYING and self.mutation != "void chunks not pushed again":
                state = self._fire(state, daemon.active, E.VOIDED)
        return state._replace(daemon=daemon)

    def _acknowledge(self, state: State) -> State:
        agreed = min(rank.agreed for rank in state.ranks)
        applied = min(rank.applied for rank in state.ranks)
        daemon = state.daemon
        left = tuple(
            each._replace(agreed=each.agreed or each.version <= agreed)
            for each in daemon.outstanding
            if each.version > applied
        )
        finished = [each for each in daemon.outstanding if each.version <= applied]
        more = sum(each.chunk[0] == daemon.active for each in finished)
        return state._replace(daemon=daemon._replace(outstanding=left, applied=daemon.applied + more))

    def _turn(self, state: State) -> State | None:
        """Model one action of ``ChunkPusher.next_chunk``: one transition or one chunk; None if nothing is due."""
        daemon = state.daemon
        if not daemon.live:
            return None
        early = self._end_early(state)
        if early is not None:
            return early
        now = self._state_of(state, daemon.active) if daemon.active else None
        if now is S.APPLYING and self._nothing_out(daemon):
            return self._ended(state, E.APPLIED)
        if not daemon.active and daemon.waiting and all(each.agreed for each in daemon.outstanding):
            started = self._fire(state, daemon.waiting, E.START)
            return started._replace(
                daemon=daemon._replace(active=daemon.waiting, waiting="", next_chunk=1, again=(), applied=0)
            )
        if now is not S.PUSHING or len(daemon.outstanding) >= self.bounds.window:
            return None
        if daemon.again:
            chunk, daemon = daemon.again[0], daemon._replace(again=daemon.again[1:])
        elif daemon.next_chunk <= self.bounds.chunks[daemon.active]:
            chunk, daemon = (daemon.active, daemon.next_chunk), daemon._replace(next_chunk=daemon.next_chunk + 1)
        else:
            return self._fire(state, daemon.active, E.EXHAUSTED)
        version = daemon.version + 1
        daemon = daemon._replace(
            journal=(*daemon.journal[: version - 1], chunk), version=version,
            outstanding=(*daemon.outstanding, Outstanding(version, chunk)),
        )  # fmt: skip
        return state._replace(daemon=daemon, sent=state.sent | {(daemon.epoch, version, chunk)})

    def _end_early(self, state: State) -> State | None:
        daemon = state.daemon
        if daemon.abort and daemon.waiting == "A":
            return self._fire(state, "A", E.ABORT)._replace(daemon=daemon._replace(waiting="", abort=False))
        now = self._state_of(state, daemon.active) if daemon.active else None
        if daemon.abort and daemon.active == "A" and now in (S.PUSHING, S.APPLYING):
            return self._fire(state, "A", E.ABORT)._replace(daemon=daemon._replace(abort=False, again=()))
        if now is S.PUSHING and daemon.waiting:
            return self._ended(state, E.SUPERSEDE)
        if now is S.ABORTING and (self._nothing_out(daemon) or self.mutation == "abort does not wait"):
            return self._ended(state, E.STOPPED)
        return None

    def _ended(self, state: State, event: TransitionEvent) -> State:
        daemon = state.daemon
        recorded = -1 if daemon.new_job else daemon.applied
        return self._fire(state, daemon.active, event, recorded)._replace(
            daemon=daemon._replace(active="", again=(), applied=0)
        )

    @staticmethod
    def _nothing_out(daemon: Daemon) -> bool:
        return not any(each.chunk[0] == daemon.active for each in daemon.outstanding)

    @staticmethod
    def _state_of(state: State, plan: str) -> MigrationState:
        return next(now for name, now, _ in state.migrations if name == plan)

    def _fire(self, state: State, plan: str, event: TransitionEvent, recorded: int = -1) -> State:
        """Fire a transition of the code's table. Raises IllegalTransitionError if the table has none."""
        now = self._state_of(state, plan)
        after = next_state(now, event, plan)
        self.reached.add((now, event))
        migrations = tuple(
            (name, after, recorded) if name == plan else (name, old, before) for name, old, before in state.migrations
        )
        daemon = state.daemon._replace(abort=False) if plan == "A" and after in FINAL_STATES else state.daemon
        return state._replace(migrations=migrations, daemon=daemon)

    # What must hold -------------------------------------------------------------------------------------------------

    def check(self, state: State) -> None:
        """Raises Violation."""
        longest = max(state.ranks, key=lambda rank: rank.agreed)
        agreed = longest.received[: longest.agreed]
        for rank in state.ranks:
            if rank.received[: rank.agreed] != agreed[: rank.agreed]:
                raise Violation(f"ranks agreed on other contents: {rank.received[: rank.agreed]} and {agreed}")
            if not rank.applied <= len(rank.received):
                raise Violation("a rank has applied what it no longer holds")
        plans = list(self.bounds.chunks)
        last = ("", 0)
        for plan, number in agreed:
            newer = plan != last[0] and number == 1 and (not last[0] or plans.index(plan) > plans.index(last[0]))
            if not newer and (plan, number) != (last[0], last[1] + 1):
                raise Violation(f"the placement is no prefix of a plan: {agreed}")
            last = (plan, number)
        if state.daemon.new_job:
            return
        for plan, now, recorded in state.migrations:
            applied = min(sum(chunk[0] == plan for chunk in rank.received[: rank.applied]) for rank in state.ranks)
            if now is S.COMMITTED and recorded >= 0 and applied != self.bounds.chunks[plan]:
                raise Violation(f"{plan} is committed, and {applied} of its chunks are applied")
            if now is S.ABORTED and recorded >= 0 and applied != recorded:
                raise Violation(f"{plan} was aborted after {recorded} chunks, and {applied} are applied")

    def canonical(self, state: State) -> State:
        """Return an equivalent state with dense epoch numbers, ranks in order, and without undeliverable messages."""
        daemon = state.daemon
        live = {rank.epoch for rank in state.ranks} | {daemon.epoch}
        sent = state.sent
        if self.mutation != "no fence":
            oldest = min((epoch for epoch in live if epoch), default=0)
            sent = frozenset(each for each in sent if each[0] >= oldest and oldest)
        used = sorted({0} | live | {epoch for epoch, _, _ in sent})
        dense = {epoch: number for number, epoch in enumerate(used)}
        ranks = tuple(sorted(rank._replace(epoch=dense[rank.epoch]) for rank in state.ranks))
        if self.mutation == "live before all settled":
            ranks = tuple(sorted(ranks, key=lambda rank: (not rank.reported, rank)))
        return state._replace(
            ranks=ranks, daemon=daemon._replace(epoch=dense[daemon.epoch]),
            sent=frozenset((dense[epoch], version, chunk) for epoch, version, chunk in sent),
        )  # fmt: skip


MUTATIONS = (
    "apply without agreement",
    "settle in the exchange",
    "settle keeps chunks",
    "no fence",
    "number from the newest pushed",
    "journal after sending",
    "live before all settled",
    "void chunks not pushed again",
    "abort does not wait",
)


def explore(bounds: Bounds, mutation: str = "", most_states: int = 10**7) -> Outcome:
    """Visit every reachable state, or stop at the first violation."""
    model = Model(bounds, mutation)
    first = model.canonical(model.first())
    came_from: dict[State, tuple[State, str] | None] = {first: None}
    before: dict[State, list[State]] = {}
    queue = deque([first])
    edges = 0

    def trace(state: State) -> tuple[str, ...]:
        events = []
        while (step := came_from[state]) is not None:
            state, what = step
            events.append(what)
        return tuple(reversed(events))

    while queue:
        state = queue.popleft()
        try:
            for what, raw in model.successors(state):
                edges += 1
                after = model.canonical(raw)
                before.setdefault(after, []).append(state)
                if after not in came_from:
                    came_from[after] = (state, what)
                    if len(came_from) > most_states:
                        raise MemoryError(f"more than {most_states} states")
                    model.check(after)
                    queue.append(after)
        except Exception as error:
            if isinstance(error, MemoryError):
                raise
            return Outcome(len(came_from), edges, str(error), trace(state), frozenset(model.reached), 0)
    ended = [state for state in came_from if all(now in FINAL_STATES for _, now, _ in state.migrations)]
    reaches = set(ended)
    queue = deque(ended)
    while queue:
        for earlier in before.get(queue.popleft(), ()):
            if earlier not in reaches:
                reaches.add(earlier)
                queue.append(earlier)
    return Outcome(len(came_from), edges, "", (), frozenset(model.reached), len(came_from) - len(reaches))
