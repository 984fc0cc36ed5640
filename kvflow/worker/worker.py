"""What an engine calls: one rank's offers, pulls, and how they end."""

import math
from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct

from kvflow.cache.destinations import Quarantined
from kvflow.cache.leases import Outcome
from kvflow.cache.tickets import Grant, RankAddress, Ticket
from kvflow.errors import ArgumentInvalid, WrongEventLoop
from kvflow.transfer.report import TransferReport
from kvflow.transport.base import StagingUse
from kvflow.worker.consumer import BlockLists, Consumer, PullItem, open_item
from kvflow.worker.drain import Drain, DrainReport
from kvflow.worker.handle import PullHandle
from kvflow.worker.home import Home
from kvflow.worker.offers import Digests, Offers
from kvflow.worker.producer import LeaseKeeper
from kvflow.worker.trust import Trust


class Snapshot(Struct, frozen=True, kw_only=True):
    """What a worker holds at one moment.

    Attributes:
        leases: offers that are held.
        pulls: pulls that are open or draining.
        quarantined: destinations that something may still write into.
        staging: staging buffers: how many there are, are in use, and are in quarantine.
        rejected: connections to us that have failed since the start, by code, strangers included.
        dropped: producers that were let go since the start, by code.
    """

    leases: int
    pulls: int
    quarantined: tuple[Quarantined, ...]
    staging: StagingUse = StagingUse()
    rejected: dict[str, int] = {}
    dropped: dict[str, int] = {}


class Worker:
    """One rank's runtime. Made by ``open_worker``.

    Attributes:
        endpoint: control endpoint as peers reach it.
        incarnation: 32 hexadecimal digits, drawn at the start.

    Raises:
        WrongEventLoop: by every method that is called elsewhere than its thread says.
        ForkedProcess: by every method that a forked child of the worker's process calls.

    Thread: ``rank_address``, ``offer``, ``admit`` and ``revoke`` from any thread; everything else on the worker's event
        loop.
    """

    def __init__(
        self,
        rank_address: RankAddress,
        keeper: LeaseKeeper,
        offers: Offers,
        consumer: Consumer,
        drain: Drain,
        *,
        trust: Trust,
        home: Home,
    ) -> None:
        self._rank_address = rank_address
        self.endpoint = rank_address.endpoint
        self.incarnation = rank_address.incarnation
        self._keeper = keeper
        self._offers = offers
        self._consumer = consumer
        self._drain = drain
        self._trust = trust
        self._home = home

    @property
    def rank_address(self) -> RankAddress:
        """What a ``TicketMint`` in another process needs to know of this worker; ask anew for every new mint."""
        self._home.require_process()
        return msgspec.structs.replace(self._rank_address, epoch_base=str(self._keeper.highest_epoch()))

    def offer(
        self,
        request_id: str,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int | Sequence[int],
        *,
        digests: Digests = None,
    ) -> Ticket:
        """Promise to keep blocks for a consumer; effective on return.

        The blocks must have been written: on a GPU, synchronise the stream or event first.

        Args:
            request_id: text that is not on offer at this moment.
            block_ids: one list per group, in the order of ``cache.groups``. A list names consecutive blocks,
                and its last block holds token ``num_tokens - 1``; -1 stands for an absent block.
            num_tokens: tokens of the request, or one number per group.
            digests: the content of each block, at most 64 bytes, in lists like those of ``block_ids``; empty for an
                absent block. Make each a chained hash of all tokens up to the end of its block, and of whatever else
                keys and values follow from. A consumer that passes ``expected_digests`` reads nothing else.

        Raises:
            ArgumentInvalid: the request's name is no text, or the digests are not one for each block.
            BlockIdsInvalid: the lists do not fit the cache, or the request is on offer already.
            CapacityExceeded: every lease slot is taken, or is for those who wait in ``offer_when_possible``.
            WorkerDraining, WorkerClosed: the worker makes no promises any more.

        Thread: any.
        """
        self._home.require_process()
        return self._offers.offer(request_id, block_ids, num_tokens, digests)

    async def offer_when_possible(
        self,
        request_id: str,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int | Sequence[int],
        *,
        digests: Digests = None,
        timeout_s: float | None = None,
    ) -> Ticket:
        """Wait until a lease slot is free, then ``offer``; first come, first served.

        Args:
            request_id: as in ``offer``.
            block_ids: as in ``offer``; they are promised, and so must stay as they are, from the call on.
            num_tokens: as in ``offer``.
            digests: as in ``offer``.
            timeout_s: how long to wait; None for as long as it takes.

        Raises:
            ArgumentInvalid, BlockIdsInvalid: as in ``offer``; found when the turn comes.
            CapacityExceeded: no slot came free in time, or too many wait already.
            WorkerDraining, WorkerClosed: the worker makes no promises any more.

        Cancellation: safe; nothing is on offer afterwards.
        """
        self._home.require_loop()
        if timeout_s is not None:
            require_seconds("timeout_s", timeout_s)
        return await self._offers.offer_when_possible(
            request_id, block_ids, num_tokens, digests=digests, timeout_s=timeout_s
        )

    def admit(self, grant: Grant) -> None:
        """Hold the lease of a grant that this engine's ``TicketMint`` signed; effective on return.

        Raises:
            BlockIdsInvalid: the grant does not fit the cache, or was admitted before.
            CapacityExceeded: its slot is taken.
            WorkerDraining, WorkerClosed: the worker makes no promises any more.

        Thread: any.
        """
        self._home.require_process()
        self._keeper.admit(grant)

    def revoke(self, request_id: str) -> bool:
        """End a lease now: on return its blocks may be reused, whoever still reads them gets ``StaleLease``.

        Returns:
            False if the lease is unknown or has ended.

        Thread: any.
        """
        self._home.require_process()
        return self._keeper.revoke(request_id)

    async def wait_offer(self, request_id: str) -> Outcome:
        """Wait until a lease has ended: then its blocks may be reused.

        Returns:
            ``released``, ``expired`` or ``revoked``.

        Raises:
            RequestUnknown: no such offer is held, and none ended recently.

        Cancellation: safe; the lease is not touched.
        """
        self._home.require_loop()
        return await self._keeper.wait_offer(request_id)

    async def pull(
        self,
        ticket: Ticket,
        block_ids: Sequence[Sequence[int]],
        *,
        priority: int = 0,
        local_request_id: str = "",
        expected_digests: Digests = None,
    ) -> TransferReport:
        """Read a ticket's blocks into ours, and release it.

        Args:
            ticket: from ``Ticket.from_params``.
            block_ids: one list per group of our cache; a shorter list than the ticket's means the last blocks,
                -1 stands for an absent block. No block may be the target of another pull.
            priority: lower is more urgent; from -2**31 to 2**31. A more urgent pull overtakes, after two chunks of
                8 MiB at most; waiting for a second is worth one step.
            local_request_id: the engine's own name of the request, for the log; the ticket has the producer's.
            expected_digests: what each of our blocks is to hold, in lists like those of ``block_ids``; empty where
                nothing is expected. They are compared with the ticket's where a block of ours and one of the
                producer's end at the same token. A list that expects anything must have at least one such block.

        Returns:
            What moved, after every fence was held.

        Raises:
            TicketInvalid: the ticket was not signed by this cluster. Nothing was dialled.
            ArgumentInvalid: ``expected_digests`` has another shape than ``block_ids``.
            BlockIdsInvalid, BlockRangeMismatch: the target blocks are wrong.
            ContentMismatch: the ticket's blocks hold something else than ``expected_digests``. Nothing was read, and
                the ticket was released.
            LayoutMismatch: the two caches cannot be matched.
            AuthenticationFailed, PeerRefused: the producer does not talk to us.
            StaleLease, PeerLost, DeadlineExceeded, ProtocolViolation, TransferFailed: nothing was delivered;
                ``.quarantined`` says whether the target blocks must wait for ``quiesced``.
            CapacityExceeded: too many pulls are open.
            WorkerDraining, WorkerClosed: the worker pulls nothing any more.

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
            The pull: ``await`` it for its report, or for the error that ``pull`` would raise; ``cancel()`` gives it up;
            ``await quiesced()`` waits until its blocks may be reused.

        Raises:
            WrongEventLoop, ForkedProcess: every other error is the handle's to tell.
        """
        try:
            self._home.require_loop()
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

        Pulls of one batch are handed to the data plane together. They share posts and fences where their producers and
        groups are the same, and their releases travel together. Each succeeds or fails alone.

        Args:
            items: for each pull its ticket and block ids as in ``pull``, and the engine's own name of the request if it
                has one: ``(ticket, block_ids)`` or ``(ticket, block_ids, local_request_id)``.
            priority: of all of them, as in ``pull``.

        Returns:
            One handle for each item, in their order; see ``start_pull``.

        Raises:
            WrongEventLoop, ForkedProcess: every other error is a handle's to tell.
        """
        batch = [open_item(item) for item in items]
        try:
            self._home.require_loop()
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
        """Write the record of a pull that the engine refuses by itself. ``pull`` writes that of every other one.

        Args:
            code: of the error.
            detail: the error in words.
            remedy: what to do about it.
            ticket: if there is one.
            request_id: the producer's name of the request, if there is no ticket.
            local_request_id: as in ``pull``.

        Thread: any.
        """
        self._home.require_process()
        self._consumer.ending.refuse(
            code, detail, remedy, ticket=ticket, request_id=request_id, local_request_id=local_request_id
        )

    def keep(self, ticket: Ticket) -> None:
        """Renew a ticket's leases until it is pulled or released: of a request that waits for room in our engine.

        What becomes of them is told by the pull. Kept, a lease lasts for as long as this worker does.

        Raises:
            TicketInvalid: the ticket was not signed by this cluster. Nothing was dialled.
            CapacityExceeded: too many tickets are kept.
            WorkerDraining, WorkerClosed: the worker pulls nothing any more.

        Thread: the event loop.
        """
        self._home.require_loop()
        self._consumer.keep(ticket)

    async def release(self, ticket: Ticket) -> None:
        """Give a ticket back unread, for example when the request was rejected before admission.

        Raises:
            TicketInvalid, AuthenticationFailed, PeerRefused, PeerLost, StaleLease, WorkerClosed: see ``pull``.
        """
        self._home.require_loop()
        await self._consumer.release(ticket)

    async def quiesced(self, request_id: str) -> None:
        """Wait until no pull of a request of this name may write; return at once if none is open.

        Two producers may use one name: this waits for the pulls of both. ``PullHandle.quiesced`` waits for one pull.

        Cancellation: safe.
        """
        self._home.require_loop()
        await self._consumer.quiesced(request_id)

    async def drain(self, deadline_s: float) -> DrainReport:
        """Begin nothing new, and wait until every lease and every pull has ended.

        From the call on, offers, admissions and pulls are refused with ``WorkerDraining``. Readers go on: their pulls,
        releases and renewals are served. There is no way back; leave ``open_worker`` when this returns.

        Args:
            deadline_s: how long to wait at most; 0 to see what is held.

        Returns:
            What is left: nothing, unless the deadline came first.

        Raises:
            ArgumentInvalid: the deadline is no number of seconds.

        Cancellation: safe; the worker goes on draining.
        """
        self._home.require_loop()
        require_seconds("deadline_s", deadline_s)
        return await self._drain.run(deadline_s)

    def check(self) -> None:
        """Check the laws of conservation: every reference to a block, and all room in flight, is accounted for.

        Raises:
            AssertionError: one is broken, by a defect of kvflow; says which.
        """
        self._home.require_loop()
        self._keeper.check()
        self._consumer.check()

    def allow_keys(self, keys: Iterable[str]) -> None:
        """Replace the list of allowed keys: new ones are met at once, and connections of those that are gone end.

        Reads from a producer whose key is gone fail with ``PeerLost``. A reader whose key is gone is refused at its
        next request over TCP. Over NIXL it goes on until its leases end: revoke them if it must not.

        Args:
            keys: public keys of all workers that this one talks to, 64 hexadecimal digits each.

        Raises:
            ConfigInvalid: a key is malformed, or this worker has no key of its own; nothing has changed.
        """
        self._home.require_loop()
        self._trust.allow_keys(keys)

    def snapshot(self) -> Snapshot:
        """Return what is held at this moment, and what was counted since the start."""
        self._home.require_loop()
        return Snapshot(
            leases=self._keeper.held(),
            pulls=self._consumer.open_pulls(),
            quarantined=tuple(self._consumer.quarantined()),
            staging=self._consumer.staging(),
            rejected=self._trust.rejected(),
            dropped=self._trust.dropped(),
        )


def require_seconds(name: str, value: object) -> None:
    """Refuse an argument that is no duration.

    Raises:
        ArgumentInvalid: names it.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ArgumentInvalid(name, "a number of seconds, 0 or more", value)
