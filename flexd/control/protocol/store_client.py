"""Hosting of and connections to the daemon's TCPStore, which carries the small messages.

A ``StoreClient`` call returns or raises within a deadline, releases the GIL while it waits, and raises ControlError (or
the RuntimeError that torch raises, which callers treat alike: ``CHANNEL_ERRORS``).

torch is imported where it is first needed: ingest does not wait for it, and no other import of the daemon takes longer.
"""

from __future__ import annotations

import importlib
import queue
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from flexd.control.protocol.store_keys import Keys
from flexd.core.errors import ControlError

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

MAX_ABANDONED_CLIENTS = 4

Result = TypeVar("Result")


def load_transports() -> None:
    """Import torch, which takes seconds, before it is needed."""
    importlib.import_module("torch.distributed")


def job_store(store: TCPStore, job: str) -> Store:
    """Return the part of the store that holds the keys of one job."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    return PrefixStore(Keys.prefix(job), store)


def host_store(host: str, port: int, timeout_seconds: float, listen_fd: int) -> TCPStore:
    """Host the store on a socket from ``listen``, which the store owns from now on."""
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
    the end of a ``get`` that timed out wait for the server's answer without limit. A stopped daemon, whose kernel
    still accepts connections and bytes, would block the caller for ever. So one helper thread makes the calls and is
    abandoned, with the connection, when a deadline passes; it ends when the daemon continues or dies.
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
        """Return or raise what ``action`` does. ``patience``: deadline in units of the client's timeout.

        Raises:
            ControlError: no answer within the deadline; the client cannot be used any more.
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
        """Disconnect as soon as a call under way ends."""
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
    """Makes ``StoreClient``s, of which at most ``MAX_ABANDONED_CLIENTS`` are abandoned at a time."""

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
