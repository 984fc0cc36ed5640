"""``python -m tests.docs.reference_tables``: write the tables of errors.md, config.md, doctor.md and metrics.md."""

import ast
import inspect
import re
import typing
from pathlib import Path

import msgspec
from msgspec import inspect as kinds

import handshake.errors
import kvflow.errors
from handshake.limits import Limits
from kvflow.config import WorkerConfig
from kvflow.observability.metrics import METRICS
from kvflow.tools.doctor.codes import CODES

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"

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


def marked(text):
    """Return text of a docstring on one line, with the marks of Markdown."""
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


def summary(kind):
    """Return the first paragraph of a docstring."""
    return marked((inspect.getdoc(kind) or "").partition("\n\n")[0])


def remedy(kind):
    """Return what a class of errors tells its caller to do."""
    return marked(kind.default_remedy)


def attributes(kind):
    """Return the attributes that a class's own docstring describes, by name."""
    section = (inspect.getdoc(kind) if kind.__doc__ else "").partition("Attributes:\n")[2]
    section = re.split(r"^\S", section, maxsplit=1, flags=re.MULTILINE)[0]
    found = re.findall(r"^ {4}(\w+): (.*?)(?=^ {4}\w+: |\Z)", section, re.MULTILINE | re.DOTALL)
    return {name: marked(text) for name, text in found}


def table(head, rows):
    """Return a table of Markdown."""
    lines = [f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def classes(module, base):
    """Return the error classes of a module, in the order in which it defines them."""
    found = [value for value in vars(module).values() if inspect.isclass(value) and issubclass(value, base)]
    return [kind for kind in found if kind.__module__ == module.__name__]


def errors(module, base):
    """Return the tables of a module's errors and of their attributes."""
    found = classes(module, base)
    rows = [
        [*(f"`{name}`" for name in (kind.__name__, kind.code, kind.__mro__[1].__name__)), summary(kind), remedy(kind)]
        for kind in found
    ]
    parts = [[f"`{kind.__name__}`", f"`{name}`", text] for kind in found for name, text in attributes(kind).items()]
    heads = ["error", "code", "is a", "meaning", "what to do"], ["error", "attribute", "meaning"]
    return "\n\n".join([table(heads[0], rows), table(heads[1], parts)])


def members(kind):
    """Return the members of an enumeration with the docstring below each."""
    [node] = ast.parse(inspect.getsource(kind)).body
    found = {}
    for member, doc in zip(node.body, node.body[1:], strict=False):
        if isinstance(member, ast.Assign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
            found[member.value.value] = marked(doc.value.value)
    return found


def codes(kind):
    """Return the table of an enumeration's documented members."""
    return table(["code", "meaning"], [[f"`{code}`", text] for code, text in members(kind).items()])


def bounds(field):
    """Return the bounds of a setting, as its type has them."""
    kind = kinds.type_info(field.type)
    [kind] = [option for option in getattr(kind, "types", [kind]) if not isinstance(option, kinds.NoneType)]
    kind = kind.type if isinstance(kind, kinds.Metadata) else kind
    match kind:
        case kinds.LiteralType(values=values):
            found = ", ".join(f'`"{value}"`' for value in values)
        case kinds.StrType(pattern=str(pattern)):
            url = "`tcp://HOST:PORT`" if pattern.startswith("^tcp") else "`HOST:PORT`"
            found = "64 hexadecimal digits" if "{64}" in pattern else url
        case kinds.BoolType():
            found = "true or false"
        case kinds.StrType(min_length=low, max_length=int(high)):
            found = f"{low} to {high:,} characters" if low else f"up to {high:,} characters"
        case kinds.FloatType(gt=low, le=high):
            found = f"above {low:,}, to {high:,}"
        case kinds.IntType(ge=low, le=high):
            found = f"{low:,} or more" if high is None else f"{low:,} to {high:,}"
    return found


def default(field):
    """Return the default of a setting."""
    if field.required:
        return "required"
    given = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    return f"`{given!r}`".replace("'", '"')


def settings():
    """Return the table of a worker's settings."""
    texts = attributes(WorkerConfig)
    rows = []
    for field in sorted(msgspec.structs.fields(WorkerConfig), key=lambda field: list(texts).index(field.name)):
        text = texts[field.name]
        for phrase, link in LINKS.items():
            text = text.replace(phrase, link, 1)
        bound = BOUNDS.get(field.name) or bounds(field)
        rows.append([f"`{field.name}`", default(field), bound, re.sub(r"(?<!`)\b(KVFLOW_\w+)\b(?!`)", r"`\1`", text)])
    return table(["setting", "default", "bounds", "meaning"], rows)


def limits():
    """Return the table of an endpoint's limits."""
    texts = attributes(Limits)
    rows = [[f"`{field.name}`", default(field), texts[field.name]] for field in msgspec.structs.fields(Limits)]
    return table(["limit", "default", "meaning"], rows)


def metrics():
    """Return the table of a worker's metrics, as Prometheus shows their names."""
    rows = [
        [
            f"`{name}{'_total' if described.kind == 'counter' else ''}`",
            described.kind,
            labels(described),
            described.text,
        ]
        for name, described in METRICS.items()
    ]
    return table(["metric", "kind", "labels", "meaning"], rows)


def labels(described):
    """Return the names of the labels of a metric."""
    return ", ".join(f"`{label}`" for label in described.labels)


def findings():
    """Return the table of the doctor's codes."""
    rows = [[f"`{code.name}`", code.status, marked(code.meaning), marked(code.remedy)] for code in CODES.values()]
    return table(["code", "status", "meaning", "what to do"], rows)


TABLES: dict[str, dict[str, typing.Callable[[], str]]] = {
    "errors.md": {
        "kvflow.errors": lambda: errors(kvflow.errors, kvflow.errors.KvflowError),
        "Codes of failed transfers": lambda: codes(kvflow.errors.FailureCode),
        "handshake.errors": lambda: errors(handshake.errors, handshake.errors.HandshakeError),
        "Refusals": lambda: codes(handshake.errors.FailureCode),
    },
    "config.md": {"WorkerConfig": settings, "handshake.Limits": limits},
    "doctor.md": {"Codes": findings},
    "metrics.md": {"Metrics of a worker": metrics},
}
"""Page -> heading -> what writes the tables under it."""


def with_tables(name):
    """Return a page with its tables as the code has them; text around them stays."""
    text = (REFERENCE / name).read_text()
    for heading, write in TABLES[name].items():
        pattern = rf"(^## {re.escape(heading)}\n(?:(?!^\||^## ).*\n)*)(?:^\|.*\n|\n(?=\|))+"
        found = re.search(pattern, text, re.MULTILINE)
        assert found, f"docs/reference/{name} has no table under {heading!r}"
        text = f"{text[: found.end(1)]}{write()}\n{text[found.end() :]}"
    return text


if __name__ == "__main__":
    for page in TABLES:
        (REFERENCE / page).write_text(with_tables(page))
