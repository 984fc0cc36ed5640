"""Which data planes the settings stand for. NIXL itself is loaded by ``start``, not here."""

from collections.abc import Sequence

from kvflow.config import WorkerConfig
from kvflow.layout.region import Region
from kvflow.transport.base import Sink, Transport
from kvflow.transport.loopback import LoopbackTransport
from kvflow.transport.mover import MoverFactory
from kvflow.transport.nixl import nixl_factory
from kvflow.transport.serving import Serving
from kvflow.transport.staging import StagingMemory
from kvflow.transport.tcp import TcpMover
from kvflow.transport.threaded import ThreadedTransport

PLANES = {"auto": ("nixl", "tcp"), "nixl": ("nixl",), "tcp": ("tcp",), "loopback": ("loopback",)}
"""The setting ``transport`` -> data planes, the preferred one first: NIXL reads without the exporter's processor."""


def create_transport(config: WorkerConfig, agent_name: str, sink: Sink, staging_bytes: int = 0) -> Transport:
    """Construct a transport that has not started.

    Args:
        config: the settings, of which those of the data planes are used.
        agent_name: unique per incarnation.
        sink: takes the events, on the owner thread.
        staging_bytes: memory for staged programs; 0 for none.

    Raises:
        ConfigInvalid: there is not so much memory for staged programs.
    """
    if config.transport == "loopback":
        return LoopbackTransport(agent_name, sink, staging_bytes)
    staging = StagingMemory(staging_bytes)
    # Where TCP can take its place, NIXL reads only what it is known to read without the exporter's process.
    nixl = nixl_factory(agent_name, staging, known_only=config.transport == "auto")
    factories = {"nixl": nixl, "tcp": _tcp_factory(config, agent_name, staging)}
    return ThreadedTransport(
        config.transport,
        {name: factories[name] for name in PLANES[config.transport]},
        sink,
        staging,
        # Who names an address for the TCP plane wants it; without it some peers could not be read.
        required=frozenset() if config.tcp_bind is None else frozenset({"tcp"}),
    )


def _tcp_factory(config: WorkerConfig, agent_name: str, staging: StagingMemory) -> MoverFactory:
    def open_tcp(regions: Sequence[Region], epochs: Region, serving: Serving) -> TcpMover:
        return TcpMover(agent_name, config.tcp(), regions, epochs, serving, staging=staging.regions)

    return open_tcp
