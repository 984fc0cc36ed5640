"""Examine this host alone, or the path to another worker, from the first packet to reads of its probe blocks."""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Iterator
from functools import partial
from statistics import median
from typing import NamedTuple

from msgspec import Struct

from kvflow.config import (
    ACCEPTED_VARIABLE,
    KEY_VARIABLE,
    SECRET_VARIABLE,
    Encryption,
    TransportName,
    WorkerConfig,
    require_secret,
)
from kvflow.errors import ConfigInvalid, KvflowError, quoted
from kvflow.reads.reach import PREFIXES, PTRACE_REMEDY, host_facts, network_cards, one_host, reach
from kvflow.rendezvous.dialer import Asker, open_asker
from kvflow.rendezvous.endpoint import Advertisement
from kvflow.tools.doctor import apart, facts, probe
from kvflow.tools.doctor.codes import FailureFigures, Finding, failure, found, note, ok
from kvflow.tools.doctor.facts import shown_size
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
    address, reached = await asyncio.to_thread(facts.dial, target.endpoint)
    for finding in reached:
        yield finding
    if not address or any(each.status == "failed" for each in reached):
        return
    offer, told = None, None
    try:
        async with open_asker(target.endpoint, target.config, server_key=target.key) as visit:
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


async def _authenticated(visit: Asker) -> Finding:
    rtts = [(await visit.ping())[0] for _ in range(PINGS)]
    identity = visit.identity
    versions = f"{quoted(identity.software)}, wire {visit.wire_version}, manifest {visit.manifest_schema}"
    who = f"{quoted(identity.engine_id)} rank {identity.rank} of {identity.num_ranks}"
    evidence = (
        f"{who} has our secret; it runs {versions}, we run kvflow {__version__}; round trip {min(rtts) * 1e3:.3f} ms "
        f"at best of {PINGS}"
    )
    return ok("worker", evidence)


def _clock(visit: Asker) -> Finding:
    ahead_s = visit.clock_offset.ahead_s
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
    reason = facts.accepts(told.data_endpoint)
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
    if offer.advertised == endpoint:
        return None
    if reason := facts.accepts(offer.advertised):
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
            evidence = f"{reads.wrong_bytes:,} bytes of {len(reads.seconds)} reads of {shown_size(reads.nbytes)}"
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
    shown = [
        f"{shown_size(reads.nbytes)} in {median(reads.seconds[1:] or reads.seconds) * 1e3:.3f} ms" for reads in small
    ]
    return (
        f"{', '.join(shown)} (medians of {len(small[0].seconds)}); the first, with its connection, {first * 1e3:.0f} ms"
    )


def rate(figures: probe.ProbeFigures) -> str:
    """Return the rate of large reads as text."""
    large = figures.reads[-1]
    checked = sum(reads.nbytes * len(reads.seconds) for reads in figures.reads)
    best = max(large.gb_per_s)
    return (
        f"{shown_size(large.nbytes)} at {best:.3g} GB/s, the best of {len(large.seconds)}, over {figures.transport} "
        f"({figures.plane}); all {checked:,} bytes compared"
    )


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


RESTRICTING = ("UCX_TLS", "UCX_NET_DEVICES")
"""Variables that leave transports or devices out."""


async def examine_host(*, bind: str | None, advertise: str | None, device: str = "cpu") -> AsyncIterator[Finding]:
    """Yield findings about this host. Addresses, as ``HOST:PORT`` or a host, are not examined if they are None."""
    on_gpu = device != "cpu" or facts.has_gpu()
    for finding in facts.examine_software(on_gpu=on_gpu):
        yield finding
    for finding in check_secret():
        yield finding
    for finding in facts.examine_machine():
        yield finding
    for finding in await asyncio.to_thread(lambda: list(facts.examine_addresses(bind, advertise))):
        yield finding
    async for finding in _gpus(expected=on_gpu):
        yield finding
    starts = False
    async for finding in check_nixl(device):
        starts = starts or (finding.subject, finding.status) == ("NIXL", "ok")
        yield finding
    transports: tuple[TransportName, ...] = ("nixl", "tcp") if starts else ("tcp",)
    for transport in transports:
        yield await check_reads(transport, device)


def check_secret() -> Iterator[Finding]:
    """Yield findings about the secrets in the environment, without their text."""
    for name, is_needed in ((SECRET_VARIABLE, True), (ACCEPTED_VARIABLE, False)):
        secret = os.environ.get(name, "")
        if not secret:
            if is_needed:
                yield found("secret_missing", name, "the variable is not set, or empty")
            continue
        try:
            require_secret(name, secret)
        except ConfigInvalid as error:
            yield found("secret_malformed", name, error.message)
            continue
        if secret != secret.strip() or secret[0] in "\"'" or secret[-1] in "\"'":
            yield found(
                "secret_suspicious", name, f"{len(secret)} characters, with a blank or a quotation mark at an end"
            )
        else:
            yield ok(name, f"set, {len(secret)} characters")


async def _gpus(*, expected: bool) -> AsyncIterator[Finding]:
    if not expected:
        yield note("GPU", "no /dev/nvidia*, and no /dev/kfd")
        return
    answer = await apart.run(apart.list_gpus)
    match answer:
        case apart.VisibleGpus(names=names, built_for=built_for) if names:
            listed = ", ".join(f"{index}: {name}" for index, name in enumerate(names))
            yield ok("GPU", f"{listed}; torch was built for {built_for}")
        case apart.VisibleGpus(built_for=built_for, refusal=refusal):
            for_what = built_for or "processors alone"
            yield found(
                "gpu_unusable", "GPU", f"torch, built for {for_what}, finds none: {refusal or 'no reason given'}"
            )
        case apart.ChildEnded(how=how, errors=errors):
            yield found("gpu_unusable", "GPU", f"the process that asked torch {how}: {errors[-400:]}")


async def check_nixl(device: str = "cpu") -> AsyncIterator[Finding]:
    """Yield whether NIXL starts, what UCX offers, and what variables leave out."""
    answer = await apart.run(partial(apart.start_agent, device))
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)}
    if variables:
        yield note("UCX", ", ".join(f"{name}={value}" for name, value in variables.items()))
    match answer:
        case apart.AgentFigures(variant=variant, cuda=cuda, transports=transports):
            yield _matches(variant, cuda)
            shown = ", ".join(transports) or "unknown: this NIXL writes metadata of another form"
            yield ok("UCX", f"{shown} (kvflow leaves out tcp)")
            async for finding in _restricted(device, transports):
                yield finding
        case FailureFigures(message=message, remedy=remedy):
            code = "nixl_missing" if "cannot be imported" in message else "nixl_agent_failed"
            yield found(code, "NIXL", message, remedy=remedy)
        case apart.ChildEnded(how=how, errors=errors):
            yield found("nixl_agent_failed", "NIXL", f"the process that starts an agent {how}: {errors[-400:]}")


def _matches(variant: str, cuda: str) -> Finding:
    major = cuda.partition(".")[0]
    if major and variant.startswith("nixl_cu") and variant != f"nixl_cu{major}":
        return found("nixl_variant_mismatch", "NIXL", f"{variant} was loaded, and torch was built for CUDA {cuda}")
    return ok("NIXL", f"an agent of {variant} starts with its UCX plugin")


async def _restricted(device: str, transports: tuple[str, ...]) -> AsyncIterator[Finding]:
    """Yield what UCX would also offer without the variables that restrict it."""
    restricting = {name: os.environ[name] for name in RESTRICTING if os.environ.get(name)}
    if not restricting:
        return
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    free = await apart.run(partial(apart.start_agent, device), environment)
    if not isinstance(free, apart.AgentFigures):
        return
    left_out = sorted({*free.transports} - {*transports})
    shown = ", ".join(f"{name}={value}" for name, value in restricting.items())
    if left_out:
        yield found("ucx_restricted", "UCX", f"{shown} leaves out {', '.join(left_out)}")
    elif "UCX_NET_DEVICES" in restricting:
        cards = network_cards()
        missing = [card for card in cards if card not in restricting["UCX_NET_DEVICES"]]
        if missing and restricting["UCX_NET_DEVICES"] != "all":
            yield found("ucx_restricted", "UCX", f"{shown} leaves out the cards {', '.join(missing)}")


async def check_reads(transport: TransportName, device: str = "cpu") -> Finding:
    """Read between two processes of this host over one data plane, with a secret of their own."""
    subject = f"read over {'NIXL' if transport == 'nixl' else 'TCP'}"
    secret = secrets.token_hex(32)
    environment = os.environ | {SECRET_VARIABLE: secret}
    for name in (ACCEPTED_VARIABLE, KEY_VARIABLE):
        environment.pop(name, None)
    async with apart.running(partial(apart.listen, transport, device), environment) as endpoint:
        answer = endpoint
        if isinstance(endpoint, str):
            answer = await apart.run(
                partial(apart.read, endpoint, transport, device), environment, limit_s=apart.READ_S
            )
        if not isinstance(answer, probe.ProbeFigures):
            refused = unread(answer, subject)
            return found("self_read_failed", subject, f"{refused.evidence} [{refused.code}]", remedy=refused.remedy)
        if answer.failure is not None:
            return await _explained(subject, answer, endpoint, secret)
    if wrong := sum(reads.wrong_bytes for reads in answer.reads):
        return found("bytes_differ", subject, f"{wrong:,} bytes over {answer.transport}")
    return ok(subject, f"{rate(answer)}; {latency(answer)}")


async def _explained(subject: str, figures: probe.ProbeFigures, endpoint: str, secret: str) -> Finding:
    """Return why two processes could not read from each other."""
    fault = figures.failure
    assert fault is not None
    evidence = f"{fault.message} [{fault.code}]"
    if figures.may_copy is False:
        scope = f"; ptrace_scope is {figures.facts.ptrace_scope}" if figures.facts.ptrace_scope else ""
        return found("process_memory_denied", subject, f"{evidence}{scope}")
    reasons = []
    try:
        config = WorkerConfig(engine_id="doctor", cluster_secret=secret)
        async with open_asker(endpoint, config) as visit:
            offer = await probe.ask(visit)
        reasons = list(why_tcp(figures, offer)) if offer is not None else []
    except KvflowError:
        pass  # the first failure says more
    if reasons:
        texts = "; ".join(dict.fromkeys(each.text for each in reasons))
        remedy = " ".join(dict.fromkeys(each.remedy for each in reasons))
        return found("shared_memory_unused", subject, f"{texts} ({evidence})", remedy=remedy)
    return found("self_read_failed", subject, evidence, remedy=fault.remedy)
