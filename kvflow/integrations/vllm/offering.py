"""The producer's part of the scheduler's side: requests whose blocks other engines may read.

This module takes what vLLM does with a request, signs tickets, and collects commands for the ranks.

vLLM divides a call with several samples (``n``) or several prompts into several requests, but answers one ticket: that
of the first prompt, and among its samples that of the last one to end. The offer of any other request would hold its
blocks until its lease expires. So a sample offers nothing while another sample of its prompt runs. vLLM sends samples
one after the other, and a short prompt may end before the next sample arrives: later samples then answer the same
ticket.
"""

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import lcm
from queue import SimpleQueue
from typing import Any

from msgspec import Struct

from kvflow import Grant, RankAddress, Ticket, TicketMint
from kvflow.contents import DigestLists
from kvflow.errors import KvflowError
from kvflow.integrations.vllm.blocks import NULL_BLOCK, TransferGroup, offered_blocks
from kvflow.integrations.vllm.logs import logger, warn
from kvflow.integrations.vllm.messages import BlocksByGroup, Command, End, Hold, Ordered, Tell
from kvflow.integrations.vllm.params import SAMPLE
from kvflow.routing import no_ticket_params

MintTickets = Callable[[Sequence[RankAddress]], TicketMint]
Send = Callable[[Ordered], None]  # ``EarlyAdmission.send``

PROMPT_NAME = re.compile(r"(?P<call>cmpl-.+)-(?P<number>\d{1,6})(-[0-9a-f]{8})?", re.DOTALL)
"""vLLM's name of a prompt of ``/v1/completions``: all prompts of a call have it, up to their number and some digits."""

PROMPT_STARTS = ("cmpl-", *"0123456789")  # start of the name of such a prompt, or of a sample of it

NEVER = 1 << 53  # more tokens than any prompt has

SPECULATIVE_SHARE = 0.5
"""Share of the engine's blocks, and of its lease slots, that speculative offers may hold: those no client asked for."""


class _ClientCall(Struct, frozen=True):
    """The call from which vLLM made a request."""

    prompt: str  # name that all samples of one prompt share
    sampled: bool  # the request is one of several samples
    call: str  # name that all prompts of one call share; empty if the request is not of ``/v1/completions``
    number: int  # of the prompt in its call
    asked: bool  # the client has asked for a ticket
    traceparent: str = ""

    @classmethod
    def of(cls, request_id: str, *, asked: bool, traceparent: str = "") -> "_ClientCall":
        """Read the name that vLLM gave to a request."""
        sample = SAMPLE.fullmatch(request_id)
        prompt = sample["prompt"] if sample else request_id
        named = PROMPT_NAME.fullmatch(prompt)
        call, number = (named["call"], int(named["number"])) if named else ("", 0)
        sampled = sample is not None
        return cls(prompt, sampled=sampled, call=call, number=number, asked=asked, traceparent=traceparent)


def is_further_prompt(request_id: str) -> bool:
    """Return whether a request is a second or later prompt of a call: vLLM answers no ticket for it."""
    # Most requests have other names: skip the regular expressions for them.
    return request_id.startswith(PROMPT_STARTS) and _ClientCall.of(request_id, asked=False).number > 0


@dataclass(slots=True)
class _Prefill:
    """A request whose blocks are to be offered."""

    call: _ClientCall
    digests: Callable[..., DigestLists]  # block ids, ``num_tokens`` -> digests of the blocks
    grow: Callable[[int], None]  # computes the digests of the blocks that the first tokens fill
    num_tokens: int  # of its prompt
    step: int = 0  # the last one that computed it
    listed: list[list[int]] = field(default_factory=list)  # its blocks, as far as they were allocated
    signed: tuple[Ticket, dict[str, Any], DigestLists] | None = None  # when it arrives, or while its last step computes
    told: int = -1  # tokens that the ranks know, or will, when the last step has written; -1: no lease is open


class Offering:
    """Requests of one engine whose blocks other engines may read.

    While a step computes the end of a prompt, another thread signs its ticket. That thread also has the ranks hold the
    lease when the request has ended. If the request ends with other blocks or tokens than expected, or before its
    ticket is signed, the scheduler's thread signs one.

    With ``renew_s``, seconds after which leases are renewed, a request that asks is offered when it arrives, and peers
    find it by its digests. Each step says how far it computes; the last ``unsettled`` tokens are computed once more.
    A preemption ends the lease, and opens another. Samples, and further prompts of a call, are offered at their end.
    Unless it ``settles``, nothing of a prompt is read before it has ended: an engine that writes into the blocks of a
    preempted request before it ends the lease must not say more.

    Thread: the scheduler's.
    """

    def __init__(
        self,
        groups: Sequence[TransferGroup],
        mint: MintTickets,
        num_blocks: int,
        send: Send,
        *,
        renew_s: float | None = None,
        unsettled: int = 0,
        settles: bool = True,
    ) -> None:
        self.groups = tuple(groups)
        sizes = [each.group.block_size for each in groups if settles and each.group.settles]
        self._whole = lcm(*sizes) if sizes else NEVER  # tokens that fill whole blocks
        self._renew_s, self._renewed_at, self._unsettled = renew_s, time.monotonic(), unsettled
        self._make_mint = mint
        self._send = send
        self._lock = threading.Lock()  # of the mint, and of signed tickets
        self._mint: TicketMint | None = None
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._wanted: dict[str, _Prefill] = {}
        self._held: dict[str, _ClientCall] = {}
        self._answered: dict[str, dict[str, Any]] = {}
        self._speculative = _Speculative(num_blocks)
        self._ordering = threading.Lock()
        self._commands: list[Command] = []
        self._num_ordered = 0

    def meet_ranks(self, ranks: Sequence[RankAddress]) -> None:
        """Take the addresses of the ranks."""
        with self._lock:
            self._mint = self._make_mint(sorted(ranks, key=lambda address: address.rank))
            for request_id, wanted in self._wanted.items():
                self._drop(request_id, wanted)

    def close(self) -> None:
        """End the other thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join()

    def announce(
        self,
        request_id: str,
        digests: Callable[..., DigestLists],
        grow: Callable[[int], None],
        *,
        num_tokens: int,
        asked: bool = True,
        traceparent: str = "",
    ) -> None:
        """Take a request whose blocks are to be offered when its prompt of ``num_tokens`` is computed.

        Offers that no client has ``asked`` for are limited to ``SPECULATIVE_SHARE``.
        """
        origin = _ClientCall.of(request_id, asked=asked, traceparent=traceparent)
        wanted = self._wanted[request_id] = _Prefill(origin, digests, grow, num_tokens)
        self._start()
        self._open_soon(request_id, wanted)

    @property
    def slots(self) -> int:
        """Number of leases that the ranks can hold; 0 before they have reported their addresses."""
        return 0 if self._mint is None else self._mint.slots

    def submit(self, job: Callable[[], object]) -> None:
        """Have the other thread do a job, behind those before it."""
        self._start()
        self._jobs.put(job)

    def sign_kept(self, name: str, block_ids: BlocksByGroup, num_tokens: int, digests: DigestLists) -> Grant:
        """Sign the grant of a kept lease. Thread: any."""
        with self._lock:
            assert self._mint is not None  # there are slots
            return self._mint.keep(name, block_ids=block_ids, num_tokens=num_tokens, digests=digests)[1]

    def retire(self, request_id: str) -> None:
        """Free the slot of a lease that has ended. Thread: any."""
        with self._lock:
            if self._mint is not None:
                self._mint.retire(request_id)

    def scheduled(self, output: Any, step: int) -> None:
        """Take vLLM's ``SchedulerOutput`` of a step, and the number of the step."""
        for name in (output.preempted_req_ids or ()) & self._wanted.keys():  # first, whatever happens next
            with self._lock:
                self._drop(name, self._wanted[name])
            self._wanted[name].listed = [[] for _ in self._wanted[name].listed]
            self._open_soon(name, self._wanted[name])
        counts, known, new = output.num_scheduled_tokens, output.scheduled_cached_reqs, output.scheduled_new_reqs
        wanted = {name: self._wanted[name] for name in self._wanted.keys() & counts.keys()}
        if not wanted:
            return
        for each in wanted.values():
            each.step = step
        for request in new:
            if request.req_id in wanted:
                wanted[request.req_id].listed = [[] for _ in request.block_ids]
        computed = [*zip(known.req_ids, known.num_computed_tokens, known.new_block_ids, strict=True)]
        computed += [(each.req_id, each.num_computed_tokens, each.block_ids) for each in new]
        for name, before, block_ids in computed:  # in the order in which the requests will end
            if name in wanted:
                for listed, more in zip(wanted[name].listed, block_ids or (), strict=False):
                    listed.extend(more)
                self._tell(name, wanted[name], before, before + counts[name])

    def is_sample(self, request_id: str) -> bool | None:
        """Return whether a request is one of several samples of its prompt; None if it was not announced."""
        wanted = self._wanted.get(request_id)
        return None if wanted is None else wanted.call.sampled

    def finished(
        self, request_id: str, listed: Sequence[Sequence[int]], *, num_tokens: int, computed: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """Offer the blocks of a request that has ended.

        Args:
            request_id: in this engine.
            listed: block ids of each group of vLLM.
            num_tokens: whose keys, values or states are in the blocks.
            computed: the request has completed, and was not aborted.

        Returns:
            Whether vLLM must keep the blocks until the ranks report the request as sent, and the parameters for the
            router: None for a request without a transfer, or one whose parameters vLLM would not answer.
        """
        with self._lock:
            wanted = self._wanted.pop(request_id, None)
        if wanted is None:
            return False, None
        origin = wanted.call
        try:
            if not computed or not num_tokens or not any(listed) or self._is_surplus(origin):
                return False, None
            if origin.sampled and origin.prompt in self._answered:
                return False, dict(self._answered[origin.prompt])
            return self._offer(request_id, wanted, listed, num_tokens) or (False, no_ticket_params())
        finally:
            if request_id not in self._held:
                with self._lock:
                    self._drop(request_id, wanted)
                self._speculative.give(request_id)

    def sent(self, request_id: str) -> None:
        """Take the report that the lease of a request has ended on every rank."""
        self.retire(request_id)
        origin = self._held.pop(request_id, None)
        if origin is not None:
            self._answered.pop(origin.prompt, None)
            self._speculative.give(request_id)

    def reset(self) -> list[str]:
        """Answer no offer again, and return the requests whose offers the ranks have not reported as sent."""
        self._answered.clear()
        with self._lock:
            for request_id, wanted in self._wanted.items():
                self._drop(request_id, wanted)
        return list(self._held)

    def take_commands(self) -> list[Command]:
        """Return the commands for the ranks since the last call."""
        with self._ordering:
            commands, self._commands = self._commands, []
        return commands

    def _is_surplus(self, origin: _ClientCall) -> bool:
        """Return whether vLLM answers the parameters of another request of the same call."""
        if not (origin.number or origin.sampled):
            return False
        running = [each.call for each in self._wanted.values()]
        firsts = [each.call for each in (*running, *self._held.values()) if not each.number]
        behind = origin.number > 0 and origin.call in firsts
        return behind or (origin.sampled and origin.prompt in [each.prompt for each in running])

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="kvflow-tickets", daemon=True)
            self._thread.start()

    def _drop(self, request_id: str, wanted: _Prefill) -> None:
        """End an open lease, and give back the slot of a ticket that is not answered. The caller holds the lock."""
        if wanted.told >= 0:
            self._order(End, (request_id,))
        if wanted.signed is not None and self._mint is not None:
            self._mint.retire(request_id)
        wanted.signed, wanted.told = None, -1

    def _work(self) -> None:
        while True:
            with suppress(Exception):  # the scheduler's thread, or the command of the next step, does the same
                self._renew()
                if (job := self._jobs.get(timeout=self._renew_s)) is None:
                    return
                job()

    def _prepare(self, request_id: str, wanted: _Prefill, end: int) -> None:
        """Sign the ticket of a prompt, or compute the digests of its blocks that are full, while a step computes it."""
        wanted.grow(min(end, wanted.num_tokens))
        with self._lock:
            is_last = end >= wanted.num_tokens and wanted.told < 0  # it may have been opened meanwhile
            if not is_last or wanted.call.sampled or self._wanted.get(request_id) is not wanted:
                return
            self._drop(request_id, wanted)  # if the request was preempted
            block_ids = offered_blocks(self.groups, wanted.listed, wanted.num_tokens)
            wanted.signed = self._sign(request_id, wanted, block_ids, wanted.num_tokens)

    def _open_soon(self, request_id: str, wanted: _Prefill) -> None:
        """Have the other thread offer a request before it is computed, if that is wanted."""
        if self._renew_s is not None and wanted.call.asked and not (wanted.call.sampled or wanted.call.number):
            self._jobs.put(partial(self._open, request_id, wanted))

    def _open(self, request_id: str, wanted: _Prefill) -> None:
        """Offer a request that has not ended."""
        wanted.grow(wanted.num_tokens)
        with self._lock:
            if self._wanted.get(request_id) is wanted and wanted.signed is None:
                wanted.signed = self._sign(request_id, wanted, None, wanted.num_tokens)
                self._order(Hold, request_id, wanted.signed[0].grants[0], 0, wanted.signed[2])
                wanted.told = 0  # only now: another thread orders what follows

    def _tell(self, request_id: str, wanted: _Prefill, before: int, end: int) -> None:
        """Say how far this step computes a request; a prefix that it found has settled when the step has written."""
        if wanted.told < 0:
            self._jobs.put(partial(self._prepare, request_id, wanted, end))
        elif before < wanted.told:  # vLLM computes again what failed to load
            with self._lock:
                self._drop(request_id, wanted)
        else:
            settled = min(end, wanted.num_tokens) - self._unsettled
            if (settled := settled - settled % self._whole) > wanted.told:
                block_ids = self._between(wanted.listed, wanted.told, settled)
                self._order(Tell, request_id, settled, block_ids, wanted.step)
                wanted.told = settled

    def _renew(self) -> None:
        """Renew the open leases, however long their requests wait for a step, or a step takes."""
        if self._renew_s is not None and time.monotonic() - self._renewed_at > self._renew_s:
            self._renewed_at = time.monotonic()
            with self._lock:
                for name in [name for name, each in list(self._wanted.items()) if each.told >= 0]:
                    self._order(Tell, name, 0, (), 0)

    def _between(self, listed: Sequence[Sequence[int]], first: int, end: int) -> BlocksByGroup:
        """Return the blocks of these tokens, of groups whose blocks are written once; none of others."""
        return tuple(
            tuple(listed[each.index][first // each.group.block_size : end // each.group.block_size])
            if each.group.settles
            else ()
            for each in self.groups
        )

    def _rest(self, wanted: _Prefill, block_ids: BlocksByGroup, num_tokens: int) -> BlocksByGroup | None:
        """Return the blocks that the ranks do not know; None if a request has ended with others than they know."""
        told = self._between(wanted.listed, 0, wanted.told)
        pairs = [(ids, len(known), known) for ids, known in zip(block_ids, told, strict=True)]
        if num_tokens != wanted.num_tokens or any(ids[:at] != known for ids, at, known in pairs):
            return None
        return tuple([ids[at:] for ids, at, _ in pairs])

    def _sign(
        self, request_id: str, wanted: _Prefill, block_ids: BlocksByGroup | None, num_tokens: int
    ) -> tuple[Ticket, dict[str, Any], DigestLists]:
        """Sign a ticket; an open one if it has no blocks yet. The caller holds the lock."""
        assert self._mint is not None
        trace = wanted.call.traceparent
        if block_ids is None:
            blocks = [1 if each.is_state else -(-num_tokens // each.group.block_size) for each in self.groups]
            digests = wanted.digests([(0,) * each for each in blocks], num_tokens=num_tokens)
            ticket, _ = self._mint.offer_progressive(request_id, [()] * len(blocks), num_tokens, digests, trace)
        else:
            digests = wanted.digests(block_ids, num_tokens=num_tokens)
            ticket, _ = self._mint.offer(
                request_id,
                block_ids=block_ids,
                num_tokens=num_tokens,
                digests=digests,
                chained=True,
                traceparent=trace,
            )
        try:
            params = ticket.to_router_params()
        except BaseException:
            self._mint.retire(request_id)
            raise
        if self._renew_s is None:
            return ticket, params, ()
        return ticket, params | {"transfer_mode": "push"}, digests

    def _offer(
        self, request_id: str, wanted: _Prefill, listed: Sequence[Sequence[int]], num_tokens: int
    ) -> tuple[bool, dict[str, Any] | None] | None:
        """Answer a ticket and order its admission; return the result of ``finished``, or None if there is no ticket."""
        origin, step = wanted.call, wanted.step
        if self._mint is None:
            logger.error("kvflow: request %s is not offered: no rank has reported its address", request_id)
            return None
        if not origin.asked and not self._speculative.take(request_id, listed, self._mint.slots):
            return None
        try:
            block_ids = offered_blocks(self.groups, listed, num_tokens)
            rest = self._rest(wanted, block_ids, num_tokens) if wanted.told >= 0 else None
            grant = wanted.signed[0].grants[0] if wanted.signed else None
            fits = rest or (grant and grant.num_tokens[0] == num_tokens and grant.block_ids == block_ids)
            if not (wanted.signed and fits):
                with self._lock:
                    self._drop(request_id, wanted)
                    wanted.signed = self._sign(request_id, wanted, block_ids, num_tokens)
        except KvflowError as error:
            warn("request %s is not offered", request_id, error=error)
            return None
        try:
            ticket, params, digests = wanted.signed
            if rest:
                params["remote_block_ids"] = [list(ids[-1:]) for ids in block_ids]
            offered = True, params
            self._held[request_id] = origin
            if origin.sampled:
                self._answered[origin.prompt] = params
            if rest:
                self._order(Tell, request_id, None, rest, step)
            else:
                self._order(Hold, request_id, ticket.grants[0], step, digests)
        except BaseException:
            # vLLM frees the blocks of a request that is not offered, so no lease of them may be admitted.
            self.retire(request_id)
            if self._held.pop(request_id, None) is not None:
                self._answered.pop(origin.prompt, None)
            raise
        return offered

    def _order(self, kind: Callable[..., Ordered], *fields: Any) -> None:
        """Give every rank a command, now and with the next step. Thread: any."""
        with self._ordering:
            command = kind(*fields, number=self._num_ordered + 1)
            self._commands.append(command)
            self._num_ordered += 1
            # From here on the command counts as given, because it comes with the step.
            try:  # noqa: SIM105 - contextlib.suppress is a call, which may fail where another has
                self._jobs.put(partial(self._send, command))
            except Exception:  # noqa: BLE001, S110 - the next step does the same
                pass


class _Speculative:
    """Blocks of offers that no client asked for: at most a share of the engine, because they may never be read."""

    def __init__(self, num_blocks: int) -> None:
        self._blocks_max = int(num_blocks * SPECULATIVE_SHARE)
        self._blocks: Counter[int] = Counter()  # requests may share a block of the prefix cache
        self._held: dict[str, frozenset[int]] = {}
        self._told = False

    def take(self, request_id: str, listed: Iterable[Sequence[int]], slots: int) -> bool:
        """Count the blocks of a request; return False, and count nothing, if they exceed the share."""
        blocks = frozenset(block for ids in listed for block in ids) - {NULL_BLOCK}
        new = sum(block not in self._blocks for block in blocks)
        if len(self._blocks) + new > self._blocks_max or len(self._held) + 1 > slots * SPECULATIVE_SHARE:
            self._warn(request_id)
            return False
        self._held[request_id] = blocks
        self._blocks.update(blocks)
        return True

    def give(self, request_id: str) -> None:
        """Stop counting the blocks of a request, if they were counted."""
        for block in self._held.pop(request_id, ()):
            self._blocks[block] -= 1
            if not self._blocks[block]:
                del self._blocks[block]

    def _warn(self, request_id: str) -> None:
        if self._told:
            return
        self._told = True
        logger.warning(
            "kvflow: request %s is not offered, and further requests may not be: offers that no client asked for hold "
            "%d of at most %d blocks, and %d leases. Each offer is held until it is read or lease_s is over. If the "
            'metric vllm:kvflow_leases_ended counts more outcome="expired" than outcome="released", the router does '
            "not pass on the kv_transfer_params of answers: remove offer. This message is not repeated.",
            request_id,
            len(self._blocks),
            self._blocks_max,
            len(self._held),
        )
