"""The identities that cross kvflow, as types: the only place where they are named."""

from typing import NewType

PeerId = NewType("PeerId", str)
"""``engine/rank/incarnation`` of a peer: a restarted worker is another peer."""


def peer_id(engine_id: str, rank: int, incarnation: str) -> PeerId:
    """Name the worker that these three identify."""
    return PeerId(f"{engine_id}/{rank}/{incarnation}")


LeaseKey = tuple[int, int]
"""A lease as its readers name it: epoch slot and epoch."""
