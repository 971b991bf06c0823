"""Independent Q-learning: each agent learns its own reward (Tan 1993); DQN for one agent."""

from typing import Literal

from pydantic import Field

from learner_service.algorithms import qmix


class Config(qmix.Config):
    """Options of IQL."""

    mixer: Literal["none"] = Field("none", description="each agent learns its own reward")


build = qmix.Qmix
