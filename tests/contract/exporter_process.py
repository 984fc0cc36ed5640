# ruff: noqa: T201 - standard output is its answer
"""An exporter in a process of its own, driven by lines on standard input.

It fills its cache from a seed, writes one msgpack line (hexadecimal) about itself, then obeys ``epoch SLOT VALUE``
(answered by ``ok``), ``content`` (answered by all bytes, hexadecimal) and ``close``; the end of the input is ``close``
too.
"""

import argparse
import sys

import msgspec
import numpy as np

from kvflow.layout.component import Region
from tests.contract.kinds import KINDS, serving
from tests.devices import cache_of


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--nbytes", type=int, required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--memory", default="DRAM")
    args = parser.parse_args()
    content = np.random.default_rng(args.seed).integers(0, 256, args.nbytes, dtype=np.uint8)
    cache = cache_of(args.memory, content)
    epochs = np.zeros(args.slots, dtype=np.uint64)
    epochs_region = Region(epochs.ctypes.data, epochs.nbytes)
    transport = KINDS[args.kind](args.name, lambda _: None)
    transport.start([cache.region], epochs_region, serving(cache, epochs))
    about = {"published": transport.published(), "epochs": epochs_region, "cache": cache.region}
    print(msgspec.msgpack.encode(about).hex(), flush=True)
    for line in sys.stdin:
        match line.split():
            case ["epoch", slot, value]:
                epochs[int(slot)] = int(value)
                print("ok", flush=True)
            case ["content"]:
                print(cache.bytes().tobytes().hex(), flush=True)
            case ["close"]:
                break
    transport.close()


if __name__ == "__main__":
    main()
