"""What the tests of transfers share: caches in a word, and one group plan with a chosen ratio of blocks."""

import numpy as np

from kvflow.layout.shards import Shard
from kvflow.layout.specs import FullAttention, SlidingWindow
from kvflow.memory.cache import allocate
from kvflow.planning.bind import Binding
from kvflow.planning.pairs import UnitPairs
from kvflow.planning.plan import plan_transfer


def full(block_size=16, num_kv_heads=2, head_size=8, dtype="float16", **fields):
    return FullAttention(block_size=block_size, num_kv_heads=num_kv_heads, head_size=head_size, dtype=dtype, **fields)


def sliding(block_size=16, num_kv_heads=2, head_size=8, dtype="float16", window=64):
    return SlidingWindow(
        block_size=block_size, num_kv_heads=num_kv_heads, head_size=head_size, dtype=dtype, window=window
    )


def manifest_of(specs, *, tp=(0, 1), num_blocks=4, layout="BLHNC", kv="content", groups=None):
    """The manifest of a cache on torch's ``meta`` device: it costs no memory."""
    shard = Shard(tp_rank=tp[0], tp_size=tp[1])
    return allocate(
        specs, num_blocks=num_blocks, layout=layout, kv=kv, groups=groups, shard=shard, device="meta"
    ).manifest()


def group_plan(source_block_size=16, target_block_size=16, **how):
    """The plan of a single full attention layer."""
    source = manifest_of({"a": full(source_block_size)}, **how)
    target = manifest_of({"a": full(target_block_size)}, **how)
    return plan_transfer(source, target).groups[0]


def binding_of(plan, source, target, index=0):
    return Binding(plan.groups[index], source, target)


def ids(*numbers):
    return np.array(numbers, np.int64)


def unit_pairs(source, target):
    return UnitPairs(tuple(source), tuple(target))
