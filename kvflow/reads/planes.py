"""The data planes of one worker, and the choice of a plane for each peer.

Planes are tried in order of preference. A peer is added to the first plane that it publishes and that can serve the
pair. Each side of a pair chooses the plane for its own reads.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack

import msgspec

from kvflow.errors import FailureCode, TransportUnavailable, quoted
from kvflow.events import PlaneOmitted
from kvflow.ids import PeerId
from kvflow.layout.component import Region
from kvflow.reads.backend import Backend, BackendError, BackendFactory, Cause
from kvflow.reads.contract import Carrier, PeerAddress, Published, Serving

_logger = logging.getLogger(__name__)

NOT_PUBLISHED = Cause(FailureCode.PLANE_UNFIT, "the peer does not have this data plane")


class PlaneBackends:
    """The backends of one worker as one, with those methods of ``Backend`` that concern the choice.

    Args:
        backends: name of each plane -> its backend, the preferred one first.
        missing: the event of each plane that could not start.
        order: names of all planes, the preferred one first; empty: those of ``backends``.
    """

    def __init__(
        self, backends: Mapping[str, Backend], missing: Sequence[PlaneOmitted], order: Iterable[str] = ()
    ) -> None:
        self.backends = dict(backends)
        unstarted = {each.plane: f"it did not start here: {each.detail}" for each in missing}
        self._unstarted = {name: Cause(FailureCode.PLANE_UNFIT, detail) for name, detail in unstarted.items()}
        self._order = tuple(order) or tuple(backends)
        self._peers: dict[PeerId, Backend] = {}
        endpoints = [backend.data_endpoint for backend in backends.values() if backend.data_endpoint]
        assert len(endpoints) <= 1, "one plane listens"
        self.published = Published(
            planes={name: backend.metadata for name, backend in backends.items()},
            data_endpoint="".join(endpoints),
            certificate=b"".join(backend.certificate for backend in backends.values()),
            missing=tuple(missing),
        )

    def add(self, address: PeerAddress) -> Carrier:
        """Add a peer to the first plane that it publishes and that can serve the pair."""
        refusals: dict[str, Cause] = {}
        for name in self._order:
            if name in self._unstarted or name not in address.planes:
                refusals[name] = self._unstarted.get(name, NOT_PUBLISHED)
                continue
            backend = self.backends[name]
            try:
                carrier = backend.add(address)
            except BackendError as failure:
                refusals[name] = failure.reason
                continue
            self._peers[address.peer] = backend
            _warn_of_failures(address.peer, name, refusals)
            remedy = " ".join(filter(None, (reason.remedy for reason in refusals.values())))
            return msgspec.structs.replace(carrier, plane=name, passed_over=_words(refusals), remedy=remedy)
        codes = [reason.code for reason in refusals.values() if reason.code != FailureCode.PLANE_UNFIT]
        raise BackendError(codes[0] if codes else FailureCode.PLANE_UNFIT, _words(refusals))

    def remove(self, peer: PeerId, *, gone: bool) -> None:
        """Forget a peer. A plane may have kept a connection to a peer that was removed before."""
        backend = self._peers.pop(peer, None)
        for each in self.backends.values() if backend is None else (backend,):
            each.remove(peer, gone=gone)

    def of(self, peer: PeerId) -> Backend:
        """Return the backend that reads from a peer that was added."""
        return self._peers[peer]

    def cancel(self, read_ids: Collection[int]) -> None:
        """End what is in flight of these reads, on the planes that can."""
        for backend in self.backends.values():
            backend.cancel(read_ids)

    def progress(self) -> None:
        """Advance what is in flight on every plane."""
        for backend in self.backends.values():
            backend.progress()

    def reset(self) -> None:
        """Reset every plane, even if another one fails."""
        self._peers.clear()
        failures = []
        for backend in self.backends.values():
            try:
                backend.reset()
            except BackendError as failure:
                failures.append(failure)
        if failures:
            raise failures[0]

    def fileno(self) -> int:
        """Return the descriptor of the one plane that has one; -1 if none has."""
        return max((backend.fileno() for backend in self.backends.values()), default=-1)

    def close(self) -> None:
        """Close every plane, even if another one fails."""
        with ExitStack() as closing:
            for backend in reversed(self.backends.values()):
                closing.callback(backend.close)


def open_planes(
    factories: Mapping[str, BackendFactory],
    required: frozenset[str],
    *,
    regions: Sequence[Region],
    epochs: Region,
    serving: Serving,
) -> PlaneBackends:
    """Open every plane that can start here.

    Args:
        factories: name of each plane -> the function that opens it, the preferred one first.
        required: planes that must start. At least one of all planes must start.
        regions: the cache.
        epochs: our epoch table.
        serving: what a plane may serve.

    Raises:
        TransportUnavailable: no plane can start, or a required one cannot.
    """
    backends: dict[str, Backend] = {}
    missing: list[PlaneOmitted] = []
    with ExitStack() as opened:
        for name, factory in factories.items():
            try:
                backends[name] = factory(regions, epochs, serving)
            except TransportUnavailable as error:
                if name in required or len(factories) == 1:
                    raise
                missing.append(PlaneOmitted(name, str(error.code), error.message, error.remedy))
                continue
            opened.callback(backends[name].close)
        if not backends:
            reasons = "; ".join(f"{each.plane}: {each.detail}" for each in missing)
            raise TransportUnavailable(f"no data plane can start: {reasons}")
        opened.pop_all()
    return PlaneBackends(backends, missing, factories)


def _words(refusals: Mapping[str, Cause]) -> str:
    return "; ".join(f"{name}: {reason.detail}" for name, reason in refusals.items())


def _warn_of_failures(peer: PeerId, chosen: str, refusals: Mapping[str, Cause]) -> None:
    """Log that a preferred plane failed. A plane that does not fit the pair is not a failure."""
    for name, reason in refusals.items():
        if reason.code != FailureCode.PLANE_UNFIT:
            who, why = quoted(str(peer)), quoted(reason.detail, 256)
            _logger.warning("kvflow.reads: %s is read over %s, because %s failed: %s", who, chosen, name, why)
