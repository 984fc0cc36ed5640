"""What a worker runs in: clock, randomness, network, data plane, terms of staging, and bounds.

Every production worker uses ``PRODUCTION``. The simulator passes another ``Environment``, and so runs the same worker
on virtual time.
"""

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from kvflow.clock import Clock, monotonic
from kvflow.config import WorkerConfig
from kvflow.errors import ConfigInvalid
from kvflow.events import CalibrationIgnored
from kvflow.layout.manifest import Manifest
from kvflow.planning.costs import CALIBRATION_BYTES_MAX, Calibration, decode_calibration
from kvflow.planning.plan import PlanCache
from kvflow.reads.contract import Sink, Transport
from kvflow.reads.factory import PLANES, create_transport
from kvflow.reads.scheduler import PULLS_MAX
from kvflow.rendezvous.endpoint import ZEROMQ, Network


class Staging(Struct, frozen=True):
    """Whether and how reads may be staged.

    Attributes:
        calibration: measured constants; None without a calibration: then every read is direct.
        nbytes: size of the staging memory; 0 for none.
        ignored: the calibration of the environment variable, if it is for another transport.
    """

    calibration: Calibration | None = None
    nbytes: int = 0
    ignored: CalibrationIgnored | None = None

    def over(self, plane: str) -> "Staging":
        """Return the costs for a peer that is read over a data plane."""
        return self if self.calibration is not None and self.calibration.transport == plane else NO_STAGING


NO_STAGING = Staging()
"""Every read is direct."""


def staging_of(config: WorkerConfig, manifest: Manifest) -> Staging:
    """Read the calibration file that the settings or the environment variable name.

    Workers of several transports may share the environment variable. A worker uses its file only for peers that it
    reads over the transport of the measurement.

    Args:
        config: the settings.
        manifest: manifest of our cache. Without memory of the kind that was measured, nothing is staged, and no staging
            memory is taken. Staging memory on a device serves a cache that lies there as a whole, over NIXL.

    Raises:
        ConfigInvalid: the file cannot be read or is no calibration, or the settings name a file of another transport.
    """
    path = config.calibration_path()
    if path is None:
        return NO_STAGING
    planes = PLANES[config.transport]
    calibration = read_calibration(path, planes=planes if config.calibration else ())
    if calibration.transport not in planes:
        return Staging(ignored=CalibrationIgnored(path, calibration.transport, config.transport))
    kinds = {region.memory for region in manifest.regions}
    on_device = calibration.memory == "VRAM" and kinds == {"VRAM"} and calibration.transport == "nixl"
    fits = on_device or (calibration.memory == "DRAM" and "DRAM" in kinds)
    return Staging(calibration, config.staging_bytes if fits else 0)


def read_calibration(path: str, *, planes: Sequence[str] = ()) -> Calibration:
    """Read a calibration file.

    Args:
        path: of the file.
        planes: as in ``decode_calibration``.

    Raises:
        ConfigInvalid: the file cannot be read or is no calibration, or is one of another data plane.
    """
    try:
        with Path(path).open("rb") as file:
            text = file.read(CALIBRATION_BYTES_MAX + 1)
    except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
        reason = getattr(error, "strerror", None) or error
        remedy = "Write it with kvflow bench descriptors --calibrate."
        raise ConfigInvalid(f"calibration {path} cannot be read: {reason}", remedy=remedy) from error
    return decode_calibration(text, name=path, planes=planes)


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
        staging: returns whether and how a worker's reads may be staged.
        tell: returns what the program above adds to the report for a member of the cluster, at most 48 KiB. Called on
            the event loop.
    """

    clock: Clock = monotonic
    network: Network = ZEROMQ
    open_transport: OpenTransport = create_transport
    draw_bits: Callable[[int], int] = secrets.randbits
    pulls_max: int = PULLS_MAX
    make_plans: Callable[[], PlanCache] = PlanCache
    staging: Callable[[WorkerConfig, Manifest], Staging] = staging_of
    tell: Callable[[], bytes] = bytes


PRODUCTION = Environment()
