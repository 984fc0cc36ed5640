"""The demo's own records, beside those of its workers: JSON lines in the same file."""

import logging

import structlog


def demo_logger() -> structlog.stdlib.BoundLogger:
    """Return a logger whose records ``configure_logging`` writes down, with their fields."""
    logger: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger("kvflow.demo"),
        wrapper_class=structlog.stdlib.BoundLogger,
        processors=[
            structlog.stdlib.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
    )
    return logger
