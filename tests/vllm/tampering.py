"""``kv_transfer_params`` that no honest router carries."""

import copy
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

import kvflow
from handshake.security import ClusterSecurity, sign

Params = dict[str, Any]


def of_other_blocks(params: Params, secret: str, distance: int = 40) -> Params:
    """Return a ticket for blocks that are so much further on, properly signed, and the fields beside it to match."""
    if "kvflow" not in params:  # vLLM's own connector believes what it is told
        told = [[block + distance for block in blocks] for blocks in params["remote_block_ids"]]
        return params | {"remote_block_ids": told}
    ticket = kvflow.Ticket.from_params(params)
    key = ClusterSecurity.from_secret(secret).ticket_key

    def moved(grant):
        shifted = tuple(
            tuple(block + distance if block >= 0 else block for block in blocks) for blocks in grant.block_ids
        )
        return replace(grant, block_ids=shifted).signed(lambda payload: sign(key, payload))

    forged = replace(ticket, grants=tuple(moved(grant) for grant in ticket.grants))
    blocks = [list(ids) for ids in forged.grants[0].block_ids]
    return copy.deepcopy(params) | {"remote_block_ids": blocks} | forged.to_params()


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

    def change(params: Params) -> Params:
        params = copy.deepcopy(params)
        params["kvflow"]["grants"][0].update(fields)
        return params

    return change


def without_in_grant(*names: str) -> Callable[[Params], Params]:
    """Return what takes fields of the ticket's grant away."""

    def change(params: Params) -> Params:
        params = copy.deepcopy(params)
        for name in names:
            params["kvflow"]["grants"][0].pop(name)
        return params

    return change


def at_address(endpoint: str) -> Callable[[Params], Params]:
    """Return what sends the reader elsewhere, in the grant and beside it."""

    def change(params: Params) -> Params:
        params = copy.deepcopy(params)
        for rank in params["kvflow"]["grants"][0]["ranks"]:
            rank["endpoint"] = endpoint
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        return params | {"remote_host": host, "remote_port": int(port)}

    return change


def nested(depth: int) -> list[Any]:
    """Return a list in a list in a list."""
    result: list[Any] = []
    for _ in range(depth):
        result = [result]
    return result
