"""Tickets survive routers and nothing else: truncated, forged or joined wrongly they are ``TicketInvalid``."""

import copy
import json
import math

import pytest

from kvflow.cache.tickets import Ticket, join_tickets
from kvflow.errors import TicketInvalid
from kvflow.ids import PeerId

from .helpers import address, mint_of, ticket_of, verify


def params_of(ticket):
    """What arrives behind a router that parsed and rewrote the JSON."""
    return json.loads(json.dumps(ticket.to_params()))


def checked(params):
    """Read a ticket as a consumer does: parse, then verify every grant."""
    ticket = Ticket.from_params(params)
    for grant in ticket.grants:
        grant.verify(verify)
    return ticket


def paths(value, path=()):
    """Yield the path of every key and index in nested JSON."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from paths(child, (*path, key))


def parent(params, path):
    for key in path[:-1]:
        params = params[key]
    return params


PARAMS = params_of(join_tickets([ticket_of(rank=0), ticket_of(rank=1)]))
PATHS = list(paths(PARAMS))


def test_a_ticket_survives_json():
    ticket = ticket_of()
    assert checked(params_of(ticket)) == ticket


def test_javascript_keeps_every_number():
    """A router written in JavaScript has 53 bits for a number: an epoch travels as text."""
    epochs_start = 2**62 - 1
    ticket, grant = mint_of(address(base=epochs_start)).offer("r", block_ids=[[1]], num_tokens=1)
    through = json.loads(json.dumps(ticket.to_params()), parse_int=lambda digits: int(float(digits)))
    assert checked(through).grants[0].epoch_value == grant.epoch_value == epochs_start + 1


@pytest.mark.parametrize("path", PATHS, ids=lambda path: ".".join(map(str, path)))
def test_a_ticket_that_lost_anything_is_refused(path):
    params = copy.deepcopy(PARAMS)
    del parent(params, path)[path[-1]]
    if path[-1] == "version":  # this release's own, when nothing is said
        assert checked(params) == checked(PARAMS)
        return
    if path in {("kvflow", "grants", 0), ("kvflow", "grants", 1)}:  # one grant is a ticket too, of fewer ranks
        assert len(checked(params).grants) == 1
        return
    with pytest.raises(TicketInvalid):
        checked(params)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: ".".join(map(str, path)))
@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        "",
        "x",
        "0",
        "1" * 64,
        -1,
        0,
        1,
        7,
        2**31,
        2**70,
        1.5,
        math.nan,
        math.inf,
        [],
        [1],
        [[0]],
        {},
        "\ud800",
    ],
    ids=repr,
)
def test_a_ticket_with_anything_changed_is_refused(path, value):
    params = copy.deepcopy(PARAMS)
    holder = parent(params, path)
    if holder[path[-1]] == value and type(holder[path[-1]]) is type(value):
        return
    holder[path[-1]] = value
    with pytest.raises(TicketInvalid):
        checked(params)


@pytest.mark.parametrize(
    "params", [None, 7, "kvflow", [], {}, {"other": 1}, {"kvflow": None}, {"kvflow": [1]}, b"{}"], ids=repr
)
def test_what_is_no_ticket_is_refused(params):
    with pytest.raises(TicketInvalid):
        Ticket.from_params(params)


def test_what_routers_add_is_ignored():
    params = copy.deepcopy(PARAMS) | {"do_remote_prefill": True}
    params["kvflow"]["note"] = "from a newer release"
    assert len(checked(params).grants) == 2


def test_a_grant_of_another_secret_is_refused():
    (grant,) = ticket_of().grants
    with pytest.raises(TicketInvalid, match="wrong signature"):
        grant.verify(lambda payload, mac: False)


def test_a_grant_of_a_newer_release_says_so():
    params = copy.deepcopy(PARAMS)
    params["kvflow"]["grants"][0]["version"] = 2
    with pytest.raises(TicketInvalid, match="has version 2, this release reads 1") as caught:
        checked(params)
    assert "same release" in caught.value.remedy


def test_a_signed_grant_with_lists_that_do_not_fit_is_refused():
    """Nobody but a holder of the secret can make one; it is still not believed."""
    (grant,) = ticket_of().grants
    params = grant.signed(lambda payload: b"\0" * 32)
    short = type(grant)(**{name: getattr(params, name) for name in params.__struct_fields__} | {"num_tokens": (48,)})
    with pytest.raises(TicketInvalid, match="1 token counts for 2 groups"):
        short.verify(lambda payload, mac: True)


def test_members_are_the_ranks_in_order():
    ticket = join_tickets([ticket_of(rank=1), ticket_of(rank=0)])
    assert [member.address.rank for member in ticket.members()] == [1, 0]
    first = next(ticket.members())
    assert first.peer == PeerId("prefill-0", 1, "0" * 32, first.address.endpoint, "")
    assert first.grant is ticket.grants[0]
    assert (ticket.engine_id, ticket.request_id) == ("prefill-0", "request-1")


def stage_of(num_tokens):
    """The offer of a pipeline stage that has one group where another one has two."""
    return mint_of(address(1)).offer("request-1", block_ids=[[5]], num_tokens=num_tokens)[0]


def test_stages_with_fewer_groups_join():
    assert join_tickets([stage_of(16), ticket_of(num_tokens=(48, 16))]).grants[0].num_tokens == (16,)


@pytest.mark.parametrize(
    ("tickets", "words"),
    [
        ([], "no ticket"),
        ([ticket_of(), ticket_of()], "rank is named twice"),
        ([ticket_of(), ticket_of("request-2", rank=1)], "different engines or requests"),
        ([ticket_of(), ticket_of(rank=1, engine_id="prefill-1")], "different engines or requests"),
        ([ticket_of(), ticket_of(rank=1, num_tokens=(48, 15))], "different numbers of tokens"),
        ([ticket_of(), stage_of(47)], "different numbers of tokens"),
    ],
)
def test_tickets_that_do_not_belong_together_are_not_joined(tickets, words):
    with pytest.raises(TicketInvalid, match=words):
        join_tickets(tickets)


def test_one_grant_can_name_every_rank():
    ticket, grant = mint_of(address(0), address(1)).offer("r", block_ids=[[1]], num_tokens=1)
    assert {member.grant for member in ticket.members()} == {grant}
    assert len(list(checked(params_of(ticket)).members())) == 2


def test_what_a_ticket_of_an_older_release_does_not_say_is_not_signed():
    """Fields were added: a ticket without them has the MAC that it always had."""
    ticket = ticket_of()
    shown = params_of(ticket)["kvflow"]["grants"][0]
    assert "issued_at" not in shown
    assert "public_key" not in shown["ranks"][0]
    assert checked(params_of(ticket)) == ticket


@pytest.mark.parametrize(
    ("age_s", "error_s", "over"),
    [
        (0.0, 0.0, False),
        (-1e6, 0.0, False),
        (12.9, 0.0, False),
        (13.6, 0.0, True),
        (13.6, 0.5, False),
        (14.1, 0.5, True),
    ],
)
def test_a_ticket_seems_over_when_its_lease_and_every_doubt_have_passed(age_s, error_s, over):
    _, grant = mint_of(lease_s=12.5, wall_clock=lambda: 1000.0).offer("r", block_ids=[[1]], num_tokens=1)
    assert grant.issued_at == 1000.0
    grant.verify(verify)
    assert grant.seems_over(1000.0 + age_s, error_s) is over


def test_a_ticket_that_does_not_say_when_it_was_signed_never_seems_over():
    assert not ticket_of().grants[0].seems_over(1e12, 0.0)
