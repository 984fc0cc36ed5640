"""What runs in the process of one rank of an engine: NIXL is watched there, whatever connector uses it."""

import os
import threading
from typing import Any

EPOCH_BYTES = 8
"""A fence reads one epoch; no cache has runs as short as that."""


class Reads:
    """What NIXL is asked to read, at its binding, so that all connectors are counted alike.

    Attributes:
        descriptors: of each prepared read, in order, before NIXL merges any.
        told: of each prepared read: name of the agent that is read, ``fence`` or ``data``, and its descriptors.
        broken: whether the next read fails.
        held: which read waits before NIXL sees it, ``data`` or the ``fence`` behind them; ``reached`` once it does.
    """

    def __init__(self) -> None:
        self.descriptors: list[int] = []
        self.told: list[tuple[str, str, int]] = []
        self.broken = False
        self.held = ""
        self._data_seen = False
        self._let_go = threading.Event()
        self._lists: dict[int, tuple[str, str]] = {}

    def listed(self, prepared: int, name: str, rows: Any) -> None:
        """Note whose memory a prepared list names."""
        kind = "fence" if getattr(rows, "shape", (0, 0))[1:] == (5,) and rows[0, 1] == EPOCH_BYTES else "data"
        self._lists[prepared] = (name, kind)

    def prepared(self, num_descriptors: int, remote: int) -> None:
        """Count a read, or let it fail."""
        if self.broken:
            self.broken = False
            raise RuntimeError("a test lets this read fail")
        kind = self._lists.get(remote, ("", "data"))[1]
        if kind == self.held and (kind == "data" or self._data_seen):
            self.held = "reached"
            self._let_go.wait()
        self._data_seen |= kind == "data"
        self.descriptors.append(num_descriptors)
        self.told.append((*self._lists.get(remote, ("", "data")), num_descriptors))

    def hold(self, kind: str) -> None:
        """Hold the next read of a kind, or let it go on if ``kind`` is empty."""
        self.held, self._data_seen = kind, False
        (self._let_go.clear if kind else self._let_go.set)()

    def take(self) -> list[int]:
        """Return the descriptors that were counted since the last call."""
        taken, self.descriptors, self.told = self.descriptors, [], []
        return taken


READS = Reads()
"""Of this process: an engine of several ranks forks theirs when it is watched already."""


def watch() -> None:
    """Watch reads from now on; NIXL may not be loaded yet."""
    from nixl_cu12 import _bindings

    make, prepare = _bindings.nixlAgent.makeXferReq, _bindings.nixlAgent.prepXferDlist

    def made(agent: Any, operation: Any, local: Any, indices: Any, remote: Any, *rest: Any, **named: Any) -> Any:
        READS.prepared(len(indices), remote)
        return make(agent, operation, local, indices, remote, *rest, **named)

    def prepared(agent: Any, name: Any, memory: Any, rows: Any, *rest: Any, **named: Any) -> Any:
        result = prepare(agent, name, memory, rows, *rest, **named)
        READS.listed(result, name, rows)
        return result

    _bindings.nixlAgent.makeXferReq = made
    _bindings.nixlAgent.prepXferDlist = prepared


def describe(_worker: Any) -> dict[str, Any]:
    """Return what a rank says of itself: its process, ``Reads.held``, and ``Reads.told`` since the last call."""
    told = READS.told
    READS.take()
    return {"pid": os.getpid(), "reads": told, "held": READS.held}


def hold_next_read(worker: Any, rank: int, kind: str) -> None:
    """Hold the next read of one rank; see ``Reads.hold``."""
    if worker.rank == rank:
        READS.hold(kind)


def break_next_read(worker: Any, rank: int) -> None:
    """Let the next read of one rank fail; the others go on."""
    if worker.rank == rank:
        READS.broken = True
