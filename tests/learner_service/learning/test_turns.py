"""Returns of an agent in games of turns are those of its own moves."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from murmur.env_service.environment import make_environment
from murmur.learner_service.algorithms.mappo import Mappo
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.learning.base import build_algorithm
from murmur.learner_service.serving.game import team_spec
from murmur.learner_service.storage.rollout import Batch, transitions
from murmur.shared.config import PluginConfig
from murmur.shared.process.errors import ConfigError, SpecError
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.spec import (
    ACTION_MASK,
    AGENT_MASK,
    TURN_MASK,
    ArraySpec,
    Continuous,
    Discrete,
    EnvSpec,
)
from tests.learner_service.toys import ABORTED, CPU, FIRST, LAST, MID, learn

AGENTS, GAMMA, LAMBDA = 3, 0.5, 0.75
SPEC = EnvSpec(
    "turns",
    AGENTS,
    (
        ArraySpec("seen", "float32", (2,)),
        ArraySpec(ACTION_MASK, "uint8", (3,)),
        ArraySpec(AGENT_MASK, "uint8", ()),
        ArraySpec(TURN_MASK, "uint8", ()),
    ),
    Discrete(3),
)


def algorithm(name: str = "mappo", spec: EnvSpec = SPEC, **options: Any) -> Any:
    plugin = PluginConfig.model_validate({"name": name, **options})
    network = PluginConfig.model_validate({"name": "mlp", "hidden": [8]})
    return build_algorithm(plugin, spec, network, Precision("fp32", CPU), CPU, 0)


def learned(
    batch: Batch, value: Tensor, spec: EnvSpec = SPEC, **options: Any
) -> tuple[Tensor, Tensor]:
    """Targets and weights [L, B, A] that reach the loss."""
    options = {"gamma": GAMMA, "gae_lambda": LAMBDA, "normalize_values": False, **options}
    mappo = algorithm(spec=spec, **options)
    assert isinstance(mappo, Mappo)
    found = {"value": value, "log_prob": batch.arrays["log_prob"]}
    columns, weight, _ = mappo._learnable(batch, found, None)
    return columns["target"], weight


def own_returns(
    batch: dict[str, Tensor], value: Tensor, env: int, agent: int, gamma: float, lambda_: float
) -> dict[int, float]:
    """Return G of an agent's moves by the number of their time steps, from its own turns alone."""
    kind, turn = batch["step_type"][:, env], batch[OBSERVATION + TURN_MASK][:, env, agent]
    alive, reward = batch[OBSERVATION + AGENT_MASK][:, env, agent], batch["reward"][:, env, agent]
    discount = batch["discount"][:, env]
    # Its moves: (time step, rewards until its next turn or end, discount and time step there).
    moves: list[tuple[int, float, float, int]] = []
    for t in range(len(kind) - 1):
        if kind[t] >= LAST or not turn[t] or not alive[t]:
            continue
        total = 0.0
        for s in range(t + 1, len(kind)):
            if kind[s] == ABORTED:
                break
            total += float(reward[s])
            if kind[s] == LAST or not alive[s]:
                moves.append((t, total, float(discount[s] * alive[s]), s))
                break
            if turn[s]:
                moves.append((t, total, 1.0, s))
                break
    found: dict[int, float] = {}
    for t, total, d, s in reversed(moves):
        following = float(value[s, env, agent])
        if s in found:  # its next move is known, too
            following = (1 - lambda_) * following + lambda_ * found[s]
        found[t] = total + gamma * d * following
    return found


def random_game(seed: int, length: int = 24, envs: int = 6) -> dict[str, Tensor]:
    """Games with turns in any order, deaths, ends of both kinds and failures, cut anywhere."""
    random = np.random.default_rng(seed)
    shape = length + 1, envs, AGENTS
    kinds, turn = np.zeros(shape[:2], np.uint8), np.zeros(shape, np.uint8)
    alive, discount = np.ones(shape, np.uint8), np.ones(shape[:2], np.float32)
    reward = random.integers(-3, 4, shape).astype(np.float32)
    for env in range(envs):
        kind = int(random.choice([FIRST, MID]))
        there = np.ones(AGENTS, bool)
        for t in range(length + 1):
            if kind == FIRST:
                there[:] = True
            elif kind == MID and there.sum() > 1 and random.random() < 0.1:
                there[random.choice(np.flatnonzero(there))] = False
            kinds[t, env], alive[t, env] = kind, there
            if kind in (FIRST, ABORTED):
                reward[t, env] = 0
            if kind < LAST:
                turn[t, env, random.choice(np.flatnonzero(there))] = 1
            if kind == LAST:
                discount[t, env] = random.integers(2)
            over = kind >= LAST
            kind = FIRST if over else int(random.choice([MID, LAST, ABORTED], p=[0.8, 0.15, 0.05]))
    mask = np.zeros((*shape, 3), np.uint8)
    mask[..., 0] = 1
    mask[turn > 0] = 1
    arrays = {
        "step_type": kinds,
        "reward": reward,
        "discount": discount,
        "action": random.integers(0, 3, shape).astype(np.int32) * turn.astype(np.int32),
        "log_prob": np.full(shape, -1, np.float32),
        OBSERVATION + "seen": random.normal(size=(*shape, 2)).astype(np.float32),
        OBSERVATION + ACTION_MASK: mask,
        OBSERVATION + AGENT_MASK: alive,
        OBSERVATION + TURN_MASK: turn,
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_returns_are_those_of_each_agents_own_turns(clip: float) -> None:
    finished = 0
    for seed in range(8):
        arrays = random_game(seed)
        value = torch.from_numpy(np.random.default_rng(seed).normal(size=arrays["reward"].shape))
        value = value.float()
        # On-policy (a ratio of 1), V-trace is the same.
        target, weight = learned(Batch(arrays, [0]), value, vtrace_clip=clip)
        for env in range(target.shape[1]):
            for agent in range(AGENTS):
                wanted = own_returns(arrays, value, env, agent, GAMMA, LAMBDA)
                assert weight[:, env, agent].nonzero().flatten().tolist() == sorted(wanted)
                for t, g in wanted.items():
                    assert target[t, env, agent] == pytest.approx(g, abs=1e-4)
                finished += len(wanted)
    assert finished > 500


def played(script: str) -> tuple[EnvSpec, dict[str, Tensor]]:
    """Time steps of one episode of a scripted game."""
    plugin = {"name": "pettingzoo", "factory": "tests.turns:Scripted"}
    config = PluginConfig.model_validate({**plugin, "arguments": {"script": script}})
    environment = make_environment(config, 1)
    spec, seed = environment.spec, np.zeros(1, np.uint64)
    t, steps = environment.reset(seed), []
    while True:
        named = {OBSERVATION + name: array for name, array in t.observation.items()}
        named |= {"step_type": t.step_type, "reward": t.reward, "discount": t.discount}
        steps.append({name: array.copy() for name, array in named.items()})
        if t.step_type[0] == LAST:
            break
        t = environment.step(np.ones((1, spec.num_agents), np.int32), np.zeros(1, np.bool_), seed)
    arrays = {name: torch.from_numpy(np.stack([s[name] for s in steps])) for name in steps[0]}
    arrays["log_prob"] = torch.full_like(arrays["reward"], -1)
    return spec, arrays


def test_returns_of_a_game_in_which_one_moves_twice_by_hand() -> None:
    spec, arrays = played("twice")  # turns: a, a, b, a, b
    value = torch.zeros_like(arrays["reward"])
    target, weight = learned(Batch(arrays, [0]), value, spec, gae_lambda=1.0)
    # a: G_3 = 5, at b's move; G_1 = 2 + 5 / 2; G_0 = 1 + 4.5 / 2.  b: G_4 = 7; G_2 = 7 / 2; the 30
    # that came before its first turn is the result of no move of its own.
    assert weight[:, 0].T.tolist() == [[1, 1, 0, 1, 0], [0, 0, 1, 0, 1]]
    assert target[weight > 0].tolist() == [3.25, 4.5, 3.5, 5, 7]


def test_returns_of_an_agent_that_leaves_by_hand() -> None:
    spec, arrays = played("leaves")  # turns: a, b, c, a, c, a; b leaves at a's second move
    value = torch.full_like(arrays["reward"], 100)
    target, weight = learned(Batch(arrays, [0]), value, spec, gae_lambda=1.0)
    assert weight[:, 0].nonzero().tolist() == [[0, 0], [1, 1], [2, 2], [3, 0], [4, 2], [5, 0]]
    # b: 1 - 4.  a: G_5 = 6, G_3 = 3 + 3, G_0 = 0 + 3.  c: G_4 = 2 + 8, G_2 = 0 + 5.
    assert target[weight > 0].tolist() == [3, -3, 5, 6, 10, 6]


def test_a_truncated_game_ends_with_the_value_seen_last() -> None:
    spec, arrays = played("truncated")  # turns: a, b
    value = torch.full_like(arrays["reward"], 10)
    target, weight = learned(Batch(arrays, [0]), value, spec)
    assert weight[:, 0].tolist() == [[1, 0], [0, 1]]
    assert target[weight > 0].tolist() == [1 + 2 + 5, 3 + 5]


def test_a_move_is_learned_from_if_its_result_is_in_the_rollout() -> None:
    spec, arrays = played("twice")
    value = torch.full_like(arrays["reward"], 10)
    cut = Batch({name: x[:4] for name, x in arrays.items()}, [0])  # turns: a, a, b, and a's next
    t = transitions(cut)
    assert t.weight[:, 0].tolist() == [[1, 0], [1, 0], [0, 0]]
    target, _ = learned(cut, value[:4], spec, gae_lambda=1.0)
    assert target[:2, 0, 0].tolist() == [1 + (2 + 5) / 2, 2 + 5]  # a's value at its next turn
    cut = Batch({name: x[:5] for name, x in arrays.items()}, [0])  # and b's: that of a is open
    target, weight = learned(cut, value[:5], spec, gae_lambda=1.0)
    assert weight[:, 0].tolist() == [[1, 0], [1, 0], [0, 1], [0, 0]]
    assert target[weight > 0].tolist() == [1 + (2 + 5) / 2, 2 + 5, 0 + 5]


@pytest.mark.parametrize("name", ["mappo", "ippo"])
@pytest.mark.parametrize("recurrent", [0, 8])
def test_actions_while_agents_wait_change_no_weight(name: str, recurrent: int) -> None:
    network = PluginConfig.model_validate({"name": "mlp", "hidden": [8], "recurrent": recurrent})
    after = []
    for noise in (0, 1):
        arrays = random_game(3)
        if recurrent:
            arrays["memory"] = torch.zeros(1, 6, AGENTS, 8)
        waits = (arrays[OBSERVATION + TURN_MASK] == 0) & (arrays["step_type"] < LAST).unsqueeze(-1)
        arrays["action"][waits] = noise
        arrays["log_prob"][waits] = -1.0 - noise
        if name == "ippo" and not recurrent:
            arrays[OBSERVATION + "seen"][waits] += noise
        plugin = PluginConfig.model_validate({"name": name, "batch_size": 32, "batch_number": 2})
        made = build_algorithm(plugin, SPEC, network, Precision("fp32", CPU), CPU, 0)
        scalars = learn(made, Batch(arrays, [0]))
        assert all(torch.isfinite(x).all() for x in scalars.values())
        after.append([p.detach().clone() for p in made.actor.parameters()])
        after[-1] += [p.detach().clone() for p in made.critic.parameters()]
    for one, other in zip(*after, strict=True):
        assert torch.equal(one, other)


def test_a_centralized_critic_is_told_whose_turn_it_is() -> None:
    mappo, ippo = algorithm("mappo"), algorithm("ippo")
    arrays = random_game(0)
    obs = {k.removeprefix(OBSERVATION): x[0] for k, x in arrays.items() if OBSERVATION in k}
    action = torch.zeros(AGENTS)  # critics of values are not told
    (actor, critic), _ = mappo._inputs_and_columns(obs, action)
    assert actor.vector.shape[-1] == 2 + AGENTS  # what is seen, and the agent's number
    turns = obs[TURN_MASK].float().unsqueeze(1).expand(-1, AGENTS, -1)
    assert torch.equal(critic.vector[..., -AGENTS:], turns)
    assert mappo._critic_inputs.shape.vector == critic.vector.shape[-1]
    assert ippo._inputs_and_columns(obs, action)[0][1].vector.shape[-1] == 2 + AGENTS


def test_updates_count_an_agents_turns_alone() -> None:
    storage = algorithm("mappo", batch_size=60, batch_number=1, unroll_steps=20).make_storage(
        SPEC, 1
    )
    assert storage.envs_per_update == 3  # 20 moves an unroll, of all agents together


def test_graphs_are_fed_a_minibatch_of_turns_at_once() -> None:
    mappo = algorithm("mappo", batch_size=60, batch_number=1)
    mappo._static = True  # as on a GPU
    assert mappo._rows_at_once >= 60


def test_a_policy_acts_for_the_agent_with_the_turn_alone() -> None:
    for action in (Discrete(3), Continuous(2)):
        arrays = tuple(o for o in SPEC.observations if o.name != ACTION_MASK)
        spec = EnvSpec("turns", AGENTS, arrays, action)
        policy = algorithm(spec=spec).snapshot()
        game = random_game(0)
        obs = {o.name: game[OBSERVATION + o.name][0] for o in arrays}
        for generator in (None, torch.Generator().manual_seed(1)):
            acted = policy.act(obs, generator)["action"]
            waits = obs[TURN_MASK] == 0
            assert (acted[waits] == 0).all()
            assert (acted[~waits] != 0).any()


@pytest.mark.parametrize(
    ("name", "unmasked"),
    [("coma", False), ("qmix", False), ("vdn", False), ("iql", False), ("masac", False),
     ("sac", False), ("maddpg", True), ("td3", True)],
)  # fmt: skip
def test_algorithms_that_learn_from_every_agent_are_refused(name: str, unmasked: bool) -> None:
    arrays = tuple(o for o in SPEC.observations if o.name != ACTION_MASK or not unmasked)
    spec = EnvSpec("turns", AGENTS, arrays, Discrete(3))
    with pytest.raises(ConfigError, match=rf"'{name}'.*agents take turns; set mappo, ippo or ppo"):
        algorithm(name, spec)


def test_unrolls_too_short_for_two_turns_of_each_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"unroll_steps = 5: .* set it to 6 or more, or to 0"):
        algorithm("mappo", unroll_steps=5)
    algorithm("mappo", unroll_steps=6)


def test_a_league_is_refused() -> None:
    with pytest.raises(SpecError, match=r"one policy learns for all of them; set league\.size=0"):
        team_spec(SPEC)
