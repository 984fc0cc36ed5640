"""The consumer's side of the scheduler: which requests read their prompt from a ticket, and how far they are.

Pure: it is told what the engine does with a request, and collects orders for the workers.

A request is *announced* when it arrives, *loading* from the moment it has blocks to load into until the workers report
it, and forgotten after that: whatever the engine asks of a request that is not known here, the answer is that there is
nothing to load. That is how a request goes on that was preempted, or whose load has failed.

A ticket is read once: reading it ends its lease. Where several requests have the same one, as the samples of one
prompt do (``n``), the first loads it, and the others *follow*: they wait, and take what it leaves in the prefix cache.
A sample that arrives when that is over is computed: vLLM sends them one by one, and a short prompt is read sooner.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvflow import Ticket
from kvflow.errors import BlockRangeMismatch, KvflowError
from kvflow.integrations.vllm.blocks import TransferGroup, loaded_blocks
from kvflow.integrations.vllm.orders import Cancel, Fail, Keep, Order, Pull, Release

logger = logging.getLogger("vllm.kvflow")  # vLLM shows what stands below its own name

SAMPLE = re.compile(r"\d+_(?P<prompt>.+)", re.DOTALL)
"""vLLM names a sample after the request of its prompt, behind its number; other requests have no number before them."""

SAMPLED_MAX = 1024
"""Prompts with samples that are remembered. Their samples arrive within a step or two."""


@dataclass(slots=True)
class _Load:
    """One request that reads its prompt, or was refused to.

    Attributes:
        end: one past the last token that is loaded: the last one of the prompt may be left for us to compute.
        ticket: verified; None if the request was refused, or follows another.
        covered: tokens of the ticket.
        refusal: why, if it was refused.
        computed: tokens that were in our cache when the engine asked last.
        loading: whether workers were told, and have not reported yet.
        follows: request that loads the same ticket; empty if this one loads its own.
    """

    end: int
    ticket: Ticket | None = None
    covered: int = 0
    refusal: KvflowError | None = None
    computed: int = 0
    loading: bool = False
    follows: str = ""


class Loading:
    """Requests of one engine that read their prompts from others.

    Args:
        groups: those whose blocks travel.
        tokens_max: of the longest request that this engine can hold.

    Attributes:
        groups: those whose blocks travel.

    Thread: the scheduler's.
    """

    def __init__(self, groups: Sequence[TransferGroup], tokens_max: int) -> None:
        self.groups = tuple(groups)
        self._tokens_max = tokens_max
        self._has_states = any(each.is_state for each in groups)
        self._loads: dict[str, _Load] = {}
        self._loaders: dict[tuple[bytes, ...], str] = {}
        self._sampled: dict[str, None] = {}
        self._orders: list[Order] = []
        self._new: list[str] = []
        self._waited: list[str] = []

    def announce(self, request_id: str, ticket: Ticket, *, wanted: int) -> None:
        """Take a request with a ticket.

        Args:
            request_id: the engine's name of it.
            ticket: verified, and its blocks hold the beginning of this request.
            wanted: tokens of the prompt that can be of use.
        """
        if ticket.sealed in self._loaders:
            self._loads[request_id] = _Load(wanted, follows=self._loaders[ticket.sealed])
            return
        sample = SAMPLE.fullmatch(request_id)
        if sample is not None and sample["prompt"] in self._sampled:
            return
        covered = max(ticket.grants[0].num_tokens)
        try:
            self._check_range(covered, wanted)
        except KvflowError as error:
            self.refuse(request_id, error, wanted=wanted, ticket=ticket)
        else:
            self._loads[request_id] = _Load(min(wanted, covered), ticket, covered)
            self._loaders[ticket.sealed] = request_id
            self._new.append(request_id)
            if sample is not None:
                self._remember(sample["prompt"])

    def refuse(self, request_id: str, error: KvflowError, *, wanted: int, ticket: Ticket | None = None) -> None:
        """Take a request that must fail, or be computed here: as ``kv_load_failure_policy`` says.

        It goes the way of a load that fails, because that is what an engine can be told of a single request.

        Args:
            request_id: the engine's name of it.
            error: why.
            wanted: tokens of its prompt.
            ticket: verified, and of no use to this request: it is given back.
        """
        logger.warning("kvflow: request %s is refused: %s", request_id, error)
        self._loads[request_id] = _Load(wanted, refusal=error)
        if ticket is not None:
            self.give_back(request_id, ticket)

    def give_back(self, request_id: str, ticket: Ticket) -> None:
        """Give a ticket back that a request will not use, unless another request loads it."""
        if ticket.sealed not in self._loaders:
            self._orders.append(Release(request_id, ticket))

    def fail(self, request_id: str, error: KvflowError, *, wanted: int) -> None:
        """Have a request fail in whatever state it is, as far as it has asked for a load; give its ticket back."""
        load = self._loads.get(request_id)
        if load is not None and load.loading:
            self._orders.append(Cancel(request_id))
            return
        self._forget(request_id)
        self.refuse(request_id, error, wanted=wanted, ticket=load.ticket if load else None)

    def matched(self, request_id: str, computed: int) -> int | None:
        """Return how many tokens behind those that are computed can be loaded; changes nothing that counts.

        Returns:
            None while that cannot be said, because another request loads the ticket: the engine asks again.
        """
        load = self._loads.get(request_id)
        if load is None or load.loading:
            return 0
        if load.follows:
            return None if load.follows in self._loads else 0
        load.computed = computed
        return max(0, load.end - computed)

    def allocated(self, request_id: str, listed: Sequence[Sequence[int]], num_tokens: int) -> None:
        """Order what the engine has made room for.

        Args:
            request_id: the engine's name of the request.
            listed: its block ids, one list for each of vLLM's groups, ``NULL_BLOCK`` for what is in our cache already.
            num_tokens: to load; 0 if all that the ticket covers is computed already.
        """
        load = self._loads.get(request_id)
        if load is None or load.loading:
            return
        if not num_tokens:
            self._forget(request_id)
            self._orders += _releases(request_id, load)
            return
        try:
            if load.refusal is not None:
                raise load.refusal
            assert load.ticket is not None
            end = load.computed + num_tokens
            block_ids = loaded_blocks(self.groups, listed, end=end, num_tokens=load.covered)
            self._orders.append(Pull(request_id, load.ticket, block_ids))
        except KvflowError as error:
            if load.refusal is None:
                logger.warning("kvflow: request %s cannot be loaded: %s", request_id, error)
            fail = Fail(request_id, error.code, error.message, error.remedy)
            self._orders += [fail, *_releases(request_id, load)]
        load.loading = True

    def received(self, request_id: str) -> None:
        """Note that all workers have reported a request."""
        self._forget(request_id)

    def finished(self, request_id: str) -> None:
        """Note that a request has ended: by itself, or aborted at any stage."""
        load = self._loads.get(request_id)
        if load is None:
            return
        if load.loading:
            # Its blocks are the workers' until they report it; that ends the entry as well.
            self._orders.append(Cancel(request_id))
            return
        self._forget(request_id)
        self._orders += _releases(request_id, load)

    def take_orders(self) -> list[Order]:
        """Return what the workers must be told, once.

        A request that got no room in the step of its arrival waits, maybe for longer than its lease: that is kept from
        the next step on. Most requests need not wait, and cost no message.
        """
        if not (self._orders or self._waited or self._new):
            return []
        orders = self._orders
        if self._waited:
            waiting = [(name, self._loads.get(name)) for name in self._waited]
            kept = [Keep(name, load.ticket) for name, load in waiting if load and load.ticket and not load.loading]
            orders = [*orders, *kept]
        # Nothing is forgotten before everything is made: a request whose order is lost would never end.
        self._orders, self._waited, self._new = [], self._new, []
        return orders

    def _remember(self, prompt: str) -> None:
        self._sampled[prompt] = None
        if len(self._sampled) > SAMPLED_MAX:
            del self._sampled[next(iter(self._sampled))]

    def _forget(self, request_id: str) -> None:
        load = self._loads.pop(request_id, None)
        if load is not None and load.ticket is not None:
            self._loaders.pop(load.ticket.sealed, None)

    def _check_range(self, covered: int, wanted: int) -> None:
        """Refuse a ticket of more tokens than this engine holds, or whose state is of a later token than we can use.

        Raises:
            BlockRangeMismatch: it is.
        """
        if covered > self._tokens_max:
            raise BlockRangeMismatch(
                f"the ticket has {covered} tokens, and a request of this engine at most {self._tokens_max}",
                remedy="Set max_model_len of both engines to the same value.",
            )
        if self._has_states and covered > wanted > 0:
            raise BlockRangeMismatch(
                f"the ticket has the state after {covered} tokens, and the prompt can use that after {wanted}",
                remedy="Send the prompt that was prefilled, with the parameters of its own prefill.",
            )


def _releases(request_id: str, load: _Load) -> list[Order]:
    return [] if load.ticket is None else [Release(request_id, load.ticket)]
