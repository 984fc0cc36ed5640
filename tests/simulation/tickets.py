"""Tickets that say something else than what was signed, for tests of those who read them."""

import base64
from collections.abc import Callable
from typing import Any

import msgspec

from kvflow.leases.tickets import HEAD_BYTES, MAC_BYTES, Content, Grant, RankAddress, Sign

Change = Callable[[dict[str, Any]], object]

LISTED = {"ranks": RankAddress, "contents": Content}
"""Fields of a grant that list other records."""


def grants_of(params: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what the grants of a ticket say, by name, decoded and not checked."""
    return [fields_of(unpacked(part)[MAC_BYTES:]) for part in params["kvflow"].split(".")[1:]]


def fields_of(payload: bytes) -> dict[str, Any]:
    """Return what a payload says behind the fingerprint, by name; its block ids as runs."""
    fields = _named(Grant, msgspec.msgpack.decode(payload[HEAD_BYTES:]))
    for name, kind in LISTED.items():
        if fields[name] is not None:
            fields[name] = [_named(kind, values) for values in fields[name]]
    return fields


def payload_of(fields: dict[str, Any], like: bytes) -> bytes:
    """Return the payload of fields that may be anything, with the fingerprint of another one."""
    listed = {
        name: [_values(kind, each) for each in fields[name]]
        for name, kind in LISTED.items()
        if isinstance(fields.get(name), list)
    }
    return like[:HEAD_BYTES] + msgspec.msgpack.encode(_values(Grant, fields | listed))


def _named(kind: type[msgspec.Struct], values: list[Any]) -> dict[str, Any]:
    return dict(zip(kind.__struct_fields__, values, strict=True))


def _values(kind: type[msgspec.Struct], fields: Any) -> Any:
    """Return fields in order, those of a newer release last."""
    if not isinstance(fields, dict):
        return fields
    known = [name for name in kind.__struct_fields__ if name in fields]
    return [fields[name] for name in [*known, *(name for name in fields if name not in known)]]


def forge(params: dict[str, Any], change: Change, *, grant: int = 0, sign: Sign | None = None) -> dict[str, Any]:
    """Return parameters with one grant changed.

    Args:
        params: with a ticket, which stays as it is.
        change: is given the grant's fields and may change them, or anything in them.
        grant: which one.
        sign: makes a new MAC; without it the grant keeps its old one, as a forger would have to.
    """

    def changed(signed: bytes) -> bytes:
        fields = fields_of(signed[MAC_BYTES:])
        change(fields)
        payload = payload_of(fields, signed[MAC_BYTES:])
        return (signed[:MAC_BYTES] if sign is None else sign(payload)) + payload

    return damage(params, changed, grant=grant)


def damage(params: dict[str, Any], change: Callable[[bytes], bytes], *, grant: int = 0) -> dict[str, Any]:
    """Return parameters with the bytes of one grant changed: its MAC, and what is encoded behind it."""
    head, *parts = params["kvflow"].split(".")
    parts[grant] = packed(change(unpacked(parts[grant])))
    return {**params, "kvflow": ".".join((head, *parts))}


def unpacked(part: str) -> bytes:
    """Return a grant of a ticket's text: its MAC and its encoding."""
    return base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))


def packed(signed: bytes) -> str:
    """Return the text of a grant: of its MAC and its encoding."""
    return base64.urlsafe_b64encode(signed).rstrip(b"=").decode("ascii")
