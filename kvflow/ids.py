"""The identities that cross kvflow, as types: the only place where they are named."""

from msgspec import Struct


class PeerId(Struct, frozen=True, cache_hash=True):
    """Whom a ticket names, and where it says that this worker is.

    Two peers are one only if all of it is equal. Anyone may claim the first three; only the endpoint and the key say
    who answers. So what was met under one identity is never read for a ticket with another endpoint or key.

    Its text is ``engine/rank/incarnation``, for people.

    Attributes:
        engine_id: of the engine.
        rank: of the engine.
        incarnation: a restarted worker is another peer.
        endpoint: its control endpoint, as the ticket has it.
        public_key: that its control endpoint must prove to hold; empty if the ticket does not say.
    """

    engine_id: str
    rank: int
    incarnation: str
    endpoint: str
    public_key: str

    def __str__(self) -> str:
        return worker_name(self.engine_id, self.rank, self.incarnation)


def worker_name(engine_id: str, rank: int, incarnation: str) -> str:
    """Return how people name a worker in one life: ``engine/rank/incarnation``. It proves nothing."""
    return f"{engine_id}/{rank}/{incarnation}"


def agent_name(worker: str, public_key: str) -> str:
    """Return the name of a worker's transport.

    A reader identifies the transports of its peers by name. A worker that used another worker's name would prevent
    reads from that worker. The name contains the public key, so no worker can use the name of one with another key.
    """
    return f"{worker}/{public_key}"


LeaseKey = tuple[int, int]
"""A lease as its readers name it: epoch slot and epoch."""
