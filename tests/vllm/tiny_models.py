"""Make small models with random weights, which vLLM runs as it runs the large ones of their families.

The weights are drawn again, wider than a library initializes them: with the usual ones a model repeats one token, and
every comparison of tokens would succeed. The seed is fixed, so that a model is the same wherever it is made::

    python -m tests.vllm.tiny_models out/vllm llama gptoss
"""

import hashlib
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

SEED = 20
VOCABULARY = 1024
CONTEXT = 1024
"""Tokens, of prompt and output together."""
CHAT_CONTEXT = 4 * CONTEXT
"""Likewise, of models for chats of several turns."""
WINDOW = 64
"""Tokens of a sliding window: less than a block of 128, so that blocks fall out of it."""
CHAT_WINDOW = 128
"""Likewise, of models for chats: as gpt-oss has it."""
GAIN = 1.5
"""Weights have this standard deviation, divided by the root of the number of inputs."""

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def _gptoss(context: int, window: int) -> dict[str, Any]:
    return EXPERTS | {
        "num_hidden_layers": 4,
        "head_dim": 64,
        "intermediate_size": 256,
        "max_position_embeddings": context,
        "sliding_window": window,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": context // 2,
        },
    }


CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 4, "head_dim": 64, "intermediate_size": 512}),
    "llama-one-head": (
        "llama",
        {"num_hidden_layers": 4, "head_dim": 64, "intermediate_size": 512, "num_key_value_heads": 1},
    ),
    "llama-chat": (
        "llama",
        {
            "num_hidden_layers": 4,
            "head_dim": 64,
            "intermediate_size": 512,
            "max_position_embeddings": CHAT_CONTEXT,
        },
    ),
    "llama-drafted": ("llama", {"num_hidden_layers": 4, "head_dim": 64, "intermediate_size": 512}),
    # 64 KiB for each token, as a model of eight billion weights has them, so that to read a prompt takes its time.
    "wide": (
        "llama",
        {
            "num_hidden_layers": 16,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 512,
            "max_position_embeddings": CHAT_CONTEXT,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "num_hidden_layers": 6,
            "head_dim": 64,
            "intermediate_size": 512,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "query_pre_attn_scalar": 64,
        },
    ),
    "gptoss": ("gpt_oss", _gptoss(CONTEXT, WINDOW)),
    "gptoss-chat": ("gpt_oss", _gptoss(CHAT_CONTEXT, CHAT_WINDOW)),
    "granite": (
        "granitemoehybrid",
        {
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "mamba", "mamba", "attention"],
            "intermediate_size": 256,
            "shared_intermediate_size": 256,
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_d_state": 64,
            "mamba_n_groups": 1,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
        }
        | EXPERTS,
    ),
    "qwen3next": (
        "qwen3_next",
        {
            "num_hidden_layers": 4,
            "head_dim": 64,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            "intermediate_size": 256,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        },
    ),
    "lfm2": (  # kvflow.models does not know its states
        "lfm2",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "conv", "conv", "full_attention"],
            "intermediate_size": 256,
            "block_dim": 256,
            "conv_dim": 256,
            "block_auto_adjust_ff_dim": False,
        },
    ),
}
"""Name -> transformers' type of model, and its fields."""

EMBEDDING_DEVIATION = {"gemma3": 0.004}
"""Deviation of embeddings that are also the output's weights and are scaled on the way in."""

DRAFT = "draft"
"""Folder of the EAGLE head, in that of ``llama-drafted``."""
REST = 0.06
"""What the layers behind the first of ``llama-drafted`` add to it, as a share of what they would add."""


CHAT_TEMPLATE = """{% for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""


def folder_of(name: str, parent: Path) -> Path:
    """Return where a model is kept: another folder whenever this file changes."""
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]
    return parent / f"{name}-{digest}"


def redraw(name: str, model: Any) -> None:
    """Draw every matrix again."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            continue
        deviation = GAIN / math.sqrt(parameter.shape[-1])
        if "embed_tokens" in parameter_name:
            deviation = EMBEDDING_DEVIATION.get(name, deviation)
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * deviation)


def save_draft(model: Any, folder: Path) -> None:
    """Weaken all layers of a model but the first, and save an EAGLE head of one layer that does what this one does.

    So most drafts are accepted, but not all; and few without the keys and values of the prompt, which the layer needs.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    first, *others = model.model.layers
    for layer in others:
        layer.self_attn.o_proj.weight.data *= REST
        layer.mlp.down_proj.weight.data *= REST
    width = model.config.hidden_size
    # The head takes a token's embedding beside the hidden state before it, and has no norm before its attention.
    weights = {f"layers.0.{name}": value.detach().clone() for name, value in first.state_dict().items()}
    del weights["layers.0.input_layernorm.weight"]
    scale = 1 / model.model.embed_tokens.weight.std()
    for name in "qkv":
        weights[f"layers.0.self_attn.{name}_proj.weight"] *= scale
    weights["fc.weight"] = torch.cat([torch.eye(width), torch.zeros(width, width)], dim=1)
    config = LlamaConfig(**model.config.to_dict() | {"num_hidden_layers": 1})
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    save_file(
        {name: value.to(torch.bfloat16).contiguous() for name, value in weights.items()}, folder / "model.safetensors"
    )


def save_tokenizer(folder: str) -> None:
    """Save a tokenizer of as many tokens as the models know, none of them special, for servers that speak text.

    Tokens are bytes, and what this file says often: any text is a prompt, and any tokens are a text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    assert tokenizer.get_vocab_size() == VOCABULARY
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE).save_pretrained(folder)


def make(name: str, parent: Path) -> Path:
    """Make a model unless it is there, and return its folder.

    The folder appears complete or not at all.
    """
    folder = folder_of(name, parent)
    if folder.exists():
        return folder
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, fields = CONFIGS[name]
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **COMMON | fields))
    redraw(name, model)
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, ignore_cleanup_errors=True) as scratch:
        if name == "llama-drafted":
            save_draft(model, Path(scratch) / DRAFT)
        model.to(torch.bfloat16).save_pretrained(scratch)
        save_tokenizer(scratch)
        Path(scratch).rename(folder)
    return folder


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    parent, *names = sys.argv[1:]
    for name in names or CONFIGS:
        sys.stdout.write(f"{make(name, Path(parent))}\n")


if __name__ == "__main__":
    main()
