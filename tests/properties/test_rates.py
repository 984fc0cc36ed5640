"""What a peer may send and leave unread, whatever it does: plain sums say what counts."""

from hypothesis import given
from hypothesis import strategies as st

from handshake.rates import Bucket, Unread

from .caches import thorough

NBYTES_MAX = 40


@thorough
@given(st.lists(st.one_of(st.integers(0, 30), st.just("ping"), st.tuples(st.just("pong"), st.integers(0, 4)))))
def test_unread_is_what_came_after_the_newest_ping_that_is_answered(steps):
    """A pong answers the ping that was so many pings ago; it shows something if that is the newest."""
    unread = Unread(NBYTES_MAX)
    said, pings, shown, waits = 0, [(0, 0)], 0, False
    for step in steps:
        if step == "ping":
            pings.append((unread.on_ping(), said))
            waits = said > shown
        elif isinstance(step, tuple):
            _, ago = step
            nonce, at = pings[-1 - ago] if ago < len(pings) else (-1, 0)
            is_newest = ago == 0
            assert unread.on_pong(nonce) == is_newest
            if is_newest:
                shown, waits = at, False
        else:
            said += step
            assert unread.add(step) == (said - shown > NBYTES_MAX)
        assert unread.wants_ping == (not waits and (said - shown) * 8 > NBYTES_MAX)


@thorough
@given(
    per_s=st.integers(1, 20),
    at_once=st.none() | st.integers(1, 40),
    asks=st.lists(st.tuples(st.integers(0, 30), st.sampled_from((0.0, 0.25, 1.0, 8.0))), max_size=20),
)
def test_what_is_taken_in_any_span_of_time_is_a_burst_and_what_comes_back(per_s, at_once, asks):
    """Without ``at_once``, a burst is what comes back in a second; what is refused costs nothing."""
    bucket, burst, now, taken = Bucket(per_s, 0.0, at_once), at_once or per_s, 0.0, []
    for tokens, pause in asks:
        now += pause
        fits = all(
            tokens + sum(took for at, took in taken if at >= since) <= burst + per_s * (now - since)
            for since in [now, *(at for at, _ in taken)]
        )
        assert bucket.take(tokens, now) == fits
        if fits:
            taken.append((now, tokens))
