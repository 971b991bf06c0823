"""Snapshots to act with: the numbers of autocast without a cast of weights in each act."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from murmur.learner_service.device.precision import Precision
from murmur.learner_service.layers.building import build_network
from murmur.learner_service.layers.casting import publish, snapshot
from murmur.learner_service.layers.inputs import InputShape
from murmur.learner_service.layers.recurrent import RecurrentState
from murmur.learner_service.learning.base import build_algorithm
from murmur.shared.config import PluginConfig
from tests.learner_service.toys import CPU, map_spec

SHAPES = {"mlp": InputShape(None, 5), "cnn": InputShape((3, 11, 11), 2)}
NETWORKS = {
    "mlp": {"name": "mlp", "hidden": (8, 8)},
    "gru": {"name": "mlp", "hidden": (8,), "recurrent": 4},
    "cnn": {"name": "cnn", "channels": (4, 4), "kernels": (3, 3), "strides": (1, 1)},
}


class Normalised(nn.Module):
    """As a plug-in may be: normalises, and multiplies by a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.scale = (
            nn.Linear(5, 8),
            nn.LayerNorm(8),
            nn.Parameter(torch.full((8,), 1.001)),
        )

    def forward(self, image: Tensor | None, vector: Tensor) -> Tensor:
        out: Tensor = self.norm(self.first(vector).float()) * self.scale
        return out


def forward(network: nn.Module, shape: InputShape, precision: Precision) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    image = None if shape.image is None else torch.rand(6, 3, *shape.image, generator=generator)
    vector = torch.randn(6, 3, shape.vector, generator=generator)
    with torch.inference_mode(), precision.autocast():
        if hasattr(network, "remember"):
            out, _ = network(image, vector, RecurrentState(torch.ones(6, 3, 4)))
            return out
        out = network(image, vector)
    return out


@pytest.mark.parametrize("name", [*NETWORKS, "normalised"])
@pytest.mark.parametrize("slices", [(0, 0, 0), (0, 1, 2)])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_a_snapshot_equals_autocast_to_the_bit(
    name: str, slices: tuple[int, ...], precision: str
) -> None:
    arithmetic = Precision(precision, CPU)
    shape = SHAPES["cnn" if name == "cnn" else "mlp"]
    torch.manual_seed(1)
    network: nn.Module = Normalised()
    if name in NETWORKS:
        config = PluginConfig(**NETWORKS[name])
        network = build_network(config, shape, 4, slices, may_remember=True)
    frozen = snapshot(network, arithmetic)
    with torch.no_grad():
        for weight in network.parameters():
            weight.mul_(1.01)
    expected = forward(network, shape, arithmetic)
    assert not torch.equal(forward(frozen, shape, arithmetic), expected)
    publish(network, frozen)
    assert torch.equal(forward(frozen, shape, arithmetic), expected)
    assert all(p.dtype == torch.float32 and p.requires_grad for p in network.parameters())


def test_normalising_layers_and_own_weights_stay_fp32() -> None:
    frozen = snapshot(Normalised(), Precision("bf16", CPU))
    assert frozen.first.weight.dtype == frozen.first.bias.dtype == torch.bfloat16
    assert frozen.norm.weight.dtype == frozen.scale.dtype == torch.float32


class _Casts(TorchDispatchMode):
    """Counts casts by the number of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::_to_copy", "aten::to") and out.dtype != args[0].dtype:
            self.sizes[args[0].numel()] += 1
        elif func._schema.name == "aten::_foreach_copy_":
            self.sizes.update(x.numel() for x in args[1])
        return out


@pytest.mark.parametrize(
    "options", [{"name": "mappo"}, {"name": "coma"}, {"name": "maddpg"}, {"name": "masac"}]
)
def test_an_act_casts_no_weight(options: dict[str, Any]) -> None:
    spec = map_spec()
    network = PluginConfig(name="cnn", channels=(8,), kernels=(3,), strides=(2,), hidden=(31,))
    algorithm = build_algorithm(
        PluginConfig(**options), spec, network, Precision("bf16", CPU), CPU, 1
    )
    policy = algorithm.make_policy()
    observation = {
        o.name: torch.ones((1, spec.num_agents, *o.shape) if o.per_agent else (1, *o.shape))
        for o in spec.observations
    }
    observation["agent_cell"] = observation["agent_cell"].int()

    def cast() -> set[int]:
        with _Casts() as casts:
            policy.act(observation, torch.Generator().manual_seed(1))
        return set(casts.sizes)

    weights = {p.numel() for p in policy.actor.parameters() if p.numel() > spec.num_agents * 31}
    assert not weights & cast()
    policy.actor.float()
    assert weights <= cast()  # as it would be
