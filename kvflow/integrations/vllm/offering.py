"""The producer's side of the scheduler: tickets for prompts that are computed.

Pure but for the mint's signature: it is told what the engine does with a request, and collects orders for the workers.

vLLM makes several requests of one request with several samples (``n``) or several prompts, and answers one ticket: that
of the first prompt, and of its samples that of the last one to end. Whatever the others offered would be held until the
end of its lease. So a sample offers nothing while another sample of its prompt runs. vLLM sends samples one by one, and
a short prompt ends before the next sample arrives: samples behind it answer the ticket that is out.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec import Struct

from kvflow import RankAddress, Ticket, TicketMint
from kvflow.errors import KvflowError
from kvflow.integrations.vllm.blocks import NULL_BLOCK, BlockIds, TransferGroup, offered_blocks
from kvflow.integrations.vllm.contents import Digests
from kvflow.integrations.vllm.loading import SAMPLE
from kvflow.integrations.vllm.orders import Admit, Order
from kvflow.integrations.vllm.params import no_ticket_params, ticket_params

logger = logging.getLogger("vllm.kvflow")  # vLLM shows what stands below its own name

MintTickets = Callable[[Sequence[RankAddress]], TicketMint]
AdmitEarly = Callable[[Ticket], None]

PROMPT_NAME = re.compile(r"(?P<call>cmpl-.+)-(?P<number>\d{1,6})(-[0-9a-f]{8})?", re.DOTALL)
"""vLLM's server names the prompts of one call of ``/v1/completions`` alike, but for their number and some digits."""

PROMPT_STARTS = ("cmpl-", *"0123456789")
"""How the name of such a prompt begins, or that of a sample of it."""

UNASKED_SHARE = 0.5
"""Of an engine's blocks, and of its lease slots, that offers which no client asked for may hold."""


class _Origin(Struct, frozen=True):
    """What a request was made of.

    Attributes:
        prompt: name that all samples of one prompt share.
        sampled: whether it is one of several samples.
        call: name that all prompts of one call share; empty if the request is of no such call.
        number: of the prompt in its call.
        asked: whether the client has asked for a ticket.
    """

    prompt: str
    sampled: bool
    call: str
    number: int
    asked: bool

    @classmethod
    def of(cls, request_id: str, *, asked: bool) -> "_Origin":
        """Read the engine's name of a request."""
        sample = SAMPLE.fullmatch(request_id)
        prompt = sample["prompt"] if sample else request_id
        named = PROMPT_NAME.fullmatch(prompt)
        call, number = (named["call"], int(named["number"])) if named else ("", 0)
        return cls(prompt, sampled=sample is not None, call=call, number=number, asked=asked)


def is_further_prompt(request_id: str) -> bool:
    """Tell whether a request is one of several prompts of a call, and not the first: vLLM answers no ticket for it."""
    # Most are named in another way, and need no closer look.
    return request_id.startswith(PROMPT_STARTS) and _Origin.of(request_id, asked=False).number > 0


class Offering:
    """Requests of one engine whose blocks others may read.

    Args:
        groups: those whose blocks travel.
        mint: makes the engine's mint when its ranks are known.
        num_blocks: of the engine.
        admit_early: tells the ranks to hold a lease before the next step orders it.

    Thread: the scheduler's.
    """

    def __init__(
        self, groups: Sequence[TransferGroup], mint: MintTickets, num_blocks: int, admit_early: AdmitEarly
    ) -> None:
        self.groups = tuple(groups)
        self._make_mint = mint
        self._admit_early = admit_early
        self._mint: TicketMint | None = None
        self._wanted: dict[str, _Origin] = {}
        self._running: Counter[str] = Counter()
        self._first_prompts: Counter[str] = Counter()
        self._held: dict[str, _Origin] = {}
        self._answered: dict[str, dict[str, Any]] = {}
        self._unasked = _Unasked(num_blocks)
        self._orders: list[Order] = []

    def meet_ranks(self, ranks: Sequence[RankAddress]) -> None:
        """Take what the workers say of themselves."""
        self._mint = self._make_mint(sorted(ranks, key=lambda address: address.rank))

    def announce(self, request_id: str, *, asked: bool = True) -> None:
        """Take a request whose blocks are wanted when its prompt is computed.

        Args:
            request_id: the engine's name of it.
            asked: whether the client has asked for a ticket. Other offers hold a share of the engine at most.
        """
        origin = _Origin.of(request_id, asked=asked)
        self._wanted[request_id] = origin
        self._running[origin.prompt] += 1
        if origin.call and not origin.number:
            self._first_prompts[origin.call] += 1

    def is_sample(self, request_id: str) -> bool | None:
        """Tell whether a request is one of several samples of its prompt; None if it was not announced."""
        origin = self._wanted.get(request_id)
        return None if origin is None else origin.sampled

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
            for the router; None for a request that wants nothing, or whose parameters vLLM would not answer.
        """
        origin = self._wanted.pop(request_id, None)
        if origin is None:
            return False, None
        _subtract(self._running, origin.prompt)
        try:
            if not computed or not num_tokens or not any(listed) or self._is_surplus(origin):
                return False, None
            if origin.sampled and origin.prompt in self._answered:
                return False, dict(self._answered[origin.prompt])
            return self._offer(request_id, origin, listed, num_tokens, digests) or (False, no_ticket_params())
        finally:
            if request_id not in self._held:
                self._end(request_id, origin)

    def sent(self, request_id: str) -> None:
        """Note that the lease of a request has ended on every rank."""
        if self._mint is not None:
            self._mint.retire(request_id)
        origin = self._held.pop(request_id, None)
        if origin is not None:
            self._answered.pop(origin.prompt, None)
            self._end(request_id, origin)

    def take_orders(self) -> list[Order]:
        """Return what the workers must be told, once."""
        orders, self._orders = self._orders, []
        return orders

    def _is_surplus(self, origin: _Origin) -> bool:
        """Tell whether vLLM answers the parameters of another request than this one."""
        behind = origin.call and origin.number and self._first_prompts[origin.call]
        return bool(behind or (origin.sampled and self._running[origin.prompt]))

    def _end(self, request_id: str, origin: _Origin) -> None:
        self._unasked.give(request_id)
        if origin.call and not origin.number:
            _subtract(self._first_prompts, origin.call)

    def _offer(
        self,
        request_id: str,
        origin: _Origin,
        listed: Sequence[Sequence[int]],
        num_tokens: int,
        digests: Callable[[BlockIds, int], Digests],
    ) -> tuple[bool, dict[str, Any] | None] | None:
        """Sign a ticket and have it admitted; return the answer of ``finished``, None if there can be no ticket."""
        if self._mint is None:
            logger.error("kvflow: request %s is not offered: no worker has told its address", request_id)
            return None
        if not origin.asked and not self._unasked.take(request_id, listed, self._mint.slots):
            return None
        try:
            block_ids = offered_blocks(self.groups, listed, num_tokens)
            contents = digests(block_ids, num_tokens)
            ticket, grant = self._mint.offer(request_id, block_ids=block_ids, num_tokens=num_tokens, digests=contents)
        except KvflowError as error:
            logger.warning("kvflow: request %s is not offered: %s", request_id, error)
            return None
        try:
            params = ticket_params(ticket)
            offered = True, params
            self._held[request_id] = origin
            if origin.sampled:
                self._answered[origin.prompt] = params
            self._orders.append(Admit(request_id, grant))
        except BaseException:
            # The engine frees the blocks of a request that is not offered: no lease of them may be admitted.
            self._mint.retire(request_id)
            if self._held.pop(request_id, None) is not None:
                self._answered.pop(origin.prompt, None)
            raise
        # The request is on offer from here on, whatever happens: a rank may hold its lease.
        try:  # noqa: SIM105 - that would be a call, which fails where another has
            self._admit_early(ticket)
        except Exception:  # noqa: BLE001, S110 - the order of the step does it
            pass
        return offered


class _Unasked:
    """What offers hold that no client asked for: at most a share of the engine, because they may never be read."""

    def __init__(self, num_blocks: int) -> None:
        self._blocks_max = int(num_blocks * UNASKED_SHARE)
        self._blocks: Counter[int] = Counter()  # several requests may hold the same one, by the prefix cache
        self._held: dict[str, frozenset[int]] = {}
        self._told = False

    def take(self, request_id: str, listed: Iterable[Sequence[int]], slots: int) -> bool:
        """Hold a request's blocks; False, and nothing is held, if that is more than the share."""
        blocks = frozenset(block for ids in listed for block in ids) - {NULL_BLOCK}
        new = sum(block not in self._blocks for block in blocks)
        if len(self._blocks) + new > self._blocks_max or len(self._held) + 1 > slots * UNASKED_SHARE:
            self._tell(request_id)
            return False
        self._held[request_id] = blocks
        self._blocks.update(blocks)
        return True

    def give(self, request_id: str) -> None:
        """Hold a request's blocks no longer, if they were held."""
        for block in self._held.pop(request_id, ()):
            _subtract(self._blocks, block)

    def _tell(self, request_id: str) -> None:
        if self._told:
            return
        self._told = True
        logger.warning(
            "kvflow: request %s is not offered, and others will not be: tickets that no client asked for hold %d of at "
            "most %d blocks and %d leases. Each is held until it is read, or until lease_s is over. If the metric "
            'vllm:kvflow_leases_ended has more with outcome="expired" than "released", the router does not hand '
            "kv_transfer_params of answers on. This is said once.",
            request_id,
            len(self._blocks),
            self._blocks_max,
            len(self._held),
        )


def _subtract(counter: Counter[Any], key: Any) -> None:
    """Count one less, and keep nothing of what is not there."""
    counter[key] -= 1
    if counter[key] <= 0:
        del counter[key]
