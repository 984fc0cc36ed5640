"""How a transport of each kind is made, what a TCP exporter serves, and who may read from it."""

from functools import partial

import msgspec

from kvflow.config import TcpSettings
from kvflow.ids import Credentials, pass_of
from kvflow.layout.tracks import Track
from kvflow.reads.contract import Serving
from kvflow.reads.staging import StagingMemory
from kvflow.reads.tcp.backend import TcpBackend
from kvflow.reads.thread import ThreadedTransport
from tests.helpers.async_backend import AsyncTransport
from tests.helpers.transports import loopback_transport, nixl_transport

HERE = "tcp://127.0.0.1:0"
PASS_KEY = b"contract" * 4
ALL_BLOCKS = ((0,),)
"""The whole cache is one block of one group, and each lease that is held has it."""


class _EncryptingBackend(TcpBackend):
    """A reader whose pass names its certificate, as a producer gives it on the control channel."""

    def add(self, address):
        given = credentials(self.certificate, address.credentials.certificate)
        return super().add(msgspec.structs.replace(address, credentials=given))


def tcp_transport(name, sink, staging_bytes=0, *, bind=HERE, inline_s_max=0.0, encryption="off"):
    """The data plane over TCP, with as many connections as the settings have by default."""
    staging = StagingMemory(staging_bytes)
    settings = TcpSettings(bind=bind, advertise=bind, connections=2, encryption=encryption)
    backend = TcpBackend if encryption == "off" else _EncryptingBackend

    def open_tcp(regions, epochs, serving):
        return backend(name, settings, regions, epochs, serving)

    return ThreadedTransport("tcp", {"tcp": open_tcp}, sink, staging, inline_s_max=inline_s_max)


KINDS = {"loopback": loopback_transport, "nixl": nixl_transport, "tcp": tcp_transport, "async": AsyncTransport}
KINDS["tcp tls"] = partial(tcp_transport, encryption="tls")


def serving(cache, epochs):
    """What an exporter serves: all of its cache, under each lease that its epoch table says is held."""
    region = cache.region
    tracks = (Track(region.address, region.nbytes, region.nbytes, 1, region.memory, region.device),)

    def blocks_of(slot, epoch):
        return ALL_BLOCKS if slot < len(epochs) and int(epochs[slot]) == epoch else None

    return Serving((tracks,), blocks_of, lambda _public_key: True, PASS_KEY, device_memory=cache.device_memory)


def credentials(certificate=b"", of_exporter=b""):
    """What any reader with this certificate says to a TCP exporter."""
    who = ("c0" * 32, "reader", 0, "1" * 32)
    return Credentials(*who, pass_of(PASS_KEY, *who, certificate=certificate), of_exporter)
