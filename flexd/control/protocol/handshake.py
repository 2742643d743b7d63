"""The handshake of the control channel: both ends prove the shared secret before anything else is read.

::

    client -> hello: versions, nonce
    server -> hello: versions, nonce; one proof for each key of its secret (two in a rotation)
    client -> its proof, with the first of its own keys that a proof of the server was made with
    server -> verdict, tagged with the new session key

A proof is an HMAC-SHA256 by the key over the role and both hellos. So a recorded proof is worth nothing (the nonces
differ), nor is the proof of the other end (the role differs), and versions cannot be changed on the way. All fields
have fixed or bounded sizes. Each end is a generator without a socket: it yields what to send and the number of bytes
that it needs next. ``docs/upgrading.md`` states the policy of versions.

Addresses and TLS, from which a connection begins, and the errors that end it are here too.
"""

import hashlib
import hmac
import os
import socket
import ssl
import struct
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from flexd.core.errors import AuthenticationError, ControlError, FlexdError, IncompatibleError
from flexd.core.secrets import Reloaded, Secret, tls_context
from flexd.core.supervision import Backoff

CHANNEL_ERRORS = (FlexdError, OSError)
"""The errors that are expected to end an epoch or a connection; others end it too, and are logged with their stack."""


def new_token() -> str:
    """Return 64 random bits as hex."""
    return os.urandom(8).hex()


def parse_address(address: str) -> tuple[str, int]:
    """Parse ``host:port`` or ``[v6]:port``. Raises ControlError."""
    host, separator, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port.isdigit() or not 0 < int(port) < 65_536:
        raise ControlError(f"control address {address!r}", remedy="give it as host:port")
    return host, int(port)


def listen(host: str, port: int) -> socket.socket:
    """Bind and return a listening socket. Raises ControlError.

    Bound before the server starts, so that an address that is in use is reported at once.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        ipv6 = family == socket.AF_INET6
        return socket.create_server((host, port), family=family, backlog=4096, dualstack_ipv6=ipv6)
    except OSError as error:
        raise ControlError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            remedy="give an address of this machine; another daemon may be running: set control.listen_host and "
            "control.listen_port",
        ) from error


def reconnect_backoff() -> Backoff:
    """Return the waits between two attempts to join, which ranks do not make at the same time."""
    return Backoff(0.05, 2.0, spread=0.5)


CHECK_SECONDS = 5.0
"""Time between two checks for changed certificate files."""


@dataclass(frozen=True)
class TlsFiles:
    """PEM files of one end. Both ends verify the other one's certificate against ``ca_file``.

    Attributes:
        named_by: origin of the paths for error texts.
        server_name: name that the daemon's certificate must have; empty: the host that the client connects to.
    """

    cert_file: Path
    key_file: Path
    ca_file: Path
    named_by: str = "control.tls"
    server_name: str = ""


@dataclass(frozen=True)
class ChannelCredentials:
    """Proof of one end of the channel.

    Attributes:
        secret: the shared secret, or its file (read again when it changes). None: only loopback or ``tls``.
        tls: certificates (TLS 1.3), or None.
    """

    secret: Secret = None
    tls: TlsFiles | None = None


class TlsContext(Reloaded[ssl.SSLContext]):
    """TLS 1.3 of one end, made again when its files change. Thread-safe.

    Args:
        clock: monotonic seconds, for tests.

    Raises:
        ConfigError: a file cannot be read, or certificate and key do not belong together.
    """

    def __init__(self, files: TlsFiles, server_side: bool, clock: Callable[[], float] = time.monotonic) -> None:
        paths = (files.cert_file, files.key_file, files.ca_file)
        super().__init__(paths, lambda: _make_context(files, server_side), files.named_by, clock)

    def current(self) -> ssl.SSLContext:
        """Return the context for a new connection."""
        return self.value(CHECK_SECONDS)


def _make_context(files: TlsFiles, server_side: bool) -> ssl.SSLContext:
    protocol = ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT
    context = tls_context(protocol, files.cert_file, files.key_file, files.ca_file, files.named_by)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    # Nothing is resumed: each connection presents a certificate that is valid now.
    context.options |= ssl.OP_NO_TICKET
    if server_side:
        context.num_tickets = 0
    return context


VERSION = 1
"""Raised when the schema of a message changes in any way; ``tests/control/protocol/wire`` has each version's schema."""
MIN_VERSION = max(1, VERSION - 1)
"""A peer of the previous version is served; a peer of the next one serves this version."""

MAGIC = b"FLEXD\r\n"
NONCE_BYTES = PROOF_BYTES = 32
PROOFS = 2
"""Proofs after a server's hello: as many as a secret file may have keys; unused ones are random."""
MAX_FIELDS_BYTES = 1024
"""Largest variable part of a hello; a later version may append fields to it, which are ignored here."""
VERDICT_TAG_BYTES = 16

_HEAD = struct.Struct(f">{len(MAGIC)}sBH")
_FIELDS = struct.Struct(f">HH{NONCE_BYTES}s")
MAX_CLIENT_BYTES = _HEAD.size + MAX_FIELDS_BYTES + PROOF_BYTES
"""Most bytes that a server reads from a client that has not proven itself."""

_SERVER_PROOF, _CLIENT_PROOF, _SESSION = b"flexd server proof\n", b"flexd client proof\n", b"flexd session\n"

Steps = Generator[tuple[bytes, int], bytes, "Session"]
"""A handshake: yields (bytes to send, bytes needed), is sent exactly as many as it needs, returns the session."""


@dataclass(frozen=True)
class Versions:
    """The protocol versions, lowest and highest inclusive, that one side offers in the handshake."""

    lowest: int = MIN_VERSION
    highest: int = VERSION

    def __str__(self) -> str:
        return f"version {self.highest}" if self.lowest == self.highest else f"versions {self.lowest} to {self.highest}"


OWN = Versions()


def negotiate(trainer: Versions, daemon: Versions) -> int:
    """Return the highest version that both sides speak; both sides compute the same.

    Raises:
        IncompatibleError: no common version. The text names both offers and the side to upgrade.
    """
    version = min(trainer.highest, daemon.highest)
    if version < max(trainer.lowest, daemon.lowest):
        older = "trainer" if trainer.highest < daemon.highest else "daemon"
        raise IncompatibleError(
            f"the trainer speaks {trainer} of the control protocol, the daemon {daemon}",
            remedy=f"upgrade the {older}: only adjacent versions work together (docs/upgrading.md)",
        )
    return version


class HandshakeStatus(IntEnum):
    """A server's verdict on a client."""

    OK = 0
    VERSION = 1
    WRONG_SECRET = 2
    TOO_MANY = 3


class HandshakeRefusedError(ControlError):
    """The server refuses a client.

    Attributes:
        reason: a bounded label for metrics.
        reply: the last bytes for the client.
    """

    def __init__(self, message: str, *, reason: str, reply: bytes = b"") -> None:
        self.reason = reason
        self.reply = reply
        super().__init__(message)


class Session:
    """The result of a handshake.

    Attributes:
        version: of the protocol, the highest that both ends speak.
        key: the key of the shared secret that was proven.
        binding: digest of both hellos, unique to this connection.
        to_daemon, to_client: session keys of the two directions.
    """

    def __init__(self, version: int, key: bytes, binding: bytes) -> None:
        self.version = version
        self.key = key
        self.binding = binding
        root = _mac(key, _SESSION, binding)
        self.to_daemon = _mac(root, b"to daemon\n")
        self.to_client = _mac(root, b"to client\n")

    def verdict(self, status: int) -> bytes:
        """Return the server's last bytes of a handshake, with a ``HandshakeStatus``."""
        return bytes([status]) + _mac(self.to_client, b"verdict\n", bytes([status]))[:VERDICT_TAG_BYTES]


def client_steps(offer: Versions, keys: tuple[bytes, ...]) -> Steps:
    """Prove to a server, and let it prove itself.

    Args:
        keys: accepted keys of the client's secret, the preferred one first.

    Raises:
        AuthenticationError: the server has none of the keys.
        IncompatibleError: no common version.
        ControlError: refused for another reason, or not a flexd daemon of a known format.
    """
    hello = encode_hello(offer, os.urandom(NONCE_BYTES))
    head = yield hello, _HEAD.size
    try:
        status, length = _parse_head(head)
        fields = yield b"", length
        server_offer = parse_fields(fields)
    except HandshakeRefusedError as error:
        raise ControlError(
            f"no flexd daemon answers there: {error.message}", remedy="give the address of the daemon's control channel"
        ) from error
    if status == HandshakeStatus.VERSION:
        negotiate(offer, server_offer)
        raise IncompatibleError(f"the daemon refuses {offer} of the control protocol", remedy="upgrade the older side")
    if status != HandshakeStatus.OK:
        raise _refusal(status)
    version = negotiate(offer, server_offer)
    proofs = yield b"", PROOFS * PROOF_BYTES
    binding = _digest(hello, head + fields)
    given = [proofs[:PROOF_BYTES], proofs[PROOF_BYTES:]]
    own = ((key, _mac(key, _SERVER_PROOF, binding)) for key in keys)
    key = next((key for key, proof in own if any(hmac.compare_digest(proof, each) for each in given)), None)
    if key is None:
        # Not a proof: the daemon counts a wrong secret, and learns nothing of this end's key.
        yield bytes(PROOF_BYTES), 0
        raise AuthenticationError(
            "the daemon does not have this trainer's secret", remedy="give daemon and trainers the same secret file"
        )
    session = Session(version, key, binding)
    verdict = yield _mac(key, _CLIENT_PROOF, binding), 1 + VERDICT_TAG_BYTES
    authentic = hmac.compare_digest(verdict, session.verdict(verdict[0]))
    if authentic and verdict[0] == HandshakeStatus.OK:
        return session
    if not authentic and verdict[0] != HandshakeStatus.WRONG_SECRET:
        raise AuthenticationError(
            "the daemon's verdict is not authentic", remedy="look for a fault or an intruder on the control network"
        )
    raise _refusal(verdict[0])


def server_steps(offer: Versions, keys: tuple[bytes, ...]) -> Steps:
    """Let a client prove itself, and prove to it. The caller sends ``Session.verdict`` once there is room for it.

    Raises:
        HandshakeRefusedError: the client is refused.
    """
    head = yield b"", len(MAGIC)
    if head != MAGIC:
        raise HandshakeRefusedError("not a flexd trainer", reason="garbage")
    head += yield b"", _HEAD.size - len(MAGIC)
    _, length = _parse_head(head)
    fields = yield b"", length
    client_offer = parse_fields(fields)
    try:
        version = negotiate(client_offer, offer)
    except IncompatibleError as error:
        raise HandshakeRefusedError(
            error.message, reason="version", reply=encode_hello(offer, bytes(NONCE_BYTES), HandshakeStatus.VERSION)
        ) from error
    hello = encode_hello(offer, os.urandom(NONCE_BYTES))
    binding = _digest(head + fields, hello)
    proofs = [_mac(key, _SERVER_PROOF, binding) for key in keys]
    proofs += [os.urandom(PROOF_BYTES) for _ in range(PROOFS - len(proofs))]
    proof = yield hello + b"".join(proofs), PROOF_BYTES
    made_by = [key for key in keys if hmac.compare_digest(_mac(key, _CLIENT_PROOF, binding), proof)]
    if not made_by:
        raise HandshakeRefusedError(
            "the trainer has another secret",
            reason="wrong_secret",
            reply=bytes([HandshakeStatus.WRONG_SECRET]) + bytes(VERDICT_TAG_BYTES),
        )
    return Session(version, made_by[0], binding)


def encode_hello(offer: Versions, nonce: bytes, status: HandshakeStatus = HandshakeStatus.OK) -> bytes:
    """Return a hello of either end."""
    fields = _FIELDS.pack(offer.lowest, offer.highest, nonce)
    return _HEAD.pack(MAGIC, status, len(fields)) + fields


def parse_fields(fields: bytes) -> Versions:
    """Return the offer of a hello's variable part; bytes after the known fields are ignored.

    Raises:
        HandshakeRefusedError: malformed.
    """
    try:
        lowest, highest, _ = _FIELDS.unpack_from(fields)
    except struct.error as error:
        raise HandshakeRefusedError("a hello that cannot be read", reason="malformed") from error
    if not 0 < lowest <= highest:
        raise HandshakeRefusedError("a hello that contradicts itself", reason="malformed")
    return Versions(lowest, highest)


def _parse_head(head: bytes) -> tuple[HandshakeStatus, int]:
    magic, status, length = _HEAD.unpack(head)
    if magic != MAGIC:
        raise HandshakeRefusedError("other bytes than a hello", reason="garbage")
    if length > MAX_FIELDS_BYTES:
        raise HandshakeRefusedError(f"a hello of {length} bytes", reason="oversized")
    if status not in HandshakeStatus.__members__.values():
        raise HandshakeRefusedError(f"a hello with status {status}", reason="malformed")
    return HandshakeStatus(status), length


def _refusal(status: int) -> ControlError:
    if status == HandshakeStatus.TOO_MANY:
        return ControlError("the daemon has too many connections", remedy="run a daemon for each job")
    return AuthenticationError("the daemon refuses this trainer's secret", remedy="give both the same secret file")


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")


def _digest(first: bytes, second: bytes) -> bytes:
    return hashlib.sha256(hashlib.sha256(first).digest() + second).digest()
