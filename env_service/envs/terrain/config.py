"""The options of a terrain-monitoring mission, each with its default, unit and meaning."""

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, model_validator

World = Literal["half-plane", "corner", "band", "corners-2", "corners-4", "gaussian", "raster"]
ActorChannel = Literal[
    "budget", "agent_id", "position", "w_entropy", "local_w_entropy", "prob", "footprint"
]
CriticChannel = Literal["positions", "w_entropy", "prob", "footprints"]


class Config(BaseModel):
    """A team of UAVs maps a region of interest from a camera that errs more with altitude.

    The defaults are the mission of Westheider, Rückin, Popović 2023, "Multi-UAV Adaptive Path
    Planning Using Deep Reinforcement Learning" (arXiv:2303.01150).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_agents: int = Field(4, ge=1, le=64, description="UAVs in the team")
    budget: int = Field(14, ge=0, description="moves after the first; an episode has budget + 1")
    num_actions: Literal[4, 6, 9, 27] = Field(
        6, description="4: along x, y; 6: and z; 9: eight neighbours; 27: eight neighbours and z"
    )

    area_x_m: float = Field(50.0, gt=0, description="side of the area along x (map rows), metres")
    area_y_m: float = Field(50.0, gt=0, description="side of the area along y (columns), metres")
    spacing_m: float = Field(5.0, gt=0, description="distance of neighbouring positions, metres")
    altitudes_m: tuple[PositiveFloat, ...] = Field(
        (5.0, 10.0, 15.0), min_length=1, description="altitudes of the lattice, ascending, metres"
    )
    start_altitude_m: float | None = Field(
        None, description="altitude at the start, metres; null for the highest"
    )

    noise: tuple[Annotated[float, Field(gt=0, lt=0.5)], ...] = Field(
        (0.01, 0.265, 0.375), description="probability of a wrong cell at each altitude"
    )
    fov_x_deg: float = Field(60.0, gt=0, lt=180, description="camera's opening along x, degrees")
    fov_y_deg: float = Field(60.0, gt=0, lt=180, description="camera's opening along y, degrees")
    pixels: int = Field(
        57, ge=1, description="camera pixels along x; one is one map cell at the lowest altitude"
    )

    communication_range_m: float = Field(
        25.0, ge=0, description="how far a message is heard (3-D distance), metres"
    )
    communication_ranges_m: tuple[NonNegativeFloat, ...] = Field(
        (), description="if given, each episode draws its range from these, e.g. 0, 15, 25, 100"
    )
    failure_rate: float = Field(0.0, ge=0, le=1, description="share of messages lost in range")
    mask_collisions: bool = Field(
        True, description="mask moves onto a column where an agent with a lower id stands now"
    )

    world: World = Field("half-plane", description="generator of the ground truth")
    gaussian_exponent: float = Field(
        5.0, ge=0, description="gaussian: power spectrum k^-exponent; larger is smoother"
    )
    raster: str = Field("jacksboro", description="raster: 'jacksboro' or a TIFF, PNG or NPY file")
    raster_crop: float = Field(
        0.5, gt=0, le=1, description="raster: side of the crop as a share of the largest that fits"
    )
    raster_resampling: Literal["area", "nearest"] = Field(
        "area", description="raster: how the crop's values become the map's, before the threshold"
    )
    raster_augment: bool = Field(True, description="raster: flip and turn every crop at random")
    raster_threshold: float | None = Field(
        None, description="raster: cells above this value are of interest; null for the quantile"
    )
    raster_quantile: float = Field(
        0.55, gt=0, lt=1, description="raster: share of cells that are not of interest"
    )
    raster_quantile_of: Literal["crop", "raster"] = Field(
        "crop", description="raster: what the quantile is taken over"
    )
    raster_share: tuple[float, float] = Field(
        (0.1, 0.9), description="raster: a crop whose share of interest is outside is redrawn"
    )

    actor_channels: tuple[ActorChannel, ...] = Field(
        ("budget", "agent_id", "position", "w_entropy", "local_w_entropy", "prob", "footprint"),
        min_length=1,
        description="channels of each agent's map, in this order",
    )
    critic_channels: tuple[CriticChannel, ...] = Field(
        ("positions", "w_entropy", "prob", "footprints"),
        description="channels of the global state, in this order; none leaves the state out",
    )
    expected_gain: bool = Field(
        False,
        description="also observe what each legal action is expected to gain, which the baseline "
        "information-gain maximises, estimated from a ninth of the cells; environment steps take "
        "twice as long",
    )
    channels_by: Literal["server", "learner"] = Field(
        "server",
        description="who computes channels: 'learner': it fills in budget and agent_id and takes "
        "entropies of probabilities, so fewer channels travel",
    )

    reward_scale: float = Field(22.0, description="factor of the relative entropy reduction")
    reward_offset: float = Field(-0.5, description="added to the reward of every step")
    interest_weight: float = Field(
        0.0, description="reward per bit that the metric entropy, which takes the truth, falls"
    )
    coverage_weight: float = Field(0.0, description="reward per share of the map newly seen")
    distance_weight: float = Field(0.0, description="penalty per lattice spacing flown")
    overlap_weight: float = Field(
        0.0, description="penalty per share of one's footprint that another agent sees as well"
    )
    collision_weight: float = Field(0.0, description="penalty per other agent within the distance")
    collision_distance_m: float = Field(
        5.0, ge=0, description="horizontal distance that counts as a collision, metres"
    )
    altitude_weight: float = Field(
        0.0, description="reward of 0.01 var(z) + 0.1 mean |z_i - z_j|, altitudes in metres"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """Check the combinations of fields."""
        for name, side in (("area_x_m", self.area_x_m), ("area_y_m", self.area_y_m)):
            steps = side / self.spacing_m
            if steps < 1 or abs(steps - round(steps)) > 1e-6:
                raise ValueError(
                    f"{name} = {side} must be a multiple of spacing_m = {self.spacing_m}"
                )
        if any(low >= high for low, high in pairwise(self.altitudes_m)):
            raise ValueError(f"altitudes_m = {self.altitudes_m} must be ascending")
        if len(self.noise) != len(self.altitudes_m):
            raise ValueError(
                f"noise has {len(self.noise)} values; need one for each of the "
                f"{len(self.altitudes_m)} altitudes_m"
            )
        if self.start_altitude_m is not None and self.start_altitude_m not in self.altitudes_m:
            raise ValueError(
                f"start_altitude_m = {self.start_altitude_m} is not one of {self.altitudes_m}"
            )
        x, y = round(self.area_x_m / self.spacing_m) + 1, round(self.area_y_m / self.spacing_m) + 1
        if self.num_agents > x * y:
            raise ValueError(f"num_agents = {self.num_agents} do not fit on {x} x {y} positions")
        low, high = self.raster_share
        if not 0 <= low < high <= 1:
            raise ValueError(f"raster_share = {self.raster_share} must be ascending within [0, 1]")
        if self.channels_by == "learner" and set(self.actor_channels) <= {"budget", "agent_id"}:
            raise ValueError(
                f"channels_by = learner needs a drawn channel; actor_channels = "
                f"{self.actor_channels} has none: add one, or set channels_by=server"
            )
        for name, channels in (
            ("actor_channels", self.actor_channels),
            ("critic_channels", self.critic_channels),
        ):
            if len(set(channels)) < len(channels):
                raise ValueError(f"{name} = {channels} names a channel twice")
        return self
