"""Of wrong words, whose they are."""

from tests.integration.shapes import UNTOUCHED
from tests.world.words import origin

SHOWN = 3
NOBODYS = int.from_bytes(bytes([UNTOUCHED]) * 8, "little", signed=True)


def whose(word):
    """Say of one word that should not be where it is whose it is."""
    if word == NOBODYS:
        return "nobody's: it was never written"
    if word < 0:
        return f"nobody's: {word & (1 << 64) - 1:#x} is no word of a request"
    return str(origin(word))


def foreign(words, request, block_ids):
    """Say of words in these blocks that are not a request's whose they are, the first few and how many; [] if none."""
    wrong = words.wrong(request, block_ids).tolist()
    texts = [f"request {request} holds {whose(word)}" for word in dict.fromkeys(wrong)]
    return texts[:SHOWN] + ([f"{len(wrong)} such words of {words.count(block_ids)}"] if wrong else [])
