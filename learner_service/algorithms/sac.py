"""SAC for each agent by itself (Haarnoja et al. 2018, arXiv:1812.05905)."""

from typing import Literal

from pydantic import Field

from learner_service.algorithms import masac


class Config(masac.Config):
    """Options of SAC."""

    centralised: Literal[False] = Field(False, description="each agent's own observation alone")


build = masac.Masac
