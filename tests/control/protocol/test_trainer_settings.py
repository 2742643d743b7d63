"""What a trainer says of itself: sets of tables as bits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flexd.control.protocol.trainer_settings import TrainerSettings, with_pooling
from flexd.core.keyspace import TableSpec

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
