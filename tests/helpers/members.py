"""Members of tickets, for what judges whether their addresses are worth dialing."""

from kvflow.leases.issuer import Issuer
from kvflow.leases.tickets import RankAddress


def member_of(who, issued_ms):
    """Return the member of a ticket: ``who`` is the first digit of its incarnation, and its endpoint."""
    incarnation, endpoint = who
    mint = Issuer(
        "prefill-0",
        [RankAddress(0, incarnation * 32, endpoint, 0, 4)],
        sign=lambda payload: bytes(32),
        lease_s=30.0,
        wall_clock=None if issued_ms is None else lambda: issued_ms / 1000,
    )
    return next(mint.offer("r", block_ids=[[1]], num_tokens=1)[0].members())
