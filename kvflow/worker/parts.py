"""From a ticket and our block ids to what each source rank must give."""

from collections.abc import Sequence

from msgspec import UnsetType

from kvflow.cache.blocks import Ids
from kvflow.cache.tickets import Grant, block_ends
from kvflow.errors import ArgumentInvalid, BlockIdsInvalid, ContentMismatch, TicketInvalid
from kvflow.layout.manifest import Manifest
from kvflow.transfer.bind_plan import AnyBinding
from kvflow.transfer.pairs import UnitPairs, check_block_ids, pair_units
from kvflow.transfer.requests import Part
from kvflow.worker.programs import Peer, Programs


def parts_of(
    grant: Grant, peer: Peer, programs: Programs, targets: Sequence[Ids], given: list[tuple[AnyBinding, UnitPairs]]
) -> list[Part]:
    """Pair our blocks with the ticket's, group by group; groups that need nothing are left out.

    Args:
        grant: of the rank.
        peer: the rank.
        programs: what reads it.
        targets: our checked block ids of each group.
        given: takes what each group gives, and the binding that reads it.

    Raises:
        TicketInvalid: the ticket's lists do not fit the producer's own cache.
        BlockRangeMismatch: our blocks stand for tokens that the ticket does not cover.
    """
    theirs = peer.manifest
    try:
        sources = check_block_ids(
            grant.block_ids, num_blocks=theirs.num_blocks, aliases=theirs.aliases, unique=False, decoded=True
        )
    except BlockIdsInvalid as error:
        raise TicketInvalid(f"the ticket of {peer.link.peer} does not fit its cache: {error.message}") from error
    parts = []
    for program_id, binding in programs:
        group = binding.group
        pairs = pair_units(
            group,
            sources[group.source_group],
            targets[group.target_group],
            num_tokens=grant.num_tokens[group.source_group],
        )
        if len(pairs.source):
            parts.append(Part(program_id, pairs))
            given.append((binding, pairs))
    return parts


def check_expected(expected: Sequence[Sequence[bytes]], targets: Sequence[Ids]) -> tuple[tuple[bytes, ...], ...]:
    """Return a caller's expected digests, which must go with its block ids.

    Raises:
        ArgumentInvalid: they do not.
    """
    lists = tuple(tuple(each) for each in expected)
    shape = [len(ids) for ids in targets]
    if [len(each) for each in lists] != shape or not all(isinstance(one, bytes) for each in lists for one in each):
        raise ArgumentInvalid("expected_digests", f"lists of {shape} bytes, one for each block", expected)
    return lists


def require_content(grant: Grant, programs: Programs, ours: Manifest, expected: Sequence[Sequence[bytes]]) -> None:
    """Refuse a ticket whose blocks hold something else than is expected of them, group by group.

    Raises:
        ContentMismatch: names our group.
    """
    if isinstance(grant.contents, UnsetType):
        raise ContentMismatch("the ticket does not say what its blocks hold")
    for _, binding in programs:
        source, target = binding.group.source_group, binding.group.target_group
        wanted = expected[target]
        if not any(wanted):
            continue
        content, num_tokens = grant.contents[source], grant.num_tokens[source]
        given = dict(zip(content.ends(num_tokens), content.digests, strict=True))
        ends = block_ends(len(wanted), ours.groups[target].tokens_per_id, num_tokens)
        compared = [(given[end], digest) for end, digest in zip(ends, wanted, strict=True) if digest and given.get(end)]
        if not compared or any(found != digest for found, digest in compared):
            raise ContentMismatch(f"group {target}: the ticket's blocks hold something else", group=target)
