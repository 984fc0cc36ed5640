"""kvflow moves the KV cache of a large language model from prefill workers to decode workers.

The names below are the public face; everything else may move between releases. They are loaded on first use,
so that importing kvflow loads neither torch nor nixl.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvflow import errors, models
    from kvflow.cache.tickets import Grant, RankAddress, Ticket, join_tickets
    from kvflow.config import WorkerConfig
    from kvflow.layout.compare import explain
    from kvflow.layout.groups import Group, plan_groups, window_blocks
    from kvflow.layout.manifest import Manifest
    from kvflow.layout.shards import Shard
    from kvflow.layout.specs import (
        MLA,
        ChunkedLocal,
        CrossAttention,
        FullAttention,
        Mamba,
        Opaque,
        SlidingWindow,
        State,
    )
    from kvflow.memory.adopt import adopt
    from kvflow.memory.cache import KVCache, allocate
    from kvflow.observability.logs import configure_logging
    from kvflow.rendezvous.mint import TicketKey, TicketMint
    from kvflow.transfer.costs import Calibration, Costs
    from kvflow.transfer.plan import TransferPlan, plan_transfer
    from kvflow.transfer.report import TransferReport
    from kvflow.worker.drain import DrainReport
    from kvflow.worker.handle import PullHandle
    from kvflow.worker.runtime import open_worker
    from kvflow.worker.threaded import Finished, ThreadedWorker, run_worker
    from kvflow.worker.worker import Worker

__version__ = "0.1.0"

_HOMES = {
    # describing a cache
    "FullAttention": "kvflow.layout.specs",
    "SlidingWindow": "kvflow.layout.specs",
    "ChunkedLocal": "kvflow.layout.specs",
    "CrossAttention": "kvflow.layout.specs",
    "MLA": "kvflow.layout.specs",
    "Mamba": "kvflow.layout.specs",
    "State": "kvflow.layout.specs",
    "Opaque": "kvflow.layout.specs",
    "Group": "kvflow.layout.groups",
    "plan_groups": "kvflow.layout.groups",
    "window_blocks": "kvflow.layout.groups",
    "Shard": "kvflow.layout.shards",
    "Manifest": "kvflow.layout.manifest",
    "explain": "kvflow.layout.compare",
    # having one in memory
    "KVCache": "kvflow.memory.cache",
    "allocate": "kvflow.memory.cache",
    "adopt": "kvflow.memory.adopt",
    # running a worker
    "WorkerConfig": "kvflow.config",
    "Worker": "kvflow.worker.worker",
    "open_worker": "kvflow.worker.runtime",
    "DrainReport": "kvflow.worker.drain",
    "Finished": "kvflow.worker.threaded",
    "PullHandle": "kvflow.worker.handle",
    "ThreadedWorker": "kvflow.worker.threaded",
    "run_worker": "kvflow.worker.threaded",
    "configure_logging": "kvflow.observability.logs",
    # tickets
    "Grant": "kvflow.cache.tickets",
    "RankAddress": "kvflow.cache.tickets",
    "Ticket": "kvflow.cache.tickets",
    "join_tickets": "kvflow.cache.tickets",
    "TicketKey": "kvflow.rendezvous.mint",
    "TicketMint": "kvflow.rendezvous.mint",
    # plans and reports
    "Calibration": "kvflow.transfer.costs",
    "Costs": "kvflow.transfer.costs",
    "TransferPlan": "kvflow.transfer.plan",
    "plan_transfer": "kvflow.transfer.plan",
    "TransferReport": "kvflow.transfer.report",
}

__all__ = [
    "MLA",
    "Calibration",
    "ChunkedLocal",
    "Costs",
    "CrossAttention",
    "DrainReport",
    "Finished",
    "FullAttention",
    "Grant",
    "Group",
    "KVCache",
    "Mamba",
    "Manifest",
    "Opaque",
    "PullHandle",
    "RankAddress",
    "Shard",
    "SlidingWindow",
    "State",
    "ThreadedWorker",
    "Ticket",
    "TicketKey",
    "TicketMint",
    "TransferPlan",
    "TransferReport",
    "Worker",
    "WorkerConfig",
    "adopt",
    "allocate",
    "configure_logging",
    "errors",
    "explain",
    "join_tickets",
    "models",
    "open_worker",
    "plan_groups",
    "plan_transfer",
    "run_worker",
    "window_blocks",
]


def __getattr__(name: str) -> Any:
    if name in ("errors", "models"):
        return importlib.import_module(f"kvflow.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'kvflow' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
