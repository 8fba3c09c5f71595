"""Where each request of a batch counts."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sluice_operator.gates.slices import NUM_SLOTS, Places


@given(data=st.data(), num_pairs=st.integers(1, 5), size=st.integers(1, 40))
def test_a_request_counts_once_in_each_of_its_slices(data: st.DataObject, num_pairs: int, size: int) -> None:
    """Whichever way it is asked, and in order of arrival within each slice."""
    levels = st.tuples(*(st.sampled_from((-1, *slots)) for slots in ((1, 2), (3, 4), (21, 22))))
    slots = np.array([(0, *data.draw(levels)) for _ in range(num_pairs)])
    which = np.array(data.draw(st.lists(st.integers(0, num_pairs - 1), min_size=size, max_size=size)))
    wanted = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    candidate = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    rows = np.flatnonzero(wanted)
    cell, places = rows % 3, Places(slots, which)

    expected = sorted((slot, row, row % 3) for row in rows for slot in slots[which[row]] if slot >= 0)
    assert list(zip(*places.by_slot(rows, cell), strict=True)) == expected
    assert sorted(zip(*places.spread(rows, cell), strict=True)) == expected
    counts = np.zeros((NUM_SLOTS, 2), int)
    for slot, row, _ in expected:
        counts[slot, int(candidate[row])] += 1
    np.testing.assert_array_equal(places.count(wanted, candidate), counts)
    assert {int(slot) for slot in places.whole().by_slot(rows, cell)[0]} <= {0}
