"""What importing the packages loads, and who may load what. The layers are import-linter's, in pyproject.toml."""

import ast
import importlib
import json
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import kvflow
from tests.helpers.loops import looped
from tests.helpers.sources import ROOT, product, text_of, tree_of

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


def test_names_that_need_no_memory_load_no_torch():
    names = "Ticket, WorkerConfig, TransferReport, plan_transfer, plan_groups, errors"
    assert "torch" not in loaded_by(f"from kvflow import {names}")


def test_every_public_name_can_be_had_and_none_loads_nixl():
    loaded = loaded_by("import kvflow\nassert kvflow.__all__\nfor n in kvflow.__all__: getattr(kvflow, n)")
    assert "torch" in loaded  # of the cache: this is what the others are compared with
    assert not NIXL & loaded


IMPORTERS = {
    "nixl": {"kvflow/reads/nixl/binding.py"},
    "nixl_cu12": {"kvflow/reads/nixl/binding.py"},
    "nixl_cu13": {"kvflow/reads/nixl/binding.py"},
    "torch": {"kvflow/memory", "kvflow/tools/demo", "kvflow/integrations"},
    "zmq": {
        "handshake/intake.py",
        "handshake/sockets.py",
        "handshake/security.py",
        "kvflow/integrations/vllm/admission.py",
    },
    "rich": {"kvflow/tools/demo/results.py", "kvflow/tools/demo/run.py"},
    "aiohttp": {
        "kvflow/tools/demo/engine.py",
        "kvflow/tools/demo/run.py",
        "kvflow/tools/doctor/live.py",
        "kvflow/tools/proxy/server.py",
    },
    "ray": {"kvflow/integrations/ray.py"},
    "vllm": {
        "kvflow/integrations/vllm/connector.py",
        "kvflow/integrations/vllm/caches.py",
        "kvflow/integrations/vllm/engine.py",
        "kvflow/integrations/vllm/__init__.py",
        "kvflow/integrations/vllm/scheduler.py",  # types alone
        "kvflow/integrations/vllm/stats.py",
        "kvflow/integrations/vllm/versions.py",
    },
}
"""Who may import a heavy library: modules or folders."""

DYNAMIC_IMPORTERS = {"kvflow/__init__.py", "kvflow/tools/cli/small.py", "kvflow/reads/nixl/binding.py"}
"""Who may import by a computed name, which no static check sees: lazy public names, benchmarks, variants of NIXL."""


@cache
def imports(path: Path) -> set[str]:
    """Return the top-level names that a module imports."""
    found = set()
    for node in ast.walk(tree_of(path)):
        match node:
            case ast.Import(names=names):
                found |= {alias.name.split(".")[0] for alias in names}
            case ast.ImportFrom(module=str(module), level=0):
                found.add(module.split(".")[0])
    return found


@looped("library", sorted(IMPORTERS))
def test_heavy_libraries_have_few_importers(library):
    for path in product():
        if library in imports(path):
            name = path.relative_to(ROOT)
            assert {str(name), *map(str, name.parents)} & IMPORTERS[library], f"{name} imports {library}"


def test_imports_by_computed_name_are_few():
    callers = {str(path.relative_to(ROOT)) for path in product() if "import_module" in text_of(path)}
    assert callers == DYNAMIC_IMPORTERS


def test_imports_are_found(tmp_path):
    module = tmp_path / "module.py"
    module.write_text("import a.b\ndef f():\n    from c.d import e\n    from . import g\n")
    assert imports(module) == {"a", "c"}


def graph(root: Path, packages: tuple[str, ...]) -> dict[str, set[str]]:
    """Return which modules of some packages each of their modules imports, in functions and for type checkers too."""
    paths = [path for package in packages for path in sorted((root / package).rglob("*.py"))]
    names = {path: ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for path in paths}
    known = set(names.values())
    found = {}
    for path, name in names.items():
        imported = set()
        for node in ast.walk(tree_of(path)):
            match node:
                case ast.Import(names=aliases):
                    imported |= {alias.name for alias in aliases}
                case ast.ImportFrom(module=str(module), names=aliases, level=0):
                    members = {f"{module}.{alias.name}" for alias in aliases}
                    imported |= members & known or {module}
        found[name] = imported & known
    return found


def circle(modules: dict[str, set[str]]) -> list[str]:
    """Return modules that import each other in a circle, the first one again at the end; empty if there is none."""
    try:
        TopologicalSorter(modules).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_modules_import_each_other_in_no_circle():
    modules = graph(ROOT, ("kvflow", "handshake"))
    assert {"kvflow.tools.cli", "kvflow.worker.runtime", "handshake.client"} <= set(modules)
    assert circle(modules) == []


@pytest.mark.parametrize(
    "back", ["from pack.a import A", "from pack import a", "import pack.a", "def f():\n    from pack.a import A"]
)
def test_a_circle_is_found(tmp_path, back):
    folder = tmp_path / "pack"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "a.py").write_text("import sys\nif TYPE_CHECKING:\n    from pack.b import B\n")
    (folder / "b.py").write_text("from pack import c\n")
    (folder / "c.py").write_text("")
    assert circle(graph(tmp_path, ("pack",))) == []
    (folder / "b.py").write_text(back)
    tree_of.cache_clear()
    text_of.cache_clear()
    found = circle(graph(tmp_path, ("pack",)))
    assert found[0] == found[-1]
    assert set(found) == {"pack.a", "pack.b"}


def replacements(module: ast.Module) -> list[int]:
    """Return the lines that replace an attribute by its name, which nobody notices when it is renamed."""
    found = []
    for node in ast.walk(module):
        match node:
            case ast.Call(func=ast.Name(id="setattr" | "delattr") | ast.Attribute(attr="__setattr__" | "__delattr__")):
                found.append(node.lineno)
            case ast.Subscript(
                value=ast.Call(func=ast.Name(id="vars")) | ast.Attribute(attr="__dict__"), ctx=ast.Store() | ast.Del()
            ):
                found.append(node.lineno)
    return found


def test_nothing_is_replaced_by_its_name():
    found = {str(path.relative_to(ROOT)): replacements(tree_of(path)) for path in product()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_replacements_are_found():
    text = 'setattr(a, "b", 1)\nvars(a)["b"] = 1\na.__dict__["b"] = 1\nobject.__setattr__(a, "b", 1)\nvars(a)["b"]\n'
    assert replacements(ast.parse(text)) == [1, 2, 3, 4]


def test_the_package_contains_no_data_plane_without_a_fence():
    names = {node.name for path in product() for node in ast.walk(tree_of(path)) if hasattr(node, "name")}
    assert not {name for name in names if isinstance(name, str) and "fenceless" in name.lower()}
    assert not {path.name for path in product()} & {"fence.py", "fenceless.py"}
    assert not {path.name for path in product() if "tests" in imports(path)}


def foreign_imports(path: Path) -> set[str]:
    """Return what a module imports of kvflow and handshake, as ``module`` or ``module:name``."""
    found = set()
    for node in ast.walk(tree_of(path)):
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
            small = module in ("kvflow.errors", "kvflow.addresses")  # there is one reader of host and port
            small |= module in ("kvflow.contents", "kvflow.routing")  # one way to make digests, and to read parameters
            small |= imported == "kvflow.observability.logs:Repeats"  # and one way to warn once
            small |= imported == "kvflow.observability.logs:EventLog"  # and one form of records
            small |= imported == "kvflow.validation:describe_refusal"  # and one way to say what a setting must be
            small |= imported == "kvflow.events:TIMED_OUT"  # and one list of ends that came for want of a reader
            small |= imported == "kvflow.ids:Newest"  # and one dict that forgets its oldest
            assert own or small or (module == "kvflow" and name in public), f"{path}: {imported}"


def test_examples_know_public_names_only():
    for path in sorted((ROOT / "docs" / "examples").rglob("*.py")):
        for imported in foreign_imports(path):
            module, _, name = imported.partition(":")
            listed = getattr(importlib.import_module(module), "__all__", [name])  # errors and events have no list
            assert module.removeprefix("kvflow").removeprefix(".") in {"", *kvflow.__all__}, f"{path}: {imported}"
            assert not name or name in listed, f"{path}: {imported}"


def test_the_pure_parts_of_an_integration_load_no_engine():
    loaded = loaded_by("import kvflow.integrations.vllm.scheduler, kvflow.integrations.vllm.worker")
    assert not loaded & {"vllm", "torch"}
