"""Who says what about a misconfiguration: errors, records of the log, and commands, each with a code and a remedy."""

import json
import logging
import re
from typing import NamedTuple

from kvflow.errors import KvflowError
from kvflow.observability.logs import EventRecord


class Said(NamedTuple):
    """One thing that was said.

    Attributes:
        who: ``error``, the name of a record, or a command.
        code: stable name of what is wrong.
        message: what is wrong here.
        remedy: what to do about it.
    """

    who: str
    code: str
    message: str
    remedy: str


class Sayings(logging.Handler):
    """Collects what is said while it is entered: the warnings of kvflow's log, and errors that are added."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.said = []

    def __enter__(self):
        logging.getLogger("kvflow").addHandler(self)
        return self

    def __exit__(self, *_):
        logging.getLogger("kvflow").removeHandler(self)

    def emit(self, record):
        """Take the record of an event as a line of the log shows it."""
        if isinstance(record.msg, EventRecord):
            fields = record.msg
            remedy = re.search(r' remedy=("(?:[^"\\]|\\.)*")', str(fields))
            code = fields.get("code") or fields.get("outcome", "")
            message = fields.get("detail") or f"outcome={fields.get('outcome')}"
            self.said.append(Said(fields["event"], str(code), message, json.loads(remedy[1]) if remedy else ""))

    def add_error(self, error):
        """Take an error that was raised."""
        assert isinstance(error, KvflowError), repr(error)
        self.said.append(Said("error", str(error.code), error.message, error.remedy))
