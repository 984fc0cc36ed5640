"""One connection of a reader to an exporter: it opens, sends requests, and receives each answer into the target.

It never blocks and has no thread. Its owner calls it when its descriptor is ready, and closes it when it raises.
"""

import select
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvflow.errors import FailureCode
from kvflow.leases.tickets import LeaseName
from kvflow.reads.backend import BackendError, Share
from kvflow.reads.tcp import wire
from kvflow.reads.tcp.opening import Opening
from kvflow.reads.tcp.stream import ByteRows, Stream, rows_of

_AT_ONCE_BYTES = 1 << 20
"""Bytes that are worth a wake-up while more will come: 0.3 ms of copying."""

_PORTION_BYTES = 8 << 20
"""Bytes that are received from one connection before other connections are served."""

_AWAITED_BYTES_MIN = 256 << 10
_SAID_MAX = 64 << 10


READS_MAX = 1 << 17
"""How many reads' slot values are kept until their fence. Only those of reads that end without a fence stay longer."""


class ToldEpochs:
    """Values of epoch slots that came with the chunks of reads, so that a fence needs no request."""

    def __init__(self) -> None:
        self._values: OrderedDict[int, int] = OrderedDict()

    def note(self, share: Share, value: int) -> None:
        """Record the value of a slot after a chunk was read. For several chunks of one read, keep the worst."""
        epoch = share.lease.epoch
        before = self._values.get(share.read_id, epoch)
        worst = max(before, value)
        self._values[share.read_id] = worst if worst > epoch else min(before, value)
        if len(self._values) > READS_MAX:
            self._values.popitem(last=False)

    def verdicts(self, first: int, last: int, reads: Sequence[tuple[int, LeaseName]]) -> list[int]:
        """Return and forget the reported values of slots ``first`` to ``last``, for reads whose fence is due."""
        values = [0] * (last - first + 1)
        for read_id, lease in reads:
            value = self._values.pop(read_id, None)
            if value is None:
                raise BackendError(
                    FailureCode.BOUNDS, f"no chunk of read {read_id} reported the lease in slot {lease.slot}"
                )
            values[lease.slot - first] = max(values[lease.slot - first], value)
        return values


@dataclass(slots=True, eq=False)
class Question:
    """One request, and the place of its answer.

    Attributes:
        answered: called once, with the value of its slot, or with the reason for no answer.
        epoch: of the lease under which it reads; None if it asks for the value of a slot.
        before: what its connection must have sent before: what it is about, and the frame.
        targets: makes what is filled, one after the other; the step after the last one ends the answer.
        nbytes: bytes of the answer.
        read_id: the read that it belongs to.
        repeated: whether it was sent before, over a connection that has ended.
    """

    frame: bytes
    answered: Callable[[int, BackendError | None], None]
    epoch: int | None = None
    before: tuple[Hashable, bytes] | None = None
    targets: Callable[[], Iterator[ByteRows]] = lambda: iter(())
    nbytes: int = 0
    read_id: int = -1
    repeated: bool = False


MakeRequest = Callable[[LeaseName, npt.NDArray[np.int32]], tuple[tuple[Hashable, bytes], bytes]]
"""A lease and the numbers of descriptors -> what is sent before their request, and the request."""


class SourceConnection:
    """A connection that is being opened, or is open.

    Args:
        opening: opens it.

    Attributes:
        descriptor: what to watch; another one after it has opened.
        owed: unanswered requests, in order.
        frame: header of an answer; ``frame_row`` is its row for ``ByteRows.cut``.
        begun: whether the first of these answers has begun.
    """

    def __init__(self, opening: Opening) -> None:
        self.owed: deque[Question] = deque()
        self.owed_bytes = 0
        self.descriptor = opening.fileno()
        self.frame = bytearray(wire.ANSWER.size)
        self.frame_row = rows_of(self.frame).rows().copy()
        self.begun = False
        self._opening: Opening | None = opening
        self._stream: Stream | None = None
        self._unsent: deque[Question] = deque()
        self._said = bytearray()
        self._known: dict[Hashable, bytes] = {}
        self._view = memoryview(self.frame)
        self._framed = 0  # bytes of the frame that have arrived
        self._answers = answers_of(self)
        self._filling = next(self._answers)

    @property
    def open(self) -> bool:
        """Whether both sides have proven their identity."""
        return self._stream is not None

    @property
    def late(self) -> bool:
        """Whether the other side answers, and has not let us in within the budget."""
        return self._opening is not None and self._opening.late

    @property
    def due(self) -> float:
        """When to call ``on_ready`` whatever happens."""
        return float("inf") if self._opening is None else self._opening.due

    @property
    def interest(self) -> int:
        """The events that epoll must report."""
        return select.EPOLLIN | (select.EPOLLOUT if self._said else 0)

    def ask(self, questions: Sequence[Question]) -> None:
        """Send requests, at once if the socket has room.

        Raises:
            ChannelClosed: the connection has ended; it does not owe these requests.
        """
        self._unsent.extend(questions)
        if self._stream is not None:
            self._send(self._stream)
        self.owed.extend(questions)
        self.owed_bytes += sum(question.nbytes for question in questions)

    def on_ready(self) -> None:
        """Advance: the descriptor may be ready.

        Raises:
            ChannelClosed: the connection has ended, or cannot be opened.
            BadFrame: the exporter broke the protocol.
        """
        if self._opening is not None:
            self._stream = self._opening.advance()
            if self._stream is None:
                return
            self._opening.close()
            self._opening = None
            self.descriptor = self._stream.fileno()
        assert self._stream is not None
        self._send(self._stream)
        self._receive(self._stream)

    def close(self) -> list[Question]:
        """Close it; then nothing is written to memory.

        Returns:
            The requests that may be repeated over another connection, because no byte of their answer has arrived.
        """
        if self._opening is not None:
            self._opening.close()
        if self._stream is not None:
            self._stream.close(reset=True)
        self._answers.close()
        begun = self.begun
        return [question for at, question in enumerate(self.owed) if not question.repeated and (at or not begun)]

    def answered(self, value: int, failure: BackendError | None = None) -> None:
        """End the first answer that is owed."""
        question = self.owed.popleft()
        self.owed_bytes -= question.nbytes
        self.begun = False
        question.answered(value, failure)

    def _send(self, stream: Stream) -> None:
        while self._unsent or self._said:
            while self._unsent and len(self._said) < _SAID_MAX:
                self._write(self._unsent.popleft())
            count = stream.write(self._said)
            if not count:
                return
            del self._said[:count]

    def _write(self, question: Question) -> None:
        if question.before is not None:
            about, frame = question.before
            if self._known.get(about) != frame:
                if len(self._known) >= wire.LEASES_MAX:
                    self._known.clear()
                self._known[about] = frame
                self._said += frame
        self._said += question.frame

    def _receive(self, stream: Stream) -> None:
        """Receive available bytes, at most one portion."""
        room = _PORTION_BYTES
        while room > 0 or stream.pending:
            filling = self._filling
            count = stream.read(self._view[self._framed :]) if filling is None else stream.receive(filling)
            if not count:
                return
            room -= count
            if filling is None:
                self._framed += count
                left = wire.ANSWER.size - self._framed
            else:
                left = filling.left
                stream.await_bytes(min(left, _AT_ONCE_BYTES) if left > _AWAITED_BYTES_MIN else 1)
            if not left:
                self._framed = 0
                self._filling = next(self._answers)
                if not self.owed and not stream.pending:
                    return


def answers_of(connection: SourceConnection) -> Generator[ByteRows | None, None, None]:
    """Yield what the bytes of each answer fill; None: the frame. Raises: BadFrame."""
    while True:
        yield None
        if not connection.owed:
            raise wire.BadFrame("an answer to no question")
        question = connection.owed[0]
        yield from _answer(connection, question, question.targets())


def _answer(
    connection: SourceConnection, question: Question, targets: Iterator[ByteRows]
) -> Generator[ByteRows | None, None, None]:
    """Yield what the bytes of one answer fill, whose first frame has arrived. Raises: BadFrame."""
    missing, epoch = question.nbytes, question.epoch
    target: ByteRows | None = None
    while True:
        kind, *zeros, value = wire.ANSWER.unpack(connection.frame)
        if any(zeros):
            raise wire.BadFrame("an answer to no question")
        if kind == wire.REFUSED and not connection.begun and 0 < value <= wire.DETAIL_BYTES_MAX:
            text = bytearray(value)
            yield rows_of(text)
            connection.answered(0, BackendError(FailureCode.BOUNDS, text.decode(errors="replace")))
            return
        connection.begun = True
        if kind != wire.PIECE or not 0 < value <= min(wire.PIECE_BYTES_MAX, missing):
            break
        missing -= value
        while value > 0:  # the next frame follows the last byte of the piece, and is received with it
            if target is None or not target.left:
                target = next(targets)
            filling = target.cut(value, after=connection.frame_row)
            value -= filling.left
            yield filling
    if kind == wire.DONE and not missing and epoch in (None, value):
        next(targets, None)  # stores what lies on a device
    elif kind != wire.ENDED or epoch in (None, value):  # otherwise the bytes would count as the lease's
        raise wire.BadFrame(f"an answer of kind {kind} and {value}, with {missing} bytes missing")
    connection.answered(value)
