"""Drawing actions: the right frequencies, and never one that is impossible."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from learner_service.networks.distributions import invert, race, sample
from tests.learner_service.toys import CPU

Draw = Callable[[Tensor, torch.Generator], Tensor]


@pytest.mark.parametrize("draw", [invert, race])
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
    assert invert(pi, torch.Generator()).tolist() == [first, 1]


def test_rows_of_any_shape_are_drawn_from() -> None:
    assert sample(torch.ones(2, 3, 4), torch.Generator().manual_seed(0)).shape == (2, 3)
    assert sample(torch.ones(0, 3, 4), torch.Generator()).shape == (0, 3)
    assert sample(torch.ones(4, device=CPU), torch.Generator()).dtype == torch.int64
