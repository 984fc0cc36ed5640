"""What a worker takes from outside: time, chance, a network, a data plane, a calibration, and bounds.

``REAL`` is what every worker runs in. The simulator gives its own, and so drives the same worker on virtual time.
"""

import secrets
from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from kvflow.clock import Clock, monotonic
from kvflow.config import WorkerConfig
from kvflow.layout.manifest import Manifest
from kvflow.rendezvous.introduction import ZEROMQ, Network
from kvflow.transfer.plan import PlanCache
from kvflow.transfer.scheduler import PULLS_MAX
from kvflow.transport.base import Sink, Transport
from kvflow.transport.factory import create_transport
from kvflow.worker.calibration import Staging, staging_of


class OpenTransport(Protocol):
    """Makes a transport that has not started. The last argument is given only where reads may be staged."""

    def __call__(self, config: WorkerConfig, agent_name: str, sink: Sink, /, staging_bytes: int = 0) -> Transport:
        """See ``create_transport``."""
        ...


class Surroundings(Struct, frozen=True, kw_only=True):
    """Everything that differs between a real worker and a simulated one.

    Attributes:
        clock: seconds of a monotonic clock.
        network: where peers are met.
        open_transport: makes a transport that has not started.
        draw_bits: draws a number of that many random bits, which nobody can guess.
        pulls_max: pulls that may be open at once.
        make_plans: makes the worker's cache of plans.
        staging: says on what terms a worker's reads may be staged.
    """

    clock: Clock = monotonic
    network: Network = ZEROMQ
    open_transport: OpenTransport = create_transport
    draw_bits: Callable[[int], int] = secrets.randbits
    pulls_max: int = PULLS_MAX
    make_plans: Callable[[], PlanCache] = PlanCache
    staging: Callable[[WorkerConfig, Manifest], Staging] = staging_of


REAL = Surroundings()
