"""``kubectl create --dry-run=client`` accepts the manifests and the rendered chart, and checks their fields.

It needs no cluster: ``KubernetesDiscovery`` serves the kinds and schemas of an API server. Checks that need a cluster
(quotas, admission, taken names) are not made.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.deployed import CHART, CUSTOM, KUBERNETES, TRAINERS, Document, documents
from tests.support.kubernetes_discovery import KubernetesDiscovery
from tests.support.ops_tools import run_tool, tool
from tests.support.repository import ROOT

MANIFESTS = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
VALUES = sorted((CHART / "ci").glob("*.yaml"))


@pytest.fixture(scope="module", params=KUBERNETES)
def server(request: pytest.FixtureRequest) -> Iterator[KubernetesDiscovery]:
    tool("kubectl")
    with KubernetesDiscovery(request.param, [(version, kind) for kind, version in CUSTOM.items()]) as discovery:
        yield discovery


def dry_run(server: KubernetesDiscovery, cache: Path, file: Path) -> subprocess.CompletedProcess[str]:
    return run_tool(
        "kubectl", "--kubeconfig", "/dev/null", "--server", server.url, "--cache-dir", cache,
        "create", "--dry-run=client", "--validate=strict", "-f", file,
    )  # fmt: skip


def made(found: list[Document]) -> list[str]:
    """Return the output of kubectl for these objects."""
    lines = []
    for document in found:
        group = document["apiVersion"].rpartition("/")[0]
        kind = document["kind"].lower() + (f".{group}" if group else "")
        lines.append(f"{kind}/{document['metadata']['name']} created (dry run)")
    return lines


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.name)
def test_kubectl_accepts_the_plain_manifests(server, file, tmp_path):
    server.requests.clear()
    done = dry_run(server, tmp_path, file)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.splitlines() == made(documents(file.read_text(encoding="utf-8")))
    assert {method for method, _ in server.requests} == {"GET"}
    assert ("GET", "/openapi/v2") in server.requests, "fields were checked"


@pytest.mark.parametrize("values", [None, *VALUES], ids=lambda file: file.name if file else "default")
def test_kubectl_accepts_the_rendered_chart(server, values, tmp_path):
    text = run_tool("helm", "template", "release", CHART, *(["-f", values] if values else TRAINERS)).stdout
    file = tmp_path / "rendered.yaml"
    file.write_text(text)
    done = dry_run(server, tmp_path / "cache", file)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.splitlines() == made(documents(text)) != []


DEPLOYMENT = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "flexd"},
    "spec": {
        "replicas": 1,
        "selector": {"matchLabels": {"app": "flexd"}},
        "template": {
            "metadata": {"labels": {"app": "flexd"}},
            "spec": {"containers": [{"name": "flexd", "image": "flexd"}]},
        },
    },
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ""),
        ({"replica": 1}, 'unknown field "replica" in io.k8s.api.apps.v1.DeploymentSpec'),
        ({"replicas": "two"}, 'DeploymentSpec.replicas: got "string", expected "integer"'),
        ({"selector": None}, 'missing required field "selector"'),
        (
            {"template": {"spec": {"containers": [{"name": "flexd", "readOnly": True}]}}},
            'unknown field "readOnly" in io.k8s.api.core.v1.Container',
        ),
    ],
)
def test_kubectl_refuses_invalid_manifests(server, tmp_path, change, words):
    spec = {key: value for key, value in {**DEPLOYMENT["spec"], **change}.items() if value is not None}
    file = tmp_path / "deployment.yaml"
    file.write_text(yaml.safe_dump({**DEPLOYMENT, "spec": spec}))
    done = dry_run(server, tmp_path / "cache", file)
    assert done.returncode == (1 if words else 0), done.stderr
    assert words in done.stderr


@pytest.mark.parametrize("kind", ["JobSet", "PyTorchJob"])
def test_kubectl_names_unknown_kinds(kind, tmp_path):
    (file,) = [file for file in MANIFESTS if file.name == f"sidecar-{kind.lower()}.yaml"]
    with KubernetesDiscovery(KUBERNETES[-1]) as bare:
        done = dry_run(bare, tmp_path, file)
    assert done.returncode == 1
    assert f'no matches for kind "{kind}" in version "{CUSTOM[kind]}"' in done.stderr
