"""What a call may end with, given what was done to it and around it.

A scenario notes every trouble that it makes: to a host, or between two. An error is right only if something was done
that explains it. So a pull that nobody cancelled, from a producer to which nothing happened, must be delivered.
"""

from collections.abc import Callable

from msgspec import Struct

from kvflow.errors import (
    BlockIdsInvalid,
    BlockRangeMismatch,
    CapacityExceeded,
    DeadlineExceeded,
    KvflowError,
    PeerLost,
    PeerRefused,
    ProtocolViolation,
    StaleLease,
    TicketInvalid,
    TransferCancelled,
    TransferFailed,
    WorkerClosed,
    WorkerDraining,
)
from tests.fakes.troubles import Trouble

LOST: frozenset[Trouble] = frozenset(
    ("killed", "left", "hung", "stopped", "reset", "parted", "cut", "clogged", "doubled", "failed", "slow")
)
"""What may cost a peer."""

LATE: frozenset[Trouble] = LOST | {"waited", "unsealed"}
"""What may take too long."""


class Circumstances(Struct, frozen=True, kw_only=True):
    """What was done to one call, and around it.

    Attributes:
        forged: its ticket was changed on the way.
        occupied: one of its target blocks was on offer when it was called.
        crowded: as many pulls are open as may be.
        draining: its own worker is draining.
        closing: its own worker is closing.
        over: its lease has ended somewhere, or the producer's life.
        troubles: of its host and of the producer's.
    """

    forged: bool
    occupied: bool
    crowded: bool
    draining: bool
    closing: bool
    over: bool
    troubles: set[Trouble]


EXPLAINED: dict[type[KvflowError], Callable[[Circumstances], bool]] = {
    TicketInvalid: lambda done: done.forged,
    BlockIdsInvalid: lambda done: done.occupied,
    BlockRangeMismatch: lambda _: False,
    CapacityExceeded: lambda done: done.crowded,
    WorkerDraining: lambda done: done.draining,
    WorkerClosed: lambda done: done.closing,
    TransferCancelled: lambda done: done.closing,  # a caller that cancels its own call sees no error
    StaleLease: lambda done: done.over,
    PeerRefused: lambda done: "left" in done.troubles,
    ProtocolViolation: lambda done: "doubled" in done.troubles,
    PeerLost: lambda done: bool(done.troubles & LOST),
    DeadlineExceeded: lambda done: bool(done.troubles & LATE),
    TransferFailed: lambda done: "failed" in done.troubles,
}
"""Kind of error -> whether what was done explains it. Of any other kind, a correct call ends with none."""


def explains(circumstances: Circumstances, error: KvflowError) -> bool:
    """Tell whether a call may end with this error, given what was done."""
    kind = next((kind for kind in type(error).__mro__ if kind in EXPLAINED), None)
    return kind is not None and EXPLAINED[kind](circumstances)
