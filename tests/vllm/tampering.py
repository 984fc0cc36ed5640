"""``kv_transfer_params`` that no honest router carries."""

import copy
from collections.abc import Callable
from typing import Any

from handshake.security import ClusterSecurity, sign
from kvflow.leases.tickets import MAC_BYTES
from tests.simulation.tickets import damage, forge, grants_of

Params = dict[str, Any]


def of_other_blocks(params: Params, secret: str, distance: int = 40) -> Params:
    """Return a ticket for blocks that are so much further on, properly signed, and the fields beside it to match."""
    if "kvflow" not in params:  # vLLM's own connector believes what it is told
        told = [[block + distance for block in blocks] for blocks in params["remote_block_ids"]]
        return params | {"remote_block_ids": told}
    key = ClusterSecurity.from_secret(secret).ticket_key

    def move(grant):
        grant["block_ids"] = [
            [block + distance if block >= 0 else block for block in blocks] for blocks in grant["block_ids"]
        ]

    forged = params
    for which in range(len(grants_of(params))):
        forged = forge(forged, move, grant=which, sign=lambda payload: sign(key, payload))
    return forged | {"remote_block_ids": grants_of(forged)[0]["block_ids"]}


def signed_with(params: Params, secret: str) -> Params:
    """Return the same ticket signed with another secret."""
    return of_other_blocks(params, secret, 0)


def changed(**fields: Any) -> Callable[[Params], Params]:
    """Return what replaces fields beside the ticket."""
    return lambda params: copy.deepcopy(params) | fields


def without(*names: str) -> Callable[[Params], Params]:
    """Return what takes fields away."""
    return lambda params: {name: copy.deepcopy(value) for name, value in params.items() if name not in names}


def only(**fields: Any) -> Callable[[Params], Params]:
    """Return what puts these fields in place of all."""
    return lambda _params: fields


def in_grant(**fields: Any) -> Callable[[Params], Params]:
    """Return what replaces fields of the ticket's grant and leaves its signature."""

    return lambda params: forge(params, lambda grant: grant.update(fields))


def with_mac(mac: bytes) -> Callable[[Params], Params]:
    """Return what replaces the MAC of the ticket's grant."""
    return lambda params: damage(params, lambda signed: mac + signed[MAC_BYTES:])


def with_text(change: Callable[[str], str]) -> Callable[[Params], Params]:
    """Return what replaces the ticket's text."""
    return lambda params: params | {"kvflow": change(params["kvflow"])}


def at_address(endpoint: str) -> Callable[[Params], Params]:
    """Return what sends the reader elsewhere, in the grant and beside it."""

    def move(grant: dict[str, Any]) -> None:
        for rank in grant["ranks"]:
            rank["endpoint"] = endpoint

    def change(params: Params) -> Params:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        return forge(params, move) | {"remote_host": host, "remote_port": int(port)}

    return change


def nested(depth: int) -> list[Any]:
    """Return a list in a list in a list."""
    result: list[Any] = []
    for _ in range(depth):
        result = [result]
    return result
