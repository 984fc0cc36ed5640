"""Keys and who is trusted: CURVE keys, the ticket key, who is let in, what may be bound.

A cluster shares one secret. Alone, the secret gives every server the key pair derived for servers and every client the
pair derived for clients, so that a client knows the server's public key without asking. What the secret cannot do:
tell two members of the cluster apart, or slow down the guessing of a weak secret. For that, each worker may have a
key pair of its own beside the secret, and a list of the public keys that it talks to. CURVE draws fresh session
keys for each connection in either case.
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

SECRET_CHARACTERS_MIN = 16
"""Short of this a secret is a word that someone typed, and an offline search finds it."""

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"handshake"
"""Not empty, so that libzmq turns everyone away while nobody answers at ``ZAP_ENDPOINT``."""

_SALT = b"handshake cluster secret v1"
_HASH = "sha256"
_HASH_BYTES = 32
_BLOCK_BYTES = 64
_INNER, _OUTER = (bytes(byte ^ pad for byte in range(256)) for pad in (0x36, 0x5C))
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
    inner, outer = _states(key)
    inner, outer = inner.copy(), outer.copy()
    inner.update(data)
    outer.update(inner.digest())
    return outer.digest()


@lru_cache(maxsize=16)
def _states(key: bytes) -> tuple["_Hash", "_Hash"]:
    """Return the two hashes of HMAC (RFC 2104) after their first block, which is the key's and the same for all data.

    They are kept because ``hmac.digest`` looks the algorithm up and hashes both blocks every time.
    """
    block = (key if len(key) <= _BLOCK_BYTES else hashlib.sha256(key).digest()).ljust(_BLOCK_BYTES, b"\0")
    return hashlib.sha256(block.translate(_INNER)), hashlib.sha256(block.translate(_OUTER))


def verify(key: bytes, data: bytes, signature: bytes) -> bool:
    """Tell whether ``signature`` is that of ``data``, in a time that does not depend on where they differ."""
    return hmac.compare_digest(sign(key, data), signature)


PublicKey = str
"""A public key as 64 lower-case hexadecimal digits: Z85 has characters that shells and YAML take for their own."""

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
        """The public key as lists of allowed keys and tickets have it."""
        return z85.decode(self.public).hex()

    @property
    def private_key(self) -> str:
        """The private key, in hexadecimal digits like the public one."""
        return z85.decode(self.private).hex()

    def __repr__(self) -> str:
        return f"CurveKeys(public={self.public!r})"


class AllowedKeys:
    """The public keys of all workers that one worker talks to, whichever of the two dials.

    Thread: any; a list is replaced as a whole.
    """

    def __init__(self, keys: Iterable[PublicKey]) -> None:
        self._keys = _checked(keys)

    def __contains__(self, key: PublicKey) -> bool:
        return key in self._keys

    def replace(self, keys: Iterable[PublicKey]) -> None:
        """Trust these from now on, and no others.

        Raises:
            AddressInvalid: a key is malformed; nothing has changed.
        """
        self._keys = _checked(keys)


def _checked(keys: Iterable[object]) -> frozenset[PublicKey]:
    found = set()
    for key in keys:
        if not isinstance(key, str) or not PUBLIC_KEY.match(key):
            # Not repeated: what was pasted into the wrong setting may be a private key.
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
        other: what a second secret derives, while a cluster changes from one to the other.
        allowed: the keys of all workers that we talk to; None if they are those that the secrets derive.
    """

    server: CurveKeys
    client: CurveKeys
    ticket_key: bytes
    other: Self | None = None
    allowed: AllowedKeys | None = None

    @classmethod
    def from_secret(cls, secret: str) -> Self:
        """Derive everything from a secret: any string of 16 characters or more.

        Raises:
            AddressInvalid: the secret is too short.
        """
        if len(secret) < SECRET_CHARACTERS_MIN:
            raise AddressInvalid(
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

    def accepting(self, secret: str) -> Self:
        """Return the same that takes a second secret's tickets and peers, too, while it says the first's.

        Raises:
            AddressInvalid: the secret is too short.
        """
        return structs.replace(self, other=type(self).from_secret(secret))

    def with_own_key(self, private: bytes, allowed: AllowedKeys) -> Self:
        """Return the same with a key pair of our own at both ends, that trusts a list; the secrets sign tickets only.

        Args:
            private: the 32 bytes of our private key.
            allowed: keys of the peers that may connect; may be replaced later.
        """
        own = CurveKeys.from_private(private)
        return structs.replace(self, server=own, client=own, allowed=allowed)

    def admits(self, key: PublicKey) -> bool:
        """Tell whether a client with this public key may talk to us."""
        if self.allowed is not None:
            return key in self.allowed
        return any(key == each.client.public_key for each in (self, self.other) if each is not None)

    def towards(self, server_key: PublicKey = "") -> Self:
        """Return the keys with which we dial the server of this public key; without one, a server of our secret.

        Raises:
            Unauthenticated: we do not trust that key. Nothing was dialed.
        """
        if self.allowed is not None:
            if server_key not in self.allowed:
                raise Unauthenticated(
                    f"the server's key {server_key or '(none)'} is not among our allowed keys",
                    remedy="Add the server's public key to allowed_keys, if it is a worker of this cluster.",
                    local=True,
                )
            theirs = CurveKeys(public=z85.encode(bytes.fromhex(server_key)), private=b"")
            return structs.replace(self, server=theirs)
        for each in (self, self.other):
            if each is not None and server_key in ("", each.server.public_key):
                return each
        raise Unauthenticated(f"the server's key {server_key} does not follow from our cluster secret", local=True)

    def verifies(self, data: bytes, signature: bytes) -> bool:
        """Tell whether a holder of a secret that we accept has signed ``data``."""
        if verify(self.ticket_key, data, signature):
            return True
        return self.other is not None and verify(self.other.ticket_key, data, signature)

    def __repr__(self) -> str:
        return f"ClusterSecurity(server={self.server!r}, client={self.client!r})"


def check_bind(bind: str, security: ClusterSecurity | None, *, insecure_allowed: bool = False) -> None:
    """Make sure that nobody outside this machine can reach us without the cluster secret.

    Args:
        bind: ``tcp://host:port``; the port may be 0 or ``*``, an IPv6 host stands in brackets.
        security: None for a server without encryption.
        insecure_allowed: the operator asked, by name, to go without.

    Raises:
        AddressInvalid: the address is malformed, or it is not a loopback address and there is no security.
    """
    host = _host(bind)
    if security is None and not insecure_allowed and not _is_loopback(host):
        raise AddressInvalid(
            f"binding {bind} without a cluster secret would let anyone on the network in",
            remedy="Set a cluster secret, bind a loopback address, or allow insecure binding by name.",
        )


def check_endpoint(endpoint: str) -> None:
    """Make sure that ``endpoint`` is ``tcp://host:port``, before ZeroMQ guesses what else it might mean.

    Raises:
        AddressInvalid: it is not.
    """
    _host(endpoint)


def _host(endpoint: str) -> str:
    match = _TCP_ENDPOINT.match(endpoint)
    if match is None or (match["port"] != "*" and int(match["port"]) > 65535):
        raise AddressInvalid(f"{endpoint!r} is not an address", remedy="Use tcp://host:port.")
    return match["host"].strip("[]")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"  # any other name may resolve to anything


def answer_admission(replier: zmq.Socket[bytes], admits: Callable[[PublicKey], bool]) -> None:
    """Let one client in if its public key is admitted. While nobody calls this, nobody is let in.

    Args:
        replier: a REP socket, bound to ``ZAP_ENDPOINT`` in the server's context before the server binds.
        admits: returns whether a public key may connect; called for each connection.

    Raises:
        zmq.Again: no client waits.
    """
    request = replier.recv_multipart(zmq.NOBLOCK)
    key = key_of_request(request)
    admitted = key is not None and admits(key)
    replier.send_multipart(answer_request(request, key if admitted else None), zmq.NOBLOCK)


def key_of_request(request: list[bytes]) -> PublicKey | None:
    """Return the public key of one request of ZeroMQ RFC 27, or None if it has none, or is not ours to answer.

    Frames of a request: version, request id, domain, address, routing id, mechanism, credentials.
    """
    if len(request) == 7 and request[2] == ZAP_DOMAIN and request[5] == b"CURVE" and len(request[6]) == 32:
        return request[6].hex()
    return None


def answer_request(request: list[bytes], admitted: PublicKey | None) -> list[bytes]:
    """Return the answer to one request of ZeroMQ RFC 27: status 200 with the key as the user's id, or else 400.

    Frames of an answer: version, request id, status, reason, user id, metadata.
    """
    request_id = request[1] if len(request) > 1 else b""
    if admitted is None:
        return [b"1.0", request_id, b"400", b"unknown key", b"", b""]
    # libzmq hands the user's id out with every message of the connection: that is how the server knows whose it is.
    return [b"1.0", request_id, b"200", b"", admitted.encode(), b""]
