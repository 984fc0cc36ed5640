"""How long does meeting a producer keep the event loop, however large its manifest is?

A consumer reads from producers that publish as much as they may: as many components as a manifest has at most, and
caches whose plan has as many pieces as a plan has at most, which merge or do not. Bound: 50 ms between two turns of
the consumer's loop. What the producers do runs in threads of this process, and so counts against it.

    python -m tests.benchmarks.bench_meeting
"""

# ruff: noqa: T201  # a benchmark prints

import asyncio
import platform
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import msgspec

import handshake
import kvflow
from kvflow.layout.component import Region
from kvflow.layout.manifest import COMPONENTS_MAX, Manifest
from kvflow.rendezvous.endpoint import Advertisement, encode
from kvflow.worker.worker import Worker
from tests.helpers.settings import flat_config

LAG_BOUND_MS = 50
SECRET = "the secret of a benchmark"
TICK_S = 0.001
LAYERS, HEADS, TOKENS = 128, 32, 128
"""With keys and values 2**20 pieces: as many as a plan may have."""


def model(layers: int, heads: int, tokens: int) -> dict[str, kvflow.FullAttention]:
    """Describe a model of which a block has layers x heads x tokens x 2 pieces of 16 bytes."""
    return {
        f"layers.{index}": kvflow.FullAttention(
            block_size=tokens, num_kv_heads=heads, head_size=8, dtype="bfloat16"
        )
        for index in range(layers)
    }  # fmt: skip


def cache_of(layout: str, layers: int = LAYERS, heads: int = HEADS) -> kvflow.KVCache:
    """Allocate a small cache of a large model."""
    return kvflow.allocate(model(layers, heads, TOKENS), num_blocks=2, layout=layout, kv="split")


def config(engine_id: str) -> kvflow.WorkerConfig:
    """Return the settings of either side."""
    return flat_config(engine_id=engine_id, cluster_secret=SECRET, transport="loopback", handshake_s=60.0)


def crowded(manifest: Manifest) -> Manifest:
    """Return the manifest with as many layers as there may be, all of which the consumer has if it has any."""
    (group,) = manifest.groups
    layer = group.layers[0]
    names = [f"layers.{index}" for index in range(COMPONENTS_MAX // len(layer.components))]
    layers = tuple(msgspec.structs.replace(layer, name=name) for name in names)
    return msgspec.structs.replace(manifest, groups=(msgspec.structs.replace(group, layers=layers),))


@contextmanager
def publishing(publication: handshake.Publication) -> Iterator[kvflow.Ticket]:
    """Publish anything, on a loop in a thread of its own; yield a ticket that leads there."""
    started, over = threading.Event(), threading.Event()
    endpoints: list[str] = []
    identity = handshake.Identity(
        engine_id="prefill-0", rank=0, num_ranks=1, incarnation="ab" * 16, role="prefill"
    )  # fmt: skip

    async def serve() -> None:
        security = handshake.ClusterSecurity.from_secret(SECRET)
        async with handshake.open_server(
            bind="tcp://127.0.0.1:0", identity=identity, publication=publication, security=security,
            on_event=lambda _key, _event: None,
        ) as server:  # fmt: skip
            endpoints.append(server.endpoint)
            started.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    started.wait()
    try:
        address = kvflow.RankAddress(rank=0, incarnation=identity.incarnation, endpoint=endpoints[0], slots=64)
        mint = kvflow.TicketMint(identity.engine_id, [address], cluster_secret=SECRET)
        yield mint.offer("r", block_ids=[[0]], num_tokens=TOKENS)[0]
    finally:
        over.set()
        thread.join()


@asynccontextmanager
async def measured() -> AsyncIterator[Callable[[], float]]:
    """Measure the longest that the loop stood still, in ms, while the block runs."""
    worst_s = 0.0

    async def tick() -> None:
        nonlocal worst_s
        while True:
            before = time.perf_counter()
            await asyncio.sleep(TICK_S)
            worst_s = max(worst_s, time.perf_counter() - before - TICK_S)

    task = asyncio.create_task(tick())
    await asyncio.sleep(0.1)
    worst_s = 0.0
    try:
        yield lambda: worst_s * 1e3
    finally:
        task.cancel()


async def met(name: str, pull: Awaitable[object]) -> float:
    """Pull once; print and return how long the loop stood still."""
    async with measured() as worst_ms:
        began_s = time.perf_counter()
        try:
            await pull
            outcome = "read"
        except kvflow.errors.KvflowError as error:
            outcome = error.message
        took_ms = (time.perf_counter() - began_s) * 1e3
    print(f"{name:34}{took_ms:10.0f}{worst_ms():10.1f}{LAG_BOUND_MS:7}  {outcome:.70}")
    return worst_ms()


async def meet_worker(consumer: Worker, layout: str) -> float:
    """Read from a worker in a thread of its own whose cache has this layout."""
    with kvflow.run_worker(config("prefill-1"), cache_of(layout)) as producer:
        ticket = producer.offer("r", [[0]], TOKENS)
        return await met(f"{LAYERS * HEADS * TOKENS * 2:,} pieces, {layout}", consumer.pull(ticket, [[0]]))


async def main() -> int:
    """Print what was measured; the exit status is 1 if a bound is missed."""
    print(f"{platform.platform()}, Python {platform.python_version()}")
    print(f"{'':34}{'met in ms':>10}{'lag ms':>10}{'bound':>7}")
    cache = cache_of("LBNHC")
    lags = []
    async with kvflow.open_worker(config("decode-0"), cache) as consumer:
        manifest = crowded(cache.manifest())
        advertisement = Advertisement(
            manifest=manifest, epochs=Region(1 << 20, 512), planes={"loopback": b""}
        )  # fmt: skip
        with publishing(encode(advertisement)) as ticket:
            lags.append(await met(f"{COMPONENTS_MAX:,} components", consumer.pull(ticket, [[0]])))
        lags += [await meet_worker(consumer, layout) for layout in ("LBNHC", "LBHNC", "BLHNC")]
    missed = max(lags) > LAG_BOUND_MS
    print("MISSED" if missed else "kept")
    return int(missed)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
