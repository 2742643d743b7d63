"""Reports of steps and their bounds, and what a trainer says of itself and of its tables."""

import json
import math
import zlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.control.agent.rank_connection import PendingReports
from flexd.control.protocol import report as report_module
from flexd.control.protocol.messages import Fence, MalformedReportError, Progress, decode, encode
from flexd.control.protocol.report import (
    MAX_NAMED_ID_TABLES,
    MAX_NAMED_TABLES,
    BatchReport,
    IdsReport,
    PhaseReport,
    PhasesReport,
    PlacementState,
    SentBytes,
    SlowMemoryReport,
    SlowTableReport,
    StepReport,
    TrainerSettings,
    TrainingTotals,
    UsedExchange,
    table_differences,
    tables_body,
    tables_of_body,
)
from flexd.control.protocol.wire import MAX_MESSAGE_BYTES, wire_fields
from flexd.core.bounds import Longest, Range
from flexd.core.errors import ControlError
from flexd.core.keyspace import TableSpec, digest_of
from flexd.core.placement import Placement
from flexd.core.usage_warnings import MAX_TEXT, UsageWarningKind, UsageWarningReport
from tests.support.ranks_in_threads import step_report
from tests.support.report_values import Leaf, full_report, leaves, reports


def test_reports_merge_into_one() -> None:
    one = step_report(1, Placement.empty(3))
    two = replace(step_report(2, Placement.empty(4)), step_seconds=0.5, accesses_by_tier=(1, 1, 1))
    pending = PendingReports()
    assert [pending.add(one), pending.add(two)] == [True, False]
    both = pending.drain()
    assert (both.step, both.steps, both.placement.version) == (2, 2, 4)
    assert both.step_seconds == one.step_seconds + 0.5
    assert both.accesses_by_tier == (4, 3, 2)
    assert both.sent.all_to_all_inter_bytes == 40


def totals(steps: int, version: int = 0) -> TrainingTotals:
    """Return what a rank has done after so many steps since it connected; its step counter began elsewhere."""
    named = dict.fromkeys((*vars(SentBytes()), *vars(BatchReport())), 2 * steps)
    counts = {"steps": steps, "home_accesses": 5 * steps, "node_accesses": steps, "device_accesses": 0}
    exchange = UsedExchange("chain" if steps < 3 else "direct")
    return TrainingTotals(
        100 + steps, 0.5 * steps, PlacementState(version, 7), exchange, named | counts | {"apply_seconds": 0.25 * steps}
    )


def test_each_step_is_reported_once_however_often_reports_are_sent() -> None:
    pending = PendingReports()
    pending.add(totals=totals(0))
    assert not pending.waiting
    assert pending.drain() is None, "reports begin at the first totals"
    assert [pending.add(totals=totals(step)) for step in (1, 2)] == [True, False]
    warned = StepReport(102, 0, PlacementState(0, 7), 0.0, 0.0, (0, 0, 0))
    assert not pending.add(warned)
    phases = PhasesReport((PhaseReport("read", 1.0),), 3)
    pending.add(replace(warned, phases=phases), totals(3, version=4))
    first = pending.drain()
    assert not pending.waiting
    assert first == StepReport(
        103, 3, PlacementState(4, 7), 1.5, 0.75, (15, 3, 0), SentBytes(*[6] * 6), BatchReport(*[6] * 3),
        UsedExchange("direct"), phases,
    )  # fmt: skip
    pending.add(warned)
    pending.add(totals=totals(5))
    second = pending.drain()
    assert (second.step, second.steps, second.accesses_by_tier) == (105, 2, (10, 2, 0))
    assert pending.drain() is None


TABLES = [TableSpec(name, 10, 4) for name in ("a", "b", "c")]


@pytest.mark.parametrize(
    ("pooling", "fits", "places"),
    [
        ("", True, {}), ("o-r", True, {"a": "owner", "c": "requester"}), ("---", True, {}), ("or", False, None),
        ("orro", False, None), ("orx", False, None),
    ],
)  # fmt: skip
def test_the_places_of_pooling_are_a_letter_for_each_table(pooling: str, fits: bool, places: object) -> None:
    settings = TrainerSettings("auto", "float16", pooling)
    assert settings.fits(len(TABLES)) == fits
    assert not fits or settings.pooling_at_by_table(TABLES) == places


@pytest.mark.parametrize(
    ("letters", "fits", "names"), [("", True, ""), ("r-r", True, "ac"), ("rr", False, ""), ("ro-", False, "")]
)
def test_read_only_tables_are_a_letter_for_each_table(letters: str, fits: bool, names: str) -> None:
    settings = TrainerSettings("auto", None, "ooo", letters)
    assert settings.fits(len(TABLES)) == fits
    assert not fits or settings.read_only_tables(TABLES) == set(names)


FENCE = Fence("job", "a" * 100, 2, 7, "token")
LEAVES = tuple(leaves())
NUMBERS = tuple(leaf for leaf in LEAVES if leaf.type.base is not str)
WRONG: dict[type, tuple[Any, ...]] = {
    int: (-2, -(2**63), 2**64 - 1, 2**70, 1e300, 0.5, True, "1", None, [], {}, math.nan, math.inf),
    float: (-1e-9, -math.inf, math.inf, math.nan, 1e300, True, "1", None, [], {}),
    str: ("x" * 10_000, 1, None, [], {}),
}


def progress(report: StepReport | None) -> Progress:
    return Progress(FENCE, 4, 3, report)


def with_value(leaf: Leaf, value: Any) -> bytes:
    """Return a message whose report has another value at a leaf."""
    body = json.loads(encode(progress(full_report())))
    at = body["report"]
    for step in leaf.path[:-1]:
        at = at[step]
    at[leaf.path[-1]] = value
    return json.dumps(body).encode()


def test_every_number_text_and_tuple_of_a_report_has_bounds() -> None:
    for leaf in LEAVES:
        assert isinstance(leaf.type.bounds, Longest if leaf.type.base is str else Range), leaf.field
    for name in {leaf.field.split(".")[0] for leaf in LEAVES}:
        for field, type_ in wire_fields(getattr(report_module, name)).items():
            assert type_.items is None or type_.size or type_.bounds, (name, field)


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.field)
def test_a_report_outside_its_bounds_is_refused_by_field_and_the_message_is_not(leaf: Leaf) -> None:
    for value in WRONG[leaf.type.base]:
        if leaf.field.endswith("digest") and value == 2**64 - 1:
            continue
        with pytest.raises(MalformedReportError, match="cannot be read") as found:
            decode(with_value(leaf, value))
        assert found.value.field == leaf.field, value
        assert found.value.rest == progress(None)


@pytest.mark.parametrize("name", wire_fields(StepReport))
def test_a_tuple_that_is_too_long_is_refused(name: str) -> None:
    type_ = wire_fields(StepReport)[name]
    if type_.items is None:
        return
    body = json.loads(encode(progress(full_report())))
    body["report"][name] *= 100
    with pytest.raises(MalformedReportError) as found:
        decode(json.dumps(body, separators=(",", ":")).encode())
    assert found.value.field == f"StepReport.{name}"


@given(reports())
@settings(max_examples=60, deadline=None)
def test_a_report_within_its_bounds_arrives_as_it_was_sent(report: StepReport) -> None:
    assert decode(encode(progress(report))) == progress(report)


ANY_NUMBER = st.floats() | st.integers() | st.sampled_from([math.nan, math.inf, -math.inf, -1, 2**80, 1e308])


@given(st.lists(st.tuples(st.sampled_from(NUMBERS), ANY_NUMBER), min_size=1, max_size=6), st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_whatever_a_rank_measures_its_reports_can_be_sent(changes: list[tuple[Leaf, float]], times: int) -> None:
    report = full_report()
    for leaf, value in changes:
        report = _replaced(report, leaf.path, value)
    pending = PendingReports()
    for _ in range(times):
        pending.add(report)
        pending.add(full_report())
    sent = pending.drain()
    assert decode(encode(progress(sent))) == progress(sent)


def _replaced(value: Any, path: tuple[str | int, ...], leaf: Any) -> Any:
    if not path:
        return leaf
    name = path[0]
    if isinstance(name, int):
        return (*value[:name], _replaced(value[name], path[1:], leaf), *value[name + 1 :])
    return replace(value, **{name: _replaced(getattr(value, name), path[1:], leaf)})


def test_the_largest_report_fits_into_a_message() -> None:
    """Texts of control characters are six bytes each as JSON."""
    most = 2**53
    usage_warnings = tuple(
        UsageWarningReport(kind.value, most, "\x00" * MAX_TEXT, 1e10 / 3) for kind in UsageWarningKind
    )
    tables = tuple(SlowTableReport(10**4 + at, most, most, most, most) for at in range(MAX_NAMED_TABLES + 1))
    phases = tuple(PhaseReport("p" * 12, *[1e8 / 3] * 5, *[most] * 4) for _ in range(7))
    report = replace(
        full_report(), slow_memory=SlowMemoryReport(tables, most, most, 1e8 / 3), usage_warnings=usage_warnings,
        phases=phases, ids=tuple(IdsReport(10**4 + at, *[most] * 10) for at in range(MAX_NAMED_ID_TABLES)),
    )  # fmt: skip
    pending = PendingReports()
    pending.add(report)
    assert pending.drain() == report
    assert len(encode(progress(report))) < MAX_MESSAGE_BYTES


def test_what_is_too_long_is_cut_and_nothing_else_changes() -> None:
    one = UsageWarningReport(UsageWarningKind.NO_BACKWARD.value, 1, "t" * (MAX_TEXT + 1), 1.0)
    kept = UsageWarningReport(UsageWarningKind.NO_BACKWARD.value, 1, "t" * MAX_TEXT, 1.0)
    for given_, sent in (((one,), (kept,)), ((kept,) * 33, (kept,) * 32)):
        pending = PendingReports()
        pending.add(replace(full_report(), usage_warnings=given_))
        assert pending.drain() == replace(full_report(), usage_warnings=sent)


DAEMON = (TableSpec("items", 2_000, 8), TableSpec("users", 500, 16, "float16", "adam"), TableSpec("tags", 70, 8))


ITEMS, USERS, TAGS = DAEMON


@pytest.mark.parametrize(
    ("trainer", "differences"),
    [
        *(
            ((ITEMS, replace(USERS, **{field: value}), TAGS),  # type: ignore[arg-type]
             f"users.{field}: {value} in the trainer, {configured} in the daemon's configuration")
            for field, value, configured in (
                ("rows", 501, 500), ("dim", 8, 16), ("dtype", "float32", "float16"), ("optimizer", "sgd", "adam"),
                ("sharding", "table_row_wise:1", "row_wise"),
            )
        ),
        ((ITEMS, USERS), "table tags is in the daemon's configuration, not in the trainer"),
        (
            (ITEMS, USERS, TAGS, TableSpec("shops", 9, 4)),
            "table shops is in the trainer, not in the daemon's configuration",
        ),
        ((ITEMS, TAGS, USERS), "table number 2: tags in the trainer, users in the daemon's configuration"),
        (DAEMON, ""),
    ],
)  # fmt: skip
def test_what_differs_is_named_with_both_values(trainer: tuple[TableSpec, ...], differences: str) -> None:
    assert table_differences(trainer, DAEMON) == differences


def test_a_list_of_all_tables_travels_whole() -> None:
    tables = tuple(TableSpec(f"table-{number}", 10 + number, 8) for number in range(3000))
    body = tables_body(tables)
    assert len(body) < 2**20, "one frame"
    assert tables_of_body(body, digest_of(tables)) == tables
    with pytest.raises(ControlError, match="announced as wrong"):
        tables_of_body(body, "wrong")
    for broken in (
        b"",
        body[:-9],
        b"no zlib",
        zlib.compress(b"[]"),
        zlib.compress(b'{"fields": ["name"], "tables": [[1, 2]]}'),
    ):
        with pytest.raises(ControlError, match="cannot be read"):
            tables_of_body(broken, digest_of(tables))
    # A later version may know more of a table.
    later = {"fields": ["name", "rows", "dim", "colour"], "tables": [["a", 3, 2, "red"]]}
    assert tables_of_body(zlib.compress(json.dumps(later).encode()), digest_of([TableSpec("a", 3, 2)]))[0].rows == 3
