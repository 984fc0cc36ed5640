"""Tickets survive routers and nothing else: truncated, forged or joined wrongly they are ``TicketInvalid``."""

import json
import string
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.errors import ArgumentInvalid, BlockIdsInvalid, ConfigInvalid, ReleaseMismatch, TicketInvalid
from kvflow.ids import PeerId
from kvflow.leases import tickets
from kvflow.leases.blocks import NUM_BLOCKS_MAX, block_ends
from kvflow.leases.tickets import (
    BLOCKS_MAX,
    FORMAT,
    GRANTS_MAX,
    HEAD_BYTES,
    MAC_BYTES,
    RANKS_KEPT_BYTES_MAX,
    RUN_MAX,
    TICKET_CHARS_MAX,
    Content,
    Grant,
    Ticket,
    grant_of,
    join_tickets,
)
from tests.helpers.loops import looped
from tests.simulation.tickets import damage, fields_of, forge, grants_of, payload_of

from .helpers import address, mint_of, sign, ticket_of, verify


def params_of(ticket):
    """What arrives behind a router that parsed and rewrote the JSON."""
    return json.loads(json.dumps(ticket.to_params()))


def checked(params):
    """Read a ticket as a consumer does: verify every grant, then decode."""
    return Ticket.from_params(params, verify=verify)


def paths(value, path=()):
    """Yield the path of every key and index in nested values."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from paths(child, (*path, key))


def parent(fields, path):
    for key in path[:-1]:
        fields = fields[key]
    return fields


def told_ticket():
    """A ticket with every field that there is."""
    mint = mint_of(address(0), address(1), wall_clock=lambda: 1000.0, block_sizes=(16, 0))
    digests = [[b"a", b"b", b""], [b"c"]]
    return mint.offer("r", block_ids=[[3, 4, -1], [17]], num_tokens=(48, 16), digests=digests)[0]


PARAMS = params_of(told_ticket())
PATHS = list(paths(grants_of(PARAMS)[0]))
OPTIONAL = {("contents",), ("issued_ms",)}
"""Fields that an honest producer may leave out."""

WORD = string.ascii_letters + string.digits + "-_."


def test_a_ticket_is_one_word_that_no_router_rewrites():
    """Numbers, keys and escapes are what routers change when they parse and write JSON. There are none."""
    assert set(PARAMS) == {"kvflow"}
    assert set(PARAMS["kvflow"]) <= set(WORD)


@looped("path", PATHS)
def test_a_grant_that_lost_anything_is_refused(path):
    def lose(fields):
        del parent(fields, path)[path[-1]]

    with pytest.raises(TicketInvalid, match="wrong signature"):
        checked(forge(PARAMS, lose))


@looped("path", PATHS)
@looped("value", [None, True, "", "x", "1" * 64, -2, 2**31, 2**63, 1.5, [], [1], [[0]], {}, b"", b"x" * 65])
def test_a_signed_grant_of_the_wrong_types_is_refused(path, value):
    """Only a holder of the secret can make one. It must still decode to something, or be ``TicketInvalid``."""

    def change(fields):
        parent(fields, path)[path[-1]] = value

    forged = forge(PARAMS, change, sign=sign)
    if forged != forge(PARAMS, lambda _fields: None, sign=sign):
        with pytest.raises(TicketInvalid, match="wrong signature"):
            checked(forge(PARAMS, change))
    try:
        ticket = checked(forged)
    except TicketInvalid:
        return
    except ReleaseMismatch:
        assert path == ("kind",)
        return
    assert fields_of(ticket.signed[0][MAC_BYTES:]) == grants_of(forged)[0]


def decoded_whole(payload):
    """What a grant's encoding says, or nothing, with nothing remembered."""
    try:
        return msgspec.msgpack.decode(payload[HEAD_BYTES:], type=Grant)
    except (msgspec.DecodeError, UnicodeError):
        return None


@pytest.mark.parametrize("field", ["epoch", "ranks"])
@given(st.one_of(st.none(), st.text(max_size=3), st.lists(st.one_of(st.none(), st.binary(max_size=3)), max_size=2)))
def test_what_is_remembered_of_ranks_is_what_they_say(field, value):
    """Ranks are decoded apart from their grant."""
    signed = ticket_of().signed[0][MAC_BYTES:]
    for change in (value, msgspec.to_builtins(address()), [msgspec.to_builtins(address(3))] * 2, []):
        payload = payload_of(fields_of(signed) | {field: change}, signed)
        for _ in range(2):
            try:
                found = grant_of(bytes(MAC_BYTES) + payload)
            except TicketInvalid:
                found = None
            assert found == decoded_whole(payload)


def test_ranks_of_any_number_are_the_same_decoded_apart():
    for count in (1, 2, RANKS_KEPT_BYTES_MAX // 40, 1024):
        ticket = mint_of(*map(address, range(count))).offer("r", block_ids=[[1]], num_tokens=1)[0]
        payload = ticket.signed[0][MAC_BYTES:]
        assert grant_of(ticket.signed[0]) == decoded_whole(payload)
        assert type(grant_of(ticket.signed[0])) is Grant
        assert [member.peer.rank for member in ticket.members()] == list(range(count))


@given(st.integers(0), st.binary(min_size=1, max_size=40))
def test_a_grant_with_other_bytes_is_refused(at, junk):
    def change(signed):
        where = at % len(signed)
        return signed[:where] + junk + signed[where + len(junk) :]

    forged = damage(PARAMS, change)
    if forged != PARAMS:
        with pytest.raises(TicketInvalid, match="wrong signature"):
            checked(forged)


@given(st.integers(0), st.text(max_size=8))
def test_a_ticket_with_other_text_is_refused_or_the_same(at, junk):
    text = PARAMS["kvflow"]
    where = at % (len(text) + 1)
    for other in (text[:where], text[:where] + junk + text[where:], text[:where] + junk + text[where + len(junk) :]):
        try:
            ticket = checked({"kvflow": other})
        except (TicketInvalid, ReleaseMismatch):  # the latter where it names another format now
            continue
        assert ticket == checked(PARAMS)  # base64 has bits at its end that mean nothing


@looped(
    "params",
    [
        *(None, 7, "kvflow", [], {}, {"other": 1}, b"{}"),
        *({"kvflow": value} for value in (None, [1], {"grants": [{}]}, "", ".", "jwt", "kvf99999.A")),
        *({"kvflow": f"{FORMAT}{dots}"} for dots in ("", ".", "..")),
        *({"kvflow": f"{FORMAT}.{part}"} for part in ("A", "AAAA", "ä" * 99, "\ud800", "A A A", "A" * 43)),
        {"kvflow": FORMAT + ".AAAA" * (GRANTS_MAX + 1)},
    ],
)
def test_what_is_no_ticket_is_refused(params):
    for read in (Ticket.from_params, checked):
        with pytest.raises(TicketInvalid):
            read(params)


def test_a_long_text_is_refused_before_it_is_looked_at():
    with pytest.raises(TicketInvalid, match="has 101 characters: at most 100 are allowed"):
        Ticket.from_params({"kvflow": "x" * 101}, chars_max=100)


def test_nothing_is_decoded_that_was_not_signed():
    """Text that would decode to a million numbers is refused by its MAC."""
    mac = bytes(MAC_BYTES)
    huge = mac + msgspec.msgpack.encode({"block_ids": [[0] * 1_000_000]})
    forged = damage(PARAMS, lambda _sealed: huge)
    with pytest.raises(TicketInvalid, match="wrong signature"):
        checked(forged)
    with pytest.raises(TicketInvalid, match="malformed"):
        Ticket.from_params(forged)


def test_the_longest_forged_ticket_takes_three_times_its_length():
    longest = PARAMS["kvflow"] + "A" * (TICKET_CHARS_MAX - len(PARAMS["kvflow"]) - 3)
    tracemalloc.start()
    try:
        with pytest.raises(TicketInvalid, match="wrong signature"):
            checked({"kvflow": longest})
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 2 * len(longest) < most < 3.5 * len(longest)


def test_what_routers_add_is_ignored():
    assert checked(PARAMS | {"do_remote_prefill": True, "note": None}) == checked(PARAMS)


def test_a_field_of_a_newer_release_is_signed_and_ignored():
    newer = forge(PARAMS, lambda fields: fields.update(note="from a newer release"), sign=sign)
    assert checked(newer).grants == checked(PARAMS).grants


def test_what_is_used_is_what_was_signed():
    """A ticket may be put together in this process, or come from another one of the engine's."""
    ticket = told_ticket()
    other = msgspec.structs.replace(ticket.grants[0], slot=ticket.grants[0].slot + 1)
    with pytest.raises(TicketInvalid, match="changed after it was signed"):
        Ticket(grants=(other,), signed=ticket.signed).verify(verify)
    for grants, signed in (((), ()), (ticket.grants, ()), (ticket.grants * 2, ticket.signed)):
        with pytest.raises(TicketInvalid):
            Ticket(grants=grants, signed=signed)
    newer = forge(PARAMS, lambda fields: fields.update(note="from a newer release"), sign=sign)
    checked(newer).verify(verify)


@pytest.mark.parametrize(("text", "theirs"), [("kvf2." + PARAMS["kvflow"][5:], "kvf2"), ("kvf4.AAAA", "kvf4")])
def test_a_ticket_of_another_release_says_so(text, theirs):
    with pytest.raises(ReleaseMismatch) as caught:
        checked({"kvflow": text})
    assert (caught.value.what, caught.value.theirs, caught.value.ours) == ("ticket format", theirs, FORMAT)
    assert str(caught.value) == (
        f"the ticket has ticket format {theirs}, and this release of kvflow understands kvf3 [release_mismatch] "
        "Install the same release of kvflow on the prefill and the decode side."
    )


@looped(
    "fields, words",
    [
        ({"num_tokens": [48]}, "1 token counts for 2 groups"),
        ({"contents": [[16]]}, "malformed"),
        ({"block_ids": [[1]] * 257}, r"exceeds a limit of this release: Expected `array` of length <= 256"),
        ({"contents": [{"block_size": 16, "digests": [b"a", b"b", b"c"]}]}, "1 contents for 2 groups"),
        ({"block_ids": [[3, 4], [17]]}, "3 digests and 2 blocks"),
        ({"num_tokens": [32, 16]}, "3 digests and 3 blocks for 32 tokens, which 2 blocks hold"),
    ],
)
def test_a_signed_grant_with_lists_that_do_not_fit_is_refused(fields, words):
    """Nobody but a holder of the secret can make one; it is still not believed."""
    with pytest.raises(TicketInvalid, match=words):
        checked(forge(PARAMS, lambda grant: grant.update(fields), sign=sign))


def test_members_are_the_ranks_in_order():
    ticket = join_tickets([ticket_of(rank=1), ticket_of(rank=0)])
    assert [member.address.rank for member in ticket.members()] == [1, 0]
    first = next(ticket.members())
    assert first.peer == PeerId("prefill-0", 1, "0" * 32, first.address.endpoint, "")
    assert first.grant is ticket.grants[0]
    assert (ticket.engine_id, ticket.request_id) == ("prefill-0", "request-1")
    assert checked(params_of(ticket)) == ticket


def stage_of(num_tokens):
    """The offer of a pipeline stage that has one group where another one has two."""
    return mint_of(address(1)).offer("request-1", block_ids=[[5]], num_tokens=num_tokens)[0]


def test_stages_with_fewer_groups_join():
    assert join_tickets([stage_of(16), ticket_of(num_tokens=(48, 16))]).grants[0].num_tokens == (16,)


@looped(
    "tickets, words",
    [
        ([], "no ticket"),
        ([ticket_of(), ticket_of()], "rank 0 is in two of the tickets"),
        ([ticket_of(), ticket_of("request-2", rank=1)], "different engines or requests"),
        ([ticket_of(), ticket_of(rank=1, engine_id="prefill-1")], "different engines or requests"),
        ([ticket_of(), ticket_of(rank=1, num_tokens=(48, 15))], "different numbers of tokens"),
        ([ticket_of(), stage_of(47)], "different numbers of tokens"),
    ],
)
def test_tickets_that_do_not_belong_together_are_not_joined(tickets, words):
    with pytest.raises(TicketInvalid, match=words):
        join_tickets(tickets)


def test_what_a_producer_does_not_say_is_not_in_its_ticket():
    said = grants_of(params_of(ticket_of()))[0]
    assert {name: said[name] for name in ("issued_ms", "contents", "traceparent")} == dict.fromkeys(
        ("issued_ms", "contents", "traceparent")
    )
    assert {path for path in PATHS if len(path) == 1} >= OPTIONAL


@looped(
    "num_blocks, block_size, num_tokens, ends",
    [
        (3, 16, 48, [16, 32, 48]),
        (3, 16, 40, [16, 32, 40]),
        (2, 16, 40, [32, 40]),
        (1, 16, 1, [1]),
        (0, 16, 40, []),
        (1, 0, 40, [40]),
    ],
)
def test_blocks_end_behind_their_last_token(num_blocks, block_size, num_tokens, ends):
    assert block_ends(num_blocks, block_size, num_tokens) == ends


def test_digests_go_with_their_blocks():
    grant = told_ticket().grants[0]
    assert [(content.block_size, content.digests) for content in grant.contents] == [
        (16, (b"a", b"b", b"")),
        (0, (b"c",)),
    ]
    assert [content.ends(48) for content in grant.contents] == [[16, 32, 48], [48]]


@looped(
    "digests, error",
    [
        ([[b"a", b"b"], [b"c"]], ArgumentInvalid),  # one too few
        ([[b"a", b"b", b"c"]], ArgumentInvalid),  # a group too few
        ([[b"a", b"", b"c"], [b"c"]], ArgumentInvalid),  # a block that is there without one
        ([[b"a", b"b", b"c"], [b""]], ArgumentInvalid),  # likewise, in the second group
        ([["a", "b", "c"], ["c"]], ArgumentInvalid),  # text
        ([[b"a", b"x" * 65, b"c"], [b"c"]], BlockIdsInvalid),  # too long for a ticket
    ],
)
def test_digests_that_do_not_match_the_blocks_are_refused_without_a_slot(digests, error):
    mint = mint_of(address(slots=1), block_sizes=(16, 16))
    with pytest.raises(error):
        mint.offer("r", block_ids=[[3, 4, -1], [17]], num_tokens=(48, 16), digests=digests)
    mint.offer("r", block_ids=[[3, 4, -1], [17]], num_tokens=(48, 16))


def test_of_chained_digests_a_ticket_has_the_last_of_each_group():
    mint = mint_of(block_sizes=(16, 16, 0))
    digests = [[b"a", b"b", b"c"], [b"a", b"b", b""], [b""]]
    ticket, grant = mint.offer(
        "r", block_ids=[[3, 4, 5], [6, 7, -1], [-1]], num_tokens=(48, 48, 48), digests=digests, chained=True
    )
    assert [content.digests for content in grant.contents] == [(b"c",), (b"b", b""), ()]
    assert [content.ends(48) for content in grant.contents] == [[48], [32, 48], []]
    assert checked(params_of(ticket)) == ticket


runs = st.lists(st.tuples(st.integers(-1, NUM_BLOCKS_MAX - 400), st.integers(1, 300)), max_size=8)
few = st.lists(st.integers(-1, 70), max_size=200)
listed = st.one_of(few, runs.map(lambda made: [first + at for first, length in made for at in range(length)]))


@given(st.lists(listed, min_size=1, max_size=3))
def test_block_ids_are_the_same_after_they_were_runs(block_ids):
    ticket, grant = mint_of().offer("r", block_ids=block_ids, num_tokens=1 << 20)
    assert grant.block_ids == tuple(map(tuple, block_ids))
    found = checked(params_of(ticket))
    assert found == ticket
    found.verify(verify)


def test_what_was_read_in_runs_is_not_divided_into_runs_again(monkeypatch):
    found = checked(params_of(mint_of().offer("r", block_ids=[range(300)], num_tokens=4800)[0]))
    monkeypatch.setattr(tickets, "runs_of", None)
    found.verify(verify)


def test_a_run_takes_a_few_bytes_however_long_it_is():
    texts = [
        mint_of().offer("r", block_ids=[range(10, 10 + length)], num_tokens=1 << 24)[0].to_params()["kvflow"]
        for length in (100, 100_000)
    ]
    assert len(texts[1]) - len(texts[0]) <= 8


def with_runs(*lists):
    """A signed ticket whose groups have these runs."""
    return forge(
        params_of(ticket_of()),
        lambda fields: fields.update(block_ids=list(lists), num_tokens=[1 << 40] * len(lists)),
        sign=sign,
    )


@looped(
    "lists, words",
    [
        ([[0, -RUN_MAX, -2], [0, -RUN_MAX]], f"more than {BLOCKS_MAX} blocks"),
        ([[0, *[-RUN_MAX] * 1000]] * 256, "more than"),
        ([[0, -RUN_MAX - 1]], "exceeds a limit of this release: Expected `int` >= -1048576"),
        ([[-5, 7]], "malformed"),
        ([[NUM_BLOCKS_MAX - 1, -2]], "malformed"),
        ([[NUM_BLOCKS_MAX - 4, -2, -4]], "malformed"),
    ],
)
def test_runs_of_too_many_or_impossible_blocks_are_refused(lists, words):
    """Also without a check of the signature: a short text must not become a large list."""
    forged = with_runs(*lists)
    for read in (checked, Ticket.from_params):
        with pytest.raises(TicketInvalid, match=words):
            read(forged)


def test_an_offer_of_more_blocks_than_a_ticket_has_is_refused():
    with pytest.raises(BlockIdsInvalid, match="more than"):
        mint_of().offer("r", block_ids=[range(1 << 20)] * 3, num_tokens=1 << 30)


@pytest.mark.parametrize("start", [b"\x93\xa5offer\xc0", b"\x93\xc0\xc0", b"\x92\xa5offer", b""])
def test_a_deep_nest_is_malformed(start):
    forged = damage(PARAMS, lambda signed: signed[: MAC_BYTES + HEAD_BYTES] + start + b"\x91" * 5000)
    with pytest.raises(TicketInvalid, match="malformed"):
        Ticket.from_params(forged)


@pytest.mark.parametrize("kind", ["pinned", "closed"])
@pytest.mark.parametrize("more", [{}, {"slot": "in another form", "settled": 3}])
def test_a_ticket_of_a_kind_that_is_not_known_is_refused_by_name(kind, more):
    with pytest.raises(ReleaseMismatch) as caught:
        checked(forge(PARAMS, lambda fields: fields.update(kind=kind, **more), sign=sign))
    assert (caught.value.what, caught.value.theirs, caught.value.ours) == ("kind", kind, "offer or kept or open")


def open_ticket():
    """A ticket with no block yet, whose contents are known."""
    ticket = mint_of(block_sizes=[16, 0]).offer("r", block_ids=[[1], [2]], num_tokens=9, digests=[[b"a"], [b"b"]])[0]
    open_grant = msgspec.structs.replace(ticket.grants[0], kind="open", block_ids=((), ()))
    return Ticket(grants=(open_grant,), signed=(open_grant.signed(sign, bytes(8)),))


def test_an_open_ticket_is_read_back_and_never_seems_over():
    ticket = open_ticket()
    assert checked(params_of(ticket)) == ticket
    assert not ticket.grants[0].seems_over(1e12, 0.0)
    one = msgspec.structs.replace(ticket.grants[0], contents=(Content(16, (b"a", b"b")), Content(0, ())))
    with pytest.raises(TicketInvalid, match="2 digests"):
        one.signed(sign, bytes(8))


def test_a_mint_without_block_sizes_takes_no_digests():
    with pytest.raises(ConfigInvalid, match="block_sizes of the mint has length 0 for 1 group"):
        mint_of().offer("r", block_ids=[[1]], num_tokens=1, digests=[[b"a"]])


@pytest.mark.parametrize("step", [1, 7])
def test_a_ticket_that_is_signed_again_is_the_same_and_not_decoded(step, monkeypatch):
    mint = mint_of()
    ticket, grant = mint.offer("r", block_ids=[[block * step for block in range(500)]], num_tokens=500)
    monkeypatch.setattr(tickets, "_runs_decoder", None)
    assert mint.sign_again(grant).signed == ticket.signed
