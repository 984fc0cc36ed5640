"""Staging of simulated workers: buffers that the production copies scatter into a simulated cache, and other costs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from kvflow.layout.manifest import Manifest
from kvflow.planning import staging
from kvflow.planning.plan import PlanCache, TransferPlan, plan_transfer
from kvflow.reads.bounds import CheckedScatter
from kvflow.reads.staging import Scatterer, StagingMemory
from tests.fakes.memory import SimulatedCache

Bytes = npt.NDArray[np.uint8]

STAGING_BYTES = 8 * 4096
"""Buffers of a few units each, so that they are all taken now and then."""


class Costs(Struct, frozen=True, kw_only=True):
    """Seconds by which ``kvflow.planning.staging`` compares, instead of its constants."""

    post_s: float = staging.POST_S
    descriptor_s: float = staging.DESCRIPTOR_S
    read_byte_s: float = staging.READ_BYTE_S
    copied_byte_s: float = staging.COPIED_BYTE_S
    launch_s: float = staging.LAUNCH_S


STAGE_ALL = Costs(post_s=0.0, descriptor_s=1e-3, read_byte_s=0.0, copied_byte_s=0.0, launch_s=1e-9)
"""With these, every group is staged that then takes fewer descriptors."""


@contextmanager
def _at(costs: Costs) -> Iterator[None]:
    before = {name: getattr(staging, name.upper()) for name in costs.__struct_fields__}
    for name in before:
        setattr(staging, name.upper(), getattr(costs, name))
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(staging, name.upper(), value)


def plan_at(source: Manifest, target: Manifest, *, costs: Costs | None = None, **how: Any) -> TransferPlan:
    """Plan as ``plan_transfer`` does, at these costs."""
    with _at(costs or Costs()):
        return plan_transfer(source, target, **how)


class PlansAt(PlanCache):
    """Plans that are made at these costs."""

    def __init__(self, costs: Costs, plans_max: int = 256) -> None:
        super().__init__(plans_max)
        self._costs = costs

    def plan(self, *sides: Any, **how: Any) -> TransferPlan:
        with _at(self._costs):
            return super().plan(*sides, **how)


class SimulatedStaging(StagingMemory):
    """Staging buffers whose copies go to a cache at virtual addresses.

    Args:
        staging_bytes: of all buffers; 0 for none.
        cache: what is scattered into.
        check: called with the blocks before they are written.
    """

    def __init__(self, staging_bytes: int, cache: SimulatedCache, check: Callable[[Sequence[int]], None]) -> None:
        super().__init__(staging_bytes)
        self._cache = cache
        self._check = check

    def scatterer(self, scatter: CheckedScatter) -> Scatterer:
        return _WatchedScatterer(scatter, self._target, self._check)

    def _target(self, address: int, nbytes: int) -> Bytes:
        first = address - self._cache.region.address
        return self._cache.memory[first : first + nbytes]

    def fill(self, address: int, content: memoryview) -> None:
        """Let bytes arrive in a buffer."""
        first = address - self.regions[0].address
        self._memory.data[first : first + len(content)] = content


class _WatchedScatterer(Scatterer):
    """A scatterer that tells which blocks it writes to."""

    def __init__(
        self,
        scatter: CheckedScatter,
        target: Callable[[int, int], Bytes],
        check: Callable[[Sequence[int]], None],
    ) -> None:
        super().__init__(scatter, target)
        self._units = scatter.units
        self._check = check

    def start(self, content: Bytes, numbers: npt.NDArray[np.int32]) -> None:
        self._check(blocks_of_units(self._units, numbers))
        super().start(content, numbers)


def blocks_of_units(units: tuple[int, int, int], numbers: npt.NDArray[np.int32]) -> list[int]:
    """Return the blocks that units of the target belong to."""
    _, kernel_blocks, per_kernel_block = units
    return sorted({*(numbers // (kernel_blocks * per_kernel_block)).tolist()})
