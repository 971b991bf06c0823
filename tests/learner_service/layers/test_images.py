"""The image networks `nature` and `impala`, and images that stay bytes until they are used."""

import pytest
import torch
import torch.nn.functional as F

from murmur.learner_service.device.precision import Precision
from murmur.learner_service.layers.building import build_network, resolved_name
from murmur.learner_service.layers.forward import forward_rows
from murmur.learner_service.layers.images import ImageNetwork
from murmur.learner_service.layers.inputs import ActorInputs, CriticInputs, InputOptions, InputShape
from murmur.learner_service.layers.stacked import StackedConv2d
from murmur.shared.config import PluginConfig
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.spec import ArraySpec, Discrete, EnvSpec
from tests.learner_service.toys import CPU

NATURE, IMPALA = PluginConfig(name="nature"), PluginConfig(name="impala")


def count(network: torch.nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def spec(size: int, *, state: bool = False) -> EnvSpec:
    own = (ArraySpec("image", "uint8", (3, size, size)), ArraySpec("view", "float32", (2,)))
    shared = (ArraySpec("state", "uint8", (1, size, size), per_agent=False),) * state
    return EnvSpec("pixels", 2, (*own, *shared), Discrete(6))


def test_nature_has_the_weights_of_the_paper() -> None:
    # 32*4*8*8+32, 64*32*4*4+64, 64*64*3*3+64, 7*7*64*512+512, 512*6+6: Atari's famous 1.69 million
    network = build_network(NATURE, InputShape((4, 84, 84), 0), 6)
    assert count(network) == 8_224 + 32_832 + 36_928 + 1_606_144 + 3_078 == 1_687_206
    assert network(torch.zeros(2, 3, 4, 84, 84), None).shape == (2, 3, 6)


def test_impala_has_the_weights_of_the_paper() -> None:
    # A stage of o channels fed c: 9co + o, and four convolutions of 9oo + o; 64 -> 32 -> 16 -> 8.
    stages = sum(9 * c * o + o + 4 * (9 * o * o + o) for c, o in ((3, 16), (16, 32), (32, 32)))
    network = build_network(IMPALA, InputShape((3, 64, 64), 0), 15)
    assert count(network) == stages + 8 * 8 * 32 * 256 + 256 + 256 * 15 + 15
    assert network(torch.zeros(1, 2, 3, 64, 64), None).shape == (1, 2, 15)


def test_impala_by_torch_alone() -> None:
    network = build_network(PluginConfig(name="impala", channels=(4,)), InputShape((2, 9, 7), 1), 3)
    assert isinstance(network, ImageNetwork)
    weights = dict(network.named_parameters())
    image, vector = torch.rand(2, 1, 2, 9, 7), torch.rand(2, 1, 1)

    def conv(x: torch.Tensor, name: str) -> torch.Tensor:
        w, b = (weights[f"convolutions.{name}.{what}"] for what in ("weight", "bias"))
        return F.conv2d(x, w, b, padding=1)

    x = F.max_pool2d(conv(image[:, 0], "0"), 3, 2, 1)
    for block in ("2", "3"):
        x = x + conv(F.relu(conv(F.relu(x), f"{block}.first")), f"{block}.second")
    x = torch.cat([F.relu(x).flatten(1), vector[:, 0]], 1)
    expected = network.head(None, x.unsqueeze(1))[:, 0]
    torch.testing.assert_close(network(image, vector)[:, 0], expected)


@pytest.mark.parametrize("name", ["nature", "impala"])
def test_agents_with_own_weights_have_own_networks(name: str) -> None:
    shape = InputShape((1, 36, 36), 1)
    joint = build_network(PluginConfig(name=name, hidden=(4,)), shape, 2, (0, 1, 0))
    image, vector = torch.rand(2, 3, 1, 36, 36), torch.rand(2, 3, 1)
    out = joint(image, vector)
    for agent, which in enumerate((0, 1, 0)):
        alone = build_network(PluginConfig(name=name, hidden=(4,)), shape, 2)
        for (mine, theirs), layer in zip(
            zip(alone.parameters(), joint.parameters(), strict=True),
            (p for p in alone.parameters()),
            strict=True,
        ):
            mine.data.copy_(theirs.view(2, *layer.shape)[which])
        torch.testing.assert_close(
            alone(image[:, agent : agent + 1], vector[:, agent : agent + 1])[:, 0], out[:, agent]
        )


def test_auto_takes_nature_for_images_and_cnn_for_maps() -> None:
    auto = PluginConfig(name="auto")
    assert resolved_name(auto, None) == "mlp"
    assert resolved_name(auto, (7, 11, 11)) == resolved_name(auto, (3, 35, 90)) == "cnn"
    assert resolved_name(auto, (3, 36, 90)) == "nature"
    assert resolved_name(PluginConfig(name="impala"), (7, 11, 11)) == "impala"


def test_nature_refuses_what_is_too_small_for_it() -> None:
    with pytest.raises(ConfigError, match=r"36 x 36 or more, these are 20 x 90; use network 'cnn'"):
        build_network(NATURE, InputShape((3, 20, 90), 0), 2)
    with pytest.raises(ConfigError, match="'impala' needs images"):
        build_network(IMPALA, InputShape(None, 3), 2)


def test_padding_is_that_of_torch() -> None:
    layer = StackedConv2d((0,), 2, 3, (3, 3), 1, padding=1)
    x = torch.rand(5, 2, 3, 3)  # as large as the kernel: not a linear layer here
    expected = F.conv2d(x, layer.weight, layer.bias, padding=1)
    torch.testing.assert_close(layer(x), expected)


def test_large_images_stay_bytes_until_a_network_is_fed_them() -> None:
    def inputs(size: int, *, state: bool = False) -> ActorInputs | CriticInputs:
        options, about = InputOptions(), spec(size, state=state)
        return CriticInputs(about, options, actions=False) if state else ActorInputs(about, options)

    for state in (False, True):
        big = {
            "image": torch.randint(256, (4, 2, 3, 64, 64), dtype=torch.uint8),
            "view": torch.rand(4, 2, 2),
            "state": torch.randint(256, (4, 1, 64, 64), dtype=torch.uint8),
        }
        x = inputs(64, state=state)(big)
        assert x.stored is not None
        assert x.stored.dtype == torch.uint8
        assert x.image is not None
        assert x.image.shape == (4, 2, 3 + state, 64, 64)
        torch.testing.assert_close(x.image[:, :, :3], big["image"].float() / 255, rtol=0, atol=0)
        rows = x.rows(1, 3).stored
        assert rows is not None
        assert rows.dtype == torch.uint8
    small = {k: v[..., :4, :4] if v.dim() > 3 else v for k, v in big.items()}
    stored = inputs(4)(small).stored
    assert stored is not None
    assert stored.dtype == torch.float32


def test_many_rows_of_images_pass_in_chunks() -> None:
    network = build_network(
        PluginConfig(name="impala", channels=(1,)), InputShape((3, 64, 64), 2), 1
    )
    inputs = ActorInputs(spec(64), InputOptions())
    given = {
        "image": torch.randint(256, (6, 2, 3, 64, 64), dtype=torch.uint8),
        "view": torch.rand(6, 2, 2),
    }
    seen: list[int] = []
    network.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr("murmur.learner_service.layers.forward._CHUNK_PIXELS", 5 * 3 * 64 * 64)
        out = forward_rows(network, inputs(given), Precision("fp32", CPU))
        assert seen == [2, 2, 2]
        x = inputs(given)
        torch.testing.assert_close(out, network(x.image, x.vector))
