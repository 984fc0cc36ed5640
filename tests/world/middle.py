"""What happens to a reader in the middle of a large pull.

That is when some of its target blocks hold bytes of the producer and others do not. A thread of the reader watches one
word of some of these blocks, and does there and then what is to happen: no line has to cross a pipe first. This needs
nothing of the data plane, so it is the same for all of them.
"""

import os
import signal
import time
from contextlib import suppress

from tests.stopping import stop_process

WATCHED = 64
WATCH_S = 0.0005


def act(words, pull, producer, happens):
    """Wait for the middle, and act; tell whether it still was the middle then. Thread: one of its own.

    Args:
        words: tensors of one word each, which share the memory that is read into.
        pull: its task.
        producer: process that is stopped then; 0 for none.
        happens: ``killed`` or ``hangs``: to this process; ``closes`` or ``cut``: nothing yet.
    """
    before = [int(word) for word in words]

    def is_middle():
        changed = sum(int(word) != then for word, then in zip(words, before, strict=True))
        return 0 < changed < len(words) and not pull.done()

    while not is_middle():
        if pull.done():
            return False
        time.sleep(WATCH_S)
    if producer:
        with suppress(ProcessLookupError):  # that it has died is seen by its parent
            stop_process(producer)
    if not is_middle():
        return False
    if happens in ("killed", "hangs"):
        os.kill(os.getpid(), signal.SIGKILL if happens == "killed" else signal.SIGSTOP)
    return True
