"""An API server of leases: the checks and responses of ``coordination.k8s.io/v1``, over real HTTP."""

from __future__ import annotations

import json
import re
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_PATH = re.compile(r"^/apis/coordination\.k8s\.io/v1/namespaces/([a-z0-9-]+)/leases(?:/([a-z0-9.-]+))?$")
_MICRO_TIME = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z$")


class FakeKubernetes:
    """Set ``status`` to refuse everything with it, ``location`` to redirect every request there, ``deaf`` to execute
    a request and close without a response. ``before_answer`` is called when a request has been executed and before its
    response is sent.

    Args:
        tls: of the server; without it, it speaks plain HTTP.

    Attributes:
        objects: by (namespace, name), as stored.
        asked: requests so far.
        account: directory of a mounted service account whose token is accepted.
    """

    def __init__(self, directory: Path, tls: ssl.SSLContext | None = None) -> None:
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.status: int | None = None
        self.location = ""
        self.deaf = False
        self.before_answer: Callable[[str], None] = lambda method: None
        self.requests = 0
        self.token = "first"
        self.account = directory / "account"
        self.account.mkdir()
        (self.account / "namespace").write_text("jobs\n")
        self.rotate("first")
        self._version = 100
        self._lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, answer = fake._answer(self.command, self.path, self.headers.get("Authorization", ""), body)
                fake.before_answer(self.command)
                if fake.deaf:
                    self.close_connection = True
                    return
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                if fake.location:
                    self.send_header("Location", fake.location)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = _serve

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self._server.server_address[1]}"

    def rotate(self, token: str) -> None:
        """The kubelet writes another token; the old one is refused from now on."""
        self.token = token
        (self.account / "token").write_text(token + "\n")

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def _answer(self, method: str, path: str, authorization: str, body: bytes) -> tuple[int, dict[str, Any]]:
        self.requests += 1
        match = _PATH.match(path)
        if self.location:
            return _failure(307, "elsewhere")
        if self.status is not None:
            return _failure(self.status, "refused on purpose")
        if authorization != f"Bearer {self.token}":
            return _failure(401, "Unauthorized")
        if match is None:
            return _failure(404, "the server could not find the requested resource")
        namespace, name = match[1], match[2]
        with self._lock:
            if method == "GET":
                found = self.objects.get((namespace, name))
                return (200, found) if found else _failure(404, f'leases "{name}" not found')
            given = json.loads(body)
            fault = _fault(given, namespace)
            if fault:
                return _failure(422, fault)
            named = given["metadata"]["name"]
            before = self.objects.get((namespace, named))
            if method == "POST":
                if name is not None:
                    return _failure(405, "method not allowed")
                if before is not None:
                    return _failure(409, f'leases "{named}" already exists')
            elif named != name:
                return _failure(400, "the name of the object does not match the name on the URL")
            elif before is None:
                return _failure(404, f'leases "{name}" not found')
            elif given["metadata"].get("resourceVersion") not in (None, "", before["metadata"]["resourceVersion"]):
                return _failure(409, f'Operation cannot be fulfilled on leases "{name}": the object has been modified')
            self._version += 7
            stored = {**given, "metadata": {**given["metadata"], "resourceVersion": str(self._version)}}
            self.objects[namespace, named] = stored
            return (201 if method == "POST" else 200), stored


def _fault(given: dict[str, Any], namespace: str) -> str:
    spec, metadata = given.get("spec", {}), given.get("metadata", {})
    if (given.get("apiVersion"), given.get("kind")) != ("coordination.k8s.io/v1", "Lease"):
        return "apiVersion or kind"
    if metadata.get("namespace") != namespace or not metadata.get("name"):
        return "metadata.name or metadata.namespace"
    if "holderIdentity" in spec and not spec["holderIdentity"]:
        return "spec.holderIdentity: must not be empty"
    if type(spec.get("leaseDurationSeconds")) is not int or spec["leaseDurationSeconds"] <= 0:
        return "spec.leaseDurationSeconds: must be greater than 0"
    if type(spec.get("leaseTransitions")) is not int or not 0 <= spec["leaseTransitions"] < 2**31:
        return "spec.leaseTransitions: must be an int32 >= 0"
    if not all(_MICRO_TIME.match(spec[name]) for name in ("acquireTime", "renewTime")):
        return "spec: parsing time"
    return ""


def _failure(code: int, message: str) -> tuple[int, dict[str, Any]]:
    return code, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}
