"""Minibatches that grow with the environments: their size, learning rates, steps and gradients."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from murmur.learner_service.device.precision import Precision
from murmur.learner_service.learning.base import algorithm_config, build_algorithm, grown
from murmur.learner_service.learning.minibatches import Pass
from murmur.learner_service.learning.on_policy import OnPolicyAlgorithm
from murmur.learner_service.learning.options import OnPolicyCriticConfig
from murmur.learner_service.storage.rollout import RolloutStorage
from murmur.learner_service.tuning.probe import Probe
from murmur.shared.config import PluginConfig
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.spec import EnvSpec
from tests.learner_service.algorithms.test_mappo import batch_for
from tests.learner_service.running import experiment
from tests.learner_service.toys import CPU, map_spec, random_batch, vector_spec

TERRAIN: dict[str, Any] = {"name": "coma", "batch_size": 480, "batch_number": 8}


def settled(
    environments: int, *, agents: int = 4, steps: int = 14, remembers: bool = False, **options: Any
) -> OnPolicyCriticConfig:
    asked = algorithm_config(PluginConfig(**TERRAIN | options))
    assert isinstance(asked, OnPolicyCriticConfig)
    return asked.for_environments(environments, agents, steps, remembers=remembers)


@pytest.mark.parametrize(
    ("environments", "options", "growth"),
    [
        (0, {}, 1),  # without a bound their number need not be known
        (960, {}, 1),
        (64, {"max_batch_size": 16384}, 1),
        (100, {"max_batch_size": 16384}, 1),  # whole factors alone
        (512, {"max_batch_size": 16384}, 7),  # 512 * 14 * 4 rows at once, 3,840 asked for
        (960, {"max_batch_size": 16384}, 14),
        (9600, {"max_batch_size": 16384}, 34),  # the bound
        (512, {"max_batch_size": 1000}, 2),
        (512, {"max_batch_size": 480}, 1),
        (512, {"max_batch_size": 16384, "unroll_steps": 15}, 1),  # takes what it asks for
        (512, {"max_batch_size": 16384, "unrolls_per_update": 64}, 1),
        (512, {"max_batch_size": 16384, "unrolls_per_update": 256}, 3),
    ],
)
def test_minibatches_grow_with_the_rows_up_to_a_bound(
    environments: int, options: dict[str, Any], growth: int
) -> None:
    asked, found = (
        algorithm_config(PluginConfig(**TERRAIN | options)),
        settled(environments, **options),
    )
    assert isinstance(asked, OnPolicyCriticConfig)
    assert found.batch_size == growth * asked.batch_size
    for name in ("actor_lr", "critic_lr"):
        assert getattr(found, name) == pytest.approx(math.sqrt(growth) * getattr(asked, name))
    own = {"batch_size", "actor_lr", "critic_lr", "max_batch_size"}
    assert found.model_dump(exclude=own) == asked.model_dump(exclude=own)
    half = found.for_rank(2)  # of two learners
    assert (half.batch_size, half.actor_lr) == (found.batch_size // 2, found.actor_lr)
    if growth == 1:
        assert (found.actor_lr, found.critic_lr) == (asked.actor_lr, asked.critic_lr)
    # Once settled it stays, however often it is asked for.
    assert found.for_environments(2 * environments, 4, 14, remembers=False) is found


def test_unrolls_of_whole_episodes_bring_more_rows_at_once() -> None:
    asked: dict[str, Any] = {"batch_size": 100, "agents": 1, "steps": 0, "max_batch_size": 10**6}
    assert settled(512, **asked).batch_size == 100 * (512 * 16 // 800)
    assert settled(512, remembers=True, **asked).batch_size == 100 * (512 * 128 // 800)


@pytest.mark.parametrize("remembers", [False, True])
@pytest.mark.parametrize("steps", [0, 14, 25, 500])
@pytest.mark.parametrize("environments", [1, 63, 64, 500, 512, 960, 4096])
def test_an_update_takes_the_unrolls_that_it_took(
    environments: int, steps: int, remembers: bool
) -> None:
    of_spec = vector_spec(4)
    of_spec = EnvSpec("toy", 4, of_spec.observations, of_spec.action, of_spec.metrics, steps)

    def flight(options: OnPolicyCriticConfig) -> tuple[int, int]:
        rows, memory = options.batch_size * options.batch_number, int(remembers)
        storage = RolloutStorage(of_spec, 0, rows, None, CPU, memory_size=memory)
        storage.expect(environments)
        return storage.length, storage.envs_per_update

    more: dict[str, Any] = {"steps": steps, "remembers": remembers}
    assert flight(settled(environments, max_batch_size=16384, **more)) == flight(
        settled(environments, **more)
    )


@pytest.mark.parametrize(
    ("environments", "options", "message"),
    [
        (512, {"batch_size": 0, "max_batch_size": 64}, r"max_batch_size=64: .*batch_size=0 "),
        (512, {"max_batch_size": 100}, r"max_batch_size=100 is less than .*batch_size=480"),
        (0, {"max_batch_size": 960}, r"max_batch_size=960: .*env_server\.num_workers"),
    ],
)
def test_growth_that_cannot_be_is_refused(
    environments: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        settled(environments, **options)


def test_doctor_does_not_ask_for_what_is_refused() -> None:
    asked = algorithm_config(PluginConfig(**TERRAIN, max_batch_size=960))
    for _, changes, *_ in asked.about.cheaper_learning:
        settled(512, **{"max_batch_size": 960, **changes})


def _config(workers: int, **options: Any) -> ExperimentConfig:
    own = {"unroll_steps": 0, "batch_size": 16, "data_passes": 2, "actor_lr": 1e-3, **options}
    server = {"num_workers": workers, "sessions_per_worker": 1}
    return experiment(algorithm=own, env_server=server)


@pytest.mark.parametrize("name", ["coma", "mappo"])
def test_an_update_has_as_many_steps_whatever_the_environments(name: str) -> None:
    def steps(workers: int, bound: int) -> int:
        probe = Probe(_config(workers, name=name, max_batch_size=bound), vector_spec())
        algorithm = probe.algorithm
        assert isinstance(algorithm, OnPolicyAlgorithm)
        count, apply = 0, algorithm._precision.apply

        def counted(*optimizers: torch.optim.Optimizer) -> None:
            nonlocal count
            count += len(optimizers)
            apply(*optimizers)

        algorithm._precision.apply = counted  # type: ignore[method-assign]
        probe.fill()
        probe.update()
        return count

    few = 2 * 2 * 2  # minibatches, passes, networks
    assert [steps(workers, 10_000) for workers in (1, 8, 16)] == [few] * 3
    assert steps(16, 0) > 10 * few
    assert few < steps(16, 100) < steps(16, 0)


def test_learned_rows_are_those_that_were_learned_without_growth() -> None:
    config = _config(8, max_batch_size=10_000)
    probe, plain = Probe(config, vector_spec()), Probe(_config(8), vector_spec())
    assert probe.fill() == plain.fill()
    assert config.algorithm.options["batch_size"] == 16  # the configuration says what was asked
    assert grown(config, vector_spec()).algorithm.options["max_batch_size"] == 0


# Of few units: by rounding alone one may change sides of ReLU's kink, with another number of rows.
_SMALL_CNN = {"name": "cnn", "channels": (4, 8), "kernels": (5, 4), "strides": (2, 1), "hidden": ()}

GRADIENTS: list[tuple[str, EnvSpec, dict[str, Any]]] = [
    ("mappo", vector_spec(), {"entropy_weight": 0.01}),
    ("mappo", vector_spec(), {"entropy_weight": 0.01, "share_parameters": False}),
    ("coma", vector_spec(), {"entropy_weight": 0.01, "clip_ratio": 0.2}),
    ("coma", map_spec(), {"entropy_weight": 0.01, "clip_ratio": 0.2}),
]


@pytest.mark.parametrize(("name", "spec", "options"), GRADIENTS)
def test_a_large_minibatch_is_the_mean_of_its_parts(
    name: str, spec: EnvSpec, options: dict[str, Any]
) -> None:
    still = {"actor_lr": 1e-30, "critic_lr": 1e-30, "max_grad_norm": 0.0, "data_passes": 1}
    vector = spec.observations[0].shape == (4,)
    network = {"name": "mlp", "hidden": (8,), "activation": "tanh"} if vector else _SMALL_CNN
    config = PluginConfig(name=name, batch_size=8, batch_number=1, **still, **options)
    algorithm = build_algorithm(
        config, spec, PluginConfig(**network), Precision("fp32", CPU), CPU, 0
    )
    assert isinstance(algorithm, OnPolicyAlgorithm)
    batch = batch_for(algorithm, spec) if name == "mappo" else random_batch(spec, 5, 6)
    rows = algorithm._rows(batch)
    grads: dict[int, list[list[Tensor]]] = {i: [] for i in range(len(algorithm._learned))}

    def keep(*optimizers: torch.optim.Optimizer) -> None:
        for i, (optimizer, network_) in enumerate(algorithm._learned):
            if optimizer in optimizers:
                grads[i].append(
                    [p.grad.clone() for p in network_.parameters() if p.grad is not None]
                )

    algorithm._precision.apply = keep  # type: ignore[method-assign]

    def learn(number: int) -> tuple[Pass, dict[int, list[list[Tensor]]]]:
        for kept in grads.values():
            kept.clear()
        shuffled = rows.shuffled(number, torch.Generator().manual_seed(1))
        for step in algorithm._each_stage.values():
            step(shuffled)
        return shuffled, {i: list(kept) for i, kept in grads.items()}

    _, whole = learn(1)
    parts, of_parts = learn(5)
    # Parts may differ by a row: their means weigh as many rows as they have.
    counted = (parts.share > 0).sum((1, 2)).float()
    weights = counted / counted.sum()
    assert parts.number == 5
    for i, ((large,), small) in ((i, (whole[i], of_parts[i])) for i in whole):
        assert len(small) == 5, i
        large_grad = torch.cat([g.flatten() for g in large]).double()
        mean = sum(
            w * torch.cat([g.flatten() for g in each]).double()
            for w, each in zip(weights, small, strict=True)
        )
        assert isinstance(mean, Tensor)
        assert float((mean - large_grad).norm()) <= 1e-5 * float(large_grad.norm())
        assert float((mean - large_grad).abs().max()) <= 1e-5 * float(large_grad.abs().max())
