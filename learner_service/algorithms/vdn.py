"""VDN: QMIX whose team value is the sum of the agents' (Sunehag et al. 2018, arXiv:1706.05296)."""

from typing import Literal

from pydantic import Field

from learner_service.algorithms import qmix


class Config(qmix.Config):
    """Options of VDN."""

    mixer: Literal["vdn"] = Field("vdn", description="the sum of the agents' values")


build = qmix.Qmix
