"""Returns by hand and against the definition they shorten."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from murmur.learner_service.layers.stacked import sharing_agents
from murmur.learner_service.learning.returns import (
    annealed,
    lambda_returns,
    linear_recurrence,
    mean_over,
    moments_by_slice,
    polyak_update,
    vtrace_returns,
)

GAMMA, LAMBDA = 0.99, 0.8


def near(x: Any) -> Any:
    return pytest.approx(x, rel=1e-5)


def column(*numbers: float) -> Tensor:
    """[T, 1, 1]."""
    return torch.tensor(numbers, dtype=torch.float32).view(-1, 1, 1)


def targets(
    reward: Tensor, discount: Tensor, value: Tensor, last: list[bool], lambda_: float = LAMBDA
) -> list[float]:
    out = lambda_returns(
        reward, discount.view(-1, 1, 1), value, torch.tensor(last).view(-1, 1), GAMMA, lambda_
    )
    return out.flatten().tolist()


def test_three_episodes_of_five_steps_in_a_row() -> None:
    # r = 1, V = 10. Last step: 1. The one before: 1 + .99 (.2*10 + .8*1) = 3.772, and so on.
    # Rows t = 5, 11 are LAST themselves; what stands there is masked by the code that uses it.
    n = 3 * 6 - 1
    last = [t % 6 == 4 for t in range(n)]
    discount = torch.tensor([0.0 if x else 1.0 for x in last])
    reward = torch.tensor([0.0 if t % 6 == 5 else 1.0 for t in range(n)]).view(-1, 1, 1)
    got = targets(reward, discount, torch.full((n, 1, 1), 10.0), last)
    for episode in range(3):
        assert got[6 * episode : 6 * episode + 5] == pytest.approx(
            [9.08, 7.71, 5.97, 3.77, 1.00], abs=0.005
        )


def test_a_truncated_episode_bootstraps_from_its_last_row() -> None:
    # last step: 1 + .99 * 10 = 10.9; before: 1 + .99 (.2*10 + .8*10.9) = 11.6128
    got = targets(column(1, 1), torch.ones(2), column(10, 10), [False, True])
    assert got == near([11.6128, 10.9])


def test_a_terminated_episode_has_nothing_beyond() -> None:
    got = targets(column(1, 1), torch.tensor([1.0, 0.0]), column(10, 10), [False, True])
    assert got == near([1 + 0.99 * (2 + 0.8 * 1), 1.0])


def test_what_follows_a_last_row_never_leaks_back() -> None:
    last = [False, True, False, False]
    discount = torch.tensor([1.0, 1.0, 1.0, 1.0])
    quiet = targets(column(1, 1, 0, 1), discount, column(10, 10, 10, 10), last)
    loud = targets(column(1, 1, 999, -999), discount, column(10, 10, -999, 999), last)
    assert quiet[:2] == loud[:2] == near([11.6128, 10.9])


def test_the_end_of_an_unroll_bootstraps_in_full() -> None:
    # As if truncated there: 2 + .99 * 5 = 6.95, whatever lambda.
    for lambda_ in (0.0, 0.5, 1.0):
        assert targets(column(2), torch.ones(1), column(5), [False], lambda_) == [near(6.95)]


def test_lambda_zero_is_one_step_and_lambda_one_is_monte_carlo() -> None:
    reward, discount, value = column(1, 2, 3), torch.tensor([1.0, 1.0, 0.0]), column(7, 8, 9)
    last = [False, False, True]
    assert targets(reward, discount, value, last, 0.0) == near([1 + 0.99 * 7, 2 + 0.99 * 8, 3])
    assert targets(reward, discount, value, last, 1.0) == near(
        [1 + 0.99 * (2 + 0.99 * 3), 2 + 0.99 * 3, 3]
    )


def forward_view(
    reward: Tensor, discount: Tensor, value: Tensor, last: Tensor, gamma: float, lambda_: float
) -> Tensor:
    """The definition: (1 - lambda) sum_n lambda^(n-1) G^(n) + lambda^(N-1) G^(N), step by step."""
    out = torch.zeros_like(reward)
    steps, num_envs, num_agents = reward.shape
    for b in range(num_envs):
        for a in range(num_agents):
            for t in range(steps):
                end = t  # the last transition of this episode or unroll
                while not last[end, b] and end + 1 < steps:
                    end += 1
                total = end - t + 1
                for n in range(1, total + 1):
                    g, scale = 0.0, 1.0
                    for i in range(t, t + n):
                        g += scale * float(reward[i, b, a])
                        scale *= gamma * float(discount[i, b])
                    g += scale * float(value[t + n - 1, b, a])
                    weight = lambda_ ** (n - 1) * (1 - lambda_ if n < total else 1)
                    out[t, b, a] += weight * g
    return out


@pytest.mark.parametrize("lambda_", [0.0, 0.3, 0.8, 1.0])
def test_the_backward_sweep_equals_the_forward_view(lambda_: float) -> None:
    torch.manual_seed(int(10 * lambda_))
    t, b, a = 17, 4, 2
    reward, value = torch.randn(t, b, a).double(), torch.randn(t, b, a).double()
    last = torch.rand(t, b) < 0.25
    discount = torch.where(last & (torch.rand(t, b) < 0.5), 0.0, 1.0).double()
    got = lambda_returns(reward, discount.unsqueeze(-1), value, last, 0.97, lambda_)
    expected = forward_view(reward, discount, value, last, 0.97, lambda_)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def plain_returns(
    reward: Tensor, discount: Tensor, value: Tensor, last: Tensor, gamma: float, lambda_: float
) -> Tensor:
    """The recursion itself, one step after the other."""
    returns, following = torch.empty_like(reward), value[-1]
    for t in range(len(reward) - 1, -1, -1):
        carry = torch.where(last[t], 0.0, lambda_).unsqueeze(-1)
        bracket = (1 - carry) * value[t] + carry * following
        following = returns[t] = reward[t] + gamma * discount[t] * bracket
    return returns


def vtrace(
    reward: Tensor, value: Tensor, last: list[bool], ratio: Tensor, lambda_: float, clip: float
) -> tuple[list[float], list[float]]:
    """Targets and advantages with gamma 0.5 and no termination."""
    target, advantage = vtrace_returns(
        *(reward, torch.ones_like(reward), value, torch.tensor(last).view(-1, 1), ratio.log()),
        *(0.5, lambda_, clip),
    )
    return target.flatten().tolist(), advantage.flatten().tolist()


def test_vtrace_by_hand() -> None:
    # V = 2, 4, 8; r = 1, 2: delta_1 = 2 + .5 * 8 - 4 = 2, delta_0 = 1 + .5 * 4 - 2 = 1.
    # Ratios 3 and 1/2, bounded by 1: rho_0 = 1, rho_1 = 1/2.
    # x_1 = 1/2 * 2 = 1, A_1 = 2; A_0 = 1 + .5 * x_1 = 1.5, x_0 = 1 * 1.5; targets V + x.
    given = column(1, 2), column(2, 4, 8), [False, False], column(3, 0.5)
    assert vtrace(*given, 1.0, 1.0) == (near([3.5, 5]), near([1.5, 2]))
    # Bounded by 2: rho_0 = 2, so x_0 = 2 * 1.5 = 3. With lambda 0: A_0 = delta_0 = 1, x_0 = 2.
    assert vtrace(*given, 1.0, 2.0) == (near([5, 5]), near([1.5, 2]))
    assert vtrace(*given, 0.0, 2.0) == (near([4, 5]), near([1, 2]))


def test_vtrace_corrects_nothing_beyond_an_episode() -> None:
    # As above, but row 1 is LAST: what follows, x_1, does not reach A_0 = delta_0 = 1.
    given = column(1, 2), column(2, 4, 8), [True, False], column(3, 0.5)
    assert vtrace(*given, 1.0, 1.0)[1][0] == near(1)


def test_vtrace_of_the_acting_policy_is_gae() -> None:
    torch.manual_seed(3)
    reward, value, last = torch.randn(9, 3, 2), torch.randn(10, 3, 2), torch.rand(9, 3) < 0.2
    discount = torch.where(last & (torch.rand(9, 3) < 0.5), 0.0, 1.0).unsqueeze(-1)
    target, advantage = vtrace_returns(
        reward, discount, value, last, torch.zeros_like(reward), 0.9, 0.8, 1.0
    )
    expected = lambda_returns(reward, discount, value[1:], last, 0.9, 0.8)
    torch.testing.assert_close(target, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(advantage, expected - value[:-1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 8, 9, 33, 201])
def test_all_steps_at_once_equal_one_after_the_other(steps: int) -> None:
    torch.manual_seed(steps)
    reward, value = torch.randn(steps, 3, 2), torch.randn(steps, 3, 2)
    last = torch.rand(steps, 3) < 0.1
    discount = torch.where(last & (torch.rand(steps, 3) < 0.5), 0.0, 1.0).unsqueeze(-1)
    for lambda_ in (0.0, 0.8, 1.0):
        got = lambda_returns(reward, discount, value, last, 0.99, lambda_)
        expected = plain_returns(reward, discount, value, last, 0.99, lambda_)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_a_linear_recurrence_by_hand() -> None:
    # From the end: 4; 3 + 10 * 4 = 43; 2 + 0 * 43 = 2; 1 + 0.5 * 2 = 2.
    constant, factor = torch.tensor([1.0, 2, 3, 4]), torch.tensor([0.5, 0, 10, 7])
    assert linear_recurrence(constant, factor).tolist() == [2, 2, 43, 4]


def test_returns_take_fewer_operations_than_steps() -> None:
    class Counter(TorchDispatchMode):
        operations = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.operations += not func.is_view
            return func(*args, **(kwargs or {}))

    with Counter() as counter:
        lambda_returns(
            torch.ones(64, 2, 1), torch.ones(64, 2, 1), torch.ones(64, 2, 1),
            torch.zeros(64, 2, dtype=torch.bool), 0.9, 0.5,
        )  # fmt: skip
    assert counter.operations < 32


def test_no_gradient_reaches_the_inputs() -> None:
    reward = torch.ones(3, 1, 1, requires_grad=True)
    value = torch.ones(3, 1, 1, requires_grad=True)
    got = lambda_returns(
        reward, torch.ones(3, 1, 1), value, torch.zeros(3, 1, dtype=torch.bool), 0.9, 0.5
    )
    assert not got.requires_grad


def test_polyak_update_is_exact_at_one_and_linear_below() -> None:
    target, online = nn.Linear(3, 2), nn.Linear(3, 2)
    before = [p.detach().clone() for p in target.parameters()]
    polyak_update(target, online, 0.25)
    for old, now, new in zip(before, target.parameters(), online.parameters(), strict=True):
        torch.testing.assert_close(now.detach(), 0.75 * old + 0.25 * new.detach())
    polyak_update(target, online, 1.0)
    for now, new in zip(target.parameters(), online.parameters(), strict=True):
        assert torch.equal(now, new)


def test_polyak_update_copies_buffers() -> None:
    target, online = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    assert online.running_mean is not None
    online.running_mean.fill_(4.0)
    polyak_update(target, online, 0.25)
    assert target.running_mean is not None
    assert target.running_mean.tolist() == [4, 4]


def test_annealed_by_hand() -> None:
    # From 1 to 0.2 over 4: 0.8 / 4 = 0.2 less each time, and no further than the end.
    seen = [annealed(1.0, 0.2, done, 4) for done in (0, 1, 2, 4, 9)]
    assert seen == near([1.0, 0.8, 0.6, 0.2, 0.2])
    assert annealed(1.0, 0.2, 9, 0) == 1.0  # never


def test_mean_over_what_counts_by_hand() -> None:
    x = torch.tensor([[1.0, 2, 3], [5, 6, 7]])
    counted = torch.tensor([[1.0, 0, 0], [1, 1, 0]])
    assert mean_over(x, counted, 0).tolist() == [3, 6, 0]
    assert mean_over(x, counted, 1).tolist() == [1, 5.5]


def test_means_and_variances_of_sets_by_hand() -> None:
    sharing = sharing_agents((0, 1, 0, 2), torch.device("cpu"))
    assert sharing.tolist() == [[1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 1]]
    x = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]])
    counted = torch.tensor([[1.0, 1, 0, 0], [1, 0, 1, 0]])
    # Agents 0 and 2: (1 + 5 + 7) / 3; agent 1: 2; agent 3 has no row that counts.
    # Agents 0 and 2 about 13/3: (100 + 4 + 64) / 9 / 3; one row does not vary.
    mean, variance = moments_by_slice(x, counted, sharing)
    assert mean.tolist() == pytest.approx([13 / 3, 2, 0])
    assert variance.tolist() == pytest.approx([56 / 9, 0, 0])
