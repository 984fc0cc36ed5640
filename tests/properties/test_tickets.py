"""Texts of tickets as the wire has them, right and wrong: an oracle says which may be read, and what they say."""

import base64
import itertools
from unittest import mock

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from handshake.security import ClusterSecurity, sign
from kvflow.errors import ReleaseMismatch, TicketInvalid
from kvflow.leases import tickets
from kvflow.leases.tickets import Ticket

from .caches import thoroughly

OURS, THEIRS = (ClusterSecurity.from_secret(f"{who} is a secret of the tests") for who in ("this", "that"))
BLOCKS_MAX, UNSIGNED_MAX = 40, 20
"""The limits while these tests run: as many blocks as there are would take seconds."""
KINDS = ("offer", "kept", "open")
LEASE_MS, ISSUED_MS, ERROR_S = 30_000, 1_000_000_000, 0.5
EPOCH = (1 << 62) + 1  # no float has it

ids = st.lists(st.one_of(st.integers(-1, 50), st.tuples(st.integers(0, 50), st.integers(2, 15))), max_size=4)
"""Block ids, and runs of them: the first id and how many follow one another."""


class Written(msgspec.Struct):
    """One grant of a text: ``groups``: ids and runs of each."""

    groups: list
    secret: ClusterSecurity = OURS
    mark: bytes = b"\x03"

    def expanded(self):
        """The ids of each group, one by one."""
        runs = [[each if isinstance(each, tuple) else (each, 1) for each in group] for group in self.groups]
        return tuple(tuple(itertools.chain(*(range(first, first + count) for first, count in group))) for group in runs)

    def text(self, kind, rank, issued_ms):
        groups = [list(itertools.chain(*map(written, group))) for group in self.groups]
        address = [rank, f"{rank:032x}", "tcp://127.0.0.1:7000", 0, 4, None]
        fields = [
            kind,
            "engine",
            "request",
            [address],
            1,
            EPOCH,
            groups,
            [1 << 20] * len(groups),
            LEASE_MS,
            True,
            issued_ms,
        ]
        payload = self.mark + self.secret.fingerprint + msgspec.msgpack.encode(fields)
        return base64.urlsafe_b64encode(sign(self.secret.ticket_key, payload) + payload).rstrip(b"=").decode()


def written(each):
    """An id, or a run as the wire has it: its first id, and the number of its ids below zero."""
    return [each[0], -each[1]] if isinstance(each, tuple) else [each]


grants = st.builds(
    Written,
    st.lists(ids, min_size=1, max_size=2),
    st.sampled_from((*[OURS] * 7, THEIRS)),
    st.sampled_from((*[b"\x03"] * 7, b"\x02")),
)


def expected_of(head, kind, listed, verify):
    """Return the error that a text must have, or None."""
    if head != "kvf3":
        return ReleaseMismatch if head in {"kvf2", "kvf0004"} else TicketInvalid
    if verify and THEIRS in [grant.secret for grant in listed]:
        return TicketInvalid
    room = BLOCKS_MAX if verify else UNSIGNED_MAX
    for grant in listed:
        if grant.mark != b"\x03":
            return TicketInvalid
        if kind not in KINDS:
            return ReleaseMismatch
        room -= sum(map(len, grant.expanded()))
        if room < 0 and any(isinstance(each, tuple) for group in grant.groups for each in group):
            return TicketInvalid
    return None


READ = {"head": "kvf3", "verify": None, "late_s": 4.0}


@thoroughly(300)
@given(
    head=st.sampled_from((*["kvf3"] * 9, "kvf2", "kvf0004", "kvf", "kvf3x")),
    kind=st.sampled_from((*KINDS, *KINDS, "pinned")),
    listed=st.lists(grants, min_size=1, max_size=3),
    verify=st.sampled_from((OURS.verifies, None)),
    issued_ms=st.sampled_from((ISSUED_MS, None)),
    late_s=st.sampled_from((-30.0, -0.01, 0.01, 4.0)),
)
@example(**READ, kind="kept", listed=[Written([[1]])], issued_ms=ISSUED_MS)
@example(**READ, kind="offer", listed=[Written([[1]])], issued_ms=None)
@example(**READ, kind="offer", listed=[Written([[1]]), Written([[1]], secret=THEIRS)], issued_ms=ISSUED_MS)
@example(**READ, kind="offer", listed=[Written([[1]], mark=b"\x02")], issued_ms=ISSUED_MS)
@example(**READ, kind="offer", listed=[Written([[(0, UNSIGNED_MAX - 5)]])] * 2, issued_ms=ISSUED_MS)
def test_a_text_is_read_if_it_is_signed_and_of_this_release_and_bounded(
    *, head, kind, listed, verify, issued_ms, late_s
):
    texts = [grant.text(kind, rank, issued_ms) for rank, grant in enumerate(listed)]
    params = {"kvflow": ".".join((head, *texts))}
    expected = expected_of(head, kind, listed, verify)
    with mock.patch.multiple(tickets, BLOCKS_MAX=BLOCKS_MAX, UNSIGNED_BLOCKS_MAX=UNSIGNED_MAX):
        if expected:
            with pytest.raises(expected) as caught:
                Ticket.from_params(params, verify=verify)
            assert caught.value.remedy
            return
        ticket = Ticket.from_params(params, verify=verify)
    assert [grant.block_ids for grant in ticket.grants] == [grant.expanded() for grant in listed]
    assert {(grant.kind, grant.epoch) for grant in ticket.grants} == {(kind, EPOCH)}
    if THEIRS in [grant.secret for grant in listed]:
        with pytest.raises(TicketInvalid, match="wrong signature"):
            ticket.verify(OURS.verifies)
    else:
        ticket.verify(OURS.verifies)
    over = (ISSUED_MS + LEASE_MS) / 1000 + ERROR_S + tickets.OVERDUE_S
    for grant in ticket.grants:
        assert grant.seems_over(over + late_s, ERROR_S) == (kind == "offer" and issued_ms is not None and late_s > 0)
