"""Bind a whole plan to two pools, and check once more that it is theirs."""

from kvflow.errors import PlanUnsound
from kvflow.layout.manifest import Manifest
from kvflow.transfer.bind import Binding
from kvflow.transfer.bind_staged import StagedBinding
from kvflow.transfer.plan import GroupPlan, TransferPlan

AnyBinding = Binding | StagedBinding


def bind_plan(plan: TransferPlan, source: Manifest, target: Manifest) -> tuple[AnyBinding, ...]:
    """Bind every group of a plan; done once for each peer, so that binding a batch checks nothing any more.

    The proof holds for the geometry that was planned. So the digests are compared, the bytes are counted again, and
    every row is seen to lie in the region that its side has registered.

    Args:
        plan: of these two.
        source: the producer's manifest.
        target: the consumer's manifest.

    Raises:
        PlanUnsound: the plan is of other caches, or a row leaves its region.
        LayoutMismatch: a group lies in VRAM and in DRAM, on one side.
        CapacityExceeded: a prepared list would be too long.
    """
    if plan.geometry != (source.geometry_digest(), target.geometry_digest()):
        raise PlanUnsound("the plan was made, and proven, for other caches")
    if sum(map(_written_bytes, plan.groups)) != plan.certificate.written_bytes:
        raise PlanUnsound("the plan's runs are not the ones that were proven")
    return tuple(
        (Binding if group.staged is None else StagedBinding)(
            group,
            source_regions=source.regions,
            source_blocks=source.num_blocks,
            target_regions=target.regions,
            target_blocks=target.num_blocks,
        )
        for group in plan.groups
    )


def _written_bytes(group: GroupPlan) -> int:
    """Count the bytes that a group's runs write into one block, as the certificate does."""
    share = group.source.stripe.share_of(group.target.stripe)
    return int(group.runs.unit_bytes * group.target_units * share)
