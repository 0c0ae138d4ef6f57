"""The shuffled order is a permutation of each epoch, and differs from epoch to epoch."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlite.data.order import Order


@settings(deadline=None)
@given(
    st.integers(1, 700),
    st.integers(0, 5),
    st.integers(0, 2**40),
    st.one_of(st.none(), st.integers(1, 90)),
    st.integers(1, 9),
)
def test_every_epoch_has_every_document_once(length, epoch, seed, window, stride):
    found = []
    for lane in range(stride):
        order = Order(length, seed, window=window, stride=stride)
        first = epoch * length + (lane - epoch * length) % stride
        found += [order.at(position) for position in range(first, (epoch + 1) * length, stride)]
    assert sorted(found) == list(range(length))


@pytest.mark.parametrize("window", [None, 16])
def test_a_position_does_not_depend_on_what_was_asked_before(window):
    straight = Order(100, 5, window=window, stride=3)
    expected = {position: straight.at(position) for position in range(1, 300, 3)}
    for position, index in expected.items():
        assert Order(100, 5, window=window, stride=7).at(position) == index


def test_a_window_keeps_neighbours_together():
    order = Order(1000, 3, window=50)
    found = [order.at(position) for position in range(1000)]
    for begin in range(0, 1000, 50):
        block = found[begin : begin + 50]
        assert max(block) - min(block) == 49 and block != sorted(block)
    assert [block // 50 for block in found[::50]] != list(range(20))


def test_epochs_and_seeds_differ():
    orders = set()
    for seed in range(3):
        order = Order(100, seed)
        orders |= {tuple(order.at(epoch * 100 + i) for i in range(100)) for epoch in range(3)}
    assert len(orders) == 9


def test_an_order_of_a_trillion_needs_no_memory():
    assert 0 <= Order(10**12, 3).at(10**11) < 10**12
