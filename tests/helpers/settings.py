"""Make configurations from settings by name at one level."""

from kvflow.config import Tuning, WorkerConfig


def flat_config(**settings):
    """Return the configuration with these settings, unchecked and unconverted."""
    tuned = {name: settings.pop(name) for name in Tuning.__struct_fields__ if name in settings}
    return WorkerConfig(**settings, tuning=Tuning(**tuned))
