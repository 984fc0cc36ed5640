"""What is installed: releases, the encryption of ZeroMQ, variants of NIXL, vLLM's plugin, torch's allocator."""

import importlib.metadata
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

import kvflow
from kvflow.tools.doctor import facts
from kvflow.version import __version__


def by_subject(**how):
    return {finding.subject: finding for finding in facts.examine_software(**{"on_gpu": False} | how)}


@pytest.fixture
def installed(monkeypatch):
    """Make releases appear installed: all others stay as they are."""

    def install(**releases):
        real = importlib.metadata.version

        def version(name):
            if name not in releases:
                return real(name)
            if releases[name] is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return releases[name]

        monkeypatch.setattr(importlib.metadata, "version", version)

    return install


def test_the_environment_of_the_tests_is_complete():
    findings = by_subject()
    assert {finding.status for finding in findings.values()} <= {"ok", "note"}
    assert findings["ZeroMQ"].evidence == "encrypts with CURVE"
    assert findings["NIXL"].code == ""
    assert findings["kvflow"].evidence == f"{__version__}, {Path(kvflow.__file__).parent}"


def test_bounds_are_those_of_the_package_and_of_the_constraints(repository):
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    least = dict(requirement.split(">=") for requirement in project["dependencies"])
    pinned = dict(
        line.split("==") for line in (repository / "constraints.txt").read_text().splitlines() if "==" in line
    )
    assert {name: (least[name], pinned[name]) for name in least} == facts.PACKAGES


@pytest.mark.parametrize(
    ("release", "code", "status"),
    [
        (None, "package_missing", "failed"),
        ("0.18.6", "release_unsupported", "failed"),
        ("0.99.0", "", "note"),
        ("0.22.0", "", "ok"),
    ],
)
def test_the_release_of_a_package_is_judged(installed, release, code, status):
    installed(msgspec=release)
    found = facts.check_package("msgspec", *facts.PACKAGES["msgspec"])
    assert (found.code, found.status) == (code, status)
    assert bool(found.remedy) == (status != "ok")


def test_a_missing_nixl_is_noticed(installed, monkeypatch):
    installed(**dict.fromkeys(facts.VARIANTS))
    monkeypatch.setattr(facts, "_is_there", lambda _: False)
    found = by_subject()["NIXL"]
    assert (found.code, found.status) == ("nixl_missing", "warning")


def test_a_nixl_without_its_variant_is_noticed(installed, monkeypatch):
    installed(**{**dict.fromkeys(facts.VARIANTS), "nixl": "1.5.1"})
    monkeypatch.setattr(facts, "_is_there", lambda name: name == "nixl")
    found = by_subject()["NIXL"]
    assert found.code == "nixl_missing"
    assert "without the variant" in found.evidence


def test_an_old_nixl_is_noticed(installed):
    installed(**{**dict.fromkeys(facts.VARIANTS), "nixl-cu12": "1.4.0"})
    assert by_subject()["NIXL"].code == "release_unsupported"


def plugins(*values):
    return lambda **_: [SimpleNamespace(value=value) for value in values]


@pytest.mark.parametrize(
    "case",
    [
        ("0.32.0+cpu", ("kvflow.integrations.vllm:register",), None, ""),
        ("0.32.0", ("other.plugin:register",), None, "vllm_plugin_missing"),
        ("0.32.0", ("kvflow.integrations.vllm:register",), "other", "vllm_plugin_missing"),
        ("0.32.0", ("kvflow.integrations.vllm:register",), "other,kvflow", ""),
        ("0.12.0", ("kvflow.integrations.vllm:register",), None, "config_invalid"),
    ],
    ids=["registered", "not registered", "left out", "named", "old"],
)
def test_vllm_and_its_plugin_are_judged(installed, monkeypatch, case):
    release, listed, allowed, code = case
    installed(vllm=release)
    monkeypatch.setattr(importlib.metadata, "entry_points", plugins(*listed))
    if allowed is None:
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    else:
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
    assert by_subject()["vLLM"].code == code


@pytest.mark.parametrize("name", facts.ALLOCATOR_VARIABLES)
@pytest.mark.parametrize(("on_gpu", "status"), [(True, "failed"), (False, "warning")])
def test_expandable_segments_are_noticed(monkeypatch, name, on_gpu, status):
    monkeypatch.setenv(name, "max_split_size_mb:512,expandable_segments:True")
    found = by_subject(on_gpu=on_gpu)[name]
    assert (found.code, found.status) == ("expandable_segments", status)
    monkeypatch.setenv(name, "expandable_segments:False")
    assert name not in by_subject(on_gpu=on_gpu)
