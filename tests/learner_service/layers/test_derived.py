"""Derived maps: by hand, and against channels that the terrain environment draws itself."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from murmur.env_service.envs.terrain import TerrainEnvironment
from murmur.env_service.envs.terrain.config import Config
from murmur.learner_service.layers.inputs import Derivation, weighted_entropy
from murmur.shared.wire.derived_maps import Channel, DerivedMap
from murmur.shared.wire.spec import STATE, ArraySpec, Discrete, EnvSpec
from murmur.shared.wire.timestep import StepType

SMALL: dict[str, Any] = {"area_x_m": 20.0, "area_y_m": 25.0, "pixels": 15, "budget": 4}
LIMITS = (1e-4, 0.499, 0.501)


def test_weighted_entropy_by_hand() -> None:
    p = torch.tensor([0.5, 0.25, 0.75, 0.5005, 0.0, 1.0])
    # H(3/4) = 2 - 3/4 log2(3); H(0.9999) = 0.001473 bits
    wanted = [0.5, 0.0, 2 - 0.75 * np.log2(3), 0.5 * 0.99999928, 0.0, 0.0014730]
    assert weighted_entropy(p, *LIMITS).tolist() == pytest.approx(wanted, abs=1e-6)


def test_channels_of_each_kind_by_hand() -> None:
    spec = EnvSpec(
        "e",
        2,
        (
            ArraySpec("drawn", "float32", (3, 1, 2)),
            ArraySpec("left", "float32", (2,)),
            ArraySpec("team", "float32", (1, 1, 2), per_agent=False),
            ArraySpec("view", "float32", (4,)),
        ),
        Discrete(3),
        derived=(
            DerivedMap(
                "maps",
                (
                    Channel("constant", values=(0.5, 1.0)),
                    Channel("constant", values=(7.0, 8.0)),
                    Channel("copy", "drawn", 1),
                    Channel("copy", "drawn", 2),
                    Channel("entropy", "drawn", 0, LIMITS),
                    Channel("fill", "left", 1),
                ),
            ),
            DerivedMap(STATE, (Channel("constant", values=(3.0,)), Channel("copy", "team", 0))),
        ),
    )
    derive = Derivation(spec)
    names = [(o.name, o.shape, o.per_agent) for o in derive.spec.observations]
    assert names == [("maps", (6, 1, 2), True), (STATE, (2, 1, 2), False), ("view", (4,), True)]
    drawn = torch.tensor([[[0.5, 0.25], [1, 2], [3, 4]], [[0.0, 0.5], [5, 6], [7, 8]]])
    view = torch.zeros(1, 2, 4)
    seen = derive(
        {
            "drawn": drawn.view(1, 2, 3, 1, 2),
            "left": torch.tensor([[[9.0, 0.1], [9.0, 0.2]]]),
            "team": torch.tensor([[[[4.0, 5.0]]]]),
            "view": view,
        }
    )
    assert set(seen) == {"maps", STATE, "view"}
    assert seen["view"] is view
    first = [[0.5, 0.5], [7, 7], [1, 2], [3, 4], [0.5, 0], [0.1, 0.1]]
    second = [[1, 1], [8, 8], [5, 6], [7, 8], [0, 0.5], [0.2, 0.2]]
    assert torch.allclose(seen["maps"].view(2, 6, 2), torch.tensor([first, second]), atol=1e-6)
    assert seen[STATE].tolist() == [[[[3.0, 3.0]], [[4.0, 5.0]]]]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"critic_channels": ()},
        {"actor_channels": ("local_w_entropy", "prob", "budget", "w_entropy")},
        {"critic_channels": ("w_entropy",), "num_agents": 1},
    ],
)
def test_the_learner_computes_what_the_server_draws(options: dict[str, Any]) -> None:
    draws, sends = (
        TerrainEnvironment(Config(**SMALL, **options, channels_by=by), 3)  # type: ignore[arg-type]
        for by in ("server", "learner")
    )
    derive = Derivation(sends.spec)
    assert derive.spec == dataclasses.replace(draws.spec, symmetries=())  # for updates alone
    generator, restart = np.random.default_rng(1), np.ones(3, np.bool_)
    for step in range(12):
        actions = generator.integers(0, 6, (3, draws.spec.num_agents)).astype(np.int32)
        seeds = np.arange(3, dtype=np.uint64) + np.uint64(step)
        drawn = draws.step(actions, restart, seeds)
        sent = sends.step(actions, restart, seeds)
        seen = derive({name: torch.from_numpy(x) for name, x in sent.observation.items()})
        assert set(seen) == set(drawn.observation)
        for name, array in drawn.observation.items():
            assert np.abs(seen[name].numpy() - array).max() <= 1e-6, name
        restart = drawn.step_type == StepType.LAST
