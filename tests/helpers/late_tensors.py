"""Staging memory as on a device: a tensor, and copies by torch that end some polls after they were started."""

import torch

from kvflow.memory.device import TorchStage
from kvflow.reads.staging import StagingMemory, memory_at

POLLS = 3


class LateTensors(StagingMemory):
    """Staging buffers in a tensor of the host."""

    def place(self, regions):
        if self.buffers:
            targets = [torch.from_numpy(memory_at(region.address, region.nbytes)) for region in regions]
            self._move(LateStage(TorchStage(torch.zeros(self._memory.nbytes, dtype=torch.uint8), targets)))


class LateStage:
    """A stage whose copies are made at the last of some polls, or when it settles.

    Attributes:
        pending: copies that were started and have not ended.
        settled: how often it was settled.
        failing: what the next polls raise.
    """

    def __init__(self, stage):
        self._stage = stage
        self.region = stage.region
        self.content = stage.content
        self.pending = []
        self.settled = 0
        self.failing = None

    def scatterer(self, copies, units):
        return _LateScatterer(self, self._stage.scatterer(copies, units))

    def settle(self):
        self.settled += 1
        for scattering in tuple(self.pending):
            scattering.finish()


class _LateScatterer:
    def __init__(self, stage, scatterer):
        self._stage, self._scatterer = stage, scatterer

    def start(self, content, numbers):
        return LateScattering(self._stage, lambda: self._scatterer.start(content, numbers))


class LateScattering:
    def __init__(self, stage, copy):
        self._stage, self._copy, self._polls = stage, copy, 0
        stage.pending.append(self)

    def poll(self):
        if self._stage.failing is not None:
            raise self._stage.failing
        self._polls += 1
        if self._polls < POLLS:
            return False
        self.finish()
        return True

    def finish(self):
        self._stage.pending.remove(self)
        assert self._copy() is None, "the host copies at once"
