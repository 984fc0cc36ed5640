"""The manifests of docs/howto/kubernetes, as what Kubernetes makes of them."""

import json
from pathlib import Path

import yaml

FOLDER = Path(__file__).parents[2] / "docs" / "howto" / "kubernetes"
FILES = ("network.yaml", "prefill.yaml", "decode.yaml", "router.yaml")
ENGINES = ("prefill", "decode")


def documents():
    """Return all objects of all files."""
    return [each for name in FILES for each in yaml.safe_load_all((FOLDER / name).read_text())]


def the(kind, name):
    """Return one object."""
    [found] = [each for each in documents() if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def workload(name):
    return the("Deployment" if name == "router" else "StatefulSet", name)


def pod(name):
    """Return the specification of a workload's pods."""
    return workload(name)["spec"]["template"]["spec"]


def container(name):
    """Return the one container of a workload's pods."""
    [found] = pod(name)["containers"]
    return found


def words(name):
    """Return the command line of a container."""
    return [*container(name)["command"], *container(name)["args"]]


def value(name, flag):
    """Return the value of a flag, in one word or two."""
    [found] = [word.partition("=")[2] for word in words(name) if word.startswith(f"{flag}=")] or [
        following for word, following in zip(words(name), words(name)[1:], strict=False) if word == flag
    ]
    return found


def transfer_config(name):
    """Return what ``--kv-transfer-config`` of an engine says."""
    return json.loads(value(name, "--kv-transfer-config"))


def ports(name):
    """Return the ports of a container by their names."""
    return {each["name"]: each["containerPort"] for each in container(name)["ports"]}
