"""Tickets that say something else than what was signed, for tests of those who read them."""

import base64
from collections.abc import Callable
from typing import Any

import msgspec

from kvflow.leases.tickets import MAC_BYTES, Sign

Change = Callable[[dict[str, Any]], object]


def grants_of(params: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what the grants of a ticket say, decoded and not checked."""
    return [msgspec.msgpack.decode(unpacked(part)[MAC_BYTES:]) for part in params["kvflow"].split(".")[1:]]


def forge(params: dict[str, Any], change: Change, *, grant: int = 0, sign: Sign | None = None) -> dict[str, Any]:
    """Return parameters with one grant changed.

    Args:
        params: with a ticket, which stays as it is.
        change: is given the grant's fields and may change them, or anything in them.
        grant: which one.
        sign: makes a new MAC; without it the grant keeps its old one, as a forger would have to.
    """

    def changed(sealed: bytes) -> bytes:
        fields = msgspec.msgpack.decode(sealed[MAC_BYTES:])
        change(fields)
        payload = msgspec.msgpack.encode(fields)
        return (sealed[:MAC_BYTES] if sign is None else sign(payload)) + payload

    return damage(params, changed, grant=grant)


def damage(params: dict[str, Any], change: Callable[[bytes], bytes], *, grant: int = 0) -> dict[str, Any]:
    """Return parameters with the bytes of one grant changed: its MAC, and what is encoded behind it."""
    head, *parts = params["kvflow"].split(".")
    parts[grant] = packed(change(unpacked(parts[grant])))
    return {**params, "kvflow": ".".join((head, *parts))}


def unpacked(part: str) -> bytes:
    """Return a grant of a ticket's text: its MAC and its encoding."""
    return base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))


def packed(sealed: bytes) -> str:
    """Return the text of a grant: of its MAC and its encoding."""
    return base64.urlsafe_b64encode(sealed).rstrip(b"=").decode("ascii")
