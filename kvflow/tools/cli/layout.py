"""``kvflow layout``: how the cache of a model lies in memory, as tables or as JSON."""

import argparse
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import msgspec
from msgspec import Struct

from kvflow import models
from kvflow.errors import KvflowError, SpecInvalid, suggest
from kvflow.layout.component import ADDRESS_MAX, Region
from kvflow.layout.describe import CachePlan, plan_cache
from kvflow.layout.groups import Group, plan_groups, resolve_layout, stripe_of
from kvflow.layout.manifest import Manifest
from kvflow.layout.placement import KV_FORMS, LAYOUTS, page_bytes
from kvflow.layout.shards import Shard
from kvflow.layout.specs import CacheSpec
from kvflow.planning.assignment import assign_sources
from kvflow.planning.plan import TransferPlan, plan_transfer
from kvflow.tools.cli.arguments import (
    CommandFailed,
    Subparsers,
    add_command,
    at_least,
    number_from,
    print_json,
    with_default,
)

NUM_BLOCKS = 1024

HUB_REMEDY = "For a model of the Hugging Face Hub, download its config.json and give the path."

BLOCKS_MAX = 1 << 31
"""Above what block ids of any engine reach; every stride and offset still fits 64 bits."""


class ComponentFigures(Struct, frozen=True):
    """One component of one layer; strides and offset in bytes, one stride per extent."""

    role: str
    dtype: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    block_stride: int


class LayerFigures(Struct, frozen=True):
    """One layer: its group, and the bytes of its page, padding included."""

    group: int
    page_bytes: int
    components: tuple[ComponentFigures, ...]


class GroupFigures(Struct, frozen=True):
    """One group.

    Attributes:
        block_size: tokens in one block, of those that are on this rank.
        block_tokens: tokens of a request that one block id stands for.
        layer_stride: bytes from one layer to the next; None where that differs, or for a single layer.
        padding_bytes: of one block, unused while it is this group's.
    """

    kind: str
    layers: int
    block_size: int
    block_tokens: int
    window: int
    page_bytes: tuple[int, ...]
    layer_stride: int | None
    content_bytes: int
    padding_bytes: int


class PeerFigures(Struct, frozen=True):
    """What the first rank of another engine reads of this one, from all ranks, for one of its blocks of every group."""

    tp_size: int
    descriptors: int


class Report(Struct, frozen=True):
    """What ``kvflow layout`` shows; all groups are overlaid in one allocation.

    Attributes:
        positions: layers of the longest group, which others share memory with.
        tensors: separate ranges of the allocation: one if it is packed, else one per position.
        enlarged: whether blocks were enlarged so that a page of attention holds a state.
        peer: an engine that reads this one.
    """

    model: str
    layout: str
    kv: str
    tp_rank: int
    tp_size: int
    dcp_rank: int
    dcp_size: int
    dcp_interleave: int
    num_blocks: int
    positions: int
    tensors: int
    bytes_per_block: int
    nbytes: int
    padding_percent: float
    enlarged: bool
    peer: PeerFigures
    groups: tuple[GroupFigures, ...]
    layers: dict[str, LayerFigures]


def add_parser(commands: Subparsers) -> None:
    """Add ``layout`` to the command line."""
    parser = add_command(
        commands,
        "layout",
        summary="show how the cache of a model lies in memory",
        description="Plan the KV cache of a model and show how it lies in memory: tensors, groups, strides and bytes. "
        "Nothing is allocated, and neither torch nor NIXL is loaded.",
        examples="kvflow layout gemma-3-4b --layout BLHNC\nkvflow layout ./my-model --tp 4 --rank 1",
    )
    parser.add_argument("model", metavar="MODEL", help="a bundled model, or the path to a config.json or its folder")
    with_default(parser, "--tp", 1, "tensor-parallel ranks of the engine", type=at_least(1), metavar="N")
    with_default(parser, "--rank", 0, "rank to show, counted from 0", type=at_least(0), metavar="R")
    parser.add_argument(
        "--peer-tp",
        type=at_least(1),
        metavar="N",
        help="tensor-parallel ranks of the engine that reads this one: for the number of descriptors (default: --tp)",
    )
    divided = "neighboring ranks that divide the tokens: decode context parallelism"
    with_default(parser, "--dcp", 1, divided, type=at_least(1), metavar="N")
    kept = "consecutive tokens that one of these ranks keeps"
    with_default(parser, "--dcp-interleave", 1, kept, type=at_least(1), metavar="N")
    with_default(parser, "--layout", "auto", "order of the axes", choices=("auto", *LAYOUTS))
    where = (
        "where V lies: beside K in each token (content), in a second half of the tensor (split), or in a second "
        "half of each block (block_split)"
    )
    with_default(parser, "--kv", "content", where, choices=KV_FORMS)
    parser.add_argument("--block-size", type=at_least(1), metavar="N", help="tokens in one block; 16 for most models")
    blocks = number_from(int, 1, f"not between 1 and {BLOCKS_MAX}", high=BLOCKS_MAX)
    with_default(parser, "--blocks", NUM_BLOCKS, "blocks in the pool", type=blocks, metavar="N")
    parser.add_argument("--cross-layers", action="store_true", help="let --layout auto choose a packed layout")
    parser.add_argument(
        "--guess", action="store_true", help="describe an unknown model type as plain attention, and say so"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run, misuse=KvflowError)


def run(options: argparse.Namespace) -> int:
    """Plan the cache and show it; 2 if the model or the options cannot be used."""
    try:
        report = _describe(options)
    except msgspec.ValidationError as error:
        raise CommandFailed(str(error)) from error
    if options.json:
        print_json(report)
    else:
        print(_as_text(report))
    return 0


def _describe(options: argparse.Namespace) -> Report:
    if options.rank >= options.tp:
        remedy = f"Give --rank from 0 to {options.tp - 1}, or raise --tp."
        raise SpecInvalid(f"--rank is {options.rank}, but --tp is {options.tp}", remedy=remedy)
    if options.tp % options.dcp:
        remedy = "Give a divisor of --tp: neighboring ranks of one engine divide the tokens."
        raise SpecInvalid(f"--dcp is {options.dcp}, which does not divide --tp {options.tp}", remedy=remedy)
    shard = msgspec.convert(
        {
            "tp_rank": options.rank,
            "tp_size": options.tp,
            "dcp_rank": options.rank % max(1, options.dcp),
            "dcp_size": options.dcp,
            "dcp_interleave": options.dcp_interleave,
        },
        type=Shard,
    )
    given = specs_of(options.model, options.block_size, guess=options.guess)
    specs = models.align_states(given, shard=shard)
    layout = resolve_layout(specs, options.layout, enable_cross_layers_blocks=options.cross_layers, shard=shard)
    name = options.model if options.model in models.names() else Path(options.model).resolve().name
    return _summarize(
        plan_rank(given, layout, options.kv, shard, options.blocks),
        name,
        layout=layout,
        kv=options.kv,
        enlarged=specs != given,
        peer=_descriptors(partial(manifest_of, given, layout, options.kv), shard, options.peer_tp or options.tp),
    )


def plan_rank(
    given: Mapping[str, CacheSpec], layout: str, kv: str, shard: Shard, num_blocks: int = NUM_BLOCKS
) -> CachePlan:
    """Plan the cache of one rank of an engine."""
    specs = models.align_states(given, shard=shard)
    layout = resolve_layout(specs, layout, shard=shard)
    groups = plan_groups(specs, layout=layout, shard=shard)
    return plan_cache(specs, groups, layout=layout, kv=kv, shard=shard, num_blocks=num_blocks)


def manifest_of(given: Mapping[str, CacheSpec], layout: str, kv: str, shard: Shard) -> Manifest:
    """Return the manifest of one rank of an engine."""
    return plan_rank(given, layout, kv, shard).manifest(Region(0, ADDRESS_MAX))


def plans_of(sources: Sequence[Manifest], target: Manifest) -> list[tuple[int, TransferPlan]]:
    """Return what a rank reads from which source ranks."""
    if len(sources) == 1:
        return [(0, plan_transfer(sources[0], target))]
    return [
        (share.source, plan_transfer(sources[share.source], target, head_ranges=share.head_ranges))
        for share in assign_sources(target, sources)
    ]


def _descriptors(manifest: Callable[[Shard], Manifest], shard: Shard, peer_tp: int) -> PeerFigures:
    """Count what the first rank of another engine reads of this one, for one of its blocks of every group."""
    stripes = {"dcp_size": shard.dcp_size, "dcp_interleave": shard.dcp_interleave}
    sources = [
        manifest(Shard(tp_rank=rank, tp_size=shard.tp_size, dcp_rank=rank % shard.dcp_size, **stripes))
        for rank in range(shard.tp_size)
    ]
    target = manifest(Shard(tp_size=peer_tp, **(stripes if peer_tp % shard.dcp_size == 0 else {})))
    plans = plans_of(sources, target)
    return PeerFigures(tp_size=peer_tp, descriptors=sum(plan.descriptors(1) for _, plan in plans))


def specs_of(
    model: str, block_size: int | None, *, cache_dtype: str | None = None, guess: bool
) -> dict[str, CacheSpec]:
    """Describe a bundled model, or the one at a path, and print guesses to standard error.

    Raises:
        SpecInvalid: it is neither, or cannot be described.
    """
    if model in models.names():
        return models.load(model, block_size=block_size, cache_dtype=cache_dtype)
    if not Path(model).exists():
        raise SpecInvalid(
            f"{model!r} is neither a bundled model nor a file or folder",
            remedy=f"{HUB_REMEDY} {suggest(model.rpartition('/')[2].lower(), models.names())}",
        )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", models.GuessWarning)
        specs = models.from_hf_config(Path(model), block_size=block_size, cache_dtype=cache_dtype, guess=guess)
    for warning in told:
        print(f"kvflow: {warning.message}", file=sys.stderr)
    return specs


def _summarize(plan: CachePlan, model: str, *, layout: str, kv: str, enlarged: bool, peer: PeerFigures) -> Report:
    groups = tuple(_group_figures(plan, group) for group in plan.groups)
    positions = max(group.layers for group in groups)
    padding = sum(group.padding_bytes for group in groups)
    return Report(
        model=model,
        layout=layout,
        kv=kv,
        tp_rank=plan.shard.tp_rank,
        tp_size=plan.shard.tp_size,
        dcp_rank=plan.shard.dcp_rank,
        dcp_size=plan.shard.dcp_size,
        dcp_interleave=plan.shard.dcp_interleave,
        num_blocks=plan.num_blocks,
        positions=positions,
        tensors=1 if plan.packed else positions,
        bytes_per_block=plan.bytes_per_block,
        nbytes=plan.nbytes,
        padding_percent=100 * padding / (plan.bytes_per_block * len(groups)),
        enlarged=enlarged,
        peer=peer,
        groups=groups,
        layers={
            name: LayerFigures(
                group=index,
                page_bytes=page_bytes(plan.specs[name], plan.shard),
                components=msgspec.convert(
                    plan.layers[name].components, tuple[ComponentFigures, ...], from_attributes=True
                ),
            )
            for index, group in enumerate(plan.groups)
            for name in group.layers
        },
    )


def _group_figures(plan: CachePlan, group: Group) -> GroupFigures:
    components = [part for name in group.layers for part in plan.layers[name].components]
    content = sum(part.nbytes * part.kernel_blocks(group.block_size) for part in components)
    starts = [plan.layers[name].components[0].offset for name in group.layers]
    steps = {after - before for before, after in pairwise(starts)}
    return GroupFigures(
        kind=group.kind,
        layers=len(group.layers),
        block_size=group.block_size,
        block_tokens=group.block_size * stripe_of(group, plan.shard).size,
        window=group.window,
        page_bytes=tuple(sorted({page_bytes(plan.specs[name], plan.shard) for name in group.layers})),
        layer_stride=steps.pop() if len(steps) == 1 else None,
        content_bytes=content,
        padding_bytes=plan.bytes_per_block - content,
    )


def _as_text(report: Report) -> str:
    kind_of_tensors = "packed: a block is one row" if report.tensors < report.positions else "one per position"
    facts = [
        ("bytes per block", f"{report.bytes_per_block:,}"),
        ("bytes in all", f"{report.nbytes:,} ({report.num_blocks:,} blocks)"),
        ("positions", f"{report.positions} (layers of the longest group)"),
        ("tensors", f"{report.tensors} ({kind_of_tensors})"),
        ("padding", f"{report.padding_percent:.1f} % of one block of every group"),
        (
            "descriptors",
            f"{report.peer.descriptors:,} for a block of every group, read by rank 0 of {report.peer.tp_size}",
        ),
    ]
    if report.dcp_size > 1:
        divided = [index for index, group in enumerate(report.groups) if group.block_tokens > group.block_size]
        which = f"groups {_ranges(divided)}" if divided else "no group"
        stripe = f"rank {report.dcp_rank} of {report.dcp_size}, {report.dcp_interleave} at a time"
        facts.append(("tokens", f"of {which} divided: {stripe}"))
    if report.enlarged:
        facts.append(("block sizes", "enlarged, so that a page of attention holds a state"))
    width = max(len(label) for label, _ in facts)
    lines = [
        f"{report.model}: layout {report.layout}, kv {report.kv}, rank {report.tp_rank} of {report.tp_size}",
        "",
        *_table(_group_rows(report)),
        "",
        *(f"{label.ljust(width)}  {value}" for label, value in facts),
        "",
        "strides of a group's first layer, in bytes:",
        *_table(_stride_rows(report)),
    ]
    return "\n".join(lines)


def _group_rows(report: Report) -> list[list[str]]:
    header = ["group", "kind", "layers", "block size", "window", "page bytes", "layer stride", "padding bytes", "%"]
    return [header] + [
        [
            str(index),
            group.kind,
            str(group.layers),
            str(group.block_size),
            str(group.window or ""),
            " ".join(f"{size:,}" for size in group.page_bytes),
            "" if group.layer_stride is None else f"{group.layer_stride:,}",
            f"{group.padding_bytes:,}",
            f"{100 * group.padding_bytes / report.bytes_per_block:.1f}",
        ]
        for index, group in enumerate(report.groups)
    ]


def _stride_rows(report: Report) -> list[list[str]]:
    """Return one row per component, for groups whose first layers lie alike together."""
    alike: dict[tuple[ComponentFigures, ...], list[int]] = {}
    seen: set[int] = set()
    for layer in report.layers.values():
        if layer.group not in seen:
            seen.add(layer.group)
            alike.setdefault(layer.components, []).append(layer.group)
    rows = [["groups", "component", "dtype", "extents", "strides", "offset", "block stride"]]
    for components, groups in alike.items():
        for part in components:
            extents = "x".join(map(str, part.extents))
            strides = " ".join(f"{stride:,}" for stride in part.strides)
            label = _ranges(groups) if part is components[0] else ""
            rows.append([label, part.role, part.dtype, extents, strides, f"{part.offset:,}", f"{part.block_stride:,}"])
    return rows


def _ranges(numbers: Sequence[int]) -> str:
    """Write ascending numbers shortly: 0, 2-5."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align columns, those of numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if rows[-1][index][:1].isdigit() else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
