"""Messages of the control channel: round trips, sizes and shapes."""

import json
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flexd.control.protocol import messages as m
from flexd.control.protocol.messages import RankIdentity
from flexd.control.protocol.report import PhaseReport, PhasesReport, PlacementState, TrainerSettings
from flexd.control.protocol.wire import wire_fields
from flexd.core.errors import ControlError, UnknownMessageError
from flexd.core.placement import Placement
from tests.support.ranks_in_threads import step_report

PHASES = (PhaseReport("ids", 0.5, inter_bytes=7), PhaseReport("rows", exposed_seconds=0.25, inter_collectives=2))
FENCE = m.Fence("job", "a1", 2, 7, "token")
EVERY_KIND: list[m.ControlMessage] = [
    m.DaemonNotice("job", "instance", "digest"),
    m.Hello(
        RankIdentity("job", "a1", 1, 2, 2, (10, 20), "digest", TrainerSettings("auto", "float16", "or-")),
        "i", "s", "n", PlacementState(3, 2**64 - 1), "127.0.0.1",
    ),
    m.TableList("i", "0123456789abcdef"),
    m.HelloRefused("n", "reason", "remedy"),
    m.Heartbeat(),
    m.EpochAnnouncement(FENCE, "n0", 0.5),
    m.EpochGo(FENCE),
    m.EpochEnd(FENCE),
    m.Settled(FENCE, PlacementState(4, 12345), 3),
    m.Progress(FENCE, 4, 3, None),
    m.Progress(FENCE, 4, 3, step_report(8, Placement.empty())),
    m.Progress(FENCE, 4, 3, replace(step_report(8, Placement.empty()), phases=PhasesReport(PHASES, 3))),
    m.ChunkRefused(FENCE, 4, "too big"),
    m.Listing(FENCE, 4, 100, ""),
    m.ChunkHeader(FENCE, "plan", 4, 100),
    m.RowsPiece(FENCE),
    m.ListRequest(FENCE, 4),
    m.TapOffer(FENCE, 4, 100, True),
    m.TapState(FENCE, 4, 2, 4, ""),
    m.TapPiece(FENCE, 2),
]  # fmt: skip


def wire(body: object) -> bytes:
    """Return a message with any body."""
    return (body if isinstance(body, str) else json.dumps(body)).encode()


@pytest.mark.parametrize("message", EVERY_KIND, ids=lambda message: message.kind)
def test_decoding_an_encoded_message_returns_it(message: m.ControlMessage) -> None:
    assert m.decode(m.encode(message)) == message


def test_every_kind_is_covered() -> None:
    assert {message.kind for message in EVERY_KIND} == set(m._KINDS)


@given(st.binary(max_size=300))
@settings(max_examples=100, deadline=None)
def test_rubbish_is_refused(data: bytes) -> None:
    with pytest.raises(ControlError):
        m.decode(data)


GOOD = {"kind": "daemon", "job": "j", "instance": "i", "table_digest": "d"}
SETTLED = json.loads(m.encode(m.Settled(FENCE, PlacementState(4, 12345), 3)))
PROGRESS = json.loads(m.encode(m.Progress(FENCE, 4, 3, step_report(8, Placement.empty()))))


@pytest.mark.parametrize(
    "body",
    [
        "", "[]", "1", "{", "[" * 20_000, {}, {**GOOD, "kind": 3}, {"kind": "daemon"},
        {**GOOD, "job": 1}, {**GOOD, "job": None}, {**SETTLED, "applied_version": "1"},
        {**SETTLED, "applied_version": True},
        {**SETTLED, "applied_version": 1.0}, {**SETTLED, "applied_version": 2**64},
        json.dumps({**SETTLED, "applied_version": 1}).replace("1", "NaN"), {**SETTLED, "fence": {"job": "job"}},
        {**PROGRESS, "report": {}}, {**PROGRESS, "report": 3},
        {**PROGRESS, "report": {**PROGRESS["report"], "accesses_by_tier": [1, 2]}},
        {**PROGRESS, "report": {**PROGRESS["report"], "step_seconds": "x"}},
        json.dumps({**PROGRESS, "report": {**PROGRESS["report"], "step_seconds": 12345.5}}).replace("12345.5", "1e999"),
    ],
    ids=lambda body: str(body)[:40],
)  # fmt: skip
def test_a_message_of_another_shape_is_a_control_error(body: object) -> None:
    with pytest.raises(ControlError, match="cannot be read"):
        m.decode(wire(body))


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
BODIES = [json.loads(m.encode(message)) for message in EVERY_KIND]


@given(st.sampled_from(BODIES), st.dictionaries(st.text(min_size=1), ANY_JSON, max_size=5))
@example(PROGRESS, {"more": 10**400, "deep": [[[[[[[[]]]]]]]]})
@example(SETTLED, {"more": "x" * 60_000})
@settings(max_examples=200, deadline=None)
def test_fields_of_a_newer_version_are_ignored(body: dict[str, object], added: dict[str, object]) -> None:
    extended = {**added, **body}
    if isinstance(report := body.get("report"), dict):
        extended["report"] = {**added, **report}
    assert m.decode(wire(extended)) == m.decode(wire(body))


@pytest.mark.parametrize("message", EVERY_KIND, ids=lambda message: message.kind)
def test_optional_fields_may_be_missing_and_no_others(message: m.ControlMessage) -> None:
    body = json.loads(m.encode(message))
    for name, type_ in wire_fields(type(message)).items():
        without = wire({key: value for key, value in body.items() if key != name})
        if type_.optional:
            (default,) = (item.default for item in fields(message) if item.name == name)
            assert getattr(m.decode(without), name) == default
        else:
            with pytest.raises(ControlError, match=f"without {name}"):
                m.decode(without)


@given(st.text(max_size=200).filter(lambda kind: kind not in m._KINDS), st.dictionaries(st.text(), ANY_JSON))
@settings(max_examples=50, deadline=None)
def test_a_message_of_an_unknown_kind_is_told_apart(kind: str, body: dict[str, object]) -> None:
    with pytest.raises(UnknownMessageError, match="unknown kind"):
        m.decode(wire({**body, "kind": kind}))


def test_rows_travel_as_little_endian_keys_then_tiers() -> None:
    keys, tiers = np.array([1, 258], np.int64), np.array([0, 2], np.uint8)
    wire = b"\x01" + bytes(7) + b"\x02\x01" + bytes(6) + b"\x00\x02"
    assert m.rows_body(keys, tiers) == wire


@settings(deadline=None)
@given(rows=st.integers(0, 40), per_row=st.integers(1, 2), piece_bytes=st.integers(1, 64), seed=st.integers(0, 99))
def test_any_list_arrives_as_it_was_cut(rows: int, per_row: int, piece_bytes: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    keys, tiers = rng.integers(0, 2**62, rows), rng.integers(0, 3, per_row * rows).astype(np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(m, "PIECE_BYTES", piece_bytes)
        body = m.rows_body(keys, tiers)
        pieces = m.pieces_of(body)
        assert all(len(piece) <= piece_bytes for piece in pieces)
        assembly = m.RowsAssembly(rows, per_row)
        assert [assembly.add(piece) for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    received_keys, received_tiers = assembly.rows()
    assert np.array_equal(received_keys, keys)
    assert np.array_equal(received_tiers, tiers)
    assert received_keys.flags.writeable and received_tiers.flags.writeable  # noqa: PT018


@pytest.mark.parametrize("rows", [-1, m.MAX_ROWS + 1])
def test_no_memory_is_allocated_for_a_message_of_too_many_rows(rows: int) -> None:
    with pytest.raises(ControlError, match="rows in one message"):
        m.RowsAssembly(rows, 2)


@pytest.mark.parametrize("data", [b"", b"x" * 9, b"x" * 11])
def test_a_piece_of_another_length_is_refused(data: bytes) -> None:
    with pytest.raises(ControlError, match="piece 0 of a list of 1 rows"):
        m.RowsAssembly(1, 2).add(data)
    assembly = m.RowsAssembly(1, 2)
    assert assembly.add(bytes(10))
    with pytest.raises(ControlError, match="piece 1"):
        assembly.add(data)
