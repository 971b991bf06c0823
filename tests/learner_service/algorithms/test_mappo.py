"""MAPPO and IPPO: a whole update against a plain one, resume, and games with known answers."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from env_service.envs.matrix import Config as MatrixConfig
from env_service.envs.matrix import MatrixGame
from learner_service.algorithms.mappo import Config, Mappo, ValueNorm
from learner_service.distributions import Categorical, Normal
from learner_service.precision import Precision, clip_gradients
from learner_service.returns import sharing_agents
from learner_service.storage.rollout import OBSERVATION, Batch, RolloutStorage
from shared.config import PluginConfig
from shared.spec import EnvSpec
from tests.learner_service.toys import CPU, LAST, random_batch, vector_spec


def make(spec: EnvSpec, seed: int = 3, precision: str = "fp32", **options: Any) -> Mappo:
    network = PluginConfig(name="mlp", hidden=(8,))
    return Mappo(Config(**options), spec, network, Precision(precision, CPU), CPU, seed)


def batch_for(mappo: Mappo, spec: EnvSpec, seed: int = 0) -> Batch:
    """Random rows, acted on by the algorithm's own policy."""
    batch = random_batch(spec, 5, 6, seed)
    policy, generator = mappo.make_policy(), torch.Generator().manual_seed(seed)
    acted = [
        policy.act({k: v[t] for k, v in batch.observation().items()}, generator) for t in range(6)
    ]
    for name in acted[0]:
        batch.arrays[name] = torch.stack([a[name] for a in acted])
    return batch


# ---------------------------------------------------------------- distributions


def test_categorical_by_hand() -> None:
    pi = Categorical(torch.tensor([[0.0, 0.0, 5.0]]), torch.tensor([[1, 1, 0]]))
    # Two equal legal actions: log 1/2 each; entropy log 2; the third is never chosen.
    torch.testing.assert_close(pi.log_prob(torch.tensor([1])), torch.tensor([-0.693147]))
    torch.testing.assert_close(pi.entropy(), torch.tensor([0.693147]))
    generator = torch.Generator().manual_seed(0)
    assert {int(pi.sample(generator)) for _ in range(50)} == {0, 1}


def test_normal_equals_torch() -> None:
    mean, log_std = torch.randn(3, 2), torch.tensor([-0.3, 0.2])
    ours, torchs = Normal(mean, log_std), torch.distributions.Normal(mean, log_std.exp())
    x = torch.randn(3, 2)
    torch.testing.assert_close(ours.log_prob(x), torchs.log_prob(x).sum(-1))
    torch.testing.assert_close(ours.entropy(), torchs.entropy().sum(-1))


# ---------------------------------------------------------------- parts


def test_value_norm_by_hand() -> None:
    norm = ValueNorm(sharing_agents((0, 0), CPU), decay=0.5)
    norm.update(torch.tensor([[1.0, 3.0]]), torch.ones(1, 2))
    # One update, debiased: mean 2, variance 5 - 4 = 1.
    torch.testing.assert_close(
        norm.normalize(torch.tensor([[4.0, 1.0]])), torch.tensor([[2, -1.0]])
    )
    norm.update(torch.tensor([[5.0, 9.0], [5.0, 9.0]]), torch.tensor([[1.0, 0], [1, 0]]))
    # Weights 1/3 and 2/3: mean 4, square (5 + 2*25)/3 = 55/3, variance 7/3.
    got = norm.normalize(torch.full((1, 2), 4.0 + (7 / 3) ** 0.5))
    torch.testing.assert_close(got, torch.ones(1, 2))
    torch.testing.assert_close(norm.denormalize(got), torch.full((1, 2), 4.0 + (7 / 3) ** 0.5))


def test_value_norms_of_sets_by_hand() -> None:
    norm = ValueNorm(sharing_agents((0, 1, 2), CPU), decay=0.5)
    counted = torch.tensor([[1.0, 1, 0], [1, 1, 0]])
    norm.update(torch.tensor([[1.0, 100, 7], [3, 300, 7]]), counted)
    # Means 2 and 200, deviations 1 and 100; the third agent has had nothing: as it is.
    got = norm.normalize(torch.tensor([[[3.0, 300, 7]]]))
    torch.testing.assert_close(got, torch.tensor([[[1.0, 1, 7]]]))
    torch.testing.assert_close(norm.denormalize(got), torch.tensor([[[3.0, 300, 7]]]))


def test_a_value_norm_of_one_for_all_loads_into_one_for_each() -> None:
    old = {name: torch.tensor(x) for name, x in (("mean", 2.0), ("square", 5.0), ("weight", 1.0))}
    norm = ValueNorm(sharing_agents((0, 1), CPU))
    norm.load_state_dict(old)
    torch.testing.assert_close(
        norm.normalize(torch.tensor([[4.0, 1.0]])), torch.tensor([[2, -1.0]])
    )


def test_clipping_by_agent_equals_a_loop() -> None:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(2, 3, 4)), torch.nn.Parameter(torch.zeros(2, 5))]
    grads = [
        torch.randn_like(p) * torch.tensor([0.1, 10.0]).view(2, *[1] * (p.dim() - 1))
        for p in parameters
    ]
    for p, g in zip(parameters, grads, strict=True):
        p.grad = g.clone()
    clip_gradients(parameters, 1.0, 2)
    for agent in range(2):
        alone = [torch.nn.Parameter(torch.zeros_like(g[agent])) for g in grads]
        for p, g in zip(alone, grads, strict=True):
            p.grad = g[agent].clone()
        torch.nn.utils.clip_grad_norm_(alone, 1.0)
        for p, q in zip(parameters, alone, strict=True):
            assert p.grad is not None
            torch.testing.assert_close(p.grad[agent], q.grad)


# ---------------------------------------------------------------- updates


def test_learning_rates_fall_to_their_share() -> None:
    spec = vector_spec()
    mappo = make(spec, actor_lr=1.0, critic_lr=2.0, anneal_updates=4, final_lr_fraction=0.2)
    rates = []
    for _ in range(6):
        mappo.update(batch_for(make(spec), spec))
        groups = mappo._actor_optimizer.param_groups + mappo._critic_optimizer.param_groups
        rates.append([g["lr"] for g in groups])
    # 1 - 0.8 n / 4 for n = 0 ... 4, then no further
    for rate, share in zip(rates, (1.0, 0.8, 0.6, 0.4, 0.2, 0.2), strict=True):
        assert rate == pytest.approx([share, 2 * share])


def plain_loss(mappo: Mappo, batch: Batch, advantage: Tensor) -> Tensor:
    """The clipped surrogate with entropy, row by row, in a loop."""
    c, total, count = mappo._config, torch.zeros(()), 0
    step_type = batch.arrays["step_type"]
    for t in range(5):
        for b in range(step_type.shape[1]):
            if step_type[t, b] == LAST:
                continue
            observation = {k: v[t, b : b + 1] for k, v in batch.observation().items()}
            inputs = mappo._actor_inputs(observation)
            logits = mappo.actor.network(inputs.image, inputs.vector)
            for a in range(2):
                log_pi = logits[a].log_softmax(-1)
                action = int(batch.arrays["action"][t, b, a])
                ratio = (log_pi[action] - batch.arrays["log_prob"][t, b, a]).exp()
                gain = advantage[t, b, a]
                surrogate = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
                total = total - surrogate + c.entropy_weight * (log_pi.exp() * log_pi).sum()
                count += 1
    return total / count


def test_one_actor_step_equals_a_plain_one() -> None:
    spec = vector_spec()
    mappo = make(spec, batch_number=1, data_passes=1, max_grad_norm=0.0)
    batch = batch_for(mappo, spec)
    plain = copy.deepcopy(mappo)
    rows = copy.deepcopy(mappo)._prepare(copy.deepcopy(batch))
    loss = plain_loss(plain, batch, rows.advantage.view(5, 6, 2))
    optimizer = torch.optim.Adam(plain.actor.parameters(), 5e-4, eps=1e-5)
    loss.backward()
    optimizer.step()
    log = mappo.update(batch)
    torch.testing.assert_close(log["actor_loss"], loss.detach(), atol=1e-6, rtol=1e-5)
    for ours, theirs in zip(mappo.actor.parameters(), plain.actor.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_bf16_stays_near_fp32() -> None:
    spec = vector_spec()
    full = make(spec)
    batch = batch_for(full, spec)
    half = make(spec, precision="bf16")
    a, b = full.update(copy.deepcopy(batch)), half.update(copy.deepcopy(batch))
    for name in ("actor_loss", "critic_loss", "entropy"):
        assert float(b[name]) == pytest.approx(float(a[name]), rel=0.05, abs=0.02)


# ---------------------------------------------------------------- known answers


def greedy_payoff(mappo: Mappo, game: MatrixGame) -> float:
    acted = mappo.make_policy().act({"observation": torch.ones(1, 2, 1)}, None)["action"][0]
    return 25 * float(game.payoffs[tuple(acted.tolist())])


def play_and_learn(
    mappo: Mappo, game: MatrixGame, steps: int, done: Callable[[], bool] = lambda: False
) -> None:
    """Until it is done, looked at after every update, or so many steps have been taken."""
    storage = RolloutStorage(
        game.spec, mappo.unroll_length, mappo.rows_per_update, None, CPU, mappo.extras
    )
    policy, generator = mappo.make_policy(), torch.Generator().manual_seed(0)
    seeds, taken = np.zeros(game.num_envs, np.uint64), 0
    timestep = game.reset(seeds)
    unroll = storage.begin(game.num_envs, 0, 0)
    while taken < steps:
        rows = {
            "step_type": timestep.step_type,
            "reward": timestep.reward,
            "discount": timestep.discount,
            OBSERVATION + "observation": timestep.observation["observation"],
        }
        while True:
            for name, x in rows.items():
                unroll.arrays[name][unroll.cursor] = torch.from_numpy(x)
            unroll.cursor += 1
            if not unroll.full:
                break
            storage.put(unroll)
            while storage.ready:
                batch, _ = storage.take(0, 0.0)
                assert batch is not None
                mappo.update(batch)
                mappo.publish(policy)
                storage.done(batch)
                if done():
                    return
            unroll = storage.begin(game.num_envs, 0, 0)
        observation = {k: torch.from_numpy(v) for k, v in timestep.observation.items()}
        acted = policy.act(observation, generator)
        for name, value in acted.items():
            unroll.arrays[name][unroll.cursor - 1] = value
        taken += game.num_envs
        restart = timestep.step_type == LAST
        timestep = game.step(acted["action"].numpy(), restart, seeds)


@pytest.mark.parametrize(
    ("options", "goal"),
    [
        ({"game": "climbing"}, 175),
        ({"game": "penalty", "penalty": -100.0}, 50),
        ({"game": "penalty", "penalty": 0.0}, 250),
    ],
)
@pytest.mark.parametrize("centralised", [True, False], ids=["mappo", "ippo"])
def test_matrix_games_reach_their_known_answers(
    options: dict[str, Any], goal: float, centralised: bool
) -> None:
    game = MatrixGame(MatrixConfig(**options), 32)
    mappo = make(
        game.spec,
        centralised=centralised,
        share_parameters=False,
        batch_size=200,
        batch_number=4,
        actor_lr=1e-3,
        critic_lr=1e-3,
        entropy_weight=0.01,
    )
    reached = 0

    def stays() -> bool:
        """Whether the last 20 updates have left a policy with that answer."""
        nonlocal reached
        reached = reached + 1 if abs(greedy_payoff(mappo, game) - goal) < 1 else 0
        return reached == 20

    play_and_learn(mappo, game, 100_000, stays)
    assert reached == 20
