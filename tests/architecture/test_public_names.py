"""One list of public names, which type checkers see, and signatures that use public types alone."""

import ast
import inspect
import re
import subprocess
import sys
import textwrap
import types
import typing
import zipfile
from dataclasses import is_dataclass
from pathlib import Path

import msgspec
import pytest

import kvflow

ROOT = Path(__file__).parents[2]
PUBLIC = {name: getattr(kvflow, name) for name in kvflow.__all__}
MODULES = [value for value in PUBLIC.values() if inspect.ismodule(value)]

CONSTRUCTED_BY_KVFLOW = {"KVCache", "PullHandle", "ThreadedWorker", "TicketKey", "Worker"}
"""Classes whose constructors are not public."""

PRIVATE = {
    "Environment.*": "a simulator replaces these parts",
    "GroupPlan.*": "the worker binds plans; runs are public",
    "Ticket.members": "the worker calls it",
    "WorkerConfig.security": "a part for one package of kvflow; its settings are those of WorkerConfig",
    "WorkerConfig.tcp": "likewise",
}
"""Members of public classes that users need not know, and why."""


def test_the_stub_exports_every_name_explicitly_once():
    """``make lint`` lets mypy check that each name exists where the stub says."""
    lines = (ROOT / "kvflow" / "__init__.pyi").read_text().splitlines()
    exports = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"from kvflow[.\w]* import (\w+) as \1", line) for line in exports)
    assert [line.split()[3] for line in sorted(exports, key=lambda line: line.split()[3])] == kvflow.__all__
    assert len(set(kvflow.__all__)) == len(kvflow.__all__)


def test_names_are_found_in_a_zip_file(tmp_path):
    archive = tmp_path / "kvflow.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for path in [*(ROOT / "kvflow").rglob("*.py"), ROOT / "kvflow" / "__init__.pyi"]:
            packed.write(path, path.relative_to(ROOT))
    program = f"import sys; sys.path.insert(0, {str(archive)!r}); import kvflow; print(kvflow.__file__, kvflow.errors)"
    done = subprocess.run([sys.executable, "-Pc", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith(f"{archive}/kvflow/__init__.py")


def test_unknown_names_are_refused_with_a_suggestion():
    with pytest.raises(AttributeError, match="has no attribute 'TicketMin'") as caught:
        _ = kvflow.TicketMin
    assert (caught.value.name, caught.value.obj) == ("TicketMin", kvflow)
    assert {*kvflow.__all__, "__version__"} <= set(dir(kvflow))


def definition(value):
    """Return the syntax tree of a function or class."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(value))).body
    return node


def annotations(node):
    """Yield what a function or the body of a class annotates."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg]
            yield from (each.annotation for each in arguments if each and each.annotation)
            if node.returns:
                yield node.returns
        case ast.AnnAssign(target=ast.Name(id=name)) if not name.startswith("_"):
            yield node.annotation


def names_in(annotation):
    """Return the names and dotted names that an annotation uses."""
    match annotation:
        case ast.Constant(value=str(text)):
            return names_in(ast.parse(text, mode="eval").body)
        case ast.Subscript(value=ast.Name(id="Literal")):
            return {"Literal"}
        case ast.Name() | ast.Attribute():
            return {ast.unparse(annotation)}
    return set().union(*map(names_in, ast.iter_child_nodes(annotation)))


def classes_in(value):
    """Return the classes of this repository that a class or an alias stands for."""
    if isinstance(value, type) and not isinstance(value, types.GenericAlias):
        return {value} if value.__module__.partition(".")[0] in ("kvflow", "handshake") else set()
    parts = value if isinstance(value, list) else typing.get_args(value)
    return set().union(*map(classes_in, parts))


def is_public(kind):
    """Return whether a class has a public name, or is defined in a public module."""
    return kind in PUBLIC.values() or sys.modules.get(kind.__module__) in MODULES


def private_types(node, namespace):
    """Return the names in the annotations of a definition that stand for classes without a public name."""
    found = set()
    for name in set().union(*map(names_in, annotations(node))):
        try:
            value = eval(name, namespace)  # a name of our own source
        except NameError:  # imported for type checkers alone
            continue
        if not all(map(is_public, classes_in(value))):
            found.add(name)
    return found


def signatures(name, value):
    """Yield every public signature of a public name: ``Worker.pull`` and what it uses of private types."""
    if inspect.isroutine(value):
        function = inspect.unwrap(value)
        yield name, private_types(definition(function), function.__globals__)
    if not inspect.isclass(value):
        return
    for base in value.__mro__:
        if not base.__module__.startswith("kvflow"):
            continue
        namespace = vars(sys.modules[base.__module__])
        if issubclass(base, msgspec.Struct) or is_dataclass(base):
            for node in [each for each in definition(base).body if isinstance(each, ast.AnnAssign)]:
                yield f"{name}.{ast.unparse(node.target)}", private_types(node, namespace)
        for member, given in vars(base).items():
            function = inspect.unwrap(getattr(given, "fget", None) or getattr(given, "__func__", given))
            hidden = member.startswith("_") and (member != "__init__" or name in CONSTRUCTED_BY_KVFLOW)
            written = inspect.isfunction(function) and function.__code__.co_filename == inspect.getsourcefile(base)
            if written and not hidden:
                yield f"{name}.{member}", private_types(definition(function), namespace)


def leaks():
    """Return the public signatures that use private types."""
    found = [signatures(name, value) for name, value in PUBLIC.items() if not inspect.ismodule(value)]
    return {place: private for each in found for place, private in each if private}


def test_every_type_in_a_public_signature_is_public():
    excused = [place for place in leaks() if place in PRIVATE or f"{place.partition('.')[0]}.*" in PRIVATE]
    assert {place: private for place, private in leaks().items() if place not in excused} == {}
    needed = {place if place in PRIVATE else f"{place.partition('.')[0]}.*" for place in excused}
    assert needed == set(PRIVATE), "an exception that no signature needs"


def test_private_types_are_found():
    hidden = type("Hidden", (), {"__module__": "kvflow.hidden"})
    namespace = {"Ticket": kvflow.Ticket, "Hidden": hidden, "Alias": dict[str, hidden], "Number": int}
    text = "async def pull(a: Ticket, b: 'Hidden | None', *, c: list[Alias] = [], d: Number) -> events.Event: ..."
    assert private_types(ast.parse(text).body[0], namespace) == {"Hidden", "Alias"}
