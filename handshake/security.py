"""Keys and who is trusted: CURVE keys, the ticket key, who is admitted, what may be bound.

A cluster shares one secret, from which all servers derive one key pair and all clients another, so that a client knows
the server's public key. The secret cannot identify a member, or slow down the guessing of a weak secret. For that, each
worker may have its own key pair, and a list of allowed public keys. CURVE draws fresh session keys in either case.
"""

import hashlib
import hmac
import ipaddress
import re
import secrets
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Self

import zmq
from msgspec import Struct, structs
from zmq.utils import z85

from handshake.errors import AddressInvalid, Unauthenticated

if TYPE_CHECKING:
    from hashlib import _Hash

SECRET_CHARACTERS_MIN = 16  # shorter secrets can be found by an offline search

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"handshake"  # not empty: libzmq refuses all clients while no handler is bound to ``ZAP_ENDPOINT``

_SALT = b"handshake cluster secret v1"
_HASH = "sha256"
_HASH_BYTES = 32
_BLOCK_BYTES = 64
_INNER, _OUTER = (bytes(byte ^ pad for byte in range(256)) for pad in (0x36, 0x5C))
_TCP_ENDPOINT = re.compile(r"tcp://(?P<host>\[[^\[\]]+\]|[^\[\]:/]+):(?P<port>[0-9]{1,5}|\*)\Z")


def hkdf(secret: bytes, *, salt: bytes, info: bytes, nbytes: int) -> bytes:
    """Derive ``nbytes`` (at most 8160) from a secret, with SHA-256. Source: RFC 5869."""
    assert 0 < nbytes <= 255 * _HASH_BYTES
    pseudorandom_key = hmac.digest(salt or bytes(_HASH_BYTES), secret, _HASH)
    output, block = b"", b""
    for counter in range(1, -(-nbytes // _HASH_BYTES) + 1):
        block = hmac.digest(pseudorandom_key, block + info + bytes([counter]), _HASH)
        output += block
    return output[:nbytes]


def sign(key: bytes, data: bytes) -> bytes:
    """Return the 32 bytes that prove that ``data`` comes from a holder of ``key`` (HMAC-SHA256)."""
    inner, outer = _states(key)
    inner, outer = inner.copy(), outer.copy()
    inner.update(data)
    outer.update(inner.digest())
    return outer.digest()


@lru_cache(maxsize=16)
def _states(key: bytes) -> tuple["_Hash", "_Hash"]:
    """Return the two hashes of HMAC (RFC 2104) after the block of the key, which ``hmac.digest`` hashes every time."""
    block = (key if len(key) <= _BLOCK_BYTES else hashlib.sha256(key).digest()).ljust(_BLOCK_BYTES, b"\0")
    return hashlib.sha256(block.translate(_INNER)), hashlib.sha256(block.translate(_OUTER))


def verify(key: bytes, data: bytes, signature: bytes) -> bool:
    """Return whether ``signature`` is that of ``data``, in constant time."""
    return hmac.compare_digest(sign(key, data), signature)


PublicKey = str  # 64 lower-case hexadecimal digits: Z85 has characters that shells and YAML interpret
PUBLIC_KEY = re.compile(r"[0-9a-f]{64}\Z")


def draw_secret() -> str:
    """Draw a cluster secret of 256 bits."""
    return secrets.token_urlsafe(32)


class CurveKeys(Struct, frozen=True):
    """A CURVE key pair, each key as 40 characters of Z85. Its ``repr`` shows the public key only."""

    public: bytes
    private: bytes

    @classmethod
    def from_private(cls, private: bytes) -> Self:
        """Complete a pair from the 32 bytes of its private key."""
        encoded = z85.encode(private)
        return cls(public=zmq.curve_public(encoded), private=encoded)

    @classmethod
    def draw(cls) -> Self:
        """Draw a new pair."""
        public, private = zmq.curve_keypair()
        return cls(public=public, private=private)

    @property
    def public_key(self) -> PublicKey:
        """The public key as 64 hexadecimal digits, as in tickets."""
        return z85.decode(self.public).hex()

    @property
    def private_key(self) -> str:
        """The private key as 64 hexadecimal digits."""
        return z85.decode(self.private).hex()

    def __repr__(self) -> str:
        return f"CurveKeys(public={self.public!r})"


class AllowedKeys:
    """The public keys of all workers that one worker talks to, in either direction. Thread: any."""

    def __init__(self, keys: Iterable[PublicKey]) -> None:
        self._keys = _checked(keys)

    def __contains__(self, key: PublicKey) -> bool:
        return key in self._keys

    def replace(self, keys: Iterable[PublicKey]) -> None:
        """Trust only these from now on; ``AddressInvalid`` if one is malformed, and nothing has changed."""
        self._keys = _checked(keys)


def _checked(keys: Iterable[object]) -> frozenset[PublicKey]:
    found = set()
    for key in keys:
        if not isinstance(key, str) or not PUBLIC_KEY.match(key):  # not repeated: it may be a private key
            raise AddressInvalid(
                "an allowed key is malformed", remedy="Give 64 lower-case hexadecimal digits for each."
            )
        found.add(key)
    return frozenset(found)


class ClusterSecurity(Struct, frozen=True):
    """The keys of one worker, and the keys that it trusts. Its ``repr`` shows no secret.

    Attributes:
        server: the key pair of our listener.
        client: the key pair that we dial with.
        ticket_key: 32 bytes for ``sign`` and ``verify``.
        content_key: 32 bytes that key the digests of what blocks hold.
        fingerprint: 8 bytes that name the secret and do not help to guess it: of the public key that it derives.
        other: what a second secret derives, while a cluster changes from one to the other.
        allowed: the keys of all workers that we talk to; None if they are those that the secrets derive.
    """

    server: CurveKeys
    client: CurveKeys
    ticket_key: bytes
    content_key: bytes
    fingerprint: bytes
    other: Self | None = None
    allowed: AllowedKeys | None = None

    @classmethod
    def from_secret(cls, secret: str) -> Self:
        """Derive everything from a secret; ``AddressInvalid`` if it has fewer than 16 characters."""
        if len(secret) < SECRET_CHARACTERS_MIN:
            raise AddressInvalid(
                f"the cluster secret has {len(secret)} characters, at least {SECRET_CHARACTERS_MIN} are needed",
                remedy="Draw one, for example with: python -c 'import secrets; print(secrets.token_urlsafe(32))'",
            )
        # Environment variables that are not UTF-8 arrive with lone surrogates; they are part of the secret.
        material = secret.encode("utf-8", "surrogatepass")

        def derive(label: bytes) -> bytes:
            return hkdf(material, salt=_SALT, info=label, nbytes=32)

        server = CurveKeys.from_private(derive(b"curve server"))
        return cls(
            server=server,
            client=CurveKeys.from_private(derive(b"curve client")),
            ticket_key=derive(b"ticket"),
            content_key=derive(b"content"),
            fingerprint=z85.decode(server.public)[:8],
        )

    def accepting(self, secret: str) -> Self:
        """Return the same that also accepts tickets and peers of a second secret; raise as ``from_secret``."""
        return structs.replace(self, other=type(self).from_secret(secret))

    def with_own_key(self, private: bytes, allowed: AllowedKeys) -> Self:
        """Return the same with our own private key of 32 bytes and a list; secrets then sign tickets only."""
        own = CurveKeys.from_private(private)
        return structs.replace(self, server=own, client=own, allowed=allowed)

    def admits(self, key: PublicKey) -> bool:
        """Return whether a client with this public key may connect."""
        if self.allowed is not None:
            return key in self.allowed
        return any(key == each.client.public_key for each in (self, self.other) if each is not None)

    def towards(self, server_key: PublicKey = "") -> Self:
        """Return the keys to dial the server of this public key; without one, a server of our secret.

        Raises:
            Unauthenticated: we do not trust that key. Nothing was dialed.
        """
        if self.allowed is not None:
            if server_key not in self.allowed:
                raise Unauthenticated(
                    f"the server's key {server_key or '(none)'} is not among our allowed keys",
                    remedy="Name the server's public key, and have it in allowed_keys, if it is of this cluster.",
                    local=True,
                )
            theirs = CurveKeys(public=z85.encode(bytes.fromhex(server_key)), private=b"")
            return structs.replace(self, server=theirs)
        for each in (self, self.other):
            if each is not None and server_key in ("", each.server.public_key):
                return each
        raise Unauthenticated(f"the server's key {server_key} does not follow from our cluster secret", local=True)

    def accepted(self) -> tuple[Self, ...]:
        """Return what each secret derives whose tickets are valid, our own first."""
        return (self,) if self.other is None else (self, self.other)

    def verifies(self, data: bytes, signature: bytes) -> bool:
        """Return whether a holder of an accepted secret signed ``data``."""
        if verify(self.ticket_key, data, signature):
            return True
        return self.other is not None and verify(self.other.ticket_key, data, signature)

    def __repr__(self) -> str:
        return f"ClusterSecurity(server={self.server!r}, client={self.client!r})"


def check_bind(bind: str, security: ClusterSecurity | None, *, insecure_allowed: bool = False) -> None:
    """Check that a server without encryption listens on this machine only.

    Args:
        bind: ``tcp://host:port``; the port may be 0 or ``*``, an IPv6 host stands in brackets.
        security: None for a server without encryption.
        insecure_allowed: the operator allowed it by name.

    Raises:
        AddressInvalid: the address is malformed, or it is not a loopback address and there is no security.
    """
    host, _ = host_and_port(bind)
    if security is None and not insecure_allowed and not _is_loopback(host):
        raise AddressInvalid(
            f"binding {bind} without a cluster secret would let anyone on the network in",
            remedy="Set a cluster secret, bind a loopback address, or allow insecure binding by name.",
        )


def host_and_port(endpoint: str) -> tuple[str, str]:
    """Return the host, without brackets, and the port of ``tcp://host:port``. ZeroMQ would guess what others mean.

    Raises:
        AddressInvalid: it is something else.
    """
    match = _TCP_ENDPOINT.match(endpoint)
    if match is None or (match["port"] != "*" and int(match["port"]) > 65535):
        raise AddressInvalid(f"{endpoint!r} is not an address", remedy="Use tcp://host:port.")
    return match["host"].strip("[]"), match["port"]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"  # any other name may resolve to anything


def answer_admission(replier: zmq.Socket[bytes], admits: Callable[[PublicKey], bool]) -> None:
    """Answer whether one client may connect; raise ``zmq.Again`` if no client waits.

    Args:
        replier: a REP socket, bound to ``ZAP_ENDPOINT`` in the server's context before the server binds.
        admits: returns whether a public key may connect.
    """
    request = replier.recv_multipart(zmq.NOBLOCK)
    key = key_of_request(request)
    admitted = key is not None and admits(key)
    replier.send_multipart(answer_request(request, key if admitted else None), zmq.NOBLOCK)


def key_of_request(request: list[bytes]) -> PublicKey | None:
    """Return the public key of one request, or None if it has none. Source: ZeroMQ RFC 27."""
    # Frames: version, request id, domain, address, routing id, mechanism, credentials.
    if len(request) == 7 and request[2] == ZAP_DOMAIN and request[5] == b"CURVE" and len(request[6]) == 32:
        return request[6].hex()
    return None


def answer_request(request: list[bytes], admitted: PublicKey | None) -> list[bytes]:
    """Return the answer to one request: status 200 with the key as the user's id, or 400. Source: ZeroMQ RFC 27."""
    # Frames: version, request id, status, reason, user id, metadata.
    request_id = request[1] if len(request) > 1 else b""
    if admitted is None:
        return [b"1.0", request_id, b"400", b"unknown key", b"", b""]
    # libzmq gives the user's id with every message of the connection.
    return [b"1.0", request_id, b"200", b"", admitted.encode(), b""]
