"""One engine that reads one request: a pull on each of its ranks, and what must be true of how each ends."""

import asyncio
from typing import TYPE_CHECKING, Any

from kvflow.cache.tickets import Ticket
from kvflow.errors import (
    CapacityExceeded,
    DeadlineExceeded,
    KvflowError,
    PeerLost,
    PeerRefused,
    PeerUnavailable,
    ProtocolViolation,
    StaleLease,
    TicketInvalid,
    TransferCancelled,
    TransferFailed,
    WorkerClosed,
    WorkerDraining,
)
from kvflow.layout.groups import window_blocks
from kvflow.testing.engines import Engine, Rank
from kvflow.testing.world import World
from kvflow.worker.worker import Worker

if TYPE_CHECKING:
    from kvflow.testing.requests import Request

EXPECTED = (
    CapacityExceeded,
    DeadlineExceeded,
    PeerLost,
    PeerRefused,
    PeerUnavailable,
    ProtocolViolation,
    StaleLease,
    TransferCancelled,
    WorkerClosed,
    WorkerDraining,
)
"""What a correct call may end with while faults happen. Any other error says that the caller was wrong, who was not."""


class Reading:
    """One engine that reads one request: a pull on each of its ranks, into the same blocks."""

    def __init__(self, world: World, request: "Request", engine: Engine, params: dict[str, Any], reading: int) -> None:
        self._world = world
        self._request = request
        self._engine = engine
        self._params = params
        self._name = f"{request.name}.{engine.name}.{reading}"
        self._number = next(engine.setting.pulls)
        self._block_ids: list[list[int]] = []
        self._blocks: list[int] = []
        self._left = len(engine.ranks)

    def begin(self) -> None:
        """Claim blocks, and pull on every rank."""
        plan = self._request.plan
        counts = [window_blocks(group, plan.num_tokens) for group in self._engine.groups]
        counts[0] = max(1, counts[0] - plan.skipped)
        claimed = self._engine.claim(sum(counts))
        if claimed is None:
            self._request.outcomes.append("no blocks")
            return
        self._blocks = list(claimed)
        self._block_ids = [[claimed.pop(0) for _ in range(number)] for number in counts]
        for rank in self._engine.ranks:
            rank.own(self._blocks, self._number)
            self._request.begun()
            task = rank.process.create_task(self._drive(rank), name=f"drive {self._name}")
            if plan.cancel_s is not None:
                self._world.after(plan.cancel_s, rank.process.call_soon, task.cancel)
        self._engine.call_when_killed(self._on_kill)

    def _on_kill(self) -> None:
        for _ in range(self._left):
            self._request.over("reader killed")
        self._left = 0

    async def _drive(self, rank: Rank) -> None:
        """Pull on one rank, look at the bytes, use them for a while, and give the blocks back."""
        try:
            outcome = await self._read(rank)
        except asyncio.CancelledError:  # before it had begun to pull, or while it used the bytes
            outcome = "cancelled"
        except BaseException as error:  # noqa: BLE001 - a scenario ends with the first defect
            self._world.fail(error)
            return
        if not rank.engine.alive:
            return
        rank.disown(self._blocks)
        self._left -= 1
        if not self._left:
            self._engine.give_back(self._blocks)
        self._world.note(rank.name, "ended", self._name, outcome)
        self._request.over(outcome)

    async def _read(self, rank: Rank) -> str:
        request, plan, worker = self._request, self._request.plan, rank.worker
        if worker is None:
            return "not open"
        try:
            ticket = Ticket.from_params(self._params)
            if plan.unread:
                request.gave_back(rank)
                await worker.release(ticket)
                return "given back"
            await worker.pull(ticket, self._block_ids, priority=plan.priority)
        except asyncio.CancelledError:
            request.gave_back(rank)  # it may have been complete by then
            await self._quiesced(worker)
            return "cancelled"
        except KvflowError as error:
            self._judge(rank, error)
            if isinstance(error, TransferFailed) and error.quarantined:
                await self._quiesced(worker)
            return error.code
        if plan.forged:
            self._world.fail(f"{rank.name}: a forged ticket of {request.name} was read")
        request.gave_back(rank)
        self._look(rank, "was delivered")
        await asyncio.sleep(self._world.delay(plan.keep_s))
        self._look(rank, "was changed after its delivery")
        return "completed"

    async def _quiesced(self, worker: Worker) -> None:
        """Wait for quiescence, whoever cancels."""
        while True:
            try:
                await worker.quiesced(self._request.name)
            except asyncio.CancelledError:
                if not self._engine.alive:
                    raise
            else:
                return

    def _look(self, rank: Rank, when: str) -> None:
        wrong = rank.cache.wrong(self._block_ids, self._request.written)
        if wrong:
            self._world.fail(f"{rank.name}: {self._request.name} {when} wrong: {wrong}")

    def _judge(self, rank: Rank, error: KvflowError) -> None:
        """Check that an error is one that this call may end with."""
        self._world.note(rank.name, "error", self._name, error)
        plan, request = self._request.plan, self._request
        if plan.forged:
            right = isinstance(error, TicketInvalid | WorkerClosed)
        else:
            right = isinstance(error, EXPECTED) or type(error) is TransferFailed
        if not right:
            self._world.fail(f"{rank.name}: {request.name} ended with {error!r}")
        if isinstance(error, StaleLease) and not request.stale():
            self._world.fail(f"{rank.name}: {request.name} is held, and was called stale: {error}")
