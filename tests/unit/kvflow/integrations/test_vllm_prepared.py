"""Tickets that another thread signs while a step computes the end of their prompts."""

import threading

import pytest

from kvflow import Ticket
from kvflow.integrations.vllm.messages import Hold

from .vllm_like import (
    ABORTED,
    OFFER,
    PATIENCE_S,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    await_jobs,
    new_contents,
    new_key,
    new_request,
    rank_address,
    side,
    step_output,
)

SLOTS = 8  # of ``rank_address``


class Prefill:
    """A prefill engine of which each step is told."""

    def __init__(self, *specs, **named):
        self.side = side(*(specs or (FullAttentionSpec(),)), role="kv_producer", **named)
        self.offering = self.side.offering
        self.requests = {}
        self.step = 0
        self.signed_here = []
        sign = self.offering._sign

        def noted(request_id, *given):
            ticket = sign(request_id, *given)
            if threading.current_thread() is threading.main_thread():
                self.signed_here.append(request_id)
            return ticket

        self.offering._sign = noted

    def arrive(self, name="r", prompt=48):
        request = self.requests[name] = new_request(OFFER, prompt, request_id=name)
        request.num_computed_tokens = 0
        self.side.on_new_request(request)
        return request

    def compute(self, counts, new=None, known=None, *, awaited=True):
        """Tell of a step, and await what the other thread makes of it."""
        self.step += 1
        self.side.on_scheduled(step_output(counts, new, known), self.step)
        if awaited:
            await_jobs(self.side)
        for name, count in counts.items():
            if name in self.requests:
                self.requests[name].num_computed_tokens += count

    def end(self, name="r", blocks=((1, 2, 3),), status=None):
        """End a request that has made a token; return the grant of its ticket, or None."""
        request = self.requests.pop(name)
        request.all_token_ids.append(7)
        request.status = status or request.status
        keeps, params = self.side.on_finished(request, [list(ids) for ids in blocks])
        if not keeps:
            return None
        (command,) = [each for each in self.side.take_commands() if isinstance(each, Hold)]
        (grant,) = Ticket.from_params(params, verify=new_key().verifies).grants
        assert command.grant == grant
        return grant

    def free_slots(self):
        return len(self.offering._mint._free)


def digests_of(prompt, blocks, size=16):
    """The digest of the last block of a prompt's."""
    (found,) = new_contents().digests(new_request(None, prompt), blocks, [size], prompt)
    return found[-1:]


def test_a_ticket_is_signed_while_the_last_step_computes():
    prefill = Prefill()
    prefill.arrive()
    prefill.compute({"r": 48}, new={"r": (0, [[1, 2, 3]])})
    grant = prefill.end()
    assert prefill.signed_here == []
    assert (grant.block_ids, grant.num_tokens) == (((1, 2, 3),), (48,))
    assert grant.contents[0].digests == digests_of(48, [(1, 2, 3)])


@pytest.mark.parametrize("late", [None, [[]]], ids=["no list", "empty list"])
def test_a_ticket_has_the_blocks_of_all_steps_of_its_prompt(late):
    prefill = Prefill()
    prefill.arrive(prompt=70)
    prefill.compute({"r": 20}, new={"r": (0, [[1, 2]])})
    prefill.compute({"r": 12}, known={"r": (20, late)})
    prefill.compute({"r": 38}, known={"r": (32, [[9, 8, 7]])})
    grant = prefill.end(blocks=[(1, 2, 9, 8, 7)])
    assert prefill.signed_here == []
    assert grant.block_ids == ((1, 2, 9, 8, 7),)
    assert grant.contents[0].digests == digests_of(70, [(1, 2, 9, 8, 7)])


def test_what_the_prefix_cache_has_is_in_the_ticket():
    prefill = Prefill()
    prefill.arrive().num_computed_tokens = 32
    prefill.compute({"r": 16}, new={"r": (32, [[4, 5, 6]])})
    assert prefill.end(blocks=[(4, 5, 6)]).block_ids == ((4, 5, 6),)
    assert prefill.signed_here == []


def test_a_window_that_has_moved_on_fits_the_ticket():
    prefill = Prefill(SlidingWindowSpec(sliding_window=20), MambaSpec(), FullAttentionSpec())
    request = prefill.arrive(prompt=65)  # the decode engine computes the last token
    assert request.num_prompt_tokens == 64
    prefill.compute({"r": 64}, new={"r": (0, [[1, 2, 3, 4], [5], [6, 7, 8, 9]])})
    grant = prefill.end(blocks=[(0, 0, 3, 4), (5,), (6, 7, 8, 9)])
    assert prefill.signed_here == []
    assert grant.block_ids == ((3, 4), (5,), (6, 7, 8, 9))


@pytest.mark.parametrize(
    ("blocks", "computed"), [([(1, 2, 5)], 48), ([(1, 2, 3, 4)], 49), ([(1, 2)], 32)], ids=["blocks", "more", "less"]
)
def test_a_request_that_ends_otherwise_gets_another_ticket(blocks, computed):
    prefill = Prefill()
    for number in range(2 * SLOTS):
        prefill.arrive(f"r{number}", prompt=48).all_token_ids.extend(range(100, 120))
        prefill.compute({f"r{number}": 48}, new={f"r{number}": (0, [[1, 2, 3]])})
        prefill.requests[f"r{number}"].num_computed_tokens = computed
        grant = prefill.end(f"r{number}", blocks)
        assert (grant.block_ids, grant.num_tokens) == (tuple(blocks), (computed,))
        prefill.side.on_reported(None, {f"r{number}"})
    assert len(prefill.signed_here) == 2 * SLOTS
    assert prefill.free_slots() == SLOTS


@pytest.mark.parametrize("status", [ABORTED, None], ids=["aborted", "without blocks"])
def test_a_ticket_that_is_not_answered_gives_its_slot_back(status):
    prefill = Prefill()
    for number in range(2 * SLOTS):
        prefill.arrive(f"r{number}")
        prefill.compute({f"r{number}": 48}, new={f"r{number}": (0, [[1, 2, 3]])})
        assert prefill.end(f"r{number}", [(1, 2, 3)] if status else [()], status) is None
    assert prefill.free_slots() == SLOTS


def test_a_request_that_ends_before_its_ticket_is_signed_gets_it_at_once():
    prefill, goes_on = Prefill(), threading.Event()
    prefill.arrive()
    prefill.offering._jobs.put(lambda: goes_on.wait(PATIENCE_S))
    prefill.compute({"r": 48}, new={"r": (0, [[1, 2, 3]])}, awaited=False)
    assert prefill.end().block_ids == ((1, 2, 3),)
    goes_on.set()
    await_jobs(prefill.side)
    assert prefill.signed_here == ["r"]
    assert prefill.free_slots() == SLOTS - 1


def test_ranks_that_were_started_again_are_those_of_the_ticket():
    prefill = Prefill()
    prefill.arrive()
    prefill.compute({"r": 48}, new={"r": (0, [[1, 2, 3]])})
    prefill.side.meet_ranks([rank_address()])
    grant = prefill.end()
    assert prefill.signed_here == ["r"]
    assert prefill.offering._mint.retire("r"), grant


def test_a_prompt_that_cannot_be_signed_is_told_when_it_ends(caplog):
    prefill = Prefill()
    prefill.arrive(prompt=[*range(47), -1])
    prefill.compute({"r": 48}, new={"r": (0, [[1, 2, 3]])})
    assert prefill.end() is None
    assert "is not an unsigned 32-bit integer" in caplog.text
    assert prefill.free_slots() == SLOTS


def test_a_defect_of_the_other_thread_costs_no_ticket(monkeypatch):
    prefill = Prefill()
    prefill.arrive()
    sign = prefill.offering._sign
    monkeypatch.setattr(prefill.offering, "_sign", lambda *_: 1 / 0)
    prefill.compute({"r": 48}, new={"r": (0, [[1, 2, 3]])})
    monkeypatch.setattr(prefill.offering, "_sign", sign)
    assert prefill.end().block_ids == ((1, 2, 3),)


def test_a_side_that_is_closed_has_no_thread():
    prefill = Prefill()
    prefill.arrive()
    prefill.compute({"r": 48}, new={"r": (0, [[1, 2, 3]])})
    thread = prefill.offering._thread
    prefill.side.close()
    assert not thread.is_alive()
    prefill.side.close()


def test_samples_and_requests_of_others_are_not_prepared():
    prefill = Prefill()
    prefill.arrive("0_cmpl-x")
    prefill.compute({"0_cmpl-x": 48, "other": 5}, new={"0_cmpl-x": (0, [[1, 2, 3]]), "other": (0, [[4]])})
    assert prefill.free_slots() == SLOTS
    assert prefill.end("0_cmpl-x").block_ids == ((1, 2, 3),)


def test_a_second_request_of_a_name_costs_the_first_one_nothing():
    prefill = Prefill()
    for blocks in ([1, 2, 3], [4, 5, 6]):
        prefill.arrive()
        prefill.compute({"r": 48}, new={"r": (0, [blocks])})
        grant = prefill.end(blocks=[blocks])
        assert (grant is None) == (blocks == [4, 5, 6])
    assert prefill.free_slots() == SLOTS - 1
