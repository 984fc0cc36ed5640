"""The figures of one planned cache, and the tables that show them."""

from collections.abc import Sequence
from itertools import pairwise

from msgspec import Struct

from kvflow.layout.describe import CachePlan
from kvflow.layout.groups import Group, stripe_of
from kvflow.layout.placement import page_bytes


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
        kind: of its layers.
        layers: how many; each takes one position.
        block_size: tokens in one block, of those that are on this rank.
        block_tokens: tokens of a request that one block id stands for.
        window: tokens that a window or chunk holds; 0 for other kinds.
        page_bytes: the different sizes of its pages.
        layer_stride: bytes from one layer to the next; None where that differs, or for a single layer.
        content_bytes: bytes of one block that mean something.
        padding_bytes: the rest of ``bytes_per_block``, unused while the block is this group's.
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
    """What an engine of the same model and layout reads of this one.

    Attributes:
        tp_size: its ranks.
        descriptors: that its first rank reads for one of its blocks of every group, from all ranks together.
    """

    tp_size: int
    descriptors: int


class Report(Struct, frozen=True):
    """What ``kvflow layout`` shows.

    Attributes:
        model: its name.
        layout: as chosen.
        kv: form of keys and values.
        tp_rank: the rank.
        tp_size: ranks of the engine.
        dcp_rank: among those that divide the tokens.
        dcp_size: how many those are.
        dcp_interleave: tokens in a row on one of them.
        num_blocks: blocks in the pool.
        positions: layers of the longest group, which others share memory with.
        tensors: separate ranges of the allocation: one if it is packed, else one per position.
        bytes_per_block: of the allocation, all groups overlaid.
        nbytes: of the allocation.
        padding_percent: of one block of every group together.
        enlarged: whether blocks were enlarged so that a page of attention holds a state.
        peer: an engine that reads this one.
        groups: in the order of block ids.
        layers: layer name -> figures.
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


def summarize(plan: CachePlan, model: str, *, layout: str, kv: str, enlarged: bool, peer: PeerFigures) -> Report:
    """Gather the figures of a planned cache."""
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
            name: LayerFigures(index, page_bytes(plan.specs[name], plan.shard), _component_figures(plan, name))
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


def _component_figures(plan: CachePlan, name: str) -> tuple[ComponentFigures, ...]:
    return tuple(
        ComponentFigures(part.role, part.dtype, part.extents, part.strides, part.offset, part.block_stride)
        for part in plan.layers[name].components
    )


def as_text(report: Report) -> str:
    """Return the report as tables."""
    kind_of_tensors = "packed: a block is one row" if report.tensors < report.positions else "one per position"
    facts = [
        ("bytes per block", f"{report.bytes_per_block:,}"),
        ("bytes in all", f"{report.nbytes:,} ({report.num_blocks:,} blocks)"),
        ("positions", f"{report.positions} (layers of the longest group)"),
        (
            "tensors",
            f"{report.tensors} ({kind_of_tensors})",
        ),
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
