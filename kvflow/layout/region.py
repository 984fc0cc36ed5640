"""One registered address range."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

ADDRESS_MAX = (1 << 63) - 1
"""Addresses and lengths are int64 in descriptor lists; no user address of a 64-bit machine reaches this."""

METADATA_BYTES_MAX = 1 << 20
"""Largest metadata of a transport. NIXL needs about 44 bytes per region, so there is room for more than 20,000."""

Address = Annotated[int, Meta(ge=0, le=ADDRESS_MAX)]


class Region(Struct, frozen=True):
    """A contiguous address range that one worker registers with its transport.

    Attributes:
        address: address of the first byte, in the owner's address space.
        nbytes: length.
        memory: ``DRAM`` or ``VRAM``.
        device: device index; 0 for DRAM.
    """

    address: Address
    nbytes: Annotated[int, Meta(ge=1, le=ADDRESS_MAX)]
    memory: Literal["DRAM", "VRAM"] = "DRAM"
    device: Annotated[int, Meta(ge=0, le=1023)] = 0
