"""``kvflow explain``: how many descriptors a read between two engines takes, why, and which change makes it fewer."""

import argparse
import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
from msgspec import Struct

from kvflow.errors import KvflowError, SpecInvalid, counted, suggest
from kvflow.layout.groups import Group, window_blocks
from kvflow.layout.manifest import Manifest, ManifestGroup
from kvflow.layout.placement import KV_FORMS, LAYOUTS
from kvflow.layout.shards import Shard
from kvflow.layout.specs import CacheSpec
from kvflow.planning.plan import GroupPlan, TransferPlan, explain_stop
from kvflow.tools.cli.arguments import (
    CommandFailed,
    ProgressLine,
    Subparsers,
    add_command,
    at_least,
    control_endpoint,
    member_config,
    number_from,
    print_facts,
    print_json,
    with_default,
)
from kvflow.tools.cli.layout import manifest_of, plans_of, specs_of

RANKS_MAX = 256
"""Of one engine: planning a rank takes some milliseconds."""

FORM = "tp=2,pp=1,layout=LBHNC,kv=content,block-size=16,dtype=bfloat16"


class Deployment(Struct, frozen=True, kw_only=True):
    """How one engine is deployed. ``layout`` may be ``auto``; None stands for what the model says."""

    tp: int = 1
    pp: int = 1
    layout: str = "auto"
    kv: str = "content"
    block_size: int | None = None
    dtype: str | None = None

    def __str__(self) -> str:
        """Return the deployment as ``parse`` reads it, without defaults."""
        fields = msgspec.structs.fields(Deployment)
        given = {each.name: getattr(self, each.name) for each in fields if getattr(self, each.name) != each.default}
        return ",".join(f"{name.replace('_', '-')}={value}" for name, value in given.items()) or "tp=1"


def parse(text: str) -> Deployment:
    """Read a deployment such as ``tp=2,layout=LBHNC``.

    Raises:
        SpecInvalid: a name is unknown or a value is none; names it.
    """
    names = [name.replace("_", "-") for name in Deployment.__struct_fields__]
    given: dict[str, str] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in names:
            raise SpecInvalid(f"{part!r} is no part of a deployment such as {FORM}", remedy=suggest(name, names))
        given[name.replace("-", "_")] = value
    try:
        found = msgspec.convert(given, type=Deployment, strict=False)
    except msgspec.ValidationError as error:
        raise SpecInvalid(f"the deployment {text!r} is wrong: {error}", remedy=f"Write it as {FORM}.") from error
    if found.layout not in {"auto", *LAYOUTS}:
        raise SpecInvalid(f"layout {found.layout!r} is unknown", remedy=suggest(found.layout, ("auto", *LAYOUTS)))
    if found.kv not in KV_FORMS:
        raise SpecInvalid(f"kv {found.kv!r} is unknown", remedy=suggest(found.kv, KV_FORMS))
    if found.tp < 1 or found.pp < 1 or found.tp * found.pp > RANKS_MAX:
        raise SpecInvalid(
            f"the deployment {text!r} has {found.tp * found.pp} ranks",
            remedy=f"Give tp and pp of 1 or more, and at most {RANKS_MAX} ranks.",
        )
    return found


def manifests_of(model: str, deployment: Deployment, *, guess: bool = False) -> list[Manifest]:
    """Return the manifest of each rank of an engine, the ranks of the first pipeline stage first.

    Raises:
        SpecInvalid: the model cannot be described, or does not go with the deployment.
    """
    given = specs_of(model, deployment.block_size, cache_dtype=deployment.dtype, guess=guess)
    if deployment.pp > len(given):
        raise SpecInvalid(f"pp is {deployment.pp}, but the model has {len(given)} layers", remedy="Give a smaller pp.")
    return [
        manifest_of(stage, deployment.layout, deployment.kv, Shard(tp_rank=rank, tp_size=deployment.tp))
        for stage in _stages(given, deployment.pp)
        for rank in range(deployment.tp)
    ]


def _stages(specs: Mapping[str, CacheSpec], count: int) -> list[dict[str, CacheSpec]]:
    """Divide layers among pipeline stages. As in vLLM, the last but one stages take what is left over."""
    sizes = [len(specs) // count] * count
    for at in range(2, 2 + len(specs) % count):
        sizes[-at] += 1
    names = iter(specs.items())
    return [dict([next(names) for _ in range(size)]) for size in sizes]


TOKENS = 8192
LINK_GBIT_S = 100.0
DESCRIPTOR_US = 3.6
"""Of a descriptor of 256 bytes over shared memory: 65,536 of them took 235 ms. See the performance page."""

FEWER = 10
"""A change that makes descriptors this many times fewer is worth it."""

CHANGES_SHOWN = 3


class GroupRead(Struct, frozen=True, kw_only=True):
    """What one source rank gives of one group. ``run_bytes``: smallest and largest run; ``reason``: what ends one."""

    source: int
    source_group: int
    target_group: int
    runs: int
    run_bytes: tuple[int, int]
    descriptors: int
    nbytes: int
    reason: str


class ReadCost(Struct, frozen=True, kw_only=True):
    """What one rank of the reader reads, and the seconds for its bytes, and for its descriptors in any order of ids."""

    source_ranks: int
    descriptors: int
    descriptors_consecutive: int
    nbytes: int
    link_s: float
    descriptors_s: float


class ChangeFigures(Struct, frozen=True, kw_only=True):
    """One change of one setting, on one side or on both, and how many times fewer descriptors it makes."""

    change: str
    descriptors: int
    fewer: float


class ExplainFigures(Struct, frozen=True, kw_only=True):
    """What ``kvflow explain --json`` prints."""

    source: str
    target: str
    tokens: int
    read: ReadCost
    groups: tuple[GroupRead, ...]
    changes: tuple[ChangeFigures, ...]


def add_parser(commands: Subparsers) -> None:
    """Add ``explain`` to the command line."""
    parser = add_command(
        commands,
        "explain",
        summary="count the descriptors of a read between two engines, and say why there are so many",
        description="Plan a read between two deployments of a model, or between two running workers: descriptors, "
        "bytes and time for a request, what makes the descriptors so many, and which single change makes them fewer.",
        examples="kvflow explain llama-3.1-8b --source tp=2,layout=LBHNC --target tp=4,layout=BHLNC\n"
        "kvflow explain --from prefill-0:7000 --from decode-0:7000 --tokens 32768",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a bundled model, or a config.json or its folder")
    for side, what in (("source", "prefill engine"), ("target", "decode engine")):
        parser.add_argument(f"--{side}", default="tp=1", metavar="TEXT", help=f"the {what}, such as {FORM}")
    parser.add_argument(
        "--from",
        dest="endpoints",
        action="append",
        type=control_endpoint,
        metavar="ENDPOINT",
        help="a running worker instead of a model: give it twice, the prefill side first",
    )
    parser.add_argument(
        "--key", dest="keys", action="append", metavar="KEY", help="public keys of these workers, in the same order"
    )
    with_default(parser, "--tokens", TOKENS, "tokens of the request", type=at_least(1), metavar="N")
    positive = number_from(float, 1e-9, "not between 1e-9 and 1e9", high=1e9)
    with_default(parser, "--link-gbit-s", LINK_GBIT_S, "rate of the link, in Gbit/s", type=positive, metavar="G")
    cost = "cost of a descriptor, in microseconds"
    with_default(parser, "--descriptor-us", DESCRIPTOR_US, cost, type=positive, metavar="US")
    parser.add_argument(
        "--guess", action="store_true", help="describe an unknown model type as plain attention, and say so"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(run=run, misuse=SpecInvalid)


def run(options: argparse.Namespace) -> int:
    """Plan the read and explain it; 1 if the caches do not fit or a worker does not answer, 2 for a wrong command."""
    if (options.model is None) == (options.endpoints is None) or len(options.endpoints or "ab") != 2:
        raise CommandFailed("give a model, or --from twice")
    with ProgressLine(as_json=options.json) as progress:
        figures = _of_workers(options) if options.model is None else _of_model(options, progress)
    if options.json:
        print_json(figures)
    else:
        _print(figures, options)
    return 0


def _of_model(options: argparse.Namespace, progress: Callable[[str], None]) -> ExplainFigures:
    source, target = parse(options.source), parse(options.target)

    def plan(source: Deployment, target: Deployment) -> "_Read":
        manifests = [manifests_of(options.model, each, guess=options.guess) for each in (source, target)]
        one_of_each_stage = manifests[1][:: target.tp]  # the others of a stage read as much
        return _read(manifests[0], one_of_each_stage, options.tokens)

    progress("planning the read")
    read = plan(source, target)
    changes = []
    candidates = [*_changes(source, target)]
    for at, (words, changed_source, changed_target) in enumerate(candidates):
        progress(f"trying change {at + 1} of {len(candidates)}: {words}")
        try:
            descriptors = plan(changed_source, changed_target).descriptors
        except KvflowError:
            continue  # the model does not go with it
        if descriptors < read.descriptors:
            fewer = read.descriptors / max(1, descriptors)
            changes.append(ChangeFigures(change=words, descriptors=descriptors, fewer=fewer))
    # Of changes that do the same, those of one side come first.
    changes.sort(key=lambda change: (change.descriptors, change.change.startswith("both")))
    return _figures(read, options, f"{options.model}, {source}", f"{options.model}, {target}", changes)


def _of_workers(options: argparse.Namespace) -> ExplainFigures:
    source, target = asyncio.run(_manifests(options.endpoints, options.keys or []))
    first, second = options.endpoints
    return _figures(_read([source], [target], options.tokens), options, first, second, [])


async def _manifests(endpoints: Sequence[str], keys: Sequence[str]) -> list[Manifest]:
    from kvflow.rendezvous.dialer import open_asker  # noqa: PLC0415 - a model needs no ZeroMQ

    found, config = [], member_config(*keys)
    for endpoint, key in zip(endpoints, [*keys, "", ""], strict=False):
        async with open_asker(endpoint, config, server_key=key) as visit:
            found.append((await visit.read_manifest()).manifest)
    return found


class _Read(Struct, frozen=True):
    """What one rank of the reader reads: a plan for each source rank."""

    plans: tuple[tuple[int, TransferPlan], ...]
    blocks: tuple[int, ...]

    @property
    def descriptors(self) -> int:
        return self.count(consecutive=False)

    def count(self, *, consecutive: bool) -> int:
        return sum(plan.descriptors(self.blocks, consecutive=consecutive) for _, plan in self.plans)


def _read(sources: Sequence[Manifest], targets: Sequence[Manifest], tokens: int) -> _Read:
    """Plan what each of these ranks of the reader reads, and return the one with the most descriptors."""
    reads = [
        _Read(tuple(plans_of(sources, target)), tuple(_blocks(group, tokens) for group in target.groups))
        for target in targets
    ]
    return max(reads, key=lambda read: read.descriptors)


def _blocks(group: ManifestGroup, tokens: int) -> int:
    """Return how many blocks of a group a request needs: of a window only the last."""
    kinds = {(layer.kind, layer.window) for layer in group.layers}
    if len(kinds) > 1 or group.stripe.size > 1:
        return -(-tokens // group.block_tokens)
    kind, window = kinds.pop()
    names = tuple(layer.name for layer in group.layers)
    return window_blocks(Group(kind=kind, layers=names, block_size=group.block_size, window=window), tokens)


def _changes(source: Deployment, target: Deployment) -> Iterator[tuple[str, Deployment, Deployment]]:
    """Yield each change of one setting, with both deployments after it."""
    choices = {
        "layout": LAYOUTS,
        "kv": KV_FORMS,
        "block_size": {source.block_size, target.block_size} - {None},
        "tp": {source.tp, target.tp},
        "pp": {source.pp, target.pp},
    }
    replace = msgspec.structs.replace
    for name, values in choices.items():
        for value in sorted(values, key=str):
            for side, changed_source, changed_target in (
                ("source", replace(source, **{name: value}), target),
                ("target", source, replace(target, **{name: value})),
                ("both sides", replace(source, **{name: value}), replace(target, **{name: value})),
            ):
                both = side == "both sides" and value in {getattr(source, name), getattr(target, name)}
                if (changed_source, changed_target) != (source, target) and not both:
                    yield f"{side}: {name.replace('_', '-')}={value}", changed_source, changed_target


def _figures(
    read: _Read, options: argparse.Namespace, source: str, target: str, changes: Sequence[ChangeFigures]
) -> ExplainFigures:
    groups = tuple(_group(at, group, read) for at, plan in read.plans for group in plan.groups)
    nbytes = sum(group.nbytes for group in groups)
    return ExplainFigures(
        source=source,
        target=target,
        tokens=options.tokens,
        read=ReadCost(
            source_ranks=len(read.plans),
            descriptors=read.descriptors,
            descriptors_consecutive=read.count(consecutive=True),
            nbytes=nbytes,
            link_s=nbytes * 8 / (options.link_gbit_s * 1e9),
            descriptors_s=read.descriptors * options.descriptor_us * 1e-6,
        ),
        groups=groups,
        changes=tuple(changes),
    )


def _group(source: int, group: GroupPlan, read: _Read) -> GroupRead:
    units, _ = group.moved(read.blocks[group.target_group])
    runs = group.runs
    return GroupRead(
        source=source,
        source_group=group.source_group,
        target_group=group.target_group,
        runs=len(runs),
        run_bytes=(int(runs.nbytes.min()), int(runs.nbytes.max())),
        descriptors=units * len(runs),
        nbytes=units * int(runs.nbytes.sum()),
        reason=explain_stop(runs, group.pairs, group.unit_tokens),
    )


def _print(figures: ExplainFigures, options: argparse.Namespace) -> None:
    read, tokens = figures.read, counted(figures.tokens, "token")
    cost = f"{read.descriptors_s * 1e3:,.1f} ms at {options.descriptor_us:g} us each"
    print_facts(
        [
            ("source", figures.source),
            ("target", figures.target),
            ("request", f"{tokens}, of which one rank reads from {counted(read.source_ranks, 'source rank')}"),
            ("bytes", f"{read.nbytes:,}, {read.link_s * 1e3:,.1f} ms at {options.link_gbit_s:g} Gbit/s"),
            ("descriptors", f"{read.descriptors:,} for ids in any order, {cost}"),
            ("  ascending", f"{read.descriptors_consecutive:,} for ids that ascend by one on both sides"),
        ]
    )
    worst = max(figures.groups, key=lambda group: group.descriptors)
    low, high = worst.run_bytes
    size = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    print(
        f"\nwhy so many: group {worst.source_group} of source rank {worst.source} gives {worst.descriptors:,}:\n"
        f"{counted(worst.runs, 'run')} of {size} bytes each time:\n{worst.reason}"
    )
    print()
    if options.model is None:
        print("To try changes, give the model and both deployments instead of --from.")
        return
    _print_changes(figures.changes)


def _print_changes(changes: Sequence[ChangeFigures]) -> None:
    if not changes:
        print("No single change makes it fewer.")
        return
    if changes[0].fewer >= FEWER:
        print(f"A single change makes it {FEWER} times fewer, or better:")
    else:
        print(f"No single change makes it {FEWER} times fewer. The best are:")
    for change in changes[:CHANGES_SHOWN]:
        print(f"  {change.change}: {change.descriptors:,} descriptors, {change.fewer:.1f} times fewer")
