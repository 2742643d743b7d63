"""What is deployed agrees with what runs: configuration, ports, probes, mounts, metric names."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from flexd.config.base import split_address
from flexd.config.load import parse_config
from flexd.config.model import Config
from flexd.server.app import create_metrics_app
from flexd.server.figures import DaemonFigures
from flexd.server.metrics import Metrics

REPOSITORY = Path(__file__).parents[2]
CHART = REPOSITORY / "helm" / "flexd"
HELM = os.environ.get("HELM")
FIGURES = DaemonFigures(job="j", version="1", started_unix_seconds=0.0)


def config_of(documents: list[dict]) -> Config:
    (text,) = [d["data"]["flexd.yaml"] for d in documents if d["kind"] == "ConfigMap"]
    return parse_config(yaml.safe_load(text))


def probe_paths() -> set[str]:
    app = create_metrics_app(None, Metrics(lambda: FIGURES))
    return {app.url_path_for(name) for name in ("metrics_page", "healthz", "readyz")}


def check_daemon_container(pod: dict, container: dict, config: Config) -> None:
    """The container can run this configuration as it is locked down."""
    assert container["args"] == ["run", "-c", "/etc/flexd/flexd.yaml"]
    security = container["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["runAsUser"] == 10001
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    host, metrics_port = split_address(config.server.metrics_listen)
    assert (host, metrics_port) == ("0.0.0.0", ports["metrics"])
    for name, path in (("startupProbe", "/healthz"), ("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")):
        get = container[name]["httpGet"]
        assert (get["path"], get["port"]) == (path, "metrics")
        assert path in probe_paths()
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert "/tmp" in mounts
    assert mounts["/etc/flexd/flexd.yaml"]["subPath"] == "flexd.yaml"
    assert not mounts[str(config.state.dir)].get("readOnly")
    assert mounts[str(config.control.secret_file.parent)]["readOnly"] is True
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in mounts.values()} <= volumes
    assert pod["terminationGracePeriodSeconds"] > config.shutdown_seconds


def test_sidecar_manifest():
    documents = list(yaml.safe_load_all((REPOSITORY / "deploy" / "kubernetes" / "sidecar.yaml").read_text()))
    config = config_of(documents)
    (job,) = [d for d in documents if d["kind"] == "Job"]
    pod = job["spec"]["template"]["spec"]
    (sidecar,) = pod["initContainers"]
    assert sidecar["restartPolicy"] == "Always"
    check_daemon_container(pod, sidecar, config)
    (trainer,) = pod["containers"]
    environment = {item["name"]: item["value"] for item in trainer["env"]}
    assert environment["FLEXD_CONTROL"] == f"{config.control.listen_host}:{config.control.listen_port}"
    assert environment["FLEXD_SECRET_FILE"] == str(config.control.secret_file)
    shared = {mount["mountPath"] for mount in trainer["volumeMounts"]}
    assert {str(config.stream.source.path), str(config.control.secret_file.parent)} <= shared
    claims = {d["metadata"]["name"] for d in documents if d["kind"] == "PersistentVolumeClaim"}
    maps = {d["metadata"]["name"] for d in documents if d["kind"] == "ConfigMap"}
    for volume in pod["volumes"]:
        if "persistentVolumeClaim" in volume:
            assert volume["persistentVolumeClaim"]["claimName"] in claims
        if "configMap" in volume:
            assert volume["configMap"]["name"] in maps


def test_the_trainers_variables_are_those_that_connect_reads():
    source = (REPOSITORY / "flexd" / "embedding" / "connect.py").read_text()
    assert 'ADDRESS_VARIABLE = "FLEXD_CONTROL"' in source
    assert 'SECRET_VARIABLE = "FLEXD_SECRET_FILE"' in source


def test_dockerfile():
    text = (REPOSITORY / "deploy" / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    final = lines[[i for i, line in enumerate(lines) if line.startswith("FROM")][-1] :]
    (entry,) = [line.removeprefix("ENTRYPOINT ") for line in final if line.startswith("ENTRYPOINT")]
    (command,) = [line.removeprefix("CMD ") for line in final if line.startswith("CMD")]
    # Exec form parses as JSON; a shell in between would keep SIGTERM from the daemon.
    assert json.loads(entry) == ["flexd"]
    assert json.loads(command) == ["run", "-c", "/etc/flexd/flexd.yaml"]
    assert "USER 10001:10001" in final
    exposed = {int(port) for line in final if line.startswith("EXPOSE") for port in line.split()[1:]}
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    assert exposed == {defaults["control"]["port"], defaults["metrics"]["port"]}
    ignored = (REPOSITORY / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
    for line in lines:
        if line.startswith("COPY") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert f"!{source.removeprefix('./')}" in ignored, f"{source} is not in the build context"


def test_chart_and_package_have_one_version():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = (REPOSITORY / "pyproject.toml").read_text()
    version = re.search(r'^version = "(.*)"$', project, re.MULTILINE)[1]
    assert chart["appVersion"] == version
    assert f"flexd:{version}" in (REPOSITORY / "deploy" / "kubernetes" / "sidecar.yaml").read_text()


def test_default_values_are_a_valid_configuration_and_fit_the_schema():
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    parse_config(values["config"])
    assert set(values) <= set(schema["properties"])


needs_helm = pytest.mark.skipif(HELM is None, reason="set HELM to the helm binary")


def helm(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(HELM), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@needs_helm
@pytest.mark.parametrize(
    "values", [None, *sorted((CHART / "ci").glob("*.yaml"))], ids=lambda file: file.name if file else "default"
)
def test_chart_renders_what_the_daemon_takes(values):
    chosen = ["-f", values] if values else []
    linted = helm("lint", "--strict", CHART, *chosen)
    assert linted.returncode == 0, linted.stdout + linted.stderr
    rendered = helm("template", "release", CHART, *chosen)
    assert rendered.returncode == 0, rendered.stderr
    documents = [d for d in yaml.safe_load_all(rendered.stdout) if d]
    config = config_of(documents)
    by_kind = {d["kind"]: d for d in documents}
    pod = by_kind["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    check_daemon_container(pod, container, config)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["control"] == config.control.listen_port
    service = by_kind["Service"]["spec"]
    assert service["publishNotReadyAddresses"] is True
    assert {port["name"]: port["port"] for port in service["ports"]} == ports
    labels = by_kind["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()
    assert by_kind["Deployment"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert ("ServiceMonitor" in by_kind) == (values is not None)
    assert ("PersistentVolumeClaim" in by_kind) == (values is None)


@needs_helm
@pytest.mark.parametrize(
    "setting",
    [
        "state.size=lots",
        "control.port=0",
        "control.existingSecret=",
        "config.job=a b",
        "config.stream.source.kind=rabbit",
        "config.shutdown_seconds=0",
        "image.pullPolicy=Sometimes",
        "typo=1",
    ],
)
def test_chart_refuses_bad_values(setting):
    done = helm("template", "release", CHART, "--set", setting)
    assert done.returncode != 0
    assert "schema" in done.stderr
