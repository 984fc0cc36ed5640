"""How long does it take to turn pairs of blocks into the indices of descriptors?

Three sizes: 64 blocks of 8 layers; 607 blocks of 28 layers with keys and values apart; 8192 blocks, which are 131,072
tokens, of 64 layers. Ids ascend or are random, and chunks are those of a pull, or one for all. The floor is what NumPy
needs for the same two arrays and nothing else: an outer sum each. Bounds: 25 us, 150 us, 3 ms.

    python tests/benchmarks/bench_bind.py [--rounds 200]
"""

# ruff: noqa: T201  # a benchmark prints

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from msgspec import Struct

from kvflow.ids import Int32s
from kvflow.layout.component import Region
from kvflow.layout.describe import plan_cache
from kvflow.layout.groups import plan_groups
from kvflow.layout.shards import Shard
from kvflow.layout.specs import FullAttention
from kvflow.planning.bind import Binding
from kvflow.planning.pairs import UnitPairs
from kvflow.planning.plan import plan_transfer

UNCHUNKED = 1 << 62
STRETCHES = 10
CHUNKINGS = {"of a pull": (8 << 20, 256), "one": (UNCHUNKED, UNCHUNKED)}
"""Most bytes, and most merged descriptors, of one chunk."""


class Case(Struct, frozen=True):
    """A cache, how many of its blocks are read, and how long binding them may take."""

    num_layers: int
    kv: str
    num_kv_heads: int
    num_blocks: int
    bound_us: float

    def binding(self) -> Binding:
        """Bind the plan between two caches of this form."""
        spec = FullAttention(block_size=16, num_kv_heads=self.num_kv_heads, head_size=128, dtype="bfloat16")
        specs = {f"layers.{index}": spec for index in range(self.num_layers)}
        groups = plan_groups(specs, layout="LBNHC")
        cache = plan_cache(specs, groups, layout="LBNHC", kv=self.kv, shard=Shard(), num_blocks=self.num_blocks)
        manifest = cache.manifest(Region(1 << 30, cache.nbytes))
        (group,) = plan_transfer(manifest, manifest).groups
        return Binding(group, manifest, manifest)


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


def microseconds(functions: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Return the median time of one call of each, hot: the lowest of some medians, because neighbors slow stretches.

    They take turns, so that all find memory in the same state.
    """
    medians: list[list[float]] = [[] for _ in functions]
    for _ in range(STRETCHES):
        samples: list[list[float]] = [[] for _ in functions]
        for _ in range(rounds):
            for function, times in zip(functions, samples, strict=True):
                started = time.perf_counter()
                function()
                times.append((time.perf_counter() - started) * 1e6)
        for found, times in zip(medians, samples, strict=True):
            found.append(statistics.median(times))
    return [min(found) for found in medians]


def main() -> None:
    """Print the medians beside their bounds.

    The exit status is 0 either way: where neighbors slow the machine, the floor doubles, and so does the rest.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    print(f"{platform.platform()}, Python {platform.python_version()}, NumPy {np.__version__}")
    print(f"{STRETCHES} times {rounds} rounds, us")
    print(f"{'descriptors':>11}  {'ids':10}  {'chunks':>15}{'bind':>9}{'floor':>9}{'bound':>8}")
    for case in CASES:
        binding = case.binding()
        ascending = np.arange(case.num_blocks, dtype=np.int64)
        targets = {"ascending": ascending, "random": np.random.default_rng(0).permutation(ascending)}
        first = np.arange(binding.unit_descriptors, dtype=np.int32)[:, None] * np.int32(case.num_blocks)
        plain = partial(floor, first, ascending.astype(np.int32))
        for ids, target in targets.items():
            for chunking, (chunk_bytes, chunk_descriptors) in CHUNKINGS.items():
                bind = partial(
                    binding.bind,
                    UnitPairs(ascending, target),
                    chunk_bytes=chunk_bytes,
                    chunk_descriptors=chunk_descriptors,
                )
                bound = bind()
                median, least = microseconds((bind, plain), rounds)
                chunks = f"{chunking}, {len(bound.cuts) - 1}"
                print(
                    f"{len(bound.source_index):11,}  {ids:10}  {chunks:>15}"
                    f"{median:9.1f}{least:9.1f}{case.bound_us:8.0f}  {'MISSED' if median > case.bound_us else 'kept'}"
                )


if __name__ == "__main__":
    main()
