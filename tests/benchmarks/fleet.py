# ruff: noqa: T201 - a script prints what it finds
"""How much of all prompts must a fleet compute that shares prefixes? A model on virtual time.

    python -m tests.benchmarks.fleet [--seeds 5] [--ways none,product] [--engines 64] [--seconds 60]

Modelled: conversations of several turns that share the prompts of applications; a router that sends each turn to the
least-loaded prefill and decode engine; prefill engines that compute one prompt at a time; caches that reuse what was
used longest ago; links that carry one transfer at a time; decode engines that keep each turn; and the one thread of
each engine's finder, with the measured times of its work. The same seed gives the same figures.

The product decides whom to ask, for how long and in which order, and which answer to take: each prefill engine has a
``Finder`` of its own, with ``Chains``, ``ToldIndex``, ``ContentQuestion`` and ``Asker.claim``, on a loop on virtual
time, and each source tells its ends by ``KeptEnds``. ``Reader`` is what the finder calls: links, sources and their
answers are the model's. Three further ways to find are for comparison:
``none`` asks nobody, ``old`` is how 0ccf874 asked all, and ``free`` knows at once who holds most.

Not modelled: dead engines, lost answers, busy interpreters, encryption, steps that mix prompts, memory that fetched
prompts take while they wait, holds of leases that are read, and conversations that fork. A lease that ends between an
answer and its read costs nothing but its tokens.

How long callers think, how large caches are, and how many tokens are shared and new are no measured figures: they were
chosen so that ``none``, ``old`` and ``free`` come close to an earlier model of the same fleet (at 0ccf874: 0.78, 0.60
and 0.09 computed; 3.4, 2.2 and 0.7 s to the first token, p99). Compare ways with each other.

Before the measured time all find as ``free`` does for ``WARM_S``, and in their own way for ``SETTLE_S``.
"""

import argparse
import asyncio
import json
import random
import statistics
import threading
import time
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from struct import Struct
from types import SimpleNamespace
from typing import Any
from unittest import mock

from kvflow import Told
from kvflow.contents import NO_CHAIN, Chains
from kvflow.errors import ContentMismatch
from kvflow.integrations.vllm import finder as finder_module
from kvflow.integrations.vllm.finder import Finder
from kvflow.integrations.vllm.messages import Tally
from kvflow.integrations.vllm.settings import EngineFacts, read_settings
from kvflow.leases.held import Names
from kvflow.leases.told import END_BYTES, STRIDE_TOKENS, KeptEnds
from kvflow.rendezvous.dialer import Asker, ContentQuestion, _split
from kvflow.rendezvous.questions import AnswerHeld, encode
from kvflow.tools.bench import quantile
from tests.benchmarks.fleet_time import Clock, Loop

# The fleet, for 64 engines of each kind; sessions grow with their number.
SESSIONS_PER_S = 9.0
TURNS_MIN, TURNS_MAX, TURNS_MEAN = 6, 20, 10.3
THINK_S = 8.0  # mean time from an answer to the next turn
APPLICATIONS, ZIPF = 200, 1.1
APPLICATION_TOKENS = (2048, 8192)  # of its prompt
GOLDEN = 0.618034
NEW_TOKENS, ANSWER_TOKENS = 1150, 400  # of a turn; means
PREFILL_TOKENS_PER_S = 15_000.0
DECODE_TOKENS_PER_S = 100.0  # of one answer
PREFILL_ROOM, DECODE_ROOM = 400_000, 2_000_000  # tokens of a cache
TOKEN_BYTES = 131_072  # 32 layers, 8 heads of 128 values, two bytes each
LINK_BYTES_PER_S = 25e9
BLOCK = 16

# CPU times, measured (scale.md at 0ccf874, and its prototype of short questions).
HASH_S = 2.7e-6  # of one block
ENCODE_S = 20e-6  # of one question
ASK_S, READ_S = 90e-6, 180e-6  # of the asker for each source: to send a question, to take its answer
ANSWER_S = 0.22e-3  # of the source for each question
WIRE_S = 50e-6  # each way
TOLD_S, TOLD_END_S = 150e-6, 1e-6  # of the asker, to take what a source tells, and for each end
OLD_ASK_S, OLD_FIND_S = 0.9e-3, 5e-3  # of the asker for each source, and how long a request waited, at 0ccf874
LOOK_S = 4e-3  # between two looks of a scheduler at a request that waits for answers

WARM_S, SETTLE_S, MEASURED_S = 150.0, 30.0, 60.0
DRAIN_S = 10.0
SEEDS = 5
NAME = "tcp://decode.example:7600"
SECRET = "a secret of the model, long enough"


@dataclass(slots=True, eq=False)
class Request:
    """One turn of a conversation; the first fields are what the product reads."""

    request_id: str
    num_prompt_tokens: int
    application: int
    session: int
    turns_left: int
    num_answered: int  # tokens of the answer
    arrived: float
    chains: Chains = field(default_factory=Chains)
    fetched: int = 0  # tokens
    computed: int = 0  # tokens


# Contents. A digest names what it stands for, so that no tokens are needed; its first 8 bytes tell it from all others.

_DIGEST = Struct(">HIHxxxxxxxx")


class Model:
    """A fleet of engines, and what happened to its requests."""

    def __init__(self, way: str, seed: int, engines: int = 64) -> None:
        self.clock, self.random, self.num_engines = Clock(), random.Random(seed), engines
        weights = [rank**-ZIPF for rank in range(1, APPLICATIONS + 1)]
        sums, total = [], 0.0
        for weight in weights:
            total += weight
            sums.append(total)
        self._weights = sums
        least, most = APPLICATION_TOKENS  # spread evenly, so that the most frequent ones do not decide the figures
        spread = [least + (most - least) * (rank * GOLDEN % 1) for rank in range(1, APPLICATIONS + 1)]
        self.shared = [int(each) // BLOCK * BLOCK for each in spread]
        self.prefill = [Prefill(self, number) for number in range(engines)]
        self.decode = [Decode(self, number) for number in range(engines)]
        self.by_endpoint = {f"tcp://10.0.{each.number >> 8}.{each.number & 255}:7600": each for each in self.decode}
        self.way: Way = Free(self)
        self._next_way = way
        self._num_sessions = 0
        self.is_measured = False
        self._measured: set[Request] = set()  # those that came in the measured time
        self.outcomes: Counter[str] = Counter()
        self.num_asked = self.num_requests = self.num_stale = self.num_computed = self.num_tokens = 0
        self.first_token_s: list[float] = []

    def run(self, seconds: float = MEASURED_S) -> dict[str, float]:
        """Run the fleet and return the figures of the measured time."""
        with ExitStack() as stack:
            self._begin_session()
            self.clock.run(WARM_S)
            self.way = way = WAYS[self._next_way](self)
            way.open(stack)
            self.clock.run(WARM_S + SETTLE_S)
            self.is_measured = True
            sent = [each.link.num_bytes for each in self.decode]
            self.clock.run(WARM_S + SETTLE_S + seconds)
            self.is_measured = False
            outcomes = way.outcomes()
            sent = [each.link.num_bytes - before for each, before in zip(self.decode, sent, strict=True)]
            self.clock.run(self.clock.now + DRAIN_S)  # those that came last get their first token, too
        self.outcomes += outcomes
        used, firsts = [each / LINK_BYTES_PER_S / seconds for each in sent], sorted(self.first_token_s)
        return {
            "requests_per_s": self.num_requests / seconds,
            "prompt_tokens": self.num_tokens / len(firsts),
            "computed": self.num_computed / self.num_tokens,
            "questions": self.num_asked / self.num_requests,
            "stale": self.num_stale / self.num_requests,
            "p50_s": quantile(firsts, 0.50),
            "p90_s": quantile(firsts, 0.90),
            "p99_s": quantile(firsts, 0.99),
            "link_busiest": max(used),
            "link_mean": statistics.mean(used),
        }

    def _begin_session(self) -> None:
        rate = SESSIONS_PER_S * self.num_engines / 64
        self.clock.at(self.clock.now + self.random.expovariate(rate), self._begin_session)
        self._num_sessions += 1
        application = bisect_left(self._weights, self.random.random() * self._weights[-1])
        more = self.random.expovariate(1 / (TURNS_MEAN - TURNS_MIN))
        turns = min(TURNS_MAX, TURNS_MIN + round(more))
        self._turn(application, self._num_sessions, turns, self.shared[application])

    def _turn(self, application: int, session: int, turns_left: int, known: int) -> None:
        num_tokens = known + self._about(NEW_TOKENS)
        request_id, answer = f"{session}-{turns_left}", self._about(ANSWER_TOKENS)
        request = Request(request_id, num_tokens, application, session, turns_left, answer, self.clock.now)
        if self.is_measured:
            self.num_requests += 1
            self._measured.add(request)
        engine = min(self.prefill, key=lambda each: (each.num_open, self.random.random()))
        engine.take(request)

    def _about(self, num_tokens: int) -> int:
        return 16 + int(self.random.expovariate(1 / (num_tokens - 16)))

    def on_first_token(self, request: Request) -> None:
        """Count a request that has arrived in the measured time."""
        if request in self._measured:
            self.first_token_s.append(self.clock.now - request.arrived)
            self.num_computed += request.computed
            self.num_tokens += request.num_prompt_tokens

    def on_answered(self, request: Request) -> None:
        """Let the conversation go on, if it does."""
        if request.turns_left > 1:
            later = self.clock.now + self.random.expovariate(1 / THINK_S)
            known = request.num_prompt_tokens + request.num_answered
            self.clock.at(later, self._turn, request.application, request.session, request.turns_left - 1, known)

    def send(self, source: "Link", target: "Link", num_tokens: int) -> float:
        """Send blocks from one engine to another; return when they have arrived."""
        begins = max(self.clock.now, source.out_until, target.in_until)
        source.num_bytes += num_tokens * TOKEN_BYTES
        source.out_until = target.in_until = begins + num_tokens * TOKEN_BYTES / LINK_BYTES_PER_S
        return source.out_until


@dataclass(slots=True)
class Link:
    """Both directions of an engine's network card."""

    out_until: float = 0.0
    in_until: float = 0.0
    num_bytes: int = 0  # sent


class Cache:
    """What an engine keeps: tokens of conversations, and of the applications before them (-1, -2, ...)."""

    def __init__(self, room: int) -> None:
        self.kept: OrderedDict[int, int] = OrderedDict()
        self.room, self.used = room, 0

    def put(self, request: Request, shared: int, num_tokens: int) -> None:
        """Keep the first tokens of a conversation, of which an application shares some."""
        for key, tokens in ((request.session, num_tokens - shared), (~request.application, shared)):
            self.used += tokens - self.kept.pop(key, 0)
            self.kept[key] = tokens
        self.shrink(0)

    def shrink(self, others: int) -> None:
        """Reuse what was used longest ago, so that ``others`` have room."""
        while self.used + others > self.room and self.kept:
            self.used -= self.kept.popitem(last=False)[1]

    def held(self, application: int, session: int) -> int:
        """Return how many first tokens of a conversation are kept."""
        shared = self.kept.get(~application, 0)
        return shared + self.kept.get(session, 0) if shared else 0

    def usable(self, request: Request) -> int:
        """Return how many first tokens a prompt need not compute: whole blocks, without its last token."""
        held = self.held(request.application, request.session)
        return min(held, request.num_prompt_tokens - 1) // BLOCK * BLOCK


@dataclass(frozen=True, eq=False)
class Part:
    """As much of a kept lease as ``KeptEnds`` reads."""

    names: Names


class KeptCache(Cache):
    """What a decode engine keeps, and tells: each part has an end at each 1,024th token, and one at its last block."""

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self.ends = KeptEnds()
        self._parts: dict[int, Any] = {}

    def put(self, request: Request, shared: int, num_tokens: int) -> None:
        """See ``Cache.put``."""
        super().put(request, shared, num_tokens)
        parts = ((request.session, request.session, shared, num_tokens), (~request.application, 0, 0, shared))
        for key, session, begin, end in parts:
            self._end(key)
            if key in self.kept:
                places = {*range(STRIDE_TOKENS, end + 1, STRIDE_TOKENS), end - end % BLOCK}
                digests = [(request.application, session, place // BLOCK - 1) for place in places if place > begin]
                self._parts[key] = Part(Names(ends=tuple([_DIGEST.pack(*each)[:END_BYTES] for each in digests])))
                self.ends.add(self._parts[key])

    def shrink(self, others: int) -> None:
        """See ``Cache.shrink``."""
        before = list(self.kept) if self.used + others > self.room else []
        super().shrink(others)
        for key in before:
            if key in self.kept:
                break
            self._end(key)

    def _end(self, key: int) -> None:
        if key in self._parts:
            self.ends.remove(self._parts.pop(key))


class Prefill:
    """A prefill engine: it finds, fetches, and computes one prompt at a time."""

    def __init__(self, model: Model, number: int) -> None:
        self.model, self.number, self.link, self.cache = model, number, Link(), Cache(PREFILL_ROOM)
        self.num_open = 0
        self._ready: deque[Request] = deque()
        self._is_busy = False

    def take(self, request: Request) -> None:
        """Take a request of the router."""
        self.num_open += 1
        self.model.way.seek(self, request)
        self._look(self.model.way, request)

    def _look(self, way: "Way", request: Request) -> None:
        """See whether the answers are there; fetch what was found."""
        clock, cached = self.model.clock, self.cache.usable(request)
        if way.is_asking(self, request, request.num_prompt_tokens - cached):
            clock.at(clock.now + LOOK_S, self._look, way, request)
            return
        source, num_tokens = way.take(self, request, cached)
        if source is None or num_tokens <= cached:
            self._queue(request)
        elif source.cache.held(request.application, request.session) < num_tokens:
            self.model.num_stale += self.model.is_measured
            self._queue(request)
        else:
            request.fetched = num_tokens
            clock.at(self.model.send(source.link, self.link, num_tokens - cached), self._queue, request)

    def _queue(self, request: Request) -> None:
        self._ready.append(request)
        if not self._is_busy:
            self._compute()

    def _compute(self) -> None:
        self._is_busy, clock = bool(self._ready), self.model.clock
        if self._ready:
            request = self._ready.popleft()
            request.computed = request.num_prompt_tokens - max(self.cache.usable(request), request.fetched)
            self.model.way.on_scheduled(self, request.computed)
            clock.at(clock.now + request.computed / PREFILL_TOKENS_PER_S, self._computed, request)

    def _computed(self, request: Request) -> None:
        self.model.way.on_computed(self)
        shared = self.model.shared[request.application]
        self.cache.put(request, shared, request.num_prompt_tokens)
        self.num_open -= 1
        decode = min(self.model.decode, key=lambda each: (each.num_open, self.model.random.random()))
        decode.num_open += 1
        num_tokens = request.num_prompt_tokens - decode.cache.usable(request)
        self.model.clock.at(self.model.send(self.link, decode.link, num_tokens), decode.take, request)
        self._compute()


class Decode:
    """A decode engine: it keeps each turn whose answer it has computed."""

    def __init__(self, model: Model, number: int) -> None:
        self.model, self.number, self.link, self.cache = model, number, Link(), KeptCache(DECODE_ROOM)
        self.num_open = self._active = 0
        self.answers_until = 0.0  # the thread that answers questions is busy

    def take(self, request: Request) -> None:
        """Answer a prompt that has come."""
        self.model.on_first_token(request)
        self._active += request.num_prompt_tokens + request.num_answered
        self.cache.shrink(self._active)
        clock = self.model.clock
        clock.at(clock.now + request.num_answered / DECODE_TOKENS_PER_S, self._answered, request)

    def _answered(self, request: Request) -> None:
        num_tokens = request.num_prompt_tokens + request.num_answered
        self._active, self.num_open = self._active - num_tokens, self.num_open - 1
        self.cache.put(request, self.model.shared[request.application], num_tokens)
        self.cache.shrink(self._active)
        self.model.on_answered(request)


class Way:
    """How prefill engines find prefixes: this one asks nobody."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def open(self, stack: ExitStack) -> None:
        """Begin; the stack ends it."""

    def seek(self, engine: Prefill, request: Request) -> None:
        """Start to ask for a request."""

    def is_asking(self, engine: Prefill, request: Request, missing: int) -> bool:
        """Return whether a request waits, which misses so many tokens in the engine's own cache."""
        return False

    def take(self, engine: Prefill, request: Request, cached: int) -> tuple[Decode | None, int]:
        """Return what was found: who holds it, and how many tokens."""
        return None, 0

    def on_scheduled(self, engine: Prefill, num_tokens: int) -> None:
        """Take how many tokens a step computes."""

    def on_computed(self, engine: Prefill) -> None:
        """Note that a step has ended."""

    def outcomes(self) -> Counter[str]:
        """Return how searches have ended."""
        return Counter()

    def _best(self, sources: list[Decode], request: Request) -> tuple[Decode | None, int]:
        """Return the first of those that hold most."""
        best = max(sources, key=lambda each: each.cache.usable(request), default=None)
        return (best, best.cache.usable(request)) if best is not None else (None, 0)


class Free(Way):
    """Knows at once who holds most; any of those that hold the same."""

    def take(self, engine: Prefill, request: Request, cached: int) -> tuple[Decode | None, int]:
        """See ``Way.take``."""
        sources = self.model.decode
        if self.model.is_measured:
            self.model.num_asked += len(sources)
        return self._best(self.model.random.sample(sources, len(sources)), request)


class Old(Way):
    """Asks all in a fixed order, as 0ccf874 did: the time for it begins before the prompt is hashed."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._busy_until = [0.0] * len(model.prefill)
        self._in_time: dict[str, int] = {}

    def seek(self, engine: Prefill, request: Request) -> None:
        """See ``Way.seek``."""
        now, sources = self.model.clock.now, len(self.model.decode)
        asks_from = max(now, self._busy_until[engine.number]) + request.num_prompt_tokens // BLOCK * HASH_S
        self._busy_until[engine.number] = asks_from + sources * OLD_ASK_S
        in_time = int((now + OLD_FIND_S - 2 * WIRE_S - ANSWER_S - asks_from) / OLD_ASK_S)
        self._in_time[request.request_id] = min(sources, max(0, in_time))
        self.model.num_asked += sources * self.model.is_measured

    def is_asking(self, engine: Prefill, request: Request, missing: int) -> bool:
        """See ``Way.is_asking``."""
        return self.model.clock.now < request.arrived + OLD_FIND_S

    def take(self, engine: Prefill, request: Request, cached: int) -> tuple[Decode | None, int]:
        """See ``Way.take``."""
        return self._best(self.model.decode[: self._in_time.pop(request.request_id)], request)


# The product, and what it calls.


@dataclass(frozen=True, slots=True)
class FakeTicket:
    """As much of a ticket as the finder reads, and whose lease it is."""

    grants: tuple[Any, ...]
    session: int


class Contents:
    """Computes digests of what a request stands for, in the time that hashing takes."""

    def __init__(self, model: Model, loop: Loop) -> None:
        self._model, self._loop = model, loop

    def grow(self, request: Request, chains: Chains, block_sizes: Any, num_tokens: int) -> None:
        """See ``kvflow.contents.Contents``."""
        for size in block_sizes:
            digests, _ = chains.by_size.get(size, NO_CHAIN)
            new, shared = range(len(digests), num_tokens // size), self._model.shared[request.application] // size
            more = [_DIGEST.pack(request.application, 0 if at < shared else request.session, at) for at in new]
            chains.by_size[size] = [*digests, *more], 0
            self._loop.compute(len(new) * HASH_S)

    def require(self, request: Request, ticket: FakeTicket, first: int = 0, chains: Chains | None = None) -> None:
        """See ``kvflow.contents.Contents``."""
        (covered,) = ticket.grants[0].num_tokens
        if 0 < first < covered:
            return
        if ticket.session != request.session or covered > request.num_prompt_tokens:
            raise ContentMismatch("the blocks hold another conversation")


class Question(Asker):
    """One question to one source: the model carries and answers it, ``Asker.claim`` reads the answer."""

    def __init__(self, reader: "Reader", endpoint: str, places: list[bytes]) -> None:
        self.endpoint = endpoint
        self._reader, self._digests = reader, places
        self._ticket: FakeTicket | None = None

    async def ask(self, question: bytes, within_s: float) -> bytes:
        """See ``Asker.ask``."""
        loop, model = self._reader.loop, self._reader.model
        loop.compute(ASK_S)
        model.num_asked += model.is_measured
        answered = loop.create_future()
        model.clock.at(loop.time() + WIRE_S, self._arrive, answered)
        count = await answered
        loop.compute(READ_S)
        return encode(AnswerHeld(ticket="model" if count else "", count=count))

    def _arrive(self, answered: "asyncio.Future[int]") -> None:
        source, clock = self._reader.model.by_endpoint[self.endpoint], self._reader.model.clock
        source.answers_until = max(clock.now, source.answers_until) + ANSWER_S
        application, session, _ = _DIGEST.unpack(self._digests[-1])
        shared, own = source.cache.kept.get(~application, 0), source.cache.kept.get(session, 0)
        held = (shared + own if shared else 0) // BLOCK
        count = bisect_left(self._digests, held, key=lambda each: _DIGEST.unpack(each)[2])
        covered = shared + own if own else shared + BLOCK * 64  # of another conversation of this application
        self._ticket = FakeTicket((SimpleNamespace(num_tokens=(covered,)),), session if own else 0)
        clock.at(source.answers_until + WIRE_S, self._give, answered, count)

    def _give(self, answered: "asyncio.Future[int]", count: int) -> None:
        if not answered.done():
            answered.set_result(count)

    def _read_ticket(self, question: Any, held: Any) -> Any:
        return self._ticket


class Reader:
    """What the finder calls in place of ``PrefixReader``."""

    def __init__(self, model: Model, loop: Loop) -> None:
        self.model, self.loop = model, loop
        identity = SimpleNamespace(engine_id="decode", model="m", revision="")
        layers = (SimpleNamespace(kind="full", window=0),)
        groups = (SimpleNamespace(tokens_per_id=BLOCK, block_tokens=BLOCK, layers=layers),)
        self._manifests = {each: SimpleNamespace(identity=identity, groups=groups) for each in model.by_endpoint}

    async def read_manifest(self, endpoint: str) -> Any:
        """See ``PrefixReader``. Those of 64 sources come one after another, whatever the order of a set of texts."""
        await asyncio.sleep(WIRE_S * (1 + self.model.by_endpoint[endpoint].number))
        return self._manifests[endpoint]

    def asks_for(self, digests: Any) -> Any:
        """See ``PrefixReader``."""
        question = ContentQuestion(digests)
        self.loop.compute(ENCODE_S)
        return partial(self._claim, question, [digests[place] for place in question.places])

    async def follow_kept(self, endpoint: str) -> Any:
        """See ``PrefixReader``."""
        ends, since, begun = self.model.by_endpoint[endpoint].cache.ends, 0, 0
        while True:
            changes = ends.after(since, begun)
            is_anew = not since or changes.begun != begun
            since, begun = changes.until, changes.begun
            new, gone = _split(changes.new), _split(changes.gone)
            await asyncio.sleep(2 * WIRE_S)
            self.loop.compute(TOLD_S + TOLD_END_S * len(new + gone))
            yield Told(new, gone, is_anew, changes.is_all)

    async def _claim(self, question: ContentQuestion, digests: list[bytes], endpoint: str) -> Any:
        return await Question(self, endpoint, digests).claim(question, 1.0)


class FinderLoop(Loop):
    """The loop of a finder's thread, on which it looks up its sources."""

    def __init__(self, model: Model) -> None:
        super().__init__(model.clock)
        self._hosts = [each.removeprefix("tcp://").partition(":")[0] for each in model.by_endpoint]

    async def getaddrinfo(self, host: Any, port: Any, **_: Any) -> Any:
        return [(None, None, None, "", (each, port)) for each in self._hosts]


class Product(Way):
    """The product's finder, one in each prefill engine."""

    def open(self, stack: ExitStack) -> None:
        """See ``Way.open``."""
        model, seed = self.model, self.model.random.random()
        for name, value in {
            "time": SimpleNamespace(monotonic=model.clock.monotonic),
            "random": random.Random(seed),
            "threading": SimpleNamespace(Event=threading.Event, Thread=mock.Mock()),
        }.items():
            stack.enter_context(mock.patch.object(finder_module, name, value))
        self._tallies, self._finders = [], []
        for engine in model.prefill:
            loop = FinderLoop(model)
            reader = Reader(model, loop)

            @asynccontextmanager
            async def open_reader(*_, reader=reader, **__):
                yield reader

            extra = {"cluster_secret": SECRET, "sources": [NAME]}
            facts = EngineFacts(engine_id=f"prefill-{engine.number}", model="m", kv_role="kv_both")
            tally = Tally()
            with (
                mock.patch.object(asyncio, "new_event_loop", lambda loop=loop: loop),
                mock.patch.object(finder_module, "open_reader", open_reader),
            ):
                finder = Finder(read_settings(extra, facts), Contents(model, loop), tally)
                loop.create_task(finder._serve())
                model.clock.run(model.clock.now)
            self._tallies.append(tally)
            self._finders.append(finder)
        stack.callback(self._close)

    def _close(self) -> None:
        self.model.way = Way(self.model)
        for finder in self._finders:
            finder._loop.call_soon_threadsafe(finder._closing.set)
        self.model.clock.run(self.model.clock.now + 1.0)

    def seek(self, engine: Prefill, request: Request) -> None:
        """See ``Way.seek``."""
        self._finders[engine.number].seek(request, request.chains)

    def is_asking(self, engine: Prefill, request: Request, missing: int) -> bool:
        """See ``Way.is_asking``."""
        return self._finders[engine.number].is_asking(request.request_id, missing)

    def take(self, engine: Prefill, request: Request, cached: int) -> tuple[Decode | None, int]:
        """See ``Way.take``."""
        found = self._finders[engine.number].take(request.request_id, cached)
        return (None, 0) if found is None else (self.model.by_endpoint[found.source], found.num_tokens)

    def on_scheduled(self, engine: Prefill, num_tokens: int) -> None:
        """See ``Way.on_scheduled``."""
        self._finders[engine.number].on_scheduled(num_tokens)

    def on_computed(self, engine: Prefill) -> None:
        """See ``Way.on_computed``."""
        self._finders[engine.number].on_computed()

    def outcomes(self) -> Counter[str]:
        """See ``Way.outcomes``."""
        counters = [each.take() for each in self._tallies]
        return sum([Counter(each["prefixes"]) for each in counters if each is not None], Counter())


WAYS: dict[str, type[Way]] = {"none": Way, "old": Old, "free": Free, "product": Product}


def main() -> None:
    """Run each way with some seeds, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", default="none,old,free,product")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--engines", type=int, default=64, help="of each kind")
    parser.add_argument("--seconds", type=float, default=MEASURED_S, help="of the model, that are measured")
    options = parser.parse_args()
    for way in options.ways.split(","):
        began, rows, outcomes = time.perf_counter(), [], Counter()
        for seed in range(options.seeds):
            model = Model(way, seed, options.engines)
            rows.append(model.run(options.seconds))
            outcomes += model.outcomes
        medians = {name: round(statistics.median([row[name] for row in rows]), 3) for name in rows[0]}
        print(json.dumps({"way": way, **medians, "outcomes": outcomes, "took_s": round(time.perf_counter() - began)}))


if __name__ == "__main__":
    main()
