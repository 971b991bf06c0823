"""Every algorithm learns of mirrored worlds what it has only seen in one, if told to."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from murmur.learner_service.device.precision import Precision
from murmur.learner_service.learning.base import Algorithm, build_algorithm
from murmur.learner_service.learning.minibatches import Minibatch, Pass
from murmur.learner_service.preprocess.augment.base import Augment
from murmur.learner_service.preprocess.augment.symmetry import Symmetries
from murmur.learner_service.preprocess.transform import Transforms
from murmur.learner_service.storage.replay import ReplayBatch
from murmur.learner_service.storage.rollout import Batch
from murmur.learner_service.storage.storage import NEXT
from murmur.shared.config import PluginConfig
from murmur.shared.config.experiment import AugmentConfig
from murmur.shared.config.symmetry import ArrayChange, Symmetry
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.spec import ACTION_MASK, ArraySpec, Continuous, Discrete, EnvSpec
from murmur.shared.wire.timestep import StepType

CPU = torch.device("cpu")
Arrays = dict[str, Tensor]
ROWS, LENGTH = 32, 6
VIEW = ArrayChange("view", signs=(-1.0, 1.0))
OBSERVATIONS = (ArraySpec("view", "float32", (2,)), ArraySpec(ACTION_MASK, "uint8", (3,)))
# Action 0 is right where the first number is 1, and action 1 where it is -1. Action 2 is illegal.
DISCRETE = EnvSpec(
    "sides", 2, OBSERVATIONS, Discrete(3), symmetries=(Symmetry("mirror", (VIEW,), (1, 0, 2)),)
)
SMOOTH = EnvSpec(
    "smooth",
    2,
    OBSERVATIONS[:1],
    Continuous(1),
    symmetries=(Symmetry("mirror", (VIEW,), action_signs=(-1.0,)),),
)
_ON = {"batch_size": 128, "batch_number": 1, "unroll_steps": LENGTH, "gamma": 0.0}
ON_POLICY: dict[str, dict[str, Any]] = {
    "mappo": {"name": "mappo", **_ON, "data_passes": 4, "actor_lr": 0.01},
    "mappo, recurrent": {"name": "mappo", **_ON, "data_passes": 4, "actor_lr": 0.01},
    "coma": {
        **{"name": "coma", **_ON, "data_passes": 4, "actor_lr": 0.01, "critic_lr": 0.01},
        **{"clip_ratio": 0.2, "normalize_advantage": True},
    },
}
OFF_POLICY: dict[str, tuple[EnvSpec, dict[str, Any]]] = {
    "qmix": (DISCRETE, {"name": "qmix", "lr": 0.01}),
    "maddpg": (DISCRETE, {"name": "maddpg", "actor_lr": 0.01, "critic_lr": 0.01}),
    "masac": (DISCRETE, {"name": "masac", "actor_lr": 0.01, "critic_lr": 0.01}),
    "masac, continuous": (SMOOTH, {"name": "masac", "actor_lr": 0.01, "critic_lr": 0.01}),
}


def build(
    spec: EnvSpec, options: dict[str, Any], preset: str, recurrent: int = 0
) -> Algorithm[Any]:
    return build_algorithm(
        PluginConfig(**options),
        spec,
        PluginConfig(name="mlp", hidden=(16,), recurrent=recurrent),
        Precision("fp32", CPU),
        CPU,
        1,
        AugmentConfig.model_validate({"preset": preset}),
    )


def view(*shape: int) -> torch.Tensor:
    """Observations on the first side: [..., 2]."""
    return torch.stack((torch.ones(shape), torch.randn(shape)), -1)


def mask(*shape: int) -> torch.Tensor:
    return torch.tensor([1, 1, 0], dtype=torch.uint8).expand(*shape, 3).clone()


def rollout(memory: int) -> Batch:
    shape = (LENGTH + 1, ROWS, 2)
    action = torch.randint(0, 2, shape, dtype=torch.int32)
    reward = torch.zeros(shape)
    reward[1:] = (action[:-1] == 0).float()
    step_type = torch.full(shape[:2], int(StepType.MID), dtype=torch.uint8)
    arrays = {
        "step_type": step_type,
        "reward": reward,
        "discount": torch.ones(shape[:2]),
        "action": action,
        "log_prob": torch.full(shape, 0.5).log(),
        OBSERVATION + "view": view(*shape),
        OBSERVATION + ACTION_MASK: mask(*shape),
    }
    if memory:
        arrays["memory"] = torch.zeros(1, ROWS, 2, memory)
    return Batch(arrays, [0] * ROWS)


def transitions(spec: EnvSpec) -> ReplayBatch:
    shape = (128, 2)
    if isinstance(spec.action, Discrete):
        action = torch.randint(0, 2, shape, dtype=torch.int32)
        reward = (action == 0).float()
        extra = {OBSERVATION + ACTION_MASK: mask(*shape)}
    else:
        action = torch.rand(*shape, 1) * 2 - 1
        reward = -(action - 0.8).square().squeeze(-1)
        extra = {}
    index = torch.arange(128)
    return ReplayBatch(
        arrays={OBSERVATION + "view": view(*shape), **extra, "action": action},
        next_arrays={OBSERVATION + "view": view(*shape), **extra},
        reward=reward,
        discount=torch.zeros(128, 1),
        weight=torch.ones(128),
        index=index,
        age=index,
    )


def chosen(algorithm: Algorithm[Any], side: float) -> torch.Tensor:
    """[64, 2, ...] greedy actions on a side."""
    seen = {"view": view(64, 2) * torch.tensor([side, 1.0]), ACTION_MASK: mask(64, 2)}
    policy = algorithm.make_policy()
    memory = torch.zeros(64, 2, policy.memory_size) if policy.memory_size else None
    return policy.act(seen, None, memory)["action"].float()


def right_on_the_other_side(
    spec: EnvSpec, options: dict[str, Any], preset: str, recurrent: int = 0, updates: int = 24
) -> float:
    """Share of actions that are right where nothing was ever seen."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        algorithm = build(spec, options, preset, recurrent)
        for _ in range(updates):
            on_policy = options["name"] in ("mappo", "coma")
            algorithm.update(rollout(algorithm.memory_size) if on_policy else transitions(spec))
        seen, unseen = chosen(algorithm, 1.0), chosen(algorithm, -1.0)
    if isinstance(spec.action, Discrete):
        assert (seen == 0).float().mean() > 0.95
        return float((unseen == 1).float().mean())
    assert (seen - 0.8).abs().mean() < 0.4
    return float((unseen < 0).float().mean())


def some(names: Iterable[str], quick: str) -> list[Any]:
    """Parameters of which all but one take longer than each change is worth."""
    return [name if name == quick else pytest.param(name, marks=pytest.mark.long) for name in names]


def other_side(name: str, preset: str) -> float:
    """See right_on_the_other_side."""
    if name in ON_POLICY:
        recurrent = 4 if "recurrent" in name else 0
        return right_on_the_other_side(DISCRETE, ON_POLICY[name], preset, recurrent)
    return right_on_the_other_side(*OFF_POLICY[name], preset, updates=80)


@pytest.mark.parametrize("name", [*some(ON_POLICY, "mappo"), *some(OFF_POLICY, "qmix")])
def test_algorithms_learn_the_side_they_never_saw(name: str) -> None:
    assert other_side(name, "symmetry") > 0.95


@pytest.mark.long
@pytest.mark.parametrize("name", [*ON_POLICY, *OFF_POLICY])
def test_without_symmetries_they_do_not(name: str) -> None:
    assert other_side(name, "none") < 0.5


class Fixed(Augment):
    """Changes every row by the same symmetry; draws nothing."""

    def __init__(self, spec: EnvSpec, number: int) -> None:
        self._all = Symmetries(spec, CPU, [OBSERVATION, NEXT + OBSERVATION])
        self._number = number

    def __call__(self, batch: Mapping[str, Tensor], generator: torch.Generator) -> Batch:
        rows = len(next(iter(batch.values())))
        return self._all.apply(batch, torch.full((rows,), self._number))


def test_every_algorithm_learns_from_changed_rows() -> None:
    """Quickly, where the tests above take long: mirrored rows lead to other weights."""
    for spec, options, recurrent in (
        *((DISCRETE, options, 4 if "rec" in name else 0) for name, options in ON_POLICY.items()),
        *((spec, options, 0) for spec, options in OFF_POLICY.values()),
    ):
        weights = []
        for number in range(2):
            algorithm = build(spec, options, "none", recurrent)
            algorithm.transforms = Transforms((), Fixed(spec, number))
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(3)
                on_policy = options["name"] in ("mappo", "coma")
                batch = rollout(algorithm.memory_size) if on_policy else transitions(spec)
            algorithm.update(batch)
            nets = [part for part in algorithm.parts.values() if isinstance(part, torch.nn.Module)]
            weights.append([w.detach().clone() for net in nets for w in net.parameters()])
        assert not all(map(torch.equal, *weights)), options["name"]


def test_first_pass_sees_rows_as_they_are_and_later_ones_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    algorithm = build(DISCRETE, {**ON_POLICY["mappo"], "data_passes": 3}, "symmetry")
    seen: list[float] = []
    minibatch = Pass.at

    def kept(of: Pass, i: int) -> Minibatch:
        rows = minibatch(of, i)
        vector = rows.actor.vector
        assert vector is not None
        seen.append(float((vector[..., 0] == 1).float().mean()))
        mirrored = (vector[..., 0] == -1).unsqueeze(-1)
        assert not (mirrored & (rows.columns["action"].unsqueeze(-1) == 2)).any()
        return rows

    monkeypatch.setattr(Pass, "at", kept)
    algorithm.update(rollout(0))
    assert seen[0] == 1
    assert all(0.2 < share < 0.8 for share in seen[1:])
