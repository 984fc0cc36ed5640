"""What the scheduler's side tells every worker to do in a step. Pickled on the way, hence plain Structs."""

from msgspec import Struct

from kvflow import Grant, Ticket


class Admit(Struct, frozen=True):
    """Hold the lease of a grant, unless ``admission`` was faster; report the request as sent when it has ended."""

    request_id: str
    grant: Grant


class Pull(Struct, frozen=True):
    """Read a ticket's blocks into these; report the request as received, failed or not.

    Attributes:
        request_id: our engine's name of the request.
        ticket: of the producer.
        block_ids: one list per group, -1 where nothing is to be written.
    """

    request_id: str
    ticket: Ticket
    block_ids: tuple[tuple[int, ...], ...]


class Keep(Struct, frozen=True):
    """Renew a ticket's leases until it is pulled or given back: its request waits for room."""

    request_id: str
    ticket: Ticket


class Cancel(Struct, frozen=True):
    """End a pull whose request has ended; its blocks are reported when nothing writes into them."""

    request_id: str


class Release(Struct, frozen=True):
    """Give a ticket back unread."""

    request_id: str
    ticket: Ticket


class Fail(Struct, frozen=True):
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
