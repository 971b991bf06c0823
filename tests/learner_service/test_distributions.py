"""What TensorBoard is given to draw after an update."""

from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from murmur.learner_service.report import MOST_VALUES, distributions
from murmur.learner_service.telemetry.progress import Progress, ProgressLog
from murmur.shared.config.files import load
from murmur.shared.process.errors import ConfigError


def learned() -> dict[str, object]:
    """A network with a gradient, one without, and an optimiser."""
    actor, target = nn.Linear(2, 1, bias=False), nn.Linear(2, 1)
    actor.weight.grad = torch.tensor([[3.0, 4.0]])
    return {"actor": actor, "target": target, "optimizer": torch.optim.SGD(actor.parameters())}


def test_networks_that_learn_and_actions_are_drawn() -> None:
    parts = learned()
    found = distributions(parts, torch.tensor([[0, 2], [1, 2]], dtype=torch.int32))
    assert found.keys() == {"weights/actor.weight", "gradients/actor.weight", "actions/chosen"}
    assert found["gradients/actor.weight"].tolist() == [3, 4]
    assert found["actions/chosen"].tolist() == [0, 2, 1, 2]
    vectors = distributions({}, torch.tensor([[[0.5, -1.0]], [[0.25, 1.0]]]))
    assert {name: v.tolist() for name, v in vectors.items()} == {
        "actions/0": [0.5, 0.25],
        "actions/1": [-1.0, 1.0],
    }
    assert distributions({}, None) == {}


def test_large_parameters_are_sampled_evenly() -> None:
    network = nn.Linear(1000, 1000, bias=False)
    network.weight.grad = torch.zeros_like(network.weight)
    values = distributions({"big": network}, None)["weights/big.weight"]
    assert MOST_VALUES / 2 < len(values) <= MOST_VALUES
    assert torch.equal(values[:3], network.weight.detach().flatten()[[0, 16, 32]])


def test_tensorboard_has_the_finite_ones(tmp_path: Path) -> None:
    log = ProgressLog(tmp_path, Progress(), num_agents=1)
    actions = torch.tensor([[0.5, torch.nan], [torch.inf, torch.nan]])
    log.draw_histograms(distributions(learned(), actions), 70)
    log.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"), {"histograms": 0})
    board.Reload()
    tags = {"weights/actor.weight", "gradients/actor.weight", "actions/0"}
    assert set(board.Tags()["histograms"]) == tags
    (point,) = board.Histograms("gradients/actor.weight")
    assert (point.step, point.histogram_value.sum_squares) == (70, 25)
    assert board.Histograms("actions/0")[0].histogram_value.num == 1


def test_they_need_tensorboard() -> None:
    options = ["tracking.histograms_every_updates=5", "tracking.loggers=[]"]
    with pytest.raises(ConfigError, match="add tensorboard, or set it to 0"):
        load("spread", options, {})
