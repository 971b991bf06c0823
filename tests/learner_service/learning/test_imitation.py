"""Imitation: the loss by hand, updates that learn from it alone, a game that it alone solves."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from murmur.learner_service.device.precision import Precision
from murmur.learner_service.learning.base import Algorithm, build_algorithm
from murmur.learner_service.learning.minibatches import imitation
from murmur.learner_service.learning.on_policy import OnPolicyAlgorithm
from murmur.shared.config import PluginConfig
from murmur.shared.config.experiment import ImitationConfig
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.spec import ACTION_MASK, EXPERT_ACTION, ArraySpec, EnvSpec
from tests.learner_service.running import experiment, running_learner
from tests.learner_service.toys import CPU, LAST, MatrixGame, random_batch, vector_spec
from tests.wire import Client, Refused

LABEL = OBSERVATION + EXPERT_ACTION


def told_spec(**options: Any) -> EnvSpec:
    spec = vector_spec(**options)
    expert = ArraySpec(EXPERT_ACTION, "int32", ())
    return replace(spec, observations=(*spec.observations, expert))


def make(name: str, spec: EnvSpec, **options: Any) -> Algorithm[Any]:
    network = PluginConfig(name="mlp", hidden=[options.pop("hidden", 8)])
    algorithm = PluginConfig(name=name, **{"batch_size": 12, "batch_number": 1, **options})
    return build_algorithm(algorithm, spec, network, Precision("fp32", CPU), CPU, 3)


def test_the_loss_by_hand() -> None:
    log_pi = torch.tensor([[0.2, 0.8], [0.5, 0.5]]).log()  # of two rows of one agent
    expert = torch.tensor([[1], [-1]])
    share = torch.tensor([[0.5], [0.5]])
    found = imitation(expert, lambda u: log_pi.gather(1, u), -share)
    value, weight = found.term
    # Half of -log 0.8, and nothing of the row that was not told.
    assert float((value * weight).sum()) == pytest.approx(-0.5 * math.log(0.8))
    loss, was_told = found.logged.values()
    torch.testing.assert_close(loss, torch.tensor([[-math.log(0.8)], [0.0]]))
    assert was_told.tolist() == [[1.0], [0.0]]
    assert found.expert_mask.tolist() == [[True], [False]]


def policy_probabilities(algorithm: Algorithm[Any], observation: dict[str, Tensor]) -> Tensor:
    logits = algorithm.make_policy().act(observation, None)["logits"]
    return torch.softmax(logits, -1)


@pytest.mark.parametrize("name", ["coma", "mappo"])
@pytest.mark.parametrize("masked", [False, True])
def test_told_rows_teach_the_experts_actions_not_the_rewards(name: str, masked: bool) -> None:
    spec = told_spec(masked=masked)
    options = {"hidden": 32, "data_passes": 150, "actor_lr": 0.01}
    batch = random_batch(spec, 5, 4)
    shape = batch.arrays["action"].shape
    scores = torch.from_numpy(np.random.default_rng(1).random((*shape, 3)))
    if masked:
        scores *= batch.arrays[OBSERVATION + ACTION_MASK]
    expert = scores.argmax(-1).int()
    batch.arrays[LABEL] = expert
    batch.arrays["log_prob"] = torch.full(shape, -1.0)
    batch.arrays["reward"] = (batch.arrays["action"] != expert).float()  # rewards say the opposite
    algorithm = make(name, spec, **options)
    scalars = algorithm.update(batch)
    observation = {k: v[0] for k, v in batch.observation().items()}
    told = expert[0].long().unsqueeze(-1)
    assert policy_probabilities(algorithm, observation).gather(-1, told).mean() > 0.9
    assert 0 < scalars["imitation_loss"] < math.log(3)
    assert float(scalars["imitation_share"]) == pytest.approx(1)
    assert float(scalars["actor_loss"]) == 0  # of rows that are not told, and there are none


@pytest.mark.parametrize("name", ["coma", "mappo"])
def test_the_log_says_what_was_told_and_how_well(name: str) -> None:
    spec = told_spec()
    batch = random_batch(spec, 5, 4)
    shape = batch.arrays["action"].shape
    batch.arrays["log_prob"] = torch.full(shape, -math.log(3))
    told = torch.full(shape, -1, dtype=torch.int32)
    told[:, :, 0] = 2  # one of two agents
    batch.arrays[LABEL] = told
    zero = {"actor_lr": 1e-12, "data_passes": 1}
    algorithm = make(name, spec, **zero)
    assert isinstance(algorithm, OnPolicyAlgorithm)
    with torch.no_grad():
        for parameter in algorithm.actor.parameters():  # all actions alike
            parameter.zero_()
    scalars = algorithm.update(batch)
    assert float(scalars["imitation_loss"]) == pytest.approx(math.log(3), rel=1e-4)
    assert float(scalars["imitation_share"]) == pytest.approx(0.5)


def test_imitation_ends_at_its_update_whenever_rows_were_sent() -> None:
    def built(imitation: ImitationConfig) -> Algorithm[Any]:
        networks = told_spec(), PluginConfig(name="mlp"), Precision("fp32", CPU), CPU, 3
        return build_algorithm(PluginConfig(name="mappo"), *networks, imitation=imitation)

    ending = built(ImitationConfig(baseline="planner", updates=3))
    for updates, expected in ((2, 2), (3, -1), (4, -1)):
        batch = random_batch(told_spec(), 5, 4)
        batch.arrays[LABEL] = torch.full_like(batch.arrays["action"], 2)
        seen = ending.transforms.batch(batch, updates)
        assert (seen.arrays[LABEL] == expected).all()
    endless = built(ImitationConfig())
    batch = random_batch(told_spec(), 5, 4)
    assert endless.transforms.batch(batch, 100) is batch


@pytest.mark.parametrize("name", ["coma", "mappo"])
def test_rows_that_are_not_told_learn_as_without_imitation(name: str) -> None:
    plain, told = vector_spec(), told_spec()
    batch, same = random_batch(plain, 5, 4), random_batch(plain, 5, 4)
    for one in (batch, same):
        one.arrays["log_prob"] = torch.full(one.arrays["action"].shape, -1.0)
    same.arrays[LABEL] = torch.full_like(same.arrays["action"], -1)
    without, with_it = make(name, plain), make(name, told)
    found, expected = with_it.update(same), without.update(batch)
    assert float(found.pop("imitation_loss")) == float(found.pop("imitation_share")) == 0
    assert list(found) == list(expected)
    for key in expected:  # of more rows side by side a sum is rounded otherwise
        torch.testing.assert_close(found[key], expected[key], msg=key)
    assert isinstance(with_it, OnPolicyAlgorithm)
    assert isinstance(without, OnPolicyAlgorithm)
    for ours, theirs in zip(with_it.actor.parameters(), without.actor.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_policy_does_not_see_the_expert() -> None:
    algorithm = make("coma", told_spec())
    observation = {"view": torch.rand(2, 2, 4), EXPERT_ACTION: torch.zeros(2, 2, dtype=torch.int32)}
    before = policy_probabilities(algorithm, observation)
    observation[EXPERT_ACTION] += 2
    assert torch.equal(policy_probabilities(algorithm, observation), before)


@pytest.mark.parametrize(
    ("baseline", "spec", "words"),
    [
        ("recall", vector_spec(), "baseline is 'recall' here, but the .* does not send"),
        ("", told_spec(), "baseline is '' here, but the environment server sends 'expert_action'"),
    ],
)
def test_both_services_must_imitate(
    tmp_path: Path, baseline: str, spec: EnvSpec, words: str
) -> None:
    config = experiment(imitation={"baseline": baseline})
    with (
        running_learner(tmp_path, config) as learner,
        Client(learner.port, spec, 2) as client,
        pytest.raises(Refused, match=words),
    ):
        client.hello()


def test_other_algorithms_refuse() -> None:
    with pytest.raises(ConfigError, match="'qmix' does not imitate; set coma, mappo, happo, ippo"):
        build_algorithm(
            PluginConfig(name="qmix"),
            told_spec(),
            PluginConfig(name="mlp"),
            Precision("fp32", CPU),
            CPU,
            3,
        )


def climb(told_updates: int, updates: int) -> float:
    """What COMA gets of climbing, greedily, after imitation of the best pair and reinforcement."""
    game = MatrixGame(MatrixGame.CLIMBING, 8, 4)
    spec = game.spec
    if told_updates:
        expert = ArraySpec(EXPERT_ACTION, "int32", ())
        spec = replace(spec, observations=(*spec.observations, expert))
    options = {"actor_lr": 0.02, "critic_lr": 0.02, "entropy_weight": 0.01, "gamma": 0.0}
    falls = {"epsilon_start": 0.2, "epsilon_end": 0.2}
    algorithm = make("coma", spec, batch_size=64, data_passes=2, **options, **falls)
    generator, seeds = torch.Generator().manual_seed(0), np.zeros(8, np.uint64)
    policy, timestep = algorithm.make_policy(), game.reset(np.zeros(8, np.uint64))

    def observed(k: int) -> dict[str, Tensor]:
        seen = {name: torch.from_numpy(x) for name, x in timestep.observation.items()}
        if told_updates:
            best = 0 if k < told_updates else -1
            seen[EXPERT_ACTION] = torch.full((8, 2), best, dtype=torch.int32)
        return seen

    for k in range(updates):
        batch = random_batch(spec, 4, 8)
        for t in range(5):
            seen = observed(k)
            action = policy.act(seen, generator)["action"]
            for name, x in seen.items():
                batch.arrays[OBSERVATION + name][t] = x
            for name in ("step_type", "reward", "discount"):
                batch.arrays[name][t] = torch.from_numpy(getattr(timestep, name))
            batch.arrays["action"][t] = action
            timestep = game.step(action.numpy(), timestep.step_type == LAST, seeds)
        algorithm.update(batch)
        algorithm.publish(policy)
    chosen = policy.act(observed(updates), None)["action"][0].tolist()
    return MatrixGame.CLIMBING[chosen[0]][chosen[1]]


def test_imitation_reaches_an_optimum_that_rewards_miss() -> None:
    assert climb(told_updates=0, updates=120) < 11
    assert climb(told_updates=20, updates=120) == 11
