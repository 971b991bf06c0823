"""Networks written outside the package: what they are fed, and what is refused of them."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from murmur.learner_service.algorithms.coma import Coma
from murmur.learner_service.checkpoint.contents import saved_policy
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.layers.building import build_network, build_twins, resolve_network
from murmur.learner_service.layers.forward import Alone, forward_history
from murmur.learner_service.layers.inputs import Inputs, InputShape
from murmur.learner_service.learning.base import build_algorithm
from murmur.shared.config import PluginConfig
from murmur.shared.process.errors import CheckpointError, ConfigError
from tests.learner_service.algorithms.apart import apart
from tests.learner_service.algorithms.test_contract import ALIVE, ENTRIES, make_spec, numbers
from tests.learner_service.networks.plugged import ATTENTION, install
from tests.learner_service.reference_layers import assert_history_is_steps
from tests.learner_service.toys import CPU

NETWORK = PluginConfig(name="listening", width=8)
CASES = [
    (name, space)
    for name, entry in ENTRIES.items()
    for space in entry.spaces
    if "share_trunk" not in entry.options and 0 in entry.recurrent  # a trunk needs agents apart
]


@pytest.fixture
def attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(install(tmp_path, "listening", ATTENTION)))


def build(name: str, space: str, network: PluginConfig = NETWORK, **options: Any) -> Any:
    config = PluginConfig(**{**ENTRIES[name].options, **options})
    return build_algorithm(config, make_spec(space), network, Precision("fp32", CPU), CPU, 3)


@pytest.mark.usefixtures("attention")
@pytest.mark.parametrize(("name", "space"), CASES)
def test_attention_over_agents_learns_with_every_algorithm(name: str, space: str) -> None:
    algorithm, entry = build(name, space, share_parameters=True), ENTRIES[name]
    batch = entry.batch(algorithm, make_spec(space), 0, ALIVE)
    log = [numbers(algorithm.update(copy.deepcopy(batch))) for _ in range(12)]
    assert log[-1][entry.loss] < 0.9 * log[0][entry.loss]
    policy = algorithm.make_policy()
    observation = {k: v[0] for k, v in batch.observation().items()}
    if entry.batch.__name__ == "sample":
        observation = batch.observation()
    whole = policy.act(observation, None)["action"]
    few = policy.act({k: v[2:4] for k, v in observation.items()}, None)["action"]
    torch.testing.assert_close(whole[2:4], few)  # joint rows are not mixed


@pytest.mark.usefixtures("attention")
def test_coma_minibatches_hold_whole_joint_rows() -> None:
    coma = build("coma", "discrete")
    assert isinstance(coma, Coma)
    batch = ENTRIES["coma"].batch(coma, make_spec("discrete"), 0, ALIVE)
    rows = coma._rows(batch)
    joint = torch.arange(len(rows.weight))
    rows.columns["joint"] = joint
    with torch.no_grad():
        every = coma.actor(rows.actor.image, rows.actor.vector)
        for part in apart(rows.shuffled(3, coma._generator)):
            some = coma.actor(part.actor.image, part.actor.vector)
            torch.testing.assert_close(some, every[part.columns["joint"]])


@pytest.mark.usefixtures("attention")
def test_a_critic_that_must_not_mix_agents_sees_each_alone() -> None:
    network = build_network(NETWORK, InputShape(None, 4), 2, (0, 0, 0), apart=True)
    assert isinstance(network, Alone)
    vector = torch.rand(5, 3, 4)
    other = vector.clone()
    other[:, 1:] = 0
    first, second = (network(None, x) for x in (vector, other))
    torch.testing.assert_close(first[:, 0], second[:, 0], rtol=0, atol=0)
    assert not torch.equal(first[:, 1], second[:, 1])
    mixing = build_network(NETWORK, InputShape(None, 4), 2, (0, 0, 0))
    assert not torch.equal(mixing(None, vector)[:, 0], mixing(None, other)[:, 0])


def test_twins_of_a_plug_in_remember_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ATTENTION.replace("    width: int", "    recurrent: int = 0\n    width: int")
    monkeypatch.syspath_prepend(str(install(tmp_path, "remembering", source)))
    net = resolve_network(PluginConfig(name="remembering", width=8, recurrent=5), None)
    shared, twins = (0, 0, 0), (0, 1, 0, 1, 0, 1)
    network = build_twins(net, InputShape(None, 4), 2, shared, twins, 2, may_remember=True)
    first = torch.rand(4, 2) < 0.3
    inputs = Inputs(None, torch.randn(8, 3, 4))
    assert_history_is_steps(network, inputs, first)
    # A twin has a network and a unit of its own, and is fed its own agent alone.
    whole, _ = forward_history(network, inputs, first, Precision("fp32", CPU))
    assert whole.shape == (8, 3, 4)
    assert inputs.vector is not None
    vector = inputs.vector.clone()
    vector[:, 1:] = 0
    other, _ = forward_history(network, Inputs(None, vector), first, Precision("fp32", CPU))
    torch.testing.assert_close(whole[:, 0], other[:, 0], rtol=0, atol=0)
    assert not torch.equal(whole[..., :2], whole[..., 2:])
    with pytest.raises(ConfigError, match=r"network\.recurrent = 5, but this algorithm learns"):
        build_twins(net, InputShape(None, 4), 2, shared, twins, 2)


@pytest.mark.usefixtures("attention")
def test_own_weights_need_a_network_that_has_them() -> None:
    with pytest.raises(ConfigError, match=r"'listening' has one parameter group.*3 are wanted"):
        build("mappo", "discrete", share_parameters=False)


@pytest.mark.usefixtures("attention")
def test_one_trunk_needs_a_network_that_keeps_agents_apart() -> None:
    with pytest.raises(ConfigError, match=r"share_trunk = true: network 'listening' mixes agents"):
        build("ippo", "discrete", share_trunk=True)


BROKEN = {
    "shape": ("return self.out(x).flatten(0, 1)", r"gives \(6, 2\).*must give \(2, 3, 2\)"),
    "dtype": ("return self.out(x).long()", "int64 for inputs"),
    "nan": ("return self.out(x) / 0 * 0", "gives NaN"),
    "memory": (
        "self.last = getattr(self, 'last', 0) + self.out(x).mean(); return self.out(x) + self.last",
        "must keep nothing between calls",
    ),
    "raises": ("raise KeyError('lost')", r"network 'broken' failed: KeyError: 'lost' \(.*py:\d+\)"),
}
MODULE = """
from pydantic import BaseModel
from torch import nn
class Config(BaseModel, frozen=True, extra="forbid"):
    pass
class Net(nn.Module):
    def __init__(self, features, outputs):
        super().__init__()
        self.out = nn.Linear(features, outputs)
    def forward(self, image, x):
        {forward}
def build(config, shape, num_outputs, slices):
    return Net(shape.vector, num_outputs)
"""


@pytest.mark.parametrize("fault", BROKEN)
def test_a_network_that_breaks_the_contract_is_named(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, words = BROKEN[fault]
    source = MODULE.format(forward=forward).replace("plugged_broken", fault)
    monkeypatch.syspath_prepend(str(install(tmp_path, f"broken{fault}", source)))
    name = f"broken{fault}"
    with pytest.raises(ConfigError, match=words.replace("'broken'", f"'{name}'")):
        build_network(PluginConfig(name=name), InputShape(None, 4), 2, (0, 0, 0))


def test_rounding_between_calls_is_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every second call is rounded otherwise, as some kernels are where memory is aligned otherwise.
    forward = "self.odd = not getattr(self, 'odd', 0); return self.out(x) * (1 + 1e-6 * self.odd)"
    source = MODULE.format(forward=forward)
    monkeypatch.syspath_prepend(str(install(tmp_path, "rounded", source)))
    build_network(PluginConfig(name="rounded"), InputShape(None, 4), 2, (0, 0, 0))


def test_a_result_that_is_not_contiguous_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = MODULE.format(forward="return self.out(x.transpose(0, 1)).transpose(0, 1)")
    monkeypatch.syspath_prepend(str(install(tmp_path, "turned", source)))
    for name in ("coma", "mappo", "masac", "qmix"):
        algorithm = build(name, "discrete", PluginConfig(name="turned"))
        batch = ENTRIES[name].batch(algorithm, make_spec("discrete"), 0, ALIVE)
        algorithm.update(batch)


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ("width: int", "network.width"),
        ("agent_id: str = 'x'", "option agent_id = 'x'; the name is reserved for a bool"),
    ],
)
def test_missing_or_reinterpreted_options_are_named(
    declared: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"options{len(declared)}"
    source = MODULE.format(forward="return self.out(x)").replace("    pass", f"    {declared}")
    monkeypatch.syspath_prepend(str(install(tmp_path, name, source)))
    with pytest.raises(ConfigError, match=words):
        build_network(PluginConfig(name=name), InputShape(None, 4), 2, (0, 0, 0))


def test_an_import_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "raise RuntimeError('no licence')"
    monkeypatch.syspath_prepend(str(install(tmp_path, "unfit", source)))
    with pytest.raises(ConfigError, match=r"network 'unfit' failed: RuntimeError: no licence"):
        build_network(PluginConfig(name="unfit"), InputShape(None, 4), 2)


def test_inputs_are_grouped_without_moving_a_row() -> None:
    rows = Inputs(None, torch.arange(12.0).view(2, 3, 2))
    alone = rows.grouped(1).each(lambda x: x[[4, 0]]).vector
    assert alone is not None
    assert alone.tolist() == [[[8, 9]], [[0, 1]]]
    grouped = rows.grouped(1).vector
    assert grouped is not None
    assert grouped.shape == (6, 1, 2)


class Own(torch.nn.Linear):
    """A network whose further parameters are its options."""

    def __init__(self, shape: InputShape, num_outputs: int, slices: Any, scale: float = 1) -> None:
        super().__init__(shape.vector, num_outputs)
        self.scale = scale

    def forward(self, image: Any, vector: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.scale * super().forward(vector)


def test_a_network_may_be_named_by_its_class() -> None:
    config = PluginConfig(name=f"{__name__}:Own", scale=2.0)
    network = build_network(config, InputShape(None, 4), 2, (0, 0, 0))
    assert isinstance(network, Own)
    assert network.scale == 2
    assert network(None, torch.zeros(5, 3, 4)).shape == (5, 3, 2)
    with pytest.raises(ConfigError, match=r"unknown key 'network\.scael'; did you mean 'scale'"):
        build_network(PluginConfig(name=config.name, scael=2), InputShape(None, 4), 2, (0,))


def not_an_algorithm(*given: Any) -> object:
    return object()


def test_what_is_no_algorithm_is_refused() -> None:
    config, mlp = PluginConfig(name=f"{__name__}:not_an_algorithm"), PluginConfig(name="mlp")
    with pytest.raises(ConfigError, match=r"not_an_algorithm' gave a object; derive it from"):
        build_algorithm(config, make_spec("discrete"), mlp, Precision("fp32", CPU), CPU, 3)


def test_a_checkpoint_alone_names_no_code() -> None:
    config = {
        "environment": {"name": "spread"},
        "network": {"name": "not_imported_here:Net"},
    }
    state = {"config": json.dumps(config)}
    with pytest.raises(CheckpointError, match=r"names 'not_imported_here:Net', which no"):
        saved_policy("best.pt", state, Precision("fp32", CPU), CPU)
