"""Map failure codes of the scheduler and the transport to the errors that callers get."""

import asyncio

from kvflow import events
from kvflow.errors import (
    DeadlineExceeded,
    FailureCode,
    KvflowError,
    PeerLost,
    ProtocolViolation,
    StaleLease,
    TransferCancelled,
    TransferFailed,
)

ERRORS: dict[str, type[TransferFailed]] = {
    StaleLease.code: StaleLease,
    PeerLost.code: PeerLost,
    FailureCode.PEER_CLOSED: PeerLost,
    TransferCancelled.code: TransferCancelled,
    FailureCode.CANCELLED: TransferCancelled,
    FailureCode.CLOSING: TransferCancelled,
    FailureCode.KEY_REMOVED: PeerLost,
    FailureCode.METADATA_INVALID: ProtocolViolation,
    # Our own descriptors are checked when they are bound, so it is the peer's memory that is not there.
    FailureCode.BOUNDS: ProtocolViolation,
}
"""Code of the scheduler or the transport -> error. Any other code is a plain ``TransferFailed``."""

CANCELLED = "the caller cancelled the pull"


def transfer_error(event: events.PullFailed) -> TransferFailed:
    """Return the error that this event stands for."""
    about = {"request_id": event.request_id, "peer": event.peer}
    message = f"request {event.request_id!r}: {event.detail}"
    if event.code == DeadlineExceeded.code:
        return DeadlineExceeded(message, phase=event.phase, quarantined=event.quarantined, **about)
    kind = ERRORS.get(event.code, TransferFailed)
    return kind(message, quarantined=event.quarantined, **about)


def connection_error(peer: str, code: str, detail: str) -> TransferFailed:
    """Return the error of a caller whose peer was dropped before it could be read from."""
    return ERRORS.get(code, TransferFailed)(f"{peer} cannot be read from: {detail}", peer=peer)


def as_ours(error: BaseException, request_id: str) -> KvflowError:
    """Return the exception that ended a pull as an error of kvflow."""
    if isinstance(error, KvflowError):
        return error
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return TransferCancelled(CANCELLED, request_id=request_id)
    failed = TransferFailed(f"the pull ended with {type(error).__name__}: {error}", request_id=request_id)
    failed.__cause__ = error  # as ``raise ... from`` does it
    return failed
