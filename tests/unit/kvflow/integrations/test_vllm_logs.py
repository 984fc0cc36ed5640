"""What the connector writes into vLLM's log."""

import io
import logging

from kvflow.errors import ConfigInvalid
from kvflow.integrations.vllm.logs import logger, share_handlers, warn

HOSTILE = "\x1b[2J\nERROR forged " + "x" * 100_000


def test_texts_of_others_are_escaped_and_cut_wherever_they_are_logged(caplog):
    caplog.set_level("INFO", "vllm.kvflow")
    logger.info("kvflow: request %s has %d tokens and %s", HOSTILE, 7, "\x1b" * 300)
    warn("request %s is refused", HOSTILE, error=ConfigInvalid("no"))
    for record in caplog.records:
        text = record.getMessage()
        assert text.isprintable()
        assert "x" * 100 in text
        assert len(text) < 700
    assert "...xxx" in caplog.text


def test_a_traceback_has_no_line_that_others_have_written(caplog):
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logger.exception("kvflow: it failed")
    _, *lines = caplog.text.splitlines()
    assert all(line.startswith("  ") and line.isprintable() and len(line) <= 300 for line in lines)
    assert any("raise ValueError(HOSTILE)" in line for line in lines)
    assert any("ValueError: " in line and "[2J" in line for line in lines)


def vllm_log(monkeypatch):
    """Return what vLLM's own handler writes from now on, as if nobody else had set up logging."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(message)s"))
    for name, handlers in {"": [], "kvflow": [], "handshake": [], "vllm": [handler]}.items():
        monkeypatch.setattr(logging.getLogger(name), "handlers", handlers)
    return written


def test_lines_of_kvflow_have_a_level_and_a_time_in_vllms_log(monkeypatch):
    written = vllm_log(monkeypatch)  # in the test itself: pytest has a handler for each of its phases
    share_handlers()
    for name in ("kvflow.consumer", "handshake"):
        logging.getLogger(name).warning("%s warns", name)
    [first, second] = written.getvalue().splitlines()
    assert first.startswith("WARNING 20")
    assert first.endswith(" kvflow.consumer warns")
    assert second.endswith(" handshake warns")


def test_loggers_that_have_a_handler_keep_it(monkeypatch):
    vllm_log(monkeypatch)
    own = logging.NullHandler()
    logging.getLogger("kvflow").handlers.append(own)
    share_handlers()
    assert logging.getLogger("kvflow").handlers == [own]
