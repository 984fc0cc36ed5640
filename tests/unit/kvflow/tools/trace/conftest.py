"""Logs of real workers, as files."""

import logging

import pytest

from kvflow.observability.logs import configure_logging


@pytest.fixture
def log(tmp_path):
    """A file that takes every record of this process; it puts the loggers back afterward."""
    loggers = [logging.getLogger(name) for name in ("kvflow", "handshake")]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    path = tmp_path / "workers.jsonl"
    configure_logging(path, level=logging.DEBUG)
    (handler,) = loggers[0].handlers
    yield path
    handler.close()
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.level, logger.propagate = handlers, level, propagate
        logger.setLevel(level)
