"""Merging of step reports, and what a trainer says of itself."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from flexd.control.agent.rank_connection import PendingReports
from flexd.control.protocol.report import TrainerSettings, with_pooling
from flexd.core.keyspace import TableSpec
from flexd.core.placement import Placement
from tests.support.ranks_in_threads import step_report


def test_reports_merge_into_one() -> None:
    one = step_report(1, Placement.empty(3))
    two = replace(step_report(2, Placement.empty(4)), step_seconds=float("nan"), accesses_by_tier=(1, 1, 1))
    pending = PendingReports()
    assert [pending.add(one), pending.add(two)] == [True, False]
    both = pending.drain()
    assert both is not None
    assert (both.step, both.steps, both.placement.version) == (2, 2, 4)
    assert both.step_seconds == one.step_seconds
    assert both.accesses_by_tier == (4, 3, 2)
    assert both.sent.all_to_all_inter_bytes == 40


TABLES = [TableSpec(f"t{number}", 10, 4) for number in range(70)]


@given(st.dictionaries(st.sampled_from([table.name for table in TABLES]), st.sampled_from(["requester", "owner"])))
def test_answers_come_back(pooling_at: dict[str, str]) -> None:
    told = with_pooling(TrainerSettings("auto", "float16"), TABLES, pooling_at)
    assert (told.exchange, told.comm_dtype) == ("auto", "float16")
    assert told.pooling_at_by_table(TABLES) == pooling_at
    assert told.fault(len(TABLES)) == ""


@given(st.text(max_size=40))
def test_what_is_no_set_of_tables_is_a_fault(text: str) -> None:
    for told in (TrainerSettings(pooled=text), TrainerSettings(at_owner=text)):
        if not told.fault(3):
            assert set(told.pooling_at_by_table(TABLES[:3])) <= {"t0", "t1", "t2"}
    assert TrainerSettings(pooled="8").fault(3) == "pooled is no set of 3 tables"
    assert TrainerSettings(pooled="-1").fault(3)
    assert TrainerSettings(at_owner="f" * 5_000_000).fault(3), "not even parsed"
    assert TrainerSettings(at_owner="7").fault(3) == ""
