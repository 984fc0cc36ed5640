"""Cache specs of known models: from a Hugging Face ``config.json``, or by the name of a bundled one."""

from kvflow.models.alignment import align_states
from kvflow.models.bundled import load, names
from kvflow.models.families import GuessWarning, from_hf_config

__all__ = ["GuessWarning", "align_states", "from_hf_config", "load", "names"]
