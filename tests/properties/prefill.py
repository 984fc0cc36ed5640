"""A prefill engine as vLLM runs one, with a memory that knows what each block holds, and ranks that keep leases.

vLLM's part is played here: its scheduler and block pool, its steps and the device. kvflow's part is real: the sides of
the connector, which hear what vLLM tells them, and the lease table of each rank.
"""

import threading
from collections import deque
from contextlib import ExitStack
from types import SimpleNamespace

from kvflow import Finished, RankAddress, Ticket
from kvflow.errors import BlockIdsInvalid, CapacityExceeded
from kvflow.integrations.vllm.admission import reachable
from kvflow.integrations.vllm.messages import KeepBlocks, Ordered, Reset
from kvflow.integrations.vllm.worker import RankWorker
from kvflow.layout.groups import Group
from kvflow.leases.epochs import EpochTable, judge
from kvflow.leases.held import OpenGroups
from kvflow.leases.table import LeaseTable, Reader
from tests.unit.kvflow.integrations.vllm_like import (
    ABORTED,
    OFFER,
    FullAttentionSpec,
    LikePool,
    SlidingWindowSpec,
    new_request,
    side,
    step_output,
)

BLOCK, WINDOW = 4, 9
NUM_BLOCKS, SLOTS, BASE = 20, 4, 500
PATIENCE_S = 3600.0  # the machine may stand still; only a defect takes so long
READER = Reader("decode", 0, 1)
KINDS = (Group((), "full", BLOCK), Group((), "sliding", BLOCK, WINDOW))


class LeaseKeeper:
    """The worker of a rank, which holds leases in a real table. ``refuses``: how many kept leases it will not hold."""

    def __init__(self, engine, rank):
        self._engine = engine
        self.rank_address = RankAddress(rank, f"{rank:032}", f"tcp://127.0.0.1:{5000 + rank}", BASE, SLOTS)
        self.epochs = EpochTable(SLOTS, BASE)
        self.table = LeaseTable(self.epochs, num_blocks=NUM_BLOCKS, unread_s=1e9)
        kinds = KINDS[: engine.num_groups]
        self._groups = OpenGroups(
            [BLOCK] * len(kinds), [each.settles for each in kinds], range(len(kinds)), [{each} for each in kinds]
        )
        self._ends, self.refuses, self.refused, self.held = [], 0, [], {}

    def admit(self, grant, digests=None):
        with self._engine.lock:
            if grant.kind == "kept" and self.refuses:
                self.refuses -= 1
                self.refused.append(grant)
                raise CapacityExceeded("leases of this test", 0)
            try:
                self._note(
                    self.table.admit(grant, 0.0, digests[0] if digests else (), set() if grant.is_open else None)
                )
            except Exception as error:
                if grant.kind == "kept":  # an offer may have its slot meanwhile
                    self.refused.append(grant)
                else:
                    self._engine.faults.append(f"{grant.request_id} is refused: {error}")
                raise
            self.held[grant.request_id] = self.table.held(grant.slot, grant.epoch)
            self._engine.compare()

    def revoke(self, name, grant=None):
        with self._engine.lock:
            is_held = name in self.table
            self._note(self.table.revoke(name, 0.0))
            if grant is not None:
                self._note(self.table.void(grant, 0.0))
            return is_held

    def advance(self, name, num_tokens, new):
        with self._engine.lock:
            lease = self.table.unsealed(name)
            if lease is None:
                return False
            sealed, most = num_tokens is None, lease.grant.num_tokens[0]
            settled = most if sealed else num_tokens
            if not lease.settled <= settled <= most:
                self._engine.faults.append(f"{name} takes back what has settled")
                raise BlockIdsInvalid("it takes back what has settled")
            new = new or ((),) * self._engine.num_groups
            whole = self._groups.whole(settled)
            blocks, told = self._groups.extend(lease.grant, lease.blocks, lease.told, new, whole, sealed=sealed)
            lease.told |= told
            ends = self._groups.counts(whole)
            served = blocks if sealed else tuple([each[:end] for each, end in zip(blocks, ends, strict=True)])
            self.table.advance(lease, blocks, served, settled, 0.0, sealed=sealed)
            self._engine.compare()
            return True

    def seal(self, name, new):
        return self.advance(name, None, new)

    def finished(self):
        with self._engine.lock:
            ends, self._ends = self._ends, []
            return ends

    def end(self, name):
        """Let a reader release a lease, or time end it."""
        with self._engine.lock:
            lease = self.held[name]
            answers, ended = self.table.release([(lease.grant.slot, lease.epoch)], READER, 0.0, read=True)
            assert answers == ["ended"]
            self._note(ended)

    def _note(self, ended):
        for each in ended:
            del self.held[each.request_id]
            self._ends.append(Finished(each.request_id, "producer", each.outcome))

    @property
    def leases(self):
        """The leases that readers end: their names."""
        return [name for name, lease in self.held.items() if lease.ends_by_readers]


class Courier:
    """The way to a rank between steps: commands arrive late, in order, or not at all."""

    def __init__(self, rank):
        self.rank, self.queue = rank, deque()

    def take(self, commands):
        self.queue.extend(commands)

    def reset(self, names):
        return self.rank.reset(names)


class Running:
    """A request in vLLM's scheduler. ``lists``: its blocks by group, 0 where a window has moved on."""

    def __init__(self, request, num_groups):
        self.request, self.computed, self.is_new = request, 0, True
        self.lists = [[] for _ in range(num_groups)]

    @property
    def tokens(self):
        return tuple(self.request.prompt_token_ids)

    @property
    def is_done(self):
        return self.computed >= len(self.tokens)


class Engine:
    """One prefill engine of some ranks.

    Args:
        windows: its model has layers with a sliding window.
        device: a device writes the cache, after the step was launched.
        clears: steps clear new blocks before anything else.
        concurrent: prompts are on offer while they are computed.
        near: ranks are reached between steps.
    """

    def __init__(self, *, windows, device, clears, concurrent, near, num_ranks):
        self.lock = threading.RLock()
        self.num_groups = 1 + windows
        self.device, self.clears, self.is_near = device, clears, near
        self.faults, self.memory, self.tokens = [], {}, {}
        self.launched, self.passed, self.step_number = deque(), 0, 0
        self.pool, self.running, self.keeping, self.done, self.preempted = LikePool(NUM_BLOCKS), {}, {}, [], set()
        self.keepers = [LeaseKeeper(self, rank) for rank in range(num_ranks)]
        mark = self._mark if device else None
        self.ranks = [RankWorker(keeper, mark) for keeper in self.keepers]
        self.couriers = [Courier(rank) for rank in self.ranks]
        self.stack = ExitStack()
        specs = (FullAttentionSpec(block_size=BLOCK), SlidingWindowSpec(block_size=BLOCK, sliding_window=WINDOW))
        self.side = side(
            *specs[: self.num_groups],
            met=False,
            dispatch="concurrent" if concurrent else "serial",
            keep=True,
            engine={"needs_kv_cache_zeroing": clears},
            second_runner=clears,
        )
        contacts = [self.stack.enter_context(reachable(each, apart=False)) for each in self.couriers] if near else []
        self.side.bind_pool(self.pool)
        self.side.meet_ranks([rank.address for rank in self.ranks], contacts)
        self._sent = [set() for _ in self.ranks]

    def close(self):
        for rank in self.ranks:
            rank.stop()
        self.side.close()
        self.stack.close()

    def _mark(self):
        number = self.step_number
        return lambda: self.passed >= number

    def flush(self):
        """Wait until the other thread has done its jobs, and those that they have made."""
        for _ in range(3):
            done = threading.Event()
            self.side.offering.submit(done.set)
            assert done.wait(PATIENCE_S)

    # What must hold.

    def compare(self):
        """Look at every lease that is held: each block that its readers may read has the bytes of its tokens."""
        for keeper in self.keepers:
            for name, lease in keeper.held.items():
                tokens = self.tokens[name.removeprefix("kept:")]
                num_tokens = lease.settled
                for group, ids in enumerate(lease.served):
                    whole = -(-num_tokens // BLOCK)
                    first = whole - len(ids) if lease.sealed else 0
                    for at, block in enumerate(ids, first):
                        needed = (group, tokens[: min(num_tokens, (at + 1) * BLOCK)])
                        if block >= 0 and not self._holds(block, needed, at):
                            found = self.memory.get(block)
                            self.faults.append(f"{name}: block {block} of {ids} has {found}, not {needed}")

    def _holds(self, block, needed, at):
        group, tokens = self.memory.get(block, (None, ()))
        return (
            group == needed[0]
            and at * BLOCK < len(tokens) <= (at + 1) * BLOCK
            and tokens[: len(needed[1])] == needed[1]
        )

    def check(self):
        with self.lock:
            assert self.faults == []

    # What clients, vLLM and readers do.

    def arrive(self, name, tokens, *, asks):
        request = new_request(dict(OFFER) if asks else None, tokens, request_id=name)
        request.num_computed_tokens = 0
        if not asks:
            request.max_tokens = 1
        self.side.on_new_request(request)
        self.tokens[name] = tuple(request.prompt_token_ids)
        self.running[name] = Running(request, self.num_groups)
        self.flush()

    def preempt(self, name):
        """Take the blocks of a request; it is computed again later."""
        running = self.running[name]
        self._free(running.lists)
        running.lists, running.computed = [[] for _ in running.lists], 0
        if not running.is_new:
            self.preempted.add(name)

    def _free(self, lists):
        for ids in lists:
            self.pool.free_blocks([self.pool.blocks[block] for block in reversed(ids) if block])

    def _allocate(self, running, count, ahead):
        """Allocate what a step needs; return the number of tokens before, the new blocks, and all that it writes."""
        tokens, is_first = running.tokens, not running.computed and not any(running.lists)
        if is_first and self.num_groups == 1:  # what the prefix cache has
            while (running.computed + BLOCK) < len(tokens):
                block = self.pool.cached((0, tokens[: running.computed + BLOCK]))
                if block is None:
                    break
                self.pool.touch([block])
                running.lists[0].append(block.block_id)
                running.computed += BLOCK
        before = running.computed
        end = min(len(tokens), before + count)
        if self.num_groups > 1:
            window = running.lists[1]
            gone = [at for at in range(max(0, before - WINDOW + 1) // BLOCK) if window[at]]
            self.pool.free_blocks([self.pool.blocks[window[at]] for at in reversed(gone)])
            for at in gone:
                window[at] = 0
        more = [max(0, -(-(end + ahead) // BLOCK) - len(ids)) for ids in running.lists]
        if sum(more) > self.pool.get_num_free_blocks():
            return None
        new = [[block.block_id for block in self.pool.get_new_blocks(each)] for each in more]
        for ids, fresh in zip(running.lists, new, strict=True):
            ids.extend(fresh)
        writes = []
        for group, ids in enumerate(running.lists):
            for at in range(before // BLOCK, -(-end // BLOCK)):
                content = (group, tokens[: min(end, (at + 1) * BLOCK)])
                writes.append((ids[at], content))
                if (at + 1) * BLOCK <= end:
                    self.pool.blocks[ids[at]].block_hash = content
        running.computed = end
        listed = [list(ids) for ids in running.lists] if is_first else new
        return before, listed, new, end - before, writes

    def step(self, counts, *, ahead=0, fast=False):
        """Take a step: schedule, tell kvflow, launch. ``fast``: the device has written before kvflow hears more."""
        self.step_number += 1
        new, known, done, writes, fresh = {}, {}, {}, [], []
        for name, count in counts.items():
            running = self.running[name]
            if running.is_done or name in self.preempted:
                continue
            found = self._allocate(running, count, ahead)
            if found is None:
                self.preempt(name)
                continue
            before, listed, blocks, done[name], written = found
            (new if running.is_new else known)[name] = before, listed
            running.is_new = False
            writes += written
            fresh += [block for ids in blocks for block in ids]
        lists = {name: [list(ids) for ids in each.lists] for name, each in self.running.items()}
        output = step_output(done, new, known, self.preempted)
        output.kv_connector_block_state = SimpleNamespace(get_block_ids=lists.get)
        self.preempted = set()
        self.side.on_scheduled(output, self.step_number)
        self.flush()
        commands, revoked = self.side.take_commands(), self.side.keeping.take_revoked()
        if self.clears:
            with self.lock:
                for block in fresh:
                    self.memory[block] = None, ()
                self.compare()
        before, after = self._divided(commands)
        for rank in self.ranks:
            rank.prepare(commands)
            rank.revoke(revoked)
            rank.execute(before)
        self.launched.append((self.step_number, writes))
        if fast or not self.device:
            self.write(len(self.launched))
        for rank in self.ranks:
            rank.execute(after)
            rank.end_step(self.step_number)
        self.collect()

    def _divided(self, commands):
        """Return the commands that come before the model runs, and those that come after its launch or end."""
        if not self.device and (not self.is_near or any(isinstance(each, Reset) for each in commands)):
            return commands, []
        holds = [each for each in commands if isinstance(each, Ordered | KeepBlocks)]
        others = [each for each in commands if not isinstance(each, Ordered | KeepBlocks)]
        return (holds, others) if self.device else (others, holds)

    def write(self, count):
        """Have the device do the work of so many steps."""
        for _ in range(min(count, len(self.launched))):
            with self.lock:
                number, writes = self.launched.popleft()
                for block, content in writes:
                    self.memory[block] = content
                self.compare()
                self.passed = number

    def collect(self):
        """Tell vLLM what has ended on all ranks: it has those blocks again."""
        refused = []
        for rank, sent in zip(self.ranks, self._sent, strict=True):
            found = rank.collect()
            assert not found.received
            assert not found.sent & sent
            sent.update(found.sent)
            refused += rank.take_refused()
        if refused:
            self.side.on_refused(refused)
        for name in sorted(set.intersection(*self._sent)):
            with self.lock:
                assert not any(name in keeper.held for keeper in self.keepers), "somebody may read its blocks"
            self._free(self.keeping.pop(name))
            for sent in self._sent:
                sent.remove(name)
            self.side.on_reported(None, {name})
        self.check()

    def finish(self, name, *, aborted):
        """End a request; return whether it is on offer."""
        running = self.running.pop(name)
        request = running.request
        self.preempted.discard(name)
        request.num_computed_tokens = running.computed
        request.status = ABORTED if aborted else request.status
        if not aborted:
            request.all_token_ids.append(7)
        lists = [list(ids) for ids in running.lists]
        keeps, params = self.side.on_finished(request, lists)
        if keeps:
            self.keeping[name] = running.lists
            (grant,) = Ticket.from_params(params).grants
            for ids, listed in zip(grant.block_ids, lists, strict=True):
                wanted = [block or -1 for block in listed[: -(-running.computed // BLOCK)]]
                assert list(ids) == wanted[len(wanted) - len(ids) :]
                assert grant.is_open or len(ids) >= min(len(wanted), 2)
        else:
            self._free(running.lists)
        self.flush()
        return keeps

    def end_kept(self):
        """Reset the prefix cache."""
        self.side.end_kept()
        self.pool.reset_prefix_cache()

    def drain(self):
        """End all that runs, and all leases but those that are kept; then everything is as in the beginning."""
        for name in list(self.running):
            self.finish(name, aborted=True)
        for _ in range(3):
            self.step({})
            self.write(len(self.launched))
            self.collect()
            for keeper in self.keepers:
                for name in keeper.leases:
                    keeper.end(name)
            self.collect()
        assert self.keeping == {}, "what was offered is given back"
        for keeper in self.keepers:
            assert keeper.leases == []
            assert all(judge(grant.epoch, keeper.epochs[grant.slot]) == "stale" for grant in keeper.refused)
        kept = [{name for name, lease in keeper.held.items() if not lease.ends_by_readers} for keeper in self.keepers]
        assert all(each == kept[0] for each in kept), "each rank keeps the same"
        for number in range(SLOTS):
            self.arrive(f"last-{number}", [900 + number] * 3, asks=True)
            self.step({f"last-{number}": 3})
            self.write(len(self.launched))
            assert self.finish(f"last-{number}", aborted=False), "every slot is free again"
        self.step({})
        self.check()
