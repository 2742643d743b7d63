"""Signed messages of the control channel: round trips, changed bytes, sizes and shapes."""

from __future__ import annotations

import hashlib
import hmac
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flexd.control.protocol import messages as m
from flexd.core.errors import AuthenticationError, ControlError, UnknownMessageError
from flexd.core.placement import Placement
from tests.support.ranks_in_threads import SECRET, step_report

FENCE = ("job", "a1", 2, 7, "token", 3)
EVERY_KIND: list[m.Message] = [
    m.DaemonNotice("job", "instance", "digest", 3),
    m.Hello("job", "i", "a1", 1, 4, 2, 2, (10, 20), "digest", "s", "n", 5, 3, 2**64 - 1, "127.0.0.1", True, ("t",), 3),
    m.HelloRefused("job", "i", "n", "reason", "remedy"),
    m.EpochAnnouncement("job", "i", "a1", 2, 7, "token", 3, ("n0", "n1")),
    m.Settled(*FENCE, 1, 9, 4, 12345, 3),
    m.Progress(*FENCE, 1, 9, 4, 3, None),
    m.Progress(*FENCE, 1, 9, 4, 3, step_report(8, Placement.empty())),
    m.ChunkRefused(*FENCE, 1, 9, 4, "too big"),
    m.Listing(*FENCE, 1, 9, 4, 100, "sha", ""),
    m.ChunkHeader(*FENCE, 3, "plan", 4, 100, "sha"),
    m.ListRequest(*FENCE, 3, 4, (0, 1)),
    m.TapOffer(*FENCE, 1, 9, "session", 4, 100, 1, True),
    m.TapState(*FENCE, 1, "session", 4, 2, 4, ""),
    m.TapPiece(*FENCE, 1, 4, 2, 0, "ab" * 32),
]


def forge(body: object, secret: bytes = SECRET) -> bytes:
    """Return a signed message with any body."""
    text = body if isinstance(body, str) else json.dumps(body)
    return f"{hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()}\n{text}".encode()


@pytest.mark.parametrize("message", EVERY_KIND, ids=lambda message: message.kind)
def test_opening_a_sealed_message_returns_it(message: m.Message) -> None:
    assert m.Signer(SECRET).open(m.Signer(SECRET).seal(message).encode()) == message


def test_every_kind_is_covered() -> None:
    assert {message.kind for message in EVERY_KIND} == set(m._KINDS)


@given(at=st.integers(0, 10_000), flip=st.integers(1, 255))
@example(at=64, flip=1)
@settings(max_examples=100, deadline=None)
def test_a_changed_byte_is_refused_unread(at: int, flip: int) -> None:
    data = bytearray(m.Signer(SECRET).seal(EVERY_KIND[1]).encode())
    at %= len(data)
    data[at] ^= flip
    with pytest.raises(AuthenticationError):
        m.Signer(SECRET).open(bytes(data))


@given(st.binary(max_size=300))
@settings(max_examples=100, deadline=None)
def test_rubbish_is_refused(data: bytes) -> None:
    with pytest.raises(ControlError):
        m.Signer(SECRET).open(data)


@pytest.mark.parametrize("secret", [None, b"", b"another secret"])
def test_another_secret_is_refused(secret: bytes | None) -> None:
    with pytest.raises(AuthenticationError, match="same secret file"):
        m.Signer(SECRET).open(m.Signer(secret).seal(EVERY_KIND[0]).encode())


GOOD = {"kind": "daemon", "job": "j", "instance": "i", "table_digest": "d", "term": 0}
SETTLED = json.loads(m.Signer(SECRET).seal(EVERY_KIND[4]).split("\n")[1])
PROGRESS = json.loads(m.Signer(SECRET).seal(EVERY_KIND[6]).split("\n")[1])


@pytest.mark.parametrize(
    "body",
    [
        "", "[]", "1", "{", "[" * 20_000, {}, {**GOOD, "kind": 3}, {"kind": "daemon"},
        {**GOOD, "job": 1}, {**GOOD, "job": None}, {**SETTLED, "rank": "1"}, {**SETTLED, "rank": True},
        {**SETTLED, "rank": 1.0}, {**SETTLED, "rank": 2**64}, json.dumps({**SETTLED, "rank": 1}).replace("1", "NaN"),
        {**PROGRESS, "report": {}}, {**PROGRESS, "report": 3},
        {**PROGRESS, "report": {**PROGRESS["report"], "accesses_by_tier": [1, 2]}},
        {**PROGRESS, "report": {**PROGRESS["report"], "step_seconds": "x"}},
        json.dumps({**PROGRESS, "report": {**PROGRESS["report"], "step_seconds": 12345.5}}).replace("12345.5", "1e999"),
    ],
    ids=lambda body: str(body)[:40],
)  # fmt: skip
def test_a_signed_message_of_another_shape_is_a_control_error(body: object) -> None:
    with pytest.raises(ControlError, match="cannot be read"):
        m.Signer(SECRET).open(forge(body))


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
BODIES = [json.loads(m.Signer(SECRET).seal(message).split("\n")[1]) for message in EVERY_KIND]


@given(st.sampled_from(BODIES), st.dictionaries(st.text(min_size=1), ANY_JSON, max_size=5))
@example(PROGRESS, {"more": 10**5000, "deep": [[[[[[[[]]]]]]]]})
@example(SETTLED, {"more": "x" * 60_000})
@settings(max_examples=200, deadline=None)
def test_fields_of_a_newer_version_are_ignored(body: dict[str, object], added: dict[str, object]) -> None:
    extended = {**added, **body}
    if isinstance(report := body.get("report"), dict):
        extended["report"] = {**added, **report}
    with unlimited_digits():
        data = forge(extended)
    if len(data) <= m.MAX_MESSAGE_BYTES:
        assert m.Signer(SECRET).open(data) == m.Signer(SECRET).open(forge(body))


@contextmanager
def unlimited_digits() -> Iterator[None]:
    """Let this thread write integers of any length, which its reader must survive."""
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(limit)


@pytest.mark.parametrize("message", EVERY_KIND, ids=lambda message: message.kind)
def test_optional_fields_may_be_missing_and_no_others(message: m.Message) -> None:
    body = json.loads(m.Signer(SECRET).seal(message).split("\n")[1])
    for name, field in m.wire_fields(type(message)).items():
        without = forge({key: value for key, value in body.items() if key != name})
        if field.optional:
            (default,) = (item.default for item in fields(message) if item.name == name)
            assert getattr(m.Signer(SECRET).open(without), name) == default
        else:
            with pytest.raises(ControlError, match=f"without {name}"):
                m.Signer(SECRET).open(without)


@given(st.text(max_size=200).filter(lambda kind: kind not in m._KINDS), st.dictionaries(st.text(), ANY_JSON))
@settings(max_examples=50, deadline=None)
def test_a_message_of_an_unknown_kind_is_told_apart(kind: str, body: dict[str, object]) -> None:
    with pytest.raises(UnknownMessageError, match="unknown kind"):
        m.Signer(SECRET).open(forge({**body, "kind": kind}))


def test_a_message_too_long_is_refused_on_both_sides() -> None:
    long = replace(EVERY_KIND[0], job="x" * m.MAX_MESSAGE_BYTES)
    with pytest.raises(ControlError, match="longer than"):
        m.Signer(SECRET).seal(long)
    with pytest.raises(ControlError, match="longer than"):
        m.Signer(SECRET).open(forge("x" * m.MAX_MESSAGE_BYTES))


def test_a_message_of_the_longest_length_passes_and_one_byte_more_does_not() -> None:
    signer, notice = m.Signer(SECRET), m.DaemonNotice("", "i", "d", 0)
    longest = replace(notice, job="x" * (m.MAX_MESSAGE_BYTES - len(signer.seal(notice))))
    sealed = signer.seal(longest).encode()
    assert len(sealed) == m.MAX_MESSAGE_BYTES
    assert signer.open(sealed) == longest
    with pytest.raises(ControlError, match="longer than"):
        signer.seal(replace(longest, job=longest.job + "x"))
    with pytest.raises(ControlError, match="longer than"):
        signer.open(forge(sealed[65:].decode().replace("x", "xx", 1)))


def test_the_longest_header_passes_before_the_longest_piece() -> None:
    signer, data = m.Signer(SECRET), b"12345"
    piece = m.TapPiece("", *FENCE[1:], 1, 4, 2, 0, hashlib.sha256(data).hexdigest())
    longest = replace(piece, job="x" * (m.MAX_MESSAGE_BYTES - len(signer.seal(piece))))
    sealed = m.seal_with_bytes(signer, longest, data)
    assert m.open_with_bytes(signer, sealed, len(data)) == (longest, data)
    with pytest.raises(ControlError, match="a piece of"):
        m.open_with_bytes(signer, sealed + b"6", len(data))


def test_another_kind_than_expected_is_refused() -> None:
    with pytest.raises(ControlError, match="where a epoch message belongs"):
        m.Signer(SECRET).open_as(m.EpochAnnouncement, m.Signer(SECRET).seal(EVERY_KIND[0]).encode())


def test_the_messages_before_their_changes_are_accepted() -> None:
    for body in (GOOD, SETTLED, PROGRESS):
        m.Signer(SECRET).open(forge(body))


def test_a_piece_longer_than_requested_is_refused() -> None:
    signer, data = m.Signer(SECRET), b"12345"
    piece = next(message for message in EVERY_KIND if isinstance(message, m.TapPiece))
    sealed = m.seal_with_bytes(signer, replace(piece, sha256=hashlib.sha256(data).hexdigest()), data)
    assert m.open_with_bytes(signer, sealed, 5)[1] == data
    with pytest.raises(AuthenticationError, match="not those that were announced"):
        m.open_with_bytes(signer, sealed, 4)


def piece_of(data: bytes) -> m.TapPiece:
    return m.TapPiece("job", "a", 1, 1, "t", 0, 0, 0, 1, 0, hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize("data", [b"", b"\n\n", bytes(range(256)) * 40])
def test_pieces_carry_any_bytes(data: bytes) -> None:
    signer, header = m.Signer(SECRET), piece_of(data)
    assert m.open_with_bytes(signer, m.seal_with_bytes(signer, header, data), 2**20) == (header, data)


def test_any_changed_byte_of_a_piece_is_refused() -> None:
    signer, data = m.Signer(SECRET), b"some bytes"
    sealed = m.seal_with_bytes(signer, piece_of(data), data)
    for at in range(len(sealed)):
        changed = bytearray(sealed)
        changed[at] ^= 0x20
        if bytes(changed[:64]).lower() == sealed[:64]:
            continue
        with pytest.raises(ControlError):
            m.open_with_bytes(signer, bytes(changed), 2**20)
    with pytest.raises(AuthenticationError):
        m.open_with_bytes(m.Signer(b"other"), sealed, 2**20)
    with pytest.raises(ControlError):
        m.open_with_bytes(signer, sealed + b"x" * (m.MAX_MESSAGE_BYTES + 2**20), 2**20)
