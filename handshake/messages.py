"""The messages of the wire protocol, version 2, the bounds of every field, and the events that follow from them.

The conversation. Only the client may ask, renew and release; both may ping, refuse and leave::

    client                          server
    Hello         ->                              who speaks, which versions
                  <-  Welcome or Refuse           the version, or why not
                  <-  Publish
    Publish       ->                              now both are ready
    Release, Renew ->
                  <-  Released, Renewed
    Ask           ->
                  <-  Answer                      when the server has one: answers come in any order
    Ping          <->  Pong                       a client's Ping may ask for the server's report
    Bye, Refuse   <->  Bye                        close the connection

A new field needs a default; unknown fields are skipped. A field keeps its name, type and meaning forever. A new message
type, or a new word in a closed set (``EngineRole``, ``LeaseOutcome``), needs a new wire version. ``Hello`` and
``Refuse`` are read before a version is agreed, and may only grow.
"""

import hashlib
from typing import Annotated, Any, Literal, NamedTuple, Self

from msgspec import UNSET, Meta, Struct, UnsetType, field

from handshake.limits import LEASES_MAX, PUBLICATION_BYTES_MAX

WIRE_VERSION = 2


class VersionRange(NamedTuple):
    """Both ends are included."""

    lowest: int
    highest: int

    def __str__(self) -> str:
        return f"{self.lowest}..{self.highest}"


SUPPORTED = VersionRange(lowest=WIRE_VERSION, highest=WIRE_VERSION)


def choose(ours: VersionRange, theirs: VersionRange) -> int | None:
    """Return the highest version in both ranges, or None if there is none."""
    highest = min(ours.highest, theirs.highest)
    return highest if highest >= max(ours.lowest, theirs.lowest) else None


PASS_BYTES_MAX = 64  # two digests of 32 bytes
REPORT_BYTES_MAX = 64 << 10  # some two hundred pulls and leases
QUESTION_BYTES_MAX = 48 << 10  # two thousand digests of 16 bytes are 36 KiB
ANSWER_BYTES_MAX = 1 << 20
CERTIFICATE_BYTES_MAX = 1024  # one of an elliptic curve has some 300

EngineRole = Literal["prefill", "decode", "both"]
# What became of a lease: still held; this release was counted and others are awaited; ended; unknown.
LeaseOutcome = Literal["held", "counted", "ended", "unknown"]

Version = Annotated[int, Meta(ge=1, le=65535)]
RankNumber = Annotated[int, Meta(ge=0, le=65535)]
Text = Annotated[str, Meta(max_length=1024)]  # for people; logged with ``repr``, because a peer chose its characters
Epoch = Annotated[int, Meta(ge=0)]  # 64 bits without a sign: MessagePack has no larger number
Nonce = Annotated[int, Meta(ge=0, le=2**63 - 1)]
# One of a set that may grow: a peer that does not know the word still reads the rest of the message.
Word = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,31}\Z")]
SecondsAgo = Annotated[float, Meta(ge=0, le=2**40)]
Pass = Annotated[bytes, Meta(max_length=PASS_BYTES_MAX)]  # admits one client elsewhere; opaque here
ReportBytes = Annotated[bytes, Meta(max_length=REPORT_BYTES_MAX)]
CertificateBytes = Annotated[bytes, Meta(max_length=CERTIFICATE_BYTES_MAX)]  # of connections elsewhere; opaque here
ClockTime = Annotated[float, Meta(ge=0, le=2**40)]  # seconds since 1970 on the sender's wall clock


class Identity(Struct, frozen=True, kw_only=True):
    """Who speaks: one rank of one engine, since its last start.

    Attributes:
        engine_id: shared by all ranks of an engine.
        rank: below ``num_ranks``.
        incarnation: 32 lower-case hexadecimal digits, drawn at each start, never reused.
        software: name and version of the program, for people.
        certificate: with which it encrypts connections elsewhere; absent if it does not.
    """

    engine_id: Annotated[str, Meta(min_length=1, max_length=256)]
    rank: RankNumber
    num_ranks: Annotated[int, Meta(ge=1, le=65536)]
    incarnation: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
    role: EngineRole
    software: Annotated[str, Meta(max_length=64)] = ""
    certificate: CertificateBytes | UnsetType = UNSET

    def __post_init__(self) -> None:
        if self.rank >= self.num_ranks:
            raise ValueError(f"rank {self.rank} is not below num_ranks {self.num_ranks}")


class Publication(Struct, frozen=True, kw_only=True):
    """What a peer states to the program above; opaque here. ``of`` makes one.

    Attributes:
        schema: version of the payload's own format.
        digest: SHA-256 of the payload.
    """

    schema: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    digest: Annotated[bytes, Meta(min_length=32, max_length=32)]
    payload: Annotated[bytes, Meta(max_length=PUBLICATION_BYTES_MAX)]

    @classmethod
    def of(cls, payload: bytes, *, schema: int = 1) -> Self:
        """Add the digest to a payload."""
        return cls(schema=schema, digest=hashlib.sha256(payload).digest(), payload=payload)

    def is_intact(self) -> bool:
        """Return whether the digest is that of the payload."""
        return hashlib.sha256(self.payload).digest() == self.digest


class LeaseRef(Struct, frozen=True, kw_only=True):
    """One lease of a producer: its slot in the epoch table, and the epoch that the ticket named."""

    slot: Annotated[int, Meta(ge=0, le=2**31)]
    epoch: Epoch


class LeaseAnswer(LeaseRef, frozen=True, kw_only=True):
    """What became of one lease."""

    outcome: LeaseOutcome
    ended_by: Word | UnsetType = UNSET  # how it ended, as the application names it; absent if that is not remembered
    ended_s: SecondsAgo | UnsetType = UNSET  # how long ago


class Message(Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all messages; each has its own explicit tag."""


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """The client's first message."""

    version_min: Version
    version_max: Version
    identity: Identity

    def __post_init__(self) -> None:
        if self.version_min > self.version_max:
            raise ValueError(f"version_min {self.version_min} is above version_max {self.version_max}")


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """The server's answer: the version that both speak from here on."""

    version: Version
    identity: Identity
    clock_s: ClockTime


class Refuse(Message, frozen=True, kw_only=True, tag="refuse"):
    """The last word of a peer that has a complaint. ``code``: a ``CloseCode``, or a newer peer's."""

    code: Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,63}\Z")]
    reason: Text
    remedy: Text = ""


class Publish(Message, frozen=True, kw_only=True, tag="publish"):
    """The sender's publication, the same for every peer, once per connection. Its ``repr`` does not show the pass.

    A client's is small: see ``Limits.client_frame_bytes_max``.

    Attributes:
        clock_s: of a client; a server has said its own in ``Welcome``.
        pass_: of a server, for this client alone; ``pass`` on the wire. A client's is ignored.
    """

    publication: Publication
    clock_s: ClockTime | UnsetType = UNSET
    pass_: Pass | UnsetType = field(default=UNSET, name="pass")

    def __repr__(self) -> str:
        return f"Publish(publication={self.publication!r}, clock_s={self.clock_s!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("publication", self.publication), ("clock_s", self.clock_s)]


LeaseRefs = Annotated[tuple[LeaseRef, ...], Meta(min_length=1, max_length=LEASES_MAX)]
LeaseAnswers = Annotated[tuple[LeaseAnswer, ...], Meta(min_length=1, max_length=LEASES_MAX)]


class Release(Message, frozen=True, kw_only=True, tag="release"):
    """The client's rank needs these leases no more. Repeating it is harmless."""

    leases: LeaseRefs
    read: bool  # whether the client has read the blocks


class Released(Message, frozen=True, kw_only=True, tag="released"):
    """Answer to ``Release``: its leases that have not ended. If all of them have, the server says nothing."""

    leases: LeaseAnswers


class Renew(Message, frozen=True, kw_only=True, tag="renew"):
    """The client still needs these leases."""

    leases: LeaseRefs


class Renewed(Message, frozen=True, kw_only=True, tag="renewed"):
    """Answer to ``Renew``, lease by lease; those that are ``held`` last ``lease_s`` seconds from now."""

    leases: LeaseAnswers
    lease_s: Annotated[float, Meta(ge=0, le=86400)]


class Ping(Message, frozen=True, kw_only=True, tag="ping"):
    """Asks for a sign of life; a client may ask for the server's report."""

    nonce: Nonce
    report: bool | UnsetType = UNSET


class Pong(Message, frozen=True, kw_only=True, tag="pong"):
    """Answer to the ``Ping`` with the same nonce; with the program's report if it was asked for and there is one."""

    nonce: Nonce
    clock_s: ClockTime
    report: ReportBytes | UnsetType = UNSET


class Ask(Message, frozen=True, kw_only=True, tag="ask"):
    """A question of the client's program, opaque here. ``nonce``: of no question that is still open."""

    nonce: Nonce
    question: Annotated[bytes, Meta(max_length=QUESTION_BYTES_MAX)]


class Answer(Message, frozen=True, kw_only=True, tag="answer"):
    """Answer to the open question with the same nonce; opaque here."""

    nonce: Nonce
    answer: Annotated[bytes, Meta(max_length=ANSWER_BYTES_MAX)]


class Bye(Message, frozen=True, kw_only=True, tag="bye"):
    """The last word of a peer without a complaint, and the answer to a last word."""

    reason: Text = ""


AnyMessage = (
    Hello | Welcome | Refuse | Publish | Release | Released | Renew | Renewed | Ask | Answer | Ping | Pong | Bye
)


# What a connection reports to the program above. Exactly one ``ConnectionClosed`` or ``ConnectionFailed`` comes last.


class PeerReady(Struct, frozen=True, kw_only=True):
    """The handshake is done. ``pass_``: the server's for this client, which ``repr`` does not show; or empty."""

    identity: Identity
    publication: Publication
    version: int
    pass_: bytes = b""

    def __repr__(self) -> str:
        return f"PeerReady({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in self.__struct_fields__ if name != "pass_"]


class ReleaseReceived(Struct, frozen=True, kw_only=True):
    """The peer needs these leases no more; ``read`` as in ``Release``."""

    leases: tuple[LeaseRef, ...]
    read: bool


class RenewReceived(Struct, frozen=True, kw_only=True):
    """The peer still needs these leases."""

    leases: tuple[LeaseRef, ...]


class ReleaseAnswered(Struct, frozen=True, kw_only=True):
    """What became of the leases that we released."""

    leases: tuple[LeaseAnswer, ...]


class RenewAnswered(Struct, frozen=True, kw_only=True):
    """What became of the leases that we asked to renew; the held ones last ``lease_s`` from the answer."""

    leases: tuple[LeaseAnswer, ...]
    lease_s: float


class PingAnswered(Struct, frozen=True, kw_only=True):
    """The server has answered our last ping, after ``rtt_s``."""

    rtt_s: float
    report: bytes | UnsetType = UNSET  # if we have not asked for it, or the server has none


class Asked(Struct, frozen=True, kw_only=True):
    """The client asks. The question is open until it is answered, or the connection ends."""

    nonce: int
    question: bytes


class Answered(Struct, frozen=True, kw_only=True):
    """The server has answered the question with this nonce."""

    nonce: int
    answer: bytes


class ConnectionClosed(Struct, frozen=True, kw_only=True):
    """One side left without a complaint."""

    reason: str


class ConnectionFailed(Struct, frozen=True, kw_only=True):
    """The connection ended with a complaint."""

    code: str  # a ``CloseCode``; the peer's own if it refused
    reason: str
    remedy: str = ""
    refused: bool = False  # the peer refused us; otherwise we found the fault


Ending = ConnectionClosed | ConnectionFailed
HandshakeEvent = (
    PeerReady
    | ReleaseReceived
    | RenewReceived
    | ReleaseAnswered
    | RenewAnswered
    | Asked
    | Answered
    | PingAnswered
    | Ending
)
