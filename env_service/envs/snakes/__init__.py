"""Three snakes against three, on a torus: the environment plug-in `snakes`."""

from murmur.env_service.environment import VectorEnvironment
from murmur.env_service.envs.snakes.config import Config
from murmur.env_service.envs.snakes.environment import BASELINES, Snakes

__all__ = ["BASELINES", "Config", "make"]


def make(config: Config, num_envs: int) -> VectorEnvironment:
    """Make N games of one configuration."""
    return Snakes(config, num_envs)
