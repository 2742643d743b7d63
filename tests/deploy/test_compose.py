"""The compose file: existing files, consistent addresses and ports, and no published ports."""

import yaml

from flexd.config.base import split_address
from flexd.config.model import load_config
from tests.support.repository import ROOT

DEPLOY = ROOT / "deploy"
SERVICES = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
SECRETS = {"./secrets/control"}
"""Made by the user."""


def mounts(service: str) -> dict[str, str]:
    """Return the path or volume outside by path in the container."""
    return {inside: outside for outside, inside, *_ in (text.split(":") for text in SERVICES[service]["volumes"])}


def test_every_mounted_path_exists():
    for service in SERVICES.values():
        for text in service.get("volumes", []):
            outside = text.split(":")[0]
            if outside.startswith(".") and outside not in SECRETS:
                assert (DEPLOY / outside).exists(), outside


def test_the_daemon_has_its_broker_files_and_state():
    config = load_config(DEPLOY / "flexd.yaml", {})
    daemon, inside = SERVICES["flexd"], mounts("flexd")
    assert inside["/etc/flexd/flexd.yaml"] == "./flexd.yaml"
    assert str(config.control.secret_file) in inside
    assert inside[str(config.state.dir)] == "state"
    assert any(path.startswith("/tmp") for path in daemon["tmpfs"])
    broker = SERVICES["kafka"]["environment"]["KAFKA_ADVERTISED_LISTENERS"]
    assert f"INSIDE://{config.stream.source.bootstrap_servers}" in broker
    assert (daemon["read_only"], daemon["cap_drop"]) == (True, ["ALL"])
    assert int(daemon["stop_grace_period"].removesuffix("s")) > config.shutdown_seconds
    assert f"127.0.0.1:{config.control.listen_port}:{config.control.listen_port}" in daemon["ports"]


def test_nothing_is_published_beyond_this_machine():
    for name, service in SERVICES.items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name


def test_prometheus_scrapes_the_daemon_and_has_the_rules():
    _, port = split_address(load_config(DEPLOY / "flexd.yaml", {}).server.metrics_listen)
    settings = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    (scrape,) = settings["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": [f"flexd:{port}"]}]
    assert mounts("prometheus")["/etc/prometheus"] == "./prometheus"
    assert all((DEPLOY / "prometheus" / file).exists() for file in settings["rule_files"])


def test_grafana_is_provisioned_with_data_and_dashboards():
    provisioning = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "flexd.yaml").read_text())["providers"]
    path = provider["options"]["path"]
    assert mounts("grafana")[path] == "./grafana/dashboards"
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (DEPLOY / "grafana" / "dashboards" / home.removeprefix(f"{path}/")).exists()
