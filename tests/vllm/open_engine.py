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
        from kvflow.integrations.vllm.messages import Advance
        from kvflow.integrations.vllm.worker import RankWorker

        tell, withdraw = RankWorker._tell, RankWorker._withdraw

        def told(rank: Any, command: Any) -> None:
            name = command.request_id
            if isinstance(command, Advance):
                if command.block_ids:  # otherwise it only renews the lease
                    self.told.setdefault(name, []).append((command.block_ids, contents(command.block_ids)))
            else:
                self.leave(name, "sealed")
            tell(rank, command)

        def withdrawn(rank: Any, name: str) -> None:
            self.leave(name, "withdrawn")
            withdraw(rank, name)

        RankWorker._tell, RankWorker._withdraw = told, withdrawn  # type: ignore[method-assign]

    def leave(self, name: str, how: str) -> None:
        told = self.told.pop(name, [])
        self.ended.append((name, how, len(told), all(contents(ids) == before for ids, before in told)))


OPENED = Opened()


def describe(_worker: Any) -> dict[str, Any]:
    """Return the leases that a rank holds, by kind, and what ``Opened`` has seen."""
    leases = runtime()._worker.snapshot().held_leases
    return {"held": [(lease.request_id, lease.kind) for lease in leases], "ended": OPENED.ended}


class Served(engine_process.Served):
    """An engine that preempts requests on demand, and tells of its open leases; see ``engine_process``.

    =======  ==========  ======================================================================================
    op       fields      answer
    =======  ==========  ======================================================================================
    preempt  id, times   id; before so many of the next steps, every request that has computed some is preempted
    gather   id, number  id; the next step waits until so many requests are on offer
    opened   id          id, ranks: ``describe`` of each
    =======  ==========  ======================================================================================
    """

    ops = engine_process.Served.ops | {"preempt", "gather", "opened"}

    def __init__(self, *arguments: Any) -> None:
        OPENED.watch()
        self.preemptions = self.gathered = 0
        super().__init__(*arguments)

    def preempt(self, command: dict[str, Any]) -> None:
        self.preemptions = command["times"]
        self.answer(id=command["id"])

    def gather(self, command: dict[str, Any]) -> None:
        self.gathered = command["number"]
        self.answer(id=command["id"])

    def opened(self, command: dict[str, Any]) -> None:
        self.answer(id=command["id"], ranks=self.core.model_executor.collective_rpc(describe))

    def step(self) -> None:
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
