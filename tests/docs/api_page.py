"""``python -m tests.docs.api_page``: write the two pages of the API from the docstrings of the public names.

docs/reference/api.md has what an engine calls, docs/reference/api-values.md all that it gives, gets and seldom needs.
"""

import ast
import enum
import importlib
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from msgspec import Struct

import kvflow
import kvflow.contents
import kvflow.models
import kvflow.routing

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"

CALLED = frozenset(
    {
        "FullAttention",
        "SlidingWindow",
        "MLA",
        "Mamba",
        "models.from_hf_config",
        "allocate",
        "adopt",
        "KVCache",
        "WorkerConfig",
        "Tuning",
        "open_worker",
        "Worker",
        "run_worker",
        "ThreadedWorker",
        "PullHandle",
        "OpenOffer",
        "open_reader",
        "PrefixReader",
        "Ticket",
        "TicketMint",
        "join_tickets",
        "RankAddress",
        "Grant",
        "TransferReport",
        "configure_logging",
    }
)
"""The names that an engine needs to move a cache."""

HEADS = {
    "api.md": """# API: what an engine calls

The 25 names with which an engine moves its cache. The others, which it gives, gets and seldom needs, are in
[API: values](api-values.md). `python -m tests.docs.api_page` generates both pages from the docstrings.
Import the names from `kvflow`; all other modules may change between releases. Importing `kvflow` loads neither torch
nor NIXL.

Errors are in [Errors](errors.md), events in [Events](events.md), settings with their bounds in [Settings](config.md).
""",
    "api-values.md": """# API: values

Public names beside those [that an engine calls](api.md): parts of descriptions, tickets and reports, and plans.
`python -m tests.docs.api_page` generates this page from the docstrings.
""",
}
"""Page -> how it begins."""

CHAPTERS = {
    "kvflow.layout": "Describe a cache",
    "kvflow.models": "Describe a known model",
    "kvflow.memory": "Allocate or adopt memory",
    "kvflow.config": "Run a worker",
    "kvflow.worker": "Run a worker",
    "kvflow.contents": "Tickets",
    "kvflow.leases": "Tickets",
    "kvflow.rendezvous": "Tickets",
    "kvflow.routing": "Tickets",
    "kvflow.planning": "Plans",
    "": "Reports, logs and types",
}
"""Where a name is defined -> the chapter that it is in; the last one takes all others."""

MADE_BY_KVFLOW = {"Worker", "ThreadedWorker", "KVCache", "PullHandle", "TransferPlan"}
"""Classes that a caller does not construct."""

SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields|Cancellation|Threads?|Note|Examples?):(.*)$")
LINE = 100


def _definition(value: Any) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef:
    [node] = ast.parse(textwrap.dedent(inspect.getsource(value))).body
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    return node


def _call(name: str, arguments: list[str], returns: str) -> str:
    """Return a signature: on one line if it fits, else with one argument on each line."""
    line = f"{name}({', '.join(arguments)}){returns}"
    if len(line) <= LINE:
        return line
    return "\n".join([f"{name}(", *(f"    {argument}," for argument in arguments), f"){returns}"])


def _arguments(arguments: ast.arguments) -> list[str]:
    """Return the arguments of a function as they are written, without ``self``."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    shown = [
        _argument(argument, default)
        for argument, default in zip(positional, defaults, strict=True)
        if argument.arg not in ("self", "cls")
    ]
    if arguments.vararg:
        shown.append(f"*{ast.unparse(arguments.vararg)}")
    elif arguments.kwonlyargs:
        shown.append("*")
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        shown.append(_argument(argument, default))
    return shown + ([f"**{ast.unparse(arguments.kwarg)}"] if arguments.kwarg else [])


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(argument) + (f" = {ast.unparse(default)}" if default else "")


def signature(name: str, function: Any) -> str:
    """Return the signature of a function as its source has it."""
    wrapped = inspect.unwrap(function)
    node = _definition(wrapped)
    assert not isinstance(node, ast.ClassDef)
    if inspect.isasyncgenfunction(wrapped):
        word = "async with "
    elif inspect.isgeneratorfunction(wrapped) and wrapped is not function:
        word = "with "
    else:
        word = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    result = ast.unparse(node.returns) if node.returns else "None"
    if "__signature__" in vars(function):  # it runs the method of another class, and may give its result later
        word, later = "", typing.get_origin(function.__signature__.return_annotation) is Future
        result = f"'Future[{result}]'" if later else result
    returns = "" if result == "None" else f" -> {result}"
    return word + _call(name, _arguments(node.args), returns)


def is_record(kind: type) -> bool:
    """Tell whether a class is a record: its fields are its signature."""
    return issubclass(kind, Struct | tuple) or is_dataclass(kind)


def fields(kind: type) -> list[str]:
    """Return the public fields of a record, those of its bases first."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("kvflow"):
            for node in _definition(base).body:
                if isinstance(node, ast.AnnAssign) and "ClassVar" not in (text := ast.unparse(node)):
                    found[ast.unparse(node.target)] = text
    return [text for name, text in found.items() if not name.startswith("_")]


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties of a class, those of its bases included."""
    seen = set()
    for base in kind.__mro__:
        if base.__module__.startswith("kvflow"):
            for name, value in vars(base).items():
                if not name.startswith("_") and name not in seen and inspect.getdoc(value):
                    seen.add(name)
                    if isinstance(value, property | types.FunctionType | classmethod | staticmethod):
                        yield name, value


def _inline(text: str) -> str:
    """Return a paragraph on one line, with the code marks of Markdown."""
    parts = re.split(r"(`[^`]+`)", re.sub(r"``(.+?)``", r"`\1`", " ".join(text.split())))
    return "".join(part if part.startswith("`") else re.sub(r"([<*_])", r"\\\1", part) for part in parts)


def _items(lines: list[str]) -> Iterator[str]:
    """Yield the entries of a section: a line that is not indented further begins one."""
    entry: list[str] = []
    for line in textwrap.dedent("\n".join(lines)).splitlines():
        if line.strip() and not line.startswith(" ") and entry:
            yield " ".join(entry)
            entry = []
        entry.append(line.strip())
    if entry:
        yield " ".join(entry)


def _section(title: str, rest: str, lines: list[str]) -> Iterator[str]:
    if title in ("Args", "Attributes", "Raises"):
        yield f"**{title}**"
        yield ""
        for item in _items(lines):
            name, _, meaning = item.partition(": ")
            names = ", ".join(f"`{part.strip()}`" for part in name.split(","))
            yield f"- {names}: {_inline(meaning)}"
    elif title.startswith("Example"):
        yield from (f"**{title}**", "", *_code(textwrap.dedent("\n".join(lines)).strip()))
    else:
        yield f"**{title}:** {_inline(' '.join([rest, *lines]))}"
    yield ""


def _paragraphs(lines: list[str]) -> Iterator[str]:
    """Yield text as Markdown: paragraphs, and lists with an item on each line."""
    for block in re.split(r"\n\s*\n", "\n".join(lines).strip()):
        if re.match(r" {4}", block) or block.startswith(">>>"):
            yield from ("```py", textwrap.dedent(block), "```", "")
        elif re.match(r"[-*] ", block):
            yield from (f"- {_inline(item[2:])}" for item in _items(block.splitlines()))
            yield ""
        elif block:
            yield from (_inline(block), "")


def markdown(doc: str) -> Iterator[str]:
    """Yield the lines of a docstring as Markdown."""
    text: list[str] = []
    section: tuple[str, str, list[str]] | None = None
    for line in doc.splitlines():
        if found := SECTION.match(line):
            yield from _section(*section) if section else _paragraphs(text)
            section, text = (found[1], found[2], []), []
        elif section and line.strip() and not line.startswith(" "):
            yield from _section(*section)
            section, text = None, [line]
        else:
            (section[2] if section else text).append(line)
    yield from _section(*section) if section else _paragraphs(text)


def _code(text: str) -> list[str]:
    return ["```py", text, "```", ""]


def _members(owner: str, kind: type) -> Iterator[str]:
    """Yield the properties of a class as a list, then its methods."""
    found = dict(members(kind))
    properties = {name: value for name, value in found.items() if isinstance(value, property)}
    if properties:
        yield from ("**Properties**", "")
        for name, value in properties.items():
            node = _definition(value.fget)
            assert not isinstance(node, ast.ClassDef)
            returns = f": {ast.unparse(node.returns)}" if node.returns else ""
            yield f"- `{name}{returns}`: {_inline(inspect.getdoc(value) or '')}"
        yield ""
    for name, value in found.items():
        if name in properties:
            continue
        yield from (f"#### {owner}.{name}", "")
        yield from _code(signature(name, getattr(value, "__func__", value)))
        doc = inspect.getdoc(value) or ""
        if "__signature__" in vars(value):
            first, _, _ = doc.partition("\n\n")
            doc = f"{first} See ``{value.__wrapped__.__qualname__}``."
        yield from markdown(doc)


def entry(name: str, value: Any) -> Iterator[str]:
    """Yield the lines of one public name."""
    yield f"### {name}"
    yield ""
    if inspect.isclass(value):
        if issubclass(value, enum.Enum):
            yield from _code("\n".join(f"{name}.{member.name} = {member.value!r}" for member in value))
        elif is_record(value):
            yield from _code("\n".join([f"class {name}:", *(f"    {field}" for field in fields(value))]))
        elif name not in MADE_BY_KVFLOW and "__init__" in vars(value):
            yield from _code(signature(name, value.__init__))
        yield from markdown(inspect.getdoc(value) or "")
        yield from _members(name, value)
    elif callable(value) and inspect.isroutine(value):
        yield from _code(signature(name, value))
        yield from markdown(inspect.getdoc(value) or "")
    else:
        yield from _alias(name)


def _alias(name: str) -> Iterator[str]:
    """Yield the definition of an alias and the text below it."""
    module = importlib.import_module(vars(kvflow)["_HOMES"][name])
    body = ast.parse(inspect.getsource(module)).body
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            yield from _code(ast.unparse(node))
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                yield from markdown(inspect.cleandoc(str(following.value.value)))


def chapter_of(value: Any) -> str:
    """Return the chapter that a name belongs in."""
    module = getattr(value, "__module__", "") or ""
    return next(title for home, title in CHAPTERS.items() if not home or f"{module}.".startswith(f"{home}."))


def public_names() -> dict[str, Any]:
    """Return every public name that the page has an entry for."""
    found = {name: getattr(kvflow, name) for name in kvflow.__all__ if not name.startswith("__")}
    found = {name: value for name, value in found.items() if not inspect.ismodule(value)}
    for module in (kvflow.contents, kvflow.models, kvflow.routing):
        home = module.__name__.removeprefix("kvflow.")
        found |= {f"{home}.{name}": getattr(module, name) for name in module.__all__}
    return found


def page(file: str) -> str:
    """Return a page of the API."""
    lines = [HEADS[file]]
    names = {name: value for name, value in public_names().items() if (name in CALLED) == (file == "api.md")}
    for title in dict.fromkeys(CHAPTERS.values()):
        chapter = sorted((name for name in names if chapter_of(names[name]) == title), key=str.lower)
        if chapter:
            lines += [f"## {title}", ""]
        for name in chapter:
            lines += entry(name, names[name])
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


if __name__ == "__main__":
    for file in HEADS:
        (REFERENCE / file).write_text(page(file))
