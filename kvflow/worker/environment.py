"""What a worker runs in: clock, randomness, network, data plane, staging memory, and bounds.

Every production worker uses ``PRODUCTION``. The simulator passes another ``Environment``, and so runs the same worker
on virtual time.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Literal

from msgspec import Struct

from kvflow.config import WorkerConfig
from kvflow.errors import WorkerClosed, WorkerDraining
from kvflow.ids import Clock
from kvflow.layout.manifest import Manifest
from kvflow.leases.blocks import BlockAccount
from kvflow.observability.logs import Reporter
from kvflow.planning.plan import PlanCache
from kvflow.reads.contract import Sink, Transport
from kvflow.reads.thread import create_transport
from kvflow.rendezvous.endpoint import ZEROMQ, LocalEndpoint, Network

PULLS_MAX = 65536  # most pulls that may be connecting, under way or draining at once


def staging_of(config: WorkerConfig, manifest: Manifest) -> int:
    """Return the bytes of staging memory that the settings give, if some of our cache is in host memory."""
    in_host_memory = any(region.memory == "DRAM" for region in manifest.regions)
    return config.tuning.staging_bytes if in_host_memory else 0


OpenTransport = Callable[[WorkerConfig, str, Sink, int], Transport]
"""Makes a transport that has not started: from settings, the agent's name, the sink of events, and staging bytes."""


class Environment(Struct, frozen=True, kw_only=True):
    """Everything that differs between a real worker and a simulated one.

    Attributes:
        clock: returns seconds of a monotonic clock.
        network: how peers are reached.
        open_transport: makes a transport that has not started.
        draw_bits: draws a number with this many unpredictable bits.
        pulls_max: pulls that may be connecting, under way or draining at once.
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


class Lifecycle:
    """The stage of one worker, which the producer's and the consumer's side share. It never goes back."""

    stage: Literal["open", "draining", "closing"] = "open"

    def is_open(self) -> bool:
        """Return whether the worker takes new offers and pulls."""
        return self.stage == "open"

    def drain(self) -> None:
        """Refuse what is new."""
        if self.stage == "open":
            self.stage = "draining"

    def close(self) -> None:
        """Refuse everything."""
        self.stage = "closing"

    def require_open(self, refusal: str) -> None:
        """Refuse what starts only while the worker is open; ``refusal`` says what, such as ``takes no offers``."""
        self.require_running(refusal)
        if self.stage == "draining":
            raise WorkerDraining(f"the worker is draining and {refusal}")

    def require_running(self, refusal: str) -> None:
        """Refuse what a worker does until it closes."""
        if self.stage == "closing":
            raise WorkerClosed(f"the worker is closing and {refusal}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What the parts of one worker share."""

    config: WorkerConfig
    environment: Environment
    lifecycle: Lifecycle
    manifest: Manifest
    bytes_per_block: int
    account: BlockAccount
    local: LocalEndpoint
    transport: Transport
    staging_bytes: int
    report: Reporter
