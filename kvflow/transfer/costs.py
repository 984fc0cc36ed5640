"""What reading costs on this machine, as measured by ``kvflow bench descriptors --calibrate``.

A model of five constants, which tells whether many small pieces of a source are better read one by one, or as part of
larger ones that are then scattered locally. The constants are never guessed: without a calibration nothing is compared.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from kvflow.errors import ConfigInvalid

CALIBRATION_BYTES_MAX = 1 << 16
"""A calibration is a few hundred bytes; whatever is larger is another file."""

MACHINE_LENGTH_MAX = 256
"""Characters that name a machine."""

Seconds = Annotated[float, Meta(ge=0, le=1)]


class Work(Struct, frozen=True):
    """What filling one unit of the target takes.

    Attributes:
        descriptors: pieces that NIXL reads, none of them merged with those of the next unit.
        read_bytes: bytes that they have.
        copies: strided copies that scatter them locally.
        pieces: contiguous pieces that these move.
        copied_bytes: bytes that they move.
    """

    descriptors: int
    read_bytes: int
    copies: int = 0
    pieces: int = 0
    copied_bytes: int = 0


class Costs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds.

    Attributes:
        descriptor_s: of one descriptor, whatever its size.
        read_byte_s: of one byte that is read.
        copy_s: of one strided copy, whatever it moves.
        piece_s: of one contiguous piece of it.
        copied_byte_s: of one byte that it moves.
    """

    descriptor_s: Seconds
    read_byte_s: Seconds
    copy_s: Seconds
    piece_s: Seconds
    copied_byte_s: Seconds

    def seconds(self, work: Work) -> float:
        """Return how long some work takes."""
        return (
            work.descriptors * self.descriptor_s
            + work.read_bytes * self.read_byte_s
            + work.copies * self.copy_s
            + work.pieces * self.piece_s
            + work.copied_bytes * self.copied_byte_s
        )


class Calibration(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured constants, and where they hold.

    Attributes:
        schema: version of this format.
        machine: processor and cores that they were measured on.
        transport: data plane that they were measured over.
        source: where the bytes came from: ``same machine``, or ``host:port`` of another one.
        date: of the measurement, UTC.
        costs: the constants.
    """

    schema: Literal[1]
    machine: Annotated[str, Meta(max_length=MACHINE_LENGTH_MAX)]
    transport: Annotated[str, Meta(max_length=32)]
    source: Annotated[str, Meta(max_length=512)]
    date: Annotated[str, Meta(max_length=32)]
    costs: Costs


def encode_calibration(calibration: Calibration) -> bytes:
    """Return the calibration as the text of its file.

    Raises:
        ConfigInvalid: a field is out of its bounds, which are checked when a file is read; names it.
    """
    text = msgspec.json.format(msgspec.json.encode(calibration), indent=2) + b"\n"
    decode_calibration(text, name="as measured")
    return text


def decode_calibration(text: bytes, *, name: str, planes: Sequence[str] = ()) -> Calibration:
    """Check the text of a calibration file.

    Args:
        text: what the file holds.
        name: of the file, for the error.
        planes: the data planes that the constants are wanted for, of which one is enough; none: any.

    Raises:
        ConfigInvalid: it is no calibration, or one of another data plane; names the file and the field.
    """
    remedy = "Write it anew: kvflow bench descriptors --calibrate."
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
