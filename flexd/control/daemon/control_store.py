"""The daemon's side of the store: hosts it, writes its keys and removes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from flexd.control.protocol.messages import (
    ChunkHeader,
    DaemonNotice,
    EpochAnnouncement,
    HelloRefused,
    ListRequest,
    Signer,
    TapState,
)
from flexd.control.protocol.store_client import host_store, job_store
from flexd.control.protocol.store_keys import Hint, Keys

_KEPT_REFUSALS = 1024
_REWRITE_POLLS = 50
"""Polls of the queue after which all announcements are written again; a second at the default tick."""


class ControlStore:
    """Hosts the store and owns its keys, whose number is bounded. Belongs to the coordinator's thread.

    Args:
        listen_fd: a socket that listens on ``host`` and ``port``; the store owns it from now on.
    """

    def __init__(self, host: str, port: int, listen_fd: int, job: str, signer: Signer, timeout_seconds: float) -> None:
        self.signer = signer
        self._server = host_store(host, port, timeout_seconds, listen_fd)
        self._prefix = Keys.prefix(job)
        self.torch_store = job_store(self._server, job)
        self._refusals: deque[str] = deque()
        self._polls = 0
        self._notice: DaemonNotice | None = None
        self._announcement: EpochAnnouncement | None = None
        self.hint = Hint()
        self._write_hint(self.hint)

    def publish(self, notice: DaemonNotice) -> None:
        """Announce the daemon: ranks register from now on."""
        self._notice = notice
        self.torch_store.set(Keys.NOTICE, self.signer.seal(notice))

    def poll_messages(self, limit: int) -> Iterator[bytes]:
        """Yield at most ``limit`` messages that wait in the queue."""
        from torch.distributed import QueueEmptyError

        self._polls += 1
        self.torch_store.set(Keys.POLLS, str(self._polls))
        if self._polls % _REWRITE_POLLS == 0:
            self._rewrite_announcements()
        for _ in range(min(limit, self.torch_store.queue_len(Keys.INBOUND))):
            try:
                yield self.torch_store.queue_pop(Keys.INBOUND, False)
            except QueueEmptyError:
                return

    def refuse(self, refusal: HelloRefused) -> None:
        key = Keys.refused(refusal.nonce)
        self.torch_store.set(key, self.signer.seal(refusal))
        self._refusals.append(key)
        while len(self._refusals) > _KEPT_REFUSALS:
            self.torch_store.delete_key(self._refusals.popleft())

    def announce(self, announcement: EpochAnnouncement) -> None:
        self._announcement = announcement
        self.torch_store.set(Keys.EPOCH, self.signer.seal(announcement))
        self._write_hint(Hint(announcement.epoch))

    def go(self) -> None:
        """Let the ranks join the epoch's group, once all have settled."""
        self._write_hint(Hint(self.hint.epoch, True))

    def command(self, message: ChunkHeader | ListRequest) -> None:
        self.torch_store.set(Keys.command(message.epoch, message.command), self.signer.seal(message))
        self._write_hint(Hint(message.epoch, True, message.command))

    def delete_command(self, epoch: int, command: int) -> None:
        """Remove a command that no rank will read again."""
        self.torch_store.delete_key(Keys.command(epoch, command))

    def write_tap_state(self, state: TapState) -> None:
        self.torch_store.set(Keys.tap_state(state.epoch, state.rank), self.signer.seal(state))

    def pop_tap_piece(self, epoch: int, rank: int, grant: int, piece: int) -> bytes | None:
        """Return and remove a piece as it was written; None if it is not there yet."""
        key = Keys.tap_piece(epoch, rank, grant, piece)
        if not self.torch_store.check([key]):
            return None
        data = bytes(self.torch_store.get(key))
        self.torch_store.delete_key(key)
        return data

    def end_epoch(self, ended: int) -> None:
        """Make the ranks leave the group at their next poll, and remove the epoch's keys."""
        self._write_hint(Hint())
        names = (Keys.command(ended, 0)[:-1], f"{Keys.group(ended)}/", Keys.taps(ended))
        parts = tuple(f"{self._prefix}/{name}" for name in names)
        for key in self._server.list_keys():
            if key.startswith(parts):
                self._server.delete_key(key)

    def _rewrite_announcements(self) -> None:
        """Repair what others may have overwritten: ranks accept signed messages only, and would wait for ever."""
        if self._notice is not None:
            self.torch_store.set(Keys.NOTICE, self.signer.seal(self._notice))
        if self._announcement is not None and self._announcement.epoch == self.hint.epoch:
            self.torch_store.set(Keys.EPOCH, self.signer.seal(self._announcement))
        self._write_hint(self.hint)

    def _write_hint(self, hint: Hint) -> None:
        self.torch_store.set(Keys.HINT, hint.text())
        self.hint = hint
