"""Keys of the control channel's store, and the hint."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexd.control.protocol.store_keys import Hint, Keys
from flexd.core.errors import ControlError


@given(st.integers(0, 2**63 - 1), st.booleans(), st.integers(0, 2**31))
def test_parsing_a_hints_text_returns_the_hint(epoch: int, go: bool, commands: int) -> None:
    hint = Hint(epoch, go, commands)
    assert Hint.parse(hint.text().encode()) == hint


@pytest.mark.parametrize(
    "data",
    [b"", b"1:1", b"1:1:1:1", b"1::1", b"-1:0:0", b"a:0:0", b"1:0: 2", b"\xff:0:0", b"1:0:" + b"9" * 61],
    ids=lambda data: repr(data)[:20],
)
def test_malformed_hints_are_refused(data: bytes) -> None:
    with pytest.raises(ControlError, match="hint"):
        Hint.parse(data)


def test_the_longest_hint_that_is_read_has_64_bytes() -> None:
    assert Hint.parse(b"1:0:" + b"9" * 60) == Hint(1, False, int("9" * 60))


def test_no_two_keys_of_a_job_are_equal() -> None:
    numbers = (0, 1, 11)
    keys = [Keys.HINT, Keys.NOTICE, Keys.EPOCH, Keys.INBOUND, Keys.POLLS]
    keys += [Keys.refused(nonce) for nonce in ("a", "b")]
    keys += [make(epoch) for make in (Keys.group, Keys.taps) for epoch in numbers]
    keys += [make(epoch, rank) for make in (Keys.command, Keys.tap_state) for epoch in numbers for rank in numbers]
    keys += [
        Keys.tap_piece(epoch, rank, grant, piece)
        for epoch in numbers for rank in numbers for grant in numbers for piece in numbers
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)


def test_all_tap_keys_of_an_epoch_have_its_prefix_and_those_of_other_epochs_do_not() -> None:
    keys = {epoch: (Keys.tap_state(epoch, 3), Keys.tap_piece(epoch, 3, 2, 0)) for epoch in (1, 11)}
    for epoch in keys:
        matching = {other for other, names in keys.items() for name in names if name.startswith(Keys.taps(epoch))}
        assert matching == {epoch}


def test_keys_of_different_jobs_have_different_prefixes() -> None:
    assert Keys.prefix("a") != Keys.prefix("b")
