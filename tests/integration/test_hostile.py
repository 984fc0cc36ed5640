"""A producer that holds the cluster's secret and lies: an error for its readers, and nothing for anybody else."""

import msgspec
import pytest
from msgspec.structs import replace

import handshake
from handshake import Publication
from kvflow import errors
from kvflow.layout.component import ADDRESS_MAX, Region
from kvflow.layout.manifest import MANIFEST_SCHEMA
from kvflow.planning.plan import PlanCache
from kvflow.rendezvous.endpoint import decode, encode

from .consuming import works
from .strangers import IDENTITY, SECURITY, publishing, ticket_to

BLOCKS = [[0, 1], [2, 3]]


async def published(endpoint):
    """Return what a worker publishes."""
    async with handshake.open_client(
        endpoint,
        identity=IDENTITY,
        publication=Publication.of(b"of a stranger"),
        security=SECURITY,
        on_event=lambda _event: None,
    ) as client:
        return decode(client.publication, peer="")


def with_components(whole, *, num_blocks=None, **changes):
    """Change every component of every layer."""
    groups = tuple(
        replace(
            group,
            layers=tuple(
                replace(layer, components=tuple(replace(part, **changes) for part in layer.components))
                for layer in group.layers
            ),
        )
        for group in whole.manifest.groups
    )
    return with_manifest(whole, groups=groups, num_blocks=num_blocks or whole.manifest.num_blocks)


def with_manifest(whole, **changes):
    return encode(replace(whole, manifest=replace(whole.manifest, **changes)))


def plane_of(whole):
    (plane,) = whole.planes
    return plane


def with_metadata(whole, change):
    """The same with other metadata of its data plane."""
    return encode(replace(whole, planes={plane_of(whole): change(whole.planes[plane_of(whole)])}))


def told(payload):
    return Publication.of(payload, schema=MANIFEST_SCHEMA)


def far_away(whole):
    """The same cache where the producer has none."""
    (region,) = whole.manifest.regions
    return (replace(region, address=4096),)


ADVERTISEMENTS = {
    "no bytes": (lambda _: told(b""), errors.ProtocolViolation),
    "no manifest": (lambda _: told(msgspec.msgpack.encode({"manifest": 7})), errors.ProtocolViolation),
    "half a manifest": (lambda it: told(encode(it).payload[:200]), errors.ProtocolViolation),
    "text that is not Unicode": (
        lambda it: told(encode(it).payload.replace(plane_of(it).encode(), b"\xff" * len(plane_of(it)), 1)),
        errors.ProtocolViolation,
    ),
    "another version": (
        lambda it: Publication.of(encode(it).payload, schema=MANIFEST_SCHEMA + 1),
        errors.ReleaseMismatch,
    ),
    "a region beyond all addresses": (
        lambda it: with_manifest(it, regions=(Region(address=ADDRESS_MAX, nbytes=ADDRESS_MAX),)),
        errors.ProtocolViolation,
    ),
    "a region that is not its own": (lambda it: with_manifest(it, regions=far_away(it)), errors.ProtocolViolation),
    "blocks beyond the region": (lambda it: with_manifest(it, num_blocks=33), errors.ProtocolViolation),
    "a region that does not exist": (lambda it: with_components(it, region=1), errors.ProtocolViolation),
    "a stride beyond memory": (lambda it: with_components(it, block_stride=ADDRESS_MAX), errors.ProtocolViolation),
    "heads beyond the model": (lambda it: with_components(it, first=3), errors.ProtocolViolation),
    "heads without end": (lambda it: with_components(it, total=1 << 31), errors.LayoutMismatch),
    "heads without end in one place": (
        lambda it: with_components(it, extents=(1 << 31, 4, 8), total=1 << 31, strides=(0, 16, 2)),
        errors.ProtocolViolation,
    ),
    "blocks without end": (
        lambda it: with_components(it, num_blocks=(1 << 31) - 1, block_stride=0), errors.ProtocolViolation
    ),
    "strides of zero": (
        lambda it: with_components(it, block_stride=0, strides=(0, 0, 0)), errors.ProtocolViolation
    ),
    "layers named twice": (lambda it: with_manifest(it, groups=it.manifest.groups * 2), errors.ProtocolViolation),
    "half an epoch": (
        lambda it: encode(replace(it, epochs=Region(address=4096, nbytes=7))), errors.ProtocolViolation
    ),
    "epochs that are not its own": (
        lambda it: encode(replace(it, epochs=Region(address=4096, nbytes=4096))), errors.ProtocolViolation
    ),
    "epochs without end": (
        lambda it: encode(replace(it, epochs=replace(it.epochs, nbytes=ADDRESS_MAX - 7))), errors.ProtocolViolation
    ),
    "no metadata": (lambda it: with_metadata(it, lambda _: b""), errors.ProtocolViolation),
    "metadata with a flipped bit": (
        lambda it: with_metadata(it, lambda good: good[:-1] + bytes([good[-1] ^ 1])), errors.ProtocolViolation
    ),
    "metadata that cannot be read": (
        lambda it: with_metadata(it, lambda _: b"\x93\xa2\xff\xff\xa1a\xc4\x00"), errors.ProtocolViolation
    ),
    "no data plane": (lambda it: encode(replace(it, planes={})), errors.ProtocolViolation),
    "a data plane that is nowhere": (
        lambda it: encode(replace(it, planes={**it.planes, "tcp": b""})), errors.ProtocolViolation
    ),
    "a data plane of which nobody has heard": (
        lambda it: encode(replace(it, planes={"carrier pigeon": b""}, data_endpoint="")), errors.LayoutMismatch
    ),
}  # fmt: skip


async def test_a_lie_ends_its_own_pull_only(world):
    async with world.producing() as producer, world.producing(engine_id="prefill-1") as liar:
        about = await published(liar.endpoint)
        async with world.consuming() as consumer:
            await works(producer, consumer)
            for lie, (tell, kind) in ADVERTISEMENTS.items():
                async with publishing(tell(about)) as endpoint:
                    with pytest.raises(errors.KvflowError) as caught:
                        await consumer.pull(ticket_to(endpoint), BLOCKS)
                assert type(caught.value) is kind, lie
                assert caught.value.remedy, lie
                consumer.at_rest()
                await works(producer, consumer)


async def test_a_defect_of_ours_in_meeting_a_peer_ends_that_peer_only(near_world, monkeypatch):
    def stumble(*_, **__):
        raise ZeroDivisionError("as a defect would")

    async with (
        near_world.producing() as producer,
        near_world.producing(engine_id="prefill-1") as another,
        near_world.consuming() as consumer,
    ):
        await works(producer, consumer)
        with monkeypatch.context() as patch:
            patch.setattr(PlanCache, "plan", stumble)
            with pytest.raises(errors.TransferFailed, match="as a defect would"):
                await consumer.pull(await another.offer("r", BLOCKS, 8), BLOCKS)
        await works(producer, consumer)
        await works(another, consumer)
