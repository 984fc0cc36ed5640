"""Bytes and values that nobody sends in good faith, drawn from a seed: the same seed draws the same ones.

What is drawn is a valid thing with something wrong in it: rubbish from nothing seldom gets past the first check.
"""

import random

import msgspec

HOSTILE = (
    *(None, True, False, -1, 0, 1, 127, 255, 65536, 2**31 - 1, 2**31, 2**32, 2**53),
    *(2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
    *(0.5, -0.0, 1e308, float("inf"), float("nan")),
    *("", "\0", "x" * 2000, "é" * 300, "hello", "../../x", "0" * 32, "tcp://127.0.0.1:1"),
    *([], {}, [[]], [0] * 300, ["x"], {"": 0}, {"type": "hello"}, {"type": "publish", "publication": {}}),
)  # fmt: skip
"""Values of the wrong type, or at the end of a range."""

NUMBERS = (
    0,
    1,
    4,
    7,
    8,
    0x7F,
    0x80,
    0xFF,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63 - 1,
    2**63,
    2**64 - 100,
    2**64 - 1,
)

FRAGMENTS = (
    b"\xdd\xff\xff\xff\xff",  # a list of 2**32 - 1 elements
    b"\xdf\xff\xff\xff\xff",  # a map of so many
    b"\xc6\xff\xff\xff\xff",  # 4 GiB of bytes
    b"\xdb\xff\xff\xff\xff",  # 4 GiB of text
    b"\xcf" + b"\xff" * 8,
    b"\xd3\x80" + bytes(7),
    b"\xa2\xff\xff",  # text that is not UTF-8
    b"\xa3\xed\xa0\x80",  # half a surrogate pair
    b"\x91" * 2000,  # lists in lists
    b"\x81\xa1x" * 600,  # maps in maps
    b"\xc1",
    b"\xc7\xff\x01",
    b"\xd6\xff" + bytes(4),
)
"""MessagePack that is dangerous where it stands alone, and where it replaces a value."""


class Mutator:
    """Draws mutations.

    Args:
        seed: anything that ``random.Random`` takes.
    """

    def __init__(self, seed):
        self.draw = random.Random(seed)

    def of_bytes(self, data, other=b""):
        """Return bytes with one to four things wrong; ``other`` is another valid thing to splice with."""
        made = bytearray(data)
        for _ in range(self.draw.choice((1, 1, 1, 2, 4))):
            self._change(made, other)
        return bytes(made)

    def _change(self, made, other):
        draw, at = self.draw, self.draw.randrange(len(made) + 1)
        length = draw.choice((1, 2, 4, 8, 33))
        match draw.randrange(9):
            case 0 if at < len(made):
                made[at] ^= 1 << draw.randrange(8)
            case 1 if at < len(made):
                made[at] = draw.choice((0, 1, 0x7F, 0x80, 0xC1, 0xFE, 0xFF, draw.randrange(256)))
            case 2:
                del made[at:]
            case 3:
                del made[at : at + length]
            case 4:
                made[at:at] = draw.randbytes(length)
            case 5:
                made[at:at] = made[at : at + 8 * length]
            case 6:
                made[at:] = other[draw.randrange(len(other) + 1) :]
            case 7:
                made[at : at + 8] = draw.choice(NUMBERS).to_bytes(8, draw.choice(("little", "big")))
            case _:
                made[at : at + draw.randrange(2)] = draw.choice(FRAGMENTS)

    def of_value(self, value, hostile=HOSTILE):
        """Return a value of lists and dicts with one to three nodes replaced, removed, doubled or renamed."""
        for _ in range(self.draw.choice((1, 1, 2, 3))):
            value = self._node(value, hostile)
        return value

    def _node(self, value, hostile):
        draw = self.draw
        if not isinstance(value, (dict, list)) or not value or draw.random() < 0.15:
            return self._leaf(value, hostile)
        made = value.copy()
        if isinstance(made, dict):
            key = draw.choice(list(made))
            match draw.randrange(12):
                case 0:
                    del made[key]
                case 1:
                    made[draw.choice(("", "x", "type", "version", key + "_"))] = made.pop(key)
                case 2:
                    made[draw.choice(list(made))] = made[key]
                case _:
                    made[key] = self._node(made[key], hostile)
            return made
        at = draw.randrange(len(made))
        match draw.randrange(12):
            case 0:
                del made[at]
            case 1:
                made[at:at] = [made[at]] * draw.choice((1, 2, 1100))
            case 2:
                made[at] = made[draw.randrange(len(made))]
            case _:
                made[at] = self._node(made[at], hostile)
        return made

    def _leaf(self, value, hostile):
        draw = self.draw
        if isinstance(value, bool) or draw.random() < 0.5:
            return draw.choice(hostile)
        if isinstance(value, int):
            return max(-(2**63), min(2**64 - 1, draw.choice((value + 1, value - 1, -value, value * 2, value << 32))))
        if isinstance(value, str):
            return draw.choice((value + value, value[:-1], value[::-1], value.upper(), value + "\0"))
        if isinstance(value, bytes):
            return self.of_bytes(value) if value else b"\0"
        return [value] * draw.choice((1, 2, 3))

    def of_packed(self, data, other):
        """Return MessagePack with something wrong in its bytes or in its values, or bytes from nothing."""
        kind = self.draw.random()
        if kind < 0.45:
            return self.of_bytes(data, other)
        if kind < 0.95:
            return msgspec.msgpack.encode(self.of_value(msgspec.msgpack.decode(data)))
        return self.draw.randbytes(self.draw.choice((0, 1, 2, 20, 300)))
