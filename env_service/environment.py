"""The contract of an environment: N independent copies stepped by one call.

An environment plug-in is a module `env_service/envs/<name>.py` (or a package, or an entry point of
group `murmur.environments`) that has

    Config               a frozen pydantic model: every option with its default, unit and meaning
    make(config, num_envs) -> VectorEnvironment
    BASELINES            name -> (environment) -> ScriptedPolicy; by default `random` alone

`package.module:Name` names a class that is a plug-in by itself: see
murmur.shared.config.named_plugin.

`murmur.env_service.checks.check_environment()` reports violations by an implementation.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from types import ModuleType
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from murmur.shared.config import PluginConfig
from murmur.shared.config.episode_options import Value
from murmur.shared.config.named_plugin import find_object, named_plugin
from murmur.shared.config.plugins import load_plugin, plugin_failures
from murmur.shared.config.section import known_names, validate
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.codec import timestep_layout
from murmur.shared.wire.notices import Notices
from murmur.shared.wire.seeding import episode_seeds, uniform
from murmur.shared.wire.spec import (
    ACTION_MASK,
    Composite,
    Continuous,
    Discrete,
    EnvSpec,
    action_bounds,
    action_factors,
    action_layout,
    factor_starts,
)
from murmur.shared.wire.timestep import Array, TimeStep

# Algorithms that take several choices and numbers at once; all others, an algorithm of your own
# too, get every combination as one choice, unless environment.joint_actions says otherwise.
SEVERAL_PARTS = frozenset(("mappo", "ippo", "ppo", "happo"))


class VectorEnvironment(ABC):
    """N copies of one environment.

    Copies are independent: the episode in one follows from its own seed and actions alone, never
    from the others, their number or the time of day. All methods are called from one thread.
    Returned arrays may be views of buffers that the next call overwrites.

    An environment that fails raises; it is then closed and recreated, and all its episodes are
    dropped. If copies are separate objects, it can recreate the failed ones alone: see
    CopiesFailed.

    Attributes:
        spec: observations, actions and metrics of the environment; fixed for life.
        num_envs: number of copies N.
        seeded: false if episodes do not follow from their seeds, as where another library begins
            them; the sync pipeline refuses that.
        episode_options: names of the options that `set_options` takes, for environment.curriculum
            and environment.randomize.
    """

    spec: EnvSpec
    num_envs: int
    seeded: bool = True
    episode_options: Collection[str] = ()

    @abstractmethod
    def step(
        self, action: Array, restart: NDArray[np.bool_], seeds: NDArray[np.uint64]
    ) -> TimeStep:
        """Start new episodes in some copies, advance all others by one action.

        Args:
            action: actions, [N, A] int32, [N, A, U] float32 or those of a Composite; ignored if
                restart is True.
            restart: [N] bool, true for copies that begin a new episode. The caller sets it for
                every copy after a LAST row; it may set it for any other copy too.
            seeds: [N] uint64 below 2**63; the new episode is a pure function of its seed and of
                the actions taken in it. Ignored if restart is False.

        Returns:
            FIRST rows (reward 0, discount 1) if restart is True, else MID or LAST rows.
        """

    def reset(self, seeds: NDArray[np.uint64]) -> TimeStep:
        """Start a new episode in every copy."""
        restart = np.ones(self.num_envs, np.bool_)
        return self.step(zero_actions(self.spec, self.num_envs), restart, seeds)

    def set_options(self, index: int, options: Mapping[str, Value]) -> None:
        """Set the options of the episode that copy `index` begins in the next step.

        Called before every step that restarts the copy, with a value for each option that
        environment.curriculum or environment.randomize names. The new episode is then a pure
        function of its seed, its options and the actions taken in it.
        """
        raise NotImplementedError(f"environment '{self.spec.name}' takes no options of an episode")

    def require_options(self, options: Mapping[str, Value]) -> None:
        """Check that episodes can be given these options, before the first one begins.

        Raises:
            ConfigError: if one is unknown, or the environment does not take it.
        """
        known = self.episode_options
        if unknown := [name for name in options if name not in known]:
            more = known_names(unknown[0], sorted(known))
            raise ConfigError(
                f"environment '{self.spec.name}' takes no option '{unknown[0]}' of an episode, "
                f"which environment.curriculum or environment.randomize names; {more}; an "
                "environment of your own lists them in episode_options and gets them in "
                "set_options()"
            )

    def render_state(self, index: int) -> Mapping[str, Array]:
        """Return the arrays that a picture of copy `index` needs, by name.

        Raises:
            NotImplementedError: if the environment cannot be drawn.
        """
        raise NotImplementedError(f"environment '{self.spec.name}' cannot be rendered")

    def watch(self, at: NDArray[np.int64]) -> None:  # noqa: B027 - nothing to tell of one step
        """Keep the number of the copy being stepped in at[0], if copies are stepped one by one.

        If a step hangs, another process reads it and names the episode, and each copy has the
        whole step timeout for itself. While a copy is recreated, set at[1] to 1, else to 0: that
        may take env_server.start_timeout_s.
        """

    @cached_property
    def notices(self) -> Notices:
        """Return the collector of notices about values that are changed, ignored or guessed."""
        return Notices()

    def close(self) -> None:  # noqa: B027 - nothing to release unless an environment says so
        """Release the environment's resources."""


def zero_actions(spec: EnvSpec, num_envs: int) -> Array:
    """Return actions of zeros, [N, A, ...] as the spec says."""
    dtype, shape = action_layout(spec.action)
    return np.zeros((num_envs, spec.num_agents, *shape), dtype)


class ScriptedPolicy(Protocol):
    """A policy that needs no learner and may read the environment itself.

    A policy that changes the environment has the attribute `advises = False`: imitation refuses it.
    """

    def act(self, timestep: TimeStep) -> Array:
        """Return actions, as the spec says, for the rows just returned by the environment."""
        ...


@runtime_checkable
class SeededPolicy(ScriptedPolicy, Protocol):
    """A scripted policy that draws random numbers."""

    def seed(self, seeds: NDArray[np.uint64]) -> None:
        """Seed the draws for episodes that begin, by their seeds [N] alone."""
        ...


BaselineFactory = Callable[[VectorEnvironment], ScriptedPolicy]


class RandomPolicy:
    """A policy that is uniform over the legal actions.

    Its actions in a copy follow from the copy's seed and the number of actions since.
    """

    def __init__(self, environment: VectorEnvironment, *, legal: bool = True) -> None:
        """Seed copy i with i, until `seed` is called.

        Args:
            environment: copies to act for.
            legal: true to apply the environment's action masks, if it has them.
        """
        self._spec, self._legal = environment.spec, legal
        self.seed(np.arange(environment.num_envs, dtype=np.uint64))

    def seed(self, seeds: NDArray[np.uint64]) -> None:
        """Seed the draws for episodes that begin, by their seeds [N] alone."""
        self._seeds, self._calls = np.array(seeds, np.uint64), 0

    def act(self, timestep: TimeStep) -> Array:
        """Draw actions for the rows, as the spec says."""
        draws = episode_seeds(0, self._seeds, np.full(len(self._seeds), self._calls))
        self._calls += 1
        mask = timestep.observation.get(ACTION_MASK) if self._legal else None
        return random_action(self._spec, draws, mask)


def random_action(spec: EnvSpec, draws: NDArray[np.uint64], mask: Array | None) -> Array:
    """Draw a random legal action for each copy, a pure function of its seed and mask.

    Args:
        spec: spec of the environment.
        draws: [N] seeds, one for each copy's action.
        mask: [N, A, K] legal actions, not 0; None: all are legal.

    Returns:
        [N, A] int32, [N, A, U] float32, or as a Composite travels; numbers without bounds are
        within 1 of the bound that there is, or of 0.
    """
    n, a, action = len(draws), spec.num_agents, spec.action
    factors, count = action_factors(action), num_draws(spec)
    chance = uniform(draws, count).T.reshape(n, a, count // a)
    scores = chance[..., : sum(factors)]
    if mask is not None and factors:
        scores = np.where(mask, scores, -1)
    if isinstance(action, Discrete):
        chosen: NDArray[np.int32] = scores.argmax(axis=-1).astype(np.int32)
        return chosen
    dtype, _ = action_layout(action)
    starts = factor_starts(factors)
    parts = [
        scores[..., start : start + size].argmax(axis=-1)[..., None]
        for start, size in zip(starts, factors, strict=True)
    ]
    if action.size:
        low, high = drawn_bounds(action)
        parts.append(np.clip(low + (high - low) * chance[..., sum(factors) :], low, high))
    return np.concatenate(parts, axis=-1, dtype=dtype)


def num_draws(spec: EnvSpec) -> int:
    """Return how many random numbers `random_action` takes for a copy."""
    numbers = 0 if isinstance(spec.action, Discrete) else spec.action.size
    return spec.num_agents * (sum(action_factors(spec.action)) + numbers)


def drawn_bounds(action: Continuous | Composite) -> NDArray[np.float32]:
    """Return the bounds [2, U] of random numbers: the spec's, or 1 from the other one or from 0."""
    low, high = np.array(action_bounds(action), np.float32)[:, -action.size :]
    lowest = np.where(np.isfinite(low), low, np.where(np.isfinite(high), high - 1, -1))
    highest = np.where(np.isfinite(high), high, np.where(np.isfinite(low), low + 1, 1))
    return np.array((lowest, highest), np.float32)


# Kind and subject of the notice that an episode is longer than spec.max_episode_steps.
LONGER = "longer_episode", "max_episode_steps"


def environment_module(name: str) -> ModuleType:
    """Load the environment plug-in of that name.

    Raises:
        ConfigError: if there is none, or the named class is no VectorEnvironment.
    """
    try:
        target = find_object(name) if ":" in name else None
    except ConfigError as error:
        raise ConfigError(f"environment '{name}': {error}") from error.__cause__
    if isinstance(target, type) and not issubclass(target, VectorEnvironment):
        raise ConfigError(f"environment '{name}': it is no VectorEnvironment; {_how_foreign(name)}")
    return load_plugin("environment", name)


def _how_foreign(factory: str) -> str:
    """Return advice about the configuration of an environment of another library."""
    return (
        "one of PettingZoo or Gymnasium is configured as "
        f"environment: {{name: pettingzoo (or gymnasium), factory: {factory}}}"
    )


def make_environment(plugin: PluginConfig, num_envs: int, algorithm: str = "") -> VectorEnvironment:
    """Make N copies of the environment that the configuration names, with its options.

    Args:
        plugin: name and options of the environment.
        num_envs: number of copies N.
        algorithm: name of the algorithm that will act, on which an environment's
            `joint_actions: null` depends; empty: any that takes several choices.

    Raises:
        ConfigError: for an unknown environment, an unknown option or an ill-typed one, and if the
            class or function named as module:Name raises or makes no valid VectorEnvironment.
    """
    name = plugin.name
    module = environment_module(name)
    config = validate(module.Config, plugin.options, where="environment")
    if getattr(config, "joint_actions", False) is None:
        joint = bool(algorithm) and algorithm not in SEVERAL_PARTS
        config = config.model_copy(update={"joint_actions": joint})
    if ":" not in name:
        environment: VectorEnvironment = module.make(config, num_envs)
        return environment
    with plugin_failures(f"environment '{name}'"):
        environment = module.make(config, num_envs)
    if not isinstance(environment, VectorEnvironment):
        raise ConfigError(
            f"environment '{name}' gave a {type(environment).__name__}, no VectorEnvironment; "
            + _how_foreign(name)
        )
    if not isinstance(getattr(environment, "spec", None), EnvSpec):
        raise ConfigError(f"environment '{name}' has no spec: set self.spec to an EnvSpec")
    if getattr(environment, "num_envs", None) != num_envs:
        raise ConfigError(f"environment '{name}' has no num_envs of {num_envs}: set self.num_envs")
    return environment


def baselines(plugin: PluginConfig) -> Mapping[str, BaselineFactory]:
    """Return the scripted baselines that come with an environment, by name.

    Raises:
        ConfigError: for an unknown environment.
    """
    module = environment_module(plugin.name)
    found: Mapping[str, BaselineFactory] = getattr(module, "BASELINES", {"random": RandomPolicy})
    return found


def find_baseline(plugin: PluginConfig, name: str) -> BaselineFactory:
    """Find a baseline of an environment, or one named as package.module:Name.

    Raises:
        ConfigError: if there is none, naming the known ones.
    """
    if ":" in name:
        module = named_plugin("baseline", name)

        def make(environment: VectorEnvironment) -> ScriptedPolicy:
            with plugin_failures(f"baseline '{name}'"):
                policy: ScriptedPolicy = module.build(module.Config(), environment)
            if not callable(getattr(policy, "act", None)):
                raise ConfigError(f"baseline '{name}' is a {type(policy).__name__} without act()")
            return policy

        return make
    known = baselines(plugin)
    if name not in known:
        names = known_names(name, sorted(known))
        raise ConfigError(f"environment '{plugin.name}' has no baseline '{name}'; {names}")
    return known[name]


def blank_timestep(spec: EnvSpec, num_envs: int) -> TimeStep:
    """Allocate the arrays of a time step: zeros, but for discounts of 1."""
    layout = timestep_layout(spec, num_envs)
    timestep = layout.timestep([np.zeros(shape, dtype) for _, dtype, shape in layout.fields])
    timestep.discount.fill(1)
    return timestep
