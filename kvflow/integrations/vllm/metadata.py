"""What vLLM carries between the two sides of the connector, in classes of its own."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

from kvflow import RankAddress
from kvflow.integrations.vllm.admission import Contact
from kvflow.integrations.vllm.orders import Order


@dataclass
class StepOrders(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Orders of one step, from the scheduler to every worker.

    Attributes:
        orders: in the order in which they are carried out.
        idle: whether the step has nothing to compute.
        loaded: see ``versions.LoadedBlocks``.
    """

    orders: list[Order] = field(default_factory=list)
    idle: bool = False
    loaded: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class RankIntroduction(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # as above
    """What the scheduler must know of one rank, from its worker, once.

    Attributes:
        address: for the mint.
        contact: how the scheduler reaches the rank between steps.
    """

    address: RankAddress
    contact: Contact
