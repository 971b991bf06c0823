"""The curriculum: options of episodes that the learner changes during the run."""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from murmur.learner_service.telemetry.metrics import LearnerMetrics
from murmur.shared.config.episode_options import Course, Threshold, Value, Values
from murmur.shared.config.section import known_names
from murmur.shared.process.errors import ConfigError
from murmur.shared.process.process import logger
from murmur.shared.wire.spec import EnvSpec

Agree = Callable[[Mapping[str, float]], Mapping[str, float]]
_RETURN = "return"
_MOST_FINISHED = 1 << 16  # episodes between two updates whose results are kept


class Curriculum:
    """Courses of a run's options, where each of them stands, and what moves it.

    The thread that learns uses it; the thread that acts calls `note`, and any thread reads
    `current`.

    Attributes:
        courses: course of each option.
        current: values of the episodes that begin from now on.
        last: values at the end of all courses, which evaluations use.
    """

    def __init__(self, courses: Mapping[str, Course], size: int = 1) -> None:
        """Begin with the first values.

        Args:
            courses: course of each option.
            size: number of learners, which each see a share of the episodes.
        """
        self.courses = courses
        self.current, self.last = self._values(0.0), self._values(1.0)
        self._finished: deque[tuple[Values, Mapping[str, float]]] = deque(maxlen=_MOST_FINISHED)
        self._windows: dict[str, deque[float]] = {
            name: deque(maxlen=math.ceil(when.over_episodes / size))
            for name, when in self._thresholds().items()
        }
        # Finished episodes that began at each level, of this learner.
        self._episodes = {name: [0] * len(x.levels) for name, x in courses.items() if x.levels}

    def _values(self, share: float) -> Values:
        """Return the values after a share of each course, 0 to 1."""
        return Values(
            {name: course.at(share) for name, course in self.courses.items()},
            {name: x.level_at(share) for name, x in self.courses.items() if x.levels},
        )

    def _thresholds(self) -> dict[str, Threshold]:
        return {name: x.when for name, x in self.courses.items() if x.when is not None}

    def check(self, spec: EnvSpec) -> None:
        """Check that the environment reports the metrics that levels wait for.

        Raises:
            ConfigError: if it does not, naming those that it reports.
        """
        for name, when in self._thresholds().items():
            if when.metric not in (_RETURN, *spec.metrics):
                raise ConfigError(
                    f"environment.curriculum.{name}.when.metric={when.metric}: environment "
                    f"'{spec.name}' reports no such metric; "
                    + known_names(when.metric, (_RETURN, *spec.metrics))
                )

    def note(
        self,
        begun: NDArray[Any],
        last: NDArray[np.bool_],
        returns: NDArray[np.float64],
        metrics: Mapping[str, NDArray[Any]],
    ) -> None:
        """Note the results of finished episodes. Called by the thread that acts.

        Args:
            begun: [n] values that each copy's episode began with.
            last: [n] bool, whether it has ended.
            returns: [n] its return so far.
            metrics: [n] its results by name.
        """
        wanted = {when.metric for when in self._thresholds().values()}
        for i in np.flatnonzero(last).tolist():
            results = {m: float((returns if m == _RETURN else metrics[m])[i]) for m in wanted}
            self._finished.append((begun[i], results))

    def _take_finished(self) -> None:
        """Count finished episodes; those of another level say nothing of the current one."""
        thresholds, levels = self._thresholds(), self.current.levels
        while self._finished:
            begun, results = self._finished.popleft()
            for name, level in begun.levels.items():
                if name in self._episodes and level < len(self._episodes[name]):
                    self._episodes[name][level] += 1
                if name in thresholds and level == levels[name]:
                    self._windows[name].append(results[thresholds[name].metric])

    def advance(self, updates: int, env_steps: int, agree: Agree) -> None:
        """Move every course after an update.

        Args:
            updates: updates made.
            env_steps: environment steps of all learners.
            agree: function that sums numbers over the learners, which all call it.
        """
        self._take_finished()
        options, levels = dict[str, Value](), dict[str, int]()
        means = self._means(agree)
        for name, course in self.courses.items():
            if course.when is not None:
                level = self.current.levels[name]
                mean = means.get(name)
                if mean is not None and level + 1 < len(course.levels) and course.when.met(mean):
                    level += 1
                    self._windows[name].clear()
                    self._say(name, course, level, f"{course.when.metric} {mean:.4g}", env_steps)
                options[name], levels[name] = course.levels[level], level
                continue
            done = env_steps / course.over_env_steps if course.over_env_steps else 0.0
            share = min(1.0, max(done, updates / course.over_updates if course.over_updates else 0))
            options[name] = course.at(share)
            if course.levels:
                levels[name] = course.level_at(share)
                if levels[name] != self.current.levels[name]:
                    self._say(name, course, levels[name], f"{updates} updates", env_steps)
        new = Values(options, levels)
        if new != self.current:  # two levels may have one value
            self.current = new

    def _means(self, agree: Agree) -> dict[str, float]:
        """Return the mean of each metric over the episodes of all learners, once there are enough.

        The learners decide by the same numbers, so they are at the same level.
        """
        windows = self._windows
        if not windows:
            return {}
        own = {f"count {name}": float(len(window)) for name, window in windows.items()}
        own |= {f"sum {name}": math.fsum(window) for name, window in windows.items()}
        total = agree(own)
        enough = {name: when.over_episodes for name, when in self._thresholds().items()}
        return {
            name: total[f"sum {name}"] / total[f"count {name}"]
            for name in windows
            if total[f"count {name}"] >= enough[name]
        }

    def _say(self, name: str, course: Course, level: int, why: str, env_steps: int) -> None:
        """Log the change of a level."""
        logger.info(
            "curriculum: '%s' is %s from now on, level %d of %d: %s; %d environment steps",
            name,
            course.levels[level],
            level + 1,
            len(course.levels),
            why,
            env_steps,
        )

    def figures(self, metrics: LearnerMetrics) -> dict[str, Any]:
        """Return the entry of a line of the log, and set the gauges.

        Of each option: `value`, `number` (the value, or the level of words, from 0), `level`,
        `episodes` finished that began at each level, and `mean` of the metric that it waits for.

        Args:
            metrics: Prometheus metrics.
        """
        self._take_finished()
        now, found = self.current, dict[str, dict[str, Any]]()
        for name, value in now.options.items():
            number = now.levels[name] if isinstance(value, str) else float(value)
            found[name] = {"value": value, "number": number}
            metrics.gauge("curriculum_value", name=name).set(number)
            if name not in now.levels:
                continue
            metrics.gauge("curriculum_level", name=name).set(now.levels[name])
            found[name] |= {"level": now.levels[name], "episodes": list(self._episodes[name])}
            if window := self._windows.get(name):
                found[name]["mean"] = fmean(window)
        return {"curriculum": found}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        self._take_finished()
        return {
            **asdict(self.current),
            "episodes": {name: list(counts) for name, counts in self._episodes.items()},
            "windows": {name: list(window) for name, window in self._windows.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; courses that it lacks begin."""
        options, levels = dict(self.current.options), dict(self.current.levels)
        for name, course in self.courses.items():
            if course.levels and name in state["levels"]:
                level = state["levels"][name]
                if level >= len(course.levels):
                    logger.warning(
                        "curriculum: '%s' was at level %d and has %d levels now: it is at the last",
                        name,
                        level + 1,
                        len(course.levels),
                    )
                levels[name] = min(level, len(course.levels) - 1)
                options[name] = course.levels[levels[name]]
                counts = state["episodes"].get(name, [])[: len(course.levels)]
                self._episodes[name][: len(counts)] = counts
            elif not course.levels and name in state["options"] and name not in state["levels"]:
                options[name] = state["options"][name]
            if name in self._windows:
                self._windows[name].extend(state["windows"].get(name, ()))
        self.current = Values(options, levels)

    def completed(self, values: Values) -> Values:
        """Return older values for the options of this curriculum; those it adds are current."""
        now, levels = self.current, values.levels
        return Values(
            {name: values.options.get(name, value) for name, value in now.options.items()},
            {name: levels.get(name, level) for name, level in now.levels.items()},
        )
