"""What a decode engine orders of its ranks: each ticket is read once or given back once, into the blocks of its tokens.

vLLM's part is played: requests come, wait, get blocks, end, in any order.
"""

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvflow.integrations.vllm.messages import Cancel, Fail, GiveBack, Load, RenewLeases
from tests.unit.kvflow.integrations.vllm_like import (
    FullAttentionSpec,
    SlidingWindowSpec,
    blocks_of,
    new_request,
    new_ticket,
    side,
)

from .caches import thoroughly

TOKENS_MAX = 24


class Request:
    """What is known of one. ``state``: ``announced``, ``following``, ``refused``, ``loading`` or ``forgotten``."""

    def __init__(self, request, ticket, *, covered, end, state, follows=None):
        self.request, self.ticket, self.covered, self.end = request, ticket, covered, end
        self.state, self.follows, self.computed = state, follows, None
        self.is_new = state == "announced"


class LoadingMachine(RuleBasedStateMachine):
    """One engine."""

    @initialize(windows=st.booleans())
    def begin(self, windows):
        self.sizes = (4, 8) if windows else (4,)
        specs = (FullAttentionSpec(block_size=4), SlidingWindowSpec(block_size=8, sliding_window=9))
        self.side = side(*specs[: len(self.sizes)], tokens_max=TOKENS_MAX)
        self.backoff = 1 if windows else 0
        self.requests, self.tickets, self.count = {}, [], 0
        self.expected = Counter()
        self.free = 1000

    def known(self, *states):
        return [name for name, each in self.requests.items() if each.state in states]

    def asked(self):
        """Return the requests that vLLM may give their blocks."""
        return [name for name in self.known("announced", "refused") if self.requests[name].computed is not None]

    def loader_of(self, ticket):
        """Return the request that loads a ticket; one that was refused does not."""
        loads = [name for name in self.known("announced", "loading") if self.requests[name].covered <= TOKENS_MAX]
        return next((name for name in loads if self.requests[name].ticket is ticket), None)

    def order(self, kind, name):
        ticket = self.requests[name].ticket if kind in (GiveBack, RenewLeases) else None
        self.expected[kind, name, ticket and ticket.signed] += 1

    @rule(length=st.integers(2, TOKENS_MAX + 4), less=st.integers(0, 6), again=st.booleans())
    def arrive(self, length, less, again):
        """A request brings a ticket of its own, or that of another, as copies of a request do."""
        self.count += 1
        name = f"r{self.count}"
        if again and self.tickets:
            tokens, ticket, covered = self.tickets[-1]
        else:
            tokens, covered = [1000 * self.count + at for at in range(length)], max(1, length - less)
            ids = tuple(tuple(range(1, 1 - (-covered // size))) for size in self.sizes)
            ticket = new_ticket(covered, ids, name, prompt=tokens[:covered], block_sizes=self.sizes)
            self.tickets.append((tokens, ticket, covered))
        request = new_request({"do_remote_prefill": True, **ticket.to_params()}, tokens, request_id=name)
        wanted, loader = max(0, len(tokens) - self.backoff), self.loader_of(ticket)
        self.side.on_new_request(request)
        if loader is not None:
            self.requests[name] = Request(
                request, ticket, covered=covered, end=wanted, state="following", follows=loader
            )
        elif covered > TOKENS_MAX:
            self.requests[name] = Request(request, ticket, covered=covered, end=wanted, state="refused")
            self.order(GiveBack, name)
        else:
            self.requests[name] = Request(request, ticket, covered=covered, end=min(wanted, covered), state="announced")

    @precondition(lambda self: self.known("announced", "following", "refused", "loading"))
    @rule(which=st.integers(0, 9), cached=st.integers(0, 3))
    def ask(self, which, cached):
        """vLLM asks how much can be loaded behind what its prefix cache has."""
        names = self.known("announced", "following", "refused", "loading")
        name = names[which % len(names)]
        each = self.requests[name]
        computed = min(8 * cached, (len(each.request.prompt_token_ids) - 1) // 8 * 8)
        found = self.side.matched(each.request, computed)
        match each.state:
            case "loading":
                assert found == (0, False)
            case "following":
                waits = self.requests[each.follows].state in ("announced", "loading")
                assert found == ((None, False) if waits else (0, False))
            case _:
                most = max(0, each.end - computed)
                assert found == (most, most > 0)
                each.computed = computed

    @precondition(lambda self: self.asked())
    @rule(which=st.integers(0, 9), ahead=st.integers(0, 1))
    def allocate(self, which, ahead):
        """vLLM gives a request its blocks; those of the prefix cache are filled."""
        name = self.asked()[which % len(self.asked())]
        each = self.requests[name]
        num_tokens = max(0, each.end - each.computed)
        lists = []
        for size in self.sizes:
            count = -(-(each.computed + num_tokens) // size) + ahead
            lists.append([self.free + at for at in range(count)])
            self.free += count
        blocks = blocks_of(*lists)
        for size, group in zip(self.sizes, blocks.blocks, strict=True):
            for block in group[: each.computed // size]:
                block.block_hash = b"filled"
        self.side.allocated(each.request, blocks, num_tokens)
        if not num_tokens:
            if each.state == "announced":
                self.order(GiveBack, name)
            each.state = "forgotten"
        else:
            self.order(Load if each.state == "announced" else Fail, name)
            each.state, each.lists = "loading", lists

    @precondition(lambda self: self.known("loading"))
    @rule(which=st.integers(0, 9))
    def be_received(self, which):
        names = self.known("loading")
        name = names[which % len(names)]
        self.look()
        self.side.on_reported({name}, None)
        self.requests[name].state = "forgotten"

    @precondition(lambda self: self.known("announced", "following", "refused", "loading"))
    @rule(which=st.integers(0, 9))
    def finish(self, which):
        names = self.known("announced", "following", "refused", "loading")
        name = names[which % len(names)]
        each = self.requests[name]
        self.side.on_finished(each.request, [[] for _ in self.sizes])
        if each.state == "loading":
            self.order(Cancel, name)
            return
        if each.state == "announced":
            self.order(GiveBack, name)
        each.state = "forgotten"

    @rule()
    def look(self):
        """Take what the ranks are told."""
        for name, each in self.requests.items():
            if each.is_new and each.state == "announced":
                self.order(RenewLeases, name)
            each.is_new = False
        commands = self.side.take_commands()
        found = Counter()
        for command in commands:
            ticket = command.ticket if isinstance(command, GiveBack | RenewLeases) else None
            found[type(command), command.request_id, ticket and ticket.signed] += 1
            if isinstance(command, Load):
                self.compare(command)
        assert found == self.expected
        self.expected = Counter()

    def compare(self, load):
        """Look where each block of the ticket is read to."""
        each = self.requests[load.request_id]
        assert load.ticket == each.ticket
        for size, ids, listed, window in zip(self.sizes, load.block_ids, each.lists, (0, 9), strict=False):
            end = -(-each.end // size)
            first = max(0, each.end - window + 1) // size if window else 0
            targets = dict(enumerate(ids, -(-each.covered // size) - len(ids)))
            for at in range(max(end, *targets) + 1 if targets else end):
                is_wanted = max(first, each.computed // size) <= at < end
                assert targets.get(at, -1) == (listed[at] if is_wanted else -1)

    def teardown(self):
        if not hasattr(self, "side"):
            return
        for name in self.known("announced", "following", "refused"):
            self.side.on_finished(self.requests[name].request, [[] for _ in self.sizes])
            if self.requests[name].state == "announced":
                self.order(GiveBack, name)
            self.requests[name].state = "forgotten"
        self.look()
        self.side.close()


LoadingMachine.TestCase.settings = thoroughly(80, stateful_step_count=30)
TestLoading = LoadingMachine.TestCase
