"""Memory is asked for before it is taken."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from murmur.learner_service.algorithms.segmentation import any_loss
from murmur.learner_service.device.memory import (
    free_bytes,
    learning_from,
    limited,
    require_room,
    room,
)
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.layers.building import build_network, build_twins, resolve_network
from murmur.learner_service.layers.dense import build_dense
from murmur.learner_service.layers.footprint import footprint
from murmur.learner_service.layers.inputs import InputShape
from murmur.learner_service.learning.base import build_algorithm
from murmur.learner_service.learning.supervised import build_supervised
from murmur.learner_service.storage.frames import find_frames
from murmur.learner_service.storage.replay import ReplayConfig, ReplayStorage
from murmur.learner_service.storage.rollout import RolloutStorage
from murmur.shared.config import PluginConfig
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.process.errors import ResourceError, SpecError
from murmur.shared.wire.samples import SampleSpec
from murmur.shared.wire.spec import ArraySpec, Discrete, EnvSpec
from tests.learner_service.toys import CPU


def test_what_does_not_fit_is_refused_with_both_figures() -> None:
    require_room(1, "a row", "observe less", CPU)
    with pytest.raises(SpecError, match=r"a row would take .* GiB; free on cpu: .* GiB; observe"):
        require_room(2 * free_bytes(CPU) + 2**40, "a row", "observe less", CPU)
    with limited(1.0):
        require_room(2**30, "a row", "observe less", CPU)
        with pytest.raises(SpecError, match=r"2\.0 GiB; learner\.memory_limit_gib allows 1\.0 GiB"):
            require_room(2**31, "a row", "observe less", CPU)


def test_a_network_is_weighed_before_it_is_built() -> None:
    config, before = PluginConfig(name="cnn"), torch.get_rng_state()
    with pytest.raises(SpecError, match=r"network 'cnn' for images \(1, 4000, 4000\).*weights"):
        build_network(config, InputShape((1, 4000, 4000), 0), 5)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_limit_holds_for_all_that_is_asked_for() -> None:
    with limited(1.0):
        require_room(0.75 * 2**30, "a network", "use another", CPU)
        assert room(CPU) == 0.25 * 2**30
        with pytest.raises(SpecError, match=r"0\.5 GiB; .* 1\.0 GiB, 0\.8 GiB of it for the"):
            require_room(0.5 * 2**30, "an unroll", "observe less", CPU)
        require_room(0.25 * 2**30, "a smaller one", "observe less", CPU)


def test_what_a_pass_keeps_is_counted_by_hand() -> None:
    """1 x 8 x 8 pixels, 2 kernels of 3 x 3, then 2 * 36 + 3 numbers to 1."""
    from murmur.learner_service.networks.cnn import Config, build

    shape = InputShape((1, 8, 8), 3)
    config = Config(channels=(2,), kernels=(3,), strides=(1,), hidden=())
    found = footprint(lambda: build(config, shape, 1, (0,)), 2, (2, 1, 8, 8), (2, 3))
    assert found is not None
    assert found.weights == 2 * 9 + 2 + 75 + 1
    # float32: the image, what the ReLU gives, and what the linear layer is fed
    assert found.activation_bytes == 4 * (64 + 72 + 75)
    assert found.learning_bytes(10) == 16 * found.weights + 10 * found.activation_bytes


def test_the_rows_of_a_pass_count_for_images() -> None:
    """Nature at 84 x 84 takes 0.03 GiB, and a pass over 8192 rows of it takes more than 1 GiB."""
    shape, config = InputShape((4, 84, 84), 0), PluginConfig(name="nature")
    with limited(1.0):
        build_network(config, shape, 6)
    with (
        limited(1.0),
        learning_from(8192, CPU),
        pytest.raises(SpecError, match=r"a pass over 8192 agents' rows would take .*batch_size"),
    ):
        build_network(config, shape, 6)


def test_what_a_dense_network_keeps_is_counted_by_hand() -> None:
    """1 x 1 convolution of 3 x 4 x 4 pixels to 2 classes: it keeps its input, the loss its own."""
    found = footprint(lambda: nn.Conv2d(3, 2, 1), 1, (3, 4, 4))
    assert found is not None
    assert (found.weights, found.activation_bytes) == (8, 4 * 48)
    found = footprint(lambda: nn.Conv2d(3, 2, 1), 1, (3, 4, 4), loss=lambda x: x.square().sum())
    assert found is not None
    assert found.activation_bytes == 4 * (48 + 32)
    # four copies of the weights, and two more; half of the activations in 16 bits
    assert found.learning_bytes(5, 2, 2) == 6 * 4 * 8 + 5 * 2 * (48 + 32)


@pytest.mark.parametrize("name", ["unet", "segformer"])
def test_what_a_pass_over_images_keeps_is_what_is_counted(name: str) -> None:
    network, kept = build_dense(PluginConfig(name=name), (64, 96), 5), dict[int, int]()
    found = footprint(
        lambda: build_dense(PluginConfig(name=name), (64, 96), 5), 1, (3, 64, 96), loss=any_loss
    )
    alive: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        alive.append(x)
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = any_loss(network(torch.rand(4, 3, 64, 96)))
    for own in (*network.parameters(), *network.buffers()):
        kept.pop(own.untyped_storage().data_ptr(), None)
    assert loss.isfinite()
    assert found is not None
    # Attention and activations in place may keep less on a device than where nothing is computed.
    assert 0.7 < sum(kept.values()) / (4 * found.activation_bytes) < 1.05


@pytest.mark.parametrize("name", ["unet", "segformer"])
def test_a_dense_network_is_weighed_with_its_batch(name: str) -> None:
    specs = (
        ArraySpec("image", "uint8", (3, 512, 512), False),
        ArraySpec("mask", "uint8", (512, 512), False),
    )
    spec = SampleSpec("big", specs, (64, 8), "0" * 64, ("a", "b"))
    config = ExperimentConfig.model_validate(
        {
            "source": {"name": "faces"},
            "network": {"name": name},
            "algorithm": {"name": "segmentation", "batch_size": 64},
        }
    )
    said = (
        rf"network '{name}' for images of 512 x 512 has .* a pass over 64 images would take \d+\."
    )
    with limited(1.0), pytest.raises(SpecError, match=said):
        build_supervised(config, spec, Precision("fp32", CPU), CPU)


def test_twin_critics_are_fed_every_row_twice() -> None:
    shape = InputShape((3, 84, 84), 4)
    net = resolve_network(PluginConfig(name="nature"), shape.image)
    for slices, twins in (((0, 0), (0, 1)), ((0, 1), (0, 1, 2, 3))):
        with (
            limited(0.5),
            learning_from(4096, CPU),
            pytest.raises(SpecError, match="a pass over 8192 agents' rows would take"),
        ):
            build_twins(net, shape, 1, slices, twins, 2)


def test_small_images_are_weighed_in_a_large_pass() -> None:
    shape = InputShape((7, 11, 11), 0)
    config = PluginConfig(name="cnn", channels=(256, 256, 256))
    with limited(1.0), learning_from(512, CPU):
        build_network(config, shape, 6)
    with (
        limited(1.0),
        learning_from(16384, CPU),
        pytest.raises(SpecError, match="a pass over 16384 agents' rows"),
    ):
        build_network(config, shape, 6)


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ({"name": "mappo", "batch_size": 16384}, "a pass over 16384 agents' rows"),
        ({"name": "masac", "replay": {"batch_size": 4096}}, "a pass over 8192 agents' rows"),
    ],
)
def test_algorithms_say_how_many_rows_they_learn_from(algorithm: dict[str, Any], said: str) -> None:
    spec = EnvSpec("p", 2, (ArraySpec("image", "uint8", (3, 84, 84)),), Discrete(4))
    args = PluginConfig(**algorithm), spec, PluginConfig(name="auto"), Precision("fp32", CPU)
    with limited(1.0), pytest.raises(SpecError, match=said):
        build_algorithm(*args, CPU, 0)


def test_a_replay_keeps_to_the_limit() -> None:
    spec = EnvSpec("p", 2, (ArraySpec("image", "uint8", (3, 84, 84)),), Discrete(4))
    config = ReplayConfig(capacity_rows=100_000)
    message = r"takes 4\.4 GiB, more than 80% of the 1\.0 GiB that cpu has free"
    with limited(1.0), pytest.raises(ResourceError, match=message):
        ReplayStorage(config, spec, 0.9, None, CPU, {}, 0)


def test_a_batch_of_a_replay_counts_beside_the_ring() -> None:
    """A row is 2 x 3 x 84 x 84 bytes, drawn with the next one, and some for its action."""
    spec = EnvSpec("p", 2, (ArraySpec("image", "uint8", (3, 84, 84)),), Discrete(4))
    args = spec, 0.9, None, CPU, dict[str, tuple[int, ...]](), 0
    large = ReplayConfig(capacity_rows=8000, batch_size=8000)
    said = r"a batch of 8,000 rows drawn from the replay, each of 84,69\d bytes .* 0\.6 GiB; .*0\.9"
    with limited(0.9), pytest.raises(SpecError, match=said):
        ReplayStorage(large, *args)
    with limited(0.9):
        small = ReplayStorage(ReplayConfig(capacity_rows=800, start_rows=1, batch_size=10), *args)
        ring = sum(array.nbytes for array in small._arrays.values())
        assert 0 < 0.9 * 2**30 - ring - room(CPU) < 11 * 84_699


def test_an_update_of_stacked_frames_is_counted() -> None:
    spec = EnvSpec("p", 1, (ArraySpec("image", "uint8", (1, 100, 100)),), Discrete(4))
    storage = RolloutStorage(spec, 9, 18, None, CPU, frames=find_frames(4, spec))
    # 10 rows of 3 environments, and twice those of 2 unrolls with four frames: 10 000 bytes each,
    # and 13 for the rest of a row: step type, reward, discount, action
    assert storage.memory_bytes(3, 2) == 10 * (3 * 10_013 + 2 * 2 * 40_013)
