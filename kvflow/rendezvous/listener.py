"""The producer's end of the control channel: meets readers, and hands their releases and renewals down."""

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import msgspec

from handshake import HandshakeServer, PeerKey, Publication, open_server
from handshake.errors import HandshakeError
from handshake.events import ConnectionFailed, Event, PeerReady, ReleaseReceived, RenewReceived
from handshake.messages import LeaseAnswer, LeaseRef, Released, Renewed
from kvflow.cache.leases import Answer, Reader
from kvflow.errors import ReleaseMismatch
from kvflow.ids import LeaseKey, worker_name
from kvflow.observability.events import ReaderRejected
from kvflow.rendezvous.failures import as_kvflow_error
from kvflow.rendezvous.introduction import OurSide
from kvflow.rendezvous.publication import READER


class LeaseKeeper(Protocol):
    """Who counts releases and renews leases."""

    def on_release(self, leases: Sequence[LeaseKey], reader: Reader, *, read: bool = False) -> list[Answer]:
        """Count a reader's releases, which say whether it has read; answer each."""
        ...

    def on_renew(self, leases: Sequence[LeaseKey]) -> tuple[list[Answer], float]:
        """Renew leases; answer each, with the seconds that they last from now."""
        ...

    def past(self, lease: LeaseKey) -> tuple[str, float] | None:
        """Return how a lease has ended, and how many seconds ago; None if that is not remembered."""
        ...


class Listener:
    """Readers of one worker.

    Attributes:
        endpoint: the address that is listened on.

    Thread: the event loop.
    """

    def __init__(self, keeper: LeaseKeeper, report: Callable[[ReaderRejected], None]) -> None:
        self._keeper = keeper
        self._report = report
        self._readers: dict[PeerKey, Reader] = {}
        self._names: dict[PeerKey, str] = {}

    def on_event(self, server: HandshakeServer, key: PeerKey, event: Event) -> None:
        """Handle what one reader did. Its identity is that of its Hello, whatever it says later."""
        match event:
            case PeerReady(identity=identity, publication=publication):
                self._readers[key] = Reader(identity.engine_id, identity.rank, identity.num_ranks)
                self._names[key] = worker_name(identity.engine_id, identity.rank, identity.incarnation)
                self._look_at_release(key, publication, identity.software)
            case ReleaseReceived(leases=refs, read=read):
                answers = self._keeper.on_release(_keys(refs), self._readers[key], read=read is True)
                if left := [each for each in zip(refs, answers, strict=True) if each[1] != "ended"]:
                    server.send(key, Released(leases=_answered(left)))
            case RenewReceived(leases=refs):
                answers, lease_s = self._keeper.on_renew(_keys(refs))
                answered = tuple(map(self._explained, _answered(zip(refs, answers, strict=True))))
                server.send(key, Renewed(leases=answered, lease_s=lease_s))
            case ConnectionFailed(code=code, reason=reason):
                self._report(ReaderRejected(self._forget(key), code, reason))
            case _:
                self._forget(key)

    def _look_at_release(self, key: PeerKey, publication: Publication, software: str) -> None:
        """Say which readers cannot read from us: an older one leaves without a word."""
        if publication.schema != READER.schema:
            detail = f"it is {software!r}, and does not say that it reads manifest schema {READER.schema}"
            self._report(
                ReaderRejected(self._names[key], ReleaseMismatch.code, f"{detail}. {ReleaseMismatch.default_remedy}")
            )

    def _explained(self, answer: LeaseAnswer) -> LeaseAnswer:
        """Say how a lease has ended that a reader still wants."""
        past = self._keeper.past((answer.slot, answer.epoch)) if answer.outcome == "ended" else None
        if past is None:
            return answer
        return msgspec.structs.replace(answer, ended_by=past[0], ended_s=max(0.0, past[1]))

    def _forget(self, key: PeerKey) -> str:
        self._readers.pop(key, None)
        return self._names.pop(key, str(key))


@asynccontextmanager
async def open_listener(
    *,
    bind: str,
    ours: OurSide,
    keeper: LeaseKeeper,
    report: Callable[[ReaderRejected], None],
) -> AsyncIterator[HandshakeServer]:
    """Listen for readers.

    Raises:
        ConfigInvalid: the address cannot be bound.
    """
    listener = Listener(keeper, report)
    try:
        async with open_server(
            bind=bind,
            identity=ours.identity,
            publication=ours.publication,
            security=ours.security,
            limits=ours.limits,
            network=ours.network,
            make_pass=ours.make_pass,
            # No reader can be ready, and so none can release, before the server exists.
            on_event=lambda key, event: listener.on_event(server, key, event),
        ) as server:
            yield server
    except HandshakeError as error:
        raise as_kvflow_error(error, peer=bind) from error


def _keys(refs: Sequence[LeaseRef]) -> list[LeaseKey]:
    return [(ref.slot, ref.epoch) for ref in refs]


def _answered(answers: Iterable[tuple[LeaseRef, Answer]]) -> tuple[LeaseAnswer, ...]:
    return tuple([LeaseAnswer(slot=ref.slot, epoch=ref.epoch, outcome=answer) for ref, answer in answers])
