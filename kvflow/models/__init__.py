"""Cache specs of known models: from a Hugging Face ``config.json``, or by the name of a bundled one."""

from kvflow.models.families import (
    GuessWarning,
    align_states,
    by_layer,
    from_hf_config,
    kv_heads,
    layer_number,
    load,
    names,
)
from kvflow.models.recurrent import whole_states

__all__ = [
    "GuessWarning",
    "align_states",
    "by_layer",
    "from_hf_config",
    "kv_heads",
    "layer_number",
    "load",
    "names",
    "whole_states",
]
