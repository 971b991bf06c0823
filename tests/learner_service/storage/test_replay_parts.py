"""Replays dealt to another number of learners: no row twice, none lost, the newest kept."""

from typing import Any

import pytest
import torch

from murmur.learner_service.storage.replay import ReplayStorage
from murmur.learner_service.storage.storage import SavedPart
from tests.learner_service.storage.test_replay import VIEW, put, replay


def saved(rank: int, storage: ReplayStorage) -> SavedPart:
    chunks = {number: (lambda read=read: read()) for number, read in storage.chunks().items()}
    return SavedPart(rank, storage.state_dict(), chunks)


def columns(storage: ReplayStorage) -> list[float]:
    """The first view of each column, in the order in which they will be overwritten."""
    filled, total = storage._filled, storage._columns
    first = storage._cursor if filled == total else 0
    views = storage._arrays[VIEW][:, 0, 0, 0]
    return [float(views[(first + i) % total]) for i in range(filled)]


def filled(count: int, first: float, capacity_rows: int = 32, **options: Any) -> ReplayStorage:
    storage = replay(capacity_rows=capacity_rows, **options)
    for i in range(count):
        put(storage, first + 10 * i)
    return storage


@pytest.mark.parametrize("count", [0, 3, 8, 11])
def test_two_replays_become_one_and_two_again(count: int) -> None:
    a, b = filled(count, 0), filled(5, 1000)
    expected = sorted(columns(a) + columns(b))
    one = replay(capacity_rows=64)
    one.load_parts([saved(0, a), saved(1, b)], 0, 1)
    assert sorted(columns(one)) == expected
    assert one.inserted == a.inserted + b.inserted
    assert one._tree.root.sum() == a._tree.root.sum() + b._tree.root.sum()
    two = [replay(capacity_rows=32) for _ in range(2)]
    part = saved(0, one)
    for rank in range(2):
        two[rank].load_parts([part], rank, 2)
    assert sorted(columns(two[0]) + columns(two[1])) == expected
    assert abs(len(columns(two[0])) - len(columns(two[1]))) <= 1


def test_the_oldest_columns_are_overwritten_first() -> None:
    a, b = filled(2, 0), filled(2, 1000)  # added in turns
    one = replay(capacity_rows=64)
    one.load_parts([saved(0, a), saved(1, b)], 0, 1)
    assert columns(one) == [0, 1000, 10, 1010]


def test_what_has_no_room_is_the_oldest() -> None:
    a = filled(8, 0)
    small = replay(capacity_rows=16)
    small.load_parts([saved(0, a)], 0, 1)
    assert columns(small) == [40, 50, 60, 70]
    put(small, 80)
    assert columns(small) == [50, 60, 70, 80]


def test_priorities_go_with_their_rows() -> None:
    a = filled(3, 0, prioritized=True)
    a._tree.set(torch.tensor([4]), torch.tensor([9.0]))
    halves = [replay(capacity_rows=32, prioritized=True) for _ in range(2)]
    part = saved(0, a)
    for rank in range(2):
        halves[rank].load_parts([part], rank, 2)
    assert columns(halves[1]) == [10]
    assert halves[1]._tree.leaves[0] == pytest.approx(9.0)
    assert 9.0 not in halves[0]._tree.leaves
