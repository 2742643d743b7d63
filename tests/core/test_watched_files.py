"""Changes of watched files."""

from __future__ import annotations

import os
from pathlib import Path

from flexd.core.secrets import WatchedFiles


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
