"""``kvflow layout``: how the cache of a model lies in memory, as tables, as JSON, or as a picture."""

import argparse
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvflow import models
from kvflow.cli import layout_map, layout_report
from kvflow.errors import KvflowError, SpecInvalid
from kvflow.layout.describe import CachePlan, plan_cache
from kvflow.layout.groups import plan_groups, resolve_layout
from kvflow.layout.placement import KV_FORMS, LAYOUTS
from kvflow.layout.shards import Shard
from kvflow.layout.specs import CacheSpec

if TYPE_CHECKING:
    # What argparse calls the object is private; this is its only use.
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001

NUM_BLOCKS = 1024

BLOCKS_MAX = 1 << 31
"""Above what block ids of any engine reach; every stride and offset still fits 64 bits."""


def add_parser(commands: "Subparsers") -> None:
    """Add ``layout`` to the command line."""
    parser = commands.add_parser("layout", help="show how the cache of a model lies in memory")
    parser.add_argument("model", metavar="MODEL", help="a bundled model, or the path to a config.json or its folder")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="ranks of the engine (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="which of them (default: %(default)s)")
    parser.add_argument(
        "--dcp",
        type=int,
        default=1,
        metavar="N",
        help="neighbors among them that divide the tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--dcp-interleave",
        type=int,
        default=1,
        metavar="N",
        help="tokens in a row on one of those (default: %(default)s)",
    )
    parser.add_argument(
        "--layout", choices=("auto", *LAYOUTS), default="auto", help="order of the axes (default: %(default)s)"
    )
    parser.add_argument(
        "--kv", choices=KV_FORMS, default="content", help="K and V side by side, or apart (default: %(default)s)"
    )
    parser.add_argument("--block-size", type=int, metavar="N", help="tokens in one block; 16 for most models")
    parser.add_argument(
        "--blocks", type=_block_count, default=NUM_BLOCKS, metavar="N", help="blocks in the pool (default: %(default)s)"
    )
    parser.add_argument("--cross-layers", action="store_true", help="let auto choose a packed layout")
    parser.add_argument(
        "--guess", action="store_true", help="take a model type that is not known for plain attention, and say so"
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON instead of tables")
    output.add_argument("--svg", type=Path, metavar="FILE", help="draw the memory of one block into a file")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Plan the cache and show it; 2 if the model or the options cannot be used."""
    try:
        report, drawing = _describe(options)
        if options.svg:
            options.svg.write_text(drawing, encoding="utf-8")
    except (KvflowError, msgspec.ValidationError) as error:
        print(f"kvflow layout: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"kvflow layout: {options.svg} cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        print(layout_report.as_text(report))
        if options.svg:
            print(f"\nmap of one block: {options.svg}")
    return 0


def _describe(options: argparse.Namespace) -> tuple[layout_report.Report, str]:
    """Return the figures of the cache, and its picture if one is asked for."""
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
    given = _specs(options.model, options.block_size, guess=options.guess)
    specs = models.align_states(given, shard=shard)
    layout = resolve_layout(specs, options.layout, enable_cross_layers_blocks=options.cross_layers, shard=shard)
    groups = plan_groups(specs, layout=layout, shard=shard)

    def plan(num_blocks: int) -> CachePlan:
        return plan_cache(specs, groups, layout=layout, kv=options.kv, shard=shard, num_blocks=num_blocks)

    name = options.model if options.model in models.names() else Path(options.model).resolve().name
    report = layout_report.summarize(plan(options.blocks), name, layout=layout, kv=options.kv, enlarged=specs != given)
    # In a pool of one block every layout is one row: that row is the map.
    return report, layout_map.draw(plan(1), report) if options.svg else ""


def _specs(model: str, block_size: int | None, *, guess: bool) -> dict[str, CacheSpec]:
    """Describe a bundled model, or the one at a path; what is guessed is said on standard error.

    Raises:
        SpecInvalid: it is neither, or cannot be described.
    """
    if model in models.names():
        return models.load(model, block_size=block_size)
    if not Path(model).exists():
        raise SpecInvalid(
            f"{model!r} is neither bundled nor a file or folder", remedy=f"Bundled are {', '.join(models.names())}."
        )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", models.GuessWarning)
        specs = models.from_hf_config(Path(model), block_size=block_size, guess=guess)
    for warning in told:
        print(f"kvflow layout: {warning.message}", file=sys.stderr)
    return specs


def _block_count(text: str) -> int:
    count = int(text)
    if not 1 <= count <= BLOCKS_MAX:
        raise argparse.ArgumentTypeError(f"{count} blocks are not between 1 and {BLOCKS_MAX}")
    return count
