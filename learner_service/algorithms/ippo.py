"""IPPO: MAPPO with a value of each own observation (de Witt et al. 2020, arXiv:2011.09533)."""

from typing import Literal

from pydantic import Field

from learner_service.algorithms import mappo


class Config(mappo.Config):
    """Options of IPPO."""

    centralised: Literal[False] = Field(False, description="each agent's own observation alone")


build = mappo.Mappo
