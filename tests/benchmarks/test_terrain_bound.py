"""The planners that bound terrain."""

from benchmarks.terrain_bound import fly, truth
from murmur.env_service.envs.terrain import Config, TerrainEnvironment
from murmur.env_service.envs.terrain.planning import game_of


def test_agents_in_one_column_are_never_planned() -> None:
    """Flying checks that every agent does what was planned for it."""
    environment = TerrainEnvironment(Config(num_agents=3, budget=3), 1)
    game = game_of(environment.config, environment.mission)
    entropy, f1 = fly(environment, game, truth(game), seed=1, width=4)
    assert 0 < entropy < 1
    assert 0 < f1 <= 1
