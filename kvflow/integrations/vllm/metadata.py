"""What vLLM carries between the two sides of the connector, in classes of its own."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

from kvflow import RankAddress
from kvflow.integrations.vllm.orders import Order


@dataclass
class StepOrders(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Orders of one step, from the scheduler to every worker.

    Attributes:
        orders: in the order in which they are carried out.
        idle: whether the step has nothing to compute.
    """

    orders: list[Order] = field(default_factory=list)
    idle: bool = False


@dataclass
class RankIntroduction(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # as above
    """What the scheduler's mint must know of one rank, from its worker, once."""

    address: RankAddress
