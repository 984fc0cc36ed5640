"""How long reads would hold the thread that posts them: an estimate, which is learnt from every post. Pure."""

READ_S = 12e-6
"""Of one read beside its posts: the fence, and all that Python does for it."""

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
    """What posts for one peer cost. Thread: one at a time.

    Attributes:
        ratio: of measured times to the estimates above.
    """

    def __init__(self) -> None:
        self.ratio = 1.0

    def learn(self, measured_s: float, expected_s: float) -> None:
        """Note how long a post took, and how long it was expected to take by the estimates above."""
        self.ratio += (min(SLOWEST, measured_s / expected_s) - self.ratio) * WEIGHT
