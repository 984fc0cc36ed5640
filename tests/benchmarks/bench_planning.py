"""How long does it take to plan the cache of a large compound model, its memory aside?

128 layers in the manner of DeepSeek-V4: latents of 512, an indexer's keys of 128, and sliding windows. Bound: 50 ms for
everything from specs to a manifest, because an engine does it while it starts; the plan of a transfer stands beside it.

    python tests/benchmarks/bench_planning.py [--rounds 30]
"""

# ruff: noqa: T201  # a benchmark prints

import argparse
import platform
import statistics
import time
from itertools import pairwise

from kvflow.layout.component import Region
from kvflow.layout.describe import plan_cache
from kvflow.layout.groups import plan_groups, resolve_layout
from kvflow.layout.shards import Shard
from kvflow.layout.specs import MLA, CacheSpec
from kvflow.planning.plan import plan_transfer

BOUND_MS = 50
KINDS: tuple[CacheSpec, ...] = (
    MLA(block_size=64, head_size=512, dtype="bfloat16"),
    MLA(block_size=64, head_size=128, dtype="bfloat16"),
    MLA(block_size=64, head_size=512, dtype="bfloat16", sliding_window=128),
    MLA(block_size=64, head_size=512, dtype="bfloat16"),
)


def one_round() -> dict[str, float]:
    """Plan once; return the milliseconds of each step."""
    specs = {f"model.layers.{index}.attn": KINDS[index % len(KINDS)] for index in range(128)}
    marks = [time.perf_counter()]
    layout = resolve_layout(specs, "auto")
    groups = plan_groups(specs, layout=layout)
    marks.append(time.perf_counter())
    cache = plan_cache(specs, groups, layout=layout, kv="content", shard=Shard(), num_blocks=4096)
    marks.append(time.perf_counter())
    manifest = cache.manifest(Region(1 << 30, cache.nbytes))
    manifest.check()
    marks.append(time.perf_counter())
    plan_transfer(manifest, manifest)
    marks.append(time.perf_counter())
    steps = [(end - start) * 1e3 for start, end in pairwise(marks)]
    return dict(zip(("groups", "placement", "manifest", "transfer"), steps, strict=True))


def main() -> None:
    """Print the median of each step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = [one_round() for _ in range(parser.parse_args().rounds)]
    medians = {step: statistics.median(each[step] for each in rounds) for step in rounds[0]}
    total = statistics.median(sum(each.values()) - each["transfer"] for each in rounds)
    print(f"{platform.platform()}, medians of {len(rounds)} rounds, ms")
    print("  ".join(f"{step} {value:.1f}" for step, value in medians.items()))
    print(f"specs to manifest: {total:.1f} ms, bound {BOUND_MS} ms: {'kept' if total <= BOUND_MS else 'MISSED'}")


if __name__ == "__main__":
    main()
