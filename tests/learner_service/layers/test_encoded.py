"""An encoder that actor and critic share: who trains it, and that it is one."""

from typing import Any

import pytest
import torch
from torch import Tensor

from murmur.learner_service.device.precision import Precision
from murmur.learner_service.layers.building import (
    build_network,
    build_twins,
    resolve_network,
    shared_encoder,
    weight_slices,
)
from murmur.learner_service.layers.encoded import Encoded, Encoder, learned_parameters
from murmur.learner_service.layers.forward import forward, forward_twice
from murmur.learner_service.layers.inputs import Inputs, InputShape
from murmur.learner_service.learning.base import Algorithm, build_algorithm
from murmur.shared.config import PluginConfig
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.spec import STATE, ArraySpec, Continuous, Discrete, EnvSpec
from tests.learner_service.algorithms.test_contract import numbers
from tests.learner_service.reference_layers import assert_history_is_steps
from tests.learner_service.toys import CPU, random_batch, random_transitions

SMALL = PluginConfig(name="cnn", channels=(3,), kernels=(2,), strides=(1,), hidden=(8,))
SHAPE = InputShape((2, 4, 4), 3)
NET = resolve_network(SMALL, SHAPE.image)
FP32 = Precision("fp32", CPU)


def spec(*, discrete: bool = True, state: bool = False) -> EnvSpec:
    observations = [ArraySpec("image", "uint8", (2, 4, 4)), ArraySpec("view", "float32", (3,))]
    if state:
        observations.append(ArraySpec(STATE, "uint8", (1, 4, 4), per_agent=False))
    return EnvSpec("e", 2, tuple(observations), Discrete(3) if discrete else Continuous(2))


def build(about: EnvSpec, network: PluginConfig = SMALL, **options: Any) -> Algorithm[Any]:
    config = PluginConfig(share_encoder=True, **options)
    return build_algorithm(config, about, network, FP32, CPU, 3)


def encoders(network: torch.nn.Module) -> list[Encoder]:
    return [m.encoder for m in network.modules() if isinstance(m, Encoded)]


def copies(network: torch.nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in network.parameters()]


def inputs(rows: int = 4) -> Inputs:
    return Inputs(torch.rand(rows, 2, 2, 4, 4), torch.rand(rows, 2, 3))


@pytest.mark.parametrize("slices", [(0, 0), (0, 1)])
def test_shared_encoder_equals_separate_convolutions(slices: tuple[int, ...]) -> None:
    encoder = shared_encoder(NET, SHAPE, SHAPE, slices)
    mine = build_network(SMALL, SHAPE, 5, slices, encoder=encoder)
    plain = build_network(SMALL, SHAPE, 5, slices)
    assert isinstance(mine, Encoded)
    plain.convolutions.load_state_dict(encoder.convolutions.state_dict())
    plain.head.load_state_dict(mine.head.state_dict())
    x = inputs()
    torch.testing.assert_close(mine(x.image, x.vector), plain(x.image, x.vector))


@pytest.mark.parametrize("slices", [(0, 0), (0, 1)])
def test_twins_share_the_encoder_of_their_agent(slices: tuple[int, ...]) -> None:
    encoder = shared_encoder(NET, SHAPE, SHAPE, slices)
    twins = tuple(2 * s + i for s in (slices if slices[1] else (0,)) for i in (0, 1))
    critic = build_twins(NET, SHAPE, 1, slices, twins, 2, encoder)
    x, change = inputs(), torch.rand(4, 2, 2)
    both = forward(critic, x, precision=FP32)[0]
    features = encoder(x.image)
    joined = torch.cat([features, x.vector], 2).repeat_interleave(2, 1)
    torch.testing.assert_close(both, critic.head(None, joined).view(4, 2, 2))
    first, second = forward_twice(critic, x, change, FP32)
    torch.testing.assert_close(first, both)
    moved = Inputs(x.stored, x.vector + torch.nn.functional.pad(change, (1, 0)))
    torch.testing.assert_close(second, forward(critic, moved, precision=FP32)[0])


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_twins_on_an_encoder_remember(cell: str) -> None:
    config = PluginConfig(
        **{"name": SMALL.name, **SMALL.options, "recurrent": 4, "recurrent_cell": cell}
    )
    net = resolve_network(config, SHAPE.image)
    encoder = shared_encoder(net, SHAPE, SHAPE, (0, 1))
    slices = (0, 1, 2, 3)
    critic = build_twins(net, SHAPE, 1, (0, 1), slices, 2, encoder, may_remember=True)
    assert_history_is_steps(critic, inputs(6), torch.rand(3, 2) < 0.3)
    assert weight_slices(critic, 4) == 1


def test_the_actors_gradient_stops_at_the_encoder() -> None:
    encoder = shared_encoder(NET, SHAPE, SHAPE, (0,))
    actor = build_network(SMALL, SHAPE, 3, encoder=encoder, trains=False)
    critic = build_network(SMALL, SHAPE, 1, encoder=encoder)
    x = inputs()
    actor(x.image, x.vector).sum().backward()
    assert all(p.grad is None for p in encoder.parameters())
    assert all(p.grad is not None for p in actor.head.parameters())
    critic(x.image, x.vector).sum().backward()
    assert all(p.grad is not None for p in encoder.parameters())
    assert len(learned_parameters(actor)) == len(list(actor.head.parameters()))
    assert len(learned_parameters(critic)) == len(list(critic.parameters()))


REPLAY = {"batch_size": 16, "start_rows": 16, "capacity_rows": 64}


@pytest.mark.parametrize(
    ("discrete", "options"),
    [
        (True, {"name": "mappo", "batch_size": 16, "batch_number": 1, "unroll_steps": 8}),
        (True, {"name": "masac", "replay": REPLAY}),
        (False, {"name": "masac", "replay": REPLAY, "share_parameters": False}),
        (True, {"name": "maddpg", "replay": REPLAY, "twin_critics": True}),
        (False, {"name": "maddpg", "replay": REPLAY, "policy_delay": 2}),
    ],
)
def test_actor_and_critic_learn_on_one_encoder(discrete: bool, options: dict[str, Any]) -> None:
    about = spec(discrete=discrete)
    algorithm = build(about, **options)
    actor, critic = (algorithm.parts[name] for name in ("actor", "critic"))
    assert isinstance(actor, torch.nn.Module)
    assert isinstance(critic, torch.nn.Module)
    (mine,), (theirs,) = encoders(actor), encoders(critic)
    assert mine is theirs
    policy, before = algorithm.make_policy(), copies(mine)
    if options["name"] == "mappo":
        batch: Any = random_batch(about, 8, 2)
        batch.arrays["log_prob"] = torch.full((9, 2, 2), -1.0)
    else:
        batch = random_transitions(about, 16)
    loss = "critic_loss"
    log = [numbers(algorithm.update(batch))[loss] for _ in range(30)]
    assert log[-1] < log[0]
    assert any(not torch.equal(a, b) for a, b in zip(before, copies(mine), strict=True))
    algorithm.publish(policy)
    acting = next(p for p in vars(policy).values() if isinstance(p, torch.nn.Module))
    for ours, published in zip(copies(mine), copies(encoders(acting)[0]), strict=True):
        torch.testing.assert_close(ours, published)


def test_what_cannot_share_an_encoder_is_refused() -> None:
    mlp = resolve_network(PluginConfig(name="mlp"), None)
    with pytest.raises(ConfigError, match="the environment observes no images"):
        shared_encoder(mlp, InputShape(None, 3), InputShape(None, 3), (0,))
    with pytest.raises(ConfigError, match=r"the critic sees maps of the state, too: images \(3, 4"):
        build(spec(state=True), name="masac", replay=REPLAY)
    with pytest.raises(ConfigError, match="share everything already"):
        build(spec(), name="mappo", centralized=False, share_trunk=True)
