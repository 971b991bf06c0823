"""Three snakes against three, on a torus: the environment plug-in `snakes`.

All N games are advanced by one compiled call.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import override

from murmur.env_service.compiled import compiled
from murmur.env_service.environment import (
    BaselineFactory,
    RandomPolicy,
    ScriptedPolicy,
    VectorEnvironment,
)
from murmur.env_service.envs.snakes import egocentric, game, observation, opponents, reward
from murmur.env_service.envs.snakes.game import (
    CELLS,
    COLUMNS,
    NUM_ACTIONS,
    NUM_SNAKES,
    ROWS,
    TEAM,
    Games,
)
from murmur.env_service.envs.snakes.ground import Ground, ground, survey
from murmur.shared.config import Section
from murmur.shared.config.symmetry import ArrayChange, Symmetry, grid_change
from murmur.shared.wire.spec import ACTION_MASK, AGENT_CELL, STATE, ArraySpec, Discrete, EnvSpec
from murmur.shared.wire.timestep import Array, StepType, TimeStep

_SIDES = {"first": 0, "second": 1, "alternate": -1}
_OPPONENTS = {"random": opponents.RANDOM, "greedy": opponents.GREEDY, "mixed": -1}


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


class Settings(NamedTuple):
    """The constants of all games.

    Attributes:
        side: side of the agents, 0 or 1; -1: 0 for even seeds, 1 for odd ones.
        opponent: code of the opponent; see opponents.assign.
        greedy_share: probability of the greedy opponent; see opponents.assign.
        mask: code of the action mask; see observation.draw_mask.
        reward: code of the reward; see reward.step_reward.
        extras: true for the shaped reward's extras; see reward.step_reward.
        scale: [F] factors of the vector; see observation.draw_vector.
        turns: true if agents observe, and act, in their own frame: see egocentric.
    """

    side: int
    opponent: int
    greedy_share: float
    mask: int
    reward: int
    extras: bool
    scale: NDArray[np.float32]
    turns: bool


class Rows(NamedTuple):
    """Buffers of the environment's results; an array that is not configured has no agents.

    Attributes:
        vectors: [N, A or 0, F] vector observations.
        images: [N, A or 0, 11, CELLS] image observations.
        state: [N or 0, 13, CELLS] global state in images.
        cell: [N, A, 2] row and column of each head.
        mask: [N, A or 0, 4] action masks.
        reward: [N, A] rewards.
        metrics: [N, M] metrics.
    """

    vectors: NDArray[np.float32]
    images: NDArray[np.uint8]
    state: NDArray[np.uint8]
    cell: NDArray[np.int32]
    mask: NDArray[np.uint8]
    reward: NDArray[np.float32]
    metrics: NDArray[np.float32]


@compiled()
def advance(
    settings: Settings,
    games: Games,
    ground: Ground,
    action: NDArray[np.int32],
    restart: NDArray[np.bool_],
    seeds: NDArray[np.uint64],
    rows: Rows,
) -> None:
    """Begin or play one step of every game, then write its agents' observations and rewards.

    Args:
        settings: constants of the games.
        games: states of the games, updated.
        ground: memory for searches.
        action: [N, 6] directions, those of the learner's side first; columns 3-5 are ignored
            if a script plays the other side.
        restart: [N] bool, true for games to restart.
        seeds: [N] seeds of the games that begin.
        rows: buffers of the results, overwritten.
    """
    move, legal = np.empty(NUM_SNAKES, np.int32), np.empty(NUM_ACTIONS, np.uint8)
    for n in range(len(restart)):
        if restart[n]:
            game.begin(games, n, seeds[n])
            odd = int(seeds[n] & np.uint64(1))
            games.side[n] = odd if settings.side < 0 else settings.side
            opponents.assign(games, n, settings.opponent, settings.greedy_share)
        else:
            for number in range(NUM_SNAKES):
                player = observation.seen(number, games.side[n])
                move[player] = action[n, number]
                if settings.turns:
                    move[player] = egocentric.TURNED[games.heading[n, player], action[n, number]]
            opponents.act(games, n, move)
            game.play(games, n, move)
        if settings.turns:
            survey(games, n, ground)
        for agent in range(rows.reward.shape[1]):
            player = observation.seen(agent, games.side[n])
            head = games.body[n, player, 0]
            rows.cell[n, agent, 0], rows.cell[n, agent, 1] = head // COLUMNS, head % COLUMNS
            if settings.turns:
                egocentric.draw_egocentric(games, n, player, ground, rows.vectors[n, agent])
            elif rows.vectors.shape[1]:
                observation.draw_vector(games, n, player, settings.scale, rows.vectors[n, agent])
            if rows.images.shape[1]:
                observation.draw_images(games, n, player, rows.images[n, agent])
            if rows.mask.shape[1]:
                observation.draw_mask(games, n, player, settings.mask, legal)
                for choice in range(NUM_ACTIONS):
                    direction = egocentric.TURNED[games.heading[n, player], choice]
                    rows.mask[n, agent, choice] = legal[direction if settings.turns else choice]
            rows.reward[n, agent] = (
                0.0
                if restart[n]
                else reward.step_reward(games, n, player, settings.reward, settings.extras)
            )
        if rows.state.shape[0]:
            observation.draw_state(games, n, rows.state[n])
        reward.measure(games, n, rows.metrics[n])


def _rows(config: Config, n: int, agents: int, width: int) -> Rows:
    """Allocate the buffers of N games, all zero."""
    images, masked = config.observation == "images", config.mask != "none"
    return Rows(
        vectors=np.zeros((n, agents if width else 0, width), np.float32),
        images=np.zeros((n, agents if images else 0, observation.NUM_IMAGES, CELLS), np.uint8),
        state=np.zeros(
            (n if images and config.state else 0, observation.NUM_STATE_IMAGES, CELLS), np.uint8
        ),
        cell=np.zeros((n, agents, 2), np.int32),
        mask=np.zeros((n, agents if masked else 0, NUM_ACTIONS), np.uint8),
        reward=np.zeros((n, agents), np.float32),
        metrics=np.zeros((n, len(reward.METRICS)), np.float32),
    )


def _observations(config: Config, rows: Rows) -> dict[str, tuple[Array, bool]]:
    """Return (view of `rows`, whether it is per agent) of each observation by name."""
    n, agents = rows.reward.shape
    seen: dict[str, tuple[Array, bool]] = {}
    if config.observation == "images":
        seen["maps"] = rows.images.reshape(n, agents, -1, ROWS, COLUMNS), True
        if config.state:
            seen[STATE] = rows.state.reshape(n, -1, ROWS, COLUMNS), False
        seen[AGENT_CELL] = rows.cell, True
    else:
        seen["observation"] = rows.vectors, True
        if config.state:
            seen[STATE] = rows.vectors.reshape(n, -1), False
    if config.mask != "none":
        seen[ACTION_MASK] = rows.mask, True
    return seen


class Snakes(VectorEnvironment):
    """N games; see docs/snakes.md. An agent is a snake, on `side` of its game.

    Metrics are valid on every row; win, draw and loss are zero before LAST.

    Attributes:
        config: options of the games.
        games: states of the games, which scripted policies may read.
    """

    def __init__(self, config: Config, num_envs: int) -> None:
        """Allocate N games; each starts with the first `step` that restarts it."""
        self.config, self.num_envs = config, num_envs
        self.games, self._ground = game.games(num_envs), ground()
        agents = TEAM if config.control == "team" else NUM_SNAKES
        turns = config.observation == "egocentric"
        width = egocentric.SIZE if turns else observation.VECTORS.get(config.observation, 0)
        self._settings = Settings(
            side=_SIDES[config.side],
            opponent=_OPPONENTS[config.opponent] if config.control == "team" else opponents.GIVEN,
            greedy_share=config.greedy_share,
            mask=observation.MASKS[config.mask],
            reward=reward.REWARDS[config.reward],
            extras=config.shaped_extras,
            scale=observation.vector_scale(width, config.normalize)
            if config.observation in observation.VECTORS
            else np.zeros(0, np.float32),
            turns=turns,
        )
        self._rows = _rows(config, num_envs, agents, width)
        self._action = np.zeros((num_envs, NUM_SNAKES), np.int32)
        self._restart = np.zeros(num_envs, np.bool_)
        self._seeds = np.zeros(num_envs, np.uint64)
        self._step_type = np.zeros(num_envs, np.uint8)
        self._discount = np.ones(num_envs, np.float32)
        seen = _observations(config, self._rows)
        self.spec = EnvSpec(
            name="snakes",
            num_agents=agents,
            observations=tuple(
                ArraySpec(name, array.dtype.name, array.shape[1 + each :], each)
                for name, (array, each) in seen.items()
            ),
            action=Discrete(NUM_ACTIONS),
            metrics=reward.METRICS,
            max_episode_steps=game.MAX_STEPS,
            symmetries=symmetries(config),
            agents=tuple(f"snake_{i}" for i in range(agents)),
        )
        self._timestep = TimeStep(
            step_type=self._step_type,
            reward=self._rows.reward,
            discount=self._discount,
            observation={name: array for name, (array, _) in seen.items()},
            metrics=dict(zip(reward.METRICS, self._rows.metrics.T, strict=True)),
        )

    @override
    def step(
        self, action: Array, restart: NDArray[np.bool_], seeds: NDArray[np.uint64]
    ) -> TimeStep:
        over, own = self.games.over, self._action[:, : self.spec.num_agents]
        own[:] = np.where(restart[:, None], 0, action)
        self._restart[:], self._seeds[:] = restart, seeds  # arrays of one kind: compiled once
        assert 0 <= own.min() <= own.max() < NUM_ACTIONS, "an action is none of 0 .. 3"
        assert not (over & ~restart).any(), "an episode continued after its LAST row"
        advance(
            self._settings,
            self.games,
            self._ground,
            self._action,
            self._restart,
            self._seeds,
            self._rows,
        )
        self._step_type.fill(StepType.MID)
        self._step_type[over] = StepType.LAST
        self._step_type[restart] = StepType.FIRST
        np.subtract(1, over, out=self._discount)
        return self._timestep

    def render_state(self, index: int) -> Mapping[str, Array]:
        """Return copies of the arrays that a picture needs.

        Returns:
            board: [10, 20] uint8, 0 empty, 1 bean, 2-7 player + 2.
            heads: [6, 2] row, column.
            lengths, scores: [6] by player.
            side, time: 0 if the agents are players 0-2, else 1; steps played.
        """
        games = self.games
        return {
            "board": games.board[index].reshape(ROWS, COLUMNS).copy(),
            "heads": np.stack(np.divmod(games.body[index, :, 0], COLUMNS), axis=1),
            "lengths": games.length[index].copy(),
            "scores": games.score[index].copy(),
            "side": games.side[index].copy(),
            "time": games.time[index].copy(),
        }


_MIRRORS = {"left and right": (True, 0), "up and down": (True, 2), "both": (False, 2)}


def symmetries(config: Config) -> tuple[Symmetry, ...]:
    """Return the symmetries of a configured game, without the identity.

    The rules are the same on a mirrored board, but for two: a dead snake restarts at the first free
    place in row-major order, along a search that prefers right and down, and numbers of missing
    beans (-1, -1) of vectors would be mirrored too. Both are rare, so the symmetries hold nearly
    always. What is drawn at random (beans, the way of a snake that tries to turn back) is as likely
    mirrored.
    """
    agents = TEAM if config.control == "team" else NUM_SNAKES
    if config.observation == "egocentric":
        order, signs = egocentric.mirrored()
        arrays = _vector(config, agents, order, signs, [0.0] * egocentric.SIZE)
        return (Symmetry("left and right", arrays, (0, 1, 3, 2)),)
    found = []
    for name, (flip, turns) in _MIRRORS.items():
        grid = grid_change(ROWS, COLUMNS, flip=flip, turns=turns)
        steps = [tuple(step) for step in egocentric.STEP.tolist()]
        action = tuple(steps.index(grid.direction(step)) for step in steps)
        if config.observation == "images":
            changed = ("maps", STATE) if config.state else ("maps",)
            place, shift = tuple(map(float, grid.signs)), tuple(map(float, grid.offsets))
            cell = ArrayChange(AGENT_CELL, signs=place, offsets=shift)
            arrays = (*(ArrayChange(array, flip=flip, turns=turns) for array in changed), cell)
        else:
            arrays = _vector(config, agents, *_numbers(config, action, flip=flip, turns=turns))
        found.append(Symmetry(name, arrays, action))
    return tuple(found)


def _vector(
    config: Config, agents: int, order: list[int], signs: list[float], offsets: list[float]
) -> tuple[ArrayChange, ...]:
    """Return the changes of an agent's vector, and of the state of all agents' vectors."""
    one = ArrayChange("observation", False, 0, tuple(order), tuple(signs), tuple(offsets))
    if not config.state:
        return (one,)
    size = len(order)
    every = tuple(size * agent + i for agent in range(agents) for i in order)
    whole = ArrayChange(STATE, False, 0, every, one.signs * agents, one.offsets * agents)
    return one, whole


def _numbers(
    config: Config, action: tuple[int, ...], *, flip: bool, turns: int
) -> tuple[list[int], list[float], list[float]]:
    """Return order, signs and offsets of a vector of board coordinates; see draw_vector."""
    width, longer = observation.VECTORS[config.observation], config.observation == "vector35"
    grid = grid_change(ROWS, COLUMNS, flip=flip, turns=turns)
    scale = observation.vector_scale(width, config.normalize)
    order, signs, offsets = list(range(width)), np.ones(width), np.zeros(width)
    for direction, new in enumerate(action):
        order[2 + new] = 2 + direction
    beans = range(6, 6 + 2 * game.NUM_BEANS, 2)
    first = 6 + 2 * game.NUM_BEANS + 7 * longer
    others = range(first, first + 2 * (NUM_SNAKES - 1), 2)
    for at in chain((0,), beans, others):
        signs[at], signs[at + 1] = grid.signs
        offsets[at], offsets[at + 1] = grid.offsets * scale[at : at + 2]
    if longer:  # offsets of the nearest beans: columns, rows, distance
        for at in (16, 19):
            signs[at], signs[at + 1] = grid.signs[1], grid.signs[0]
    return order, signs.tolist(), offsets.tolist()


def random(environment: VectorEnvironment) -> ScriptedPolicy:
    """Make a policy that is uniform over the four directions, legal or not."""
    return RandomPolicy(environment, legal=False)


class GreedyPolicy:
    """A policy in which every agent goes for a bean: see opponents.greedy."""

    def __init__(self, environment: VectorEnvironment) -> None:
        """Keep the games of the environment, which must be `snakes`."""
        snakes = cast(Snakes, environment)
        self._games, self._turns = snakes.games, snakes.config.observation == "egocentric"
        self._action = np.zeros((environment.num_envs, environment.spec.num_agents), np.int32)

    def act(self, timestep: TimeStep) -> NDArray[np.int32]:
        """Return [N, A] int32 directions, or turns."""
        _act_greedily(self._games, self._turns, self._action)
        return self._action


@compiled()
def _act_greedily(games: Games, turns: bool, action: NDArray[np.int32]) -> None:
    """Fill action [N, A] for the agents of every game; with `turns`, in their own frame."""
    move = np.empty(NUM_SNAKES, np.int32)
    for n in range(len(action)):
        opponents.greedy(games, n, 0, move)
        opponents.greedy(games, n, TEAM, move)
        for agent in range(action.shape[1]):
            player = observation.seen(agent, games.side[n])
            action[n, agent] = move[player]
            if turns:
                action[n, agent] = egocentric.turn_of(games.heading[n, player], move[player])


make = Snakes
BASELINES: dict[str, BaselineFactory] = {"random": random, "greedy": GreedyPolicy}
