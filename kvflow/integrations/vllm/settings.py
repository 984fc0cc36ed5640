"""``kv_connector_extra_config`` and what the engine says of itself -> the settings of one worker."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

from kvflow import WorkerConfig
from kvflow.errors import ConfigInvalid
from kvflow.integrations.vllm.hosts import with_host

OWN_KEYS = frozenset({"enable_cross_layers_blocks", "log_file", "offer"})
"""Keys that are the connector's and not the worker's."""

FROM_ENGINE = frozenset({"engine_id", "rank", "num_ranks", "role"})
"""Settings of a worker that the engine decides; a value of the user's could only contradict it."""

KEYS = OWN_KEYS | set(WorkerConfig.__struct_fields__) - FROM_ENGINE

SECRET_KEYS = frozenset({"cluster_secret", "cluster_secret_accepted", "private_key"})
"""Keys that better stand in the environment: vLLM prints its configuration."""

PACKED_LAYOUT = "BLHNC"
"""One block of all layers is one row, and the heads of a rank lie together in it. Also valid for mixed page sizes."""

OFFERS = ("asked", "always")

PORT_MAX = 65535

RAY_COPIES_LITTLE = (
    "Ray copies few variables to its workers, and KVFLOW_CLUSTER_SECRET is not among them: set "
    "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY=KVFLOW_ where vLLM is started."
)

ROLES: dict[str, Literal["prefill", "decode", "both"]] = {
    "kv_producer": "prefill",
    "kv_consumer": "decode",
    "kv_both": "both",
}


class EngineFacts(Struct, frozen=True, kw_only=True):
    """What the engine says of itself and of one rank.

    Attributes:
        engine_id: all ranks of the engine share it.
        kv_role: ``kv_producer``, ``kv_consumer`` or ``kv_both``.
        rank: of the worker in its engine.
        num_ranks: ranks of the engine.
        port_offset: added to a port that is not 0: ranks on one host need different ones.
        copied_by_ray: whether Ray has started this process, which copies few variables to it.
        model: name that peers compare; see ``model_name``.
        model_revision: of its weights; empty if not told.
        model_dtype: that it computes in.
    """

    engine_id: str
    kv_role: str
    rank: int = 0
    num_ranks: int = 1
    port_offset: int = 0
    copied_by_ray: bool = False
    model: str = ""
    model_revision: str = ""
    model_dtype: str = ""


class Settings(Struct, frozen=True, kw_only=True):
    """What one side of the connector is told.

    Attributes:
        worker: of the rank.
        produces: whether this engine hands out tickets.
        consumes: whether it reads those of others.
        enable_cross_layers_blocks: ask vLLM for a packed layout.
        log_file: where kvflow writes its records, one JSON object a line; None leaves them to Python's logging.
        offers_always: whether a request for one token is offered though its router has said nothing of a transfer.
    """

    worker: WorkerConfig
    produces: bool
    consumes: bool
    enable_cross_layers_blocks: bool = False
    log_file: str | None = None
    offers_always: bool = False


def read_settings(extra: Mapping[str, Any], facts: EngineFacts, find_host: Callable[[], str] = str) -> Settings:
    """Read the connector's extra configuration.

    Args:
        extra: ``kv_connector_extra_config``.
        facts: of the engine and the rank.
        find_host: returns what ``{host}`` is where no variable tells it.

    Raises:
        ConfigInvalid: a key is unknown, decided by the engine, or has a value that is malformed or unsafe.
    """
    check_keys(extra)
    if extra.get("advertise") is not None and "bind" not in extra:
        raise ConfigInvalid(
            f"advertise is {extra['advertise']!r}, but without bind the rank listens at a free port of 127.0.0.1",
            remedy="Set bind, for example to tcp://0.0.0.0 and the port of advertise.",
        )
    extra = with_host(extra, find_host)
    own = {"model": facts.model, "model_revision": facts.model_revision, "model_dtype": facts.model_dtype}
    given = {name: value for name, value in extra.items() if name not in OWN_KEYS}
    try:
        config = msgspec.convert(
            {
                **own,
                **given,
                "engine_id": facts.engine_id,
                "rank": facts.rank,
                "num_ranks": facts.num_ranks,
                "role": ROLES[facts.kv_role],
            },
            type=WorkerConfig,
            strict=False,  # a number or a switch may come from a command line, as text
        )
    except msgspec.ValidationError as error:
        raise ConfigInvalid(f"kv_connector_extra_config: {error}") from error
    try:
        config.check()
    except ConfigInvalid as error:
        if not facts.copied_by_ray:
            raise
        raise ConfigInvalid(f"{error.message}, in a worker that Ray has started", remedy=RAY_COPIES_LITTLE) from error
    config = msgspec.structs.replace(
        config,
        bind=moved(config.bind, facts.port_offset),
        advertise=config.advertise and moved(config.advertise, facts.port_offset),
        tcp_bind=config.tcp_bind and moved(config.tcp_bind, facts.port_offset),
        tcp_advertise=config.tcp_advertise and moved(config.tcp_advertise, facts.port_offset),
    )
    return Settings(
        worker=config,
        produces=facts.kv_role != "kv_consumer",
        consumes=facts.kv_role != "kv_producer",
        enable_cross_layers_blocks=wants_packed(extra),
        log_file=_log_file(extra),
        offers_always=_offers_always(extra, facts.kv_role),
    )


def check_keys(extra: Mapping[str, Any]) -> None:
    """Refuse keys that are not known.

    Raises:
        ConfigInvalid: names them, and lists those that are.
    """
    decided = sorted(FROM_ENGINE & set(extra))
    if decided:
        raise ConfigInvalid(
            f"kv_connector_extra_config has {', '.join(decided)}, which vLLM decides",
            remedy="Leave it out; engine_id and kv_role stand beside kv_connector_extra_config.",
        )
    unknown = sorted(str(key) for key in set(extra) - KEYS)
    if unknown:
        raise ConfigInvalid(
            f"kv_connector_extra_config has unknown {', '.join(unknown)}",
            remedy=f"Known are {', '.join(sorted(KEYS))}.",
        )


def wants_packed(extra: Mapping[str, Any]) -> bool:
    """Return the switch ``enable_cross_layers_blocks``; off if it is not there.

    Raises:
        ConfigInvalid: it is no switch.
    """
    value = extra.get("enable_cross_layers_blocks", False)
    try:
        return msgspec.convert(value, type=bool, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigInvalid(f"enable_cross_layers_blocks is {value!r}: expected true or false") from error


def model_name(model: str) -> str:
    """Return the name under which peers compare a model: a path differs between hosts, its last part rarely does."""
    return model.rstrip("/").rpartition("/")[2][-256:] if model.startswith(("/", ".", "~")) else model[-256:]


def _log_file(extra: Mapping[str, Any]) -> str | None:
    value = extra.get("log_file")
    if value is not None and not (isinstance(value, str) and value):
        raise ConfigInvalid(f"log_file is {value!r}: expected the path of a file")
    return value


def _offers_always(extra: Mapping[str, Any], kv_role: str) -> bool:
    value = extra.get("offer", OFFERS[0])
    if value not in OFFERS:
        raise ConfigInvalid(f"offer is {value!r}: expected one of {', '.join(OFFERS)}")
    if value == "always" and kv_role != "kv_producer":
        raise ConfigInvalid(
            f"offer is always, but kv_role is {kv_role}: of such an engine clients may want one token and no ticket",
            remedy="Set kv_role to kv_producer on the prefill engine, or leave offer out.",
        )
    return bool(value == "always")


def moved(endpoint: str, offset: int) -> str:
    """Return an endpoint whose port, unless any will do, is this much higher."""
    host, _, port = endpoint.rpartition(":")
    if port == "0":
        return endpoint
    moved = int(port) + offset
    if moved > PORT_MAX:
        raise ConfigInvalid(f"{endpoint} and {offset} make port {moved}: no port is above {PORT_MAX}")
    return f"{host}:{moved}"
