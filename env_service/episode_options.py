"""Options that the episodes of a session begin with: the curriculum's, and draws by their seeds."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from murmur.env_service.environment import VectorEnvironment
from murmur.shared.config.episode_options import EnvironmentConfig, Value
from murmur.shared.process.errors import WireError

Options = Mapping[str, Value]


class EpisodeOptions:
    """Options of the episodes of N copies. Used by one thread.

    Attributes:
        curriculum: names of the options that the learner changes.
        values: values of the curriculum for episodes that begin from now on.
        any: whether episodes have options at all.
    """

    def __init__(self, config: EnvironmentConfig, num_envs: int, values: Options) -> None:
        """Begin with these values of the curriculum.

        Args:
            config: configuration of the environment.
            num_envs: number of copies N.
            values: values of the curriculum until others are set.
        """
        self.curriculum = tuple(config.curriculum)
        self._draw, self.any = config.drawn, bool(config.names)
        self._of_copy: list[Options] = [values] * num_envs
        self.values = values

    def set(self, values: Options) -> None:
        """Use these values for all episodes that begin from now on.

        Raises:
            WireError: if they are not those of the curriculum.
        """
        if values.keys() != set(self.curriculum):
            raise WireError(
                f"the learner sent the options {sorted(values)}, environment.curriculum here names "
                f"{sorted(self.curriculum)}: start the server with the learner's configuration"
            )
        self.values = values
        self._of_copy = [values] * len(self._of_copy)

    def resume(self, values: Sequence[Options]) -> None:
        """Use these values for the episodes that copies begin again, each until `next_episode`.

        Args:
            values: [N] values of each copy; empty: those of the session.
        """
        for own in values:
            if own and own.keys() != set(self.curriculum):
                raise WireError(f"the learner sent the options {sorted(own)} of an episode")
        self._of_copy = [own or self.values for own in values]

    def next_episode(self, copies: Iterable[int]) -> None:
        """Note that copies begin their next episode, with the session's values."""
        for i in copies:
            self._of_copy[i] = self.values

    def give(
        self,
        environment: VectorEnvironment,
        restart: NDArray[np.bool_],
        seeds: NDArray[np.uint64],
    ) -> None:
        """Set the options of the copies that restart in the next step."""
        for i in np.flatnonzero(restart).tolist():
            environment.set_options(i, {**self._of_copy[i], **self._draw(int(seeds[i]))})

    def require(self, environment: VectorEnvironment) -> None:
        """Check that an environment takes the options.

        Raises:
            ConfigError: if it does not.
        """
        if self.any:
            environment.require_options({**self.values, **self._draw(0)})
