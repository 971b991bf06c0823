"""The incremental environment equals the plain full-map one, from the same camera reports."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from terrain_reference import ReferenceMission

from murmur.env_service.envs.terrain import Config, TerrainEnvironment
from murmur.env_service.envs.terrain.lattice import MOVES
from murmur.shared.wire.spec import ACTION_MASK, AGENT_CELL, STATE

CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    "gaussian, from 5 m": {"world": "gaussian", "start_altitude_m": 5.0},
    "other geometry": {
        "num_agents": 3,
        "area_x_m": 40.0,
        "area_y_m": 60.0,
        "num_actions": 27,
        "fov_x_deg": 50.0,
        "fov_y_deg": 75.0,
        "pixels": 31,
        "altitudes_m": (4.0, 9.0),
        "noise": (0.1, 0.3),
        "budget": 9,
        "communication_ranges_m": (0.0, 15.0, 25.0, 100.0),
        "failure_rate": 0.3,
        "world": "band",
    },
    "nine actions, coarse": {
        "num_actions": 9,
        "pixels": 20,
        "altitudes_m": (10.0,),
        "noise": (0.2,),
        "spacing_m": 2.5,
        "num_agents": 5,
        "communication_range_m": 8.0,
        "world": "raster",
        "actor_channels": ("prob", "footprint", "position"),
        "critic_channels": ("prob",),
    },
}


def clone(reports: NDArray[np.uint8], rects: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
    return [
        seen[: r[1] - r[0], : r[3] - r[2]].copy() for seen, r in zip(reports, rects, strict=True)
    ]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("seed", [3, 4])
def test_equals_full_maps(name: str, seed: int) -> None:
    config = Config(**CONFIGS[name])
    env = TerrainEnvironment(config, 1)
    state = env.state
    generator = np.random.default_rng(seed)
    step = env.reset(np.array([seed], np.uint64))
    plain = ReferenceMission(config, state.truth[0].copy(), float(state.range[0]))
    visits = np.zeros(len(config.altitudes_m))
    for row in range(config.budget + 2):
        if row:
            before = state.cells[0].copy()
            mask = step.observation[ACTION_MASK]
            action = np.where(mask, generator.random(mask.shape), -1).argmax(-1).astype(np.int32)
            step = env.step(action, np.zeros(1, np.bool_), np.zeros(1, np.uint64))
            moved = MOVES[config.num_actions][state.executed[0]]
            np.testing.assert_array_equal(state.cells[0], before + moved)
            visits += np.bincount(state.cells[0, :, 2], minlength=len(visits))
        reports = clone(env.mission.scratch.seen, state.rects[0])
        plain.advance(state.cells[0], reports, state.heard[0])
        allowed = plain.in_range()
        assert (state.heard[0] <= allowed).all()
        if config.failure_rate == 0:
            np.testing.assert_array_equal(state.heard[0], allowed)
        assert state.heard[0].diagonal().all()

        odds = state.odds[0].astype(np.float64)
        p_plain = 1 / (1 + np.exp(-plain.beliefs))
        np.testing.assert_allclose(odds / (1 + odds), p_plain, rtol=0, atol=1e-5)
        if row:
            wanted = config.reward_scale * plain.gain + config.reward_offset
            np.testing.assert_allclose(step.reward, wanted, rtol=0, atol=1e-5)
        else:
            assert not step.reward.any()
        for metric, value in plain.metrics().items():
            np.testing.assert_allclose(step.metrics[metric], value, rtol=0, atol=1e-5)
        shares = [v[0] for k, v in step.metrics.items() if k.startswith("altitude_share_")]
        np.testing.assert_allclose(shares, visits / max(visits.sum(), 1), atol=1e-6)

        for a in range(config.num_agents):
            channels = plain.actor(a)
            for i, channel in enumerate(config.actor_channels):
                close(step.observation["maps"][0, a, i], channels[channel], channel)
        for i, channel in enumerate(config.critic_channels):
            close(step.observation[STATE][0, i], plain.critic()[channel], channel)
        np.testing.assert_array_equal(step.observation[AGENT_CELL][0], state.cells[0, :, :2])
    assert step.step_type[0] == 2
    assert step.discount[0] == 0


def close(ours: NDArray[Any], plain: NDArray[np.float64], channel: str) -> None:
    np.testing.assert_allclose(ours, plain, rtol=0, atol=1e-5, err_msg=channel)
