"""``--dispatch concurrent``: both servers are asked at once, and a client sees one answer whichever of them fails."""

import asyncio
import json

import pytest

from tests.helpers.waiting import until

from .test_records import several
from .test_server import ASKED, open_rig
from .upstream import DECODED, hang, hang_up, stream, text

PLACE = {"remote_host": "10.0.0.7", "remote_port": 5600}
EARLY = {"do_remote_prefill": True, "do_remote_decode": False, **PLACE}
PUSHED_TICKET = {**EARLY, "transfer_mode": "push", "kvflow": {"mac": "5a"}}
PUSHED = text(json.dumps({"id": "cmpl-1", "kv_transfer_params": PUSHED_TICKET}))
FAILS = text('{"error": {"message": "no"}}', 500)
ERROR_EVENT = b'data: {"error": {"message": "the load failed"}}\n\n'
EVENTS = b"data: 1\n\n", b"data: [DONE]\n\n"


def turns(*behaviors):
    """Behave once like each; then like the last."""
    left = list(behaviors)

    async def behavior(request):
        return await (left.pop(0) if left[1:] else left[0])(request)

    return behavior


def after(event, behavior):
    async def waiting(request):
        await event.wait()
        return await behavior(request)

    return waiting


def params_of(server):
    return [json.loads(body).get("kv_transfer_params") for body in server.bodies]


def open_concurrent(prefill, *decode, **settings):
    return open_rig(prefill=prefill, decode=decode or (DECODED,), dispatch="concurrent", **settings)


async def test_from_the_second_request_on_both_servers_are_asked_at_once():
    computed = asyncio.Event()
    async with open_concurrent([turns(PUSHED, after(computed, PUSHED))]) as rig:
        assert (await rig.send())[0] == 200
        rig.decode[0].asked.clear()
        asking = asyncio.create_task(rig.send())
        await rig.decode[0].asked.wait()
        computed.set()
        assert (await asking)[0] == 200
        assert params_of(rig.decode[0]) == [PUSHED_TICKET, EARLY]
        assert json.loads(rig.decode[0].bodies[1]) == {**ASKED, "kv_transfer_params": EARLY}


@pytest.mark.parametrize("changes", [{"transfer_mode": "pull"}, {"transfer_mode": None}, {"remote_port": "5600"}])
async def test_a_server_that_offers_nothing_early_is_asked_first(changes):
    ticket = PUSHED_TICKET | changes
    async with open_concurrent([text(json.dumps({"kv_transfer_params": ticket}))]) as rig:
        for _ in range(2):
            assert (await rig.send())[0] == 200
        assert params_of(rig.decode[0]) == [ticket] * 2


async def test_a_serial_proxy_asks_one_after_the_other():
    async with open_rig(prefill=[PUSHED]) as rig:
        for _ in range(2):
            assert (await rig.send())[0] == 200
        assert params_of(rig.decode[0]) == [PUSHED_TICKET] * 2


async def test_a_request_that_no_prefill_server_may_have_is_sent_alone():
    async with open_concurrent([PUSHED]) as rig:
        await rig.send()
        assert (await rig.send(prompt=["a", "b"]))[0] == 200
        assert params_of(rig.decode[0]) == [PUSHED_TICKET, None]
        assert len(rig.prefill[0].bodies) == 1


FAILURES = {"fails": FAILS, "hangs up": hang_up, "has no ticket": text("{}"), "is slow": hang}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_prefill_that_fails_ends_the_early_part_and_decode_computes(failure, streamed):
    """A decode server may have begun a stream in which nothing is yet."""
    waiting, asked = stream(asyncio.Event()) if streamed else hang, asyncio.Event()
    failing = after(asked, FAILURES[failure])
    decode = turns(DECODED, waiting, DECODED)
    slow = {"prefill_timeout_s": 4.0} if failure == "is slow" else {}  # the others may take as long as a machine stalls
    async with open_concurrent([turns(PUSHED, failing)], decode, **slow) as rig:
        await rig.send()
        rig.decode[0].asked.clear()
        asking = asyncio.create_task(rig.send(stream=streamed))
        await rig.decode[0].asked.wait()
        asked.set()
        status, said = await asking
        assert (status, json.loads(said)["choices"]) == (200, [{"text": "b"}])
        await rig.decode[0].cancelled.wait()
        assert params_of(rig.decode[0]) == [PUSHED_TICKET, EARLY, None]


async def fail_early(rig, failing):
    """Send a request whose prefill fails once the decode server has it, and return its status."""
    rig.decode[0].asked.clear()
    asking = asyncio.create_task(rig.send())
    await rig.decode[0].asked.wait()
    failing.set()
    status = (await asking)[0]
    await rig.decode[0].cancelled.wait()
    return status


async def test_the_next_prefill_server_is_asked_at_once_too_when_one_fails():
    failing, decode = asyncio.Event(), turns(DECODED, DECODED, hang, DECODED)
    async with open_concurrent([turns(PUSHED, after(failing, FAILS)), PUSHED], decode) as rig:
        for _ in range(2):
            assert (await rig.send())[0] == 200
        assert await fail_early(rig, failing) == 200
        assert params_of(rig.decode[0]) == [PUSHED_TICKET, PUSHED_TICKET, EARLY, EARLY]


async def test_what_a_prefill_server_refuses_ends_the_early_part():
    refusal, asked = '{"error": {"message": "no"}}', asyncio.Event()
    async with open_concurrent([turns(PUSHED, after(asked, text(refusal, 400)))], turns(DECODED, hang)) as rig:
        await rig.send()
        rig.decode[0].asked.clear()
        asking = asyncio.create_task(rig.send())
        await rig.decode[0].asked.wait()
        asked.set()
        assert await asking == (400, refusal.encode())
        await rig.decode[0].cancelled.wait()
        assert len(rig.decode[0].bodies) == 2


DECODE_FAILURES = {
    "fails": FAILS,
    "hangs up": hang_up,
    "says too much": text(json.dumps({"x": "x" * 5000})),
    "streams an error": stream(ERROR_EVENT),
    "breaks off": stream(None),
}


@pytest.mark.parametrize("failure", DECODE_FAILURES)
async def test_decode_is_asked_again_with_the_ticket_if_its_early_part_fails(failure):
    """The prefill server may have another address than it had."""
    decode = turns(DECODED, DECODE_FAILURES[failure], DECODED)
    async with open_concurrent([PUSHED], decode, body_bytes_max=4000) as rig:
        await rig.send()
        status, said = await rig.send()
        assert (status, json.loads(said)["choices"]) == (200, [{"text": "b"}])
        assert params_of(rig.decode[0]) == [PUSHED_TICKET, EARLY, PUSHED_TICKET]


async def test_decode_servers_out_of_reach_are_named_when_prefill_has_ended():
    async with open_concurrent([PUSHED], None) as rig:
        for _ in range(2):
            status, said = await rig.send()
            assert (status, json.loads(said)["error"]["code"]) == (502, "decode_unreachable")


async def test_a_stream_that_has_begun_outlives_the_prefill(log):
    """Who has begun to answer has the prompt."""
    begun, ended = asyncio.Event(), asyncio.Event()
    decode = turns(DECODED, stream(EVENTS[0], ended, EVENTS[1]))
    async with open_concurrent([turns(PUSHED, after(begun, FAILS))], decode) as rig:
        await rig.send()
        async with rig.post(stream=True) as answer:
            assert await answer.content.readany() == EVENTS[0]
            begun.set()
            await until(lambda: "prefill.failed" in log.read_text())
            ended.set()
            assert await answer.read() == EVENTS[1]
        assert len(rig.decode[0].bodies) == 2


async def test_an_answer_that_is_complete_waits_for_no_prefill():
    async with open_concurrent([turns(PUSHED, hang)]) as rig:
        await rig.send()
        assert (await rig.send())[0] == 200
        await rig.prefill[0].cancelled.wait()


async def test_a_client_that_hangs_up_ends_its_request_on_both_servers():
    async with open_concurrent([turns(PUSHED, hang)], turns(DECODED, hang)) as rig:
        await rig.send()
        for server in (*rig.prefill, *rig.decode):
            server.asked.clear()
        asking = asyncio.create_task(rig.send())
        for server in (*rig.prefill, *rig.decode):
            await server.asked.wait()
        asking.cancel()
        for server in (*rig.prefill, *rig.decode):
            await server.cancelled.wait()
        assert await rig.serves()


async def test_a_server_that_has_failed_is_asked_first_until_it_answers_again():
    failing, decode = asyncio.Event(), turns(DECODED, hang, DECODED)
    async with open_concurrent([turns(PUSHED, after(failing, FAILS), PUSHED)], decode) as rig:
        await rig.send()
        assert await fail_early(rig, failing) == 200
        for _ in range(2):
            assert (await rig.send())[0] == 200
        assert params_of(rig.decode[0])[1:] == [EARLY, None, PUSHED_TICKET, EARLY]


async def test_the_record_tells_what_the_early_part_was(log):
    async with open_concurrent([PUSHED], turns(DECODED, FAILS, DECODED)) as rig:
        for _ in range(3):
            await rig.send()
        url = rig.decode[0].url
        answered = await several(log, 3)
    assert [each["prefilled"] for each in answered] == [True] * 3
    assert [each["decode_server"] for each in answered] == [url] * 3
    failed = [[(each["role"], each["server"]) for each in record["failed_attempts"]] for record in answered]
    assert failed == [[], [("decode", url)], []]
    assert all(0 < each["prefill_s"] <= each["elapsed_s"] for each in answered)
