"""What a release contains, and that it works without a checkout: built from an sdist, installed in a bare folder."""

import os
import re
import subprocess
import sys
import venv
import zipfile
from email import message_from_bytes
from email.policy import EmailPolicy
from pathlib import Path

import msgspec
import pytest

import kvflow
from tests.architecture.test_imports import IMPORTERS

ROOT = Path(__file__).parents[2]
ENGINES = ("ray", "vllm")
"""Libraries that this environment does not have."""

IMPORT_ALL = """
import importlib, pkgutil, sys
failed = {}
for package in ("kvflow", "handshake"):
    root = importlib.import_module(package)
    for found in pkgutil.walk_packages(root.__path__, f"{package}.", onerror=lambda name: None):
        if found.name.endswith("__main__"):
            continue  # a program
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            failed[found.name] = error.name
print(*(f"{module} {missing}" for module, missing in failed.items()), sep="\\n")
"""


def run(*command: object, **options: object) -> "subprocess.CompletedProcess[str]":
    """Run a program as a user does who has no checkout: nothing of this repository is on its path."""
    ours = ("PYTHON", "COV", "PIP_", "MAKE")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    arguments = [str(part) for part in command]
    return subprocess.run(arguments, check=False, capture_output=True, text=True, timeout=300, env=inherited, **options)


def build(*command: object) -> None:
    done = run(sys.executable, "-P", "-m", *command, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel that users get from an index: ``make wheel`` builds it from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    # The environment is there, and must not change under the tests that run beside this one.
    environment = ("--old-file=.venv/.installed", f"BIN={Path(sys.executable).parent}")
    made = run("make", *environment, "wheel", f"DIST={folder}", cwd=ROOT)
    assert made.returncode == 0, made.stdout + made.stderr
    sdist, built = sorted(folder.iterdir(), key=lambda path: path.name.endswith(".whl"))
    assert (sdist.name, built.suffix) == (f"kvflow-{kvflow.__version__}.tar.gz", ".whl")
    return built


@pytest.fixture(scope="module")
def programs(wheel, tmp_path_factory):
    """The programs of an environment with that wheel, which shares what kvflow depends on and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    build("pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps", wheel)
    (packages,) = folder.glob("lib/python*/site-packages")
    # Such a file adds a folder, but reads no files of its kind there: the editable install of this checkout stays out.
    (packages / "shared.pth").write_text(f"{Path(msgspec.__file__).parents[1]}\n")
    return folder / "bin"


def test_the_wheel_has_every_file_of_both_packages_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    info = f"kvflow-{kvflow.__version__}.dist-info"
    shipped = {
        str(path.relative_to(ROOT))
        for package in ("kvflow", "handshake")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
    assert names - shipped == {
        f"{info}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    }
    assert shipped <= names
    data = {"kvflow/py.typed", "handshake/py.typed", "kvflow/__init__.pyi", "kvflow/models/configs/gpt-2.json"}
    data |= {"kvflow/tools/trace/page.html"}
    assert data <= shipped
    suffixes = {Path(name).suffix for name in shipped if name not in data}
    assert suffixes == {".py", ".json"}


def test_the_wheel_states_version_license_and_what_it_needs(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        stated = message_from_bytes(archive.read(name), policy=EmailPolicy())
    assert (stated["Name"], stated["Version"]) == ("kvflow", kvflow.__version__)
    assert (stated["License-Expression"], stated["Requires-Python"]) == ("Apache-2.0", ">=3.11")
    assert stated.get_payload().startswith((ROOT / "README.md").read_text()[:50])
    needed = stated.get_all("Requires-Dist")
    always = {each.partition(">=")[0] for each in needed if "extra ==" not in each}
    assert always == {"msgspec", "nixl", "numpy", "pyzmq", "structlog", "torch", "uvloop"}
    assert stated.get_all("Provides-Extra") == ["demo", "metrics", "otel", "proxy", "tls"]


def test_every_installed_module_can_be_imported_without_a_checkout(programs, tmp_path):
    done = run(programs / "python", "-c", IMPORT_ALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    missing = dict(line.split() for line in done.stdout.splitlines())
    assert set(missing.values()) <= set(ENGINES)
    for module, library in missing.items():
        path = Path(*module.split(".")).with_suffix(".py")
        assert {str(path), *map(str, path.parents)} & {*IMPORTERS["ray"], *IMPORTERS["vllm"]}, f"{module}: {library}"


def test_vllm_finds_the_plugin_of_the_wheel(programs, tmp_path):
    program = """
from importlib.metadata import entry_points
import kvflow
(plugin,) = entry_points(group="vllm.general_plugins", name="kvflow")
print(plugin.load().__module__, kvflow.__file__)
"""
    done = run(programs / "python", "-c", program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    module, path = done.stdout.split()
    assert module == "kvflow.integrations.vllm"
    assert Path(path).is_relative_to(programs.parent)


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        ("--version", f"kvflow {kvflow.__version__}\n"),
        ("--help", "Move KV caches between prefill and decode workers."),
        ("demo --help", "usage: kvflow demo"),
        ("proxy --help", "usage: kvflow proxy"),
        ("bench --help", "usage: kvflow bench"),
        ("layout gpt-2", "gpt-2"),
    ],
)
def test_the_installed_program_runs_without_a_checkout(programs, tmp_path, arguments, printed):
    done = run(programs / "kvflow", *arguments.split(), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert printed in done.stdout


@pytest.mark.nixl
@pytest.mark.processes
def test_the_demo_runs_without_a_checkout(programs, tmp_path):
    done = run(programs / "python", "-m", "kvflow", "demo", "--prompts", "2", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert done.stdout.count("64 of 64") == 2  # tokens, in each of two layouts
    (command,) = re.findall("where the time went: (.*)\n", done.stdout)
    shown = run("bash", "-c", command, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr


@pytest.mark.parametrize("command", ["bench loop", "bench idle"])
def test_commands_of_a_checkout_say_that_they_need_one(programs, tmp_path, command):
    done = run(programs / "kvflow", *command.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(
        f"kvflow {command} needs a checkout of kvflow's repository: kvflow was imported from "
    )
    assert done.stderr.count("\n") == 1
