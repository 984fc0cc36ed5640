"""The wire of the release before: its frames, their bounds, and its answers. Pure.

Requests and answers come in order. Every number is little-endian. A request is a header of 16 bytes and a body::

    PROGRAM   number, group, rows             rows of 5 x int64: address, nbytes, device, stride, count; once
    READ      number, 1, descriptors          the lease: slot u32, epoch u64 and the MAC of the ticket, 32 bytes;
                                              descriptor numbers int32
    EPOCH     slot                            nothing

An answer is a header of 16 bytes, a body, and a u64: what the slot held after the body had been copied::

    DONE      nbytes                          of a READ: the bytes
    NOT_HELD                                  of a READ whose lease is not held
    REFUSED   nbytes                          why, as text, and no u64
"""

import struct
from collections.abc import Generator, Hashable
from functools import partial

import numpy as np
import numpy.typing as npt

from kvflow.errors import FailureCode
from kvflow.reads.backend import BackendError, CheckedList
from kvflow.reads.bounds import OutOfBounds
from kvflow.reads.contract import LeaseName
from kvflow.reads.tcp.connection import Request, SourceConnection
from kvflow.reads.tcp.stream import ByteRows, rows_of
from kvflow.reads.tcp.wire import BadFrame

HEADER = struct.Struct("<BBHIII")
"""Header of a request: kind, 0, group or leases, number or slot, rows or descriptors, bytes of the body."""

ANSWER = struct.Struct("<BBHIQ")
"""Header of an answer: status, 0, leases, 0, bytes of the body."""

PROGRAM, READ, EPOCH = 1, 2, 3
DONE, NOT_HELD, REFUSED = 0, 1, 2

LEASE = struct.Struct("<IQ32s")
EPOCH_BYTES = 8

ROWS_MAX = 1 << 15
"""Most rows of one prepared list: eight rows for each component of 4,096 layers."""

LISTS_MAX = 4096
"""Most lists of one connection: 64 groups of 64 divisions among ranks."""

DESCRIPTORS_MAX = 1 << 16
"""Most descriptors of one request. A portion has at most 8,192 before they merge, or one unit, if that has more."""

DETAIL_BYTES_MAX = 512


def requests_of(prepared: CheckedList) -> Request:
    """Return what makes the requests for descriptors of a list. Raises ``OutOfBounds``: it is too large."""
    prepared_list, rows = prepared.prepared_list, prepared.source.table
    binding = prepared_list.binding
    if binding is not None and binding.unit_descriptors > DESCRIPTORS_MAX:
        raise OutOfBounds(f"a unit of {binding.unit_descriptors} descriptors: the last release takes {DESCRIPTORS_MAX}")
    if len(rows) > ROWS_MAX:
        raise OutOfBounds(f"a prepared list of {len(rows)} rows: the TCP data plane takes {ROWS_MAX}")
    body = np.ascontiguousarray(rows, "<i8").tobytes()
    number = prepared_list.list_id
    frame = HEADER.pack(PROGRAM, 0, prepared_list.group, number, len(rows), len(body)) + body
    return partial(_request, number, frame)


def _request(
    number: int, announcement: bytes, lease: LeaseName, index: npt.NDArray[np.int32]
) -> tuple[tuple[Hashable, bytes], bytes]:
    body = LEASE.pack(lease.slot, lease.epoch, lease.mac) + np.ascontiguousarray(index, "<i4").tobytes()
    return (number, announcement), HEADER.pack(READ, 0, 1, number, len(index), len(body)) + body


def encode_epoch(slot: int) -> bytes:
    """Return the request for the value of a slot."""
    return HEADER.pack(EPOCH, 0, 0, slot, 0, 0)


def answers_of(connection: SourceConnection) -> Generator[ByteRows | None, None, None]:
    """Yield what the bytes of each answer fill; None: the frame. Raises: BadFrame."""
    while True:
        yield None
        status, zero, leases, rest, nbytes = ANSWER.unpack(connection.frame)
        if not connection.owed or zero or rest:
            raise BadFrame("an answer to no question")
        question = connection.owed[0]
        if status == REFUSED and 0 < nbytes <= DETAIL_BYTES_MAX:
            text = bytearray(nbytes)
            yield rows_of(text)
            connection.answered(0, BackendError(FailureCode.BOUNDS, text.decode(errors="replace")[:256]))
            continue
        connection.begun = True
        reads = question.epoch is not None
        held = status == DONE and nbytes == (question.nbytes if reads else EPOCH_BYTES)
        if leases != reads or not (held or (status == NOT_HELD and reads and not nbytes)):
            raise BadFrame(f"an answer of kind {status} with {nbytes} bytes to a request for {question.nbytes}")
        if held:
            yield from question.targets()
        slot = bytearray(EPOCH_BYTES)
        yield rows_of(slot)
        value = int.from_bytes(slot, "little")
        if not held and value == question.epoch:  # otherwise the bytes would count as the lease's
            raise BadFrame("it sends nothing although the lease is held")
        connection.answered(value)
