"""Prompts that sources are asked for: the longest answer in time is loaded, and no fault of a source fails a prompt.

The sources are real workers. Only what they would not do, such as to be silent or to lie, is done for them.
"""

import asyncio
import socket
import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from msgspec import structs

from kvflow.contents import Chains
from kvflow.errors import CapacityExceeded, DeadlineExceeded, PeerLost, ProtocolViolation
from kvflow.integrations.vllm import finder as finder_module
from kvflow.integrations.vllm import scheduler
from kvflow.integrations.vllm.finder import Finder, PrefillRate
from kvflow.integrations.vllm.messages import Cancel, GiveBack, Hold, Load, Tally
from kvflow.integrations.vllm.settings import EngineFacts, read_settings
from kvflow.layout.specs import FullAttention, Mamba, SlidingWindow, State
from kvflow.rendezvous import dialer
from kvflow.rendezvous.dialer import Asker, Claim
from kvflow.rendezvous.issuer import draw_pair
from kvflow.worker.askers import PrefixReader
from kvflow.worker.threaded import run_worker
from tests.helpers.settings import flat_config
from tests.ports import free_port
from tests.unit.kvflow.worker.helpers import cache_of

from .vllm_like import (
    OFFER,
    SECRET,
    SIDES,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    blocks_of,
    counted,
    matched,
    new_contents,
    new_request,
    new_ticket,
    side,
    wait_until,
)

WITHIN_S = 30.0
PORT = free_port()
FIRST, SECOND, THIRD = (f"tcp://127.0.0.{number}:{PORT}" for number in (1, 2, 3))
NAME = f"tcp://decode.example:{PORT}"
STATES = {"layers.0": Mamba(block_size=16, states=(State("ssm", (2, 4, 4), "float32", shard_axis=0),))}


class Source:
    """A worker that keeps the first tokens of ``new_request``'s prompt.

    ``kept``: which of the last blocks it has in a group with windows of 49 tokens, if it has such a group.
    """

    def __init__(
        self,
        num_tokens=0,
        engine_id="decode-0",
        *,
        block_size=16,
        kept=None,
        error=None,
        before=None,
        is_silent=False,
        **settings,
    ):
        self.num_tokens = num_tokens
        self.block_size = block_size  # 0: it has only states
        self.kept = kept
        self.error = error  # instead of its answers
        self.end = threading.Event()  # of the test
        self.before = self.end if is_silent else before  # what its answers wait for
        self.ticket = None  # what it answers with, though it does not keep it
        self.settings = {
            "engine_id": engine_id,
            "cluster_secret": SECRET,
            "transport": "loopback",
            "model": "m",
            "tell": False,
        } | settings
        self.questions = []
        self.worker = None
        self._stack = ExitStack()

    def open(self, endpoint):
        size = self.block_size
        shape = {"block_size": size or 16, "num_kv_heads": 1, "head_size": 8, "dtype": "float16"}
        layers = {"layers.0": FullAttention(**shape)} if size else STATES
        if self.kept is not None:
            layers |= {"layers.1": SlidingWindow(window=49, **shape)}
        cache = cache_of(64, layers)
        self.worker = self._stack.enter_context(run_worker(flat_config(bind=endpoint, **self.settings), cache))
        if self.num_tokens and size:
            self.keep("kept:1", self.num_tokens, self.kept)

    def keep(self, name, num_tokens, kept):
        digests, blocks = chain_of(num_tokens, self.block_size), range(1, 1 + num_tokens // self.block_size)
        lists = [(blocks, digests)]
        if kept is not None:
            window = [32 + at if is_kept else -1 for at, is_kept in enumerate(kept)]
            last = digests[len(digests) - len(window) :]
            lists.append((window, [each if block >= 0 else b"" for block, each in zip(window, last, strict=True)]))
        return self.worker.keep(name, [ids for ids, _ in lists], num_tokens, [found for _, found in lists])

    def close(self):
        self._stack.close()


def chain_of(num_tokens, block_size):
    chains = Chains()
    new_contents().grow(new_request(None, num_tokens), chains, (block_size,), num_tokens)
    return chains.first(block_size, num_tokens)


class Finders:
    """Makes finders, opens the sources that they ask, and waits until they are connected."""

    def __init__(self):
        self.sources = {}
        self.asked = []  # endpoints, in the order of the questions

    def __call__(self, sources, *, unit=1, listed=None, find_s=WITHIN_S, tally=None, **extra):
        for endpoint, source in sources.items():
            self.sources[endpoint] = source
            if source.worker is None:
                source.open(endpoint)
        extra = {"sources": list(listed or sources), "fetch_tokens_min": 32, "model": "m", **extra}
        settings = read_settings({"cluster_secret": SECRET, **extra}, EngineFacts(engine_id="e", kv_role="kv_both"))
        finder = Finder(structs.replace(settings, find_s=find_s), new_contents(), tally or Tally(), unit=unit)
        SIDES.append(finder)
        wait_until(lambda: len(connected(finder)) == len(sources))
        return finder


def connected(finder):
    return {each.endpoint for each in list(finder._sources.values()) if each is not None}


@pytest.fixture
def finders(monkeypatch):
    """Make finders whose requests wait for answers as long as a busy machine may need."""
    monkeypatch.setattr(finder_module, "WAIT_S_MIN", WITHIN_S)
    monkeypatch.setattr(finder_module, "GIVE_UP_S", WITHIN_S)
    finders, claim = Finders(), Asker.claim

    async def ask(asker, question, within_s):
        finders.asked.append(asker.endpoint)
        source = finders.sources[asker.endpoint]
        source.questions.append(question.places)
        if source.before is not None:
            await asyncio.to_thread(source.before.wait, WITHIN_S)
        if source.error is not None:
            raise source.error
        if source.ticket is not None:
            return Claim(question.num_digests, range(0), lambda: source.ticket)
        return await claim(asker, question, WITHIN_S)

    monkeypatch.setattr(Asker, "claim", ask)
    yield finders
    for source in finders.sources.values():
        source.end.set()
    while SIDES:
        SIDES.pop().close()
    for source in finders.sources.values():
        source.close()


@pytest.fixture
def names(monkeypatch):
    """Return the addresses of ``NAME``, or the errors of its next look-ups, which are often."""
    monkeypatch.setattr(finder_module, "LOOK_S", 0.01)
    addresses, real = [], socket.getaddrinfo

    def resolve(host, port, *args, **named):
        if host != "decode.example":
            return real(host, port, *args, **named)
        if addresses and isinstance(addresses[0], Exception):
            raise addresses.pop(0)
        return [(0, 0, 0, "", (each, port)) for each in addresses]

    monkeypatch.setattr("socket.getaddrinfo", resolve)
    return addresses


def seek(finder, request, hints=()):
    finder.seek(request, Chains(), hints)


def sought(finder, request, hints=(), computed=0):
    """Ask for a request; wait until nothing more comes, and take what was found."""
    seek(finder, request, hints)
    search = finder._searches.get(request.request_id)
    asking = finder.is_asking(request.request_id)
    deadline = threading.Event()
    while search is not None and not search.is_done:
        deadline.wait(0.001)
    assert asking or search is None or search.is_done
    assert not finder.is_asking(request.request_id)
    return finder.take(request.request_id, computed)


def test_the_longest_answer_wins(finders):
    finder = finders({FIRST: Source(64), SECOND: Source(160, "decode-1"), THIRD: Source(96, "decode-2")})
    found = sought(finder, new_request(None, 400))
    assert (found.source, found.num_tokens, found.ticket.request_id) == (SECOND, 160, "kept:1")
    assert 0 <= found.asked_s <= WITHIN_S
    assert counted(finder._tally, "prefixes") == {"held": 1}
    assert finder.take("r", 0) is None


def test_a_source_that_holds_more_is_read_in_part(finders):
    finder = finders({FIRST: Source(160)})
    found = sought(finder, new_request(None, 100))
    assert (found.num_tokens, found.ticket.grants[0].num_tokens) == (96, (160,))
    assert sought(finder, new_request(None, 96)).num_tokens == 80  # the last token has to be computed


LAST = [1, 1, 1]  # all blocks of the last window
HOLE = [1, 1, 1, 1, 1, 0, 1, 1, 1, 1]  # of 160 tokens; after 96 to 128 of them, a window lacks a block


def test_without_a_whole_window_a_part_is_of_no_use(finders):
    finder = finders({FIRST: Source(160, kept=LAST)})
    assert sought(finder, new_request(None, 100)) is None
    assert sought(finder, new_request(None, 160)) is None
    assert sought(finder, new_request(None, 161)).num_tokens == 160
    assert counted(finder._tally, "prefixes") == {"not_held": 2, "held": 1}


@pytest.mark.parametrize(("prompt", "found"), [(161, 160), (160, 144), (144, 80), (100, 80), (81, 80), (80, 64)])
def test_the_longest_part_after_which_all_windows_are_whole_is_found(finders, prompt, found):
    finder = finders({FIRST: Source(160, kept=HOLE)})
    assert sought(finder, new_request(None, prompt)).num_tokens == found


@pytest.mark.parametrize(("prompt", "found"), [(161, 160), (160, 64), (100, 64)])
def test_a_part_fills_whole_blocks_of_this_engine(finders, prompt, found):
    finder = finders({FIRST: Source(160, kept=HOLE)}, unit=64)
    assert sought(finder, new_request(None, prompt)).num_tokens == found


@pytest.mark.parametrize(("prompt", "found"), [(161, 160), (144, 80), (100, 80)])
def test_of_a_source_that_names_more_only_what_the_lists_prove_is_read(finders, prompt, found):
    source = Source(kept=HOLE)
    finder = finders({FIRST: source})
    source.ticket = source.keep("kept:1", 160, HOLE)
    assert sought(finder, new_request(None, prompt)).num_tokens == found


@pytest.mark.parametrize("kept", [[0, *LAST], [1, 1, 0], [0, 1, 1, 0, 1, 1, 0, 1, 1, 0]])
def test_of_a_source_whose_lists_prove_nothing_nothing_is_read(finders, kept):
    source = Source(kept=LAST)
    finder = finders({FIRST: source})
    source.ticket = source.keep("kept:1", 160, kept)
    assert sought(finder, new_request(None, 144)) is None


def test_a_shorter_lease_with_a_whole_window_is_found_first(finders):
    source = Source(64, kept=LAST)
    finder = finders({FIRST: source})
    source.keep("kept:2", 160, LAST)
    found = sought(finder, new_request(None, 100))
    assert (found.ticket.request_id, found.num_tokens) == ("kept:1", 64)
    assert sought(finder, new_request(None, 161)).ticket.request_id == "kept:2"


def test_the_longest_whole_part_is_found_between_the_digests_of_a_question(finders, monkeypatch):
    monkeypatch.setattr(dialer, "DIGESTS_MAX", 4)
    finder = finders({FIRST: Source(16 * 20, kept=[*LAST, 0, 0, 0])})
    assert sought(finder, new_request(None, 16 * 18 + 1)).num_tokens == 16 * 17


def test_with_windows_the_whole_of_a_long_entry_is_found(finders, monkeypatch):
    monkeypatch.setattr(dialer, "DIGESTS_MAX", 4)
    finder = finders({FIRST: Source(16 * 7, kept=LAST)})
    assert sought(finder, new_request(None, 16 * 8 + 1)).num_tokens == 16 * 7
    assert sought(finder, new_request(None, 16 * 12 + 1)).num_tokens == 16 * 7  # its last block is not asked for


def test_another_prompt_is_not_held(finders):
    finder = finders({FIRST: Source(160)})
    assert sought(finder, new_request(None, range(1, 200))) is None
    assert sought(finder, new_request(None, 200, cache_salt="another")) is None
    assert counted(finder._tally, "prefixes") == {"not_held": 2}


def test_each_source_is_asked_in_its_own_block_size(finders):
    coarse, fine = Source(128, block_size=64), Source(0, "decode-1", block_size=8)
    finder = finders({FIRST: coarse, SECOND: fine})
    assert sought(finder, new_request(None, 200)).num_tokens == 128
    assert [len(each.questions[0]) for each in (coarse, fine)] == [3, 24]


def test_what_the_cache_has_need_not_be_fetched(finders):
    finder = finders({FIRST: Source(160)})
    assert sought(finder, new_request(None, 200), computed=144) is None
    assert sought(finder, new_request(None, 200), computed=128).num_tokens == 160
    assert counted(finder._tally, "prefixes") == {"below_minimum": 1, "held": 1}


def test_a_prompt_too_short_to_save_anything_is_not_asked_for(finders):
    source = Source(160)
    finder = finders({FIRST: source})
    assert sought(finder, new_request(None, 32)) is None
    assert source.questions == []
    assert counted(finder._tally, "prefixes") == {}


def test_the_source_of_a_hint_is_asked_first(finders):
    first, second = Source(160), Source(320, "decode-1")
    finder = finders({FIRST: first, SECOND: second})
    assert sought(finder, new_request(None, 400), [FIRST]).source == FIRST
    assert second.questions == []
    assert sought(finder, new_request(None, 400, "s"), [FIRST, SECOND]).source == SECOND
    first.worker.revoke("kept:1")  # then all others are asked
    assert sought(finder, new_request(None, 400, "t"), [FIRST]).source == SECOND
    assert counted(finder._tally, "prefixes") == {"held": 3}


def test_a_hint_that_names_no_source_is_ignored_and_counted(finders):
    finder = finders({FIRST: Source(160)})
    assert sought(finder, new_request(None, 400), ["tcp://10.0.0.9:1", "tcp://10.0.0.9:1"]).source == FIRST
    assert counted(finder._tally, "prefixes") == {"held": 1, "hint_ignored": 1}


def test_every_address_of_a_name_is_asked(finders, names):
    names += ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    sources = {FIRST: Source(64), SECOND: Source(160, "decode-1"), THIRD: Source(96, "decode-2")}
    finder = finders(sources, listed=[NAME])
    assert sought(finder, new_request(None, 400)).source == SECOND
    assert [len(each.questions) for each in sources.values()] == [1, 1, 1]
    assert sought(finder, new_request(None, 400), [NAME, THIRD]).source == SECOND
    assert counted(finder._tally, "prefixes") == {"held": 2}


def test_an_address_that_has_gone_is_no_longer_asked(finders, names):
    names += ["127.0.0.1", "127.0.0.2"]
    finder = finders({FIRST: Source(64), SECOND: Source(160, "decode-1")}, listed=[NAME])
    names.pop()
    wait_until(lambda: connected(finder) == {FIRST})
    assert sought(finder, new_request(None, 400)).num_tokens == 64
    assert sought(finder, new_request(None, 400), [SECOND]).num_tokens == 64
    assert counted(finder._tally, "prefixes") == {"held": 2, "hint_ignored": 1}


def test_a_name_without_an_address_is_looked_up_again(finders, names):
    names += [OSError("unknown"), UnicodeError("label too long"), "127.0.0.1"]
    finder = finders({FIRST: Source(64)}, listed=[NAME])
    assert sought(finder, new_request(None, 400)).source == FIRST


def test_a_source_with_a_key_of_its_own_is_asked_by_that_key(finders, monkeypatch):
    (private, public), (ours, our_public), (_, other) = draw_pair(), draw_pair(), draw_pair()
    theirs = {"private_key": private, "allowed_keys": (our_public,)}
    mine = {"private_key": ours, "allowed_keys": [public, other]}
    finder = finders({FIRST: Source(160, **theirs)}, listed=[f"{FIRST}#{public}"], **mine)
    assert sought(finder, new_request(None, 400), [FIRST]).source == FIRST
    assert counted(finder._tally, "prefixes") == {"held": 1}
    listed = [f"{SECOND}#{other}", SECOND]
    finder = finders({SECOND: Source(160, "decode-1", **theirs)}, listed=[f"{SECOND}#{public}", *listed], **mine)
    wait_until(lambda: len(finder._sources) == 3)
    assert sought(finder, new_request(None, 400)).source == SECOND


@pytest.mark.parametrize(
    "changes", [{"model": "another"}, {"engine_id": "e"}, {"block_size": 0}], ids=["model", "itself", "states"]
)
def test_an_engine_of_no_use_is_not_asked(finders, changes):
    useless, useful = Source(320, **changes), Source(160, "decode-1")
    finder = finders({FIRST: useless, SECOND: useful})
    assert sought(finder, new_request(None, 400)).source == SECOND
    assert useless.questions == []


@pytest.mark.parametrize(
    ("tokens", "rate", "expected"),
    [(300, None, 0.03), (30_000, None, 0.1), (30_000, 30_000, 0.05), (30_000, 3_000, 0.25)],
)
def test_who_may_save_more_waits_longer(finders, monkeypatch, tokens, rate, expected):
    finder = finders({}, listed=[FIRST], find_s=0.25)
    monkeypatch.setattr(finder_module, "WAIT_S_MIN", 0.03)
    monkeypatch.setattr(finder_module, "time", clock := SimpleNamespace(now=0.0, monotonic=lambda: clock.now))
    if rate is not None:
        finder.on_scheduled(rate)
        clock.now = 1.0
        finder.on_computed()
    assert finder._wait_s(tokens) == pytest.approx(expected)


def test_an_engine_is_as_fast_as_its_steps_of_prompts():
    rate = PrefillRate()
    for number, tokens in enumerate((8000, 16, 4000, 8000)):  # the third is slow
        rate.begin(tokens, number + 0.0)
        rate.begin(0, number + 0.1)  # two steps are in flight
        rate.end(number + 0.5)
        rate.end(number + 0.6)
    assert rate.tokens_per_s == pytest.approx(16_000)
    rate.end(9.0)
    rate.begin(500, 10.0)
    rate.begin(500, 10.0)
    rate.end(11.0)
    rate.end(12.0)  # it began when the one before it ended
    assert rate.tokens_per_s == pytest.approx(8_000)


def test_a_request_whose_cache_has_much_waits_as_for_the_rest(finders):
    finder = finders({FIRST: Source(160, is_silent=True)})
    request = new_request(None, 400)
    seek(finder, request)
    assert finder.is_asking(request.request_id, 400)
    assert not finder.is_asking(request.request_id, 31)
    assert finder.take(request.request_id, 369) is None
    assert counted(finder._tally, "prefixes") == {"below_minimum": 1}


def test_an_answer_that_nobody_can_better_ends_the_wait(finders):
    finder = finders({FIRST: Source(400, is_silent=True), SECOND: Source(400, "decode-1")})
    assert sought(finder, new_request(None, 400)).source == SECOND
    assert not finder._sources[FIRST].is_late


def test_of_a_long_prompt_few_digests_are_asked_for_and_then_the_winners(finders, monkeypatch):
    monkeypatch.setattr(dialer, "DIGESTS_MAX", 8)
    first, second = Source(16 * 30), Source(16 * 20, "decode-1")
    finder = finders({FIRST: first, SECOND: second})
    prompt = [*range(16 * 25), *range(5000, 5000 + 16 * 25)]  # it leaves what is kept within a stride
    assert sought(finder, new_request(None, prompt)).num_tokens == 16 * 25
    assert len(first.questions[0]) <= 8
    assert len(first.questions) == 2
    assert len(second.questions) == 1


@pytest.fixture
def clock(monkeypatch):
    """Return a clock that stands still, whose time ``hashing`` passes with each piece of digests."""
    clock = SimpleNamespace(now=0.0, hashing=0.0, monotonic=lambda: clock.now)
    grow = finder_module.Contents._grown

    def grown(*given):
        clock.now += clock.hashing
        return grow(*given)

    monkeypatch.setattr(finder_module, "time", clock)
    monkeypatch.setattr(finder_module.Contents, "_grown", grown)
    return clock


def test_the_clock_starts_when_the_question_leaves(finders, clock):
    finder = finders({FIRST: Source(160)}, find_s=WITHIN_S / 3)
    clock.hashing = WITHIN_S / 2
    found = sought(finder, new_request(None, 400))
    assert (found.source, found.asked_s) == (FIRST, 0.0)


def test_a_prompt_is_given_up_if_its_digests_take_too_long(finders, clock):
    source = Source(160)
    finder = finders({FIRST: source})
    clock.hashing = WITHIN_S
    assert sought(finder, new_request(None, 400)) is None
    assert source.questions == []
    assert not finder._sources[FIRST].is_late
    assert counted(finder._tally, "prefixes") == {"not_asked": 1}


def test_a_request_that_is_given_up_computes_no_more_digests(finders, monkeypatch):
    monkeypatch.setattr(finder_module, "GIVE_UP_S", 0.0)
    source = Source(160)
    finder = finders({FIRST: source})
    seek(finder, new_request(None, 400))
    wait_until(lambda: finder._searches["r"].is_done)
    assert finder.take("r", 0) is None
    wait_until(finder._turns.empty)
    assert source.questions == []


def test_who_comes_last_computes_digests_first(finders, monkeypatch):
    monkeypatch.setattr(finder_module, "PIECE_TOKENS", 128)
    finder = finders({FIRST: Source(160)})
    grown, grow, gate = [], finder_module.Contents.grow, threading.Event()

    def noted(contents, request, chains, sizes, num_tokens):
        if sizes == {16}:  # not for a ticket
            grown.append((request.request_id, num_tokens))
        grow(contents, request, chains, sizes, num_tokens)

    monkeypatch.setattr(finder_module.Contents, "grow", noted)
    finder._loop.call_soon_threadsafe(gate.wait, WITHIN_S)
    for name in "abc":
        seek(finder, new_request(None, 400, name))
    searches = list(finder._searches.values())
    gate.set()
    wait_until(lambda: all(each.is_done for each in searches))
    assert grown == [(name, end) for name in "cba" for end in (128, 256, 384, 399)]
    assert [finder.take(name, 0).num_tokens for name in "abc"] == [160] * 3


def test_what_has_come_in_time_is_used(finders):
    finder = finders({FIRST: Source(320, is_silent=True), SECOND: Source(160, "decode-1")})
    request = new_request(None, 400)
    seek(finder, request)
    search = finder._searches[request.request_id]
    wait_until(lambda: search.best is not None)
    assert finder.is_asking(request.request_id)
    search.until = 0.0
    assert not finder.is_asking(request.request_id)
    assert finder.take(request.request_id, 0).source == SECOND


LATE = {
    "silent": DeadlineExceeded("late", phase="handshake", peer=FIRST),
    "gone": PeerLost("gone", peer=FIRST),
    "hostile": ProtocolViolation("nonsense", peer=FIRST),
}


@pytest.mark.parametrize("error", LATE.values(), ids=LATE)
def test_nobody_waits_for_a_source_that_was_late(finders, monkeypatch, caplog, error):
    caplog.set_level("INFO", "vllm.kvflow")
    monkeypatch.setattr(finder_module, "FAILED_S", 1e6)
    source, gate = Source(320, error=error), threading.Event()
    finder = finders({FIRST: source, SECOND: Source(160, "decode-1")})
    late = finder._sources[FIRST]
    for number in range(3):
        assert sought(finder, new_request(None, 400, str(number))).source == SECOND
    assert len(source.questions) == 1  # the others came sooner than it is asked again
    for number in range(3):  # it is asked along, one question at a time, and no request waits for it
        source.before, late.ask_from = gate, 0.0
        assert sought(finder, new_request(None, 400, f"along {number}")).source == SECOND
    assert len(source.questions) == 2
    source.error = None
    gate.set()
    wait_until(lambda: not late.is_late)
    assert sought(finder, new_request(None, 400, "last")).source == FIRST
    assert caplog.text.count(f"requests do not wait for source {FIRST} until it answers in time: {error.message}") == 1
    assert caplog.text.count(f"source {FIRST} answers in time again") == 1


def test_a_dead_source_alone_costs_one_request_its_time(finders, monkeypatch):
    finder = finders({FIRST: Source(160, is_silent=True)})
    monkeypatch.setattr(finder_module, "WAIT_S_MIN", 0.001)
    assert sought(finder, new_request(None, 400)) is None
    wait_until(lambda: finder._sources[FIRST].is_late)
    finder._sources[FIRST].took_s = WITHIN_S
    monkeypatch.setattr(finder_module, "WAIT_S_MIN", WITHIN_S / 2)
    for number in range(3):
        assert sought(finder, new_request(None, 400, str(number))) is None
    assert counted(finder._tally, "prefixes") == {"late": 4}
    assert len(finders.sources[FIRST].questions) == 1  # it still waits for the first answer


def test_an_answer_that_has_come_is_read_though_the_time_is_over(finders, monkeypatch):
    ticket = new_ticket(160, (tuple(range(1, 11)),))

    async def read(*_):
        for _ in range(4):  # as many turns of the loop as an answer may take
            await asyncio.sleep(0)
        return Claim(10, range(10, 10), lambda: ticket)

    finder = finders({FIRST: Source()})
    monkeypatch.setattr(Asker, "claim", read)
    monkeypatch.setattr(finder_module, "WAIT_S_MIN", 0.0)
    monkeypatch.setattr(finder_module, "WAIT_SHARE", 0.0)
    request = new_request(None, 400)
    seek(finder, request)
    search = finder._searches[request.request_id]
    wait_until(lambda: search.is_done)
    assert search.best.num_tokens == 160


def test_a_source_that_refuses_a_question_has_not_answered_and_is_not_late(finders):
    source = Source(160, error=CapacityExceeded("questions", 1))
    finder = finders({FIRST: source})
    assert sought(finder, new_request(None, 400)) is None
    assert counted(finder._tally, "prefixes") == {"late": 1}
    source.error = None
    assert sought(finder, new_request(None, 400, "s")).source == FIRST


def test_what_nobody_holds_is_told_from_what_somebody_has_not_answered(finders, monkeypatch):
    monkeypatch.setattr(finder_module, "FAILED_S", 1e6)
    late, other = Source(0, error=LATE["silent"]), Source(0, "decode-1")
    finder = finders({FIRST: late, SECOND: other})
    assert sought(finder, new_request(None, 400)) is None
    assert counted(finder._tally, "prefixes") == {"late": 1}
    assert sought(finder, new_request(None, 400)) is None  # nobody waits for the first
    assert counted(finder._tally, "prefixes") == {"not_held": 1}
    other.error = LATE["silent"]
    assert sought(finder, new_request(None, 400)) is None
    assert sought(finder, new_request(None, 400)) is None  # nobody is asked
    assert counted(finder._tally, "prefixes") == {"late": 1, "not_asked": 1}


def test_a_prompt_shorter_than_a_block_of_a_source_is_not_held(finders):
    source = Source(64, block_size=64)
    finder = finders({FIRST: source})
    assert sought(finder, new_request(None, 40)) is None
    assert source.questions == []
    assert counted(finder._tally, "prefixes") == {"not_held": 1}


def test_sources_are_asked_in_random_order(finders):
    finder = finders({FIRST: Source(160), SECOND: Source(160, "decode-1"), THIRD: Source(160, "decode-2")})
    for number in range(60):  # one is never first in 1 of 12 billion runs
        assert sought(finder, new_request(None, 400, str(number)))
    assert set(finders.asked[::3]) == {FIRST, SECOND, THIRD}


def test_a_hinted_source_that_is_silent_leaves_half_of_the_time_to_others(finders, monkeypatch):
    left_s = []
    noted = SimpleNamespace(wait=lambda _: left_s.append(search.until - time.monotonic()))
    finder = finders({FIRST: Source(320, is_silent=True), SECOND: Source(160, "decode-1", before=noted)})
    monkeypatch.setattr(finder_module, "WAIT_S_MIN", 6.0)  # half of it is longer than a busy machine stalls
    request = new_request(None, 400)
    seek(finder, request, [FIRST])
    search = finder._searches[request.request_id]
    wait_until(lambda: search.is_done)
    assert left_s[0] <= 3.0
    assert finders.asked == [FIRST, SECOND]
    assert not finder._sources[SECOND].is_late


def test_of_a_name_with_too_many_addresses_some_are_asked(finders, names, caplog):
    finder = finders({FIRST: Source(160)})
    names += [f"10.0.{number >> 8}.{number & 255}" for number in range(1100)]
    for _ in range(2):
        found = asyncio.run_coroutine_threadsafe(finder._look_up(NAME), finder._loop).result(WITHIN_S)
        assert len(found) == 1100
    text = f"{NAME} has 1100 addresses, of which this engine asks 1024, and others if a hint names them. Set several"
    assert caplog.text.count(text) == 1


def test_a_hint_leads_to_an_address_beyond_those_that_are_connected(finders, names, monkeypatch):
    monkeypatch.setattr(finder_module, "ADDRESSES_MAX", 1)
    monkeypatch.setattr(finder_module, "LOOK_S", WITHIN_S)
    names += ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    sources = {each: Source(160, f"decode-{each[14:15]}") for each in (FIRST, SECOND, THIRD)}
    for endpoint, source in sources.items():
        finders.sources[endpoint] = source
        source.open(endpoint)
    finder = finders({}, listed=[NAME])
    wait_until(lambda: len(connected(finder)) == 1)
    (near,) = connected(finder)
    far, other = sorted(sources.keys() - {near})
    assert sought(finder, new_request(None, 400), [far]).source == far
    assert connected(finder) == {near, far}
    assert sought(finder, new_request(None, 400, "s")).source == near  # without a hint it is not asked
    assert [len(sources[each].questions) for each in (near, far, other)] == [1, 1, 0]
    assert counted(finder._tally, "prefixes") == {"held": 2}


def test_few_addresses_of_hints_are_dialed_in_a_second(finders, names, monkeypatch):
    monkeypatch.setattr(finder_module, "ADDRESSES_MAX", 0)
    monkeypatch.setattr(finder_module, "LOOK_S", WITHIN_S)
    names += [f"127.0.1.{number}" for number in range(1, 41)]
    dialed = []

    async def connect(_reader, endpoint):
        dialed.append(endpoint)
        raise PeerLost("gone", peer=endpoint)

    monkeypatch.setattr(PrefixReader, "_connect", connect)
    finder = finders({}, listed=[NAME])
    wait_until(lambda: len(finder._addresses[NAME]) == 40)
    clock = SimpleNamespace(now=1.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(finder_module, "time", clock)
    endpoints = sorted(finder._addresses[NAME])
    assert sought(finder, new_request(None, 400, "a"), endpoints[:20]) is None
    assert len(dialed) == 8
    assert sought(finder, new_request(None, 400, "b"), endpoints) is None
    assert len(dialed) == 8
    clock.now += 1.0
    assert sought(finder, new_request(None, 400, "c"), dialed) is None  # nobody dials what has failed
    assert len(dialed) == 8
    assert sought(finder, new_request(None, 400, "d"), endpoints) is None
    assert len(dialed) == len(set(dialed)) == 16
    assert counted(finder._tally, "prefixes") == {"not_asked": 4}


def test_few_addresses_are_dialed_at_a_time(finders, names, monkeypatch):
    monkeypatch.setattr(finder_module, "DIALED_MAX", 3)
    names += [f"127.0.1.{number}" for number in range(1, 41)]
    dialing, most, ended = set(), [], []

    async def connect(_reader, endpoint):
        dialing.add(endpoint)
        most.append(len(dialing))
        await asyncio.sleep(0)
        dialing.discard(endpoint)
        ended.append(endpoint)
        raise PeerLost("gone", peer=endpoint)

    monkeypatch.setattr(PrefixReader, "_connect", connect)
    finders({}, listed=[NAME])
    wait_until(lambda: len(set(ended)) == 40)
    assert max(most) == 3


def test_a_ticket_of_other_content_is_not_used(finders):
    source = Source()
    source.ticket = new_ticket(160, (tuple(range(1, 11)),), prompt=range(7, 400))
    finder = finders({FIRST: source})
    assert sought(finder, new_request(None, 400)) is None
    assert sought(finder, new_request(None, 400, "s")) is None
    assert len(source.questions) == 1


def test_a_source_that_was_restarted_is_asked_again(finders, monkeypatch):
    monkeypatch.setattr(finder_module, "LOOK_S", 0.01)
    source = Source(160)
    finder = finders({FIRST: source}, connect_s=0.05)
    before = finder._sources[FIRST].manifest
    source.close()
    wait_until(lambda: finder._sources[FIRST] is None)
    assert sought(finder, new_request(None, 400)) is None
    source.open(FIRST)
    wait_until(lambda: finder._sources[FIRST] is not None)
    assert sought(finder, new_request(None, 400)).source == FIRST
    assert finder._sources[FIRST].manifest is not before


def test_a_source_that_dies_costs_a_search_nothing(finders):
    source = Source(320)
    finder = finders({FIRST: source, SECOND: Source(160, "decode-1")})
    source.close()
    assert sought(finder, new_request(None, 400)).source == SECOND
    assert finder._sources[FIRST] is None or finder._sources[FIRST].is_late


def test_a_source_that_comes_later_is_asked_from_then_on(finders, monkeypatch, caplog):
    monkeypatch.setattr(finder_module, "LOOK_S", 0.01)
    caplog.set_level("INFO", "vllm.kvflow")
    late = Source(160, "decode-1")
    finder = finders({FIRST: Source(64)}, listed=[FIRST, SECOND], connect_s=0.05)
    wait_until(lambda: SECOND in finder._sources)
    assert sought(finder, new_request(None, 400)).source == FIRST
    late.open(SECOND)
    finders.sources[SECOND] = late
    wait_until(lambda: connected(finder) == {FIRST, SECOND})
    assert sought(finder, new_request(None, 400)).source == SECOND
    assert caplog.text.count(f"no prefixes come from {SECOND}") == 1


def test_searches_are_bounded_and_end_with_their_requests(finders, monkeypatch):
    monkeypatch.setattr(finder_module, "SEARCHES_MAX", 2)
    source = Source(160)
    finder = finders({FIRST: source})
    for name in "abc":
        seek(finder, new_request(None, 400, name))
    assert list(finder._searches) == ["a", "b"]
    finder.forget("a")
    finder.forget("unknown")
    assert finder.take("a", 0) is None
    finder.clear()
    assert finder.take("b", 0) is None
    assert counted(finder._tally, "prefixes") == {"not_asked": 1}


def test_a_defect_in_a_search_ends_only_that_search(finders, monkeypatch, caplog):
    finder = finders({FIRST: Source(160)})
    with monkeypatch.context() as patch:
        patch.setattr(finder, "_note", lambda *_: 1 / 0)
        assert sought(finder, new_request(None, 400)) is None
    wait_until(lambda: "a search for prefixes failed" in caplog.text)
    assert sought(finder, new_request(None, 400)).source == FIRST


def test_idle_steps_wait_for_the_answers_of_sources(finders, monkeypatch):
    gate = threading.Event()
    finder = finders({FIRST: Source(160, before=gate)})
    monkeypatch.setattr(finder_module, "LOAD_WAIT", finder_module.LOAD_WAIT._replace(each_s=WITHIN_S))
    finder.pause(idle=True)
    finder.pause(idle=True)  # nobody has asked for anything
    finder._has_answer.clear()
    seek(finder, new_request(None, 400))
    finder._loop.call_soon_threadsafe(finder._loop.call_later, 0.01, gate.set)
    finder.pause(idle=True)
    assert not finder.is_asking("r")
    assert finder.take("r", 0).source == FIRST


def test_the_thread_ends_with_its_connections(finders):
    finder = finders({FIRST: Source(160)})
    finder.close()
    assert not finder._thread.is_alive()
    assert not finder._reader._dialed
    finder.close()


# At the side of vLLM's scheduler.


@pytest.fixture
def engine(finders, monkeypatch):
    """Makes the scheduler's side of an engine with sources."""

    def make(sources, *specs, **named):
        monkeypatch.setattr(
            scheduler, "Finder", lambda *given, unit, waits: finders(sources, tally=given[2], unit=unit)
        )
        return side(*(specs or [FullAttentionSpec()]), sources=list(sources), **named)

    return make


def loaded(found, request, *blocks, computed=0):
    """Schedule a request; return its load."""
    num_tokens, is_load = matched(found, request, computed)
    assert is_load
    found.allocated(request, blocks_of(*blocks), num_tokens)
    (command,) = found.take_commands()
    assert isinstance(command, Load)
    return command


def test_a_prefill_loads_what_a_source_holds_and_offers_all_of_it(engine):
    gate = threading.Event()
    prefill = engine({FIRST: Source(160, before=gate)}, role="kv_producer")
    request = new_request(OFFER, 200)
    prefill.on_new_request(request)
    assert prefill.matched(request, 0) == (None, False)
    gate.set()
    load = loaded(prefill, request, range(1, 11))
    assert load.block_ids == (tuple(range(1, 11)),)
    assert (load.prefix.source, load.prefix.tokens_held, load.prefix.tokens) == (FIRST, 160, 160)
    assert (load.prefix.request_id, load.prefix.local_request_id) == ("kept:1", "r")
    prefill.on_reported({"r"}, None)
    assert prefill.take_counters()["prefixes"] == {"held": 1}
    offered, params = prefill.on_finished(request, [list(range(1, 14))])
    assert offered
    assert params["do_remote_prefill"]
    (command,) = prefill.take_commands()
    assert isinstance(command, Hold)
    assert command.grant.num_tokens == (200,)


def test_a_part_of_what_is_held_is_loaded_behind_the_cache(engine):
    prefill = engine({FIRST: Source(320)})
    request = new_request(OFFER, 200, name := "r" * 300)
    prefill.on_new_request(request)
    load = loaded(prefill, request, range(1, 13), computed=32)
    assert load.prefix.local_request_id == name[:256]
    assert load.block_ids == ((*range(1, 13), *[-1] * 8),)
    assert (load.prefix.tokens_held, load.prefix.tokens) == (192, 160)


def test_a_part_is_loaded_with_the_window_at_its_end(engine):
    prefill = engine({FIRST: Source(160, kept=HOLE)}, FullAttentionSpec(), SlidingWindowSpec(sliding_window=49))
    request = new_request(OFFER, 120)
    prefill.on_new_request(request)
    load = loaded(prefill, request, [*range(1, 6)], [*range(11, 16)])
    assert load.block_ids == ((*range(1, 6), *[-1] * 5), (*range(13, 16), *[-1] * 5))
    assert load.prefix.tokens == 80


def test_an_engine_that_keeps_states_asks_nobody(engine, caplog):
    prefill = engine({FIRST: Source(160)}, FullAttentionSpec(), MambaSpec())
    request = new_request(OFFER, 200)
    prefill.on_new_request(request)
    assert prefill.matched(request, 0) == (0, False)
    assert "no source is asked" in caplog.text


def test_a_prompt_that_nobody_holds_is_computed(engine):
    prefill = engine({FIRST: Source(0), SECOND: Source(0, "decode-1", error=PeerLost("gone", peer=SECOND))})
    request = new_request(None, 200)
    prefill.on_new_request(request)
    assert matched(prefill, request) == (0, False)
    assert prefill.take_commands() == []


@pytest.mark.parametrize(
    "request_",
    [
        new_request(None, 200, skips=True),
        new_request(None, 200, abort_immediately=True),
        new_request({"do_remote_prefill": True, **new_ticket().to_params()}, 200),
        new_request({"do_remote_prefill": True}, 200),
    ],
    ids=["every output is needed", "rejected", "it has a ticket", "it is refused"],
)
def test_who_must_not_be_asked_for_is_not(engine, request_):
    source = Source(160)
    decode = engine({FIRST: source})
    decode.on_new_request(request_)
    assert decode.matched(request_, 0)[0] is not None
    assert source.questions == []


def test_a_request_that_ends_while_sources_are_asked_is_forgotten(engine):
    gate = threading.Event()
    prefill = engine({FIRST: Source(160, before=gate)})
    request = new_request(OFFER, 200)
    prefill.on_new_request(request)
    request.status = SimpleNamespace(name="FINISHED_ABORTED")
    prefill.on_finished(request, [[]])
    gate.set()
    assert prefill.matched(request, 0) == (0, False)
    assert prefill.take_commands() == []


def test_a_kept_lease_is_neither_renewed_nor_released(engine):
    prefill = engine({FIRST: Source(160)})
    request = new_request(None, 200)
    prefill.on_new_request(request)
    assert matched(prefill, request) == (160, True)
    assert [prefill.take_commands() for _ in range(3)] == [[], [], []]  # it waits for free blocks
    request.status = SimpleNamespace(name="FINISHED_ABORTED")
    prefill.on_finished(request, [[]])
    assert prefill.take_commands() == []
    again = new_request(None, 200, "s")
    prefill.on_new_request(again)
    loaded(prefill, again, range(1, 11))
    again.status = SimpleNamespace(name="FINISHED_ABORTED")
    prefill.on_finished(again, [[]])
    assert [type(each) for each in prefill.take_commands()] == [Cancel]


def test_requests_of_one_kept_lease_wait_for_each_other_or_load_more(engine):
    prefill = engine({FIRST: Source(320)})
    short, same, longer = new_request(None, 100, "a"), new_request(None, 100, "b"), new_request(None, 400, "c")
    for each in (short, same, longer):
        prefill.on_new_request(each)
    assert loaded(prefill, short, range(1, 7)).prefix.tokens == 96
    assert matched_now(prefill, same) == (None, False)  # it follows the first
    assert loaded(prefill, longer, range(1, 21)).prefix.tokens == 320
    prefill.on_reported({"a"}, None)
    assert prefill.matched(same, 96) == (0, False)
    prefill.on_reported({"c"}, None)
    assert prefill.loading.begun() == []
    assert not any(isinstance(each, GiveBack) for each in prefill.take_commands())


def matched_now(found, request):
    wait_until(lambda: not found._finder.is_asking(request.request_id))
    return found.matched(request, 0)


def test_a_reset_drops_what_was_found(engine):
    prefill = engine({FIRST: Source(160)})
    first, second = new_request(None, 200, "a"), new_request(None, 200, "b")
    for each in (first, second):
        prefill.on_new_request(each)
    assert matched(prefill, first) == (160, True)
    assert prefill.reset(SimpleNamespace(finished_recving_kv_req_ids=set(), requests={}, connector=None))
    assert [prefill.matched(each, 0) for each in (first, second)] == [(0, False)] * 2


def test_hints_of_a_request_reach_the_sources(engine):
    first, second = Source(160), Source(320, "decode-1")
    prefill = engine({FIRST: first, SECOND: second})
    host, port = FIRST.removeprefix("tcp://").split(":")
    hint = {"remote_kv_source": {"kv_request_id": "x", "remote_host": host, "remote_port": int(port)}}
    request = new_request(OFFER | hint, 400)
    prefill.on_new_request(request)
    assert matched(prefill, request) == (160, True)
    assert second.questions == []


def test_a_defect_while_sources_are_asked_fails_no_request(engine, monkeypatch):
    prefill = engine({FIRST: Source(160)})
    monkeypatch.setattr(prefill._finder, "seek", lambda *_: 1 / 0)
    request = new_request(OFFER, 200)
    prefill.on_new_request(request)
    assert prefill.matched(request, 0) == (0, False)
    assert prefill.take_counters()["defects"] == {"_seek": 1}
