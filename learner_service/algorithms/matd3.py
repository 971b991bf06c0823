"""MATD3: MADDPG with the three changes of TD3 (Ackermann et al. 2019, arXiv:1910.01465)."""

from pydantic import Field

from learner_service.algorithms import maddpg


class Config(maddpg.Config):
    """Options of MATD3."""

    twin_critics: bool = Field(True, description="two critics, the lesser target counts")
    policy_delay: int = Field(
        2, ge=1, description="critic updates per update of the policy and the targets"
    )
    target_noise: float = Field(
        0.2,
        ge=0,
        description="continuous: deviation of noise on target actions, in halves of their range",
    )


build = maddpg.Maddpg
