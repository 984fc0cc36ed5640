"""What the scheduler's side tells every worker to do in a step; encoded on the way to another process."""

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from kvflow import Grant, Ticket


class Admit(Struct, frozen=True, tag=True):
    """Hold the lease of a grant, unless ``admission`` was faster; report the request as sent when it has ended."""

    request_id: str
    grant: Grant


class Pull(Struct, frozen=True, tag=True):
    """Read a ticket's blocks into these; report the request as received, failed or not.

    Attributes:
        request_id: our engine's name of the request.
        ticket: of the producer.
        block_ids: one list per group, -1 where nothing is to be written.
    """

    request_id: str
    ticket: Ticket
    block_ids: tuple[tuple[int, ...], ...]


class Keep(Struct, frozen=True, tag=True):
    """Renew a ticket's leases until it is pulled or given back: its request waits for room."""

    request_id: str
    ticket: Ticket


class Cancel(Struct, frozen=True, tag=True):
    """End a pull whose request has ended; its blocks are reported when nothing writes into them."""

    request_id: str


class Release(Struct, frozen=True, tag=True):
    """Give a ticket back unread."""

    request_id: str
    ticket: Ticket


class Fail(Struct, frozen=True, tag=True):
    """Report a request as received and failed: its parameters were refused.

    Attributes:
        request_id: our engine's name of the request.
        code: of the error.
        reason: the error in words.
        remedy: what to do about it.
    """

    request_id: str
    code: str
    reason: str
    remedy: str = ""


Order = Admit | Pull | Keep | Cancel | Release | Fail

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Order])


def pack(orders: Sequence[Order]) -> bytes | Sequence[Order]:
    """Return orders as they are pickled: encoded, because pickle takes seven times as long for a Struct."""
    try:
        return _encoder.encode(orders)
    except (UnicodeEncodeError, TypeError):  # half of a character in a client's text, say: pickle can carry it
        return orders


def unpack(packed: bytes | Sequence[Order]) -> Sequence[Order]:
    """Return the orders that ``pack`` was given."""
    return _decoder.decode(packed) if isinstance(packed, bytes) else packed
