"""A shared secret is replaced while ranks train and plans are pushed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flexd.control.daemon.migration_states import MigrationState
from flexd.core import secrets as secret
from flexd.core.errors import AuthenticationError
from flexd.core.layout import RankLayout
from flexd.core.secrets import KeyFile
from tests.support.ranks_in_threads import Ranks, target
from tests.support.raw_rank import RawRank
from tests.support.until import until

OLD, NEW = b"the key of last year", b"the key of this year"


def write(path: Path, *keys: bytes) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_bytes(b"\n".join(keys))
    os.replace(fresh, path)


def test_three_steps_replace_the_secret_within_one_epoch(
    host: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secret, "RELOAD_SECONDS", 0.0)
    daemons, ranks_own = tmp_path / "daemon", tmp_path / "ranks"
    write(daemons, OLD)
    write(ranks_own, OLD)
    hosted = host(secret=KeyFile(daemons, "control.secret_file"))
    with Ranks(hosted.port, RankLayout(1, 2), secret=KeyFile(ranks_own, "secret file")) as ranks:
        until(hosted.ready)
        epoch = hosted.coordinator.status().epoch
        for step, keys in enumerate([(OLD, NEW), (NEW, OLD), (NEW,)]):
            write(daemons if step % 2 else ranks_own, *keys)
            for half in range(2):
                planned = target(10 * step + half, 40)
                migration = hosted.coordinator.migrate("p", lambda p, planned=planned: p.delta_to(planned).chunks(10))
                assert migration.wait(15) is MigrationState.COMMITTED, migration.progress
                assert ranks.all_at(planned)
                write(ranks_own if step % 2 else daemons, *keys)
        status = hosted.coordinator.status()
        assert (status.epoch, status.refused_messages["forged"]) == (epoch, 0)
        # The old key opens nothing any more.
        with pytest.raises(AuthenticationError):
            RawRank(hosted.port, OLD)
        until(lambda: hosted.coordinator.channel_counters().refused.get("wrong_secret") == 1)
