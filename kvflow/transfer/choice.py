"""Direct or staged: the cheaper of the two ways to fill a unit, by measured constants."""

from collections.abc import Iterator

from msgspec import Struct

from kvflow.layout.manifest import Manifest
from kvflow.transfer.costs import Calibration, Costs, Work
from kvflow.transfer.match import GroupPair
from kvflow.transfer.runs import RunTable, Units
from kvflow.transfer.staging import CannotStage, StagedRuns, stage

NOT_CALIBRATED = "nothing was calibrated, so that all is read directly (kvflow bench descriptors --calibrate)"


class Choice(Struct, frozen=True, eq=False):
    """How one pair of groups is read, and why.

    Attributes:
        staged: the runs of a staged read if that was chosen; None: the direct runs are read.
        reason: in words.
        direct_s: seconds that a unit takes directly; 0 if nothing was calibrated.
        staged_s: seconds that it takes staged; 0 if that was not compared.
    """

    staged: StagedRuns | None
    reason: str
    direct_s: float = 0.0
    staged_s: float = 0.0


UNCALIBRATED = Choice(None, NOT_CALIBRATED)


class Between(Struct, frozen=True):
    """One pair of groups, and how the blocks of both sides are cut."""

    pair: GroupPair
    source: Units
    target: Units


def choose(
    between: Between,
    runs: RunTable,
    sides: tuple[Manifest, Manifest],
    terms: Costs | Calibration,
    staging_bytes: int,
) -> Choice:
    """Compare what a unit costs directly with what it costs through a staging buffer; among equals direct is chosen.

    Neither counts on neighbors that merge: which ids a request has is not known when planning, and where a direct
    run merges, the source's own pieces are no longer than it, so that staging gains nothing.

    Args:
        between: what both sides hold.
        runs: the direct ones.
        sides: both manifests, source first.
        terms: measured costs; a calibration's are told together with where they were measured.
        staging_bytes: of all buffers; 0: never stage.

    Raises:
        PlanUnsound: a staged plan failed its proof.
    """
    costs, basis = (terms, "") if isinstance(terms, Costs) else (terms.costs, _basis(terms))
    direct = Work(len(runs), runs.unit_bytes)
    direct_s = costs.seconds(direct)
    told = f"{basis}direct takes {_count(direct.descriptors, 'descriptor')} and {direct_s * 1e6:,.1f} us"
    if not staging_bytes:
        return Choice(None, f"{told}; not staged, because staging_bytes is 0", direct_s)
    for side, manifest, numbers in zip(("source", "target"), sides, (runs.source[0], runs.target[0]), strict=True):
        if any(manifest.regions[region].memory != "DRAM" for region in set(numbers.tolist())):
            return Choice(None, f"{told}; not staged, because the {side} is VRAM", direct_s)
    try:
        staged = stage(between.pair, between.source, between.target, staging_bytes=staging_bytes)
    except CannotStage as error:
        return Choice(None, f"{told}; not staged, because {error}", direct_s)
    work = Work(len(staged.fetch), staged.slot_bytes, len(staged.boxes), len(staged.scatter), staged.scatter.unit_bytes)
    staged_s = costs.seconds(work)
    told += (
        f", staged {_count(work.descriptors, 'descriptor')}, {_count(work.copies, 'copy', 'copies')} and "
        f"{staged_s * 1e6:,.1f} us"
    )
    if staged_s < direct_s:
        return Choice(
            staged, f"{told}; staged, because it is {direct_s / staged_s:,.1f} times cheaper", direct_s, staged_s
        )
    return Choice(None, f"{told}; direct, because staging is not cheaper", direct_s, staged_s)


def explain_choice(choice: Choice) -> Iterator[str]:
    """Say how a group is read, and what the alternative costs; nothing where nothing was calibrated."""
    if choice is not UNCALIBRATED:
        yield f"  for each unit {choice.reason}"


def _basis(calibration: Calibration) -> str:
    """Say whose costs are compared: a source elsewhere may cost more, or less."""
    return f"by costs measured over {calibration.transport} (source: {calibration.source}), "


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"
