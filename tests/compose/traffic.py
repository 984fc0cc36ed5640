"""Requests from inside the private network, as a program of few words. Each answer is a line of JSON.

``prefill COUNT`` prefills prompts and prints a ticket each.
``decode`` reads tickets from standard input and sends all at once, with one more prefill, ``late``, beside them. It
prints ``{"in_flight": BLOCKS}`` as soon as the decode engine has taken blocks, then an outcome per request as it comes.
``serve COUNT`` sends prompts through both engines and prints an outcome each, then what both engines still hold.
"""

# ruff: noqa: T201  # standard output is what it talks on

import asyncio
import json
import os
import re
import sys

from kvflow.tools.demo.channel import EngineFailed, call, wait_until_reachable
from kvflow.tools.demo.messages import Decode, Prefill, request_from_line, to_line
from kvflow.tools.demo.router import MAX_TOKENS, drain, through_two

PREFILL, DECODE = os.environ["KVFLOW_DEMO_PREFILL"], os.environ["KVFLOW_DEMO_DECODE"]


def prompt(index):
    """Long enough for full blocks in every group, and different each time."""
    return bytes((index * 31 + step * 7) % 251 for step in range(600))


def say(**fields):
    print(json.dumps(fields), flush=True)


async def outcome(name, reply):
    try:
        tokens = (await reply).tokens
    except EngineFailed as error:
        code = re.search(r"\[(\w+)\]", str(error))
        return {"request": name, "tokens": None, "code": code[1] if code else "", "failure": str(error)}
    return {"request": name, "tokens": tokens}


async def prefill(count):
    for index in range(count):
        reply = await call(PREFILL, Prefill(request_id=f"ticket-{index}", prompt=prompt(index)))
        ticket = Decode(
            request_id=f"ticket-{index}",
            num_prompt_tokens=len(prompt(index)),
            token=reply.token,
            max_tokens=MAX_TOKENS,
            kv_transfer_params=reply.kv_transfer_params,
        )
        print(to_line(ticket).decode(), end="", flush=True)


async def decode():
    tickets = [request_from_line(line.encode()) for line in sys.stdin]
    replies = [outcome(ticket.request_id, call(DECODE, ticket)) for ticket in tickets]
    replies.append(outcome("late", call(PREFILL, Prefill(request_id="late", prompt=prompt(99)))))
    tasks = [asyncio.ensure_future(reply) for reply in replies]
    held = await drain(DECODE)
    while not held.blocks_used and not all(task.done() for task in tasks):
        held = await drain(DECODE)
    say(in_flight=held.blocks_used)
    for answer in asyncio.as_completed(tasks):
        say(**await answer)


async def serve(count):
    await wait_until_reachable(PREFILL, 60)
    send = through_two(PREFILL, DECODE)
    for index in range(count):
        say(**await outcome(f"serve-{index}", send(f"serve-{index}", prompt(index))))
    for address in (DECODE, PREFILL):
        print(to_line(await drain(address)).decode(), end="", flush=True)


match sys.argv[1:]:
    case ["prefill", count]:
        asyncio.run(prefill(int(count)))
    case ["decode"]:
        asyncio.run(decode())
    case ["serve", count]:
        asyncio.run(serve(int(count)))
