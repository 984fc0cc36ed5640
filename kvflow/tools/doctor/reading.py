"""Read the probe blocks of another worker, check each byte, and measure."""

import asyncio
import secrets
import time

import numpy as np
from msgspec.structs import replace

from kvflow.config import WorkerConfig
from kvflow.errors import KvflowError, StaleLease
from kvflow.events import Event, PeerConnected, PeerSlow, PlaneOmitted
from kvflow.leases.tickets import Ticket
from kvflow.reads.nixl.binding import may_copy_from
from kvflow.reads.reach import host_facts
from kvflow.rendezvous.visitor import Visit, open_visit
from kvflow.report import TransferReport
from kvflow.tools.doctor import probe
from kvflow.tools.doctor.listening import build_cache, read, write
from kvflow.worker.runtime import open_worker
from kvflow.worker.snapshot import decode_inspection
from kvflow.worker.worker import Worker

SMALL_READS, LARGE_READS = 12, 4
"""Reads of each small size, and large reads. Fewer are possible: each takes a ticket, and time."""

TIME_S = 20.0
"""After so much time no further read is begun: over a slow network, one large read takes seconds."""

ASK_AGAIN_S = 0.3
"""A worker makes a report at most each 0.25 s, and answers four questions in a second."""

USED_MAX = 20
"""Tickets in a row that another reader may have used before us, and questions for another one."""


class _Notes:
    """What the events of our worker say. A hook."""

    def __init__(self) -> None:
        self.missing: dict[str, str] = {}
        self.connected: PeerConnected | None = None
        self.slow: tuple[str, ...] = ()

    def notice(self, event: Event) -> None:
        match event:
            case PlaneOmitted(plane=plane, detail=detail):
                self.missing[plane] = detail
            case PeerConnected():
                self.connected = event
            case PeerSlow(detail=detail, remedy=remedy):
                self.slow = (detail, remedy)


class _Tickets:
    """Tickets of the other worker, each given once."""

    def __init__(self, visit: Visit, offer: probe.ProbeOffer) -> None:
        self._visit = visit
        self._offer = offer
        self._given: set[str] = set()

    async def take(self, num_blocks: int) -> Ticket:
        """Return a ticket for so many blocks that nobody here has used; ask for others as long as there is none."""
        for _ in range(USED_MAX):
            offered = self._offer.small.get(num_blocks, self._offer.large)
            for params in offered:
                if (text := "".join(params.values())) not in self._given:
                    self._given.add(text)
                    return Ticket.from_params(params)
            await asyncio.sleep(ASK_AGAIN_S)
            inspection = decode_inspection(await self._visit.ask_report(), peer=self._visit.endpoint)
            self._offer = probe.decode(inspection.told, peer=self._visit.endpoint) or self._offer
        raise StaleLease(f"the worker offers no further ticket for {num_blocks} blocks", ended_by="used")


async def read_probe(
    endpoint: str, config: WorkerConfig, *, device: str = "cpu", key: str = ""
) -> probe.ReadFigures | None:
    """Read from a worker that offers probe blocks; None if it offers none.

    Args:
        endpoint: ``tcp://HOST:PORT`` of its control endpoint.
        config: of our worker, which reads.
        device: that our cache lies on.
        key: public key of the other worker, if it has its own.

    Raises:
        KvflowError: the other worker is not reached, or ours does not open.
    """
    async with open_visit(endpoint, config, server_key=key) as visit:
        inspection = decode_inspection(await visit.ask_report(), peer=endpoint)
        offer = probe.decode(inspection.told, peer=endpoint)
        if offer is None:
            return None
        cache = await asyncio.to_thread(build_cache, device, offer.large_blocks)
        expected = probe.content(offer.seed, offer.large_blocks)
        notes, facts, failure = _Notes(), host_facts(), None
        config = replace(config, engine_id=f"doctor-{secrets.token_hex(4)}")
        reads: list[probe.Reads] = []
        async with open_worker(config, cache, hooks=[notes.notice]) as worker:
            tickets, until = _Tickets(visit, offer), time.monotonic() + TIME_S
            try:
                for size in (*sorted(offer.small), offer.large_blocks):
                    times = LARGE_READS if size == offer.large_blocks else SMALL_READS
                    nbytes = size * probe.BLOCK_BYTES
                    reports: list[TransferReport] = []
                    wrong = 0
                    for _ in range(times):
                        if reports and time.monotonic() > until:
                            break
                        write(cache, ~expected[:nbytes])  # what stays of it was not read
                        reports.append(await _pull(worker, tickets, size))
                        wrong += int(np.count_nonzero(read(cache, nbytes) != expected[:nbytes]))
                    reads.append(_reads(nbytes, reports, wrong))
            except KvflowError as error:
                failure = probe.ReadFailure(code=str(error.code), message=error.message, remedy=error.remedy)
    near = offer.facts.boot_id == facts.boot_id and offer.facts.pid_namespace == facts.pid_namespace
    connected = notes.connected
    return probe.ReadFigures(
        reads=tuple(reads),
        failure=failure,
        plane="" if connected is None else connected.plane,
        transport="" if connected is None else connected.transport,
        known_by="" if connected is None else connected.transport_known_by,
        missing=notes.missing,
        may_copy=may_copy_from(offer.facts.pid) if near else None,
        slow=notes.slow,
        facts=facts,
    )


async def _pull(worker: Worker, tickets: _Tickets, num_blocks: int) -> TransferReport:
    """Pull with a ticket that no other reader was faster to use."""
    for _ in range(USED_MAX):
        ticket = await tickets.take(num_blocks)
        try:
            return await worker.pull(ticket, [list(range(num_blocks))])
        except StaleLease:  # another reader has used it, or it has expired
            continue
    raise StaleLease(f"{USED_MAX} tickets in a row had ended: many readers use this worker", ended_by="used")


def _reads(nbytes: int, reports: list[TransferReport], wrong: int) -> probe.Reads:
    return probe.Reads(
        nbytes=nbytes,
        seconds=tuple(report.timings_s["total"] for report in reports),
        gb_per_s=tuple(report.gb_per_s for report in reports),
        wrong_bytes=wrong,
    )
