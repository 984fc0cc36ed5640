"""What all of kvflow uses: identities, block ids, time as an argument, a bounded dict, the step of a state machine."""

import hashlib
import hmac
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

FEW_IDS = 64  # up to this many block ids or units, Python is faster than NumPy, whose calls take a microsecond each
ABSENT = -1  # the block id of an absent block

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Intps = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]

# Checked block ids of one group: a tuple if they are few. It needs no copy, and the garbage collector does not follow
# one of integers.
Ids = tuple[int, ...] | Int64s

LeaseKey = tuple[int, int]  # names a lease to its readers: epoch slot and epoch

# Seconds of a monotonic clock with an arbitrary origin. The pure packages never read a clock: ``now`` is an argument.
Clock = Callable[[], float]


class PeerId(Struct, frozen=True, cache_hash=True, gc=False):
    """Identity and address of a worker, as a ticket names them. Its text is ``engine/rank/incarnation``, for people.

    Two peers are equal only if all fields are. Any member can claim the first three; only the endpoint and the key
    determine who answers. So a peer is never read for a ticket with another endpoint or key.

    Attributes:
        incarnation: a restarted worker is another peer.
        endpoint: its control endpoint.
        public_key: the key that its control endpoint must prove to hold; empty if the ticket does not name one.
    """

    engine_id: str
    rank: int
    incarnation: str
    endpoint: str
    public_key: str

    def __str__(self) -> str:
        return worker_name(self.engine_id, self.rank, self.incarnation)


def worker_name(engine_id: str, rank: int, incarnation: str) -> str:
    """Return the readable name of one incarnation of a worker: ``engine/rank/incarnation``. It proves nothing."""
    return f"{engine_id}/{rank}/{incarnation}"


def agent_name(worker: str, public_key: str) -> str:
    """Return the name by which readers identify a worker's transport."""
    return f"{worker}/{public_key}"  # with the key, because another worker with the name would prevent reads from it


class Credentials(Struct, frozen=True):
    """What a reader presents to the TCP plane of one producer. Its ``repr`` does not show the pass."""

    public_key: str  # the key that the reader has proven to hold on the control channel, 64 hexadecimal digits
    engine_id: str
    rank: int
    incarnation: str
    pass_: bytes  # what the producer gave to this reader on the control channel; empty if nothing
    certificate: bytes = b""  # of the producer's TCP plane, as its control channel states it; empty without encryption

    def __repr__(self) -> str:
        return f"Credentials({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        # Neither repr nor rich, whose tracebacks show locals, may print a secret.
        return [(name, getattr(self, name)) for name in self.__struct_fields__ if name != "pass_"]


class ReaderId(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A reader, as the TCP plane of a producer knows it. Its text is for people, as that of ``PeerId``.

    Attributes:
        certificate: with which it encrypts; empty without encryption.
    """

    public_key: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    engine_id: Annotated[str, Meta(min_length=1, max_length=256)]
    rank: Annotated[int, Meta(ge=0, le=65535)]
    incarnation: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
    certificate: Annotated[bytes, Meta(max_length=1024)] = b""

    def __str__(self) -> str:
        return worker_name(self.engine_id, self.rank, self.incarnation)


def pass_of(
    pass_key: bytes, public_key: str, engine_id: str, rank: int, incarnation: str, *, certificate: bytes = b""
) -> bytes:
    """Return the pass of one reader: 32 bytes that only a holder of ``pass_key`` can compute (HMAC-SHA256)."""
    # With the lengths of the fields, so that no two readers have the same pass.
    reader = ReaderId(public_key, engine_id, rank, incarnation, certificate)
    return pass_of_digest(pass_key, hashlib.sha256(msgspec.msgpack.encode(reader)).digest())


def pass_of_digest(pass_key: bytes, digest: bytes) -> bytes:
    """Return the pass of the reader whose ``ReaderId``, as MessagePack, has this SHA-256."""
    return hmac.digest(pass_key, digest, "sha256")


K = TypeVar("K")
V = TypeVar("V")


class Newest(dict[K, V]):
    """A dict of at most ``most`` entries: to set one makes it the newest, and then the oldest is forgotten."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        if len(self) > self._most:
            del self[next(iter(self))]


S = TypeVar("S", bound=str)
E = TypeVar("E", bound=str)


class IllegalTransition(Exception):
    """An event that a state does not have: a defect of kvflow. Nothing has changed."""


def advance(table: Mapping[tuple[S, E], S], state: S, event: E, what: str) -> S:
    """Return the next state of ``what``; raise ``IllegalTransition`` if the table has no such entry."""
    try:
        return table[state, event]
    except KeyError:
        raise IllegalTransition(f"{what} that is {state} cannot be {event}") from None
