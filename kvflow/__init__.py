"""kvflow moves the KV cache of a large language model from prefill workers to decode workers.

``__init__.pyi`` lists the public names, for type checkers and for this module; everything else may change between
releases. Each name is loaded on first use, so that importing kvflow loads neither torch nor NIXL.
"""

import sys
from importlib import import_module

_STUB = __spec__.loader.get_data(f"{__path__[0]}/__init__.pyi").decode()
_LINES = [line.split() for line in _STUB.splitlines() if line.startswith("from ")]

_HOMES = {name: home for _, home, _, name, *_ in _LINES}
"""Public name -> the module that defines it; ``kvflow`` for a module that is public itself."""

__all__ = sorted(_HOMES)  # noqa: PLE0605  # type checkers read the stub


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kvflow' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    value = import_module(f"kvflow.{name}") if home == "kvflow" else getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
