"""What one completed pull moved, and where its time went."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from kvflow.transfer.bind_plan import AnyBinding
from kvflow.transfer.pairs import UnitPairs
from kvflow.transfer.requests import ReadEnded

Given = Sequence[tuple[AnyBinding, UnitPairs]]
"""Binding and pairs of each group that a source rank gives to a pull."""

Times = tuple[float, float, float]
"""When a pull was called, when its reads were made, and when it was completed, in seconds of the data plane's clock."""

KEPT_BYTES_MAX = 1 << 20
"""Reports of more bytes are computed at once, so that they keep no long lists of blocks."""


class _Computed:
    """Fields that are computed when one of them is first read. Thread: any.

    Attributes:
        delivery: what they are computed from; None when they are.
    """

    __slots__ = ("delivery",)

    delivery: tuple[Given, Sequence[ReadEnded], Times] | None

    if not TYPE_CHECKING:  # it would say that there is every attribute

        def __getattr__(self, name: str) -> Any:
            delivery = None if name == "delivery" else getattr(self, "delivery", None)
            if delivery is not None:
                self.compute(*delivery)
            return object.__getattribute__(self, name)


@dataclass(slots=True, kw_only=True)
class TransferReport(_Computed):
    """The record of one completed pull.

    Attributes:
        request_id: the producer's name of the request.
        nbytes: bytes that arrived where they belong.
        read_bytes: bytes that were read for them: more, where dense pieces of a source went through staging buffers.
        descriptors: how many the pull's block lists make once neighbors have merged; pacing may cut them further.
        merged: share of the descriptors that merging saved, from 0 (ids apart, or runs too short) to nearly 1.
        reads: batches that carried it, some of them shared with other pulls.
        early: how often the lease of a source rank was found not to be admitted yet; 0 for a ticket in time.
        early_bytes: bytes that were read before that and read again; 0 unless the producer broke its word.
        transport: what carried the bytes, by UCX's name: ``cma`` (shared memory), ``tcp``, ``rc_mlx5``, ``cuda_ipc``;
            or ``loopback``. Several with a bar between them: one of these. Those of several peers are joined by a plus.
        plane: the data plane: ``nixl``, ``tcp`` or ``loopback``. Those of several peers are joined by a plus.
        timings_s: seconds per phase. ``handshake``: reaching the peers, and checking ticket and block ids. ``queue``:
            submission to the first dispatch. ``bind``: computing descriptor indices. ``post``: inside posting
            calls; on shared memory this is the copy. ``wire``: first dispatch to the last byte, as the event loop hears
            of it, less ``post`` and ``scatter``. ``scatter``: copies from staging buffers to where the bytes belong.
            ``fence``: reading the epochs. ``total``: the call of ``pull`` to its result.
    """

    request_id: str
    nbytes: int
    descriptors: int
    reads: int
    read_bytes: int = 0
    merged: float = 0.0
    early: int = 0
    early_bytes: int = 0
    transport: str = ""
    plane: str = ""
    timings_s: dict[str, float]

    @classmethod
    def of(
        cls,
        request_id: str,
        nbytes: int,
        given: Given,
        ended: Sequence[ReadEnded],
        times: Times,
        *,
        transport: str,
        plane: str,
        early: int = 0,
        early_bytes: int = 0,
    ) -> "TransferReport":
        """Return the report of a pull. What no one reads of it is not computed.

        Args:
            request_id: as above, and so are those that are not named here.
            nbytes: as above.
            given: what each group has given.
            ended: the answers of all source ranks; none if nothing was to be moved.
            times: of the pull.
            transport: as above.
            plane: as above.
            early: as above.
            early_bytes: as above.
        """
        report = cls.__new__(cls)
        report.request_id, report.nbytes, report.early, report.early_bytes = request_id, nbytes, early, early_bytes
        report.transport, report.plane = transport, plane
        report.delivery = given, ended, times  # type: ignore[misc]  # mypy overlooks the base's slots
        if nbytes > KEPT_BYTES_MAX:
            report.compute(given, ended, times)
        return report

    @property
    def gb_per_s(self) -> float:
        """Rate over post and wire, in 10**9 bytes per second."""
        moving = self.timings_s.get("post", 0.0) + self.timings_s.get("wire", 0.0)
        return self.nbytes / moving / 1e9 if moving > 0 else 0.0

    def compute(self, given: Given, ended: Sequence[ReadEnded], times: Times) -> None:
        """Compute what was left. The arguments are those of ``of``."""
        called_at, submitted_at, ended_at = times
        units = sum([len(pairs.source) * binding.unit_descriptors for binding, pairs in given])
        self.descriptors = sum([binding.merged(pairs) for binding, pairs in given])
        self.read_bytes = sum([len(pairs.source) * binding.read_bytes for binding, pairs in given])
        self.merged = 1 - self.descriptors / units if units else 0.0
        self.reads = sum([each.chunks for each in ended])
        timings_s = {"handshake": submitted_at - called_at, "total": ended_at - called_at}
        if ended:
            started_at = min([each.started_at for each in ended])
            arrived_at = max([each.arrived_at for each in ended])
            fence_s = max([each.fence_s for each in ended])
            timings_s |= phases_s(ended, submitted_at, started_at, arrived_at, fence_s)
        self.timings_s = timings_s
        self.delivery = None  # type: ignore[misc]  # last: another thread may read meanwhile

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """Return all fields, for a copy."""
        return None, {each.name: getattr(self, each.name) for each in fields(self)}


def phases_s(
    ended: Sequence[ReadEnded], submitted_at: float, started_at: float, arrived_at: float, fence_s: float
) -> dict[str, float]:
    """Return the seconds of each phase: see ``TransferReport.timings_s``.

    Args:
        ended: the answers of those ranks that have delivered.
        submitted_at: when the pull's reads were made.
        started_at: when the first of them left the queue.
        arrived_at: when the last byte had arrived, or now.
        fence_s: what the slowest rank needed after its last byte.
    """
    bind_s = sum([each.bind_s for each in ended])
    post_s = sum([each.post_s for each in ended])
    scatter_s = sum([each.scatter_s for each in ended])
    return {
        "queue": started_at - submitted_at,
        "bind": bind_s,
        "post": post_s,
        "wire": max(0.0, arrived_at - started_at - bind_s - post_s - scatter_s),
        "scatter": scatter_s,
        "fence": fence_s,
    }
