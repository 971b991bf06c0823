"""Seeds and counter-based random numbers: pure, spread out, in range."""

import numpy as np

from murmur.shared.wire.seeding import episode_seeds, uniform


def seeds_of(run_seed: int, slots: list[int], episodes: list[int]) -> list[int]:
    return [int(s) for s in episode_seeds(run_seed, np.array(slots), np.array(episodes))]


def test_one_seed_does_not_depend_on_the_others() -> None:
    together = seeds_of(7, [0, 1, 2, 3], [5, 0, 9, 5])
    assert together == [seeds_of(7, [s], [e])[0] for s, e in ((0, 5), (1, 0), (2, 9), (3, 5))]


def test_seeds_of_a_run_are_these_for_ever() -> None:
    """A change here would change every run that anyone repeats."""
    assert seeds_of(1, [0, 1, 4095], [0, 0, 12345]) == [
        2501916871519199002,
        8771336188894127881,
        4809806803799411450,
    ]


def test_no_two_episodes_share_a_seed() -> None:
    slots, episodes = np.divmod(np.arange(200_000), 200)
    seeds = np.concatenate([episode_seeds(run, slots, episodes) for run in (0, 1, 2**64 - 1)])
    assert len(np.unique(seeds)) == 600_000
    assert seeds.max() < 2**63


def test_uniform_is_a_pure_function_of_seed_and_index() -> None:
    seeds = np.array([1, 2, 2**63 - 1], np.uint64)
    draws = uniform(seeds, 10)
    assert draws.shape == (10, 3)
    assert draws.dtype == np.float32
    for i in range(3):
        np.testing.assert_array_equal(draws[:, i], uniform(seeds[i : i + 1], 10)[:, 0])
    np.testing.assert_array_equal(draws[:4], uniform(seeds, 4))


def test_uniform_is_independent_for_neighbouring_seeds() -> None:
    draws = uniform(np.arange(20_000, dtype=np.uint64), 8).astype(np.float64)
    assert draws.min() >= 0
    assert draws.max() < 1
    np.testing.assert_allclose(draws.mean(axis=1), 0.5, atol=0.01)
    np.testing.assert_allclose(draws.var(axis=1), 1 / 12, atol=0.003)
    correlation = np.corrcoef(np.concatenate([draws, np.roll(draws, 1, axis=1)]))
    assert np.abs(correlation - np.eye(16)).max() < 0.04
