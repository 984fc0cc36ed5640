"""Cache specs of known models: from a Hugging Face ``config.json``, or by the name of a bundled one."""

from kvflow.models.families import GuessWarning, align_states, from_hf_config, load, names

__all__ = ["GuessWarning", "align_states", "from_hf_config", "load", "names"]
