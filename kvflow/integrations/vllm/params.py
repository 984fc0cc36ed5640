"""``kv_transfer_params``: what a router carries from a prefill engine to a decode engine, and any client can write.

The ticket is what counts: it is signed. The fields that today's routers know stand beside it and repeat what it says;
they are never acted upon, and one that says something else fails the request.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from kvflow import Ticket
from kvflow.errors import TicketInvalid

Text = Annotated[str, Meta(max_length=512)]
Natural = Annotated[int, Meta(ge=0, le=1 << 40)]
BlockIds = Annotated[tuple[Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)], ...], Meta(max_length=1 << 20)]

CONVERSION_ERRORS = (msgspec.ValidationError, TypeError, ValueError, OverflowError, RecursionError)
"""What msgspec raises for objects that no JSON could hold: an engine in this process passes whatever it was given."""


class TransferParams(Struct, frozen=True, kw_only=True):
    """The fields that routers know, under the names of vLLM's own connector. None is as good as absent.

    Attributes:
        do_remote_prefill: read the cache of this prompt from where the ticket says.
        do_remote_decode: hand out a ticket when this prompt is computed.
        remote_engine_id: the producer, as in the ticket.
        remote_request_id: its name of the request, as in the ticket.
        remote_host: of the ticket's first rank.
        remote_port: of the ticket's first rank.
        tp_size: how many ranks the ticket names.
        remote_num_tokens: tokens that its blocks hold.
        remote_block_ids: its block ids, one list per group.
    """

    do_remote_prefill: bool | None = None
    do_remote_decode: bool | None = None
    remote_engine_id: Text | None = None
    remote_request_id: Text | None = None
    remote_host: Text | None = None
    remote_port: Natural | None = None
    tp_size: Natural | None = None
    remote_num_tokens: Natural | None = None
    remote_block_ids: Annotated[tuple[BlockIds, ...], Meta(max_length=256)] | None = None


class Nothing(Struct, frozen=True):
    """The request has nothing to do with other engines."""


class OfferWanted(Struct, frozen=True):
    """When the prompt is computed, hand out a ticket for its blocks."""


class LoadWanted(Struct, frozen=True):
    """Read the blocks of a ticket instead of computing them.

    Attributes:
        ticket: well-formed, in agreement with the fields beside it; its signature is checked by the worker.
    """

    ticket: Ticket


Wish = Nothing | OfferWanted | LoadWanted


def read_params(params: object) -> Wish:
    """Read what a request wants of other engines.

    Raises:
        TicketInvalid: a field is malformed, fields contradict each other or the ticket, or there is no ticket.
    """
    if params is None:
        return Nothing()
    if not isinstance(params, dict):
        raise TicketInvalid(f"kv_transfer_params is {type(params).__name__}: expected an object")
    try:
        known = msgspec.convert(params, type=TransferParams)
    except CONVERSION_ERRORS as error:
        raise TicketInvalid(f"kv_transfer_params: {error}") from error
    if known.do_remote_prefill and known.do_remote_decode:
        raise TicketInvalid("kv_transfer_params: do_remote_prefill and do_remote_decode are both true: expected one")
    if known.do_remote_decode:
        return OfferWanted()
    if not known.do_remote_prefill:
        return Nothing()
    try:
        ticket = Ticket.from_params(params)
    except CONVERSION_ERRORS as error:
        raise TicketInvalid(f"the ticket is malformed: {error}") from error
    _require_agreement(known, ticket)
    return LoadWanted(ticket)


def describe_ticket(ticket: Ticket) -> dict[str, Any]:
    """Return what a ticket says, under the names that routers know.

    Raises:
        TicketInvalid: its endpoint has no port.
    """
    grant = ticket.grants[0]
    host, _, port = grant.ranks[0].endpoint.partition("://")[2].rpartition(":")
    if not host or not (port.isascii() and port.isdigit()):
        raise TicketInvalid(f"the ticket's endpoint {grant.ranks[0].endpoint!r} has no host or no port")
    return {
        "remote_engine_id": ticket.engine_id,
        "remote_request_id": ticket.request_id,
        "remote_host": host,
        "remote_port": int(port),
        "tp_size": sum(len(each.ranks) for each in ticket.grants),
        "remote_num_tokens": max(grant.num_tokens),
        "remote_block_ids": [list(ids) for ids in grant.block_ids],
    }


def ticket_params(ticket: Ticket) -> dict[str, Any]:
    """Return what a producer answers to a router: JSON-safe, and all that the decode request needs."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        **describe_ticket(ticket),
        "dcp_size": 1,
        "pp_size": 1,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        **ticket.to_params(),
    }


def no_ticket_params() -> dict[str, Any]:
    """Return what a producer answers when it can promise nothing: the decode engine then computes the prompt."""
    return {"do_remote_prefill": False, "do_remote_decode": False}


def _require_agreement(known: TransferParams, ticket: Ticket) -> None:
    expected: Mapping[str, Any] = describe_ticket(ticket)
    for name, signed in expected.items():
        given = getattr(known, name)
        found = [list(ids) for ids in given] if name == "remote_block_ids" and given is not None else given
        if found is not None and found != signed:
            raise TicketInvalid(
                f"kv_transfer_params: {name} is {_short(found)}, but the ticket says {_short(signed)}",
                remedy="Pass the producer's kv_transfer_params through unchanged.",
            )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
