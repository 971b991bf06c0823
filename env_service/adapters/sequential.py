"""Environments of other libraries: one object per copy, stepped one after another.

The common part of the plug-ins `pettingzoo` and `gymnasium`: buffers, and messages about faults
that name environment, agent, seed and step.
"""

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from murmur.env_service.adapters.casts import (
    WHOLE,
    CastWatch,
    require_numbers,
    say_number,
    subject_of,
    write_box,
)
from murmur.env_service.adapters.factory import AdapterConfig, create, require_reset_options
from murmur.env_service.adapters.frames import FRAME, frame_of
from murmur.env_service.adapters.seeds import fold_seed
from murmur.env_service.adapters.teams import TeamReturns, teams_of
from murmur.env_service.environment import LONGER, VectorEnvironment, blank_timestep
from murmur.env_service.watchdog.faults import (
    CopiesFailed,
    Fault,
    Reason,
    close_quietly,
    is_environments_fault,
)
from murmur.shared.config.episode_options import Value
from murmur.shared.process.errors import ConfigError, EnvironmentFault
from murmur.shared.process.process import logger
from murmur.shared.process.traces import error_message
from murmur.shared.wire.codec import RowCheck
from murmur.shared.wire.notices import Notices
from murmur.shared.wire.spec import (
    ACTION_MASK,
    AGENT_MASK,
    MAX_EPISODE_STEPS,
    STATE,
    TURN_MASK,
    ArraySpec,
    EnvSpec,
    action_bounds,
)
from murmur.shared.wire.timestep import Array, StepType, TimeStep, surely_finite

if TYPE_CHECKING:
    from murmur.env_service.adapters.actions import ActionLayout
    from murmur.env_service.adapters.observations import ObservationLayout

# The outcome of a copy's step, and its values in a row.
FIRST, MID, TERMINATED, TRUNCATED, FAILED = range(5)
_STEP_TYPE = np.array(
    [StepType.FIRST, StepType.MID, StepType.LAST, StepType.LAST, StepType.ABORTED], np.uint8
)
_DISCOUNT = np.array([1, 1, 0, 1, 1], np.float32)
_FAR = 2**62  # steps
GUESSED = "axes_guessed"  # kind of a notice


def hint_of(value: object) -> int:
    """Return a hint of the longest episode, steps, within the spec's limit; 0 if invalid."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        return 0
    return int(value) if 0 < value <= MAX_EPISODE_STEPS else 0


@dataclass(frozen=True)
class Interface:
    """The interface of each copy, read from the first one.

    Attributes:
        name: name of the environment, for messages and the spec.
        agents: names of the agents.
        observations: layout of the observations.
        actions: layout of the actions.
        masks_told: true if the infos of the first reset hold action masks.
        agents_can_die: true if the learner gets a mask of the agents that are alive.
        takes_turns: true if one agent acts at a time, and the learner gets a mask of it.
        state: spec of the global state, if the environment gives one.
        max_episode_steps: the environment's hint, steps, which episodes may exceed; 0 if none.
        hint: name of that hint.
        doubts: (kind, subject, sentence) of each guess and ignored value.
        sharing: combination of the agents' own rewards.
    """

    name: str
    agents: list[str]
    observations: "ObservationLayout"
    actions: "ActionLayout"
    masks_told: bool
    agents_can_die: bool = False
    takes_turns: bool = False
    state: ArraySpec | None = None
    max_episode_steps: int = 0
    hint: str = ""
    doubts: tuple[tuple[str, str, str], ...] = ()
    sharing: Literal["none", "mean", "sum"] = "none"

    def arrays(self) -> tuple[ArraySpec, ...]:
        """Return the specs of all observations.

        If agents have different numbers of actions, or take turns, they include an action mask.
        """
        specs = list(self.observations.arrays)
        if self.state is not None:
            specs.append(self.state)
        waits = self.takes_turns and self.actions.maskable  # who waits has its first action alone
        if self.masked or waits or self.actions.masked:
            specs.append(ArraySpec(ACTION_MASK, "uint8", self.actions.first.shape))
        if self.agents_can_die:
            specs.append(ArraySpec(AGENT_MASK, "uint8", ()))
        if self.takes_turns:
            specs.append(ArraySpec(TURN_MASK, "uint8", ()))
        return tuple(specs)

    def spec(self, metrics: tuple[str, ...], max_episode_steps: int) -> EnvSpec:
        """Return the environment's spec.

        Args:
            metrics: names of its metrics.
            max_episode_steps: configured limit of an episode, steps; 0 if none.
        """
        limits = (x for x in (max_episode_steps, self.max_episode_steps) if x)
        return EnvSpec(
            name=self.name,
            num_agents=len(self.agents),
            observations=self.arrays(),
            action=self.actions.spec,
            metrics=metrics,
            max_episode_steps=min(limits, default=0),
            agents=tuple(self.agents),
        )

    @property
    def masked(self) -> bool:
        """Return whether the environment gives action masks."""
        return self.masks_told or any(self.observations.masks_seen)

    def check(self, config: AdapterConfig, notices: Notices) -> None:
        """Report images that are sent smaller, and guesses.

        Raises:
            ConfigError: if the environment gives action masks, but has no choices.
        """
        if self.masked and not self.actions.maskable:
            raise ConfigError(
                f"'{config.factory}' gives an '{ACTION_MASK}', but its actions are numbers, of "
                "which none can be illegal; take the mask away in a factory of your own"
            )
        if reduced := self.observations.reduced:
            text = f"{'; '.join(reduced)} (environment.resize: {config.resize})"
            if config.resize == "auto":
                notices.say("image_reduced", "image", text)
            else:
                logger.info("%s", text)
        for kind, subject, text in self.doubts:
            notices.say(kind, subject, text)
        for subject, text in self.observations.doubts.items():
            notices.say(GUESSED, subject, f"observation '{subject}': {text}")
        for agent, text in self.actions.doubts.items():
            notices.say("action_range", "actions", f"agent '{agent}' {text}")


class SequentialVectorEnv(VectorEnvironment):
    """N objects of another library behind the contract.

    A subclass starts and advances one copy, writing into its rows; this class does the work for
    all copies at once, after them. All buffers and views are made once. A copy that fails is
    recreated when its next episode starts; the others are not affected.

    Attributes:
        agents: names of the agents, in the order of their rows.

    Metrics:
        length: steps of the episode.
        return/<team>: rewards of a team's agents, summed over the episode, if there are teams.
    """

    def __init__(
        self, interface: Interface, environments: list[Any], config: AdapterConfig
    ) -> None:
        """Allocate everything.

        Args:
            interface: interface of each copy.
            environments: one object per copy.
            config: options of the environment.

        Raises:
            ConfigError: if the environment gives action masks, but has no choices.
        """
        self._masks_seen, self._masks_told = interface.observations.masks_seen, interface.masks_told
        self._masks_given = interface.masked
        interface.check(config, self.notices)
        n, a = len(environments), len(interface.agents)
        self.num_envs, self.agents = n, interface.agents
        self._environments = environments
        self._config = config
        self._sharing = interface.sharing
        self._limit, self._hint = config.max_episode_steps, interface.hint
        self._watch = CastWatch(self.notices)
        wanted = "agents" if interface.takes_turns and config.teams == "auto" else config.teams
        self._teams = TeamReturns(teams_of(interface.agents, wanted, config.factory), n, a)
        metrics = (*self._teams.names, "length", *config.metrics)
        self.spec = interface.spec(metrics, config.max_episode_steps)
        # Length at which an episode without an end is looked at.
        self._bound = self.spec.max_episode_steps or _FAR
        self._timestep = blank_timestep(self.spec, n)
        self._arrays, self._metrics = self._timestep.observation, self._timestep.metrics
        self._step_type, self._discount = self._timestep.step_type, self._timestep.discount
        self._reward = self._timestep.reward
        self._range = np.array(action_bounds(self.spec.action), np.float32)
        self._prepare, self._convert = interface.actions.prepare, interface.actions.convert
        self._make_views(interface)

        self._seeds = [0] * n
        self._more: list[dict[str, Any]] = [{}] * n  # further arguments of each copy's reset
        self._ages = [0] * n
        self._outcome = [FIRST] * n
        self._infos: list[Any] = [None] * n
        self._masking: set[int] = set()  # agents whose infos held a mask before
        self._failed: dict[int, Fault] = {}  # in this step
        self._unclosed: list[Fault] = []  # in this step, by what was not to be used any more
        self._broken: set[int] = set()  # copies to recreate
        self._at = np.zeros(2, np.int64)

    def _make_views(self, interface: Interface) -> None:
        """Make the views of the arrays by copy and agent, and the arrays of rewards and masks."""
        n, a = self.num_envs, len(self.agents)
        seen, actions = interface.observations, interface.actions
        self._keys = seen.keys
        self._parts = [[seen.parts(self._arrays, i, j) for j in range(a)] for i in range(n)]
        # Each agent's rows, to be blanked when it dies.
        self._rows = [
            [[self._arrays[o.name][i, j, ...] for o in seen.arrays] for j in range(a)]
            for i in range(n)
        ]
        # Rewards before they are shared.
        self._own = self._reward if self._sharing == "none" else np.zeros((n, a), np.float32)
        self._own_rows = list(self._own)
        self._alive = self._arrays.get(AGENT_MASK, np.ones((n, a), np.uint8))
        self._turns = self._arrays.get(TURN_MASK, np.zeros((n, a), np.uint8))
        self._masks: Array | None = self._arrays.get(ACTION_MASK)
        if self._masks is not None:
            self._usual, self._noop = actions.legal, actions.first
            self._masks[...] = self._usual
            self._starts = np.flatnonzero(actions.first)  # first entry of each choice
            self._mask_places = actions.masks
            self._mask_rows = [
                [place.view(self._masks[i, j]) for j, place in enumerate(actions.masks)]
                for i in range(n)
            ]

    @abstractmethod
    def _begin(self, i: int, environment: Any, seed: int) -> None:
        """Start an episode in copy i and write its agents' observations."""

    @abstractmethod
    def _advance(self, i: int, environment: Any, actions: Any) -> int:
        """Step copy i, write its rows and `_infos`; return MID, TERMINATED or TRUNCATED."""

    @abstractmethod
    def _info(self, i: int, name: str) -> float | None:
        """Return a number from the infos of copy i's last step, or None if it is missing."""

    def step(
        self, action: Array, restart: NDArray[np.bool_], seeds: NDArray[np.uint64]
    ) -> TimeStep:
        """Restart or advance copy after copy; see VectorEnvironment.

        Raises:
            CopiesFailed: if some copies raised or returned invalid values, or a replaced one
                raised when it was closed.
        """
        if self._watch.on and action.dtype.kind == "f":
            look_at_actions(self.notices, self._range, action, restart)
        prepared, restarts = self._prepare(action), restart.tolist()
        ages, outcome, at = self._ages, self._outcome, self._at
        for i, environment in enumerate(self._environments):
            at[0], at[1] = i, 0
            try:
                if restarts[i]:
                    self._restart(i, environment, int(seeds[i]))
                else:
                    ages[i] += 1
                    if i == 0:
                        self._watch.step()
                    result = self._advance(i, environment, prepared[i])
                    if result == MID and ages[i] >= self._bound:
                        result = self._at_bound(ages[i])
                        if result == TRUNCATED:
                            self._cut(i, environment)
                    outcome[i] = result
            except _CopyFault as fault:
                self._fail(i, "contents", str(fault), fault.__cause__)
            except BaseException as error:
                if not is_environments_fault(error):
                    raise
                message = str(self._fault(i, f"raised {error_message(error)}"))
                self._fail(i, "raised", message, error)
        # From here on all copies at once, [N]: step types, metrics, checks, shared rewards.
        np.take(_STEP_TYPE, outcome, out=self._step_type)
        np.take(_DISCOUNT, outcome, out=self._discount)
        self._metrics["length"][:] = ages
        if self._teams.names:
            self._teams.add(self._own, self._step_type == StepType.FIRST, self._metrics)
        if self._config.metrics:
            self._report()
        if self._masks is not None:
            self._check_masks()
        if not surely_finite([self._own, *self._arrays.values()]):
            self._check_finite(restart)
        if self._sharing != "none":
            total = self._own.sum(axis=1, keepdims=True)
            self._reward[...] = total / len(self.agents) if self._sharing == "mean" else total
        if self._failed or self._unclosed:
            faults = [*self._unclosed, *self._failed.values()]
            self._failed, self._unclosed = {}, []
            raise CopiesFailed(faults, self._timestep)
        return self._timestep

    def _cut(self, i: int, environment: Any) -> None:
        """Complete the rows of copy i where environment.max_episode_steps ends its episode."""

    def _at_bound(self, age: int) -> int:
        """Truncate at environment.max_episode_steps; the environment's own hint ends nothing."""
        if self._limit and age >= self._limit:
            return TRUNCATED
        self.notices.say(
            *LONGER,
            f"an episode continues after {age} steps, the number that {self._hint} says: murmur "
            "plans unrolls with it and ends no episode there; environment.max_episode_steps would",
        )
        self._bound = self._limit or _FAR
        return MID

    def _restart(self, i: int, environment: Any, seed: int) -> None:
        """Begin an episode in copy i, in a new object if its own failed or `renew` is set."""
        recreate = self._config.renew or i in self._broken
        if recreate:
            self._retire(i, environment)
        self._seeds[i], self._ages[i], self._outcome[i] = seed, 0, FIRST
        self._own_rows[i].fill(0)
        self._unmask(i)  # a fault may have left action 0 alone
        if recreate:
            self._at[1] = 1
            environment = self._environments[i] = create(self._config)
            self._at[1] = 0
            self._broken.discard(i)
        if i == 0:
            self._watch.begin()
        self._begin(i, environment, fold_seed(seed))

    @override
    def set_options(self, index: int, options: Mapping[str, Value]) -> None:
        self._more[index] = {"options": dict(options)}

    @override
    def require_options(self, options: Mapping[str, Value]) -> None:
        require_reset_options(self._environments[0], self._config.factory, options)

    def _reset(self, i: int, environment: Any, seed: int) -> Any:
        """Reset copy i, with the options of its next episode if there are some."""
        return environment.reset(seed=seed, **self._more[i])

    def _retire(self, i: int, environment: Any) -> None:
        """Close an object that is replaced; no episode is lost if that fails."""
        if i in self._broken:
            close_quietly(environment)
            return
        try:
            environment.close()
        except (Exception, SystemExit) as error:
            message = str(self._fault(i, f"raised {error_message(error)} when it was closed"))
            self._unclosed.append(Fault((), "raised", message, error))

    def _fail(self, i: int, reason: Reason, message: str, error: BaseException | None) -> None:
        """Mark copy i as failed and blank its row; only its first fault in a step counts."""
        self._failed.setdefault(i, Fault((i,), reason, message, error))
        self._broken.add(i)
        self._outcome[i] = FAILED
        self._own_rows[i].fill(0)
        for agent in range(len(self.agents)):
            self._blank(i, agent)
        if STATE in self._arrays:
            self._arrays[STATE][i] = 0
        self._step_type[i], self._discount[i] = StepType.ABORTED, 1

    def _unmask(self, i: int, agent: int | slice = slice(None)) -> None:
        """Make all actions of the space legal again, unless the environment gives masks."""
        if self._masks is not None and not self._masks_given:
            self._masks[i, agent] = self._usual[agent]

    @override
    def watch(self, at: NDArray[np.int64]) -> None:
        self._at = at

    def _unpack(self, i: int, result: Any, returns: str) -> Any:
        """Check that step() returned the values that `returns` names, and return them."""
        count = returns.count(",") + 1
        if not isinstance(result, tuple | list):
            raise self._fault(i, f"returned {shown(result)} from step(), not {returns}")
        if len(result) != count:
            raise self._fault(i, f"returned {len(result)} things from step(), not {returns}")
        return result

    def _observe(self, i: int, agent: int, observation: Any) -> None:
        """Write an agent's observation into its rows."""
        watched = i == 0 and self._watch.on
        try:
            for path, write, place in self._parts[i][agent]:
                value = observation
                for key in path:
                    value = value[key]
                if watched and write is write_box:
                    require_numbers(value)
                write(place, value)
                if watched and write is write_box:
                    self._watch.look(agent, subject_of(path), value, place)
            if watched:
                self._look_for_more(agent, observation)
        except Exception as error:
            message = without(observation, [path for path, *_ in self._parts[i][agent]])
            message = message or (
                str(error) if type(error) is ValueError else f"raised {error_message(error)}"
            )
            raise self._fault(
                i, f"gave a wrong observation: that of agent '{self.agents[agent]}' {message}"
            ) from error

    def _read_infos(self, i: int, infos: Any) -> Mapping[Any, Any]:
        """Return the infos of a reset or a step; None counts as empty if no masks are read."""
        if isinstance(infos, Mapping):
            return infos
        if infos is None and not self._masks_told:
            return {}
        raise self._fault(i, not_infos(infos))

    def _read_mask(
        self, i: int, agent: int, observation: Any, info: Mapping[str, Any], *, over: bool = False
    ) -> None:
        """Write an agent's mask of legal actions; all are legal if its infos have none.

        Args:
            i: number of the copy.
            agent: row of the agent.
            observation: observation of the agent.
            info: info of the agent.
            over: true if no action follows, so that a missing mask gives no notice.
        """
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
                raise self._fault(i, not_infos(info, self.agents[agent])) from error
            if mask is not None and not self._masks_told:
                raise self._fault(
                    i,
                    f"gives agent '{self.agents[agent]}' an '{ACTION_MASK}' among its infos, but "
                    "none in its first reset(); give it in both",
                )
        if not self._masks_given:
            return
        assert self._masks is not None
        row, own = self._mask_rows[i][agent]
        if mask is None:
            row[own] = 1
            missed = not over and agent in self._masking
            if missed and not self.notices.said("mask_missing", ACTION_MASK):
                self.notices.say(
                    "mask_missing",
                    ACTION_MASK,
                    f"infos of agent '{self.agents[agent]}' have no '{ACTION_MASK}' at step "
                    f"{self._ages[i]}, though they had one before: there every action counts as "
                    "legal; give it in every step",
                )
            return
        self._masking.add(agent)
        place = self._mask_places[agent]
        if not isinstance(mask, np.ndarray):
            mask = place.read(mask)
        if mask.shape != (place.size,):
            raise self._fault(
                i,
                f"'{ACTION_MASK}' of agent '{self.agents[agent]}' has shape {mask.shape}, "
                f"its actions are {place.size}",
            )
        if mask.itemsize == 1:  # bool, int8 or uint8: the quickest look at every byte
            wrong = mask.tobytes().strip(b"\0\1") != b"" or mask.dtype.kind not in "biu"
        else:
            wrong = mask.dtype.kind not in "iuf" or bool(((mask != 0) & (mask != 1)).any())
        if wrong:
            held = next((x for x in mask.tolist() if x not in (0, 1)), mask.dtype)
            raise self._fault(
                i,
                f"gives agent '{self.agents[agent]}' an '{ACTION_MASK}' that holds {held}; 1 is "
                "legal, 0 is not",
            )
        row[own] = mask if place.combined is None else place.legal(mask)

    def _look_for_more(self, agent: int, observation: Any) -> None:
        """Give notices of a dictionary's keys that are ignored because its space lacks them."""
        if not isinstance(observation, Mapping):
            return
        known = self._keys[agent]
        for key in observation:
            if key not in known:
                self.notices.say(
                    "observation_ignored",
                    str(key),
                    f"agent '{self.agents[agent]}' is given {key!r}, which its observation space "
                    "does not have: it is ignored",
                )

    def _say_reward(self, agent: int, reward: Any, own: NDArray[np.float32]) -> None:
        """Give a notice that a reward beyond WHOLE changes as float32."""
        fix = "scale rewards in a factory of your own"
        what = f"reward of '{self.agents[agent]}'"
        say_number(self.notices, "rewards", what, reward, float(own[agent]), fix)

    def _blank(self, i: int, agent: int) -> None:
        """Zero the observation of a missing agent, and allow it only action 0."""
        for row in self._rows[i][agent]:
            row[...] = 0
        self._turns[i, agent] = 0
        if self._masks is not None:
            self._masks[i, agent] = self._noop

    def _report(self) -> None:
        """Read the configured metrics of the copies that ended an episode."""
        for i in np.flatnonzero(self._step_type == StepType.LAST).tolist():
            infos = self._infos[i]
            if not isinstance(infos, Mapping):
                self._spoiled(i, not_infos(infos))
                continue
            for name in self._config.metrics:
                try:
                    value = self._info(i, name)
                except Exception as error:  # whatever objects are among the infos
                    plain = isinstance(error, TypeError | ValueError)
                    why = str(error) if plain else error_message(error)
                    self._spoiled(i, f"has no number as info '{name}': {why}")
                    break
                if value is None:
                    self._spoiled(
                        i,
                        f"has no '{name}' among the infos of the episode's last step; give it "
                        "there or take it out of environment.metrics",
                    )
                    break
                self._metrics[name][i] = value
                if not -WHOLE <= value <= WHOLE:
                    what, fix = f"info '{name}'", "scale it in a factory of your own"
                    arrived = float(self._metrics[name][i])
                    say_number(self.notices, what, what, value, arrived, fix)

    def _check_masks(self) -> None:
        """Allow action 0 to agents without a legal action; before LAST that is a fault."""
        assert self._masks is not None
        if len(self._starts) == 1:
            stuck = ~self._masks.any(axis=-1)
        else:
            stuck = (np.maximum.reduceat(self._masks, self._starts, axis=-1) == 0).any(axis=-1)
        if not stuck.any():
            return
        for i, j in np.argwhere(stuck).tolist():
            if self._step_type[i] in (StepType.FIRST, StepType.MID):
                self._spoiled(i, f"leaves agent '{self.agents[j]}' no legal action")
            self._masks[i, j] = self._noop

    def _check_finite(self, restart: NDArray[np.bool_]) -> None:
        """Find the copies whose rows break the contract, after NaN or infinity was seen in one."""
        rows = replace(self._timestep, reward=self._own)  # of each agent, before they are shared
        check = RowCheck(self.spec, self.num_envs, received=False)
        for i, what in check.broken(rows, restart).items():
            self._spoiled(i, f"returned {what}")

    def _spoiled(self, i: int, what: str) -> None:
        """Mark copy i as failed because of its values, after all copies were stepped."""
        self._fail(i, "contents", str(self._fault(i, what)), None)

    def _fault(self, i: int, what: str) -> "_CopyFault":
        """Make the error for a fault of copy i."""
        seed = self._seeds[i]
        return _CopyFault(
            f"environment '{self.spec.name}' {what}, in the episode with seed {seed} "
            f"(reset(seed={fold_seed(seed)})) at step {self._ages[i]}"
        )

    def render_state(self, index: int) -> Mapping[str, Array]:
        """Return the picture that copy `index` draws itself, [height, width, 3].

        Raises:
            NotImplementedError: if environment.arguments.render_mode is not rgb_array, or the
                environment draws nothing in it.
        """
        if self._config.arguments.get("render_mode") != FRAME:
            return super().render_state(index)
        return {FRAME: frame_of(self._environments[index])}

    @property
    def frames_per_second(self) -> float:
        """Return the environment's steps per second of an episode; 0 if it does not say."""
        metadata = getattr(self._environments[0], "metadata", None) or {}
        return float(metadata.get("render_fps") or 0)

    def close(self) -> None:
        """Close every copy, even if one of them raises."""
        with ExitStack() as stack:
            for environment in self._environments:
                stack.callback(environment.close)


class _CopyFault(EnvironmentFault):
    """An invalid value that one copy returned; raised and caught while it is stepped."""


def look_at_actions(
    notices: Notices, bounds: Array, action: Array, restart: NDArray[np.bool_]
) -> None:
    """Give a notice that numbers beyond their bounds [2, ...], mostly [-1, 1], are clipped."""
    low, high = bounds
    taken = action[~restart]
    beyond = (taken < low) | (taken > high)
    if beyond.any():
        row = tuple(np.argwhere(beyond)[0])
        text = (
            f"action {float(taken[row]):g} of a policy or baseline is outside "
            f"[{low[row[-1]]:g}, {high[row[-1]]:g}] and is clipped"
        )
        notices.say("action_clipped", "action", text)


def shown(value: object) -> str:
    """Describe a value that an environment returned, for a message: arrays by their shape."""
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}"
    text = repr(value)
    return text if len(text) < 40 else f"a {type(value).__name__}"


def without(observation: Any, paths: list[tuple[Any, ...]]) -> str:
    """Describe the first part of its space that an observation lacks; "" if none."""
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


def not_infos(value: object, agent: str = "") -> str:
    """Return the message about infos, of one agent or of all, that are no dictionary."""
    who = f" of agent '{agent}'" if agent else ""
    return f"returned a {type(value).__name__} as infos{who}, not a dictionary"
