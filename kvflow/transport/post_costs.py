"""How long reads would hold the thread that posts them: an estimate, which is learnt from every post. Pure."""

from kvflow.transport.mover import Prepared

READ_S = 20e-6
"""Of one read: two calls into NIXL that move next to nothing, and all that Python does for it."""

POST_S = 8e-6
DESCRIPTOR_S = 0.5e-6
BYTE_S = 1 / 6e9
"""Of one chunk over shared memory: the call, each descriptor that may have merged with others, and each byte. What a
machine or a peer makes of it shows in the ratio of measured times to these."""

SLOWEST = 64.0
"""No post counts as slower than so many times its estimate, so that a peer recovers from it within some ten posts."""

WEIGHT = 0.25
"""Of the last post. A post that the kernel interrupted must not stand for those after it: posts of a peer that is hot
take as long as estimated, and after a pause of 2 ms two to three times as long, one in ten of them five times."""


class PostCosts:
    """What posts for one peer cost. Thread: one at a time."""

    def __init__(self) -> None:
        self._ratio = 1.0

    def of_read(self, pairs: int, program: Prepared) -> float:
        """Return the seconds that a read of so many pairs is expected to take, its fence included."""
        descriptors = pairs * program.source.count // program.source_units
        post_s = POST_S + descriptors * DESCRIPTOR_S + pairs * program.pair_bytes * BYTE_S
        return READ_S - POST_S + self._ratio * post_s

    def learn(self, measured_s: float, descriptors: int, nbytes: int) -> None:
        """Note how long a post took."""
        ratio = min(SLOWEST, measured_s / (POST_S + descriptors * DESCRIPTOR_S + nbytes * BYTE_S))
        self._ratio += (ratio - self._ratio) * WEIGHT
