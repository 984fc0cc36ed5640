"""Clocks of several machines as one: workers are compared by handshakes, routers by the order of events."""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from kvflow.events import PeerConnected
from kvflow.tools.trace.model import ComparedClock
from kvflow.tools.trace.records import Logged, PullEnded

Edges = dict[str, list[tuple[float, str, float]]]
"""Worker -> of each handshake with it: error, the other worker, and by how much that one's clock is ahead."""


class Clocks:
    """How far each clock is ahead of a reference, which is the worker with most pulls among those that have met.

    Args:
        records: records of all files.
    """

    def __init__(self, records: Sequence[Logged]) -> None:
        self._by_name: dict[str, ComparedClock] = {}
        self._of_file: dict[int, str] = {}
        self._routers: dict[tuple[int, str], ComparedClock] = {}
        edges: Edges = {}
        pulls: dict[str, int] = {}
        files: dict[str, int] = {}
        for each in records:
            event, worker = each.event, each.worker
            if not worker:
                continue
            files.setdefault(worker, each.file)
            self._of_file.setdefault(each.file, worker)
            pulls[worker] = pulls.get(worker, 0) + isinstance(event, PullEnded)
            if isinstance(event, PeerConnected) and event.clock_ahead_s is not None:
                ahead_s, error_s = event.clock_ahead_s, abs(event.clock_error_s or 0.0)
                edges.setdefault(worker, []).append((error_s, event.peer, ahead_s))
                edges.setdefault(event.peer, []).append((error_s, worker, -ahead_s))
        for worker in sorted(pulls, key=lambda worker: -pulls[worker]):
            if worker not in self._by_name and not self._share(worker, files):
                self._by_name[worker] = ComparedClock(worker, worker, 0.0, 0.0, "reference")
                self._follow(worker, edges)

    def _follow(self, reference: str, edges: Edges) -> None:
        """Reach workers over handshakes, those with the smallest sum of errors first."""
        waiting = [(0.0, reference, 0.0)]
        done: set[str] = set()
        while waiting:
            error_s, worker, ahead_s = heappop(waiting)
            if worker in done:
                continue
            done.add(worker)
            if worker != reference:
                self._by_name[worker] = ComparedClock(worker, reference, ahead_s, error_s, "handshake")
            best: dict[str, tuple[float, str, float]] = {}
            for edge in edges.get(worker, ()):
                if edge[1] not in done and (edge[1] not in best or edge < best[edge[1]]):
                    best[edge[1]] = edge
            for edge_s, peer, step_s in best.values():
                heappush(waiting, (error_s + edge_s, peer, ahead_s + step_s))

    def _share(self, worker: str, files: dict[str, int]) -> bool:
        """Give a worker the clock of another one that writes into the same file, so on the same machine."""
        of_file = self._by_name.get(self._of_file[files[worker]])
        if of_file is not None:
            self._by_name[worker] = ComparedClock(worker, of_file.reference, of_file.ahead_s, of_file.error_s, "file")
        return of_file is not None

    def of(self, worker: str) -> ComparedClock:
        """Return the clock of a worker."""
        return self._by_name.get(worker) or ComparedClock(worker, worker, 0.0, None, "nothing")

    def of_router(self, file: int, reference: str) -> ComparedClock:
        """Return the clock of a router beside a reference.

        Args:
            file: number of the router's file.
            reference: worker that the clock is compared with; empty if none is concerned.
        """
        if file in self._of_file:
            return self.of(self._of_file[file])
        found = self._routers.get((file, reference))
        return found or ComparedClock(
            f"router of file {file + 1}", reference, 0.0, 0.0 if not reference else None, "nothing"
        )

    def add_router(self, file: int, reference: str, bounds: Iterable[tuple[float, float]]) -> None:
        """Compare the clock of a router with a reference.

        Args:
            file: number of the router's file.
            reference: worker to compare it with.
            bounds: least and largest offset that each request allows: its offer comes before the end of its prefill,
                and that before its pull.
        """
        low, high = float("-inf"), float("inf")
        for least, most in bounds:
            low, high = max(low, least), min(high, most)
        if low <= high and low > float("-inf") and high < float("inf"):
            ahead_s = 0.0 if low <= 0.0 <= high else (low + high) / 2
            name, error_s = f"router of file {file + 1}", max(high - ahead_s, ahead_s - low)
            self._routers[file, reference] = ComparedClock(name, reference, ahead_s, error_s, "order")

    def all(self) -> list[ComparedClock]:
        """Return all clocks."""
        return [*self._by_name.values(), *self._routers.values()]
