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
    asks=st.lists(st.tuples(st.integers(0, 30), st.sampled_from((0.0, 0.25, 1.0, 8.0))), max_size=20),
)
def test_no_span_of_time_takes_more_than_a_burst_and_what_comes_back(per_s, asks):
    bucket, now, taken = Bucket(per_s, 0.0), 0.0, []
    for tokens, pause in asks:
        now += pause
        if bucket.take(tokens, now):
            taken.append((now, tokens))
        else:
            assert tokens > min(per_s, per_s * pause), "what has come back since the last one is there"
        for since, _ in taken:
            assert sum(took for at, took in taken if at >= since) <= per_s + per_s * (now - since)
