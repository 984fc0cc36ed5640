"""Whom a worker talks to, and who was turned away."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from kvflow.rendezvous.introduction import OurSide
from kvflow.worker.peers import PeerPool


class Door(Protocol):
    """The listening end, as ``handshake`` has it."""

    @property
    def failures(self) -> Mapping[str, int]:
        """How many connections have failed since the start, by code."""
        ...

    def recheck_keys(self) -> None:
        """Refuse every peer whose key is not allowed any more."""
        ...


class Trust:
    """Allowed keys of one worker, and counts of those who did not keep to the rules.

    Thread: the event loop.
    """

    def __init__(self, ours: OurSide, door: Door, pool: PeerPool) -> None:
        self._ours = ours
        self._door = door
        self._pool = pool

    def allow_keys(self, keys: Iterable[str]) -> None:
        """Replace the list of allowed keys. See ``Worker.allow_keys``."""
        self._ours.allow_keys(keys)
        self._door.recheck_keys()
        self._pool.drop_distrusted()

    def rejected(self) -> dict[str, int]:
        """Return how many connections to us have failed since the start, by code."""
        return dict(self._door.failures)

    def dropped(self) -> dict[str, int]:
        """Return how many producers were let go since the start, by code."""
        return dict(self._pool.drops)
