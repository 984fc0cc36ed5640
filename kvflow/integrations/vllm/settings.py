"""``kv_connector_extra_config`` and vLLM's configuration -> the settings of one worker, with its host's address."""

import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, structs

from kvflow import WorkerConfig
from kvflow.addresses import PORT_MAX, AddressMalformed, host_and_port
from kvflow.errors import ConfigInvalid, closest
from kvflow.validation import describe_refusal

SourceAddress = Annotated[
    str,
    Meta(
        pattern=r"\Atcp://[^\s/#]+:[0-9]{1,5}(#[0-9a-f]{64})?\Z",
        max_length=256,
        extra_json_schema={"description": "tcp://HOST:PORT or tcp://HOST:PORT#KEY of an engine that keeps or offers"},
    ),
]
Port = Annotated[int, Meta(ge=1, le=PORT_MAX)]
Sources = Annotated[tuple[SourceAddress, ...], Meta(max_length=256)]


class OwnSettings(Struct, frozen=True, kw_only=True):
    """Settings of the connector itself, under the names that users write. All others are settings of the worker."""

    enable_cross_layers_blocks: bool = False  # ask vLLM for a layout in which one block of all layers is one row
    log_file: Annotated[str, Meta(min_length=1)] | None = None  # for kvflow's records; None: Python's logging has them
    log_level: Literal["info", "debug", "warning"] = "info"  # of log_file; debug: each pull has a record of its reads
    offer: Literal["asked", "always"] = "asked"  # always: also requests for one token without ``kv_transfer_params``
    rebuild_layers: Literal["auto", "never"] = "auto"  # auto: leave draft layers unread that no prefill engine has
    keep: bool = False  # keep the blocks of ended requests readable until the engine reuses them
    sources: Sources = ()  # control endpoints of engines that keep
    find_s: Annotated[float, Meta(gt=0, le=1.0)] = 0.25  # longest time that a request waits for answers
    fetch_tokens_min: Annotated[int, Meta(ge=1, le=1 << 31)] = 256  # fewest tokens to fetch
    router_capabilities: Annotated[tuple[str, ...], Meta(max_length=16)] = ()  # which Dynamo reads, and kvflow not
    control_ports: Annotated[tuple[Port, ...], Meta(max_length=256)] = ()  # likewise
    rendezvous_from: Sources = ()  # prefill engines that requests may name
    rendezvous_s: Annotated[float, Meta(gt=0, le=600.0)] = 2.0  # longest time until such an engine offers the prompt
    dispatch: Literal["serial", "concurrent"] = "serial"  # concurrent: offer prompts when they arrive


OWN_KEYS = frozenset(OwnSettings.__struct_fields__)

FROM_ENGINE = frozenset({"engine_id", "rank", "num_ranks", "role", "sleep_mode"})
"""Settings of a worker that vLLM decides: users must not set them."""

KEYS = OWN_KEYS | set(WorkerConfig(engine_id="").settings()) - FROM_ENGINE

RENAMED = {"kv_lease_duration": "lease_s"}
"""Keys of NixlConnector -> the settings that take the same value."""

POSTED = "Remove it: kvflow posts reads from its own threads."
READ_BACK = "Set keep on the decode engines and sources on the prefill engines: blocks are kept without a time."
BESIDE = "Remove it, or let LMCacheConnectorV1 run beside KVFlowConnector: list both in connectors of MultiConnector."

REPLACED = {
    **{key: f"Set {name} to the same value." for key, name in RENAMED.items()},
    # of NixlConnector
    "backends": "Remove it: kvflow uses NIXL's backend UCX. nixl_backend_params takes parameters of it.",
    "num_threads": POSTED,
    "enforce_handshake_compat": "Remove it: kvflow always compares the caches of both engines.",
    "engine_ttl": "Remove it: kvflow forgets engines that have gone.",
    "enable_permute_local_kv": "Remove it: kvflow reads a cache of any layout.",
    "bidirectional_kv_xfer": READ_BACK,
    "kv_recompute_threshold": "Set fetch_tokens_min to the same value.",
    "decoder_kv_blocks_ttl": READ_BACK,
    "push_registration_timeout": "Remove it: decode engines read, and nothing is pushed to them.",
    # of MooncakeConnector
    "mooncake_protocol": "Remove it. If it is tcp, set transport to tcp.",
    "num_workers": POSTED,
    "device_name": 'Set nixl_backend_params to {"ucx_devices": ...} with the same devices.',
    "bootstrap_server_address": "Set bind and advertise on the prefill engines: tickets carry their addresses.",
    # of LMCache
    **dict.fromkeys(("use_native", "use_layerwise", "discard_partial_chunks", "skip_last_n_tokens"), BESIDE),
}
"""Keys of other connectors of vLLM, and what to do instead. ``lmcache`` starts more of LMCache's."""

SECRET_KEYS = frozenset({"cluster_secret", "cluster_secret_accepted", "private_key"})
"""Secrets, which belong in the environment: vLLM prints its configuration."""

RAY_REMEDY = (
    "Set VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY=KVFLOW_ where vLLM is started: without it, Ray does not copy "
    "KVFLOW_CLUSTER_SECRET to its workers."
)


class EngineFacts(Struct, frozen=True, kw_only=True):
    """Facts of an engine and of one rank, from vLLM's configuration."""

    engine_id: str
    kv_role: str  # ``kv_producer``, ``kv_consumer`` or ``kv_both``
    rank: int = 0
    num_ranks: int = 1
    port_offset: int = 0  # added to each port that is not 0, because ranks on one host need different ports
    copied_by_ray: bool = False  # Ray has started this process, and copies few variables to its workers
    model: str = ""  # as ``model_name`` returns it
    model_revision: str = ""
    model_dtype: str = ""  # in which the model computes
    sleep_mode: bool = False  # the engine may sleep
    load_failure_policy: str = ""  # ``kv_load_failure_policy``; empty where it is not known


class Settings(OwnSettings, frozen=True, kw_only=True):
    """Settings of one side of the connector."""

    worker: WorkerConfig
    produces: bool  # this engine makes tickets
    consumes: bool  # it reads tickets of others


def read_settings(extra: Mapping[str, Any], facts: EngineFacts, find_host: Callable[[], str] = str) -> Settings:
    """Read the settings of the connector from ``kv_connector_extra_config``.

    ``find_host`` returns the address for ``{host}`` if no variable in ``HOST_VARIABLES`` is set.

    Raises:
        ConfigInvalid: a key is unknown or decided by vLLM, or a value is malformed or unsafe.
    """
    chosen = read_own(extra)
    if chosen.offer == "always" and facts.kv_role != "kv_producer":
        raise ConfigInvalid(
            f"offer is always, but kv_role is {facts.kv_role}: clients may ask such an engine for one token and no "
            "ticket",
            remedy="Set kv_role to kv_producer on the prefill engine, or remove offer.",
        )
    if chosen.sources and facts.load_failure_policy not in ("", "recompute"):
        raise ConfigInvalid(
            f"sources is set, but kv_load_failure_policy is {facts.load_failure_policy}: a prefix that cannot be "
            "fetched would fail its request",
            remedy='Set "kv_load_failure_policy": "recompute" next to kv_connector_extra_config.',
        )
    if extra.get("advertise") is not None and "bind" not in extra:
        raise ConfigInvalid(
            f"advertise is {extra['advertise']!r}, but bind is not set: the rank listens at a free port of 127.0.0.1",
            remedy="Set bind too, for example to tcp://0.0.0.0 with the port of advertise.",
        )
    extra = _with_host(extra, find_host)
    own = {"model": facts.model, "model_revision": facts.model_revision, "model_dtype": facts.model_dtype}
    given = {name: value for name, value in extra.items() if name not in OWN_KEYS}
    decided = {"engine_id": facts.engine_id, "rank": facts.rank, "num_ranks": facts.num_ranks}
    decided |= {"role": _role(facts.kv_role, chosen), "sleep_mode": facts.sleep_mode}
    values = {**own, **given, **decided}
    try:
        config = WorkerConfig.read(values)
    except ConfigInvalid as error:
        raise ConfigInvalid(f"kv_connector_extra_config: {error.message}") from error
    try:
        config.check()
    except ConfigInvalid as error:
        if not facts.copied_by_ray:
            raise
        raise ConfigInvalid(f"{error.message}, in a worker that Ray has started", remedy=RAY_REMEDY) from error
    given = {name: value for name, value in config.settings().items() if name in (*ENDPOINTS, "http") and value}
    endpoints = {name: moved(value, facts.port_offset) for name, value in given.items()}
    return Settings(
        worker=config.replaced(**endpoints),
        produces=facts.kv_role != "kv_consumer",
        consumes=facts.kv_role != "kv_producer",
        **structs.asdict(chosen),
    )


def read_own(extra: Mapping[str, Any]) -> OwnSettings:
    """Return the connector's own settings; ConfigInvalid if a key is unknown, or one of them is malformed."""
    check_keys(extra)
    given = {name: value for name, value in extra.items() if name in OWN_KEYS}
    try:
        chosen = msgspec.convert(given, OwnSettings, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigInvalid(f"kv_connector_extra_config: {describe_refusal(error, given, OwnSettings)}") from error
    for name in ("sources", "rendezvous_from"):
        for source in getattr(chosen, name):
            try:
                host_and_port(source.partition("#")[0], port_min=1)
            except AddressMalformed as error:
                raise ConfigInvalid(f"{name} has {source}, whose port must be from 1 to {PORT_MAX}") from error
    if "log_level" in given and chosen.log_file is None:
        remedy = "Set log_file, too, or set the levels of Python's loggers below kvflow."
        raise ConfigInvalid("log_level has no effect without log_file", remedy=remedy)
    if chosen.log_file is not None:
        path = Path(chosen.log_file)
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            remedy = "Name a file, in a folder that exists and in which the user of this process may write."
            raise ConfigInvalid(f"log_file {path} cannot be written", remedy=remedy)
    return chosen


def check_keys(extra: Mapping[str, Any]) -> None:
    """Refuse unknown keys of ``kv_connector_extra_config`` with ConfigInvalid, which suggests a known one."""
    decided = sorted(FROM_ENGINE & set(extra))
    if decided:
        raise ConfigInvalid(
            f"kv_connector_extra_config has {', '.join(decided)}, but vLLM decides this setting",
            remedy="Remove it. To name the engine, set engine_id next to kv_connector_extra_config.",
        )
    unknown = sorted(str(key) for key in set(extra) - KEYS)
    if unknown:
        raise ConfigInvalid(
            f"kv_connector_extra_config has an unknown setting: {', '.join(unknown)}",
            remedy=" ".join(f"{key}: {instead_of(key)}" for key in unknown),
        )


def instead_of(key: str) -> str:
    """Return what to do instead of an unknown key: it is of another connector, or perhaps misspelt."""
    meant = closest(key, KEYS)
    guess = f"Did you mean {meant}?" if meant else "Remove it: it is none of those in docs/reference/config.md."
    return BESIDE if key.startswith("lmcache") else REPLACED.get(key, guess)


def model_name(model: str) -> str:
    """Return the name by which peers compare a model: of a path only its last part, because folders differ by host."""
    return model.rstrip("/").rpartition("/")[2][-256:] if model.startswith(("/", ".", "~")) else model[-256:]


def _role(kv_role: str, chosen: OwnSettings) -> str:
    """Return the role of the worker: a decode engine that keeps is read from, a prefill engine with sources reads."""
    both = (kv_role == "kv_consumer" and chosen.keep) or (kv_role == "kv_producer" and chosen.sources)
    return "both" if both else kv_role.removeprefix("kv_")


def moved(endpoint: str, offset: int) -> str:
    """Return an endpoint with a port that is higher by an offset; port 0, which means any port, stays."""
    port = host_and_port(endpoint)[1]
    higher = port + offset if port else 0
    if higher > PORT_MAX:
        raise ConfigInvalid(f"{endpoint} plus {offset} for this rank is port {higher}, above the last port {PORT_MAX}")
    return f"{endpoint.rpartition(':')[0]}:{higher}"


# The address of this host.

HOST = "{host}"
ENDPOINTS = ("bind", "advertise", "tcp_bind", "tcp_advertise")  # settings with an endpoint, which may contain ``HOST``

HOST_VARIABLE = "KVFLOW_ADVERTISE_HOST"
HOST_VARIABLES = (HOST_VARIABLE, "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_HOST_IP", "POD_IP")
"""Variables with the address of the host: the first one that is set and not empty counts. Each node has its own."""

NAME = re.compile(r"([A-Za-z0-9_-]+\.)*(?![0-9]+\.?$)[A-Za-z0-9_-]+\.?")
"""A host name. A name whose last part is a number is a mistyped address."""


def _with_host(extra: Mapping[str, Any], find_host: Callable[[], str]) -> dict[str, Any]:
    """Return the settings with this host in place of ``{host}``; peers resolve a name when they connect."""
    endpoints = {key: extra[key] for key in ENDPOINTS if isinstance(extra.get(key), str) and HOST in extra[key]}
    if not endpoints:
        return dict(extra)
    source, found = _given_or_found(find_host)
    address = _address(found)
    if address is None and not NAME.fullmatch(found):
        raise ConfigInvalid(f"{source} must be an address or a name without a port, not {found!r}")
    if address is not None and (address.is_unspecified or "%" in found):
        raise ConfigInvalid(
            f"{source} is {found!r}, an address to which no peer can connect",
            remedy=f"Set {HOST_VARIABLE} to the address at which peers reach this host.",
        )
    for key, endpoint in endpoints.items():
        if key.endswith("bind") and (address is None or not is_here(address)):
            raise ConfigInvalid(
                f"{key} is {endpoint!r}, but {source} is {found!r}, which is not an address of this host",
                remedy=f"Set {key} to tcp://0.0.0.0 with its port, and use {HOST} in advertise only.",
            )
    written = f"[{address}]" if isinstance(address, IPv6Address) else found
    return {**extra, **{key: endpoint.replace(HOST, written) for key, endpoint in endpoints.items()}}


def remark(endpoint: str) -> str:
    """Return a note for the log about an address that other hosts cannot reach; empty for most addresses."""
    if _is_loopback(endpoint):
        return ", only on this host"
    return ", which is not an address of this host" if _is_elsewhere(endpoint) else ""


def doubts(config: WorkerConfig) -> Iterator[str]:
    """Yield a warning for each address that other hosts may not reach, though the rank listens for them."""
    bound = {"bind": config.bind, "tcp_bind": config.tcp.bind}
    reached = {"advertise": config.advertise or config.bind, "tcp_advertise": config.tcp.advertise}
    listens = next((f"{name} is {each}" for name, each in bound.items() if not _is_loopback(each)), "")
    hosts = [host_and_port(endpoint)[0] for endpoint in reached.values()]
    if hosts[0] == hosts[1] and config.tuning.tcp_advertise is None:
        del reached["tcp_advertise"]  # which nobody has set
    for name, endpoint in reached.items():
        if listens and _is_loopback(endpoint):
            yield f"{name} is {endpoint}, which only this host can reach, but {listens}"
        elif _is_elsewhere(endpoint):
            yield (
                f"{name} is {endpoint}, which is not an address of this host. Ignore this if addresses are translated "
                f"(NAT). Otherwise correct it; or write tcp://{HOST}:PORT, for which each node takes its own address, "
                f"or that in {HOST_VARIABLE}"
            )


def is_here(address: IPv4Address | IPv6Address) -> bool:
    """Return whether an address belongs to this host: a socket can be bound to it."""
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return True


def _given_or_found(find_host: Callable[[], str]) -> tuple[str, str]:
    """Return the name of what says so, and the host."""
    for name in HOST_VARIABLES:
        if value := os.environ.get(name, "").strip():
            return name, value
    return "the address that vLLM found", find_host()


def _is_loopback(endpoint: str) -> bool:
    host = host_and_port(endpoint)[0]
    address = _address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def _is_elsewhere(endpoint: str) -> bool:
    """Return whether an address belongs to another host; False for a name, which is not resolved."""
    address = _address(host_and_port(endpoint)[0])
    return address is not None and not is_here(address)


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None
