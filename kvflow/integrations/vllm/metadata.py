"""What vLLM carries between the two sides of the connector, in classes of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

from kvflow import RankAddress
from kvflow.integrations.vllm.admission import Contact
from kvflow.integrations.vllm.orders import Order, pack, unpack


@dataclass
class StepOrders(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Orders of one step, from the scheduler to every worker.

    Attributes:
        orders: in the order in which they are carried out.
        idle: whether the step has nothing to compute.
        loaded: see ``versions.LoadedBlocks``.
    """

    orders: Sequence[Order] = ()
    idle: bool = False
    loaded: Mapping[str, list[int]] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled."""
        return self.__dict__ | {"orders": pack(self.orders)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what was pickled."""
        self.__dict__.update(state, orders=unpack(state["orders"]))


NO_ORDERS = {idle: StepOrders(idle=idle) for idle in (False, True)}
"""Those of a step in which nothing is new, by whether it has nothing to compute."""


@dataclass
class RankIntroduction(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # as above
    """What the scheduler must know of one rank, from its worker, once.

    Attributes:
        address: for the mint.
        contact: how the scheduler reaches the rank between steps.
    """

    address: RankAddress
    contact: Contact
