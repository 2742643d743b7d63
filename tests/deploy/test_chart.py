"""The Helm chart: rendered manifests, refused values, and its README."""

from __future__ import annotations

import json

import gen_chart_readme
import pytest
import yaml

from flexd.embedding.connect import TLS_VARIABLES
from tests.support.deployed import (
    CHART,
    TRAINERS,
    check_daemon,
    check_references,
    check_schema,
    config_key,
    configs_of,
    daemon_of,
    has_daemon,
    pod_templates,
    rendered,
)
from tests.support.ops_tools import run_tool
from tests.support.repository import ROOT

VALUES = sorted((CHART / "ci").glob("*.yaml"))


@pytest.mark.parametrize("values", [None, *VALUES], ids=lambda file: file.name if file else "default")
def test_chart_renders_valid_manifests_and_configuration(values):
    chosen = ["-f", values] if values else TRAINERS
    linted = run_tool("helm", "lint", "--strict", "--quiet", CHART, *chosen)
    assert linted.returncode == 0, linted.stdout + linted.stderr
    documents = rendered(*chosen)
    for document in documents:
        check_schema(document)
    check_references(documents)
    configs = configs_of(documents)
    settings = yaml.safe_load(values.read_text()) if values else {}
    workloads = [d for d in documents if d["kind"] in ("Deployment", "JobSet", "PyTorchJob")]
    assert len(workloads) == (settings.get("sidecar", {}).get("workload") != "none")
    service = next(d for d in documents if d["kind"] == "Service")["spec"]
    assert service["publishNotReadyAddresses"] is True
    pods = [pod for workload in workloads for pod in pod_templates(workload)]
    assert sum(map(has_daemon, pods)) == len(workloads)
    for pod in pods:
        labels = pod["metadata"]["labels"]
        assert (service["selector"].items() <= labels.items()) is has_daemon(pod)
        if has_daemon(pod):
            check_daemon(pod, configs[config_key(pod)])
            ports = {port["name"]: port["containerPort"] for port in daemon_of(pod)["ports"]}
            assert {port["targetPort"]: port["port"] for port in service["ports"]} == ports
        for policy in [d for d in documents if d["kind"] in ("NetworkPolicy", "PodDisruptionBudget")]:
            selector = policy["spec"].get("podSelector") or policy["spec"]["selector"]
            assert selector["matchLabels"].items() <= labels.items()
    test_pods = [d for d in documents if d["kind"] == "Pod"]
    assert [d["metadata"]["annotations"]["helm.sh/hook"] for d in test_pods] == ["test"]


def kinds(documents: list[dict]) -> set[str]:
    return {document["kind"] for document in documents}


def test_monitoring_equals_that_of_deploy():
    documents = rendered("-f", CHART / "ci" / "sidecar-jobset-values.yaml")
    by_kind = {document["kind"]: document for document in documents if document["kind"] != "ConfigMap"}
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "flexd.rules.yaml").read_text())["groups"]
    for group in rules:
        group["rules"] = [rule for rule in group["rules"] if rule.get("alert") != "FlexdPlanStale"]
        for rule in group["rules"]:
            if "alert" in rule:
                url = rule["annotations"]["runbook_url"]
                rule["annotations"]["runbook_url"] = url.replace(
                    "docs/runbook.md", "https://docs.example.com/flexd/runbook"
                )
    assert by_kind["PrometheusRule"]["spec"]["groups"] == rules
    assert "PodMonitor" in by_kind
    assert "ServiceMonitor" not in by_kind
    (dashboards,) = [d for d in documents if d["kind"] == "ConfigMap" and d["metadata"]["name"].endswith("-dashboards")]
    files = {file.name: file.read_text() for file in (ROOT / "deploy" / "grafana" / "dashboards").glob("*.json")}
    assert files
    assert {name: json.loads(text) for name, text in dashboards["data"].items()} == {
        name: json.loads(text) for name, text in files.items()
    }
    assert "ServiceMonitor" in kinds(rendered("-f", CHART / "ci" / "full-values.yaml"))
    assert not kinds(rendered(*TRAINERS)) & {"ServiceMonitor", "PodMonitor", "PrometheusRule"}


def test_values_of_the_user_replace_defaults():
    documents = rendered("-f", CHART / "ci" / "full-values.yaml")
    config = configs_of(documents)["flexd.yaml"]
    assert config.job == "ads"
    assert config.log.level == "debug"
    assert config.control.listen_port == 30000
    assert str(config.control.tls.cert_file) == "/etc/flexd/control-tls/tls.crt"
    (deployment,) = [d for d in documents if d["kind"] == "Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 51
    assert pod["containers"][0]["image"] == f"registry.example.com/flexd@sha256:{'ab' * 32}"
    assert pod["containers"][0]["env"][0]["valueFrom"]["secretKeyRef"] == {"name": "kafka", "key": "password"}


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("shape=daemonset", "shape"),
        ("control.existingSecret=", "existingSecret"),
        ("config.job=a b", "job"),
        ("config.shutdown_seconds=0", "shutdown_seconds"),
        ("image.digest=sha256:12", "digest"),
        ("typo=1", "typo"),
        ("prometheusRule.enabled=true", "runbookUrl"),
        ("prometheusRule.runbookUrl=docs/runbook.md", "runbookUrl"),
        ("shape=sidecar,config.stream.source.kind=file_log", "must be kafka or tap"),
        ("control.tls.cert=x", "tls"),
        ("shape=sidecar,control.tls.existingSecret=daemon", "go together"),
    ],
)
def test_chart_refuses_bad_values(setting, words):
    done = run_tool("helm", "template", "release", CHART, *TRAINERS, "--set", setting)
    assert done.returncode != 0
    assert words in done.stderr


@pytest.mark.parametrize(("shape", "version", "accepted"), [
    ("sidecar", "1.28.9", False), ("sidecar", "1.29.0", True),
    ("standalone", "1.25.0", True), ("standalone", "1.24.9", False),
])  # fmt: skip
def test_sidecars_need_a_kubernetes_version_that_supports_them(shape, version, accepted):
    done = run_tool(
        "helm", "template", "release", CHART, *TRAINERS, "--kube-version", version, "--set", f"shape={shape}"
    )  # fmt: skip
    assert (done.returncode == 0) is accepted, done.stderr
    if shape == "sidecar" and not accepted:
        assert "1.29" in done.stderr


def test_readme_is_current_and_describes_every_value():
    assert gen_chart_readme.TARGET.read_text(encoding="utf-8") == gen_chart_readme.render(), (
        f"run {gen_chart_readme.COMMAND}"
    )
    silent = [key for key, _, meaning in gen_chart_readme.rows((CHART / "values.yaml").read_text()) if not meaning]
    assert silent == []


def test_ranks_show_certificates_and_no_container_has_the_keys_of_another():
    documents = rendered("-f", CHART / "ci" / "sidecar-pytorchjob-values.yaml")
    (job,) = [document for document in documents if document["kind"] == "PyTorchJob"]
    leads = []
    for pod in pod_templates(job):
        secrets = {each["name"]: each["secret"]["secretName"] for each in pod["spec"]["volumes"] if "secret" in each}
        (trainer,) = pod["spec"]["containers"]
        mounted = {secrets.get(mount["name"]) for mount in trainer["volumeMounts"]}
        assert "ranking-trainer-tls" in mounted
        assert "ranking-daemon-tls" not in mounted
        if has_daemon(pod):
            assert "ranking-trainer-tls" not in {secrets.get(each["name"]) for each in daemon_of(pod)["volumeMounts"]}
        variables = {item["name"]: item["value"] for item in trainer["env"]}
        for name, file in zip(TLS_VARIABLES, ("tls.crt", "tls.key", "ca.crt"), strict=True):
            assert variables[name] == f"/etc/flexd/trainer-tls/{file}"
        leads.append("ranking-daemon-tls" in secrets.values())
    assert sorted(leads) == [False, True], "one pod has the daemon"


@pytest.mark.parametrize(("settings", "expected"), [
    (["shape=sidecar"], "wait"),
    (["shape=sidecar", "sidecar.nodes=1"], "wait"),
    (["shape=sidecar", "config.state.on_unusable=reset"], "reset"),
    (["shape=standalone"], "exit"),
], ids=str)  # fmt: skip
def test_unusable_state_does_not_make_the_pod_of_a_trainer_crash_loop(settings, expected):
    documents = rendered(*TRAINERS, *(word for setting in settings for word in ("--set", setting)))
    assert sorted({config.state.on_unusable for config in configs_of(documents).values()}) == expected.split()
