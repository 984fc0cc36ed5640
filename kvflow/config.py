"""Settings of a worker: the only place that reads them, with a reason beside each default."""

import os
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from kvflow.errors import ConfigInvalid

SECRET_VARIABLE = "KVFLOW_CLUSTER_SECRET"  # noqa: S105  # the name of the variable, not a secret
CALIBRATION_VARIABLE = "KVFLOW_CALIBRATION"
ACCEPTED_VARIABLE = "KVFLOW_CLUSTER_SECRET_ACCEPTED"
KEY_VARIABLE = "KVFLOW_PRIVATE_KEY"
SECRET_LENGTH_MIN = 16
SECRETS = frozenset({"cluster_secret", "cluster_secret_accepted", "private_key"})
"""Settings that are never printed."""
WILDCARD_HOSTS = frozenset({"0.0.0.0", "*", "[::]"})  # noqa: S104  # recognised in order to be refused

PORT_MAX = 65535

ENDPOINT_PATTERN = r"tcp://(\[[^\[\]]+\]|[^\[\]:/]+):[0-9]{1,5}"
Endpoint = Annotated[str, Meta(pattern=rf"^{ENDPOINT_PATTERN}\Z")]
Key = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Seconds = Annotated[float, Meta(gt=0, le=86400)]


TransportName = Literal["auto", "nixl", "tcp", "loopback"]
Encryption = Literal["off", "tls"]


class TcpSettings(Struct, frozen=True, kw_only=True):
    """How the TCP plane of one worker listens and dials: ``WorkerConfig.tcp``.

    Attributes:
        bind: ``tcp://HOST:PORT`` to listen on; port 0 takes a free one. ``*`` is written ``0.0.0.0``.
        advertise: the same as peers reach it; port 0 stands for the one that was taken.
        connections: to each peer that is read from.
        encryption: of everything that is sent; both sides must have the same.
    """

    bind: str
    advertise: str
    connections: int
    encryption: Encryption


class QuarantineLimits(Struct, frozen=True, kw_only=True):
    """What failed pulls may keep from reuse; above it the reader is reset.

    Attributes:
        quarantine_s_max: how long a failed pull may keep its blocks, before the reader is reset to free them.
        quarantine_bytes_max: bytes of blocks that failed pulls may keep for more than 5 s, all together, before that.
    """

    quarantine_s_max: Seconds = 120.0  # four times wire_s: who has not answered by then hangs, and will for long
    quarantine_bytes_max: Annotated[int, Meta(ge=0)] = 4 << 30  # 32,768 tokens of an 8B model: one long prompt


class TcpPlaneSettings(QuarantineLimits, frozen=True, kw_only=True):
    """What one worker is told of its TCP plane.

    Attributes:
        tcp_bind: address on which the TCP plane listens; when None, the host of ``bind`` and a free port.
        tcp_advertise: the same as peers reach it; when None, the host of ``tcp_bind``, ``advertise`` or ``bind``, the
            first that is given and no wildcard, and the port that was taken.
        tcp_connections: TCP connections to each peer that is read from.
        tcp_encryption: ``tls`` encrypts what the TCP plane sends; must be the same on all workers of a cluster.
    """

    tcp_bind: Endpoint | None = None
    tcp_advertise: Endpoint | None = None
    tcp_connections: Annotated[int, Meta(ge=1, le=16)] = 2  # a stream is sent by one core at a time
    tcp_encryption: Encryption = "off"  # NIXL does not encrypt, either, and it costs CPU on both sides


class SecuritySettings(TcpPlaneSettings, frozen=True, kw_only=True):
    """What one worker is told of secrets and keys. A Struct has one line of ancestors, hence the bases.

    Attributes:
        cluster_secret: shared by all workers of a cluster; the variable KVFLOW_CLUSTER_SECRET when None.
        cluster_secret_accepted: a second secret that is accepted, too, while a cluster changes from one to the other;
            the variable KVFLOW_CLUSTER_SECRET_ACCEPTED when None.
        private_key: of this worker alone, 64 hexadecimal digits, beside the secret; the variable KVFLOW_PRIVATE_KEY
            when None. Needs ``allowed_keys``.
        allowed_keys: public keys of all workers that this one talks to, as reader or as producer; may be replaced with
            ``worker.allow_keys``. Needs ``private_key``.
    """

    cluster_secret: str | None = None
    cluster_secret_accepted: str | None = None
    private_key: Key | None = None  # the secret's own keys cannot tell two workers apart
    allowed_keys: Annotated[tuple[Key, ...], Meta(max_length=65536)] | None = None

    def check_secrets(self) -> None:
        """Check that secrets and keys are usable, and given together where they belong together.

        Raises:
            ConfigInvalid: names the setting.
        """
        self.secret()
        self.accepted_secret()
        if (self.own_key() is None) != (self.allowed_keys is None):
            raise ConfigInvalid(
                "private_key and allowed_keys are given together or not at all",
                remedy=f"Draw a pair with kvflow keys, set private_key or {KEY_VARIABLE}, and list all others.",
            )

    def secret(self) -> str:
        """Return the cluster secret, from the settings or the environment.

        Raises:
            ConfigInvalid: there is none, or it is too short to be one.
        """
        return _long_enough("cluster secret", self.cluster_secret or os.environ.get(SECRET_VARIABLE, ""))

    def accepted_secret(self) -> str | None:
        """Return the second secret that is accepted, from the settings or the environment; None if there is none.

        Raises:
            ConfigInvalid: it is too short to be one.
        """
        secret = self.cluster_secret_accepted or os.environ.get(ACCEPTED_VARIABLE)
        return _long_enough("accepted cluster secret", secret) if secret else None

    def own_key(self) -> bytes | None:
        """Return the 32 bytes of this worker's private key, from the settings or the environment; None if it has none.

        Raises:
            ConfigInvalid: the environment's is malformed.
        """
        key = self.private_key or os.environ.get(KEY_VARIABLE)
        try:
            return bytes.fromhex(msgspec.convert(key, type=Key)) if key else None
        except msgspec.ValidationError as error:
            raise ConfigInvalid(f"{KEY_VARIABLE} is not 64 lower-case hexadecimal digits") from error


class WorkerConfig(SecuritySettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that one worker is told, secrets and keys included.

    Attributes:
        engine_id: name of the engine; all its ranks share it.
        rank: of this worker in its engine.
        num_ranks: ranks of the engine.
        role: what the engine does, for its peers' logs.
        model: name of the model; peers that both name one must name the same.
        model_revision: of its weights; likewise.
        model_dtype: that it computes in; likewise.
        bind: control endpoint to listen on; port 0 takes a free one.
        advertise: control endpoint as peers reach it; needed when ``bind`` is a wildcard.
        transport: data plane. ``auto``: NIXL to peers whose memory can be read without their help (RDMA, shared
            memory), and TCP to all others. ``nixl`` or ``tcp``: only this one. ``loopback``: between workers of one
            process.
        lease_s: how long an offer lasts unless renewed.
        lease_slots: offers that may be held at once.
        connect_s: budget for reaching a peer's endpoint.
        handshake_s: budget from there to its manifest.
        queue_s: budget for a pull to be dispatched.
        wire_s: budget without any completion from a peer that owes us one.
        fence_s: budget from the last byte to the verdict, waiting for a late admission included.
        calibration: file of ``kvflow bench descriptors --calibrate``; the variable KVFLOW_CALIBRATION when None.
            Without one all is read directly.
        staging_bytes: memory for staged reads, taken if there is a calibration; 0 never stages.
        peer_weights: producers' engine ids -> how many chunks in a row they are read, while other peers wait for their
            turn; 1 for every engine that is not named.
    """

    engine_id: Annotated[str, Meta(min_length=1, max_length=256)]
    rank: Annotated[int, Meta(ge=0, le=65535)] = 0
    num_ranks: Annotated[int, Meta(ge=1, le=65536)] = 1
    role: Literal["prefill", "decode", "both"] = "both"
    model: Annotated[str, Meta(max_length=256)] = ""  # what is not said is not compared
    model_revision: Annotated[str, Meta(max_length=256)] = ""
    model_dtype: Annotated[str, Meta(max_length=32)] = ""
    bind: Endpoint = "tcp://127.0.0.1:0"  # unreachable until asked otherwise
    advertise: Endpoint | None = None
    transport: TransportName = "auto"
    lease_s: Seconds = 30.0  # as vLLM's NixlConnector; a router's queue is shorter
    lease_slots: Annotated[int, Meta(ge=1, le=1 << 20)] = 4096  # 32 KiB of epochs; more requests than one rank runs
    connect_s: Seconds = 1.5  # a listening peer accepts within milliseconds; a death is to be known within 2 s
    handshake_s: Seconds = 5.0  # one round trip and a manifest; the rest is a peer that is busy starting
    queue_s: Seconds = 30.0
    wire_s: Seconds = 30.0  # a hung peer is found only by this
    fence_s: Seconds = 10.0
    calibration: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    staging_bytes: Annotated[int, Meta(ge=0, le=1 << 40)] = 64 << 20  # eight buffers of 8 MiB, each as large as a chunk
    peer_weights: Annotated[dict[str, Annotated[int, Meta(ge=1, le=64)]], Meta(max_length=4096)] = {}

    def check(self) -> None:
        """Check every field, and what relates them.

        Raises:
            ConfigInvalid: names the setting.
        """
        try:
            msgspec.convert(msgspec.to_builtins(self, builtin_types=(bytes,)), type=WorkerConfig)
        except (msgspec.ValidationError, TypeError) as error:
            raise ConfigInvalid(f"worker settings: {error}") from error
        for name, value in zip(self.__struct_fields__, msgspec.structs.astuple(self), strict=True):
            if isinstance(value, str) and not _is_unicode(value):
                raise ConfigInvalid(f"{name} is not Unicode text: it holds half of a surrogate pair")
        if self.rank >= self.num_ranks:
            raise ConfigInvalid(f"rank is {self.rank}, but num_ranks is {self.num_ranks}")
        _check_bound("bind", self.bind)
        _check_bound("tcp_bind", self.tcp_bind)
        if self.advertise is None and _is_wildcard(self.bind):
            raise ConfigInvalid(
                f"bind is {self.bind!r}, which no peer can dial",
                remedy="Set advertise to the address that peers reach this worker at.",
            )
        _check_advertised("advertise", self.advertise)
        _check_advertised("tcp_advertise", self.tcp_advertise)
        self.check_secrets()

    def tcp(self) -> TcpSettings:
        """Return the settings of the TCP plane, what was not given taken from the control endpoint; checked before."""
        bind = self.tcp_bind or f"tcp://{_host_and_port(self.bind)[0]}:0"
        hosts = [_host_and_port(each)[0] for each in (self.tcp_bind, self.advertise, self.bind) if each is not None]
        reached = next(host for host in hosts if host not in WILDCARD_HOSTS)  # bind is one, or advertise is given
        return TcpSettings(
            bind=bind.replace("tcp://*:", "tcp://0.0.0.0:"),
            advertise=self.tcp_advertise or f"tcp://{reached}:{_host_and_port(bind)[1]}",
            connections=self.tcp_connections,
            encryption=self.tcp_encryption,
        )

    def calibration_path(self) -> str | None:
        """Return the calibration file, from the settings or the environment; None if there is none."""
        return self.calibration or os.environ.get(CALIBRATION_VARIABLE) or None

    def __repr__(self) -> str:
        shown = (f"{name}={value!r}" for name, value in self.__rich_repr__())
        return f"WorkerConfig({', '.join(shown)})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        # Neither repr nor rich, whose tracebacks show locals, may print a secret.
        return [(name, getattr(self, name)) for name in self.__struct_fields__ if name not in SECRETS]


def _long_enough(name: str, secret: str) -> str:
    if len(secret) < SECRET_LENGTH_MIN:
        raise ConfigInvalid(
            f"the {name} has {len(secret)} characters, fewer than {SECRET_LENGTH_MIN}",
            remedy=f"Set cluster_secret or {SECRET_VARIABLE} to the same long random string on every worker.",
        )
    return secret


def _is_unicode(text: str) -> bool:
    """Tell whether a text can be sent and hashed; Python itself carries halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_written_as_a_host(host: str) -> bool:
    """Tell whether a resolver would take it: no part of a name is empty, or longer than 63 bytes."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return True


def _is_wildcard(endpoint: str) -> bool:
    return _host_and_port(endpoint)[0] in WILDCARD_HOSTS


def _check_bound(name: str, endpoint: str | None) -> None:
    """Check an address to listen on.

    Raises:
        ConfigInvalid: there is no such port, or it is not filled in.
    """
    if endpoint is None:
        return
    _check_filled_in(name, endpoint)
    if _host_and_port(endpoint)[1] > PORT_MAX:
        raise ConfigInvalid(f"{name} is {endpoint!r}, but no port is above {PORT_MAX}")


def _check_advertised(name: str, endpoint: str | None) -> None:
    """Check an address as peers dial it.

    Raises:
        ConfigInvalid: nobody can dial it.
    """
    if endpoint is None:
        return
    _check_filled_in(name, endpoint)
    host, port = _host_and_port(endpoint)
    if host in WILDCARD_HOSTS or not _is_written_as_a_host(host) or not 0 < port <= PORT_MAX:
        raise ConfigInvalid(f"{name} is {endpoint!r}, which no peer can dial")


def _check_filled_in(name: str, endpoint: str) -> None:
    """Check that an address has no braces.

    Raises:
        ConfigInvalid: it has.
    """
    if "{" in endpoint:
        raise ConfigInvalid(
            f"{name} is {endpoint!r}, with a place that is not filled in",
            remedy="Give an address or a name. {host} is understood by the connector of vLLM alone.",
        )


def _host_and_port(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port)
