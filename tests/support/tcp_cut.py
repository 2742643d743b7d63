"""A TCP proxy whose connections can all be cut, and that can refuse new ones: a network outage in front of a broker."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable


class TcpCut:
    """Forwards one loopback port to another, with interruptions."""

    def __init__(self, listen_port: int, target_port: int) -> None:
        self._target_port = target_port
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._open = True
        self.tamper: Callable[[bytes], bytes] | None = None
        """Changes each segment, in either direction."""
        self._flowing = threading.Event()
        self._flowing.set()
        self._server = socket.create_server(("127.0.0.1", listen_port))
        threading.Thread(target=self._accept, daemon=True).start()

    def disconnect(self) -> None:
        """End all connections, and every new one until ``mend``."""
        self._open = False
        with self._lock:
            for end in self._sockets:
                _close(end)
            self._sockets.clear()

    def stall(self) -> None:
        """Keep connections and accept new ones, and forward no byte until ``mend``."""
        self._flowing.clear()

    def mend(self) -> None:
        self._open = True
        self.tamper: Callable[[bytes], bytes] | None = None
        """Changes each segment, in either direction."""
        self._flowing.set()

    def close(self) -> None:
        _close(self._server)
        self.disconnect()
        self._flowing.set()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            if not self._open:
                _close(client)
                continue
            try:
                target = socket.create_connection(("127.0.0.1", self._target_port), timeout=5.0)
                target.settimeout(None)
            except OSError:
                _close(client)
                continue
            with self._lock:
                self._sockets |= {client, target}
            for source, sink in ((client, target), (target, client)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                self._flowing.wait()
                tamper = self.tamper
                sink.sendall(data if tamper is None else tamper(data))
        _close(source)
        _close(sink)


def _close(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
