"""What the connector writes into vLLM's log."""

from kvflow.errors import ConfigInvalid
from kvflow.integrations.vllm.logs import logger, warn

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
