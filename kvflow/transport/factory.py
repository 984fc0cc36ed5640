"""Which transport a name stands for. NIXL itself is loaded by ``start``, not here."""

from kvflow.transport.base import Sink, Transport
from kvflow.transport.loopback import LoopbackTransport
from kvflow.transport.nixl import NixlTransport


def create_transport(name: str, agent_name: str, sink: Sink, staging_bytes: int = 0) -> Transport:
    """Construct a transport that has not started.

    Args:
        name: ``nixl`` or ``loopback``.
        agent_name: unique per incarnation.
        sink: takes the events, on the owner thread.
        staging_bytes: memory for staged programs; 0 for none.

    Raises:
        ConfigInvalid: there is not so much memory for staged programs.
    """
    if name == "loopback":
        return LoopbackTransport(agent_name, sink, staging_bytes)
    return NixlTransport(agent_name, sink, staging_bytes)
