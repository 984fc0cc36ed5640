"""``kvflow inspect``: what a running worker holds now: peers, pulls, leases, quarantine."""

import argparse
import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from kvflow.errors import ConfigInvalid, quoted
from kvflow.tools.cli.arguments import (
    Subparsers,
    add_command,
    control_endpoint,
    member_config,
    print_facts,
    print_json,
)

if TYPE_CHECKING:
    from kvflow.rendezvous.dialer import Asker
    from kvflow.rendezvous.endpoint import Advertisement
    from kvflow.worker.snapshot import Inspection, Snapshot


ENDS = {"offer": "{}", "open": "open, {}", "kept": "kept"}  # how a lease of each kind ends

WATCH_S = 1.0
"""Between two looks: a worker answers four in a second, and then refuses."""


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
    clock_ahead_s: float


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


class InspectFigures(Struct, frozen=True, kw_only=True):
    """What ``kvflow inspect --json`` prints; ``rtt_s`` is that of the control channel."""

    worker: WorkerFigures
    rtt_s: float
    cache: CacheFigures
    inspection: "Inspection"


def add_parser(commands: Subparsers) -> None:
    """Add ``inspect`` to the command line."""
    parser = add_command(
        commands,
        "inspect",
        summary="check that a worker answers, and show its peers, pulls and leases",
        description="Dial a worker as its readers do, with the secret of the environment. Show who it is, the round "
        "trip, its cache, and what it holds now: peers, pulls, held leases and quarantined blocks. "
        "Any member of the cluster may ask.",
        examples="kvflow inspect decode-0:7000\nkvflow inspect decode-0:7000 --watch",
    )
    parser.add_argument(
        "endpoint",
        type=control_endpoint,
        metavar="ENDPOINT",
        help="control endpoint of a worker, HOST:PORT or tcp://HOST:PORT",
    )
    parser.add_argument("--key", metavar="KEY", help="public key of the worker, if it has one of its own")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--watch", action="store_true", help="ask again each second, until Ctrl-C")
    parser.set_defaults(run=run, misuse=ConfigInvalid)


def run(options: argparse.Namespace) -> int:
    """Ask the worker and show the answer; 1 if it does not answer."""
    with suppress(KeyboardInterrupt):
        asyncio.run(_inspect(options))
    return 0


async def _inspect(options: argparse.Namespace) -> None:
    from kvflow.rendezvous.dialer import open_asker  # noqa: PLC0415 - --help needs no ZeroMQ

    config = member_config(options.key)
    async with open_asker(options.endpoint, config, server_key=options.key or "") as visit:
        cache = _cache_figures(await visit.read_manifest())
        while True:
            _show(await _ask(visit, cache), as_json=options.json)
            if not options.watch:
                return
            await asyncio.sleep(WATCH_S)


async def _ask(visit: "Asker", cache: CacheFigures) -> InspectFigures:
    from kvflow.worker.snapshot import decode_inspection  # noqa: PLC0415 - --help needs no worker

    rtt_s, _ = await visit.ping()
    _, report = await visit.ping(report=True)
    inspection = decode_inspection(report, peer=visit.endpoint)
    shown = replace(inspection, told=b"")  # tickets of probes, which only the doctor reads
    return InspectFigures(worker=_worker_figures(visit), rtt_s=rtt_s, cache=cache, inspection=shown)


def _show(figures: InspectFigures, *, as_json: bool) -> None:
    if as_json:
        print_json(figures)
        return
    facts = _worker_facts(figures.worker, figures.cache)
    facts += [("round trip", f"{figures.rtt_s * 1e3:.3f} ms"), ("stage", quoted(figures.inspection.stage))]
    print_facts(facts)
    for line in lines_of(figures.inspection):
        print(line)


def lines_of(inspection: "Inspection") -> Iterator[str]:
    """Yield what a worker holds, line by line. Texts that it has chosen are in quotes."""
    snapshot = inspection.snapshot
    yield from _peers(snapshot)
    yield from _titled("open pulls", snapshot.pulls, len(snapshot.open_pulls))
    for pull in snapshot.open_pulls:
        ours = f" as {quoted(pull.local_request_id)}" if pull.local_request_id else ""
        transport = f" over {quoted(pull.transport)}" if pull.transport else ""
        yield (
            f"  {quoted(pull.request_id)}{ours}: {quoted(pull.phase)}, {pull.age_s:.3f} s old, {pull.nbytes:,} of "
            f"{pull.nbytes_wanted:,} bytes{transport} from {quoted(pull.peer)}"
        )
    yield from _titled("held leases", snapshot.leases, len(snapshot.held_leases))
    for lease in snapshot.held_leases:
        readers = ", ".join(f"{quoted(each.engine_id)} ({each.released}/{each.num_ranks})" for each in lease.readers)
        end = (
            f"expires in {lease.expires_in_s:.3f} s, {f'readers {readers}' if readers else 'no reader has renewed it'}"
        )
        held = f"{quoted(lease.request_id)}: {lease.num_blocks:,} blocks, {lease.age_s:.3f} s old"
        yield f"  {held}, {ENDS[lease.kind].format(end)}"
    if snapshot.found or snapshot.not_held:
        yield f"questions for content since the start: {snapshot.found:,} found, {snapshot.not_held:,} not held"
    if snapshot.posted_inline or snapshot.posted_on_thread:
        ways = f"{snapshot.posted_inline:,} inline, {snapshot.posted_on_thread:,} on the read thread"
        yield f"reads of pulls since the start: {ways}"
    yield from _titled("quarantined pulls", len(snapshot.quarantined), len(snapshot.quarantined))
    for entry in snapshot.quarantined:
        yield f"  {entry.num_blocks:,} blocks for {inspection.now - entry.since:.3f} s: {quoted(entry.reason)}"
    staging = snapshot.staging
    if staging.buffers:
        yield f"staging buffers: {staging.in_use} of {staging.buffers} in use, {staging.quarantined} quarantined"
    for title, counts in (("rejected connections", snapshot.rejected), ("dropped producers", snapshot.dropped)):
        if counts:
            yield f"{title} since the start: {', '.join(f'{quoted(code)} {count}' for code, count in counts.items())}"


def _peers(snapshot: "Snapshot") -> Iterator[str]:
    for title, peers in (("producers", snapshot.producers), ("readers", snapshot.readers)):
        yield from _titled(title, len(peers), len(peers))
        for peer in peers:
            over = f" over {quoted(peer.transport)}" if peer.transport else ""
            rtt = f", {peer.rtt_s * 1e3:.3f} ms" if peer.rtt_s is not None else ""
            software = f", {quoted(peer.software)}" if peer.software else ""
            yield f"  {quoted(peer.name)}: {quoted(peer.state)}{over}{software}{rtt}"


def _titled(title: str, count: int, listed: int) -> Iterator[str]:
    shown = f", the oldest {listed} of them" if listed < count else ""
    yield f"{title}: {count:,}{shown}"


def _worker_figures(visit: "Asker") -> WorkerFigures:
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
        clock_ahead_s=visit.clock_offset.ahead_s,
    )


def _cache_figures(told: "Advertisement") -> CacheFigures:
    manifest = told.manifest
    return CacheFigures(
        model=manifest.identity.model,
        revision=manifest.identity.revision,
        dtype=manifest.identity.dtype,
        num_blocks=manifest.num_blocks,
        region_bytes=tuple(region.nbytes for region in manifest.regions),
        memory=tuple(sorted({region.memory for region in manifest.regions})),
        groups=tuple(
            PublishedGroup(kind=group.kind, layers=len(group.layers), block_size=group.block_size)
            for group in manifest.groups
        ),
        planes=tuple(sorted(told.planes)),
        data_endpoint=told.data_endpoint,
        tcp_encryption=told.tcp_encryption,
    )


def _worker_facts(worker: WorkerFigures, cache: CacheFigures) -> list[tuple[str, object]]:
    """Return who a worker is. Texts that it has chosen are in quotes."""
    ahead = f", its clock {worker.clock_ahead_s * 1e3:+.1f} ms from ours"
    facts: list[tuple[str, object]] = [
        ("worker", f"{quoted(worker.engine_id)} rank {worker.rank} of {worker.num_ranks}{ahead}"),
        ("incarnation", worker.incarnation),
        ("release", f"{quoted(worker.software)}, wire {worker.wire_version}, manifest {worker.manifest_schema}"),
    ]
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
