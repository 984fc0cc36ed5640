"""Misconfigurations, each created for real, and who names it by which code. ``test_misconfigurations.py`` runs them."""

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

import msgspec

import handshake
from handshake.limits import Limits
from kvflow.config import VARIABLES
from kvflow.leases.tickets import FORMAT
from kvflow.rendezvous.issuer import draw_pair
from kvflow.worker.environment import PRODUCTION
from tests.helpers.limits import files_limited, open_files
from tests.ports import free_port

from .misconfigured import BLOCKS, NUM_TOKENS, TINY, HourAhead, Scene
from .strangers import IDENTITY, SECURITY, of_newer_release, ticket_to

SECRET_VARIABLE, KEY_VARIABLE = VARIABLES["cluster_secret"], VARIABLES["private_key"]
OTHER_SECRET = "a secret of another cluster"
PRODUCER, READER, STRANGER = (draw_pair() for _ in range(3))
REPLACED = msgspec.structs.replace


class Row(NamedTuple):
    """One misconfiguration.

    Attributes:
        wrong: what is wrong.
        said: who names it -> the code.
        create: creates it.
    """

    wrong: str
    said: Mapping[str, str]
    create: Callable[[Scene], Awaitable[None]]


ROWS: list[Row] = []


def row(wrong: str, **said: str):
    """Add a row that a function creates; one function may create several.

    ``transfer_failed`` stands for the record, ``kvflow_inspect`` for the command.
    """

    def add(create):
        named = {_name(who): code for who, code in said.items()}
        ROWS.append(Row(wrong, named, create))
        return create

    return add


COMMANDS = {"kvflow_doctor_endpoint": "kvflow doctor ENDPOINT", "kvflow_doctor_live": "kvflow doctor --live"}


def _name(who):
    return COMMANDS.get(who) or who.replace("_", " " if who.startswith("kvflow") else ".")


# Settings.


def wrong_setting(wrong, settings=None, **environment):
    """Add a row whose worker does not start with these settings or variables; ``kvflow config`` names them, too."""

    @row(wrong, error="config_invalid", kvflow_config="config_invalid")
    async def _(scene):
        await scene.child(settings=settings, **environment)
        told = () if settings is None else ("--vllm", json.dumps(settings))
        await scene.command("config", *told, **environment)


wrong_setting("`KVFLOW_CLUSTER_SECRET` is not set", **{SECRET_VARIABLE: ""})
wrong_setting("the secret is too short", **{SECRET_VARIABLE: "too short"})
wrong_setting("a private key, and no `allowed_keys`", **{KEY_VARIABLE: PRODUCER[0]})
wrong_setting("the name of a setting is misspelled", {"lease_seconds": 30})
wrong_setting("a setting has a value that it must not have", {"transport": "ucx"})


@row("`KVFLOW_PRIVATE_KEY` is not a key", error="config_invalid")
async def _(scene):
    await scene.child(settings={"allowed_keys": [READER[1]]}, **{KEY_VARIABLE: "no key"})


@row("the name of a variable is misspelled", kvflow_config="config_invalid")
async def _(scene):
    await scene.command("config", KVFLOW_CLUSTERSECRET="a secret of the tests, long enough")


# Addresses.


@row("another process has the control port", error="config_invalid")
async def _(scene):
    await scene.refuses_to_open(bind=scene.silent())


@row("another process has the port of the TCP plane", error="transport_unavailable")
async def _(scene):
    await scene.refuses_to_open(transport="tcp", tcp_bind=scene.silent())


@row("`bind` is not an address of this host", error="config_invalid")
async def _(scene):
    await scene.refuses_to_open(bind="tcp://198.51.100.7:0")


@row("`bind` is a wildcard, and `advertise` is not set", error="config_invalid")
async def _(scene):
    await scene.refuses_to_open(bind="tcp://0.0.0.0:0")


@row("`advertise` is 0.0.0.0", error="config_invalid", kvflow_config="config_invalid")
async def _(scene):
    await scene.refuses_to_open(bind="tcp://0.0.0.0:0", advertise="tcp://0.0.0.0:7000")
    await scene.command("config", "--vllm", '{"bind": "tcp://0.0.0.0:7000", "advertise": "tcp://0.0.0.0:7000"}')


@row(
    "`advertise` is a loopback address, and other hosts read",
    kvflow_inspect="peer_lost",
    kvflow_config="config_invalid",
)
async def _(scene):
    another_host = scene.namespaces("--net")
    port = free_port()
    worker = await scene.worker(bind=f"tcp://0.0.0.0:{port}", advertise=f"tcp://127.0.0.1:{port}")
    await scene.command("inspect", worker.endpoint, before=another_host)
    await scene.command("config", "--vllm", '{"bind": "tcp://0.0.0.0:7000", "advertise": "tcp://127.0.0.1:7000"}')


@row(
    "nothing listens at the advertised address",
    error="peer_lost",
    transfer_failed="peer_lost",
    kvflow_inspect="peer_lost",
    kvflow_doctor_endpoint="connection_refused",
)
async def _(scene):
    await scene.fails_to_pull({"advertise": "tcp://127.0.0.1:1"}, {"connect_s": 0.2})
    await scene.command("inspect", "127.0.0.1:1")
    await scene.examine("127.0.0.1:1")


@row(
    "the advertised name does not resolve",
    error="peer_lost",
    transfer_failed="peer_lost",
    kvflow_inspect="peer_lost",
    kvflow_doctor_endpoint="name_unresolved",
)
async def _(scene):
    await scene.fails_to_pull({"advertise": "tcp://no-such-host.invalid:7000"})
    await scene.command("inspect", "no-such-host.invalid:7000")
    await scene.examine("no-such-host.invalid:7000")


@row(
    "something else listens at the advertised address",
    error="deadline_exceeded",
    transfer_failed="deadline_exceeded",
    kvflow_doctor_endpoint="no_handshake",
)
async def _(scene):
    await scene.fails_to_pull({"advertise": scene.silent()}, {"handshake_s": 0.5})
    await scene.examine(scene.silent())


@row("the advertised address leads to another worker", error="peer_lost", transfer_failed="peer_lost")
async def _(scene):
    another = await scene.worker("prefill-1")
    await scene.fails_to_pull({"advertise": another.endpoint})


@row("an address fails again and again", error="peer_unavailable", transfer_failed="peer_unavailable")
async def _(scene):
    producer, consumer = await scene.pair({"advertise": "tcp://127.0.0.1:1"}, {"connect_s": 0.1})
    params = producer.offer("request-1", BLOCKS, NUM_TOKENS).to_params()
    while not any(said.code == "peer_unavailable" for said in scene.heard.said):
        await scene.fails_with(consumer, params)


@row("no route leads to the worker", kvflow_inspect="peer_lost", kvflow_doctor_endpoint="host_unreachable")
async def _(scene):
    alone = scene.namespaces("--net")
    await scene.command("inspect", "203.0.113.5:7000", before=alone)
    await scene.command("doctor", "203.0.113.5:7000", before=alone, who="kvflow doctor ENDPOINT")


# NIXL and UCX.
ONLY_NIXL = {"transport": "nixl"}


@row("NIXL is not installed", error="transport_unavailable", plane_omitted="transport_unavailable")
async def _(scene):
    site = scene.site_without("nixl")
    await scene.child(site=site, settings=ONLY_NIXL)
    await scene.child(site=site)


@row("`nixl` is installed without a variant for a GPU", error="transport_unavailable")
async def _(scene):
    await scene.child(site=scene.site_without("nixl_cu"), settings=ONLY_NIXL)


def nixl_does_not_start(wrong, variables):
    """Add a row whose NIXL does not start with the variables that ``variables`` returns."""

    @row(wrong, error="transport_unavailable", plane_omitted="transport_unavailable")
    async def _(scene):
        for settings in (ONLY_NIXL, {}):
            await scene.child(settings=settings, **variables(scene))


nixl_does_not_start("NIXL finds no plugin for UCX", lambda scene: {"NIXL_PLUGIN_DIR": str(scene.folder)})
nixl_does_not_start("`UCX_TLS` names a transport that does not exist", lambda _: {"UCX_TLS": "infiniband"})


def nixl_differs(wrong, start):
    """Add a row of which a worker here does not read the child that is started as ``start`` returns."""

    @row(wrong, error="layout_mismatch", transfer_failed="layout_mismatch")
    async def _(scene):
        child, _ = await scene.child(settings=ONLY_NIXL, **start(scene))
        await scene.fails_to_pull_from(child, **ONLY_NIXL)


nixl_differs("`UCX_TLS=tcp` on one side", lambda _: {"UCX_TLS": "tcp"})
nixl_differs("a variable of UCX differs between the two sides", lambda _: {"UCX_UNIFIED_MODE": "y"})
nixl_differs(
    "the two sides have separate PID namespaces",
    lambda scene: {"before": scene.namespaces("--pid", "--ipc"), "forked": False},
)


@row("`UCX_TLS` leaves out transports that the host has", kvflow_doctor="ucx_restricted")
@row("two processes of one host do not read over shared memory", kvflow_doctor="shared_memory_unused")
@row("a process may open few files", kvflow_doctor="open_files_low")
@row("a process may lock little memory", kvflow_doctor="memlock_low")
@row("torch may allocate expandable segments", kvflow_doctor="expandable_segments")
@row("`advertise` is a loopback address, before a worker starts", kvflow_doctor="advertise_loopback")
@row("another process has the control port, before a worker starts", kvflow_doctor="port_taken")
@row("the name of a variable is misspelled, before a worker starts", kvflow_doctor="setting_doubtful")
@row("`KVFLOW_CLUSTER_SECRET` is not set, before a worker starts", kvflow_doctor="secret_missing")
async def _(scene):
    taken = scene.silent().removeprefix("tcp://")
    await scene.command(
        *("doctor", "--bind", taken, "--advertise", "127.0.0.1:7000"),
        before=("sh", "-c", 'ulimit -n 200; ulimit -l 64; exec "$@"', "sh"),
        UCX_TLS="tcp",
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
        KVFLOW_CLUSTERSECRET="a secret of the tests, long enough",
        **{SECRET_VARIABLE: ""},
    )


@row("the clock of one host is off by an hour", kvflow_doctor_endpoint="clock_skewed")
async def _(scene):
    worker = await scene.worker(environment=REPLACED(PRODUCTION, network=HourAhead()))
    await scene.examine(worker.endpoint)


# Two sides.


@row(
    "the two sides have different secrets",
    error="ticket_invalid",
    transfer_failed="ticket_invalid",
    kvflow_inspect="authentication_failed",
    kvflow_doctor_endpoint="authentication_failed",
)
async def _(scene):
    producer, consumer = await scene.pair({}, {"cluster_secret": OTHER_SECRET})
    await scene.fails_with(consumer, producer.offer("request-1", BLOCKS, NUM_TOKENS).to_params())
    await scene.command("inspect", producer.endpoint, **{SECRET_VARIABLE: OTHER_SECRET})
    await scene.examine(producer.endpoint, **{SECRET_VARIABLE: OTHER_SECRET})


@row("the key given for a worker is not its key", kvflow_inspect="authentication_failed")
async def _(scene):
    worker = await scene.worker(private_key=PRODUCER[0], allowed_keys=[READER[1]])
    await scene.command("inspect", worker.endpoint, "--key", STRANGER[1], **{KEY_VARIABLE: READER[0]})


def differ(wrong, source, target, code="layout_mismatch"):
    """Add a row whose two workers have different settings or caches."""

    @row(wrong, error=code, transfer_failed=code)
    async def _(scene):
        await scene.fails_to_pull(source, target)


differ("the engines serve different models", {"model": "llama-3.1-8b"}, {"model": "qwen2.5-7b"})
differ("the engines have different revisions of a model", {"model_revision": "main"}, {"model_revision": "v2"})
differ("the engines compute in different data types", {"model_dtype": "bfloat16"}, {"model_dtype": "float16"})
differ("the caches have different data types", {}, {"shape": REPLACED(TINY, dtype="float8_e4m3fn", head_size=16)})
differ("the caches have different numbers of heads", {}, {"shape": REPLACED(TINY, heads=2)})
differ("the layers have different windows", {}, {"shape": REPLACED(TINY, window=16)})
differ("the layers have different names", {}, {"shape": REPLACED(TINY, prefix="model.layers")})
differ("a data plane is on one side only", {"transport": "tcp"}, {"transport": "loopback"})
differ("encryption is on one side only", {"transport": "tcp"}, {"transport": "tcp", "tcp_encryption": "tls"})
differ(
    "the key of the reader is not among `allowed_keys`",
    {"private_key": PRODUCER[0], "allowed_keys": [STRANGER[1]]},
    {"private_key": READER[0], "allowed_keys": [PRODUCER[1]]},
    code="authentication_failed",
)
differ(
    "the ticket is of one rank of two, and the reader needs both",
    {"shape": REPLACED(TINY, tp_size=2), "num_ranks": 2},
    {},
)


@row(
    "the two sides run releases with different tickets",
    error="release_mismatch",
    kvflow_ticket="release_mismatch",
)
async def _(scene):
    def of_newer_release(params):
        return {"kvflow": params["kvflow"].replace(FORMAT, "kvf9", 1)}

    changed = await scene.fails_to_pull(change=of_newer_release)
    await scene.command("ticket", changed["kvflow"])


@row(
    "the two sides run releases with different protocols",
    error="peer_refused",
    transfer_failed="peer_refused",
    kvflow_inspect="peer_refused",
)
async def _(scene):
    async with of_newer_release() as endpoint:
        await scene.fails_with(await scene.worker("decode-0"), ticket_to(endpoint))
        await scene.command("inspect", endpoint)


# Router and tickets.


def altered(params):
    """Return a ticket of which a router has changed one character."""
    text = params["kvflow"]
    return {"kvflow": text[:40] + ("A" if text[40] != "A" else "B") + text[41:]}


@row("the router does not ask for a ticket", kvflow_doctor_live="router_does_not_ask")
async def _(scene):
    await scene.examine_router("does_not_ask")


@row("the router sends requests to another decode server", kvflow_doctor_live="router_skips_decode")
async def _(scene):
    await scene.examine_router("skips_decode")


@row(
    "the router alters the ticket",
    error="ticket_invalid",
    transfer_failed="ticket_invalid",
    kvflow_ticket="ticket_invalid",
    kvflow_doctor_live="router_changes_ticket",
)
async def _(scene):
    changed = await scene.fails_to_pull(change=altered)
    await scene.command("ticket", changed["kvflow"])
    await scene.examine_router("changes_the_ticket")


@row("the router cuts the ticket", error="ticket_invalid", kvflow_ticket="ticket_invalid")
async def _(scene):
    cut = await scene.fails_to_pull(change=lambda params: {"kvflow": params["kvflow"][:90]})
    await scene.command("ticket", cut["kvflow"])


@row("the router drops the ticket", lease_ended="expired", kvflow_doctor_live="router_drops_ticket")
async def _(scene):
    worker = await scene.worker(lease_s=0.1)
    worker.offer("request-1", BLOCKS, NUM_TOKENS)
    assert await worker.wait_offer("request-1") == "expired"
    await scene.examine_router("drops_the_ticket")


@row("the router is later than the lease", error="stale_lease", transfer_failed="stale_lease")
async def _(scene):
    producer, consumer = await scene.pair({"lease_s": 0.1})
    params = producer.offer("request-1", BLOCKS, NUM_TOKENS).to_params()
    assert await producer.wait_offer("request-1") == "expired"
    await scene.fails_with(consumer, params)


@row("the router sends a ticket twice", error="stale_lease", transfer_failed="stale_lease")
async def _(scene):
    producer, consumer = await scene.pair()
    ticket = producer.offer("request-1", BLOCKS, NUM_TOKENS)
    await consumer.pull(ticket, BLOCKS)
    assert await producer.wait_offer("request-1") == "released"
    await scene.fails_with(consumer, ticket.to_params())


@row(
    "the router sends the ticket of another request",
    error="content_mismatch",
    transfer_failed="content_mismatch",
)
async def _(scene):
    producer, consumer = await scene.pair()
    digests = [[f"{name}-{block}".encode() for block in ids] for name, ids in zip("ab", BLOCKS, strict=True)]
    ticket = producer.offer("request-1", BLOCKS, NUM_TOKENS, digests=digests)
    others = [[b"another prompt" for _ in ids] for ids in BLOCKS]
    await scene.fails(consumer.pull(ticket, BLOCKS, expected_digests=others))


@row("the producer has started again since", error="stale_lease", transfer_failed="stale_lease")
async def _(scene):
    producer, consumer = await scene.pair()
    await scene.fails_with(consumer, ticket_to(producer.endpoint))


# Limits.


@row("more offers than `lease_slots`", error="capacity_exceeded", offer_refused="capacity_exceeded")
async def _(scene):
    worker = await scene.worker(lease_slots=1)
    worker.offer("request-1", BLOCKS, NUM_TOKENS)

    async def offer():
        worker.offer("request-2", BLOCKS, NUM_TOKENS)

    await scene.fails(offer())


@row("a process may open no more files", error="capacity_exceeded")
async def _(scene):
    with files_limited(open_files() + 3):
        await scene.refuses_to_open()


@row("more pulls than a worker may have open", error="capacity_exceeded", transfer_failed="capacity_exceeded")
async def _(scene):
    producer = await scene.worker()
    consumer = await scene.worker("decode-0", environment=REPLACED(PRODUCTION, pulls_max=1))
    one, other = (producer.offer(name, BLOCKS, NUM_TOKENS) for name in ("request-1", "request-2"))
    first = consumer.start_pull(one, BLOCKS)
    await scene.fails(consumer.pull(other, [[4, 5], [6, 7]]))
    await first


@row("more readers than a producer takes", error="peer_refused", transfer_failed="peer_refused")
async def _(scene):
    async with handshake.open_server(
        bind="tcp://127.0.0.1:0",
        identity=IDENTITY,
        publication=handshake.Publication.of(b""),
        security=SECURITY,
        on_event=lambda _key, _event: None,
        limits=Limits(peers_max=1),
    ) as server:
        reader = await scene.worker("decode-0", queue_s=0.1)
        async with handshake.open_client(
            endpoint=server.endpoint,
            identity=REPLACED(IDENTITY, engine_id="decode-1"),
            publication=handshake.Publication.of(b""),
            security=SECURITY,
            on_event=lambda _event: None,
        ):
            await scene.fails_with(reader, ticket_to(server.endpoint))
