"""The report of a completed pull: what moved, and where the time went."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from kvflow.errors import counted, quoted

# Of a pull, in the order in which they begin. ``TransferReport.timings_s`` says what each of them measures.
PHASES: Final = ("handshake", "queue", "bind", "post", "wire", "scatter", "fence", "deliver")

# A function that sets the missing fields of a report, and its arguments after the report.
Deferred = tuple[Callable[..., None], tuple[Any, ...]]


class _Deferring:
    """Computes missing fields when one is first read. Two threads may both do so, and find the same values."""

    __slots__ = ("deferred",)

    deferred: Deferred | None  # None if no field is missing

    if not TYPE_CHECKING:  # a type checker would accept every attribute

        def __getattr__(self, name: str) -> Any:
            if name != "deferred":
                self.compute()
            return object.__getattribute__(self, name)

    def compute(self) -> None:
        """Compute the missing fields, if there are any."""
        deferred = getattr(self, "deferred", None)  # read once: another thread may set it to None
        if deferred is not None:
            function, arguments = deferred
            function(self, *arguments)
            self.deferred = None  # last: another thread may read meanwhile


@dataclass(slots=True, kw_only=True, repr=False)
class TransferReport(_Deferring):
    """What a completed pull has moved, and where its time went.

    Attributes:
        request_id: the producer's name of the request.
        nbytes: bytes that arrived in the target blocks.
        read_bytes: bytes that were read for them. Reads through staging buffers fetch whole source regions, and so
            more than ``nbytes``.
        descriptors: descriptors after adjacent ones have merged. Pacing may split them again.
        merged: share of the descriptors that merging has saved, from 0 to nearly 1.
        reads: batches that carried the pull. Pulls may share a batch.
        early: how often a source rank did not hold the lease yet; 0 for a ticket in time.
        early_bytes: bytes that were read before the lease was held, and then read again. Above 0 only if a ticket
            promises a lease that its producer does not hold yet.
        ranges: of an open offer: how many ranges of tokens were read, one after the other, while it was computed.
        seal_s: of an open offer: seconds from the news that everything is written to the result.
        transport: transport that carried the bytes, by UCX's name: ``cma`` (shared memory), ``tcp``, ``rc_mlx5``,
            ``cuda_ipc``; or ``loopback``. Several names with a bar between them: one of these. Those of several peers
            are joined by a plus sign.
        plane: data plane: ``nixl``, ``tcp`` or ``loopback``. Those of several peers are joined by a plus sign.
        timings_s: seconds per phase. ``handshake``: connecting to the peers, and checking the ticket and the block ids.
            ``queue``: from the submission to the first dispatch; of an open offer also the time in which its producer
            computes and nothing is read. ``bind``: computing descriptor indices. ``post``: in
            the calls that post reads, which include the copy on shared memory. ``wire``: from the first dispatch to
            the last byte, less ``bind``, ``post`` and ``scatter``. ``scatter``: copying from staging buffers to the
            target blocks. ``fence``: reading the epochs, after the last byte. ``deliver``: from the last fence until
            the event loop has the answer. ``total``: from the call of ``pull`` to its result, the sum of the phases.
    """

    request_id: str
    nbytes: int
    descriptors: int
    reads: int
    read_bytes: int = 0
    merged: float = 0.0
    early: int = 0
    early_bytes: int = 0
    ranges: int = 0
    seal_s: float = 0.0
    transport: str = ""
    plane: str = ""
    timings_s: dict[str, float]

    @property
    def gb_per_s(self) -> float:
        """Rate over ``post`` and ``wire``, in 10**9 bytes per second; 0 if both are 0."""
        moving = self.timings_s.get("post", 0.0) + self.timings_s.get("wire", 0.0)
        return self.nbytes / moving / 1e9 if moving > 0 else 0.0

    def __repr__(self) -> str:
        """Return one line: what moved, how, and how long it took."""
        moved = f"{self.nbytes:,} bytes in {self.timings_s.get('total', 0.0) * 1e3:.1f} ms"
        carrier = f"{self.transport} ({self.plane})" if self.transport else "nothing"
        parts = [f"{moved} over {carrier}", counted(self.descriptors, "descriptor"), counted(self.reads, "read")]
        return f"<TransferReport {quoted(self.request_id)}: {', '.join(parts)}>"

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """Return all fields, for a copy."""
        return None, {each.name: getattr(self, each.name) for each in fields(self)}
