"""What is different in releases of vLLM, and the releases that are refused."""

import sys
from types import SimpleNamespace

import pytest

from kvflow.errors import ConfigInvalid
from kvflow.integrations.vllm import versions
from kvflow.integrations.vllm.versions import (
    LoadedBlocks,
    check_release,
    features_of,
    name_keys,
    prefill_lookahead,
    require_failures_told,
    require_sharing,
)
from tests.helpers.loops import looped


@pytest.fixture
def release(monkeypatch):
    """Have a release of vLLM be installed."""

    def install(name):
        versions.features.cache_clear()
        monkeypatch.setattr(versions, "installed_release", lambda: name)

    yield install
    versions.features.cache_clear()


@looped("name", ["0.29.0", "0.31.0+cpu", "0.32.0", "0.32.0+cpu", "0.33.1", "0.33.0rc1"])
def test_supported_releases(name):
    check_release(name)


@looped("name", ["", "0.28.9", "0.34.0", "1.0.0", "dev"])
def test_other_releases_are_refused_with_the_range(name):
    with pytest.raises(ConfigInvalid, match=r"0\.29 to 0\.33") as caught:
        check_release(name)
    assert (name or "not installed") in str(caught.value)


@looped(
    "name, has",
    [
        ("0.29.0", set()),
        ("0.30.1", {"failed_requests", "shared_prefixes"}),
        ("0.31.0", {"failed_requests", "shared_prefixes", "named_keys"}),
        ("0.32.0+cpu", {"failed_requests", "shared_prefixes", "named_keys", "hit_sources"}),
        ("0.33.0", {"failed_requests", "shared_prefixes", "named_keys", "hit_sources", "sleep"}),
    ],
)
def test_what_releases_do(name, has):
    features = features_of(name)
    assert {field for field in features.__struct_fields__ if getattr(features, field)} == has


def test_keys_of_older_releases_get_their_kinds():
    adapter = SimpleNamespace(lora_name="sql", lora_path="/a")
    request = SimpleNamespace(lora_request=adapter)
    assert name_keys(request, ("sql", ("a cat", 4), "mine", b"digest")) == (
        ("lora", "sql", "/a"),
        ("mm", "a cat", 4),
        ("cache_salt", "mine"),
        ("prompt_embeds", b"digest"),
    )
    assert name_keys(SimpleNamespace(lora_request=None), ("sql",)) == (("cache_salt", "sql"),)


def test_a_key_that_no_older_release_makes_is_a_defect():
    with pytest.raises(TypeError, match="int"):
        name_keys(SimpleNamespace(lora_request=None), (7,))


def draft(eagle, several):
    return SimpleNamespace(use_eagle=lambda: eagle, use_multi_module_mtp=lambda: several)


@looped(
    "config, tokens",
    [
        (SimpleNamespace(num_prefill_lookahead_tokens=3), 3),
        (SimpleNamespace(num_prefill_lookahead_tokens=0), 1),  # what vLLM says without a draft model
        (SimpleNamespace(), 1),
        (SimpleNamespace(speculative_config=None), 1),
        (SimpleNamespace(speculative_config=draft(False, False), num_speculative_tokens=4), 1),
        (SimpleNamespace(speculative_config=draft(True, False), num_speculative_tokens=4), 1),
        (SimpleNamespace(speculative_config=draft(True, True), num_speculative_tokens=4), 4),
    ],
)
def test_how_far_a_draft_model_reads_ahead(config, tokens):
    assert prefill_lookahead(config) == tokens


class SlidingWindowSpec:
    """Named as vLLM's."""


class FullAttentionSpec:
    """Named as vLLM's."""


def groups(*specs):
    return [SimpleNamespace(kv_cache_spec=spec()) for spec in specs]


def test_windows_are_not_recomputed_where_only_blocks_are_reported(release):
    release("0.29.0")
    require_failures_told(groups(FullAttentionSpec), "recompute")
    require_failures_told(groups(SlidingWindowSpec), "fail")
    with pytest.raises(ConfigInvalid, match=r"0\.29\.0.*SlidingWindowSpec"):
        require_failures_told(groups(SlidingWindowSpec), "recompute")
    release("0.30.0")
    require_failures_told(groups(SlidingWindowSpec), "recompute")


def test_prefixes_are_shared_where_the_reuse_of_blocks_is_told(release):
    release("0.30.0")
    require_sharing(["keep"])
    release("0.29.0")
    with pytest.raises(ConfigInvalid, match=r"vLLM 0\.29\.0 cannot share .* has keep and sources"):
        require_sharing(["keep", "sources"])


def blocks(*named):
    """Blocks as vLLM's manager lists them: id -> whether it is in the prefix cache, 0 is the null block."""
    listed = [SimpleNamespace(block_id=at, block_hash=b"x" if cached else None, is_null=not at) for at, cached in named]
    return SimpleNamespace(blocks=(listed,))


def test_blocks_of_failed_requests_are_reported_once(release):
    release("0.29.0")
    scheduler, worker = LoadedBlocks(), LoadedBlocks()
    scheduler.note("a", blocks((7, True), (0, False), (8, False), (9, False)))
    scheduler.note("b", blocks((10, False)))
    worker.learn(scheduler.take())
    assert scheduler.take() == {}
    worker.end(received={"b"}, failed=())
    assert worker.take_failed() == set()
    worker.end(received={"a", "b"}, failed={"a", "b"})
    assert worker.take_failed() == {8, 9}, "not those of the prefix cache, nor of a request that has ended"
    assert worker.take_failed() == set()


def test_blocks_are_not_noted_where_requests_are_reported(release):
    release("0.32.0")
    scheduler = LoadedBlocks()
    scheduler.note("a", blocks((8, False)))
    assert scheduler.take() == {}


def test_connectors_are_reset_before_the_cache_that_needs_their_blocks():
    told = []

    class Scheduler:
        def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
            told.append((reset_running_requests, reset_connector))
            return True

    class Connector:
        def reset_before(self, scheduler, *, forced):
            told.append((scheduler, forced))

    for _ in range(2):
        versions.reset_connectors_first(Scheduler, Connector)
    scheduler = Scheduler()
    beside = SimpleNamespace(_connectors=[object(), Connector()])
    for connector in (Connector(), beside, SimpleNamespace(_connectors=[SimpleNamespace(_connectors=[]), beside])):
        scheduler.connector = connector
        told.clear()
        assert scheduler.reset_prefix_cache()
        assert scheduler.reset_prefix_cache(reset_connector=True)
        assert scheduler.reset_prefix_cache(True)
        before, forced = (scheduler, False), (scheduler, True)
        assert told == [before, (False, False), forced, (False, True), forced, (True, False)]
    scheduler.connector = None
    assert scheduler.reset_prefix_cache(True, True)


BASES = "vllm.distributed.kv_transfer.kv_connector.v1"


class Base:
    """vLLM's base class, as far as a connector takes the block pool with it; the tests with vLLM have its own."""

    def bind_kv_cache_manager(self, manager):
        self.bind_gpu_block_pool(manager)

    def bind_gpu_block_pool(self, pool):
        pass


class Multi(Base):
    def __init__(self, *children):
        self._connectors = children

    def bind_kv_cache_manager(self, manager):
        for each in self._connectors:
            each.bind_kv_cache_manager(manager)


class Pooled(Base):
    def bind_gpu_block_pool(self, pool):
        pass


class Managed(Base):
    def bind_kv_cache_manager(self, manager):
        pass


class Keeper(Base):
    def __init__(self):
        self.met = []

    def meet_siblings(self, takers):
        self.met.append(takers)

    def bind_gpu_block_pool(self, pool):
        assert self.met, "it knows before it gets the pool"


def test_a_child_is_told_which_others_take_the_block_pool(monkeypatch):
    bound = Multi.bind_kv_cache_manager
    monkeypatch.setitem(sys.modules, f"{BASES}.multi_connector", SimpleNamespace(MultiConnector=Multi))
    monkeypatch.setitem(sys.modules, f"{BASES}.base", SimpleNamespace(KVConnectorBase_V1=Base))
    try:
        for _ in range(2):
            versions.introduce_siblings(Keeper)
        assert Multi.bind_kv_cache_manager.__wrapped__ is bound, "once"
        for found, make in [
            ([], lambda keeper: (keeper, Base())),
            (["Pooled"], lambda keeper: (keeper, Pooled())),
            (["Managed"], lambda keeper: (Managed(), Base(), keeper)),
            (["Pooled", "Managed"], lambda keeper: (Multi(Base(), Pooled()), Multi(keeper, Multi(Managed())))),
            (["Keeper"], lambda keeper: (keeper, Keeper())),
        ]:
            keeper = Keeper()
            Multi(*make(keeper)).bind_kv_cache_manager(object())
            assert keeper.met[0] == found
    finally:
        Multi.bind_kv_cache_manager = bound


def test_without_multiconnector_there_are_no_siblings(monkeypatch):
    monkeypatch.delitem(sys.modules, f"{BASES}.multi_connector", raising=False)
    versions.introduce_siblings(Keeper)
    monkeypatch.setitem(sys.modules, f"{BASES}.multi_connector", SimpleNamespace(MultiConnector=type("Older", (), {})))
    versions.introduce_siblings(Keeper)  # a release that shares no prefixes
