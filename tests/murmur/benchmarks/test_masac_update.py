"""The work of an update, counted by hand."""

import pytest
import torch

from murmur.benchmarks.masac_update import _BATCH, batch, count_gflop, make, sequential_update

CPU = torch.device("cpu")


def test_a_multiply_add_is_two() -> None:
    bias, x, weight = torch.zeros(4, 1, 6), torch.zeros(4, 5, 3), torch.zeros(4, 3, 6)
    assert count_gflop(lambda: torch.baddbmm(bias, x, weight)) == 2 * 4 * 5 * 3 * 6 / 1e9


def test_matrix_products_of_both_schemes() -> None:
    agents, rows = 2, batch(2, CPU)
    actor_first, critic_first = 18 * 256, 40 * 256  # the critic: two observations, two actions
    actor = actor_first + 256 * 256 + 256 * 4  # a mean and a deviation of two actions
    critic = critic_first + 256 * 256 + 256
    forward = agents * actor + actor  # next actions of all, the own action
    forward += 2 * 3 * critic  # twins on next actions, on those taken, on the own one
    backward = 2 * actor - actor_first  # by weights and by inputs; no gradient of observations
    backward += 2 * (2 * critic - critic_first) + 2 * 2 * critic  # the own action has a gradient
    sequential = count_gflop(lambda: sequential_update(agents, "fp32", CPU)(rows))
    assert sequential == pytest.approx(2 * agents * _BATCH * (forward + backward) / 1e9)
    stacked = count_gflop(lambda: make(agents, "fp32", CPU).update(rows))
    assert sequential / stacked == pytest.approx(1.23, abs=0.01)
