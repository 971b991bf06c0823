"""DDPG for each agent by itself (Lillicrap et al. 2016, arXiv:1509.02971)."""

from typing import Literal

from pydantic import Field

from learner_service.algorithms import maddpg


class Config(maddpg.Config):
    """Options of DDPG."""

    centralised: Literal[False] = Field(False, description="each agent's own observation alone")


build = maddpg.Maddpg
