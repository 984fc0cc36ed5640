"""Which source ranks a pull reads, so that every byte of the target is written exactly once."""

from collections.abc import Sequence

from kvflow.errors import LayoutMismatch
from kvflow.layout.manifest import Manifest
from kvflow.transfer.plan import TransferPlan

Heads = frozenset[tuple[str, str, int]]
"""(layer, role, global head) of everything that is meant."""


def choose_sources(target: Manifest, plans: Sequence[TransferPlan]) -> tuple[int, ...]:
    """Choose the plans that together fill the target.

    One source that holds everything is preferred; otherwise all that hold a part are read, and must not
    overlap.

    Args:
        target: the consumer's manifest.
        plans: one per source rank, in the order of the ticket.

    Returns:
        Indices into ``plans``.

    Raises:
        LayoutMismatch: the sources together lack a part of the target, or hold a part twice.
    """
    for index, plan in enumerate(plans):
        if plan.certificate.complete:
            return (index,)
    wanted = _all_heads(target)
    chosen: list[int] = []
    covered: Heads = frozenset()
    for index, plan in enumerate(plans):
        part = wanted - _missing_heads(plan)
        if part <= covered:
            continue  # nothing of it is needed, or a replica of what another rank gives
        twice = part & covered
        if twice:
            layer, role, head = min(twice)
            raise LayoutMismatch(
                f"{layer}.{role}.head {head}",
                "held by several ranks",
                "needed once",
                remedy="Use the same tensor parallel size on both sides.",
            )
        covered |= part
        chosen.append(index)
    lacking = wanted - covered
    if lacking:
        layer, role, head = min(lacking)
        raise LayoutMismatch(f"{layer}.{role}", "absent", f"head {head} is needed")
    return tuple(chosen)


def _all_heads(target: Manifest) -> Heads:
    return frozenset(
        (layer.name, part.role, head)
        for group in target.groups
        for layer in group.layers
        for part in layer.components
        for head in range(part.first, part.first + part.held.count)
    )


def _missing_heads(plan: TransferPlan) -> Heads:
    return frozenset(
        (gap.layer, gap.role, head)
        for gap in plan.certificate.missing
        for head in range(gap.first, gap.first + gap.count)
    )
