"""A producer that tests tell what to do: a worker, its cache of tagged bytes, and what it has on offer."""

import json
from contextlib import asynccontextmanager

import msgspec

import kvflow
from kvflow.leases.tickets import Grant, RankAddress
from kvflow.worker.environment import PRODUCTION
from tests.helpers.settings import flat_config

from .shapes import Shape, whole, write

SECRET = "the secret of the test cluster"


class Producer:
    """One worker that offers requests with tagged bytes."""

    def __init__(self, worker, cache):
        self.worker = worker
        self.cache = cache
        self.endpoint = worker.endpoint
        self._offered = {}

    async def offer(self, request, block_ids, num_tokens):
        """Write the tags of a request and offer it; return what a router carries."""
        self._write(request, block_ids, num_tokens)
        return await self.offer_as_is(request, block_ids, num_tokens)

    async def offer_as_is(self, request, block_ids, num_tokens):
        """Offer whatever the blocks hold: tags for a large cache take longer than moving it."""
        lists = whole(self.cache, block_ids, num_tokens)
        return json.loads(json.dumps(self.worker.offer(request, lists, num_tokens).to_params()))

    async def address(self):
        """What a mint in another process needs to know."""
        return msgspec.to_builtins(self.worker.rank_address)

    async def admit(self, grant: Grant):
        """Hold a lease that a mint has signed."""
        self.worker.admit(grant)

    async def refusal(self, grant: Grant):
        """Say why a lease that a mint has signed is not held."""
        try:
            await self.admit(grant)
        except kvflow.errors.KvflowError as error:
            return str(error)

    async def write(self, request, block_ids, num_tokens):
        self._write(request, block_ids, num_tokens)

    def _write(self, request, block_ids, num_tokens):
        write(self.cache, request, block_ids, num_tokens)
        self._offered[request] = (block_ids, num_tokens)

    async def revoke(self, request):
        return self.worker.revoke(request)

    async def recycle(self, request):
        """Revoke a request and give its blocks to another one at once, as an engine does."""
        return self.recycle_now(request)

    def recycle_now(self, request):
        revoked = self.worker.revoke(request)
        write(self.cache, f"whoever comes after {request}", *self._offered.pop(request))
        return revoked

    async def outcome(self, request):
        """Wait until the lease has ended, and say how."""
        try:
            return await self.worker.wait_offer(request)
        except kvflow.errors.RequestUnknown as error:
            return error.code

    async def held(self):
        """Name the requests whose leases are held."""
        return self.worker._leases.requests()

    async def check(self):
        """Assert the law of blocks: what is lent is what the leases hold."""
        self.worker._leases.check()

    async def leases(self):
        return self.worker.snapshot().leases


@asynccontextmanager
async def producing(shape: Shape, *, engine_id="prefill-0", alike=False, hooks=(), **settings):
    """Open a producer in this process; all that are ``alike`` have one incarnation, and the same epochs."""
    cache = shape.build()
    environment = msgspec.structs.replace(PRODUCTION, draw_bits=lambda _bits: 7) if alike else PRODUCTION
    config = configured(engine_id, **settings)
    async with kvflow.open_worker(config, cache, hooks=hooks, environment=environment) as worker:
        yield Producer(worker, cache)


async def minting(*producers, changed=(), **how):
    """Return the mint of some producers' engine, which lives in another process than they; ``changed``: addresses."""
    addresses = [msgspec.convert(await producer.address(), RankAddress) for producer in producers]
    addresses = [msgspec.structs.replace(address, **dict(changed)) for address in addresses]
    return kvflow.TicketMint("prefill-0", addresses, cluster_secret=SECRET, **how)


async def write_and_admit(grant, *producers):
    """Let producers write what a mint has signed, and hold its lease."""
    for producer in producers:
        await producer.write(grant.request_id, grant.block_ids, grant.num_tokens[0])
        await producer.admit(grant)


STALLS = {"connect_s": 5.0, "handshake_s": 15.0}  # a busy machine stalls for longer than the defaults allow


def configured(engine_id, **settings):
    """Settings that all tests share."""
    return flat_config(engine_id=engine_id, **{"cluster_secret": SECRET, **STALLS, **settings})
