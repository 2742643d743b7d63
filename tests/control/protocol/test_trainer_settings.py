"""What a trainer says of itself: sets of tables as bits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flexd.control.protocol.trainer_settings import TrainerSettings, with_answers
from flexd.core.keyspace import TableSpec

TABLES = [TableSpec(f"t{number}", 10, 4) for number in range(70)]


@given(st.dictionaries(st.sampled_from([table.name for table in TABLES]), st.sampled_from(["rows", "sums"])))
def test_answers_come_back(answers: dict[str, str]) -> None:
    told = with_answers(TrainerSettings("auto", "float16"), TABLES, answers)
    assert (told.exchange, told.comm_dtype) == ("auto", "float16")
    assert told.answer_by_table(TABLES) == answers
    assert told.fault(len(TABLES)) == ""


@given(st.text(max_size=40))
def test_what_is_no_set_of_tables_is_a_fault(text: str) -> None:
    for told in (TrainerSettings(pooled=text), TrainerSettings(by_sums=text)):
        if not told.fault(3):
            assert set(told.answer_by_table(TABLES[:3])) <= {"t0", "t1", "t2"}
    assert TrainerSettings(pooled="8").fault(3) == "pooled is no set of 3 tables"
    assert TrainerSettings(pooled="-1").fault(3)
    assert TrainerSettings(by_sums="f" * 5_000_000).fault(3), "not even parsed"
    assert TrainerSettings(by_sums="7").fault(3) == ""
