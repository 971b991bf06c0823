"""Minibatches: every row that counts once in a pass, the same on all devices, weights by hand."""

import pytest
import torch
from torch import Tensor

from murmur.learner_service.layers.inputs import Inputs
from murmur.learner_service.layers.recurrent import RecurrentState
from murmur.learner_service.layers.stacked import sharing_agents
from murmur.learner_service.learning.minibatches import Rows, deviations
from tests.learner_service.algorithms.apart import Part, apart
from tests.learner_service.toys import CPU


def make_rows(weight: Tensor, slices: tuple[int, ...], num_envs: int = 0) -> Rows:
    """Rows whose inputs and column are their own number; with memory of `num_envs` environments."""
    number = torch.arange(len(weight)).view(-1, 1, 1).expand(-1, weight.shape[1], 1).float()
    hidden = None
    if num_envs:
        memory = torch.arange(num_envs).view(-1, 1, 1).expand(-1, weight.shape[1], 2).float()
        first = torch.zeros(len(weight) // num_envs, num_envs, dtype=torch.bool)
        hidden = RecurrentState(memory, first)
    inputs = Inputs(None, number)
    columns = {"number": number.squeeze(2)}
    return Rows(
        inputs,
        inputs,
        columns,
        weight,
        sharing_agents(slices, CPU),
        hidden,
        hidden,
    )


def parts_of(rows: Rows, number: int) -> list[Part]:
    return apart(rows.shuffled(number, torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("number", [1, 3, 4, 7])
def test_every_row_that_counts_is_in_one_minibatch_of_a_pass(number: int) -> None:
    weight = (torch.arange(13) % 3 != 1).float().unsqueeze(1)  # 9 of 13 count
    parts = parts_of(make_rows(weight, (0,)), number)
    assert len({part.share.shape for part in parts}) == 1
    found = [part.columns["number"][part.share > 0] for part in parts]
    assert sorted(torch.cat(found).tolist()) == weight.flatten().nonzero().flatten().tolist()
    assert max(map(len, found)) - min(map(len, found)) <= 1
    for part in parts:
        assert part.actor is part.critic or part.actor.vector is not None
        assert float(part.counts) == 1
        assert float(part.share.sum()) == pytest.approx(1)
        assert torch.equal(part.cost, -part.share)


def test_minibatches_with_memory_are_whole_environments() -> None:
    weight = torch.ones(3 * 5, 2)  # 3 steps of 5 environments
    weight[2::5] = 0  # the third never acts
    parts = parts_of(make_rows(weight, (0, 0), num_envs=5), 2)
    seen = []
    for part in parts:
        assert part.actor_state is not None
        envs = part.actor_state.memory[:, 0, 0]
        number = part.columns["number"][:, 0].view(3, -1)
        assert torch.equal(number, envs + 5 * torch.arange(3).unsqueeze(1))  # time outermost
        assert part.actor_state.first is not None
        assert part.actor_state.first.shape == (3, len(envs))
        seen += envs[part.share.view(3, -1, 2)[0, :, 0] > 0].tolist()
    assert sorted(seen) == [0, 1, 3, 4]


def test_without_a_row_that_counts_there_is_no_minibatch() -> None:
    assert parts_of(make_rows(torch.zeros(6, 1), (0,)), 3) == []


def test_shares_are_means_of_sets_by_hand() -> None:
    weight = torch.tensor([[1.0, 1, 0], [1, 0, 0]])
    (part,) = parts_of(make_rows(weight, (0, 0, 1)), 1)
    x = torch.tensor([[1.0, 2, 50], [6, 70, 80]])[part.columns["number"][:, 0].long()]
    # The first set has 1, 2 and 6, mean 3; the second has nothing.
    assert float((x * part.share).sum()) == pytest.approx(3)
    assert float((x * part.cost).sum()) == pytest.approx(-3)
    # (4 + 1 + 9) / 3
    got = deviations(x, part.share, part.sharing)
    torch.testing.assert_close(got, torch.tensor([(14 / 3) ** 0.5, 0.0]))


def test_deviations_of_one_set_by_hand() -> None:
    x = torch.tensor([[[1.0, 2], [6, 100]]])  # of one minibatch
    share = torch.tensor([[[1.0, 1], [1, 0]]]) / 3
    torch.testing.assert_close(
        deviations(x, share, torch.ones(1, 2)), torch.tensor([[(14 / 3) ** 0.5]])
    )


def test_single_agents_rows_are_those_of_joint_rows() -> None:
    weight = torch.tensor([[1.0, 0], [1, 1]])
    rows = make_rows(weight, (0, 0))
    rows.columns["value"] = torch.arange(6.0).view(3, 2)  # of one row more
    alone = rows.of_single_agents()
    assert alone.weight.flatten().tolist() == [1, 0, 1, 1]
    assert alone.columns["value"].flatten().tolist() == [0, 1, 2, 3]
    assert alone.sharing.tolist() == [[1]]
    (part,) = parts_of(alone, 1)
    assert sorted(part.columns["value"].flatten().tolist()) == [0, 2, 3]
