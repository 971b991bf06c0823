"""Any vectorised Gymnasium environment, by "package.module:factory"; one agent.

The factory is called once with `num_envs`, and makes a gymnasium.vector.VectorEnv that steps all
copies by one call. How it begins episodes (its metadata's `autoreset_mode`) decides what holds:

    Disabled    reset(seed=…, options={"reset_mask": …}) begins an episode in the copies that the
                mask names, each from its own seed: all promises hold
    NextStep    a copy begins its next episode by itself in the step after its end, from a seed
                that murmur does not know: no sync pipeline, and no episode is played twice

SameStep is refused: it hides an episode's last observation among the infos.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import field_validator
from typing_extensions import override

from murmur.env_service.adapters.casts import WHOLE, say_number
from murmur.env_service.adapters.factory import (
    AdapterConfig,
    create,
    first_reset,
    read_info,
    read_spaces,
    require_reset_options,
)
from murmur.env_service.adapters.frames import FRAME, frame_of
from murmur.env_service.adapters.kinds import require_kind, unread_masks
from murmur.env_service.adapters.seeds import fold_seed
from murmur.env_service.adapters.sequential import (
    Interface,
    hint_of,
    look_at_actions,
    not_infos,
    shown,
)
from murmur.env_service.environment import (
    LONGER,
    VectorEnvironment,
    blank_timestep,
    zero_actions,
)
from murmur.shared.config.episode_options import Value
from murmur.shared.process.errors import ConfigError, EnvironmentFault
from murmur.shared.wire.spec import (
    ACTION_MASK,
    action_bounds,
    action_factors,
    factor_starts,
)
from murmur.shared.wire.timestep import Array, StepType, TimeStep

KIND = "gymnasium_vector"
_AGENT = "agent"
_DISABLED, _NEXT_STEP, _SAME_STEP = "Disabled", "NextStep", "SameStep"
_MASK = "reset_mask"  # option of reset()
_STEP_RETURNS = "(observations, rewards, terminations, truncations, infos)"
_OWN_SEEDS = {
    "gymnasium.vector.sync_vector_env.SyncVectorEnv",
    "gymnasium.vector.async_vector_env.AsyncVectorEnv",
}  # that reset several copies at once, each from a seed of its own


class Config(AdapterConfig):
    """Options of `gymnasium_vector`."""

    @field_validator("renew")
    @classmethod
    def _is_kept(cls, value: bool) -> bool:
        if value:
            raise ValueError(
                "a vectorised environment cannot make one copy again; use environment.name: "
                "gymnasium with a factory that makes one environment"
            )
        return value


class GymnasiumVector(VectorEnvironment):
    """A gymnasium.vector.VectorEnv of N copies behind the contract.

    A step in which episodes begin costs a second reset of these copies where others continue: a
    VectorEnv steps all copies at once, so copies that have ended are reset before the step and
    reset from their seeds after it.

    Attributes:
        seeded: true if an episode follows from its seed.

    Metrics:
        length: steps of the episode.
    """

    def __init__(self, config: Config, num_envs: int) -> None:
        """Make N copies; each begins with the first `step` that restarts it.

        Raises:
            ConfigError: if murmur cannot step the environment, naming the fix.
        """
        from murmur.env_service.adapters.actions import ActionLayout
        from murmur.env_service.adapters.observations import ObservationLayout

        self._env = environment = create(config, num_envs=num_envs)
        require_kind(environment, config, KIND)
        mode = self._autoreset_of(environment, config.factory)
        self.seeded = mode == _DISABLED
        if not self.seeded and config.max_episode_steps:
            raise ConfigError(
                f"environment.max_episode_steps: {config.max_episode_steps} cannot end episodes of "
                f"'{config.factory}', which begins them by itself (autoreset mode {mode}); make it "
                f"with autoreset mode {_DISABLED}, or give the limit to its factory"
            )
        count = getattr(environment, "num_envs", None)
        if count != num_envs:
            raise ConfigError(
                f"'{config.factory}' made {count} copies where num_envs={num_envs} asks for "
                f"{num_envs}"
            )
        seen, acting = read_spaces(environment, config.factory, "single_")
        layout = ObservationLayout({_AGENT: seen}, config)
        self._actions = ActionLayout({_AGENT: acting}, joint=bool(config.joint_actions))
        _, infos = first_reset(environment, config.factory, "(observations, infos)")
        about = environment.spec
        limit = about and about.max_episode_steps
        interface = Interface(
            about.id if about else config.factory,
            [_AGENT],
            layout,
            self._actions,
            masks_told=ACTION_MASK in infos,
            max_episode_steps=hint_of(limit or getattr(environment, "max_episode_steps", None)),
            hint="spec.max_episode_steps of the registration",
            doubts=()
            if ACTION_MASK in infos or layout.masks_seen[0]
            else unread_masks(environment, [infos], [seen]),
        )
        interface.check(config, self.notices)
        if not self.seeded:
            self.notices.say(
                "unseeded",
                "autoreset_mode",
                f"'{interface.name}' begins episodes by itself (autoreset mode {mode}), from seeds "
                "that murmur does not give: no two runs are alike, and every evaluation plays "
                f"other episodes; autoreset mode {_DISABLED} seeds each",
            )
        self.num_envs, self._config = num_envs, config
        self._name, self._limit = interface.name, config.max_episode_steps
        self.spec = interface.spec(("length", *config.metrics), config.max_episode_steps)
        self._hint, self._bound = interface.hint, self.spec.max_episode_steps
        self._timestep = blank_timestep(self.spec, num_envs)
        self._masks_seen = layout.masks_seen[0]
        self._parts = layout.parts_of_all(self._timestep.observation, 0)
        self._masks = self._timestep.observation.get(ACTION_MASK)
        self._to_env = self._actions.batched(num_envs)
        self._range = np.array(action_bounds(self.spec.action), np.float32)
        classes = {f"{c.__module__}.{c.__qualname__}" for c in type(environment.unwrapped).__mro__}
        self._own_seeds = bool(classes & _OWN_SEEDS)
        self._given: dict[int, Mapping[str, Value]] = {}  # options of each copy's next reset
        self._mask_obeyed = False  # until a reset of some copies was seen to leave the others alone
        self._steps = np.zeros(num_envs, np.int64)
        self._over = np.ones(num_envs, np.bool_)

    @staticmethod
    def _autoreset_of(environment: Any, factory: str) -> str:
        """Return the autoreset mode.

        Raises:
            ConfigError: if there is none, or murmur cannot use it.
        """
        said = (environment.metadata or {}).get("autoreset_mode")
        mode = str(getattr(said, "value", said))
        if mode in (_DISABLED, _NEXT_STEP):
            return mode
        fix = (
            f"make it with autoreset_mode: {_DISABLED} (for gymnasium:make_vec "
            f"arguments.vector_kwargs: {{autoreset_mode: {_DISABLED}}})"
        )
        if mode == _SAME_STEP:
            raise ConfigError(
                f"'{factory}' has autoreset mode {mode}, which hides an episode's last "
                f"observation; {fix}"
            )
        raise ConfigError(
            f"'{factory}' has metadata['autoreset_mode'] {said!r}, so murmur cannot tell when its "
            f"episodes begin; set it to {_DISABLED} or {_NEXT_STEP}; {fix}"
        )

    def step(
        self, action: Array, restart: NDArray[np.bool_], seeds: NDArray[np.uint64]
    ) -> TimeStep:
        """Start and advance episodes; see VectorEnvironment.

        Raises:
            EnvironmentFault: for a result of another form or shape, for one copy to restart in the
                middle of its episode where the environment begins episodes by itself, and if a
                reset of some copies changes others.
        """
        timestep = self._timestep
        timestep.step_type.fill(StepType.MID)
        timestep.discount.fill(1)
        if restart.all():
            self._observe(*self._reset(restart, seeds))
        elif not self.seeded:
            if not (early := restart & ~self._over).any():
                self._advance(action, restart)
            else:
                raise EnvironmentFault(
                    f"environment '{self._name}' (autoreset mode {_NEXT_STEP}) cannot restart copy "
                    f"{int(early.argmax())} alone in the middle of its episode; autoreset mode "
                    f"{_DISABLED} could"
                )
        else:
            if restart.any():
                # Copies that ended cannot be stepped; in this episode they take one step.
                self._observe(*self._reset(restart, seeds))
                action = action.copy()
                action[restart] = self._harmless()[restart]
            self._advance(action, restart)
            if restart.any():
                self._observe(*self._reset(restart, seeds))
        self._steps += 1
        self._steps[restart] = 0
        timestep.step_type[restart] = StepType.FIRST
        timestep.discount[restart] = 1
        timestep.reward[restart] = 0
        if self._bound and (self._steps >= self._bound).any():
            self._at_bound()
        timestep.metrics["length"][:] = self._steps
        self._over = timestep.step_type == StepType.LAST
        return timestep

    def _reset(self, restart: NDArray[np.bool_], seeds: NDArray[np.uint64]) -> tuple[Any, Any]:
        """Begin episodes in some copies; return the observations and infos of all.

        One call resets copies that have seeds of their own and no options; else each copy is reset
        by a call with its seed. An environment that begins episodes by itself is reset as a whole.
        """
        folded = [fold_seed(seed) for seed in seeds.tolist()]
        if not self.seeded:
            whole: tuple[Any, Any] = self._env.reset(seed=folded if self._own_seeds else folded[0])
            return whole
        if self._own_seeds and not self._given:
            own: list[int | None] = [
                seed if begins else None
                for seed, begins in zip(folded, restart.tolist(), strict=True)
            ]
            result = self._env.reset(seed=own, options={_MASK: restart.copy()})
            return self._seen(result, restart)
        observations, infos = None, dict[str, Any]()
        for i in np.flatnonzero(restart).tolist():
            alone = np.arange(self.num_envs) == i
            seed = [folded[i] if j == i else None for j in range(self.num_envs)]
            options = {**self._given.get(i, {}), _MASK: alone}
            result = self._env.reset(seed=seed if self._own_seeds else folded[i], options=options)
            observations, told = self._seen(result, alone)
            for name, value in told.items():
                infos[name] = _joined(infos.get(name), value, alone)
        return observations, infos

    @override
    def set_options(self, index: int, options: Mapping[str, Value]) -> None:
        self._given[index] = options

    @override
    def require_options(self, options: Mapping[str, Value]) -> None:
        names = ", ".join(options)
        if not self.seeded:
            raise ConfigError(
                f"environment '{self._name}' begins episodes by itself (autoreset mode "
                f"{_NEXT_STEP}), so environment.curriculum and environment.randomize cannot set "
                f"{names}; autoreset mode {_DISABLED} could"
            )
        if _MASK in options:
            raise ConfigError(
                f"'{_MASK}' is murmur's own option of reset(): name the option of "
                "environment.curriculum or environment.randomize otherwise"
            )
        alone = np.ones(self.num_envs, np.bool_)
        require_reset_options(self._env, self._config.factory, options, **{_MASK: alone})

    def _seen(self, result: Any, restart: NDArray[np.bool_]) -> tuple[Any, Any]:
        """Check once that a reset of some copies leaves the others alone."""
        observations, infos = result
        if not (self._mask_obeyed or restart.all() or self._over.all()):
            kept = ~restart
            before = {name: array[kept].copy() for name, array in self._arrays()}
            self._observe(observations, {})
            for name, array in self._arrays():
                if not np.array_equal(before[name], array[kept], equal_nan=array.dtype.kind == "f"):
                    raise EnvironmentFault(
                        f"environment '{self._name}' has autoreset mode {_DISABLED} and does not "
                        f"obey reset(options={{'{_MASK}': …}}): it changed '{name}' of copies that "
                        "the mask leaves out"
                    )
            self._mask_obeyed = True
        return observations, infos

    def _arrays(self) -> list[tuple[str, Array]]:
        return [(n, a) for n, a in self._timestep.observation.items() if n != ACTION_MASK]

    def _harmless(self) -> Array:
        """Return an action that is legal in an episode's first step, [N, 1] or [N, 1, ...]."""
        harmless = zero_actions(self.spec, self.num_envs)
        if self._masks is not None:
            factors = action_factors(self.spec.action)
            by_choice = harmless if harmless.ndim > 2 else harmless[..., None]
            for f, masks in enumerate(np.split(self._masks, factor_starts(factors)[1:], -1)):
                by_choice[..., f] = masks.argmax(axis=-1)
        return harmless

    def _advance(self, action: Array, restart: NDArray[np.bool_]) -> None:
        """Step all copies, and write the rows of those that do not restart."""
        if action.dtype.kind == "f" and not self.notices.said("action_clipped", "action"):
            look_at_actions(self.notices, self._range, action, restart)
        result = self._env.step(self._to_env(action))
        if not isinstance(result, tuple | list) or len(result) != 5:
            raise self._fault(f"returned {shown(result)} from step(), not {_STEP_RETURNS}")
        observations, rewards, terminations, truncations, infos = result
        own = self._batch("rewards", rewards, "biuf")
        terminated = self._batch("terminations", terminations, "b")
        truncated = self._batch("truncations", truncations, "b")
        timestep = self._timestep
        timestep.reward[:, 0] = own
        if (largest := int(np.abs(own).argmax())) >= 0 and abs(own[largest]) > WHOLE:
            sent = float(timestep.reward[largest, 0])
            fix = "scale rewards in a factory of your own"
            say_number(self.notices, "rewards", "a reward", own[largest], sent, fix)
        ended = (terminated | truncated) & ~restart
        timestep.step_type[ended] = StepType.LAST
        timestep.discount[terminated & ended] = 0
        self._observe(observations, infos)
        for name in self._config.metrics:
            self._report(name, infos, ended)

    def _batch(self, name: str, value: Any, kinds: str) -> NDArray[Any]:
        """Return one number for each copy, [N].

        Raises:
            EnvironmentFault: for another shape or type.
        """
        array = np.asarray(value)
        if array.shape != (self.num_envs,) or array.dtype.kind not in kinds:
            what = "numbers" if "f" in kinds else "true or false"
            raise self._fault(
                f"returned {name} of shape {array.shape} and dtype {array.dtype} from step(), not "
                f"[{self.num_envs}] {what}"
            )
        return array

    def _observe(self, observations: Any, infos: Any) -> None:
        """Write the observations and masks of all copies."""
        for path, write in self._parts:
            value = observations
            try:
                for key in path:
                    value = value[key]
                write(value)
            except Exception as error:
                what = ".".join(map(str, path)) or "the observation"
                raise self._fault(
                    f"gave wrong observations: {what} {error or type(error).__name__}"
                ) from error
        if not isinstance(infos, Mapping):
            raise self._fault(not_infos(infos))
        if self._masks is None:
            return
        told = observations if self._masks_seen else infos
        mask = told.get(ACTION_MASK)
        if mask is None:  # of a reset whose infos are not read
            return
        place = self._actions.masks[0]
        mask, shape = np.asarray(mask), (self.num_envs, place.size)
        if mask.shape != shape or ((mask != 0) & (mask != 1)).any():
            raise self._fault(
                f"gives an '{ACTION_MASK}' of shape {mask.shape}, {shown(mask)}; it must be "
                f"{list(shape)} with 1 for legal and 0 for not"
            )
        given = slice(None) if self._masks_seen else _given(infos, ACTION_MASK, self.num_envs)
        self._masks[given, 0] = place.legal(mask)[given]

    def _report(self, name: str, infos: Mapping[str, Any], ended: NDArray[np.bool_]) -> None:
        """Write a metric of the copies that ended, from the infos.

        Raises:
            EnvironmentFault: if a copy that ended has none.
        """
        if not ended.any():
            return
        values = read_info(infos, name)
        first, _, last = name.rpartition(".")
        holder = read_info(infos, first) if first else infos
        given = np.zeros(self.num_envs, np.bool_)
        if values is not None and isinstance(holder, Mapping):
            given = _given(holder, last, self.num_envs)
        if (missing := ended & ~given).any():
            raise self._fault(
                f"has no number '{name}' (environment.metrics) among the infos of copy "
                f"{int(missing.argmax())}'s last step"
            )
        self._timestep.metrics[name][ended] = np.asarray(values)[ended]

    def _at_bound(self) -> None:
        """Truncate at environment.max_episode_steps; the environment's own hint ends nothing."""
        long = (self._steps >= self._bound) & (self._timestep.step_type == StepType.MID)
        if self._limit:
            self._timestep.step_type[long] = StepType.LAST
        elif long.any():
            self._bound = 0
            self.notices.say(
                *LONGER,
                f"an episode continues after {self._steps[long][0]} steps, the number that "
                f"{self._hint} says: murmur plans unrolls with it and ends no episode there",
            )

    def _fault(self, what: str) -> EnvironmentFault:
        return EnvironmentFault(f"environment '{self._name}' {what}")

    @override
    def render_state(self, index: int) -> Mapping[str, Array]:
        try:
            return {FRAME: frame_of(self._env, index)}
        except NotImplementedError as error:
            raise NotImplementedError(
                f"{error}; give render_mode: {FRAME} to its factory"
            ) from error

    @override
    def close(self) -> None:
        self._env.close()


def _given(infos: Mapping[str, Any], name: str, num_envs: int) -> NDArray[np.bool_]:
    """Return which copies have an info, [N]: gymnasium keeps it beside the info, as `_name`."""
    return np.asarray(infos.get(f"_{name}", np.ones(num_envs, np.bool_)), np.bool_)


def _joined(before: Any, value: Any, own: NDArray[np.bool_]) -> Any:
    """Return infos of resets of one copy each as those of one reset of all of them."""
    if isinstance(value, Mapping):
        before = before if isinstance(before, Mapping) else {}
        return {name: _joined(before.get(name), inner, own) for name, inner in value.items()}
    array = np.array(value)
    if before is not None and array.shape[:1] == own.shape:
        array[~own] = np.asarray(before)[~own]
    return array


make = GymnasiumVector
