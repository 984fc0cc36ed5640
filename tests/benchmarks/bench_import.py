"""How long do ``import kvflow`` and ``import handshake`` take together?

Each round is a fresh interpreter that imports both and times that itself; the bare interpreter's start does not
count. Bound: 150 ms, because a router or a scheduler imports kvflow for tickets only.

    python tests/benchmarks/bench_import.py [--rounds 20]
"""

# ruff: noqa: T201  # a benchmark prints

import argparse
import platform
import statistics
import subprocess
import sys
from pathlib import Path

BOUND_MS = 150
PROGRAM = """
import time
started = time.perf_counter()
import kvflow, handshake
print((time.perf_counter() - started) * 1e3)
"""


def import_ms() -> float:
    """Return the milliseconds of one import in a fresh interpreter."""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True, cwd=root)
    return float(done.stdout)


def main() -> int:
    """Print the times; the exit status is 1 if the median is over the bound."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    import_ms()  # fills the page cache and writes the byte code
    samples = sorted(import_ms() for _ in range(rounds))
    median, worst = statistics.median(samples), samples[-1]
    print(f"machine: {platform.machine()}, Python {platform.python_version()}, {rounds} fresh interpreters")
    print(f"import kvflow, handshake: best {samples[0]:.0f} ms, median {median:.0f} ms, worst {worst:.0f} ms")
    print(f"bound: {BOUND_MS} ms")
    return int(median > BOUND_MS)


if __name__ == "__main__":
    sys.exit(main())
