"""A heap that gives what a sorted list would, and holds little more than its items."""

from hypothesis import given
from hypothesis import strategies as st

from kvflow.heaps import SPARE_MAX, Heap

items = st.integers(0, 9)
keys = st.integers(0, 5)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), items, keys),
            st.tuples(st.just("remove"), items, st.none()),
            st.tuples(st.just("take"), st.none(), keys),
        ),
        max_size=80,
    )
)
def test_it_gives_what_a_sorted_list_would(script):
    heap, listed, puts = Heap(), {}, 0
    for what, item, key in script:
        match what:
            case "put":
                puts += 1
                heap.put(item, key)
                listed[item] = (key, puts)
            case "remove":
                heap.remove(item)
                listed.pop(item, None)
            case "take":
                due = sorted((place, item) for item, place in listed.items() if place[0] <= key)
                assert heap.take_until(key) == [item for _, item in due]
                for _, taken in due:
                    del listed[taken]
        first = min(((place, item) for item, place in listed.items()), default=None)
        assert heap.first() == (None if first is None else (first[0][0], first[1]))
        assert len(heap) == len(listed)
        assert heap.entries <= 2 * len(listed) + SPARE_MAX


def test_what_was_removed_is_not_kept():
    heap = Heap()
    for item in range(10_000):
        heap.put(item, item)
        heap.remove(item)
    assert heap.entries <= SPARE_MAX
    for key in range(10_000):
        heap.put("moved", key)
    assert heap.entries <= SPARE_MAX + 2
