"""How long does it take to plan a transfer, anew and from the cache of plans?

80 layers of 8 heads of 128 in bfloat16, blocks of 16 tokens: tensors per layer with keys and values apart, which is
the worst case for heads, and packed rows. Bounds: 50 ms cold, because a peer that is met for the first time waits for
it, and 5 us cached, because every pull asks.

    python tests/benchmarks/bench_plan.py [--rounds 50]
"""

# ruff: noqa: T201  # a benchmark prints

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable

from kvflow.layout.component import Region
from kvflow.layout.describe import plan_cache
from kvflow.layout.groups import plan_groups
from kvflow.layout.manifest import Manifest
from kvflow.layout.shards import Shard
from kvflow.layout.specs import FullAttention
from kvflow.planning.plan import PlanCache, plan_transfer

COLD_BOUND_US = 50_000
CACHED_BOUND_US = 5
CACHED_CALLS = 1000
"""Calls in one sample: the clock itself takes a fifth of a microsecond."""

SPECS = {
    f"model.layers.{index}.self_attn.attn": FullAttention(
        block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16"
    )
    for index in range(80)
}
FORMS = {"per layer, split": ("LBNHC", "split"), "packed": ("BLHNC", "content")}


def manifest(layout: str, kv: str, shard: Shard) -> Manifest:
    """Describe the cache of one rank."""
    groups = plan_groups(SPECS, layout=layout, shard=shard)
    cache = plan_cache(SPECS, groups, layout=layout, kv=kv, shard=shard, num_blocks=4096)
    return cache.manifest(Region(1 << 30, cache.nbytes))


def microseconds(function: Callable[[], object], *, rounds: int, calls: int = 1) -> float:
    """Return the median time of one call."""
    samples = []
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(calls):
            function()
        samples.append((time.perf_counter() - started) / calls * 1e6)
    return statistics.median(samples)


def main() -> int:
    """Print the medians beside their bounds; the exit status is 1 if one is over."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50)
    rounds = parser.parse_args().rounds
    print(f"{platform.platform()}, Python {platform.python_version()}, medians of {rounds} rounds")
    print(f"{'':36}{'runs':>7}{'cold ms':>10}{'bound':>7}{'cached us':>11}{'bound':>7}")
    missed = False
    for source_form, target_form, source_tp, target_tp in (
        ("per layer, split", "per layer, split", 8, 4),
        ("packed", "packed", 8, 4),
        ("per layer, split", "packed", 8, 4),
        ("packed", "packed", 8, 8),
    ):
        source = manifest(*FORMS[source_form], Shard(tp_size=source_tp))
        target = manifest(*FORMS[target_form], Shard(tp_size=target_tp))
        plans = PlanCache()
        runs = sum(len(group.runs) for group in plans.plan(source, target).groups)
        cold = microseconds(lambda s=source, t=target: plan_transfer(s, t), rounds=rounds)
        cached = microseconds(lambda p=plans, s=source, t=target: p.plan(s, t), rounds=rounds, calls=CACHED_CALLS)
        title = f"{source_form} -> {target_form}, TP {source_tp} -> {target_tp}"
        print(f"{title:36.36}{runs:7}{cold / 1e3:10.2f}{COLD_BOUND_US // 1000:7}{cached:11.2f}{CACHED_BOUND_US:7}")
        missed |= cold > COLD_BOUND_US or cached > CACHED_BOUND_US
    print("MISSED" if missed else "kept")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
