"""``python -m tests.docs.reference_tables``: write the generated parts of pages.

A generated part lies between ``<!-- generated: NAME -->`` and ``<!-- end -->``; the text around it stays.
"""

import argparse
import ast
import inspect
import logging
import re
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect as kinds

import handshake.errors
import kvflow.errors
from handshake.limits import Limits
from kvflow.config import SETTINGS, Tuning, WorkerConfig
from kvflow.events import Event, LeaseEnded, PeerConnected, PeerDropped, PullFailed, TransferCompleted, event_name
from kvflow.observability.logs import LEVELS
from kvflow.observability.metrics import METRICS
from kvflow.report import TransferReport
from kvflow.tools.cli import build_parser
from kvflow.tools.doctor.codes import CODES
from tests.docs import performance
from tests.docs.collecting import RUNS, started
from tests.vllm.replaying import facts

TESTS = Path(__file__).parents[1]
REFERENCE = TESTS.parent / "docs" / "reference"

LINKS = {
    "staged reads": "[staged reads](../explanation/planning.md#direct-or-staged)",
    "a second secret": "[a second secret](../explanation/security.md#changing-the-secret)",
}
"""Phrases of docstrings that are links on a page, at their first occurrence."""

BOUNDS = {
    "cluster_secret": "16 characters or more",
    "cluster_secret_accepted": "16 characters or more",
    "allowed_keys": "up to 65,536 keys, 64 hexadecimal digits each",
    "peer_weights": "each 1 to 64",
    "nixl_backend_params": "up to 32 texts of 1,024 characters",
    "sleep_mode": "`True` or `False`",
}
"""Bounds that the type of a setting does not say."""

ROUTED = ("completions", "chat", "stream", "n=2", "concurrent", "prefill fails")
VERDICTS = {"works": "yes", "otherwise": "otherwise", "refused": "refused", "no": "no", "": ""}

ENGINES = ("real", "stand-in", "bytes")
FULL_RUN_ONLY = " (full run only)"
PARITY = {
    "packed layouts (`BLHNC`, `BHLNC`)": "yes, also on one side only",
    "hybrid models, sliding windows": "yes: the blocks that the next token needs",
    "states of Mamba and gated delta nets": "yes, in both state layouts",
    "states of unequal numbers of ranks": "those whose parts `kvflow.models` knows; others are refused by name",
    "MLA, sparse indexers": "yes, each read from one replica",
    "caches of fp8, NVFP4, int8, int4, with scales per head": "yes; unequal formats are refused (`layout_mismatch`)",
    "compressed caches (DeepSeek V4)": "yes, as whole pages, between equal ones",
    "DeepSeek V4.1, CSA, HiSparse, PLE": "refused at the start, by name",
    "encoder-decoder models": "no, as NixlConnector",
    "unequal block sizes": "yes, any two, in hybrid models too",
    "unequal tensor parallelism": "yes, any two sizes",
    "pipeline stages": "yes, by pull, on both sides",
    "pipeline stages of models with states": "yes",
    "stages by push, prefill writes to decode (`NixlPushConnector`)": "no, decode always reads",
    "context parallelism": "refused at the start; the library moves divided tokens",
    "data parallelism": "yes, each engine has ports of its own",
    "draft models": "yes, on one side too: fewer drafts are then accepted (`rebuild_layers`)",
    "drafts from n-grams": "not refused",
    "prefix caching": "yes: the missing blocks are read",
    "next turn read from decode (`bidirectional_kv_xfer`)": "[prefixes](../howto/share-prefixes.md) of any engine",
    "KV events": "those of vLLM: what was read is reported like what was computed",
    "`kv_load_failure_policy`": "yes, with the reason in the log",
    "leases, renewed": "yes, without an engine step, and fenced",
    "restart of prefill": "yes, old tickets are refused",
    "aborted requests": "yes: prefill has its blocks at once",
    "sleep and wake": "as vLLM 0.33 calls it, which has not run here; 0.32 is refused",
    "`MultiConnector`": "yes, at any place",
    "host staging (`kv_buffer_device`)": "refused by name; the TCP plane serves such GPUs in portions of 1 MiB",
    "several NIXL backends (`backends`)": "refused by name: UCX alone",
    "EFA": "as UCX or TCP; not the backend `LIBFABRIC`",
    "other devices (TPU, XPU, NPU)": "CPUs, CUDA and ROCm; others are refused by name",
}
"""What NixlConnector can do, and what KVFlowConnector makes of it: rows that tests prove by the marker ``proves``."""

LEVEL_EXCEPTIONS = {
    LeaseEnded: ", `WARNING` if no reader came in time",
    PeerConnected: ", `WARNING` if it has a remedy",
    PeerDropped: ", `DEBUG` if the worker is closing",
    PullFailed: ", `INFO` if the caller canceled the pull",
}
"""Events whose level depends on their fields."""


def marked(text: str) -> str:
    """Return text of a docstring on one line, with the marks of Markdown."""
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


def summary(kind: type) -> str:
    """Return the first paragraph of a docstring."""
    return marked((inspect.getdoc(kind) or "").partition("\n\n")[0])


def attributes(kind: type) -> dict[str, str]:
    """Return the attributes that a class's own docstring describes, or comments of its fields, by name."""
    if kind.__module__ == "kvflow.events":
        return dict(commented(kind))
    section = (inspect.getdoc(kind) or "" if kind.__doc__ else "").partition("Attributes:\n")[2]
    section = re.split(r"^\S", section, maxsplit=1, flags=re.MULTILINE)[0]
    found = re.findall(r"^ {4}(\w+): (.*?)(?=^ {4}\w+: |\Z)", section, re.MULTILINE | re.DOTALL)
    return {name: marked(text) for name, text in found}


def commented(kind: type) -> Iterator[tuple[str, str]]:
    """Yield each field with the comment on its line, or with that on the lines before it."""
    before: list[str] = []
    for line in inspect.getsource(kind).splitlines():
        if found := re.match(r"    (\w+): [^#]*(?:# (.*))?$", line):
            text = found[2] or " ".join(before)
            yield found[1], marked(text if text.endswith(".") else f"{text}.")
        before = [*before, line.strip(" #")] if line.startswith("    # ") else []


def coded(names: Iterable[str]) -> str:
    """Return names with commas between them, as code."""
    return ", ".join(f"`{name}`" for name in names)


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    """Return a table of Markdown."""
    lines = [f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def bullets(items: Iterable[tuple[str, str]]) -> str:
    """Return a list of names with their meanings."""
    return "\n".join(f"- `{name}`: {text}".rstrip(": ") for name, text in items)


def errors() -> str:
    """Return kvflow's errors with their remedies and the names of their attributes."""
    found = [value for value in vars(kvflow.errors).values() if inspect.isclass(value)]
    found = [kind for kind in found if issubclass(kind, kvflow.errors.KvflowError)]
    lines = []
    for kind in found:
        own = f" Attributes: {coded(attributes(kind))}." if attributes(kind) else ""
        parent = kind.__mro__[1]
        base = "" if parent in (Exception, kvflow.errors.KvflowError) else f", a `{parent.__name__}`"
        text = f"{summary(kind)} *{marked(kind.default_remedy)}*".removesuffix(" **")
        lines.append(f"- `{kind.__name__}` (`{kind.code}`{base}): {text}{own}")
    return "\n".join(lines)


def codes(kind: type) -> str:
    """Return the members of an enumeration with the docstring below each."""
    [node] = ast.parse(inspect.getsource(kind)).body
    assert isinstance(node, ast.ClassDef)
    found = []
    for member, doc in zip(node.body, node.body[1:], strict=False):
        match member, doc:
            case ast.Assign(value=ast.Constant(value=str(code))), ast.Expr(value=ast.Constant(value=str(text))):
                found.append((code, marked(text)))
    return bullets(found)


def bounds(field: Any) -> str:
    """Return the bounds of a setting, as its type has them."""
    kind: Any = kinds.type_info(field.type)
    [kind] = [option for option in getattr(kind, "types", [kind]) if not isinstance(option, kinds.NoneType)]
    kind = kind.type if isinstance(kind, kinds.Metadata) else kind
    match kind:
        case kinds.LiteralType(values=values):
            return ", ".join(f'`"{value}"`' for value in values)
        case kinds.StrType(pattern=str(pattern)):
            url = "`tcp://HOST:PORT`" if pattern.startswith("^tcp") else "`HOST:PORT`"
            return "64 hexadecimal digits" if "{64}" in pattern else url
        case kinds.BoolType():
            return "true or false"
        case kinds.StrType(min_length=low, max_length=int(high)):
            return f"{low} to {high:,} characters" if low else f"up to {high:,} characters"
        case kinds.FloatType(ge=low, gt=below, le=high):
            return f"{low:,} to {high:,}" if below is None else f"above {below:,}, to {high:,}"
        case kinds.IntType(ge=low, le=high):
            return f"{low:,} or more" if high is None else f"{low:,} to {high:,}"
    raise AssertionError(f"{field.name} has no bounds")


def default(field: Any) -> str:
    """Return the default of a setting."""
    if field.required:
        return "required"
    given = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    return f"`{given!r}`".replace("'", '"')


def settings() -> str:
    """Return a worker's settings, each with its default and its bounds."""
    texts = attributes(WorkerConfig) | attributes(Tuning)
    lines = []
    for field in SETTINGS.values():
        text = texts[field.name]
        for phrase, link in LINKS.items():
            text = text.replace(phrase, link, 1)
        bound = BOUNDS.get(field.name) or bounds(field)
        text = re.sub(r"(?<!`)\b(KVFLOW_\w+)\b(?!`)", r"`\1`", text)
        lines.append(f"- `{field.name}` ({default(field)}; {bound}): {text}")
    return "\n".join(lines)


def limits() -> str:
    """Return an endpoint's limits and their defaults."""
    return ", ".join(f"`{field.name}` {default(field).strip('`')}" for field in msgspec.structs.fields(Limits)) + "."


def metrics() -> str:
    """Return a worker's metrics, as Prometheus shows their names."""
    lines = []
    for name, described in METRICS.items():
        suffix = "_total" if described.kind == "counter" else ""
        labels = f" by {coded(described.labels)}" if described.labels else ""
        lines.append(f"- `{name}{suffix}` ({described.kind}{labels}): {described.text}")
    return "\n".join(lines)


def findings() -> str:
    """Return the doctor's codes that someone may have to act on."""
    return "\n".join(
        f"- {status}: {coded(code.name for code in CODES.values() if code.status == status)}"
        for status in ("failed", "warning")
    )


def phases() -> dict[str, str]:
    """Return the phases of a transfer, by the names that their seconds have in a record."""
    text = attributes(TransferReport)["timings_s"]
    return {f"{name}_s": f"seconds: {meaning}" for name, meaning in re.findall(r"`(\w+)`: (.+?)\.(?= `\w+`:|$)", text)}


def fields(kind: type) -> dict[str, str]:
    """Return the fields of an event's record, with their meaning."""
    found = attributes(kind)
    if kind is TransferCompleted:
        found |= attributes(TransferReport) | phases()
        found["report"] = "what moved, and where the time went. The record has the fields below in its place."
        del found["timings_s"]
    elif "timings_s" in found:
        found["timings_s"] = "seconds per phase so far. The record has one field for each phase, such as `queue_s`."
    return found


def common_fields() -> dict[str, str]:
    """Return the fields that several events have in one meaning."""
    seen = Counter(item for kind in typing.get_args(Event) for item in fields(kind).items())
    return {name: text for (name, text), count in seen.items() if count > 1}


def events() -> str:
    """Return the fields that events share, and a section for each event."""
    common = common_fields()
    parts = ["## Shared fields", bullets(common.items())]
    for kind in typing.get_args(Event):
        level = f"Level `{logging.getLevelName(LEVELS[kind])}`{LEVEL_EXCEPTIONS.get(kind, '')}"
        own = {name: text for name, text in fields(kind).items() if common.get(name) != text}
        shared = [name for name in fields(kind) if name not in own]
        parts.append(f"## {event_name(kind)}")
        parts.append(f"{level}. {summary(kind)}")
        parts += [f"Shared: {coded(shared)}."] * bool(shared) + [bullets(own.items())] * bool(own)
    return "\n\n".join(parts)


def commands(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield every command with its parser, subcommands included."""
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, command in action.choices.items():
                yield from commands(command, f"{name} {word}")


def command_line() -> str:
    """Return a section for each command, with its flags."""
    parts: list[str] = []
    seen: list[tuple[str, str]] = []
    for name, parser in commands(build_parser(), "kvflow"):
        formatter = parser._get_formatter()
        flags = [
            (formatter._format_action_invocation(action), marked(formatter._expand_help(action) if action.help else ""))
            for action in parser._actions
            if not isinstance(action, argparse._HelpAction | argparse._SubParsersAction) and action.dest != "json"
        ]
        own = [flag for flag in flags if flag not in seen]
        again = [flag for flag, meaning in flags if (flag, meaning) in seen]
        seen += own
        parts += [f"## {name}", marked(parser.description or "").replace("<", "\\<")]
        parts += [bullets(own)] * bool(own) + [f"As above: {coded(again)}."] * bool(again)
    return "\n\n".join(parts)


def routers() -> str:
    """Return the table of what each router does, and what those that are not on the page need."""
    known = sorted(facts().values(), key=lambda each: each["order"])
    rows = []
    for each in known:
        shown = {row["what"]: VERDICTS[row["verdict"]] for row in each["shown"]}
        version = f"[{each['version']}]({each['source']})"
        rows.append([each["router"], version, each["how"], *(shown.get(what, "") for what in ROUTED)])
    lines = []
    for each in known:
        if each["how"] == "replayed":
            told = [re.sub(r" \(`[^`]*`\)", "", text) for text in each["router_settings"] + each["kvflow_settings"]]
            lines += [f"- **{each['router']}**", *(f"  - {text}" for text in told)]
    head = "Set on routers that are replayed, beside `KVFlowConnector` instead of `NixlConnector`:"
    return "\n\n".join([table(["router", "version", "how", *ROUTED], rows), head, "\n".join(lines)])


def is_proof(node: ast.AST) -> bool:
    """Return whether a part of a source is ``pytest.mark.proves(...)``."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.proves"


class Proof(typing.NamedTuple):
    """A test that proves a row, with one of the pairs of engines whose names have ``pairs`` in them."""

    engine: str
    test: str
    path: Path  # in the folder of tests
    pairs: str = ""

    @property
    def with_vllm(self) -> bool:
        """Whether it needs vLLM: all of these are collected, and the others run with ``make test-full``."""
        return self.path.parts[0] == "vllm"

    def is_in(self, tests: dict[str, list[str]]) -> bool:
        """Return whether it is among the tests that a run starts, with such a pair."""
        return any(self.pairs in pair for pair in tests.get(f"{self.path}::{self.test}", ()))


def proofs(folder: Path = TESTS) -> dict[str, list[Proof]]:
    """Return what proves each row. Reads the sources and imports none.

    Raises:
        AssertionError: a marker names no row or engine that exists, or stands at no test.
    """
    found: dict[str, list[Proof]] = {row: [] for row in PARITY}
    for path in sorted(folder.rglob("*.py")):
        if "mark.proves(" not in (text := path.read_text()):
            continue
        module = ast.parse(text)
        marked = 0
        for test in module.body if path.name.startswith("test_") else []:
            if not isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef) or not test.name.startswith("test_"):
                continue
            for marker in filter(is_proof, test.decorator_list):
                assert isinstance(marker, ast.Call)
                rows = [ast.literal_eval(row) for row in marker.args]
                told = {str(option.arg): ast.literal_eval(option.value) for option in marker.keywords}
                where, engine, pairs = f"{path.name}::{test.name}", told.pop("engine", ""), told.pop("pairs", "")
                assert rows, f"{where} names no row"
                assert not told, f"{where}: unknown {coded(told)}"
                assert set(rows) <= set(PARITY), f"{where} proves an unknown row: {coded(set(rows) - set(PARITY))}"
                assert engine in ENGINES, f"{where}: the engine is one of {coded(ENGINES)}"
                marked += 1
                for row in rows:
                    found[row].append(Proof(engine, test.name, path.relative_to(folder), pairs))
        assert marked == sum(map(is_proof, ast.walk(module))), f"{path.name}: a marker stands at no test"
    return found


def files_with_vllm(found: Iterable[Proof]) -> tuple[str, ...]:
    """Return the files of proofs that need vLLM, in one order, so that they are collected once."""
    return tuple(sorted({str(proof.path) for proof in found if proof.with_vllm}))


def in_full_runs_only(found: Iterable[Proof]) -> set[Proof]:
    """Return the proofs that ``make test-vllm`` does not run.

    Raises:
        AssertionError: ``make test-vllm-full`` does not run one either, or not with a pair of its name.
    """
    real = [proof for proof in found if proof.with_vllm]
    files = files_with_vllm(real)
    usual, full = (started(run, files) for run in RUNS)
    for proof in real:
        assert proof.is_in(full), (
            f"{proof.path}::{proof.test}: no run starts it with a pair that has {proof.pairs!r} in its name"
        )
    return {proof for proof in real if not proof.is_in(usual)}


def parity() -> str:
    """Return what KVFlowConnector makes of each capability, and the tests that prove it."""
    found = proofs()
    rare = in_full_runs_only(proof for shown in found.values() for proof in shown)
    rows = []
    for row, shown in found.items():
        kinds = []
        for engine in ENGINES:
            links = [
                f"[{proof.test}](../../tests/{proof.path}){FULL_RUN_ONLY if proof in rare else ''}"
                for proof in shown
                if proof.engine == engine
            ]
            kinds += [f"{engine}: {', '.join(dict.fromkeys(links))}"] * bool(links)
        rows.append([row, PARITY[row], "; ".join(kinds) or "no test"])
    return table(["capability of NixlConnector", "KVFlowConnector", "shown by"], rows)


PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "errors.md": {
        "errors": errors,
        "codes": lambda: codes(kvflow.errors.FailureCode),
        "refusals": lambda: codes(handshake.errors.CloseCode),
        "findings": findings,
    },
    "config.md": {"settings": settings, "limits": limits},
    "metrics.md": {"metrics": metrics},
    "events.md": {"events": events},
    "cli.md": {"commands": command_line},
    "../howto/routers.md": {"routers": routers},
    "../explanation/comparison.md": {"parity": parity},
    "../explanation/performance.md": {"figures": performance.figures, "others": performance.others},
}
"""Page -> generated part -> what writes it."""


def page(name: str) -> str:
    """Return a page with its generated parts as the code has them."""
    text = (REFERENCE / name).read_text()
    for part, write in PARTS[name].items():
        before, start, rest = text.partition(f"<!-- generated: {part} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        assert end, f"docs/reference/{name} has no part {part}"
        text = f"{before}{start}\n{write()}\n\n{end}{after}"
    return text


if __name__ == "__main__":
    for page_name in PARTS:
        (REFERENCE / page_name).write_text(page(page_name))
    performance.PICTURE.write_text(performance.picture())
