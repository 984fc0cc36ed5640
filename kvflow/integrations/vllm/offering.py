"""The producer's side of the scheduler: tickets for prompts that are computed.

Pure but for the mint's signature: it is told what the engine does with a request, and collects orders for the workers.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from kvflow import RankAddress, TicketMint
from kvflow.errors import KvflowError
from kvflow.integrations.vllm.blocks import BlockIds, TransferGroup, offered_blocks
from kvflow.integrations.vllm.contents import Digests
from kvflow.integrations.vllm.orders import Admit, Order
from kvflow.integrations.vllm.params import no_ticket_params, ticket_params

logger = logging.getLogger("vllm.kvflow")  # vLLM shows what stands below its own name

MintTickets = Callable[[Sequence[RankAddress]], TicketMint]


class Offering:
    """Requests of one engine whose blocks others may read.

    Args:
        groups: those whose blocks travel.
        mint: makes the engine's mint when its ranks are known.

    Thread: the scheduler's.
    """

    def __init__(self, groups: Sequence[TransferGroup], mint: MintTickets) -> None:
        self.groups = tuple(groups)
        self._make_mint = mint
        self._mint: TicketMint | None = None
        self._wanted: set[str] = set()
        self._orders: list[Order] = []

    def meet_ranks(self, ranks: Sequence[RankAddress]) -> None:
        """Take what the workers say of themselves."""
        self._mint = self._make_mint(sorted(ranks, key=lambda address: address.rank))

    def announce(self, request_id: str) -> None:
        """Take a request whose blocks are wanted when its prompt is computed."""
        self._wanted.add(request_id)

    def finished(
        self,
        request_id: str,
        listed: Sequence[Sequence[int]],
        *,
        num_tokens: int,
        computed: bool,
        digests: Callable[[BlockIds, int], Digests],
    ) -> tuple[bool, dict[str, Any] | None]:
        """Offer the blocks of a request that has ended.

        Args:
            request_id: the engine's name of it.
            listed: its block ids, one list for each of vLLM's groups.
            num_tokens: whose keys, values or states are in them.
            computed: whether it ended by itself; False if it was aborted or has failed.
            digests: says what the request's blocks hold, given their ids and ``num_tokens``.

        Returns:
            Whether the engine must keep the blocks until the workers report the request as sent, and its parameters
            for the router; None for a request that wants nothing.
        """
        if request_id not in self._wanted:
            return False, None
        self._wanted.discard(request_id)
        if not computed or not num_tokens or not any(listed):
            return False, None
        if self._mint is None:
            logger.error("kvflow: request %s is not offered: no worker has told its address", request_id)
            return False, no_ticket_params()
        try:
            block_ids = offered_blocks(self.groups, listed, num_tokens)
            contents = digests(block_ids, num_tokens)
            ticket, grant = self._mint.offer(request_id, block_ids=block_ids, num_tokens=num_tokens, digests=contents)
        except KvflowError as error:
            logger.warning("kvflow: request %s is not offered: %s", request_id, error)
            return False, no_ticket_params()
        try:
            params = ticket_params(ticket)
            self._orders.append(Admit(request_id, grant))
        except BaseException:
            # The engine frees the blocks of a request that is not offered: no lease of them may be admitted.
            self._mint.retire(request_id)
            raise
        return True, params

    def sent(self, request_id: str) -> None:
        """Note that the lease of a request has ended on every rank."""
        if self._mint is not None:
            self._mint.retire(request_id)

    def take_orders(self) -> list[Order]:
        """Return what the workers must be told, once."""
        orders, self._orders = self._orders, []
        return orders
