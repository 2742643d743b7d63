"""The two transports under the control channel: a TCPStore for small messages, a gloo group for row lists.

Every call here returns or raises within a deadline, releases the GIL while it waits, and raises ControlError (or the
RuntimeError that torch raises, which callers treat alike: ``CHANNEL_ERRORS``).

torch is imported where it is first needed: ingest does not wait for it, and no other import of the daemon takes longer.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import queue
import random
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from flexd.core.errors import ControlError, FlexdError
from flexd.core.fault_points import fault_point
from flexd.core.placement import Delta

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]

CHANNEL_ERRORS = (FlexdError, RuntimeError, OSError)
"""Everything that ends an epoch or a connection; torch's own errors are RuntimeErrors."""

MAX_ROWS = 2**26
"""Rows in one chunk or listing: bounds the memory that a message makes its receiver allocate."""

MAX_ABANDONED_CLIENTS = 4

Result = TypeVar("Result")


def new_token() -> str:
    """64 random bits as hex."""
    return os.urandom(8).hex()


def parse_address(address: str) -> tuple[str, int]:
    """``host:port`` or ``[v6]:port``. Raises ControlError."""
    host, separator, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port.isdigit() or not 0 < int(port) < 65_536:
        raise ControlError(f"control address {address!r}", remedy="give it as host:port")
    return host, int(port)


def address_towards(host: str, port: int) -> str:
    """This machine's own address on the way to ``host``: what its peers can reach it by, without any name look-up."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


class Backoff:
    """Waits of ``first`` seconds doubling to ``longest``, each shortened at random by up to a half."""

    def __init__(self, first: float = 0.05, longest: float = 2.0) -> None:
        self._first = first
        self._longest = longest
        self._next = first

    def seconds(self) -> float:
        wait, self._next = self._next, min(self._longest, self._next * 2)
        return wait * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        self._next = self._first


def listen(host: str, port: int) -> tuple[int, int]:
    """Binds a listening socket; returns (file descriptor, port). Raises ControlError.

    A TCPStore that opens its own socket listens on every interface, whatever host it is given: so it is handed one.
    """
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ControlError(
            f"control.listen_host {host!r}: {error}", remedy="give an address of this machine"
        ) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen(1024)
        port = int(listener.getsockname()[1])
        return listener.detach(), port
    except OSError as error:
        listener.close()
        raise ControlError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            remedy="another daemon may be running; set control.listen_host and control.listen_port",
        ) from error


def load_transports() -> None:
    """Imports torch, which takes seconds, so that nobody has to wait for it later."""
    importlib.import_module("torch.distributed")


def job_store(store: TCPStore, job: str) -> Store:
    """All keys of one job."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    return PrefixStore(Keys.prefix(job), store)


def host_store(host: str, port: int, timeout_seconds: float, listen_fd: int) -> TCPStore:
    """Hosts the rendezvous store on a socket from ``listen``, which is the store's from now on."""
    return _store(host, port, timeout_seconds, listen_fd)


def _store(host: str, port: int, timeout_seconds: float, listen_fd: int | None) -> TCPStore:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(
        host, port, is_master=listen_fd is not None, wait_for_workers=False,
        timeout=timedelta(seconds=timeout_seconds), master_listen_fd=listen_fd,
    )  # fmt: skip


class StoreClient:
    """A connection to the daemon's store whose every call has a deadline.

    The store itself has none where it matters: its constructor greets the server, and ``check``, ``queue_push`` and
    the end of a ``get`` that timed out wait for the server's answer, all without limit. A stopped daemon, whose kernel
    still accepts connections and bytes, would hold the caller for ever. So one helper thread makes the calls and is
    left behind, with the connection, when a deadline passes; it ends when the daemon moves on or dies.
    """

    def __init__(self, host: str, port: int, job: str, timeout_seconds: float) -> None:
        self._where = f"{host}:{port}"
        self._timeout = timeout_seconds
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._helper = threading.Thread(target=self._serve, args=(host, port, job), name="flexd-store", daemon=True)
        self._helper.start()

    def get(self, key: str) -> bytes:
        """Raises ControlError without waiting if there is no such key."""

        def get_if_there(store: Store) -> bytes:
            if not store.check([key]):
                raise ControlError(f"the daemon has no {key!r}")
            return bytes(store.get(key))

        return self.call(get_if_there)

    def check(self, key: str) -> bool:
        return self.call(lambda store: bool(store.check([key])))

    def queue_push(self, key: str, text: str) -> None:
        self.call(lambda store: store.queue_push(key, text))

    def delete_key(self, key: str) -> None:
        self.call(lambda store: store.delete_key(key))

    def call(self, action: Callable[[Store], Result], patience: float = 1.0) -> Result:
        """What ``action`` returns or raises. ``patience``: deadline in units of the client's timeout.

        Raises:
            ControlError: no answer within the deadline; the client is of no use any more.
        """
        call = _Call(action)
        self._calls.put(call)
        if not call.done.wait(self._timeout * patience):
            self.close()
            raise ControlError(f"the daemon at {self._where} does not answer in {self._timeout * patience:g} s")
        if call.error is not None:
            raise call.error
        result: Result = call.result
        return result

    def close(self) -> None:
        """Disconnects, as soon as a call under way ends."""
        self._calls.put(None)

    @property
    def is_alive(self) -> bool:
        return self._helper.is_alive()

    def _serve(self, host: str, port: int, job: str) -> None:
        store: Store | None = None
        while (call := self._calls.get()) is not None:
            try:
                if store is None:
                    store = job_store(_store(host, port, self._timeout, None), job)
                call.result = call.action(store)
            except BaseException as error:
                call.error = error
            call.done.set()
            # Neither an error's frames nor a result may keep the connection or a group alive.
            del call


class _Call:
    def __init__(self, action: Callable[[Store], Any]) -> None:
        self.action = action
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None


class StoreConnector:
    """Makes ``StoreClient``s, of which at most ``MAX_ABANDONED_CLIENTS`` are left behind at a time."""

    def __init__(self, host: str, port: int, job: str, timeout_seconds: float) -> None:
        self._host = host
        self._port = port
        self._job = job
        self._timeout = timeout_seconds
        self._clients: list[StoreClient] = []

    def connect(self) -> StoreClient:
        """Raises ControlError: unreachable, no store, or no answer in time."""
        where = f"{self._host}:{self._port}"
        try:
            # Fails fast and quietly where the store would retry and log until its deadline.
            socket.create_connection((self._host, self._port), timeout=self._timeout).close()
        except OSError as error:
            raise ControlError(f"no daemon at {where}: {error}", remedy="is it running? check the address") from error
        self._clients = [client for client in self._clients if client.is_alive]
        if len(self._clients) > MAX_ABANDONED_CLIENTS:
            raise ControlError(f"the daemon at {where} accepts connections but does not answer")
        client = StoreClient(self._host, self._port, self._job, self._timeout)
        self._clients.append(client)
        try:
            client.check(Keys.HINT)
        except BaseException:
            client.close()
            raise
        return client


def first_line(error: BaseException) -> str:
    """The first line of an error: torch appends stack traces to its own."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


@dataclass(frozen=True)
class Hint:
    """The one key that ranks poll: which epoch, whether to join its group now, and how many commands it has.

    Unsigned: a false one makes a rank look for messages that it then does not find or does not believe.
    """

    epoch: int = 0
    go: bool = False
    commands: int = 0

    def text(self) -> str:
        return f"{self.epoch}:{int(self.go)}:{self.commands}"

    @staticmethod
    def parse(data: bytes) -> Hint:
        """Raises ControlError."""
        parts = data.split(b":")
        if len(data) > 64 or len(parts) != 3 or not all(part.isdigit() for part in parts):
            raise ControlError("the daemon's hint cannot be read")
        return Hint(int(parts[0]), parts[1] != b"0", int(parts[2]))


class Keys:
    """Names of the store's keys, under the job's prefix."""

    HINT = "hint"
    NOTICE = "daemon"
    EPOCH = "epoch"
    INBOUND = "inbound"
    """The queue that all ranks push to."""
    TURN = "turn"
    """How often the daemon has looked at that queue. Ranks ask for this and not for the queue's length: torch 2.13
    holds the GIL in ``queue_len``, so that a stopped daemon would stop the training of who asks."""

    @staticmethod
    def prefix(job: str) -> str:
        return f"flexd/{job}"

    @staticmethod
    def refused(nonce: str) -> str:
        return f"refused/{nonce}"

    @staticmethod
    def command(epoch: int, command: int) -> str:
        return f"command/{epoch}/{command}"

    @staticmethod
    def group(epoch: int) -> str:
        return f"group/{epoch}"

    @staticmethod
    def taps(epoch: int) -> str:
        """Where all of an epoch's tap keys are under."""
        return f"tap/{epoch}/"

    @staticmethod
    def tap_state(epoch: int, rank: int) -> str:
        return f"{Keys.taps(epoch)}{rank}/state"

    @staticmethod
    def tap_piece(epoch: int, rank: int, grant: int, piece: int) -> str:
        return f"{Keys.taps(epoch)}{rank}/{grant}/{piece}"


def rows_sha256(keys: Int64Array, tiers: UInt8Array) -> str:
    """Hex digest of int64[n] keys and uint8[m] tiers as they travel (little endian)."""
    digest = hashlib.sha256(keys.astype("<i8").tobytes())
    digest.update(tiers.tobytes())
    return digest.hexdigest()


def delta_tiers(delta: Delta) -> UInt8Array:
    """uint8[2n]: old tiers, then new tiers."""
    return np.concatenate([delta.old_tiers, delta.new_tiers]).astype(np.uint8)


class EpochGroup:
    """The gloo group of one epoch: ranks 0..W-1 and the daemon as rank W. Unusable after its first error.

    Args:
        address: this member's own address; its peers connect to it.

    Raises:
        RuntimeError: not all members joined within the deadline.
    """

    def __init__(
        self, store: Store, epoch: int, rank: int, world_size: int, address: str, timeout_seconds: float
    ) -> None:
        from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout_seconds)
        options._devices = [gloo.create_device(hostname=address)]
        self._daemon = world_size
        self._timeout = timedelta(seconds=timeout_seconds)
        self._group = gloo(PrefixStore(Keys.group(epoch), store), rank, world_size + 1, options)

    def broadcast(self, keys: Int64Array, tiers: UInt8Array) -> None:
        """Daemon only: to all ranks."""
        import torch

        self._broadcast(torch.from_numpy(keys.copy()))
        fault_point("chunk.half_sent")
        self._broadcast(torch.from_numpy(tiers.copy()))

    def receive(self, rows: int, tiers: int) -> tuple[Int64Array, UInt8Array]:
        """Ranks only: the counterpart of ``broadcast``, int64[rows] and uint8[tiers]."""
        received = self._empty(rows, tiers)
        for tensor in received:
            self._broadcast(tensor)
        return received[0].numpy(), received[1].numpy()

    def send_to_daemon(self, keys: Int64Array, tiers: UInt8Array) -> None:
        import torch

        arrays: tuple[npt.NDArray[Any], ...] = (keys, tiers)
        for tag, array in enumerate(arrays):
            if len(array):
                self._group.send([torch.from_numpy(array.copy())], self._daemon, tag).wait(self._timeout)

    def receive_from(self, rank: int, rows: int, tiers: int) -> tuple[Int64Array, UInt8Array]:
        """Daemon only: the counterpart of ``send_to_daemon``."""
        received = self._empty(rows, tiers)
        for tag, tensor in enumerate(received):
            if len(tensor):
                self._group.recv([tensor], rank, tag).wait(self._timeout)
        return received[0].numpy(), received[1].numpy()

    def _broadcast(self, tensor: torch.Tensor) -> None:
        from torch.distributed import BroadcastOptions

        if not len(tensor):
            return
        options = BroadcastOptions()
        options.rootRank = self._daemon
        options.timeout = self._timeout
        self._group.broadcast([tensor], options).wait(self._timeout)

    @staticmethod
    def _empty(rows: int, tiers: int) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        if not 0 <= rows <= MAX_ROWS or not 0 <= tiers <= 2 * MAX_ROWS:
            raise ControlError(f"{rows} rows in one message", remedy=f"at most {MAX_ROWS}")
        return torch.empty(rows, dtype=torch.int64), torch.empty(tiers, dtype=torch.uint8)
