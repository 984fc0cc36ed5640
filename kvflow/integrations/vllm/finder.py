"""Asks other engines for the beginnings of prompts, while vLLM's scheduler goes on.

A thread of the scheduler's process connects every address of every source. When a request arrives, it asks all of them
at once, with the digests of the prompt in each source's block size. The longest answer wins.

A request without a ticket may name the prefill engine that gets it at the same time. That engine is asked alone, and
answers when it offers the prompt.
"""

import asyncio
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from kvflow import Manifest, Ticket
from kvflow.addresses import host_and_port
from kvflow.errors import CapacityExceeded, DeadlineExceeded, KvflowError, StaleLease, TicketInvalid
from kvflow.integrations.vllm.blocks import NO_CHAIN, Chain, Contents, Request
from kvflow.integrations.vllm.engine import LOAD_WAIT
from kvflow.integrations.vllm.messages import Tally
from kvflow.integrations.vllm.settings import Settings, logger
from kvflow.rendezvous.dialer import Asker
from kvflow.worker.askers import Askers

SEARCHES_MAX = 1024  # requests that are asked for at a time: further ones are computed

ADDRESSES_MAX = 64  # of one source that are dialed
LOOK_S = 10.0  # time between two look-ups of the addresses of a source; those without a connection are dialed then
LOOK_AGAIN_S = 1.0  # the same of prefill engines, if a request names an address that they had not
MISSES_MAX = 3  # answers in a row that have not come in time, after which a source is not asked
SKIP_S = 10.0  # for this time
ANSWER_S = 5.0  # longest time to wait for an answer that waits for nothing
SETTLED_S = 30.0  # longest time that a question waits at a prefill engine until it has computed something
CLOSE_S = 2.0  # longest time to wait for the end of the thread, which may be looking up a name


class Found(Struct, frozen=True):
    """What a source holds of a prompt."""

    source: str  # its control endpoint
    ticket: Ticket
    num_tokens: int  # first tokens of the prompt that it holds
    asked_s: float  # seconds until its answer


@dataclass(slots=True, eq=False)
class _Source:
    """One address that has been connected."""

    names: frozenset[str]  # its endpoint, and how the settings name it
    endpoint: str
    asker: Asker
    block_size: int  # of its first group
    skip_until: float  # it is asked from then on
    misses: int = 0


@dataclass(slots=True, eq=False)
class _Search:
    """The questions for one request."""

    until: float
    hinted: frozenset[str]
    best: Found | None = None
    is_answered: bool = False  # by any source
    is_done: bool = False
    chains: dict[int, Chain] = field(default_factory=dict)  # by block size


@dataclass(slots=True, eq=False)
class _Meeting:
    """The question for one request that names a prefill engine."""

    name: str  # of the prompt, whose samples share the ticket
    asked: Future[Ticket] = field(init=False)
    given: Ticket | None = None  # even if nothing of it is computed yet


class Finder:
    """Finds prompts and their beginnings at the engines that the settings name. Thread: the scheduler's.

    ``whole``: a part of what a source holds is of no use, because no window of a sliding layer was kept for it.
    ``waits``: no other engine waits for the steps of this one.
    """

    def __init__(
        self, settings: Settings, contents: Contents, tally: Tally, *, whole: bool, waits: bool = True
    ) -> None:
        self._settings = settings
        self._contents = contents
        self._tally = tally  # of how searches have ended, and of ignored hints
        self._whole = whole
        self._waits, self._is_idle = waits, False
        self._searches: dict[str, _Search] = {}
        self._meetings: dict[str, _Meeting] = {}
        self._addresses: dict[str, frozenset[str]] = {each: frozenset() for each in settings.sources}  # of each source
        self._hosts: dict[str, frozenset[str]] = {}  # of prefill engines, by their names
        self._looked_at = -math.inf  # when these were looked up
        self._looking = asyncio.Lock()
        self._has_met = threading.Event()
        self._sources: dict[str, _Source | None] = {}  # by address and key; None if it could not be reached
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._connections = asyncio.TaskGroup()
        limit = ADDRESSES_MAX * (len(self._addresses) + len(settings.rendezvous_from))
        self._askers = Askers(self._connections, limit, config=settings.worker)
        self._thread = threading.Thread(target=self._run, name="kvflow-finder", daemon=True)
        self._thread.start()

    def seek(self, request: Request, hints: Iterable[str] = ()) -> None:
        """Start to ask who holds the beginning of a prompt, first the sources that hints name."""
        hinted = frozenset(hints)
        names = {each.partition("#")[0] for each in self._addresses}
        known = hinted & frozenset(names.union(*tuple(self._addresses.values())))
        for _ in hinted - known:
            self._tally.count("prefixes", "hint_ignored")
        if request.num_prompt_tokens > self._settings.fetch_tokens_min and len(self._searches) < SEARCHES_MAX:
            search = _Search(time.monotonic() + self._settings.find_s, known)
            self._loop.call_soon_threadsafe(self._spawn, self._search, request, search)
            self._searches[request.request_id] = search

    def is_asking(self, request_id: str) -> bool:
        """Return whether an answer for a request may still come in time."""
        search, meeting = self._searches.get(request_id), self._meetings.get(request_id)
        waits = search is not None and not search.is_done and time.monotonic() < search.until
        return waits or (meeting is not None and not meeting.asked.done())

    def take(self, request_id: str, computed: int) -> Found | None:
        """End the search for a request; return what was found, if it saves enough over the ``computed`` tokens."""
        search = self._searches.pop(request_id, None)
        if search is None:
            return None
        found, outcome = search.best, "held"
        if found is None:
            outcome = "not_held" if search.is_answered else "not_answered"
        elif found.num_tokens - computed < self._settings.fetch_tokens_min:
            found, outcome = None, "below_minimum"
        self._tally.count("prefixes", outcome)
        return found

    def meet(self, request: Request, endpoint: str, num_tokens: int, name: str) -> None:
        """Start to wait for the ticket of the first tokens of a prompt, which this prefill engine computes now.

        It is there when the engine has computed some of them. Requests of the same ``name`` get the same.
        Raises ``CapacityExceeded`` if too many wait.
        """
        meeting = next((each for each in self._meetings.values() if each.name == name), None)
        if meeting is None:
            if len(self._meetings) >= SEARCHES_MAX:
                raise CapacityExceeded("requests that wait for a prefill engine", SEARCHES_MAX)
            meeting = _Meeting(name)
            asking = self._ticket_of(request, endpoint, num_tokens, meeting)
            meeting.asked = asyncio.run_coroutine_threadsafe(asking, self._loop)
            meeting.asked.add_done_callback(lambda _: self._has_met.set())
        self._meetings[request.request_id] = meeting

    def pause(self, *, idle: bool) -> None:
        """Take whether a step has nothing to do; behind another such step, wait briefly until a meeting has its answer.

        Behind a step that computes, its output would wait, too.
        """
        was_idle, self._is_idle = self._is_idle, idle
        if was_idle and idle and self._waits and self._meetings:
            self._has_met.wait(LOAD_WAIT.each_s)
            self._has_met.clear()

    def met(self, request_id: str) -> Ticket | BaseException | None:
        """Return the ticket of a request that names a prefill engine and waits no more, or why there is none.

        None: it names no engine, or ``forget`` was called.
        """
        if (meeting := self._meetings.get(request_id)) is None:
            return None
        error = meeting.asked.exception()
        return meeting.asked.result() if error is None else error

    def forget(self, request_id: str) -> Ticket | None:
        """End the search for a request; return the ticket that it alone has not taken, if it names an engine."""
        self._searches.pop(request_id, None)
        meeting = self._meetings.pop(request_id, None)
        if meeting is None or meeting in self._meetings.values():
            return None
        return meeting.given if meeting.asked.cancel() or not meeting.asked.exception() else None

    def clear(self) -> None:
        """End all searches, so that their requests are computed."""
        self._searches.clear()

    def close(self) -> None:
        """Close all connections and end the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(CLOSE_S)

    # On the other thread.

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        async with self._connections:
            for source in self._addresses:
                self._spawn(self._watch, source)
            await self._closing.wait()
            for task in self._tasks:
                task.cancel()
            self._askers.close()

    def _spawn(self, work: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        async def guarded() -> None:
            try:
                await work(*args)
            except Exception:
                logger.exception("kvflow: a search for prefixes failed")

        task = self._loop.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, source: str) -> None:
        """Look up the addresses of a source now and then, and connect those that are not connected."""
        name, mark, key = source.partition("#")
        while True:
            endpoints = await self._look_up(name)
            if endpoints is not None:
                for gone in self._addresses[source] - endpoints:
                    self._sources.pop(gone + mark + key, None)
                self._addresses[source] = endpoints
            endpoints = self._addresses[source]
            await asyncio.gather(*[self._connect(name, each, each + mark + key) for each in endpoints])
            await asyncio.sleep(LOOK_S)

    async def _connect(self, name: str, endpoint: str, address: str) -> None:
        """Connect an address, unless it is connected, and learn what it has."""
        known = self._sources.get(address)
        try:
            asker = await self._askers.connect(address)
            if known is None or known.asker is not asker:
                manifest = (await asker.read_manifest()).manifest
                skip_until = 0.0 if self._is_of_use(endpoint, manifest) else math.inf
                size = manifest.groups[0].tokens_per_id
                self._sources[address] = _Source(frozenset((name, endpoint)), endpoint, asker, size, skip_until)
        except KvflowError as error:
            level = logging.INFO if known or address not in self._sources else logging.DEBUG
            logger.log(level, "kvflow: no prefixes come from %s: %s", endpoint, error)
            self._sources[address] = None

    async def _ticket_of(self, request: Request, endpoint: str, num_tokens: int, meeting: _Meeting) -> Ticket:
        """Wait until a prefill engine offers a prompt and has computed some of it, and return the ticket.

        Raises:
            TicketInvalid: the settings do not name this engine.
            DeadlineExceeded: it does not offer the prompt in time.
            StaleLease: its offer has ended.
        """
        until = time.monotonic() + self._settings.rendezvous_s
        asker = await self._askers.connect(await self._allowed(endpoint))
        manifest = (await asker.read_manifest()).manifest
        size = manifest.groups[0].tokens_per_id or num_tokens
        (digests,) = self._contents.digests(request, (range(-(-num_tokens // size)),), (size,), num_tokens)
        wait_s = max(0.001, until - time.monotonic())
        ticket, _ = await asker.held(digests, ANSWER_S, wait_s=wait_s, at_least=len(digests))
        if ticket is None:
            message = f"{endpoint} has not offered this prompt within {self._settings.rendezvous_s:g} s"
            remedy = 'Set "dispatch": "concurrent" on the prefill engines, or raise rendezvous_s.'
            raise DeadlineExceeded(message, phase="handshake", peer=endpoint, remedy=remedy)
        self._contents.require(request, ticket)
        meeting.given, grant = ticket, ticket.grants[0]
        lease, known = (grant.slot, grant.epoch_value), [0] * len(grant.num_tokens)
        has_begun = grant.kind != "open"
        while not has_begun:
            settled = await asker.settled(lease, known=known, above=1, wait_s=SETTLED_S, within_s=ANSWER_S)
            if settled.ended:
                raise StaleLease("the prefill engine has ended its offer", ended_by=settled.ended, peer=endpoint)
            has_begun = settled.sealed or settled.num_tokens > 0
        return ticket

    async def _allowed(self, endpoint: str) -> str:
        """Return an endpoint that a request names, with its key if it has one; TicketInvalid if no setting names it."""
        entries = {each.partition("#")[0]: each for each in self._settings.rendezvous_from}
        if endpoint in entries:
            return entries[endpoint]
        for age_s in (LOOK_S, LOOK_AGAIN_S):
            await self._look_up_all(entries, age_s)
            for name in [name for name, hosts in self._hosts.items() if endpoint in hosts]:
                return endpoint + entries[name].removeprefix(name)
        raise TicketInvalid(
            f"the request has no ticket, and rendezvous_from does not name {endpoint}",
            remedy="Add the control endpoint of the prefill engine to rendezvous_from of the decode engine.",
        )

    async def _look_up_all(self, names: Iterable[str], age_s: float) -> None:
        """Look up names, unless that was done in the last seconds: requests name addresses as fast as they come."""
        async with self._looking:
            if time.monotonic() >= self._looked_at + age_s:
                found = await asyncio.gather(*map(self._look_up, names))
                self._hosts |= {name: hosts for name, hosts in zip(names, found, strict=True) if hosts is not None}
                self._looked_at = time.monotonic()

    async def _look_up(self, name: str) -> frozenset[str] | None:
        """Return the endpoints of every address of a host; None if it has none."""
        host, port = host_and_port(name)
        try:
            found = await self._loop.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # the latter for a part of a name that is too long
            logger.debug("kvflow: %s has no address: %s", name, error)
            return None
        hosts = sorted({str(address[0]) for *_, address in found})[:ADDRESSES_MAX]
        return frozenset(f"tcp://{f'[{each}]' if ':' in each else each}:{port}" for each in hosts)

    def _is_of_use(self, endpoint: str, manifest: Manifest) -> bool:
        """Return whether a source may hold what this engine can read; it may be this engine itself."""
        config, theirs = self._settings.worker, manifest.identity
        pairs = ((config.model, theirs.model), (config.tuning.model_revision, theirs.revision))
        if any(own and other and own != other for own, other in pairs):
            logger.warning("kvflow: source %s has another model, and is not asked: %s", endpoint, pairs)
            return False
        is_asked = theirs.engine_id != config.engine_id and manifest.groups[0].tokens_per_id > 0
        logger.info("kvflow: source %s is engine %s%s", endpoint, theirs.engine_id, "" if is_asked else ", not asked")
        return is_asked

    async def _search(self, request: Request, search: _Search) -> None:
        try:
            now = time.monotonic()
            ready = [each for each in self._sources.values() if each is not None and each.skip_until <= now]
            hinted = [each for each in ready if each.names & search.hinted]
            for sources in (hinted, [each for each in ready if each not in hinted]):
                if search.best is None or search.best.num_tokens < self._settings.fetch_tokens_min:
                    await asyncio.gather(*[self._ask(each, request, search) for each in sources])
        finally:
            search.is_done = True

    async def _ask(self, source: _Source, request: Request, search: _Search) -> None:
        """Ask one source, and note what it holds if nobody has more. Its faults end no search."""
        size = source.block_size
        if size not in search.chains:
            chains = {size: NO_CHAIN}
            self._contents.grow(request, chains, request.num_prompt_tokens - 1)  # the last token has to be computed
            search.chains |= chains
        digests = search.chains[size][0]
        within_s = search.until - time.monotonic()
        if not digests or within_s <= 0:
            return
        try:
            ticket, count = await source.asker.held(digests, within_s)
            source.misses = 0
            search.is_answered = True
            if ticket is not None:
                self._note(source, request, search, ticket, count * size)
        except DeadlineExceeded:
            source.misses += 1
            if source.misses >= MISSES_MAX:
                self._skip(source, "its answers come too late")
        except KvflowError as error:
            self._skip(source, error)

    def _note(self, source: _Source, request: Request, search: _Search, ticket: Ticket, num_tokens: int) -> None:
        """Note an answer. Raises ``ContentMismatch`` if the ticket has digests of other content."""
        covered = max(ticket.grants[0].num_tokens)
        num_tokens = min(num_tokens, covered)
        if num_tokens < covered and self._whole:
            return
        if search.best is None or search.best.num_tokens < num_tokens:
            self._contents.require(request, ticket, num_tokens)
            asked_s = time.monotonic() - search.until + self._settings.find_s
            search.best = Found(source.endpoint, ticket, num_tokens, asked_s)

    def _skip(self, source: _Source, reason: object) -> None:
        source.misses, source.skip_until = 0, time.monotonic() + SKIP_S
        logger.info("kvflow: source %s is not asked for %g s: %s", source.endpoint, SKIP_S, reason)
