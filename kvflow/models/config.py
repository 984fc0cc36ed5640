"""The keys of one ``config.json``, read so that a missing or odd one is named with its purpose."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct

from kvflow.errors import SpecInvalid
from kvflow.layout.specs import DType, Positive

FILE_NAME = "config.json"

DTYPE_KEYS = ("dtype", "torch_dtype")
"""The element type of a model: the newer name first."""

DTYPE_ASSUMED = "bfloat16"
"""Where the config names none: what engines load such weights as on today's accelerators."""

STATE_DTYPE_KEYS = ("mamba_ssm_dtype", "mamba_ssm_cache_dtype")

STATE_DTYPE_ASSUMED = "float32"
"""Of a recurrent state, where the config names none: it accumulates over the whole prompt."""


class Options(Struct, frozen=True):
    """What a family needs to know beside its own keys.

    Attributes:
        block_size: tokens in one block.
        dtype: of the model, and of convolution states.
        cache_dtype: of keys, values and latents.
        state_dtype: of recurrent states.
    """

    block_size: Positive
    dtype: DType
    cache_dtype: DType
    state_dtype: DType


Entry = TypeVar("Entry", str, int)

LAYERS_MAX = 4096
"""Layers of one model; far above any, so that a broken config does not fill the memory."""


class ModelConfig:
    """The text model's part of a config.

    Attributes:
        keys: as in the file; those of a nested ``text_config`` before the outer ones.
        model_type: of the text model.
        prefix: of its layer names, with a dot at the end; empty unless the text model is nested.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        nested = config.get("text_config")
        if isinstance(nested, Mapping):
            # The vision tower is no cache; what the text model leaves out (its dtype, often) stands outside.
            inner = {key: value for key, value in nested.items() if value is not None}
            self.keys: Mapping[str, Any] = {**config, **inner}
            self.prefix = "language_model."
        else:
            self.keys = config
            self.prefix = ""
        found = self.keys.get("model_type")
        if found is not None and not isinstance(found, str):
            raise SpecInvalid(f"config: model_type is {found!r}, not a string")
        self.model_type: str = found or ""

    def layer_name(self, index: int, suffix: str) -> str:
        """Return the name of one layer's cache, as vLLM registers it."""
        return f"{self.prefix}model.layers.{index}.{suffix}"

    def num_layers(self, key: str = "num_hidden_layers") -> int:
        """Return the number of layers.

        Raises:
            SpecInvalid: it is missing, or beyond reason.
        """
        count = self.whole(key, "number of layers")
        if count > LAYERS_MAX:
            raise self.odd(key, count, f"at most {LAYERS_MAX}")
        return count

    def whole(self, key: str, purpose: str, default: int | None = None) -> int:
        """Return a whole number of 1 or more.

        Raises:
            SpecInvalid: it is missing without a default, or not such a number.
        """
        value = self.optional(key)
        if value is not None:
            return value
        if default is None:
            raise SpecInvalid(
                f"config of model type {self.model_type!r} has no {key!r}: {purpose}",
                remedy="Give the config.json that belongs to the model's weights.",
            )
        return default

    def optional(self, key: str) -> int | None:
        """Return a whole number of 1 or more, or None if the key is missing or null.

        Raises:
            SpecInvalid: it is something else.
        """
        value = self.keys.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.odd(key, value, "a whole number of 1 or more")
        return value

    def sequence(self, key: str, num_layers: int, kind: type[Entry]) -> list[Entry] | None:
        """Return a list with one entry of ``kind`` per layer, or None if the key is missing, null or empty.

        Entries past the last layer belong to draft heads and are left out.

        Raises:
            SpecInvalid: it is no such list, or too short.
        """
        value = self.keys.get(key)
        if value is None or value == []:
            return None
        if not isinstance(value, list) or not all(isinstance(entry, kind) for entry in value):
            raise self.odd(key, value, f"a list of {kind.__name__}, one per layer")
        if len(value) < num_layers:
            raise self.odd(key, value, f"{num_layers} entries, one per layer, not {len(value)}")
        return value[:num_layers]

    def dtype(self) -> str:
        """Return the model's element type, as torch names it."""
        return self._first(DTYPE_KEYS) or DTYPE_ASSUMED

    def state_dtype(self) -> str:
        """Return the element type of recurrent states."""
        return self._first(STATE_DTYPE_KEYS) or STATE_DTYPE_ASSUMED

    def _first(self, names: Sequence[str]) -> str:
        """Return the first of these keys that is there, without torch's prefix; empty if none is."""
        found = next((self.keys[key] for key in names if self.keys.get(key) is not None), "")
        if not isinstance(found, str):
            raise self.odd(names[0], found, "the name of a dtype")
        return found.removeprefix("torch.")

    def odd(self, key: str, found: object, expected: str) -> SpecInvalid:
        """Return the error for a key with an unusable value, which may come from anyone and be of any length."""
        return SpecInvalid(
            f"config of model type {self.model_type!r}: {key} is {repr(found)[:80]}, expected {expected}"
        )


def read_config(config: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """Return the config of a mapping, a file, or the folder of a model.

    Raises:
        SpecInvalid: the file cannot be read, or holds no JSON object.
    """
    if isinstance(config, Mapping):
        return config
    path = Path(config)
    if path.is_dir():
        path /= FILE_NAME
    try:
        decoded = json.loads(path.read_bytes())
    except OSError as error:
        raise SpecInvalid(
            f"{path} cannot be read: {error.strerror or error}", remedy="Give a model's folder or its config.json."
        ) from error
    except ValueError as error:
        raise SpecInvalid(f"{path} is not JSON: {error}") from error
    if not isinstance(decoded, dict):
        raise SpecInvalid(f"{path} holds a JSON {type(decoded).__name__}, expected an object")
    return decoded
