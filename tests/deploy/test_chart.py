"""The Helm chart: rendered manifests, refused values, its README, and network policies; the written manifests; the
image's Dockerfile."""

import json
from typing import Any

import gen_chart_readme
import pytest
import yaml

from flexd.config.model import parse_config
from flexd.embedding.connect import TLS_VARIABLES
from tests.support.deployed import (
    CHART,
    TRAINERS,
    Document,
    check_daemon,
    check_references,
    check_schema,
    config_key,
    configs_of,
    daemon_of,
    has_daemon,
    pod_templates,
    read,
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
    full, plain = rendered("-f", CHART / "ci" / "full-values.yaml"), rendered(*TRAINERS)
    assert "ServiceMonitor" in {document["kind"] for document in full}
    assert not {document["kind"] for document in plain} & {"ServiceMonitor", "PodMonitor", "PrometheusRule"}


def test_values_of_the_user_replace_defaults():
    documents = rendered("-f", CHART / "ci" / "full-values.yaml")
    config = configs_of(documents)["flexd.yaml"]
    assert (config.job, config.log.level, config.control.listen_port) == ("ads", "debug", 30000)
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
        ("config.planer.auto=false", "planer"),
        ("config.planner.auto=maybe", "/config/planner/auto"),
        ("config.sketch.memory_bytes=5", "/config/sketch/memory_bytes"),
        ("config.stream.source.kind=pulsar", "/config/stream/source"),
        ("image.digest=sha256:12", "digest"),
        ("typo=1", "typo"),
        ("prometheusRule.enabled=true", "runbookUrl"),
        ("prometheusRule.runbookUrl=docs/runbook.md", "runbookUrl"),
        ("shape=sidecar,config.stream.source.kind=file_log,config.stream.source.path=/log", "must be kafka or tap"),
        ("control.tls.cert=x", "tls"),
        ("control.port=9464", "config.server.port"),
        ("metrics.port=29400", "metrics.port"),
        ("config.server.port=9465", "config.server.port"),
        ("resources.limits.memory=511Mi", "resources.limits.memory"),
        ("resources.limits.memory=536870911", "536870912"),
        ("config.sketch.memory_bytes=4294967296,config.sketch.coaccess_memory_bytes=1", "4294967297"),
        ("config.tables[0].name=on,config.tables[0].rows=7.5", "/config/tables/0"),
        ("config.tables[0].name=123", "/config/tables/0/name"),
        ("shape=sidecar,control.tls.existingSecret=daemon", "go together"),
        ("networkPolicy.trainers=[{}]", "/networkPolicy/trainers/0"),
        ('networkPolicy.trainers=[{"podSelector": {}, "ports": []}]', "/networkPolicy/trainers/0"),
        ('networkPolicy.trainers=["trainer"]', "/networkPolicy/trainers/0"),
        ('networkPolicy.trainers=[{"matchLabels": {}}]', "/networkPolicy/trainers/0"),
    ],
)
def test_chart_refuses_bad_values(setting, words):
    given = ("--set-json", setting) if setting.startswith("networkPolicy") else (*TRAINERS, "--set", setting)
    done = run_tool("helm", "template", "release", CHART, *given)
    assert done.returncode != 0
    assert words in done.stderr


@pytest.mark.parametrize("limit", ["512Mi", "536870912", "0.5Gi", "537M", "1e9", "536870912000m"])
def test_memory_for_the_counters_is_accepted_in_every_notation(limit):
    rendered(*TRAINERS, "--set-string", f"resources.limits.memory={limit}")
    assert parse_config({"job": "j", "stream": {"source": {"kind": "tap"}}}).sketch.memory_bytes == 2**29


def test_names_and_sizes_stay_what_they_are(tmp_path):
    """YAML has words and numbers that are no strings, and helm reads a number of seven digits as a fraction."""
    rows = {"on": 1234567, "123": 10**7, "1e3": 2**40}
    tables = [{"name": name, "rows": number, "dim": 4} for name, number in rows.items()]
    values = tmp_path / "values.yaml"
    values.write_text(json.dumps({"config": {"tables": tables, "sketch": {"memory_bytes": 2**31}}}))
    config = configs_of(rendered(*TRAINERS, "-f", values))["flexd.yaml"]
    assert [(table.name, table.rows) for table in config.tables] == [*rows.items()]
    assert config.sketch.memory_bytes == 2**31


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


MANIFESTS = ROOT / "deploy" / "kubernetes"
FILES = sorted(MANIFESTS.glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_manifest_is_valid_and_runs_the_daemon(file):
    documents = read(file)
    configs = configs_of(documents)
    check_references(documents)
    (pod,) = [pod for document in documents for pod in pod_templates(document) if has_daemon(pod)]
    for document in documents:
        check_schema(document)
    check_daemon(pod, configs[config_key(pod)])


@pytest.mark.parametrize("name", ["sidecar.yaml", "sidecar-jobset.yaml", "sidecar-pytorchjob.yaml"])
def test_trainers_reach_the_daemon_and_have_its_secret(name):
    documents = read(MANIFESTS / name)
    config = configs_of(documents)["flexd.yaml"]
    assert config.state.on_unusable == "wait", "saved state that cannot be used must not end the pod of the trainer"
    services = {d["metadata"]["name"]: d["spec"] for d in documents if d["kind"] == "Service"}
    pods = [pod for document in documents for pod in pod_templates(document)]
    for pod in pods:
        for sidecar in pod["spec"].get("initContainers", []):
            assert sidecar["restartPolicy"] == "Always"
            assert "readinessProbe" not in sidecar or not services, "an unready pod has no name in a service"
        (trainer,) = pod["spec"]["containers"]
        environment = {item["name"]: item["value"] for item in trainer["env"]}
        host, _, port = environment["FLEXD_CONTROL"].rpartition(":")
        assert int(port) == config.control.listen_port
        assert environment["FLEXD_SECRET_FILE"] == str(config.control.secret_file)
        mounted = {mount["mountPath"] for mount in trainer["volumeMounts"]}
        assert str(config.control.secret_file.parent) in mounted
        if not services:
            assert host == config.control.listen_host
            assert str(config.stream.source.path) in mounted
            continue
        service = services[host]
        assert service["publishNotReadyAddresses"] is True
        assert service["clusterIP"] == "None"
        chosen = [p for p in pods if service["selector"].items() <= p["metadata"]["labels"].items()]
        assert len(chosen) == 1
        ports = {port["name"] for port in daemon_of(chosen[0])["ports"]}
        assert {port["targetPort"] for port in service["ports"]} <= ports


def test_written_manifests_agree_with_the_chart():
    run_tool("helm", "version")
    import gen_manifests

    for name in gen_manifests.MANIFESTS:
        text = (MANIFESTS / name).read_text(encoding="utf-8")
        assert text == gen_manifests.render(name, gen_manifests.helm()), f"run {gen_manifests.COMMAND}"


def test_dockerfile():
    lines = (ROOT / "deploy" / "Dockerfile").read_text().splitlines()
    lines = [line for line in lines if not line.startswith("#")]
    final = lines[[i for i, line in enumerate(lines) if line.startswith("FROM")][-1] :]
    (entry,) = [line.removeprefix("ENTRYPOINT ") for line in final if line.startswith("ENTRYPOINT")]
    (command,) = [line.removeprefix("CMD ") for line in final if line.startswith("CMD")]
    # Exec form parses as JSON; a shell in between would keep SIGTERM from the daemon.
    assert (json.loads(entry), json.loads(command)) == (["flexd"], ["run", "-c", "/etc/flexd/flexd.yaml"])
    assert "USER 10001:10001" in final
    exposed = {int(port) for line in final if line.startswith("EXPOSE") for port in line.split()[1:]}
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    assert exposed == {defaults["control"]["port"], defaults["metrics"]["port"]}
    ignored = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
    for line in lines:
        if line.startswith("COPY") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert f"!{source.removeprefix('./')}" in ignored, f"{source} is not in the build context"


def test_chart_manifests_and_package_have_one_version():
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert f'\nversion = "{version}"\n' in (ROOT / "pyproject.toml").read_text()
    for file in FILES:
        assert f"flexd:{version}" in file.read_text()


SELECTOR = {"podSelector": {"matchLabels": {"app": "trainer"}}}
OWN = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "flexd", "app.kubernetes.io/instance": "release"}}}
JOB = ("--set", "shape=sidecar,sidecar.workload=jobset,sidecar.nodes=3")


def policy_of(documents: list[Document]) -> dict[str, Any]:
    (policy,) = [document for document in documents if document["kind"] == "NetworkPolicy"]
    return dict(policy["spec"])


def admitted(rules: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the peers by port; ``any`` is every port."""
    found: dict[str, list[Any]] = {}
    for rule in rules:
        for port in rule.get("ports", [{"port": "any"}]):
            assert port.get("protocol", "TCP") == "TCP"
            found.setdefault(str(port["port"]), []).extend(rule["from"])
    return found


def test_trainers_reach_the_control_port_and_nothing_else() -> None:
    spec = policy_of(rendered("--set", "metrics.port=9000,control.port=30000,config.server.host=0.0.0.0", *TRAINERS))
    assert spec["policyTypes"] == ["Ingress"]
    peers = admitted(spec["ingress"])
    assert set(peers) == {"30000", "9000"}, "the admin API is not opened, wherever it listens"
    assert peers["30000"] == [SELECTOR]
    assert SELECTOR not in peers["9000"]


def test_without_a_scraper_the_metrics_port_is_for_helm_test_alone() -> None:
    spec = policy_of(rendered("--set-json", "networkPolicy.metricsFrom=[]", *TRAINERS))
    (peer,) = admitted(spec["ingress"])["9465"]
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/name"] == "flexd-test"


def test_pods_of_a_job_reach_each_other_and_the_metrics_scraper_one_port() -> None:
    """The policy is of the pod, and the training's own process groups listen on any port of it."""
    peers = admitted(policy_of(rendered(*JOB))["ingress"])
    assert peers["any"] == [OWN]
    assert set(peers) == {"any", "9465"}
    assert OWN not in peers["9465"]


def test_egress_reaches_dns_the_job_and_the_given_peers() -> None:
    spec = policy_of(rendered("-f", CHART / "ci" / "standalone-egress-values.yaml"))
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    dns, *given = spec["egress"]
    assert dns == {"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]}
    assert [rule["to"] for rule in given] == [[{"ipBlock": {"cidr": "10.0.0.0/8"}}]], "a daemon connects to no trainer"
    egress = ("--set-json", 'networkPolicy.egress=[{"ports": [{"port": 9092}]}]')
    assert {"to": [OWN]} in policy_of(rendered(*JOB, *egress))["egress"]


@pytest.mark.parametrize("shape", ["standalone", "sidecar,sidecar.workload=none"])
def test_the_trainers_have_to_be_given(shape: str) -> None:
    refused = run_tool("helm", "template", "release", CHART, "--set", f"shape={shape}")
    assert refused.returncode != 0
    assert "networkPolicy.trainers: name the pods that are trainers" in refused.stderr
    linted = run_tool("helm", "lint", "--strict", CHART, "--set", f"shape={shape}")
    assert linted.returncode == 0, linted.stdout + linted.stderr
    without = rendered("--set", f"shape={shape},networkPolicy.enabled=false")
    assert "NetworkPolicy" not in {document["kind"] for document in without}
