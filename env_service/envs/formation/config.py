"""Options of `formation`."""

from typing import Literal

from pydantic import Field, model_validator

from murmur.shared.config import Section


class Config(Section):
    """Options of `formation`. Defaults: the published task; configs/formation.yaml: one to learn.

    Rewards are paid in every step in which their condition holds.
    """

    num_followers: int = Field(2, ge=1, le=16, description="UAVs that follow the leader")
    episode_steps: int = Field(1000, ge=1, description="longest episode; then it is cut off")
    observation: Literal["reference", "formation"] = Field(
        "reference",
        description="reference: 7 numbers per agent, the leader sees neither followers nor "
        "obstacle; formation: everyone sees everything, relative to itself",
    )
    normalize: bool = Field(
        False,
        description="reference: the same numbers, shifted and scaled so that 100 px, 10 px/step "
        "and 1 rad are 1",
    )
    role: bool = Field(
        False, description="also tell each agent whether it leads (1) or follows (0)"
    )
    state: bool = Field(
        False, description="also give everything, in the area's frame, as one state"
    )

    time_reward: float = Field(-0.2, description="everyone, always")
    border_reward: float = Field(-1.0, description="an agent within 50 px of the area's edge")
    near_obstacle_reward: float = Field(
        -2.0, description="an agent within 40 px of the obstacle, but for a leader that collides"
    )
    collision_reward: float = Field(-500.0, description="leader, at a collision")
    goal_reward: float = Field(1000.0, description="leader, at the goal")
    goal_formation: float = Field(
        0.0,
        ge=0,
        le=1,
        description="part of goal_reward paid by the share of followers in formation",
    )
    follower_goal_reward: float = Field(
        0.0, description="a follower in formation, when the leader is at the goal"
    )
    goal_distance_weight: float = Field(
        -0.02, description="leader, except at the goal: times its distance to the goal, px"
    )
    progress_weight: float = Field(
        0.0, description="leader: times what it came nearer to the goal, 100 px"
    )
    follower_distance_weight: float = Field(
        -0.005,
        description="times the distance of leader and follower, px: the leader for each follower "
        "out of formation; a follower out of formation, or nearer to the goal than the leader",
    )
    matched_reward: float = Field(
        1.0,
        description="leader for each follower, follower for itself: in formation, its speed within "
        "1 px/step of the leader's (follower: and the leader nearer to the goal)",
    )
    apart_reward: float = Field(
        0.0, description="a follower out of formation; the leader the mean of its followers'"
    )
    spread_weight: float = Field(
        0.0,
        description="times a follower's distance to the leader, 0 up to 25 px and 1 from 125 px; "
        "the leader the mean of its followers'",
    )
    mismatch_weight: float = Field(
        0.0,
        description="a follower in formation: times the difference of speeds, 1 from 10 px/step; "
        "the leader the mean of its followers'",
    )
    speed_weight: float = Field(
        0.0, description="leader: times its speed, 0 at the lowest and 1 at the highest"
    )

    @model_validator(mode="after")
    def _normalise_has_a_meaning(self) -> "Config":
        if self.normalize and self.observation != "reference":
            raise ValueError("normalize is for observation: reference; the other is scaled already")
        return self
