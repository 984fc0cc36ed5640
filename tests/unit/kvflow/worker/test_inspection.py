"""What a worker tells a member of the cluster: bounded when it is made, refused when it is anything else."""

import msgspec
import pytest

from kvflow.errors import ProtocolViolation
from kvflow.leases.table import LeaseReader, LeaseState
from kvflow.reads.contract import StagingUse
from kvflow.worker.destinations import Quarantined
from kvflow.worker.snapshot import (
    INSPECTION_BYTES_MAX,
    REPORTED_MAX,
    TEXT_MAX,
    TOLD_BYTES_MAX,
    Snapshot,
    decode_inspection,
    encode_inspection,
)
from tests.helpers.loops import looped

from .helpers import PULL


def told(added=b"", **fields):
    """Return a report of a snapshot, whose lists are cut as a worker cuts them."""

    def take(limit):
        lists = {name: value[:limit] if isinstance(value, tuple) else value for name, value in fields.items()}
        return Snapshot(**{"leases": 0, "pulls": 0, "quarantined": ()} | lists)

    return encode_inspection("open", 9.0, take, added)


def test_what_is_told_arrives():
    quarantined = (Quarantined(1, "peer_lost", 2.0, 3),)
    inspection = decode_inspection(told(leases=4, pulls=1, open_pulls=(PULL,), quarantined=quarantined), peer="p")
    assert (inspection.stage, inspection.now) == ("open", 9.0)
    assert inspection.snapshot.open_pulls == (PULL,)
    assert inspection.snapshot.quarantined == quarantined


def test_what_the_program_above_adds_arrives_beside_long_lists():
    lease = LeaseState(request_id="r" * 256, age_s=1.0, expires_in_s=2.0, num_blocks=3, readers=())
    added = bytes(TOLD_BYTES_MAX)
    report = told(added, held_leases=(lease,) * 1000)
    assert len(report) <= INSPECTION_BYTES_MAX
    inspection = decode_inspection(report, peer="p")
    assert inspection.told == added
    assert inspection.snapshot.held_leases
    with pytest.raises(AssertionError, match="are added to a report"):
        told(bytes(TOLD_BYTES_MAX + 1))


def test_more_than_may_be_added_is_refused():
    inspection = decode_inspection(told(), peer="p")
    larger = msgspec.structs.replace(inspection, told=bytes(TOLD_BYTES_MAX + 1))
    with pytest.raises(ProtocolViolation):
        decode_inspection(msgspec.msgpack.encode(larger), peer="p")


def test_a_report_is_never_too_large_and_no_list_too_long():
    reader = LeaseReader(engine_id="e" * 256, num_ranks=2, released=1)
    lease = LeaseState(request_id="r" * 256, age_s=1.0, expires_in_s=2.0, num_blocks=3, readers=(reader,) * 16)
    long = msgspec.structs.replace(PULL, local_request_id="x" * 1_000_000)
    quarantined = tuple(Quarantined(at, "peer_lost", 2.0, 3) for at in range(1000))
    report = told(
        open_pulls=(long,) * 100,
        held_leases=(lease,) * 100,
        quarantined=quarantined,
        rejected={f"code {at}": at for at in range(1000)},
    )
    assert len(report) <= INSPECTION_BYTES_MAX
    snapshot = decode_inspection(report, peer="p").snapshot
    assert 0 < len(snapshot.open_pulls) == len(snapshot.held_leases) < REPORTED_MAX  # halved until it fits
    assert len(snapshot.open_pulls[0].local_request_id) == TEXT_MAX
    assert len(snapshot.rejected) == REPORTED_MAX


def test_keys_of_peers_that_wait_are_not_told():
    report = told(staging=StagingUse(buffers=2, waiting=frozenset()))
    assert decode_inspection(report, peer="p").snapshot.staging.buffers == 2


@looped(
    "report",
    [
        b"\xc1",
        b"",
        b"\x80",
        b"\x91" * 10_000,
        msgspec.msgpack.encode(
            {"stage": "open", "now": 1.0, "snapshot": {"leases": -1, "pulls": 0, "quarantined": []}}
        ),
        msgspec.msgpack.encode({"stage": "x" * 2000, "now": 1.0, "snapshot": {}}),
        msgspec.msgpack.encode({"stage": "open", "now": float("nan"), "snapshot": {}}),
        bytes(INSPECTION_BYTES_MAX + 1),
    ],
)
def test_what_is_no_report_is_a_violation(report):
    with pytest.raises(ProtocolViolation) as caught:
        decode_inspection(report, peer="tcp://127.0.0.1:1")
    assert caught.value.remedy
