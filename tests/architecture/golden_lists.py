"""Lists of what others rely on, as text: public names with their signatures, wire formats, and examples of them.

python -m tests.architecture.golden_lists    # write all of them, in tests/golden
"""

import ast
import enum
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
from msgspec.inspect import StructType, Type

import handshake.codec
import handshake.messages
import handshake.security
import kvflow
from kvflow import contents
from kvflow.errors import KvflowError
from kvflow.integrations.vllm import admission, messages
from kvflow.layout.manifest import MANIFEST_SCHEMA
from kvflow.leases import tickets
from kvflow.reads import backend
from kvflow.reads.tcp import opening, wire
from kvflow.rendezvous import questions
from kvflow.rendezvous.endpoint import Advertisement
from kvflow.worker.snapshot import Inspection
from tests.architecture import golden_bytes
from tests.architecture.golden_bytes import OFFER
from tests.docs.api_page import MADE_BY_KVFLOW, fields, is_record, members, public_names, signature

GOLDEN = Path(__file__).parents[1] / "golden"
ATTRIBUTES = re.compile(r"^Attributes:\n((?: .*\n|\n)+)", re.MULTILINE)

# --- public names ---


def names() -> str:
    """Return every public name with its signature: a line for each function, field, method, property and alias."""
    found = public_names()
    for module in (getattr(kvflow, name) for name in kvflow.__all__):
        if isinstance(module, ModuleType) and not hasattr(module, "__all__"):
            for name, value in vars(module).items():
                if inspect.isclass(value) and value.__module__ == module.__name__ and not name.startswith("_"):
                    found[f"{module.__name__.partition('.')[2]}.{name}"] = value
    return "".join(f"{line}\n" for name in sorted(found) for line in _lines(name, found[name]))


def _lines(name: str, value: Any) -> Iterator[str]:
    if inspect.isroutine(value):
        yield _signature(name, value)
    elif not inspect.isclass(value):
        yield f"{name} = {_alias(name)}"
    elif issubclass(value, enum.Enum):
        yield from (f"{name}.{member.name} = {member.value!r}" for member in value)
    else:
        bases = ", ".join(base.__name__ for base in value.__bases__ if base.__module__.startswith("kvflow"))
        yield f"class {name}({bases})"
        if is_record(value):
            yield from (f"    {name}.{field}" for field in fields(value))
        elif name not in MADE_BY_KVFLOW and "__init__" in vars(value) and not getattr(value, "_is_protocol", False):
            yield f"    {_signature(name, value.__init__)}"
        if issubclass(value, KvflowError):
            yield f"    {name}.code = {str(value.code)!r}"
        if not is_record(value) and (section := ATTRIBUTES.search(f"{inspect.getdoc(value)}\n")):
            listed = ", ".join(re.findall(r"^    ([\w, ]+): ", section[1], re.MULTILINE))
            yield from (f"    {name}.{attribute}" for attribute in listed.split(", "))
        for member, given in members(value):
            what = "property " if isinstance(given, property) else ""
            yield f"    {what}{_signature(f'{name}.{member}', getattr(value, member) if not what else given.fget)}"


def _signature(name: str, function: Any) -> str:
    """Return a signature on one line."""
    return (
        re.sub(r"\s+", " ", signature(name, getattr(function, "__func__", function)))
        .replace("( ", "(")
        .replace(", )", ")")
    )


def _alias(name: str) -> str:
    """Return what an alias stands for, as its source has it."""
    body = ast.parse(inspect.getsource(importlib.import_module(vars(kvflow)["_HOMES"][name]))).body
    (found,) = [node.value for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name]
    return ast.unparse(found)


# --- wire formats ---

TICKET = tickets.Ticket(
    grants=(OFFER,), signed=(OFFER.signed(lambda _: bytes(tickets.MAC_BYTES), bytes(tickets.FINGERPRINT_BYTES)),)
)

WORDS = {
    "handshake: versions": handshake.messages.SUPPORTED,
    "handshake: first byte of a frame": handshake.codec.FORMAT,
    "handshake: keys of a secret": handshake.security._SALT,
    "ticket: first part": tickets.FORMAT,
    "ticket: kv_transfer_params of an example": TICKET.to_params(),
    "ticket: bytes of a MAC": tickets.MAC_BYTES,
    "ticket: byte after the MAC": tickets.MARK,
    "ticket: bytes of a fingerprint": tickets.FINGERPRINT_BYTES,
    "ticket: a hundred block ids in a row": tickets.runs_of(tuple(range(7, 107))),
    "publication: schema": MANIFEST_SCHEMA,
    "TCP: first bytes": opening.MAGIC,
    "TCP: hello": opening._HELLO.format,
    "TCP: proof of a reader, of an exporter, and of both with another certificate": [
        opening.proof_of(bytes(range(32)), role, (b"t" * 32, b"o" * 32), certificate).hex()
        for certificate in (b"", b"a certificate")
        for role in ("reader", "exporter")
    ],
    "TCP: header of a request": wire.REQUEST.format,
    "TCP: kinds of requests": (wire.LEASE, wire.READ, wire.EPOCH),
    "TCP: run of a request": wire.RUN.format,
    "TCP: header of an answer": wire.ANSWER.format,
    "TCP: kinds of answers": (wire.PIECE, wire.DONE, wire.ENDED, wire.REFUSED),
    "TCP: stretches of a producer": wire.Row.__struct_fields__,
    "vLLM: fields of kv_transfer_params": sorted(TICKET.to_router_params()),
    "vLLM: start of the digests": contents.START.hex(),
    "vLLM: bytes of a MAC of an early admission": admission.MAC_BYTES,
}
"""What is not the field of a struct."""

STRUCTS = {
    "handshake: messages": handshake.messages.AnyMessage,
    "ticket: msgpack of a grant, after its MAC": tickets.Grant,
    "publication: payload": Advertisement,
    "data plane's metadata": backend.Envelope,
    "report of a worker, in a pong": Inspection,
    "questions and answers": questions.PeerQuestion | questions.PeerAnswer,
    "vLLM: commands of a step": messages.Command,
    "vLLM: contact of a rank": admission.Contact,
}


def formats() -> str:
    """Return every format that crosses a wire: its words, and the fields of its structs in order, with their bounds."""
    lines = [f"{what} = {value}" for what, value in WORDS.items()]
    known: dict[type, StructType] = {}
    for what, kind in STRUCTS.items():
        before = len(known)
        _add_structs(msgspec.inspect.type_info(kind), known)
        lines += ["", f"# {what}", *(line for each in list(known.values())[before:] for line in _fields(each))]
    return "\n".join(lines) + "\n"


def _add_structs(info: Any, known: dict[type, StructType]) -> None:
    """Collect a type's structs, and those of their fields."""
    if isinstance(info, StructType):
        if info.cls in known:
            return
        known[info.cls] = info
    if isinstance(info, Type | msgspec.inspect.Field):
        for name in info.__struct_fields__:
            _add_structs(getattr(info, name), known)
    elif isinstance(info, tuple):
        for each in info:
            _add_structs(each, known)


def _fields(info: StructType) -> Iterator[str]:
    """Yield a struct and its fields, with their types as JSON schema has them."""
    _, schemas = msgspec.json.schema_components([info.cls], ref_template="{name}")
    (schema,) = [each for each in schemas.values() if each.get("title") == info.cls.__name__]
    tag = f" {info.tag_field}={info.tag}" if info.tag is not None else ""
    yield f"{info.cls.__name__}{tag}{' (array)' if info.array_like else ''}"
    types = (
        schema["prefixItems"] if info.array_like else [schema["properties"][each.encode_name] for each in info.fields]
    )
    if info.array_like and info.tag is not None:
        types = types[1:]
    for field, kind in zip(info.fields, types, strict=True):
        yield f"    {field.encode_name}{'' if field.required else '?'}: {json.dumps(kind)}"


LISTS = {
    "public_names.txt": names,
    "wire_formats.txt": formats,
    "tickets.json": golden_bytes.tickets,
    "tcp.json": golden_bytes.tcp,
}

if __name__ == "__main__":
    for file, lines in LISTS.items():
        (GOLDEN / file).write_text(lines())
