"""The producer's end of the control channel: accepts readers, and passes on their releases and renewals."""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Protocol, TypeVar

import msgspec

import handshake
from handshake import HandshakeServer, Peer, PeerKey, open_server
from handshake.errors import CloseCode, Closed, HandshakeError
from handshake.messages import (
    ANSWER_BYTES_MAX,
    Asked,
    ConnectionFailed,
    HandshakeEvent,
    LeaseAnswer,
    LeaseRef,
    PeerReady,
    Released,
    ReleaseReceived,
    Renewed,
    RenewReceived,
)
from kvflow.errors import ProtocolViolation
from kvflow.events import ConsumerRejected
from kvflow.ids import LeaseKey, worker_name
from kvflow.leases.table import Reader, ReaderAnswer
from kvflow.rendezvous import questions
from kvflow.rendezvous.endpoint import LocalEndpoint, as_kvflow_error
from kvflow.rendezvous.questions import AnswerHeld, PeerQuestion


class Answering(Protocol):
    """What members ask about leases."""

    def ask(
        self,
        connection: PeerKey,
        question: PeerQuestion,
        reader: Reader,
        answer: Callable[[questions.PeerAnswer | None], bool],
        nonce: int,
    ) -> None:
        """Answer a member's question, once, now or later. ``nonce``: its number on the connection.

        ``answer`` returns whether the connection has taken it.
        """
        ...

    def forget(self, connection: PeerKey) -> object:
        """Forget the questions of a connection that has ended."""
        ...


class Leases(Protocol):
    """The leases that readers release and renew, and that members ask for."""

    @property
    def answers(self) -> Answering:
        """The answers to members."""
        ...

    def on_release(self, leases: Sequence[LeaseKey], reader: Reader, *, read: bool = False) -> list[ReaderAnswer]:
        """Count a reader's releases, and answer each; ``read``: whether it has read the blocks."""
        ...

    def on_renew(self, leases: Sequence[LeaseKey], reader: Reader) -> tuple[list[ReaderAnswer], float]:
        """Renew leases for a reader. Return an answer for each, and how many seconds they last from now."""
        ...

    def past(self, lease: LeaseKey) -> tuple[str, float] | None:
        """Return how a lease has ended and how many seconds ago; None if that is no longer known."""
        ...


LeasesT = TypeVar("LeasesT", bound=Leases)


class Listener:
    """The readers that are connected to one worker; ``make_report`` is set by the worker. Thread: the event loop."""

    def __init__(self, server: HandshakeServer, leases: Leases, report: Callable[[ConsumerRejected], None]) -> None:
        self.endpoint = server.endpoint
        self._server = server
        self._leases = leases
        self._report = report
        self.make_report: Callable[[], bytes] = bytes
        self._readers: dict[PeerKey, Reader] = {}
        self._names: dict[PeerKey, str] = {}

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The readers that are connected now."""
        return self._server.peers

    @property
    def failures(self) -> Mapping[str, int]:
        """How many connections have failed since the start, by code."""
        return self._server.failures

    def recheck_keys(self) -> None:
        """Refuse every connected reader whose key was removed from the list of allowed keys."""
        self._server.recheck_keys()

    def on_event(self, key: PeerKey, event: HandshakeEvent) -> None:
        """Handle an event of one reader, which its Hello identifies."""
        match event:
            case PeerReady(identity=identity):
                engine, rank, ranks = identity.engine_id, identity.rank, identity.num_ranks
                self._readers[key] = Reader(engine, rank, ranks, self._server.public_key(key))
                self._names[key] = worker_name(identity.engine_id, identity.rank, identity.incarnation)
            case ReleaseReceived(leases=refs, read=read):
                answers = self._leases.on_release(_keys(refs), self._readers[key], read=read)
                if left := [each for each in zip(refs, answers, strict=True) if each[1] != "ended"]:
                    self._server.send(key, Released(leases=_answered(left)))
            case RenewReceived(leases=refs):
                answers, lease_s = self._leases.on_renew(_keys(refs), self._readers[key])
                answered = tuple(map(self._explained, _answered(zip(refs, answers, strict=True))))
                self._server.send(key, Renewed(leases=answered, lease_s=lease_s))
            case Asked(nonce=nonce, question=encoded):
                self._take_question(key, nonce, encoded)
            case ConnectionFailed(code=code, reason=reason):
                self._report(ConsumerRejected(self._forget(key), code, reason))
            case _:
                self._forget(key)

    def _take_question(self, key: PeerKey, nonce: int, encoded: bytes) -> None:
        """Pass a question on, or end the connection if it is malformed: what follows cannot be trusted either."""
        try:
            question = questions.decode_question(encoded, peer=self._names[key])
        except ProtocolViolation as error:
            self._server.disconnect(key, CloseCode.PROTOCOL_VIOLATION, error.message, error.remedy)
            return
        if question is None:
            self.answer(key, nonce, None)
        else:
            self._leases.answers.ask(key, question, self._readers[key], partial(self.answer, key, nonce), nonce)

    def answer(self, key: PeerKey, nonce: int, answer: questions.PeerAnswer | None) -> bool:
        """Answer an open question; None says that we do not know it. Return whether the connection has not ended."""
        encoded = b"" if answer is None else questions.encode(answer)
        if len(encoded) > ANSWER_BYTES_MAX:
            encoded = questions.encode(AnswerHeld())  # what cannot be said cannot be read
        with suppress(Closed):
            self._server.send(key, handshake.Answer(nonce=nonce, answer=encoded))
            return True
        return False

    def _explained(self, answer: LeaseAnswer) -> LeaseAnswer:
        """Add how the lease has ended, if it has."""
        past = self._leases.past((answer.slot, answer.epoch)) if answer.outcome == "ended" else None
        if past is None:
            return answer
        return msgspec.structs.replace(answer, ended_by=past[0], ended_s=max(0.0, past[1]))

    def _forget(self, key: PeerKey) -> str:
        self._leases.answers.forget(key)
        self._readers.pop(key, None)
        return self._names.pop(key, str(key))


@asynccontextmanager
async def open_listener(
    *,
    bind: str,
    local: LocalEndpoint,
    open_leases: Callable[[str], LeasesT],
    report: Callable[[ConsumerRejected], None],
) -> AsyncIterator[tuple[Listener, LeasesT]]:
    """Listen for readers; return the listener, and what ``open_leases`` has returned.

    ``open_leases`` is called once with the endpoint, before any message of a reader is handled.

    Raises:
        ConfigInvalid: the address cannot be bound.
    """
    try:
        async with open_server(
            bind=bind,
            identity=local.identity,
            publication=local.publication,
            security=local.security,
            limits=local.limits,
            network=local.network,
            make_pass=local.make_pass,
            make_report=lambda: listener.make_report(),  # noqa: PLW0108
            # Nothing is awaited before the listener exists, so no event comes earlier.
            on_event=lambda key, event: listener.on_event(key, event),  # noqa: PLW0108
        ) as server:
            leases = open_leases(server.endpoint)
            listener = Listener(server, leases, report)
            yield listener, leases
    except HandshakeError as error:
        raise as_kvflow_error(error, peer=bind) from error


def _keys(refs: Sequence[LeaseRef]) -> list[LeaseKey]:
    return [(ref.slot, ref.epoch) for ref in refs]


def _answered(answers: Iterable[tuple[LeaseRef, ReaderAnswer]]) -> tuple[LeaseAnswer, ...]:
    return tuple([LeaseAnswer(slot=ref.slot, epoch=ref.epoch, outcome=answer) for ref, answer in answers])
