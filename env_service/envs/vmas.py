"""Any scenario of VMAS, the vectorized multi-agent simulator, by its name.

Bettini, Kortvelesy, Blumenkamp, Prorok 2022, "VMAS: A Vectorized Multi-Agent Simulator for
Collective Robot Learning" (arXiv:2207.03530). VMAS steps all copies by one call, and so does this.

VMAS computes with torch, so a worker that plays it loads torch; no other worker does. This file
does not import it: VMAS turns arrays into tensors itself, and its tensors give their memory as
arrays. Only torch's inference mode (a third less time a step) is used, from the module that VMAS
has loaded. vmas is imported when the first environment is made. It is licensed under the GPL 3 and
not a part of murmur: `pip install -e '.[vmas]'`.
"""

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from murmur.env_service.adapters.factory import MoreMetrics, find_factory
from murmur.env_service.adapters.frames import FRAME
from murmur.env_service.adapters.seeds import fold_seed
from murmur.env_service.adapters.teams import TEAMS, TeamReturns, Teams, teams_of
from murmur.env_service.environment import VectorEnvironment, blank_timestep
from murmur.shared.config import Section
from murmur.shared.config.section import known_names
from murmur.shared.process.errors import ConfigError
from murmur.shared.process.traces import error_message
from murmur.shared.wire.spec import ArraySpec, Continuous, Discrete, EnvSpec
from murmur.shared.wire.timestep import Array, StepType, TimeStep


class Config(Section):
    """Options of `vmas`."""

    scenario: str = Field(
        "balance", description="a scenario of VMAS, or package.module:Scenario of your own"
    )
    arguments: dict[str, Any] = Field(
        default={}, description="keyword arguments of the scenario, for example n_agents"
    )
    continuous: bool = Field(True, description="false: the scenario's discrete actions")
    max_episode_steps: int = Field(
        100, ge=1, description="truncate episodes after this number of steps"
    )
    until_done: bool = Field(
        True, description="false: what VMAS calls done does not end the episode"
    )
    metrics: MoreMetrics = Field(
        (), description="numbers among the infos of an episode's last step: mean over the agents"
    )

    teams: Teams = Field("auto", description=TEAMS)


class Vmas(VectorEnvironment):
    """N copies of a VMAS scenario.

    Each copy is reset by itself, from its own seed (folded to 32 bits). A scenario that draws
    random numbers in its steps draws them for all copies at once, so there an episode depends on
    its neighbours; `murmur check-env` shows it.

    Observations are flattened and, where agents see less than others, padded with zeros. Continuous
    actions are [-1, 1], clipped, and scaled to the agent's range; where agents have fewer numbers
    than others the rest are ignored, and so are discrete actions beyond an agent's own: they are
    masked. What VMAS calls done terminates the episode (discount 0), if `until_done`.

    Metrics:
        length: steps of the episode.
        return/<team>: rewards of a team's agents, summed over the episode, if there are teams.
    """

    def __init__(self, config: Config, num_envs: int) -> None:
        """Make the scenario with N copies; each starts with the first `step` that restarts it.

        Raises:
            ConfigError: for an unknown scenario, an argument that it does not take, or a metric
                that it does not report.
        """
        find_factory("vmas:make_env")  # says what to do where vmas is not installed
        self._inference_mode = sys.modules["torch"].inference_mode
        with self._inference_mode():
            self._env = _make(config, num_envs)
            first = self._env.get_from_scenario(True, False, False, False)[0]
            infos = self._env.get_from_scenario(False, False, True, False)[0]
        self._config, self.num_envs = config, num_envs
        if "max_steps" in config.arguments:
            self.notices.say(
                "truncation_ignored",
                "environment.arguments.max_steps",
                f"environment.arguments.max_steps={config.arguments['max_steps']} ends episodes as "
                "terminated, with discount 0; environment.max_episode_steps truncates them",
            )
        names = [agent.name for agent in self._env.agents]
        widths = [sum(part.shape[1] for part in _parts(seen)) for seen in first]
        a, width = len(names), max(widths)
        observations = [ArraySpec("observation", "float32", (width,))]
        sizes = self._sizes = self._action_sizes()
        if not config.continuous and len(set(sizes)) > 1:
            observations.append(ArraySpec("action_mask", "uint8", (max(sizes),)))
        teams = teams_of(names, config.teams, config.scenario)
        self._teams = TeamReturns(teams, num_envs, a)
        self.spec = EnvSpec(
            name=f"vmas-{config.scenario}",
            num_agents=a,
            observations=tuple(observations),
            action=Continuous(max(sizes)) if config.continuous else Discrete(max(sizes)),
            metrics=(*self._teams.names, "length", *config.metrics),
            max_episode_steps=config.max_episode_steps,
            agents=tuple(names),
        )
        self._steps = np.zeros(num_envs, np.int64)
        self._timestep = blank_timestep(self.spec, num_envs)
        if "action_mask" in self._timestep.observation:
            self._timestep.observation["action_mask"][:] = (
                np.arange(max(sizes)) < np.array(sizes)[:, None]
            )
        if config.metrics:
            self._report(infos)

    def _action_sizes(self) -> list[int]:
        """Return the size, or number of choices, of each agent's action; keep the scaling."""
        spaces = list(self._env.action_space)
        if not self._config.continuous:
            return [int(space.n) for space in spaces]
        self._middle = [(space.low + space.high) / np.float32(2) for space in spaces]
        self._half = [(space.high - space.low) / np.float32(2) for space in spaces]
        return [space.shape[0] for space in spaces]

    def step(
        self, action: Array, restart: NDArray[np.bool_], seeds: NDArray[np.uint64]
    ) -> TimeStep:
        """Advance all copies, then restart each copy that `restart` marks."""
        starting = np.flatnonzero(restart)
        self._steps += 1
        self._steps[starting] = 0
        timestep = self._timestep
        timestep.step_type.fill(StepType.MID)
        timestep.discount.fill(1)
        with self._inference_mode():
            if len(starting) < self.num_envs:
                self._advance(action, restart)
            for i in starting.tolist():
                self._env.seed(fold_seed(int(seeds[i])))
                self._env.reset_at(i, return_observations=False)
            if len(starting):
                seen = self._env.get_from_scenario(True, False, False, False)[0]
                self._observe(seen, starting)
        timestep.step_type[starting] = StepType.FIRST
        timestep.discount[starting] = 1
        timestep.reward[starting] = 0
        timestep.metrics["length"][:] = self._steps
        if self._teams.names:
            self._teams.add(timestep.reward, restart, timestep.metrics)
        return timestep

    def render_state(self, index: int) -> Mapping[str, Array]:
        """Return VMAS's picture of the copy, uint8 [height, width, 3].

        Raises:
            ConfigError: if VMAS cannot draw on this machine, or the scenario fails to be drawn.
        """
        try:
            with self._inference_mode():
                frame = self._env.render(mode=FRAME, env_index=index)
        except Exception as error:  # of OpenGL, of pyglet, or of a scenario of your own
            kind, fix = type(error), ""
            if kind.__module__.startswith("pyglet") or isinstance(error, ImportError):
                fix = (
                    "; it draws with OpenGL: install EGL (libegl1, libgl1, libglu1-mesa), or give "
                    "it a display (xvfb-run murmur render ...)"
                )
            raise ConfigError(
                f"VMAS could not draw scenario '{self._config.scenario}': {kind.__name__}: "
                f"{error}{fix}"
            ) from error
        return {FRAME: np.ascontiguousarray(frame[..., :3], np.uint8)}

    @property
    def frames_per_second(self) -> float:
        """Return the steps per second of VMAS's world."""
        return 1 / float(self._env.world.dt)

    def _advance(self, action: Array, restart: NDArray[np.bool_]) -> None:
        """Step every copy; copies that are restarted afterwards get action 0."""
        actions = []
        for a, size in enumerate(self._sizes):
            own = action[:, a]
            if self._config.continuous:
                own = np.clip(own[:, :size], -1, 1) * self._half[a] + self._middle[a]
            own = np.array(own, np.float32)
            own[restart] = 0
            actions.append(own)
        seen, rewards, done, infos = self._env.step(actions)
        self._observe(seen, slice(None))
        for a, reward in enumerate(rewards):
            self._timestep.reward[:, a] = reward.numpy().reshape(-1)  # some scenarios give [N, 1]
        ended = done.numpy() & self._config.until_done
        self._timestep.discount[ended] = 0
        self._timestep.step_type[ended | (self._steps >= self._config.max_episode_steps)] = (
            StepType.LAST
        )
        if self._config.metrics:
            self._report(infos)

    def _observe(self, seen: list[Any], copies: NDArray[np.intp] | slice) -> None:
        """Write the observations of some copies' agents."""
        own = self._timestep.observation["observation"]
        for a, parts in enumerate(map(_parts, seen)):
            start = 0
            for part in parts:
                stop = start + part.shape[1]
                own[copies, a, start:stop] = part.numpy()[copies]
                start = stop

    def _report(self, infos: list[Mapping[str, Any]]) -> None:
        """Write the configured metrics of the last step.

        Raises:
            ConfigError: if no agent reports one of them.
        """
        for name in self._config.metrics:
            found = [
                info[name].numpy().reshape(self.num_envs, -1).mean(1)
                for info in infos
                if name in info
            ]
            if not found:
                known = sorted({key for info in infos for key in info})
                raise ConfigError(
                    f"scenario '{self._config.scenario}' reports no '{name}'; environment.metrics "
                    "may name: " + (", ".join(known) or "nothing")
                )
            self._timestep.metrics[name][:] = np.mean(found, axis=0)


def _parts(seen: Any) -> list[Any]:
    """Return the tensors of an agent's observation, each [N, F], in the scenario's order."""
    parts = list(seen.values()) if isinstance(seen, dict) else [seen]
    return [part.flatten(1) for part in parts]


def _make(config: Config, num_envs: int) -> Any:
    """Make VMAS's own environment.

    Raises:
        ConfigError: if the scenario is unknown or cannot be made.
    """
    import vmas

    scenario: Any = config.scenario
    if ":" in scenario:
        scenario = find_factory(scenario)()
    else:
        known = [*vmas.scenarios, *vmas.mpe_scenarios, *vmas.debug_scenarios]
        if scenario not in known:
            names = known_names(scenario, sorted(known))
            raise ConfigError(f"VMAS has no scenario '{scenario}'; {names}")
    try:
        return vmas.make_env(
            scenario,
            num_envs,
            continuous_actions=config.continuous,
            seed=0,
            **config.arguments,
        )
    except Exception as error:  # whatever a scenario says to its arguments
        raise ConfigError(
            f"VMAS scenario '{config.scenario}' with environment.arguments {config.arguments} "
            f"raised {error_message(error)}"
        ) from error


make = Vmas
