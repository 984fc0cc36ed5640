"""Pulls of blocks that their producer recycles meanwhile."""

import asyncio

from kvflow import errors


async def attempt(consumer, params, targets):
    """Pull, and say how it ended."""
    try:
        await consumer.pull(params, targets)
    except errors.StaleLease as error:
        return error.code
    return "completed"


async def recycle_after(turns, producer, request):
    """Recycle a request after some turns of the loop."""
    for _ in range(turns):
        await asyncio.sleep(0)
    await producer.recycle(request)
