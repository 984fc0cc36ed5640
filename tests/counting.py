"""How much a call does, counted and not timed: a busy machine changes no count."""

import gc
import sys


def calls_of(function):
    """Return how many functions a call calls, and how often it resumes generators."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    collects = gc.isenabled()
    gc.disable()  # a collection calls what others have left to it
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()
    return count
