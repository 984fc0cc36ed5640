"""Public names, their signatures, and wire formats do not change by accident: the lists in tests/golden have them."""

import json

import msgspec
import pytest

from kvflow.leases.tickets import Ticket
from kvflow.reads.backend import decode_envelope, encode_envelope
from kvflow.reads.tcp import wire

from .golden_bytes import GRANTS, sign
from .golden_lists import GOLDEN, LISTS

DESIGNED = """
    FullAttention SlidingWindow ChunkedLocal CrossAttention MLA Mamba State Shard Group.layers Group.kind
    Group.block_size plan_groups allocate adopt window_blocks KVCache.groups KVCache.views KVCache.component
    KVCache.held KVCache.bytes_per_block KVCache.backing KVCache.manifest WorkerConfig open_worker run_worker
    Worker.endpoint Worker.offer Worker.revoke Worker.wait_offer Worker.pull Worker.quiesced Worker.start_pull
    Worker.pull_many Worker.admit PullHandle.cancel PullHandle.quiesced ThreadedWorker.pull ThreadedWorker.finished
    Ticket.to_params Ticket.from_params join_tickets TransferReport.descriptors TransferReport.nbytes
    TransferReport.transport TransferReport.timings_s TicketMint TicketMint.offer plan_transfer TransferPlan.groups
    TransferPlan.certificate TransferPlan.explain TransferPlan.descriptors GroupPlan.runs errors.StaleLease
    errors.PeerLost errors.LayoutMismatch errors.BlockRangeMismatch errors.DeadlineExceeded errors.CapacityExceeded
"""
"""Names that programs outside this repository are written against. They stay."""


@pytest.mark.parametrize("file", LISTS)
def test_what_others_rely_on_is_as_the_list_has_it(file):
    listed, found = (GOLDEN / file).read_text().splitlines(), LISTS[file]().splitlines()
    gone, new = [line for line in listed if line not in found], [line for line in found if line not in listed]
    assert listed == found, (
        f"tests/golden/{file} differs: a public name, its signature or a wire format has changed.\n"
        f"gone: {gone}\nnew: {new}\n"
        "Others rely on these: keep the old name or format, or mark the change as breaking in CHANGELOG.md. "
        "Then write the list: python -m tests.architecture.golden_lists"
    )


@pytest.mark.parametrize("kind", GRANTS)
def test_a_recorded_ticket_is_read_and_written_again_byte_by_byte(kind):
    params = json.loads((GOLDEN / "tickets.json").read_text())[kind]
    ticket = Ticket.from_params(params, verify=lambda payload, mac: sign(payload) == mac)
    assert (ticket.grants, ticket.to_params()) == ((GRANTS[kind],), params)
    (grant,), (fingerprint,) = ticket.grants, ticket.fingerprints
    assert (grant.signed(sign, fingerprint),) == ticket.signed


def test_recorded_frames_over_tcp_are_read_and_written_again_byte_by_byte():
    """What both ends make of them is in ``tests/unit/kvflow/reads/tcp/test_golden.py``."""
    said = json.loads((GOLDEN / "tcp.json").read_text())
    (publication,) = [bytes.fromhex(content) for who, _, content in said if who == "producer"]
    envelope = decode_envelope(publication, transport="tcp", agent="producer")
    assert msgspec.msgpack.encode(wire.decode_layout(envelope.blob)) == envelope.blob
    assert encode_envelope(envelope) == publication
    requests = [bytes.fromhex(content) for who, what, content in said if who == "reader" and what != "hello"]
    assert {write_again(each) for each in requests} == {*requests}


def write_again(frame):
    kind, group, runs, slot, epoch, _ = wire.decode_request(frame)
    body = frame[wire.REQUEST.size :]
    if kind == wire.READ:
        found = [*wire.RUN.iter_unpack(body)]
        assert len(found) == runs
        return wire.encode_read(group, slot, epoch, found)
    return wire.encode_epoch(slot) if kind == wire.EPOCH else wire.encode_lease(slot, epoch, body)


def test_the_list_has_every_name_that_programs_are_written_against():
    lines = (GOLDEN / "public_names.txt").read_text().replace("(", " ").replace(":", " ").replace("=", " ").split()
    assert [name for name in DESIGNED.split() if name not in lines] == []
