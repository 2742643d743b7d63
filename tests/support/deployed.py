"""Requirements of every deployed daemon, of the chart or of a plain manifest; and reading manifests."""

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from prometheus_client.parser import text_string_to_metric_families

from flexd.api.training import IdsStatus, SlowMemoryStatus
from flexd.config.base import split_address
from flexd.config.model import Config, parse_config
from flexd.server.app import Metrics, create_metrics_app
from tests.support.fake_daemon import STATUS, FakeDaemon
from tests.support.ops_tools import run_tool
from tests.support.repository import ROOT

CHART = ROOT / "helm" / "flexd"
KUBERNETES = ("1.29", "1.35")
"""Versions whose schemas are checked: the oldest with sidecars, and a new one."""
TRAINERS = ("--set", "networkPolicy.trainers[0].podSelector.matchLabels.app=trainer")
"""Values without which the chart's default shape does not render."""
Document = dict[str, Any]

CUSTOM = {
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "PyTorchJob": "kubeflow.org/v1",
    "ServiceMonitor": "monitoring.coreos.com/v1",
    "PodMonitor": "monitoring.coreos.com/v1",
    "PrometheusRule": "monitoring.coreos.com/v1",
}
"""Kinds that the Kubernetes schemas do not know; the pods inside them are checked."""


def documents(text: str) -> list[Document]:
    return [document for document in yaml.safe_load_all(text) if document]


def rendered(*arguments: object) -> list[Document]:
    """The chart as ``helm template`` gives it."""
    done = run_tool("helm", "template", "release", CHART, *arguments)
    assert done.returncode == 0, done.stderr
    return documents(done.stdout)


def configs_of(found: list[Document]) -> dict[str, Config]:
    """The daemon's configurations by file name, as the daemon reads them."""
    (data,) = [d["data"] for d in found if d["kind"] == "ConfigMap" and "flexd.yaml" in d["data"]]
    return {name: parse_config(yaml.safe_load(text)) for name, text in data.items()}


def pod_templates(document: Document) -> list[Document]:
    """The pods that an object makes."""
    spec = document.get("spec", {})
    if document["kind"] in ("Deployment", "Job"):
        return [spec["template"]]
    if document["kind"] == "Pod":
        return [{"metadata": document["metadata"], "spec": spec}]
    if document["kind"] == "JobSet":
        return [job["template"]["spec"]["template"] for job in spec["replicatedJobs"]]
    if document["kind"] == "PyTorchJob":
        return [replica["template"] for replica in spec["pytorchReplicaSpecs"].values()]
    return []


def check_schema(document: Document) -> None:
    """Against the OpenAPI schemas of Kubernetes, unknown keys refused. Raises ``ValidationError`` of the validator."""
    kind = document["kind"]
    if kind in CUSTOM:
        assert document["apiVersion"] == CUSTOM[kind]
        pods = [
            {"apiVersion": "v1", "kind": "Pod", "metadata": {**pod["metadata"], "name": "pod"}, "spec": pod["spec"]}
            for pod in pod_templates(document)
        ]
    else:
        pods = [document]
    for version in KUBERNETES:
        for pod in pods:
            kubernetes_validate.validate(pod, version, strict=True)


def known_metrics() -> set[str]:
    """Names of the metrics page, with all its parts; ``_sum`` and ``_count`` of each."""
    text = (
        Metrics(
            FakeDaemon(
                shown=STATUS.model_copy(update={"slow_memory": SlowMemoryStatus(), "unbounded_ids": IdsStatus()})
            )
        )
        .render()[0]
        .decode()
    )
    known = set(re.findall(r"^# TYPE (flexd_\w+) ", text, re.MULTILINE))
    known |= {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    return known | {f"{name}{suffix}" for name in known for suffix in ("_sum", "_count")}


def probe_paths() -> set[str]:
    daemon = FakeDaemon()
    app = create_metrics_app(daemon, Metrics(daemon))
    return {app.url_path_for(name) for name in ("metrics_page", "healthz", "readyz")}


def has_daemon(pod: Document) -> bool:
    spec = pod["spec"]
    return any(c["name"] == "flexd" for c in [*spec.get("initContainers", []), *spec["containers"]])


def daemon_of(pod: Document) -> Document:
    """The container of a pod that is the daemon."""
    spec = pod["spec"]
    (found,) = [c for c in [*spec.get("initContainers", []), *spec["containers"]] if c["name"] == "flexd"]
    return dict(found)


def check_daemon(pod: Document, config: Config) -> None:
    """The container can run this configuration as it is locked down."""
    container, spec = daemon_of(pod), pod["spec"]
    assert container["args"] == ["run", "-c", "/etc/flexd/config/flexd.yaml"]
    security = container["securityContext"]
    locked = {
        "runAsNonRoot": True, "readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert {name: security.get(name) for name in locked} == locked
    assert security["runAsUser"] == security["runAsGroup"] == spec["securityContext"]["fsGroup"] == 10001
    # Without it the kubelet changes the owner of every file of the state at every start.
    assert spec["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
    assert container["resources"]["limits"]["memory"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert split_address(config.server.metrics_listen) == ("0.0.0.0", ports["metrics"])
    for name, path in (("startupProbe", "/healthz"), ("livenessProbe", "/healthz")):
        assert container[name]["httpGet"] == {"path": path, "port": "metrics"}
    assert container.get("readinessProbe", {"httpGet": {"path": None}})["httpGet"]["path"] in ("/readyz", None)
    assert {probe["httpGet"]["path"] for name, probe in container.items() if name.endswith("Probe")} <= probe_paths()
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert "/tmp" in mounts
    assert config_key(pod) == "flexd.yaml"
    assert not mounts[str(config.state.dir)].get("readOnly")
    secrets = [config.control.secret_file]
    if config.control.tls.cert_file:
        secrets += [config.control.tls.cert_file, config.control.tls.key_file, config.control.tls.ca_file]
    for file in filter(None, secrets):
        assert mounts[str(file.parent)]["readOnly"] is True
    volumes = {volume["name"] for volume in spec["volumes"]}
    for any_container in [*spec.get("initContainers", []), *spec["containers"]]:
        assert {mount["name"] for mount in any_container.get("volumeMounts", [])} <= volumes
    assert spec["terminationGracePeriodSeconds"] > config.shutdown_seconds
    if split_address(f"{config.control.listen_host}:1")[0] == "0.0.0.0":
        assert ports["control"] == config.control.listen_port


def config_key(pod: Document) -> str:
    """The ConfigMap's key that the daemon reads. Mounted as a directory: by ``subPath`` a pod never sees a change."""
    (mount,) = [m for m in daemon_of(pod)["volumeMounts"] if m["mountPath"] == "/etc/flexd/config"]
    assert "subPath" not in mount
    (volume,) = [volume for volume in pod["spec"]["volumes"] if volume["name"] == mount["name"]]
    items = volume["configMap"].get("items", [{"key": "flexd.yaml", "path": "flexd.yaml"}])
    (key,) = [item["key"] for item in items if item["path"] == "flexd.yaml"]
    return key


def check_references(found: list[Document]) -> None:
    """Claims, maps, accounts and roles that are named are in the manifest; Secrets are the user's."""
    names: dict[str, set[str]] = {}
    for document in found:
        names.setdefault(document["kind"], set()).add(document["metadata"]["name"])
    assert "Secret" not in names
    for document in found:
        for pod in pod_templates(document):
            spec = pod["spec"]
            for volume in spec.get("volumes", []):
                if "persistentVolumeClaim" in volume:
                    assert volume["persistentVolumeClaim"]["claimName"] in names["PersistentVolumeClaim"]
                if "configMap" in volume:
                    assert volume["configMap"]["name"] in names["ConfigMap"]
            if "serviceAccountName" in spec:
                assert spec["serviceAccountName"] in names["ServiceAccount"]
        if document["kind"] == "RoleBinding":
            assert document["roleRef"]["name"] in names["Role"]
            assert {subject["name"] for subject in document["subjects"]} <= names["ServiceAccount"]


def read(path: Path) -> list[Document]:
    return documents(path.read_text(encoding="utf-8"))
