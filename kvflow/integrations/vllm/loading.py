"""The consumer's part of the scheduler's side: requests that read their prompt from a ticket.

This module is pure: it takes what vLLM does with a request, and collects commands for the ranks. A request is
*announced* when it arrives, and *loading* from the time it has blocks until the ranks report it. Then it is forgotten,
and vLLM computes it if it comes again: it was preempted, or its load has failed.

A ticket is read once, because reading it ends its lease. If several requests have the same ticket, as the samples of
one prompt do (``n``), the first one loads it. The others *follow*: they wait, and use the blocks of the first one in
the prefix cache. vLLM sends samples one after the other. A sample that arrives after the load has ended is computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvflow import Ticket, events
from kvflow.errors import BlockRangeMismatch, KvflowError
from kvflow.ids import Newest
from kvflow.integrations.vllm.blocks import TransferGroup, loaded_blocks
from kvflow.integrations.vllm.logs import TEXT_MAX, warn
from kvflow.integrations.vllm.messages import Cancel, Command, Fail, Found, GiveBack, Load, RenewLeases
from kvflow.integrations.vllm.params import SAMPLE

SAMPLED_MAX = 1024  # number of prompts with samples to remember; the samples of a prompt arrive within a step or two


@dataclass(slots=True)
class _Load:
    """One request that reads its prompt, or whose ticket was refused."""

    end: int  # index after the last token to load; this engine may compute the last tokens of the prompt
    ticket: Ticket | None = None  # verified; None if the request was refused or follows another
    covered: int = 0  # tokens of the ticket
    refusal: KvflowError | None = None
    computed: int = 0  # tokens in the prefix cache when vLLM last asked
    loading: bool = False  # the ranks have the command and have not reported yet
    follows: str = ""  # request that loads the same ticket; empty if this request loads its own
    found: Found | None = None  # the ticket was not in the request: only the engine that keeps the blocks ends it
    num_blocks: int = 0  # that it holds while the ticket's blocks are being computed


class Loading:
    """Requests of one engine that read their prompts from other engines. Thread: the scheduler's.

    ``tokens_max`` is ``max_model_len`` of this engine.
    """

    def __init__(self, groups: Sequence[TransferGroup], tokens_max: int) -> None:
        self.groups = tuple(groups)
        self._tokens_max = tokens_max
        self._has_states = any(each.is_state for each in groups)
        self._loads: dict[str, _Load] = {}
        self._loaders: dict[tuple[bytes, ...], str] = {}
        self._sampled = Newest[str, None](SAMPLED_MAX)
        self._commands: list[Command] = []
        self._new: list[str] = []

    def announce(self, request_id: str, ticket: Ticket, *, wanted: int) -> None:
        """Take a request, and a verified ticket whose blocks hold its beginning; ``wanted`` tokens can be loaded."""
        if ticket.signed in self._loaders:
            self._loads[request_id] = _Load(wanted, follows=self._loaders[ticket.signed])
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
            self._loaders[ticket.signed] = request_id
            self._new.append(request_id)
            if sample is not None:
                self._sampled[sample["prompt"]] = None

    def fetch(self, request_id: str, found: Found) -> None:
        """Take a request whose beginning a source holds. It follows one that loads as much of the same ticket."""
        loader = self._loaders.get(found.ticket.signed, "")
        if loader and self._loads[loader].end >= found.num_tokens:
            self._loads[request_id] = _Load(found.num_tokens, follows=loader)
            return
        covered = max(found.ticket.grants[0].num_tokens)
        if covered > self._tokens_max:  # blocks that are not read would be listed, however many a source names
            return
        self._loads[request_id] = _Load(found.num_tokens, found.ticket, covered, found=found)
        self._loaders[found.ticket.signed] = request_id

    def refuse(self, request_id: str, error: KvflowError, *, wanted: int, ticket: Ticket | None = None) -> None:
        """Take a request that must fail or be computed here, as ``kv_load_failure_policy`` says.

        The request is handled as a failed load, because vLLM accepts no other failure of a single request. ``wanted``
        are the tokens of its prompt; a ticket is verified, but useless to it, and released.
        """
        warn("request %s is refused", request_id, error=error)
        self._loads[request_id] = _Load(wanted, refusal=error)
        if ticket is not None:
            self.give_back(request_id, ticket)

    def give_back(self, request_id: str, ticket: Ticket) -> None:
        """Release a ticket that a request does not use, unless another request loads it."""
        if ticket.signed not in self._loaders:
            self._commands.append(GiveBack(request_id, ticket))

    def fail(self, request_id: str, error: KvflowError, *, wanted: int) -> None:
        """Fail a request in any state, if it has asked for a load, and release its ticket."""
        load = self._loads.get(request_id)
        if load is not None and load.loading:
            self._commands.append(Cancel(request_id))
            return
        self._forget(request_id)
        self.refuse(request_id, error, wanted=wanted, ticket=load.ticket if load and not load.found else None)

    def matched(self, request_id: str, computed: int) -> int | None:
        """Return how many tokens after the computed ones can be loaded; None while another loads the same ticket."""
        load = self._loads.get(request_id)
        if load is None or load.loading:
            return 0
        if load.follows:
            return None if load.follows in self._loads else 0
        load.computed = computed
        return max(0, load.end - computed)

    def allocated(self, request_id: str, listed: Sequence[Sequence[int]], num_tokens: int) -> None:
        """Order the load of a request for which vLLM has allocated blocks: ``NULL_BLOCK`` for one that is filled.

        ``num_tokens`` is 0 if the prefix cache has all tokens of the ticket.
        """
        load = self._loads.get(request_id)
        if load is None or load.loading:
            return
        if not num_tokens:
            self._forget(request_id)
            self._commands += _releases(request_id, load)
            return
        try:
            if load.refusal is not None:
                raise load.refusal
            assert load.ticket is not None
            end = load.computed + num_tokens
            block_ids = loaded_blocks(self.groups, listed, end=end, num_tokens=load.covered)
            prefix = None
            if (found := load.found) is not None:
                held = found.source, found.num_tokens, num_tokens, found.asked_s
                prefix = events.PrefixFetched(load.ticket.request_id, request_id[:TEXT_MAX], *held)
            self._commands.append(Load(request_id, load.ticket, block_ids, prefix))
            if load.ticket.grants[0].is_open:
                load.num_blocks = sum([block >= 0 for ids in block_ids for block in ids])
        except KvflowError as error:
            if load.refusal is None:
                warn("request %s cannot be loaded", request_id, error=error)
            fail = Fail(request_id, error.code, error.message, error.remedy)
            self._commands += [fail, *_releases(request_id, load)]
        load.loading = True

    @property
    def num_waiting_blocks(self) -> int:
        """Blocks of requests whose prompts other engines may still compute."""
        return sum([load.num_blocks for load in self._loads.values()])

    def received(self, request_id: str) -> None:
        """Take the report of all ranks that a load has ended."""
        self._forget(request_id)

    def finished(self, request_id: str) -> None:
        """Take the end of a request, which has completed or was aborted in any state."""
        load = self._loads.get(request_id)
        if load is None:
            return
        if load.loading:
            # The ranks use its blocks until they report it, which also removes the entry.
            self._commands.append(Cancel(request_id))
            return
        self._forget(request_id)
        self._commands += _releases(request_id, load)

    def reset(self) -> list[str]:
        """Drop every load that the ranks do not know, so that its request is computed, and return those they know."""
        for request_id, load in list(self._loads.items()):
            if not load.loading and load.refusal is None:
                self._forget(request_id)
                self._commands += _releases(request_id, load)
        return self.begun()

    def begun(self) -> list[str]:
        """Return the requests whose loads the ranks have not reported yet."""
        return [request_id for request_id, load in self._loads.items() if load.loading]

    def take_commands(self) -> list[Command]:
        """Return the commands for the ranks since the last call.

        A request that gets no blocks in the step of its arrival may wait longer than its lease, so the lease is renewed
        from then on, and its producer knows that it has a reader.
        """
        if not (self._commands or self._new):
            return []
        loads = [(name, self._loads.get(name)) for name in self._new]
        held = [RenewLeases(name, load.ticket) for name, load in loads if load and load.ticket and not load.loading]
        commands = [*self._commands, *held]
        # Clear the lists last: a request whose command is lost would never end.
        self._commands, self._new = [], []
        return commands

    def _forget(self, request_id: str) -> None:
        load = self._loads.pop(request_id, None)
        if load is not None and load.ticket is not None and self._loaders.get(load.ticket.signed) == request_id:
            del self._loaders[load.ticket.signed]

    def _check_range(self, covered: int, wanted: int) -> None:
        """Refuse a ticket of more tokens than a request may have, or with the state of a token that is of no use."""
        if covered > self._tokens_max:
            raise BlockRangeMismatch(
                f"the ticket has {covered} tokens, but max_model_len of this engine is {self._tokens_max}",
                remedy="Set max_model_len of both engines to the same value.",
            )
        if self._has_states and covered > wanted > 0:
            raise BlockRangeMismatch(
                f"the ticket has the state after {covered} tokens, but the prompt needs the state after {wanted}",
                remedy="Send the prompt that was prefilled, with the kv_transfer_params of that prefill.",
            )


def _releases(request_id: str, load: _Load) -> list[Command]:
    return [] if load.ticket is None or load.found is not None else [GiveBack(request_id, load.ticket)]
