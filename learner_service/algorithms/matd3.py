"""MATD3: MADDPG with the three changes of TD3 (Ackermann et al. 2019, arXiv:1910.01465)."""

from pydantic import Field

from learner_service.algorithms import maddpg


class Config(maddpg.Config):
    """Options of MATD3."""

    twin_critics: bool = Field(True, description="two critics, the lesser target counts")
    policy_delay: int = Field(
        2, ge=1, description="the policy and the targets move on every so many updates"
    )
    target_noise: float = Field(
        0.2,
        ge=0,
        description="continuous: deviation of noise on target actions, in halves of their range",
    )


build = maddpg.Maddpg
