"""``kvflow doctor``: what is wrong with this host, with the path to another one, or with running engines."""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator

from kvflow.addresses import host_and_port
from kvflow.config import WILDCARD_HOSTS, Tuning, WorkerConfig
from kvflow.errors import ConfigInvalid, counted
from kvflow.tools.cli import config as settings
from kvflow.tools.cli.arguments import (
    CommandFailed,
    Subparsers,
    above_0,
    add_command,
    address,
    at_least,
    bound_address,
    member_config,
    print_json,
    require_extra,
    server,
    with_default,
)
from kvflow.tools.doctor.codes import Finding, exit_status, ok, summarized
from kvflow.tools.doctor.facts import own_address
from kvflow.tools.trace.text import printable

MARKS = {"ok": "ok", "note": "note", "warning": "WARNING", "failed": "FAILED"}

LINE_MAX = 2000
"""Characters of evidence that a terminal gets; --json has all of them."""

TRANSPORTS = ("auto", "nixl", "tcp")


def add_parser(commands: Subparsers) -> None:
    """Add ``doctor`` to the command line."""
    parser = add_command(
        commands,
        "doctor",
        summary="find out what is wrong with this host, the path to another one, or running engines",
        description="Examine this host: software, limits, addresses, NIXL and UCX, and reads between two of its "
        "processes. With ENDPOINT, examine the path to a worker; if kvflow doctor --listen runs there, read "
        "from it, compare each byte, and measure. With --live, send requests through the router of two servers of "
        "vLLM, and say what each hop did. What is wrong has a code, its evidence, and a remedy.",
        examples="kvflow doctor\nkvflow doctor --bind 0.0.0.0:7000 --advertise prefill-0\n"
        "kvflow doctor --listen 10.0.0.5:7400\nkvflow doctor 10.0.0.5:7400\n"
        "kvflow doctor --live http://127.0.0.1:8100 http://127.0.0.1:8200 http://127.0.0.1:8000",
    )
    parser.add_argument(
        "endpoint",
        type=_endpoint,
        nargs="?",
        metavar="ENDPOINT",
        help="control endpoint of a worker, or of kvflow doctor --listen",
    )
    parser.add_argument(
        "--listen",
        type=_listening,
        nargs="?",
        const="",
        metavar="HOST:PORT",
        help="offer probe blocks to members of the cluster, until Ctrl-C; without an address, on a free port",
    )
    parser.add_argument("--bind", type=bound_address, metavar="HOST:PORT", help="address that a worker would listen on")
    reached = "address at which peers would reach the worker, or --listen"
    parser.add_argument("--advertise", type=_advertised, metavar="HOST[:PORT]", help=reached)
    parser.add_argument(
        "--tcp-bind", type=bound_address, metavar="HOST:PORT", help="with --listen, where the TCP plane listens"
    )
    parser.add_argument("--key", metavar="KEY", help="public key of the worker, if it has one of its own")
    planes = "data planes that ENDPOINT and --listen may use"
    with_default(parser, "--transport", TRANSPORTS[0], planes, choices=TRANSPORTS)
    with_default(parser, "--device", "cpu", "where probe blocks lie: cpu, cuda or cuda:1")
    _add_live(parser)
    parser.add_argument("--strict", action="store_true", help="exit with 1 for warnings, too")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(run=run, misuse=ConfigInvalid)


def _add_live(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--live",
        type=server,
        nargs=3,
        metavar=("PREFILL", "DECODE", "ROUTER"),
        help="base URLs, http://HOST:PORT, of two running servers of vLLM and of the router before them",
    )
    length = "with --live, length of a prompt, roughly; several blocks of the cache"
    with_default(parser, "--prompt-tokens", 512, length, type=at_least(1), metavar="N")
    parser.add_argument(
        "--api-key", metavar="KEY", help="with --live, key that the servers expect (default: the variable VLLM_API_KEY)"
    )
    for flag, default, meaning in (
        ("--timeout-s", 120.0, "timeout of one request"),
        ("--settle-s", 5.0, "how long counters may take to show a request"),
    ):
        with_default(parser, flag, default, f"with --live, {meaning}", type=above_0(float), metavar="SECONDS")


def _listening(text: str) -> str:
    return bound_address(text) if text else text  # argparse also reads what --listen means without an address


def _advertised(text: str) -> str:
    return bound_address(text) if ":" in text.removeprefix("tcp://").rpartition("]")[2] else text


def _endpoint(text: str) -> str:
    return f"tcp://{address(text.removeprefix('tcp://'))}"


def run(options: argparse.Namespace) -> int:
    """Examine what the command line names; 1 if something failed, 2 if the command line is wrong."""
    if sum(given is not None for given in (options.endpoint, options.listen, options.live)) > 1:
        raise CommandFailed("give one of ENDPOINT, --listen and --live")
    if options.live is not None:
        require_extra(aiohttp="proxy", prometheus_client="metrics")
    if options.listen is not None:
        return asyncio.run(_listen(options))
    return asyncio.run(_show(_examined(options), as_json=options.json, strict=options.strict))


def _examined(options: argparse.Namespace) -> AsyncIterator[Finding]:
    # Loaded here, so that --help waits for none of it.
    if options.live is not None:
        from kvflow.tools.doctor import live  # noqa: PLC0415

        prefill, decode, router = options.live
        return live.examine(
            live.Targets(
                prefill=prefill,
                decode=decode,
                router=router,
                prompt_tokens=options.prompt_tokens,
                api_key=options.api_key or os.environ.get("VLLM_API_KEY", ""),
                timeout_s=options.timeout_s,
                settle_s=options.settle_s,
            )
        )
    if options.endpoint is None:
        return _alone(options)
    from kvflow.tools.doctor import path  # noqa: PLC0415

    target = path.Target(
        endpoint=options.endpoint,
        config=member_config(options.key),
        key=options.key or "",
        transport=options.transport,
        device=options.device,
    )
    target.config.check()  # with a wrong secret of ours, nothing that follows would mean anything
    return path.examine(target)


async def _alone(options: argparse.Namespace) -> AsyncIterator[Finding]:
    from kvflow.tools.doctor import path  # noqa: PLC0415

    for finding in check_settings():
        yield finding
    async for finding in path.examine_host(bind=options.bind, advertise=options.advertise, device=options.device):
        yield finding


def check_settings() -> Iterator[Finding]:
    """Yield what is wrong with the settings in the environment, secrets aside."""
    judged, _ = settings.examine(settings.Given({}))
    wrong = [each for each in judged if "cluster secret" not in each.message]
    for each in wrong:
        status, code = ("failed", each.code) if each.severity == "error" else ("warning", "setting_doubtful")
        yield Finding(code=code, status=status, subject="settings", evidence=each.message, remedy=each.remedy)  # type: ignore[arg-type]
    if not wrong:
        yield ok("settings", "all variables of kvflow are valid; kvflow config shows the values")


async def _show(findings: AsyncIterator[Finding], *, as_json: bool, strict: bool) -> int:
    """Print findings, as text each when it is there, and return the exit status."""
    listed = []
    async for finding in findings:
        listed.append(finding)
        if not as_json:
            print(line_of(finding), flush=True)
    figures = summarized(listed)
    if as_json:
        print_json(figures)
    else:
        print(f"\n{counted(len(listed), 'finding')}: {figures.failed} failed, {counted(figures.warnings, 'warning')}")
    return exit_status(figures, strict=strict)


def line_of(finding: Finding) -> str:
    """Return a finding as text: what was seen, and for what is wrong its code and remedy."""
    subject, evidence = (printable(each, LINE_MAX) for each in (finding.subject, finding.evidence))
    text = f"{MARKS[finding.status].ljust(8)} {subject}: {evidence}"
    if finding.status in {"warning", "failed"}:
        return f"{text} [{printable(finding.code)}]\n{' ' * 9}{printable(finding.remedy, LINE_MAX)}"
    return text


async def _listen(options: argparse.Namespace) -> int:
    from kvflow.tools.doctor.probe import listening  # noqa: PLC0415 - loads torch

    ended = asyncio.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(each, ended.set)
    async with listening(_listener_config(options), device=options.device) as worker:
        shown = worker.endpoint.removeprefix("tcp://")
        if options.json:
            print_json({"endpoint": worker.endpoint})
        else:
            print(f"offering probe blocks at {worker.endpoint}, until Ctrl-C; on the other host, with the same secret:")
            print(f"  kvflow doctor {shown}", flush=True)
        sys.stdout.flush()
        await ended.wait()
    return 0


def _listener_config(options: argparse.Namespace) -> WorkerConfig:
    own = own_address()
    bind = options.listen or f"{'127.0.0.1' if own in WILDCARD_HOSTS else own}:0"
    host, port = host_and_port(bind)
    advertise = options.advertise
    if advertise is None and host in WILDCARD_HOSTS:
        advertise = own
    if advertise is not None and ":" not in advertise:
        advertise = f"{advertise}:{port}"
    base = member_config(options.key)
    config = WorkerConfig(
        engine_id="doctor",
        bind=f"tcp://{bind}",
        advertise=None if advertise is None else f"tcp://{advertise}",
        allowed_keys=base.allowed_keys,
        transport=options.transport,
        lease_s=60.0,
        tuning=Tuning(tcp_bind=None if options.tcp_bind is None else f"tcp://{options.tcp_bind}"),
    )
    config.check()
    return config
