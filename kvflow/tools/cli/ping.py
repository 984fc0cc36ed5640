"""``kvflow ping``: whether a worker answers, who it is, and whether a cache would fit."""

import argparse
from typing import TYPE_CHECKING

from msgspec import Struct

from kvflow.errors import ConfigInvalid, KvflowError, SpecInvalid
from kvflow.layout.compare import compare_manifests
from kvflow.layout.manifest import Manifest
from kvflow.planning.assignment import assign_sources
from kvflow.planning.plan import plan_transfer
from kvflow.tools.cli import visits
from kvflow.tools.cli.arguments import add_command, at_least, member_config
from kvflow.tools.cli.deployments import FORM, manifests_of, parse
from kvflow.tools.cli.findings import Failure, failure_of, print_facts, print_failure, print_json

if TYPE_CHECKING:
    from kvflow.config import WorkerConfig
    from kvflow.tools.cli.arguments import Subparsers

PINGS = 5
FIELDS_SHOWN = 8


class FitFigures(Struct, frozen=True, kw_only=True):
    """Whether a reader could read from the worker.

    Attributes:
        reader: the model, or the endpoint.
        verdict: ``same``, ``convertible`` or ``incompatible``.
        differences: a line for each field that differs.
        descriptors: to read one block of every group from this rank; None if nothing can be read.
        missing: components of the reader that this rank does not hold; other ranks may.
        failure: why nothing can be read.
    """

    reader: str
    verdict: str
    differences: tuple[str, ...]
    descriptors: int | None
    missing: int
    failure: Failure | None


class PingFigures(Struct, frozen=True, kw_only=True):
    """What ``kvflow ping --json`` prints."""

    worker: visits.WorkerFigures
    rtt_s: tuple[float, ...]
    cache: visits.CacheFigures
    fit: FitFigures | None


def add_parser(commands: "Subparsers") -> None:
    """Add ``ping`` to the command line."""
    parser = add_command(
        commands,
        "ping",
        summary="check that a worker answers, and that a cache would fit",
        description="Dial a worker as its readers do, with the secret of the environment: show who it is, its "
        "versions and its cache, and measure the round trip. With --model or --reader, say whether that "
        "cache can be read from this worker.",
        examples="kvflow ping prefill-0:7000\nkvflow ping prefill-0:7000 --reader decode-0:7000\n"
        "kvflow ping prefill-0:7000 --model ./my-model --deployment tp=2",
    )
    visits.add_flags(parser)
    parser.add_argument("--count", type=at_least(1), default=PINGS, help="round trips (default: %(default)s)")
    against = parser.add_mutually_exclusive_group()
    against.add_argument(
        "--reader", type=visits.endpoint, metavar="ENDPOINT", help="another worker: could it read from this one?"
    )
    against.add_argument("--model", metavar="MODEL", help="a bundled model, or a config.json: could it be read?")
    parser.add_argument("--reader-key", metavar="KEY", help="public key of that worker, if it has its own")
    parser.add_argument("--deployment", default="tp=1", metavar="TEXT", help=f"of the model, such as {FORM}")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Dial the worker and show it; 1 if that fails or the cache does not fit."""
    try:
        figures = visits.run_loop(_visit(options))
    except KvflowError as error:
        return print_failure("kvflow ping", error, as_json=options.json, status=_status(error))
    if options.json:
        print_json(figures)
    else:
        _print(figures)
    return int(figures.fit is not None and figures.fit.failure is not None)


def _status(error: KvflowError) -> int:
    """Return 2 for what the user gave wrong, and 1 for what the worker did."""
    return 2 if isinstance(error, ConfigInvalid | SpecInvalid) else 1


async def _visit(options: argparse.Namespace) -> PingFigures:
    from kvflow.rendezvous.visitor import open_visit  # noqa: PLC0415 - --help needs no ZeroMQ

    targets = manifests_of(options.model, parse(options.deployment)) if options.model is not None else []
    config = member_config(visits.keys_of(options.key, options.reader_key))
    async with open_visit(options.endpoint, config, server_key=options.key or "") as visit:
        rtts = tuple([await visit.ping() for _ in range(options.count)])
        told = await visit.read_manifest()
        worker = visits.worker_figures(visit)
    fit = None
    if targets:
        fit = _fit(options.model, told.manifest, targets[0])
    elif options.reader is not None:
        reader = await _manifest_of(options.reader, config, options.reader_key)
        fit = _fit(options.reader, told.manifest, reader)
    return PingFigures(worker=worker, rtt_s=rtts, cache=visits.cache_figures(told), fit=fit)


async def _manifest_of(endpoint: str, config: "WorkerConfig", key: str | None) -> Manifest:
    from kvflow.rendezvous.visitor import open_visit  # noqa: PLC0415 - --help needs no ZeroMQ

    async with open_visit(endpoint, config, server_key=key or "") as visit:
        return (await visit.read_manifest()).manifest


def _fit(reader: str, source: Manifest, target: Manifest) -> FitFigures:
    """Compare two caches, and plan a read of what this one rank holds."""
    compared = compare_manifests(source, target)
    descriptors, missing, failure = None, 0, None
    try:
        plan = plan_transfer(source, target)
        descriptors, missing = plan.descriptors(1), len(plan.certificate.missing)
        if source.identity.num_ranks == 1:
            assign_sources(target, [source])  # no other rank can give what is missing
    except KvflowError as error:
        failure = failure_of(error)
    return FitFigures(
        reader=reader,
        verdict=str(compared.verdict),
        differences=tuple(str(field) for field in compared.fields if field.verdict != "same"),
        descriptors=descriptors,
        missing=missing,
        failure=failure,
    )


def _print(figures: PingFigures) -> None:
    least, most = min(figures.rtt_s), max(figures.rtt_s)
    facts = visits.worker_facts(figures.worker, figures.cache)
    facts.append(("round trip", f"{least * 1e3:.3f} ms at best, {most * 1e3:.3f} ms at worst of {len(figures.rtt_s)}"))
    print_facts(facts)
    fit = figures.fit
    if fit is None:
        return
    print()
    if fit.failure is not None:
        print(f"{fit.reader} cannot read it: {fit.failure.message} [{fit.failure.code}] {fit.failure.remedy}")
    else:
        more = f"; other ranks must give {fit.missing} components" if fit.missing else ""
        print(f"{fit.reader} can read it: {fit.descriptors:,} descriptors for a block of every group{more}")
    for line in fit.differences[:FIELDS_SHOWN]:
        print(f"  {line}")
    if len(fit.differences) > FIELDS_SHOWN:
        print(f"  and {len(fit.differences) - FIELDS_SHOWN} more differences; --json has all of them")
