"""Cold rows whose writes are over."""

from __future__ import annotations

from flexd.embedding.store.slow.cold_rows import ColdRows
from flexd.embedding.store.slow.log_rows import LogRows


def wait_for_writes(slow: ColdRows) -> None:
    """Wait until all rows that were given are in the file."""
    for staged in slow._staged if isinstance(slow, LogRows) else ():
        slow._end(staged)
