"""An engine whose kept leases are watched in the process of each rank: their ends, and what lies in their blocks."""

import itertools
from typing import Any

from . import engine_process


class Kept:
    """The kept leases of this process.

    Attributes:
        held: name -> block ids of each group, and what lay in the blocks when the lease began.
        ended: name, whether the blocks were unchanged just before the lease ended, and the two of ``held``.
    """

    def __init__(self) -> None:
        self.held: dict[str, tuple[Any, bytes]] = {}
        self.ended: list[tuple[str, bool, Any, bytes]] = []

    def watch(self) -> None:
        """Watch from now on; ranks that are forked later do, too."""
        from kvflow.integrations.vllm.messages import KeepBlocks
        from kvflow.integrations.vllm.worker import RankWorker

        execute, revoke = RankWorker._execute, RankWorker.revoke

        def executed(rank: Any, command: Any) -> None:
            execute(rank, command)
            if isinstance(command, KeepBlocks):
                self.held[command.request_id] = command.grant.block_ids, contents(command.grant.block_ids)

        def revoked(rank: Any, names: Any) -> None:
            for name in names:
                if name in self.held:
                    block_ids, before = self.held.pop(name)
                    self.ended.append((name, contents(block_ids) == before, block_ids, before))
            revoke(rank, names)

        RankWorker._execute, RankWorker.revoke = executed, revoked  # type: ignore[method-assign]


KEPT = Kept()


def runtime() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._runtime


def contents(block_ids: Any) -> bytes:
    """Return what lies in blocks, of all layers of each group."""
    import torch

    cache, found = runtime()._cache, []
    for group, ids in zip(cache.groups, block_ids, strict=True):
        for layer, role, block in itertools.product(group.layers, "kv", [block for block in ids if block >= 0]):
            found.append(cache.component(layer, role)[block].contiguous().view(torch.uint8).numpy().tobytes())
    return b"".join(found)


def describe(_worker: Any) -> dict[str, Any]:
    """Return the names of the leases that a rank keeps, and those that have ended.

    Of each one: its name, whether its blocks were unchanged when it ended, and whether they are unchanged now.
    """
    leases = runtime()._worker.snapshot().held_leases
    return {
        "kept": [lease.request_id for lease in leases if lease.kind == "kept"],
        "ended": [(name, intact, contents(ids) == before) for name, intact, ids, before in KEPT.ended],
    }


def spoil_windows(_worker: Any) -> None:
    """Change the blocks of sliding windows of all leases that a rank keeps."""
    cache = runtime()._cache
    for block_ids, _ in KEPT.held.values():
        for group, ids in zip(cache.groups, block_ids, strict=True):
            for layer, role, block in itertools.product(group.layers if group.window else (), "kv", ids):
                if block >= 0:
                    cache.component(layer, role)[block].fill_(100.0)


def refuse_next(_worker: Any) -> None:
    """Have the second rank refuse the next lease."""
    from kvflow.errors import CapacityExceeded

    worker = runtime()._worker

    def refused(*_: Any) -> None:
        del worker.admit
        raise CapacityExceeded("leases", 0)

    if worker.rank_address.rank == 1:
        worker.admit = refused


class Served(engine_process.Served):
    """An engine that tells of its free blocks and of what it keeps; see ``engine_process``.

    ======  ======  ========================================================================================
    op      fields  answer
    ======  ======  ========================================================================================
    pool    id      when no step is due: id, order: ids of the free blocks, the next one first; and as ``kept``
    kept    id      at once: id, ranks: ``describe`` of each
    refuse  id      id: the second rank will refuse the next lease
    spoil   id      id: ``spoil_windows`` of each
    ======  ======  ========================================================================================
    """

    ops = engine_process.Served.ops | {"pool", "kept", "refuse", "spoil"}

    def __init__(self, *arguments: Any) -> None:
        KEPT.watch()
        super().__init__(*arguments)

    def pool(self, command: dict[str, Any]) -> None:
        while self.scheduler.has_requests():
            self.step()
        queue = self.scheduler.kv_cache_manager.block_pool.free_block_queue
        order = [block.block_id for block in queue.get_all_free_blocks()]
        self.answer(id=command["id"], order=order, ranks=self.core.model_executor.collective_rpc(describe))

    def kept(self, command: dict[str, Any]) -> None:
        self.answer(id=command["id"], ranks=self.core.model_executor.collective_rpc(describe))

    def refuse(self, command: dict[str, Any]) -> None:
        self.core.model_executor.collective_rpc(refuse_next)
        self.answer(id=command["id"])

    def spoil(self, command: dict[str, Any]) -> None:
        self.core.model_executor.collective_rpc(spoil_windows)
        self.answer(id=command["id"])
