"""How a transport of each kind is made, what a TCP exporter serves, and who may read from it."""

from kvflow.config import TcpSettings
from kvflow.ids import Credentials, pass_of
from kvflow.layout.tracks import Track
from kvflow.transport.loopback import LoopbackTransport
from kvflow.transport.nixl import NixlTransport
from kvflow.transport.serving import Serving
from kvflow.transport.staging import StagingMemory
from kvflow.transport.tcp import TcpMover
from kvflow.transport.threaded import ThreadedTransport

HERE = "tcp://127.0.0.1:0"
PASS_KEY = b"contract" * 4
ALL_BLOCKS = ((0,),)
"""The whole cache is one block of one group, and each lease that is held has it."""


def tcp_transport(name, sink, staging_bytes=0, bind=HERE, inline_s_max=0.0):
    """The data plane over TCP, with as many connections as the settings have by default."""
    staging = StagingMemory(staging_bytes)
    settings = TcpSettings(bind=bind, advertise=bind, connections=2, encryption="off")

    def open_tcp(regions, epochs, serving):
        return TcpMover(name, settings, regions, epochs, serving, staging=staging.regions)

    return ThreadedTransport("tcp", {"tcp": open_tcp}, sink, staging, inline_s_max=inline_s_max)


KINDS = {"loopback": LoopbackTransport, "nixl": NixlTransport, "tcp": tcp_transport}


def serving(cache, epochs):
    """What an exporter serves: all of its cache, under each lease that its epoch table says is held."""
    tracks = (Track(cache.address, cache.nbytes, cache.nbytes, 1, cache.memory, cache.device),)

    def blocks_of(slot, epoch):
        return ALL_BLOCKS if slot < len(epochs) and int(epochs[slot]) == epoch else None

    return Serving((tracks,), blocks_of, lambda _public_key: True, PASS_KEY)


def credentials():
    """What any reader says to a TCP exporter."""
    who = ("c0" * 32, "reader", 0, "1" * 32)
    return Credentials(*who, pass_of(PASS_KEY, *who))
