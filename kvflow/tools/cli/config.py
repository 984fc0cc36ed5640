"""``kvflow config``: every setting of a worker, where its value comes from, and what is wrong with the settings."""

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct, structs

from kvflow.config import SECRETS, SETTINGS, VARIABLES, WorkerConfig
from kvflow.errors import ConfigInvalid, KvflowError, closest
from kvflow.integrations.vllm import ALIAS, NAME
from kvflow.integrations.vllm import settings as vllm
from kvflow.tools.cli.arguments import CommandFailed, Subparsers, add_command, print_facts, print_json, read_file
from kvflow.tools.doctor.facts import own_address

FILE_BYTES_MAX = 16 << 20
"""65,536 allowed keys take 4.5 MB."""

PLACEHOLDER = "engine-0"

BY_ENGINE = "decided by the engine"

OF_VLLM = {*vllm.FROM_ENGINE, "model", "model_revision", "model_dtype"}

OWN_DEFAULTS = structs.asdict(vllm.OwnSettings())

OF_TRANSFER = frozenset(
    {
        *("kv_connector", "kv_connector_module_path", "kv_connector_extra_config", "kv_role", "engine_id"),
        *("kv_load_failure_policy", "kv_buffer_device", "kv_port", "enable_permute_local_kv"),
    }
)
"""Keys of vLLM's ``--kv-transfer-config``, which refuses others."""

OF_OLDER = frozenset({"kv_buffer_size", "kv_ip", "kv_parallel_size", "kv_rank"})
"""Keys that vLLM knew until 0.31, and that mean nothing to kvflow."""

MODULE = vllm.__name__.rpartition(".")[0]

ONE_OF = {
    "kv_connector": (NAME, ALIAS),
    "kv_role": ("kv_producer", "kv_consumer", "kv_both"),
    "kv_load_failure_policy": ("fail", "recompute"),
}
REQUIRED = {"kv_connector", "kv_role"}

PREFIX = "KVFLOW_"
OBSOLETE = {"KVFLOW_CALIBRATION": "Remove it: reads are staged without a file. staging_bytes 0 reads directly."}
OTHER_PREFIXES = ("KVFLOW_DEMO_", "KVFLOW_TEST_")
"""Variables of the demo and of kvflow's own tests."""


class SettingFigures(Struct, frozen=True, kw_only=True):
    """One setting, and where its value comes from; of a secret, only whether it is set."""

    name: str
    value: Any
    source: str


class SettingProblem(Struct, frozen=True, kw_only=True):
    """Something that is wrong (``error``: no worker opens with it), or probably not meant (``warning``)."""

    severity: Literal["error", "warning"]
    code: str
    message: str
    remedy: str


class ConfigFigures(Struct, frozen=True, kw_only=True):
    """What ``kvflow config --json`` prints.

    Attributes:
        cluster: the first half of the public key that follows from the cluster secret: equal on all workers of a
            cluster; None without a usable secret.
    """

    settings: tuple[SettingFigures, ...]
    cluster: str | None
    findings: tuple[SettingProblem, ...]


class Given(Struct, frozen=True):
    """Settings as a user gives them, and where.

    ``transfer`` is vLLM's ``--kv-transfer-config`` with them, empty if it is not given; None if they are not of vLLM.
    """

    values: Mapping[str, Any]
    source: str = ""
    transfer: Mapping[str, Any] | None = None

    @property
    def is_vllm(self) -> bool:
        """Whether they are settings of the connector."""
        return self.transfer is not None


def add_parser(commands: Subparsers) -> None:
    """Add ``config`` to the command line."""
    parser = add_command(
        commands,
        "config",
        summary="show every setting of a worker, and what is wrong with them",
        description="Show every setting of a worker with its value and where it comes from: a default, the "
        "environment, or a file. Secrets are never printed. Nothing is opened or dialed.",
        examples="kvflow config\nkvflow config --file worker.json\nkvflow config --vllm kv-transfer-config.json",
    )
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--file", type=Path, metavar="FILE", help="JSON with the arguments of WorkerConfig")
    given.add_argument(
        "--vllm", metavar="FILE", help="vLLM's --kv-transfer-config, or its kv_connector_extra_config: a file, or JSON"
    )
    given.add_argument(
        "--from-nixl",
        metavar="FILE",
        help="print the --kv-transfer-config that replaces one of NixlConnector",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Show the settings; 1 if something is wrong with them, 2 if the file cannot be read."""
    try:
        if options.from_nixl is not None:
            return _convert(*_vllm_object(options.from_nixl, "--from-nixl")[:2])
        given = _given(options)
    except ConfigInvalid as error:
        raise CommandFailed(str(error)) from error
    findings, config = examine(given)
    figures = ConfigFigures(
        settings=tuple(_settings(given, config)), cluster=_cluster(config), findings=tuple(findings)
    )
    (print_json if options.json else _print)(figures)
    return int(bool(findings))


def examine(given: Given) -> tuple[list[SettingProblem], WorkerConfig | None]:
    """Return what is wrong with settings, and the settings of the worker; None if it would not open."""
    findings, config = [*_faults(given)], None
    if not findings:
        try:
            config = _resolved(given)
        except KvflowError as error:
            findings.append(_finding(error))
    if config is not None:
        findings += _doubts(config, given)
    return [*findings, *_misspelled()], config


def _given(options: argparse.Namespace) -> Given:
    if options.file is not None:
        values = _object(read_file(options.file, FILE_BYTES_MAX), str(options.file))
        return Given(values, str(options.file))
    if options.vllm is None:
        return Given({})
    transfer, extra, source = _vllm_object(options.vllm, "--vllm")
    return Given(extra, source, transfer)


def _vllm_object(given: str, flag: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Read vLLM's ``--kv-transfer-config``, or its ``kv_connector_extra_config`` alone.

    Returns:
        The former, empty if only the latter is given; the latter; and where they are from.
    """
    is_text = given.lstrip().startswith("{")
    source = flag if is_text else given
    found = _object(given.encode() if is_text else read_file(Path(given), FILE_BYTES_MAX), source)
    if not found.keys() & (OF_TRANSFER - vllm.FROM_ENGINE):
        return {}, found, source
    extra = found.get("kv_connector_extra_config") or {}
    if not isinstance(extra, dict):
        raise ConfigInvalid(f"{source}: kv_connector_extra_config must be an object, not {type(extra).__name__}")
    return found, extra, source


def _convert(found: dict[str, Any], theirs: dict[str, Any]) -> int:
    """Print the configuration of kvflow that replaces one of NixlConnector; on standard error, what is wrong with it.

    Returns:
        1 if something is dropped or wrong.
    """
    if (connector := found.get("kv_connector", ALIAS)) != ALIAS:
        raise ConfigInvalid(f"kv_connector is {connector!r}, not {ALIAS}", remedy="Give a part with that one.")
    given = {vllm.RENAMED.get(name, name): value for name, value in theirs.items()}
    extra = {name: value for name, value in given.items() if name in vllm.KEYS}
    if os.environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST"):
        port = os.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600")
        extra = {"bind": f"tcp://0.0.0.0:{port}", "advertise": f"tcp://{vllm.HOST}:{port}"} | extra
    converted = {**found, "kv_connector": NAME, "kv_connector_extra_config": extra}
    print_json(converted)
    wrong = [f"{name} is dropped. {vllm.instead_of(name)}" for name in sorted(given.keys() - extra.keys())]
    wrong += [f"{fault.message}. {fault.remedy}" for fault in (_transfer_faults(converted) if found else ())]
    for line in wrong:
        print(line, file=sys.stderr)
    return int(bool(wrong))


def _object(text: bytes, source: str) -> dict[str, Any]:
    remedy = "Give a JSON object: names of settings and their values."
    if len(text) > FILE_BYTES_MAX:
        raise ConfigInvalid(f"{source} has more than {FILE_BYTES_MAX} bytes", remedy=remedy)
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigInvalid(f"{source} is no JSON object: {error}", remedy=remedy) from error


def _faults(given: Given) -> Iterator[SettingProblem]:
    """Yield what is wrong with each setting alone: all of it, and not only the first."""
    if given.transfer is not None:
        yield from _transfer_faults(given.transfer) if given.transfer else ()
        try:
            vllm.check_keys(given.values)
        except ConfigInvalid as error:
            yield _finding(error)
    for name, value in given.values.items():
        if given.is_vllm and (name not in vllm.KEYS or name in vllm.OWN_KEYS):
            continue
        if given.is_vllm and isinstance(value, str):
            value = value.replace(vllm.HOST, "host")  # noqa: PLW2901
        alone = {"engine_id": PLACEHOLDER, name: value}
        try:
            WorkerConfig.read(alone)
        except ConfigInvalid as error:
            yield _finding(error)


def _transfer_faults(transfer: Mapping[str, Any]) -> Iterator[SettingProblem]:
    """Yield what vLLM would refuse of its ``--kv-transfer-config``, and a connector that is not kvflow's."""
    if older := sorted(transfer.keys() & OF_OLDER):
        yield _warning(
            f"vLLM 0.32 refuses {_listed(older)}, which releases before it take", "Remove it: kvflow has no use for it."
        )
    if unknown := sorted(transfer.keys() - OF_TRANSFER - OF_OLDER):
        inside = [name for name in unknown if name in vllm.KEYS]
        remedy = f"Move {_listed(inside)} into kv_connector_extra_config." if inside else f"Remove {_listed(unknown)}."
        yield _fault(f"vLLM knows no {_listed(unknown)} in --kv-transfer-config", remedy)
    for name, known in ONE_OF.items():
        value = transfer.get(name)
        if value is None and name in REQUIRED:
            yield _fault(f"{name} is missing", f"Set it to {_listed(known, 'or')}.")
        elif value is not None and value not in known:
            meant = closest(value, known)
            remedy = f"Did you mean {meant}?" if meant else f"Set it to {_listed(known, 'or')}."
            yield _fault(f"{name} is {value!r}, not {_listed(known, 'or')}", remedy)
    if transfer.get("kv_connector") == ALIAS and transfer.get("kv_connector_module_path") != MODULE:
        remedy = f"Set it to {NAME}, or set kv_connector_module_path to {MODULE}."
        yield _fault(f"kv_connector is {ALIAS}, which is vLLM's own", remedy)


def _resolved(given: Given) -> WorkerConfig:
    if given.transfer is not None:
        policy = str(given.transfer.get("kv_load_failure_policy", "fail" if given.transfer else ""))
        role = str(given.transfer.get("kv_role", "kv_both"))
        facts = vllm.EngineFacts(engine_id=PLACEHOLDER, kv_role=role, load_failure_policy=policy)
        config = vllm.read_settings(given.values, facts, own_address).worker
    else:
        config = WorkerConfig.read({"engine_id": PLACEHOLDER, **given.values} if not given.source else given.values)
        config.check()
    return config


def _doubts(config: WorkerConfig, given: Given) -> Iterator[SettingProblem]:
    if printed := sorted(vllm.SECRET_KEYS & set(given.values)):
        where = "vLLM prints its configuration" if given.is_vllm else "a file is easily read by others"
        remedy = f"Set {', '.join(VARIABLES[name] for name in printed)} instead."
        yield _warning(f"{given.source} has {', '.join(printed)}: {where}", remedy)
    for doubt in vllm.doubts(config):
        yield _warning(doubt, "Set advertise or tcp_advertise to an address that other hosts reach.")


def _misspelled() -> Iterator[SettingProblem]:
    """Yield variables whose names are almost those of kvflow, or were."""
    known = {*VARIABLES.values(), vllm.HOST_VARIABLE}
    for name in sorted(os.environ):
        is_right = not name.startswith(PREFIX) or name in known or name.startswith(OTHER_PREFIXES)
        if name in OBSOLETE:
            yield _warning(f"the variable {name} is set, which kvflow no longer reads", OBSOLETE[name])
        elif not is_right and (meant := get_close_matches(name, known, n=1, cutoff=0.8)):
            yield _warning(f"the variable {name} is set, which kvflow does not read", f"Did you mean {meant[0]}?")


def _listed(names: Iterable[str], word: str = "and") -> str:
    *others, last = sorted(names)
    return f"{', '.join(others)} {word} {last}" if others else last


def _fault(message: str, remedy: str) -> SettingProblem:
    return _finding(ConfigInvalid(message, remedy=remedy))


def _finding(error: KvflowError) -> SettingProblem:
    return SettingProblem(severity="error", code=str(error.code), message=error.message, remedy=error.remedy)


def _warning(message: str, remedy: str) -> SettingProblem:
    return SettingProblem(severity="warning", code=str(ConfigInvalid.code), message=message, remedy=remedy)


def _settings(given: Given, config: WorkerConfig | None) -> Iterator[SettingFigures]:
    """Yield every setting, as it is given if a worker would not open."""
    values = config.settings() if config is not None else {}
    for name, field in SETTINGS.items():
        variable = VARIABLES.get(name, "")
        value = values.get(name, given.values.get(name, field.default))
        source = "default"
        if name in given.values:
            source = given.source
        elif (given.is_vllm and name in OF_VLLM) or (field.required and not given.source):
            value, source = None, BY_ENGINE
        elif os.environ.get(variable):
            value, source = os.environ[variable], variable
        elif config is not None and value is None and name in {"tcp_bind", "tcp_advertise"}:
            value, source = getattr(config.tcp, name.removeprefix("tcp_")), "from bind and advertise"
        if value is msgspec.NODEFAULT:
            value = {} if field.default_factory is not msgspec.NODEFAULT else None
        if name in SECRETS:
            value = "set" if value else "not set"
        yield SettingFigures(name=name, value=_shown(value), source=source)
    for name, default in OWN_DEFAULTS.items() if given.is_vllm else ():
        source = given.source if name in given.values else "default"
        yield SettingFigures(name=name, value=_shown(given.values.get(name, default)), source=source)


def _shown(value: object) -> object:
    """Return a value that JSON can hold; half of a surrogate pair in it is replaced."""
    try:
        msgspec.json.encode(value)
    except (TypeError, UnicodeEncodeError):
        return repr(value)
    return value


def _cluster(config: WorkerConfig | None) -> str | None:
    if config is None:
        return None
    from kvflow.rendezvous.endpoint import cluster_key  # noqa: PLC0415 - what is refused needs no ZeroMQ

    return cluster_key(config)[:32]


def _print(figures: ConfigFigures) -> None:
    width = max(len(each.source) for each in figures.settings)
    print_facts((each.name, f"{each.source.ljust(width)}  {_text(each.value)}") for each in figures.settings)
    if figures.cluster is not None:
        print(f"\ncluster {figures.cluster[:16]}: equal on all workers with this secret")
    for finding in figures.findings:
        print(f"\n{finding.severity}: {finding.message} [{finding.code}] {finding.remedy}")


def _text(value: object) -> str:
    if value is None:
        return "-"
    text = value if isinstance(value, str) and value.isprintable() and value else repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
