"""A multilayer perceptron over vector observations."""

from typing import TYPE_CHECKING

from pydantic import Field

from murmur.learner_service.layers.stacked import MLP, NetworkConfig, linear_layers
from murmur.shared.process.errors import ConfigError

if TYPE_CHECKING:
    from murmur.learner_service.layers.inputs import InputShape

STACKED = True


class Config(NetworkConfig):
    """Options of the `mlp` network."""

    agent_id: bool = Field(True, description=NetworkConfig.model_fields["agent_id"].description)


def build(config: Config, shape: "InputShape", num_outputs: int, slices: tuple[int, ...]) -> MLP:
    """Build the network.

    Raises:
        ConfigError: if there are images, which an MLP does not take.
    """
    if shape.image is not None:
        raise ConfigError(
            f"network 'mlp' takes no images, the environment observes {shape.image}; use 'cnn'"
        )
    return MLP(linear_layers([shape.vector, *config.hidden, num_outputs], slices, config), slices)
