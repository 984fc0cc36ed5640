"""The identities that cross kvflow, as types: the only place where they are named."""

from typing import NewType

EngineId = NewType("EngineId", str)
"""Name of one engine; its ranks share it. Chosen by the operator."""

Incarnation = NewType("Incarnation", str)
"""32 hexadecimal digits, drawn at each start of a worker, never reused."""

RequestId = NewType("RequestId", str)
"""The engine's own name of a request; a producer and a consumer may use different ones."""

LayerName = NewType("LayerName", str)
"""Name of a layer, the same on both sides: layers are matched by it."""

PeerId = NewType("PeerId", str)
"""``engine/rank/incarnation`` of a peer: a restarted worker is another peer."""


def peer_id(engine_id: str, rank: int, incarnation: str) -> PeerId:
    """Name the worker that these three identify."""
    return PeerId(f"{engine_id}/{rank}/{incarnation}")


LeaseKey = tuple[int, int]
"""A lease as its readers name it: epoch slot and epoch."""
