"""A state machine of followers and a leader: the totals of the leader equal the messages below its positions."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.scaleout_world import BAD, World, payload

PARTITIONS = 3
NAMES = ("f0", "f1", "f2")


class Protocol(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World(PARTITIONS, 2)

    @rule(partition=st.integers(0, PARTITIONS - 1), row=st.integers(0, 7), times=st.integers(1, 3), n=st.integers(1, 6))
    def produce(self, partition: int, row: int, times: int, n: int) -> None:
        self.world.log[f"p{partition}"] += [payload(row, times)] * n

    @rule(partition=st.integers(0, PARTITIONS - 1))
    def produce_garbage(self, partition: int) -> None:
        self.world.log[f"p{partition}"].append(BAD)

    @rule(name=st.sampled_from(NAMES), seconds=st.sampled_from([0.1, 2.0]))
    def poll(self, name: str, seconds: float) -> None:
        if name in self.world.followers:
            self.world.followers[name].poll(seconds)

    @rule(seconds=st.sampled_from([0.1, 2.0]))
    def all_poll(self, seconds: float) -> None:
        for name in self.world.followers:
            self.poll(name, seconds)

    @rule(lose_answer=st.booleans())
    def all_push(self, lose_answer: bool) -> None:
        for follower in self.world.followers.values():
            follower.network.attempt(lose_answer=lose_answer)

    @rule(times=st.integers(1, 3))
    def time_passes(self, times: int) -> None:
        for _ in range(times):
            self.world.drive()

    @rule(n=st.integers(1, 3), row=st.integers(0, 7))
    def produce_to_every_partition(self, n: int, row: int) -> None:
        for messages in self.world.log.values():
            messages += [payload(row, 1)] * n

    @rule(name=st.sampled_from(NAMES), up=st.booleans())
    def network(self, name: str, up: bool) -> None:
        if name in self.world.followers:
            self.world.followers[name].network.up = up

    @rule(name=st.sampled_from(NAMES), which=st.integers(0, 7))
    def repeat_old_delta(self, name: str, which: int) -> None:
        if self.world.leader is not None and name in self.world.followers:
            history = self.world.followers[name].network.history
            if history:
                self.world.leader.leader.offer(history[which % len(history)])

    @rule(shift=st.integers(0, 2), lost=st.sampled_from([None, *NAMES]))
    def rebalance(self, shift: int, lost: str | None) -> None:
        self.world.assign(shift, lost=lost)

    @rule(name=st.sampled_from(NAMES))
    def kill_or_add_follower(self, name: str) -> None:
        if name in self.world.followers:
            self.world.kill(name)
        else:
            self.world.join(name)

    @rule(name=st.sampled_from(NAMES))
    def stop_follower(self, name: str) -> None:
        if name in self.world.followers:
            self.world.followers[name].stop()
            self.world.kill(name)

    @precondition(lambda self: self.world.leader is not None)
    @rule()
    def snapshot(self) -> None:
        self.world.leader.save()

    @rule()
    def crash_or_start_leader(self) -> None:
        if self.world.leader is None:
            self.world.start_leader()
        else:
            self.world.crash_leader()

    @rule()
    def restart_leader(self) -> None:
        self.world.start_leader()

    @invariant()
    def totals_equal_the_messages_below_the_positions(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.finish()


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
