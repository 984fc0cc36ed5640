"""The binding of two pools of dense blocks of one size: a unit is a block, and a block is a descriptor."""

import numpy as np

from kvflow.planning.bind import Bound
from kvflow.planning.pairs import UnitPairs


class Blocks:
    """See ``kvflow.planning.bind.Binding``.

    Args:
        nbytes: of each block.
        chunk: most blocks of one chunk; by default as many as its bytes allow.
    """

    unit_descriptors = 1
    number = None

    def __init__(self, nbytes: int, chunk: int = 1 << 30) -> None:
        self.unit_bytes = self.read_bytes = nbytes
        self._chunk = chunk

    def bind(self, pairs: UnitPairs, *, chunk_bytes: int, chunk_descriptors: int) -> Bound:
        """See ``Binding.bind``. Blocks count as merged, whether they follow each other or not."""
        del chunk_descriptors
        count = len(pairs.source)
        step = min(self._chunk, max(1, chunk_bytes // self.unit_bytes))
        source, target = (np.asarray(side, np.int32) for side in (pairs.source, pairs.target))
        return Bound(source, target, np.array([*range(0, count, step), count]), count * self.unit_bytes)
