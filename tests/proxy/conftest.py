"""The log of a proxy is read as those of workers are."""

from tests.unit.kvflow.tools.conftest import log

__all__ = ["log"]
