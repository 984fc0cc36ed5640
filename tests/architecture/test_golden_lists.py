"""Public names, their signatures, and wire formats do not change by accident: the lists in tests/golden have them."""

import pytest

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


def test_the_list_has_every_name_that_programs_are_written_against():
    lines = (GOLDEN / "public_names.txt").read_text().replace("(", " ").replace(":", " ").replace("=", " ").split()
    assert [name for name in DESIGNED.split() if name not in lines] == []
