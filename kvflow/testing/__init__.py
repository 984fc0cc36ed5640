"""Real workers on virtual time: processes, a network and a data plane that break on command, and a simulator of them.

``simulate`` runs one scenario, ``run_seeds`` many. What they are made of can be used by itself: a ``World`` has the
time and the chance, a ``Process`` is an event loop in it, ``Wires`` and a ``Fabric`` connect processes, and
``bury`` ends them all.
"""

from kvflow.testing.fabric import Fabric, FabricFaults
from kvflow.testing.faults import Faults
from kvflow.testing.process import Process, bury
from kvflow.testing.runner import Summary, run_seeds
from kvflow.testing.scenario import Outcome, Scenario, simulate
from kvflow.testing.wires import NetworkFaults, Wires
from kvflow.testing.world import Violation, World

__all__ = [
    "Fabric",
    "FabricFaults",
    "Faults",
    "NetworkFaults",
    "Outcome",
    "Process",
    "Scenario",
    "Summary",
    "Violation",
    "Wires",
    "World",
    "bury",
    "run_seeds",
    "simulate",
]
