"""What one completed pull moved, and where its time went."""

from msgspec import Struct


class TransferReport(Struct, frozen=True, kw_only=True, gc=False):
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

    @property
    def gb_per_s(self) -> float:
        """Rate over post and wire, in 10**9 bytes per second."""
        moving = self.timings_s.get("post", 0.0) + self.timings_s.get("wire", 0.0)
        return self.nbytes / moving / 1e9 if moving > 0 else 0.0
