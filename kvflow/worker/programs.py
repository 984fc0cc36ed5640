"""What each peer gives us, and the prepared lists that read it: planned, bound and prepared once for each part."""

from dataclasses import dataclass
from typing import NamedTuple

from kvflow.errors import CapacityExceeded
from kvflow.ids import PeerId
from kvflow.layout.manifest import Manifest
from kvflow.rendezvous.dialer import Link
from kvflow.transfer.bind_plan import AnyBinding, bind_plan
from kvflow.transfer.cover import share_out
from kvflow.transfer.match import Piece, PieceName, Pieces, have_common_layer, require_same_model
from kvflow.transfer.plan import PlanCache, TransferPlan
from kvflow.transport.base import Program, Transport
from kvflow.worker.calibration import NEVER, Staging

DIVISIONS_MAX = 4096
"""Sets of ranks that are remembered with what each rank gives. One that was forgotten is divided again, with the
programs that are there already."""

PROGRAMS_MAX = 64
"""Different parts of our cache that one peer is prepared to give: one for each set of ranks that it is read with, at
most. A ticket names all ranks of its engine, so that one or two are enough; who joins any sets at all is stopped."""


@dataclass(slots=True)
class Peer:
    """A producer rank that can be read from.

    Attributes:
        link: its control connection.
    """

    link: Link

    @property
    def manifest(self) -> Manifest:
        """Of its cache."""
        return self.link.advertisement.manifest

    @property
    def num_slots(self) -> int:
        """Slots of its epoch table."""
        return self.link.advertisement.epochs.nbytes // 8


Programs = tuple[tuple[int, AnyBinding], ...]
"""Program id and binding for each group of a plan."""

Taken = tuple[tuple[PieceName, Piece], ...]
"""The pieces of our cache that one peer gives, in their order."""


class Leg(NamedTuple):
    """What one peer gives, and the prepared lists that read it."""

    member: int
    programs: Programs


class ProgramTable:
    """Every program of the peers that are met.

    Args:
        manifest: of our cache.
        turn: which of several peers that hold the same gives it: our ranks take turns, so that replicas on the other
            side are all of use.
        transport: where programs are prepared.
        plans: shared by all peers of one layout.
        staging: on which terms units are staged.

    Attributes:
        bindings: program id -> binding of all peers.

    Thread: the event loop.
    """

    def __init__(
        self, *, manifest: Manifest, turn: int, transport: Transport, plans: PlanCache, staging: Staging = NEVER
    ) -> None:
        self._manifest = manifest
        self._turn = turn
        self._transport = transport
        self._plans = plans
        self._staging = staging
        self._divisions: dict[tuple[PeerId, ...], tuple[Leg, ...]] = {}
        self._prepared: dict[PeerId, dict[Taken | None, Programs]] = {}
        self._last_id = 0
        self.bindings: dict[int, AnyBinding] = {}

    def require_readable(self, theirs: Manifest) -> None:
        """Refuse a cache that cannot fill ours, before anything is read of it.

        Raises:
            LayoutMismatch: it is that of another model, or cut in a way that cannot be read.
            CapacityExceeded: the plan would be too large.
        """
        require_same_model(theirs, self._manifest)
        if have_common_layer(theirs, self._manifest):
            self._plan(theirs, None)  # another pipeline stage may have nothing for us

    def begin(self, peer: PeerId) -> None:
        """Take programs of a peer that can be read from, until it is forgotten."""
        self._prepared[peer] = {}

    def legs(self, peers: tuple[Peer, ...]) -> tuple[Leg, ...]:
        """Divide our cache among the ranks of one ticket, and prepare to read from those that are needed.

        Args:
            peers: the ranks, begun and ascending: each order is a division of its own.

        Raises:
            LayoutMismatch: together they cannot fill our cache.
            CapacityExceeded: a plan would be too large, or a rank is read with too many different sets of others.
        """
        key = tuple(peer.link.peer for peer in peers)
        if key not in self._divisions:
            shares = share_out(self._manifest, [peer.manifest for peer in peers], turn=self._turn)
            legs = tuple(Leg(share.source, self._programs(peers[share.source], share.pieces)) for share in shares)
            if len(self._divisions) >= DIVISIONS_MAX:
                del self._divisions[next(iter(self._divisions))]
            self._divisions[key] = legs
        return self._divisions[key]

    def forget(self, peer: PeerId) -> bool:
        """Forget what a peer gives, as it was let go; tell whether anything was prepared."""
        prepared = self._prepared.pop(peer, {})
        for programs in prepared.values():
            for program_id, _ in programs:
                self.bindings.pop(program_id, None)
        self._divisions = {key: legs for key, legs in self._divisions.items() if peer not in key}
        return bool(prepared)

    def _plan(self, theirs: Manifest, pieces: Pieces | None) -> TransferPlan:
        terms = self._staging
        return self._plans.plan(theirs, self._manifest, pieces, costs=terms.calibration, staging_bytes=terms.nbytes)

    def _programs(self, peer: Peer, pieces: Pieces | None) -> Programs:
        """Return what reads these pieces, prepared now or before: the same part may be given beside other ranks."""
        prepared = self._prepared[peer.link.peer]
        taken = None if pieces is None else tuple(sorted(pieces.items()))
        if taken not in prepared:
            if len(prepared) >= PROGRAMS_MAX:
                remedy = "Join the offers of the same ranks into each ticket: of all ranks of the engine."
                raise CapacityExceeded(
                    f"different parts that are read from {peer.link.peer}", PROGRAMS_MAX, remedy=remedy
                )
            bindings = bind_plan(self._plan(peer.manifest, pieces), peer.manifest, self._manifest)
            prepared[taken] = tuple(self._prepare(peer.link.peer, binding) for binding in bindings)
        return prepared[taken]

    def _prepare(self, peer: PeerId, binding: AnyBinding) -> tuple[int, AnyBinding]:
        self._last_id += 1
        self.bindings[self._last_id] = binding
        self._transport.prepare(
            Program(
                program_id=self._last_id,
                peer=peer,
                source_rows=binding.source.table,
                target_rows=binding.target.table,
                source_memory=binding.source.memory,
                target_memory=binding.target.memory,
                scatter=binding.scatter,
            )
        )
        return self._last_id, binding
