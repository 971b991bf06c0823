"""Small specs, batches and games with known answers, for tests of the learner."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from murmur.env_service.environment import VectorEnvironment
from murmur.learner_service.algorithms.coma import Coma, Config
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.learning.base import Algorithm, Policy
from murmur.learner_service.storage.replay import ReplayBatch
from murmur.learner_service.storage.rollout import Batch
from murmur.learner_service.storage.storage import NEXT
from murmur.shared.config import PluginConfig
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.spec import (
    ACTION_MASK,
    AGENT_CELL,
    AGENT_MASK,
    STATE,
    ArraySpec,
    Discrete,
    EnvSpec,
    action_layout,
)
from murmur.shared.wire.timestep import Array, StepType, TimeStep

FIRST, MID, LAST, ABORTED = (int(s) for s in StepType)
CPU = torch.device("cpu")


def vector_spec(num_agents: int = 2, num_actions: int = 3, masked: bool = False) -> EnvSpec:
    """Each agent observes four numbers."""
    observations = [ArraySpec("view", "float32", (4,))]
    if masked:
        observations.append(ArraySpec(ACTION_MASK, "uint8", (num_actions,)))
    return EnvSpec("toy", num_agents, tuple(observations), Discrete(num_actions), ("score",), 4)


def map_spec() -> EnvSpec:
    """The shapes of the reference terrain mission: 7 actor channels, 12 critic channels."""
    return EnvSpec(
        "maps",
        4,
        (
            ArraySpec("maps", "float32", (7, 11, 11)),
            ArraySpec(STATE, "float32", (4, 11, 11), per_agent=False),
            ArraySpec(ACTION_MASK, "uint8", (6,)),
            ArraySpec(AGENT_CELL, "int32", (2,)),
        ),
        Discrete(6),
        (),
        14,
    )


def make_coma(
    spec: EnvSpec,
    *,
    network: dict[str, Any] | None = None,
    precision: str = "fp32",
    device: torch.device = CPU,
    seed: int = 3,
    **options: Any,
) -> Coma:
    net = PluginConfig(**(network or {"name": "mlp", "hidden": (8,)}))
    return Coma(Config(**options), spec, net, Precision(precision, device), device, seed)


def random_batch(spec: EnvSpec, length: int, num_envs: int, seed: int = 0) -> Batch:
    """L + 1 rows of random numbers, with episode ends here and there."""
    random = np.random.default_rng(seed)
    n, a, rows = num_envs, spec.num_agents, length + 1
    assert isinstance(spec.action, Discrete)
    k = spec.action.num_actions
    step_type = np.full((rows, n), MID, np.uint8)
    step_type[0] = FIRST
    discount = np.ones((rows, n), np.float32)
    for env in range(n):
        for t in range(1 + env % 3, rows - 1, 4):
            step_type[t, env], step_type[t + 1, env] = LAST, FIRST
            discount[t, env] = (t + env) % 2  # some terminate, some are cut short
    reward = random.normal(size=(rows, n, a)).astype(np.float32)
    reward[step_type == FIRST] = 0
    arrays: dict[str, Array] = {"step_type": step_type, "reward": reward, "discount": discount}
    mask = None
    for o in spec.observations:
        shape = (rows, n, a, *o.shape) if o.per_agent else (rows, n, *o.shape)
        if o.name == ACTION_MASK:
            mask = (random.random(shape) < 0.6).astype(np.uint8)
            np.put_along_axis(mask, random.integers(k, size=(rows, n, a, 1)), 1, -1)
            arrays[OBSERVATION + o.name] = mask
        elif o.name == AGENT_CELL:
            arrays[OBSERVATION + o.name] = random.integers(11, size=shape).astype(np.int32)
        else:
            arrays[OBSERVATION + o.name] = random.normal(size=shape).astype(o.dtype)
    scores = random.random((rows, n, a, k)) * (1 if mask is None else mask)
    arrays["action"] = scores.argmax(-1).astype(np.int32)
    return Batch({name: torch.from_numpy(x) for name, x in arrays.items()}, [0] * n)


def clone(batch: Batch) -> Batch:
    return Batch({k: v.clone() for k, v in batch.arrays.items()}, list(batch.version))


def parameters(coma: Coma) -> list[Tensor]:
    nets = (coma.actor, coma.critic, coma.target)
    return [p.detach().cpu().clone() for net in nets for p in net.parameters()]


class MatrixGame(VectorEnvironment):
    """Two agents play one payoff matrix T times; each gets half the payoff; they see nothing."""

    PENALTY_ZERO = ((0.0, 0.0, 10.0), (0.0, 2.0, 0.0), (10.0, 0.0, 0.0))
    CLIMBING = ((11.0, -30.0, 0.0), (-30.0, 7.0, 0.0), (0.0, 6.0, 5.0))

    def __init__(self, payoff: tuple[tuple[float, ...], ...], num_envs: int, rounds: int) -> None:
        self.num_envs, self._rounds = num_envs, rounds
        self._payoff = np.array(payoff, np.float32)
        self.spec = EnvSpec(
            "matrix",
            2,
            (ArraySpec("one", "float32", (1,)),),
            Discrete(len(payoff)),
            ("return",),
            rounds,
        )
        self._age = np.zeros(num_envs, np.int64)
        self._return = np.zeros(num_envs, np.float32)

    def step(
        self, action: Array, restart: NDArray[np.bool_], seeds: NDArray[np.uint64]
    ) -> TimeStep:
        gain = np.where(restart, 0, self._payoff[action[:, 0], action[:, 1]]).astype(np.float32)
        self._age = np.where(restart, 0, self._age + 1)
        self._return = np.where(restart, 0, self._return + gain).astype(np.float32)
        last = self._age == self._rounds
        step_type = np.where(restart, FIRST, np.where(last, LAST, MID)).astype(np.uint8)
        return TimeStep(
            step_type=step_type,
            reward=np.repeat(gain[:, None] / 2, 2, 1),
            discount=np.where(last, 0, 1).astype(np.float32),
            observation={"one": np.ones((self.num_envs, 2, 1), np.float32)},
            metrics={"return": self._return.copy()},
        )


def row(spec: EnvSpec, n: int, step_type: int = MID, value: float = 0.0) -> TimeStep:
    """One row of every environment, all numbers equal to `value`, but for rewards on FIRST."""
    a = spec.num_agents
    return TimeStep(
        step_type=np.full(n, step_type, np.uint8),
        reward=np.full((n, a), 0 if step_type == FIRST else value, np.float32),
        discount=np.ones(n, np.float32),
        observation={
            o.name: np.full(
                ((n, a) if o.per_agent else (n,)) + o.shape, 1 if o.name == ACTION_MASK else value
            ).astype(o.dtype)
            for o in spec.observations
        },
        metrics={m: np.full(n, value, np.float32) for m in spec.metrics},
    )


def no_action(spec: EnvSpec, n: int) -> Array:
    dtype, shape = action_layout(spec.action)
    return np.zeros((n, spec.num_agents, *shape), dtype)


def rows_of(batch: ReplayBatch) -> dict[str, Tensor]:
    """Return the rows of a batch as `OffPolicyAlgorithm.update` gives them to `_learn`."""
    rows = batch.arrays | {NEXT + name: x for name, x in batch.next_arrays.items()}
    return rows | {"reward": batch.reward, "discount": batch.discount, "weight": batch.weight}


def random_transitions(spec: EnvSpec, rows: int, seed: int = 0) -> ReplayBatch:
    """Rows of random numbers, as a replay gives them; some of the episodes have terminated."""
    random = np.random.default_rng(seed)
    a = spec.num_agents
    arrays: dict[str, Array] = {}
    following: dict[str, Array] = {}
    for o in spec.observations:
        shape = (rows, a, *o.shape) if o.per_agent else (rows, *o.shape)
        for where in (arrays, following):
            if o.name in (ACTION_MASK, AGENT_MASK):
                x = (random.random(shape) < 0.6).astype(np.uint8)
                x[..., 0] = 1  # one action is legal, one agent alive
            else:
                x = random.normal(size=shape).astype(o.dtype)
            where[OBSERVATION + o.name] = x
    if isinstance(spec.action, Discrete):
        mask = arrays.get(OBSERVATION + ACTION_MASK, np.ones(spec.action.num_actions))
        scores = random.random((rows, a, spec.action.num_actions)) * mask
        arrays["action"] = scores.argmax(-1).astype(np.int32)
    else:
        low, high = spec.action.low, spec.action.high
        shape = (rows, a, spec.action.size)
        arrays["action"] = random.uniform(low, high, shape).astype(np.float32)
    return ReplayBatch(
        {k: torch.from_numpy(x) for k, x in arrays.items()},
        {k: torch.from_numpy(x) for k, x in following.items()},
        torch.from_numpy(random.normal(size=(rows, a)).astype(np.float32)),
        torch.from_numpy(np.where(random.random((rows, 1)) < 0.3, 0, 0.9).astype(np.float32)),
        torch.from_numpy(random.uniform(0.2, 1, rows).astype(np.float32)),
        torch.arange(rows),
        torch.ones(rows, dtype=torch.long),
    )


def learn(algorithm: Algorithm[Any], batch: Any) -> dict[str, Tensor]:
    """Make an update as the learner does."""
    return algorithm.update(algorithm.transforms.batch(batch))


def step_plainly(
    optimizer: torch.optim.Optimizer, loss: Tensor, values: nn.Module, target: nn.Module
) -> None:
    """Make a step down a loss, after which the target network follows by 0.01 of the way."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for t, p in zip(target.parameters(), values.parameters(), strict=True):
            t += 0.01 * (p - t)


def play_and_learn(
    algorithm: Algorithm[Any], environment: VectorEnvironment, env_steps: int
) -> Policy:
    """Act and learn in turns, as the sync pipeline does, without processes; returns the policy."""
    storage = algorithm.make_storage(environment.spec, None)
    policy, generator = algorithm.snapshot(), torch.Generator().manual_seed(0)
    n, taken, sequence = environment.num_envs, 0, 0
    seeds = np.arange(n, dtype=np.uint64)
    timestep = environment.reset(seeds)
    unroll = storage.begin(n, 0, sequence)
    while taken < env_steps:
        rows = {
            "step_type": timestep.step_type,
            "reward": timestep.reward,
            "discount": timestep.discount,
            **{OBSERVATION + name: x for name, x in timestep.observation.items()},
        }
        while True:
            for name, x in rows.items():
                unroll.arrays[name][unroll.cursor] = torch.from_numpy(x)
            unroll.cursor += 1
            if not unroll.full:
                break
            storage.add(unroll)
            while storage.ready:
                batch = storage.sample(0, 0.0)
                seen = algorithm.transforms.batch(batch)
                algorithm.update(seen)
                algorithm.refresh(policy)
                storage.done(seen)
            sequence += 1
            unroll = storage.begin(n, 0, sequence)
        observation = {k: torch.from_numpy(v) for k, v in timestep.observation.items()}
        acted = policy.act(observation, generator)
        for name, value in acted.items():
            unroll.arrays[name][unroll.cursor - 1] = value
        taken += n
        restart = timestep.step_type == LAST
        seeds = seeds + np.uint64(n) * restart.astype(np.uint64)
        timestep = environment.step(acted["action"].numpy(), restart, seeds)
    return policy
