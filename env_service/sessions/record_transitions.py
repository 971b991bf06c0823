"""The episodes of an evaluation as transitions, for a dataset."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from murmur.shared.wire.dataset import OBSERVATION, DatasetWriter, array_layout
from murmur.shared.wire.spec import EnvSpec, action_layout
from murmur.shared.wire.timestep import Array, StepType, TimeStep


class TransitionRecorder:
    """Recorder of whole episodes, played in several copies at once. Used by one thread.

    Time steps of all copies are kept until the oldest episode under way ends.
    """

    def __init__(
        self, writer: DatasetWriter, on_episode: Callable[[int], None] = lambda number: None
    ) -> None:
        """Record to a writer.

        Args:
            writer: writer of the dataset.
            on_episode: function called with the number of recorded episodes after each one.
        """
        self._writer, self._on_episode = writer, on_episode

    def begin(self, spec: EnvSpec, seeds: NDArray[np.uint64]) -> None:
        """Begin a session, or play it again: what was recorded of it is dropped.

        Args:
            spec: spec of the environment.
            seeds: [E] seeds of the session's episodes.
        """
        self._writer.begin(spec)
        self._spec, self._seeds = spec, seeds.copy()
        self._action_layout = action_layout(spec.action)
        self._steps: list[dict[str, Array]] = []
        self._first = 0  # number of the first of these steps
        self._began = np.zeros(0, np.int64)  # [n] number of the step with each copy's FIRST

    def act(self, action: Array) -> None:
        """Note the actions [n, A, ...] in answer to the last time step."""
        self._steps[-1]["action"] = np.array(action)

    def take(self, timestep: TimeStep, episode: NDArray[np.int64]) -> None:
        """Note a time step, and write the episodes that end with it.

        Args:
            timestep: rows of all copies.
            episode: [n] number of the episode in each copy; -1: it is not recorded.
        """
        now = self._first + len(self._steps)
        dtype, shape = self._action_layout
        copies = len(timestep.step_type)
        self._steps.append(
            {
                "step_type": timestep.step_type.copy(),
                "reward": timestep.reward.copy(),
                "discount": timestep.discount.copy(),
                # Of a row that no action answers, such as LAST.
                "action": np.zeros((copies, self._spec.num_agents, *shape), dtype),
                **{OBSERVATION + name: x.copy() for name, x in timestep.observation.items()},
            }
        )
        first = timestep.step_type == StepType.FIRST
        self._began = np.where(first, now, self._began) if now else np.zeros(copies, np.int64)
        for copy in np.flatnonzero((episode >= 0) & (timestep.step_type == StepType.LAST)).tolist():
            steps = self._steps[self._began[copy] - self._first :]
            arrays = {
                name: np.stack([step[name][copy] for step in steps])
                for name in array_layout(self._spec)
            }
            self._writer.add(arrays, int(self._seeds[episode[copy]]))
            self._on_episode(self._writer.num_episodes)
        needed = self._began[episode >= 0]
        oldest = int(needed.min()) if needed.size else now
        del self._steps[: oldest - self._first]
        self._first = oldest

    def keep(self) -> None:
        """Keep the episodes of the session that has ended."""
        self._writer.keep()
