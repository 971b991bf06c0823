"""Three snakes against three, on a torus: the environment plug-in `snakes`."""

from murmur.env_service.envs.snakes.config import Config
from murmur.env_service.envs.snakes.environment import BASELINES, Snakes

__all__ = ["BASELINES", "Config", "make"]


make = Snakes
