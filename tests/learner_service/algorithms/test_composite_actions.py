"""Policies of several choices and numbers: what they compute, learn, export and refuse."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple

from murmur.env_service.environment import SEVERAL_PARTS
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.export.policy import (
    Check,
    GreedyPolicy,
    _pairs,
    random_observations,
    write_exported,
)
from murmur.learner_service.layers.distributions import Choices, CompositeDistribution, Normal
from murmur.learner_service.learning.base import Algorithm, build_algorithm
from murmur.shared.config import PluginConfig
from murmur.shared.config.plugins import plugin_names
from murmur.shared.process.errors import SpecError
from murmur.shared.wire.spec import (
    ACTION_MASK,
    ActionSpec,
    ArraySpec,
    Composite,
    Continuous,
    EnvSpec,
    action_factors,
)
from murmur.testing import assert_algorithm

CPU = torch.device("cpu")
HYBRID = Composite((2, 3), (-1.0, -math.inf), (1.0, math.inf))


def spec_of(action: ActionSpec, num_agents: int = 2) -> EnvSpec:
    observations = [ArraySpec("observation", "float32", (3,))]
    if factors := action_factors(action):
        observations.append(ArraySpec(ACTION_MASK, "uint8", (sum(factors),)))
    return EnvSpec("some", num_agents, tuple(observations), action)


def algorithm_for(name: str, action: ActionSpec) -> Algorithm[Any]:
    network = PluginConfig(name="mlp", hidden=(8,))
    precision = Precision("fp32", CPU)
    return build_algorithm(PluginConfig(name=name), spec_of(action), network, precision, CPU, 0)


def test_log_probabilities_and_entropies_are_sums() -> None:
    logits = torch.tensor([[[math.log(3), 0, 0, 0, 5]]])
    mask = torch.tensor([[[1, 1, 1, 1, 0]]], dtype=torch.uint8)
    normal = Normal(torch.tensor([[[1.0]]]), torch.tensor([[math.log(2)]]))
    pi = CompositeDistribution(Choices((2, 3)), logits, normal, mask)
    # Choices 3/4, 1/4 and 1/2, 1/2, 0; (3 - 1) / 2 = 1 deviation from the mean.
    number = -1 / 2 - math.log(2) - math.log(2 * math.pi) / 2
    wanted = math.log(3 / 4) + math.log(1 / 2) + number
    torch.testing.assert_close(
        pi.log_prob(torch.tensor([[[0.0, 1.0, 3.0]]])), torch.tensor([[wanted]])
    )
    first = -3 / 4 * math.log(3 / 4) - 1 / 4 * math.log(1 / 4)
    number = math.log(2) + math.log(2 * math.pi * math.e) / 2
    torch.testing.assert_close(pi.entropy(), torch.tensor([[first + math.log(2) + number]]))
    assert pi.mode().tolist() == [[[0.0, 0.0, 1.0]]]


def test_no_choice_takes_an_illegal_alternative() -> None:
    logits = torch.zeros(4000, 1, 5)
    mask = torch.tensor([1, 0, 0, 1, 1], dtype=torch.uint8).expand(4000, 1, 5)
    pi = CompositeDistribution(Choices((2, 3)), logits, None, mask)
    action = pi.sample(torch.Generator().manual_seed(0))
    assert action.dtype == torch.int64
    assert action[..., 0].unique().tolist() == [0]
    assert action[..., 1].unique().tolist() == [1, 2]
    assert 0.45 < float((action[..., 1] == 1).float().mean()) < 0.55


def test_an_idle_number_counts_for_nothing() -> None:
    mean, log_std = torch.zeros(1, 2, 1), torch.zeros(1, 1)
    pi = Normal(mean, log_std, torch.tensor([[1.0], [0.0]]))
    assert pi.log_prob(torch.full((1, 2, 1), 9.0))[0, 1] == 0
    assert pi.entropy()[0, 1] == 0
    assert pi.entropy()[0, 0] == pytest.approx(math.log(2 * math.pi * math.e) / 2)


@pytest.mark.parametrize("factors", [(2, 3), (3, 3), ()])
def test_gradients_are_those_of_autograd(factors: tuple[int, ...]) -> None:
    random = torch.Generator().manual_seed(1)
    logits = torch.randn(4, 2, sum(factors), generator=random, requires_grad=True)
    mean = torch.randn(4, 2, 2, generator=random, requires_grad=True)
    log_std = torch.randn(1, 2, generator=random, requires_grad=True)
    mask = torch.ones(4, 2, sum(factors), dtype=torch.uint8)
    if factors:
        mask[..., 1] = 0
    of_log_prob, of_order = (torch.randn(4, 2, generator=random) for _ in range(2))

    def make() -> CompositeDistribution:
        normal = Normal(mean, log_std, torch.tensor([[1.0, 1.0], [1.0, 0.0]]))
        return CompositeDistribution(Choices(factors), logits, normal, mask)

    pi, leaves = make(), [*([logits] if factors else []), mean, log_std]
    action = pi.sample(random).detach()
    wanted = torch.autograd.grad(
        (of_log_prob * pi.log_prob(action) - of_order * pi.entropy()).sum(), leaves
    )
    values, weights = zip(*make().gradient(action, of_log_prob, of_order), strict=True)
    torch.testing.assert_close(torch.autograd.grad(values, leaves, weights), wanted)


def test_a_number_without_bounds_is_not_clipped() -> None:
    policy = algorithm_for("mappo", Continuous(1, -math.inf, math.inf)).snapshot()
    with torch.no_grad():
        policy.actor.log_std.fill_(5.0)  # type: ignore[attr-defined]
    seen = random_observations(spec_of(Continuous(1)), 50, 0)
    acted = policy.act(seen, torch.Generator().manual_seed(0))
    assert torch.equal(acted["action"], acted["raw_action"])
    assert acted["action"].abs().max() > 100


def test_numbers_are_clipped_to_their_own_bounds() -> None:
    policy = algorithm_for("ippo", HYBRID).snapshot()
    with torch.no_grad():
        policy.actor.log_std.fill_(5.0)  # type: ignore[attr-defined]
    acted = policy.act(random_observations(spec_of(HYBRID), 50, 0), torch.Generator())
    assert acted["action"].dtype == torch.float32
    assert acted["action"][..., 2].abs().max() == 1
    assert acted["action"][..., 3].abs().max() > 100


class Hybrid(gymnasium.Env[Any, Any]):
    """Several choices and numbers; episodes of four steps."""

    observation_space = Box(-1, 1, (3,))
    action_space = Dict(
        {"n": Tuple((Box(-2, 2, (2,)), Discrete(2))), "m": MultiDiscrete([3, 4], start=[1, 0])}
    )

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self.np_random.uniform(-1, 1, 3).astype(np.float32), {ACTION_MASK: self.mask()}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.steps += 1
        seen = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        return seen, float(action["n"][1]), self.steps == 4, False, {ACTION_MASK: self.mask()}

    def mask(self) -> Any:
        return np.array([1, 0, 1, 1, 1, 1, 0, 1, 1], np.int8)


HYBRID_ENVIRONMENT = PluginConfig(name="gymnasium", factory=f"{__name__}:Hybrid")


@pytest.mark.parametrize(
    "options",
    [{}, {"vtrace_clip": 1.0}, {"centralized": False, "share_trunk": True}],
)
def test_it_learns_and_resumes_from_its_state(options: dict[str, Any]) -> None:
    assert_algorithm("mappo", environment=HYBRID_ENVIRONMENT, **options)


def test_it_remembers() -> None:
    network = PluginConfig(name="mlp", hidden=(8,), recurrent=True)
    assert_algorithm("ppo", environment=HYBRID_ENVIRONMENT, network=network)


@pytest.mark.parametrize("action", [HYBRID, Composite((2, 3)), Composite((3, 3), (0.0,), (9.0,))])
def test_an_exported_policy_acts_alike(action: Composite, tmp_path: Path) -> None:
    policy, spec = algorithm_for("mappo", action).snapshot(), spec_of(action)
    example, factors = random_observations(spec, 3, 0), action.factors
    module = GreedyPolicy(policy, factors)
    outputs = module(example)
    assert outputs["logits"].shape == (3, 2, sum(factors))
    sizes = {name: {0: torch.export.Dim("rows", min=1)} for name in example}
    samples = [random_observations(spec, rows, rows) for rows in (1, 64)]
    check = Check(samples, partial(_pairs, factors), 1e-4)
    file, about = tmp_path / "policy.onnx", {"outputs": list(outputs)}
    done = write_exported(module, example, sizes, "onnx", file, about, check)
    assert done.difference < 1e-4


def test_a_choice_without_a_legal_alternative_is_marked() -> None:
    policy, spec = algorithm_for("mappo", Composite((2, 3))).snapshot(), spec_of(HYBRID)
    seen = random_observations(spec, 2, 0)
    seen[ACTION_MASK][1, 0] = torch.tensor([1, 1, 0, 0, 0])
    action = GreedyPolicy(policy, (2, 3))(seen)["action"]
    assert (action[0] >= 0).all()
    assert (action[1] == -1).all()


@pytest.mark.parametrize("name", [n for n in plugin_names("algorithm") if n != "segmentation"])
def test_an_algorithm_of_one_choice_refuses_several(name: str) -> None:
    if name in SEVERAL_PARTS:
        assert algorithm_for(name, HYBRID).extras["raw_action"] == (4,)
        return
    words = rf"^{name} takes one choice .* \[2, 3\] and 2 numbers .* use mappo, happo, ippo or ppo$"
    with pytest.raises(SpecError, match=words):
        algorithm_for(name, HYBRID)
    with pytest.raises(SpecError, match="joint_actions: true: each of the 6 combinations"):
        algorithm_for(name, Composite((2, 3)))


@pytest.mark.parametrize("name", ["maddpg", "matd3", "td3", "masac", "sac"])
def test_unbounded_numbers_are_refused_in_the_name_asked_for(name: str) -> None:
    words = rf"^{name} needs actions with finite bounds.*use mappo, happo, ippo or ppo"
    with pytest.raises(SpecError, match=words):
        algorithm_for(name, Continuous(1, -math.inf, math.inf))
