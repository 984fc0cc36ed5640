"""Hugging Face transformers' continuous batching offers, reads, keeps and finds KV cache with kvflow.

Written for transformers 5.24: what it uses there is not public, and changes from release to release. Of kvflow it uses
public names alone. Tickets and digests are those of KVFlowConnector: either engine reads what the other computes.

    with serve(model, config, ContinuousBatchingConfig(page_size=16)) as (manager, transfers):
        answer = transfers.ask("request-1", prompt, {"do_remote_decode": True})  # a future of ``kv_transfer_params``
        manager.add_request(prompt, "request-1", max_new_tokens=1)

An offer holds blocks in a block table of transformers, under a name that no request has. What is read comes into blocks
of its pool, which get the hashes of their tokens when all bytes have arrived: transformers then finds them as a prefix
that it has computed. All runs on the manager's thread, between two batches, unless it says otherwise.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler

import kvflow
from kvflow.contents import Contents, TokenIds
from kvflow.errors import KvflowError, SpecInvalid
from kvflow.routing import LoadWanted, OfferWanted, RendezvousWanted, read_params

FULL = "full_attention"  # transformers' name of the only kind of cache that its requests share
MEET_S = 10.0  # how long a request waits until the engine that it names offers its prompt


def adopt(cache: PagedAttentionCache) -> kvflow.KVCache:
    """Describe transformers' cache: ``[block, layer, keys or values, token, head, content]``, with vLLM's layer names.

    Raises:
        SpecInvalid: the model has sliding windows, which transformers keeps in a ring that only one request reads.
    """
    if list(cache.cache_allocators) != [FULL]:
        raise SpecInvalid(f"the model has {list(cache.cache_allocators)}: only {FULL} can be shared")
    full = cache.cache_allocators[FULL]
    heads, size, page = full.num_key_value_heads, full.head_dim, full.tokens_per_page
    blocks = cache.cache_tensor.view(cache.dtype).view(-1, len(full.layer_indices), 2, page, heads, size)
    dtype = str(cache.dtype).removeprefix("torch.")
    spec = kvflow.FullAttention(block_size=page, num_kv_heads=heads, head_size=size, dtype=dtype)
    tensors = {f"model.layers.{layer}.self_attn.attn": blocks[:, at] for at, layer in enumerate(full.layer_indices)}
    specs = dict.fromkeys(tensors, spec)
    return kvflow.adopt(tensors, specs, axes=dict.fromkeys(tensors, "BKNHC"))


class TransferScheduler(FIFOScheduler):
    """transformers' scheduler, which tells ``Transfers`` of its requests."""

    transfers: "Transfers"

    def add_waiting_request(self, state: RequestState) -> None:
        """Take a request, unless it first waits for what others have computed."""
        if not self.transfers.holds_back(state):
            super().add_waiting_request(state)

    def has_pending_requests(self) -> bool:
        """Return whether a request runs or waits, also for others."""
        return super().has_pending_requests() or bool(self.transfers.waiting)

    def set_request_cancellation(self, request_id: str) -> None:
        """End a request that its client no longer wants."""
        super().set_request_cancellation(request_id)
        self.transfers.cancel(request_id)

    def clear_cancelled_requests(self) -> list[RequestState]:
        """Do what is due between two batches: transformers calls this before each."""
        cancelled = super().clear_cancelled_requests()
        for state in cancelled:
            self.transfers.finish(state)
        self.transfers.step()
        return cancelled

    def finish_request(self, request_id: str) -> None:
        """Free the blocks of a request that has ended, unless they are offered."""
        if state := self.active_requests.get(request_id):
            self.transfers.finish(state)
        super().finish_request(request_id)


@dataclass(slots=True)
class Asked:
    """What a client asks of one request: what it wants, and how many tokens its prompt has."""

    wanted: OfferWanted | LoadWanted | RendezvousWanted | None = None
    num_tokens: int = 0
    answer: "Future[dict[str, Any] | None]" = field(default_factory=Future)  # ``kv_transfer_params``
    offer: kvflow.OpenOffer | None = None
    told: int = 0  # blocks of the open offer


class Transfers:
    """All transfers of one manager.

    ``wake`` ends its wait for requests. ``sources``: control endpoints of engines that keep what they have computed;
    ``keep``: whether this one does. ``early``: whether a prompt is offered before it is computed.
    """

    def __init__(
        self,
        worker: kvflow.ThreadedWorker,
        key: kvflow.TicketKey,
        scheduler: TransferScheduler,
        wake: Callable[[], None],
        *,
        sources: Sequence[str] = (),
        keep: bool = False,
        early: bool = False,
    ) -> None:
        self.worker, self._key, self._scheduler, self._wake = worker, key, scheduler, wake
        self._start = partial(FIFOScheduler.add_waiting_request, scheduler)
        self._contents = Contents(key.content_keys())
        self._sources, self._keep, self._early = sources, keep, early
        self._cache = scheduler.cache
        self._full = scheduler.cache.cache_allocators[FULL]
        self._size: int = self._full.tokens_per_page
        self._asked: dict[str, Asked] = {}
        self.waiting: dict[str, Future[Any]] = {}  # for what it finds, then until that is read
        self._searching: dict[str, RequestState] = {}
        self._reading: dict[str, tuple[RequestState, RequestState]] = {}  # and who has the blocks meanwhile
        self._readable: dict[str, set[int]] = {}  # blocks of leases that pin nothing
        self._threads = ThreadPoolExecutor(4, "finding")
        self._take = self._cache.pool.get_free_blocks
        self._cache.pool.get_free_blocks = self._taken  # all blocks that are written come from there

    def ask(self, request_id: str, prompt: Sequence[int], params: object) -> "Future[dict[str, Any] | None]":
        """Note what a client asks for; return the parameters of the answer. Call before ``add_request``. Thread: any.

        Raises:
            TicketInvalid: the parameters are malformed, or no member of the cluster has signed their ticket.
        """
        wanted = read_params(params, self._key.read, meets=True)
        asked = self._asked[request_id] = Asked(wanted, len(prompt))
        return asked.answer

    def holds_back(self, state: RequestState) -> bool:
        """Begin with what a request asks for; return whether it has to wait."""
        asked = self._asked.setdefault(state.request_id, Asked())
        match asked.wanted:
            case LoadWanted(ticket):
                asked.wanted = None  # transformers may begin again with a request
                return self._read(state, ticket, max(ticket.grants[0].num_tokens))
            case RendezvousWanted(endpoint):
                asked.wanted = None
                return self._search(state, self._meet, endpoint)
            case OfferWanted() if self._early and asked.offer is None:
                with suppress(KvflowError):  # then it is offered when it is computed
                    digests = self._digests(state.initial_tokens, asked.num_tokens)
                    asked.offer = self.worker.offer_progressive(
                        state.request_id, [[]], asked.num_tokens, digests=digests
                    )
                    asked.answer.set_result(asked.offer.ticket.to_router_params())
        if self._sources and len(state.initial_tokens) > self._size:
            return self._search(state, self._find)
        return False

    def step(self) -> None:
        """Do what is due between two batches."""
        for name in [name for name in self._searching if self.waiting[name].done()]:
            state, search = self._searching.pop(name), self.waiting.pop(name)
            found = (None, 0) if search.exception() else search.result()
            if name not in self._asked:  # cancelled
                if found[0] is not None:
                    self.worker.release(found[0])
            elif not self._read(state, *found):
                self._start(state)
        for end in self.worker.finished():
            if end.side == "consumer":
                del self.waiting[end.local_request_id]
                self._end_read(*self._reading.pop(end.local_request_id), is_read=end.error is None)
            else:
                self._cache.free_blocks(f"{end.request_id} offered")
        for name, asked in list(self._asked.items()):  # ``ask`` adds to it
            if asked.offer and (state := self._scheduler.active_requests.get(name)):
                self._advance(state, asked, asked.offer)

    def finish(self, state: RequestState) -> None:
        """Offer or keep what a request that ends has computed."""
        name = state.request_id
        self._cache.free_blocks(f"{name} read")
        asked = self._asked.pop(name, Asked())
        blocks = self._full.block_table.get(name)
        answer = None
        with suppress(KvflowError):  # another engine computes it then
            if blocks is None or state.status != RequestStatus.FINISHED:
                if asked.offer:
                    asked.offer.abort()
            elif asked.wanted:
                answer = self._offer(state, asked, blocks)
            elif self._keep:
                self._keep_blocks(state, blocks)
        if not asked.answer.done():
            asked.answer.set_result(answer)

    def cancel(self, request_id: str) -> None:
        """Forget a request that waits for others."""
        if request_id in self.waiting:
            self._asked.pop(request_id).answer.set_result(None)
        if request_id in self._reading:
            self.waiting[request_id].cancel()

    def _digests(self, tokens: Sequence[int], num_tokens: int) -> tuple[tuple[bytes, ...], ...]:
        """Return the digest of each block of the first tokens."""
        blocks = range(-(-num_tokens // self._size))
        return self._contents.digests(TokenIds(tokens), [blocks], [self._size], num_tokens)

    def _advance(self, state: RequestState, asked: Asked, offer: kvflow.OpenOffer) -> None:
        """Tell which blocks the batches so far have filled."""
        count = min(state.position_offset, asked.num_tokens) // self._size
        if count > asked.told:
            new = self._full.block_table[state.request_id][asked.told : count]
            self._readable.setdefault(state.request_id, set()).update(new)
            asked.told = count
            offer.advance(count * self._size, [new])

    def _offer(self, state: RequestState, asked: Asked, blocks: list[int]) -> dict[str, Any] | None:
        """Hold the blocks of a prompt until its lease ends."""
        name, count, params = state.request_id, -(-asked.num_tokens // self._size), None
        self._readable.pop(name, None)
        if asked.offer:
            held = asked.offer.seal([blocks[asked.told : count]])
        else:
            digests = self._digests(state.initial_tokens, asked.num_tokens)
            ticket = self.worker.offer(name, [blocks[:count]], asked.num_tokens, digests=digests)
            held, params = True, ticket.to_router_params()
        if held:
            self._full.block_table[f"{name} offered"] = self._full.block_table.pop(name)
        return params

    def _keep_blocks(self, state: RequestState, blocks: list[int]) -> None:
        """Let others find the whole blocks of a request; the last token has not been computed."""
        tokens = state.initial_tokens + state.generated_tokens
        count = (len(tokens) - 1) // self._size
        if count:
            digests = self._digests(tokens, count * self._size)
            self.worker.keep(state.request_id, [blocks[:count]], count * self._size, digests)
            self._end([name for name, kept in self._readable.items() if kept <= {*blocks} and name not in self._asked])
            self._readable[state.request_id] = set(blocks[:count])

    def _taken(self, index: int, num_blocks: int) -> list[int]:
        """Take blocks from transformers' pool, and end the leases under which others still read them."""
        blocks = self._take(index, num_blocks)
        self._end([name for name, readable in self._readable.items() if not readable.isdisjoint(blocks)])
        return blocks

    def _end(self, names: list[str]) -> None:
        for name in names:
            self.worker.revoke(name)
            del self._readable[name]

    def _search(self, state: RequestState, call: Callable[..., tuple[kvflow.Ticket, int]], *args: str) -> bool:
        search = self._threads.submit(call, state.initial_tokens, *args)
        self._searching[state.request_id], self.waiting[state.request_id] = state, search
        search.add_done_callback(lambda _: self._wake())
        return True

    def _find(self, prompt: Sequence[int]) -> tuple[kvflow.Ticket, int]:
        """Return the ticket of the source that holds most of a prompt, and how many tokens. Thread: any."""
        best: tuple[kvflow.Ticket | None, int] = None, 0
        for source in self._sources:
            size = self.worker.read_manifest(source).result().groups[0].block_tokens
            num_tokens = (len(prompt) - 1) // size * size
            digests = self._contents.digests(TokenIds(prompt), [range(num_tokens // size)], [size], num_tokens)
            ticket, count = self.worker.find(source, digests).result()
            best = max(best, (ticket, count * size), key=lambda found: found[1])
        return best

    def _meet(self, prompt: Sequence[int], endpoint: str) -> tuple[kvflow.Ticket, int]:
        """Wait until another engine offers a prompt. Thread: any."""
        size = self.worker.read_manifest(endpoint).result().groups[0].block_tokens
        last = self._contents.digests(TokenIds(prompt), [(0,)], [size], len(prompt))  # it stands for all before
        ticket, _ = self.worker.find(endpoint, last, MEET_S).result()
        return ticket, len(prompt)

    def _read(self, state: RequestState, ticket: kvflow.Ticket | None, num_tokens: int) -> bool:
        """Begin to read a prompt's whole blocks that are not in our cache; return whether there are any."""
        if ticket is None:
            return False
        prompt, size, covered = state.initial_tokens, self._size, max(ticket.grants[0].num_tokens)
        count = min(num_tokens, len(prompt) - 1) // size  # the last token has to be computed
        blocks = RequestState(f"{state.request_id} read", prompt[: count * size])
        with suppress(KvflowError):  # then the prompt is computed
            self._contents.require(TokenIds(prompt), ticket, num_tokens)
            blocks.position_offset = self._cache.search_prefix_match(blocks.request_id, prompt[: count * size + 1])
            missing = count * size - blocks.position_offset
            if missing > 0 and self._cache.can_store_request_tokens(blocks, missing):
                ids = self._full.block_table[blocks.request_id][-(missing // size) :]
                ids += [-1] * (-(-covered // size) - count)
                pull = self.worker.pull(ticket, [ids], local_request_id=state.request_id)
                self._reading[state.request_id], self.waiting[state.request_id] = (state, blocks), pull
                pull.add_done_callback(lambda _: self._wake())
                return True
        self._cache.free_blocks(blocks.request_id)
        self.worker.release(ticket)
        return False

    def _end_read(self, state: RequestState, blocks: RequestState, *, is_read: bool) -> None:
        """Let transformers find the blocks that have been read, and take the request that waits for them."""
        if is_read:
            new = (len(blocks.initial_tokens) - blocks.position_offset) // self._size
            self._cache.mark_complete_blocks(blocks, {FULL: new})
        if not is_read or state.request_id not in self._asked:
            self._cache.free_blocks(blocks.request_id)
        if state.request_id in self._asked:
            self._start(state)


@contextmanager
def serve(
    model: PreTrainedModel, config: kvflow.WorkerConfig, batching: ContinuousBatchingConfig, **transfers: Any
) -> Iterator[tuple[Any, Transfers]]:
    """Run a model; yield transformers' manager and its transfers. ``transfers``: further arguments of ``Transfers``."""
    SCHEDULER_MAPPING["kvflow"] = TransferScheduler
    batching.scheduler_type = "kvflow"
    batching.use_async_batching = False  # what a batch has written is there when the next one is prepared
    manager = model.init_continuous_batching(GenerationConfig(do_sample=False, eos_token_id=-1), batching)
    manager.warmup()  # allocates the cache
    scheduler = manager.batch_processor.scheduler
    with kvflow.run_worker(config, adopt(scheduler.cache)) as worker:
        key, wake = kvflow.TicketKey.of(config), manager._wake_up_loop.set  # noqa: SLF001
        scheduler.transfers = Transfers(worker, key, scheduler, wake, **transfers)
        manager.start()
        try:
            yield manager, scheduler.transfers
        finally:
            manager.stop()
