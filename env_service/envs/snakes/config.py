"""The options of a game of snakes, each with its default and meaning."""

from typing import Literal

from pydantic import Field

from murmur.shared.config import Section


class Config(Section):
    """Three snakes against three on a 10 × 20 torus; the team with the larger total length wins."""

    control: Literal["team", "both"] = Field(
        "team", description="team: three agents against a script; both: six agents, self-play"
    )
    side: Literal["first", "second", "alternate"] = Field(
        "alternate",
        description="agents 0-2 are players 0-2, 3-5, or by the seed: players 0-2 if it is even",
    )
    opponent: Literal["random", "greedy", "mixed"] = Field(
        "greedy", description="team: the script; mixed: drawn for each episode"
    )
    greedy_share: float = Field(
        0.5, ge=0, le=1, description="mixed: share of episodes against greedy, else random"
    )

    observation: Literal["vector26", "vector35", "images", "egocentric"] = Field(
        "vector26",
        description="what each agent sees; see docs/snakes.md; egocentric: its actions are turns",
    )
    normalize: bool = Field(
        False, description="vectors: scale numbers to about [-1, 1]; else board coordinates"
    )
    state: bool = Field(
        False, description="also a global state: the board in 13 images, or the vectors in a row"
    )
    mask: Literal["none", "reverse", "legal"] = Field(
        "legal",
        description="action_mask forbids nothing; turning back; entering a snake other than a tail",
    )

    reward: Literal["game", "shaped", "zero-sum"] = Field(
        "game", description="each agent's change of length; dense; or against the enemy's mean"
    )
    shaped_extras: bool = Field(
        False, description="shaped: also 0.1/(d+1) if not eating, 0.1 if not dying, 0.05 if eating"
    )
