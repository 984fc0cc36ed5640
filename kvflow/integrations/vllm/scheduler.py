"""The scheduler's side: vLLM's requests, read and handed to ``Loading`` or ``Offering``."""

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from kvflow import RankAddress, TicketKey, TicketMint
from kvflow.errors import DefectFound, KvflowError, TicketInvalid
from kvflow.integrations.vllm.admission import Contact, EarlyAdmission
from kvflow.integrations.vllm.blocks import NULL_BLOCK, BlockIds, TransferGroup
from kvflow.integrations.vllm.contents import Contents, Digests, ExtraKeys
from kvflow.integrations.vllm.guard import Guard, guarded
from kvflow.integrations.vllm.loading import Loading
from kvflow.integrations.vllm.offering import Offering, is_further_prompt
from kvflow.integrations.vllm.orders import Order
from kvflow.integrations.vllm.params import (
    LoadWanted,
    OfferWanted,
    Wish,
    is_tagged,
    read_params,
    ticket_chars_max,
)
from kvflow.integrations.vllm.settings import Settings
from kvflow.integrations.vllm.specs import read_groups, retained_tokens
from kvflow.integrations.vllm.tally import Tally, empty_tally
from kvflow.integrations.vllm.untagged import Untagged
from kvflow.integrations.vllm.versions import prefill_lookahead

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvflow")  # vLLM shows what stands below its own name

BLOCK_ID, BLOCK_HASH = attrgetter("block_id"), attrgetter("block_hash")
"""Of a block of vLLM's manager."""

ENDED_BY_ITSELF = frozenset({"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"})
"""Statuses of a request whose blocks are worth something to others."""


class SchedulerSide:
    """What the scheduler's process decides. What vLLM calls while it schedules never raises.

    Args:
        settings: of the connector.
        vllm_config: the engine's.
        kv_cache_config: the groups of its cache.
        extra_keys: vLLM's ``generate_block_hash_extra_keys``.

    Attributes:
        guard: exceptions that were kept from vLLM.
        loading: requests that read their prompts.
        offering: requests that others read.
        untagged: requests that are computed as if there were no other engine.

    Thread: the scheduler's.
    """

    def __init__(
        self,
        settings: Settings,
        vllm_config: "VllmConfig",
        kv_cache_config: "KVCacheConfig",
        extra_keys: ExtraKeys,
    ) -> None:
        groups = transfer_groups(kv_cache_config)
        config = settings.worker
        tokens_max = vllm_config.model_config.max_model_len
        self._block_sizes = [0 if each.is_state else each.group.block_size for each in groups]
        mint = partial(
            TicketMint,
            config.engine_id,
            cluster_secret=config.secret(),
            lease_s=config.lease_s,
            block_sizes=self._block_sizes,
        )
        self._settings = settings
        self._read_params = partial(
            read_params,
            verify=TicketKey.of(config).verifies,
            chars_max=ticket_chars_max(self._block_sizes, tokens_max),
        )
        self._told_rewritten: set[str] = set()
        self._contents = Contents(extra_keys)
        self._backoff = prefill_backoff(groups, prefill_lookahead(vllm_config))
        self.guard = Guard()
        self.loading = Loading(groups, tokens_max)
        self._early = EarlyAdmission()
        self.offering = Offering(groups, mint, kv_cache_config.num_blocks, self._early.admit)
        self.untagged = Untagged(settings)

    def meet_ranks(self, ranks: Sequence[RankAddress], contacts: Iterable[Contact] = ()) -> None:
        """Take what the workers say of themselves: where they are, and how they are reached between steps."""
        self.offering.meet_ranks(ranks)
        self._early.meet(contacts)

    def close(self) -> None:
        """Reach no worker from here on."""
        self._early.close()

    def _fail(self, error: Exception, request: "Request") -> None:
        """Have a request fail after an unforeseen exception."""
        request.kv_transfer_params = {}  # vLLM itself reads it, and expects a dict
        found = DefectFound(f"{type(error).__name__}: {error!s:.200}")
        self.loading.fail(request.request_id, found, wanted=request.num_prompt_tokens)

    def _fail_matched(self, error: Exception, request: "Request", computed: int) -> tuple[int | None, bool]:
        self._fail(error, request)
        found = self.loading.matched(request.request_id, computed)
        return found, bool(found)

    def _fail_allocated(self, error: Exception, request: "Request", blocks: "KVCacheBlocks", num_tokens: int) -> None:
        self._fail(error, request)
        self.loading.allocated(request.request_id, [], num_tokens)

    @guarded(None, _fail)
    def on_new_request(self, request: "Request") -> None:
        """Read what a request wants of other engines."""
        request_id, prompt = request.request_id, request.num_prompt_tokens
        if not request.abort_immediately:
            self.untagged.note(request.kv_transfer_params)
        wish: Wish | None = None
        try:
            wish = self._read_params(request.kv_transfer_params)
            if isinstance(wish, OfferWanted) and not self._settings.produces:
                raise TicketInvalid("do_remote_decode is true, but this engine's kv_role is kv_consumer")
            if isinstance(wish, LoadWanted):
                if not self._settings.consumes:
                    raise TicketInvalid("do_remote_prefill is true, but this engine's kv_role is kv_producer")
                if request.abort_immediately:  # the server has turned the request down; its prompt did not come here
                    self.loading.give_back(request_id, wish.ticket)
                    return
                if is_further_prompt(request_id):  # the ticket is the first prompt's, which reads it
                    self.untagged.note_further_prompt()
                    request.kv_transfer_params = {}  # as below
                    return
                if wish.rewritten:
                    self._tell_rewritten(wish.rewritten)
                self._contents.require(request, wish.ticket)
        except KvflowError as error:
            request.kv_transfer_params = {}  # vLLM itself reads it, and expects a dict
            ticket = wish.ticket if isinstance(wish, LoadWanted) else None
            self.loading.refuse(request_id, error, wanted=prompt, ticket=ticket)
            return
        if isinstance(wish, LoadWanted):
            self.loading.announce(request_id, wish.ticket, wanted=max(0, prompt - self._backoff))
        elif isinstance(wish, OfferWanted) or self._is_prefill(request):
            self._leave_to_decode(request)
            self.offering.announce(request_id, asked=isinstance(wish, OfferWanted))

    @guarded((0, False), _fail_matched)
    def matched(self, request: "Request", computed: int) -> tuple[int | None, bool]:
        """Return how many tokens behind those that are computed can be loaded, and whether that takes a while."""
        found = self.loading.matched(request.request_id, computed)
        return found, bool(found)

    @guarded(None, _fail_allocated)
    def allocated(self, request: "Request", blocks: "KVCacheBlocks", num_tokens: int) -> None:
        """Order the load of a request that has room now."""
        self.loading.allocated(request.request_id, [writable(group) for group in blocks.blocks], num_tokens)

    @guarded((False, None))
    def on_finished(self, request: "Request", listed: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """Offer what has ended, or give back what it did not use."""
        self.loading.finished(request.request_id)
        sample = self.offering.is_sample(request.request_id)
        if sample is None:
            return False, None
        num_tokens = request.num_computed_tokens - request.num_in_flight_tokens
        if sample and not self._backoff:
            num_tokens = min(num_tokens, request.num_prompt_tokens)  # each sample goes on in its own way
        return self.offering.finished(
            request.request_id,
            listed,
            num_tokens=num_tokens,
            computed=request.status.name in ENDED_BY_ITSELF,
            digests=partial(self._digests, request),
        )

    def on_reported(self, received: Iterable[str] | None, sent: Iterable[str] | None) -> None:
        """Note what the workers have reported."""
        for request_id in received or ():
            self._received(request_id)
        for request_id in sent or ():
            self._sent(request_id)

    def take_orders(self) -> list[Order]:
        """Return what the workers must be told, once."""
        return [*self._take_orders(self.loading), *self._take_orders(self.offering)]

    def take_tally(self) -> Tally | None:
        """Return what was counted since the last call, if anything was."""
        if not (self.guard.caught or self.untagged.counts):
            return None
        return empty_tally() | {"defects": self.guard.take(), "untagged": self.untagged.take()}

    @guarded(())
    def _take_orders(self, half: Loading | Offering) -> Iterable[Order]:
        return half.take_orders()

    @guarded(None)
    def _received(self, request_id: str) -> None:
        self.loading.received(request_id)

    @guarded(None)
    def _sent(self, request_id: str) -> None:
        self.offering.sent(request_id)

    def _digests(self, request: "Request", block_ids: BlockIds, num_tokens: int) -> Digests:
        return self._contents.digests(request, block_ids, self._block_sizes, num_tokens)

    def _tell_rewritten(self, names: Iterable[str]) -> None:
        """Say once of each field that a router has rewritten it; kvflow does not act upon such fields."""
        for name in set(names) - self._told_rewritten:
            self._told_rewritten.add(name)
            logger.info("kvflow: %s is not what the ticket says: a router writes it, and kvflow does not use it", name)

    def _is_prefill(self, request: "Request") -> bool:
        """Tell whether a request of which the router has said nothing is a prefill: it makes one token.

        A client that wants more tokens wants this engine's answer, and the prompt may be cut for none of those.
        """
        if not self._settings.offers_always or is_tagged(request.kv_transfer_params):
            return False
        return request.max_tokens == 1 and request.pooling_params is None

    def _leave_to_decode(self, request: "Request") -> None:
        """Drop the tokens from the end of a prompt that the decode engine computes.

        The lists are vLLM's own, and the prompt's may be the caller's: it is replaced, not cut.
        """
        backoff = self._backoff
        if not backoff or request.num_prompt_tokens <= backoff or request.get_skip_reading_prefix_cache():
            return
        if request.prompt_token_ids is not None:
            request.prompt_token_ids = request.prompt_token_ids[:-backoff]
        if request.prompt_embeds is not None:
            request.prompt_embeds = request.prompt_embeds[:-backoff]
        del request._all_token_ids[-backoff:]  # noqa: SLF001 - there is no other way to shorten a request
        request.num_prompt_tokens -= backoff
        request.max_tokens = 1


def writable(blocks: Sequence[Any]) -> list[int]:
    """Return the ids of blocks, ``NULL_BLOCK`` for one with a hash: it has its tokens, and others may read it."""
    ids, hashes = list(map(BLOCK_ID, blocks)), list(map(BLOCK_HASH, blocks))
    if hashes.count(None) == len(hashes):
        return ids
    return [block if known is None else NULL_BLOCK for block, known in zip(ids, hashes, strict=True)]


def transfer_groups(kv_cache_config: Any) -> tuple[TransferGroup, ...]:
    """Return the groups of vLLM's configuration whose blocks travel."""
    groups = kv_cache_config.transfer_groups
    return tuple(
        TransferGroup(index, named, group.kv_cache_spec, retained_tokens(group))
        for index, named, group in zip(kv_cache_config.transfer_group_ids, read_groups(groups), groups, strict=True)
    )


def prefill_backoff(groups: Sequence[TransferGroup], lookahead: int) -> int:
    """Return how many tokens of a prompt's end the decode engine computes, so that the prefill engine must not.

    It computes the last one in any case, to sample from it. What is kept of all tokens does not mind that the prefill
    engine has been there. A state is that of the last token and no other; and a window that has moved on to the token
    behind the prompt may have lost the first one that the last token looks at.
    """
    moves_on = any(each.is_state or each.group.window for each in groups)
    return max(1 if moves_on else 0, lookahead - 1)
