"""What vLLM's configuration says of the heads of each layer, and which layout it is asked for."""

import ctypes
import errno
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvflow.errors import ConfigInvalid
from kvflow.integrations.vllm import engine
from kvflow.integrations.vllm.caches import EngineShape, read_spec
from kvflow.integrations.vllm.engine import (
    allow_tiles,
    draft_layers,
    drain_time,
    head_counts,
    require_fixed_pages,
    require_own_device,
    required_layout,
)
from tests.helpers.loops import looped

from .vllm_like import FullAttentionSpec

TABLE = json.loads((Path(__file__).parents[3] / "data" / "vllm_specs.json").read_text())
PUBLISHED = {row["model"]: row["config"] for row in TABLE["models"]}
LAYER = "model.layers.{}.self_attn.attn"


def model_of(config, total):
    hf_config = SimpleNamespace(**config, to_dict=lambda: config)
    return SimpleNamespace(hf_config=hf_config, hf_text_config=hf_config, get_total_num_kv_heads=lambda: total)


def counts(config, total, *indices, draft=None):
    """Return the heads of some layers, in their order."""
    speculative = SimpleNamespace(draft_model_config=draft) if draft else None
    engine = SimpleNamespace(model_config=model_of(config, total), speculative_config=speculative)
    return list(head_counts(engine, [LAYER.format(index) for index in indices]).values())


def strange(**named):
    return {"model_type": "strange", "num_hidden_layers": 2, **named}


def test_layers_of_one_model_may_have_different_numbers_of_heads():
    config = PUBLISHED["XiaomiMiMo/MiMo-V2-Flash"]
    assert config["hybrid_layer_pattern"][:2] == [0, 1]
    assert counts(config, 4, 0, 1) == [4, 8]


@looped(
    "config, found",
    [
        (strange(num_key_value_heads=2), 2),
        (strange(num_attention_heads=4), 2),
        (strange(num_key_value_heads=2, odd_num_key_value_heads=4), 0),
        (strange(num_key_value_heads_per_layer=[2, 4]), 0),
        (strange(num_key_value_heads_per_layer=[2, 0]), 2),
        (strange(attention_other_setting={"num_attention_groups": 8}), 0),
    ],
    ids=["one", "none", "two", "per layer", "layers without", "nested"],
)
def test_heads_of_a_model_that_is_not_known_are_told_only_if_all_agree(config, found):
    assert counts(config, 2, 0) == [found]


def test_vllms_own_number_comes_first():
    spec = FullAttentionSpec(num_kv_heads=1, num_heads=1)
    spec.max_tp_shards = 2
    assert read_spec("layer", spec, EngineShape(tp_size=4, num_kv_heads={"layer": 4})).num_kv_heads == 2


def test_layers_behind_the_model_are_those_of_its_draft():
    draft = model_of({"num_key_value_heads": 1}, 1)
    assert counts(PUBLISHED["meta-llama/Meta-Llama-3.1-8B"], 8, 31, 32, draft=draft) == [8, 1]


def drafts(speculative, *names, marked=(), num_layers=2, kept_back=()):
    """Return which of some layers are taken for those of a draft model, and transferred."""
    modules = {name: SimpleNamespace(is_draft_layer=name in marked) for name in names}
    engine = SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=num_layers)),
        speculative_config=speculative,
        compilation_config=SimpleNamespace(static_forward_context=modules),
    )
    groups = [SimpleNamespace(layer_names=[each]) for each in (*names, "model.layers.9.attn.of_no_module")]
    transferred = [group for group in groups if group.layer_names[0] not in kept_back]
    return draft_layers(engine, SimpleNamespace(kv_cache_groups=groups, transfer_groups=transferred))


def speculative(eagle=True, model=False):
    return SimpleNamespace(use_eagle=lambda: eagle, uses_draft_model=lambda: model)


MODEL = ("model.layers.0.self_attn.attn", "language_model.model.layers.1.self_attn.attn", "model.layers.1.attn.0")


@pytest.mark.proves("draft models", engine="stand-in")
@looped(
    "draft",
    [
        "model.layers.2.self_attn.attn",  # EAGLE and MTP count on
        "model.layers.3.mtp_block.self_attn.attn",
        "mtp.layers.0.self_attn.attn",
        "draft_model.model.layers.0.self_attn.attn",
    ],
)
def test_the_layers_of_a_draft_model_are_told_from_those_of_the_model(draft):
    assert drafts(speculative(), *MODEL, draft) == [draft]
    assert drafts(speculative(eagle=False, model=True), *MODEL, draft) == [draft]
    assert drafts(speculative(eagle=False), *MODEL, draft) == []  # what it keeps may be no draft's
    assert drafts(None, *MODEL, draft) == []


def test_layers_of_a_draft_model_that_vllm_leaves_out_are_told(caplog):
    first, second = "mtp.layers.0.self_attn.attn", "mtp.layers.1.self_attn.attn"
    assert drafts(speculative(), *MODEL, first, second, kept_back=[MODEL[0], second]) == [first]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"draft model out of transfers: {second}." in caplog.messages[0]


def test_vllm_may_mark_the_layers_of_a_draft_model():
    assert drafts(speculative(), *MODEL, "head.0", marked=["head.0"]) == ["head.0"]


def test_a_layer_with_two_numbers_in_its_name_has_the_heads_of_all():
    engine = SimpleNamespace(model_config=model_of(strange(num_key_value_heads=2), 2), speculative_config=None)
    assert head_counts(engine, ["model.layers.0.self_attn.1.attn"]) == {"model.layers.0.self_attn.1.attn": 2}


def asked(monkeypatch, *, packed=False, use_mla=False, is_hybrid=False, major=9):
    capability = SimpleNamespace(major=major) if major else None
    platform = SimpleNamespace(get_device_capability=lambda: capability)
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    model = SimpleNamespace(use_mla=use_mla, is_hybrid=is_hybrid)
    return required_layout(SimpleNamespace(model_config=model), packed=packed)


def test_a_layout_with_heads_outside_tokens_is_asked_for(monkeypatch):
    assert asked(monkeypatch) == asked(monkeypatch, is_hybrid=True) == "LBHNC"


def test_no_layout_is_asked_for_latents_or_without_a_model(monkeypatch):
    assert asked(monkeypatch, use_mla=True) is None
    assert required_layout(SimpleNamespace(model_config=None), packed=False) is None


@looped(
    "engine, layout",
    [
        ({}, "BHLNC"),
        ({"major": 0}, "BHLNC"),
        ({"major": 10}, "BLHNC"),
        ({"major": 12}, "BLHNC"),
        ({"is_hybrid": True}, "BLHNC"),
        ({"use_mla": True}, "BLHNC"),
    ],
    ids=["Hopper", "no capability", "Blackwell", "consumer Blackwell", "hybrid", "latents"],
)
def test_a_packed_layout_is_one_that_backends_support(monkeypatch, engine, layout):
    assert asked(monkeypatch, packed=True, **engine) == layout


@looped(
    "backend, shutdown_timeout, seconds",
    [("uni", 0, 0.0), ("uni", 3, 3.0), ("uni", 60, 10.0), ("uni", None, 0.0), ("mp", 60, 4.0), ("mp", 3, 3.0)],
)
def test_a_rank_that_shuts_down_is_read_while_vllm_lets_it(monkeypatch, backend, shutdown_timeout, seconds):
    monkeypatch.setitem(
        sys.modules, "vllm", SimpleNamespace(envs=SimpleNamespace(VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS=5))
    )
    engine = SimpleNamespace(parallel_config=SimpleNamespace(distributed_executor_backend=backend))
    if shutdown_timeout is not None:  # older releases have none
        engine.shutdown_timeout = shutdown_timeout
    assert drain_time(engine, 10.0) == seconds


@pytest.fixture
def on_gpu(monkeypatch):
    """Returns a call of the check as on a GPU, or on a CPU."""

    def check(*, cpu=False, **model):
        platform = SimpleNamespace(current_platform=SimpleNamespace(is_cpu=lambda: cpu))
        monkeypatch.setitem(sys.modules, "vllm.platforms", platform)
        require_fixed_pages(SimpleNamespace(model_config=SimpleNamespace(**model)))

    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    return check


@pytest.mark.parametrize("value", ["expandable_segments:True", "max_split_size_mb:64, expandable_segments: true"])
@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_expandable_segments_are_refused_by_every_name(monkeypatch, on_gpu, name, value):
    on_gpu()
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigInvalid, match=name):
        on_gpu()
    on_gpu(cpu=True)
    on_gpu(enable_sleep_mode=True)  # vLLM has a pool of its own for the cache then
    on_gpu(enable_cumem_allocator=True)
    with pytest.raises(ConfigInvalid, match="expandable_segments"):
        on_gpu(enable_sleep_mode=False, enable_cumem_allocator=False)


def test_segments_that_are_not_expandable_are_not_refused(monkeypatch, on_gpu):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False,max_split_size_mb:64")
    on_gpu()


@pytest.fixture
def buffered(monkeypatch):
    """Returns a call of the check with a ``kv_buffer_device`` and the device of the cache."""

    def check(wanted, has):
        platform = SimpleNamespace(current_platform=SimpleNamespace(device_type=has))
        monkeypatch.setitem(sys.modules, "vllm.platforms", platform)
        require_own_device(SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_buffer_device=wanted)))

    return check


@looped("device", ["cpu", "cuda", "xpu"])
def test_a_cache_may_be_named_as_its_own_buffer(buffered, device):
    buffered(device, device)


@pytest.mark.proves("host staging (`kv_buffer_device`)", engine="stand-in")
@looped("wanted, has", [("cpu", "cuda"), ("cpu", "xpu"), ("cuda", "cpu"), ("xpu", "cuda")])
def test_a_buffer_on_another_device_is_refused_by_name(buffered, wanted, has):
    with pytest.raises(ConfigInvalid, match=f"kv_buffer_device is {wanted}, but the cache is on {has}") as refused:
        buffered(wanted, has)
    assert refused.value.code == "config_invalid"
    assert refused.value.remedy.startswith("Leave kv_buffer_device out.")
    assert "TCP plane" in refused.value.remedy


@pytest.fixture
def tiles(monkeypatch, tmp_path, caplog):
    """Returns a call as on a host with AMX or without; it returns what Linux was asked, and what is in the log."""

    def ask(*, cpu=True, flags="fpu amx_bf16 amx_tile amx_int8", error=0):
        asked = []
        platform = SimpleNamespace(is_cpu=lambda: cpu)
        monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
        monkeypatch.setattr(engine, "CPU_FLAGS", tmp_path / "cpuinfo")

        def syscall(*arguments):
            asked.append(arguments)
            ctypes.set_errno(error)
            return -1 if error else 0

        monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno: SimpleNamespace(syscall=syscall))
        caplog.clear()
        with caplog.at_level("DEBUG", logger="vllm.kvflow"):
            allow_tiles()
        return asked, [(record.levelname, record.getMessage()) for record in caplog.records]

    return ask


def test_an_engine_on_a_cpu_with_amx_asks_linux_for_it(tiles):
    for _ in range(2):  # each process asks for itself, and may ask again
        assert tiles() == ([(158, 0x1023, 18)], [("DEBUG", "kvflow: this process may use AMX")])


def test_an_engine_without_amx_or_on_a_gpu_does_not_ask_for_it(tiles):
    assert tiles(flags="fpu avx512f avx512_bf16 amx_tile_like") == ([], [])
    assert tiles(flags="") == ([], [])
    assert tiles(cpu=False) == ([], [])


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSPC, errno.EPERM])
def test_an_engine_that_linux_keeps_off_amx_says_how_it_may_end(tiles, error):
    asked, [(level, message)] = tiles(error=error)
    assert (len(asked), level) == (1, "WARNING")
    assert f"Linux does not let this process use AMX ({os.strerror(error)})" in message
    assert "SIGILL" in message
    assert "--dtype float32" in message


def test_linux_answers_who_asks_for_what_the_cpu_has_not():
    has = "amx_tile" in Path("/proc/cpuinfo").read_text().split()
    assert (engine._request_feature(18) == 0) is has
    assert engine._request_feature(63) != 0
