"""Undo changes that jobs of one rank make in the process of the tests."""

import pytest

from flexd.embedding.checkpoint import table_rows


@pytest.fixture(autouse=True)
def window_of_whole_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of one rank in this process cut windows small; later tests of large worlds would take minutes."""
    monkeypatch.setattr(table_rows, "MAX_WINDOW_BYTES", table_rows.MAX_WINDOW_BYTES)
