"""Staged reads between workers: the right bytes, and no staging buffer left behind; ``test_stale`` has the fence."""

import pytest

import kvflow

from .shapes import Shape
from .staging import STAGING, TOKEN_MAJOR, no_buffer_is_taken
from .test_ranks import engine

SOURCES = [[3, 4, 6, 9, 10, 20], [21, 24, 23, 30, 0, 1]]
TARGETS = [[7, 8, 1, 30, 31, 2], [20, 11, 12, 13, 25, 26]]
TOKENS = 6 * 16 - 5


@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 2), (2, 1), (3, 2)])
async def test_token_major_pages_are_staged_between_unlike_engines(world, source_tp, target_tp):
    async with engine(world.producing, source_tp, Shape(**TOKEN_MAJOR)) as producers:
        for rank in range(target_tp):
            reports = []
            for settings in ({"staging_bytes": 0}, STAGING):
                # Each rank reads by itself, as an engine of its own.
                offers = [kvflow.Ticket.from_params(await each.offer("r", SOURCES, TOKENS)) for each in producers]
                ticket = kvflow.join_tickets(offers)
                shape = Shape(**TOKEN_MAJOR, tp_rank=rank, tp_size=target_tp)
                async with world.consuming(shape, **settings) as consumer:
                    reports.append(await consumer.pull(ticket.to_params(), TARGETS))
                    consumer.has("r", TARGETS, TOKENS)
                    consumer.untouched(but=TARGETS)
                    consumer.at_rest()
                    if settings is STAGING:
                        no_buffer_is_taken(consumer)
                    else:
                        assert consumer.worker.snapshot().staging.buffers == 0
                    assert [await each.outcome("r") for each in producers] == ["released"] * source_tp
            direct, staged = reports
            assert staged.nbytes == direct.nbytes == direct.read_bytes
            assert (staged.read_bytes > staged.nbytes) == (source_tp % target_tp > 0 or source_tp < target_tp)
            assert staged.descriptors * 8 <= direct.descriptors
            assert staged.timings_s["scatter"] > 0.0 == direct.timings_s["scatter"]
