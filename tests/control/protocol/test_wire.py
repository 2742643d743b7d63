"""Frames arrive as they were sent, however the bytes are cut; anything else is refused before it is believed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.control.protocol.wire import (
    MAX_BODY_BYTES,
    MAX_MESSAGE_BYTES,
    FrameKey,
    FrameReader,
    SealedPayload,
)
from flexd.core.errors import ControlError

KEY = bytes(range(32))
FRAMES = st.lists(
    st.tuples(
        st.binary(max_size=300),
        st.one_of(st.binary(max_size=300), st.integers(0, 40_000).map(bytes)),
    ),
    min_size=1,
    max_size=6,
)


def wire(frames: list[tuple[bytes, bytes]], key: bytes = KEY) -> list[bytes]:
    sender = FrameKey(key)
    out = []
    for message, body in frames:
        payload = SealedPayload(message, body)
        out.append(payload.start + bytes(payload.body) + sender.tag(payload))
        assert len(out[-1]) == payload.nbytes
    return out


def read(data: bytes, cuts: list[int], key: bytes = KEY) -> list[tuple[int, bytes, bytes]]:
    """Feed ``data`` in pieces as a socket would, and return what comes out."""
    reader = FrameReader(FrameKey(key))
    found: list[tuple[int, bytes, bytes]] = []
    at, turn = 0, 0
    while at < len(data):
        piece = data[at : at + 1 + cuts[turn % len(cuts)]]
        reader.feed(piece)
        at, turn = at + len(piece), turn + 1
        while (each := reader.next_frame()) is not None:
            kind, frame = each
            found.append((kind, frame.message, bytes(frame.body)))
    return found


@settings(max_examples=60, deadline=None)
@given(FRAMES, st.lists(st.integers(0, 20_000), min_size=1, max_size=8))
def test_frames_arrive_as_they_were_sent(frames: list[tuple[bytes, bytes]], cuts: list[int]) -> None:
    assert read(b"".join(wire(frames)), cuts) == [(0, *frame) for frame in frames]


def test_the_largest_frame_fits() -> None:
    frames = [(bytes(MAX_MESSAGE_BYTES), bytes(MAX_BODY_BYTES))]
    assert read(wire(frames)[0], [2**20]) == [(0, *frames[0])]
    for too_long in ((bytes(MAX_MESSAGE_BYTES + 1), b""), (b"", bytes(MAX_BODY_BYTES + 1))):
        with pytest.raises(ControlError, match="at most"):
            SealedPayload(*too_long)
