"""The part of a Kubernetes API server that ``kubectl create --dry-run=client`` reads: kinds and their schemas.

Both come from the schemas of ``kubernetes_validate``. Nothing can be written to it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from types import TracebackType
from typing import Any

Schema = Mapping[str, Any]
GroupVersionKind = tuple[str, str, str]
_KIND = "x-kubernetes-group-version-kind"
_CLUSTER_WIDE = {
    "ClusterRole",
    "ClusterRoleBinding",
    "CustomResourceDefinition",
    "Namespace",
    "Node",
    "PersistentVolume",
}


class KubernetesDiscovery:
    """A context manager that serves one Kubernetes version on loopback.

    Args:
        version: such as ``1.35``; one that ``kubernetes_validate`` has.
        custom: ``apiVersion`` and kind of resources whose definitions are installed; they have no schema here.

    Attributes:
        requests: method and path of everything that was asked.
    """

    def __init__(self, version: str, custom: Iterable[tuple[str, str]] = ()) -> None:
        definitions = _definitions(version)
        kinds = {
            (kind["group"], kind["version"], kind["kind"])
            for definition in definitions.values()
            for kind in definition.get(_KIND, [])
            if "metadata" in definition.get("properties", {}) and not kind["kind"].endswith("List")
        }
        for api_version, kind in custom:
            group, _, at = api_version.rpartition("/")
            kinds.add((group, at, kind))
        answers = {path: json.dumps(answer).encode() for path, answer in _discovery(kinds).items()}
        answers["/version"] = json.dumps(
            {"major": "1", "minor": version.partition(".")[2], "gitVersion": f"v{version}.0"}
        ).encode()
        answers["/openapi/v2"] = _openapi(version)
        self.requests: list[tuple[str, str]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(answers, self.requests))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> KubernetesDiscovery:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


def _handler(answers: Mapping[str, bytes], requests: list[tuple[str, str]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            path = self.path.partition("?")[0]
            requests.append((self.command, path))
            body = answers.get(path) if self.command == "GET" else None
            self.send_response(200 if body is not None else 404)
            kind = "application/json" if path != "/openapi/v2" else _PROTOBUF
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body or b"")))
            self.end_headers()
            self.wfile.write(body or b"")

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


# ---- which kinds there are ----


def _discovery(kinds: set[GroupVersionKind]) -> dict[str, Schema]:
    """The documents of the discovery API by path."""
    versions: dict[str, set[str]] = {}
    resources: dict[tuple[str, str], list[Schema]] = {}
    for group, version, kind in sorted(kinds):
        versions.setdefault(group, set()).add(version)
        name = kind.lower()
        plural = f"{name[:-1]}ies" if name.endswith("y") else f"{name}es" if name.endswith("s") else f"{name}s"
        entry = {
            "name": plural, "singularName": name, "kind": kind, "namespaced": kind not in _CLUSTER_WIDE,
            "verbs": ["create", "delete", "get", "list", "patch", "update", "watch"],
        }  # fmt: skip
        resources.setdefault((group, version), []).append(entry)
    groups = []
    for group in sorted(versions.keys() - {""}):
        listed = [{"groupVersion": f"{group}/{version}", "version": version} for version in sorted(versions[group])]
        groups.append({"name": group, "versions": listed, "preferredVersion": listed[0]})
    documents: dict[str, Schema] = {
        "/api": {"kind": "APIVersions", "versions": sorted(versions[""])},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups},
    }
    for (group, version), found in resources.items():
        path, name = (f"/apis/{group}/{version}", f"{group}/{version}") if group else (f"/api/{version}", version)
        documents[path] = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": name, "resources": found}
    return documents


# ---- their schemas, in the only encoding that kubectl takes ----

_PROTOBUF = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"


@cache
def _definitions(version: str) -> dict[str, Any]:
    folder = files("kubernetes_validate") / "kubernetes-json-schema" / f"v{version}.0-local"
    found: dict[str, Any] = json.loads((folder / "_definitions.json").read_text())["$defs"]
    return found


@cache
def _openapi(version: str) -> bytes:
    """An OpenAPI 2 document of all definitions, as gnostic's ``openapi.v2.Document`` (the numbers are its fields').

    It has no paths, so it does not say that the server validates fields: kubectl does it then.
    """
    named = b"".join(
        _field(1, _text(1, name) + _field(2, _schema(definition))) for name, definition in _definitions(version).items()
    )
    info = _text(1, "Kubernetes") + _text(2, f"v{version}.0")
    return _text(1, "2.0") + _field(2, info) + _field(8, b"") + _field(9, named)


def _schema(schema: Schema) -> bytes:
    """``openapi.v2.Schema``."""
    return b"".join(_schema_fields(schema))


def _schema_fields(schema: Schema) -> Iterator[bytes]:
    if "oneOf" in schema:
        # Quantity and IntOrString: a string in OpenAPI 2, of a format by which numbers are let through.
        schema = {"type": "string", "format": "int-or-string"}
    if "$ref" in schema:
        yield _text(1, schema["$ref"].replace("#/$defs/", "#/definitions/"))
    if "format" in schema:
        yield _text(2, schema["format"])
    for name in schema.get("required", []):
        yield _text(19, name)
    if isinstance(schema.get("additionalProperties"), dict):
        yield _field(21, _field(1, _schema(schema["additionalProperties"])))
    types = schema.get("type", [])
    # JSON schema says that a field may be null by a second type, OpenAPI does not say it.
    for kind in [types] if isinstance(types, str) else [kind for kind in types if kind != "null"]:
        yield _field(22, _text(1, kind))
    if "items" in schema:
        yield _field(23, _field(1, _schema(schema["items"])))
    if "properties" in schema:
        properties = schema["properties"].items()
        yield _field(25, b"".join(_field(1, _text(1, name) + _field(2, _schema(inner))) for name, inner in properties))
    for name, value in schema.items():
        if name.startswith("x-"):
            yield _field(31, _text(1, name) + _field(2, _text(2, json.dumps(value))))


def _text(number: int, value: str) -> bytes:
    return _field(number, value.encode())


def _field(number: int, value: bytes) -> bytes:
    """A length-delimited protobuf field."""
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
