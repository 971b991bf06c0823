"""A leader and its followers fly to a goal in formation: the environment plug-in `formation`."""

from env_service.envs.formation.environment import BASELINES, Config, make

__all__ = ["BASELINES", "Config", "make"]
