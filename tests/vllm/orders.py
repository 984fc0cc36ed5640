"""Engines whose devices work late, with prompts, loads, aborts and preemptions at random; every cell read is compared.

A *source* computes prompts, offers those that are asked for, and keeps the others. An engine reads from it: by tickets
if it consumes, and else what it finds. Its cache is small, so blocks serve one request right after the other.
"""

import itertools
import threading
import time
from collections import Counter
from functools import partial
from random import Random

from . import first_runner, second_runner
from .engines import PREFILL_PARAMS
from .pairs import model_folder
from .second_runner import BLOCK_SIZE

EXECUTORS = {"first": first_runner.Executor, "second": second_runner.Executor}
ROLES = ("kv_producer", "kv_consumer", "kv_both")
PATIENCE_S = 120.0
PREFIXES = 4
PREFIX = 5 * BLOCK_SIZE
REST = 3 * BLOCK_SIZE  # longest rest of a prompt behind its prefix
ANSWER = 60
NUM_BLOCKS = 14
NAMES = itertools.count()


class Held:
    """What lies in the blocks that the leases of a rank hold, from the time that peers may read them.

    Attributes:
        changed: leases whose blocks were written while they were held.
        settled: how often a part of an open lease has settled.
    """

    def __init__(self, rank):
        self._cells = rank.cells
        self._worker = rank.connector._runtime.rank._worker
        self._of = {}
        self.changed = []
        self.settled = 0
        for name in ("admit", "advance", "seal"):
            setattr(self._worker, name, self._before(getattr(self, f"_{name}"), getattr(self._worker, name)))
        rank.device.after = self.check

    def _before(self, note, call):
        def noted(*args):
            note(*args)
            return call(*args)

        return noted

    def _admit(self, grant, _digests=None):
        self._of[grant.request_id] = {}
        for blocks, num_tokens in zip(grant.block_ids, grant.num_tokens, strict=True):
            self._note(grant.request_id, blocks, num_tokens if len(blocks) > 1 else BLOCK_SIZE)

    def _advance(self, name, _settled, block_ids):
        self.settled += any(block_ids)
        self._note(name, *block_ids)

    def _seal(self, name, block_ids):
        whole = block_ids[0][:-1]  # the last block may be partly filled
        self._note(name, whole)

    def _note(self, name, blocks=(), num_tokens=1 << 20):
        for index, block in enumerate(blocks):
            first, length = block * BLOCK_SIZE, min(BLOCK_SIZE, num_tokens - index * BLOCK_SIZE)
            cells = slice(first, first + max(0, length))
            self._of[name][block] = cells, self._cells[:, cells].copy()

    def check(self):
        """Compare all that is held with what it was."""
        leases = self._worker._thread.worker._leases._leases._by_request
        for name, blocks in list(self._of.items()):
            for cells, before in list(blocks.values()):  # another thread adds some
                if (self._cells[:, cells] != before).any():
                    del self._of[name]
                    if name in leases:
                        self.changed.append(name)
                    break


class World:
    """A source and an engine that reads from it, or an engine that offers what it computes.

    Args:
        runner: ``first`` or ``second``, of both.
        role: ``kv_role`` of the engine that reads.
        seed: of everything that is drawn.
        drafts: the engine that reads has a draft model.
        states: a layer of both has states. They are read by tickets alone.
        stages: pipeline stages of both.
        opens: it offers each prompt when it arrives.

    Attributes:
        happened: what has happened, and how often.
    """

    def __init__(self, runner, role, seed, *, drafts=False, states=False, stages=1, opens=False):
        self.draw = Random(f"{runner} {role} {seed} {drafts} {states} {stages} {opens}")
        self.happened = Counter()
        chunk = 24 if opens else 48
        start = {"executor": EXECUTORS[runner], "max_num_batched_tokens": chunk, "max_num_seqs": 8}
        start |= {"drafts": drafts, "states": states, "stages": stages}
        start["enable_prefix_caching"] = not (opens or states)
        folder = model_folder("llama")
        self.source = second_runner.Engine(folder, "kv_both", num_blocks=256, own={"keep": not states}, **start)
        own = {"dispatch": "concurrent"} if opens else {}
        if asks := role != "kv_consumer" and not (opens or states):
            own |= {"sources": [self.source.rank.address.endpoint], "fetch_tokens_min": 1, "find_s": 1.0}
        self.engine = second_runner.Engine(folder, role, num_blocks=NUM_BLOCKS, own=own, **start)
        self.engines = (self.source, self.engine)
        self.takes_tickets, self.opens = role != "kv_producer", opens
        self.tickets = []
        self.asked, self.offered = [], []
        self.wanted = {}
        self.workers = [worker for engine in self.engines for worker in engine.workers]
        self.held = [Held(worker) for worker in self.workers]
        self._finder = self.engine.scheduler.connector._scheduler._finder
        self._watch(self.engine)
        for engine in self.engines:
            for worker in engine.workers:
                worker.between = partial(self._between, engine)
        if asks:
            self._fill()
        if opens:
            self._lose(self.engine.scheduler.connector._scheduler.offering)

    def _watch(self, engine):
        preempt, pull_many = engine.scheduler._preempt_request, engine.rank._worker.pull_many

        def preempted(*args, **named):
            self.happened["preempted"] += 1
            return preempt(*args, **named)

        def pulled(items):
            futures = pull_many(items)
            for future in futures:
                future.add_done_callback(self._count)
            return futures

        engine.scheduler._preempt_request, engine.rank._worker.pull_many = preempted, pulled

    def _lose(self, offering):
        """Have most of the commands that may come before their step come with it alone, as behind a busy rank."""
        send, draw = offering._send, Random(0)
        offering._send = lambda command: draw.random() < 0.1 and send(command)

    def _count(self, future):
        self.happened["read" if not future.cancelled() and future.exception() is None else "not read"] += 1

    def _fill(self):
        """Have the source keep some prompts, and wait until the engine knows the source."""
        for number in range(2 * PREFIXES):
            self.source.ask(f"first {number}", self.prompt(), max_tokens=1)
        deadline = time.monotonic() + PATIENCE_S
        while self.source.has_work:
            self.source.step()
        while not any(self._finder._sources.values()):
            assert time.monotonic() < deadline, "the source cannot be reached"
            time.sleep(0.01)

    @property
    def writes_behind(self):
        """Whether the engine writes when the tokens of a step are on their way."""
        config = self.engine.core.vllm_config
        return config.speculative_config is not None or config.model_config.is_hybrid

    @property
    def faults(self):
        """What was read and should not, and what was written though it was on offer."""
        read = [each for worker in self.workers for each in worker.wrong]
        return read + [("held", name) for held in self.held for name in held.changed]

    def run(self, steps):
        """Let the engine take some steps, until there is a fault."""
        until = self.happened["step"] + steps
        while self.happened["step"] < until and not self.faults:
            self._act()
            for engine in self.engines:
                if engine.has_work:
                    engine.step()
                    self.happened["step"] += engine is self.engine
                self._work(engine)

    def settle(self):
        """Let what runs end."""
        deadline = time.monotonic() + PATIENCE_S
        while any(engine.has_work for engine in self.engines):
            assert time.monotonic() < deadline, self.happened
            for engine in self.engines:
                if engine.has_work:
                    engine.step()
            self._take_tickets()
            for name in self.asked:  # nobody reads the rest
                revoke(self.source, name)

    def close(self):
        for engine in self.engines:
            engine.close()

    def prompt(self):
        """Draw a prompt, whose beginning some others have."""
        which = self.draw.randrange(PREFIXES)
        beginning = Random(f"prefix {which}")
        length = self.draw.choice((0, BLOCK_SIZE, self.draw.randrange(REST)))
        rest = Random(f"rest {which} {self.draw.randrange(3)}")
        return [beginning.randrange(99) for _ in range(PREFIX)] + [rest.randrange(99) for _ in range(length + 1)]

    def _act(self):
        """Send something to one of the engines, or abort it."""
        self._take_tickets()
        running = [name for name, each in self.engine.outputs.items() if each.finished is None]
        if self.draw.random() < (0.02 if self.opens else 0.15) and running:
            name = self.draw.choice(running)
            self.engine.abort(name)
            self.engine.outputs[name].finished = "abort"
            self.happened["aborted"] += 1
        if len(running) < (6 if self.opens else 4) and self.draw.random() < 0.5:
            self._ask()
        busy = [name for name, each in self.source.outputs.items() if each.finished is None]
        # Without sources, tickets alone bring something to read.
        if not self.opens and len(busy) < 2 and self.draw.random() < (0.2 if self._finder else 0.6):
            asks = self.takes_tickets and len(self.tickets) < 4
            name, prompt = f"s{next(NAMES)}", self.prompt()
            self.source.ask(name, prompt, PREFILL_PARAMS if asks else None, max_tokens=1)
            self.wanted[name] = prompt
            self.asked += [name] if asks else []

    def _ask(self):
        name, prompt, params = f"e{next(NAMES)}", self.prompt(), None
        if self.opens and self.draw.random() < 0.6:
            params = PREFILL_PARAMS
        if self.tickets and self.draw.random() < 0.7:
            prompt, params = self.tickets.pop(0)
        self.engine.ask(name, prompt, params, max_tokens=self.draw.randrange(1, ANSWER))

    def _take_tickets(self):
        for name in [name for name in self.wanted if self.source.outputs[name].finished is not None]:
            prompt, answer = self.wanted.pop(name), self.source.outputs.pop(name)
            if answer.params and answer.params["do_remote_prefill"]:
                self.tickets.append((prompt, answer.params))
        for name in [name for name, each in self.engine.outputs.items() if each.finished is not None]:
            answer = self.engine.outputs.pop(name)
            self.happened["ended"] += 1
            if self.opens and answer.params and answer.params["do_remote_prefill"]:
                self.happened["offered"] += 1
                self.offered.append(name)
        for name in self.offered:  # as if it had been read, once its last step has written
            revoke(self.engine, name)
        del self.offered[:-8]

    def _between(self, engine):
        if self.opens and self.draw.random() < 0.5:
            for worker in engine.workers:
                worker.device.work()
        self._work(engine)

    def _work(self, engine):
        """Let devices do some of what they were given, and reads end."""
        for worker in engine.workers:
            for _ in range(self.draw.choice((0, 0, 0, 1, 2, 9))):
                if not worker.device.is_idle:
                    worker.device.work_once()
        pulls = [rank for rank in engine.ranks if rank._pulls]
        if pulls and self.draw.random() < 0.7:
            for rank in pulls:
                rank._worker.wait_finished(0.02, at_least=len(rank._pulls))
        elif self._finder is not None and engine is self.engine and any(map(self._finder.is_asking, engine.outputs)):
            time.sleep(0.0005)


def revoke(engine, name):
    """End a lease on all ranks."""
    for rank in engine.ranks:
        rank._worker.revoke(name)


def crowded(runner):
    """Have many answers take the blocks of a prompt that is on offer and half computed, in the step that preempts it.

    Return the leases whose blocks were written while they were held, and how often a part of the prompt had settled.

    Args:
        runner: ``first`` or ``second``.
    """
    spare, answers = 18, 16  # blocks that are free when the prompt comes, and requests that take them
    limits = {"max_num_seqs": 20, "executor": EXECUTORS[runner]}
    limits |= {"max_num_batched_tokens": 20 * answers, "long_prefill_token_threshold": 16}  # all want blocks at once
    num_blocks = 1 + 2 * answers + spare
    own = {"dispatch": "concurrent"}
    engine = second_runner.Engine(
        model_folder("llama"), "kv_producer", num_blocks=num_blocks, drafts=False, own=own, **limits
    )
    try:
        side, preempted = engine.scheduler.connector._scheduler, []
        side.offering._send = lambda _: None  # commands come with their step, as to a rank that is busy
        preempt = engine.scheduler._preempt_request
        engine.scheduler._preempt_request = lambda *args, **named: preempted.append(args) or preempt(*args, **named)
        held = Held(engine.worker)
        engine.worker.between = engine.device.work
        for number in range(answers):
            engine.ask(f"answer {number}", [number] * 20, max_tokens=200)
        deadline = time.monotonic() + PATIENCE_S
        while engine.free_blocks > spare:
            assert time.monotonic() < deadline
            engine.step()
        engine.ask("offered", [7] * 16 * spare, PREFILL_PARAMS)
        is_open = threading.Event()
        side.offering.submit(is_open.set)  # behind what opens the offer
        assert is_open.wait(PATIENCE_S)
        while not preempted:
            assert time.monotonic() < deadline
            engine.step()
        return held.changed, held.settled
    finally:
        engine.close()
