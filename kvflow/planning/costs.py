"""The costs of reading on this machine, as measured by ``kvflow bench descriptors --calibrate``.

Five constants decide whether it is cheaper to read many small runs one by one, or to read larger stretches and scatter
them locally. The constants are never guessed: without a calibration, all groups are read directly.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from kvflow.errors import ConfigInvalid

CALIBRATION_BYTES_MAX = 1 << 16
"""Largest calibration file. A calibration has a few hundred bytes."""

MACHINE_LENGTH_MAX = 256
"""Most characters of a machine's name."""

Seconds = Annotated[float, Meta(ge=0, le=1)]


class Work(Struct, frozen=True):
    """The work of filling one unit of the target.

    Attributes:
        descriptors: pieces that NIXL reads, without merging across units.
        read_bytes: bytes of these pieces.
        copies: strided copies that scatter them locally.
        pieces: contiguous pieces that the copies move.
        copied_bytes: bytes that the copies move.
    """

    descriptors: int
    read_bytes: int
    copies: int = 0
    pieces: int = 0
    copied_bytes: int = 0


class Costs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds.

    Attributes:
        descriptor_s: seconds of one descriptor, without its bytes.
        read_byte_s: seconds of one byte that is read.
        copy_s: seconds of one strided copy, without its pieces and bytes.
        piece_s: seconds of one contiguous piece of a copy.
        copied_byte_s: seconds of one byte that is copied.
    """

    descriptor_s: Seconds
    read_byte_s: Seconds
    copy_s: Seconds
    piece_s: Seconds
    copied_byte_s: Seconds

    def seconds(self, work: Work) -> float:
        """Return the seconds that some work takes."""
        return (
            work.descriptors * self.descriptor_s
            + work.read_bytes * self.read_byte_s
            + work.copies * self.copy_s
            + work.pieces * self.piece_s
            + work.copied_bytes * self.copied_byte_s
        )


class Calibration(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured constants, and where they were measured.

    Attributes:
        schema: version of this format.
        machine: processor and cores of the machine.
        transport: data plane of the measurement.
        source: where the bytes came from: ``same machine``, or ``host:port`` of another one.
        date: of the measurement, UTC.
        memory: kind of both caches' memory: ``DRAM`` or ``VRAM``.
        costs: the constants.
    """

    schema: Literal[1]
    machine: Annotated[str, Meta(max_length=MACHINE_LENGTH_MAX)]
    transport: Annotated[str, Meta(max_length=32)]
    source: Annotated[str, Meta(max_length=512)]
    date: Annotated[str, Meta(max_length=32)]
    costs: Costs
    memory: Literal["DRAM", "VRAM"] = "DRAM"


def encode_calibration(calibration: Calibration) -> bytes:
    """Return the calibration as the text of its file.

    Raises:
        ConfigInvalid: a field is out of bounds; names it.
    """
    text = msgspec.json.format(msgspec.json.encode(calibration), indent=2) + b"\n"
    decode_calibration(text, name="as measured")
    return text


def decode_calibration(text: bytes, *, name: str, planes: Sequence[str] = ()) -> Calibration:
    """Check the text of a calibration file.

    Args:
        text: contents of the file.
        name: name of the file, for the error.
        planes: the data planes of the worker; the file must be for one of them. Empty accepts any.

    Raises:
        ConfigInvalid: it is not a calibration, or is for another data plane; names the file and the field.
    """
    remedy = "Write it again: kvflow bench descriptors --calibrate."
    if len(text) > CALIBRATION_BYTES_MAX:
        raise ConfigInvalid(
            f"calibration {name}: {len(text)} bytes are more than {CALIBRATION_BYTES_MAX}", remedy=remedy
        )
    try:
        calibration = msgspec.json.decode(text, type=Calibration)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigInvalid(f"calibration {name}: {error}", remedy=remedy) from error
    if planes and calibration.transport not in planes:
        ours = " or ".join(map(repr, planes))
        raise ConfigInvalid(
            f"calibration {name}: measured over transport {calibration.transport!r}, but the worker's is {ours}",
            remedy="kvflow bench descriptors --calibrate measures nixl; for another transport name no calibration.",
        )
    return calibration
