"""One cluster secret, and all that follows from it: CURVE keys, the ticket key, who is let in, what may be bound.

A cluster shares one secret. Every server has the key pair derived for servers, every client the pair derived for
clients, so that a client knows the server's public key without asking, and a server admits exactly one key.
CURVE draws fresh session keys for each connection. What the secret cannot do: tell two members of the cluster
apart, or slow down the guessing of a weak secret.
"""

import hmac
import ipaddress
import re
from typing import Self

import zmq
import zmq.asyncio
from msgspec import Struct
from zmq.utils import z85

from handshake.errors import ConfigInvalid

SECRET_CHARACTERS_MIN = 16
"""Short of this a secret is a word that someone typed, and an offline search finds it."""

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"handshake"
"""Not empty, so that libzmq turns everyone away while nobody answers at ``ZAP_ENDPOINT``."""

_SALT = b"handshake cluster secret v1"
_HASH = "sha256"
_HASH_BYTES = 32
_TCP_ENDPOINT = re.compile(r"tcp://(?P<host>\[[^\[\]]+\]|[^\[\]:/]+):(?P<port>[0-9]{1,5}|\*)\Z")


def hkdf(secret: bytes, *, salt: bytes, info: bytes, nbytes: int) -> bytes:
    """Derive ``nbytes`` (at most 8160) from a secret, as RFC 5869 says, with SHA-256."""
    assert 0 < nbytes <= 255 * _HASH_BYTES
    # Step 1, extract. The RFC's default salt is a string of zeros.
    pseudorandom_key = hmac.digest(salt or bytes(_HASH_BYTES), secret, _HASH)
    # Step 2, expand.
    output, block = b"", b""
    for counter in range(1, -(-nbytes // _HASH_BYTES) + 1):
        block = hmac.digest(pseudorandom_key, block + info + bytes([counter]), _HASH)
        output += block
    return output[:nbytes]


def sign(key: bytes, data: bytes) -> bytes:
    """Return the 32 bytes that prove that ``data`` comes from a holder of ``key`` (HMAC-SHA256)."""
    return hmac.digest(key, data, _HASH)


def verify(key: bytes, data: bytes, signature: bytes) -> bool:
    """Tell whether ``signature`` is that of ``data``, in a time that does not depend on where they differ."""
    return hmac.compare_digest(sign(key, data), signature)


class CurveKeys(Struct, frozen=True):
    """A CURVE key pair, each key as 40 characters of Z85. Its ``repr`` shows the public key only."""

    public: bytes
    private: bytes

    @classmethod
    def from_private(cls, private: bytes) -> Self:
        """Complete a pair from the 32 bytes of its private key."""
        encoded = z85.encode(private)
        return cls(public=zmq.curve_public(encoded), private=encoded)

    def __repr__(self) -> str:
        return f"CurveKeys(public={self.public!r})"


class ClusterSecurity(Struct, frozen=True):
    """What the members of one cluster derive from their secret. Its ``repr`` shows no secret.

    Attributes:
        server: the key pair of every server.
        client: the key pair of every client; the only one that servers admit.
        ticket_key: 32 bytes for ``sign`` and ``verify``.
    """

    server: CurveKeys
    client: CurveKeys
    ticket_key: bytes

    @classmethod
    def from_secret(cls, secret: str) -> Self:
        """Derive everything from a secret: any string of 16 characters or more.

        Raises:
            ConfigInvalid: the secret is too short.
        """
        if len(secret) < SECRET_CHARACTERS_MIN:
            raise ConfigInvalid(
                f"the cluster secret has {len(secret)} characters, at least {SECRET_CHARACTERS_MIN} are needed",
                remedy="Draw one, for example with: python -c 'import secrets; print(secrets.token_urlsafe(32))'",
            )
        # Environment variables that are not UTF-8 arrive with lone surrogates; they are part of the secret.
        material = secret.encode("utf-8", "surrogatepass")

        def derive(label: bytes) -> bytes:
            return hkdf(material, salt=_SALT, info=label, nbytes=32)

        return cls(
            server=CurveKeys.from_private(derive(b"curve server")),
            client=CurveKeys.from_private(derive(b"curve client")),
            ticket_key=derive(b"ticket"),
        )

    def __repr__(self) -> str:
        return f"ClusterSecurity(server={self.server!r}, client={self.client!r})"


def check_bind(bind: str, security: ClusterSecurity | None, *, insecure_allowed: bool = False) -> None:
    """Make sure that nobody outside this machine can reach us without the cluster secret.

    Args:
        bind: ``tcp://host:port``; the port may be 0 or ``*``, an IPv6 host stands in brackets.
        security: None for a server without encryption.
        insecure_allowed: the operator asked, by name, to go without.

    Raises:
        ConfigInvalid: the address is malformed, or it is not a loopback address and there is no security.
    """
    host = _host(bind)
    if security is None and not insecure_allowed and not _is_loopback(host):
        raise ConfigInvalid(
            f"binding {bind} without a cluster secret would let anyone on the network in",
            remedy="Set a cluster secret, bind a loopback address, or allow insecure binding by name.",
        )


def check_endpoint(endpoint: str) -> None:
    """Make sure that ``endpoint`` is ``tcp://host:port``, before ZeroMQ guesses what else it might mean.

    Raises:
        ConfigInvalid: it is not.
    """
    _host(endpoint)


def _host(endpoint: str) -> str:
    match = _TCP_ENDPOINT.match(endpoint)
    if match is None or (match["port"] != "*" and int(match["port"]) > 65535):
        raise ConfigInvalid(f"{endpoint!r} is not an address", remedy="Use tcp://host:port.")
    return match["host"].strip("[]")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"  # any other name may resolve to anything


async def answer_admissions(replier: zmq.asyncio.Socket, admitted: bytes) -> None:
    """Let clients with the public key ``admitted`` (Z85) in, and nobody else. Runs until it is cancelled.

    While nobody runs this, nobody is let in.

    Args:
        replier: a REP socket, bound to ``ZAP_ENDPOINT`` in the server's context before the server binds.
        admitted: the one public key.
    """
    credentials = z85.decode(admitted)
    while True:
        request = await replier.recv_multipart()
        await replier.send_multipart(judge_admission(request, credentials))


def judge_admission(request: list[bytes], credentials: bytes) -> list[bytes]:
    """Return the answer to one request of ZeroMQ RFC 27: status 200, or 400 for whoever else.

    Frames of a request: version, request id, domain, address, routing id, mechanism, credentials. Frames of an
    answer: version, request id, status, reason, user id, metadata.
    """
    request_id = request[1] if len(request) > 1 else b""
    admitted = (
        len(request) == 7
        and request[2] == ZAP_DOMAIN
        and request[5] == b"CURVE"
        and hmac.compare_digest(request[6], credentials)
    )
    status, reason = (b"200", b"") if admitted else (b"400", b"unknown key")
    return [b"1.0", request_id, status, reason, b"", b""]
