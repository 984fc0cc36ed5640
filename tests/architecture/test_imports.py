"""What importing the packages loads, and who may load what. The layers are import-linter's, in pyproject.toml."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import kvflow

ROOT = Path(__file__).parents[2]
NIXL = {"nixl", "nixl_cu12", "nixl_cu13"}


def loaded_by(statement: str) -> set[str]:
    """Return the top-level modules that a statement loads in a fresh interpreter."""
    program = (
        f"import json, sys\n{statement}\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("package", ["kvflow", "handshake"])
def test_import_loads_neither_torch_nor_nixl(package):
    assert loaded_by(f"import {package}") & ({"torch"} | NIXL) == set()


def test_the_public_names_are_there_and_only_memory_loads_torch():
    names = "Ticket, WorkerConfig, TransferReport, plan_transfer, plan_groups, errors"
    assert "torch" not in loaded_by(f"from kvflow import {names}")
    assert "torch" in loaded_by("from kvflow import allocate")


def test_every_public_name_can_be_had():
    assert "torch" in loaded_by("import kvflow\nassert kvflow.__all__\nfor n in kvflow.__all__: getattr(kvflow, n)")


def test_nixl_is_loaded_only_when_asked_for():
    assert not NIXL & loaded_by("from kvflow import open_worker, allocate")


IMPORTERS = {
    "nixl": {"kvflow/transport/nixl_binding.py"},
    "nixl_cu12": {"kvflow/transport/nixl_binding.py"},
    "nixl_cu13": {"kvflow/transport/nixl_binding.py"},
    "torch": {"kvflow/memory", "kvflow/demo", "kvflow/integrations"},
    "zmq": {
        "handshake/arrivals.py",
        "handshake/sockets.py",
        "handshake/security.py",
        "kvflow/integrations/vllm/admission.py",
    },
    "rich": {"kvflow/demo/display.py"},
    "aiohttp": {"kvflow/demo/proxy.py"},
    "ray": {"kvflow/integrations/ray"},
    "vllm": {
        "kvflow/integrations/vllm/connector.py",
        "kvflow/integrations/vllm/cpu_attention.py",
        "kvflow/integrations/vllm/engine.py",
        "kvflow/integrations/vllm/metadata.py",
        "kvflow/integrations/vllm/plugin.py",
        "kvflow/integrations/vllm/scheduler.py",  # types alone
        "kvflow/integrations/vllm/stats.py",
        "kvflow/integrations/vllm/versions.py",
    },
}
"""Who may import a heavy library: modules or folders."""

DYNAMIC_IMPORTERS = {"kvflow/__init__.py", "kvflow/cli/bench.py", "kvflow/transport/nixl_binding.py"}
"""Who may import by a computed name, which no static check sees: lazy public names, benchmarks, variants of NIXL."""


def imports(path: Path) -> set[str]:
    """Return the top-level names that a module imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                found |= {alias.name.split(".")[0] for alias in names}
            case ast.ImportFrom(module=str(module), level=0):
                found.add(module.split(".")[0])
    return found


def modules() -> list[Path]:
    return [path for package in ("kvflow", "handshake") for path in sorted((ROOT / package).rglob("*.py"))]


@pytest.mark.parametrize("library", sorted(IMPORTERS))
def test_heavy_libraries_have_few_importers(library):
    for path in modules():
        if library in imports(path):
            name = path.relative_to(ROOT)
            assert {str(name), *map(str, name.parents)} & IMPORTERS[library], f"{name} imports {library}"


def test_imports_by_computed_name_are_few():
    callers = {str(path.relative_to(ROOT)) for path in modules() if "import_module" in path.read_text()}
    assert callers == DYNAMIC_IMPORTERS


def test_imports_are_found(tmp_path):
    module = tmp_path / "module.py"
    module.write_text("import a.b\ndef f():\n    from c.d import e\n    from . import g\n")
    assert imports(module) == {"a", "c"}


def replacements(text: str) -> list[int]:
    """Return the lines that replace an attribute by its name, which nobody notices when it is renamed."""
    found = []
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Call(func=ast.Name(id="setattr" | "delattr") | ast.Attribute(attr="__setattr__" | "__delattr__")):
                found.append(node.lineno)
            case ast.Subscript(
                value=ast.Call(func=ast.Name(id="vars")) | ast.Attribute(attr="__dict__"), ctx=ast.Store() | ast.Del()
            ):
                found.append(node.lineno)
    return found


def test_nothing_is_replaced_by_its_name():
    found = {str(path.relative_to(ROOT)): replacements(path.read_text()) for path in modules()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_replacements_are_found():
    text = 'setattr(a, "b", 1)\nvars(a)["b"] = 1\na.__dict__["b"] = 1\nobject.__setattr__(a, "b", 1)\nvars(a)["b"]\n'
    assert replacements(text) == [1, 2, 3, 4]


def test_the_package_contains_no_data_plane_without_a_fence():
    names = {node.name for path in modules() for node in ast.walk(ast.parse(path.read_text())) if hasattr(node, "name")}
    assert not {name for name in names if isinstance(name, str) and "fenceless" in name.lower()}
    assert not {path.name for path in modules()} & {"fence.py", "fenceless.py"}
    assert not {path for path in modules() if "tests" in imports(path)}


def foreign_imports(path: Path) -> set[str]:
    """Return what a module imports of kvflow and handshake, as ``module`` or ``module:name``."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                found |= {alias.name for alias in names if alias.name.split(".")[0] in ("kvflow", "handshake")}
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] in ("kvflow", "handshake"):
                found |= {f"{module}:{alias.name}" for alias in names}
    return found


def test_integrations_know_public_names_only():
    public = set(kvflow.__all__)
    for path in sorted((ROOT / "kvflow" / "integrations").rglob("*.py")):
        for imported in foreign_imports(path):
            module, _, name = imported.partition(":")
            own = module.startswith("kvflow.integrations.")
            assert own or module == "kvflow.errors" or (module == "kvflow" and name in public), f"{path}: {imported}"


def test_the_pure_parts_of_an_integration_load_no_engine():
    loaded = loaded_by("import kvflow.integrations.vllm.scheduler, kvflow.integrations.vllm.worker")
    assert not loaded & {"vllm", "torch"}
