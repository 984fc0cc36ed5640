"""The path to another worker: real workers and real sockets; what the figures of a reader mean."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace

from kvflow.config import KEY_VARIABLE, SECRET_VARIABLE
from kvflow.errors import ProtocolViolation
from kvflow.rendezvous.dialer import open_asker
from kvflow.rendezvous.issuer import draw_pair
from kvflow.tools.doctor import path, probe
from kvflow.tools.doctor.codes import FailureFigures
from kvflow.tools.doctor.probe import build_cache, listening, read_probe
from kvflow.worker.runtime import open_worker
from tests.helpers.settings import flat_config
from tests.ports import free_port
from tests.unit.kvflow.worker.helpers import SECRET, cache_of

PATIENCE_S = 300.0


@pytest.fixture(autouse=True)
def little_memory(monkeypatch):
    """Keep the large reads of these tests small, and have a cluster secret in the environment, and no key."""
    monkeypatch.setattr(probe, "free_memory", lambda: 0)
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def config(**settings):
    return flat_config(**{"engine_id": "doctor", "cluster_secret": SECRET, "transport": "tcp"} | settings)


def target(endpoint, **how):
    return path.Target(**{"endpoint": endpoint, "config": config(), "transport": "tcp"} | how)


async def examined(endpoint, **how):
    """Examine a worker, and return what is found, by code or else by subject."""
    async with asyncio.timeout(PATIENCE_S):
        found = [finding async for finding in path.examine(target(endpoint, **how))]
    return {finding.code or finding.subject: finding for finding in found}


@asynccontextmanager
async def offering(**settings):
    async with asyncio.timeout(PATIENCE_S), listening(config(**settings)) as worker:
        yield worker


async def test_a_worker_that_offers_probes_is_read_and_each_byte_compared():
    async with offering() as worker:
        found = await examined(worker.endpoint)
    assert not [each for each in found.values() if each.status == "failed"], found
    assert {"address", "worker", "clock", "location", "small reads", "large reads"} <= set(found)
    assert "1 MiB at" in found["large reads"].evidence
    assert "bytes compared" in found["large reads"].evidence
    slow = found["data_plane_slow"]
    assert "though both run on one host: transport is tcp there" in slow.evidence
    assert "transport auto" in slow.remedy


async def test_a_worker_with_its_own_key_is_examined_with_that_key():
    (ours, our_key), (theirs, their_key) = draw_pair(), draw_pair()
    async with offering(private_key=theirs, allowed_keys=(our_key,)) as worker:
        known = config(private_key=ours, allowed_keys=(their_key,))
        async with open_asker(worker.endpoint, known, server_key=their_key) as visit:
            assert (await probe.ask(visit)).advertised == worker.endpoint
        found = await examined(worker.endpoint, config=config())
    assert list(found) == ["address", "authentication_failed"]


async def test_an_ordinary_worker_is_reached_and_not_read():
    async with open_worker(config(engine_id="prefill-0"), cache_of()) as worker:
        found = await examined(worker.endpoint)
    assert found["reads"].status == "note"
    assert "'prefill-0' rank 0 of 1 has our secret" in found["worker"].evidence
    assert "large reads" not in found


async def test_a_tcp_plane_that_is_not_reached_is_named():
    port = free_port()
    async with open_worker(config(tcp_advertise=f"tcp://127.0.0.1:{port}"), cache_of()) as worker:
        found = await examined(worker.endpoint)
    unreached = found["data_port_unreachable"]
    assert f"tcp://127.0.0.1:{port}" in unreached.evidence
    assert "tcp_bind" in unreached.remedy


async def test_an_advertised_address_that_is_not_reached_is_named():
    port, bound = free_port(), free_port()
    async with offering(bind=f"tcp://127.0.0.1:{bound}", advertise=f"tcp://127.0.0.1:{port}"):
        found = await examined(f"tcp://127.0.0.1:{bound}")
    differs = found["advertise_differs"]
    assert (differs.status, f"tcp://127.0.0.1:{port}" in differs.evidence) == ("failed", True)
    assert found["peer_lost"].status == "failed"  # no pull reaches it, either


async def test_each_ticket_is_replaced_when_it_was_used():
    async with offering() as worker:
        for _ in range(2):
            figures = await read_probe(worker.endpoint, config())
            assert (figures.failure, figures.plane, len(figures.reads)) == (None, "tcp", 3)


async def test_a_byte_that_differs_is_counted(monkeypatch):
    caches = []

    def build(*arguments):
        caches.append(build_cache(*arguments))
        return caches[-1]

    monkeypatch.setattr(probe, "build_cache", build)
    async with offering() as worker:
        caches[0].backing[5] ^= 1
        figures = await read_probe(worker.endpoint, config())
    assert [each.wrong_bytes for each in figures.reads] == [len(each.seconds) for each in figures.reads]


async def test_two_readers_at_once_do_not_take_each_others_tickets_for_a_fault():
    async with offering() as worker:
        both = await asyncio.gather(*(read_probe(worker.endpoint, config()) for _ in range(2)))
    assert [each.failure for each in both] == [None, None]


FACTS = probe.HostFacts(
    host="a", boot_id="boot", pid_namespace="pid:[1]", pid=1, ptrace_scope="1", network_cards=(), variables={}
)
OFFER = probe.ProbeOffer(
    seed=1,
    device="cpu",
    transport="auto",
    missing={},
    advertised="tcp://127.0.0.1:7000",
    small={1: ()},
    large=(),
    large_blocks=64,
    facts=FACTS,
)
READS = tuple(
    probe.Reads(nbytes=nbytes, seconds=(0.02, 0.001), gb_per_s=(0.5, 1.5), wrong_bytes=0)
    for nbytes in (16 << 10, 64 << 10, 64 << 20)
)
FIGURES = probe.ProbeFigures(
    reads=READS,
    failure=None,
    plane="tcp",
    transport="tcp",
    known_by="kind",
    passed_over="",
    missing={},
    may_copy=None,
    slow=(),
    facts=FACTS,
)


def reasons(figures=FIGURES, **offered):
    return [each.text for each in path.why_tcp(figures, replace(OFFER, **offered))]


def facts(**changes):
    return replace(FACTS, **changes)


@pytest.mark.parametrize(
    ("figures", "offered", "words"),
    [
        ({}, {"transport": "tcp"}, "transport is tcp there"),
        ({"missing": {"nixl": "no library"}}, {}, "NIXL does not start here: no library"),
        ({}, {"missing": {"nixl": "no library"}}, "NIXL does not start there: no library"),
        ({"facts": facts(variables={"UCX_TLS": "tcp"})}, {}, "UCX_TLS is 'tcp' here, which leaves out cma"),
        ({}, {"facts": facts(variables={"UCX_TLS": "^cma"})}, "UCX_TLS is '^cma' there, which leaves out cma"),
        ({}, {"facts": facts(pid_namespace="pid:[2]")}, "the PID namespaces differ: pid:[2] there, pid:[1] here"),
        ({"may_copy": False}, {}, "copy the memory of process 1; ptrace_scope is 1"),
        ({}, {"facts": facts(boot_id="another")}, "no RDMA device here"),
        (
            {"facts": facts(network_cards=("mlx5_0",), variables={"UCX_TLS": "cma,tcp"})},
            {"facts": facts(boot_id="another", network_cards=("mlx5_0",))},
            "UCX_TLS is 'cma,tcp' here, which leaves out rc",
        ),
    ],
)
def test_the_reason_for_tcp_is_found(figures, offered, words):
    assert any(words in each for each in reasons(replace(FIGURES, **figures), **offered))


def test_no_reason_is_invented():
    assert reasons() == []
    (carrier, *_) = path.judged(FIGURES, OFFER)
    assert "no reason was found" in carrier.evidence
    (carrier, *_) = path.judged(replace(FIGURES, passed_over="nixl: UCX_PROTO_ENABLE is 'n' here"), OFFER)
    assert "nixl: UCX_PROTO_ENABLE is 'n' here" in carrier.evidence


def codes(figures, offer=OFFER):
    return {finding.code or finding.subject: finding for finding in path.judged(figures, offer)}


def test_two_hosts_without_network_cards_are_as_fast_as_they_can():
    found = codes(FIGURES, replace(OFFER, facts=facts(boot_id="another")))
    assert found["data plane"].status == "note"
    assert "no RDMA device" in found["data plane"].evidence


def test_two_hosts_with_network_cards_should_use_them():
    cards = facts(network_cards=("mlx5_0",))
    found = codes(replace(FIGURES, facts=cards), replace(OFFER, facts=replace(cards, boot_id="another")))
    assert found["data_plane_slow"].status == "warning"


def test_other_bytes_than_were_offered_are_a_defect():
    found = codes(replace(FIGURES, reads=(replace(READS[0], wrong_bytes=3), *READS[1:])))
    assert (found["bytes_differ"].status, found["bytes_differ"].evidence[:7]) == ("failed", "3 bytes")


def test_a_failure_after_some_reads_is_told_beside_them():
    fault = FailureFigures(code="peer_lost", message="it died", remedy="Start it.")
    found = codes(replace(FIGURES, reads=READS[:1], failure=fault))
    assert (found["peer_lost"].evidence, found["peer_lost"].remedy) == ("it died", "Start it.")
    assert "small reads" in found
    assert "large reads" not in found


def test_a_slow_pair_of_gpus_is_told_with_its_cause():
    found = codes(replace(FIGURES, plane="nixl", transport="rc_mlx5", slow=("the card is far", "Choose a card.")))
    assert "the card is far" in found["data_plane_slow"].evidence
    assert found["data_plane_slow"].remedy == "Choose a card."


@pytest.mark.parametrize(
    "told",
    [
        b"\x00",
        b"\xc1" * 100,
        probe.encode(replace(OFFER, advertised="7000")),
        probe.encode(replace(OFFER, large_blocks=1 << 30)),
        probe.encode(replace(OFFER, small={})),
        probe.encode(replace(OFFER, facts=facts(host="h" * 300))),
    ],
)
def test_a_malformed_offer_is_refused(told):
    with pytest.raises(ProtocolViolation):
        probe.decode(told, peer="tcp://127.0.0.1:7000")


def test_an_offer_comes_back_as_it_was():
    assert probe.decode(probe.encode(OFFER), peer="") == OFFER
    assert probe.decode(b"", peer="") is None


def test_blocks_of_the_cache_differ_and_depend_on_the_seed():
    first, second = probe.content(1, 64), probe.content(2, 64)
    blocks = {first[at : at + probe.BLOCK_BYTES].tobytes() for at in range(0, first.size, probe.BLOCK_BYTES)}
    assert len(blocks) == 64
    assert (first != second).any()


@pytest.mark.parametrize(("free", "blocks"), [(0, 64), (256 << 20, 2048), (1 << 40, 4096)])
def test_the_large_read_takes_a_part_of_the_free_memory(free, blocks):
    assert probe.large_blocks(free) == blocks
