"""The dashboards, the configuration of Prometheus and the Compose file fit each other and the metrics."""

import re

import pytest
import yaml

from kvflow.config import WorkerConfig
from kvflow.observability.metrics import METRICS
from kvflow.tools.demo.__main__ import build_parser
from tests.helpers.loops import looped

from .pages import ROOT
from .scraping import KINDS, dashboard, queries_shown
from .test_monitor_page import PAGE, SERIES, VLLM_METRICS, VLLM_SERIES, described

DOCKER = ROOT / "docker"
GRAFANA = DOCKER / "grafana"
PANELS = [
    pytest.param(kind, panel, id=f"{kind}: {panel['title']}") for kind in KINDS for panel in dashboard(kind)["panels"]
]
METRIC = r"(?:vllm:)?\bkvflow_\w+"
KNOWN_SERIES = {"worker": SERIES, "vllm": VLLM_SERIES}
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
OF_TARGETS = {"instance", "job", "le"}
"""Labels that Prometheus adds to every series, and that of a bucket."""


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_names_the_dashboard_whose_instances_a_series_knows(kind):
    assert f"(`{kind}.json`" in (ROOT / PAGE).read_text()
    (variable,) = [each for each in dashboard(kind)["templating"]["list"] if each["name"] == "instance"]
    assert re.findall(METRIC, variable["query"]["query"])[0] in KNOWN_SERIES[kind]


@looped("kind, panel", PANELS)
def test_every_query_asks_for_series_and_labels_that_exist(kind, panel):
    for query in (target["expr"] for target in panel["targets"]):
        names = re.findall(METRIC, query)
        assert names
        assert set(names) <= KNOWN_SERIES[kind]
        assert query.count('{instance=~"$instance"}') == len(names)
        for labels, name in re.findall(rf"\bby \(([^)]*)\) \((?:rate\()?({METRIC})", query):
            assert set(labels.replace(" ", "").split(",")) <= {*OF_TARGETS, *described(name).labels}
        assert query.count("(") == query.count(")")
        assert query.count("{") == query.count("}")
    legends = {label for target in panel["targets"] for label in re.findall(r"{{(\w+)}}", target["legendFormat"])}
    grouped = re.findall(r"\bby \(([^)]*)\)", " ".join(target["expr"] for target in panel["targets"]))
    assert legends <= set(", ".join(grouped).split(", "))


def test_every_metric_of_a_transfer_is_shown():
    shown = {name for query in queries_shown("worker") for name in re.findall(METRIC, query)}
    hidden = {name for name in METRICS if not any(series.startswith(name) for series in shown)}
    of_transfers = {name for name in hidden if name.startswith(("kvflow_pull_", "kvflow_read_", "kvflow_failed_"))}
    assert of_transfers == {"kvflow_read_bytes"}


def test_every_metric_of_vllm_is_shown():
    shown = {described(name) for query in queries_shown("vllm") for name in re.findall(METRIC, query)}
    assert shown == {*VLLM_METRICS.values()}


def test_grafana_finds_its_data_source_and_dashboard():
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/kvflow.yaml").read_text())["providers"]
    service = COMPOSE["services"]["grafana"]
    mounted = dict(volume.split(":")[:2] for volume in service["volumes"])
    assert mounted["./grafana/dashboards/worker.json"] == provider["options"]["path"] + "/worker.json"
    assert mounted["./grafana/provisioning"] == "/etc/grafana/provisioning"
    assert source["url"] == "http://prometheus:9090"
    (variable,) = [each for each in dashboard("worker")["templating"]["list"] if each["type"] == "datasource"]
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
