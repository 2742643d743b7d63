"""Secret files: format, reloading, and rotation of keys without an interruption."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from flexd.control.protocol.handshake import Status, client_steps, server_steps
from flexd.control.protocol.versions import OWN
from flexd.core.errors import AuthenticationError, ConfigError
from flexd.core.secrets import (
    MAX_FILE_BYTES,
    MIN_SECRET_BYTES,
    RELOAD_SECONDS,
    KeyFile,
    accepted_keys,
    read_keys,
)
from flexd.core.watched_files import WatchedFiles

OLD, NEW = b"the key of last year", b"the key of this year"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def write(path: Path, *keys: bytes) -> None:
    """Replace the file atomically, like a mounted secret."""
    fresh = path.with_suffix(".new")
    fresh.write_bytes(b"\n".join(keys) + b"\n")
    os.replace(fresh, path)


def test_keys_are_lines(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"\n  " + OLD + b"\r\n\n" + NEW)
    assert read_keys(path, "control.secret_file") == (OLD, NEW)
    assert accepted_keys(KeyFile(path, "x")) == (OLD, NEW)
    assert accepted_keys(None) == (b"",)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "No such file"),
        (b" \n\n", "is empty"),
        (b"short", "fewer than 16 bytes"),
        (OLD + b"\nshort", "fewer than 16 bytes"),
        (b"\n".join([OLD, NEW, b"a third key, one too many"]), "more than 2 lines"),
        (b"x" * 5000, "4096 bytes"),
    ],
)
def test_invalid_files_are_refused_without_showing_keys(tmp_path: Path, text: bytes | None, reason: str) -> None:
    path = tmp_path / "secret"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(ConfigError, match="control.secret_file: .*" + reason) as caught:
        read_keys(path, "control.secret_file")
    assert caught.value.remedy
    assert "of last year" not in str(caught.value)


def test_the_shortest_key_and_the_largest_file_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"x" * MIN_SECRET_BYTES + b"\n" * (MAX_FILE_BYTES - MIN_SECRET_BYTES))
    assert read_keys(path, "x") == (b"x" * MIN_SECRET_BYTES,)
    path.write_bytes(b"x" * (MIN_SECRET_BYTES - 1))
    with pytest.raises(ConfigError, match="fewer than 16 bytes"):
        read_keys(path, "x")


def test_a_file_is_checked_at_most_once_an_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, clock = tmp_path / "secret", Clock()
    write(path, OLD)
    checks: list[float] = []
    identity = WatchedFiles._identity

    def count_check(files: WatchedFiles) -> tuple[object, ...]:
        checks.append(clock.now)
        return identity(files)

    monkeypatch.setattr(WatchedFiles, "_identity", count_check)
    keys = KeyFile(path, "x", clock)
    for _ in range(30):
        clock.now += RELOAD_SECONDS / 10
        keys.keys()
    assert 1 < len(checks) <= 4, checks


def test_a_change_during_the_first_read_is_detected_at_the_next_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, clock = tmp_path / "secret", Clock()
    write(path, OLD)

    def read_and_replace(*arguments: Any) -> tuple[bytes, ...]:
        keys = read_keys(*arguments)
        write(path, NEW)
        return keys

    with monkeypatch.context() as patch:
        patch.setattr("flexd.core.secrets.read_keys", read_and_replace)
        keys = KeyFile(path, "x", clock)
    assert keys.keys() == (OLD,)
    clock.now += RELOAD_SECONDS
    assert keys.keys() == (NEW,)


def test_a_changed_file_is_read_and_an_invalid_one_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, clock = tmp_path / "secret", Clock()
    write(path, OLD)
    keys = KeyFile(path, "control.secret_file", clock)
    write(path, OLD, NEW)
    assert keys.keys() == (OLD,)
    clock.now += RELOAD_SECONDS
    assert keys.keys() == (OLD, NEW)
    caplog.set_level(logging.INFO)
    path.unlink()
    for _ in range(3):
        clock.now += RELOAD_SECONDS
        assert keys.keys() == (OLD, NEW)
    assert caplog.text.count("the keys read before stay in use") == 1
    write(path, NEW)
    clock.now += RELOAD_SECONDS
    assert keys.keys() == (NEW,)
    assert "of last year" not in caplog.text


def test_a_new_key_of_the_same_length_is_detected(tmp_path: Path) -> None:
    path, clock = tmp_path / "secret", Clock()
    write(path, b"0" * 32)
    keys = KeyFile(path, "control.secret_file", clock)
    write(path, b"1" * 32)
    clock.now += RELOAD_SECONDS
    assert keys.keys() == (b"1" * 32,)


def shake_hands(trainer: KeyFile, daemon: KeyFile) -> None:
    """Make the handshake of the control channel. Raises AuthenticationError: the two have no key in common."""
    sides = [client_steps(OWN, trainer.keys()), server_steps(OWN, daemon.keys())]
    waiting = [b"", b""]
    """Bytes sent to each side and not taken yet."""
    needed = [0, 0]
    done: set[int] = set()
    for side, steps in enumerate(sides):
        sent, needed[side] = next(steps)
        waiting[1 - side] += sent
    while len(done) < 2:
        side = next(at for at in (0, 1) if at not in done and len(waiting[at]) >= needed[at])
        data, waiting[side] = waiting[side][: needed[side]], waiting[side][needed[side] :]
        try:
            sent, needed[side] = sides[side].send(data)
            waiting[1 - side] += sent
        except StopIteration as end:
            done.add(side)
            if side == 1:
                waiting[0] += end.value.verdict(Status.OK)


def test_adjacent_steps_of_a_rotation_accept_each_other(tmp_path: Path) -> None:
    """Two sides may be one step of a rotation apart, not two."""
    files = []
    for step, keys in enumerate([(OLD,), (OLD, NEW), (NEW, OLD), (NEW,)]):
        write(tmp_path / str(step), *keys)
        files.append(KeyFile(tmp_path / str(step), "secret_file"))
    for a, own_keys in enumerate(files):
        for b, peer_keys in enumerate(files):
            if abs(a - b) <= 1:
                shake_hands(own_keys, peer_keys)
    with pytest.raises(AuthenticationError):
        shake_hands(files[3], files[0])
