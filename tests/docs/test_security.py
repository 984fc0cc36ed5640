"""The page on security lists every number from outside: its checks and tests are there, and no message is left out."""

import ast
import importlib
import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from msgspec import inspect as kinds

import handshake.messages
import kvflow.tools.bench.source
import kvflow.tools.demo.messages
from kvflow.ids import ReaderId
from kvflow.leases.tickets import Grant
from kvflow.reads.backend import Envelope
from kvflow.reads.tcp.wire import Layout
from kvflow.rendezvous import questions
from kvflow.rendezvous.endpoint import Advertisement
from kvflow.tools.proxy import completions
from kvflow.worker.snapshot import Inspection
from tests.helpers.loops import looped
from tests.helpers.sources import ROOT, product, tree_of

from .pages import require_test

PAGE = (ROOT / "docs" / "explanation" / "security.md").read_text()
HEADING = "## Numbers from outside\n"
COLUMNS = ["input", "who sends it", "checked by", "bound", "at most it costs", "shown by"]

WIRE = {
    "handshake/codec.py": [handshake.messages.AnyMessage],
    "kvflow/leases/tickets.py": [Grant],
    "kvflow/rendezvous/endpoint.py": [Advertisement],
    "kvflow/rendezvous/questions.py": [questions.PeerQuestion, questions.PeerAnswer],
    "kvflow/reads/backend.py": [Envelope],
    "kvflow/reads/tcp/access.py": [ReaderId],
    "kvflow/reads/tcp/wire.py": [Layout],
    "kvflow/worker/snapshot.py": [Inspection],
    "kvflow/tools/proxy/completions.py": [
        completions._LongFields,
        completions._PrefillAnswer,
        completions._ErrorAnswer,
        completions._TransferParams,
    ],
    "kvflow/tools/demo/engine.py": [
        kvflow.tools.demo.messages.PromptRequest,
        kvflow.tools.demo.messages.OfferedPrompt,
    ],
    "kvflow/tools/bench/source.py": [kvflow.tools.bench.source.SourceRequest],
}
"""Modules that read what others send -> what they read it as."""

UNPACKED = {
    "kvflow/reads/nixl/metadata.py": {"kvflow.reads.backend:Envelope.blob"},
    "kvflow/reads/tcp/opening.py": {"kvflow.reads.tcp.opening:ReaderHello"},
    "kvflow/reads/tcp/wire.py": {"kvflow.reads.tcp.wire:ReadRequest"},
    "kvflow/reads/tcp/runs.py": {"runs of a read over TCP"},
    "kvflow/reads/tcp/connection.py": {"frames of an answer over TCP", "epochs at the end of an answer over TCP"},
}
"""Modules that take numbers out of bytes that others send -> the inputs of their rows."""

NOT_UNPACKED = {
    "kvflow/reads/tcp/stream.py": "addresses of this process",
    "handshake/intake.py": "the kernel's counters of a socket",
    "handshake/sockets.py": "what ZeroMQ reports of our own sockets",
    "kvflow/tools/bench/ceilings.py": "requests of a benchmark to the source that it has named",
    "kvflow/leases/blocks.py": "counts of our own, and integers of a list, copied by Python itself",
    "kvflow/memory/device.py": "memory of this process",
}
"""Modules that take numbers out of bytes that nobody else sends, and whose they are."""

NOT_WIRE = {
    "kvflow/tools/bench/ceilings.py": "replies of a source that the benchmark has named",
    "kvflow/tools/cli/explain.py": "flags",
    "kvflow/tools/cli/config.py": "files that the user names",
    "kvflow/tools/cli/layout.py": "flags",
    "kvflow/tools/cli/ticket.py": "JSON around a ticket that the user gives; leases.tickets reads the ticket",
    "kvflow/config.py": "settings",
    "kvflow/tools/demo/run.py": "answers of engines that the demo names",
    "kvflow/tools/doctor/live.py": "answers of servers that the user names: bounded, and nothing is sized by them",
    "kvflow/tools/doctor/probe.py": "a worker that the user names, which has the secret",
    "kvflow/integrations/vllm/admission.py": "the engine's own scheduler, whose MAC is checked first",
    "kvflow/integrations/vllm/messages.py": "commands of the engine's own scheduler",
    "kvflow/integrations/vllm/settings.py": "settings",
    "kvflow/layout/manifest.py": "manifests of this process; a peer's are read by rendezvous.endpoint",
    "kvflow/models/config.py": "files that the user names",
    "kvflow/models/families.py": "options of the caller, and files of this package",
    "kvflow/tools/trace/records.py": "logs that the user names: bounded by the types, and skipped if broken",
    "kvflow/validation.py": "settings, and specs of a caller",
}
"""Modules that decode what nobody else sends, and what that is."""


def read_table(page):
    """Return the rows of the table, without its head."""
    lines = [line for line in page.partition(HEADING)[2].splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == COLUMNS
    return cells[2:]


ROWS = read_table(PAGE)


def names(cell):
    """Return what a cell names: ``module:object``."""
    return re.findall(r"`([\w.]+:[\w.]+)`", cell)


def find(name):
    """Return the object of a name; a field of a Struct is its type."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        fields = {field.name: field.type for field in msgspec.structs.fields(found)} if is_struct(found) else {}
        found = fields[part] if part in fields else getattr(found, part)
    return found


def is_struct(value):
    return isinstance(value, type) and issubclass(value, Struct)


def name_of(kind):
    return f"{kind.__module__}:{kind.__qualname__}"


def within(kind):
    """Return the types that a type consists of."""
    match kind:
        case kinds.UnionType(types=types) | kinds.TupleType(item_types=types):
            return list(types)
        case kinds.DictType(key_type=key, value_type=value):
            return [key, value]
        case kinds.Metadata(type=inner):
            return [inner]
        case kinds.CollectionType(item_type=item):
            return [item]
        case _:
            return []


BOUNDED = (kinds.BoolType, kinds.NoneType, kinds.LiteralType, kinds.EnumType, kinds.StructType)


def is_bounded(kind):
    """Tell whether a type says how large, or how long, a value may be."""
    match kind:
        case kinds.IntType() | kinds.FloatType():
            low = kind.ge is not None or kind.gt is not None
            return low and (kind.le is not None or kind.lt is not None)
        case kinds.StrType(pattern=str(pattern), max_length=None):
            return re.search(r"[*+]|,\}", pattern) is None
        case kinds.StrType() | kinds.BytesType() | kinds.ByteArrayType():
            return kind.max_length is not None
        case kinds.CollectionType() | kinds.DictType():
            return kind.max_length is not None and all(map(is_bounded, within(kind)))
        case kinds.UnionType() | kinds.TupleType() | kinds.Metadata():
            return all(map(is_bounded, within(kind)))
    return isinstance(kind, BOUNDED)


def structs_of(root):
    """Return every Struct that is read with a type, and its fields."""
    found = {}
    waiting = [kinds.type_info(root)]
    while waiting:
        kind = waiting.pop()
        if isinstance(kind, kinds.StructType):
            if kind.cls in found:
                continue
            found[kind.cls] = {field.name: field.type for field in kind.fields}
            waiting += found[kind.cls].values()
        waiting += within(kind)
    return found


STRUCTS = {kind: fields for roots in WIRE.values() for root in roots for kind, fields in structs_of(root).items()}
NAMED = {name for row in ROWS for name in names(row[0])}


def uncovered(structs, named):
    """Return the Structs without a row, and the fields without a bound in their type and without a row of their own."""
    lacking = {name_of(kind) for kind in structs} - named
    unbounded = {
        f"{name_of(kind)}.{name}" for kind, fields in structs.items() for name in fields if not is_bounded(fields[name])
    }
    return sorted(lacking | (unbounded - named))


def test_every_row_is_complete():
    assert len(ROWS) > 25
    for row in ROWS:
        assert len(row) == len(COLUMNS)
        assert all(row), row


@looped("name", sorted({name for row in ROWS for name in names(row[2])}))
def test_a_check_that_is_named_is_there(name):
    assert callable(find(name))


def test_every_row_names_a_check():
    assert all(names(row[2]) for row in ROWS)


@looped("name", sorted(NAMED))
def test_an_input_that_is_named_is_there(name):
    find(name)


@looped("cell", [row[5] for row in ROWS])
def test_a_test_that_is_named_is_there(cell):
    require_test(re.fullmatch(r"`(tests/[\w/]+\.py::\w+)`", cell)[1])


MEASURED = {
    "engine and number of ranks in `handshake.messages:Identity` of a reader that releases",
    "requests to the HTTP server of a worker",
    "connections to `kvflow proxy`, and headers",
    "`kvflow.tools.proxy.completions:_LongFields`",
    "`kvflow.tools.proxy.completions:_LongFields.prompt`",
    "`kvflow.leases.tickets:Grant`",
}
"""Inputs whose test measures what they cost; the TCP plane's tests compare its whole table with what it holds."""


def unproven(row):
    """Return the figures of a row's cost that are not its bound."""
    return [figure for figure in re.findall(r"\d[\d,.]*(?: \w+)?", row[4]) if figure not in row[3]]


def test_every_figure_is_the_bound_or_is_measured():
    found = {
        row[0].partition(", `")[0]
        for row in ROWS
        if unproven(row) and "TCP" not in row[0] and "reads.tcp" not in row[0]
    }
    assert found == MEASURED


def test_every_message_and_every_field_without_a_bound_has_a_row():
    assert len(STRUCTS) > 30
    assert uncovered(STRUCTS, NAMED) == []


def decoders(tree):
    """Tell whether a module decodes into types, or any JSON."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="Decoder" | "convert" | "loads")):
                return True
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="json" | "msgpack"), attr="decode")):
                return True
    return False


def unpacks(tree):
    """Tell whether a module takes numbers out of bytes."""
    names = {"unpack", "unpack_from", "iter_unpack", "frombuffer", "from_bytes"}
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return any(isinstance(func, ast.Attribute) and func.attr in names for func in calls)


def modules(test):
    """Return the modules of which something is true."""
    return {str(path.relative_to(ROOT)) for path in product() if test(tree_of(path))}


def test_every_module_that_decodes_says_whose_words_it_reads():
    assert modules(decoders) == WIRE.keys() | NOT_WIRE.keys()


def test_every_module_that_unpacks_says_whose_bytes_it_reads():
    assert modules(unpacks) == UNPACKED.keys() | NOT_UNPACKED.keys()


@looped("name", sorted(name for names in UNPACKED.values() for name in names))
def test_what_is_unpacked_has_a_row(name):
    assert name in NAMED | {row[0] for row in ROWS}


class Inner(Struct):
    free: int


class Outer(Struct):
    held: Annotated[int, Meta(ge=0, le=1)]
    half: Annotated[int, Meta(ge=0)]
    text: str
    word: Annotated[str, Meta(pattern="^[a-z]{3}$")]
    words: Annotated[list[str], Meta(max_length=3)]
    some: tuple[Annotated[int, Meta(ge=0, le=1)], ...]
    inner: Annotated[dict[Annotated[str, Meta(max_length=1)], Inner], Meta(max_length=1)]
    either: Annotated[float, Meta(ge=0, le=1)] | None
    any: Any


def test_what_has_no_bound_or_no_row_is_noticed():
    outer, inner = name_of(Outer), name_of(Inner)
    free = [f"{outer}.{name}" for name in ("half", "text", "words", "some", "any")]
    expected = sorted([outer, inner, f"{inner}.free", *free])
    assert uncovered(structs_of(Outer), set()) == expected
    assert uncovered(structs_of(Outer), {*expected} - {f"{outer}.some"}) == [f"{outer}.some"]
