"""A multilayer perceptron over vector observations."""

from typing import TYPE_CHECKING

from pydantic import Field
from torch import Tensor, nn

from learner_service.networks.casting import frozen
from learner_service.networks.layers import LayersConfig, NetworkConfig, linear_layers
from learner_service.networks.stacked import StackedLinear, count_slices
from shared.errors import ConfigError

if TYPE_CHECKING:
    from learner_service.networks.inputs import InputShape

STACKED = True


class Config(NetworkConfig):
    """Options of the `mlp` network."""

    agent_id: bool = Field(True, description=NetworkConfig.model_fields["agent_id"].description)


class MLP(nn.Module):
    """Linear layers; the slice of each agent as in StackedLinear."""

    def __init__(self, widths: list[int], slices: tuple[int, ...], config: LayersConfig) -> None:
        super().__init__()
        self._agents = len(slices) if count_slices(slices) > 1 else 1
        self.layers = linear_layers(widths, slices, config)

    def forward(self, image: Tensor | None, vector: Tensor) -> Tensor:
        """[B, A, F] -> [B, A, outputs]."""
        if self._agents == vector.shape[1] > 1 and vector.device.type != "cpu":
            # As they lie in memory; a CPU reads them faster in order.
            out: Tensor = self.layers(vector.transpose(0, 1))
            return out.transpose(0, 1)
        return self.of_rows(vector.flatten(0, 1)).view(*vector.shape[:2], -1)

    def of_rows(self, rows: Tensor) -> Tensor:
        """[R, F] -> [R, outputs]; the agent is the innermost index of R = B * A rows."""
        return self._by_row(self.layers(self._by_agent(rows)))

    def twice(self, image: Tensor | None, vector: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs of the inputs, and of the same with the last of them changed.

        Args:
            image: None.
            vector: [B, A, F].
            change: [B, A, U] what is added to the last U of the F inputs.

        Returns:
            Two of [B, A, outputs].
        """
        if self._agents == vector.shape[1] > 1 and vector.device.type != "cpu":
            both = self._twice(vector.transpose(0, 1), change.transpose(0, 1))
            return both[0].transpose(0, 1), both[1].transpose(0, 1)
        first, second = self.twice_of_rows(vector.flatten(0, 1), change.flatten(0, 1))
        shape = *vector.shape[:2], first.shape[-1]
        return first.view(shape), second.view(shape)

    def twice_of_rows(self, rows: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
        """`twice` of rows [R, F] and changes [R, U]; the agent is the innermost index."""
        first, second = self._twice(self._by_agent(rows), self._by_agent(change))
        return self._by_row(first), self._by_row(second)

    def _twice(self, stacked: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
        """`twice` as the stacked layers have it.

        The first layer's sums are formed once, then the change's part is added. What comes second
        passes gradient on to the change alone: weights and rows are constants there.
        """
        first, rest = self.layers[0], self.layers[1:]
        assert isinstance(first, StackedLinear)
        sums = first(stacked)
        changed = first.changed(sums, change)
        with frozen(self):
            second = rest(changed)
        # Last: it overwrites the sums.
        return rest(sums), second

    def _by_agent(self, rows: Tensor) -> Tensor:
        """[R, F] -> [A, B, F], as the stacked layers want it; as it is if all agents share."""
        if self._agents == 1:
            return rows
        return rows.view(-1, self._agents, rows.shape[1]).transpose(0, 1)

    def _by_row(self, stacked: Tensor) -> Tensor:
        return stacked if self._agents == 1 else stacked.transpose(0, 1).flatten(0, 1)


def build(config: Config, shape: "InputShape", num_outputs: int, slices: tuple[int, ...]) -> MLP:
    """Build the network.

    Raises:
        ConfigError: if there are images, which an MLP does not take.
    """
    if shape.image is not None:
        raise ConfigError(
            f"network 'mlp' takes no images, the environment observes {shape.image}; use 'cnn'"
        )
    return MLP([shape.vector, *config.hidden, num_outputs], slices, config)
