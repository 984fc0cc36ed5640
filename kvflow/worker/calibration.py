"""What the planner is told about this machine: the calibration file that the settings name, and staging memory."""

from pathlib import Path

from msgspec import Struct

from kvflow.config import WorkerConfig
from kvflow.errors import ConfigInvalid
from kvflow.layout.manifest import Manifest
from kvflow.observability.events import CalibrationIgnored
from kvflow.transfer.costs import CALIBRATION_BYTES_MAX, Calibration, decode_calibration
from kvflow.transport.factory import PLANES


class Staging(Struct, frozen=True):
    """On what terms reads may be staged.

    Attributes:
        calibration: measured constants; None: nothing was calibrated, and all is read directly.
        nbytes: staging memory; 0: none.
        ignored: the calibration that the environment names, if it is not for us.
    """

    calibration: Calibration | None = None
    nbytes: int = 0
    ignored: CalibrationIgnored | None = None

    def over(self, plane: str) -> "Staging":
        """Return the terms for a peer that is read over a data plane."""
        return self if self.calibration is not None and self.calibration.transport == plane else NEVER


NEVER = Staging()
"""All is read directly."""


def staging_of(config: WorkerConfig, manifest: Manifest) -> Staging:
    """Read the calibration file, if the settings or the environment name one.

    Workers of several transports share an environment: what it names counts for those that it was measured over. A
    worker of several data planes uses it for the peers that it reads over that one.

    Args:
        config: the settings.
        manifest: our cache; in VRAM alone nothing is staged, and no memory is taken.

    Raises:
        ConfigInvalid: the file cannot be read, is no calibration, or is of another transport although the settings
            name it.
    """
    path = config.calibration_path()
    if path is None:
        return NEVER
    try:
        with Path(path).open("rb") as file:
            text = file.read(CALIBRATION_BYTES_MAX + 1)
    except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
        raise ConfigInvalid(
            f"calibration {path}: {error}", remedy="Write it with kvflow bench descriptors --calibrate."
        ) from error
    planes = PLANES[config.transport]
    calibration = decode_calibration(text, name=path, planes=planes if config.calibration else ())
    if calibration.transport not in planes:
        return Staging(ignored=CalibrationIgnored(path, calibration.transport, config.transport))
    in_memory = any(region.memory == "DRAM" for region in manifest.regions)
    return Staging(calibration, config.staging_bytes if in_memory else 0)
