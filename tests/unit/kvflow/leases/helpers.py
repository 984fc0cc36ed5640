"""What the tests of tickets and leases share: a key, addresses, and grants."""

import hashlib
import hmac

from kvflow.leases.issuer import Issuer
from kvflow.leases.tickets import RankAddress

KEY = b"a key of the tests"
BASE = 1000
SLOTS = 4


def sign(payload):
    return hmac.digest(KEY, payload, hashlib.sha256)


def verify(payload, mac):
    return hmac.compare_digest(sign(payload), mac)


def address(rank=0, *, incarnation="0" * 32, base=BASE, slots=SLOTS):
    return RankAddress(rank, incarnation, f"tcp://127.0.0.1:{5000 + rank}", base, slots)


def mint_of(*addresses, engine_id="prefill-0", lease_s=30.0, head_start=0, wall_clock=None, block_sizes=()):
    return Issuer(
        engine_id,
        addresses or (address(),),
        sign=sign,
        lease_s=lease_s,
        head_start=head_start,
        wall_clock=wall_clock,
        block_sizes=block_sizes,
    )


def ticket_of(request_id="request-1", rank=0, engine_id="prefill-0", num_tokens=(48, 16)):
    mint = mint_of(address(rank), engine_id=engine_id)
    return mint.offer(request_id, block_ids=[[3, 4, -1], [17]], num_tokens=num_tokens)[0]
