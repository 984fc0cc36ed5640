"""Settings of a worker, with the reason for each default. Only this module reads settings."""

import ipaddress
import logging
import os
import re
from collections.abc import Mapping
from functools import cache
from itertools import combinations
from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import FieldInfo, fields, replace

from kvflow.addresses import PORT_MAX, AddressMalformed, host_and_port
from kvflow.errors import ConfigInvalid, suggest
from kvflow.validation import SuggestingMeta, describe_refusal, find_fault

SECRET_VARIABLE = "KVFLOW_CLUSTER_SECRET"  # noqa: S105  # the name of the variable, not a secret
ACCEPTED_VARIABLE = "KVFLOW_CLUSTER_SECRET_ACCEPTED"
KEY_VARIABLE = "KVFLOW_PRIVATE_KEY"
SECRET_LENGTH_MIN = 16
VARIABLES = {
    "cluster_secret": SECRET_VARIABLE,
    "cluster_secret_accepted": ACCEPTED_VARIABLE,
    "private_key": KEY_VARIABLE,
}
"""Settings that a variable gives if the caller does not."""
SECRETS = frozenset(VARIABLES)  # settings that are never printed
WILDCARD_HOSTS = frozenset({"0.0.0.0", "*", "[::]"})  # noqa: S104  # recognized in order to be refused

ENDPOINT_PATTERN = r"tcp://(\[[^\[\]]+\]|[^\[\]:/]+):[0-9]{1,5}"
KEY_PATTERN = r"[0-9a-f]{64}"
Endpoint = Annotated[str, Meta(pattern=rf"^{ENDPOINT_PATTERN}\Z", description="tcp://HOST:PORT")]
HostAndPort = Annotated[str, Meta(pattern=rf"^{ENDPOINT_PATTERN.removeprefix('tcp://')}\Z", description="HOST:PORT")]
Key = Annotated[str, Meta(pattern=rf"^{KEY_PATTERN}\Z", description="64 lower-case hexadecimal digits")]
Seconds = Annotated[float, Meta(gt=0, le=86400, description="a number of seconds above 0 and at most 86400")]

SECRET_REMEDY = f"Set cluster_secret or {SECRET_VARIABLE} to the same long random string on every worker."
DRAW_REMEDY = "Draw one with kvflow keys secret."


NixlParams = Annotated[
    dict[Annotated[str, Meta(min_length=1, max_length=64)], Annotated[str, Meta(max_length=1024)]], Meta(max_length=32)
]

NIXL_PARAMS_OF_KVFLOW = frozenset({"num_threads", "num_workers", "split_batch_size", "ucx_error_handling_mode"})
"""Parameters that users must not set. With several threads or workers, a part of a failed post may go on writing when
the pull has ended. Error handling depends on what reaches a peer."""

TransportName = Literal["auto", "nixl", "tcp", "loopback"]
Encryption = Literal["off", "tls"]
WorkerRole = Literal["both", "producer", "consumer"]


class TcpSettings(Struct, frozen=True, kw_only=True):
    """How the TCP plane of one worker listens and dials: ``WorkerConfig.tcp``.

    Attributes:
        bind: ``tcp://HOST:PORT`` to listen on; port 0 takes a free one. ``*`` is written ``0.0.0.0``.
        advertise: the same as peers reach it; port 0 stands for the port that was taken.
        connections: connections to each peer that is read from.
        encryption: ``tls`` or ``off``; both sides must have the same.
        handshake_s: budget for opening one connection.
    """

    bind: str
    advertise: str
    connections: int
    encryption: Encryption
    handshake_s: float = 5.0


class SecuritySettings(Struct, frozen=True, kw_only=True):
    """The secrets and keys of one worker, from its settings or the environment: ``WorkerConfig.security``.

    Attributes:
        secret: shared by all workers of a cluster.
        accepted_secret: a second secret that is accepted; None if there is none.
        own_key: the 32 bytes of this worker's private key; None if it has none.
        allowed_keys: public keys of all workers that it talks to; None without ``own_key``.
    """

    secret: str
    accepted_secret: str | None
    own_key: bytes | None
    allowed_keys: tuple[str, ...] | None

    def __repr__(self) -> str:
        return f"SecuritySettings(allowed_keys={self.allowed_keys!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        # Neither repr nor rich, whose tracebacks show locals, may print a secret.
        return [("allowed_keys", self.allowed_keys)]


class Tuning(Struct, metaclass=SuggestingMeta, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that most deployments leave alone: ``WorkerConfig.tuning``.

    Attributes:
        model_revision: revision of the model's weights. Peers that both name one must name the same.
        model_dtype: data type that the model computes in; compared in the same way.
        sleep_mode: whether the engine frees the memory of its cache and allocates it again while peers live. NIXL then
            does without ``cuda_ipc``, with which readers on the same host would keep the memory of a GPU.
        tcp_bind: address on which the TCP plane listens. If None, the host of ``bind`` and a free port.
        tcp_advertise: the same address as peers reach it. If None, the port that was taken, and the host of
            ``tcp_bind``, ``advertise`` or ``bind``: the first of them that is given and is not a wildcard.
        tcp_connections: TCP connections to each peer that is read from.
        tcp_encryption: ``tls`` encrypts what the TCP plane sends. All workers of a cluster must have the same value.
            Requires ``kvflow[tls]``.
        require_encryption: refuses every data plane between hosts that does not encrypt, NIXL's included. NIXL within a
            host, and TCP over a loopback address, are allowed.
        nixl_backend_params: parameters for NIXL's UCX backend, by name, such as ``engine_config`` and ``ucx_devices``.
            ``engine_config`` is added to kvflow's own: a value that it sets replaces kvflow's.
        copy_threads: threads that copy a large read which NIXL makes within a host; 0: two where this process may use
            at least four cores, otherwise the read thread alone. The others start with the first read of 2 MiB or more,
            and each keeps off the read thread's core.
        lease_slots: leases that may be held at once; what is kept leaves its slot to offers. A kept lease takes 170
            bytes of memory for each of its blocks, and in vLLM's scheduler 500.
        peers_max: most peers that may be connected. Each takes up to 5 open files.
        tell: tells members that ask what is kept, as short digests of the ends of prompts. Who looks for a prompt then
            asks only a worker that keeps some of it. Without it, the worker is one of few that are asked at random.
        unread_s: age at which the oldest offer without a sign of a reader ends if such offers hold over half of the
            blocks.
        drain_s: how long a worker that drains keeps what is kept readable, so that an engine that leaves can still be
            read; 0: not at all. With nothing kept, draining does not wait. In vLLM an engine that shuts down does so,
            within ``--shutdown-timeout``.
        connect_s: budget for reaching a peer's endpoint.
        handshake_s: budget from there until the peer's manifest has arrived; all of it if a name has several addresses.
        queue_s: budget of a pull from its submission to its first read.
        wire_s: longest time without a completed read while a peer owes one. Only this finds a hung peer.
        fence_s: budget from the last byte to the result, including the wait for a late admission.
        compute_s: budget of an open offer, from the start of its pull until its producer has computed everything; and
            of a hold.
        follow_bytes_min: bytes of an open offer that are worth a read while its producer computes the rest.
        staging_bytes: memory for staged reads, allocated if the cache is in host memory; 0 disables staging.
        peer_weights: engine id of a producer -> chunks that are read from it in a row while other peers wait; 1 for
            engines that are not named.
        quarantine_s_max: longest time that a failed pull may keep its blocks. After it the reader is reset to free
            them.
        quarantine_bytes_max: most bytes of blocks that failed pulls may keep for more than 5 s, all pulls together.
            Above it the reader is reset.
        http_public: allows ``http`` to listen on an address that other hosts reach.
        log_every: of the pulls that complete, one in so many has a record, from the first one on. Failed pulls always
            have one, and hooks and metrics take every pull.
        trace_offers: gives each offer without a ``traceparent`` a drawn one, with the flag ``sampled``, so that the
            records and spans of both sides have one trace id.
    """

    model_revision: Annotated[str, Meta(max_length=256)] = ""
    model_dtype: Annotated[str, Meta(max_length=32)] = ""
    sleep_mode: bool = False
    tcp_bind: Endpoint | None = None
    tcp_advertise: Endpoint | None = None
    tcp_connections: Annotated[int, Meta(ge=1, le=16)] = 2  # one core at a time sends a stream
    tcp_encryption: Encryption = "off"  # NIXL does not encrypt, either, and it costs CPU on both sides
    require_encryption: bool = False
    nixl_backend_params: NixlParams = {}
    copy_threads: Annotated[int, Meta(ge=0, le=16)] = 0  # on two cores a busy engine needs the second one
    lease_slots: Annotated[int, Meta(ge=1, le=1 << 20)] = 4096  # 32 KiB of epochs; more requests than one rank runs
    peers_max: Annotated[int, Meta(ge=1, le=1 << 16)] = 1024  # 128 engines of TP 8 meet each rank of such an engine
    tell: bool = True  # 4 KB/s to each asker at 16 long prompts per second
    unread_s: Seconds = 10.0  # a router hands a ticket on at once; longer than a first meeting
    drain_s: Annotated[float, Meta(ge=0, le=86400)] = 10.0  # a chat that a tool continues is back by then
    connect_s: Seconds = 1.5  # a listening peer accepts within milliseconds; a death must be detected within 2 s
    handshake_s: Seconds = 5.0  # one round trip and a manifest; the rest is a peer that is busy starting
    queue_s: Seconds = 30.0
    wire_s: Seconds = 30.0  # only this detects a hung peer
    fence_s: Seconds = 10.0
    compute_s: Seconds = 600.0  # the longest prompts take minutes, and wait in a queue before
    follow_bytes_min: Annotated[int, Meta(ge=1, le=1 << 40)] = 2 << 20  # a question and a fence cost 1 % of it
    staging_bytes: Annotated[int, Meta(ge=0, le=1 << 40)] = 64 << 20  # eight buffers of 8 MiB, each as large as a chunk
    peer_weights: Annotated[dict[str, Annotated[int, Meta(ge=1, le=64)]], Meta(max_length=4096)] = {}
    quarantine_s_max: Seconds = 120.0  # four times wire_s: a peer that has not answered by then will hang for long
    quarantine_bytes_max: Annotated[int, Meta(ge=0)] = 4 << 30  # 32,768 tokens of an 8B model: one long prompt
    http_public: bool = False  # who reaches the port reads names of requests and peers
    log_every: Annotated[int, Meta(ge=1, le=1 << 20)] = 1  # a record has 750 bytes
    trace_offers: bool = False  # a ticket is 60 bytes longer with it


class WorkerConfig(Struct, metaclass=SuggestingMeta, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of one worker, secrets and keys included.

    ``read`` takes all of them by name at one level, those of ``tuning`` too, as files and command lines have them.

    Attributes:
        engine_id: name of the engine; all its ranks share it.
        rank: rank of this worker in its engine, counted from 0.
        num_ranks: number of ranks of the engine.
        model: name of the model. Peers that both name one must name the same.
        bind: control endpoint to listen on; port 0 takes a free port.
        advertise: control endpoint as peers reach it. Required if ``bind`` is a wildcard.
        cluster_secret: secret that all workers of a cluster share. If None, the variable KVFLOW_CLUSTER_SECRET.
        transport: data plane. ``auto``: NIXL to peers whose memory it can read without their help (RDMA, shared
            memory), TCP to all others. ``nixl`` or ``tcp``: only this one. ``loopback``: between workers of one
            process.
        lease_s: how long an offer lasts unless it is renewed.
        http: ``HOST:PORT`` on which the worker serves metrics, health and its state over HTTP, without
            authentication or encryption; port 0 takes a free port. If None, it serves none. Requires
            ``kvflow[metrics]``.
        role: what the worker does. ``producer``: it offers blocks, and NIXL registers memory for reads only if it reads
            all the same. ``consumer``: it reads and may not offer, and NIXL registers memory for its reads only.
        cluster_secret_accepted: a second secret that is accepted while a cluster changes its secret. If None, the
            variable KVFLOW_CLUSTER_SECRET_ACCEPTED.
        private_key: key of this worker alone, 64 hexadecimal digits, in addition to the secret. If None, the variable
            KVFLOW_PRIVATE_KEY. Requires ``allowed_keys``.
        allowed_keys: public keys of all workers that this one reads from or serves; ``worker.allow_keys`` replaces
            them. Requires ``private_key``.
        tuning: the settings that most deployments leave alone.
    """

    engine_id: Annotated[str, Meta(min_length=1, max_length=256)]
    rank: Annotated[int, Meta(ge=0, le=65535)] = 0
    num_ranks: Annotated[int, Meta(ge=1, le=65536)] = 1
    model: Annotated[str, Meta(max_length=256)] = ""  # peers compare it only where both name one
    bind: Endpoint = "tcp://127.0.0.1:0"  # other hosts cannot reach it by default
    advertise: Endpoint | None = None
    cluster_secret: str | None = None
    transport: TransportName = "auto"
    lease_s: Seconds = 30.0  # as vLLM's NixlConnector; a router's queue is shorter
    http: HostAndPort | None = None
    role: WorkerRole = "both"
    cluster_secret_accepted: str | None = None
    private_key: Key | None = None  # the cluster secret's own keys cannot tell two workers apart
    allowed_keys: Annotated[tuple[Key, ...], Meta(max_length=65536)] | None = None
    tuning: Tuning = Tuning()

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> Self:
        """Read settings by name, for example from a file or a command line. Call ``check`` afterwards.

        Args:
            settings: name -> value, those of ``tuning`` among the others; a number or a switch may be text.

        Raises:
            ConfigInvalid: a name is unknown, or a value is malformed; names it.
        """
        if unknown := [name for name in settings if name not in SETTINGS]:
            raise ConfigInvalid(f"{unknown[0]} is unknown. {suggest(unknown[0], SETTINGS)}")
        parts: dict[str, Any] = {name: value for name, value in settings.items() if name in cls.__struct_fields__}
        parts["tuning"] = {name: value for name, value in settings.items() if name in Tuning.__struct_fields__}
        try:
            return msgspec.convert(parts, type=cls, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigInvalid(_flat(describe_refusal(error, parts, cls, hidden=SECRETS))) from error

    def check(self) -> None:
        """Check every field, and how fields relate.

        Raises:
            ConfigInvalid: names the setting.
        """
        if fault := find_fault(self, hidden=SECRETS):
            raise ConfigInvalid(_flat(fault))
        for name, value in self.settings().items():
            if isinstance(value, str) and not _can_encode(value, "utf-8"):
                raise ConfigInvalid(
                    f"{name} is not Unicode text: it holds half of a surrogate pair",
                    remedy="Give text that can be encoded as UTF-8.",
                )
        if self.rank >= self.num_ranks:
            raise ConfigInvalid(
                f"rank is {self.rank}, but num_ranks is {self.num_ranks}",
                remedy=f"Ranks count from 0: give one from 0 to {self.num_ranks - 1}, or raise num_ranks.",
            )
        _check_address("bind", self.bind)
        _check_address("tcp_bind", self.tuning.tcp_bind)
        if self.advertise is None and _is_wildcard(self.bind):
            raise ConfigInvalid(
                f"bind is {self.bind!r}, which no peer can dial",
                remedy="Set advertise to the address that peers reach this worker at.",
            )
        _check_address("advertise", self.advertise, dialed=True)
        _check_address("tcp_advertise", self.tuning.tcp_advertise, dialed=True)
        _check_families("", self.bind, self.advertise)
        _check_families("tcp_", self.tcp.bind, self.tcp.advertise)
        _check_nixl_params(self.tuning.nixl_backend_params)
        self._check_encryption()
        self._check_http()
        self._check_ports()
        _ = self.security

    def _check_encryption(self) -> None:
        tcp = self.tcp
        plain = self.transport in ("auto", "tcp") and tcp.encryption == "off"
        if self.tuning.require_encryption and plain and not is_loopback(host_and_port(tcp.bind)[0]):
            raise ConfigInvalid(
                f"require_encryption is true, and TCP would listen at {tcp.bind!r} without encryption",
                remedy='Set tcp_encryption to "tls".',
            )

    def _check_http(self) -> None:
        if self.http is None:
            return
        _check_address("http", self.http)
        if not self.tuning.http_public and not is_loopback(host_and_port(self.http)[0]):
            raise ConfigInvalid(
                f"http is {self.http!r}, which other hosts may reach, and the server has no authentication",
                remedy="Give a loopback address such as 127.0.0.1:9400. Behind a firewall, set http_public to true.",
            )

    def _check_ports(self) -> None:
        """Refuse two servers at one port, and an address for peers that has the port of the other server."""
        servers = {"bind": self.bind, "tcp_bind": self.tcp.bind} | ({} if self.http is None else {"http": self.http})
        for (name, one), (other, another) in combinations(servers.items(), 2):
            hosts = {host_and_port(each)[0] for each in (one, another)}
            if _port(one) == _port(another) != 0 and (len(hosts) == 1 or any(map(_is_wildcard, (one, another)))):
                raise ConfigInvalid(
                    f"{name} is {one!r} and {other} is {another!r}: two servers cannot listen at one port",
                    remedy="Give each a port of its own.",
                )
        bound, data = _port(self.bind), _port(self.tcp.bind)
        told = (("advertise", self.advertise, bound, data), ("tcp_advertise", self.tuning.tcp_advertise, data, bound))
        ports = [None if endpoint is None else _port(endpoint) for _, endpoint, _, _ in told]
        for (name, endpoint, own, others), port, beside in zip(told, ports, reversed(ports), strict=True):
            # Behind an address translation, the address beside it has a port of its own.
            if others and port == others != own and beside in (None, own, others):
                raise ConfigInvalid(
                    f"{name} is {endpoint!r}, but port {port} is that of the other server",
                    remedy="Give advertise the port of bind, and tcp_advertise that of tcp_bind.",
                )

    @property
    def security(self) -> SecuritySettings:
        """The secrets and keys; those that are not given come from the environment.

        Raises:
            ConfigInvalid: one is missing, too short or malformed, or only one of ``private_key`` and ``allowed_keys``
                is given.
        """
        secret = self.cluster_secret or os.environ.get(SECRET_VARIABLE, "")
        accepted = self.cluster_secret_accepted or os.environ.get(ACCEPTED_VARIABLE) or None
        require_secret("cluster secret", secret)
        if accepted is not None:
            require_secret("accepted cluster secret", accepted)
        own_key = self._own_key()
        if (own_key is None) != (self.allowed_keys is None):
            given, missing = ("private_key", "allowed_keys") if own_key is not None else ("allowed_keys", "private_key")
            raise ConfigInvalid(
                f"{given} is set, and {missing} is not; set both private_key and allowed_keys, or neither",
                remedy=f"Draw a pair with kvflow keys, set private_key or {KEY_VARIABLE}, and list all others.",
            )
        return SecuritySettings(
            secret=secret, accepted_secret=accepted, own_key=own_key, allowed_keys=self.allowed_keys
        )

    def _own_key(self) -> bytes | None:
        key = self.private_key or os.environ.get(KEY_VARIABLE)
        if not key:
            return None
        if not re.fullmatch(KEY_PATTERN, key):
            raise ConfigInvalid(
                f"{KEY_VARIABLE} must be 64 lower-case hexadecimal digits: not these {len(key)} characters",
                remedy="Draw a pair with kvflow keys pair.",
            )
        return bytes.fromhex(key)

    @property
    def tcp(self) -> TcpSettings:
        """The settings of the TCP plane; the control endpoint gives those that are missing. Call ``check`` before."""
        bind = self.tuning.tcp_bind or f"tcp://{host_and_port(self.bind)[0]}:0"
        known = (self.tuning.tcp_bind, self.advertise, self.bind)
        hosts = [host_and_port(each)[0] for each in known if each is not None]
        reached = next(host for host in hosts if host not in WILDCARD_HOSTS)  # bind is one, or advertise is given
        return TcpSettings(
            bind=bind.replace("tcp://*:", "tcp://0.0.0.0:"),
            advertise=self.tuning.tcp_advertise or f"tcp://{reached}:{host_and_port(bind)[1]}",
            connections=self.tuning.tcp_connections,
            encryption=self.tuning.tcp_encryption,
            handshake_s=self.tuning.handshake_s,
        )

    def settings(self) -> dict[str, Any]:
        """Return the value of each setting by its name at one level, those of ``tuning`` last."""
        return {name: getattr(self if name in self.__struct_fields__ else self.tuning, name) for name in SETTINGS}

    def replaced(self, **settings: Any) -> Self:
        """Return a configuration in which some settings, given by name at one level, have other values."""
        tuned = {name: settings.pop(name) for name in Tuning.__struct_fields__ if name in settings}
        return replace(self, **settings, tuning=replace(self.tuning, **tuned))

    def __repr__(self) -> str:
        shown = (f"{name}={value!r}" for name, value in self.__rich_repr__())
        return f"WorkerConfig({', '.join(shown)})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        # Neither repr nor rich, whose tracebacks show locals, may print a secret. Defaults would hide what is set.
        defaults = WorkerConfig(engine_id="").settings()
        given = self.settings().items()
        return [(name, value) for name, value in given if name not in SECRETS and value != defaults[name]]


SETTINGS: dict[str, FieldInfo] = {
    field.name: field for kind in (WorkerConfig, Tuning) for field in fields(kind) if field.name != "tuning"
}
"""Every setting by its name, those of ``Tuning`` last."""


def _flat(fault: str) -> str:
    """Return a message that names settings as users give them, without the part that holds them."""
    return re.sub(r"\A(each (?:key|value) of )?tuning\.", r"\1", fault)


def require_secret(name: str, secret: str | None) -> None:
    """Check that a secret is given, and long enough.

    Raises:
        ConfigInvalid: it is not.
    """
    if not secret:
        raise ConfigInvalid(f"the {name} is not set", remedy=f"{SECRET_REMEDY} {DRAW_REMEDY}")
    if len(secret) < SECRET_LENGTH_MIN:
        raise ConfigInvalid(
            f"the {name} has {len(secret)} characters, fewer than {SECRET_LENGTH_MIN}", remedy=SECRET_REMEDY
        )
    if secret != secret.strip():
        _warn_of_ends(name)


@cache
def _warn_of_ends(name: str) -> None:
    logging.getLogger("kvflow.config").warning(
        "the %s has white space at an end, such as the line end of a file. It counts: a worker whose secret lacks it "
        "is refused. Remove it from all of them",
        name,
    )


def engine_settings(params: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of UCX in ``engine_config`` of NIXL's parameters, by name without ``UCX_``."""
    pairs = (each.partition("=") for each in params.get("engine_config", "").split(",") if each.strip())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _check_nixl_params(params: Mapping[str, str]) -> None:
    """Raise ``ConfigInvalid`` for parameters that kvflow decides, and for what NIXL and UCX would ignore."""
    if taken := sorted(NIXL_PARAMS_OF_KVFLOW & set(params)):
        raise ConfigInvalid(
            f"nixl_backend_params has {', '.join(taken)}, but kvflow decides this parameter", remedy="Remove it."
        )
    for name, value in engine_settings(params).items():
        if not re.fullmatch("[A-Z][A-Z0-9_]*", name) or name.startswith("UCX_") or not value:
            raise ConfigInvalid(
                f"nixl_backend_params: engine_config has {name!r} with the value {value!r}",
                remedy="Write NAME=VALUE with commas between entries, and each name of UCX without UCX_.",
            )
        if name == "TLS":
            raise ConfigInvalid(
                "nixl_backend_params: engine_config sets TLS, whose list needs commas, and NIXL cuts at each comma",
                remedy="Set UCX_TLS in the environment.",
            )


def _can_encode(text: str, encoding: str) -> bool:
    """Return whether text has an encoding: half of a surrogate pair has none, nor a host with an empty part."""
    try:
        text.encode(encoding)
    except UnicodeError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether a host, as it is written, is an address that only this machine reaches."""
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _is_wildcard(endpoint: str) -> bool:
    return host_and_port(endpoint)[0] in WILDCARD_HOSTS


def _check_address(name: str, endpoint: str | None, *, dialed: bool = False) -> None:
    """Raise ``ConfigInvalid`` if nothing can listen on an address, or if it is to be ``dialed``, and no peer can."""
    if endpoint is None:
        return
    if "{" in endpoint:
        raise ConfigInvalid(
            f"{name} is {endpoint!r}, which contains a placeholder that was not replaced",
            remedy="Give an address or a name. {host} is understood by the connector of vLLM alone.",
        )
    try:
        host, port = host_and_port(endpoint)
    except AddressMalformed as error:
        raise ConfigInvalid(
            f"{name} is {endpoint!r}, but no port is above {PORT_MAX}", remedy=f"Give a port up to {PORT_MAX}."
        ) from error
    if dialed and (host in WILDCARD_HOSTS or not _can_encode(host, "idna") or port == 0):
        raise ConfigInvalid(
            f"{name} is {endpoint!r}, which no peer can dial",
            remedy="Give the host name or address of this worker, and its port, as peers reach it.",
        )


def _check_families(prefix: str, bound: str, advertised: str | None) -> None:
    """Raise ``ConfigInvalid`` if an address to listen on and that for peers are of different families."""
    families = {_family(each) for each in (bound, advertised) if each is not None} - {""}
    if len(families) > 1:
        raise ConfigInvalid(
            f"{prefix}bind is {bound!r} and {prefix}advertise is {advertised!r}: one is IPv4, the other IPv6",
            remedy=f"Set {prefix}bind to tcp://[::] with its port, which listens at the addresses of both families.",
        )


def _port(endpoint: str) -> int:
    return host_and_port(endpoint)[1]


def _family(endpoint: str) -> str:
    """Return ``IPv4`` or ``IPv6``; empty for a name, and for the wildcard of both."""
    host = host_and_port(endpoint)[0]
    if host.startswith("["):
        return "" if host == "[::]" else "IPv6"
    return "IPv4" if host == "*" or re.fullmatch(r"[0-9.]+", host) else ""
