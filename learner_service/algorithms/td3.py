"""TD3 for each agent by itself (Fujimoto et al. 2018, arXiv:1802.09477)."""

from typing import Literal

from pydantic import Field

from learner_service.algorithms import matd3


class Config(matd3.Config):
    """Options of TD3."""

    centralised: Literal[False] = Field(False, description="each agent's own observation alone")


build = matd3.build
