"""The chart's NetworkPolicy admits trainers to the control port alone, and nobody by default."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.deployed import CHART, TRAINERS, Document, rendered
from tests.support.ops_tools import run_tool

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
    assert "/networkPolicy/trainers" in refused.stderr
    told = run_tool("helm", "template", "release", CHART, "--set", f"shape={shape}", "--skip-schema-validation")
    assert told.returncode != 0
    assert "networkPolicy.trainers: name the pods that are trainers" in told.stderr
    without = rendered("--set", f"shape={shape},networkPolicy.enabled=false")
    assert "NetworkPolicy" not in {document["kind"] for document in without}


@pytest.mark.parametrize(
    "peers", ["[{}]", '[{"podSelector": {}, "ports": []}]', '["trainer"]', '[{"matchLabels": {}}]']
)
def test_a_peer_without_a_selector_is_refused(peers: str) -> None:
    refused = run_tool("helm", "template", "release", CHART, "--set-json", f"networkPolicy.trainers={peers}")
    assert refused.returncode != 0
    assert "/networkPolicy/trainers/0" in refused.stderr
