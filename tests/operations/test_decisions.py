"""Decisions of operators: kept over restarts and kills, quarantined when unusable, recorded with user and reason."""

import hashlib
import re
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from flexd.api.handlers import OperatorCommands
from flexd.api.status import ReloadReport
from flexd.config.sections import ControlConfig, ThrottleConfig
from flexd.control.daemon.migration import ActionRecord, MigrationRecord, Transition, VerificationReport
from flexd.control.daemon.pusher import Throttle, ThrottleLimits
from flexd.core.errors import ConfigError, SnapshotError
from flexd.operations import decisions
from flexd.operations.decisions import NAME, DecisionFile, Decisions, HeldPlan, Pause, StateDatabase, ThrottleOverride

CONFIGURED = ThrottleConfig(bytes_per_second=9_000)


class Start:
    """The commands of one start of a daemon, over the state directory of earlier starts."""

    def __init__(self, directory: Path, throttle: ThrottleConfig = CONFIGURED) -> None:
        control = ControlConfig(throttle=throttle)
        self.throttle = Throttle(ThrottleLimits(throttle.bytes_per_step, throttle.bytes_per_second))
        self.held = False
        self.now = 100.0
        self.actions: list[tuple[str, ...]] = []
        self.channel: Any = SimpleNamespace(
            pause=lambda: self._hold(True), resume=lambda: self._hold(False), divergence=""
        )
        history: Any = SimpleNamespace(record_action=lambda *action: self.actions.append(action))
        self.state = StateDatabase(directory / NAME)
        self.file = DecisionFile(self.state)
        self.commands = OperatorCommands(control, self.file, history, self.channel, self.throttle, lambda: self.now)

    def _hold(self, held: bool) -> None:
        self.held = held
        if not held:
            self.channel.divergence = ""


def test_every_action_is_recorded_with_user_and_reason(tmp_path: Path) -> None:
    it = Start(tmp_path)
    it.commands.pause("night", "ann")
    it.now = 130.0
    it.commands.resume("morning", "bob")
    it.commands.resume("again", "bob")
    it.commands.set_throttle(None, None, "only looking", "bob")
    it.commands.set_throttle(None, 0, "quiet now", "")
    it.commands.record_reload("SIGHUP", "", ReloadReport(file="f", applied=("log.level",), pending=("job",)))
    it.commands.record_reload("ann", "try", ConfigError("log.level: 'loud'" + "x" * 5_000))
    it.commands.record("override", "ann", "campaign", "plan p1 in spite of samples, lag")
    assert [each[:3] for each in it.actions] == [
        ("pause", "ann", "night"), ("resume", "bob", "morning"), ("throttle", "anonymous", "quiet now"),
        ("reload", "SIGHUP", ""), ("reload", "ann", "try"), ("override", "ann", "campaign"),
    ]  # fmt: skip
    details = [each[3] for each in it.actions]
    assert details[1] == "after 30 s of: night"
    assert details[2] == "bytes per step no limit, bytes per second no limit"
    assert details[3] == "applied log.level; needs a restart: job"
    assert details[4].startswith("rejected: log.level: 'loud'")
    assert details[5] == "plan p1 in spite of samples, lag"


def test_a_later_change_of_the_configured_throttle_replaces_the_override(tmp_path: Path) -> None:
    Start(tmp_path).commands.set_throttle(4_096, None)
    other = Start(tmp_path, ThrottleConfig(bytes_per_second=500))
    assert other.throttle.limits == ThrottleLimits(None, 500)
    assert other.file.current.throttle is None
    assert Start(tmp_path).throttle.limits == ThrottleLimits(None, 9_000), "the override is removed for good"


def test_a_reload_keeps_the_chosen_throttle_unless_it_changes_the_configured_one(tmp_path: Path) -> None:
    it = Start(tmp_path)
    it.commands.set_throttle(4_096, None)
    it.commands.apply_config(ControlConfig(throttle=CONFIGURED, chunk_bytes=2**18))
    assert it.throttle.limits == ThrottleLimits(4_096, 9_000)
    assert it.file.current.throttle is not None
    it.commands.apply_config(ControlConfig(throttle=ThrottleConfig(bytes_per_step=77)))
    assert it.throttle.limits == ThrottleLimits(77, None)
    assert it.file.current.throttle is None


@pytest.mark.parametrize(
    "document",
    [
        "", "{", "[]", '{"format": 0}', '{"pause": {"reason": 5}}', '{"throttle": {"bytes_per_step": 0}}',
        '{"throttle": {"bytes_per_step": 1125899906842625}}', '{"throttle": {"bytes_per_step": "7"}}',
        '{"pause": {"reason": "x", "by": "me"}}', '{"pause": {"reason": "x", "unix_seconds": NaN}}',
    ],
)  # fmt: skip
def test_decisions_that_cannot_be_used_are_not_in_force(tmp_path: Path, document: str) -> None:
    file = StateDatabase(tmp_path / NAME)
    DecisionFile(file).update(pause=Pause(reason="night", requested_by="ann", unix_seconds=5.0))
    file.write([("UPDATE documents SET document = ?", (document,))])
    file.close()
    it = Start(tmp_path)
    assert (it.held, it.throttle.limits) == (False, ThrottleLimits(None, 9_000))
    it.commands.pause("night")
    assert Start(tmp_path).held is True


def test_a_full_disk_delays_no_command_and_the_write_is_repeated(tmp_path: Path) -> None:
    it = Start(tmp_path)
    it.commands.set_throttle(4_096, None)
    with patch.object(it.state, "write", side_effect=SnapshotError("No space left on device")):
        paused = it.commands.pause("night")
        assert (paused.changed, paused.saved) == (True, False)
        it.commands.tick()
    assert (it.held, it.commands.decisions_status().failures) == (True, 2)
    assert "No space left" in it.file.problem
    before = DecisionFile(it.state)
    assert before.current.pause is None
    assert before.current.throttle is not None, "the file is unchanged"
    it.commands._retry_at = 0.0
    it.commands.tick()
    assert it.commands.pause("night").saved is True
    assert Start(tmp_path).held is True


ADD = "INSERT INTO actions (document) VALUES (?)"


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[], StateDatabase]]:
    made: list[StateDatabase] = []

    def one() -> StateDatabase:
        made.append(StateDatabase(tmp_path / NAME))
        return made[-1]

    yield one
    for file in made:
        file.close()


def documents(file: StateDatabase) -> list[str]:
    return [document for (document,) in file.read("SELECT document FROM actions ORDER BY serial")]


def test_a_write_is_whole_and_kept(make: Callable[[], StateDatabase], tmp_path: Path) -> None:
    file = make()
    assert documents(file) == []
    assert not (tmp_path / NAME).exists(), "a reader makes no file"
    with pytest.raises(SnapshotError, match="cannot be written"):
        file.write([(ADD, ("a",)), ("INSERT INTO actions (document) VALUES (NULL)", ())])
    assert documents(file) == []
    file.write([(ADD, ("b",)), (ADD, ("c",))])
    file.close()
    assert documents(make()) == ["b", "c"]
    assert stat.S_IMODE((tmp_path / NAME).stat().st_mode) == 0o600


def _other_program(path: Path) -> bytes:
    path.unlink()
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("CREATE TABLE migrations (id); PRAGMA user_version = 1")
    return path.read_bytes()


HARMS: dict[str, Callable[[Path], bytes]] = {
    "random bytes": lambda path: np.random.default_rng(1).bytes(8_192),
    "truncated": lambda path: path.read_bytes()[:5_000],
    "of another program": _other_program,
}


@pytest.mark.parametrize("harm", HARMS)
def test_an_unusable_file_is_quarantined(make: Callable[[], StateDatabase], tmp_path: Path, harm: str) -> None:
    for text in ("old", "newer"):
        file = make()
        file.write([(ADD, (text * 5_000,))])
        file.close()
        harmed = HARMS[harm](tmp_path / NAME)
        (tmp_path / NAME).write_bytes(harmed)
        again = make()
        assert documents(again) == []
        again.close()
        assert (tmp_path / f"{NAME}.unusable").read_bytes() == harmed
    assert len(list(tmp_path.glob("*.unusable*"))) == 1, "one is kept, not one a fault"


def test_a_file_of_format_1_keeps_its_decisions(make: Callable[[], StateDatabase], tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / NAME)) as connection:
        tables = "".join(
            f"CREATE TABLE {'decisions' if name == 'documents' else name} ({columns.removesuffix(', digest')});"
            for name, columns in decisions._TABLES.items()
        )
        connection.executescript(f"{tables} INSERT INTO decisions VALUES ('in force', 'x'); PRAGMA user_version = 1")
    before = (tmp_path / NAME).read_bytes()
    reader = StateDatabase(tmp_path / NAME, read_only=True)
    with pytest.raises(SnapshotError, match="of format 1, not 3 - start the daemon once"):
        reader.document("in force")
    assert (tmp_path / NAME).read_bytes() == before
    assert make().document("in force") == "x"
    assert reader.document("in force") == "x"
    reader.close()


STORED = (MigrationRecord, Transition, VerificationReport, ActionRecord, Decisions, Pause, ThrottleOverride, HeldPlan)


def test_what_is_stored_does_not_change_without_a_new_format() -> None:
    """After a changed field: raise ``FORMAT``, and change older documents in ``_UPGRADES`` where defaults do not."""
    fields = sorted(
        f"{model.__name__}.{name}: {field.annotation}" for model in STORED for name, field in model.model_fields.items()
    )
    # A class that moves to another module stores the same.
    text = re.sub(r"flexd(\.\w+)*\.", "", "\n".join(fields))
    assert {3: "1da92f74a65d"}[decisions.FORMAT] == hashlib.sha256(text.encode()).hexdigest()[:12]


def test_a_bit_that_changes_on_disk_is_noticed(make: Callable[[], StateDatabase], tmp_path: Path) -> None:
    document = '{"throttle": {"bytes_per_step": 1048576}}'
    file = make()
    file.put("in force", document)
    file.write([(ADD, ("an action",))])
    file.close()
    whole = (tmp_path / NAME).read_bytes()
    first = whole.index(document.encode())
    for bit in range(8 * len(document)):
        harmed = bytearray(whole)
        harmed[first + bit // 8] ^= 1 << bit % 8
        (tmp_path / NAME).write_bytes(harmed)
        with pytest.raises(SnapshotError, match="a record of its table documents was damaged"):
            StateDatabase(tmp_path / NAME, read_only=True).document("in force")
    assert make().document("in force") is None
    assert documents(make()) == ["an action"]


def test_a_locked_file_is_an_error_and_not_quarantined(
    make: Callable[[], StateDatabase], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "BUSY_SECONDS", 0.01)
    file = make()
    file.write([(ADD, ("a",))])
    with closing(sqlite3.connect(tmp_path / NAME, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(SnapshotError, match="locked"):
            file.write([(ADD, ("b",))])
        assert documents(file) == ["a"]
    file.write([(ADD, ("c",))])
    assert (documents(file), list(tmp_path.glob("*.unusable"))) == (["a", "c"], [])


def test_a_path_that_is_no_file_is_an_error(make: Callable[[], StateDatabase], tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    file = make()
    with pytest.raises(SnapshotError, match=f"{NAME} cannot be read"):
        documents(file)
    (tmp_path / NAME).rmdir()
    file.write([(ADD, ("a",))])
    assert documents(file) == ["a"]
