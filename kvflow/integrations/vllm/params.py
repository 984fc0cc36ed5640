"""``kv_transfer_params``: what a router carries from a prefill engine to a decode engine, and any client can write.

The ticket is what counts: it is signed, and nothing of it is decoded before its signature is checked. The fields that
today's routers know stand beside it and repeat what it says. kvflow does not act upon them: routers rewrite them.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from msgspec import Struct

from kvflow import Ticket
from kvflow.errors import TicketInvalid

Verify = Callable[[bytes, bytes], bool]
"""Payload and MAC of a grant -> whether a member of the cluster signed it."""

TICKET_CHARS_BASE = 1 << 17
"""Characters of a ticket without its blocks: 400 ranks with long names."""

CHARS_PER_BLOCK = 32
"""A block id and a digest in msgpack, 23 bytes, take 31 characters of base64."""

FINEST_BLOCK = 16
"""Tokens of the smallest block that a producer is expected to have, unless ours are smaller: vLLM's default."""


class Nothing(Struct, frozen=True):
    """The request has nothing to do with other engines."""


class OfferWanted(Struct, frozen=True):
    """When the prompt is computed, hand out a ticket for its blocks."""


class LoadWanted(Struct, frozen=True):
    """Read the blocks of a ticket instead of computing them.

    Attributes:
        ticket: signed by a member of the cluster.
        rewritten: fields beside the ticket that say something else than it.
    """

    ticket: Ticket
    rewritten: tuple[str, ...] = ()


Wish = Nothing | OfferWanted | LoadWanted


SWITCHES = ("do_remote_prefill", "do_remote_decode")


def is_tagged(params: object) -> bool:
    """Tell whether a router has said anything of a transfer, be it that there is none; null says as little as absence.

    Args:
        params: as the client sent them: an object, or anything else.
    """
    if isinstance(params, dict):
        load, offer = SWITCHES
        return params.get(load) is not None or params.get(offer) is not None
    return params is not None


def wants_transfer(params: object) -> bool:
    """Tell whether a router wants something of other engines, right or wrong."""
    if isinstance(params, dict):
        load, offer = SWITCHES
        return bool(params.get(load) or params.get(offer))
    return True


def read_params(params: object, verify: Verify, chars_max: int) -> Wish:
    """Read what a request wants of other engines.

    Args:
        params: as the client sent them: an object, or anything else.
        verify: tells whether a member of the cluster signed a grant.
        chars_max: of the longest ticket that this engine can use.

    Raises:
        TicketInvalid: a wish is no switch, both are there, or there is no ticket of this cluster.
    """
    if params is None:
        return Nothing()
    if not isinstance(params, dict):
        raise TicketInvalid(f"kv_transfer_params is {type(params).__name__}: expected an object")
    load, offer = switches = [params.get(name) for name in SWITCHES]
    for name, value in zip(SWITCHES, switches, strict=True):
        if value is not None and type(value) is not bool:
            raise TicketInvalid(f"kv_transfer_params: {name} is {type(value).__name__}: expected true or false")
    if load and offer:
        raise TicketInvalid("kv_transfer_params: do_remote_prefill and do_remote_decode are both true: expected one")
    if offer:
        return OfferWanted()
    if not load:
        return Nothing()
    ticket = Ticket.from_params(params, verify=verify, chars_max=chars_max)
    return LoadWanted(ticket, _rewritten(params, ticket))


def ticket_chars_max(block_sizes: Sequence[int], tokens_max: int) -> int:
    """Return the length of the longest ticket that an engine can use.

    Args:
        block_sizes: tokens in a block of each of our groups, 0 for states.
        tokens_max: of the longest prompt.
    """
    smallest = min([FINEST_BLOCK, *filter(None, block_sizes)])
    groups = max(4, 2 * len(block_sizes))  # the producer may divide its layers into more
    return TICKET_CHARS_BASE + groups * CHARS_PER_BLOCK * -(-tokens_max // smallest)


def describe_ticket(ticket: Ticket) -> dict[str, Any]:
    """Return what a ticket says, under the names that routers know.

    Raises:
        TicketInvalid: its endpoint has no port.
    """
    grant = ticket.grants[0]
    host, port = _host_and_port(grant.ranks[0].endpoint)
    return {
        "remote_engine_id": grant.engine_id,
        "remote_request_id": grant.request_id,
        "remote_host": host,
        "remote_port": port,
        "tp_size": sum([len(each.ranks) for each in ticket.grants]),
        "remote_num_tokens": max(grant.num_tokens),
    }


@lru_cache(maxsize=1024)
def _host_and_port(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.partition("://")[2].rpartition(":")
    if not host or not (port.isascii() and port.isdigit()):
        raise TicketInvalid(f"the ticket's endpoint {endpoint!r} has no host or no port")
    return host, int(port)


def ticket_params(ticket: Ticket) -> dict[str, Any]:
    """Return what a producer answers to a router: JSON-safe, and all that the decode request needs.

    Raises:
        TicketInvalid: the producer's endpoint has no port.
    """
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        **describe_ticket(ticket),
        "remote_block_ids": [list(ids) for ids in ticket.grants[0].block_ids],
        "dcp_size": 1,
        "pp_size": 1,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        **ticket.to_params(),
    }


def no_ticket_params() -> dict[str, Any]:
    """Return what a producer answers when it can promise nothing: the decode engine then computes the prompt."""
    return {"do_remote_prefill": False, "do_remote_decode": False}


def _rewritten(params: dict[Any, Any], ticket: Ticket) -> tuple[str, ...]:
    """Return the fields that do not say what the ticket says; null is as good as absent, and 5600.0 as 5600."""
    try:
        expected = describe_ticket(ticket)
    except TicketInvalid:
        return ()
    if expected.items() <= params.items():
        return ()
    return tuple([name for name, value in expected.items() if params.get(name, value) not in (value, None)])
