# ruff: noqa: T201 - a benchmark prints its table
"""From the end of a prompt until its reader has all: an open offer beside a serial pull and its last chunk alone.

    python -m tests.benchmarks.following [--rounds 9] [--transport nixl]

A source process writes chunks of 8 MiB every 20 ms. The reader compares every byte. Times are from the seal, or from
the offer, by the clock that both processes share.
"""

import argparse
import asyncio
import json
import os
import secrets
import statistics
import sys
import time

import kvflow
from kvflow.config import SECRET_VARIABLE
from kvflow.tools.doctor.probe import Geometry

CHUNK_BLOCKS = 64
BLOCK_TOKENS = 16
GEOMETRY = Geometry(layers=4, num_kv_heads=4, head_size=128, num_blocks=16 * CHUNK_BLOCKS, layout="BLHNC", kv="content")
"""Blocks of 128 KiB; the pool is 128 MiB."""

CHUNK_S = 0.02
SIZES = (2, 4, 8, 16)
WAYS = ("open", "serial", "last")


def value_of(number, block):
    """Return what every byte pair of a block holds, as a number that float16 has."""
    return float((31 * number + block) % 1024)


async def source(transport):
    """Compute what each line of the standard input asks for."""
    cache = GEOMETRY.build()
    (view,) = [cache.backing.view(GEOMETRY.num_blocks, -1)]
    config = kvflow.WorkerConfig(engine_id="source", transport=transport)
    async with kvflow.open_worker(config, cache) as worker:
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        print("ready", flush=True)
        while line := await reader.readline():
            number, way, chunks = json.loads(line)
            blocks = list(range(chunks * CHUNK_BLOCKS))
            name, tokens, offer = f"{way} {number}", len(blocks) * BLOCK_TOKENS, None
            if way == "open":
                offer = worker.offer_progressive(name, [[]], tokens)
                print(json.dumps(offer.ticket.to_params()), flush=True)
            for chunk in range(chunks):
                await asyncio.sleep(CHUNK_S)
                new = blocks[chunk * CHUNK_BLOCKS : (chunk + 1) * CHUNK_BLOCKS]
                for block in new:
                    view[block].view(cache.views["layers.0"].dtype).fill_(value_of(number, block))
                if offer is not None and chunk < chunks - 1:
                    offer.advance((chunk + 1) * CHUNK_BLOCKS * BLOCK_TOKENS, [new])
            ended_at = time.monotonic()
            if offer is not None:
                offer.seal([new])
            else:
                offered = new if way == "last" else blocks
                ticket = worker.offer(name, [offered], len(offered) * BLOCK_TOKENS)
                print(json.dumps(ticket.to_params()), flush=True)
            print(json.dumps(ended_at), flush=True)


class Sample:
    """Milliseconds from the end of the prompt, what the reader says of that, and its descriptors and ranges."""

    def __init__(self, ended_at, report):
        self.ms = (time.monotonic() - ended_at) * 1e3
        self.seal_ms, self.descriptors, self.ranges = report.seal_s * 1e3, report.descriptors, report.ranges


async def measure(worker, cache, process, prompt):
    """Read one prompt, by its number, the way and the number of chunks; return its sample."""
    number, way, chunks = prompt
    process.stdin.write(json.dumps([number, way, chunks]).encode() + b"\n")
    ticket = kvflow.Ticket.from_params(json.loads(await process.stdout.readline()))
    targets = list(range((1 if way == "last" else chunks) * CHUNK_BLOCKS))
    report = await worker.pull(ticket, [targets])
    done = time.monotonic()
    ended_at = json.loads(await process.stdout.readline())
    sample = Sample(ended_at, report)
    sample.ms = (done - ended_at) * 1e3
    view, dtype = cache.backing.view(GEOMETRY.num_blocks, -1), cache.views["layers.0"].dtype
    first = chunks * CHUNK_BLOCKS - len(targets)
    for block in targets:
        assert bool((view[block].view(dtype) == value_of(number, first + block)).all()), f"wrong bytes: {way} {number}"
    return sample


async def main(rounds, transport):
    """Print one row for each size, and how the ways grow."""
    os.environ.setdefault(SECRET_VARIABLE, secrets.token_hex(32))
    cache = GEOMETRY.build()
    command = [sys.executable, "-m", "tests.benchmarks.following", "--source", "--transport", transport]
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    process = await asyncio.create_subprocess_exec(*command, **pipes)
    medians = {}
    async with kvflow.open_worker(kvflow.WorkerConfig(engine_id="reader", transport=transport), cache) as worker:
        await process.stdout.readline()
        number = 0
        found = {(way, chunks): [] for chunks in SIZES for way in WAYS}
        for turn in range(rounds + 1):
            for key, samples in found.items():
                number += 1
                sample = await measure(worker, cache, process, (number, *key))
                if turn:
                    samples.append(sample)
        for key, samples in found.items():
            medians[key] = statistics.median(each.ms for each in samples)
    process.stdin.close()
    await process.wait()
    print(f"{transport}, medians of {rounds}: milliseconds from the last byte of the prompt to the result")
    print("MiB   open  serial  last  last*1.3+1  seal_s  ranges  descriptors: open, serial")
    for chunks in SIZES:
        open_ms, serial_ms, last_ms = (medians[way, chunks] for way in WAYS)
        opened, serial = found["open", chunks], found["serial", chunks]
        seal_ms = statistics.median(each.seal_ms for each in opened)
        ranges = statistics.median(each.ranges for each in opened)
        more = [statistics.median(each.descriptors for each in samples) for samples in (opened, serial)]
        print(
            f"{8 * chunks:4d} {open_ms:6.2f} {serial_ms:7.2f} {last_ms:5.2f} {last_ms * 1.3 + 1:11.2f} {seal_ms:7.2f} "
            f"{ranges:7g} {more[0]:g}, {more[1]:g}"
        )
    grows = {way: medians[way, SIZES[-1]] - medians[way, SIZES[0]] for way in WAYS}
    print(
        f"from {8 * SIZES[0]} to {8 * SIZES[-1]} MiB: open +{grows['open']:.2f} ms, serial +{grows['serial']:.2f} ms: "
    )
    print(f"{100 * grows['open'] / grows['serial']:.1f} % of the serial pull's slope; goal: at most 5 %")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--transport", default="nixl")
    parser.add_argument("--source", action="store_true")
    given = parser.parse_args()
    asyncio.run(source(given.transport) if given.source else main(given.rounds, given.transport))
