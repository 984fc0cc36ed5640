"""Create the data planes that the settings name. ``start`` loads NIXL, not this module."""

from collections.abc import Sequence

from kvflow.config import WorkerConfig
from kvflow.layout.component import Region
from kvflow.reads.backend import BackendFactory
from kvflow.reads.contract import Serving, Sink, Transport
from kvflow.reads.loopback import LoopbackBackend
from kvflow.reads.nixl.reader import Uses
from kvflow.reads.nixl.transport import nixl_factory
from kvflow.reads.staging import StagingMemory
from kvflow.reads.tcp.backend import TcpBackend
from kvflow.reads.thread import ThreadedTransport

PLANES = {"auto": ("nixl", "tcp"), "nixl": ("nixl",), "tcp": ("tcp",), "loopback": ("loopback",)}
"""The setting ``transport`` -> data planes, the preferred one first. NIXL comes first, because it reads without the
exporter's processor."""


def create_transport(config: WorkerConfig, agent_name: str, sink: Sink, staging_bytes: int = 0) -> Transport:
    """Construct a transport that has not started.

    Args:
        config: the settings; only those of the data planes are used.
        agent_name: unique per incarnation.
        sink: takes the events, on the read thread.
        staging_bytes: memory for staged lists; 0 for none.

    Raises:
        ConfigInvalid: there is not enough memory for staged lists.
    """
    staging = StagingMemory(staging_bytes)
    # If TCP is available, NIXL reads only over transports that are known to need no help of the exporter's process.
    nixl = nixl_factory(
        agent_name,
        staging,
        uses=Uses(config.role, config.tuning.sleep_mode),
        known_only=config.transport == "auto",
        params=config.tuning.nixl_backend_params,
    )
    factories = {
        "nixl": nixl,
        "tcp": _tcp_factory(config, agent_name, staging),
        "loopback": lambda regions, epochs, _serving: LoopbackBackend(agent_name, regions, epochs),
    }
    return ThreadedTransport(
        config.transport,
        {name: factories[name] for name in PLANES[config.transport]},
        sink,
        staging,
        # A caller that names an address for the TCP plane requires it; without it some peers could not be read.
        required=frozenset() if config.tuning.tcp_bind is None else frozenset({"tcp"}),
    )


def _tcp_factory(config: WorkerConfig, agent_name: str, staging: StagingMemory) -> BackendFactory:
    def open_tcp(regions: Sequence[Region], epochs: Region, serving: Serving) -> TcpBackend:
        in_host_memory = [region for region in staging.regions if region.memory == "DRAM"]
        return TcpBackend(agent_name, config.tcp, regions, epochs, serving, staging=in_host_memory)

    return open_tcp
