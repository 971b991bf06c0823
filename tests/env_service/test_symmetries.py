"""Announced symmetries against the environments: change the world, step both, compare."""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from murmur.env_service.envs.snakes import Config as SnakesConfig
from murmur.env_service.envs.snakes import Snakes, game
from murmur.env_service.envs.terrain import TerrainEnvironment, simulation
from murmur.env_service.envs.terrain.config import Config as TerrainConfig
from murmur.env_service.envs.terrain.lattice import MOVES
from murmur.learner_service.preprocess.augment.symmetry import Symmetries
from murmur.shared.config.symmetry import ArrayChange, Symmetry, grid_change
from murmur.shared.wire.timestep import Array, TimeStep

CPU = torch.device("cpu")


def changed(env: TerrainEnvironment | Snakes, step: TimeStep, number: int) -> dict[str, Array]:
    """What the learner makes of one environment's observations under a symmetry, from 1."""
    batch = {name: torch.from_numpy(x.copy()) for name, x in step.observation.items()}
    found = Symmetries(env.spec, CPU, [""]).apply(batch, torch.tensor([number]))
    return {name: x.numpy() for name, x in found.items()}


def agree(env: TerrainEnvironment | Snakes, one: TimeStep, two: TimeStep, number: int) -> float:
    """The largest difference between the changed first and the second world's observations."""
    expected = changed(env, one, number)
    return max(
        float(np.abs(expected[name].astype(float) - x.astype(float)).max())
        for name, x in two.observation.items()
    )


def acted(action: NDArray[np.int32], symmetry: Symmetry) -> NDArray[np.int32]:
    return np.array(symmetry.action, np.int32)[action]


# --- terrain ----------------------------------------------------------

# A camera that sees 5 m from 5 m, in ten pixels: positions are ten map cells of 0.5 m apart.
EXACT = {
    "fov_x_deg": 2 * math.degrees(math.atan(0.5)),
    "fov_y_deg": 2 * math.degrees(math.atan(0.5)),
}
EXACT |= {"pixels": 10, "noise": (5e-6,) * 3}  # below 2^-16: the camera never errs


def quiet_moves(
    env: TerrainEnvironment, step: TimeStep, random: np.random.Generator
) -> NDArray[np.int32]:
    """Legal actions [1, A] after which no two UAVs are, or were, in one column."""
    moves, cells = MOVES[env.config.num_actions], env.state.cells[0]
    taken = {tuple(cell[:2]) for cell in cells.tolist()}
    action = np.zeros((1, len(cells)), np.int32)
    for agent, cell in enumerate(cells):
        own = tuple(cell[:2].tolist())
        legal = np.flatnonzero(step.observation["action_mask"][0, agent])
        for k in random.permutation(legal):
            column = tuple((cell + moves[k])[:2].tolist())
            if column == own or column not in taken:
                action[0, agent] = k
                taken.add(column)
                break
        else:
            raise AssertionError("no quiet move; take another seed")
    return action


def fly(config: TerrainConfig, number: int, steps: int, seed: int) -> float:
    """The largest difference between two missions, the second one changed by a symmetry."""
    envs = [TerrainEnvironment(config, 1) for _ in range(2)]
    symmetry = envs[0].spec.symmetries[number - 1]
    change = symmetry.arrays[0]
    random = np.random.default_rng(seed)
    x, y = envs[0].spec.observations[0].shape[-2:]
    grid = grid_change(x, y, flip=change.flip, turns=change.turns)
    start = np.zeros((1, config.num_agents), np.int32)
    begin = np.ones(1, np.bool_), np.zeros(1, np.uint64)
    for env in envs:
        env.step(start, *begin)
    truth = envs[0].state.truth[0].copy()
    columns = random.choice(x * y, config.num_agents, replace=False)
    cells = np.stack([columns // y, columns % y, random.integers(0, 3, len(columns))], 1)
    cells = cells.astype(np.int32)
    mirrored = truth[:, ::-1] if change.flip else truth
    worlds = (
        (truth, cells),
        (
            np.ascontiguousarray(np.rot90(mirrored, change.turns)),
            np.array([(*grid.place(c[:2]), c[2]) for c in cells.tolist()], np.int32),
        ),
    )
    for env, world in zip(envs, worlds, strict=True):
        simulation.begin(env.state, 0, 7, *world, communication_range=25.0)
    worst, on = 0.0, (np.zeros(1, np.bool_), np.zeros(1, np.uint64))
    action = np.full((1, config.num_agents), 5, np.int32)  # down: legal above the lowest level
    for env, (_, at) in zip(envs, worlds, strict=True):
        env.state.cells[0] = at
    steps_seen: list[TimeStep] = []
    for t in range(steps):
        if t:
            action = quiet_moves(envs[0], steps_seen[0], random)
        else:
            action[0, cells[:, 2] == 0] = 0  # up
        steps_seen = [
            env.step(a, *on) for env, a in zip(envs, (action, acted(action, symmetry)), strict=True)
        ]
        np.testing.assert_allclose(steps_seen[0].reward, steps_seen[1].reward, atol=1e-4)
        worst = max(worst, agree(envs[0], steps_seen[0], steps_seen[1], number))
    return worst


@pytest.mark.parametrize("number", range(1, 8))
def test_terrain_plays_alike_when_turned_and_mirrored(number: int) -> None:
    assert fly(TerrainConfig(**EXACT, expected_gain=True), number, 6, seed=number) < 1e-4


@pytest.mark.parametrize("channels_by", ["server", "learner"])
def test_reference_mission_differs_by_a_map_cell_at_most(channels_by: str) -> None:
    config = TerrainConfig(channels_by=channels_by, noise=(5e-6,) * 3)
    # A pixel of the agents' maps is 45 map cells wide: a border that is off by one shifts 1/45.
    assert 0 < fly(config, 5, 6, seed=3) < 0.2


def test_terrain_without_a_square_area_has_flips_and_half_turns() -> None:
    found = TerrainEnvironment(TerrainConfig(area_y_m=40.0), 1).spec.symmetries
    assert [s.name for s in found] == ["180 degrees", "flip, 0 degrees", "flip, 180 degrees"]


def test_terrain_with_an_even_lattice_has_no_symmetry() -> None:
    assert not TerrainEnvironment(TerrainConfig(area_x_m=45.0, area_y_m=45.0), 1).spec.symmetries
    config = TerrainConfig(area_x_m=45.0, area_y_m=45.0, actor_channels=("prob",))
    assert len(TerrainEnvironment(config, 1).spec.symmetries) == 7


# --- snakes -----------------------------------------------------------


def mirror_games(source: game.Games, to: game.Games, change: ArrayChange) -> None:
    """Make a game's mirrored copy."""
    grid = grid_change(game.ROWS, game.COLUMNS, flip=change.flip, turns=change.turns)
    places = [grid.place(divmod(cell, game.COLUMNS)) for cell in range(game.CELLS)]
    cell = np.array([r * game.COLUMNS + c for r, c in places])
    steps = [(-1, 0), (1, 0), (0, -1), (0, 1)]
    direction = np.array([steps.index(grid.direction(s)) for s in steps])
    for name, array in source._asdict().items():
        getattr(to, name)[:] = array
    to.body[:] = cell[source.body]
    to.heading[:] = direction[source.heading]
    to.bean[:] = np.where(source.bean < 0, -1, cell[source.bean])
    game.paint(to, 0)


WAYS = [ArrayChange("", flip=True), ArrayChange("", flip=True, turns=2), ArrayChange("", turns=2)]


@pytest.mark.parametrize("way", range(3))
@pytest.mark.parametrize(
    "options",
    [
        {"observation": "egocentric", "state": True},
        {"observation": "vector26"},
        {"observation": "vector35", "normalize": True, "state": True},
        {"observation": "images", "state": True},
    ],
    ids=lambda options: str(options["observation"]),
)
def test_snakes_play_alike_on_a_mirrored_board(options: dict[str, object], way: int) -> None:
    config = SnakesConfig.model_validate({"control": "both", "mask": "legal", **options})
    one, two = Snakes(config, 1), Snakes(config, 1)
    egocentric = config.observation == "egocentric"
    number = 1 if egocentric else way + 1
    symmetry = one.spec.symmetries[number - 1]
    if egocentric and way == 2:
        symmetry = Symmetry("turned by half: nothing changes as seen from a head", ())
    begin = np.ones(1, np.bool_), np.full(1, 11, np.uint64)
    on = np.zeros(1, np.bool_), np.zeros(1, np.uint64)
    idle = np.zeros((1, game.NUM_SNAKES), np.int32)
    step = one.step(idle, *begin)
    two.step(idle, *begin)
    random, compared = np.random.default_rng(0), 0
    for _ in range(80):
        mask = step.observation["action_mask"][0]
        action = np.array([[random.choice(np.flatnonzero(m)) for m in mask]], np.int32)
        if egocentric:  # turns back are drawn at random
            action[action == 1] = 0
        mirror_games(one.games, two.games, WAYS[way])
        eaten, deaths = one.games.eaten.sum(), one.games.deaths.sum()
        step = one.step(action, *on)
        other = two.step(acted(action, symmetry) if symmetry.action else action, *on)
        np.testing.assert_array_equal(step.reward, other.reward)
        # New beans, and restarted snakes, are elsewhere.
        if one.games.eaten.sum() == eaten and one.games.deaths.sum() == deaths:
            which = number if symmetry.action else 0
            assert agree(one, step, other, which) < 1e-5
            compared += 1
    assert compared > 30


def test_snakes_that_start_anew_break_the_symmetry() -> None:
    """The first free place in row-major order is another one on a mirrored board."""
    board = SnakesConfig(control="both", observation="images", mask="none")
    one, two = Snakes(board, 1), Snakes(board, 1)
    begin = np.ones(1, np.bool_), np.full(1, 11, np.uint64)
    on = np.zeros(1, np.bool_), np.zeros(1, np.uint64)
    idle = np.zeros((1, game.NUM_SNAKES), np.int32)
    step = one.step(idle, *begin)
    two.step(idle, *begin)
    random = np.random.default_rng(0)
    while not one.games.deaths.sum():
        mirror_games(one.games, two.games, WAYS[0])
        action = random.integers(0, 4, (1, 6)).astype(np.int32)
        step = one.step(action, *on)
        other = two.step(acted(action, one.spec.symmetries[0]), *on)
    assert agree(one, step, other, 1) > 0
