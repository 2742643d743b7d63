"""Schemas of a registry over HTTP: fetched once, and one that fails is neither waited for nor tried again and
again."""

import contextlib
import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from flexd.core.errors import CodecError
from flexd.stream import schemas
from flexd.stream.schemas import RETRY_SECONDS, AvroSchemas
from tests.support.until import Clock

SCHEMA = {"type": "record", "name": "E", "fields": [{"name": "id", "type": "long"}]}
ANSWERS = {
    3: json.dumps({"schema": json.dumps(SCHEMA)}),
    5: "<html>",
    6: json.dumps({"schema": 'syntax = "proto3";', "schemaType": "PROTOBUF"}),
    7: json.dumps({"schema": "x" * (schemas.MAX_DEFINITION_BYTES + 1)}),
    8: json.dumps({"schema": json.dumps(SCHEMA | {"fields": [{"name": "it", "type": "E"}]})}),
    11: json.dumps({"schema": '["null", "shop.Order"]', "references": [{"subject": "a/b", "version": 2}]}),
    12: json.dumps({"schema": '"shop.Order"', "references": [{"subject": "loop", "version": 1}]}),
    13: json.dumps({"schema": '"shop.Order"', "references": [{"version": 1}]}),
    14: json.dumps({"schema": '"int"', "references": [{"subject": f"s{n}", "version": 1} for n in range(70)]}),
}
LINE = {"type": "record", "name": "shop.Line", "fields": [{"name": "sku", "type": "string"}]}
ORDER = {"type": "record", "name": "shop.Order", "fields": [
    {"name": "line", "type": "Line"}, {"name": "other", "type": "shop.Line"}]}  # fmt: skip
SUBJECTS = {
    "/subjects/a%2Fb/versions/2": {"schema": json.dumps(ORDER), "references": [{"subject": "line", "version": 1}]},
    "/subjects/line/versions/1": {"schema": json.dumps(LINE)},
    "/subjects/loop/versions/1": {"schema": json.dumps(LINE), "references": [{"subject": "loop", "version": 1}]},
    **{f"/subjects/s{n}/versions/1": {"schema": '"int"'} for n in range(70)},
}
DRIPS = 9
MOVED = 10


class Registry(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.paths: list[str] = []
        self.logins: list[str | None] = []
        self.url = f"http://127.0.0.1:{self.server_port}/"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Registry)
        self.server.paths.append(self.path)
        self.server.logins.append(self.headers["Authorization"])
        if self.path in SUBJECTS:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(SUBJECTS[self.path]).encode())
            return
        number = int(self.path.rpartition("/")[2])
        if number == MOVED:
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{self.server.server_port}/schemas/ids/3")
            self.end_headers()
            return
        if number != DRIPS and number not in ANSWERS:
            self.send_error(404)
            return
        self.send_response(200)
        self.end_headers()
        if number == DRIPS:
            while True:
                self.wfile.write(b" ")
                time.sleep(0.02)
        self.wfile.write(ANSWERS[number].encode())

    def log_message(self, *_: object) -> None:
        pass

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # the reader has had enough
            super().handle()


@pytest.fixture
def registry() -> Iterator[Registry]:
    with Registry() as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def framed(number: int) -> bytes:
    return b"\0" + number.to_bytes(4, "big") + b"\x02"


def refusal(of: AvroSchemas, number: int) -> str:
    with pytest.raises(CodecError) as caught:
        of.of(framed(number))
    assert caught.value.reason == "unknown_schema"
    return caught.value.message


def test_a_schema_is_asked_for_once(registry: Registry) -> None:
    of = AvroSchemas(registry.url)
    found = [of.of(framed(3)) for _ in range(5)]
    assert found[0].names == ["id"]
    assert registry.paths == ["/schemas/ids/3"]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (4, "the registry answers 404"), (5, "no schema that can be read|Expecting value"), (6, "type PROTOBUF"),
        (7, "more than 1048576 bytes"), (8, "holds itself"), (13, "references that cannot be read: 'subject'"),
    ],
)  # fmt: skip
def test_what_is_no_schema_is_named_and_asked_for_again_later(registry: Registry, number: int, text: str) -> None:
    clock = Clock()
    of = AvroSchemas(registry.url, clock)
    for _ in range(3):
        assert any(part in refusal(of, number) for part in text.split("|"))
    assert len(registry.paths) == 1
    assert of.of(framed(3)), "other schemas are not affected"
    clock.sleep(RETRY_SECONDS)
    refusal(of, number)
    assert len(registry.paths) == 3


def test_schemas_that_one_refers_to_are_fetched_with_it(registry: Registry) -> None:
    of = AvroSchemas(registry.url)
    _, order = of.of(framed(11)).inner
    assert [(part.kind, part.names) for part in order.inner] == [("record", ["sku"])] * 2
    assert registry.paths == ["/schemas/ids/11", "/subjects/a%2Fb/versions/2", "/subjects/line/versions/1"]
    assert "cycle" in refusal(of, 12)
    assert "more than 64 schemas" in refusal(of, 14)


def test_a_registry_that_does_not_end_its_answer_holds_the_stream_up_once(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schemas, "REGISTRY_SECONDS", 0.2)
    clock = Clock()
    of = AvroSchemas(registry.url, clock)
    assert "nothing whole within 0.2 s" in refusal(of, DRIPS)
    assert "nothing whole" in refusal(of, 3)
    assert registry.paths == [f"/schemas/ids/{DRIPS}"]
    clock.sleep(RETRY_SECONDS)
    assert of.of(framed(3))


def test_a_registry_that_is_not_there_is_named(registry: Registry) -> None:
    registry.shutdown()
    registry.server_close()
    assert "refused" in refusal(AvroSchemas(registry.url), 3)


def test_a_login_is_that_of_the_host_in_netrc_and_of_no_other(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert AvroSchemas(registry.url).of(framed(3))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert "netrc" in refusal(AvroSchemas(registry.url), 3)
    (tmp_path / "netrc").write_text("machine 127.0.0.1 pasword s3")
    assert "line" in refusal(AvroSchemas(registry.url), 3)
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login key password s3\n")
    assert AvroSchemas(registry.url).of(framed(MOVED))
    assert registry.logins == [None, "Basic a2V5OnMz", None]
