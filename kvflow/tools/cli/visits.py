"""What the commands that dial a worker have in common: their flags, and what a manifest says in a few figures."""

import argparse
import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct

from kvflow.layout.manifest import Manifest
from kvflow.reprs import quoted

if TYPE_CHECKING:
    from kvflow.rendezvous.publication import Advertisement
    from kvflow.rendezvous.visitor import Visit

T = TypeVar("T")


class WorkerFigures(Struct, frozen=True, kw_only=True):
    """Who a worker is, and what it speaks."""

    endpoint: str
    engine_id: str
    rank: int
    num_ranks: int
    incarnation: str
    software: str
    wire_version: int
    manifest_schema: int
    clock_ahead_s: float | None


class PublishedGroup(Struct, frozen=True, kw_only=True):
    """One group of a worker's cache."""

    kind: str
    layers: int
    block_size: int


class CacheFigures(Struct, frozen=True, kw_only=True):
    """What a worker publishes of its cache."""

    model: str
    revision: str
    dtype: str
    num_blocks: int
    region_bytes: tuple[int, ...]
    memory: tuple[str, ...]
    groups: tuple[PublishedGroup, ...]
    planes: tuple[str, ...]
    data_endpoint: str
    tcp_encryption: str


def endpoint(text: str) -> str:
    """Return ``tcp://HOST:PORT`` for the same with or without ``tcp://``; the handshake checks it."""
    return text if "://" in text else f"tcp://{text}"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the worker to dial, its key, and the format."""
    parser.add_argument(
        "endpoint", type=endpoint, metavar="ENDPOINT", help="control endpoint of a worker, HOST:PORT or tcp://HOST:PORT"
    )
    parser.add_argument("--key", metavar="KEY", help="public key of the worker, if it has one of its own")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def keys_of(*keys: str | None) -> tuple[str, ...]:
    """Return the keys that are given."""
    return tuple(key for key in keys if key)


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run a command on an event loop of its own."""
    return asyncio.run(work)


def worker_figures(visit: "Visit") -> WorkerFigures:
    """Return who was dialed."""
    identity = visit.identity
    return WorkerFigures(
        endpoint=visit.endpoint,
        engine_id=identity.engine_id,
        rank=identity.rank,
        num_ranks=identity.num_ranks,
        incarnation=identity.incarnation,
        software=identity.software,
        wire_version=visit.wire_version,
        manifest_schema=visit.manifest_schema,
        clock_ahead_s=visit.clock_ahead_s,
    )


def cache_figures(told: "Advertisement") -> CacheFigures:
    """Return what a worker has published."""
    manifest = told.manifest
    return CacheFigures(
        model=manifest.identity.model,
        revision=manifest.identity.revision,
        dtype=manifest.identity.dtype,
        num_blocks=manifest.num_blocks,
        region_bytes=tuple(region.nbytes for region in manifest.regions),
        memory=tuple(sorted({region.memory for region in manifest.regions})),
        groups=group_figures(manifest),
        planes=tuple(sorted(told.planes)),
        data_endpoint=told.data_endpoint,
        tcp_encryption=told.tcp_encryption,
    )


def group_figures(manifest: Manifest) -> tuple[PublishedGroup, ...]:
    """Return the groups of a cache."""
    return tuple(
        PublishedGroup(kind=group.kind, layers=len(group.layers), block_size=group.block_size)
        for group in manifest.groups
    )


def worker_facts(worker: WorkerFigures, cache: CacheFigures | None) -> list[tuple[str, object]]:
    """Return the lines that say who a worker is. Names that it has chosen are in quotes."""
    ahead = "" if worker.clock_ahead_s is None else f", its clock {worker.clock_ahead_s * 1e3:+.1f} ms from ours"
    facts: list[tuple[str, object]] = [
        ("worker", f"{quoted(worker.engine_id)} rank {worker.rank} of {worker.num_ranks}{ahead}"),
        ("incarnation", worker.incarnation),
        (
            "release",
            f"{quoted(worker.software)}, wire {worker.wire_version}, manifest {worker.manifest_schema}",
        ),
    ]
    if cache is not None:
        model = quoted(cache.model) if cache.model else "not named"
        memory = f"{sum(cache.region_bytes):,} bytes in {len(cache.region_bytes)} regions, {' and '.join(cache.memory)}"
        facts += [("model", model), ("memory", memory), ("blocks", f"{cache.num_blocks:,}")]
        facts += [
            (f"group {index}", f"{group.layers} layers, {quoted(group.kind)}, {group.block_size} tokens in a block")
            for index, group in enumerate(cache.groups)
        ]
        served = f", TCP at {quoted(cache.data_endpoint)}" if cache.data_endpoint else ""
        encrypted = f", encryption {quoted(cache.tcp_encryption)}" if cache.data_endpoint else ""
        facts.append(("data planes", f"{', '.join(map(quoted, cache.planes))}{served}{encrypted}"))
    return facts
