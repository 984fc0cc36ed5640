"""Examine the path to another worker: reach it, authenticate, compare, and read its probe blocks if it offers some."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import partial
from statistics import median
from typing import NamedTuple

from msgspec import Struct

from kvflow.addresses import host_and_port
from kvflow.config import Encryption, TransportName, WorkerConfig
from kvflow.errors import KvflowError, quoted
from kvflow.reads.reach import PTRACE_REMEDY, host_facts, one_host, reach
from kvflow.rendezvous.dialer import Visit, open_visit
from kvflow.rendezvous.endpoint import Advertisement
from kvflow.tools.doctor import apart, probe
from kvflow.tools.doctor.codes import FailureFigures, Finding, failure, found, note, ok
from kvflow.tools.doctor.facts import accepts, dial
from kvflow.version import __version__

PINGS = 5

SKEW_S = 1.0
"""kvflow itself takes a ticket for overdue a second after its apparent end."""


class Target(Struct, frozen=True, kw_only=True):
    """The worker to examine, with our settings as a member, and the public key of the worker if it has its own."""

    endpoint: str
    config: WorkerConfig
    key: str = ""
    transport: TransportName = "auto"
    device: str = "cpu"


async def examine(target: Target) -> AsyncIterator[Finding]:
    """Yield findings about the path to a worker, from the first packet to the rate of large reads."""
    address, reached = await asyncio.to_thread(dial, target.endpoint)
    for finding in reached:
        yield finding
    if not address or any(each.status == "failed" for each in reached):
        return
    offer, told = None, None
    try:
        async with open_visit(target.endpoint, target.config, server_key=target.key) as visit:
            yield await _authenticated(visit)
            yield _clock(visit)
            told = await visit.read_manifest()
            offer = await probe.ask(visit)
    except KvflowError as error:
        yield failure(error, "worker")
        return
    data_finding = await asyncio.to_thread(_data_port, told)
    if data_finding is not None:
        yield data_finding
    if offer is None:
        planes = ", ".join(quoted(plane) for plane in sorted(told.planes))
        evidence = f"an ordinary worker, with the data planes {planes}: start kvflow doctor --listen there to measure"
        yield note("reads", evidence)
        return
    yield _location(offer)
    advertised = await asyncio.to_thread(_advertised, target.endpoint, offer)
    if advertised is not None:
        yield advertised
    async for finding in _reads(target, offer, told):
        yield finding


async def _authenticated(visit: Visit) -> Finding:
    rtts = [await visit.ping() for _ in range(PINGS)]
    identity = visit.identity
    versions = f"{quoted(identity.software)}, wire {visit.wire_version}, manifest {visit.manifest_schema}"
    who = f"{quoted(identity.engine_id)} rank {identity.rank} of {identity.num_ranks}"
    evidence = (
        f"{who} has our secret; it runs {versions}, we run kvflow {__version__}; round trip {min(rtts) * 1e3:.3f} ms "
        f"at best of {PINGS}"
    )
    return ok("worker", evidence)


def _clock(visit: Visit) -> Finding:
    ahead_s = visit.clock_ahead_s
    if ahead_s is None:
        return note("clock", "the worker does not tell its time")
    way = "ahead of" if ahead_s >= 0 else "behind"
    evidence = f"its clock is {abs(ahead_s):,.3f} s {way} ours"
    if abs(ahead_s) < SKEW_S:
        return ok("clock", evidence)
    effect = (
        f"{evidence}: until the two are connected, its tickets appear to be issued and to expire {abs(ahead_s):,.0f} s "
        f"{'late' if ahead_s >= 0 else 'early'} here; kvflow ticket and logs show them so"
    )
    return found("clock_skewed", "clock", effect)


def _data_port(told: Advertisement) -> Finding | None:
    if not told.data_endpoint:
        return None
    reason = accepts(told.data_endpoint)
    if reason:
        return found("data_port_unreachable", "TCP plane", f"{told.data_endpoint}: {reason}")
    return ok("TCP plane", f"{told.data_endpoint} accepts connections")


def _location(offer: probe.ProbeOffer) -> Finding:
    ours, theirs = host_facts(), offer.facts
    if not one_host(ours, theirs):
        return note("location", f"another host, {theirs.host!r}; this one is {ours.host!r}")
    if ours.pid_namespace == theirs.pid_namespace:
        evidence = f"this host, {ours.host!r}, and the same PID namespace"
        return note("location", evidence)
    evidence = f"this host, in another PID namespace: {theirs.pid_namespace} there, {ours.pid_namespace} here"
    return note("location", evidence)


def _advertised(endpoint: str, offer: probe.ProbeOffer) -> Finding | None:
    """Return what is wrong with the address that tickets name; None if nothing is."""
    if host_and_port(offer.advertised) == host_and_port(endpoint):
        return None
    if reason := accepts(offer.advertised):
        evidence = f"its tickets name {offer.advertised}, which we do not reach: {reason}"
        return found("advertise_differs", "address", evidence, status="failed")
    return None


async def _reads(target: Target, offer: probe.ProbeOffer, told: Advertisement) -> AsyncIterator[Finding]:
    """Read in a child process, because NIXL and UCX may end the process that they run in."""
    encryption: Encryption = "tls" if told.tcp_encryption == "tls" else "off"
    work = partial(apart.read, target.endpoint, target.transport, target.device, target.key, encryption)
    figures = await apart.run(work, limit_s=apart.READ_S)
    if not isinstance(figures, probe.ProbeFigures):
        yield unread(figures, "reads")
        return
    for finding in judged(figures, offer):
        yield finding


def unread(answer: object, subject: str) -> Finding:
    """Return why a reader found nothing."""
    match answer:
        case FailureFigures():
            return failure(answer, subject)
        case apart.ChildEnded(how=how, errors=errors):
            return found("reader_ended", subject, f"the process that read {how}{_quoted(errors)}")
        case _:
            return found("no_probe", subject, "it has stopped to offer probe blocks")


def _quoted(errors: str) -> str:
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return f": {' / '.join(lines[-3:])[-400:]}" if lines else ""


def judged(figures: probe.ProbeFigures, offer: probe.ProbeOffer) -> Iterator[Finding]:
    """Yield what a reader's figures mean."""
    if figures.plane:
        yield _carrier(figures, offer)
    if figures.slow:
        cause, remedy = figures.slow
        yield found(
            "data_plane_slow", "data plane", f"from GPU to GPU over {figures.transport}: {cause}", remedy=remedy
        )
    for reads in figures.reads:
        if reads.wrong_bytes:
            evidence = f"{reads.wrong_bytes:,} bytes of {len(reads.seconds)} reads of {size(reads.nbytes)}"
            yield found("bytes_differ", "reads", evidence)
    if figures.reads:
        yield ok("small reads", latency(figures))
    if figures.failure is not None:
        yield failure(figures.failure, "reads")
    elif figures.reads:
        yield ok("large reads", rate(figures))


def latency(figures: probe.ProbeFigures) -> str:
    """Return the seconds of small reads as text."""
    small = [reads for reads in figures.reads if reads.nbytes <= probe.SMALL_BLOCKS[-1] * probe.BLOCK_BYTES]
    first = small[0].seconds[0]
    # The first read connects.
    shown = [f"{size(reads.nbytes)} in {median(reads.seconds[1:] or reads.seconds) * 1e3:.3f} ms" for reads in small]
    return (
        f"{', '.join(shown)} (medians of {len(small[0].seconds)}); the first, with its connection, {first * 1e3:.0f} ms"
    )


def rate(figures: probe.ProbeFigures) -> str:
    """Return the rate of large reads as text."""
    large = figures.reads[-1]
    checked = sum(reads.nbytes * len(reads.seconds) for reads in figures.reads)
    best = max(large.gb_per_s)
    return (
        f"{size(large.nbytes)} at {best:.3g} GB/s, the best of {len(large.seconds)}, over {figures.transport} "
        f"({figures.plane}); all {checked:,} bytes compared"
    )


def size(nbytes: int) -> str:
    """Return a number of bytes in the largest unit that divides it."""
    return f"{nbytes >> 20} MiB" if nbytes % (1 << 20) == 0 else f"{nbytes >> 10} KiB"


class Reason(NamedTuple):
    """Why a faster data plane is not used, and what to do about it."""

    text: str
    remedy: str


def _carrier(figures: probe.ProbeFigures, offer: probe.ProbeOffer) -> Finding:
    if figures.plane != "tcp":
        evidence = f"NIXL carries the bytes, over {figures.transport} (known by {figures.known_by})"
        return ok("data plane", evidence)
    together = one_host(figures.facts, offer.facts)
    reasons = list(why_tcp(figures, offer))
    if figures.passed_over and not reasons:
        reasons.append(Reason(figures.passed_over, "Follow this."))
    texts = "; ".join(each.text for each in reasons) or "no reason was found"
    remedies = " ".join(dict.fromkeys(each.remedy for each in reasons))
    where = "though both run on one host" if together else "between two hosts"
    evidence = f"the TCP plane carries the bytes, {where}: {texts}"
    has_cards = figures.facts.network_cards and offer.facts.network_cards
    if together or has_cards:
        return found("data_plane_slow", "data plane", evidence, remedy=remedies)
    return note("data plane", evidence)


def why_tcp(figures: probe.ProbeFigures, offer: probe.ProbeOffer) -> Iterator[Reason]:
    """Yield why NIXL does not carry the bytes, as far as the facts of both sides say it."""
    ours, theirs = figures.facts, offer.facts
    if offer.transport == "tcp":
        yield Reason("transport is tcp there", "Start the worker there with transport auto.")
    for where, missing in (("here", figures.missing), ("there", offer.missing)):
        if "nixl" in missing:
            yield Reason(f"NIXL does not start {where}: {missing['nixl']}", "Run kvflow doctor on that host.")
    for each in reach(ours, theirs).why:
        yield Reason(*each)
    if figures.may_copy is False:
        scope = f"; ptrace_scope is {ours.ptrace_scope}" if ours.ptrace_scope else ""
        yield Reason(
            f"the kernel does not let this process copy the memory of process {theirs.pid}{scope}", PTRACE_REMEDY
        )


def without_ucx(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables without those of UCX."""
    return {name: value for name, value in environment.items() if not name.startswith("UCX_")}
