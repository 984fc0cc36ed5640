"""The scheduler's side: vLLM's requests, read and handed to ``Loading`` or ``Offering``."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kvflow import TicketMint
from kvflow.errors import KvflowError, TicketInvalid
from kvflow.integrations.vllm.blocks import TransferGroup
from kvflow.integrations.vllm.loading import Loading
from kvflow.integrations.vllm.offering import Offering
from kvflow.integrations.vllm.orders import Order
from kvflow.integrations.vllm.params import LoadWanted, OfferWanted, read_params
from kvflow.integrations.vllm.settings import Settings
from kvflow.integrations.vllm.specs import read_groups, retained_tokens

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

ENDED_BY_ITSELF = frozenset({"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"})
"""Statuses of a request whose blocks are worth something to others."""


class SchedulerSide:
    """What the scheduler's process decides.

    Attributes:
        loading: requests that read their prompts.
        offering: requests that others read.

    Thread: the scheduler's.
    """

    def __init__(self, settings: Settings, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
        groups = transfer_groups(kv_cache_config)
        config = settings.worker
        mint = partial(TicketMint, config.engine_id, cluster_secret=config.secret(), lease_s=config.lease_s)
        self._settings = settings
        self._backoff = prefill_backoff(groups, getattr(vllm_config, "num_prefill_lookahead_tokens", 1))
        self.loading = Loading(groups)
        self.offering = Offering(groups, mint)
        self.meet_ranks = self.offering.meet_ranks

    def on_new_request(self, request: "Request") -> None:
        """Read what a request wants of other engines; whatever a client has sent, this returns."""
        prompt = request.num_prompt_tokens
        try:
            wish = read_params(request.kv_transfer_params)
            if isinstance(wish, LoadWanted) and not self._settings.consumes:
                raise TicketInvalid("do_remote_prefill is true, but this engine's kv_role is kv_producer")
            if isinstance(wish, OfferWanted) and not self._settings.produces:
                raise TicketInvalid("do_remote_decode is true, but this engine's kv_role is kv_consumer")
        except KvflowError as error:
            request.kv_transfer_params = {}  # vLLM itself reads it, and expects a dict
            self.loading.refuse(request.request_id, error, wanted=prompt)
            return
        match wish:
            case LoadWanted(ticket=ticket):
                self.loading.announce(request.request_id, ticket, wanted=max(0, prompt - self._backoff))
            case OfferWanted():
                self._leave_to_decode(request)
                self.offering.announce(request.request_id)
            case _:
                pass

    def on_finished(self, request: "Request", listed: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """Offer what has ended, or give back what it did not use."""
        self.loading.finished(request.request_id)
        return self.offering.finished(
            request.request_id,
            listed,
            num_tokens=request.num_computed_tokens - request.num_in_flight_tokens,
            computed=request.status.name in ENDED_BY_ITSELF,
        )

    def take_orders(self) -> list[Order]:
        """Return what the workers must be told, once."""
        return self.loading.take_orders() + self.offering.take_orders()

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
