"""Agents cover landmarks together: the environment plug-in `spread`."""

from murmur.env_service.envs.spread.environment import BASELINES, Config, make

__all__ = ["BASELINES", "Config", "make"]
