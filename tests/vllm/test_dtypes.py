"""What vLLM's own layers say of their caches, read as kvflow's element types."""

import warnings
from types import SimpleNamespace
from typing import get_args

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of vLLM's imports
    import torch
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.config.cache import CacheDType
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, get_kv_quant_mode

from kvflow.errors import SpecInvalid
from kvflow.integrations.vllm.caches import EngineShape, byte_format, read_spec, set_scales
from kvflow.integrations.vllm.engine import element_types

from .pairs import model_folder

pytestmark = pytest.mark.filterwarnings("ignore")

LAYER = "model.layers.{}.self_attn.attn"
REFUSED = {name for name in get_args(CacheDType) if name.startswith(("turboquant", "ultraquant", "int", "nvfp4"))} - {
    "nvfp4_ds_mla"
}
"""Those that cannot be described: they are refused by the name of their mode, not by that of their bytes."""


def config_of(cache_dtype, skipped=()):
    model = ModelConfig(model=str(model_folder("llama")), skip_tokenizer_init=True, dtype="bfloat16")
    cache = CacheConfig(block_size=32, cache_dtype=cache_dtype, kv_cache_dtype_skip_layers=list(skipped))
    return VllmConfig(model_config=model, cache_config=cache, device_config=DeviceConfig("cpu"))


def read(config, count=1):
    """Return the element types of layers that vLLM makes."""
    names = [LAYER.format(index) for index in range(count)]
    with set_current_vllm_config(config):
        layers = [Attention(4, 64, 0.125, 2, cache_config=config.cache_config, prefix=name) for name in names]
        specs = [layer.get_kv_cache_spec(config) for layer in layers]
    shape = EngineShape(element_types=element_types(config, names))
    return [read_spec(name, spec, shape).dtype for name, spec in zip(names, specs, strict=True)]


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        ("auto", "bfloat16"),
        ("fp8", "float8_e4m3fn"),
        ("fp8_e4m3", "float8_e4m3fn"),
        ("fp8_e5m2", "float8_e5m2"),
    ],
)
def test_a_layer_is_of_the_type_that_its_engine_was_told(told, kept):
    assert read(config_of(told)) == [kept]


def test_a_layer_left_out_of_the_quantization_keeps_the_models_dtype():
    assert read(config_of("fp8_e5m2", skipped=["1"]), 2) == ["float8_e5m2", "bfloat16"]


def test_fp8_is_the_platforms(monkeypatch):
    # As vLLM's ROCm platform answers on gfx94x; that platform cannot be imported without its driver.
    monkeypatch.setattr(type(current_platform), "fp8_dtype", classmethod(lambda _: torch.float8_e4m3fnuz))
    assert read(config_of("fp8")) == ["float8_e4m3fnuz"]


def test_keys_of_an_indexer_are_fp8_whatever_the_others_are():
    config = config_of("auto")
    name = "model.layers.0.self_attn.indexer.k_cache"
    with set_current_vllm_config(config):
        layer = DeepseekV32IndexerCache(132, STR_DTYPE_TO_TORCH_DTYPE["fp8"], name, config.cache_config)
    shape = EngineShape(element_types=element_types(config, [name]))
    assert read_spec(name, layer.get_kv_cache_spec(config), shape).dtype == "float8_e4m3fn"


@pytest.mark.parametrize("told", get_args(CacheDType))
def test_every_type_that_vllm_knows_is_named_or_refused(told):
    stored = STR_DTYPE_TO_TORCH_DTYPE.get(told, STR_DTYPE_TO_TORCH_DTYPE["bfloat16"])
    shape = EngineShape(element_types={"layer": byte_format(told, platform_fp8="float8_e4m3fn")})
    fields = {"block_size": 32, "dtype": stored, "kv_quant_mode": get_kv_quant_mode(told), "head_size": 64}
    if told.endswith("_ds_mla"):
        content = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}[told]
        spec = MLAAttentionSpec(**fields, num_kv_heads=1, cache_dtype_str=told, state_content_bytes=content)
    else:
        # As Triton's backend has it, the only one with scales beside the heads.
        scales = {"state_content_bytes": 136} if told == "fp8_per_token_head" else {}
        spec = FullAttentionSpec(**fields, num_kv_heads=2, **scales)
    if told in REFUSED:
        with pytest.raises(SpecInvalid, match=get_kv_quant_mode(told).name):
            read_spec("layer", spec, shape)
    else:
        found = read_spec("layer", spec, shape)
        assert found.dtype != "uint8" or told == "nvfp4_ds_mla"


@pytest.mark.parametrize("in_time", [True, False])
@pytest.mark.parametrize("told", ["fp8_per_token_head", "int8_per_token_head", "int4_per_token_head"])
def test_scales_that_have_arrived_are_not_set_again_when_the_layer_runs(told, in_time):
    content = 2 * (64 // (2 if told.startswith("int4") else 1) + 4)
    cache = torch.zeros(3, 2, 16, content, dtype=torch.uint8)
    module = SimpleNamespace(impl=TritonAttentionImpl(4, 64, 0.125, 2, None, None, told))
    if in_time:
        set_scales({"layer": cache, "another": cache}, {"layer": module, "another": SimpleNamespace()})
        assert cache.any(), "it sets nothing: this proves nothing"
    cache.fill_(7)  # a transfer
    module.impl._pth_key_value_caches(cache)
    assert (cache == 7).all() == in_time, "vLLM does it elsewhere by now: set_scales can go" if not in_time else ""
