"""Avro schemas: of a file, or by the number in a schema registry's header; and the import of the formats' packages."""

from __future__ import annotations

import base64
import importlib
import json
import netrc
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from flexd.core.errors import ConfigError, MissingExtraError
from flexd.stream import codec
from flexd.stream.avro.schema import Type, parse

# A zero byte and four of the schema's number.
HEADER_BYTES = 5
MAX_DEFINITION_BYTES = 2**20
MAX_SCHEMAS = 256
MAX_REFERENCES = 64
REGISTRY_SECONDS = 3.0
"""Deadline of a registry's answers for one schema: the stream waits for them."""
RETRY_SECONDS = 30.0
"""Time before an unknown or unreadable schema, or a registry that does not answer, is tried again."""
_EXTRA = {"google.protobuf": "protobuf"}
_REMEDY = "compare it with the producer's, or name another in stream.mapping.definition"


def import_extra(name: str) -> Any:
    """Import a package of the extra ``stream-formats``. Raises MissingExtraError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(
            f"stream.mapping needs {_EXTRA.get(name, name)} ({error})", remedy="pip install 'flexd[stream-formats]'"
        ) from error


class AvroSchemas:
    """Parsed schemas by number, at most ``MAX_SCHEMAS``; or one, for messages without a header.

    Args:
        definition: a schema file, a directory of ``ID.avsc``, or the URL of a registry.
        clock: monotonic seconds.

    Attributes:
        by_id: fetches a schema, the last one, and before it those whose names it uses; None with one schema for all.

    Raises:
        ConfigError: the schema file, or the directory, cannot be used.
    """

    def __init__(self, definition: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[int, Type] = {}
        # By number: why it cannot be had, and when that was found.
        self._refused: dict[int, tuple[str, float]] = {}
        self._silent: tuple[str, float] = ("", -RETRY_SECONDS)
        self.by_id: Callable[[int], list[Any]] | None = None
        self._only: Type | None = None
        if definition.startswith(("http://", "https://")):
            self.by_id = lambda number: _of_registry(definition.rstrip("/"), number)
        elif (path := Path(definition)).is_dir():
            self.by_id = lambda number: [_read(path / f"{number}.avsc")]
        else:
            try:
                self._only = _parsed([_read(path)])
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"stream.mapping.definition: {definition}: {error}",
                    remedy="give a readable Avro schema, a directory of ID.avsc, or a registry's URL",
                ) from error

    def of(self, payload: bytes) -> Type:
        """Return the schema of a message. Raises CodecError: there is none."""
        if self._only is not None:
            if not payload:
                codec.fail("empty", "no bytes")
            return self._only
        if payload[:1] != b"\0" or len(payload) < HEADER_BYTES:
            codec.refuse_head(payload)
            codec.fail(
                "corrupt", f"begins with {payload[:4]!r}, not with a schema registry's header",
                "give stream.mapping.definition as the file of the schema",
            )  # fmt: skip
        number = int.from_bytes(payload[1:HEADER_BYTES], "big")
        schema = self._known.get(number)
        return self._fetched(number) if schema is None else schema

    def _fetched(self, number: int) -> Type:
        now = self._clock()
        for problem, since in (self._silent, self._refused.get(number, self._silent)):
            if now - since < RETRY_SECONDS:
                codec.fail("unknown_schema", f"schema {number}: {problem}", _REMEDY)
        assert self.by_id is not None  # noqa: S101 - the caller has checked it
        try:
            schema = _parsed(self.by_id(number))
        except (OSError, ValueError) as error:
            codec.fail("unknown_schema", f"schema {number}: {self._remember(number, error)}", _REMEDY)
        if len(self._known) >= MAX_SCHEMAS:
            del self._known[next(iter(self._known))]
        self._known[number] = schema
        return schema

    def _remember(self, number: int, error: Exception) -> str:
        """Return why a schema cannot be had, which later messages are refused for at once."""
        problem = str(getattr(error, "reason", error))[:200]
        if isinstance(error, urllib.error.HTTPError):
            problem = f"the registry answers {error.code}"
            error.close()
        elif isinstance(error, FileNotFoundError):
            problem = f"there is no {error.filename}"
        elif isinstance(error, OSError):
            # Another number would wait as long.
            self._silent = problem, self._clock()
        if len(self._refused) >= MAX_SCHEMAS:
            self._refused.clear()
        self._refused[number] = problem, self._clock()
        return problem


def _parsed(schemas: list[Any]) -> Type:
    """Parse the last one. Raises ValueError if it is none, or one whose values could exceed every bound."""
    try:
        return parse(schemas[-1], schemas[:-1])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no schema that can be read: {str(error)[:200]}") from error


def _read(path: Path) -> Any:
    with path.open("rb") as file:
        raw = _bounded(file.read(MAX_DEFINITION_BYTES + 1))
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no schema that can be read: {str(error)[:200]}") from error


def _bounded(raw: bytearray | bytes) -> bytearray | bytes:
    if len(raw) > MAX_DEFINITION_BYTES:
        raise ValueError(f"more than {MAX_DEFINITION_BYTES} bytes")
    return raw


def _login(url: str) -> str | None:
    """Return the name and password that ``NETRC``, or else ``~/.netrc``, has for the host, as a header's value."""
    path = os.environ.get("NETRC")
    try:
        # Read again each time: secrets are rotated.
        known = netrc.netrc(path).authenticators(urllib.parse.urlsplit(url).hostname or "")
    except FileNotFoundError:
        if path is not None:
            raise
        return None
    except netrc.NetrcParseError as error:
        raise ValueError(f"{error.filename} line {error.lineno}: {error.msg}") from error
    return known and "Basic " + base64.b64encode(f"{known[0]}:{known[2]}".encode()).decode()


def _of_registry(url: str, number: int) -> list[Any]:
    """Return a schema behind those that it refers to, directly or by way of others."""
    deadline = time.monotonic() + REGISTRY_SECONDS
    answers: dict[str, Any] = {}
    references: dict[str, list[str]] = {}
    paths = [f"/schemas/ids/{number}"]
    while paths:
        path = paths.pop()
        if path in answers:
            continue
        if len(answers) >= MAX_REFERENCES:
            raise ValueError(f"it refers to more than {MAX_REFERENCES} schemas")
        document = _answer(url, path, deadline)
        answers[path] = json.loads(document["schema"])
        try:
            references[path] = [
                f"/subjects/{urllib.parse.quote(each['subject'], safe='')}/versions/{int(each['version'])}"
                for each in document.get("references") or ()
            ]
        except (KeyError, TypeError) as error:
            raise ValueError(f"references that cannot be read: {error}") from error
        paths += references[path]
    return [answers[path] for path in TopologicalSorter(references).static_order()]


def _answer(url: str, path: str, deadline: float) -> Any:
    request = urllib.request.Request(f"{url}{path}", headers={"Accept": "application/json"})
    if login := _login(url):
        # Not for the host that a redirection names.
        request.add_unredirected_header("Authorization", login)
    with urllib.request.urlopen(request, timeout=max(deadline - time.monotonic(), 0.01)) as answer:
        raw = bytearray()
        while part := answer.read1(2**16):
            raw += part
            _bounded(raw)
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing whole within {REGISTRY_SECONDS:g} s")
    document = json.loads(raw)
    if not isinstance(document, dict) or not isinstance(document.get("schema"), str):
        raise ValueError("the registry's answer has no schema")
    if document.get("schemaType", "AVRO") != "AVRO":
        raise ValueError(f"it is of type {str(document['schemaType'])[:40]}, not Avro")
    return document
