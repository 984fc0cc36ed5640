"""The reading agent of a worker, and what the worker does with its cache."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np

from kvflow.layout.component import Region
from kvflow.memory.mapping import map_bytes
from kvflow.reads.backend import SPAN_MAX
from kvflow.reads.nixl.binding import Agent

SPANS = 1024
"""Where checks land: 4 MiB. A peer has at most eight checks in flight, so this is enough for 128 hung peers."""

_READER_DELAY_US = 2000
"""How long the reader's progress thread sleeps when nothing wakes it: about 1 % of a core. UCX may not wake it for each
transport, and a card's queue must not run dry for longer."""


class Uses(NamedTuple):
    """What a worker does with its cache, as far as that decides what NIXL registers.

    Attributes:
        role: as ``WorkerConfig.role``. A ``consumer`` exports its epoch table only. A ``producer`` registers its cache
            for reads only when it reads.
        sleeps: see ``Agent``.
    """

    role: str = "both"
    sleeps: bool = False


USUAL = Uses()
"""Of a worker that reads and is read, and does not sleep."""


class ReadingAgent:
    """An agent that reads, and the scratch memory that its checks land in, span by span.

    Args:
        make_agent: creates an ``Agent``.
        name: name of the agent.
        regions: regions that reads may write to.
        progress, connects: see ``Agent``.
    """

    def __init__(
        self,
        make_agent: Callable[..., Agent],
        name: str,
        regions: Sequence[Region],
        *,
        progress: bool,
        connects: bool,
    ) -> None:
        self.progress = progress
        self.scratch = map_bytes(8 * SPANS * SPAN_MAX).view(np.uint64)
        self.free_spans = list(range(SPANS))
        self.numbers = np.arange(self.scratch.size, dtype=np.int32)  # of slots, of which checks take slices
        rows = np.array([[self.scratch.ctypes.data, 8, 0, 8, self.scratch.size]], dtype=np.int64)
        with ExitStack() as undo:
            self.agent = make_agent(name, progress=progress, connects=connects, delay_us=_READER_DELAY_US)
            undo.callback(self.agent.destroy)
            self.agent.register([*regions, Region(self.scratch.ctypes.data, self.scratch.nbytes)])
            self.scratch_list = self.agent.prepare_local(rows, "DRAM")
            undo.pop_all()
