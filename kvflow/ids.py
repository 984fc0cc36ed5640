"""The identities that cross kvflow, as types: the only place where they are named."""

import hmac
from typing import Any

import msgspec
from msgspec import Struct


class PeerId(Struct, frozen=True, cache_hash=True, gc=False):
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


class Credentials(Struct, frozen=True):
    """What a reader says to the TCP plane of one producer, and proves. Its ``repr`` does not show the pass.

    Attributes:
        public_key: that the reader has proved to hold on the control channel, 64 hexadecimal digits.
        engine_id: of the reader.
        rank: of the reader.
        incarnation: of the reader.
        pass_: what the producer has given to this reader on the control channel; empty if it gave none.
    """

    public_key: str
    engine_id: str
    rank: int
    incarnation: str
    pass_: bytes

    def __repr__(self) -> str:
        return f"Credentials({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        # Neither repr nor rich, whose tracebacks show locals, may print a secret.
        return [(name, getattr(self, name)) for name in self.__struct_fields__ if name != "pass_"]


def pass_of(pass_key: bytes, public_key: str, engine_id: str, rank: int, incarnation: str) -> bytes:
    """Return the pass of one reader: 32 bytes that only a holder of ``pass_key`` can compute (HMAC-SHA256).

    The fields are encoded with their lengths, so that no two readers have the same pass.
    """
    return hmac.digest(pass_key, msgspec.msgpack.encode((public_key, engine_id, rank, incarnation)), "sha256")


LeaseKey = tuple[int, int]
"""A lease as its readers name it: epoch slot and epoch."""
