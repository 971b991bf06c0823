"""A leader and its followers fly to a goal in formation: the environment plug-in `formation`."""

from murmur.env_service.envs.formation.config import Config
from murmur.env_service.envs.formation.environment import BASELINES, make

__all__ = ["BASELINES", "Config", "make"]
