"""Two threads in every order: a call is interrupted at each of its bytecodes, as the interpreter may switch threads."""

import sys
from collections.abc import Callable, Iterator
from itertools import count
from types import FrameType


def every_preemption() -> Iterator["Preemption"]:
    """Yield one preemption after the other, each a bytecode later, until a call has ended before its turn."""
    for moment in count():
        preemption = Preemption(moment)
        yield preemption
        assert preemption.called, "each preemption interrupts one call"
        if not preemption.happened:
            assert moment > 5, "the code that is interrupted was not found"
            return


class Preemption:
    """A switch of threads at one moment.

    Attributes:
        called: whether a call was made.
        happened: whether it had not ended before.

    Args:
        moment: number of the bytecode, of those in the interrupted source file, before which it happens.
    """

    def __init__(self, moment: int) -> None:
        self.called = False
        self.happened = False
        self._moment = moment
        self._seen = 0

    def interrupt(self, call: Callable[[], object], other: Callable[[], object], *, within: str) -> None:
        """Make a call, and in the middle of it the other one, in the other thread's place.

        Args:
            call: what is interrupted.
            other: what is run meanwhile.
            within: source file whose bytecodes count; the other call is made between two of them.
        """

        def trace(frame: FrameType, event: str, argument: object) -> object:
            if frame.f_code.co_filename != within:
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            sys.settrace(trace)  # Python 3.12 reports bytecodes only if a frame wants them when this is called
            return step

        def step(frame: FrameType, event: str, argument: object) -> object:
            if event == "opcode":
                self._seen += 1
                if self._seen > self._moment and not self.happened:
                    self.happened = True
                    other()
            return step

        self.called = True
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            call()
        finally:
            sys.settrace(before)
