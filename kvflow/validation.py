"""Explain why msgspec refused a value: name the field, the expected form and the value."""

import difflib
import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import msgspec
from msgspec import Meta, inspect

from kvflow.errors import ArgumentInvalid, shown, suggest

Name = Annotated[str, Meta(max_length=1024)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Number = Annotated[float, Meta(ge=-(2**53), le=2**53)]
"""Types of what a worker says about itself. Their bounds hold where it is decoded."""


class SuggestingMeta(msgspec.StructMeta):
    """The class of a ``Struct`` that users make: an unknown keyword is refused with the names that are known."""

    if not TYPE_CHECKING:  # a checker of types reads the fields

        def __call__(self, *args: Any, **fields: Any) -> Any:
            """Make an object.

            Raises:
                TypeError: a keyword is unknown, or one is missing.
            """
            unknown = [name for name in fields if name not in self.__struct_fields__]
            if unknown:
                parts = {name: each for each in msgspec.structs.fields(self) for name in _names_in(each.default)}
                if part := parts.get(unknown[0]):
                    made = f"{type(part.default).__name__}({unknown[0]}=...)"
                    raise TypeError(f"{unknown[0]!r} is a field of {part.name}: give {part.name}={made}")
                known = suggest(unknown[0], [*self.__struct_fields__, *parts])
                raise TypeError(f"{self.__name__} has no field {unknown[0]!r}. {known}")
            return super().__call__(*args, **fields)


def _names_in(part: object) -> tuple[str, ...]:
    """Return the names of the fields of a ``Struct``."""
    return part.__struct_fields__ if isinstance(part, msgspec.Struct) else ()


_AT = re.compile(r" - at (?P<key>`key` in )?`\$(?P<path>[^`]*)`\Z")
_STEP = re.compile(r"\.(?P<name>[A-Za-z_]\w*)|\[(?P<index>\d+)\]|(?P<any>\[\.\.\.\])")
_OF_MSGSPEC = ("Expected `", "Invalid enum value ", "Invalid value ", "Integer value out of range")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`\Z")
_MISSING = re.compile(r"Object missing required field `(.*)`\Z")

_PLAIN = {
    inspect.AnyType: "anything",
    inspect.BoolType: "true or false",
    inspect.BytesType: "bytes",
    inspect.NoneType: "None",
}


def find_fault(struct: msgspec.Struct, *, hidden: Collection[str] = ()) -> str:
    """Check every field of a ``Struct``, which msgspec itself checks only when it decodes one.

    Args:
        struct: the object.
        hidden: fields whose values are secret: a message names only their type.

    Returns:
        What is wrong, such as ``rank must be an integer from 0 to 65535, not '3'``; empty if nothing is.
    """
    kind = type(struct)
    try:
        msgspec.convert(msgspec.to_builtins(struct, builtin_types=(bytes,)), type=kind)
    except msgspec.ValidationError as error:
        return describe_refusal(error, struct, kind, hidden=hidden)
    except TypeError as error:  # a value of a type that msgspec does not know, such as a number of numpy's
        for field in msgspec.structs.fields(kind):
            value = getattr(struct, field.name)
            try:
                msgspec.to_builtins(value, builtin_types=(bytes,))
            except TypeError:
                fault = _must_be(field.name, inspect.type_info(field.type), value, hidden)
                return f"{fault}; give Python's own numbers and texts"
        return str(error)
    return ""


def describe_refusal(
    error: msgspec.ValidationError, value: object, expected: Any, *, hidden: Collection[str] = ()
) -> str:
    """Explain why msgspec refused a value.

    Args:
        error: raised by ``msgspec.convert(value, expected)`` or by decoding.
        value: the refused value.
        expected: its expected type.
        hidden: fields at the top whose values are secret: the message names only their type.
    """
    text = str(error)
    at = _AT.search(text)
    path = at["path"] if at else ""
    reason = text[: at.start()] if at else text
    try:
        name, kind, found = _walk(expected, value, path)
    except LookupError:
        return _prefixed(path.removeprefix("."), reason)
    if unknown := _UNKNOWN.fullmatch(reason):
        return _prefixed(name, f"{unknown[1]} is unknown. {suggest(unknown[1], _fields(kind))}")
    if missing := _MISSING.fullmatch(reason):
        return _prefixed(name, f"{missing[1]} is required")
    if not reason.startswith(_OF_MSGSPEC):
        return _prefixed(name, reason)  # an error of our own, raised while an object was made
    if at and at["key"]:
        name, kind = f"each key of {name or 'the object'}", kind.key_type
    return _must_be(name, kind, found, hidden)


def describe_type(kind: inspect.Type) -> str:
    """Say what a value of a type must be, such as ``an integer from 0 to 65535``."""
    match kind:
        case inspect.Metadata(type=inner, extra_json_schema=schema):
            told = str((schema or {}).get("description") or describe_type(inner))
        case inspect.IntType() | inspect.FloatType():
            told = f"{'an integer' if isinstance(kind, inspect.IntType) else 'a number'}{_bounds(kind)}"
        case inspect.StrType():
            told = f"text{_length(kind.min_length, kind.max_length, 'characters')}"
        case inspect.BytesType() if kind.max_length is not None:
            told = f"bytes{_length(kind.min_length, kind.max_length, 'in length')}"
        case inspect.LiteralType(values=values):
            told = _any_of(map(repr, values))
        case inspect.EnumType(cls=cls):
            told = _any_of(repr(each.value) for each in cls)
        case inspect.UnionType(types=types):
            # None is the default: a caller who gives a value wants one of the others.
            others = [each for each in types if not isinstance(each, inspect.NoneType)]
            told = " or ".join(map(describe_type, others or types))
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            told = f"a list{_length(kind.min_length, kind.max_length, 'entries')}, each {describe_type(item)}"
        case inspect.DictType() | inspect.StructType():
            told = "an object with named fields"
        case _:
            told = _PLAIN.get(type(kind), type(kind).__name__.removesuffix("Type").lower())
    return told


def _any_of(values: Iterable[str]) -> str:
    listed = [*values]
    return f"one of {', '.join(listed)}" if len(listed) > 1 else listed[0]


def _bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    low, above, high, below = kind.ge, kind.gt, kind.le, kind.lt
    if low is not None and high is not None:
        return f" from {low:g} to {high:g}" if isinstance(kind, inspect.FloatType) else f" from {low} to {high}"
    limits = [
        f"{word} {limit}"
        for word, limit in (("of at least", low), ("above", above), ("of at most", high), ("below", below))
        if limit is not None
    ]
    return f" {' and '.join(limits)}" if limits else ""


def _length(low: int | None, high: int | None, of: str) -> str:
    if low and high is not None:
        return f" of {low} to {high} {of}"
    return f" of at least {low} {of}" if low else f" of at most {high} {of}" if high is not None else ""


def _must_be(name: str, kind: inspect.Type, value: object, hidden: Collection[str]) -> str:
    top = re.split(r"[.\[]", name, maxsplit=1)[0]
    is_hidden = top in hidden or (not top and bool(hidden))
    found = f"another {type(value).__name__}, which is not shown" if is_hidden else shown(value)
    meant = difflib.get_close_matches(value, _texts(kind), n=1, cutoff=0.5) if isinstance(value, str) else []
    hint = f"; did you mean {meant[0]!r}?" if meant else ""
    return f"{name or 'the value'} must be {describe_type(kind)}, not {found}{hint}"


def _texts(kind: Any) -> list[str]:
    """Return the texts that a type allows, if it lists them."""
    match kind:
        case inspect.Metadata(type=inner):
            return _texts(inner)
        case inspect.UnionType(types=types):
            return [text for each in types for text in _texts(each)]
        case inspect.LiteralType(values=values):
            return [value for value in values if isinstance(value, str)]
    return []


def _prefixed(name: str, text: str) -> str:
    return f"{name}: {text}" if name else text


def _fields(kind: inspect.Type) -> list[str]:
    if isinstance(kind, inspect.UnionType):
        return [name for each in kind.types for name in _fields(each)]
    return [field.encode_name for field in kind.fields] if isinstance(kind, inspect.StructType) else []


def _walk(expected: Any, value: Any, path: str) -> tuple[str, Any, Any]:
    """Follow a path of msgspec into a type and a value; return it by names, and both. LookupError: there is none."""
    name, kind = "", inspect.type_info(expected)
    for step in _STEP.finditer(path):
        kind = _choose(kind, step, value)
        if step["any"]:  # msgspec does not say which of them
            return f"each value of {name}", kind.value_type if hasattr(kind, "value_type") else kind.item_type, value
        index = int(step["index"] or 0)
        if isinstance(kind, inspect.StructType):
            field = _field(kind, step["name"], index)
            kind, value = field.type, _got(value, field, index)
            name = f"{name}.{field.encode_name}".removeprefix(".")
        else:
            kind = kind.item_types[index] if isinstance(kind, inspect.TupleType) else kind.item_type
            name, value = f"{name}[{index}]", value[index]
    return name, kind, value


def _field(kind: inspect.StructType, name: str | None, index: int) -> inspect.Field:
    if name is None:
        return kind.fields[index - (kind.tag is not None)]  # as an array, its tag comes first
    return next((each for each in kind.fields if each.encode_name == name), None) or _nothing(name)


def _nothing(name: str) -> NoReturn:
    raise LookupError(name)


def _got(value: Any, field: inspect.Field, index: int) -> Any:
    """Return a field of an object, whether it is a ``Struct``, a mapping, or an array."""
    if isinstance(value, Mapping):
        return value[field.encode_name]
    if isinstance(value, list | tuple):
        return value[index]
    return getattr(value, field.name) if hasattr(value, field.name) else _nothing(field.name)


def _is_of(value: object, kind: inspect.Type) -> bool:
    """Return whether a value says that it is of a kind of ``Struct``: by its class, or by its tag."""
    if not isinstance(kind, inspect.StructType):
        return False
    if isinstance(value, list | tuple):
        return kind.tag is not None and value[:1] == type(value)([kind.tag])
    if isinstance(value, Mapping):
        return kind.tag is not None and value.get(kind.tag_field) == kind.tag
    return kind.cls is type(value)


def _choose(kind: Any, step: "re.Match[str]", value: object) -> Any:
    """Return the member of a type that has a step of a path. LookupError: none has."""
    match kind:
        case inspect.Metadata(type=inner):
            return _choose(inner, step, value)
        case inspect.UnionType(types=types):
            for each in [each for each in types if _is_of(value, each)] or types:
                try:
                    return _choose(each, step, value)
                except LookupError:
                    continue
        case inspect.StructType() if kind.array_like == (step["name"] is None):
            return kind
        case inspect.ListType() | inspect.VarTupleType() | inspect.SetType() | inspect.TupleType() if not step["name"]:
            return kind
        case inspect.DictType() if step["any"]:
            return kind
    raise LookupError(step[0])


def require_seconds(name: str, value: object) -> None:
    """Refuse an argument that is not a duration."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        remedy = "Pass seconds as a number, such as 30.0."
        raise ArgumentInvalid(name, "a number of seconds, 0 or more", value, remedy=remedy)


def require_count(name: str, value: object) -> None:
    """Refuse an argument that is not a positive number of things."""
    if not isinstance(value, int) or value < 1:
        raise ArgumentInvalid(name, "a whole number, 1 or more", value)
