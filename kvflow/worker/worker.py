"""One rank's worker: what an engine calls."""

import asyncio
import math
import os
from asyncio import _get_running_loop
from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct

from kvflow.errors import WrongEventLoop, quoted
from kvflow.events import Outcome, WorkerDrained
from kvflow.forks import Origin
from kvflow.ids import worker_name
from kvflow.layout.manifest import Manifest
from kvflow.leases.tickets import Grant, RankAddress, Ticket
from kvflow.rendezvous.listener import Listener
from kvflow.report import TransferReport
from kvflow.validation import require_seconds
from kvflow.worker.connections import PeerState
from kvflow.worker.consumer import BlockLists, Consumer, PullItem, open_item
from kvflow.worker.destinations import Quarantined
from kvflow.worker.environment import Shared
from kvflow.worker.open_pulls import PullHandle
from kvflow.worker.producer import Digests, LeaseManager, OfferRequest
from kvflow.worker.snapshot import KEPT_S, LISTED_MAX, Snapshot, encode_inspection


class DrainReport(Struct, frozen=True, kw_only=True):
    """What a worker still holds when ``drain`` returns. Closing the worker ends all of it.

    Attributes:
        leases: requests whose leases are held. Their readers would get ``StaleLease``.
        pulls: requests whose pulls are not over. They would be cancelled.
        quarantined: destinations that something may still write into.
        waited_s: how many seconds ``drain`` waited.
    """

    leases: tuple[str, ...]
    pulls: tuple[str, ...]
    quarantined: tuple[Quarantined, ...]
    waited_s: float

    @property
    def complete(self) -> bool:
        """Whether nothing is left."""
        return not (self.leases or self.pulls or self.quarantined)


class OpenOffer:
    """An offer whose blocks are told while they are computed. Made by ``Worker.offer_progressive``.

    Attributes:
        ticket: for its consumer.

    Thread: any.
    """

    def __init__(self, worker: "Worker", ticket: Ticket) -> None:
        self._worker = worker
        self.ticket = ticket

    def advance(self, num_tokens: int, new_block_ids: Sequence[Sequence[int]] = (), digests: Digests = None) -> bool:
        """Say that the first ``num_tokens`` have settled: see ``Worker.advance``."""
        return self._worker.advance(self.ticket.request_id, num_tokens, new_block_ids, digests)

    def seal(self, new_block_ids: Sequence[Sequence[int]] = (), digests: Digests = None) -> bool:
        """Say that all tokens have settled: see ``Worker.seal``."""
        return self._worker.seal(self.ticket.request_id, new_block_ids, digests)

    def abort(self) -> bool:
        """End the lease now: see ``Worker.revoke``."""
        return self._worker.revoke(self.ticket.request_id)


class Worker:
    """One rank's runtime. Made by ``open_worker``.

    Attributes:
        endpoint: control endpoint as peers reach it.
        incarnation: 32 hexadecimal digits, drawn at the start.

    Raises:
        WrongEventLoop: by every method that is called elsewhere than its thread says.
        ForkedProcess: by every method that a forked child of the worker's process calls.

    Thread: ``rank_address``, ``offer``, ``offer_progressive``, ``advance``, ``seal``, ``keep``, ``admit``, ``revoke``,
        ``read_ticket`` and ``record_refusal`` from any thread; everything else on the worker's event loop.
    """

    def __init__(
        self,
        shared: Shared,
        rank_address: RankAddress,
        leases: LeaseManager,
        consumer: Consumer,
        *,
        listener: Listener,
        origin: Origin,
    ) -> None:
        self._rank_address = rank_address
        self.endpoint = rank_address.endpoint
        self.incarnation = rank_address.incarnation
        self._shared = shared
        self._leases = leases
        self._consumer = consumer
        self._listener = listener
        self._require_process = origin.require
        self._pid = os.getpid()
        self._loop = asyncio.get_running_loop()
        self._clock = shared.environment.clock
        self._told, self._report_until = b"", -math.inf
        listener.make_report = self._make_report

    def __repr__(self) -> str:
        """Return the engine, the rank and the endpoint."""
        name = f"{quoted(self._shared.config.engine_id)} rank {self._rank_address.rank}"
        return f"<Worker {name} at {self.endpoint}, incarnation {self.incarnation[:8]}>"

    @property
    def rank_address(self) -> RankAddress:
        """What a ``TicketMint`` in another process needs from this worker. Read it again for every new mint."""
        self._require_process()
        return msgspec.structs.replace(self._rank_address, epoch_base=self._leases.highest_epoch())

    def offer(
        self,
        request_id: str,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int | Sequence[int],
        *,
        digests: Digests = None,
        traceparent: str = "",
    ) -> Ticket:
        """Hold a lease on blocks for a consumer, and return its ticket. The lease is held on return.

        The blocks must have been written. On a GPU, synchronize the stream or event first, or ask a mark of
        ``KVCache.write_marker``.

        Args:
            request_id: text that no held offer has.
            block_ids: one list per group, in the order of ``cache.groups``: consecutive blocks, as many as
                ``window_blocks`` says or more, and the last holds token ``num_tokens - 1``; -1: an absent block.
            num_tokens: tokens of the request, or one number per group.
            digests: the content digest of each block, at most 64 bytes, in lists like those of ``block_ids``; empty
                bytes for an absent block. Make each a chained hash of all tokens up to the end of its block, and of
                everything else that determines keys and values. A consumer that passes other ``expected_digests`` reads
                nothing.
            traceparent: W3C trace context of the request, version 00, for the records and spans of both sides. If it is
                empty, the setting ``trace_offers`` decides.

        Raises:
            ArgumentInvalid: ``request_id`` is not text, ``digests`` does not have one digest per block, or
                ``traceparent`` is malformed.
            BlockIdsInvalid: the lists do not fit the cache, or the request is already on offer.
            CapacityExceeded: every lease slot is taken, or needed for offers that wait in ``offer_when_possible``.
            WorkerDraining, WorkerClosed: the worker takes no new offers.
            ConfigInvalid: its ``role`` is ``consumer``, or it has admitted the grants of a ``TicketMint``.

        Thread: any.
        """
        self._require_process()
        return self._leases.offer(OfferRequest(request_id, block_ids, num_tokens, digests, traceparent))

    async def offer_when_possible(
        self,
        request_id: str,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int | Sequence[int],
        *,
        digests: Digests = None,
        timeout_s: float | None = None,
        traceparent: str = "",
    ) -> Ticket:
        """Wait until a lease slot is free, then ``offer``; first come, first served.

        The arguments are those of ``offer``; the blocks must stay unchanged from this call on. ``timeout_s`` is
        how long to wait; None waits without limit.

        Raises:
            ArgumentInvalid, BlockIdsInvalid: as in ``offer``; raised when a slot is free.
            CapacityExceeded: its turn did not come in time, or too many offers wait already.
            WorkerDraining, WorkerClosed, ConfigInvalid: as in ``offer``.

        Cancellation: safe; nothing is offered afterwards.
        """
        self._require_loop()
        if timeout_s is not None:
            require_seconds("timeout_s", timeout_s)
        offer = OfferRequest(request_id, block_ids, num_tokens, digests, traceparent)
        return await self._leases.offer_when_possible(offer, timeout_s)

    def keep(
        self,
        request_id: str,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int | Sequence[int],
        digests: Sequence[Sequence[bytes]],
    ) -> Ticket:
        """Keep blocks readable until ``revoke``, for any number of readers, which ``find`` them. Held on return.

        Neither time nor the releases of readers end the lease. Call ``revoke`` before you write into one of the blocks.
        A kept lease takes one of ``lease_slots``. If none is free, an offer, or another call of ``keep``, ends the
        oldest. All end ``drain_s`` after the worker begins to drain. An engine of several ranks uses
        ``TicketMint.keep``, so that peers find all of them.

        The arguments and the errors are those of ``offer``, but ``digests`` must be given, and are chained: each covers
        all tokens up to the end of its block. The ticket has only the last of each group.

        Thread: any.
        """
        self._require_process()
        return self._leases.offer(OfferRequest(request_id, block_ids, num_tokens, digests or (), kind="kept"))

    def offer_progressive(
        self,
        request_id: str,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int | Sequence[int],
        *,
        digests: Digests = None,
        traceparent: str = "",
    ) -> OpenOffer:
        """Offer blocks while they are computed. A consumer that pulls the ticket reads what has settled meanwhile.

        The lease is held on return. Each call of ``advance`` renews it, and so does a reader that waits for the next.
        After ``seal`` it ends as that of an ``offer`` does.

        The arguments, the errors and the thread are those of ``offer``, but for these. ``block_ids`` are the blocks so
        far, each list from the first token on; it may be empty, as it must be for groups that are not full attention,
        such as windows and states: ``seal`` tells their blocks. ``num_tokens`` is what the request will have in the
        end. ``digests`` are those of the blocks that it will have, chained as in ``keep``; peers find the offer by them
        once they reach the last token.
        """
        self._require_process()
        offer = OfferRequest(request_id, block_ids, num_tokens, digests, traceparent, kind="open")
        return OpenOffer(self, self._leases.offer(offer))

    def advance(
        self,
        request_id: str,
        num_tokens: int,
        new_block_ids: Sequence[Sequence[int]] = (),
        digests: Digests = None,
    ) -> bool:
        """Say that the first tokens of an open offer have settled, and renew its lease. Effective on return.

        Their blocks must have been written, as in ``offer``, and must not be written again before the lease has ended.

        Args:
            request_id: of ``offer_progressive``, or of a grant of ``TicketMint.offer_progressive``.
            num_tokens: at least as many as before. Before the seal, peers read whole blocks only.
            new_block_ids: one list per group, of the blocks behind those that were told; an empty list: none.
            digests: as in ``offer_progressive``, if they were not known then.

        Returns:
            False if the lease has ended, or is unknown: its reader has given the ticket back, for example.

        Raises:
            ArgumentInvalid: ``digests`` has too many, or something else than bytes.
            BlockIdsInvalid: fewer tokens than before, or more than were offered; blocks that do not fit the cache or
                the tokens, or were told before; or the request is not open. Nothing has changed.

        Thread: any.
        """
        self._require_process()
        return self._leases.advance(request_id, num_tokens, new_block_ids, digests)

    def seal(self, request_id: str, new_block_ids: Sequence[Sequence[int]] = (), digests: Digests = None) -> bool:
        """Say that all tokens of an open offer have settled, and tell its last blocks. Effective on return.

        The arguments, the result, the errors and the thread are those of ``advance``.
        """
        self._require_process()
        return self._leases.advance(request_id, None, new_block_ids, digests)

    def admit(self, grant: Grant, digests: Digests = None) -> None:
        """Hold the lease of a grant that this engine's ``TicketMint`` signed; effective on return.

        A worker admits grants or makes its own offers: its first lease decides, for both would allot the same slots.

        Args:
            grant: of ``TicketMint``. If its slot has a kept lease, that lease ends.
            digests: those that the mint got. Peers that ask this worker find the lease by them.

        Raises:
            ArgumentInvalid: ``digests`` does not have one digest per block.
            BlockIdsInvalid: the grant does not fit the cache, or is older than the last one of its slot.
            CapacityExceeded: its slot has another lease.
            WorkerDraining, WorkerClosed: the worker takes no new offers.
            ConfigInvalid: its ``role`` is ``consumer``, or it has made offers of its own.

        Thread: any.
        """
        self._require_process()
        self._leases.admit(grant, digests)

    def revoke(self, request_id: str, grant: Grant | None = None) -> bool:
        """End a lease now. On return its blocks may be reused; consumers that still read them get ``StaleLease``.

        Args:
            request_id: of its offer.
            grant: one that this worker may not have admitted, and will not: its consumers no longer wait for it.
                ``ConfigInvalid`` if it makes its own offers; the lease has ended.

        Returns:
            False if the lease is unknown or has ended.

        Thread: any.
        """
        self._require_process()
        return self._leases.revoke(request_id, grant)

    async def wait_offer(self, request_id: str) -> Outcome:
        """Wait until a lease has ended. Then its blocks may be reused.

        Returns:
            ``released``, ``expired``, ``unread`` or ``revoked``.

        Raises:
            RequestUnknown: no such offer is held, and none ended recently.

        Cancellation: safe; the lease is not touched.
        """
        self._require_loop()
        return await self._leases.wait_offer(request_id)

    async def find(
        self,
        endpoint: str,
        digests: Sequence[bytes] | Sequence[Sequence[bytes]],
        wait_s: float = 0.0,
        *,
        at_least: int = 1,
    ) -> tuple[Ticket | None, int]:
        """Ask a worker for the longest prefix of some content that it, and the other ranks of its engine, have.

        Then ``pull`` the ticket: to read a shorter prefix, put -1 into the lists behind its last block. The lease may
        end at any time, and the pull then raises ``StaleLease``. The connection stays open for later calls.

        Args:
            endpoint: control endpoint of the worker, such as ``tcp://host:5600``. Of a worker that has its own key,
                ``tcp://host:5600#KEY`` with its public key, which must be among our allowed keys.
            digests: chained digests, as its engine has passed them to ``keep``: those of the blocks of the first group,
                or one list per group, in its block size (``read_manifest``). Each has 1 to 64 bytes.
            wait_s: 0 finds only what is kept. Otherwise the worker waits for so long, also for an offer with digests,
                open or not, the last of which is among these; it gives each offer to one caller, until that releases
                the ticket unread.
            at_least: fewer digests are of no use.

        Returns:
            The ticket, and how many digests of the first group's list it covers; ``(None, 0)`` if there is none.

        Raises:
            ArgumentInvalid: ``digests`` has something else than bytes, or another argument is out of bounds.
            ConfigInvalid: the endpoint is malformed.
            AuthenticationFailed: it does not prove the cluster's secret, or has another key.
            PeerRefused, PeerLost, DeadlineExceeded, ProtocolViolation: it cannot be reached, or answers wrongly.
            CapacityExceeded: 1,024 questions to it have no answer, or too many wait there.
            ReleaseMismatch: its ticket is of a kind that only newer releases know.
            WorkerDraining, WorkerClosed: this worker starts no new pulls.

        Cancellation: safe.
        """
        self._require_loop()
        self._shared.lifecycle.require_open("finds nothing")
        return await self._consumer.prefixes.find(endpoint, digests, wait_s, at_least=at_least)

    async def read_manifest(self, endpoint: str) -> Manifest:
        """Return what a worker says of its cache: ``groups[0].block_tokens`` is the block size to ``find`` with.

        It is the same object as long as the connection lives, which stays open for later calls.

        Raises:
            KvflowError: of ``find``. ``ReleaseMismatch`` if another release has written it.

        Cancellation: safe.
        """
        self._require_loop()
        self._shared.lifecycle.require_open("asks no worker")
        return await self._consumer.prefixes.read_manifest(endpoint)

    def read_ticket(self, params: object) -> Ticket:
        """Verify and read a ticket, so that ``pull``, ``hold`` and ``release`` need not verify this object again.

        Args:
            params: what the producer's ``Ticket.to_params`` returned; other entries are ignored.

        Raises:
            TicketInvalid: the parameters are too long, truncated, malformed, or not signed by a member of this cluster.
            ReleaseMismatch: the ticket has the format of another release, or is of a kind that only others know.
        """
        self._require_process()
        return self._consumer.key.read(params)

    async def pull(
        self,
        ticket: Ticket,
        block_ids: Sequence[Sequence[int]],
        *,
        priority: int = 0,
        local_request_id: str = "",
        expected_digests: Digests = None,
    ) -> TransferReport:
        """Read a ticket's blocks into ours, and release it. An open offer is read while its producer computes it.

        Args:
            ticket: from ``read_ticket``, or from ``Ticket.from_params``.
            block_ids: one list per group of our cache; a list that is shorter than the ticket's names the last blocks;
                -1 stands for an absent block. No block may be the target of another pull.
            priority: lower is more urgent; from -2**31 to 2**31. A more urgent pull overtakes others after at most two
                chunks of 8 MiB. Each second of waiting counts like one step of priority.
            local_request_id: the engine's own name of the request, for the log; the ticket has the producer's name.
            expected_digests: the digest that each of our blocks must have, in lists like those of ``block_ids``; empty
                bytes to expect nothing. They are compared with the ticket's digests where a block of ours and one of
                the producer's end at the same token. A list with an expectation must have at least one such block.

        Returns:
            The report of what moved, after every fence found its lease held.

        Raises:
            TicketInvalid: no member of this cluster signed the ticket. Nothing was dialed.
            ArgumentInvalid: ``expected_digests`` has another shape than ``block_ids``.
            BlockIdsInvalid, BlockRangeMismatch: the target blocks are wrong.
            ContentMismatch: the ticket's digests differ from ``expected_digests``. Nothing was read, and
                the ticket was released.
            LayoutMismatch: the two caches cannot be matched.
            AuthenticationFailed, PeerRefused: the producer refused the connection, or has another secret.
            StaleLease, PeerLost, DeadlineExceeded, ProtocolViolation, TransferFailed: nothing was delivered;
                ``.quarantined`` says whether the target blocks must wait for ``quiesced``.
            CapacityExceeded: too many pulls are under way.
            WorkerDraining, WorkerClosed: the worker starts no new pulls.

        Cancellation: cancels the pull; its blocks are quarantined until ``quiesced`` returns.
        """
        return await self.start_pull(
            ticket,
            block_ids,
            priority=priority,
            local_request_id=local_request_id,
            expected_digests=expected_digests,
        )

    def start_pull(
        self,
        ticket: Ticket,
        block_ids: BlockLists,
        *,
        priority: int = 0,
        local_request_id: str = "",
        expected_digests: Digests = None,
    ) -> PullHandle:
        """Start to read a ticket's blocks into ours, and return at once. The arguments are those of ``pull``.

        Returns:
            The handle of the pull. ``await`` it to get the report, or the error that ``pull`` would raise. ``cancel()``
            cancels it. ``await quiesced()`` waits until its blocks may be reused.

        Raises:
            WrongEventLoop, ForkedProcess: awaiting the handle raises every other error.
        """
        try:
            self._require_loop()
        except WrongEventLoop as error:
            self._record_refusals(error, [(ticket, block_ids, local_request_id)])
            raise
        return self._consumer.start(
            ticket,
            block_ids,
            priority=priority,
            local_request_id=local_request_id,
            expected_digests=expected_digests,
        )

    def pull_many(self, items: Iterable[PullItem], *, priority: int = 0) -> list[PullHandle]:
        """Start many pulls as one batch, and return at once.

        The data plane gets the pulls of one batch together. Pulls with the same producer and groups share posts and
        fences, and their releases are sent together. Each succeeds or fails alone.

        Args:
            items: for each pull, its ticket and block ids as in ``pull``, and optionally the engine's own name of the
                request: ``(ticket, block_ids)`` or ``(ticket, block_ids, local_request_id)``.
            priority: priority of all of them, as in ``pull``.

        Returns:
            One handle for each item, in their order; see ``start_pull``.

        Raises:
            WrongEventLoop, ForkedProcess: awaiting a handle raises every other error.
        """
        batch = [open_item(item) for item in items]
        try:
            self._require_loop()
        except WrongEventLoop as error:
            self._record_refusals(error, batch)
            raise
        return self._consumer.start_many(batch, priority=priority)

    def _record_refusals(self, error: WrongEventLoop, batch: Sequence[tuple[Ticket, BlockLists, str]]) -> None:
        for ticket, _, name in batch:
            self.record_refusal(error.code, error.message, remedy=error.remedy, ticket=ticket, local_request_id=name)

    def record_refusal(
        self,
        code: str,
        detail: str,
        *,
        remedy: str = "",
        ticket: object = None,
        request_id: str = "",
        local_request_id: str = "",
    ) -> None:
        """Write the record of a pull that the engine itself refuses. ``pull`` writes the records of all others.

        Args:
            code: code of the error.
            detail: message of the error.
            remedy: what to do about it.
            ticket: the ticket, if there is one.
            request_id: the producer's name of the request, if there is no ticket.
            local_request_id: as in ``pull``.

        Thread: any.
        """
        self._require_process()
        self._consumer.pulls.refuse(
            code, detail, remedy, ticket=ticket, request_id=request_id, local_request_id=local_request_id
        )

    def hold(self, ticket: Ticket, *, local_request_id: str = "") -> None:
        """Renew a ticket's leases until the ticket is pulled or released. Use it while a request waits for room.

        A held lease lasts ``compute_s`` or until this worker closes, unless its producer ends it. If it has ended, the
        pull reports it.

        Args:
            ticket: the producer's ticket.
            local_request_id: our own id of the request, as in ``pull``. If several requests share a ticket, such as
                samples of one prompt, give each its own id: the pull of one then does not end the hold of another.

        Raises:
            TicketInvalid: no member of this cluster signed the ticket. Nothing was dialed.
            CapacityExceeded: too many tickets are held.
            WorkerDraining, WorkerClosed: the worker starts no new pulls.
        """
        self._require_loop()
        self._consumer.hold(ticket, local_request_id)

    async def release(self, ticket: Ticket, *, local_request_id: str = "") -> None:
        """Release a ticket without reading it, for example if the request was rejected before admission.

        Args:
            ticket: the producer's ticket.
            local_request_id: our own id of the request, as in ``hold``.

        Raises:
            TicketInvalid, AuthenticationFailed, PeerRefused, PeerLost, StaleLease, WorkerClosed: see ``pull``.
        """
        self._require_loop()
        await self._consumer.release(ticket, local_request_id)

    async def quiesced(self, request_id: str) -> None:
        """Wait until no pull of this request id may write into our blocks; return at once if there is none.

        It waits for all pulls of the id: two producers may use the same id, and one ticket may be pulled twice.
        ``PullHandle.quiesced`` waits for one pull.

        Cancellation: safe.
        """
        self._require_loop()
        await self._consumer.pulls.quiesced(request_id)

    async def drain(self, deadline_s: float) -> DrainReport:
        """Accept no new work, and wait until every lease and every pull has ended.

        From this call on, the worker refuses offers, admissions and pulls with ``WorkerDraining``. It still serves the
        reads, releases and renewals of its readers. What is kept is found and read for ``drain_s`` more, so that others
        read it where this engine's requests go next; ``revoke`` ends it before. Draining cannot be undone: leave
        ``open_worker`` when this returns.

        Args:
            deadline_s: longest time to wait; 0 returns at once. What is kept ends then.

        Returns:
            What is left. Nothing is left unless the deadline has passed.

        Raises:
            ArgumentInvalid: the deadline is not a number of seconds.

        Cancellation: safe; the worker continues to drain.
        """
        self._require_loop()
        require_seconds("deadline_s", deadline_s)
        started = self._clock()
        self._leases.drain(self._shared.config.tuning.drain_s)
        try:
            async with asyncio.timeout(deadline_s):
                await self._leases.wait_idle()
                await self._consumer.pulls.quiesced()
        except TimeoutError:
            self._leases.end_kept()  # the report says what else is left
        report = DrainReport(
            leases=self._leases.requests(),
            pulls=self._consumer.pulls.requests(),
            quarantined=tuple(self._consumer.quarantined()),
            waited_s=self._clock() - started,
        )
        self._shared.report(
            WorkerDrained(len(report.leases), len(report.pulls), len(report.quarantined), report.waited_s)
        )
        return report

    def check(self) -> None:
        """Check the invariants: every reference to a block and every read in flight has an owner.

        Raises:
            AssertionError: an invariant is violated, which is a defect of kvflow. Names it.
        """
        self._require_loop()
        self._leases.check()
        self._consumer.check()

    def allow_keys(self, keys: Iterable[str]) -> None:
        """Replace the list of allowed keys. Added keys may connect at once; connections of removed keys end.

        Reads from a producer whose key was removed fail with ``PeerLost``. A reader whose key was removed is refused at
        its next request over TCP. Over NIXL it can read until its leases end: revoke them to stop it.

        Args:
            keys: public keys of all workers that this one talks to, 64 hexadecimal digits each.

        Raises:
            ConfigInvalid: a key is malformed, or this worker has no key of its own. Nothing has changed.
        """
        self._require_loop()
        self._shared.local.allow_keys(keys)
        self._listener.recheck_keys()
        self._consumer.peers.drop_distrusted()
        self._consumer.prefixes.close()  # who is still allowed is dialed again

    def snapshot(self, *, limit: int = LISTED_MAX) -> Snapshot:
        """Return what the worker holds now, and what it has counted since the start.

        Nothing is collected between calls. A call costs some microseconds for each pull and lease that it lists.

        Args:
            limit: how many pulls, leases, producers and readers are listed at most, each; 0 only counts them.
        """
        self._require_loop()
        limit = max(0, limit)
        answers = self._leases.answers
        return Snapshot(
            leases=len(self._leases),
            pulls=len(self._consumer.pulls),
            producers=self._consumer.peers.listed(limit),
            readers=tuple(
                PeerState(
                    name=worker_name(each.identity.engine_id, each.identity.rank, each.identity.incarnation),
                    state="connected",
                    software=each.identity.software,
                    rtt_s=each.rtt_s,
                )
                for each in self._listener.peers[:limit]
            ),
            open_pulls=self._consumer.listed(limit),
            held_leases=self._leases.listed(limit),
            quarantined=tuple(self._consumer.quarantined()),
            staging=self._shared.transport.staging(),
            rejected=dict(self._listener.failures),
            dropped=dict(self._consumer.peers.drops),
            found=answers.found,
            not_held=answers.not_held,
            posted_inline=self._consumer.posted_inline,
            posted_on_thread=self._consumer.posted_on_thread,
        )

    def _make_report(self) -> bytes:
        """Return the report for a member of the cluster that asks how this worker is."""
        if self._clock() >= self._report_until:
            stage, told = self._shared.lifecycle.stage, self._shared.environment.tell()
            self._told = encode_inspection(stage, self._clock(), self.snapshot, told)
            self._report_until = self._clock() + KEPT_S
        return self._told

    def _require_loop(self) -> None:
        """Refuse a call from another loop, which would never end, because futures resolve only on their own loop."""
        here = _get_running_loop()
        if here is self._loop and os.getpid() == self._pid:
            return
        self._require_process()
        if here is None:
            raise WrongEventLoop("the worker was called outside of an event loop")
        raise WrongEventLoop("the worker was called on another event loop than its own")
