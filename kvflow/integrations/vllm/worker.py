"""The worker's side: serves the cache of one rank, executes commands, and reports ended transfers.

kvflow's own thread posts, polls and checks reads. A step of the engine only hands over commands and collects the
transfers that have ended since the last step.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import inf
from typing import NamedTuple, cast

from msgspec import structs

from kvflow import Finished, RankAddress, ThreadedWorker, Ticket, TransferReport
from kvflow.errors import (
    AuthenticationFailed,
    DefectFound,
    KvflowError,
    PeerLost,
    PeerRefused,
    ReleaseMismatch,
    StaleLease,
    TicketInvalid,
    WorkerClosed,
)
from kvflow.integrations.vllm.engine import LOAD_WAIT, LoadWait
from kvflow.integrations.vllm.logs import logger, warn
from kvflow.integrations.vllm.messages import (
    Cancel,
    Command,
    Counters,
    End,
    Fail,
    GiveBack,
    Hold,
    KeepBlocks,
    Load,
    Ordered,
    RenewLeases,
    Reset,
    Tally,
    Tell,
)
from kvflow.observability.logs import EventLog

WRITTEN_PAUSE_S = 0.001
"""Pause between two looks whether a device has written, while a command waits: a step takes some milliseconds."""

RESET_WAIT_S = 5.0  # longest time that a reset waits for the last write of the pulls that it cancels
RESET_PAUSE_S = 0.05  # the engine's thread may take the end for which a reset waits, so it looks again

MARKS_MAX = 8  # ends of steps that are watched. vLLM gives a device at most a few steps ahead

NOT_RELEASED = (AuthenticationFailed, PeerLost, PeerRefused, ReleaseMismatch, StaleLease, TicketInvalid, WorkerClosed)
"""Errors after which the ticket is not released: the producer cannot be reached or does not need it."""

Passed = Callable[[], bool]  # returns whether a device has done what it had been given when it was marked


class Results(NamedTuple):
    """Requests whose transfers have ended since the last step."""

    sent: set[str]  # their leases have ended: vLLM may reuse their blocks
    received: set[str]  # their loads have ended: nothing writes into their blocks
    failed: set[str]  # those in ``received`` whose blocks were not loaded


@dataclass(slots=True)
class _HeldLease:
    """A lease, until vLLM learns that it has ended."""

    # Of the command after which vLLM may learn it. That one must have come with its step, because only with that step
    # ``MultiConnector`` learns if another connector saves the blocks.
    number: float
    ended: bool
    settled: int = 0  # tokens, if it is open


class RankWorker:
    """Executes the commands of one rank and collects the ends of its transfers.

    ``mark`` marks the end of what a device has been given to do; None if no device writes the cache.

    Thread: the engine's; ``take`` may be called from any.
    """

    def __init__(
        self,
        worker: ThreadedWorker,
        mark: Callable[[], Passed] | None = None,
        load_wait: LoadWait = LOAD_WAIT,
        log: EventLog = EventLog(),  # noqa: B008 - it has no fields of a rank
    ) -> None:
        self._worker = worker
        self._log = log
        self._load_wait = load_wait
        self._is_quiet = False  # the last step had nothing to compute and nothing to report
        self._held_back: deque[tuple[int, Sequence[Command]]] = deque()
        self._pulls: dict[str, tuple[Load, Future[TransferReport]]] = {}
        self._results = Results(set(), set(), set())
        self._tally = Tally()
        self._lock = threading.RLock()
        self._taken = self._confirmed = 0  # numbers of the last ordered command, and of the last that came with a step
        self._unwritten: list[Hold | Tell | KeepBlocks] = []  # their steps may not have written
        self._awaited = threading.Event()  # set while one of them waits for the device
        self._leases: dict[str, _HeldLease] = {}
        self._refused: list[str] = []  # kept leases that this rank does not hold, until the scheduler's side knows
        self._unreported: Counter[str] = Counter()  # ends of open leases that vLLM does not wait for
        self._void: set[str] = set()  # requests that a reset has ended, while commands may still name them
        self._mark = mark
        self._marks: deque[tuple[int, Passed]] = deque(maxlen=MARKS_MAX)  # a device does its work in order
        self._written = 0
        self._stopped = threading.Event()
        # Not on kvflow's loop, though nothing here waits for it: to hold one lease of 8,192 blocks takes half a
        # millisecond, and a step may end with many. One thread, because to start one takes eight times a look.
        self._watch = threading.Thread(target=self._look_again, name="kvflow-marks", daemon=True)
        if mark is not None:
            self._watch.start()

    @property
    def address(self) -> RankAddress:
        """Address of this rank, for tickets."""
        return self._worker.rank_address

    def execute(self, commands: Iterable[Command]) -> None:
        """Execute the commands of the scheduler's side, without waiting for the network or for a device."""
        commands = list(commands)
        self.take([each for each in commands if isinstance(each, Ordered)], with_step=True)
        for kind, run in groupby([each for each in commands if not isinstance(each, Ordered)], type):
            if kind is Load:
                self._pull(cast("list[Load]", list(run)))
                continue
            for command in run:
                try:
                    self._execute(command)
                except Exception:  # an exception must fail this command, not the engine
                    logger.exception("kvflow: a command of request %s failed", command.request_id)

    def execute_written(self, commands: Sequence[Command] = (), *, step: int = 0) -> None:
        """Execute commands, in order, when this step and all earlier ones have written; then check commands that wait.

        vLLM gives a block that a step writes to another request when the tokens of the step have arrived. A draft model
        writes later, and would write over what a load has brought.
        """
        if commands:
            self._held_back.append((step, commands))
        while self._held_back:
            with self._lock:
                is_written = self._has_written(self._held_back[0][0])
            if not is_written:
                return
            self.execute(self._held_back.popleft()[1])

    def _execute(self, command: Command) -> None:
        match command:
            case RenewLeases(request_id=request_id, ticket=ticket):
                self._keep(request_id, ticket)
            case KeepBlocks(request_id=name, grant=grant):
                with self._lock:
                    if name in self._void:
                        self._worker.revoke(name, grant)
                    else:
                        self._unwritten.append(command)
                        self._execute_unwritten()
            case Cancel(request_id=request_id):
                self._cancel(request_id)
            case GiveBack(request_id=request_id, ticket=ticket):
                self._release(request_id, ticket)
            case Reset(void=request_ids):  # behind all commands that name them
                self._end_all(request_ids)
                self._void.intersection_update([*self._pulls, *[each.request_id for each in self._unwritten]])
            case Fail(request_id=request_id, code=code, reason=reason, remedy=remedy):
                self._tally.count("failed", code)
                self._end(request_id, failed=True)
                self._worker.record_refusal(code, reason, remedy=remedy, local_request_id=request_id)

    def end_step(self, step: int) -> None:
        """Take the number of a step that has written, or whose work the device has been given, all of it."""
        passed = None if self._mark is None else self._mark()
        with self._lock:
            if passed is None:
                self._written = step
            else:
                self._marks.append((step, passed))

    def reset(self, request_ids: Sequence[str]) -> bool:
        """End the leases and pulls of requests, in spite of commands that are on their way.

        Return whether nothing reads or writes their blocks. Their pulls do not count as failed.

        Thread: any.
        """
        deadline = time.monotonic() + RESET_WAIT_S
        self._end_all(request_ids)
        while not self._void.isdisjoint(list(self._pulls)):
            if time.monotonic() > deadline:
                return False
            self._worker.wait_finished(RESET_PAUSE_S)
            self._take_ends()
        return True

    def _end_all(self, request_ids: Iterable[str]) -> None:
        with self._lock:
            self._void.update(request_ids)
            self._results.failed.difference_update(self._void)
            self.revoke(request_ids)
            for request_id in request_ids:
                self._cancel(request_id)

    def suspend(self) -> None:
        """Withdraw the cache. Loads that have ended but are not collected yet count as failed: their bytes are lost."""
        try:
            self._worker.suspend()
        finally:
            self._take_ends(lost=True)

    def collect(self, *, idle: bool = False) -> Results:
        """Return the requests whose transfers have ended since the last call.

        If the step is ``idle``, wait briefly for all open pulls, unless there is something else to report.
        """
        self.take()
        self.execute_written()
        self._take_ends()
        if idle and self._load_wait.all_s and self._pulls and not (self._results.failed or self._results.sent):
            self._wait()
        with self._lock:
            results, self._results = self._results, Results(set(), set(), set())
        self._is_quiet = idle and not any(results)
        return results

    def _wait(self) -> None:
        """Wait for all open pulls, while pulls end."""
        # Prompts that are still computed take seconds. Behind a step that reports nothing no output is on its way.
        follows = self._is_quiet and all(load.ticket.grants[0].is_open for load, _ in self._pulls.values())
        each_s, all_s = LOAD_WAIT if follows else self._load_wait
        until = time.monotonic() + all_s
        while open_pulls := len(self._pulls):
            wait_s = min(each_s, until - time.monotonic())
            if wait_s > 0:
                self._worker.wait_finished(wait_s, at_least=open_pulls)
            self._take_ends()
            if wait_s <= 0 or len(self._pulls) == open_pulls:
                return

    def take_counters(self) -> Counters | None:
        """Return the counters since the last call, or None if nothing was counted."""
        with self._lock:
            return self._tally.take()

    def take(self, commands: Iterable[Ordered] = (), *, with_step: bool = False) -> None:
        """Take commands, and execute those whose steps have written.

        Each command comes with its step. Before that it may come over ``admission``, which may lose some: then later
        ones are left to their steps, too. The last step may never come, because ``LLM.generate`` does not step the
        engine when it has ended.

        Thread: any.
        """
        with self._lock:
            for command in commands:
                if command.number > self._taken and (with_step or command.number == self._taken + 1):
                    self._taken = command.number
                    if isinstance(command, End):
                        self._withdraw(command.request_ids)
                    else:
                        self._unwritten.append(command)
            self._execute_unwritten()
            if with_step:
                for command in commands:
                    self._confirmed = max(self._confirmed, command.number)
                    if not isinstance(command, End):
                        self._report(command.request_id)

    def _execute_unwritten(self) -> None:
        """Execute the commands whose steps have written, and look again soon for others. The caller holds ``_lock``."""
        if not self._unwritten or self._stopped.is_set():
            return
        # Ask once: otherwise a later command of a lease might be executed before an earlier one.
        self._has_written(max([each.step for each in self._unwritten]))
        at = 0
        while at < len(self._unwritten):
            if (command := self._unwritten[at]).step <= self._written:
                if isinstance(command, Hold):
                    self._hold(command)
                elif isinstance(command, KeepBlocks):
                    self._keep_blocks(command)
                else:
                    self._tell(command)
                del self._unwritten[at]  # only now: an admission that is interrupted is refused the next time
            else:
                at += 1
        if self._unwritten:  # without a device, the end of their step executes them
            self._awaited.set()

    def _look_again(self) -> None:
        """Execute commands when a device has written, also if no step follows, until the rank stops."""
        while self._awaited.wait() and not self._stopped.wait(WRITTEN_PAUSE_S):
            with self._lock:
                if self._stopped.is_set():
                    return
                self._awaited.clear()
                try:
                    self._execute_unwritten()
                except Exception:  # the next command looks again
                    logger.exception("kvflow: a look at what the device has written failed")

    def _keep_blocks(self, command: KeepBlocks) -> None:
        """Hold a kept lease. If this rank cannot, its readers fail at once, and the other ranks end it, too."""
        name = command.request_id
        try:
            self._worker.admit(command.grant, command.digests)
        except Exception as error:  # noqa: BLE001 - an exception must fail this command, not those behind it
            logger.info("kvflow: the blocks of %s are not kept: %s", name, error)
            self._worker.revoke(name, command.grant)
            self._refused.append(name)

    def take_refused(self) -> list[str]:
        """Return the kept leases that this rank has refused since the last call."""
        with self._lock:
            refused, self._refused = self._refused, []
        return refused

    def prepare(self, commands: Sequence[Command]) -> None:
        """Execute what must end leases before a step writes, and the commands for leases that come with it."""
        ordered = [each for each in commands if isinstance(each, Ordered)]
        if any(isinstance(each, End) for each in ordered):
            self.take(ordered, with_step=True)

    def revoke(self, names: Iterable[str]) -> None:
        """End kept leases now."""
        with self._lock:
            gone = frozenset(names)
            early = [each for each in self._unwritten if isinstance(each, KeepBlocks)]
            grants = {each.request_id: each.grant for each in early}  # another rank may hold it, and have told a reader
            self._unwritten = [
                each for each in self._unwritten if not isinstance(each, KeepBlocks) or each.request_id not in gone
            ]
            for name in gone:
                self._worker.revoke(name, grants.get(name))

    def stop(self) -> None:
        """Execute no command that waits for a device, and end the thread that looks."""
        with self._lock:
            self._stopped.set()
            self._awaited.set()
        if self._watch.is_alive():
            self._watch.join()

    def _has_written(self, step: int) -> bool:
        """Return whether a step has written its blocks, without waiting. The caller holds ``_lock``."""
        # The scheduler's side ends a request when its tokens have arrived. With vLLM's second model runner the device
        # may then still write the draft model's keys and values, and states.
        while self._marks and step > self._written and self._marks[0][1]():
            self._written, _ = self._marks.popleft()
        return step <= self._written

    def _hold(self, command: Hold) -> None:
        """Hold the lease of a grant."""
        name, held = command.request_id, command.request_id not in self._void
        try:
            if held:
                self._worker.admit(command.grant, command.digests or None)
        except Exception as error:  # noqa: BLE001 - an exception must fail this request, not the engine
            logger.error("kvflow: request %s is not offered and its ticket is invalid: %s", name, error)
            held = False
        if not held:
            self._worker.revoke(name, command.grant)  # also if the admission was interrupted: vLLM frees the blocks
            self._tally.count("leases", "refused")
        self._leases[name] = _HeldLease(inf if command.grant.is_open else command.number, ended=not held)
        self._report(name)

    def _tell(self, command: Tell) -> None:
        """Say what has settled of an open lease."""
        name = command.request_id
        lease = self._leases.setdefault(name, _HeldLease(inf, ended=True))
        if command.num_tokens is None:
            lease.number = command.number
        try:
            if lease.ended:
                self._report(name)
            elif command.num_tokens is None:
                self._worker.seal(name, command.block_ids)
            else:
                lease.settled = max(lease.settled, command.num_tokens)
                self._worker.advance(name, lease.settled, command.block_ids)
        except Exception as error:  # noqa: BLE001 - as above
            self._worker.revoke(name)  # what follows would be taken for the blocks of other tokens
            logger.info("kvflow: the lease of request %s has ended while it was computed: %s", name, error)

    def _withdraw(self, names: Sequence[str]) -> None:
        """End open leases. Their ends must not be taken for those of later leases of the requests."""
        void = [each for each in self._unwritten if isinstance(each, Hold) and each.request_id in names]
        self._unwritten = [each for each in self._unwritten if each.request_id not in names]
        for name in names:
            lease = self._leases.pop(name, None)
            if lease is not None and not lease.ended:
                self._unreported[name] += 1
            self._worker.revoke(name)
        for each in void:
            self._worker.revoke(each.request_id, each.grant)

    def _report(self, request_id: str) -> None:
        """Tell vLLM if a lease has ended. The caller holds ``_lock``."""
        lease = self._leases.get(request_id)
        if lease is not None and lease.ended and lease.number <= self._confirmed:
            del self._leases[request_id]
            self._results.sent.add(request_id)

    def _pull(self, commands: Sequence[Load]) -> None:
        """Start the loads of a step as one batch. Each load fails alone, unless the worker refuses the batch."""
        with self._lock:
            for command in [each for each in commands if each.request_id in self._void]:
                self._end(command.request_id)
                self._release(command.request_id, command.ticket)
            commands = [each for each in commands if each.request_id not in self._void]
            try:
                futures = self._worker.pull_many([(each.ticket, each.block_ids, each.request_id) for each in commands])
            except Exception as error:  # noqa: BLE001 - as above
                for command in commands:
                    warn("the load of request %s failed", command.request_id, error=error)
                    self._tally.count("failed", error.code if isinstance(error, KvflowError) else DefectFound.code)
                    self._end(command.request_id, failed=True)
            else:
                for command, future in zip(commands, futures, strict=True):
                    self._pulls[command.request_id] = command, future

    def _cancel(self, request_id: str) -> None:
        if request_id in self._pulls:
            self._pulls[request_id][1].cancel()

    def _take_ends(self, *, lost: bool = False) -> None:
        with self._lock:
            ends = self._worker.finished()
            self._tally.count_ends(ends)
            for end in ends:
                if end.side == "producer":
                    self._end_lease(end.request_id)
                else:
                    self._end_pull(end, lost=lost)

    def _end_lease(self, request_id: str) -> None:
        if self._unreported[request_id]:
            self._unreported[request_id] -= 1
            self._unreported += Counter()  # drops what is 0
        elif (lease := self._leases.get(request_id)) is not None:
            lease.ended = True
            self._report(request_id)

    def _end_pull(self, end: Finished, *, lost: bool) -> None:
        request_id, error = end.local_request_id, end.error
        if request_id not in self._pulls:
            return
        command, _ = self._pulls.pop(request_id)
        ticket, prefix = command.ticket, command.prefix
        self._end(request_id, failed=error is not None or lost)
        if error is not None:
            is_late = prefix is not None and isinstance(error, StaleLease)  # nobody pins what is kept
            if is_late and self.address.rank == 0:
                self._tally.count("prefixes", "stale")
            if request_id not in self._void and not is_late:
                named = request_id, end.request_id, ticket.engine_id
                warn("the load of request %s (%s of engine %s) failed", *named, error=error)
            if not isinstance(error, NOT_RELEASED):
                self._release(request_id, ticket)
        elif lost:
            logger.warning(
                "kvflow: the load of request %s is lost, because the engine went to sleep before it was used",
                request_id,
            )
        elif prefix is not None and end.report is not None:
            seconds, nbytes = end.report.timings_s.get("total", 0.0), end.report.nbytes
            self._log(structs.replace(prefix, seconds=seconds, nbytes=nbytes))

    def _end(self, request_id: str, *, failed: bool = False) -> None:
        self._results.received.add(request_id)
        if failed and request_id not in self._void:
            self._results.failed.add(request_id)

    def _keep(self, request_id: str, ticket: Ticket) -> None:
        """Renew the leases of a ticket while its request waits. Rank 0 renews those of all ranks of the ticket."""
        try:
            if self._worker.rank_address.rank == 0:
                held = self._worker.hold(ticket, local_request_id=request_id)
                held.add_done_callback(partial(_tell_failure, request_id, "is not renewed"))
        except KvflowError as error:
            logger.info("kvflow: the ticket of request %s is not renewed: %s", request_id, error)

    def _release(self, request_id: str, ticket: Ticket) -> None:
        """Release a ticket, so that the producer gets its blocks back before the lease expires."""
        try:
            released = self._worker.release(ticket, local_request_id=request_id)
            released.add_done_callback(partial(_tell_failure, request_id, "was not released"))
        except KvflowError as error:
            logger.info("kvflow: the ticket of request %s was not released: %s", request_id, error)


def _tell_failure(request_id: str, what: str, done: "Future[None]") -> None:
    error = None if done.cancelled() else done.exception()
    if error is not None:
        logger.info("kvflow: the ticket of request %s %s: %s", request_id, what, error)
