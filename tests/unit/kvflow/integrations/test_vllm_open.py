"""A prompt is on offer while a prefill engine computes it: what a step has written settles, and nothing else."""

import itertools
import threading
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from kvflow import FullAttention, Mamba, SlidingWindow, State, Ticket, allocate
from kvflow.integrations.vllm import offering
from kvflow.integrations.vllm import worker as rank_side
from kvflow.integrations.vllm.messages import End, Hold, Reset, Tell
from kvflow.integrations.vllm.runtime import RankRuntime
from tests.helpers.settings import flat_config
from tests.helpers.waiting import wait_until

from .vllm_like import (
    ABORTED,
    OFFER,
    PATIENCE_S,
    SECRET,
    Device,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    await_jobs,
    new_key,
    new_request,
    side,
    step_output,
)

SHAPE = {"num_kv_heads": 2, "head_size": 8, "dtype": "float16"}
SPECS = {
    "layer.0": FullAttention(block_size=16, **SHAPE),
    "layer.1": SlidingWindow(block_size=16, window=64, **SHAPE),
    "layer.2": Mamba(block_size=1024, states=(State("ssm", (4, 8), "float16", shard_axis=0),)),
}
VLLM = (FullAttentionSpec(), SlidingWindowSpec(), MambaSpec())


class Engine:
    """A prefill engine of one rank, which takes steps as vLLM's runners do.

    ``early``: the rank is reached between steps.
    """

    def __init__(self, kinds=1, *, early=True, mark=None, slots=8, **extra):
        self.stack = ExitStack()
        config = flat_config(engine_id="engine", cluster_secret=SECRET, transport="loopback", lease_slots=slots)
        cache = allocate(dict([*SPECS.items()][:kinds]), num_blocks=64)
        self.runtime = RankRuntime(config, cache, mark=mark)
        self.stack.callback(self.runtime.close)
        self.rank = self.runtime.rank
        self.side = side(*VLLM[:kinds], met=False, dispatch="concurrent", **extra)
        self.side.meet_ranks([self.rank.address], [self.runtime.contact] if early else [])
        self.requests, self.sent, self.ordered = {}, [], []
        self.number = 0

    def arrive(self, name="r", prompt=64, params=OFFER, **named):
        request = self.requests[name] = new_request(params, prompt, request_id=name, **named)
        request.num_computed_tokens = 0
        self.side.on_new_request(request)
        self.flush()
        return request

    def flush(self):
        """Wait until the other thread has done its jobs, and those that they have made."""
        for _ in range(2):
            await_jobs(self.side)

    def begin(self, counts=None, new=None, known=None, preempted=()):
        """Begin a step: what has to be done before it writes is done."""
        self.number += 1
        self.side.on_scheduled(step_output(counts or {}, new, known, preempted), self.number)
        self.flush()
        commands = self.side.take_commands()
        self.ordered += commands
        self.rank.prepare(commands)
        self.rank.execute(commands)

    def write(self):
        """End the step."""
        self.rank.end_step(self.number)
        self.collect()

    def step(self, *args, **named):
        self.begin(*args, **named)
        self.write()

    def collect(self):
        found = self.rank.collect().sent
        self.side.on_reported(None, found)
        self.sent += sorted(found)

    def end(self, name="r", blocks=((1, 2, 3, 4),), status=None, computed=None):
        """End a request that has made a token; return its parameters."""
        request = self.requests.pop(name)
        request.num_computed_tokens = request.num_prompt_tokens if computed is None else computed
        request.all_token_ids.append(7)
        request.status = status or request.status
        keeps, params = self.side.on_finished(request, [list(ids) for ids in blocks])
        self.flush()
        assert keeps == bool(params and params["do_remote_prefill"])
        return params

    def lease(self, name="r"):
        """The lease of a request as peers are told of it: its kind, tokens that have settled, and blocks."""
        table = self.runtime._worker._thread.worker._leases._leases
        held = table._by_request.get(name)
        kind = held and ("sealed" if held.sealed and held.grant.kind == "open" else held.grant.kind)
        return held and (kind, held.settled, held.blocks)

    def kinds(self):
        """The kinds of commands so far."""
        self.ordered += self.side.take_commands()
        return [type(each).__name__ for each in self.ordered]


@pytest.fixture
def engines():
    made = []

    def make(*args, **named):
        made.append(Engine(*args, **named))
        return made[-1]

    yield make
    for engine in made:
        engine.runtime._worker._thread.worker._leases.check()
        engine.stack.close()


@pytest.fixture
def engine(engines):
    return engines()


@pytest.mark.parametrize("early", [True, False])
def test_each_step_settles_whole_blocks_once_it_has_written(engines, early):
    engine = engines(early=early)
    engine.arrive()
    engine.begin({"r": 24}, new={"r": (0, [[1, 2]])})
    assert engine.lease() == ("open", 0, ((),)), "the step has not written"
    engine.write()
    assert engine.lease() == ("open", 16, ((1,),)), "the second block is not full"
    engine.step({"r": 24}, known={"r": (24, [[3]])})
    assert engine.lease() == ("open", 48, ((1, 2, 3),))
    engine.step({"r": 16}, known={"r": (48, [[4]])})
    assert engine.lease() == ("open", 64, ((1, 2, 3, 4),))
    params = engine.end()
    assert (params["transfer_mode"], params["remote_block_ids"]) == ("push", [[4]])
    assert Ticket.from_params(params, verify=new_key().verifies).grants[0].kind == "open"
    if not early:
        engine.step()
    assert engine.lease() == ("sealed", 64, ((1, 2, 3, 4),))
    assert engine.kinds() == ["Hold", "Tell", "Tell", "Tell", "Tell"]


def test_a_prefix_hit_settles_when_the_step_that_found_it_has_written(engine):
    """vLLM counts it as computed while another request of the same step still writes it."""
    engine.arrive("first", 48)
    engine.arrive("second", 64)
    engine.begin({"first": 48, "second": 16}, new={"first": (0, [[1, 2, 3]]), "second": (48, [[1, 2, 3, 4]])})
    assert engine.lease("second") == ("open", 0, ((),))
    engine.write()
    assert engine.lease("second") == ("open", 64, ((1, 2, 3, 4),))


def test_a_device_settles_what_it_has_written(engines):
    device = Device()
    engine = engines(mark=device.mark)
    engine.arrive()
    engine.step({"r": 32}, new={"r": (0, [[1, 2]])})
    engine.step({"r": 32}, known={"r": (32, [[3, 4]])})  # asynchronous scheduling
    assert engine.lease() == ("open", 0, ((),))
    device.done = 1
    engine.collect()
    assert engine.lease() == ("open", 32, ((1, 2),))
    engine.end()
    assert engine.lease() == ("open", 32, ((1, 2),)), "the last step has not written"
    device.done = 2
    engine.collect()
    assert engine.lease() == ("sealed", 64, ((1, 2, 3, 4),))


def test_what_a_device_has_written_settles_though_no_step_follows(engines):
    """The next step is told of it when it is launched, and the engine may launch two ahead of the device."""
    device = Device()
    engine = engines(early=False, mark=device.mark)  # so nothing that comes meanwhile looks, such as a renewal
    engine.arrive()
    engine.step({"r": 32}, new={"r": (0, [[1, 2]])})
    engine.step({"r": 32}, known={"r": (32, [[3, 4]])})
    for written, lease in enumerate([("open", 32, ((1, 2),)), ("open", 64, ((1, 2, 3, 4),))], 1):
        device.done = written
        wait_until(lambda lease=lease: engine.lease() == lease)


def test_commands_of_a_lease_keep_their_order(engines, monkeypatch):
    """Though the device writes between two questions to it."""
    monkeypatch.setattr(rank_side, "WRITTEN_PAUSE_S", 10 * PATIENCE_S)
    answers = iter(())
    engine = engines(mark=lambda: lambda: next(answers, False))
    engine.arrive()
    engine.step({"r": 32}, new={"r": (0, [[1, 2]])})
    engine.step({"r": 32}, known={"r": (32, [[3, 4]])})
    engine.end()
    answers = itertools.chain([False, False], itertools.repeat(True))
    for _ in range(3):
        engine.collect()
    assert engine.lease() == ("sealed", 64, ((1, 2, 3, 4),))


def test_a_draft_model_computes_the_last_tokens_once_more(engines):
    engine = engines(lookahead=4)
    request = engine.arrive(prompt=83)  # three are left to the decode engine
    assert request.num_prompt_tokens == 80
    engine.step({"r": 34}, new={"r": (0, [[1, 2, 3]])})
    assert engine.lease() == ("open", 16, ((1,),))
    engine.step({"r": 46}, known={"r": (31, [[4, 5]])})
    assert engine.lease() == ("open", 64, ((1, 2, 3, 4),))


def test_without_a_draft_model_nothing_settles_before_it_is_computed(engines):
    engine = engines(lookahead=0)
    engine.arrive()
    engine.step({"r": 15}, new={"r": (0, [[1]])})
    assert engine.lease() == ("open", 0, ((),))


@pytest.mark.parametrize(("second_runner", "clears"), [(True, True), (True, False), (False, True), (False, False)])
def test_nothing_settles_early_where_steps_clear_blocks_before_leases_end(engines, second_runner, clears):
    """A preempted request's blocks would be cleared while their lease is held. The seal tells all in any case."""
    engine = engines(3, second_runner=second_runner, engine={"needs_kv_cache_zeroing": clears})
    early = ("open", 0, ((), (), ())) if second_runner and clears else ("open", 80, ((1, 2, 3, 4, 5), (), ()))
    engine.arrive(prompt=81)
    engine.step({"r": 80}, new={"r": (0, [[1, 2, 3, 4, 5], [11, 12, 13, 14, 15], [21]])})
    assert engine.lease() == early
    params = engine.end(blocks=((1, 2, 3, 4, 5), (0, 12, 13, 14, 15), (21,)))
    assert params["remote_block_ids"] == [[5], [15], [21]]
    assert engine.lease() == ("sealed", 80, ((1, 2, 3, 4, 5), (12, 13, 14, 15), (21,)))


def test_a_sealed_lease_is_reported_once_after_its_step(engine):
    engine.arrive()
    engine.step({"r": 64}, new={"r": (0, [[1, 2, 3, 4]])})
    engine.end()
    engine.runtime._worker.revoke("r")
    engine.collect()
    assert engine.sent == [], "MultiConnector learns with the step that the request has ended"
    engine.step()
    assert engine.sent == ["r"]


@pytest.mark.parametrize("when", ["queued", "computed", "ended"])
def test_a_lease_that_has_ended_before_the_seal_gives_the_blocks_back_then(engine, when):
    engine.arrive()
    if when == "queued":
        engine.runtime._worker.revoke("r")
    engine.step({"r": 32}, new={"r": (0, [[1, 2]])})
    if when == "computed":
        engine.runtime._worker.revoke("r")
    engine.step({"r": 32}, known={"r": (32, [[3, 4]])})
    if when == "ended":
        engine.runtime._worker.revoke("r")
    assert engine.sent == [], "vLLM has not ended the request"
    engine.end()
    engine.step()
    assert (engine.sent, engine.lease()) == (["r"], None)


@pytest.mark.parametrize("early", [True, False])
def test_a_preemption_ends_the_lease_before_its_step_writes(engines, early):
    engine = engines(early=early)
    engine.arrive()
    engine.step({"r": 32}, new={"r": (0, [[1, 2]])})
    engine.number += 1
    engine.side.on_scheduled(step_output({"other": 64}, preempted={"r"}), engine.number)
    commands = engine.side.take_commands()
    engine.rank.prepare(commands)
    assert engine.lease() in (None, ("open", 0, ((),))), "only that of a new lease"
    engine.rank.execute(commands)
    engine.write()
    engine.flush()
    engine.step({"r": 16}, known={"r": (0, [[7]])})
    assert engine.lease() == ("open", 16, ((7,),)), "it is offered again"
    engine.step({"r": 48}, known={"r": (16, [[5, 4, 3]])})
    engine.end(blocks=((7, 5, 4, 3),))
    engine.step()
    assert engine.lease() == ("sealed", 64, ((7, 5, 4, 3),))
    assert engine.sent == [], "neither end is that of the request's blocks"
    engine.runtime._worker.revoke("r")
    engine.step()
    assert engine.sent == ["r"]


def test_what_vllm_computes_again_settles_no_more(engine):
    """A load of another connector may fail after the step that used it."""
    engine.arrive()
    engine.step({"r": 32}, new={"r": (0, [[1, 2]])})
    engine.step({"r": 16}, known={"r": (16, None)})
    assert engine.lease() is None


def test_a_request_that_ends_with_other_blocks_is_offered_anew(engine):
    engine.arrive()
    engine.step({"r": 64}, new={"r": (0, [[1, 2, 3, 4]])})
    params = engine.end(blocks=((1, 2, 3, 5),))
    assert Ticket.from_params(params, verify=new_key().verifies).grants[0].kind == "offer"
    assert params["transfer_mode"] == "push", "a router that sends both legs at once must go on"
    engine.step()
    assert engine.lease()[0] == "offer"
    assert engine.sent == []


def test_a_request_that_ends_before_its_ticket_is_signed_is_offered_then(engine):
    request = engine.requests["r"] = new_request(OFFER, 64, request_id="r")
    hold = threading.Event()
    engine.side.offering.submit(hold.wait)
    engine.side.on_new_request(request)
    engine.number += 1
    engine.side.on_scheduled(step_output({"r": 64}, new={"r": (0, [[1, 2, 3, 4]])}), 1)
    engine.rank.end_step(1)
    request.all_token_ids.append(7)
    keeps, params = engine.side.on_finished(engine.requests.pop("r"), [[1, 2, 3, 4]])
    hold.set()
    engine.flush()
    assert (keeps, params["transfer_mode"]) == (True, "push")
    assert engine.kinds() == ["Hold"]
    assert engine.lease()[0] == "offer"


@pytest.mark.parametrize("name", ["0_cmpl-x-0-01234567", "cmpl-x-1-01234567"], ids=["a sample", "a further prompt"])
def test_what_may_get_no_ticket_is_offered_when_it_ends(engine, name):
    engine.arrive(name)
    assert (engine.lease(name), engine.kinds()) == (None, [])
    engine.step({name: 64}, new={name: (0, [[1, 2, 3, 4]])})
    assert engine.end(name)["transfer_mode"] == "push"
    engine.step()
    assert engine.lease(name)[0] == "offer"


def test_peers_find_what_is_offered_by_its_digests(engine):
    engine.arrive("open")
    engine.step({"open": 64}, new={"open": (0, [[1, 2, 3, 4]])})
    name = "0_cmpl-x-0-01234567"
    engine.arrive(name)
    engine.step({name: 64}, new={name: (0, [[5, 6, 7, 8]])})
    engine.end(name)
    engine.kinds()
    opened, offered = (each for each in engine.ordered if isinstance(each, Hold))
    assert opened.digests == offered.digests
    assert len(opened.digests[0]) == 4


def test_requests_without_a_free_lease_are_offered_when_they_end(engines):
    engine = engines(slots=1)
    engine.arrive("a")
    engine.arrive("b")
    engine.step({"b": 64}, new={"b": (0, [[5, 6, 7, 8]])})
    engine.end("a", status=ABORTED, computed=0)
    assert engine.end("b", blocks=((5, 6, 7, 8),))["do_remote_prefill"]
    engine.step()
    assert (engine.lease("a"), engine.lease("b")[0]) == (None, "offer")


def test_a_queued_request_is_renewed_and_nothing_settles_by_that(engine, monkeypatch):
    """Also while a step takes longer than the lease: no other step is needed."""
    engine.arrive()
    engine.arrive("computed", 48)
    engine.step({"computed": 16}, new={"computed": (0, [[1]])})
    engine.begin({"computed": 16}, known={"computed": (16, [[2]])})
    before = engine.kinds()
    now = engine.side.offering._renewed_at + 11.0  # a lease lasts 30 s
    monkeypatch.setattr(offering, "time", SimpleNamespace(monotonic=lambda: now))
    engine.flush()
    engine.flush()
    assert engine.kinds()[len(before) :] == ["Tell"] * 2
    assert engine.rank._taken == engine.ordered[-1].number, "no step was needed"
    assert (engine.lease(), engine.lease("computed")) == (("open", 0, ((),)), ("open", 16, ((1,),)))
    engine.write()
    assert engine.lease("computed") == ("open", 32, ((1, 2),))
    engine.step()
    assert engine.lease("computed") == ("open", 32, ((1, 2),))
    assert len(engine.ordered) == len(before) + 2


def test_a_reset_ends_open_leases_and_reports_none(engine):
    engine.arrive()
    engine.step({"r": 32}, new={"r": (0, [[1, 2]])})
    assert engine.side.reset()
    engine.flush()
    assert engine.lease() is None
    engine.step(preempted={"r"})
    engine.step({"r": 64}, known={"r": (0, [[1, 2, 3, 4]])})
    engine.end()
    engine.step()
    assert (engine.lease()[0], engine.sent) == ("sealed", [])
    assert not any(isinstance(each, Reset) for each in engine.ordered)


def test_a_lease_that_ends_while_the_engine_sleeps_is_not_sealed(engine):
    engine.arrive()
    engine.step({"r": 32}, new={"r": (0, [[1, 2]])})
    engine.runtime.suspend()
    engine.runtime.resume()
    engine.side.meet_ranks([engine.rank.address], [engine.runtime.contact])
    engine.step({"r": 32}, known={"r": (32, [[3, 4]])})
    assert engine.end()["do_remote_prefill"]
    engine.step()
    assert (engine.lease()[0], engine.sent) == ("offer", [])


def test_an_engine_without_the_setting_offers_what_it_has_computed():
    found = side(FullAttentionSpec())
    request = new_request(OFFER, 64, request_id="r")
    found.on_new_request(request)
    _, params = found.on_finished(request, [[1, 2, 3, 4]])
    (command,) = found.take_commands()
    assert (params["transfer_mode"], command.digests) == ("pull", ())


def test_advances_that_are_refused_end_the_lease(engine):
    engine.arrive()
    engine.step()
    engine.rank.take([Tell("r", 32, ((1,),), 1, number=2), Tell("r", 48, ((2, 3),), 1, number=3)])
    engine.rank.take([Tell("r", None, ((4,),), 1, number=4), End(("r",), number=5)])
    assert (engine.lease(), engine.rank._leases) == (None, {})
