"""What actors and critics are fed."""

import threading

import pytest
import torch

from murmur.learner_service.layers.building import input_options
from murmur.learner_service.layers.inputs import (
    ActorInputs,
    CriticInputs,
    InputOptions,
    Inputs,
    InputShape,
    JointInputs,
    StateInputs,
    centre,
    others_action_map,
    with_action,
)
from murmur.shared.config import PluginConfig
from murmur.shared.process.errors import ConfigError, SpecError
from murmur.shared.wire.spec import AGENT_CELL, STATE, ArraySpec, Continuous, Discrete, EnvSpec


def spec(*observations: ArraySpec, agents: int = 3, actions: int = 4) -> EnvSpec:
    return EnvSpec("toy", agents, observations, Discrete(actions))


MAPS = ArraySpec("maps", "uint8", (2, 5, 6))
VIEW = ArraySpec("view", "float32", (3,))
CELL = ArraySpec(AGENT_CELL, "int32", (2,))


def test_others_action_map_by_hand() -> None:
    # agents 0 and 1 on cell (0, 1), agent 2 on (1, 0); K = 4, values (action + 1) / 4
    cell = torch.tensor([[[0, 1], [0, 1], [1, 0]]])
    action = torch.tensor([[0, 1, 3]])  # .25, .5, 1
    got = others_action_map(cell, action, 4, 2, 2)[0, :, 0]
    expected = torch.tensor(
        [
            [[0, 0.5], [1.0, 0]],  # agent 0 sees agent 1 on its own cell
            [[0, 0.25], [1.0, 0]],
            [[0, 0.75], [0.0, 0]],  # two agents on one cell add up
        ]
    )
    torch.testing.assert_close(got, expected)


def test_actor_inputs_stack_maps_by_channel_and_vectors_in_a_row() -> None:
    inputs = ActorInputs(
        spec(MAPS, VIEW, ArraySpec("more", "uint8", (1, 5, 6))), InputOptions(agent_id=True)
    )
    assert inputs.shape == InputShape((3, 5, 6), 3 + 3)
    observation = {
        "maps": torch.full((2, 3, 2, 5, 6), 255, dtype=torch.uint8),
        "more": torch.full((2, 3, 1, 5, 6), 51, dtype=torch.uint8),
        "view": torch.arange(18.0).view(2, 3, 3),
    }
    x = inputs(observation)
    assert x.image is not None
    assert x.vector is not None
    assert x.image[..., 0, 0].flatten(0, 1).unique(dim=0).tolist() == [
        [1.0, 1.0, pytest.approx(0.2)]
    ]
    assert x.vector[1, 1].tolist() == [12, 13, 14, 0, 1, 0]


@pytest.mark.parametrize("shared", [(), ("hour",), (STATE,)])
def test_a_number_without_dimensions_is_a_vector_of_one(shared: tuple[str, ...]) -> None:
    def fed(shape: tuple[int, ...]) -> list[torch.Tensor | None]:
        arrays = [ArraySpec(name, "float32", shape, per_agent=False) for name in shared]
        toy, options = spec(VIEW, ArraySpec("fuel", "float32", shape), *arrays), InputOptions()
        seen = {
            "view": torch.arange(18.0).view(2, 3, 3),
            "fuel": torch.arange(6.0).view(2, 3, *shape),
            **{name: torch.tensor([7.0, 8.0]).view(2, *shape) for name in shared},
        }
        action = torch.zeros(2, 3, dtype=torch.int64)
        joint = JointInputs(toy, options)(seen, torch.nn.functional.one_hot(action, 4).float())
        actor, critic = ActorInputs(toy, options)(seen), CriticInputs(toy, options)(seen, action)
        return [actor.vector, critic.vector, joint.vector, StateInputs(toy)(seen)]

    torch.testing.assert_close(fed(()), fed((1,)), rtol=0, atol=0)


def test_maps_of_different_size_cannot_be_stacked() -> None:
    with pytest.raises(SpecError, match=r"different size.*maps \(2, 5, 6\), other \(1, 4, 4\)"):
        ActorInputs(spec(MAPS, ArraySpec("other", "uint8", (1, 4, 4))), InputOptions())
    with pytest.raises(SpecError, match=r"state maps are \(4, 4\), the agents' maps \(5, 6\)"):
        CriticInputs(
            spec(MAPS, ArraySpec(STATE, "uint8", (1, 4, 4), per_agent=False)), InputOptions()
        )


@pytest.mark.parametrize(
    ("observations", "shape"),
    [
        # others' actions as one-hot vectors: 3 agents * 4 actions; all agents' views: 3 * 3
        ((VIEW,), InputShape(None, 3 + 9 + 12)),
        ((VIEW, ArraySpec(STATE, "float32", (7,), per_agent=False)), InputShape(None, 3 + 7 + 12)),
        ((MAPS,), InputShape((2, 5, 6), 12)),
        ((MAPS, CELL), InputShape((3, 5, 6), 0)),  # others' actions as a map
        (
            (MAPS, CELL, ArraySpec(STATE, "float32", (4, 5, 6), per_agent=False)),
            InputShape((7, 5, 6), 0),
        ),
        # a state of maps for agents that see vectors
        ((VIEW, ArraySpec(STATE, "uint8", (1, 5, 6), per_agent=False)), InputShape((1, 5, 6), 15)),
    ],
)
def test_critic_input_shapes(observations: tuple[ArraySpec, ...], shape: InputShape) -> None:
    toy = spec(*observations)
    inputs = CriticInputs(toy, InputOptions())
    assert inputs.shape == shape
    observation = {
        o.name: torch.zeros((2, 3, *o.shape) if o.per_agent else (2, *o.shape))
        for o in observations
    }
    x = inputs(observation, torch.zeros(2, 3, dtype=torch.int64))
    if shape.image is None:
        assert x.image is None
    else:
        assert x.image is not None
        assert x.image.shape == (2, 3, *shape.image)
    assert (0 if x.vector is None else x.vector.shape[2]) == shape.vector


@pytest.mark.parametrize("observations", [(VIEW,), (MAPS,), (MAPS, CELL)])
def test_a_critic_never_sees_its_own_agents_action(observations: tuple[ArraySpec, ...]) -> None:
    toy = spec(*observations)
    inputs = CriticInputs(toy, InputOptions(agent_id=True))
    random = torch.Generator().manual_seed(0)
    observation = {
        o.name: torch.randint(5, (2, 3, *o.shape), generator=random) for o in observations
    }
    before = torch.tensor([[0, 1, 2], [3, 2, 1]])
    after = before.clone()
    after[:, 1] = torch.tensor([3, 0])
    x, y = inputs(observation, before), inputs(observation, after)
    for a, b in ((x.image, y.image), (x.vector, y.vector)):
        if a is None or b is None:
            continue
        torch.testing.assert_close(a[:, 1], b[:, 1], rtol=0, atol=1e-6)  # its own row
    changed = [
        (a - b).abs().amax() > 0.1
        for a, b in ((x.image, y.image), (x.vector, y.vector))
        if a is not None and b is not None
    ]
    assert any(changed)  # the others' rows show it


def test_the_state_is_the_same_for_all_agents_of_an_environment() -> None:
    inputs = CriticInputs(
        spec(VIEW, ArraySpec(STATE, "float32", (2,), per_agent=False)), InputOptions()
    )
    observation = {"view": torch.zeros(2, 3, 3), STATE: torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    vector = inputs(observation, torch.zeros(2, 3, dtype=torch.int64)).vector
    assert vector is not None
    assert vector[..., 3:5].tolist() == [[[1, 2]] * 3, [[3, 4]] * 3]


def test_centre_by_hand() -> None:
    maps = torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, 8, 9]]).view(1, 1, 3, 3).repeat(2, 1, 1, 1)
    got = centre(maps, torch.tensor([[0, 0], [1, 2]]))[:, 0]
    assert got[0].tolist() == [[0, 0, 0], [0, 1, 2], [0, 4, 5]]
    assert got[1].tolist() == [[2, 3, 0], [5, 6, 0], [8, 9, 0]]
    even = centre(torch.arange(8.0).view(1, 1, 2, 4), torch.tensor([[1, 3]]))
    assert even[0, 0, 1, 2] == 7  # the cell lies at [H // 2, W // 2]


@pytest.mark.parametrize(("h", "w"), [(5, 5), (4, 6), (1, 3)])
def test_centre_equals_a_loop_over_cells(h: int, w: int) -> None:
    maps, cell = torch.rand(6, 2, h, w), torch.stack([torch.arange(6) % h, torch.arange(6) % w], 1)
    expected = torch.zeros_like(maps)
    for r, (row, column) in enumerate(cell.tolist()):
        for i in range(h):
            for j in range(w):
                y, x = row + i - h // 2, column + j - w // 2
                if 0 <= y < h and 0 <= x < w:
                    expected[r, :, i, j] = maps[r, :, y, x]
    assert torch.equal(centre(maps, cell), expected)


def test_centred_channels_are_given_once_more() -> None:
    state = ArraySpec(STATE, "float32", (4, 5, 6), per_agent=False)
    toy, options = spec(MAPS, CELL, state), InputOptions(centered=(1,), centered_state=(0, 3))
    actor, critic = ActorInputs(toy, options), CriticInputs(toy, options)
    assert actor.shape == InputShape((3, 5, 6), 0)
    assert critic.shape == InputShape((3 + 4 + 2 + 1, 5, 6), 0)
    random = torch.Generator().manual_seed(0)
    observation = {
        "maps": torch.randint(256, (2, 3, 2, 5, 6), generator=random).to(torch.uint8),
        AGENT_CELL: torch.randint(5, (2, 3, 2), generator=random),
        STATE: torch.rand((2, 4, 5, 6), generator=random),
    }
    image = critic(observation, torch.zeros(2, 3, dtype=torch.int64)).image
    assert image is not None
    assert image.shape == (2, 3, 10, 5, 6)
    for env in range(2):
        for agent in range(3):
            r, c = observation[AGENT_CELL][env, agent].tolist()
            row = image[env, agent]
            assert row[2, 2, 3] == observation["maps"][env, agent, 1, r, c] / 255
            assert row[7, 2, 3] == observation[STATE][env, 0, r, c]
            assert row[8, 2, 3] == observation[STATE][env, 3, r, c]


def test_centring_needs_cells_and_channels_that_are_there() -> None:
    with pytest.raises(
        ConfigError, match=r"network\.centered needs an environment that says where"
    ):
        ActorInputs(spec(MAPS), InputOptions(centered=(0,)))
    with pytest.raises(ConfigError, match=r"network\.centered = \[2\], but there are 2 maps"):
        ActorInputs(spec(MAPS, CELL), InputOptions(centered=(2,)))


def test_agents_are_numbered_by_default_where_they_see_no_maps() -> None:
    auto = PluginConfig(name="auto")
    assert input_options(auto, spec(VIEW)).agent_id
    assert not input_options(auto, spec(MAPS)).agent_id
    assert input_options(PluginConfig(name="cnn", agent_id=True), spec(MAPS)).agent_id


def joint_spec(*observations: ArraySpec) -> EnvSpec:
    return EnvSpec("toy", 3, observations, Continuous(2))


def test_joint_inputs_by_hand() -> None:
    toy = joint_spec(ArraySpec("view", "float32", (1,)))
    inputs = JointInputs(toy, InputOptions())
    # Own view, then view and action of the two others, in turn; own action comes last.
    assert inputs.shape == InputShape(None, 1 + 2 * 3)
    assert inputs.with_action_shape == InputShape(None, 1 + 2 * 3 + 2)
    view = torch.tensor([[[1.0], [2.0], [3.0]]])
    action = torch.tensor([[[10.0, 11.0], [20.0, 21.0], [30.0, 31.0]]], requires_grad=True)
    joint = inputs({"view": view}, action)
    assert joint.vector is not None
    assert joint.vector[0].tolist() == [
        [1, 2, 20, 21, 3, 30, 31],
        [2, 3, 30, 31, 1, 10, 11],
        [3, 1, 10, 11, 2, 20, 21],
    ]
    assert not joint.vector.requires_grad
    own = with_action(joint, action).vector
    assert own is not None
    assert own[0, 1].tolist() == [2, 3, 30, 31, 1, 10, 11, 20, 21]
    own[0, 1].sum().backward()
    assert action.grad is not None
    assert action.grad.tolist() == [[[0, 0], [1, 1], [0, 0]]]  # agent 1's row: its own action
    only = with_action(Inputs(None, None), action).vector
    assert only is not None
    assert only.shape == (1, 3, 2)


def test_joint_inputs_give_own_maps_then_the_state() -> None:
    small = ArraySpec("maps", "uint8", (1, 1, 1))
    state = ArraySpec(STATE, "uint8", (1, 1, 1), per_agent=False)
    observation = {
        "maps": torch.tensor([[51, 102, 153], [204, 255, 0]]).view(2, 3, 1, 1, 1).to(torch.uint8),
        STATE: torch.tensor([51, 255]).view(2, 1, 1, 1).to(torch.uint8),
    }
    joint = JointInputs(joint_spec(small, state), InputOptions())
    image = joint(observation, torch.zeros(2, 3, 2)).image
    assert image is not None
    own, its = [0.2, 0.4, 0.6, 0.8, 1.0, 0.0], [0.2] * 3 + [1.0] * 3
    torch.testing.assert_close(image.view(6, 2), torch.tensor([own, its]).T)


STATE_VECTOR = ArraySpec(STATE, "float32", (7,), per_agent=False)


@pytest.mark.parametrize(
    ("observations", "centralized", "shape"),
    [
        ((VIEW,), True, InputShape(None, 3 + 2 * (3 + 2))),
        ((VIEW,), False, InputShape(None, 3)),
        ((VIEW, STATE_VECTOR), True, InputShape(None, 3 + 7 + 2 * 2)),
        ((VIEW, STATE_VECTOR), False, InputShape(None, 3)),
        ((MAPS, VIEW), True, InputShape((2, 5, 6), 3 + 2 * (3 + 2))),
        (
            (MAPS, ArraySpec(STATE, "uint8", (4, 5, 6), per_agent=False)),
            True,
            InputShape((6, 5, 6), 2 * 2),
        ),
        (
            (VIEW, ArraySpec(STATE, "uint8", (4, 5, 6), per_agent=False)),
            True,
            InputShape((4, 5, 6), 3 + 2 * 2),
        ),
    ],
)
def test_joint_input_shapes(
    observations: tuple[ArraySpec, ...], centralized: bool, shape: InputShape
) -> None:
    inputs = JointInputs(joint_spec(*observations), InputOptions(), centralized=centralized)
    assert inputs.shape == shape
    observation = {
        o.name: torch.zeros((4, 3, *o.shape) if o.per_agent else (4, *o.shape))
        for o in observations
    }
    joint = inputs(observation, torch.zeros(4, 3, 2))
    assert (None if joint.image is None else tuple(joint.image.shape)) == (
        None if shape.image is None else (4, 3, *shape.image)
    )
    assert joint.vector is not None
    assert joint.vector.shape == (4, 3, shape.vector)


def test_joint_inputs_of_one_agent_are_its_own() -> None:
    toy = EnvSpec("toy", 1, (VIEW,), Continuous(2))
    joint = JointInputs(toy, InputOptions(agent_id=True))
    assert joint.shape == InputShape(None, 3)
    vector = joint({"view": torch.ones(4, 1, 3)}, torch.zeros(4, 1, 2)).vector
    assert vector is not None
    assert vector.shape == (4, 1, 3)


def test_joint_inputs_refuse_unfit_maps_and_centred_states() -> None:
    state = ArraySpec(STATE, "uint8", (1, 4, 4), per_agent=False)
    with pytest.raises(SpecError, match=r"state maps are \(4, 4\), the agents' maps \(5, 6\)"):
        JointInputs(joint_spec(MAPS, state), InputOptions())
    with pytest.raises(ConfigError, match=r"network\.centered_state = \[0\] is for critics"):
        JointInputs(joint_spec(MAPS, CELL), InputOptions(centered_state=(0,)))


def test_agents_numbers_are_made_once_for_each_thread() -> None:
    inputs = ActorInputs(spec(ArraySpec("view", "float32", (2,))), InputOptions(agent_id=True))
    view = {"view": torch.zeros(4, 3, 2)}
    with torch.inference_mode():
        acted = inputs(view).vector
    learned = inputs({"view": view["view"].requires_grad_()}).vector
    assert acted is not None
    assert learned is not None
    assert torch.equal(acted[3, :, 2:], torch.eye(3))
    learned.sum().backward()  # type: ignore[no-untyped-call] # what acting made is no obstacle
    assert len(inputs._numbers) == 1
    thread = threading.Thread(target=lambda: inputs(view))
    thread.start()
    thread.join()
    assert len(inputs._numbers) == 2
