"""Transports of one data plane, as tests and benchmarks open them."""

from kvflow.reads.loopback import LoopbackBackend
from kvflow.reads.nixl.backend import nixl_factory
from kvflow.reads.staging import StagingMemory
from kvflow.reads.thread import ThreadedTransport


def loopback_transport(agent_name, sink, staging_bytes=0, *, inline_s_max=None):
    """Return a transport within this process."""

    def opened(regions, epochs, _serving):
        return LoopbackBackend(agent_name, regions, epochs)

    return ThreadedTransport(
        "loopback", {"loopback": opened}, sink, StagingMemory(staging_bytes), inline_s_max=inline_s_max
    )


def nixl_transport(agent_name, sink, staging_bytes=0, *, inline_s_max=None, **options):
    """Return a transport over NIXL alone; ``options`` are those of ``NixlBackend``."""
    staging = StagingMemory(staging_bytes)
    opened = nixl_factory(agent_name, staging, **options)
    return ThreadedTransport("nixl", {"nixl": opened}, sink, staging, inline_s_max=inline_s_max)
