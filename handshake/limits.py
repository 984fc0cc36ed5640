"""The bounds of one endpoint, each with its reason.

The first protocol error ends a connection, because what follows it cannot be trusted either.
"""

import math

from msgspec import Struct

PUBLICATION_BYTES_MAX = 2 << 20
"""A manifest of 128 layers with 8 components takes some 60 KiB, NIXL's metadata some 44 bytes a region."""

LEASES_MAX = 1024
"""Leases in one message: 40 KiB, which is decoded in well under a millisecond."""

QUESTIONS_MAX = 1024
"""Questions of one connection that are open: a server that lets them wait remembers each."""


class Limits(Struct, frozen=True, kw_only=True):
    """What one endpoint spends on its peers at most.

    Attributes:
        frame_bytes_max: of one frame of a server: the largest publication, and 64 KiB for what surrounds it.
        client_frame_bytes_max: of one frame of a client. Its largest message is a ``Release`` of 1,024 leases, 27 KiB.
            A stranger can make a server hold one such frame per connection, before it has proved anything.
        peers_max: connections of one server. Two engines of 512 ranks each, one connection per pair of ranks. With
            encryption up to 1,024 more wait for a place, for half of ``handshake_s``.
        pending_handshakes_max: connections of one server without encryption that are not ready yet; above it one of
            them is refused as ``busy`` and dials again. With encryption a handshake keeps its place.
        handshake_grace_s: above that, a handshake of this age is given up for a newcomer; before, the newcomer is
            refused. Without encryption only.
        connections_per_key_max: connections of one client's own key, those that wait included. A worker has one at a
            time; those of its earlier incarnations end within ``silence_s_max``. Does not apply where all share the
            secret's key.
        messages_per_s_max: of one key, or of one connection where all share a key. A reader sends at most one or two
            per iteration of its loop, which takes some 100 us.
        leases_per_s_max: named in those messages.
        reports_per_s_max: reports that such a key or connection may ask for. A person who watches a server asks once
            in a second.
        questions_per_s_max: questions that such a key or connection may ask. An engine asks once for each prompt, and a
            producer answers the longest within 300 us.
        incoming_max: messages of one peer that wait to be read. A reader that keeps up never has more than a few.
        incoming_bytes_max: of those messages. Fewer of them wait where each may be a whole publication. A peer whose
            bytes are more than its messages can be is cut off.
        outgoing_max: messages that wait for one peer to read. A peer that has more is lost.
        outgoing_bytes_max: of answers that a client has not read, as its last answer to a ping shows. A client that
            has more is lost, and its TCP connection ends after ``silence_s_max`` without a byte read.
        connect_s: to reach a listening peer, all attempts together.
        handshake_s: from dialing, or from the first message received, to ready. A CURVE handshake takes about 1 ms and
            a publication some ms: seconds pass only when a process is stopped or a network is broken.
        ping_interval_s: silence after which a ping asks for a sign of life.
        silence_s_max: silence after which the peer counts as dead. Three pings: two may be lost in a stall of the
            interpreter (a first compilation takes 5 to 15 s). It stays below a lease of 30 s.
        closing_s: to exchange closing messages, which takes one round trip.

    Raises:
        ValueError: a limit is not positive and finite, ``ping_interval_s`` is not below ``silence_s_max``, or
            ``leases_per_s_max`` is below what one message may name.
    """

    frame_bytes_max: int = PUBLICATION_BYTES_MAX + (64 << 10)
    client_frame_bytes_max: int = 64 << 10
    peers_max: int = 1024
    pending_handshakes_max: int = 64
    handshake_grace_s: float = 0.3
    connections_per_key_max: int = 16
    messages_per_s_max: float = 20_000.0
    leases_per_s_max: float = 200_000.0
    reports_per_s_max: float = 4.0
    questions_per_s_max: float = 2000.0
    incoming_max: int = 64
    incoming_bytes_max: int = 8 << 20
    outgoing_max: int = 1024
    outgoing_bytes_max: int = 8 << 20
    connect_s: float = 2.0
    handshake_s: float = 5.0
    ping_interval_s: float = 9.0
    silence_s_max: float = 28.0
    closing_s: float = 0.5

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"limit {name} must be positive and finite, not {value!r}")
        if self.ping_interval_s >= self.silence_s_max:
            raise ValueError(
                f"ping_interval_s ({self.ping_interval_s}) must be below silence_s_max ({self.silence_s_max})"
            )
        if self.leases_per_s_max < LEASES_MAX:
            raise ValueError(f"leases_per_s_max ({self.leases_per_s_max}) must not be below {LEASES_MAX}")


DEFAULT_LIMITS = Limits()
