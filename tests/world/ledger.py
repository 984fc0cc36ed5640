"""The ledger of the world: how reads of what was offered have ended, and every word that is not where it should be."""

from collections import Counter
from dataclasses import dataclass, field, fields

from tests.integration.shapes import UNTOUCHED

from .words import origin

SHOWN = 3
LOOKED_AT = 1000
NOBODYS = int.from_bytes(bytes([UNTOUCHED]) * 8, "little", signed=True)


@dataclass
class Ledger:
    """What became of reads.

    Attributes:
        ends: how they ended: ``completed``, ``cancelled``, or the code of an error.
        wrong: words that were delivered and were not the request's.
        late: words that changed after a read had ended and was quiescent, or after their blocks had been given back.
        examples: whose the first of them are.
    """

    ends: Counter = field(default_factory=Counter)
    wrong: int = 0
    late: int = 0
    examples: list = field(default_factory=list)

    def compare(self, what, words, number, block_ids):
        """Compare each word in blocks with a request's; note those that are ``wrong`` or ``late``, and return them."""
        others = words.wrong(number, block_ids)
        if len(others):
            setattr(self, what, getattr(self, what) + len(others))
            if len(self.examples) < SHOWN:
                texts = list(dict.fromkeys(map(whose, others[:LOOKED_AT].tolist())))[:SHOWN]
                self.examples += [f"{what}: request {number} holds {text}" for text in texts]
                self.examples.append(f"{what}: {len(others)} such words of {words.count(block_ids)}")
        return others

    def add(self, other):
        """Count what another ledger has counted, one of its own class or what JSON has made of it."""
        for name in (each.name for each in fields(self)):
            theirs = other[name] if isinstance(other, dict) else getattr(other, name)
            if isinstance(theirs, dict):
                getattr(self, name).update(theirs)
            else:
                setattr(self, name, getattr(self, name) + theirs)

    def take(self):
        """Return all of it, and start from nothing."""
        taken = {each.name: getattr(self, each.name) for each in fields(self)}
        type(self).__init__(self)
        return taken


def whose(word):
    """Say of one word that should not be where it is whose it is."""
    if word == NOBODYS:
        return "nobody's: it was never written"
    if word < 0:
        return f"nobody's: {word & (1 << 64) - 1:#x} is no word of a request"
    return str(origin(word))
