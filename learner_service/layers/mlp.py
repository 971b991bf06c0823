"""Linear layers over vectors, for each agent its own or one set for all."""

import torch
from torch import Tensor, nn

from learner_service.layers.casting import frozen
from learner_service.layers.layers import LayersConfig, linear_layers
from learner_service.layers.stacked import StackedLinear, count_slices, per_agent


class MLP(nn.Module):
    """Linear layers; the slice of each agent as in StackedLinear."""

    def __init__(self, widths: list[int], slices: tuple[int, ...], config: LayersConfig) -> None:
        super().__init__()
        self._agents = len(slices) if count_slices(slices) > 1 else 1
        self._slices = slices
        self.layers = linear_layers(widths, slices, config)

    def forward(self, image: Tensor | None, vector: Tensor) -> Tensor:
        """Return [B, A, outputs] of [B, A, F].

        Layers that stand side by side want agents outermost, [A, B, F].
        """
        if self._agents == 1:
            out: Tensor = self.layers(vector.flatten(0, 1))
            return out.view(*vector.shape[:2], -1)
        stacked = vector.reshape(-1, self._agents, vector.shape[2]).transpose(0, 1)
        out = self.layers(stacked).transpose(0, 1)
        if vector.device.type == "cpu":  # which reads them faster in order
            out = out.contiguous()
        return out.reshape(*vector.shape[:2], -1)

    def twice(self, image: Tensor | None, vector: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of the inputs, and of the same with the last of them changed.

        The first layer's sums are formed once, then the change's part is added. What comes second
        passes gradient on to the change alone: weights and rows are constants there.

        Args:
            image: None.
            vector: [B, A, F] inputs.
            change: [B, A, U] summand of the last U of the F inputs.

        Returns:
            Two of [B, A, outputs].
        """
        first, rest = self.layers[0], self.layers[1:]
        assert isinstance(first, StackedLinear)
        shared, last = self._agents == 1, change.shape[2]
        rows, moved = (
            x.flatten(0, 1) if shared else x.reshape(-1, self._agents, x.shape[2]).transpose(0, 1)
            for x in (vector, change)
        )
        sums = first(rows, before_relu=True)
        weight = per_agent(first.weight.detach()[:, -last:], self._slices)  # [A, U, O], or [1, ...]
        if shared:
            changed = torch.addmm(sums.detach(), moved, weight.squeeze(0))
        else:
            changed = torch.baddbmm(sums.detach(), moved, weight)
        with frozen(self):
            second = rest(changed.relu_() if first.relu else changed)
        # In this order: the sums are overwritten.
        outputs = [rest(sums.relu_() if first.relu else sums), second]
        if not shared:
            outputs = [out.transpose(0, 1) for out in outputs]
        if vector.device.type == "cpu":
            outputs = [out.contiguous() for out in outputs]
        same, other = (out.reshape(*vector.shape[:2], -1) for out in outputs)
        return same, other
