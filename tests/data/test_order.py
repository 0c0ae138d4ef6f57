"""The shuffled order is a permutation of each epoch, and differs from epoch to epoch."""

from hypothesis import given
from hypothesis import strategies as st

from titanlite.data.order import shuffled


@given(st.integers(1, 300), st.integers(0, 5), st.integers(0, 2**40))
def test_every_epoch_has_every_document_once(length, epoch, seed):
    found = [shuffled(epoch * length + i, length, seed) for i in range(length)]
    assert sorted(index for _, index in found) == list(range(length))
    assert {number for number, _ in found} == {epoch}


def test_epochs_and_seeds_differ():
    orders = {
        tuple(shuffled(epoch * 100 + i, 100, seed)[1] for i in range(100)) for epoch in range(3) for seed in range(3)
    }
    assert len(orders) == 9


def test_an_order_of_a_trillion_needs_no_memory():
    assert 0 <= shuffled(10**11, 10**12, 3)[1] < 10**12
