"""An engine whose open leases are watched in the process of each rank: what has settled, and what lies there later."""

import time
from typing import Any

from . import engine_process
from .keeping_engine import contents, runtime


class Opened:
    """The open leases of this process.

    Attributes:
        told: name -> what settled at each time, as block ids of each group, and what lay in these blocks then.
        ended: name, how the lease was left, how often something had settled, and whether all of that was unchanged.
    """

    def __init__(self) -> None:
        self.told: dict[str, list[tuple[Any, bytes]]] = {}
        self.ended: list[tuple[str, str, int, bool]] = []

    def watch(self) -> None:
        """Watch from now on; ranks that are forked later do, too."""
        from kvflow.integrations.vllm.worker import RankWorker

        tell, withdraw = RankWorker._tell, RankWorker._withdraw

        def told(rank: Any, command: Any) -> None:
            name = command.request_id
            if command.num_tokens is not None:
                if command.block_ids:  # otherwise it only renews the lease
                    self.told.setdefault(name, []).append((command.block_ids, contents(command.block_ids)))
            else:
                self.leave(name, "sealed")
            tell(rank, command)

        def withdrawn(rank: Any, names: Any) -> None:
            for name in names:
                self.leave(name, "withdrawn")
            withdraw(rank, names)

        RankWorker._tell, RankWorker._withdraw = told, withdrawn  # type: ignore[method-assign]

    def leave(self, name: str, how: str) -> None:
        told = self.told.pop(name, [])
        self.ended.append((name, how, len(told), all(contents(ids) == before for ids, before in told)))


OPENED = Opened()


def describe(_worker: Any) -> dict[str, Any]:
    """Return the leases that a rank holds, by kind, what ``Opened`` has seen, and the phase and bytes of each pull."""
    snapshot = runtime()._worker.snapshot()
    return {
        "held": [(lease.request_id, lease.kind) for lease in snapshot.held_leases],
        "ended": OPENED.ended,
        "pulls": [(pull.phase, pull.nbytes) for pull in snapshot.open_pulls],
    }


class Served(engine_process.Served):
    """An engine that preempts requests and waits on demand, and tells of open leases; see ``engine_process``.

    =======  ==========  ======================================================================================
    op       fields      answer
    =======  ==========  ======================================================================================
    preempt  id, times   id; before so many of the next steps, every request that has computed some is preempted
    gather   id, number  id; the next step waits until so many requests are on offer
    halt     id, tokens  id; once a request has so many computed, no step follows; 0 ends this
    opened   id          id, ranks: ``describe`` of each
    waiting  id          id, number: requests that hold a ticket of which nothing has settled
    =======  ==========  ======================================================================================
    """

    ops = engine_process.Served.ops | {"preempt", "gather", "halt", "opened", "waiting"}

    def __init__(self, *arguments: Any) -> None:
        OPENED.watch()
        self.preemptions = self.gathered = self.halted = 0
        super().__init__(*arguments)

    def preempt(self, command: dict[str, Any]) -> None:
        self.preemptions = command["times"]
        self.answer(id=command["id"])

    def gather(self, command: dict[str, Any]) -> None:
        self.gathered = command["number"]
        self.answer(id=command["id"])

    def halt(self, command: dict[str, Any]) -> None:
        self.halted = command["tokens"]
        self.answer(id=command["id"])

    def opened(self, command: dict[str, Any]) -> None:
        self.answer(id=command["id"], ranks=self.core.model_executor.collective_rpc(describe))

    def waiting(self, command: dict[str, Any]) -> None:
        meetings = [*self.scheduler.connector._scheduler_side._finder._meetings.values()]
        self.answer(id=command["id"], number=sum(each.given is not None and not each.asked.done() for each in meetings))

    def step(self) -> None:
        if self.halted and any(request.num_computed_tokens >= self.halted for request in self.scheduler.running):
            time.sleep(engine_process.IDLE_S)
            return
        if self.gathered:
            wanted = self.scheduler.connector._scheduler_side.offering._wanted.values()
            if sum(each.told >= 0 for each in wanted) < self.gathered:
                time.sleep(engine_process.IDLE_S)
                return
            self.gathered = 0
        if self.preemptions and any(request.num_computed_tokens for request in self.scheduler.running):
            self.preemptions -= 1
            while self.scheduler.running:  # as vLLM does between two steps, if its prefix cache is reset
                self.scheduler._preempt_request(self.scheduler.running.pop(), 0.0)
        super().step()
