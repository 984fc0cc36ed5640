"""Prints where vLLM's scheduler defers the reuse of blocks, and where the connector lets loads wait: a row for each."""

import itertools
import sys
import warnings
from types import SimpleNamespace

with warnings.catch_warnings(action="ignore"):  # of torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.sched.scheduler import Scheduler

from kvflow.integrations.vllm.engine import writes_late

from .engines import run_with_vllm
from .pairs import model_folder

ROLES = ("kv_producer", "kv_consumer", "kv_both")


def rows(model, patch=setattr):
    """Return for each role, runner, number of stages and kind of scheduling: whether vLLM defers, and loads wait."""
    patch(KVConnectorFactory, "create_connector", lambda **_: SimpleNamespace(requires_kv_delivery=False))
    found = []
    for role, second, stages, overlaps in itertools.product(ROLES, (False, True), (1, 2), (False, True)):
        patch(VllmConfig, "use_v2_model_runner", property(lambda _: False))  # vLLM refuses the second one on CPUs
        transfers = KVTransferConfig(kv_connector="KVFlowConnector", kv_role=role)
        config = EngineArgs(model=model, max_model_len=64, kv_transfer_config=transfers).create_engine_config()
        patch(VllmConfig, "use_v2_model_runner", property(lambda _, second=second: second))
        config.scheduler_config.async_scheduling = overlaps
        config.parallel_config.pipeline_parallel_size = stages
        config.cache_config.num_gpu_blocks = None  # at which the scheduler stops, when it has decided
        scheduler = object.__new__(Scheduler)
        try:
            scheduler.__init__(config, SimpleNamespace(kv_cache_groups=[]), None, 16)
        except AssertionError:
            found.append((scheduler.defer_block_free, config.max_concurrent_batches > 1, writes_late(config)))
    return found


def rows_of(python):
    """Return the rows of the release that an interpreter has."""
    said = run_with_vllm("-m", "tests.vllm.deferral", str(model_folder("llama")), python=python)
    lines = [line.split()[1:] for line in said.splitlines() if line.startswith("row ")]
    return [tuple(each == "1" for each in line) for line in lines]


def require_waits(found):
    """Require of rows that loads wait exactly where steps overlap and the scheduler does not defer."""
    assert len(found) == len(ROLES) * 8
    assert {defers for defers, _, _ in found} == {False, True}
    assert [waits for *_, waits in found] == [overlaps and not defers for defers, overlaps, _ in found]


if __name__ == "__main__":
    for row in rows(sys.argv[1]):
        sys.stdout.write(f"row {' '.join(str(int(each)) for each in row)}\n")
