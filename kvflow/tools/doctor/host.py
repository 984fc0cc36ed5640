"""Examine this host alone: software, limits, addresses, NIXL and UCX, and reads between two processes."""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Iterator
from functools import partial

from kvflow.config import (
    ACCEPTED_VARIABLE,
    KEY_VARIABLE,
    SECRET_VARIABLE,
    TransportName,
    WorkerConfig,
    require_secret,
)
from kvflow.errors import ConfigInvalid, KvflowError
from kvflow.reads.reach import PREFIXES, network_cards
from kvflow.rendezvous.dialer import open_visit
from kvflow.tools.doctor import apart, facts, probe
from kvflow.tools.doctor.codes import FailureFigures, Finding, found, note, ok
from kvflow.tools.doctor.path import latency, rate, unread, why_tcp, without_ucx

RESTRICTING = ("UCX_TLS", "UCX_NET_DEVICES")
"""Variables that leave transports or devices out."""


async def examine(*, bind: str | None, advertise: str | None, device: str = "cpu") -> AsyncIterator[Finding]:
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
    free = await apart.run(partial(apart.start_agent, device), without_ucx(os.environ))
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
    environment = apart.environment_without(ACCEPTED_VARIABLE, KEY_VARIABLE, **{SECRET_VARIABLE: secret})
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
        async with open_visit(endpoint, config) as visit:
            offer = await probe.ask(visit)
        reasons = list(why_tcp(figures, offer)) if offer is not None else []
    except KvflowError:
        pass  # the first failure says more
    if reasons:
        texts = "; ".join(dict.fromkeys(each.text for each in reasons))
        remedy = " ".join(dict.fromkeys(each.remedy for each in reasons))
        return found("shared_memory_unused", subject, f"{texts} ({evidence})", remedy=remedy)
    return found("self_read_failed", subject, evidence, remedy=fault.remedy)
