"""Caches whose every eight bytes say where they belong: a wrong byte names its request, block, layer and token."""

import hashlib

import torch
from msgspec import Struct

FIELDS = (("request", 24), ("block", 9), ("layer", 6), ("role", 1), ("head", 6), ("token", 8), ("word", 9))
"""Of one word, from the highest bits to the lowest; ``block`` counts within the request. 63 bits: none is negative."""

ROLES = "kv"


class Origin(Struct, frozen=True, order=True):
    """Whose word it is."""

    request: int
    block: int
    layer: int
    role: int
    head: int
    token: int
    word: int

    def __str__(self):
        of = ", ".join(f"{name} {getattr(self, name)}" for name in ("request", "block", "layer", "head", "token"))
        return f"{ROLES[self.role]} of {of}"


def packed(**fields):
    """Put fields, numbers or tensors, into words."""
    word, shift = 0, 0
    for name, bits in reversed(FIELDS):
        word = word + (fields.get(name, 0) << shift)
        shift += bits
    return word


def origin(word):
    """Take a word apart."""
    fields = {}
    for name, bits in reversed(FIELDS):
        fields[name] = word & ((1 << bits) - 1)
        word >>= bits
    return Origin(**fields)


def digests_of(request, num_blocks):
    """Return chained digests of a request's first blocks."""
    found = [b"%d" % request]
    for at in range(num_blocks):
        found.append(hashlib.blake2b(found[-1] + b"%d" % at, digest_size=16).digest())
    return found[1:]


class Words:
    """The words of one cache: those of a request are written into its blocks, and looked for in others.

    Block ids are one list per group.
    """

    def __init__(self, cache):
        self._groups = []
        for group in cache.groups:
            parts = []
            for layer in group.layers:
                for role in ROLES:
                    cells = cache.component(layer, role).view(torch.int64)
                    first, held, _ = cache.held(layer, role)
                    head, token, word = (
                        torch.arange(first, first + held).view(-1, 1, 1),
                        torch.arange(cells.shape[2]).view(-1, 1),
                        torch.arange(cells.shape[3]),
                    )
                    number = int(layer.rpartition(".")[2])
                    names = packed(layer=number, role=ROLES.index(role), head=head, token=token, word=word)
                    parts.append((cells, names))
            self._groups.append(parts)

    def write(self, request, block_ids, first=0):
        """Make blocks those of a request, behind so many others of it in each group."""
        for cells, ids, expected in self._expected(request, block_ids, first):
            cells[ids] = expected

    def wrong(self, request, block_ids):
        """Return every word in these blocks that is not the request's: int64, flat."""
        found = []
        for cells, ids, expected in self._expected(request, block_ids):
            words = cells[ids]
            if not torch.equal(words, expected):
                found.append(words[words != expected])
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)

    def first(self, block_ids, most):
        """Return the first word of some of these blocks, each as a tensor that shares the memory of the cache."""
        words = []
        for parts, ids in zip(self._groups, block_ids, strict=True):
            cells, _ = parts[0]
            words += [cells[block, 0, 0, 0] for block in ids[:: max(1, 2 * len(ids) // most)]]
        return words

    def count(self, block_ids):
        """Return how many words these blocks hold."""
        return sum(
            len(ids) * cells[0].numel()
            for parts, ids in zip(self._groups, block_ids, strict=True)
            for cells, _ in parts
        )

    def _expected(self, request, block_ids, first=0):
        for parts, listed in zip(self._groups, block_ids, strict=True):
            ids = torch.tensor(listed, dtype=torch.int64)
            whose = packed(request=request, block=torch.arange(first, first + len(ids)).view(-1, 1, 1, 1))
            for cells, names in parts:
                yield cells, ids, whose + names


def latest_request(words):
    """Return the highest number of a request that any of some words is of; 0 for none."""
    return origin(int(words.max())).request if len(words) else 0
