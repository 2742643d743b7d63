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
from pathlib import Path
from typing import Any

from flexd.core.errors import ConfigError, MissingExtraError
from flexd.stream import codec

# A zero byte and four of the schema's number.
HEADER_BYTES = 5
MAX_DEFINITION_BYTES = 2**20
MAX_SCHEMAS = 256
REGISTRY_SECONDS = 3.0
"""Deadline of one answer of a registry: the stream waits for it."""
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
        by_id: fetches the text of a schema; None with one schema for all.

    Raises:
        ConfigError: the schema file, or the directory, cannot be used.
        MissingExtraError: fastavro is not installed.
    """

    def __init__(self, definition: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._parse = import_extra("fastavro").parse_schema
        self._clock = clock
        self._known: dict[int, Any] = {}
        # By number: why it cannot be had, and when that was found.
        self._refused: dict[int, tuple[str, float]] = {}
        self._silent: tuple[str, float] = ("", -RETRY_SECONDS)
        self.by_id: Callable[[int], bytes | bytearray] | None = None
        self._only: Any = None
        if definition.startswith(("http://", "https://")):
            self.by_id = lambda number: _of_registry(definition.rstrip("/"), number)
        elif (path := Path(definition)).is_dir():
            self.by_id = lambda number: _read(path / f"{number}.avsc")
        else:
            try:
                self._only = self._checked(_read(path))
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"stream.mapping.definition: {definition}: {error}",
                    remedy="give a readable Avro schema, a directory of ID.avsc, or a registry's URL",
                ) from error

    def of(self, payload: bytes) -> tuple[Any, int]:
        """Return the schema of a message and where its datum begins. Raises CodecError: there is none."""
        if self.by_id is None:
            if not payload:
                codec.fail("empty", "no bytes")
            return self._only, 0
        if payload[:1] != b"\0" or len(payload) < HEADER_BYTES:
            codec.refuse_head(payload)
            codec.fail(
                "corrupt", f"begins with {payload[:4]!r}, not with a schema registry's header",
                "give stream.mapping.definition as the file of the schema",
            )  # fmt: skip
        number = int.from_bytes(payload[1:HEADER_BYTES], "big")
        schema = self._known.get(number)
        return (self._fetched(number) if schema is None else schema), HEADER_BYTES

    def _fetched(self, number: int) -> Any:
        now = self._clock()
        for problem, since in (self._silent, self._refused.get(number, self._silent)):
            if now - since < RETRY_SECONDS:
                codec.fail("unknown_schema", f"schema {number}: {problem}", _REMEDY)
        assert self.by_id is not None  # noqa: S101 - the caller has checked it
        try:
            schema = self._checked(self.by_id(number))
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

    def _checked(self, raw: bytes | bytearray) -> Any:
        """Parse a schema. Raises ValueError if it is none, or one whose values could exceed every bound."""
        try:
            text = json.loads(raw)
            check_bounds(text)
            return self._parse(text)
        # The library has errors of its own beside KeyError, TypeError and others.
        except Exception as error:
            raise ValueError(f"no schema that can be read: {str(error)[:200]}") from error


def check_bounds(schema: Any) -> None:
    """Raise ValueError if a record holds itself, or a list has items that take no bytes: a short message could make the
    reader recurse, or count, without end."""
    named: dict[str, bool] = {}

    def is_empty(node: Any, inside: tuple[str, ...]) -> bool:
        if isinstance(node, list):
            for each in node:
                is_empty(each, inside)
            return False
        if isinstance(node, str):
            # By the last part of the name: namespaces are inherited.
            name = node.rpartition(".")[2]
            if name in inside:
                raise ValueError(f"record {node} holds itself")
            return node == "null" or named.get(name, False)
        if not isinstance(node, dict) or len(inside) > 32:
            raise ValueError("a type that is none, or of more than 32 levels")
        kind = node.get("type")
        if kind in ("record", "error"):
            name = str(node.get("name")).rpartition(".")[2]
            fields = [is_empty(field.get("type"), (*inside, name)) for field in node.get("fields", ())]
            named[name] = all(fields) or named.get(name, False)
            return all(fields)
        if kind in ("array", "map"):
            if is_empty(node.get("items" if kind == "array" else "values"), (*inside, "")) and kind == "array":
                raise ValueError("an array has items without bytes")
            return False
        if kind == "fixed":
            named[str(node.get("name"))] = not node.get("size")
            return not node.get("size")
        if kind == "enum":
            return False
        return is_empty(kind, inside)

    is_empty(schema, ())


def _read(path: Path) -> bytes | bytearray:
    with path.open("rb") as file:
        return _bounded(file.read(MAX_DEFINITION_BYTES + 1))


def _bounded(raw: bytes | bytearray) -> bytes | bytearray:
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


def _of_registry(url: str, number: int) -> bytes:
    deadline = time.monotonic() + REGISTRY_SECONDS
    request = urllib.request.Request(f"{url}/schemas/ids/{number}", headers={"Accept": "application/json"})
    if login := _login(url):
        # Not for the host that a redirection names.
        request.add_unredirected_header("Authorization", login)
    with urllib.request.urlopen(request, timeout=REGISTRY_SECONDS) as answer:
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
    return str(document["schema"]).encode()
