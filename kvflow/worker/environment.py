"""What a worker runs in: clock, randomness, network, data plane, staging memory, and bounds.

Every production worker uses ``PRODUCTION``. The simulator passes another ``Environment``, and so runs the same worker
on virtual time.
"""

import secrets
from collections.abc import Callable

from msgspec import Struct

from kvflow.clock import Clock, monotonic
from kvflow.config import WorkerConfig
from kvflow.layout.manifest import Manifest
from kvflow.planning.plan import PlanCache
from kvflow.reads.contract import Sink, Transport
from kvflow.reads.scheduler import PULLS_MAX
from kvflow.reads.thread import create_transport
from kvflow.rendezvous.endpoint import ZEROMQ, Network


def staging_of(config: WorkerConfig, manifest: Manifest) -> int:
    """Return the bytes of staging memory that the settings give, if some of our cache is in host memory.

    Reads into memory of devices are direct until a measured deployment gains from staging there.
    """
    in_host_memory = any(region.memory == "DRAM" for region in manifest.regions)
    return config.tuning.staging_bytes if in_host_memory else 0


OpenTransport = Callable[[WorkerConfig, str, Sink, int], Transport]
"""Makes a transport that has not started, from the settings, the agent's name, the sink of events, and the bytes of
staging memory. See ``create_transport``."""


class Environment(Struct, frozen=True, kw_only=True):
    """Everything that differs between a real worker and a simulated one.

    Attributes:
        clock: returns seconds of a monotonic clock.
        network: how peers are reached.
        open_transport: makes a transport that has not started.
        draw_bits: draws a number with this many unpredictable bits.
        pulls_max: pulls that may be open at once.
        make_plans: makes the worker's cache of plans.
        staging: returns the bytes of a worker's staging memory; 0: every read is direct.
        tell: returns what the program above adds to the report for a member of the cluster, at most 48 KiB. Called on
            the event loop.
    """

    clock: Clock = monotonic
    network: Network = ZEROMQ
    open_transport: OpenTransport = create_transport
    draw_bits: Callable[[int], int] = secrets.randbits
    pulls_max: int = PULLS_MAX
    make_plans: Callable[[], PlanCache] = PlanCache
    staging: Callable[[WorkerConfig, Manifest], int] = staging_of
    tell: Callable[[], bytes] = bytes


PRODUCTION = Environment()
