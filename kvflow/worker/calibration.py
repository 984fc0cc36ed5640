"""What the planner is told about this machine: the calibration file that the settings name, and staging memory."""

from pathlib import Path

from msgspec import Struct

from kvflow.config import WorkerConfig
from kvflow.errors import ConfigInvalid
from kvflow.layout.manifest import Manifest
from kvflow.transfer.costs import CALIBRATION_BYTES_MAX, Costs, decode_calibration


class Staging(Struct, frozen=True):
    """On what terms reads may be staged.

    Attributes:
        costs: measured constants; None: nothing was calibrated, and all is read directly.
        nbytes: staging memory; 0: none.
    """

    costs: Costs | None = None
    nbytes: int = 0


NEVER = Staging()
"""All is read directly."""


def staging_of(config: WorkerConfig, manifest: Manifest) -> Staging:
    """Read the calibration file, if the settings or the environment name one.

    Args:
        config: the settings.
        manifest: our cache; in VRAM alone nothing is staged, and no memory is taken.

    Raises:
        ConfigInvalid: the file cannot be read, or is no calibration for this transport.
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
    costs = decode_calibration(text, name=path, transport=config.transport).costs
    in_memory = any(region.memory == "DRAM" for region in manifest.regions)
    return Staging(costs, config.staging_bytes if in_memory else 0)
