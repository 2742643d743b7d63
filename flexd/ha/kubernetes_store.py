"""A lease as a Kubernetes object (``coordination.k8s.io/v1`` Lease), over HTTPS as the pod's service account.

``resourceVersion`` is the revision: the API server refuses an update made from another one (409). ``leaseTransitions``
is the term. ``renewTime`` and ``acquireTime`` are informative (``kubectl get lease``): no decision depends on another
machine's clock. Needs ``get``, ``create`` and ``update`` on ``leases`` in the namespace.

Source: https://kubernetes.io/docs/reference/kubernetes-api/cluster-resources/lease-v1/
"""

from __future__ import annotations

import math
import os
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from flexd.core.errors import LeaseError
from flexd.ha.lease_store import MAX_DURATION_SECONDS, MAX_HOLDER_CHARACTERS, MAX_TERM, LeaseRecord

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_MAX_TOKEN_BYTES = 64 * 1024
_MAX_RESPONSE_BYTES = 1024 * 1024
_REMEDIES: Mapping[int, str] = {
    401: "the service account's token is not accepted: is it mounted?",
    403: "allow the service account to get, create and update leases in this namespace (see docs/high-availability.md)",
    404: "does the namespace exist?",
    429: "the API server is busy; the request is repeated",
}


class KubernetesLeaseStore:
    """Implements ``LeaseStore``. For one thread at a time.

    Args:
        name: name of the Lease object; created if missing.
        namespace: by default that of the pod.
        timeout_seconds: deadline of connecting, and of every wait for the server.
        api_url: by default from ``KUBERNETES_SERVICE_HOST`` and ``KUBERNETES_SERVICE_PORT``.
        account: directory with the files ``token``, ``ca.crt`` and ``namespace``. The token is read for every
            request, because the kubelet replaces it.

    Raises:
        LeaseError: not running in a pod, or its service account is not mounted.
    """

    def __init__(
        self,
        name: str,
        namespace: str | None = None,
        timeout_seconds: float = 5.0,
        api_url: str | None = None,
        account: Path = SERVICE_ACCOUNT,
    ) -> None:
        self._name = name
        self._account = account
        self._namespace = namespace or self._mounted("namespace").strip()
        base = api_url or _api_url(os.environ)
        self._collection = f"{base}/apis/coordination.k8s.io/v1/namespaces/{self._namespace}/leases"
        verify: ssl.SSLContext | bool = True
        if base.startswith("https:"):
            authority = account / "ca.crt"
            try:
                verify = ssl.create_default_context(cafile=authority)
            except (OSError, ssl.SSLError) as error:
                raise LeaseError(
                    f"{authority} cannot be used: {error}", remedy="run in a pod with its service account mounted"
                ) from error
        # No proxy from the environment: the token is for the API server alone.
        self._client = httpx.Client(timeout=timeout_seconds, verify=verify, trust_env=False, follow_redirects=False)
        self._object: dict[str, Any] = {}

    @property
    def location(self) -> str:
        return f"Kubernetes lease {self._namespace}/{self._name}"

    def read(self) -> LeaseRecord | None:
        response = self._request("GET", f"{self._collection}/{self._name}")
        if response.status_code == httpx.codes.NOT_FOUND:
            return None
        return self._parse(self._checked(response))

    def compare_and_set(
        self, seen: LeaseRecord | None, holder: str, term: int, duration_seconds: float
    ) -> LeaseRecord | None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec: dict[str, Any] = {
            "leaseDurationSeconds": math.ceil(duration_seconds),
            "leaseTransitions": term,
            "renewTime": now,
            "acquireTime": now,
        }
        if holder:
            spec["holderIdentity"] = holder
        metadata: dict[str, Any] = {"name": self._name, "namespace": self._namespace}
        if seen is None:
            response = self._request("POST", self._collection, _body(metadata, spec))
        else:
            before = self._object
            # Labels, annotations and owner references belong to other programs and must survive an update.
            metadata = {**before.get("metadata", {}), **metadata, "resourceVersion": seen.revision}
            if seen.term == term and "acquireTime" in before.get("spec", {}):
                spec["acquireTime"] = before["spec"]["acquireTime"]
            response = self._request("PUT", f"{self._collection}/{self._name}", _body(metadata, spec))
        gone = response.status_code == httpx.codes.NOT_FOUND and seen is not None
        if response.status_code == httpx.codes.CONFLICT or gone:
            return None
        return self._parse(self._checked(response))

    def close(self) -> None:
        self._client.close()

    def _request(self, method: str, url: str, body: dict[str, Any] | None = None) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self._mounted('token').strip()}", "Accept": "application/json"}
        try:
            return self._client.request(method, url, json=body, headers=headers)
        except httpx.HTTPError as error:
            raise LeaseError(
                f"{self.location}: the API server does not respond: {error or type(error).__name__}",
                remedy="the lease ends by itself if this goes on; check the network to the API server",
            ) from error

    def _checked(self, response: httpx.Response) -> httpx.Response:
        if response.is_success:
            return response
        raise LeaseError(
            f"{self.location}: the API server responds {response.status_code}: {_reason(response)}",
            remedy=_REMEDIES.get(response.status_code, "see the API server's log"),
        )

    def _parse(self, response: httpx.Response) -> LeaseRecord:
        try:
            if len(response.content) > _MAX_RESPONSE_BYTES:
                raise ValueError(f"{len(response.content)} bytes")
            found = response.json()
            spec, revision = found["spec"], found["metadata"]["resourceVersion"]
            # An object of another program may lack any of these fields.
            holder, term = spec.get("holderIdentity") or "", spec.get("leaseTransitions") or 0
            duration = spec.get("leaseDurationSeconds") or 0
            if not isinstance(holder, str) or len(holder) > MAX_HOLDER_CHARACTERS or not isinstance(revision, str):
                raise ValueError("holderIdentity or resourceVersion")
            if type(term) is not int or not 0 <= term <= MAX_TERM:
                raise ValueError("leaseTransitions")
            if type(duration) is not int or not 0 <= duration <= MAX_DURATION_SECONDS:
                raise ValueError("leaseDurationSeconds")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise LeaseError(
                f"{self.location}: the API server's response is no lease: {error}",
                remedy="is KUBERNETES_SERVICE_HOST the API server? is the lease flexd's own?",
            ) from error
        self._object = found
        return LeaseRecord(holder, term, float(duration), revision)

    def _mounted(self, name: str) -> str:
        path = self._account / name
        try:
            with path.open(encoding="utf-8") as file:
                return file.read(_MAX_TOKEN_BYTES)
        except (OSError, UnicodeDecodeError) as error:
            raise LeaseError(
                f"{path} cannot be read: {error}", remedy="run in a pod with its service account mounted"
            ) from error


def _api_url(environ: Mapping[str, str]) -> str:
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise LeaseError(
            "KUBERNETES_SERVICE_HOST is not set: not running in a pod",
            remedy="set high_availability.lease.kind to file",
        )
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def _body(metadata: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}


def _reason(response: httpx.Response) -> str:
    """Return the server's message, truncated; it never contains the token."""
    try:
        return str(response.json()["message"])[:300]
    except (ValueError, KeyError, TypeError):
        return response.reason_phrase
