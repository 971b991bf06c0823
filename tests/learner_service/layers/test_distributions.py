"""Drawing actions: the right frequencies, and never one that is impossible."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from murmur.learner_service.layers.distributions import (
    Categorical,
    Normal,
    logged_entropy,
    race,
    sample,
)
from tests.learner_service.toys import CPU

Draw = Callable[[Tensor, torch.Generator], Tensor]


@pytest.mark.parametrize("draw", [sample, race])
@pytest.mark.parametrize(
    "pi", [[0.1, 0.0, 0.6, 0.3], [0.0, 0.25, 0.75], [0.5, 0.5, 0.0, 0.0], [0.0, 1.0], [1.0]]
)
def test_each_action_is_drawn_as_often_as_it_should(draw: Draw, pi: list[float]) -> None:
    rows = torch.tensor(pi).expand(60_000, len(pi))
    drawn = draw(rows, torch.Generator().manual_seed(0))
    share = torch.bincount(drawn, minlength=len(pi)) / len(drawn)
    assert (share[rows[0] == 0] == 0).all()
    # five standard deviations of a binomial share: 5 sqrt(.25 / 60000) = 0.01
    torch.testing.assert_close(share, rows[0], atol=0.01, rtol=0)


@pytest.mark.parametrize("number", [0.0, 0.3, 0.5, 1 - 2**-24])
def test_the_extremes_of_uniform_numbers_choose_possible_actions(
    number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn(x: Tensor, *, generator: torch.Generator) -> Tensor:
        return x.fill_(number)

    monkeypatch.setattr(Tensor, "uniform_", drawn)
    pi = torch.tensor([[0.0, 0.3, 0.7, 0.0], [0.0, 1.0 + 2**-23, 0.0, 0.0]])
    first = 2 if number < 0.7 else 1  # 1 - number falls on the sums 0, 0.3, 1, 1
    assert sample(pi, torch.Generator()).tolist() == [first, 1]


def test_rows_of_any_shape_are_drawn_from() -> None:
    assert sample(torch.ones(2, 3, 4), torch.Generator().manual_seed(0)).shape == (2, 3)
    assert sample(torch.ones(0, 3, 4), torch.Generator()).shape == (0, 3)
    assert sample(torch.ones(4, device=CPU), torch.Generator()).dtype == torch.int64


# ---------------------------------------------------------------- gradients in a few kernels


def surrogate(
    pi: Categorical | Normal, action: Tensor, weights: Tensor, of_order: Tensor | None
) -> Tensor:
    """The sum that `gradient` is of, plainly."""
    total = (pi.log_prob(action) * weights).sum()
    return total if of_order is None else total - (pi.entropy() * of_order).sum()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradients_of_choices_equal_autograds(masked: bool, with_entropy: bool) -> None:
    logits = (3 * torch.randn(50, 3, 5)).requires_grad_()
    mask = torch.randint(2, (50, 3, 5)) if masked else None
    action = torch.randint(5, (50, 3))
    if mask is not None:
        mask.scatter_(-1, action.unsqueeze(-1), 1)
    weights, of_order = torch.randn(50, 3), torch.rand(50, 3) if with_entropy else None
    pi = Categorical(logits, mask)
    ((outputs, got),) = pi.gradient(action, weights, of_order)
    (expected,) = torch.autograd.grad(surrogate(pi, action, weights, of_order), logits)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert mask is None or (got[mask == 0] == 0).all()
    assert outputs is logits
    torch.testing.assert_close(logged_entropy(pi.logged()), pi.entropy())


@pytest.mark.parametrize("sets", [1, 3])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradients_of_normals_equal_autograds(sets: int, with_entropy: bool) -> None:
    mean, log_std = torch.randn(50, 3, 2).requires_grad_(), torch.randn(sets, 2).requires_grad_()
    action, weights = torch.randn(50, 3, 2), torch.randn(50, 3)
    of_order = torch.rand(50, 3) if with_entropy else None
    pi = Normal(mean, log_std)
    with torch.no_grad():
        terms = pi.gradient(action, weights, of_order)
    found = torch.autograd.grad(surrogate(pi, action, weights, of_order), [mean, log_std])
    for (output, got), its, expected in zip(terms, (mean, log_std), found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        assert output is its
    entropy = logged_entropy(pi.logged()).expand(50, 3)
    torch.testing.assert_close(entropy, pi.entropy())
