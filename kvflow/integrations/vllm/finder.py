"""Asks other engines for the beginnings of prompts, while vLLM's scheduler goes on.

A thread of the scheduler's process connects every address of every source. When a request arrives, it asks all of them
at once, with the digests of the prompt in each source's block size. The longest answer wins. Nobody waits for a source
that was late the last time.

A request without a ticket may name the prefill engine that gets it at the same time. That engine is asked alone, and
answers when it offers the prompt.
"""

import asyncio
import logging
import math
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from kvflow import Manifest, PrefixReader, Ticket, open_reader
from kvflow.addresses import host_and_port
from kvflow.errors import CapacityExceeded, DeadlineExceeded, KvflowError, TicketInvalid
from kvflow.integrations.vllm.blocks import NO_CHAIN, Chain, Contents, Request
from kvflow.integrations.vllm.engine import LOAD_WAIT
from kvflow.integrations.vllm.logs import logger
from kvflow.integrations.vllm.messages import Found, Tally
from kvflow.integrations.vllm.settings import Settings

SEARCHES_MAX = 1024  # requests that are asked for at a time: further ones are computed

ADDRESSES_MAX = 1024  # of one source that are dialed
DIALED_MAX = 64  # of all, at a time
LOOK_S = 10.0  # time between two look-ups of the addresses of a source; those without a connection are dialed then
LOOK_AGAIN_S = 1.0  # the same of prefill engines, if a request names an address that they had not
BASE_S = 0.030  # longest time that a request waits for answers, from the time that the questions leave
S_PER_TOKEN = 5e-6  # and longer for each token of its prompt: the more it may save. Never longer than ``find_s``
GIVE_UP_S = 1.0  # longest time in all, with that in which digests are computed
LATE_S = 1.0  # time between two questions to a source that was late
TURNS = 8  # of the event loop, in which an answer that has come is read
PIECE_TOKENS = 1 << 14  # whose digests are computed at a time: 3 ms with blocks of 16 tokens
CLOSE_S = 2.0  # longest time to wait for the end of the thread, which may be looking up a name


@dataclass(slots=True, eq=False)
class _Source:
    """One address that has been connected."""

    names: frozenset[str]  # its endpoint, and how the settings name it
    endpoint: str
    address: str  # the endpoint, and its key if it has one of its own
    manifest: Manifest
    block_size: int  # of its first group
    ask_from: float  # it is asked from then on
    is_late: bool = False  # the last answer did not come in time: no request waits for the next one


@dataclass(slots=True, eq=False)
class _Search:
    """The questions for one request."""

    until: float
    hinted: frozenset[str]
    best: Found | None = None
    is_answered: bool = False  # by every source for which it has waited, and by one at least
    is_done: bool = False
    chains: dict[int, Chain] = field(default_factory=dict)  # by block size


@dataclass(slots=True, eq=False)
class _Meeting:
    """The question for one request that names a prefill engine."""

    name: str  # of the prompt, whose samples share the ticket
    request: Request  # the first of them, with whose prompt the ticket has been compared
    endpoint: str
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
        self._dialing = asyncio.Semaphore(DIALED_MAX)
        self._crowded: set[str] = set()  # names with too many addresses, of which the log has said so
        self._turns: list[asyncio.Future[None]] = []  # who waits to compute digests
        self._has_turns = asyncio.Event()
        self._has_answer = threading.Event()
        self._sources: dict[str, _Source | None] = {}  # by address and key; None if it could not be reached
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._reader: PrefixReader
        self._thread = threading.Thread(target=self._run, name="kvflow-finder", daemon=True)
        self._thread.start()

    def seek(self, request: Request, hints: Iterable[str] = ()) -> None:
        """Start to ask who holds the beginning of a prompt, first the sources that hints name."""
        hinted = frozenset(hints)
        names = [{each.partition("#")[0] for each in self._addresses}, *self._addresses.values()]
        known = frozenset([each for each in hinted if any(each in some for some in names)])
        for _ in hinted - known:
            self._tally.count("prefixes", "hint_ignored")
        if request.num_prompt_tokens <= self._settings.fetch_tokens_min:
            return
        if len(self._searches) >= SEARCHES_MAX:
            self._tally.count("prefixes", "not_answered")
            return
        search = self._searches[request.request_id] = _Search(time.monotonic() + GIVE_UP_S, known)
        self._loop.call_soon_threadsafe(self._spawn, self._search, request, search)

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

        It is there when the engine has computed some of them. Requests of the same ``name`` and prompt get the same.
        Raises ``CapacityExceeded`` if so many requests wait for prompts that engines compute already.
        """
        tokens = request.prompt_token_ids
        named = [each for each in self._meetings.values() if each.name == name]
        meeting = next((each for each in named if each.request.prompt_token_ids == tokens), None)
        if meeting is None:
            self._make_room()
            meeting = _Meeting(name, request, endpoint)
            asking = self._ticket_of(request, endpoint, num_tokens, meeting)
            meeting.asked = asyncio.run_coroutine_threadsafe(asking, self._loop)
            meeting.asked.add_done_callback(lambda _: self._has_answer.set())
        self._meetings[request.request_id] = meeting

    def _make_room(self) -> None:
        """If too many meetings wait, end the oldest without an offer of the engine for which most wait."""
        if len(self._meetings) < SEARCHES_MAX:
            return
        waiting = dict.fromkeys([each for each in self._meetings.values() if not each.asked.done()])
        if len(waiting) >= SEARCHES_MAX:
            counts = Counter([each.endpoint for each in waiting if each.given is None])
            if not counts:
                raise _no_room()
            largest = max(counts, key=counts.__getitem__)
            next(each for each in waiting if each.given is None and each.endpoint == largest).asked.cancel()

    def pause(self, *, idle: bool) -> None:
        """Take whether a step has nothing to do; behind another such step, wait briefly until a request has its answer.

        Behind a step that computes, its output would wait, too.
        """
        was_idle, self._is_idle = self._is_idle, idle
        if was_idle and idle and self._waits and (self._meetings or any(map(self.is_asking, self._searches))):
            self._has_answer.wait(LOAD_WAIT.each_s)
            self._has_answer.clear()

    def met(self, request_id: str) -> Ticket | BaseException | None:
        """Return the ticket of a request that names a prefill engine and waits no more, or why there is none.

        None: it names no engine, or ``forget`` was called.
        """
        if (meeting := self._meetings.get(request_id)) is None:
            return None
        if meeting.asked.cancelled():
            return _no_room()
        error = meeting.asked.exception()
        return meeting.asked.result() if error is None else error

    def require(self, request: Request, ticket: Ticket) -> None:
        """Compare a ticket with the prompt of a request that has met; raises as ``Contents.require``.

        Ids do not tell a sample from another prompt: who embeds vLLM chooses them.
        """
        if self._meetings[request.request_id].request is not request:  # compared on the other thread
            self._contents.require(request, ticket)

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
        limit = ADDRESSES_MAX * (len(self._addresses) + len(self._settings.rendezvous_from))
        async with open_reader(self._settings.worker, connections_max=limit) as self._reader:
            self._spawn(self._give_turns)
            for source in self._addresses:
                self._spawn(self._watch, source)
            await self._closing.wait()
            for task in self._tasks:
                task.cancel()

    def _spawn(self, work: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> asyncio.Task[Any]:
        async def guarded() -> Any:
            try:
                return await work(*args)
            except Exception:
                logger.exception("kvflow: a search for prefixes failed")

        task = self._loop.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

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
            async with self._dialing:
                manifest = await self._reader.read_manifest(address)
            if known is None or known.manifest is not manifest:
                ask_from = 0.0 if self._is_of_use(endpoint, manifest) else math.inf
                names, size = frozenset((name, endpoint)), manifest.groups[0].tokens_per_id
                self._sources[address] = _Source(names, endpoint, address, manifest, size, ask_from)
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
        address = await self._allowed(endpoint)
        manifest = await self._reader.read_manifest(address)
        size = manifest.groups[0].tokens_per_id or num_tokens
        chains = {size: NO_CHAIN}
        await self._grow(request, chains, num_tokens)
        (last,) = self._contents.digests(request, ((0,),), (size,), num_tokens, chains=chains)
        wait_s = max(0.001, until - time.monotonic())
        ticket, _ = await self._reader.find(address, last, wait_s)  # it stands for all before it, too
        if ticket is None:
            message = f"{endpoint} has not offered this prompt within {self._settings.rendezvous_s:g} s"
            remedy = 'Set "dispatch": "concurrent" on the prefill engines, or raise rendezvous_s.'
            raise DeadlineExceeded(message, phase="handshake", peer=endpoint, remedy=remedy)
        self._contents.require(request, ticket)
        meeting.given = ticket
        await self._reader.wait_settled(address, ticket)
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
        try:
            host, port = host_and_port(name)
            found = await self._loop.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        except (OSError, ValueError) as error:  # the latter for a part of a name that is too long
            logger.debug("kvflow: %s has no address: %s", name, error)
            return None
        hosts = sorted({str(address[0]) for *_, address in found})
        if len(hosts) > ADDRESSES_MAX and name not in self._crowded:
            self._crowded.add(name)
            text = (
                "kvflow: %s has %d addresses, of which this engine uses %d. Set several names with fewer addresses each"
            )
            logger.warning(text, name, len(hosts), ADDRESSES_MAX)
        return frozenset(f"tcp://{f'[{each}]' if ':' in each else each}:{port}" for each in hosts[:ADDRESSES_MAX])

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
        """Ask the sources in random order, and wait until those have answered that are not known to be late."""
        try:
            async with asyncio.timeout(search.until - time.monotonic()):
                await self._ask_all(request, search)
        except TimeoutError:
            pass  # the prompt is computed
        finally:
            search.is_done = True
            self._has_answer.set()

    async def _ask_all(self, request: Request, search: _Search) -> None:
        now = time.monotonic()
        ready = [each for each in self._sources.values() if each is not None and each.ask_from <= now]
        random.shuffle(ready)
        search.chains = dict.fromkeys([each.block_size for each in ready], NO_CHAIN)
        await self._grow(request, search.chains, request.num_prompt_tokens - 1)  # the last token has to be computed
        within_s = wait_s_max(request.num_prompt_tokens, self._settings.find_s)
        search.until = min(search.until, time.monotonic() + self._settings.find_s)
        for each in ready:
            if each.is_late and each.ask_from <= now:  # nobody else has asked it meanwhile
                each.ask_from = now + LATE_S
                self._spawn(self._ask, each, request, search, within_s)
        timely = [each for each in ready if not each.is_late]
        hinted = [each for each in timely if each.names & search.hinted]
        asked: list[asyncio.Task[Any]] = []
        for sources, later_s in ((hinted, within_s / 2), ([each for each in timely if each not in hinted], 0.0)):
            if search.best is not None and search.best.num_tokens >= self._settings.fetch_tokens_min:
                break
            for each in sources:
                if self.is_asking(request.request_id):
                    asked.append(self._spawn(self._ask, each, request, search, within_s))
                    await asyncio.sleep(0)  # the question leaves
            if asked:
                search.until = min(search.until, time.monotonic() + within_s)
                await asyncio.wait(asked, timeout=max(0.0, search.until - later_s - time.monotonic()))
        search.is_answered = bool(asked) and all(each.done() and each.result() for each in asked)

    async def _ask(self, source: _Source, request: Request, search: _Search, within_s: float) -> bool:
        """Ask one source, and note what it holds if nobody has more; return whether it was in time.

        Its faults end no search.
        """
        digests = search.chains[source.block_size][0]
        if not digests:
            return True
        asked_at = time.monotonic()
        asked = self._loop.create_task(self._reader.find(source.address, digests))
        try:
            await asyncio.wait((asked,), timeout=within_s)
            for _ in range(TURNS):
                if not asked.done():
                    await asyncio.sleep(0)
            if not asked.done():
                raise DeadlineExceeded(f"no answer within {within_s:.3f} s", phase="handshake", peer=source.endpoint)
            ticket, count = asked.result()
            if ticket is not None:
                held = Found(source.endpoint, ticket, count * source.block_size, time.monotonic() - asked_at)
                self._note(held, request, search)
        except CapacityExceeded:
            return False  # it says that it is busy, or so many of our questions wait for it
        except KvflowError as error:
            self._set_late(source, error)
            return False
        finally:
            asked.cancel()
        if source.is_late:
            logger.info("kvflow: source %s answers in time again", source.endpoint)
        source.is_late, source.ask_from = False, 0.0
        return True

    def _note(self, found: Found, request: Request, search: _Search) -> None:
        """Note an answer. Raises ``ContentMismatch`` if the ticket has digests of other content."""
        covered = max(found.ticket.grants[0].num_tokens)
        num_tokens = min(found.num_tokens, covered)
        if num_tokens < covered and self._whole:
            return
        if search.best is None or search.best.num_tokens < num_tokens:
            self._contents.require(request, found.ticket, num_tokens)
            search.best = structs.replace(found, num_tokens=num_tokens)

    def _set_late(self, source: _Source, reason: object) -> None:
        if not source.is_late:
            text = "kvflow: requests do not wait for source %s until it answers in time: %s"
            logger.info(text, source.endpoint, reason)
        source.is_late, source.ask_from = True, time.monotonic() + LATE_S

    async def _grow(self, request: Request, chains: dict[int, Chain], num_tokens: int) -> None:
        """Compute digests piece by piece, while answers are read. Who came last goes first: it can still be in time."""
        for end in (*range(PIECE_TOKENS, num_tokens, PIECE_TOKENS), num_tokens):
            turn: asyncio.Future[None] = self._loop.create_future()
            self._turns.append(turn)
            self._has_turns.set()
            await turn
            self._contents.grow(request, chains, end)

    async def _give_turns(self) -> None:
        """Let one go on in each iteration of the loop, so that answers are read between."""
        while await self._has_turns.wait():
            self._turns = [each for each in self._turns if not each.done()]
            if self._turns:
                self._turns.pop().set_result(None)
            else:
                self._has_turns.clear()
            await asyncio.sleep(0)


def wait_s_max(num_tokens: int, find_s: float) -> float:
    """Return how long a request with a prompt of so many tokens waits for answers."""
    return min(find_s, BASE_S + S_PER_TOKEN * num_tokens)


def _no_room() -> CapacityExceeded:
    remedy = "Have the router send each prompt to the prefill engine that its request names, too."
    return CapacityExceeded("requests that wait for offers of prefill engines", SEARCHES_MAX, remedy=remedy)
