"""The dashboard, the configuration of Prometheus and the Compose file fit each other and the metrics of a worker."""

import json
import re

import pytest
import yaml

from kvflow.config import WorkerConfig
from kvflow.observability.metrics import METRICS
from kvflow.tools.demo.__main__ import build_parser

from .pages import ROOT
from .test_monitor_page import SERIES

DOCKER = ROOT / "docker"
GRAFANA = DOCKER / "grafana"
DASHBOARD = json.loads((GRAFANA / "dashboards" / "worker.json").read_text())
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
QUERIES = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel["targets"]]
OF_TARGETS = {"instance", "job", "le"}
"""Labels that Prometheus adds to every series, and that of a bucket."""


def described(series):
    """Return the metric that a series belongs to."""
    return METRICS[series if series in METRICS else re.sub(r"_(total|bucket|sum|count)$", "", series)]


@pytest.mark.parametrize(("title", "query"), QUERIES)
def test_every_query_asks_for_series_and_labels_that_exist(title, query):
    names = set(re.findall(r"\bkvflow_\w+", query))
    assert names, title
    assert names <= SERIES
    for labels, name in re.findall(r"\bby \(([^)]*)\) \((?:rate\()?(kvflow_\w+)", query):
        assert set(labels.replace(" ", "").split(",")) <= {*OF_TARGETS, *described(name).labels}
    assert query.count("(") == query.count(")")
    assert query.count("{") == query.count("}")


@pytest.mark.parametrize("panel", DASHBOARD["panels"], ids=lambda panel: panel["title"])
def test_every_panel_has_what_grafana_needs(panel):
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert [target["refId"] for target in panel["targets"]] == sorted({target["refId"] for target in panel["targets"]})
    legends = {label for target in panel["targets"] for label in re.findall(r"{{(\w+)}}", target["legendFormat"])}
    grouped = {
        label
        for target in panel["targets"]
        for labels in re.findall(r"\bby \(([^)]*)\)", target["expr"])
        for label in labels.replace(" ", "").split(",")
    }
    assert legends <= grouped


def test_panels_do_not_overlap():
    taken = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_every_metric_of_a_transfer_is_shown():
    shown = {name for _, query in QUERIES for name in re.findall(r"\bkvflow_\w+", query)}
    hidden = {name for name in METRICS if not any(series.startswith(name) for series in shown)}
    of_transfers = {name for name in hidden if name.startswith(("kvflow_pull_", "kvflow_read_", "kvflow_failed_"))}
    assert of_transfers == {"kvflow_read_bytes"}


def test_grafana_finds_its_data_source_and_dashboard():
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/kvflow.yaml").read_text())["providers"]
    service = COMPOSE["services"]["grafana"]
    mounted = dict(volume.split(":")[:2] for volume in service["volumes"])
    assert provider["options"]["path"] == mounted["./grafana/dashboards"]
    assert mounted["./grafana/provisioning"] == "/etc/grafana/provisioning"
    assert source["url"] == "http://prometheus:9090"
    (variable,) = [each for each in DASHBOARD["templating"]["list"] if each["type"] == "datasource"]
    assert variable["current"]["value"] == source["uid"]


def test_the_compose_file_names_files_and_services_that_exist():
    services = COMPOSE["services"]
    for name in ("prometheus", "grafana"):
        assert services[name]["profiles"] == ["observe"]
        assert re.fullmatch(r"\$\{\w+:-[a-z/]+:v?[0-9.]+\}", services[name]["image"]), "pin the version"
        for volume in services[name]["volumes"]:
            assert (DOCKER / volume.split(":")[0]).exists()
        assert set(services[name]["networks"]) <= COMPOSE["networks"].keys()
        assert set(services[name].get("depends_on", [])) <= services.keys()
    assert services["grafana"]["ports"] == ["127.0.0.1:3000:3000"]


def test_prometheus_scrapes_the_port_at_which_engines_serve():
    (job,) = yaml.safe_load((GRAFANA / "prometheus.yaml").read_text())["scrape_configs"]
    (targets,) = [each["targets"] for each in job["static_configs"]]
    names = [
        name for name, service in COMPOSE["services"].items() if "KVFLOW_DEMO_HTTP" in service.get("environment", {})
    ]
    assert sorted(targets) == sorted(f"{name}:9400" for name in names)
    for name in names:
        assert "private" in COMPOSE["services"][name]["networks"]


def test_engines_of_the_compose_file_have_settings_that_are_accepted(monkeypatch):
    environment = COMPOSE["services"]["prefill-tcp"]["environment"]
    monkeypatch.setenv("KVFLOW_DEMO_HTTP", environment["KVFLOW_DEMO_HTTP"])
    monkeypatch.setenv("KVFLOW_DEMO_HTTP_PUBLIC", environment["KVFLOW_DEMO_HTTP_PUBLIC"])
    options = build_parser().parse_args(["prefill"])
    settings = {"engine_id": "prefill", "http": options.http, "http_public": options.http_public}
    config = WorkerConfig.read({**settings, "cluster_secret": "a secret of the tests, long enough"})
    config.check()
    assert config.tuning.http_public is True
