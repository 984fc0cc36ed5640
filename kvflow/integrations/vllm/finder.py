"""Asks other engines for the beginnings of prompts, while vLLM's scheduler goes on.

A thread of the scheduler's process connects every address of every source, and follows what each of them keeps. When a
request arrives, it asks the source that has told most of its prompt, and a few of those that have not told all; nobody
if all have told and none has it. What a source has told decides only who is asked. Nobody waits for a source whose last
answer took longer than this request may wait.

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
from collections import Counter, deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from msgspec.structs import replace

from kvflow import Claim, Group, Manifest, PrefixReader, Ticket, open_reader, whole_tokens
from kvflow.addresses import host_and_port
from kvflow.contents import Chains, Contents, Request
from kvflow.errors import CapacityExceeded, ContentMismatch, DeadlineExceeded, KvflowError, TicketInvalid
from kvflow.integrations.vllm.engine import LOAD_WAIT
from kvflow.integrations.vllm.logs import logger
from kvflow.integrations.vllm.messages import Found, Tally
from kvflow.integrations.vllm.settings import Settings
from kvflow.integrations.vllm.told import STRIDE_TOKENS, ToldIndex

SEARCHES_MAX = 1024  # requests that are asked for at a time: further ones are computed

ADDRESSES_MAX = 1024  # of one source that are dialed, though nobody names them
HINTED_MAX = 8  # others that are dialed in a second because a hint names them: clients may send hints
DIALED_MAX = 64  # of all, at a time
LOOK_S = 10.0  # time between two look-ups of the addresses of a source; those without a connection are dialed then
LOOK_AGAIN_S = 1.0  # the same of prefill engines, if a request names an address that they had not
WAIT_SHARE = 0.05  # of the time in which this engine would compute the missing tokens: so long a request waits
WAIT_S_MIN = 0.030  # from the time that the questions leave; never longer than ``find_s``
TOKENS_PER_S = 15_000.0  # that an engine computes, until it has measured it
MEASURED_TOKENS_MIN = 256  # of a step whose time tells how fast prompts are computed
MEASURED_STEPS = 16  # the last ones, of which the median counts
MANY = 1 << 40  # more tokens than any prompt has
ASKED_MAX = 8  # sources for a request that hints name, and as many that have not told what they keep
HOLDERS_MAX = 3  # sources that have told most of a prompt, one after the other
TELL_S = 0.1  # least time between two answers of a source about what it keeps
TELLERS_PER_S = 64  # sources whose answers are taken; with more, each tells less often
GIVE_UP_S = 1.0  # longest time in all, with that in which digests are computed
FAILED_S = 1.0  # time between two questions to a source that has failed
TURNS = 8  # of the event loop, in which an answer that has come is read
PIECE_TOKENS = 1 << 14  # whose digests are computed at a time: 3 ms with blocks of 16 tokens
CLOSE_S = 2.0  # longest time to wait for the end of the thread, which may be looking up a name

AskSource = Callable[[str], Coroutine[Any, Any, Claim]]  # a question, for the worker at any address


@dataclass(slots=True, eq=False)
class _Source:
    """One address that has been connected."""

    names: frozenset[str]  # its endpoint, and how the settings name it
    endpoint: str
    address: str  # the endpoint, and its key if it has one of its own
    manifest: Manifest
    block_size: int  # of its first group
    ask_from: float  # it is asked from then on
    took_s: float = 0.0  # the last answer, or so far the next one
    is_further: bool = False  # only hints lead to it
    num_open: int = 0  # questions without an answer
    is_late: bool = False  # a request has waited in vain
    is_doubted: bool = False  # it did not hold what it had told


@dataclass(slots=True, eq=False)
class _Search:
    """The questions for one request."""

    until: float
    hinted: frozenset[str]
    num_tokens: int  # of the prompt
    chains: Chains
    outcome: str = "not_asked"  # if nothing is found
    best: Found | None = None
    rest: tuple[_Source, range] | None = None  # who said so, and blocks behind these for which nobody was asked
    questions: dict[int, AskSource] = field(default_factory=dict)  # for all of it, by block size
    wait_s: float = 0.0  # for answers
    has_failed: bool = False  # a source for which it waits
    is_answered: bool = True  # in each round a source was asked that is not known to be late
    most: int = 0  # tokens that a source can hold of it
    waits_for: set[_Source] = field(default_factory=set)
    is_enough: asyncio.Event = field(default_factory=asyncio.Event)  # nobody else can hold more
    asked_at: float = math.inf
    is_done: bool = False


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

    ``unit``: tokens of whole blocks of this engine; ``waits``: no other engine waits for the steps of this one.
    """

    def __init__(
        self, settings: Settings, contents: Contents, tally: Tally, *, unit: int = 1, waits: bool = True
    ) -> None:
        self._settings = settings
        self._contents = contents
        self._tally = tally  # of how searches have ended, and of ignored hints
        self._unit = unit
        self._waits, self._is_idle = waits, False
        self._rate = PrefillRate()
        self._searches: dict[str, _Search] = {}
        self._meetings: dict[str, _Meeting] = {}
        self._addresses: dict[str, frozenset[str]] = {each: frozenset() for each in settings.sources}  # of each source
        self._hosts: dict[str, frozenset[str]] = {}  # of prefill engines, by their names
        self._looked_at = -math.inf  # when these were looked up
        self._looking = asyncio.Lock()
        self._dialing = asyncio.Semaphore(DIALED_MAX)
        self._hinted_at: deque[float] = deque(maxlen=HINTED_MAX)  # when addresses of hints were dialed
        self._crowded: set[str] = set()  # names with too many addresses, of which the log has said so
        self._turns: asyncio.LifoQueue[asyncio.Future[None]] = asyncio.LifoQueue()  # who waits to compute digests
        self._has_answer = threading.Event()
        self._told: ToldIndex[_Source] = ToldIndex()
        self._sources: dict[str, _Source | None] = {}  # by address and key; None if it could not be reached
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._reader: PrefixReader
        self._thread = threading.Thread(target=self._run, name="kvflow-finder", daemon=True)
        self._thread.start()

    def seek(self, request: Request, chains: Chains, hints: Iterable[str] = ()) -> None:
        """Start to ask who holds the beginning of a prompt, first the sources that hints name."""
        hinted = frozenset(hints)
        names = [{each.partition("#")[0] for each in self._addresses}, *self._addresses.values()]
        known = frozenset([each for each in hinted if any(each in some for some in names)])
        for _ in hinted - known:
            self._tally.count("prefixes", "hint_ignored")
        if request.num_prompt_tokens <= self._settings.fetch_tokens_min:
            return
        if len(self._searches) >= SEARCHES_MAX:
            self._tally.count("prefixes", "not_asked")
            return
        search = self._searches[request.request_id] = _Search(
            time.monotonic() + GIVE_UP_S, known, request.num_prompt_tokens, chains
        )
        self._loop.call_soon_threadsafe(self._spawn, self._search, request, search)

    def is_asking(self, request_id: str, missing: int = MANY) -> bool:
        """Return whether an answer for a request may still come in time; it misses so many tokens in our own cache."""
        search, meeting = self._searches.get(request_id), self._meetings.get(request_id)
        if search is not None and not search.is_done:
            until = min(search.until, search.asked_at + self._wait_s(missing))
            if missing >= self._settings.fetch_tokens_min and time.monotonic() < until:
                return True
        return meeting is not None and not meeting.asked.done()

    def take(self, request_id: str, computed: int) -> Found | None:
        """End the search for a request; return what was found, if it saves enough over the ``computed`` tokens."""
        search = self._searches.pop(request_id, None)
        if search is None:
            return None
        found, outcome = search.best, "held"
        if (search.num_tokens if found is None else found.num_tokens) - computed < self._settings.fetch_tokens_min:
            found, outcome = None, "below_minimum"
        elif found is None:
            outcome = search.outcome
        self._tally.count("prefixes", outcome)
        return found

    def on_scheduled(self, num_tokens: int) -> None:
        """Take how many tokens a step computes."""
        self._rate.begin(num_tokens, time.monotonic())

    def on_computed(self) -> None:
        """Note that the oldest step has ended."""
        self._rate.end(time.monotonic())

    def _wait_s(self, num_tokens: int) -> float:
        """Return how long a request that misses so many tokens waits for answers."""
        return min(self._settings.find_s, max(WAIT_S_MIN, WAIT_SHARE * num_tokens / self._rate.tokens_per_s))

    def meet(self, request: Request, chains: Chains, endpoint: str, num_tokens: int, name: str) -> None:
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
            asking = self._ticket_of(request, chains, endpoint, num_tokens, meeting)
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

    def require(self, request: Request, chains: Chains, ticket: Ticket) -> None:
        """Compare a ticket with the prompt of a request that has met; raises as ``Contents.require``.

        Ids do not tell a sample from another prompt: who embeds vLLM chooses them.
        """
        if self._meetings[request.request_id].request is not request:  # compared on the other thread
            self._contents.require(request, ticket, chains=chains)

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
        names = len(self._addresses) + len(self._settings.rendezvous_from)
        limit = ADDRESSES_MAX * names + math.ceil(HINTED_MAX * LOOK_S)
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
            before = self._addresses[source]
            if endpoints is not None:
                self._addresses[source] = endpoints
            first = sorted(self._addresses[source], key=hash)[:ADDRESSES_MAX]  # each process has its own order
            for each in (before | self._addresses[source]).difference(first):  # it has gone, or hints lead to it
                self._sources.pop(each + mark + key, None)
            await asyncio.gather(*[self._connect(name, each, each + mark + key) for each in first])
            await asyncio.sleep(LOOK_S)

    async def _connect_hinted(self, search: _Search) -> None:
        """Connect addresses of sources that hints name and nobody has tried, few in a second."""
        dialed: list[asyncio.Task[Any]] = []
        for source, endpoints in self._addresses.items():
            name, mark, key = source.partition("#")
            for endpoint in endpoints & search.hinted:
                address, now = endpoint + mark + key, time.monotonic()
                is_free = len(self._hinted_at) < HINTED_MAX or now - self._hinted_at[0] >= 1.0
                if address not in self._sources and is_free:
                    self._hinted_at.append(now)
                    dialed.append(self._spawn(partial(self._connect, is_further=True), name, endpoint, address))
        if dialed:
            await asyncio.wait(dialed, timeout=self._wait_s(search.num_tokens))

    async def _connect(self, name: str, endpoint: str, address: str, *, is_further: bool = False) -> None:
        """Connect an address, unless it is connected, and learn what it has."""
        known = self._sources.get(address)
        try:
            async with self._dialing:
                manifest = await self._reader.read_manifest(address)
            if known is None or known.manifest is not manifest:
                ask_from = 0.0 if self._is_of_use(endpoint, manifest) else math.inf
                names, size = frozenset((name, endpoint)), manifest.groups[0].tokens_per_id
                found = _Source(names, endpoint, address, manifest, size, ask_from, is_further=is_further)
                self._sources[address] = found
                if ask_from == 0.0 and not is_further:
                    self._spawn(self._follow, found)
        except KvflowError as error:
            level = logging.INFO if known or address not in self._sources else logging.DEBUG
            logger.log(level, "kvflow: no prefixes come from %s: %s", endpoint, error)
            self._sources[address] = None

    async def _follow(self, source: _Source) -> None:
        """Learn what a source keeps, from the start whenever its connection was lost or it has told too much."""
        while self._sources.get(source.address) is source:
            try:
                async for told in self._reader.follow_kept(source.address):
                    if self._sources.get(source.address) is not source:
                        break
                    self._told.take(source, told)
                    await asyncio.sleep(max(TELL_S, len(self._sources) / TELLERS_PER_S if told.is_all else 0.0))
            except KvflowError as error:
                logger.debug("kvflow: source %s does not tell what it keeps: %s", source.endpoint, error)
            self._told.drop(source)
            await asyncio.sleep(LOOK_S)

    async def _ticket_of(
        self, request: Request, chains: Chains, endpoint: str, num_tokens: int, meeting: _Meeting
    ) -> Ticket:
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
        await self._grow(request, chains, (size,), num_tokens)
        (last,) = self._contents.digests(request, ((0,),), (size,), num_tokens, chains=chains)
        wait_s = max(0.001, until - time.monotonic())
        ticket, _ = await self._reader.find(address, last, wait_s)  # it stands for all before it, too
        if ticket is None:
            message = f"{endpoint} has not offered this prompt within {self._settings.rendezvous_s:g} s"
            remedy = 'Set "dispatch": "concurrent" on the prefill engines, or raise rendezvous_s.'
            raise DeadlineExceeded(message, phase="handshake", peer=endpoint, remedy=remedy)
        self._contents.require(request, ticket, chains=chains)
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
        hosts = {str(address[0]) for *_, address in found}
        if len(hosts) > ADDRESSES_MAX and name not in self._crowded:
            self._crowded.add(name)
            text = (
                "kvflow: %s has %d addresses, of which this engine asks %d, and others if a hint names them. "
                "Set several names with fewer addresses each"
            )
            logger.warning(text, name, len(hosts), ADDRESSES_MAX)
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
        """Ask sources, and wait until those have answered that are not known to be late."""
        try:
            async with asyncio.timeout(search.until - time.monotonic()):
                await self._ask_all(request, search)
        except TimeoutError:
            pass  # the prompt is computed
        finally:
            search.is_done = True
            self._has_answer.set()

    async def _ask_all(self, request: Request, search: _Search) -> None:
        await self._connect_hinted(search)
        now, end = time.monotonic(), search.num_tokens - 1  # the last token has to be computed
        known = [each for each in self._sources.values() if each is not None and each.ask_from <= now]
        ready = [each for each in known if not each.is_further or each.names & search.hinted]
        short = [each for each in ready if each.block_size <= end]  # others hold nothing of it
        sizes = {each.block_size for each in short}
        await self._grow(request, search.chains, sizes, end)
        if time.monotonic() >= search.until:
            return
        search.asked_at, search.wait_s = time.monotonic(), self._wait_s(end)
        search.until = min(search.until, search.asked_at + search.wait_s)
        search.most = max([end - end % size for size in sizes], default=0)
        search.outcome = "late" if ready else "not_asked"
        hinted = _some([each for each in short if each.names & search.hinted])
        await self._ask_some(dict.fromkeys(hinted, 0), request, search, search.asked_at + search.wait_s / 2)
        if search.best is None or search.best.num_tokens < self._settings.fetch_tokens_min:
            for chosen in self._rounds([each for each in short if each not in hinted], sizes, search):
                told = max(chosen.values(), default=0)
                if search.best is not None and search.best.num_tokens >= told:
                    break
                search.most = search.most if 0 in chosen.values() else told
                await self._ask_some(
                    chosen, request, search, (time.monotonic() + search.until) / 2 if told else search.until
                )
            for each in () if search.is_enough.is_set() else search.waits_for:
                self._set_late(each, time.monotonic() - search.asked_at, "no answer")
        if ready and search.is_answered and not search.waits_for and not search.has_failed:
            search.outcome = "not_held"
        if search.rest is not None:
            async with asyncio.timeout(search.until - time.monotonic()):
                await self._ask_exactly(*search.rest, request, search)

    def _rounds(self, sources: Collection[_Source], sizes: Iterable[int], search: _Search) -> list[dict[_Source, int]]:
        """Return the sources to ask, round by round, and how many tokens each has told; 0 if it has not told all.

        The source that has told most comes first, with some that have not told all; one that was wrong comes last.
        """
        unknown = _some([each for each in sources if not self._told.knows(each)])
        chains = {size: search.chains.first(size, search.num_tokens - 1) for size in sizes}
        told = {each: count * size for size in sizes for each, count in self._told.holders(chains[size])}
        order = [each for each in told if each in sources]
        random.shuffle(order)
        order.sort(key=lambda each: (each.is_doubted, each.took_s > search.wait_s, -told[each]))
        rounds = [{each: told[each]} for each in order[:HOLDERS_MAX]] or [{}]
        return [dict.fromkeys(unknown, 0) | rounds[0], *rounds[1:]]

    async def _ask_some(self, chosen: Mapping[_Source, int], request: Request, search: _Search, until: float) -> None:
        """Ask sources; wait for those that are not known to be late, until nobody can hold more than one says.

        ``chosen``: as in ``_rounds``.
        """
        timely = {each for each in chosen if each.took_s <= search.wait_s}
        search.is_answered &= bool(timely) or not chosen
        search.waits_for |= timely
        search.is_enough.clear()
        for each, told in chosen.items():
            if each in timely or not each.num_open:
                self._spawn(self._ask, each, told, request, search)
        if search.waits_for:
            with suppress(TimeoutError):
                async with asyncio.timeout(until - time.monotonic()):
                    await search.is_enough.wait()
        for _ in range(TURNS):
            if search.waits_for and not search.is_enough.is_set():
                await asyncio.sleep(0)

    async def _ask(self, source: _Source, told: int, request: Request, search: _Search) -> None:
        """Ask one source, and note what it holds if nobody has more. Its faults end no search."""
        asked_at, failed = time.monotonic(), True
        source.num_open += 1
        try:
            claim = await self._claim(source, told, search)
            source.took_s, source.ask_from = time.monotonic() - asked_at, 0.0
            if source.is_late and source.took_s <= WAIT_S_MIN:
                logger.info("kvflow: source %s answers in time again", source.endpoint)
                source.is_late = False
            if told:
                source.is_doubted = not claim.count
            self._note(source, claim, request, search)
            failed = False
        except CapacityExceeded:
            pass  # it says that it is busy, or so many of our questions wait for it
        except KvflowError as error:
            self._set_late(source, math.inf, error)
            source.ask_from = time.monotonic() + FAILED_S
        finally:
            source.num_open -= 1
            if source in search.waits_for:
                search.waits_for.discard(source)
                search.has_failed |= failed
                if not search.waits_for:
                    search.is_enough.set()

    async def _claim(self, source: _Source, told: int, search: _Search) -> Claim:
        """Ask a source for what it has told, and the blocks up to the next end that it could; otherwise for all."""
        size = source.block_size
        digests = search.chains.first(size, search.num_tokens - 1)
        if not told:
            ask = search.questions.get(size) or self._reader.asks_for(digests)
            search.questions[size] = ask
            return await ask(source.address)
        first = told // size - 1
        claim = await self._reader.asks_for(digests[first : first + 2 + STRIDE_TOKENS // size])(source.address)
        if not claim.count:
            return claim
        rest = range(first + claim.rest.start, first + claim.rest.stop)
        return replace(claim, count=first + claim.count, rest=rest)

    def _note(self, source: _Source, claim: Claim, request: Request, search: _Search) -> None:
        """Note an answer if nobody holds more; raise ``ContentMismatch`` if its ticket has digests of other content."""
        size, most = source.block_size, search.best.num_tokens if search.best else 0
        if search.is_done or not claim.count or (claim.count + len(claim.rest)) * size <= most:
            return
        ticket = claim.read()
        covered = max(ticket.grants[0].num_tokens)
        num_tokens, rest = min(claim.count * size, covered), range(claim.count, min(claim.rest.stop, covered // size))
        if rest and covered < search.num_tokens and self._is_of(request, ticket, search.chains):
            num_tokens, rest = covered, range(0)
        self._contents.require(request, ticket, num_tokens, search.chains)
        may_hold = self._whole(source, ticket, rest.stop * size if rest else num_tokens)
        num_tokens = self._whole(source, ticket, num_tokens)
        if num_tokens > most:
            search.best = Found(source.endpoint, ticket, num_tokens, time.monotonic() - search.asked_at)
            search.rest = None
        if may_hold > max(num_tokens, most) and search.rest is None:
            search.rest = source, rest
        if num_tokens >= search.most:
            search.is_enough.set()

    def _whole(self, source: _Source, ticket: Ticket, num_tokens: int) -> int:
        """Return how many of the first tokens can be read, by the ticket's own lists: no window lacks a block there.

        Of a group whose layers other stages have, no block may be missing. A part fills whole blocks of this engine.
        """
        grant, groups = ticket.grants[0], source.manifest.groups
        reaches = [
            {Group((), layer.kind, group.block_tokens, layer.window) for layer in group.layers}
            or {Group((), "sliding", group.block_tokens, MANY)}
            for group in groups
        ]
        if not any(layer.window for group in reaches for layer in group):
            return num_tokens
        if len(ticket.grants) > 1 or len(grant.block_ids) != len(groups):
            return 0
        covered = min(grant.num_tokens)
        counts = whole_tokens(reaches, grant.block_ids, grant.num_tokens, min(num_tokens, covered))
        return next((each for each in counts if each == covered or not each % self._unit), 0)

    def _is_of(self, request: Request, ticket: Ticket, chains: Chains) -> bool:
        """Return whether all blocks of a ticket hold the beginning of a request."""
        try:
            self._contents.require(request, ticket, 0, chains)
        except ContentMismatch:
            return False
        return True

    async def _ask_exactly(self, source: _Source, rest: range, request: Request, search: _Search) -> None:
        """Ask who holds most for the blocks behind those that it has named."""
        digests = search.chains.first(source.block_size, search.num_tokens - 1)[rest.start : rest.stop]
        try:
            claim = await self._reader.asks_for(digests)(source.address)
            if claim.count:
                ticket, num_tokens = claim.read(), (rest.start + claim.count) * source.block_size
                self._contents.require(request, ticket, num_tokens, search.chains)
                num_tokens = self._whole(source, ticket, num_tokens)
                if search.best is None or num_tokens > search.best.num_tokens:
                    search.best = Found(source.endpoint, ticket, num_tokens, time.monotonic() - search.asked_at)
        except KvflowError as error:
            self._set_late(source, math.inf, error)

    def _set_late(self, source: _Source, took_s: float, reason: object) -> None:
        if not source.is_late:
            text = "kvflow: requests do not wait for source %s until it answers in time: %s"
            logger.info(text, source.endpoint, reason)
        source.is_late, source.took_s = True, max(source.took_s, took_s)

    async def _grow(self, request: Request, chains: Chains, sizes: Collection[int], num_tokens: int) -> None:
        """Compute digests piece by piece, while answers are read. Who came last goes first: it can still be in time."""
        for end in (*range(PIECE_TOKENS, num_tokens, PIECE_TOKENS), num_tokens):
            turn: asyncio.Future[None] = self._loop.create_future()
            self._turns.put_nowait(turn)
            await turn
            self._contents.grow(request, chains, sizes, end)

    async def _give_turns(self) -> None:
        """Let one go on in each iteration of the loop, so that answers are read between."""
        while True:
            turn = await self._turns.get()
            if not turn.done():
                turn.set_result(None)
                await asyncio.sleep(0)


class PrefillRate:
    """How fast an engine computes prompts, by the time of its steps. Thread: the caller's."""

    def __init__(self) -> None:
        self.tokens_per_s = TOKENS_PER_S
        self._begun: deque[tuple[int, float]] = deque(maxlen=MEASURED_STEPS)  # steps that have not ended
        self._ended_at = -math.inf
        self._rates: deque[float] = deque(maxlen=MEASURED_STEPS)

    def begin(self, num_tokens: int, now: float) -> None:
        """Take a step that computes so many tokens."""
        self._begun.append((num_tokens, now))

    def end(self, now: float) -> None:
        """Note the end of the oldest step, behind which the next one begins."""
        if self._begun:
            num_tokens, begun_at = self._begun.popleft()
            seconds, self._ended_at = now - max(begun_at, self._ended_at), now
            if num_tokens >= MEASURED_TOKENS_MIN and seconds > 0:
                self._rates.append(num_tokens / seconds)
                self.tokens_per_s = median(self._rates)


def _some(sources: list[_Source]) -> list[_Source]:
    return random.sample(sources, min(ASKED_MAX, len(sources)))


def _no_room() -> CapacityExceeded:
    remedy = "Have the router send each prompt to the prefill engine that its request names, too."
    return CapacityExceeded("requests that wait for offers of prefill engines", SEARCHES_MAX, remedy=remedy)
