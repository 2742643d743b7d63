"""Changes of watched files."""

from __future__ import annotations

import os
from pathlib import Path

from flexd.core.secrets import WatchedFiles


def test_a_change_is_reported_once_and_at_most_once_an_interval(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("a")
    two.write_text("b")
    now = [0.0]
    watched = WatchedFiles([one, two], lambda: now[0])
    two.write_text("longer")
    assert not watched.changed(5.0), "the files were looked at a moment ago"
    now[0] = 5.0
    assert watched.changed(5.0)
    now[0] = 10.0
    assert not watched.changed(5.0)
    two.unlink()
    now[0] = 15.0
    assert watched.changed(5.0), "a file that is gone has changed"
    now[0] = 20.0
    assert not watched.changed(5.0)


def test_a_replaced_file_of_equal_size_and_time_has_changed(tmp_path: Path) -> None:
    """A mounted secret is replaced by a rename."""
    path = tmp_path / "secret"
    path.write_text("old")
    watched = WatchedFiles([path])
    times = path.stat()
    (tmp_path / "new").write_text("new")
    os.utime(tmp_path / "new", ns=(times.st_atime_ns, times.st_mtime_ns))
    (tmp_path / "new").replace(path)
    assert watched.changed(0.0)
    assert not watched.changed(0.0)
