"""Draws in proportion to priorities, against a plain cumulative sum."""

import pytest
import torch

from murmur.learner_service.storage.replay import SumTree
from tests.learner_service.toys import CPU


def tree(priorities: torch.Tensor) -> SumTree:
    made = SumTree(len(priorities), CPU)
    made.set_range(0, priorities)
    return made


@pytest.mark.parametrize("size", [1, 3, 128, 129, 20_000, 2_200_000])  # one to four levels
def test_draws_equal_those_of_a_cumulative_sum(size: int) -> None:
    random = torch.Generator().manual_seed(size)
    # Whole numbers: sums are exact, so both must agree on every draw.
    priorities = torch.randint(0, 5, (size,), generator=random).float()
    priorities[-1] = 1
    made = tree(priorities)
    assert made.root.sum() == priorities.double().sum()
    index, probability = made.sample(1000, torch.Generator().manual_seed(1))
    drawn = torch.rand(1000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    left = (torch.arange(1000) + drawn) * (priorities.double().sum() / 1000)
    expected = torch.searchsorted(priorities.double().cumsum(0), left, right=True)
    assert index.tolist() == expected.tolist()
    torch.testing.assert_close(probability, priorities[index] / priorities.sum())


def test_frequencies_follow_priorities_and_zero_is_never_drawn() -> None:
    priorities = torch.tensor([1.0, 0.0, 2.0, 5.0, 0.0])
    made, random = tree(priorities), torch.Generator().manual_seed(0)
    counts = torch.zeros(5)
    for _ in range(500):
        counts += torch.bincount(made.sample(16, random)[0], minlength=5)
    assert counts[1] == counts[4] == 0
    torch.testing.assert_close(counts / counts.sum(), priorities / 8, atol=0.01, rtol=0)


def test_every_stratum_is_drawn_from() -> None:
    # Equal priorities and as many draws as rows: each row once.
    index, _ = tree(torch.ones(300)).sample(300, torch.Generator().manual_seed(0))
    assert index.tolist() == list(range(300))


def test_sums_stay_right_however_priorities_are_set() -> None:
    random, size = torch.Generator().manual_seed(0), 40_000
    made, plain = SumTree(size, CPU), torch.zeros(size)
    for _ in range(30):
        start = int(torch.randint(size - 500, (), generator=random))
        fresh = torch.randint(0, 9, (500,), generator=random).float()
        made.set_range(start, fresh)
        plain[start : start + 500] = fresh
        index = torch.randperm(size, generator=random)[:200]
        fresh = torch.randint(0, 9, (200,), generator=random).float()
        made.set(index, fresh)
        plain[index] = fresh
    assert made.leaves.tolist() == plain.tolist()
    other = tree(plain)
    assert made.root.sum() == other.root.sum() == plain.sum()
    one, two = (t.sample(2000, torch.Generator().manual_seed(1))[0] for t in (made, other))
    assert one.tolist() == two.tolist()


def test_the_larger_priority_of_a_row_named_twice_counts() -> None:
    made = tree(torch.tensor([9.0, 1.0]))
    made.set(torch.tensor([0, 0, 1, 0]), torch.tensor([2.0, 4.0, 0.5, 3.0]))
    assert made.leaves.tolist() == [4.0, 0.5]
    assert made.root.sum() == 4.5


def test_rounding_never_draws_a_row_of_no_priority() -> None:
    priorities = torch.rand(5000, generator=torch.Generator().manual_seed(0)) + 1e-3
    priorities[::7] = 0
    priorities[-100:] = 0
    made, random = tree(priorities), torch.Generator().manual_seed(1)
    for _ in range(200):
        index, probability = made.sample(1024, random)
        assert bool((priorities[index] > 0).all())
        assert bool((probability > 0).all())


def draw_at(monkeypatch: pytest.MonkeyPatch, made: SumTree, share: float, count: int = 1) -> int:
    """The last of `n` rows drawn, if that draw falls at this share of its stratum."""
    number = torch.full((count,), share, dtype=torch.float64)
    monkeypatch.setattr(torch, "rand", lambda *_, **__: number)
    return int(made.sample(count, torch.Generator())[0][-1])


def test_the_first_and_the_last_of_all_draws_have_a_priority(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # In fp32 the total is rounded to 1 + 2^-23, more than the rows have: 1 + 1.5 * 2^-24.
    made = tree(torch.tensor([0.0, 1.0, 1.5 * 2**-24, 0.0]))
    assert made.root.sum() > made.leaves.double().sum()
    assert draw_at(monkeypatch, made, 0.0) == 1
    assert draw_at(monkeypatch, made, 1 - 2**-53) == 2


@pytest.mark.parametrize("count", [1, 4])  # each of a level's blocks added up, or of the draws'
def test_a_great_priority_blurs_none_beyond_it(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    priorities = torch.zeros(3 * 128)
    priorities[0], priorities[128], priorities[256:259] = 2.0**24, 1.0, 1.0
    made = tree(priorities)
    # At 2^24 + 1 + 1.5, in the second of the last three rows; fp32 has no 2^24 + 1.
    share = count * (2**24 + 2.5) / float(made.root.sum()) - (count - 1)
    assert draw_at(monkeypatch, made, share, count) == 257
