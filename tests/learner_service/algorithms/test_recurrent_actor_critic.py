"""Actors and critics with memory from a replay: updates equal a plain loop over time steps."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from murmur.learner_service.algorithms.maddpg import Maddpg, gumbel_softmax
from murmur.learner_service.algorithms.masac import Masac, squashed_normal
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.layers.distributions import Categorical, one_hot
from murmur.learner_service.layers.forward import number_of_twins
from murmur.learner_service.layers.inputs import Inputs, with_action
from murmur.learner_service.layers.recurrent import Recurrent
from murmur.learner_service.learning.base import build_algorithm
from murmur.learner_service.storage.replay import ReplayBatch
from murmur.learner_service.storage.storage import observed
from murmur.shared.config import PluginConfig
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.spec import (
    AGENT_MASK,
    ArraySpec,
    Continuous,
    Discrete,
    EnvSpec,
)
from tests.learner_service.toys import ABORTED, CPU, FIRST, LAST, MID, random_batch

Action = Continuous | Discrete
WIDTH, LENGTH, ENVS, AGENTS = 5, 4, 6, 2
GAMMA = 0.9


def make(
    name: str, action: Action, cell: str, prioritized: bool = False, **options: Any
) -> Maddpg | Masac:
    observations = (ArraySpec("view", "float32", (4,)), ArraySpec(AGENT_MASK, "uint8", ()))
    spec = EnvSpec("toy", AGENTS, observations, action, (), 6)
    replay = {"unroll_steps": LENGTH, "batch_size": LENGTH * ENVS, "prioritized": prioritized}
    config = PluginConfig(
        **{"name": name, "gamma": GAMMA, "max_grad_norm": 0.0, "replay": replay, **options}
    )
    network = PluginConfig(name="mlp", hidden=(8,), recurrent=WIDTH, recurrent_cell=cell)
    algorithm = build_algorithm(config, spec, network, Precision("fp32", CPU), CPU, 1)
    assert isinstance(algorithm, Maddpg | Masac)
    return algorithm


def some_sequences(algorithm: Maddpg | Masac) -> ReplayBatch:
    """Five rows of six sequences: ends of episodes, an ABORTED row, dead agents, stored states."""
    torch.manual_seed(3)
    discrete = EnvSpec("toy", AGENTS, algorithm._spec.observations, Discrete(3), (), 6)
    arrays = random_batch(discrete, LENGTH, ENVS, seed=2).arrays
    if isinstance(algorithm._spec.action, Continuous):
        arrays["action"] = torch.rand(LENGTH + 1, ENVS, AGENTS, 2) * 2 - 1
    arrays["step_type"][0, ::2] = MID
    arrays["step_type"][3, 4] = ABORTED
    alive = torch.rand(LENGTH + 1, ENVS, AGENTS) < 0.8
    arrays[OBSERVATION + AGENT_MASK] = alive.to(torch.uint8)
    arrays["memory"] = torch.randn(1, ENVS, AGENTS, algorithm.memory_size)
    none, index = torch.zeros(0), torch.zeros(LENGTH * ENVS, dtype=torch.long)
    return ReplayBatch(arrays, {}, none, none, none, index, index)


# ---------------------------------------------------------------- plain networks


def step(network: Recurrent, inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """One step of [S, A * twins] units, by the formulas of torch's cells."""
    unit, twins = network.unit, number_of_twins(network)
    assert inputs.vector is not None
    fed = F.relu(network.body(None, inputs.vector.repeat_interleave(twins, 1)))  # [S, P, H]
    agents = fed.shape[1]
    own = [unit._slices[p % len(unit._slices)] for p in range(agents)]
    x = torch.einsum("sph,phg->spg", fed, unit.input.weight[own]) + unit.input.bias[own, 0]
    h = state[..., :WIDTH]
    of_h = torch.einsum("sph,phg->spg", h, unit.weight[own]) + unit.bias[own, 0]
    if unit.STATES == 1:
        (xr, xz, xn), (hr, hz, hn) = x.chunk(3, -1), of_h.chunk(3, -1)
        r, z = (xr + hr).sigmoid(), (xz + hz).sigmoid()
        h = (1 - z) * (xn + r * hn).tanh() + z * h
        after = h
    else:
        i, f, o, g = (x + of_h).chunk(4, -1)
        cell = f.sigmoid() * state[..., WIDTH:] + i.sigmoid() * g.tanh()
        h = o.sigmoid() * cell.tanh()
        after = torch.cat([h, cell], -1)
    out = torch.einsum("sph,pho->spo", h, network.head.weight[own]) + network.head.bias[own, 0]
    return out.unflatten(1, (-1, twins)).flatten(2), after


def seen_at(batch: ReplayBatch, t: int) -> dict[str, Tensor]:
    """Observations at step t, by name."""
    return observed({name: x[t] for name, x in batch.arrays.items() if name != "memory"})


def policy_outputs(algorithm: Maddpg | Masac, actor: nn.Module, batch: ReplayBatch) -> Tensor:
    """[L + 1, S, A, outputs] of an actor from the stored state on."""
    assert isinstance(actor, Recurrent)
    state, outputs = batch.arrays["memory"][0], []
    for t, kinds in enumerate(batch.arrays["step_type"]):
        state = state * (kinds != FIRST).view(-1, 1, 1)
        out, state = step(actor, algorithm._actor_inputs(seen_at(batch, t)), state)
        outputs.append(out)
    return torch.stack(outputs)


Fed = Callable[[int, Tensor | None], Inputs]  # of a time step and own actions; None: those played


def critic_values(
    critic: nn.Module, batch: ReplayBatch, fed: Fed, other: Tensor | None
) -> tuple[Tensor, Tensor]:
    """[L + 1, S, A, twins * outputs] of the actions played and, with the same past, of others."""
    assert isinstance(critic, Recurrent)
    twins = number_of_twins(critic)
    state, played, others = torch.zeros(ENVS, AGENTS * twins, critic.memory_size), [], []
    for t, kinds in enumerate(batch.arrays["step_type"]):
        state = state * (kinds != FIRST).view(-1, 1, 1)
        if other is not None:
            others.append(step(critic, fed(t, other[t]), state.detach())[0])
        out, state = step(critic, fed(t, None), state)
        played.append(out)
    return torch.stack(played), torch.stack(others or played)


def masks(batch: ReplayBatch) -> tuple[Tensor, Tensor]:
    """[L, S, A] 1 where a row is learned from; [L, S, A] weight of the value that follows."""
    arrays = batch.arrays
    kinds, alive = arrays["step_type"], arrays[OBSERVATION + AGENT_MASK].float()
    counted, onward = torch.zeros(LENGTH, ENVS, AGENTS), torch.zeros(LENGTH, ENVS, AGENTS)
    for t in range(LENGTH):
        for s in range(ENVS):
            if kinds[t, s] < LAST and kinds[t + 1, s] != ABORTED:
                counted[t, s] = alive[t, s]
                onward[t, s] = GAMMA * arrays["discount"][t + 1, s] * alive[t + 1, s]
    assert counted.sum() < alive[:-1].sum()
    return counted, onward


def mean_of(loss: Tensor, counted: Tensor, shared: bool) -> Tensor:
    """Each agent's mean over its own rows; the mean over agents that share, else the sum."""
    each = (loss * counted).flatten(0, 1).sum(0) / counted.flatten(0, 1).sum(0)
    return each.mean() if shared else each.sum()


def assert_alike(fast: nn.Module, plain: nn.Module) -> None:
    for ours, theirs in zip(fast.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


def shake(network: nn.Module) -> None:
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.1 * torch.randn_like(parameter)


# ---------------------------------------------------------------- updates


@pytest.mark.parametrize("share", [True, False], ids=["shared", "own"])
@pytest.mark.parametrize(
    ("name", "action", "cell"),
    [
        ("maddpg", Discrete(3), "gru"),
        ("matd3", Continuous(2), "gru"),
        ("td3", Continuous(2), "lstm"),
        ("ddpg", Continuous(2), "gru"),
    ],
)
def test_an_update_of_maddpg_equals_a_plain_one(
    name: str, action: Action, cell: str, share: bool
) -> None:
    options = {"actor_lr": 1e-2, "critic_lr": 1e-2, "target_tau": 0.1, "actor_gradient": "gumbel"}
    fast = make(name, action, cell, policy_delay=1, share_parameters=share, **options)
    assert isinstance(fast, Maddpg)
    batch, c = some_sequences(fast), fast._config
    shake(fast.target_actor)
    shake(fast.target_critic)
    plain, generator = copy.deepcopy(fast), torch.Generator()
    generator.set_state(fast._generator.get_state())
    plain._generator = generator
    found = fast.update(batch)
    played = plain._actions.encode(batch.arrays["action"].flatten(0, 1)).unflatten(0, (-1, ENVS))

    def fed(t: int, own: Tensor | None, following: Tensor | None = None) -> Inputs:
        others = played[t] if following is None else following
        joint = plain._joint_inputs(seen_at(batch, t), others)
        return with_action(joint, played[t] if own is None else own)

    def chosen(out: Tensor) -> Tensor:
        if isinstance(action, Continuous):
            return out.tanh()
        flat = gumbel_softmax(out.flatten(0, 1), None, c.gumbel_temperature, generator)
        return flat.view(out.shape)

    counted, onward = masks(batch)
    with torch.no_grad():
        out = policy_outputs(plain, plain.target_actor, batch)[1:]
        if plain._target_noise:
            noise = torch.empty(LENGTH * ENVS, AGENTS, 2).normal_(generator=generator)
            noise = (noise * plain._target_noise).clamp(-c.target_noise_clip, c.target_noise_clip)
            following = (out.tanh() + noise.view(out.shape)).clamp(-1, 1)
        else:
            following = chosen(out)
        padded = torch.cat([following[:1], following])

        def fed_next(t: int, own: Tensor | None) -> Inputs:
            return fed(t, own, None if own is None else padded[t])

        values = critic_values(plain.target_critic, batch, fed_next, padded)[1][1:]
        target = batch.arrays["reward"][1:] + onward * values.amin(-1)
    q = critic_values(plain.critic, batch, fed, None)[0][:-1]
    loss = mean_of((q - target.unsqueeze(-1)).square().sum(-1), counted, share)
    slices = 1 if share else AGENTS
    critics = q.shape[-1]
    assert float(found["critic_loss"]) == pytest.approx(
        float(loss.detach()) / slices / critics, rel=1e-4
    )
    adam = torch.optim.Adam(plain.critic.parameters(), 1e-2)
    loss.backward()
    adam.step()
    assert_alike(fast.critic, plain.critic)
    out = policy_outputs(plain, plain.actor, batch)[:-1]
    own = chosen(out)
    last = torch.zeros_like(own[:1])
    q = critic_values(plain.critic, batch, fed, torch.cat([own, last]))[1][:-1, ..., 0]
    loss = mean_of(c.output_penalty * out.square().mean(-1) - q, counted, share)
    assert float(found["actor_loss"]) == pytest.approx(
        float(loss.detach()) / slices, rel=1e-3, abs=1e-5
    )
    adam = torch.optim.Adam(plain.actor.parameters(), 1e-2)
    loss.backward()
    adam.step()
    assert_alike(fast.actor, plain.actor)


@pytest.mark.parametrize("share", [True, False], ids=["shared", "own"])
@pytest.mark.parametrize(
    ("name", "action", "cell"),
    [
        ("masac", Continuous(2), "gru"),
        ("masac", Discrete(3), "gru"),
        ("sac", Continuous(2), "lstm"),
    ],
)
def test_an_update_of_masac_equals_a_plain_one(
    name: str, action: Action, cell: str, share: bool
) -> None:
    rates = {"actor_lr": 1e-2, "critic_lr": 1e-2, "temperature_lr": 1e-2}
    fast = make(name, action, cell, share_parameters=share, **rates)
    assert isinstance(fast, Masac)
    batch, c = some_sequences(fast), fast._config
    shake(fast.target)
    plain, generator = copy.deepcopy(fast), torch.Generator()
    generator.set_state(fast._generator.get_state())
    found = fast.update(batch)
    discrete = isinstance(action, Discrete)
    played = batch.arrays["action"].float()
    if discrete:
        played = one_hot(batch.arrays["action"].long(), 3)

    def fed(t: int, own: Tensor | None, following: Tensor | None = None) -> Inputs:
        others = played[t] if following is None else following
        joint = plain._joint_inputs(seen_at(batch, t), others)
        return joint if discrete else with_action(joint, played[t] if own is None else own)

    counted, onward = masks(batch)
    out = policy_outputs(plain, plain.actor.network, batch)
    alpha = plain.temperature.log.detach().exp()
    now, then = out[:-1], out[1:].detach()
    if discrete:
        pi, next_pi = now.log_softmax(-1), then.log_softmax(-1)
        drawn = Categorical(then.flatten(0, 1), None).sample(generator)
        following = one_hot(drawn, 3).view(*then.shape)
    else:
        noise = torch.empty(2, LENGTH * ENVS, AGENTS, 2).normal_(generator=generator)
        pi_now, pi_then = squashed_normal(now), squashed_normal(then)
        own, log_prob = pi_now.rsample(noise[0].view(LENGTH, ENVS, AGENTS, 2))
        following, next_log_prob = pi_then.rsample(noise[1].view(LENGTH, ENVS, AGENTS, 2))
    padded = torch.cat([following[:1], following])

    def fed_next(t: int, own: Tensor | None) -> Inputs:
        return fed(t, own, None if own is None else padded[t])

    def of_twins(q: Tensor) -> Tensor:
        return q.unflatten(-1, (2, -1))  # [..., 2, outputs]

    with torch.no_grad():
        ahead = of_twins(critic_values(plain.target, batch, fed_next, padded)[1][1:]).amin(-2)
        if discrete:
            value = (next_pi.exp() * (ahead - alpha.unsqueeze(-1) * next_pi)).sum(-1)
        else:
            value = ahead.squeeze(-1) - alpha * next_log_prob
        target = batch.arrays["reward"][1:] + onward * value
    if discrete:
        every = of_twins(critic_values(plain.critic, batch, fed, None)[0][:-1])
        taken = batch.arrays["action"][:-1].long()[..., None, None].expand(*every.shape[:-1], 1)
        q = every.gather(-1, taken).squeeze(-1)
        least = every.detach().amin(-2)
        value = (pi.exp() * (least - alpha.unsqueeze(-1) * pi)).sum(-1)
        entropy, wanted = -(pi.exp() * pi).sum(-1), c.target_entropy_share * torch.tensor(3.0).log()
    else:
        q = of_twins(critic_values(plain.critic, batch, fed, None)[0][:-1]).squeeze(-1)
        frozen = copy.deepcopy(plain.critic)
        with_last = torch.cat([own, torch.zeros_like(own[:1])])
        of_own = of_twins(critic_values(frozen, batch, fed, with_last)[1][:-1]).squeeze(-1)
        value = of_own.amin(-1) - alpha * log_prob
        entropy, wanted = -log_prob, torch.tensor(plain._wanted)
    critic_loss = mean_of((q - target.unsqueeze(-1)).square().sum(-1), counted, share)
    actor_loss = mean_of(-value, counted, share)
    log_alpha = plain.temperature.log
    temperature_loss = mean_of(log_alpha * (entropy.detach() - wanted), counted, share)
    slices = 1 if share else AGENTS
    assert float(found["actor_loss"]) == pytest.approx(
        float(actor_loss.detach()) / slices, rel=1e-3
    )
    (critic_loss + actor_loss + temperature_loss).backward()
    for network in (plain.critic, plain.actor, plain.temperature):
        torch.optim.Adam(network.parameters(), 1e-2).step()
    assert_alike(fast.critic, plain.critic)
    assert_alike(fast.actor, plain.actor)
    assert_alike(fast.temperature, plain.temperature)


# ---------------------------------------------------------------- what does not go together


@pytest.mark.parametrize("name", ["matd3", "sac"])
def test_prioritized_sequences_are_refused(name: str) -> None:
    algorithm = make(name, Continuous(2), "gru", prioritized=True)
    with pytest.raises(ConfigError, match=r"replay\.prioritized=true is not supported with a recu"):
        algorithm.make_storage(algorithm._spec, None)


def test_a_cell_without_a_width_is_refused() -> None:
    network = PluginConfig(name="mlp", recurrent_cell="lstm")
    spec = make("sac", Continuous(2), "gru")._spec
    with pytest.raises(ConfigError, match=r"recurrent_cell=lstm has no effect with network\.recu"):
        build_algorithm(PluginConfig(name="sac"), spec, network, Precision("fp32", CPU), CPU, 1)
