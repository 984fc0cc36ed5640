"""``kv_connector_extra_config`` and what the engine says of itself -> the settings of one worker."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

from kvflow import WorkerConfig
from kvflow.errors import ConfigInvalid

OWN_KEYS = frozenset({"enable_cross_layers_blocks", "log_file"})
"""Keys that are the connector's and not the worker's."""

FROM_ENGINE = frozenset({"engine_id", "rank", "num_ranks", "role"})
"""Settings of a worker that the engine decides; a value of the user's could only contradict it."""

KEYS = OWN_KEYS | set(WorkerConfig.__struct_fields__) - FROM_ENGINE

SECRET_KEYS = frozenset({"cluster_secret", "cluster_secret_accepted", "private_key"})
"""Keys that better stand in the environment: vLLM prints its configuration."""

PACKED_LAYOUT = "BLHNC"
"""One block of all layers is one row, and the heads of a rank lie together in it. Also valid for mixed page sizes."""

PORT_MAX = 65535

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
        model: name that peers compare; see ``model_name``.
        model_revision: of its weights; empty if not told.
        model_dtype: that it computes in.
    """

    engine_id: str
    kv_role: str
    rank: int = 0
    num_ranks: int = 1
    port_offset: int = 0
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
    """

    worker: WorkerConfig
    produces: bool
    consumes: bool
    enable_cross_layers_blocks: bool = False
    log_file: str | None = None


def read_settings(extra: Mapping[str, Any], facts: EngineFacts) -> Settings:
    """Read the connector's extra configuration.

    Raises:
        ConfigInvalid: a key is unknown, decided by the engine, or has a value that is malformed or unsafe.
    """
    check_keys(extra)
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
    config.check()
    config = msgspec.structs.replace(
        config,
        bind=_moved(config.bind, facts.port_offset),
        advertise=config.advertise and _moved(config.advertise, facts.port_offset),
        tcp_bind=config.tcp_bind and _moved(config.tcp_bind, facts.port_offset),
        tcp_advertise=config.tcp_advertise and _moved(config.tcp_advertise, facts.port_offset),
    )
    return Settings(
        worker=config,
        produces=facts.kv_role != "kv_consumer",
        consumes=facts.kv_role != "kv_producer",
        enable_cross_layers_blocks=wants_packed(extra),
        log_file=_log_file(extra),
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


def _moved(endpoint: str, offset: int) -> str:
    """Return an endpoint whose port, unless any will do, is this much higher."""
    host, _, port = endpoint.rpartition(":")
    if port == "0":
        return endpoint
    moved = int(port) + offset
    if moved > PORT_MAX:
        raise ConfigInvalid(f"{endpoint} and {offset} make port {moved}: no port is above {PORT_MAX}")
    return f"{host}:{moved}"
