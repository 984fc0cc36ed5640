"""The data planes of one worker, and which of them each peer is read over.

The planes stand in the order of preference. A peer is added to the first plane that it publishes and that can serve
the pair. Both sides of a pair read by themselves, so each side chooses for what it reads.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import msgspec

from kvflow.errors import TransportUnavailable
from kvflow.ids import PeerId
from kvflow.layout.region import Region
from kvflow.transport.base import UNFIT, Carrier, PeerAddress, Published
from kvflow.transport.mover import MoveFailed, Mover, MoverFactory, Movers, Plane, Reason
from kvflow.transport.serving import Serving

_logger = logging.getLogger(__name__)

NOT_PUBLISHED = Reason(UNFIT, "the peer does not have this data plane")


class PlanesMover(Movers):
    """Several movers as one. See ``Movers`` for the contract.

    Args:
        movers: name of each plane -> its mover, the preferred one first.
        missing: name of each plane that could not start -> why.

    Attributes:
        movers: as above.
        published: what peers need to read from us.
    """

    def __init__(self, movers: Mapping[str, Plane], missing: Mapping[str, str]) -> None:
        self.movers = dict(movers)
        self._peers: dict[PeerId, Mover] = {}
        endpoints = [mover.data_endpoint for mover in movers.values() if mover.data_endpoint]
        assert len(endpoints) <= 1, "one plane listens"
        self.published = Published(
            planes={name: mover.metadata for name, mover in movers.items()},
            data_endpoint="".join(endpoints),
            missing=dict(missing),
        )

    def add(self, address: PeerAddress) -> Carrier:
        """See ``Movers.add``. Tries one plane after the other."""
        refusals: dict[str, Reason] = {}
        for name, mover in self.movers.items():
            if name not in address.planes:
                refusals[name] = NOT_PUBLISHED
                continue
            try:
                carrier = mover.add(address)
            except MoveFailed as failure:
                refusals[name] = failure.reason
                continue
            self._peers[address.peer] = mover
            _warn_of_failures(address.peer, name, refusals)
            return msgspec.structs.replace(carrier, plane=name)
        codes = [reason.code for reason in refusals.values() if reason.code != UNFIT]
        detail = "; ".join(f"{name}: {reason.detail}" for name, reason in refusals.items())
        raise MoveFailed(codes[0] if codes else UNFIT, detail)

    def remove(self, peer: PeerId, *, gone: bool) -> None:
        """See ``Movers.remove``. A plane may have kept something of a peer that was removed before."""
        mover = self._peers.pop(peer, None)
        for each in self.movers.values() if mover is None else (mover,):
            each.remove(peer, gone=gone)

    def of(self, peer: PeerId) -> Mover:
        """See ``Movers.of``."""
        return self._peers[peer]

    def progress(self) -> None:
        """See ``Movers.progress``."""
        for mover in self.movers.values():
            mover.progress()

    def reset(self) -> None:
        """See ``Movers.reset``. Every plane is reset, whatever the others say."""
        self._peers.clear()
        failures = []
        for mover in self.movers.values():
            try:
                mover.reset()
            except MoveFailed as failure:
                failures.append(failure)
        if failures:
            raise failures[0]

    def fileno(self) -> int:
        """See ``Movers.fileno``. Only one plane has a descriptor."""
        return max((mover.fileno() for mover in self.movers.values()), default=-1)

    def close(self) -> None:
        """See ``Movers.close``. Every plane is closed, whatever the others say."""
        with ExitStack() as closing:
            for mover in reversed(self.movers.values()):
                closing.callback(mover.close)


def open_planes(
    factories: Mapping[str, MoverFactory],
    required: frozenset[str],
    *,
    regions: Sequence[Region],
    epochs: Region,
    serving: Serving,
) -> PlanesMover:
    """Open every plane that can start here.

    Args:
        factories: name of each plane -> what opens it, the preferred one first.
        required: planes that may not be missing. Of all planes one has to start.
        regions: the cache.
        epochs: our epoch table.
        serving: what a plane serves.

    Raises:
        TransportUnavailable: none can start, or one is missing that may not be.
    """
    movers: dict[str, Plane] = {}
    missing: dict[str, str] = {}
    with ExitStack() as opened:
        for name, factory in factories.items():
            try:
                movers[name] = factory(regions, epochs, serving)
            except TransportUnavailable as error:
                if name in required or len(factories) == 1:
                    raise
                missing[name] = error.message
                continue
            opened.callback(movers[name].close)
        if not movers:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
            raise TransportUnavailable(f"no data plane can start: {reasons}")
        opened.pop_all()
    return PlanesMover(movers, missing)


def _warn_of_failures(peer: PeerId, chosen: str, refusals: Mapping[str, Reason]) -> None:
    """Say that a better plane has failed, which is not the same as that it does not fit."""
    for name, reason in refusals.items():
        if reason.code != UNFIT:
            _logger.warning(
                "kvflow.transport: %s is read over %s, because %s failed: %s", peer, chosen, name, reason.detail
            )
