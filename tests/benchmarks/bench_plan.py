"""How long does it take to plan a transfer, anew and from the cache of plans, and to bind block ids to a plan?

Planned: 80 layers of 8 heads of 128 in bfloat16, blocks of 16 tokens: tensors per layer with keys and values apart,
which is the worst case for heads, and packed rows. Bounds: 50 ms cold, because a peer that is met for the first time
waits for it, and 5 us cached, because every pull asks.

Bound: 64 blocks of 8 layers; 607 blocks of 28 layers with keys and values apart; 8192 blocks, which are 131,072 tokens,
of 64 layers. Ids ascend or are random, and chunks are those of a pull, or one for all. The floor is what NumPy needs
for the same two arrays and nothing else: an outer sum each. Bounds: 25 us, 150 us, 3 ms.

    python tests/benchmarks/bench_plan.py [--rounds 50]
"""

# ruff: noqa: T201  # a benchmark prints

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from msgspec import Struct

from kvflow.ids import Int32s
from kvflow.layout.component import Region
from kvflow.layout.describe import plan_cache
from kvflow.layout.groups import plan_groups
from kvflow.layout.manifest import Manifest
from kvflow.layout.shards import Shard
from kvflow.layout.specs import FullAttention
from kvflow.planning.bind import Binding
from kvflow.planning.pairs import UnitPairs
from kvflow.planning.plan import PlanCache, plan_transfer

COLD_BOUND_US = 50_000
CACHED_BOUND_US = 5
CACHED_CALLS = 1000
"""Calls in one sample: the clock itself takes a fifth of a microsecond."""

FORMS = {"per layer, split": ("LBNHC", "split"), "packed": ("BLHNC", "content")}

UNCHUNKED = 1 << 62
STRETCHES, STRETCH_ROUNDS = 10, 4
"""Binding is measured in so many stretches, and in each in so many times the rounds of planning."""
CHUNKINGS = {"of a pull": (8 << 20, 256), "one": (UNCHUNKED, UNCHUNKED)}
"""Most bytes, and most merged descriptors, of one chunk."""


def specs_of(num_layers: int, num_kv_heads: int) -> Mapping[str, FullAttention]:
    spec = FullAttention(block_size=16, num_kv_heads=num_kv_heads, head_size=128, dtype="bfloat16")
    return {f"model.layers.{index}.self_attn.attn": spec for index in range(num_layers)}


def manifest(specs: Mapping[str, FullAttention], layout: str, kv: str, shard: Shard, num_blocks: int) -> Manifest:
    """Describe the cache of one rank."""
    groups = plan_groups(specs, layout=layout, shard=shard)
    cache = plan_cache(specs, groups, layout=layout, kv=kv, shard=shard, num_blocks=num_blocks)
    return cache.manifest(Region(1 << 30, cache.nbytes))


class Case(Struct, frozen=True):
    """A cache, how many of its blocks are read, and how long binding them may take."""

    num_layers: int
    kv: str
    num_kv_heads: int
    num_blocks: int
    bound_us: float

    def binding(self) -> Binding:
        """Bind the plan between two caches of this form."""
        cache = manifest(specs_of(self.num_layers, self.num_kv_heads), "LBNHC", self.kv, Shard(), self.num_blocks)
        (group,) = plan_transfer(cache, cache).groups
        return Binding(group, cache, cache)


CASES = (
    Case(8, "content", 8, 64, 25),
    Case(8, "content", 1, 64, 25),
    Case(28, "split", 4, 607, 150),
    Case(64, "content", 8, 8192, 3000),
    Case(64, "content", 1, 8192, 3000),
)


def floor(first: Int32s, numbers: Int32s) -> tuple[Int32s, Int32s]:
    """Compute two arrays of that size as plainly as NumPy can."""
    return (first + numbers).ravel(), (first + numbers).ravel()


def microseconds(functions: Sequence[Callable[[], object]], *, rounds: int, calls: int = 1) -> list[float]:
    """Return the median time of one call of each. They take turns, so that all find memory in the same state."""
    samples: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, times in zip(functions, samples, strict=True):
            started = time.perf_counter()
            for _ in range(calls):
                function()
            times.append((time.perf_counter() - started) / calls * 1e6)
    return [statistics.median(times) for times in samples]


def measure_plans(rounds: int) -> bool:
    """Print the medians of planning beside their bounds; return whether all are kept."""
    print(f"{'':36}{'runs':>7}{'cold ms':>10}{'bound':>7}{'cached us':>11}{'bound':>7}")
    specs, kept = specs_of(80, 8), True
    for source_form, target_form, source_tp, target_tp in (
        ("per layer, split", "per layer, split", 8, 4),
        ("packed", "packed", 8, 4),
        ("per layer, split", "packed", 8, 4),
        ("packed", "packed", 8, 8),
    ):
        source = manifest(specs, *FORMS[source_form], Shard(tp_size=source_tp), 4096)
        target = manifest(specs, *FORMS[target_form], Shard(tp_size=target_tp), 4096)
        plans = PlanCache()
        runs = sum(len(group.runs) for group in plans.plan(source, target).groups)
        (cold,) = microseconds([partial(plan_transfer, source, target)], rounds=rounds)
        (cached,) = microseconds([partial(plans.plan, source, target)], rounds=rounds, calls=CACHED_CALLS)
        title = f"{source_form} -> {target_form}, TP {source_tp} -> {target_tp}"
        print(f"{title:36.36}{runs:7}{cold / 1e3:10.2f}{COLD_BOUND_US // 1000:7}{cached:11.2f}{CACHED_BOUND_US:7}")
        kept &= cold <= COLD_BOUND_US and cached <= CACHED_BOUND_US
    print("kept" if kept else "MISSED")
    return kept


def measure_bindings(rounds: int) -> None:
    """Print the lowest of some medians of binding, because neighbors slow stretches, beside their bounds.

    A bound that is missed is only said: where neighbors slow the machine, the floor doubles, and so does the rest.
    """
    print(f"{'descriptors':>11}  {'ids':10}  {'chunks':>15}{'bind us':>9}{'floor':>9}{'bound':>8}")
    for case in CASES:
        binding = case.binding()
        ascending = np.arange(case.num_blocks, dtype=np.int64)
        targets = {"ascending": ascending, "random": np.random.default_rng(0).permutation(ascending)}
        first = np.arange(binding.unit_descriptors, dtype=np.int32)[:, None] * np.int32(case.num_blocks)
        plain = partial(floor, first, ascending.astype(np.int32))
        for ids, target in targets.items():
            pairs = UnitPairs(ascending, target)
            for chunking, (nbytes, descriptors) in CHUNKINGS.items():
                bind = partial(binding.bind, pairs, chunk_bytes=nbytes, chunk_descriptors=descriptors)
                bound = bind()
                stretches = [microseconds((bind, plain), rounds=rounds) for _ in range(STRETCHES)]
                median, least = map(min, zip(*stretches, strict=True))
                chunks = f"{chunking}, {len(bound.cuts) - 1}"
                print(
                    f"{len(bound.source_index):11,}  {ids:10}  {chunks:>15}"
                    f"{median:9.1f}{least:9.1f}{case.bound_us:8.0f}  {'MISSED' if median > case.bound_us else 'kept'}"
                )


def main() -> int:
    """Measure both; the exit status is 1 if a bound of planning is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50)
    rounds = parser.parse_args().rounds
    print(f"{platform.platform()}, Python {platform.python_version()}, NumPy {np.__version__}, medians of rounds")
    kept = measure_plans(rounds)
    measure_bindings(STRETCH_ROUNDS * rounds)
    return int(not kept)


if __name__ == "__main__":
    sys.exit(main())
