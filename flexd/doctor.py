"""Checks of a daemon and its surroundings: the machine, the stream, and the daemon itself. A check that fails does not
hide the next one."""

import contextlib
import ctypes
import dataclasses
import errno
import math
import os
import platform
import shutil
import socket
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from importlib.metadata import distributions
from pathlib import Path
from typing import Annotated

from pydantic import Field

import flexd
from flexd.api.status import DaemonStatus
from flexd.config.model import Config
from flexd.config.sections import FileLogSourceConfig, FileSourceConfig, KafkaSourceConfig
from flexd.control.protocol.handshake import TlsContext, TlsFiles
from flexd.core import units
from flexd.core.errors import CodecError, FlexdError
from flexd.core.model import DETAIL, Model, Show
from flexd.core.secrets import read_keys
from flexd.stream.types import TOMBSTONE, RefusedMessages, StreamMessage


class Level(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    SKIPPED = "skipped"
    """The check could not run, or does not apply here."""
    WARNING = "warning"
    """It works, but not well or not for long."""
    FAULT = "fault"
    """The daemon cannot work with this."""


class Finding(Model):
    """One line of the report.

    Attributes:
        check: name of the check: ``disk``, ``broker``, ...
        text: the finding.
        remedy: the action to take; empty if there is none.
    """

    level: Level
    check: str
    text: str
    remedy: Annotated[str, DETAIL] = ""


class DoctorReport(Model):
    """The findings, in the order in which faults should be repaired, and their number by level."""

    findings: tuple[Finding, ...]
    counts: dict[Level, int]
    messages: Annotated[tuple[str, ...], Show("remedies"), Field(exclude=True)]


def ok(check: str, text: str) -> Finding:
    return Finding(level=Level.OK, check=check, text=text)


def skipped(check: str, text: str) -> Finding:
    return Finding(level=Level.SKIPPED, check=check, text=text)


def warning(check: str, text: str, remedy: str) -> Finding:
    return Finding(level=Level.WARNING, check=check, text=text, remedy=remedy)


def fault(check: str, text: str, remedy: str) -> Finding:
    return Finding(level=Level.FAULT, check=check, text=text, remedy=remedy)


def run(check: str, look: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """Return the findings of one check; an error ends the check with a fault and the error's own remedy."""
    findings: list[Finding] = []
    try:
        findings.extend(look())
    except FlexdError as error:
        findings.append(fault(check, error.message, error.remedy or "resolve the error above"))
    except OSError as error:
        findings.append(fault(check, f"{type(error).__name__}: {error}", "resolve the error above"))
    return findings


NEEDED = ("numpy", "pydantic", "pyyaml", "numba", "pyarrow", "fastapi", "uvicorn", "scipy")
FORMATS = ("orjson", "protobuf", "xxhash")
_CONNECT_SECONDS = 2.0
# Larger than ``struct timex`` on any Linux; with modes = 0 the kernel only fills it in.
_TIMEX_BYTES = 512
_CLOCK_UNSYNCHRONISED = 5


def versions(config: Config) -> Iterator[Finding]:
    """Check that the libraries that this configuration needs are installed."""
    needed = [*NEEDED]
    source = config.stream.source
    if isinstance(source, KafkaSourceConfig):
        needed.append("kafka-python")
    extras = "daemon"
    if config.stream.mapping is not None:
        needed += FORMATS
        extras = "daemon,stream-formats"
    found = [f"{name} {each.version}" for name in needed for each in distributions(name=name)]
    if missing := [name for name in needed if not any(distributions(name=name))]:
        yield fault("versions", f"not installed: {', '.join(missing)}", f"pip install 'flexd[{extras}]'")
    yield ok("versions", f"flexd {flexd.__version__}, Python {platform.python_version()}, {', '.join(found)}")


def disk(config: Config) -> Iterator[Finding]:
    """Check that the state directory is writable, private, and has room for the snapshots."""
    directory = config.state.dir.absolute()
    # Itself, or its nearest parent that exists.
    there = next((path for path in (directory, *directory.parents) if path.exists()), Path("/"))
    if there == directory and there.stat().st_mode & stat.S_IRWXO:
        yield warning("disk", f"state.dir: {there} is open to others on this machine", f"chmod 0700 {there}")
    if not os.access(there, os.W_OK | os.X_OK):
        yield fault("disk", f"state.dir: {there} cannot be written by this user", "give a writable directory")
        return
    # One more than is kept: the new one is written before the oldest is deleted.
    wanted = (config.state.keep_snapshots + 1) * config.sketch.memory_bytes
    kept = sum(file.stat().st_size for file in directory.glob("snapshots/*") if file.is_file())
    free = shutil.disk_usage(there).free
    text = (
        f"state.dir {config.state.dir}: {units.size(free)} free, snapshots take {units.size(kept)} of at most "
        f"{units.size(wanted)}"
    )
    if free + kept < wanted:
        yield warning("disk", text, "make room, lower state.keep_snapshots or sketch.memory_bytes")
    else:
        yield ok("disk", text)


def clock(_: Config) -> Iterator[Finding]:
    """Check that the kernel's clock is synchronised, with which event times of other machines are compared."""
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except (AttributeError, OSError):
        state = -1
    if state < 0:
        yield skipped("clock", "the kernel does not report the state of the clock")
    elif state == _CLOCK_UNSYNCHRONISED:
        yield warning("clock", "the clock is not synchronised", "run chrony or another NTP client on this machine")
    else:
        yield ok("clock", "synchronised")


def secrets(config: Config) -> Iterator[Finding]:
    """Check that the secret file is readable, and private."""
    path, key = config.control.secret_file, "control.secret_file"
    if path is None:
        yield ok("secrets", "none configured: only ranks on this machine, or with certificates, can connect")
        return
    keys = read_keys(path, key)
    if path.stat().st_mode & (stat.S_IRWXO | stat.S_IWGRP):
        yield warning("secrets", f"{key}: {path} can be read or changed by others", f"chmod 0640 {path}")
    else:
        yield ok("secrets", f"{key}: {units.plural(len(keys), 'key')}")


def certificates(config: Config) -> Iterator[Finding]:
    """Check that the files of ``control.tls`` can be used, and that its key is private."""
    tls = config.control.tls
    if tls.cert_file is None or tls.key_file is None or tls.ca_file is None:
        return
    TlsContext(TlsFiles(tls.cert_file, tls.key_file, tls.ca_file), server_side=True)
    if tls.key_file.stat().st_mode & (stat.S_IRWXO | stat.S_IWGRP):
        yield warning(
            "certificates", f"control.tls.key_file: {tls.key_file} can be read or changed by others",
            f"chmod 0640 {tls.key_file}",
        )  # fmt: skip
    else:
        yield ok("certificates", f"control.tls: {tls.cert_file}")


def ports(config: Config, *, running: bool) -> Iterator[Finding]:
    """Check that the running daemon accepts connections on its ports, or else that the ports are free."""
    control, server = config.control, config.server
    yield from _port("control port", control.listen_host, control.listen_port, "control.listen_port", running)
    if server.unix_socket is None:
        yield from _port("api port", server.host, server.port, "server.port", running)


def _port(check: str, host: str, port: int, key: str, running: bool) -> Iterator[Finding]:
    where = f"{host}:{port}"
    if port == 0:
        yield skipped(check, f"{key} is 0: the daemon listens on any free port")
    elif running:
        try:
            socket.create_connection((reachable(host), port), _CONNECT_SECONDS).close()
        except OSError as error:
            yield fault(
                check, f"the daemon runs, but {where} refuses connections: {error}", f"compare {key} with the daemon's"
            )
        else:
            yield ok(check, f"{where} answers")
    else:
        problem = _unusable(host, port)
        if problem is None:
            yield ok(check, f"{where} is free")
        elif problem == errno.EADDRINUSE:
            yield fault(check, f"{where} is in use by another process", f"stop it, or change {key}")
        else:
            yield fault(check, f"{where} cannot be listened on: {os.strerror(problem)}", f"change {key} or its host")


def _unusable(host: str, port: int) -> int | None:
    """Return the errno of an attempt to listen there; None if it succeeds."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        return error.errno or errno.EADDRNOTAVAIL
    return None


def reachable(host: str) -> str:
    """Return the address at which this machine reaches a listener on ``host``."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


MAX_MESSAGES = 200
MAX_CAUSES = 5
"""Of messages that cannot be read, the commonest are shown."""
SKEW_SECONDS = 60.0
"""An event further ahead of this machine's clock comes from a wrong clock."""


def stream(config: Config, timeout_seconds: float) -> Iterator[Finding]:
    """Check broker, topic and messages, without joining a consumer group or moving a position.

    Raises:
        StreamError: the broker cannot be reached or refuses, or the log cannot be read.
        ConfigError: a client option file cannot be read.
    """
    source = config.stream.source
    if isinstance(source, FileLogSourceConfig):
        name, path = f"file log {source.path}", source.path
        if not path.is_dir():
            yield warning(
                "stream",
                f"{name} does not exist yet",
                "check that stream.source.path is the publishers' directory",
            )
            return
        yield ok("stream", f"{name}: {units.plural(sum(entry.is_dir() for entry in path.iterdir()), 'partition')}")
        from flexd.stream.file_log.log import FileLogSource

        with contextlib.closing(FileLogSource(path)) as log:
            newest: Sequence[StreamMessage | RefusedMessages] = log.poll(0.2)[:MAX_MESSAGES]
            newest = [dataclasses.replace(message, payload=bytes(message.payload)) for message in newest]
    elif isinstance(source, KafkaSourceConfig):
        from flexd.stream.kafka.topic_admin import inspect_topic

        found = inspect_topic(
            source.bootstrap_servers,
            source.topic,
            source.resolved_client_options(),
            messages=MAX_MESSAGES,
            timeout_seconds=timeout_seconds,
        )
        yield ok("broker", f"{source.bootstrap_servers} answers")
        if found.partitions == 0:
            yield fault(
                "topic",
                f"{source.topic!r} does not exist",
                "create it, or correct stream.source.topic (names are exact)",
            )
            return
        kept = units.plural(found.offsets, "offset")
        yield ok("topic", f"{source.topic!r}: {units.plural(found.partitions, 'partition')}, {kept} kept")
        name, newest = f"topic {source.topic!r}", found.newest
    elif isinstance(source, FileSourceConfig):
        from flexd.daemon.config_file import make_source

        with contextlib.closing(make_source(config)) as file:
            name, newest = f"file {source.path}", file.poll(0.0)[:MAX_MESSAGES]
        yield ok("stream", f"{name} can be read")
    else:
        yield skipped("stream", f"a source of kind {source.kind} has no stream to check")
        return
    yield from messages(config, name, newest)


def messages(config: Config, name: str, sample: Sequence[StreamMessage | RefusedMessages]) -> Iterator[Finding]:
    """Check that tables, rows and times of the sampled messages fit the configuration."""
    if not sample:
        yield warning("messages", f"{name} has no messages", "start a publisher")
        return
    from flexd.daemon.config_file import make_decoder
    from flexd.stream.codec import decode

    decoder = make_decoder(config)
    # By reason and remedy: the messages that cannot be read, and the text of the first.
    refused, texts = Counter[tuple[str, str]](), dict[tuple[str, str], str]()
    unknown, outside = Counter[str](), Counter[str]()
    known = {table.name: table.rows for table in config.tables}
    accesses, newest = 0, -math.inf
    tombstones = [each for each in sample if isinstance(each, RefusedMessages) and each.reason == TOMBSTONE]
    sample = [each for each in sample if each not in tombstones]
    if tombstones:
        yield ok("messages", f"{units.plural(len(tombstones), 'tombstone')} passed over")
    for message in sample:
        try:
            if isinstance(message, RefusedMessages):
                raise CodecError(message.detail, reason=message.reason)
            if decoder is None:
                batches = decode(message.payload, config.stream.max_message_bytes)
            else:
                decoder.add(message, time.time())
                batches = decoder.drain()
        except CodecError as error:
            cause = error.reason, error.remedy or "docs/stream.md has the schema"
            refused[cause] += 1
            texts.setdefault(cause, f"the first at offset {message.offset} of {message.partition}: {error.message}")
            continue
        for batch in batches:
            accesses += len(batch.rows)
            newest = max(newest, batch.event_time_seconds)
            if batch.table not in known:
                unknown[batch.table] += len(batch.rows)
            elif len(batch.rows):
                outside[batch.table] += int(((batch.rows < 0) | (batch.rows >= known[batch.table])).sum())
    looked = f"of {len(sample)} messages"
    for cause, count in refused.most_common(MAX_CAUSES):
        yield fault("messages", f"{count} {looked} cannot be read, {texts[cause]}", cause[1])
    if decoder is not None and decoder.unread:
        paths = Counter({f"{path} ({reason})": count for (reason, path), count in decoder.unread.items()})
        yield warning(
            "messages", f"{looked}: values that are not read: {_listed(paths)}",
            "correct the paths of stream.mapping, or leave such events out with stream.mapping.where",
        )  # fmt: skip
    if not known:
        yield warning(
            "messages", "no tables are known yet: tables and rows of messages are not checked",
            "start the training once, or list its tables in the configuration",
        )  # fmt: skip
        return
    if unknown:
        yield fault("messages", f"{looked}: tables that are not configured: {_listed(unknown)}", "list them in tables")
    outside = +outside
    if outside:
        yield fault("messages", f"{looked}: rows beyond tables[].rows: {_listed(outside)}", "raise the tables' rows")
    if not (refused or unknown or outside):
        yield ok("messages", f"{accesses} accesses {looked} fit the configuration")
    ahead = newest - time.time()
    if ahead > SKEW_SECONDS:
        yield warning(
            "event time",
            f"the newest event is dated {units.age(ahead)} in the future",
            "synchronise the clocks, or send event_time in seconds (not milliseconds)",
        )
    elif math.isfinite(ahead):
        yield ok("event time", f"the newest event is {units.age(max(0.0, -ahead))} old")


def _listed(counts: Counter[str]) -> str:
    text = ", ".join(f"{name[:80]!r} {count}" for name, count in counts.most_common(5))
    return f"{text} and {len(counts) - 5} more" if len(counts) > 5 else text


def daemon(status: DaemonStatus, differing_keys: Sequence[str]) -> Iterator[Finding]:
    """Yield findings about a daemon that runs.

    Args:
        differing_keys: configuration keys whose value differs from the file.
    """
    if status.version != flexd.__version__:
        yield warning(
            "daemon",
            f"the daemon is flexd {status.version}, this command is {flexd.__version__}",
            "use the same version for both",
        )
    if not status.healthy:
        yield fault("daemon", "not healthy: " + "; ".join(status.reasons), "see its log; restart it")
    elif status.paused:
        yield warning("daemon", f"paused: {status.pause_reason or 'no reason given'}", "flexd resume")
    elif not status.ready:
        yield warning("daemon", "not ready: " + "; ".join(status.reasons), "the reasons above name what is missing")
    else:
        yield ok("daemon", f"flexd {status.version} is ready, job {status.job}")
    for what, problem in (
        ("stream", status.stream.problem),
        ("ranks", status.topology.problem),
        ("snapshot", status.snapshot.problem),
    ):
        if problem and problem not in "; ".join(status.reasons):
            yield fault(what, problem, "see the daemon's log")
    channel = status.topology.channel
    if channel.refused_connections.get("version"):
        yield fault(
            "control port",
            f"{channel.refused_connections['version']} connections of trainers of another version were refused",
            "docs/upgrading.md says which versions work together",
        )
    elif (refusals := channel.refusals()) and not channel.connections:
        yield fault(
            "control port",
            f"connections arrive and none proves itself: {refusals}",
            "docs/runbook.md, FlexdNoneProvesItself: the secret or the certificates differ",
        )
    if lost := status.stream.losses():
        yield warning(
            "stream",
            f"lost before they were counted: {lost}",
            "raise the retention of the topic; docs/runbook.md, FlexdMessagesLost",
        )
    if missing := status.stream.missing_partitions:
        since = units.age(time.time() - (status.stream.missing_since_unix_seconds or time.time()))
        yield warning(
            "stream",
            f"{units.plural(len(missing), 'partition')} not assigned to the daemon for {since}, and not counted: "
            f"{', '.join(missing[:8])}",
            "give every job a stream.source.group_id of its own; docs/runbook.md, FlexdPartitionsMissing",
        )
    if status.threads.ending:
        yield fault("threads", f"the daemon is ending: {status.threads.ending}", "start it again; see its log")
    if differing_keys:
        yield warning(
            "running configuration",
            f"{units.plural(len(differing_keys), 'key')} not as in the file: {', '.join(differing_keys[:8])}",
            "flexd reload, or restart the daemon",
        )
    else:
        yield ok("running configuration", "equals the file")
