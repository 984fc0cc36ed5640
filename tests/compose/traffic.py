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

import msgspec

from kvflow.tools.demo.messages import MAX_TOKENS, PromptRequest
from kvflow.tools.demo.run import EngineFailed, open_client
from kvflow.tools.proxy import ProxyConfig
from kvflow.tools.proxy.completions import OFFER
from kvflow.tools.proxy.server import open_proxy

PREFILL, DECODE = os.environ["KVFLOW_DEMO_PREFILL"], os.environ["KVFLOW_DEMO_DECODE"]


def prompt(index):
    """Long enough for full blocks in every group, and different each time."""
    return tuple((index * 31 + step * 7) % 251 for step in range(600))


def say(**fields):
    print(json.dumps(fields), flush=True)


async def outcome(name, answer):
    try:
        tokens = (await answer).choices[0].token_ids
    except EngineFailed as error:
        code = re.search(r"\[(\w+)\]", str(error))
        return {"request": name, "tokens": None, "code": code[1] if code else "", "failure": str(error)}
    return {"request": name, "tokens": tokens}


def prefill_one(client, name, index):
    """Have the prefill engine compute a prompt, as a router does."""
    return client.complete(PREFILL, name, PromptRequest(prompt=prompt(index), max_tokens=1, kv_transfer_params=OFFER))


async def prefill(count):
    async with open_client() as client:
        for index in range(count):
            answer = await prefill_one(client, f"ticket-{index}", index)
            say(request=f"ticket-{index}", index=index, params=answer.kv_transfer_params)


async def decode():
    async with open_client() as client:
        replies = []
        for ticket in map(json.loads, sys.stdin):
            request = PromptRequest(
                prompt=prompt(ticket["index"]), max_tokens=MAX_TOKENS, kv_transfer_params=ticket["params"]
            )
            replies.append(outcome(ticket["request"], client.complete(DECODE, ticket["request"], request)))
        replies.append(outcome("late", prefill_one(client, "late", 99)))
        tasks = [asyncio.ensure_future(reply) for reply in replies]
        held = await client.drain(DECODE)
        while not held.blocks_used and not all(task.done() for task in tasks):
            held = await client.drain(DECODE)
        say(in_flight=held.blocks_used)
        for answer in asyncio.as_completed(tasks):
            say(**await answer)


async def serve(count):
    config = ProxyConfig(prefill=(f"http://{PREFILL}",), decode=(f"http://{DECODE}",))
    async with open_client() as client, open_proxy(config, "127.0.0.1", 0) as router:
        await client.wait_until_healthy(PREFILL, 60)
        for index in range(count):
            request = PromptRequest(prompt=prompt(index), max_tokens=MAX_TOKENS)
            say(**await outcome(f"serve-{index}", client.complete(router, f"serve-{index}", request)))
        for address in (DECODE, PREFILL):
            say(**msgspec.structs.asdict(await client.drain(address)))


match sys.argv[1:]:
    case ["prefill", count]:
        asyncio.run(prefill(int(count)))
    case ["decode"]:
        asyncio.run(decode())
    case ["serve", count]:
        asyncio.run(serve(int(count)))
