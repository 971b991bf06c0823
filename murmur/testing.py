"""Tests of your own plug-ins: each assertion reports which rule of the contract is broken."""

import io
import math
from typing import Any

import torch
from torch import Tensor

from murmur.env_service.checks import assert_environment as _assert_environment
from murmur.env_service.environment import make_environment
from murmur.env_service.sources.source import make_source, read_sample
from murmur.learner_service.export.policy import random_observations
from murmur.learner_service.layers.building import build_network, resolve_network
from murmur.learner_service.layers.inputs import InputShape
from murmur.learner_service.learning.base import Algorithm, Policy
from murmur.learner_service.storage.rollout import RolloutStorage
from murmur.learner_service.tuning.probe import Probe, make_up
from murmur.shared.config import PluginConfig
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.learner import LearnerConfig
from murmur.shared.wire.samples import SPLITS
from murmur.shared.wire.spec import (
    ACTION_MASK,
    EnvSpec,
    action_bounds,
    action_factors,
    action_layout,
    factor_starts,
)
from murmur.shared.wire.timestep import StepType

_ROWS = 6  # acted for at once
_EPISODE = 5  # steps of an episode among synthetic rows
_ENVS, _UPDATES = 8, 3  # an algorithm may improve its policy in every second update alone


def assert_environment(name: str, **options: Any) -> None:  # noqa: ANN401 - what YAML can say
    """Play an environment at random and compare what must be the same.

    Args:
        name: name of the environment, package.module:Name for one of your own.
        **options: options of the environment.

    Raises:
        AssertionError: with a message, if something breaks the contract.
        ConfigError: if it cannot be built.
    """
    plugin = PluginConfig(name=name, **options)
    _assert_environment(lambda num_envs: make_environment(plugin, num_envs))


def assert_source(name: str, **options: Any) -> None:  # noqa: ANN401 - what YAML can say
    """Read the first and the last sample of each split twice.

    Args:
        name: name of the source, package.module:Name for one of your own.
        **options: options of the source.

    Raises:
        AssertionError: if a sample is another when it is read again.
        BrokenSample: if one cannot be used.
        ConfigError: if the source cannot be built.
    """
    sources = [make_source(PluginConfig(name=name, **options)) for _ in range(2)]
    assert sources[0].spec == sources[1].spec, "built twice, it has two specs"
    for split in SPLITS:
        for index in (0, sources[0].spec.size(split) - 1):
            first, again = (read_sample(source, split, index) for source in sources)
            for array, values in first.items():
                assert (values == again[array]).all(), (
                    f"'{array}' of sample {index} of split '{split}' is another when read again"
                )


def assert_network(
    name: str,
    *,
    vector: int = 8,
    image: tuple[int, int, int] | None = None,
    num_agents: int = 3,
    num_outputs: int = 5,
    **options: Any,  # noqa: ANN401 - what YAML can say
) -> None:
    """Feed a network random inputs: shapes, rows that stay apart, gradients, saved weights.

    Args:
        name: name of the network, package.module:Name for one of your own.
        vector: F, numbers that each agent observes.
        image: (C, H, W) of each agent's image; None: no images.
        num_agents: number of agents, A.
        num_outputs: number of outputs for each agent.
        **options: options of the network.

    Raises:
        AssertionError: with a message, if something breaks the contract.
        ConfigError: if it cannot be built, or gives what it must not.
    """
    torch.manual_seed(1)
    configured = resolve_network(PluginConfig(name=name, **options), image)
    shape, slices = InputShape(image, vector), (0,) * num_agents
    network = build_network(configured, shape, num_outputs, slices)
    pixels = None if image is None else torch.rand(4, num_agents, *image)
    numbers = torch.rand(4, num_agents, vector) if vector else None
    out = network(pixels, numbers)
    few = network(*(x if x is None else x[1:2] for x in (pixels, numbers)))
    assert torch.allclose(few, out[1:2], atol=1e-5), "one environment's outputs depend on another's"
    if configured.stacked:
        others = [x if x is None else x.clone() for x in (pixels, numbers)]
        for x in others:
            if x is not None:
                x[:, 1:] += 1
        apart = torch.allclose(network(*others)[:, 0], out[:, 0], atol=1e-5)
        assert apart, "it says STACKED, and an agent's outputs depend on what others observe"
    out.square().sum().backward()
    without = [key for key, weight in network.named_parameters() if weight.grad is None]
    assert not without, f"no gradient reaches {', '.join(without)}"
    torch.manual_seed(2)
    other = build_network(configured, shape, num_outputs, slices)
    other.load_state_dict(_saved(network.state_dict()))
    same = torch.allclose(other(pixels, numbers), out, atol=1e-5)  # but for rounding
    assert same, "with saved weights it gives other outputs: keep tensors as parameters or buffers"


def assert_algorithm(
    name: str,
    *,
    environment: PluginConfig = PluginConfig(name="spread", episode_steps=_EPISODE),  # noqa: B008
    network: PluginConfig = PluginConfig(name="mlp", hidden=(16,)),  # noqa: B008
    **options: Any,  # noqa: ANN401 - what YAML can say
) -> None:
    """Run an algorithm: act, learn from synthetic rows, publish, and continue from its state.

    Args:
        name: name of the algorithm, package.module:Name for one of your own.
        environment: environment with the observations and actions that it gets.
        network: network that it builds.
        **options: options of the algorithm.

    Raises:
        AssertionError: with a message, if something breaks the contract.
        ConfigError: if it cannot be built.
    """
    spec = make_environment(environment, 1, name).spec
    config = ExperimentConfig(
        environment=environment,
        network=network,
        algorithm=PluginConfig(name=name, **options),
        learner=LearnerConfig(device="cpu", precision="fp32"),
    )
    one, other = (Probe(config, spec).algorithm for _ in range(2))
    policy = one.snapshot()
    _assert_acts(policy, one, spec)
    before = _act(policy, one, spec)
    for _ in range(_UPDATES):
        _learn(one, spec)
    assert _equal(_act(policy, one, spec), before), (
        "an update changes a policy that was handed out: make_policy must copy the weights"
    )
    one.refresh(policy)
    fresh = _act(one.snapshot(), one, spec)
    says = fresh.keys() & {"logits", "mean"}
    assert not says or not _equal(fresh, before), "updates change nothing of what the policy does"
    assert _equal(_act(policy, one, spec), fresh), (
        "a published policy acts otherwise than a new one: publish must copy all that act uses"
    )
    other.load_state_dict(_saved(one.state_dict()))
    first, second = ([_learn(x, spec) for _ in range(2)][-1] for x in (one, other))
    assert first == second, (
        "with its saved state another one learns otherwise: keep every network and optimiser "
        f"({first} became {second})"
    )


def _assert_acts(policy: Policy, algorithm: Algorithm[Any], spec: EnvSpec) -> None:
    """Refuse actions that the environment does not have, and extras that are not there."""
    observation = random_observations(spec, _ROWS, 1)
    generator = torch.Generator().manual_seed(1)
    acted = policy.act(observation, generator, _memory(algorithm, spec))
    action = acted["action"]
    factors, (dtype, of_agent) = action_factors(spec.action), action_layout(spec.action)
    wanted, shape = getattr(torch, dtype.name), (_ROWS, spec.num_agents, *of_agent)
    got = action.dtype, tuple(action.shape)
    assert got == (wanted, shape), f"act returns actions {got}, not {(wanted, shape)}"
    if not of_agent:
        action = action.unsqueeze(-1)
    low, high = torch.tensor(action_bounds(spec.action))
    bounds = f"{low.tolist()} to {high.tolist()}" if of_agent else f"{low[0]:g} to {high[0]:g}"
    assert ((action >= low) & (action <= high)).all(), f"act returns actions beyond {bounds}"
    if (legal := observation.get(ACTION_MASK)) is not None:
        taken = action[..., : len(factors)].long() + torch.tensor(factor_starts(factors))
        assert (legal.gather(-1, taken) != 0).all(), "act returns actions that action_mask forbids"
    for extra, extra_shape in algorithm.extras.items():
        assert extra in acted, f"act returns no '{extra}', which is among its extras"
        found = tuple(acted[extra].shape)
        assert found == (_ROWS, spec.num_agents, *extra_shape), f"'{extra}' has the shape {found}"


def _act(policy: Policy, algorithm: Algorithm[Any], spec: EnvSpec) -> dict[str, Tensor]:
    """Return a policy's greedy actions with random observations."""
    return policy.act(random_observations(spec, _ROWS, 1), None, _memory(algorithm, spec))


def _memory(algorithm: Algorithm[Any], spec: EnvSpec) -> Tensor | None:
    size = algorithm.memory_size + algorithm.transforms.memory_size
    return torch.zeros(_ROWS, spec.num_agents, size) if size else None


def _learn(algorithm: Algorithm[Any], spec: EnvSpec) -> dict[str, float]:
    """Make one update from synthetic rows, always the same; return its scalars.

    Raises:
        AssertionError: if one of them is NaN or infinite.
    """
    storage = algorithm.make_storage(spec, None)
    if isinstance(storage, RolloutStorage):
        storage.expect(_ENVS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        while not storage.ready:
            unroll = storage.begin(_ENVS, 0, 0)
            make_up(unroll, spec)
            unroll.arrays["step_type"][_EPISODE :: _EPISODE + 1] = int(StepType.LAST)
            unroll.arrays["step_type"][:: _EPISODE + 1] = int(StepType.FIRST)
            storage.add(unroll)
    batch = storage.sample(0, 0.0)
    assert batch is not None
    seen = algorithm.transforms.batch(batch)
    scalars = {name: float(value) for name, value in algorithm.update(seen).items()}
    storage.done(seen)
    for name, value in scalars.items():
        assert math.isfinite(value), f"update returns {name} = {value}"
    return scalars


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(values, other[name]) for name, values in one.items())


def _saved(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state as it comes back from a checkpoint."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded
