"""What ranks share beside gradients: overflows, priorities, sums of losses, shuffles, options."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from murmur.learner_service.algorithms.segmentation import cross_entropy, dice_loss
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.layers.inputs import Inputs
from murmur.learner_service.learning.base import algorithm_config
from murmur.learner_service.learning.fixed_shapes import dealt_to
from murmur.learner_service.learning.minibatches import Rows, shares
from murmur.learner_service.ranks.group import ALONE, Group
from murmur.learner_service.storage.replay import ReplayConfig, ReplayStorage
from murmur.shared.config import PluginConfig
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.spec import ArraySpec, Discrete, EnvSpec
from tests.learner_service.algorithms.apart import apart
from tests.learner_service.toys import CPU, MID
from tests.ranks import jobs
from tests.ranks.cases import Case
from tests.ranks.processes import Ranks

_SPEC = EnvSpec("toy", 1, (ArraySpec("view", "float32", (1,)),), Discrete(2))


def _fp16_steps(group: Group) -> list[tuple[float, float, float]]:
    """Two steps of w <- w - gradient; in the first the loss of rank 1 overflows fp16."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(layer.weight)
    precision = Precision("fp16", CPU, group=group)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    found = []
    for large in (1.0, 0.0):
        x = torch.tensor([[60000.0 * large * group.rank + 1.0 + group.rank]])
        with precision.autocast():
            out = layer(x)
        norm = precision.step(out.float().sum(), optimizer, layer.parameters(), 0)
        scale = precision.scaler.get_scale()
        found.append((float(layer.weight), float(norm), scale))
    return found


def test_overflow_on_one_rank_skips_the_step_on_both(ranks: Ranks) -> None:
    first, second = ranks.call(_fp16_steps)
    assert first == second
    # Then the gradient is the mean of 1 and 2.
    assert first == [(0.0, 0.0, 2.0**9), (-1.5, 1.5, 2.0**9)]


def _missing_gradient(group: Group) -> tuple[list[float], int]:
    """Only rank 0 uses the second layer: 4 w0 + 2 w1 there, 6 w0 on rank 1."""
    layers = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    for layer in layers:
        nn.init.zeros_(layer.weight)
    weights = [p for layer in layers for p in layer.parameters()]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    a, b = (layer.weight.sum() for layer in layers)
    before = group.calls
    loss = 6 * a if group.rank else 4 * a + 2 * b
    Precision("fp32", CPU, group=group).step(loss, optimizer, weights, 0)
    return [float(layer.weight) for layer in layers], group.calls - before


def test_gradients_are_averaged_in_one_exchange(ranks: Ranks) -> None:
    assert ranks.call(_missing_gradient) == [([-5.0, -1.0], 1)] * 2


def _largest_priority(group: Group) -> tuple[float, list[float]]:
    """Errors of 1 on rank 0, of 7 on rank 1: priorities of what comes next."""
    config = ReplayConfig(
        **{"capacity_rows": 8, "start_rows": 1, "batch_size": 4, "unroll_steps": 4},
        **{"update_interval": 1, "prioritized": True, "alpha": 1.0},
    )
    storage = ReplayStorage(config, _SPEC, 0.5, None, CPU, {}, group.rank, group=group)
    for _ in range(2):
        unroll = storage.begin(1, 0, 0)
        unroll.arrays["step_type"][:] = MID
        unroll.cursor = 5
        storage.add(unroll)
        batch = storage.sample(0, 0.0)
        assert batch is not None
        batch.td_error = torch.full((4,), [1.0, 7.0][group.rank])
        storage.done(batch)
    state = storage.state_dict()
    return float(state["max_priority"]), state["priorities"][4:].tolist()


def test_new_rows_have_the_largest_priority_of_all_ranks(ranks: Ranks) -> None:
    own = (1.0, 7.0)
    for (largest, priorities), error in zip(ranks.call(_largest_priority), own, strict=True):
        assert largest == pytest.approx(7, abs=1e-4)
        for priority in priorities:  # 7 when it came; its own error since, if it was drawn
            assert min(abs(priority - 7), abs(priority - error)) < 1e-4


def _logits_and_target(group: Group) -> tuple[Tensor, Tensor, slice]:
    """Of three images, one on rank 0 and two on rank 1; all on a group of one."""
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 3, 4, 4, generator=random)
    mask = torch.randint(4, (3, 1, 4, 4), generator=random)  # 3: ignored
    target = (mask == torch.arange(3).view(1, 3, 1, 1)).float()
    target[1:, 2] = 0  # class 2 is on rank 0 alone
    own = slice(None) if group.size == 1 else (slice(0, 1), slice(1, 3))[group.rank]
    return logits, target, own


def _dense_losses(group: Group) -> tuple[list[float], Tensor]:
    """Losses, and their gradient with respect to a bias of each class."""
    logits, target, own = _logits_and_target(group)
    bias = torch.zeros(3, requires_grad=True)
    log_p = (logits[own] + bias.view(1, 3, 1, 1)).log_softmax(1)
    ce = cross_entropy(log_p, target[own], torch.tensor([1.0, 2.0, 3.0]), group)
    dice = dice_loss(log_p, target[own], group)
    torch.autograd.backward([ce, 2 * dice])
    assert bias.grad is not None
    group.mean_([bias.grad])
    return [float(ce.detach()), float(dice.detach())], bias.grad


def test_dense_losses_are_of_the_images_of_all_ranks(ranks: Ranks) -> None:
    values, gradient = _dense_losses(ALONE)
    for mine, slope in ranks.call(_dense_losses):
        assert mine == pytest.approx(values, abs=1e-6)
        torch.testing.assert_close(slope, gradient, atol=1e-7, rtol=1e-5)


def _dealt(group: Group, counts: tuple[int, int], number: int) -> Any:
    """Of rows of which given numbers count on each rank: numbers in each minibatch, and shares."""
    rows = 6
    weight = (torch.arange(rows) < counts[group.rank]).float().unsqueeze(1)
    inputs = Inputs(None, torch.zeros(rows, 1, 1))
    columns = {"row": torch.arange(rows).unsqueeze(1) + 100 * group.rank}
    every = Rows(inputs, inputs, columns, weight, torch.ones(1, 1), group=group)
    parts = apart(every.shuffled(number, torch.Generator().manual_seed(group.rank)))
    return [
        (p.columns["row"][p.share > 0].tolist(), p.share[p.share > 0].tolist(), float(p.counts))
        for p in parts
    ]


@pytest.mark.parametrize(
    ("counts", "number", "sizes"),
    [
        ((3, 4), 3, (3, 2, 2)),
        ((1, 1), 2, (1, 1)),
        ((1, 1), 5, (1, 1)),  # as many minibatches as there are rows
        ((4, 0), 3, (2, 1, 1)),
        ((0, 2), 2, (1, 1)),
        ((0, 0), 2, ()),
    ],
)
def test_ranks_are_dealt_minibatches_like_one_pack(
    ranks: Ranks, counts: tuple[int, int], number: int, sizes: tuple[int, ...]
) -> None:
    first, second = ranks.call(_dealt, counts, number)
    assert len(first) == len(second) == len(sizes)
    for mine, theirs, size in zip(first, second, sizes, strict=True):
        assert len(mine[0]) + len(theirs[0]) == size
        # Each row's weight is 2 / size: the mean of the ranks' sums is the mean over the rows.
        assert mine[1] + theirs[1] == pytest.approx([2 / size] * size)
        assert mine[2] == theirs[2] == 1
    dealt = [row for part in (*first, *second) for row in part[0]]
    expected = [*range(counts[0]), *range(100, 100 + counts[1])]
    assert sorted(dealt) == expected


def _shares_of_a_gpu(group: Group, width: int, number: int) -> Any:
    """Each rank has one unit that counts: its shares, and whether anything counts."""
    places, skipped = torch.arange(width * number), group.rank * number // group.size
    weight = (dealt_to(places, width, number, skipped) == 0).float()
    share, counts = shares(weight.view(number, width, 1), torch.ones(1, 1), group)
    return share.flatten(1).tolist(), counts.tolist()


def test_minibatches_of_a_gpu_count_if_any_rank_has_rows(ranks: Ranks) -> None:
    first, second = ranks.call(_shares_of_a_gpu, 2, 4)
    # Rank 0 begins with minibatch 0, rank 1 with minibatch 2: the others move nothing.
    assert first[1] == second[1] == [1, 0, 1, 0]
    assert first[0] == [[2, 0], [0, 0], [0, 0], [0, 0]]
    assert second[0] == [[0, 0], [0, 0], [2, 0], [0, 0]]


def test_a_rank_has_its_share_of_the_options() -> None:
    def share(size: int, **options: Any) -> Any:
        return algorithm_config(PluginConfig(**options)).for_rank(size)

    mappo = share(4, name="mappo", batch_size=1024, unrolls_per_update=8)
    assert (mappo.batch_size, mappo.unrolls_per_update, mappo.batch_number) == (256, 2, 8)
    assert share(3, name="coma", batch_size=0).batch_size == 0  # it is searched for on each rank
    replay = {"batch_size": 64, "update_interval": 8, "capacity_rows": 1001, "start_rows": 10}
    mine = share(4, name="qmix", replay=replay).replay
    assert (mine.batch_size, mine.update_interval) == (16, 2)
    assert (mine.capacity_rows, mine.start_rows, mine.updates_per_interval) == (251, 3, 1)
    assert share(2, name="segmentation", batch_size=32).batch_size == 16
    with pytest.raises(ConfigError, match=r"algorithm.batch_size=60 .* 8 learners .* 64"):
        share(8, name="coma", batch_size=60)
    with pytest.raises(ConfigError, match=r"algorithm.replay.update_interval=3 .* 2 learners"):
        share(2, name="qmix", replay={"update_interval": 3})
    # An update takes a row of each learner at least: an update a row of one is one of all of two.
    assert share(2, name="sac").replay.update_interval == 1
    assert share(8, name="iql").replay.update_interval == 1
    assert share(2, name="masac").replay.update_interval == 4
    assert share(2, name="qmix", replay={"update_interval": 1}).replay.update_interval == 1


def test_alone_each_share_is_the_whole() -> None:
    for name in ("mappo", "coma", "qmix", "masac", "maddpg", "segmentation"):
        options = algorithm_config(PluginConfig(name=name))
        assert options.for_rank(1) == options


def _twice(group: Group, case: Case, parts: list[Any]) -> list[dict[str, Tensor]]:
    found = []
    for _ in range(2):
        jobs.build(group, case)
        state = case.build(group).state_dict()
        found.append(jobs.update(group, state, 1, parts))
    return found


def test_an_update_of_two_ranks_repeats_to_the_bit(ranks: Ranks) -> None:
    case = Case({"name": "coma", "batch_size": 12, "batch_number": 2, "data_passes": 1})
    parts = case.parts(case.batch(case.build(), 1))
    for first, second in ranks.call(_twice, case, parts):
        assert all(torch.equal(first[name], second[name]) for name in first)
