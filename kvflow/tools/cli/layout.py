"""``kvflow layout``: how the cache of a model lies in memory, as tables or as JSON."""

import argparse
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvflow import models
from kvflow.errors import KvflowError, SpecInvalid, suggest
from kvflow.layout.component import ADDRESS_MAX, Region
from kvflow.layout.describe import CachePlan, plan_cache
from kvflow.layout.groups import plan_groups, resolve_layout
from kvflow.layout.manifest import Manifest
from kvflow.layout.placement import KV_FORMS, LAYOUTS
from kvflow.layout.shards import Shard
from kvflow.layout.specs import CacheSpec
from kvflow.planning.assignment import assign_sources
from kvflow.planning.plan import plan_transfer
from kvflow.tools.cli import layout_report
from kvflow.tools.cli.arguments import add_command, at_least
from kvflow.tools.cli.findings import print_failure

if TYPE_CHECKING:
    from kvflow.tools.cli.arguments import Subparsers

NUM_BLOCKS = 1024

HUB_REMEDY = "For a model of the Hugging Face Hub, download its config.json and give the path."

BLOCKS_MAX = 1 << 31
"""Above what block ids of any engine reach; every stride and offset still fits 64 bits."""


def add_parser(commands: "Subparsers") -> None:
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
    parser.add_argument(
        "--tp",
        type=at_least(1),
        default=1,
        metavar="N",
        help="tensor-parallel ranks of the engine (default: %(default)s)",
    )
    parser.add_argument(
        "--rank", type=at_least(0), default=0, metavar="R", help="rank to show, counted from 0 (default: %(default)s)"
    )
    parser.add_argument(
        "--peer-tp",
        type=at_least(1),
        metavar="N",
        help="tensor-parallel ranks of the engine that reads this one: for the number of descriptors (default: --tp)",
    )
    parser.add_argument(
        "--dcp",
        type=at_least(1),
        default=1,
        metavar="N",
        help="neighboring ranks that divide the tokens: decode context parallelism (default: %(default)s)",
    )
    parser.add_argument(
        "--dcp-interleave",
        type=at_least(1),
        default=1,
        metavar="N",
        help="consecutive tokens that one of these ranks keeps (default: %(default)s)",
    )
    parser.add_argument(
        "--layout", choices=("auto", *LAYOUTS), default="auto", help="order of the axes (default: %(default)s)"
    )
    parser.add_argument(
        "--kv",
        choices=KV_FORMS,
        default="content",
        help="where V lies: beside K in each token (content), in a second half of the tensor (split), or in a second "
        "half of each block (block_split) (default: %(default)s)",
    )
    parser.add_argument("--block-size", type=at_least(1), metavar="N", help="tokens in one block; 16 for most models")
    parser.add_argument(
        "--blocks", type=_block_count, default=NUM_BLOCKS, metavar="N", help="blocks in the pool (default: %(default)s)"
    )
    parser.add_argument("--cross-layers", action="store_true", help="let --layout auto choose a packed layout")
    parser.add_argument(
        "--guess", action="store_true", help="describe an unknown model type as plain attention, and say so"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Plan the cache and show it; 2 if the model or the options cannot be used."""
    try:
        report = _describe(options)
    except KvflowError as error:
        return print_failure("kvflow layout", error, as_json=options.json, status=2)
    except msgspec.ValidationError as error:
        print(f"kvflow layout: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        print(layout_report.as_text(report))
    return 0


def _describe(options: argparse.Namespace) -> layout_report.Report:
    """Return the figures of the cache.

    Raises:
        SpecInvalid: the flags do not fit each other, or the model cannot be described.
    """
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

    def plan(num_blocks: int, shard: Shard = shard) -> CachePlan:
        specs = models.align_states(given, shard=shard)
        groups = plan_groups(specs, layout=layout, shard=shard)
        return plan_cache(specs, groups, layout=layout, kv=options.kv, shard=shard, num_blocks=num_blocks)

    name = options.model if options.model in models.names() else Path(options.model).resolve().name
    return layout_report.summarize(
        plan(options.blocks),
        name,
        layout=layout,
        kv=options.kv,
        enlarged=specs != given,
        peer=_descriptors(plan, shard, options.peer_tp or options.tp),
    )


def _descriptors(plan: Callable[[int, Shard], CachePlan], shard: Shard, peer_tp: int) -> layout_report.PeerFigures:
    """Count what the first rank of another engine reads of this one, for one of its blocks of every group."""
    region = Region(0, ADDRESS_MAX)

    def manifest(shard: Shard) -> Manifest:
        return plan(NUM_BLOCKS, shard).manifest(region)

    stripes = {"dcp_size": shard.dcp_size, "dcp_interleave": shard.dcp_interleave}
    sources = [
        manifest(Shard(tp_rank=rank, tp_size=shard.tp_size, dcp_rank=rank % shard.dcp_size, **stripes))
        for rank in range(shard.tp_size)
    ]
    target = manifest(Shard(tp_size=peer_tp, **(stripes if peer_tp % shard.dcp_size == 0 else {})))
    descriptors = 0
    for share in assign_sources(target, sources):
        descriptors += plan_transfer(sources[share.source], target, head_ranges=share.head_ranges).descriptors(1)
    return layout_report.PeerFigures(tp_size=peer_tp, descriptors=descriptors)


def specs_of(
    model: str, block_size: int | None, *, cache_dtype: str | None = None, guess: bool
) -> dict[str, CacheSpec]:
    """Describe a bundled model, or the one at a path; what is guessed is said on standard error.

    Raises:
        SpecInvalid: it is neither, or cannot be described.
    """
    if model in models.names():
        return models.load(model, block_size=block_size, cache_dtype=cache_dtype)
    if not Path(model).exists():
        raise SpecInvalid(
            f"{model!r} is neither a bundled model nor a file or folder", remedy=f"{HUB_REMEDY} {_bundled(model)}"
        )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", models.GuessWarning)
        specs = models.from_hf_config(Path(model), block_size=block_size, cache_dtype=cache_dtype, guess=guess)
    for warning in told:
        print(f"kvflow: {warning.message}", file=sys.stderr)
    return specs


def _bundled(model: str) -> str:
    return suggest(model.rpartition("/")[2].lower(), models.names())


def _block_count(text: str) -> int:
    count = int(text)
    if not 1 <= count <= BLOCKS_MAX:
        raise argparse.ArgumentTypeError(f"{count} blocks are not between 1 and {BLOCKS_MAX}")
    return count
