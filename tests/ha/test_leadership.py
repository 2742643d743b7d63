"""Leadership without a lease, and snapshots of a daemon that lost its lease."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flexd.config.load import parse_config
from flexd.core.errors import SnapshotError
from flexd.ha.leadership import FencedSnapshotStore, without_lease
from flexd.ha.term_directories import open_term_directory


def test_a_daemon_without_a_lease_refuses_a_directory_with_terms(tmp_path: Path) -> None:
    config = parse_config(
        {
            "job": "j", "tables": [{"name": "item", "rows": 10, "dim": 4}],
            "stream": {"source": {"kind": "synthetic"}}, "state": {"dir": str(tmp_path)},
        }
    )  # fmt: skip
    assert without_lease(config).holds()
    open_term_directory(tmp_path, 3)
    with pytest.raises(SnapshotError, match="term-0000000003"):
        without_lease(config)


@pytest.mark.parametrize("answers", [[False], [True, False]])
def test_a_snapshot_is_refused_if_the_lease_is_lost_before_it_is_durable(tmp_path: Path, answers: list[bool]) -> None:
    left = list(answers)
    store = FencedSnapshotStore(tmp_path, 3, lambda: left.pop(0))
    with pytest.raises(SnapshotError, match="no longer leads"):
        store.save({}, {"a": np.arange(3)})
    assert left == []
    assert len(store.paths()) == len(answers) - 1, "a snapshot that was written all the same is not reported"
    assert FencedSnapshotStore(tmp_path, 3, lambda: True).save({}, {"a": np.arange(3)}).exists()
