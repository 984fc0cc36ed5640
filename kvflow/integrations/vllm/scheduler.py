"""The scheduler's side: it reads vLLM's requests and hands them to ``Loading`` or ``Offering``."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial, wraps
from math import lcm
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar, cast

from msgspec import structs

from kvflow import RankAddress, TicketKey, TicketMint
from kvflow.contents import Chains, Contents, ExtraKeys
from kvflow.errors import DefectFound, KvflowError, TicketInvalid
from kvflow.integrations.vllm.admission import Contact, EarlyAdmission
from kvflow.integrations.vllm.blocks import NULL_BLOCK, TransferGroup
from kvflow.integrations.vllm.caches import read_groups, retained_tokens
from kvflow.integrations.vllm.engine import can_keep, clears_first, load_wait
from kvflow.integrations.vllm.finder import Finder
from kvflow.integrations.vllm.keeping import Keeping
from kvflow.integrations.vllm.loading import Loading
from kvflow.integrations.vllm.logs import logger
from kvflow.integrations.vllm.messages import Command, Counters, Reset, Tally
from kvflow.integrations.vllm.offering import Offering, is_further_prompt
from kvflow.integrations.vllm.params import (
    SAMPLE,
    Untagged,
    is_streamed,
    ticket_chars_max,
    traceparent_of,
)
from kvflow.integrations.vllm.settings import Settings
from kvflow.integrations.vllm.versions import prefill_lookahead
from kvflow.routing import LoadWanted, OfferWanted, RendezvousWanted, Wanted, hinted_sources, is_tagged, read_params

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


BLOCK_ID, BLOCK_HASH = attrgetter("block_id"), attrgetter("block_hash")  # fields of a block of vLLM's block manager

ENDED_BY_ITSELF = frozenset({"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"})
"""Statuses of a request that completed: other engines can use its blocks."""

WAITING_SHARE = 0.25  # of the blocks that are free, or held by requests whose prompts are still computed elsewhere

Method = TypeVar("Method", bound=Callable[..., Any])


def guarded(answer: Any, mend: Callable[..., Any] | None = None) -> Callable[[Method], Method]:
    """Return a decorator for a method that must not raise, not even ``MemoryError``: that would end vLLM's engine.

    If it raises, ``mend`` returns the result, from the object, the exception and the arguments; without it ``answer``.
    """

    def decorate(method: Method) -> Method:
        @wraps(method)
        def call(self: "SchedulerSide", *args: Any) -> Any:
            try:
                return method(self, *args)
            except Exception as error:  # noqa: BLE001 - any exception would end vLLM
                with suppress(Exception):  # memory may be short
                    self.note_defect(method.__name__, error)
                try:
                    return answer if mend is None else mend(self, error, *args)
                except Exception:  # noqa: BLE001 - as above
                    return answer

        return cast("Method", call)

    return decorate


class SchedulerSide:
    """Decides which blocks to offer and to load. Methods that vLLM calls while it schedules never raise.

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
            trace_offers=config.tuning.trace_offers,
            cluster_secret=config.security.secret,
            lease_s=config.lease_s,
            block_sizes=self._block_sizes,
        )
        key = TicketKey.of(config)
        self._settings = settings
        self._read_params = partial(
            read_params,
            read=key.read,
            chars_max=ticket_chars_max(self._block_sizes, tokens_max),
            meets=bool(settings.rendezvous_from),
        )
        self._told_rewritten: set[str] = set()
        self._contents = Contents(key.content_keys(), extra_keys)
        self._chains: dict[str, Chains] = {}  # of each request that has not ended
        lookahead = prefill_lookahead(vllm_config)
        self._backoff, self._unsettled = prefill_backoff(groups, lookahead), lookahead - 1
        self._tally = Tally()
        self._told_defects: set[tuple[str, type[Exception]]] = set()
        self.loading = Loading(groups, tokens_max)
        self._early = EarlyAdmission()
        self.offering = Offering(
            groups,
            mint,
            kv_cache_config.num_blocks,
            self._early.send,
            renew_s=config.lease_s / 3 if settings.dispatch == "concurrent" else None,
            unsettled=self._unsettled,
            settles=not clears_first(vllm_config, kv_cache_config),
        )
        self.keeping = Keeping(groups, self.offering, self._reuse)
        self._keeps = settings.keep and can_keep(vllm_config, kv_cache_config, groups)
        self._step = 0
        self.untagged = Untagged(settings, self._tally)
        self._pool: Any = None
        self._finder: Finder | None = None
        if settings.sources and any(each.is_state for each in groups):
            logger.warning("kvflow: sources is set, but the states of this model are not kept: no source is asked")
            settings = structs.replace(settings, sources=())
        if settings.sources or settings.rendezvous_from:
            unit, waits = lcm(*filter(None, self._block_sizes)), bool(load_wait(vllm_config).all_s)
            self._finder = Finder(settings, self._contents, self._tally, unit=unit, waits=waits)
        self._ended: set[str] = set()  # requests that a reset has ended on all ranks, which have not reported them yet
        self._resets: list[Command] = []

    def note_defect(self, method: str, error: Exception) -> None:
        """Count an exception that vLLM must not see, and log its traceback the first time."""
        self._tally.count("defects", method)
        known = (method, type(error)) in self._told_defects
        self._told_defects.add((method, type(error)))
        logger.error(
            "kvflow: %s failed: %s: %.200s", method, type(error).__name__, error, exc_info=None if known else error
        )

    def meet_ranks(self, ranks: Sequence[RankAddress], contacts: Iterable[Contact] = ()) -> None:
        """Take the addresses of the ranks, and their contacts between steps."""
        self.keeping.end_all()
        self.offering.meet_ranks(ranks)
        self._early.meet(contacts)

    def bind_pool(self, pool: Any) -> None:
        """Take vLLM's block pool."""
        self._pool = pool
        if self._keeps:
            self.keeping.pool = pool

    def close(self) -> None:
        """Close the channels to the ranks."""
        self.offering.close()
        self._early.close()
        if self._finder is not None:
            self._finder.close()

    def _fail(self, error: BaseException, request: "Request") -> None:
        """Fail a request, after an unforeseen exception as for a defect."""
        request.kv_transfer_params = {}  # vLLM reads this field too, and expects a dict
        if not isinstance(error, KvflowError):
            error = DefectFound(f"{type(error).__name__}: {error!s:.200}")
        self.loading.fail(request.request_id, error, wanted=request.num_prompt_tokens)

    def _fail_matched(self, error: Exception, request: "Request", computed: int) -> tuple[int | None, bool]:
        self._fail(error, request)
        found = self.loading.matched(request.request_id, computed)
        return found, bool(found)

    def _fail_allocated(self, error: Exception, request: "Request", blocks: "KVCacheBlocks", num_tokens: int) -> None:
        self._fail(error, request)
        self.loading.allocated(request.request_id, [], num_tokens)

    @guarded(None, _fail)
    def on_new_request(self, request: "Request") -> None:
        """Read the ``kv_transfer_params`` of a request and take it as one that loads, offers or does neither."""
        request_id, prompt = request.request_id, request.num_prompt_tokens
        chains = self._chains[request_id] = Chains()
        self.keeping.expect(request)
        if not request.abort_immediately:
            self.untagged.note(request.kv_transfer_params)
        wanted: Wanted | None = None
        try:
            wanted = self._read_params(request.kv_transfer_params)
            if isinstance(wanted, LoadWanted | RendezvousWanted):
                self._load(request, wanted)
                return
            if isinstance(wanted, OfferWanted) and not self._settings.produces:
                raise TicketInvalid("do_remote_decode is true, but the kv_role of this engine is kv_consumer")
        except KvflowError as error:
            request.kv_transfer_params = {}  # vLLM reads this field too, and expects a dict
            ticket = wanted.ticket if isinstance(wanted, LoadWanted) else None
            self.loading.refuse(request_id, error, wanted=prompt, ticket=ticket)
            return
        if isinstance(wanted, OfferWanted) or self._is_prefill(request):
            request.max_tokens = 1  # whatever the API calls it: the blocks of further tokens fit no prompt
            self._leave_to_decode(request)
            trace = traceparent_of(getattr(request, "trace_headers", None))
            if isinstance(wanted, OfferWanted) and is_streamed(request):
                self.untagged.note_streamed(request_id)
            self.offering.announce(
                request_id,
                partial(self._contents.digests, request, block_sizes=self._block_sizes, chains=chains),
                partial(self._contents.grow, request, chains, self._block_sizes),
                num_tokens=request.num_prompt_tokens,
                asked=isinstance(wanted, OfferWanted),
                traceparent=trace,
            )
        self._seek(request)

    def _load(self, request: "Request", wanted: LoadWanted | RendezvousWanted) -> None:
        """Take a request that brings a ticket, or names the engine that has it. Raises KvflowError if it cannot."""
        request_id, prompt = request.request_id, request.num_prompt_tokens
        if not self._settings.consumes:
            raise TicketInvalid("do_remote_prefill is true, but the kv_role of this engine is kv_producer")
        if request.abort_immediately:  # the server rejected the request and sent no prompt
            if isinstance(wanted, LoadWanted):
                self.loading.give_back(request_id, wanted.ticket)
        elif is_further_prompt(request_id):  # the ticket covers the first prompt, which reads it
            self.untagged.note_further_prompt()
            request.kv_transfer_params = {}  # vLLM reads this field too, and expects a dict
        elif isinstance(wanted, LoadWanted):
            if wanted.rewritten:
                self._tell_rewritten(wanted.rewritten)
            self._contents.require(request, wanted.ticket, chains=self._chains[request_id])
            self.loading.announce(request_id, wanted.ticket, wanted=max(0, prompt - self._backoff))
        elif prompt > self._backoff:
            assert self._finder is not None
            sample = SAMPLE.fullmatch(request_id)
            name = sample["prompt"] if sample else request_id
            self._finder.meet(request, self._chains[request_id], wanted.endpoint, prompt - self._backoff, name)

    @guarded((0, False), _fail_matched)
    def matched(self, request: "Request", computed: int) -> tuple[int | None, bool]:
        """Return how many tokens after the computed ones can be loaded, and whether a load is needed.

        None: a source may still answer, or another request loads the same ticket.
        """
        if self._finder is not None:
            missing = request.num_prompt_tokens - computed
            if self._finder.is_asking(request.request_id, missing) or not self._has_met(request, self._finder):
                return None, False
            found = self._finder.take(request.request_id, computed)
            if found is not None:
                self.loading.fetch(request.request_id, found)
        matched = self.loading.matched(request.request_id, computed)
        return matched, bool(matched)

    def _has_met(self, request: "Request", finder: Finder) -> bool:
        """Take the ticket of a request that names its prefill engine; return False if it has to wait for room."""
        found, wanted = finder.met(request.request_id), request.num_prompt_tokens
        if found is None:
            return True
        if not isinstance(found, BaseException):
            if found.grants[0].is_open and not self._has_room(wanted):
                return False
            try:
                finder.require(request, self._chains[request.request_id], found)
                self.loading.announce(request.request_id, found, wanted=max(0, wanted - self._backoff))
                finder.forget(request.request_id)
                return True
            except KvflowError as error:
                found = error
        self._fail(found, request)
        if (unused := finder.forget(request.request_id)) is not None:
            self.loading.give_back(request.request_id, unused)
        return True

    def _has_room(self, num_tokens: int) -> bool:
        """Return whether a request may take blocks before its prompt is computed: such requests share a quarter."""
        waiting = self.loading.num_waiting_blocks
        needed = sum([-(-num_tokens // size) if size else 1 for size in self._block_sizes])
        if self._pool is None or not waiting:
            return True
        return bool(waiting + needed <= (self._pool.get_num_free_blocks() + waiting) * WAITING_SHARE)

    @guarded(None)
    def _seek(self, request: "Request") -> None:
        """Ask the sources for a prompt that this engine computes, unless vLLM must compute every token of it."""
        if self._finder is None or request.abort_immediately or request.get_skip_reading_prefix_cache():
            return
        hints = hinted_sources(request.kv_transfer_params, getattr(request, "kv_hints", None))
        self._finder.seek(request, self._chains[request.request_id], hints)

    @guarded(None, _fail_allocated)
    def allocated(self, request: "Request", blocks: "KVCacheBlocks", num_tokens: int) -> None:
        """Order the load of a request that has its blocks now."""
        self.loading.allocated(request.request_id, [writable(group) for group in blocks.blocks], num_tokens)

    @guarded((False, None))
    def on_finished(self, request: "Request", listed: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """Keep and offer the blocks of a request that has ended, or release the ticket that it did not use."""
        self._keep(request, listed)
        self._chains.pop(request.request_id, None)
        self.loading.finished(request.request_id)
        if self._finder is not None and (unused := self._finder.forget(request.request_id)) is not None:
            self.loading.give_back(request.request_id, unused)
        sample = self.offering.is_sample(request.request_id)
        if sample is None:
            return False, None
        num_tokens = request.num_computed_tokens - request.num_in_flight_tokens
        if sample and not self._backoff:
            num_tokens = min(num_tokens, request.num_prompt_tokens)  # samples differ after the prompt
        return self.offering.finished(
            request.request_id,
            listed,
            num_tokens=num_tokens,
            computed=request.status.name in ENDED_BY_ITSELF,
        )

    @guarded(None)
    def _keep(self, request: "Request", listed: Sequence[Sequence[int]]) -> None:
        """Keep the blocks of a request that has ended, unless its tokens are wrong."""
        if request.status.name == "FINISHED_ERROR":
            self.keeping.forget(request.request_id)
        else:
            num_tokens = min(request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens)
            chains = self._chains.get(request.request_id)
            digests = partial(self._contents.digests, request, block_sizes=self._block_sizes, chains=chains)
            unsettled = self._unsettled  # a draft model computes these with the tokens that follow
            self.keeping.keep(request.request_id, listed, digests, num_tokens=num_tokens - unsettled, step=self._step)

    @guarded(None)
    def _reuse(self, block: Any) -> None:
        self.keeping.on_reuse(block)

    def on_reported(self, received: Iterable[str] | None, sent: Iterable[str] | None) -> None:
        """Take the requests that the ranks have reported as received or sent, at the end of a step."""
        if self._finder is not None:
            self._finder.on_computed()
        for request_id in received or ():
            self._received(request_id)
        for request_id in sent or ():
            self._sent(request_id)

    @guarded(None)
    def on_refused(self, kept: Iterable[str]) -> None:
        """Take the kept leases that some rank has refused."""
        self.keeping.on_refused(kept)

    @guarded(None)
    def on_scheduled(self, output: Any, step: int) -> None:
        """Take what a step computes, and its number."""
        self._step = step if output.num_scheduled_tokens else self._step  # others write into no block
        self.offering.scheduled(output, step)
        self.keeping.scheduled(output)
        if self._finder is not None:
            if output.num_scheduled_tokens:
                self._finder.on_scheduled(sum(output.num_scheduled_tokens.values()))
            self._finder.pause(idle=not output.num_scheduled_tokens and not self.loading.begun())

    @guarded(False)
    def reset(self, scheduler: Any = None) -> bool:
        """End every offer, and drop every load; return whether all ranks have done so. Waits for them.

        With vLLM's ``scheduler``, which resets its own cache next, the blocks are free at once, and requests whose
        loads are dropped are computed, whatever ``kv_load_failure_policy`` says. Without it loads go on.
        """
        ended = self.end_kept()
        if self._finder is not None:
            self._finder.clear()
        loads = self.loading.begun() if scheduler is None else _dropped(scheduler, self.loading.reset())
        offers = self.offering.reset()
        void = tuple([name for name in (*(loads if scheduler else ()), *offers) if name not in self._ended])
        if void and self._void(void):
            self._ended.update(void)
            logger.info("kvflow: a reset has ended %d loads and %d offers", len(loads), len(offers))
        done = self._ended.issuperset([*loads, *offers])
        if done and scheduler is not None:
            # Beside kvflow another connector may use the blocks of an offer.
            alone = getattr(scheduler.connector, "_scheduler", None) is self
            _free(scheduler, [*loads, *(offers if alone else ())])
        return done and ended

    @guarded(False)
    def end_kept(self) -> bool:
        """End every kept lease; return whether all ranks have done so. Waits for them."""
        names = tuple(self.keeping.end_all())
        return not names or self._void(names)

    def _void(self, names: tuple[str, ...]) -> bool:
        self._resets.append(Reset(names))
        return self._early.reset(names)

    def take_commands(self) -> list[Command]:
        """Return the commands for the ranks since the last call."""
        resets, self._resets = self._resets, []
        halves = (self.loading, self.offering, self.keeping)
        return [*[command for half in halves for command in self._take_commands(half)], *resets]

    def take_counters(self) -> Counters | None:
        """Return the counters since the last call, or None if nothing was counted."""
        return self._tally.take()

    @guarded(())
    def _take_commands(self, half: Loading | Offering | Keeping) -> Iterable[Command]:
        return half.take_commands()

    @guarded(None)
    def _received(self, request_id: str) -> None:
        self._ended.discard(request_id)
        self.loading.received(request_id)

    @guarded(None)
    def _sent(self, request_id: str) -> None:
        self._ended.discard(request_id)
        self.offering.sent(request_id)

    def _tell_rewritten(self, names: Iterable[str]) -> None:
        """Log each field that a router has rewritten, once; kvflow does not act on such fields."""
        for name in set(names) - self._told_rewritten:
            self._told_rewritten.add(name)
            logger.info(
                "kvflow: a router has rewritten %s in kv_transfer_params. kvflow ignores it and uses the ticket",
                name,
            )

    def _is_prefill(self, request: "Request") -> bool:
        """Return whether a request without switches in its parameters is a prefill: it asks for one token.

        A client that asks for more tokens wants the answer of this engine, whose prompt must not be shortened.
        """
        if self._settings.offer != "always" or is_tagged(request.kv_transfer_params):
            return False
        return request.max_tokens == 1 and request.pooling_params is None

    def _leave_to_decode(self, request: "Request") -> None:
        """Drop the tokens at the end of a prompt that the decode engine computes.

        The list of prompt tokens may belong to the caller, so a shorter copy replaces it.
        """
        backoff = self._backoff
        if not backoff or request.num_prompt_tokens <= backoff or request.get_skip_reading_prefix_cache():
            return
        if request.prompt_token_ids is not None:
            request.prompt_token_ids = request.prompt_token_ids[:-backoff]
        if request.prompt_embeds is not None:
            request.prompt_embeds = request.prompt_embeds[:-backoff]
        del request._all_token_ids[-backoff:]  # noqa: SLF001 - vLLM offers no other way to shorten a request
        request.num_prompt_tokens -= backoff


def _dropped(scheduler: Any, loads: list[str]) -> list[str]:
    """Have vLLM's scheduler compute requests instead of using what is loaded or has been loaded; return those loads."""
    loaded = list(scheduler.finished_recving_kv_req_ids)
    for name in [*loads, *loaded]:
        request = scheduler.requests.get(name)
        if request is not None and not request.is_finished():
            request.num_computed_tokens = 0  # with the next line, what vLLM does for the policy ``recompute``
            scheduler.failed_recving_kv_req_ids.add(name)
    _free(scheduler, loaded)
    return loads


def _free(scheduler: Any, request_ids: Iterable[str]) -> None:
    for request in filter(None, map(scheduler.requests.get, request_ids)):
        scheduler._free_request_blocks(request)  # noqa: SLF001 - the only way that waits for a step in flight


def writable(blocks: Sequence[Any]) -> list[int]:
    """Return the ids of blocks; ``NULL_BLOCK`` for a block with a hash, which is filled and may be read by others."""
    ids, hashes = list(map(BLOCK_ID, blocks)), list(map(BLOCK_HASH, blocks))
    if hashes.count(None) == len(hashes):
        return ids
    return [block if known is None else NULL_BLOCK for block, known in zip(ids, hashes, strict=True)]


def transfer_groups(kv_cache_config: Any) -> tuple[TransferGroup, ...]:
    """Return the groups of vLLM's configuration whose blocks are transferred."""
    groups = kv_cache_config.transfer_groups
    return tuple(
        TransferGroup(index, named, group.kv_cache_spec, retained_tokens(group))
        for index, named, group in zip(kv_cache_config.transfer_group_ids, read_groups(groups), groups, strict=True)
    )


def prefill_backoff(groups: Sequence[TransferGroup], lookahead: int) -> int:
    """Return how many tokens at the end of a prompt the prefill engine must leave to the decode engine.

    The decode engine always computes the last token, to sample from it. With full attention, the prefill engine may
    compute that token too. A state, however, belongs to one token only, and a sliding window that has moved past the
    prompt may have lost the first token that the last token attends to.
    """
    moves_on = any(each.is_state or each.group.window for each in groups)
    return max(1 if moves_on else 0, lookahead - 1)
