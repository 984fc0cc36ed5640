"""Configs that come with kvflow: only the keys that decide what the cache is."""

from importlib import resources
from importlib.resources.abc import Traversable

import msgspec

from kvflow.errors import SpecInvalid
from kvflow.layout.specs import CacheSpec
from kvflow.models.families import from_hf_config

SUFFIX = ".json"


def names() -> tuple[str, ...]:
    """Return the names of the bundled models, sorted."""
    return tuple(
        sorted(entry.name.removesuffix(SUFFIX) for entry in _folder().iterdir() if entry.name.endswith(SUFFIX))
    )


def load(
    name: str,
    *,
    block_size: int | None = None,
    dtype: str | None = None,
    cache_dtype: str | None = None,
    state_dtype: str | None = None,
) -> dict[str, CacheSpec]:
    """Describe the cache of a bundled model; the options are those of ``from_hf_config``.

    Raises:
        SpecInvalid: there is no such model.
    """
    if name not in names():
        raise SpecInvalid(f"no model {name!r} is bundled", remedy=f"Use one of {', '.join(names())}.")
    config = msgspec.json.decode((_folder() / f"{name}{SUFFIX}").read_bytes())
    return from_hf_config(config, block_size=block_size, dtype=dtype, cache_dtype=cache_dtype, state_dtype=state_dtype)


def _folder() -> Traversable:
    return resources.files("kvflow.models") / "configs"
