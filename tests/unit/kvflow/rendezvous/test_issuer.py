"""Tickets are signed with a key that follows from the cluster secret, in whatever process the mint is."""

import copy
import pickle
import time

import pytest
from msgspec.structs import replace

from handshake import ClusterSecurity
from kvflow.config import WorkerConfig
from kvflow.errors import ConfigInvalid, TicketInvalid
from kvflow.leases import tickets
from kvflow.leases.tickets import MAC_BYTES, Ticket
from kvflow.rendezvous.endpoint import cluster_key
from kvflow.rendezvous.issuer import TicketKey, TicketMint
from tests.simulation.tickets import forge

from .helpers import SECRET, SECURITY, address


def ticket_of(secret=SECRET):
    mint = TicketMint(engine_id="prefill-0", ranks=[address()], cluster_secret=secret, lease_s=5.0)
    return mint.offer("r", block_ids=[[1]], num_tokens=1)[0]


def fingerprint_of(ticket):
    return tickets.fingerprint_of(ticket.signed[0][MAC_BYTES:])


def test_any_member_of_the_cluster_can_check_a_ticket():
    ticket = ticket_of()
    TicketKey(SECURITY).check(Ticket.from_params(ticket.to_params()))
    assert ticket.grants[0].lease_s == 5.0


def test_two_mints_of_one_worker_do_not_sign_the_same_epoch():
    """The second replaces the first, whose tickets nobody has admitted: they must not fit other blocks."""
    epochs = {ticket_of().grants[0].epoch for _ in range(3)}
    assert len(epochs) == 3
    assert all(epoch < 2**63 for epoch in epochs)


def test_another_cluster_cannot_and_is_told_both_fingerprints():
    theirs, ours, second = (
        cluster_key(WorkerConfig(engine_id="e", cluster_secret=secret))[:16]
        for secret in ("another secret, long enough", SECRET, "the next secret of all")
    )
    with pytest.raises(TicketInvalid, match=f"its fingerprint is {theirs}, and ours is {ours} "):
        TicketKey(SECURITY).check(ticket_of("another secret, long enough"))
    with pytest.raises(TicketInvalid, match=f"its fingerprint is {theirs}, and ours is {ours} or {second} "):
        TicketKey(SECURITY.accepting("the next secret of all")).check(ticket_of("another secret, long enough"))
    with pytest.raises(TicketInvalid):
        TicketKey(ClusterSecurity.from_secret("another secret, long enough")).check(ticket_of())


def test_a_ticket_says_when_it_was_signed():
    before_s = int(time.time() * 1000) / 1000  # a ticket keeps milliseconds
    assert before_s <= ticket_of().grants[0].issued_at <= time.time()


def test_every_grant_of_a_ticket_is_checked():
    good, bad = ticket_of(), ticket_of("another secret, long enough")
    joined = Ticket(grants=(*good.grants, *bad.grants), signed=(*good.signed, *bad.signed))
    with pytest.raises(TicketInvalid):
        TicketKey(SECURITY).check(joined)
    forged = forge(good.to_params(), lambda grant: grant.update(slot=1))
    with pytest.raises(TicketInvalid, match="wrong signature"):
        TicketKey(SECURITY).check(Ticket.from_params(forged))
    with pytest.raises(TicketInvalid):
        Ticket.from_params(forged, verify=TicketKey(SECURITY).verifies)


def test_a_short_secret_is_refused():
    with pytest.raises(ConfigInvalid, match="fewer than 16"):
        ticket_of("too short")


def test_a_process_without_a_worker_verifies_tickets_by_its_settings():
    changing = WorkerConfig(
        engine_id="decode-0", cluster_secret="the next secret of all", cluster_secret_accepted=SECRET
    )
    params = ticket_of().to_params()
    assert Ticket.from_params(params, verify=TicketKey.of(changing).verifies).request_id == "r"
    changed = WorkerConfig(engine_id="decode-0", cluster_secret="the next secret of all")
    with pytest.raises(TicketInvalid, match="another cluster secret"):
        Ticket.from_params(params, verify=TicketKey.of(changed).verifies)


def test_a_process_knows_the_macs_of_a_grant_that_another_one_has_signed():
    new, old = (
        SECURITY.accepting("another secret, long enough"),
        TicketMint(engine_id="prefill-0", ranks=[address()], cluster_secret="another secret, long enough"),
    )
    ticket, grant = old.offer("r", block_ids=[[1], range(100)], num_tokens=4096)
    assert ticket.signed[0][:MAC_BYTES] in TicketKey(new).macs(grant)
    assert ticket.signed[0][:MAC_BYTES] not in TicketKey(SECURITY).macs(grant)
    assert len(TicketKey(SECURITY).macs(grant)) == 1


def test_each_accepted_secret_has_its_own_key_of_contents():
    keys = TicketKey(SECURITY.accepting("another secret, long enough")).content_keys()
    assert list(keys) == [TicketKey(SECURITY).fingerprint, fingerprint_of(ticket_of("another secret, long enough"))]
    assert len(set(keys.values())) == 2
    assert all(len(key) == 32 for key in keys.values())


class CountingKey(TicketKey):
    """A key that counts what it verifies."""

    verified = 0

    def verifies(self, payload, mac):
        self.verified += 1
        return super().verifies(payload, mac)


def test_a_ticket_that_was_read_is_verified_once():
    reader, other = CountingKey(SECURITY), CountingKey(SECURITY)
    ticket = reader.read(ticket_of().to_params())
    for key in (reader, other, reader):
        key.check(ticket)
    assert (reader.verified, other.verified) == (1, 0)


def test_what_was_not_read_is_verified_each_time():
    key = CountingKey(SECURITY)
    params = ticket_of().to_params()
    read = key.read(params)
    key.verified = 0
    for ticket in (Ticket.from_params(params), copy.copy(read), pickle.loads(pickle.dumps(read)), replace(read)):
        assert ticket == read
        key.check(ticket)
        key.check(ticket)
    assert key.verified == 8


def test_a_ticket_that_was_read_and_changed_is_refused():
    key = TicketKey(SECURITY)
    read, another = key.read(ticket_of().to_params()), ticket_of()
    grant = replace(read.grants[0], block_ids=((2,),))
    signed = read.signed[0][:MAC_BYTES] + another.signed[0][MAC_BYTES:]
    for changed in (
        replace(read, grants=(grant,)),
        replace(read, grants=another.grants),
        replace(read, signed=(signed,)),
    ):
        with pytest.raises(TicketInvalid):
            key.check(changed)
    key.check(read)


def test_a_ticket_that_was_read_is_verified_by_who_accepts_other_secrets():
    other = "another secret, long enough"
    read = TicketKey(SECURITY.accepting(other)).read(ticket_of(other).to_params())
    with pytest.raises(TicketInvalid):
        TicketKey(SECURITY).check(read)


def test_nothing_of_a_ticket_that_was_read_stays_when_it_is_gone():
    key = CountingKey(SECURITY)
    forged = forge(ticket_of().to_params(), lambda fields: fields.update(slot=9))
    params = ticket_of().to_params()
    for _ in range(100):  # a new ticket often has the identity of the last one
        read = key.read(params)
        del read
        with pytest.raises(TicketInvalid):
            key.check(Ticket.from_params(forged))


def test_what_no_member_has_signed_is_not_read():
    with pytest.raises(TicketInvalid):
        TicketKey(SECURITY).read(ticket_of("another secret, long enough").to_params())
    with pytest.raises(TicketInvalid, match="at most 8 are allowed"):
        TicketKey(SECURITY).read(ticket_of().to_params(), chars_max=8)
