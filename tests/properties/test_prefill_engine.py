"""Nobody reads other bytes than a prompt's from a prefill engine, whatever vLLM, its device and readers do, and when.

Each block of each lease that is held is compared with what the engine's memory holds there, at each change of either.
In the end every block and every slot is free again.
"""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.helpers.loops import looped

from .caches import thoroughly
from .prefill import BLOCK, NUM_BLOCKS, Engine

prompts = st.lists(
    st.tuples(st.integers(2, 22), st.sampled_from((0, 6, 8, 12)), st.sampled_from((True, True, False))),
    min_size=1,
    max_size=3,
)
"""Their tokens, how many of them at the beginning others have, too, and whether a ticket is asked for."""

counts = st.lists(st.sampled_from((3, 4, 8, 22)), min_size=1, max_size=3)
ahead = st.sampled_from((0, 0, 5))


class PrefillMachine(RuleBasedStateMachine):
    """One engine."""

    @initialize(
        windows=st.booleans(),
        device=st.booleans(),
        clears=st.sampled_from((False, False, True)),
        concurrent=st.booleans(),
        near=st.booleans(),
        num_ranks=st.sampled_from((1, 1, 2)),
    )
    def begin(self, **named):
        self.engine, self.count = Engine(**named), 0

    def arrive(self, prompts):
        for length, shared, asks in prompts:
            if len(self.engine.running) < 4:
                self.count += 1
                tokens = [1 + at if at < shared else 100 * self.count + at for at in range(length)]
                self.engine.arrive(f"r{self.count}", tokens, asks=asks)

    def take_steps(self, counts, left_out, *, ahead, fast, ends):
        for count in counts:
            names = [name for at, name in enumerate(self.engine.running) if at != left_out]
            self.engine.step(dict.fromkeys(names, count), ahead=ahead, fast=fast)
            if ends:
                self.finish(is_one=False)

    @rule(
        prompts=prompts, counts=counts, left_out=st.integers(2, 5), ahead=ahead, fast=st.booleans(), reads=st.booleans()
    )
    def serve(self, prompts, counts, left_out, *, ahead, fast, reads):
        """Prompts come, are computed and end, and what was offered is read: as in most engines at most times."""
        if reads:
            for rank in range(len(self.engine.ranks)):
                self.read(rank, 0, is_one=False)
        self.arrive(prompts)
        self.take_steps(counts, left_out, ahead=ahead, fast=fast, ends=True)

    @rule(
        prompts=prompts, counts=counts, left_out=st.integers(0, 5), ahead=ahead, fast=st.booleans(), ends=st.booleans()
    )
    def compute(self, prompts, counts, left_out, *, ahead, fast, ends):
        self.arrive(prompts[1:])
        self.take_steps(counts, left_out, ahead=ahead, fast=fast, ends=ends)

    @rule(fast=st.booleans())
    def step_with_nothing_to_compute(self, fast):
        self.engine.step({}, fast=fast)

    @precondition(lambda self: self.engine.running)
    @rule(which=st.integers(0, 9), seldom=st.integers(0, 2))
    def preempt(self, which, seldom):
        if not seldom:
            self.engine.preempt([*self.engine.running][which % len(self.engine.running)])

    @rule(count=st.integers(1, 3))
    def write(self, count):
        self.engine.write(count)

    @rule()
    def collect(self):
        self.engine.collect()

    @precondition(lambda self: any(each.is_done for each in self.engine.running.values()))
    @rule(is_one=st.booleans())
    def finish(self, is_one):
        done = [name for name, each in self.engine.running.items() if each.is_done]
        for name in done[:1] if is_one else done:
            self.engine.finish(name, aborted=False)

    @precondition(lambda self: self.engine.running)
    @rule(which=st.integers(0, 9), seldom=st.integers(0, 4))
    def abort(self, which, seldom):
        if not seldom:
            self.engine.finish([*self.engine.running][which % len(self.engine.running)], aborted=True)

    @rule(
        rank=st.integers(0, 1),
        count=st.integers(1, 3),
        twice=st.booleans(),
        is_lost=st.sampled_from((False, False, True)),
    )
    def deliver_between_steps(self, rank, count, twice, is_lost):
        if rank < len(self.engine.couriers):
            courier = self.engine.couriers[rank]
            for _ in range(min(count, len(courier.queue))):
                command = courier.queue.popleft()
                for _ in range(0 if is_lost else 1 + twice):
                    courier.rank.take((command,))
            self.engine.check()

    @rule(rank=st.sampled_from((0, 0, 1)), which=st.integers(0, 9), is_one=st.booleans())
    def read(self, rank, which, is_one):
        if rank < len(self.engine.keepers) and (names := self.engine.keepers[rank].leases):
            for name in [names[which % len(names)]] if is_one else names:
                self.engine.keepers[rank].end(name)

    @rule(rank=st.integers(0, 1))
    def refuse_to_keep(self, rank):
        if rank < len(self.engine.keepers):
            self.engine.keepers[rank].refuses = 1

    @rule(seldom=st.integers(0, 4))
    def reset_the_prefix_cache(self, seldom):
        if not seldom:
            self.engine.end_kept()

    def teardown(self):
        if hasattr(self, "engine"):
            try:
                self.engine.drain()
            finally:
                self.engine.close()


PrefillMachine.TestCase.settings = thoroughly(150, stateful_step_count=40)
TestPrefillEngine = PrefillMachine.TestCase


@looped("device", [False, True])
def test_a_kept_lease_that_another_of_its_step_extends_is_not_held(device):
    """Two requests end before the same step, and the prompt of one begins with that of the other."""
    named = {"windows": False, "clears": False, "concurrent": False, "near": False}
    engine = Engine(**named, device=device, num_ranks=2)
    for name, length in (("short", 6), ("long", 10)):
        engine.arrive(name, [1 + at for at in range(length)], asks=False)
        engine.step({name: length}, fast=True)
    for name in ("short", "long"):
        engine.finish(name, aborted=False)
    engine.step({}, fast=True)
    assert [[*keeper.held] for keeper in engine.keepers] == [["kept:long"]] * 2
    engine.arrive("large", [100 + at for at in range(NUM_BLOCKS * BLOCK - BLOCK)], asks=False)
    while not engine.running["large"].is_done:  # it has every block
        engine.step({"large": 16}, fast=True)
    assert [[*keeper.held] for keeper in engine.keepers] == [[]] * 2
    engine.drain()
    engine.close()
