"""The logger of the connector: messages in vLLM's own log, with texts of others escaped and cut."""

import logging
from traceback import format_exception

from kvflow.errors import escaped
from kvflow.observability.logs import Repeats

logger = logging.getLogger("vllm.kvflow")  # vLLM shows the records of loggers below its own name
_repeats = Repeats()

TEXT_MAX = 256  # characters of each text in a message
LINES_MAX = 100  # last lines of a traceback


def _clean(record: logging.LogRecord) -> bool:
    """Escape and cut what a message says of others, and its traceback: routers and clients choose names of requests."""
    if isinstance(record.args, tuple):
        record.args = tuple(map(_short, record.args))
    record.msg, record.args = escaped(record.getMessage()), ()
    if record.exc_info and record.exc_info[1]:
        lines = "".join(format_exception(record.exc_info[1])).splitlines()[-LINES_MAX:]
        record.exc_text = "\n".join([f"  {_short(line)}" for line in lines])  # so that none begins as a record
    return True


def _short(value: object) -> object:
    """Return a text escaped, without its middle if it is long; anything else as it is."""
    for _ in range(2):  # an escaped text may be longer
        if isinstance(value, str):
            value = escaped(value if len(value) <= TEXT_MAX else f"{value[:125]}...{value[-125:]}")
    return value


logger.addFilter(_clean)


def share_handlers() -> None:
    """Have vLLM's handlers write the warnings of kvflow's own loggers, if nobody else does: with time and process."""
    for name in ("kvflow", "handshake"):
        own = logging.getLogger(name)
        if not own.hasHandlers():  # Python's last resort would write the text alone
            own.handlers[:] = logging.getLogger("vllm").handlers


def warn(text: str, *args: object, error: Exception) -> None:
    """Warn of a request that has failed; at INFO if another has failed likewise a moment ago."""
    level, repeats = _repeats.level_of(text, getattr(error, "code", type(error)), getattr(error, "peer", ""))
    more = f" ({repeats['repeats']} more like this since the last message)" if repeats else ""
    text = f"kvflow: {text}: %s%s"
    logger.log(level, text, *args, error, more)
