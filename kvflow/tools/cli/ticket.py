"""``kvflow ticket``: what a ticket says, whether it was signed with our secret, and when it expires."""

import argparse
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from kvflow.config import SECRET_VARIABLE
from kvflow.errors import StaleLease, TicketInvalid, counted, quoted
from kvflow.leases.tickets import TICKET_CHARS_MAX, Grant, Ticket
from kvflow.tools.cli.arguments import (
    Subparsers,
    add_command,
    member_config,
    print_facts,
    print_json,
    read_file,
)
from kvflow.tools.doctor.codes import FailureFigures, failure_of

INPUT_BYTES_MAX = TICKET_CHARS_MAX + (1 << 20)
"""The longest ticket, and 1 MiB of JSON around it."""

RANKS_SHOWN = 16
"""Ranks that the text names; ``--json`` has all of them."""

WRAPPERS = ("kv_transfer_params", "kvflow")
"""Keys that may surround a ticket, the outer one first."""

UNTIMED = {
    "kept": "when its engine ends it: the blocks are kept, not offered",
    "open": "{:g} s after its producer or a reader has renewed it: its blocks may not all be computed",
}
"""When a lease of a kind ends whose ticket does not tell."""

Signature = Literal["valid", "wrong", "not checked"]


class RankFigures(Struct, frozen=True, kw_only=True):
    """One rank that a ticket names."""

    rank: int
    endpoint: str
    incarnation: str
    public_key: str | None


class LeasedGroup(Struct, frozen=True, kw_only=True):
    """The blocks of one group; ``block_size`` is None if the ticket does not say what its blocks hold."""

    blocks: int
    absent: int
    tokens: int
    block_size: int | None


class GrantFigures(Struct, frozen=True, kw_only=True):
    """One grant: which ranks keep which blocks, and until when."""

    engine_id: str
    request_id: str
    ranks: tuple[RankFigures, ...]
    slot: int
    epoch: str
    groups: tuple[LeasedGroup, ...]
    admitted: bool
    lease_s: float
    issued_at: float | None
    expires_in_s: float | None
    kind: str


class TicketFigures(Struct, frozen=True, kw_only=True):
    """What ``kvflow ticket --json`` prints.

    Attributes:
        signature: whether a member of this cluster signed every grant; ``not checked`` without a secret.
        failure: why a worker would refuse the ticket; None if nothing is known against it.
    """

    signature: Signature
    failure: FailureFigures | None
    grants: tuple[GrantFigures, ...]


def add_parser(commands: Subparsers) -> None:
    """Add ``ticket`` to the command line."""
    parser = add_command(
        commands,
        "ticket",
        summary="show what a ticket says, and check its signature",
        description="Decode a ticket: the engine, its ranks and endpoints, the blocks, and when the lease expires. "
        f"The signature is checked if {SECRET_VARIABLE} is set. Nothing is dialed.",
        examples="kvflow ticket < params.json\nkvflow ticket --file params.json --json",
    )
    given = parser.add_mutually_exclusive_group()
    given.add_argument(
        "ticket", nargs="?", metavar="TICKET", help="the text of a ticket, or kv_transfer_params as JSON; else stdin"
    )
    given.add_argument("--file", type=Path, metavar="FILE", help="read the ticket from a file")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Show a ticket; 1 if it is invalid, has a wrong signature or has expired, 2 if it cannot be read."""
    ticket = Ticket.from_params({"kvflow": _unwrapped(_read(options.ticket, options.file))})
    wrong = _check(ticket)
    grants = tuple(_figures(grant, time.time()) for grant in ticket.grants)
    signature: Signature = "wrong" if wrong else "valid" if os.environ.get(SECRET_VARIABLE) else "not checked"
    refused = wrong or _expired(grants)
    figures = TicketFigures(signature=signature, failure=failure_of(refused) if refused else None, grants=grants)
    (print_json if options.json else _print)(figures)
    return int(refused is not None)


def _read(text: str | None, path: Path | None) -> bytes:
    """Return what is given, and at most one byte more than is allowed."""
    if text is not None:
        return text.encode(errors="surrogateescape")
    if path is None:
        return sys.stdin.buffer.read(INPUT_BYTES_MAX + 1)
    return read_file(path, INPUT_BYTES_MAX)


def _unwrapped(given: bytes) -> Any:
    """Return the text of the ticket that is given as text or within JSON."""
    if len(given) > INPUT_BYTES_MAX:
        raise TicketInvalid(f"the input has more than {INPUT_BYTES_MAX} bytes")
    given = given.strip()
    if not given:
        raise TicketInvalid("the input is empty", remedy="Give the text of a ticket, or kv_transfer_params as JSON.")
    if given[:1] not in b'{"':
        return given.decode("ascii", errors="replace")
    try:
        found = msgspec.json.decode(given)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TicketInvalid(f"the input is neither a ticket nor JSON: {error}") from error
    for key in WRAPPERS:
        if isinstance(found, dict) and key in found:
            found = found[key]
    if isinstance(found, dict) and not found.get("grants"):
        raise TicketInvalid(f"the JSON has no {' or '.join(WRAPPERS)}: it has {', '.join(map(quoted, [*found][:8]))}")
    return found


def _check(ticket: Ticket) -> TicketInvalid | None:
    """Check the signature with the secrets of the environment, if there are any; return what is wrong."""
    if not os.environ.get(SECRET_VARIABLE):
        return None
    from kvflow.rendezvous.issuer import TicketKey  # noqa: PLC0415 - without a secret no ZeroMQ is needed

    key = TicketKey.of(member_config())
    try:
        key.check(ticket)
    except TicketInvalid as error:
        return error
    return None


def _expired(grants: Iterable[GrantFigures]) -> StaleLease | None:
    ages = [-grant.expires_in_s for grant in grants if grant.expires_in_s is not None]
    if max(ages, default=-1.0) <= 0:
        return None
    return StaleLease(f"the lease expired {max(ages):.1f} s ago by this clock, unless a reader has renewed it")


def _figures(grant: Grant, now: float) -> GrantFigures:
    contents = grant.contents or (None,) * len(grant.block_ids)
    issued_at = grant.issued_at
    return GrantFigures(
        engine_id=grant.engine_id,
        request_id=grant.request_id,
        ranks=msgspec.convert(grant.ranks, tuple[RankFigures, ...], from_attributes=True),
        slot=grant.slot,
        epoch=str(grant.epoch),
        groups=tuple(
            LeasedGroup(
                blocks=len(ids),
                absent=ids.count(-1),
                tokens=tokens,
                block_size=None if content is None else content.block_size,
            )
            for ids, tokens, content in zip(grant.block_ids, grant.num_tokens, contents, strict=True)
        ),
        admitted=grant.admitted,
        lease_s=grant.lease_s,
        issued_at=issued_at,
        expires_in_s=None if issued_at is None or grant.kind in UNTIMED else issued_at + grant.lease_s - now,
        kind=grant.kind,
    )


def _print(figures: TicketFigures) -> None:
    signature = {
        "valid": "valid",
        "wrong": "wrong: believe nothing below",
        "not checked": f"not checked: set {SECRET_VARIABLE}",
    }[figures.signature]
    print_facts([("signature", signature)])
    for grant in figures.grants:
        print()
        print_facts(_facts(grant))
    if figures.failure is not None:
        print(f"\n{figures.failure.message} [{figures.failure.code}] {figures.failure.remedy}")


def _facts(grant: GrantFigures) -> list[tuple[str, object]]:
    # A router or a client may have chosen any of these texts: they are printed in quotes, without control characters.
    admitted = "admitted" if grant.admitted else "not yet admitted"
    facts: list[tuple[str, object]] = [
        ("engine", quoted(grant.engine_id)),
        ("request", quoted(grant.request_id)),
        ("expires", _expiry(grant)),
        ("lease", f"slot {grant.slot}, epoch {grant.epoch}, {admitted} when signed"),
    ]
    for index, group in enumerate(grant.groups):
        absent = f", {group.absent} of them absent" if group.absent else ""
        size = f", {group.block_size} tokens in each" if group.block_size else ""
        facts.append(
            (f"group {index}", f"{counted(group.blocks, 'block')}{absent}{size}; {counted(group.tokens, 'token')}")
        )
    for rank in grant.ranks[:RANKS_SHOWN]:
        key = f", key {rank.public_key[:8]}" if rank.public_key else ""
        facts.append((f"rank {rank.rank}", f"{quoted(rank.endpoint)}, incarnation {rank.incarnation[:8]}{key}"))
    if more := len(grant.ranks) - RANKS_SHOWN:
        facts += [("", f"and {more} more ranks")] if more > 0 else []
    return facts


def _expiry(grant: GrantFigures) -> str:
    if grant.kind in UNTIMED:
        return UNTIMED[grant.kind].format(grant.lease_s)
    if grant.expires_in_s is None:
        return f"{grant.lease_s:g} s after its admission; the ticket does not say when it was signed"
    if grant.expires_in_s < 0:
        return f"{-grant.expires_in_s:.1f} s ago by this clock, unless a reader has renewed it"
    return f"in {grant.expires_in_s:.1f} s by this clock, unless a reader renews it"
