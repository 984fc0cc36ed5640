"""Virtual time for tests: processes, a network and a data plane that break on command.

A ``World`` has the time and the random numbers. A ``Process`` is an event loop in it. ``Wires`` and a ``Fabric``
connect processes, and ``bury`` ends them all. The simulator in ``tests/simulation`` runs real workers on them.
"""

from tests.fakes.fabric import Fabric, FabricFaults
from tests.fakes.network import NetworkFaults, Wires
from tests.fakes.process import Process, bury
from tests.fakes.world import Violation, World

__all__ = [
    "Fabric",
    "FabricFaults",
    "NetworkFaults",
    "Process",
    "Violation",
    "Wires",
    "World",
    "bury",
]
