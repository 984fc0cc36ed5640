"""How an engine is deployed, as commands take it, and the manifests of its ranks."""

from collections.abc import Mapping

import msgspec
from msgspec import Struct

from kvflow import models
from kvflow.errors import SpecInvalid, suggest
from kvflow.layout.component import ADDRESS_MAX, Region
from kvflow.layout.describe import plan_cache
from kvflow.layout.groups import plan_groups, resolve_layout
from kvflow.layout.manifest import Manifest
from kvflow.layout.placement import KV_FORMS, LAYOUTS
from kvflow.layout.shards import Shard
from kvflow.layout.specs import CacheSpec
from kvflow.tools.cli.layout import specs_of

NUM_BLOCKS = 1024
RANKS_MAX = 256
"""Of one engine: planning a rank takes some milliseconds."""

FORM = "tp=2,pp=1,layout=LBHNC,kv=content,block-size=16,dtype=bfloat16"


class Deployment(Struct, frozen=True, kw_only=True):
    """How one engine is deployed.

    Attributes:
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        layout: order of the axes, ``auto`` for what kvflow chooses.
        kv: where V lies.
        block_size: tokens in one block; None for what the model says.
        dtype: of keys, values and latents; None for what the model says.
    """

    tp: int = 1
    pp: int = 1
    layout: str = "auto"
    kv: str = "content"
    block_size: int | None = None
    dtype: str | None = None

    def __str__(self) -> str:
        """Return the deployment as ``parse`` reads it, without defaults."""
        given = {name.replace("_", "-"): getattr(self, name) for name in self.__struct_fields__}
        defaults = Deployment()
        return (
            ",".join(
                f"{name}={value}" for name, value in given.items() if value != getattr(defaults, name.replace("-", "_"))
            )
            or "tp=1"
        )


def parse(text: str) -> Deployment:
    """Read a deployment such as ``tp=2,layout=LBHNC``.

    Raises:
        SpecInvalid: a name is unknown or a value is none; names it.
    """
    names = [name.replace("_", "-") for name in Deployment.__struct_fields__]
    given: dict[str, str] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in names:
            raise SpecInvalid(f"{part!r} is no part of a deployment such as {FORM}", remedy=suggest(name, names))
        given[name.replace("-", "_")] = value
    try:
        found = msgspec.convert(given, type=Deployment, strict=False)
    except msgspec.ValidationError as error:
        raise SpecInvalid(f"the deployment {text!r} is wrong: {error}", remedy=f"Write it as {FORM}.") from error
    if found.layout not in {"auto", *LAYOUTS}:
        raise SpecInvalid(f"layout {found.layout!r} is unknown", remedy=suggest(found.layout, ("auto", *LAYOUTS)))
    if found.kv not in KV_FORMS:
        raise SpecInvalid(f"kv {found.kv!r} is unknown", remedy=suggest(found.kv, KV_FORMS))
    if found.tp < 1 or found.pp < 1 or found.tp * found.pp > RANKS_MAX:
        raise SpecInvalid(
            f"the deployment {text!r} has {found.tp * found.pp} ranks",
            remedy=f"Give tp and pp of 1 or more, and at most {RANKS_MAX} ranks.",
        )
    return found


def manifests_of(model: str, deployment: Deployment, *, guess: bool = False) -> list[Manifest]:
    """Return the manifest of each rank of an engine, the ranks of the first pipeline stage first.

    Args:
        model: a bundled model, a ``config.json`` or its folder.
        deployment: of the engine.
        guess: describe an unknown type of model as plain attention.

    Raises:
        SpecInvalid: the model cannot be described, or does not go with the deployment.
    """
    given = specs_of(model, deployment.block_size, cache_dtype=deployment.dtype, guess=guess)
    if deployment.pp > len(given):
        raise SpecInvalid(f"pp is {deployment.pp}, but the model has {len(given)} layers", remedy="Give a smaller pp.")
    return [
        _manifest(stage, deployment, Shard(tp_rank=rank, tp_size=deployment.tp))
        for stage in _stages(given, deployment.pp)
        for rank in range(deployment.tp)
    ]


def _stages(specs: Mapping[str, CacheSpec], count: int) -> list[dict[str, CacheSpec]]:
    """Divide layers among pipeline stages in order. As in vLLM, the last but one stages take what is left over."""
    sizes = [len(specs) // count] * count
    for at in range(2, 2 + len(specs) % count):
        sizes[-at] += 1
    names = iter(specs.items())
    return [dict([next(names) for _ in range(size)]) for size in sizes]


def _manifest(given: Mapping[str, CacheSpec], deployment: Deployment, shard: Shard) -> Manifest:
    specs = models.align_states(given, shard=shard)
    layout = resolve_layout(specs, deployment.layout, enable_cross_layers_blocks=False, shard=shard)
    groups = plan_groups(specs, layout=layout, shard=shard)
    plan = plan_cache(specs, groups, layout=layout, kv=deployment.kv, shard=shard, num_blocks=NUM_BLOCKS)
    return plan.manifest(Region(0, ADDRESS_MAX))
