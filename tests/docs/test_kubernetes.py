"""The manifests of docs/howto/deploy.md have the fields of Kubernetes, and what they name is there."""

import copy
import re
import shlex
from pathlib import Path
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import yaml

from kvflow.config import SECRET_VARIABLE, WorkerConfig
from kvflow.integrations.vllm.settings import HOST_VARIABLE, EngineFacts, read_settings
from kvflow.tools.cli import build_parser, main

from .manifests import (
    ENGINES,
    FILES,
    FOLDER,
    container,
    documents,
    pod,
    ports,
    the,
    transfer_config,
    value,
    words,
    workload,
)
from .pages import blocks

PAGE = "docs/howto/deploy.md"
VERSIONS = ("1.30.0", "1.37.0")
"""The oldest that is promised, and the newest whose schema there is."""


def validate(document, version=VERSIONS[-1]):
    kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_has_the_fields_of_its_kind(version):
    for document in documents():
        validate(document, version)
    assert [each["kind"] for each in documents()] == [
        "NetworkPolicy",
        *("Service", "StatefulSet") * 2,
        *("Service", "Deployment"),
    ]


def test_every_file_of_the_folder_is_on_the_page_and_applied():
    assert {path.name for path in FOLDER.iterdir()} == set(FILES)
    page = (FOLDER.parent / "deploy.md").read_text()
    [applied] = [words for words in commands() if words[:2] == ["kubectl", "apply"]]
    assert applied[2:] == [word for name in FILES for word in ("-f", name)]
    for name in FILES:
        assert f"(kubernetes/{name})" in page


def commands():
    """Return the commands of the page, as words."""
    text = "".join(blocks(PAGE, "sh"))
    return [shlex.split(line) for line in text.splitlines() if line.startswith(("kubectl", "kvflow"))]


@pytest.mark.parametrize(("address", "host"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
@pytest.mark.parametrize(("name", "role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
def test_the_settings_of_the_engines_are_those_of_kvflow(name, role, address, host, monkeypatch):
    config = transfer_config(name)
    assert (config["kv_connector"], config["kv_role"]) == ("KVFlowConnector", role)
    monkeypatch.setenv(HOST_VARIABLE, address)
    monkeypatch.setenv(SECRET_VARIABLE, "x" * 32)
    facts = EngineFacts(engine_id="engine", kv_role=role)
    worker = read_settings(config["kv_connector_extra_config"], facts).worker
    assert (worker.bind, worker.advertise) == (f"tcp://{host}:{ports(name)['control']}", None)
    assert worker.tcp.bind == worker.tcp.advertise == f"tcp://{host}:{ports(name)['tcp-plane']}"


def test_both_kinds_of_engines_differ_in_name_and_role_alone():
    texts = [(FOLDER / f"{name}.yaml").read_text() for name in ENGINES]
    assert texts[0].replace("prefill", "decode").replace("kv_producer", "kv_consumer") == texts[1]


@pytest.mark.parametrize("name", ENGINES)
def test_the_address_is_the_pods_and_the_secret_is_that_of_the_page(name, capsys):
    told = {each["name"]: each["valueFrom"] for each in container(name)["env"]}
    assert told.keys() == {HOST_VARIABLE, SECRET_VARIABLE}
    assert told[HOST_VARIABLE] == {"fieldRef": {"fieldPath": "status.podIP"}}
    [created] = [words for words in commands() if words[:3] == ["kubectl", "create", "secret"]]
    [written] = [words for words in commands() if words[0] == "kvflow"]
    command, _, file = " ".join(written).partition(" > ")
    assert created[3:] == ["generic", told[SECRET_VARIABLE]["secretKeyRef"]["name"], f"--from-env-file={file}"]
    assert main(command.split()[1:]) == 0
    assert capsys.readouterr().out.partition("=")[0] == told[SECRET_VARIABLE]["secretKeyRef"]["key"]


@pytest.mark.parametrize("name", [*ENGINES, "router"])
def test_ports_volumes_and_labels_that_are_named_are_there(name):
    given, template = container(name), workload(name)["spec"]["template"]
    probes = [given[f"{each}Probe"] for each in ("startup", "readiness", "liveness")]
    named = [(probe.get("httpGet") or probe["tcpSocket"])["port"] for probe in probes]
    service = the("Service", name)["spec"]
    named += [each["targetPort"] for each in service["ports"]]
    assert set(named) <= ports(name).keys()
    assert value(name, "--port") == str(ports(name)["http"])
    assert [each["name"] for each in given.get("volumeMounts", [])] == [
        each["name"] for each in pod(name).get("volumes", [])
    ]
    labels = template["metadata"]["labels"]
    for selector in (service["selector"], workload(name)["spec"]["selector"]["matchLabels"]):
        assert selector.items() <= labels.items()
    assert not pod(name)["enableServiceLinks"]


def test_the_router_and_the_proxy_name_every_pod_of_the_engines():
    [proxy] = [yaml.safe_load(block) for block in blocks(PAGE, "yaml") if "command" in block]
    for line in (words("router"), [*proxy["command"], *proxy["args"]]):
        for name in ENGINES:
            spec = workload(name)["spec"]
            assert spec["serviceName"] == name
            assert the("Service", name)["spec"]["clusterIP"] == "None"
            urls = [urlsplit(word.partition("=")[2]) for word in line if word.startswith(f"--{name}=")]
            assert [each.hostname for each in urls] == [f"{name}-{index}.{name}" for index in range(spec["replicas"])]
            assert {each.port for each in urls} == {ports(name)["http"]}


def test_the_proxy_of_the_page_understands_its_arguments():
    [proxy] = [yaml.safe_load(block) for block in blocks(PAGE, "yaml") if "command" in block]
    program, *arguments = [*proxy["command"], *proxy["args"]]
    assert program == "kvflow"
    assert build_parser().parse_args(arguments).listen == f"0.0.0.0:{ports('router')['http']}"


def test_the_network_admits_engines_to_kvflow_and_the_router_to_the_api():
    policy = the("NetworkPolicy", "engines")["spec"]
    peers = {name: workload(name)["spec"]["template"]["metadata"]["labels"].items() for name in (*ENGINES, "router")}

    def chosen(selector):
        return {name for name, labels in peers.items() if selector["matchLabels"].items() <= labels}

    assert chosen(policy["podSelector"]) == set(ENGINES)
    admitted = [
        (chosen(rule["from"][0]["podSelector"]), {each["port"] for each in rule["ports"]}) for rule in policy["ingress"]
    ]
    told = ports("prefill")
    assert admitted == [(set(ENGINES), {told["control"], told["tcp-plane"]}), ({"router"}, {told["http"]})]


@pytest.mark.parametrize("name", ENGINES)
def test_a_pod_has_the_time_to_end(name):
    sleep = int(container(name)["lifecycle"]["preStop"]["exec"]["command"][1])
    lease_s = WorkerConfig(engine_id="any").lease_s
    assert sleep >= lease_s
    assert pod(name)["terminationGracePeriodSeconds"] > sleep + int(value(name, "--shutdown-timeout"))


def test_each_image_is_built_on_the_page():
    page = Path(FOLDER.parent / "deploy.md").read_text()
    engines, router = blocks(PAGE, "dockerfile")
    assert {container(name)["image"] for name in (*ENGINES, "router")} == set(
        re.findall(r"`(registry\.example\.com/\S+)`", page)
    )
    assert f":v{container('prefill')['image'].rpartition(':')[2]}\n" in engines
    assert f"vllm-router=={container('router')['image'].rpartition(':')[2]}\n" in router


def test_the_lines_for_rdma_fit_the_container():
    [lines] = [yaml.safe_load(block) for block in blocks(PAGE, "yaml") if "rdma/" in block]
    for name in ENGINES:
        document = copy.deepcopy(workload(name))
        [given] = document["spec"]["template"]["spec"]["containers"]
        assert lines.keys() <= given.keys(), "they take the place of others"
        given.update(lines)
        validate(document)
        assert given["resources"]["limits"].items() >= container(name)["resources"]["limits"].items()
