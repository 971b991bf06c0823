"""UAVs map a region of interest together: the environment plug-in `terrain`."""

from murmur.env_service.environment import VectorEnvironment
from murmur.env_service.envs.terrain.config import Config
from murmur.env_service.envs.terrain.environment import BASELINES, TerrainEnvironment

__all__ = ["BASELINES", "Config", "make"]


def make(config: Config, num_envs: int) -> VectorEnvironment:
    """Make N missions of one configuration.

    Raises:
        RasterError: if the configured raster cannot be used.
    """
    return TerrainEnvironment(config, num_envs)
