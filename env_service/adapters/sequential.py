"""Environments of other libraries: one object per copy, stepped one after another.

What the plug-ins `pettingzoo` and `gymnasium` have in common: they find the factory, keep the
buffers, and turn what goes wrong into a sentence that names environment, agent, seed and step.
"""

import inspect
import os
import pkgutil
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from env_service.environment import VectorEnvironment
from env_service.watchdog.faults import CopiesFailed, Fault, Reason, close_quietly
from shared.config import Section
from shared.errors import ConfigError, EnvironmentFault
from shared.spec import ACTION_MASK, AGENT_MASK, STATE, ArraySpec, Discrete, EnvSpec
from shared.timestep import Array, StepType, TimeStep, surely_finite

if TYPE_CHECKING:
    from env_service.adapters.spaces import ActionLayout, ObservationLayout

Factory = Callable[..., Any]

# What became of a copy in a step, and what that is in a row.
FIRST, MID, TERMINATED, TRUNCATED, FAILED = range(5)
_STEP_TYPE = np.array(
    [StepType.FIRST, StepType.MID, StepType.LAST, StepType.LAST, StepType.VOID], np.uint8
)
_DISCOUNT = np.array([1, 1, 0, 1, 1], np.float32)

_OWN_METRICS = ("return", "length")


class AdapterConfig(Section):
    """Options of every environment that comes from another library."""

    factory: str = Field(description="package.module:factory, what makes one environment")
    arguments: dict[str, Any] = Field(default={}, description="keyword arguments of the factory")
    max_episode_steps: int = Field(
        0, ge=0, description="truncate episodes after so many steps; 0: as the environment says"
    )
    renew: bool = Field(
        False,
        description="make a new environment for every episode: for those that remember earlier "
        "episodes, as `murmur check-env` finds out",
    )
    metrics: tuple[str, ...] = Field(
        (), description="numbers among the infos of an episode's last step to report"
    )
    images: Literal["uint8", "all", "none"] = Field(
        "uint8",
        description="which Boxes become [C, H, W] arrays: those of bytes, all with three "
        "dimensions, none; the rest is flattened",
    )
    channels_last: bool | Literal["auto"] = Field(
        "auto", description="images come as H×W×C; auto: the smaller end is C"
    )

    @field_validator("factory")
    @classmethod
    def _is_a_path(cls, value: str) -> str:
        module, _, name = value.partition(":")
        if not module or not name:
            raise ValueError(
                f"'{value}': write it as package.module:factory, "
                "for example mpe2.simple_spread_v3:parallel_env"
            )
        return value

    @field_validator("metrics")
    @classmethod
    def _are_new(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if name in _OWN_METRICS:
                raise ValueError(f"'{name}' is always reported; leave it out")
        return value


def find_factory(path: str) -> Factory:
    """What "package.module:factory" names.

    Raises:
        ConfigError: if it cannot be imported or called, naming the fix.
    """
    # pygame greets on standard output when it is imported.
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    module_name, _, name = path.partition(":")
    if module_name.endswith(".py") and os.path.isfile(module_name):
        dotted = os.path.normpath(module_name).removesuffix(".py").replace(os.sep, ".")
        raise ConfigError(f"'{module_name}' is a file; write {dotted}:{name}")
    try:
        found: Any = import_module(module_name)
    except ImportError as error:
        raise ConfigError(_import_advice(module_name, error)) from None
    except Exception as error:
        raise ConfigError(f"importing '{module_name}' raised {_words(error)}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            close = get_close_matches(part, dir(found), 1)
            hint = f"; did you mean '{close[0]}'?" if close else ""
            raise ConfigError(f"'{module_name}' has no '{part}'{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(
            f"'{path}' is a {type(found).__name__}; name a function or class that makes an "
            "environment"
        )
    factory: Factory = found
    return factory


def create(config: AdapterConfig) -> Any:  # noqa: ANN401 - whatever the factory makes
    """One environment.

    Raises:
        ConfigError: if it cannot be made.
    """
    factory = find_factory(config.factory)
    try:
        return factory(**config.arguments)
    except Exception as error:
        arguments = ", ".join(f"{key}={value!r}" for key, value in config.arguments.items())
        raise ConfigError(
            f"{config.factory}({arguments}) raised {_words(error)}; its keyword arguments are "
            "environment.arguments"
        ) from error


def first_reset(environment: Any, factory: str, returns: str) -> tuple[Any, Any]:  # noqa: ANN401
    """What reset(seed=0) returns, which is a pair.

    Raises:
        ConfigError: if it raises or returns something else.
    """
    try:
        result = environment.reset(seed=0)
    except Exception as error:
        raise ConfigError(
            f"'{factory}': reset(seed=0), which should return {returns}, raised {_words(error)}"
        ) from error
    if not isinstance(result, tuple) or len(result) != 2:
        raise ConfigError(
            f"'{factory}': reset() must return {returns}; it returned a {type(result).__name__}"
        )
    return result


def read(factory: str, what: str, get: Callable[[], Any], fix: str) -> Any:  # noqa: ANN401
    """Something that an environment must have, as `get` finds it there.

    Raises:
        ConfigError: whatever `get` raises, naming what was read and the fix.
    """
    try:
        return get()
    except Exception as error:
        raise ConfigError(f"'{factory}': reading {what} raised {_words(error)}; {fix}") from error


def _has(environment: Any, name: str) -> bool:  # noqa: ANN401
    """Whether it has an attribute, be it one that cannot be read: `read` will say so."""
    try:
        return hasattr(environment, name)
    except Exception:
        return True


def kind_of(environment: Any) -> str:  # noqa: ANN401 - whatever a factory makes
    """Which plug-in an environment is for.

    Returns:
        "murmur", "pettingzoo", "gymnasium", or, for what murmur cannot step, a phrase that says
        what it is and what to do.
    """
    if isinstance(environment, VectorEnvironment):
        return "murmur"
    classes = {f"{c.__module__}.{c.__qualname__}" for c in type(environment).__mro__}
    kind = type(environment).__name__
    if hasattr(environment, "agent_iter"):
        return (
            f"a {kind}, in which agents take turns (AEC); murmur steps all agents at once: use the "
            "module's parallel_env, or pettingzoo.utils.aec_to_parallel in a factory of your own"
        )
    if "gymnasium.vector.vector_env.VectorEnv" in classes:
        return f"a {kind}, already vectorised; use what makes one environment, gymnasium:make"
    if "gymnasium.core.Env" in classes:
        return "gymnasium"
    if _has(environment, "possible_agents") and _has(environment, "step"):
        return "pettingzoo"
    if "gym.core.Env" in classes:
        return f"a {kind} of the old gym package; use its gymnasium version, or wrap it with shimmy"
    missing = [x for x in ("possible_agents", "reset", "step") if not _has(environment, x)]
    return f"a {kind}, neither a PettingZoo parallel environment nor a Gymnasium environment" + (
        f"; the first has {', '.join(missing)}, this has not" if len(missing) < 3 else ""
    )


def require_kind(environment: Any, kind: str, factory: str) -> None:  # noqa: ANN401
    """Check that a factory made what its plug-in steps.

    Raises:
        ConfigError: saying what it is instead and what to do.
    """
    found = kind_of(environment)
    if found in ("murmur", "pettingzoo", "gymnasium"):
        if found == kind:
            return
        fix = "name: its own plug-in" if found == "murmur" else f"environment.name: {found}"
        found = f"a {type(environment).__name__}; set {fix}"
    raise ConfigError(f"'{factory}' gave {found}")


def recognise(path: str, arguments: Mapping[str, Any]) -> str:
    """Which plug-in "package.module:factory" is for, by calling it.

    Returns:
        "murmur" for factory(num_envs), which gives a VectorEnvironment; else "pettingzoo" or
        "gymnasium".

    Raises:
        ConfigError: if it is none of these, saying what to do.
    """
    factory = find_factory(path)
    if not arguments and _needs_one_argument(factory):
        return "murmur"
    environment = create(AdapterConfig(factory=path, arguments=dict(arguments)))
    kind = kind_of(environment)
    close_quietly(environment)  # `check_environment` says it if that fails
    if kind not in ("murmur", "pettingzoo", "gymnasium"):
        raise ConfigError(f"'{path}' gave {kind}")
    return kind


def fold_seed(seed: int) -> int:
    """A 63-bit episode seed in 32 bits, which is what libraries take; small seeds stay as they are.

    Two of n episodes share a seed with probability n² / 2³³; then they start alike, no more.
    """
    return (seed ^ (seed >> 32)) & 0xFFFFFFFF


class OneByOne(VectorEnvironment):
    """N objects of another library behind the contract.

    A subclass starts and advances one copy, writing into its rows; what can be done for all copies
    at once is done here, after them. All buffers and views are made once. A copy that fails is
    made anew when its next episode starts; the others notice nothing.

    Attributes:
        agents: names of the agents, in the order of their rows.

    Metrics:
        length: steps of the episode.
    """

    def __init__(
        self,
        name: str,
        agents: list[str],
        environments: list[Any],
        observations: "ObservationLayout",
        actions: "ActionLayout",
        config: AdapterConfig,
        *,
        masks_seen: list[bool],
        masks_told: bool,
        agents_can_die: bool = False,
        state: ArraySpec | None = None,
        max_episode_steps: int = 0,
        sharing: Literal["none", "mean", "sum"] = "none",
    ) -> None:
        """Allocate everything.

        Args:
            name: of the environment, for messages and the spec.
            agents: their names.
            environments: one object per copy.
            observations: where observations go.
            actions: what actions become.
            config: options.
            masks_seen: [A] whether an agent observes which of its actions are legal.
            masks_told: whether the infos of the first reset say so.
            agents_can_die: whether to tell which agents are alive.
            state: the global state, if the environment gives one.
            max_episode_steps: as the environment says; 0 if it does not.
            sharing: what becomes of the agents' own rewards.

        Raises:
            ConfigError: if it says which actions are legal and they are not Discrete.
        """
        self._masks_seen, self._masks_told = masks_seen, masks_told
        self._masks_given = masks_told or any(masks_seen)
        if self._masks_given and not actions.maskable:
            raise ConfigError(
                f"'{config.factory}' gives an '{ACTION_MASK}', but its actions are not Discrete; "
                "take the mask away in a factory of your own"
            )
        masked = self._masks_given or len(set(actions.counts)) > 1
        n, a = len(environments), len(agents)
        self.num_envs, self.agents = n, agents
        self._environments, self._config, self._sharing = environments, config, sharing
        limits = [x for x in (config.max_episode_steps, max_episode_steps) if x]
        self._limit = min(limits, default=0)
        specs = list(observations.arrays)
        if state is not None:
            specs.append(state)
        if masked:
            assert isinstance(actions.spec, Discrete)
            specs.append(ArraySpec(ACTION_MASK, "uint8", (actions.spec.num_actions,)))
        if agents_can_die:
            specs.append(ArraySpec(AGENT_MASK, "uint8", ()))
        self.spec = EnvSpec(
            name=name,
            num_agents=a,
            observations=tuple(specs),
            action=actions.spec,
            metrics=("length", *config.metrics),
            max_episode_steps=self._limit,
        )
        self._arrays: dict[str, Array] = {
            o.name: np.zeros((n, *((a,) * o.per_agent), *o.shape), o.dtype) for o in specs
        }
        self._floats = [x for x in self._arrays.values() if x.dtype.kind == "f"]
        self._prepare, self._convert = actions.prepare, actions.convert
        self._parts = [[observations.parts(self._arrays, i, j) for j in range(a)] for i in range(n)]
        # Each agent's rows, to be blanked when it dies.
        self._rows = [
            [[self._arrays[o.name][i, j, ...] for o in observations.arrays] for j in range(a)]
            for i in range(n)
        ]
        self._own = np.zeros((n, a), np.float32)  # rewards before they are shared
        self._own_rows = list(self._own)
        self._reward = self._own if sharing == "none" else np.zeros((n, a), np.float32)

        self._alive = self._arrays.get(AGENT_MASK, np.ones((n, a), np.uint8))
        self._masks: Array | None = self._arrays.get(ACTION_MASK)
        if self._masks is not None:
            self._usual = np.arange(max(actions.counts)) < np.array(actions.counts)[:, None]
            self._noop = np.arange(max(actions.counts)) == 0
            self._masks[...] = self._usual
            self._mask_rows = [
                [self._masks[i, j, :count] for j, count in enumerate(actions.counts)]
                for i in range(n)
            ]

        self._seeds, self._ages, self._outcome = [0] * n, [0] * n, [FIRST] * n
        self._infos: list[Any] = [None] * n
        self._failed: dict[int, Fault] = {}  # in this step
        self._unclosed: list[Fault] = []  # in this step, by what was not to be used any more
        self._broken: set[int] = set()  # copies to make anew
        self._at = np.zeros(1, np.int64)
        self._metrics = {m: np.zeros(n, np.float32) for m in self.spec.metrics}
        self._step_type, self._discount = np.zeros(n, np.uint8), np.ones(n, np.float32)
        self._timestep = TimeStep(
            self._step_type, self._reward, self._discount, self._arrays, self._metrics
        )

    @abstractmethod
    def _begin(self, i: int, environment: Any, seed: int) -> None:  # noqa: ANN401
        """Start an episode in copy i and write what its agents observe."""

    @abstractmethod
    def _advance(self, i: int, environment: Any, actions: Any) -> int:  # noqa: ANN401
        """Take one step in copy i, write its rows and `_infos`; MID, TERMINATED or TRUNCATED."""

    @abstractmethod
    def _info(self, i: int, name: str) -> float | None:
        """A number among the infos of copy i's last step, or None if it is not there."""

    def step(
        self, action: Array, restart: NDArray[np.bool_], seeds: NDArray[np.uint64]
    ) -> TimeStep:
        """Restart or advance copy after copy; see VectorEnvironment.

        Raises:
            CopiesFailed: if some copies raised or returned what they should not, or one that
                another takes the place of raised when it was closed.
        """
        prepared, restarts = self._prepare(action), restart.tolist()
        ages, outcome, limit = self._ages, self._outcome, self._limit or 2**62
        at = self._at
        for i, environment in enumerate(self._environments):
            at[0] = i
            try:
                if restarts[i]:
                    anew = self._config.renew or i in self._broken
                    if anew:
                        self._retire(i, environment)
                    self._seeds[i], ages[i], outcome[i] = int(seeds[i]), 0, FIRST
                    self._own_rows[i].fill(0)
                    self._unmask(i)  # a fault may have left action 0 alone
                    if anew:
                        environment = self._environments[i] = create(self._config)
                        self._broken.discard(i)
                    self._begin(i, environment, fold_seed(self._seeds[i]))
                else:
                    ages[i] += 1
                    result = self._advance(i, environment, prepared[i])
                    outcome[i] = TRUNCATED if result == MID and ages[i] >= limit else result
            except _CopyFault as fault:
                self._fail(i, "contents", str(fault), fault.__cause__)
            except Exception as error:
                words = str(self._fault(i, f"raised {_words(error)}"))
                self._fail(i, "raised", words, error)
        np.take(_STEP_TYPE, outcome, out=self._step_type)
        np.take(_DISCOUNT, outcome, out=self._discount)
        self._metrics["length"][:] = ages
        if self._config.metrics:
            self._report()
        if not surely_finite([self._own, *self._floats]):
            self._check_finite()
        if self._masks is not None:
            self._check_masks()
        if self._sharing != "none":
            total = self._own.sum(axis=1, keepdims=True)
            self._reward[...] = total / len(self.agents) if self._sharing == "mean" else total
        if self._failed or self._unclosed:
            faults = [*self._unclosed, *self._failed.values()]
            self._failed, self._unclosed = {}, []
            raise CopiesFailed(faults, self._timestep)
        return self._timestep

    def _retire(self, i: int, environment: Any) -> None:  # noqa: ANN401
        """Close an object whose place another one takes; no episode is lost if that fails."""
        if i in self._broken:
            close_quietly(environment)
            return
        try:
            environment.close()
        except Exception as error:
            words = str(self._fault(i, f"raised {_words(error)} when it was closed"))
            self._unclosed.append(Fault((), "raised", words, error))

    def _fail(self, i: int, reason: Reason, words: str, error: BaseException | None) -> None:
        """Note that copy i is of no use any more; only its first fault in a step counts."""
        self._failed.setdefault(i, Fault((i,), reason, words, error))
        self._broken.add(i)
        self._outcome[i] = FAILED
        self._own_rows[i].fill(0)
        for agent in range(len(self.agents)):
            self._blank(i, agent)
        if STATE in self._arrays:
            self._arrays[STATE][i] = 0
        self._step_type[i], self._discount[i] = StepType.VOID, 1

    def _unmask(self, i: int, agent: int | slice = slice(None)) -> None:
        """All that its space holds is legal again, unless the agent says itself what is."""
        if self._masks is not None and not self._masks_given:
            self._masks[i, agent] = self._usual[agent]

    def watch(self, at: NDArray[np.int64]) -> None:
        """See VectorEnvironment."""
        self._at = at

    def _unpack(self, i: int, result: Any, returns: str) -> Any:  # noqa: ANN401
        """What step() returned, which must be as many things as `returns` names."""
        count = returns.count(",") + 1
        if not isinstance(result, tuple | list):
            raise self._fault(i, f"returned {shown(result)} from step(), not {returns}")
        if len(result) != count:
            raise self._fault(i, f"returned {len(result)} things from step(), not {returns}")
        return result

    def _observe(self, i: int, agent: int, observation: Any) -> None:  # noqa: ANN401
        """Write what an agent observes."""
        try:
            for path, write, place in self._parts[i][agent]:
                value = observation
                for key in path:
                    value = value[key]
                write(place, value)
        except Exception as error:
            words = _without(observation, [path for path, *_ in self._parts[i][agent]])
            words = words or (
                str(error) if type(error) is ValueError else f"raised {_words(error)}"
            )
            raise self._fault(
                i, f"gave a wrong observation: that of agent '{self.agents[agent]}' {words}"
            ) from error

    def _read_infos(self, i: int, infos: Any) -> Mapping[Any, Any]:  # noqa: ANN401
        """The infos of a reset or a step; None where nobody has to read them."""
        if isinstance(infos, Mapping):
            return infos
        if infos is None and not self._masks_told:
            return {}
        raise self._fault(i, _not_infos(infos))

    def _read_mask(
        self,
        i: int,
        agent: int,
        observation: Any,  # noqa: ANN401
        info: Mapping[str, Any],
    ) -> None:
        """Write which of its own actions an agent may take; all if its infos do not say."""
        if self._masks_seen[agent]:
            if ACTION_MASK not in observation:
                raise self._fault(
                    i,
                    f"gave a wrong observation: that of agent '{self.agents[agent]}' lacks "
                    f"'{ACTION_MASK}'",
                )
            mask = observation[ACTION_MASK]
        else:
            try:
                mask = info.get(ACTION_MASK)
            except AttributeError as error:
                who = f" of agent '{self.agents[agent]}'"
                raise self._fault(i, _not_infos(info, who)) from error
            if mask is not None and not self._masks_told:
                raise self._fault(
                    i,
                    f"gives agent '{self.agents[agent]}' an '{ACTION_MASK}' among its infos, but "
                    "none in its first reset(); give it in both",
                )
        if not self._masks_given:
            return
        assert self._masks is not None
        row = self._mask_rows[i][agent]
        if mask is None:
            row[...] = 1
            return
        mask = np.asarray(mask)
        if mask.shape != row.shape:
            raise self._fault(
                i,
                f"'{ACTION_MASK}' of agent '{self.agents[agent]}' has shape {mask.shape}, "
                f"its actions are {row.shape[0]}",
            )
        row[...] = mask != 0

    def _blank(self, i: int, agent: int) -> None:
        """An agent that is not there sees nothing and may do nothing (action 0)."""
        for row in self._rows[i][agent]:
            row[...] = 0
        if self._masks is not None:
            self._masks[i, agent] = self._noop

    def _report(self) -> None:
        """Read the configured metrics of the copies whose episode has ended."""
        for i in np.flatnonzero(self._step_type == StepType.LAST).tolist():
            infos = self._infos[i]
            if not isinstance(infos, Mapping):
                self._spoiled(i, _not_infos(infos))
                continue
            for name in self._config.metrics:
                try:
                    value = self._info(i, name)
                except Exception as error:  # whatever objects are among the infos
                    plain = isinstance(error, TypeError | ValueError)
                    self._spoiled(
                        i, f"has no number as info '{name}': {error if plain else _words(error)}"
                    )
                    break
                if value is None:
                    self._spoiled(
                        i,
                        f"has no '{name}' among the infos of the episode's last step; give it "
                        "there or take it out of environment.metrics",
                    )
                    break
                self._metrics[name][i] = value

    def _check_masks(self) -> None:
        """Give every agent something legal to do where nothing depends on it any more."""
        assert self._masks is not None
        stuck = ~self._masks.any(axis=-1)
        if not stuck.any():
            return
        for i, j in np.argwhere(stuck).tolist():
            if self._step_type[i] in (StepType.FIRST, StepType.MID):
                self._spoiled(i, f"leaves agent '{self.agents[j]}' no legal action")
            self._masks[i, j] = self._noop

    def _check_finite(self) -> None:
        """Find which agents of which copies have NaN or infinity."""
        arrays = {"as reward": self._own} | {
            f"in observation '{name}'": array
            for name, array in self._arrays.items()
            if array.dtype.kind == "f"
        }
        for label, array in arrays.items():
            agents = 1 if label.endswith(f"'{STATE}'") else len(self.agents)
            bad = ~np.isfinite(array.reshape(self.num_envs, agents, -1)).all(axis=-1)
            for i, j in np.argwhere(bad).tolist():
                who = "" if agents == 1 else f" of agent '{self.agents[j]}'"
                self._spoiled(i, f"returned NaN or infinity {label}{who}")

    def _spoiled(self, i: int, what: str) -> None:
        """Copy i returned something wrong, as was found after the step."""
        self._fail(i, "contents", str(self._fault(i, what)), None)

    def _fault(self, i: int, what: str) -> "_CopyFault":
        """The error to raise when copy i did something wrong."""
        seed = self._seeds[i]
        return _CopyFault(
            f"environment '{self.spec.name}' {what}, in the episode with seed {seed} "
            f"(reset(seed={fold_seed(seed)})) at step {self._ages[i]}"
        )

    def close(self) -> None:
        """Close every copy, even if one of them raises."""
        with ExitStack() as stack:
            for environment in self._environments:
                stack.callback(environment.close)


class _CopyFault(EnvironmentFault):
    """What one copy returned is wrong; raised and caught while that copy is stepped."""


def shown(value: object) -> str:
    """A value that an environment returned, for a message: arrays by their shape."""
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}"
    text = repr(value)
    return text if len(text) < 40 else f"a {type(value).__name__}"


def _without(observation: Any, paths: list[tuple[Any, ...]]) -> str:  # noqa: ANN401
    """Which part of its space an observation is without; empty if it has them all."""
    for path in paths:
        value = observation
        for depth, key in enumerate(path):
            try:
                value = value[key]
            except Exception:
                at = f" at '{'.'.join(map(str, path[:depth]))}'" if depth else ""
                if isinstance(value, Mapping):
                    there = ", ".join(f"'{k}'" for k in value)
                    return f"has no {key!r}{at}, which its space has; it has {there or 'nothing'}"
                return f"is a {type(value).__name__}{at}; its space has a {key!r} there"
    return ""


def _not_infos(value: object, who: str = "") -> str:
    return f"returned a {type(value).__name__} as infos{who}, not a dictionary"


def _needs_one_argument(factory: Factory) -> bool:
    """Whether a factory can be called with one argument but not with none."""
    try:
        signature = inspect.signature(factory)
        signature.bind(1)
    except (TypeError, ValueError):
        return False
    try:
        signature.bind()
    except TypeError:
        return True
    return False


def _import_advice(module_name: str, error: ImportError) -> str:
    """Why a module cannot be imported and what to do."""
    package = module_name.partition(".")[0]
    missing = error.name or ""
    if module_name.startswith("pettingzoo.mpe"):
        return f"cannot import '{module_name}': PettingZoo keeps these in mpe2 (pip install mpe2)"
    if not isinstance(error, ModuleNotFoundError):
        return f"importing '{module_name}' raised {_words(error)}"
    if missing == package:
        return (
            f"cannot import '{module_name}': there is no package '{package}' (pip install "
            f"{package}, or run from the folder that holds it)"
        )
    if f"{module_name}.".startswith(f"{missing}."):
        parent, _, wanted = missing.rpartition(".")
        folders = getattr(import_module(parent), "__path__", None)
        if folders is None:
            return f"cannot import '{module_name}': '{parent}' is no package; write {parent}:NAME"
        known = [m.name for m in pkgutil.iter_modules(folders)]
        close = get_close_matches(wanted, known, 1)
        hint = f"did you mean '{parent}.{close[0]}'?" if close else f"known: {', '.join(known)}"
        return f"cannot import '{module_name}': '{parent}' has no '{wanted}'; {hint}"
    top = missing.partition(".")[0]
    return f"'{module_name}' needs '{top}', which is not installed (pip install {top})"


def _words(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
