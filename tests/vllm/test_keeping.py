"""Kept leases with vLLM's own block pool, which the tests without vLLM imitate."""

import warnings

import pytest

from tests.unit.kvflow.integrations import test_vllm_keeping as unit
from tests.unit.kvflow.integrations.conftest import closed_sides  # noqa: F401 - a fixture
from tests.unit.kvflow.integrations.vllm_like import NUM_BLOCKS

with warnings.catch_warnings(action="ignore"):  # of torch
    from vllm.v1.core.block_pool import BlockPool


class Pool(BlockPool):
    """vLLM's block pool, with the helpers of those tests."""

    def __init__(self):
        super().__init__(NUM_BLOCKS, enable_caching=True, hash_block_size=16)
        self._filled = 0

    def hash(self, block):
        self._filled += 1
        self._insert_block_hash(self._filled.to_bytes(36, "big"), block, num_tokens=16)

    def order(self):
        return [block.block_id for block in self.free_block_queue.get_all_free_blocks()]


@pytest.fixture
def new_pool():
    return Pool


pool = unit.pool
globals().update({name: found for name, found in vars(unit).items() if name.startswith("test_")})
