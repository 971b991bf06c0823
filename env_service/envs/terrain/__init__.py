"""UAVs map a region of interest together: the environment plug-in `terrain`."""

from murmur.env_service.envs.terrain.config import Config
from murmur.env_service.envs.terrain.environment import BASELINES, TerrainEnvironment

__all__ = ["BASELINES", "Config", "make"]


make = TerrainEnvironment
