"""A state of each agent: critics see their agent's, mixers all of them, policies none."""

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.teams import LOADS, loads
from benchmarks.unequal_teams import Loads
from murmur.env_service.checks import assert_environment
from murmur.learner_service.layers.building import observed_image
from murmur.learner_service.layers.inputs import (
    ActorInputs,
    CriticInputs,
    InputOptions,
    JointInputs,
    StateInputs,
)
from murmur.shared.wire.spec import (
    STATE,
    ArraySpec,
    Discrete,
    EnvSpec,
    spec_from_proto,
    spec_to_proto,
)

SPEC = EnvSpec(
    "toy", 2, (ArraySpec("view", "float32", (1,)), ArraySpec(STATE, "float32", (2,))), Discrete(3)
)
SEEN = {
    "view": torch.tensor([[[1.0], [2.0]]]),
    STATE: torch.tensor([[[3.0, 4.0], [5.0, 6.0]]]),
}
OPTIONS = InputOptions()


def test_a_critic_sees_the_state_of_its_agent_alone() -> None:
    actor = ActorInputs(SPEC, OPTIONS)
    assert actor.shape.vector == 1
    assert actor(SEEN).vector.tolist() == [[[1], [2]]]  # type: ignore[union-attr]
    critic = CriticInputs(SPEC, OPTIONS, actions=False)
    assert critic.shape.vector == 3
    assert critic(SEEN).vector.tolist() == [[[1, 3, 4], [2, 5, 6]]]  # type: ignore[union-attr]
    again = critic(SEEN, own=actor(SEEN)).vector
    assert again.tolist() == [[[1, 3, 4], [2, 5, 6]]]  # type: ignore[union-attr]


def test_a_critic_of_joint_actions_sees_it_beside_actions() -> None:
    action = torch.tensor([[[1.0, 0, 0], [0, 1.0, 0]]])
    for centralized, wanted in (
        (True, [[[1, 3, 4, 0, 1, 0], [2, 5, 6, 1, 0, 0]]]),
        (False, [[[1], [2]]]),
    ):
        joint = JointInputs(SPEC, OPTIONS, centralized=centralized)
        vector = joint(SEEN, action if centralized else None).vector
        assert vector is not None
        assert vector.tolist() == wanted
        assert joint.shape.vector == vector.shape[-1]


def test_a_mixer_sees_the_states_of_all_agents() -> None:
    mixer = StateInputs(SPEC)
    assert mixer(SEEN).tolist() == [[3, 4, 5, 6]]
    assert mixer.size == 4


def test_a_state_that_is_an_image_is_no_image_of_the_agent() -> None:
    maps = EnvSpec(
        "toy",
        2,
        (ArraySpec(STATE, "float32", (2, 5, 5)), ArraySpec("maps", "float32", (3, 5, 5))),
        Discrete(3),
    )
    assert observed_image(maps) == (3, 5, 5)
    assert ActorInputs(maps, OPTIONS).shape.image == (3, 5, 5)
    assert CriticInputs(maps, OPTIONS, actions=False).shape.image == (5, 5, 5)


def test_it_travels_and_keeps_the_contract_of_an_environment() -> None:
    assert spec_from_proto(spec_to_proto(SPEC)) == SPEC
    assert_environment(lambda num_envs: Loads(num_envs, "own"))


@pytest.mark.parametrize(("other", "error"), [(2, ""), (3, "states of different shapes")])
def test_pettingzoo_gives_a_dict_of_states(other: int, error: str) -> None:
    spaces = pytest.importorskip("gymnasium.spaces")
    from murmur.env_service.adapters.factory import AdapterConfig
    from murmur.env_service.adapters.observations import state_layout
    from murmur.shared.process.errors import ConfigError

    boxes = {name: spaces.Box(-9, 9, (size,)) for name, size in (("b", other), ("a", 2))}
    config: Any = AdapterConfig(factory="x:y")
    if error:
        with pytest.raises(ConfigError, match=error):
            state_layout(spaces.Dict(boxes), config, ["a", "b"])
        return
    spec, write, view, _ = state_layout(spaces.Dict(boxes), config, ["a", "b"])
    assert spec == ArraySpec(STATE, "float32", (2,))
    row = np.zeros((2, 2), np.float32)
    write(view(row), {"b": np.array([3, 4]), "a": np.array([1, 2])})
    assert row.tolist() == [[1, 2], [3, 4]]


@pytest.mark.long
@pytest.mark.parametrize("state", list(LOADS))
def test_the_critic_explains_what_its_state_tells(state: str) -> None:
    assert loads(state, 1, 100) == pytest.approx(LOADS[state], abs=0.1)
