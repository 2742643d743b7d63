"""Somebody who reaches the store without knowing the secret: repeats, mixes up, forges and replays messages."""

from __future__ import annotations

import random
from datetime import timedelta

from torch.distributed import QueueEmptyError, Store, TCPStore

from flexd.control.protocol.store_client import job_store
from flexd.control.protocol.store_keys import Hint, Keys

_MESSAGES = 40


class Vandal:
    """Connected to the store of one life of the daemon."""

    def __init__(self, port: int, job: str, chance: random.Random) -> None:
        self._chance = chance
        server = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))
        self._store: Store = job_store(server, job)
        self._kept: list[bytes] = []
        self._old: dict[str, bytes] = {}

    def listen(self) -> None:
        """Takes messages of the ranks out of the queue and keeps what the daemon has announced."""
        for _ in range(_MESSAGES):
            try:
                self._kept.append(bytes(self._store.queue_pop(Keys.INBOUND, False)))
            except QueueEmptyError:
                break
        for key in (Keys.NOTICE, Keys.EPOCH, *self._commands()):
            if self._store.check([key]):
                self._old[key] = bytes(self._store.get(key))

    @property
    def heard(self) -> int:
        return len(self._kept)

    def duplicate(self) -> None:
        """Every message three times."""
        for message in self._kept:
            for _ in range(3):
                self._push(message)

    def reorder(self) -> None:
        self._chance.shuffle(self._kept)
        for message in self._kept:
            self._push(message)

    def replay(self) -> None:
        """Replay old messages to the daemon, and put an old command in the place of the next one to the ranks."""
        for message in self._kept:
            self._push(message)
        hint = Hint.parse(self._store.get(Keys.HINT))
        for key, old in self._old.items():
            if key.startswith("command/"):
                self._store.set(Keys.command(hint.epoch, hint.commands + 1), old)  # type: ignore[arg-type]
        self._store.set(Keys.HINT, Hint(hint.epoch, hint.go, hint.commands + 1).text())

    def forge(self) -> None:
        """One character of each message changed, and texts that are no messages at all."""
        for message in self._kept:
            at = self._chance.randrange(len(message))
            self._push(message[:at] + bytes([message[at] ^ 1]) + message[at + 1 :])
        for rubbish in (b"", b"{}", b"[" * 5000, b"\x00\xff" * 100, b'{"kind":"hello"}'):
            self._push(rubbish)

    def forge_announcements(self) -> None:
        """The same to what ranks read: notice, epoch and hint."""
        for key, old in self._old.items():
            at = self._chance.randrange(len(old))
            self._store.set(key, old[:at] + bytes([old[at] ^ 1]) + old[at + 1 :])  # type: ignore[arg-type]
        self._store.set(Keys.HINT, self._chance.choice(["x", "0:0:0", "999999:1:5", ":" * 60]))

    def _push(self, message: bytes) -> None:
        self._store.queue_push(Keys.INBOUND, message)  # type: ignore[arg-type]

    def _commands(self) -> list[str]:
        hint = Hint.parse(self._store.get(Keys.HINT))
        return [Keys.command(hint.epoch, number) for number in range(max(1, hint.commands - 3), hint.commands + 1)]
