"""A lease is held as soon as its ticket is signed, once, and its end is reported once, whatever comes first."""

import hmac
import itertools
import os
import socket as sockets
import stat
import tempfile
import threading
from pathlib import Path

import msgspec
import pytest
import zmq

from kvflow import Ticket, TicketMint
from kvflow.integrations.vllm import admission
from kvflow.integrations.vllm import worker as rank_side
from kvflow.integrations.vllm.admission import MESSAGE_BYTES_MAX, Contact, EarlyAdmission, GrantReceiver, reachable
from kvflow.integrations.vllm.messages import Hold, Reset
from kvflow.integrations.vllm.runtime import RankRuntime
from kvflow.integrations.vllm.worker import MARKS_MAX
from tests.helpers.settings import flat_config
from tests.helpers.waiting import wait_until

from .vllm_like import (
    OFFER,
    PATIENCE_S,
    SECRET,
    Device,
    FullAttentionSpec,
    counted,
    new_request,
    new_ticket,
    offered,
    rank_address,
    side,
    small_cache,
    step_output,
)

STEP = 5
TICKET = new_ticket()


class Rank:
    """Notes what it is told to hold."""

    def __init__(self):
        self.told = []
        self.event = threading.Event()
        self.error = None
        self.void = []
        self.ends = True

    def reset(self, request_ids):
        self.void.append(request_ids)
        return self.ends

    def take(self, commands):
        self.told.extend(commands)
        self.event.set()
        if self.error:
            raise self.error

    def await_told(self):
        assert self.event.wait(PATIENCE_S)
        self.event.clear()
        return self.told


def admit(ticket):
    return Hold(ticket.request_id, ticket.grants[0], STEP, number=1)


def packed(command):
    return msgspec.msgpack.encode(command)


def message(ticket, key):
    text = packed(admit(ticket))
    return hmac.digest(key, text, "sha256") + text


# A rank that is told twice.


class World:
    """A rank with a lease, what the engine is told of it, and the two ways to admit it."""

    def __init__(self, device=None, slots=1):
        config = flat_config(engine_id="engine", cluster_secret=SECRET, transport="loopback", lease_slots=slots)
        self.cache = small_cache()
        self.runtime = RankRuntime(config, self.cache, mark=device and device.mark)
        self.sleep, self.wake = self.runtime.suspend, self.runtime.resume
        self.sent = []
        mint = TicketMint("engine", [self.runtime.rank.address], cluster_secret=SECRET, block_sizes=(4,))
        self.ticket, self.grant = mint.offer("r", block_ids=[[1]], num_tokens=4)
        if slots == 1:
            mint.retire("r")
        self.admit = Hold("r", self.grant, STEP, number=1)
        self.next = Hold("next", mint.offer("next", block_ids=[[1]], num_tokens=4)[1], STEP, number=2)
        if device is None:
            self.runtime.rank.end_step(STEP)

    def early(self):
        self.runtime.rank.take([self.admit])

    def command(self):
        self.runtime.rank.execute([self.admit])

    def end(self):
        self.runtime._worker.revoke("r")

    def collect(self):
        self.sent += sorted(self.runtime.rank.collect().sent)

    def held(self):
        return self.runtime._worker.snapshot().leases


@pytest.fixture
def world():
    world = World()
    yield world
    world.runtime.close()


BOTH_WAYS = sorted(set(itertools.permutations(["early", "command", "early"])))


@pytest.mark.parametrize("ways", BOTH_WAYS, ids="-".join)
def test_a_grant_that_comes_several_times_is_held_and_reported_once(world, ways):
    for way in ways:
        getattr(world, way)()
        assert world.held() == 1
    world.collect()
    assert world.sent == []
    world.end()
    world.collect()
    world.collect()
    assert world.sent == ["r"]


@pytest.mark.parametrize("first", ["early", "command"])
@pytest.mark.parametrize(
    "between",
    [
        *(["end", *more] for more in ([], ["collect"], ["sleep"], ["sleep", "wake"], ["sleep", "collect", "wake"])),
        *(["sleep"], ["sleep", "wake"]),
    ],
    ids="-".join,
)
def test_a_lease_that_has_ended_is_not_held_again(world, first, between):
    for step in [first, *between]:
        getattr(world, step)()
    for step in ["early", "command", "early"]:
        if step != first or first == "early":
            getattr(world, step)()
    if "wake" not in between and "sleep" in between:
        world.wake()
    assert world.held() == 0
    world.collect()
    world.collect()
    assert world.sent == ["r"]


def test_the_end_of_an_early_lease_is_reported_after_its_order(world):
    """``MultiConnector`` learns with the order's step whether another connector still saves the blocks."""
    for step in ["early", "end", "collect"]:
        getattr(world, step)()
    assert world.sent == []
    world.command()
    world.collect()
    assert world.sent == ["r"]


@pytest.mark.parametrize("ways", [["early", "command"], ["command", "early"]], ids="-".join)
def test_a_grant_that_comes_while_the_engine_sleeps_stays_refused(world, ways):
    first, second = ways
    world.sleep()
    getattr(world, first)()
    world.wake()
    getattr(world, second)()
    assert world.held() == 0
    world.collect()
    world.collect()
    assert world.sent == ["r"]


def test_what_is_refused_with_the_step_is_not_held_later(world):
    """Its blocks are the engine's again by then."""
    world.runtime.rank.execute([msgspec.structs.replace(world.next, number=1)])  # it takes the only slot
    grant = msgspec.structs.replace(world.grant, epoch=world.next.grant.epoch + 2)
    world.admit = msgspec.structs.replace(world.admit, grant=grant, number=2)
    world.command()
    world.collect()
    assert world.sent == ["r"]
    world.runtime._worker.revoke("next")
    world.early()
    assert world.held() == 0


@pytest.mark.parametrize("way", ["early", "command"])
def test_an_interrupted_admission_leaves_no_lease_of_freed_blocks(world, monkeypatch, way):
    worker = world.runtime._worker
    whole = worker.admit

    def interrupted(*given):
        whole(*given)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(worker, "admit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        getattr(world, way)()
    world.command()
    world.collect()
    world.collect()
    assert (world.held(), world.sent) == (0, ["r"])


def test_a_late_message_leaves_the_slot_to_the_next_lease(world):
    world.command()
    world.end()
    world.runtime.rank.take([world.next])
    world.early()
    assert world.held() == 1
    world.runtime.rank.execute([world.next])
    world.collect()
    assert world.sent == ["r"]
    assert world.runtime.rank.take_counters()["leases"] == {"revoked": 1}


def test_commands_behind_a_lost_one_wait_for_their_step(world):
    world.runtime.rank.take([world.next])
    assert world.held() == 0
    world.runtime.rank.execute([world.admit, world.next])
    assert world.held() == 1, "the slot is taken"
    world.collect()
    assert world.sent == ["next"]


# A reset.


@pytest.mark.parametrize("ways", BOTH_WAYS, ids="-".join)
@pytest.mark.parametrize("before", range(4))
def test_a_reset_ends_a_lease_in_spite_of_what_is_on_its_way(world, ways, before):
    for way in ways[:before]:
        getattr(world, way)()
    assert world.runtime.rank.reset(("r", "unknown"))
    assert world.held() == 0
    for way in ways[before:]:
        getattr(world, way)()
        assert world.held() == 0
    world.runtime.rank.execute([Reset(("r", "unknown"))])
    world.early()
    world.collect()
    world.collect()
    assert (world.held(), world.sent) == (0, ["r"])
    world.runtime.rank.execute([world.next])
    assert world.held() == 1, "of later offers it knows nothing"


def test_a_lease_that_waits_for_its_device_is_not_held_after_a_reset(late, device):
    end_steps(late, STEP)
    late.command()
    assert late.runtime.rank.reset(("r",))
    late.runtime.rank.execute([Reset(("r",))])
    device.done = 1
    late.collect()
    late.collect()
    assert (late.held(), late.sent) == (0, ["r"])


# A device that still writes when its step has ended.


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def late(device, monkeypatch):
    """A rank whose device writes late. Early admissions are tried once, if the test does not say otherwise."""
    monkeypatch.setattr(rank_side, "WRITTEN_PAUSE_S", 10 * PATIENCE_S)
    world = World(device, slots=2)
    yield world
    world.runtime.close()


def end_steps(world, *steps):
    for step in steps:
        world.runtime.rank.end_step(step)


def test_a_lease_whose_blocks_are_written_waits_for_no_later_step(late, device):
    end_steps(late, STEP, STEP + 1)
    device.done = 1
    late.early()
    assert late.held() == 1


def test_a_lease_is_not_held_before_its_step_was_given_to_the_device(late, device):
    """The scheduler may hear of a step from another rank."""
    end_steps(late, STEP - 1)
    device.done = 2
    late.early()
    late.command()
    assert late.held() == 0
    end_steps(late, STEP)
    late.collect()
    assert late.held() == 1


def test_steps_that_nothing_waits_for_are_forgotten(late, device):
    end_steps(late, *range(STEP, STEP + 100))
    device.done = 50
    late.command()
    assert late.held() == 0, "a mark that is still watched stands for the earlier ones"
    device.done = 100
    late.collect()
    assert late.held() == 1
    assert len(late.runtime.rank._marks) <= MARKS_MAX


def test_an_early_admission_needs_no_further_step(late, device, monkeypatch):
    """``LLM.generate`` returns when its requests have ended, and steps the engine no more."""
    monkeypatch.setattr(rank_side, "WRITTEN_PAUSE_S", 0.001)
    end_steps(late, STEP)
    late.early()
    assert late.held() == 0
    device.done = 1
    wait_until(late.held)
    late.command()
    assert late.held() == 1


@pytest.mark.parametrize("pause_s", [0.001, 10 * PATIENCE_S])
def test_an_early_admission_is_not_tried_again_when_the_rank_has_ended(late, device, monkeypatch, caplog, pause_s):
    """Whether a look is due soon or has just been."""
    monkeypatch.setattr(rank_side, "WRITTEN_PAUSE_S", pause_s)
    end_steps(late, STEP)
    late.early()
    late.runtime.close()
    device.done = 1
    late.runtime.rank.take()
    assert not late.runtime.rank._watch.is_alive()
    assert "not offered" not in caplog.text


def test_a_look_that_waits_for_its_rank_does_not_keep_it_from_ending(late, device, monkeypatch):
    rank, entered, left = late.runtime.rank, threading.Event(), threading.Event()
    monkeypatch.setattr(rank_side, "WRITTEN_PAUSE_S", 0.001)
    admit = late.runtime._worker.admit
    monkeypatch.setattr(
        late.runtime._worker, "admit", lambda *given: (entered.set(), left.wait(PATIENCE_S), admit(*given))
    )
    end_steps(late, STEP)
    late.early()
    device.done = 1
    assert entered.wait(PATIENCE_S)
    ending = threading.Thread(target=late.runtime.close)
    ending.start()
    assert rank._watch.is_alive()
    left.set()
    ending.join(PATIENCE_S)
    assert not ending.is_alive()
    assert not rank._watch.is_alive()


def test_a_rank_that_ends_while_a_look_begins_waits_for_no_other_look(late, monkeypatch):
    rank, wait, ended = late.runtime.rank, late.runtime.rank._stopped.wait, threading.Event()
    ending = threading.Thread(target=lambda: (late.runtime.close(), ended.set()), daemon=True)

    def ends_meanwhile(_pause_s):
        if ending.ident is not None:
            return rank._stopped.is_set()
        ending.start()
        wait(PATIENCE_S)
        return False  # the pause was over just before

    monkeypatch.setattr(rank._stopped, "wait", ends_meanwhile)
    end_steps(late, STEP)
    late.early()
    assert ended.wait(PATIENCE_S)
    assert not rank._watch.is_alive()


def test_a_newer_grant_does_not_let_an_older_one_be_held_twice(late, device):
    end_steps(late, STEP)
    late.command()
    late.runtime.rank.execute([late.next])
    device.done = 1
    late.collect()
    assert late.held() == 2
    late.end()
    late.early()
    late.runtime.rank.take([late.next])
    late.collect()
    assert (late.held(), late.sent) == (1, ["r"])


@pytest.mark.parametrize("again", ["reset", "sleep"])
def test_a_look_that_is_due_at_a_reset_or_sleep_holds_nothing_afterwards(late, device, monkeypatch, again):
    end_steps(late, STEP)
    rank, asked = late.runtime.rank, threading.Semaphore(0)
    (step, passed) = rank._marks.pop()
    rank._marks.append((step, lambda: (asked.release(), passed())[1]))
    monkeypatch.setattr(rank_side, "WRITTEN_PAUSE_S", 0.001)
    late.early()
    for _ in range(3):
        assert asked.acquire(timeout=PATIENCE_S)
    if again == "reset":
        assert rank.reset(("r",))
    else:
        late.sleep()
    device.done = 1
    wait_until(lambda: not rank._unwritten)
    late.command()
    if again == "sleep":
        late.wake()
    assert late.held() == 0
    late.collect()
    assert late.sent == ["r"]


@pytest.mark.parametrize("slept", [["sleep"], ["sleep", "wake"]], ids="-".join)
def test_a_lease_that_waits_for_the_device_while_the_engine_sleeps_ends(late, device, slept):
    end_steps(late, STEP)
    late.command()
    for step in slept:
        getattr(late, step)()
    device.done = 1
    late.collect()
    late.collect()
    assert late.sent == ["r"]


# The scheduler's side.


def test_a_command_names_the_last_step_that_computed_its_request():
    producer = side(FullAttentionSpec())
    request = new_request(OFFER, request_id="r")
    producer.on_new_request(request)
    for step, scheduled in enumerate([["other"], ["other", "r"], ["r"], ["other"]]):
        producer.on_scheduled(step_output(dict.fromkeys(scheduled, 1)), step)
    assert producer.on_finished(request, ([1, 2, 3],))[0]
    assert [command.step for command in producer.take_commands()] == [2]
    assert producer.offering._wanted == {}


@pytest.mark.parametrize("error", [None, MemoryError(), RecursionError(), OSError("a defect")], ids=repr)
def test_a_lease_is_held_without_a_step_and_on_offer_in_any_case(error):
    rank, producer = Rank(), side(FullAttentionSpec(), met=False)
    rank.error = error
    with reachable(rank, apart=False) as contact:
        producer.meet_ranks([rank_address()], [contact])
        keep, params = offered(producer)
        rank.await_told()
    assert (keep, params["do_remote_prefill"]) == (True, True)
    (command,) = producer.take_commands()
    assert rank.told == [command]
    assert counted(producer, "defects") == {}


def test_no_rank_is_told_of_an_offer_that_fails(monkeypatch):
    rank, producer = Rank(), side(FullAttentionSpec(), met=False)
    monkeypatch.setattr(Ticket, "to_router_params", lambda _: 1 / 0)
    with reachable(rank, apart=False) as contact:
        producer.meet_ranks([rank_address()], [contact])
        assert offered(producer) == (False, None)
        producer.close()
    assert rank.told == []
    assert producer.take_commands() == []
    producer.offering.sent("r")  # its slot is free already


def test_a_rank_that_has_gone_or_was_never_here_waits_for_the_step(caplog):
    rank, producer = Rank(), side(FullAttentionSpec(), met=False)
    elsewhere = Contact("another", "ipc:///nowhere/at/all", b"k" * 32)
    with reachable(rank, apart=False) as contact, caplog.at_level("INFO", logger="vllm.kvflow"):
        producer.meet_ranks([rank_address()], [contact, elsewhere, Contact("alone", "", b"k" * 32)])
    assert caplog.text.count("on another host") == 2
    assert offered(producer)[0]
    producer.close()
    assert rank.told == []
    assert len(producer.take_commands()) == 1


def test_a_scheduler_that_is_closed_tells_nobody():
    rank, producer = Rank(), side(FullAttentionSpec(), met=False)
    with reachable(rank, apart=True) as contact:
        producer.meet_ranks([rank_address()], [contact])
        producer.close()
        producer.close()
        assert offered(producer)[0]
        producer.close()
    assert rank.told == []


def test_a_key_is_not_printed():
    assert repr(b"k" * 32) not in repr(Contact("name", "ipc:///x", b"k" * 32))


# The socket.


@pytest.fixture
def socket(monkeypatch):
    """A rank, how it is reached, and a scheduler that reaches it as if it were in another process."""
    rank, early = Rank(), EarlyAdmission()
    with reachable(rank, apart=True) as contact:
        monkeypatch.setattr(admission, "_ranks", {})
        early.meet([contact])
        yield rank, contact, early
        early.close()


def send_until_told(rank, early, ticket=TICKET):
    """Send until it has arrived: a connection takes a moment, and nothing is kept for it."""
    for _ in range(int(PATIENCE_S / 0.01)):
        early.send(admit(ticket))
        if rank.event.wait(0.01):
            rank.event.clear()
            return
    raise AssertionError("nothing has arrived")


def test_a_rank_of_another_process_is_told_over_its_socket(socket):
    rank, contact, early = socket
    folder = Path(contact.endpoint.removeprefix("ipc://")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    send_until_told(rank, early)
    assert rank.told[0] == admit(TICKET)


def test_a_rank_that_has_ended_keeps_no_other_from_being_told(socket, tmp_path):
    rank, contact, early = socket
    (tmp_path / "ended").touch()
    early.meet([Contact("ended", f"ipc://{tmp_path}/ended", b"k" * 32), contact])
    send_until_told(rank, early)


def hostile(key):
    command = msgspec.to_builtins(admit(TICKET))
    text = packed(command)
    signed = {
        "not a command": packed("hello"),
        "nothing behind the MAC": b"",
        "no MessagePack": b"\xc1",
        "a step of nonsense": packed(command | {"step": "soon"}),
        "no grant": packed({name: command[name] for name in ("type", "request_id")}),
        "a command of another kind": packed(command | {"type": "Cancel"}),
        "a list of commands": packed([command]),
        "a reset of nonsense": packed({"type": "Reset", "void": STEP}),
        "a message that is cut": text[:-40],
        "a grant of nonsense": packed(command | {"grant": "A" * (8 << 20)}),
    }
    return {
        "nothing": b"",
        "less than a MAC": b"x" * 31,
        "another key": message(TICKET, b"k" * 32),
        "a command without a MAC": text,
        "a bit flipped": bytes([message(TICKET, key)[0] ^ 1]) + message(TICKET, key)[1:],
        "more than is read": bytes(MESSAGE_BYTES_MAX + 1),
        **{name: hmac.digest(key, each, "sha256") + each for name, each in signed.items()},
    }


@pytest.mark.parametrize("name", hostile(b""))
def test_what_the_scheduler_has_not_signed_is_dropped_and_the_rank_goes_on(socket, name):
    rank, contact, early = socket
    rubbish = hostile(contact.key)[name]
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(contact.endpoint)
        for _ in range(3):
            stranger.send(rubbish)
            stranger.send_multipart([rubbish, b""])
        honest = new_ticket(request_id=f"after {name}")
        stranger.send(message(honest, contact.key))  # behind them, unless they have ended its connection
        if name == "more than is read":
            send_until_told(rank, early, honest)
        else:
            rank.await_told()
    assert {command.request_id for command in rank.told} == {honest.request_id}


@pytest.mark.parametrize("ends", [True, False])
def test_a_rank_of_another_process_answers_a_reset(socket, ends, monkeypatch):
    rank, _, early = socket
    rank.ends = ends
    monkeypatch.setattr(admission, "RESET_WAIT_S", PATIENCE_S)
    assert early.reset(["r", "s"]) is ends
    assert early.reset(["t"]) is ends
    assert rank.void == [("r", "s"), ("t",)]


def test_an_answer_that_is_not_the_rank_s_own_ends_no_reset(monkeypatch):
    early = EarlyAdmission()
    monkeypatch.setattr(admission, "RESET_WAIT_S", 0.2)
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context, context.socket(zmq.ROUTER) as stranger:
        stranger.linger = 0
        stranger.bind(f"ipc://{folder}/admissions")
        early.meet([Contact("another", f"ipc://{folder}/admissions", b"k" * 32)])
        done = []
        asked = threading.Thread(target=lambda: done.append(early.reset(["r"])))
        asked.start()
        sender, message = stranger.recv_multipart()
        stranger.send_multipart([sender, message[:32]])
        asked.join(PATIENCE_S)
        assert done == [False]
        early.close()


def test_a_reset_is_complete_only_if_every_rank_can_be_reached():
    rank, early = Rank(), EarlyAdmission()
    assert not early.reset(["r"]), "no rank is known"
    with reachable(rank, apart=False) as contact:
        early.meet([contact])
        assert early.reset(["r"])
        early.meet([contact, Contact("elsewhere", "", b"k" * 32)])
        assert not early.reset(["r"])
        early.meet([contact])
    assert not early.reset(["r"]), "it has ended"
    assert len(rank.void) == 2


def test_a_rank_that_fails_at_one_message_takes_the_next(socket, caplog):
    rank, _, early = socket
    rank.error = RuntimeError("a defect")
    send_until_told(rank, early)
    rank.error = None
    send_until_told(rank, early)
    assert "a defect" in caplog.text


def test_a_socket_is_removed_when_its_rank_ends():
    with reachable(Rank(), apart=True) as contact:
        folder = Path(contact.endpoint.removeprefix("ipc://")).parent
        assert folder.exists()
    assert not folder.exists()


def test_the_sockets_of_killed_ranks_are_removed_and_no_others(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with reachable(Rank(), apart=True) as alive:
        folders = [Path(alive.endpoint.removeprefix("ipc://")).parent]
        folders += [tmp_path / f"kvflow-{name}" for name in ("starts", "other", "killed")]
        for folder, name in zip(folders[1:], ("admissions", "notes", "admissions"), strict=True):
            folder.mkdir()
            with sockets.socket(sockets.AF_UNIX) as unheard:
                unheard.bind(str(folder / name))
        for folder in (folders[0], folders[3]):
            os.utime(folder / "admissions", (0, 0))
        with reachable(Rank(), apart=True) as started:
            folders.append(Path(started.endpoint.removeprefix("ipc://")).parent)
            assert set(tmp_path.iterdir()) == {*folders} - {tmp_path / "kvflow-killed"}


def test_a_rank_without_a_folder_for_its_socket_is_served_by_steps(monkeypatch, tmp_path, caplog):
    deep = tmp_path / ("d" * 120)  # longer than the path of a socket may be
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with reachable(Rank(), apart=True) as contact:
        assert contact.endpoint == ""
    assert list(deep.iterdir()) == []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with reachable(Rank(), apart=True) as contact:
        assert contact.endpoint == ""
    assert caplog.text.count("its socket cannot be opened") == 2


def test_a_forked_child_leaves_the_socket_to_its_parent():
    rank = Rank()
    listener = GrantReceiver(rank, b"k" * 32)
    child = os.fork()
    if not child:
        listener.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert Path(listener.endpoint.removeprefix("ipc://")).exists()
    listener.close()
