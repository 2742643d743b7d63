"""Both ends agree on versions and keys if they share a secret, and in no other case."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.control.protocol.handshake import (
    MAX_CLIENT_BYTES,
    OWN,
    PROOF_BYTES,
    HandshakeRefusedError,
    HandshakeStatus,
    Session,
    Steps,
    Versions,
    client_steps,
    server_steps,
)
from flexd.core.errors import AuthenticationError, ControlError, IncompatibleError

OLD, NEW, OTHER = b"o" * 32, b"n" * 32, b"x" * 32


class End:
    """One generator with what it has sent, and its result or error."""

    def __init__(self, steps: Steps, verdict: bool = False) -> None:
        self.steps = steps
        self.verdict = verdict
        self.sent: list[bytes] = []
        self.pending = b""
        self.session: Session | None = None
        self.error: Exception | None = None
        self._run(None)

    def feed(self, data: bytes) -> None:
        self.pending += data
        while self.session is None and self.error is None and len(self.pending) >= self.needed:
            data, self.pending = self.pending[: self.needed], self.pending[self.needed :]
            self._run(data)

    def _run(self, data: bytes | None) -> None:
        try:
            output, self.needed = next(self.steps) if data is None else self.steps.send(data)
            if output:
                self.sent.append(output)
        except StopIteration as done:
            self.session = done.value
            if self.verdict:
                self.sent.append(done.value.verdict(HandshakeStatus.OK))
        except HandshakeRefusedError as error:
            self.error = error
            self.sent.append(error.reply)
        except ControlError as error:
            self.error = error


def meet(client: Steps, server: Steps) -> tuple[End, End]:
    ends = End(client), End(server, verdict=True)
    seen = [0, 0]
    for _ in range(10):
        for own, other in ((0, 1), (1, 0)):
            while seen[own] < len(ends[own].sent):
                ends[other].feed(ends[own].sent[seen[own]])
                seen[own] += 1
    return ends


@pytest.mark.parametrize(
    ("client_keys", "server_keys", "proven"),
    [
        ((OLD,), (OLD,), OLD),
        ((OLD,), (OLD, NEW), OLD),
        ((OLD, NEW), (NEW, OLD), OLD),
        ((NEW, OLD), (OLD, NEW), NEW),
        ((NEW, OLD), (NEW,), NEW),
        ((OLD, NEW), (NEW,), NEW),
        ((b"",), (b"",), b""),
    ],
)
def test_both_ends_agree(client_keys: tuple[bytes, ...], server_keys: tuple[bytes, ...], proven: bytes) -> None:
    client, server = meet(client_steps(OWN, client_keys), server_steps(OWN, server_keys))
    assert client.session is not None
    assert server.session is not None
    assert client.session.key == server.session.key == proven
    assert client.session.binding == server.session.binding
    assert (client.session.to_daemon, client.session.to_client) == (server.session.to_daemon, server.session.to_client)
    assert client.session.to_daemon != client.session.to_client
    assert sum(map(len, client.sent)) <= MAX_CLIENT_BYTES
    assert proven.hex() not in repr(client.session) or not proven


@pytest.mark.parametrize(("client_keys", "server_keys"), [((OTHER,), (OLD, NEW)), ((OLD,), (b"",)), ((b"",), (OLD,))])
def test_another_secret_is_refused_at_both_ends(client_keys: tuple[bytes, ...], server_keys: tuple[bytes, ...]) -> None:
    client, server = meet(client_steps(OWN, client_keys), server_steps(OWN, server_keys))
    assert isinstance(client.error, AuthenticationError)
    assert isinstance(server.error, HandshakeRefusedError)
    assert server.error.reason == "wrong_secret"
    # The client has not shown anything that its key made.
    assert client.sent[-1] == bytes(PROOF_BYTES)


def test_the_versions_are_negotiated_and_told() -> None:
    client, server = meet(client_steps(Versions(1, 3), (OLD,)), server_steps(Versions(2, 4), (OLD,)))
    for end in (client, server):
        assert end.session is not None
        assert end.session.version == 3
    client, server = meet(client_steps(Versions(1, 1), (OLD,)), server_steps(Versions(3, 4), (OLD,)))
    assert isinstance(client.error, IncompatibleError)
    assert "version 1" in str(client.error)
    assert "versions 3 to 4" in str(client.error)
    assert isinstance(server.error, HandshakeRefusedError)
    assert server.error.reason == "version"


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_one_bit_flipped_on_the_way_is_noticed(data: st.DataObject) -> None:
    """Also of versions: nobody between the ends can choose the version."""
    offer = Versions(1, 2)
    client, server = End(client_steps(offer, (OLD,))), End(server_steps(offer, (OLD, NEW)), verdict=True)
    # One of four steps; the last 32 bytes of the server's first are the proof of a key that the client does not have.
    step = data.draw(st.integers(0, 3))
    for at, (sender, receiver) in enumerate(((client, server), (server, client), (client, server), (server, client))):
        if len(sender.sent) <= at // 2:
            break
        sent = bytearray(sender.sent[at // 2])
        if at == step:
            bit = data.draw(st.integers(0, 8 * (len(sent) - (32 if at == 1 else 0)) - 1))
            sent[bit // 8] ^= 1 << bit % 8
        receiver.feed(bytes(sent))
    assert client.session is None
