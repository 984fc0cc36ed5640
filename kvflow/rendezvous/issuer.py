"""Sign and verify tickets with the cluster secret, and draw secrets and keys."""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self
from weakref import ref

from handshake import CurveKeys
from handshake.security import ClusterSecurity, draw_secret, sign
from kvflow.config import WorkerConfig, require_secret
from kvflow.errors import ArgumentInvalid, TicketInvalid, counted, quoted
from kvflow.forks import Origin
from kvflow.leases.issuer import HEAD_START_BITS, Issuer
from kvflow.leases.tickets import TICKET_CHARS_MAX, Grant, RankAddress, Ticket, fingerprint_of
from kvflow.rendezvous.endpoint import security_of

__all__ = ["TicketKey", "TicketMint", "draw_head_start", "draw_pair", "draw_secret", "public_key"]

_verified: dict[tuple[int, bytes], ref[Ticket]] = {}
"""What ``TicketKey.read`` has returned, by identity and accepted secrets. A copy of such an object is not here."""


class TicketKey:
    """The key that signs tickets: HKDF of the cluster secret with the label ``ticket``.

    What was signed with an accepted second secret is valid, too.

    Example:
        >>> key = TicketKey.of(config)
        >>> ticket = key.read(params)  # decodes nothing that was not signed
    """

    def __init__(self, security: ClusterSecurity) -> None:
        self._security = security
        self._origin = Origin("the key that signs tickets")
        self.fingerprint = security.fingerprint
        self._accepts = b"".join([each.ticket_key for each in security.accepted()])

    @classmethod
    def of(cls, config: WorkerConfig) -> Self:
        """Return the key of a worker's settings, for a process that reads tickets and has no worker.

        Raises:
            ConfigInvalid: there is no usable cluster secret.
        """
        return cls(security_of(config))

    def sign(self, payload: bytes) -> bytes:
        """Return the MAC of a grant's payload.

        Raises:
            ForkedProcess: this is a forked child: its parent signs the same slots and epochs.
        """
        self._origin.require()
        return sign(self._security.ticket_key, payload)

    def verifies(self, payload: bytes, mac: bytes) -> bool:
        """Return whether a member of the cluster signed a grant's payload; for ``Ticket.from_params``.

        Raises:
            TicketInvalid: the payload says that it was signed with another cluster secret.
        """
        if self._security.verifies(payload, mac):
            return True
        ours, theirs = [each.fingerprint for each in self._security.accepted()], fingerprint_of(payload)
        if theirs and theirs not in ours:
            raise TicketInvalid(
                f"the ticket was signed with another cluster secret: its fingerprint is {theirs.hex()}, and ours is "
                f"{' or '.join(each.hex() for each in ours)}",
                remedy="Use one cluster secret. kvflow config prints the fingerprint of a secret as cluster.",
            )
        return False

    def macs(self, grant: Grant) -> tuple[bytes, ...]:
        """Return the MACs that a ticket of this grant may have: one for each accepted secret."""
        accepted = self._security.accepted()
        return tuple([sign(each.ticket_key, grant.payload(each.fingerprint)) for each in accepted])

    def content_keys(self) -> Mapping[bytes, bytes]:
        """Return the keys of digests by the fingerprints of their accepted secrets, our own first."""
        return {each.fingerprint: each.content_key for each in self._security.accepted()}

    def read(self, params: object, *, chars_max: int = TICKET_CHARS_MAX) -> Ticket:
        """Verify and read a ticket, once: every worker of this process that accepts the same secrets knows the object.

        Arguments and errors are those of ``Ticket.from_params``.
        """
        ticket = Ticket.from_params(params, verify=self.verifies, chars_max=chars_max)
        key = id(ticket), self._accepts
        _verified[key] = ref(ticket, lambda _: _verified.pop(key, None))
        return ticket

    def check(self, ticket: Ticket) -> None:
        """Verify every grant, before the caller acts on anything in the ticket. One that was ``read`` is verified.

        Raises:
            ArgumentInvalid: it is something else than a ``Ticket``.
            TicketInvalid: a grant was not signed with the cluster's secret.
        """
        verified = _verified.get((id(ticket), self._accepts))
        if verified is None or verified() is not ticket:
            if not isinstance(ticket, Ticket):
                raise ArgumentInvalid("ticket", "a Ticket", ticket, remedy="Pass worker.read_ticket(params).")
            ticket.verify(self.verifies)


def draw_head_start(draw_bits: Callable[[int], int] = secrets.randbits) -> int:
    """Draw where the epochs of a new mint begin."""
    return draw_bits(HEAD_START_BITS)


class TicketMint(Issuer):
    """The scheduler's side of an engine of several processes: mints tickets that its workers admit.

    Example:
        >>> mint = TicketMint(engine_id="prefill-0", ranks=[worker.rank_address], cluster_secret=secret)
        >>> ticket, grant = mint.offer("request-1", block_ids=[[3, 4]], num_tokens=32)
        >>> worker.admit(grant)  # on every rank
    """

    def __init__(
        self,
        engine_id: str,
        ranks: Sequence[RankAddress],
        *,
        cluster_secret: str,
        lease_s: float = 30.0,
        draw_bits: Callable[[int], int] = secrets.randbits,
        wall_clock: Callable[[], float] = time.time,
        block_sizes: Sequence[int] = (),
        trace_offers: bool = False,
    ) -> None:
        require_secret("cluster secret", cluster_secret)
        key = TicketKey(ClusterSecurity.from_secret(cluster_secret))
        super().__init__(
            engine_id,
            ranks,
            sign=key.sign,
            fingerprint=key.fingerprint,
            lease_s=lease_s,
            head_start=draw_head_start(draw_bits),
            wall_clock=wall_clock,
            block_sizes=block_sizes,
            draw_trace=draw_bits if trace_offers else None,
        )

    def __repr__(self) -> str:
        """Say whose tickets it signs."""
        return f"<TicketMint of {quoted(self.engine_id)}: {counted(len(self.ranks), 'rank')}>"


def draw_pair() -> tuple[str, str]:
    """Draw a key pair for one worker; return the private and the public key, 64 hexadecimal digits each."""
    keys = CurveKeys.draw()
    return keys.private_key, keys.public_key


def public_key(private: bytes) -> str:
    """Return the public key, 64 hexadecimal digits, that belongs to the 32 bytes of a private one."""
    return CurveKeys.from_private(private).public_key
