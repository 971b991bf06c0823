"""N games of snakes behind the VectorEnvironment contract, advanced by one compiled call."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from env_service.compiled import compiled
from env_service.environment import VectorEnvironment
from env_service.envs.snakes import game, observation, opponents, reward
from env_service.envs.snakes.config import Config
from env_service.envs.snakes.egocentric import SIZE, TURNED, draw_egocentric
from env_service.envs.snakes.game import (
    CELLS,
    COLUMNS,
    MAX_STEPS,
    NUM_ACTIONS,
    NUM_SNAKES,
    ROWS,
    TEAM,
    Games,
)
from env_service.envs.snakes.ground import Ground, ground, survey
from env_service.envs.snakes.symmetries import symmetries
from shared.wire.spec import ACTION_MASK, AGENT_CELL, STATE, ArraySpec, Discrete, EnvSpec
from shared.wire.timestep import Array, StepType, TimeStep

_SIDES = {"first": 0, "second": 1, "alternate": -1}
_OPPONENTS = {"random": opponents.RANDOM, "greedy": opponents.GREEDY, "mixed": -1}


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
                    move[player] = TURNED[games.heading[n, player], action[n, number]]
            opponents.act(games, n, move)
            game.play(games, n, move)
        if settings.turns:
            survey(games, n, ground)
        for agent in range(rows.reward.shape[1]):
            _write_agent(settings, games, ground, n, agent, restart[n], rows, legal)
        if rows.state.shape[0]:
            observation.draw_state(games, n, rows.state[n])
        reward.measure(games, n, rows.metrics[n])


@compiled()
def _write_agent(
    settings: Settings,
    games: Games,
    ground: Ground,
    n: int,
    agent: int,
    begins: bool,
    rows: Rows,
    legal: NDArray[np.uint8],
) -> None:
    """Write one agent's observation, mask and reward; `legal` [K] is working memory."""
    player = observation.seen(agent, games.side[n])
    head = games.body[n, player, 0]
    rows.cell[n, agent, 0], rows.cell[n, agent, 1] = head // COLUMNS, head % COLUMNS
    if settings.turns:
        draw_egocentric(games, n, player, ground, rows.vectors[n, agent])
    elif rows.vectors.shape[1]:
        observation.draw_vector(games, n, player, settings.scale, rows.vectors[n, agent])
    if rows.images.shape[1]:
        observation.draw_images(games, n, player, rows.images[n, agent])
    if rows.mask.shape[1]:
        observation.draw_mask(games, n, player, settings.mask, legal)
        for choice in range(NUM_ACTIONS):
            direction = TURNED[games.heading[n, player], choice]
            rows.mask[n, agent, choice] = legal[direction if settings.turns else choice]
    rows.reward[n, agent] = (
        0.0 if begins else reward.step_reward(games, n, player, settings.reward, settings.extras)
    )


def _settings(config: Config, width: int) -> Settings:
    """Make the constants that follow from the options and the width of a vector."""
    return Settings(
        side=_SIDES[config.side],
        opponent=_OPPONENTS[config.opponent] if config.control == "team" else opponents.GIVEN,
        greedy_share=config.greedy_share,
        mask=observation.MASKS[config.mask],
        reward=reward.REWARDS[config.reward],
        extras=config.shaped_extras,
        scale=observation.vector_scale(width, config.normalize)
        if config.observation in observation.VECTORS
        else np.zeros(0, np.float32),
        turns=config.observation == "egocentric",
    )


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
        self.config, self.num_envs = config, num_envs
        self.games, self._ground = game.games(num_envs), ground()
        agents = TEAM if config.control == "team" else NUM_SNAKES
        turns = config.observation == "egocentric"
        width = SIZE if turns else observation.VECTORS.get(config.observation, 0)
        self._settings = _settings(config, width)
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
            max_episode_steps=MAX_STEPS,
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
