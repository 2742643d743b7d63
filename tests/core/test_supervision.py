"""The rule of threads: faults are counted, logged at powers of two, backed off from, shown, and survived."""

import json
import logging
import os
import re
import signal
import threading

import pytest

from flexd.core import supervision as faults
from flexd.core.errors import ConfigError
from flexd.core.supervision import (
    FIRST_BACKOFF_SECONDS,
    MAX_BACKOFF_SECONDS,
    Backoff,
    Supervisor,
    UnsafeStateError,
    format_fields,
    log_event,
    set_up_logging,
)
from tests.support.repository import ROOT
from tests.support.until import Clock, until

SECONDS = 20.0


def fail(text: str = "made up") -> None:
    raise ValueError(text)


def test_the_back_off_doubles_is_bounded_and_starts_over_after_progress() -> None:
    clock = Clock()
    supervisor = Supervisor(clock)
    watch, _ = supervisor.watch("loop", "planning"), supervisor.watch("flexd-ingest")
    waits = []
    for _ in range(12):
        assert not watch.attempt(fail)
        waits.append(watch.seconds_to_retry)
        assert not watch.attempt(lambda: pytest.fail("attempted before its time"))
        clock.now += watch.seconds_to_retry
    assert waits[:3] == [FIRST_BACKOFF_SECONDS, 2 * FIRST_BACKOFF_SECONDS, 4 * FIRST_BACKOFF_SECONDS]
    assert max(waits) == waits[-1] == MAX_BACKOFF_SECONDS
    assert supervisor.reasons() == ("thread loop (planning): ValueError: made up, 12 times in a row",)
    assert watch.attempt(lambda: None)
    assert (supervisor.problems(), supervisor.reasons()) == ((), ())
    assert not watch.attempt(fail)
    assert watch.seconds_to_retry == FIRST_BACKOFF_SECONDS
    assert supervisor.faults() == {"loop": 13, "flexd-ingest": 0}


def test_a_fault_is_logged_with_its_stack_at_powers_of_two_for_each_kind(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    watch = Supervisor(clock).watch("t")
    for number in range(9):
        watch.attempt(lambda number=number: fail(f"row {number}"))
        clock.now += MAX_BACKOFF_SECONDS
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.getMessage().split("(")[-1] for record in errors] == [
        f"{times} times so far)" for times in (1, 2, 4, 8)
    ]
    assert all(record.exc_info for record in errors)
    watch.attempt(lambda: {}["another kind"])
    assert "KeyError" in caplog.records[-1].getMessage()


def test_a_thread_whose_body_raises_or_returns_early_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexd.core.supervision.FIRST_BACKOFF_SECONDS", 0.001)
    supervisor, stopping, finished = Supervisor(), threading.Event(), threading.Event()
    rounds: list[int] = []

    def body() -> None:
        rounds.append(1)
        if len(rounds) == 1:
            fail()
        if len(rounds) == 2:
            return
        supervisor.watch("t").progress()
        stopping.wait(SECONDS)

    thread = supervisor.thread("t", body, stopping, finished.set)
    assert not thread.started
    assert thread.join(0.0), "a thread that was not started has ended"
    thread.start()
    until(lambda: len(rounds) == 3, SECONDS)
    until(lambda: not supervisor.problems(), SECONDS)
    assert supervisor.faults() == {"t": 2}
    assert thread.running
    assert not supervisor.fatal
    stopping.set()
    assert thread.join(SECONDS)
    assert finished.is_set()


def test_a_stop_ends_a_back_off_at_once_and_a_fault_of_the_clean_up_is_counted() -> None:
    supervisor, stopping = Supervisor(), threading.Event()
    supervisor.watch("t")._backoff = Backoff(MAX_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS)
    thread = supervisor.thread("t", fail, stopping, fail)
    thread.start()
    until(supervisor.problems, SECONDS)
    stopping.set()
    assert thread.join(SECONDS)
    assert supervisor.faults() == {"t": 2}
    assert supervisor.problems() == (), "a stopped thread has no problem"


@pytest.mark.parametrize("error", [UnsafeStateError("half changed"), SystemExit(3)])
def test_what_cannot_go_on_ends_the_daemon(error: BaseException) -> None:
    supervisor, stopping, finished = Supervisor(), threading.Event(), threading.Event()

    def body() -> None:
        raise error

    thread = supervisor.thread("t", body, stopping, finished.set)
    thread.start()
    assert thread.join(SECONDS)
    assert finished.is_set()
    assert supervisor.fatal.startswith(f"thread t: {type(error).__name__}")
    assert supervisor.reasons() == (f"ending: {supervisor.fatal}",)
    supervisor.end_daemon("other", ValueError("later"))
    assert supervisor.fatal.startswith("thread t"), "the first reason stays"


def test_a_job_and_a_foreign_thread_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = Supervisor()
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    supervisor.watch_uncaught()
    supervisor.job("one", fail).join(SECONDS)
    foreign = threading.Thread(target=fail)
    foreign.start()
    foreign.join(SECONDS)
    assert (supervisor.faults(), supervisor.problems()) == ({"one": 1, "other": 1}, ())


@pytest.mark.parametrize(
    "armed",
    [
        "nowhere:1:kill",
        "chunk.sent:0:kill",
        "chunk.sent:1:jump",
        "chunk.sent",
        ":::",
        "chunk.sent:3-2:kill",
        "chunk.sent:-:raise",
    ],
)
def test_invalid_entries_are_refused(armed: str) -> None:
    with pytest.raises(ConfigError, match="unset it"):
        faults.arm({faults.VARIABLE: armed})
    faults.fault_point("chunk.sent")


def test_an_armed_passage_raises_or_sends_its_signal_and_others_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: list[object] = []
    monkeypatch.setattr(faults, "_armed", {})
    monkeypatch.setattr(faults, "_passed", {})
    monkeypatch.setattr(os, "kill", lambda process, sent: outcomes.append(sent if process == os.getpid() else process))
    faults.arm({faults.VARIABLE: "thread.drift:2-3:raise,chunk.sent:1:kill,chunk.agreed:2:stop,epoch.live:1:kill"})
    for _ in range(4):
        for point in ("thread.drift", "chunk.sent", "chunk.agreed"):
            try:
                faults.fault_point(point)
            except faults.InjectedFaultError:
                outcomes.append("raised")
        outcomes.append("passed")
    assert outcomes == [
        signal.SIGKILL, "passed", "raised", signal.SIGSTOP, "passed", "raised", "passed", "passed"
    ]  # fmt: skip


def test_every_point_is_passed_at_exactly_one_place() -> None:
    sources = [path.read_text() for path in (ROOT / "flexd").rglob("*.py")]
    names = [name for source in sources for name in re.findall(r"fault_point\(\"([^\"]+)\"\)", source)]
    # ``replace_file`` passes two points of the file's name.
    for file in (name for source in sources for name in re.findall(r"replace_file\(.*, \"(\w+)\"\)", source)):
        names += [f"{file}.written", f"{file}.renamed"]
    assert sorted(names) == sorted((*faults.POINTS, *faults.THREAD_POINTS))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5, "5"),
        (0.25, "0.25"),
        (True, "true"),
        (None, "null"),
        ("plan-1", "plan-1"),
        ("", '""'),
        ("two words", '"two words"'),
        ('a="b"', '"a=\\"b\\""'),
        ("two\nlines", '"two\\nlines"'),
        ((1, 2), "[1,2]"),
        ({3, 1}, "[1,3]"),
        (ValueError("no disk"), '"no disk"'),
    ],
)
def test_a_value_is_one_word_that_reads_back(value: object, text: str) -> None:
    assert list(format_fields({"key": value})) == [f"key={text}"]


@pytest.fixture(autouse=True)
def _restore_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", logging.getLogger().handlers[:])
    for logger in map(logging.getLogger, (None, "kafka", "uvicorn")):
        monkeypatch.setattr(logger, "level", logger.level)


@pytest.mark.parametrize("line_format", ["text", "json"])
def test_what_a_user_has_written_forges_no_line(capsys: pytest.CaptureFixture[str], line_format: str) -> None:
    set_up_logging("ads", "info", line_format)
    logging.getLogger("flexd").warning("paused: %s", "busy\n2026-01-01 ERROR [ads] x: \x1b[31mforged\u2028\r")
    (line,) = capsys.readouterr().err.splitlines()
    assert "forged" in line
    assert "\x1b" not in line


@pytest.mark.parametrize("line_format", ["text", "json"])
def test_a_line_of_an_event_has_its_fields_as_words_or_as_data(
    capsys: pytest.CaptureFixture[str], line_format: str
) -> None:
    set_up_logging("ads", "info", line_format)
    fields = {"epoch": 3, "layout": {"nodes": 2, "local": 2}, "reason": "a rank joined", "error": ValueError("x")}
    log_event(logging.getLogger("flexd"), logging.INFO, "control channel: epoch_live", fields)
    line = capsys.readouterr().err
    text = 'control channel: epoch_live epoch=3 layout.nodes=2 layout.local=2 reason="a rank joined" error=x'
    if line_format == "text":
        assert line.endswith(f" INFO [ads] flexd: {text}\n")
        return
    entry = json.loads(line)
    assert (entry["message"], entry["job"], entry["level"]) == (text, "ads", "info")
    assert entry["fields"] == {**fields, "error": "x"}
