"""``kv_transfer_params``: what a router carries from a prefill engine to a decode engine, and any client can write.

Only the ticket matters. It is signed, and its signature is checked before any of it is decoded. The other fields repeat
the ticket in the form that routers know. kvflow does not act on them, because routers rewrite them.
"""

import re
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from kvflow.addresses import PORT_MAX
from kvflow.errors import TicketInvalid
from kvflow.leases.tickets import TICKET_CHARS_MAX, Ticket

__all__ = ["LoadWanted", "OfferWanted", "RendezvousWanted", "hinted_sources", "no_ticket_params", "read_params"]

ReadTicket = Callable[..., Ticket]  # TicketKey.read
HOST_CHARS_MAX = 255  # of a name of a host: longer ones are none
HINTS_MAX = 16  # actions of one hint that are read
FETCH = ("kv.fetch", "1.0")  # the action that names a source, and its version


class OfferWanted(Struct, frozen=True):
    """Offer the blocks of the prompt when it is computed."""


class LoadWanted(Struct, frozen=True):
    """Read the blocks of a ticket instead of computing them.

    Attributes:
        ticket: verified.
        rewritten: names of fields whose values differ from the ticket, which decides.
    """

    ticket: Ticket
    rewritten: tuple[str, ...] = ()


class RendezvousWanted(Struct, frozen=True):
    """Ask this prefill engine, which computes the prompt at the same time, for its ticket.

    Attributes:
        endpoint: its control endpoint.
    """

    endpoint: str


Wanted = OfferWanted | LoadWanted | RendezvousWanted

SWITCHES = ("do_remote_prefill", "do_remote_decode")


def is_tagged(params: object) -> bool:
    """Return whether the parameters of a client have a switch for a transfer, on or off. Null counts as absent."""
    if isinstance(params, dict):
        load, offer = SWITCHES
        return params.get(load) is not None or params.get(offer) is not None
    return params is not None


def wants_transfer(params: object) -> bool:
    """Return whether the parameters ask for a transfer, in a valid form or not."""
    if isinstance(params, dict):
        load, offer = SWITCHES
        return bool(params.get(load) or params.get(offer))
    return True


def read_params(
    params: object, read: ReadTicket, chars_max: int = TICKET_CHARS_MAX, *, meets: bool = False
) -> Wanted | None:
    """Read which transfer a request asks for; None if it involves no other engine. A client may send anything.

    Args:
        params: ``kv_transfer_params`` of the request.
        read: ``TicketKey.read``.
        chars_max: longest ticket that this engine can use.
        meets: whether a request without a ticket may name the prefill engine.

    Raises:
        TicketInvalid: a switch is not true or false, both are true, or there is no ticket of this cluster.
    """
    if params is None:
        return None
    if not isinstance(params, dict):
        raise TicketInvalid(f"kv_transfer_params must be an object, not {type(params).__name__}")
    load, offer = switches = [params.get(name) for name in SWITCHES]
    for name, value in zip(SWITCHES, switches, strict=True):
        if value is not None and type(value) is not bool:
            raise TicketInvalid(f"{name} in kv_transfer_params must be true or false, not {type(value).__name__}")
    if load and offer:
        raise TicketInvalid("do_remote_prefill and do_remote_decode in kv_transfer_params must not both be true")
    if offer:
        return OfferWanted()
    if not load:
        return None
    if meets and params.get("kvflow") is None and (endpoint := _endpoint_of(params)):
        return RendezvousWanted(endpoint)
    ticket = read(params, chars_max=chars_max)
    return LoadWanted(ticket, _rewritten(params, ticket))


def hinted_sources(params: object, envelope: object = None) -> list[str]:
    """Return the control endpoints that the hints of a request name. A client may send anything.

    Args:
        params: ``kv_transfer_params``. Dynamo sends ``kv_hint``, llm-d ``remote_kv_source``.
        envelope: vLLM's ``kv_hints``, of the same form as ``kv_hint``.
    """
    found = []
    for hints in (_field(params, "kv_hint"), envelope):
        actions = _field(hints, "actions")
        given = actions[:HINTS_MAX] if isinstance(actions, list) else ()
        kinds = [(_field(action, "action_type"), _field(action, "action_version")) for action in given]
        payloads = [_field(action, "payload") for action, kind in zip(given, kinds, strict=True) if kind == FETCH]
        found += [_field(payload, "source_control_endpoint") for payload in payloads]
    found.append(_endpoint_of(_field(params, "remote_kv_source")))
    return [each for each in found if isinstance(each, str) and each]


def _endpoint_of(record: object) -> str:
    """Return the control endpoint that ``remote_host`` and ``remote_port`` name; empty if they name none."""
    host, port = _field(record, "remote_host"), _field(record, "remote_port")
    if not isinstance(host, str) or not 0 < len(host) <= HOST_CHARS_MAX:
        return ""
    if isinstance(port, str) and re.fullmatch("[0-9]{1,5}", port):
        port = int(port)
    if type(port) is not int or not 0 < port <= PORT_MAX:
        return ""
    host = host.strip("[]")
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"


def _field(record: object, name: str) -> object:
    return record.get(name) if isinstance(record, dict) else getattr(record, name, None)


def no_ticket_params() -> dict[str, Any]:
    """Return the parameters of an answer without a ticket: the decode engine then computes the prompt."""
    return {"do_remote_prefill": False, "do_remote_decode": False}


def _rewritten(params: dict[Any, Any], ticket: Ticket) -> tuple[str, ...]:
    """Return the names of fields that differ from the ticket. Null counts as absent, and 5600.0 as 5600."""
    try:
        expected = ticket.router_facts()
    except TicketInvalid:
        return ()
    if expected.items() <= params.items():
        return ()
    return tuple([name for name, value in expected.items() if params.get(name, value) not in (value, None)])
