"""What the owner of a transport is told to do. A peer is added by its address, a program is prepared by itself."""

from msgspec import Struct

from kvflow.ids import PeerId
from kvflow.transfer.requests import RankRead
from kvflow.transport.base import PeerAddress, Program


class RemovePeer(Struct, frozen=True):
    """``Transport.remove_peer``."""

    peer: PeerId
    gone: bool = False


class PostReads(Struct, frozen=True):
    """``Transport.post``."""

    reads: tuple[RankRead, ...]


class CancelReads(Struct, frozen=True):
    """``Transport.cancel``."""

    read_ids: tuple[int, ...]


class ResetReader(Struct, frozen=True):
    """``Transport.reset_reader``."""


Command = PeerAddress | RemovePeer | Program | PostReads | CancelReads | ResetReader
