"""Secret files: format, reloading, and rotation of keys without an interruption."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from flexd.core.errors import ConfigError
from flexd.core.secrets import (
    RELOAD_SECONDS,
    KeyFile,
    accepted_keys,
    read_keys,
)
from tests.support.until import Clock

OLD, NEW = b"the key of last year", b"the key of this year"


def write(path: Path, *keys: bytes) -> None:
    """Replace the file atomically, like a mounted secret."""
    fresh = path.with_suffix(".new")
    fresh.write_bytes(b"\n".join(keys) + b"\n")
    os.replace(fresh, path)


def test_keys_are_lines(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"\n  " + OLD + b"\r\n\n" + NEW)
    assert read_keys(path, "control.secret_file") == (OLD, NEW)
    assert (accepted_keys(KeyFile(path, "x")), accepted_keys(None)) == ((OLD, NEW), (b"",))


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
    assert caplog.text.count("what was read before stays in use") == 1
    write(path, NEW)
    clock.now += RELOAD_SECONDS
    assert keys.keys() == (NEW,)
    assert "of last year" not in caplog.text


def test_a_replaced_file_of_equal_size_and_time_has_changed(tmp_path: Path) -> None:
    """A mounted secret is replaced by a rename."""
    path, clock = tmp_path / "secret", Clock()
    path.write_bytes(OLD)
    keys = KeyFile(path, "x", clock)
    times = path.stat()
    (tmp_path / "new").write_bytes(NEW)
    os.utime(tmp_path / "new", ns=(times.st_atime_ns, times.st_mtime_ns))
    (tmp_path / "new").replace(path)
    clock.now += RELOAD_SECONDS
    assert keys.keys() == (NEW,)
