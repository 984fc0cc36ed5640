"""Reads and prepared lists for lanes that are driven by hand: units of one byte, cut into chunks as a test says."""

import numpy as np

from kvflow.leases.tickets import LeaseName
from kvflow.planning.bind import Bound
from kvflow.planning.pairs import UnitPairs
from kvflow.reads.backend import CheckedList, Staged
from kvflow.reads.bounds import CheckedScatter, check_rows
from kvflow.reads.contract import Part, PreparedList, RankRead
from kvflow.reads.lanes import Check, Lanes

UNITS = 1 << 20
EPOCH = 7


class Units:
    """A binding that cuts after so many units."""

    unit_descriptors = 1
    number = None

    def __init__(self, chunk, unit_bytes=1):
        self.chunk = chunk
        self.unit_bytes = self.read_bytes = unit_bytes

    def bind(self, pairs, *, chunk_bytes, chunk_descriptors):
        count = len(pairs.source)
        cuts = np.array([*range(0, count, self.chunk), count])
        return Bound(np.array(pairs.source, np.int32), np.array(pairs.target, np.int32), cuts, count * self.unit_bytes)


def prepared(chunk=1, *, shared=0, portion=1 << 20, staged=False, list_id=1):
    """A prepared list whose chunks have so many units, and so many of several reads."""
    rows = np.array([[1 << 30, 1, 0, 1, UNITS]])
    scatter = None
    if staged:
        scatter = Staged(CheckedScatter(rows, chunk, (UNITS, 1, 1), rows[:, 0], 1, 1, UNITS), None)
    return CheckedList(
        PreparedList(list_id, "p", rows, rows, binding=Units(chunk)),
        check_rows(rows),
        check_rows(rows),
        scatter,
        source_units=UNITS,
        target_units=UNITS,
        pair_bytes=1,
        portion_pairs=portion,
        chunk_pairs=shared,
    )


ONE_EACH = prepared()
STAGED = prepared(staged=True)


def a_read(read_id, *, peer="p", chunks=1, slot=0, epoch=EPOCH, parts=1, **rest):
    """A read of so many units in each part, numbered from a place of its own: a chunk tells whose it is."""
    units = list(range(64 * read_id, 64 * read_id + chunks))
    made = tuple(Part(1 + number, UnitPairs(units, units)) for number in range(parts))
    return RankRead(read_id, peer, LeaseName(slot, epoch), made, **rest)


class Bench:
    """Lanes, their clock, and their answers."""

    def __init__(self, *peers, buffers=0, weights=None):
        self.now = 100.0
        self.answers = []
        self.lanes = Lanes(self.answers.append, lambda: self.now, buffers)
        for peer in peers or ("p",):
            self.lanes.open(peer, (weights or {}).get(peer, 1))

    def admit(self, read_id, prepared_list=ONE_EACH, **how):
        read = a_read(read_id, **how)
        self.lanes.admit(read, [prepared_list] * len(read.parts))
        return read

    def take(self):
        """Take a check if one is due, otherwise a chunk."""
        return self.lanes.take_check() or self.lanes.take_chunk()

    def land(self, work, observed=EPOCH):
        if isinstance(work, Check):
            self.lanes.checked(work, [observed] * (work.last - work.first + 1))
        else:
            self.lanes.arrived(work)

    def drain(self):
        """Let everything arrive as soon as it is posted; return what was posted, in order."""
        works = []
        while (work := self.take()) is not None:
            works.append(work)
            self.land(work)
        return works

    def told(self):
        """The answers since the last call: read, verdict, code."""
        told = [(answer.read_id, answer.code or answer.verdict) for answer in self.answers]
        self.answers.clear()
        return told


def ids(work):
    """Whose a piece of work is."""
    return [opened.read.read_id for opened in work.reads]


def chunks(works):
    """Whose the chunks among some works are, one read each."""
    return [ids(work)[0] for work in works if not isinstance(work, Check)]
