"""Random parameters of a whole batch, drawn on the device in five kernels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Parameter:
    """A number drawn for each sample.

    Attributes:
        low: the least value.
        high: the largest value; values between are equally likely.
        neutral: the value of samples that the gate leaves out.
        gate: name of the event that must occur; parameters with the same gate occur together.
    """

    low: float
    high: float
    neutral: float
    gate: str

    @classmethod
    def around(cls, centre: float, by: float, gate: str) -> "Parameter":
        """Between centre - by and centre + by; neutral is the centre."""
        return cls(centre - by, centre + by, centre, gate)


class Draws:
    """Draws parameters: name -> [N] float32."""

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        gates: Mapping[str, float],
        device: torch.device,
    ) -> None:
        """Lay constants out on the device.

        Args:
            parameters: parameters to draw, by name.
            gates: probability of each gate.
            device: device to draw on.
        """
        self._device = device
        self._names = tuple(parameters)
        names = [*gates]

        def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype).unsqueeze(1).to(device)

        every = parameters.values()
        self._low = column([p.low for p in every])
        self._span = column([p.high - p.low for p in every])
        self._neutral = column([p.neutral for p in every])
        self._chance = column([gates[name] for name in names])
        self._gate = column([names.index(p.gate) for p in every], torch.int64).squeeze(1)

    def __call__(self, count: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Parameters of `count` samples."""
        numbers, gates = len(self._names), len(self._chance)
        u = torch.rand(numbers + gates, count, generator=generator, device=self._device)
        values = torch.addcmul(self._low, u[:numbers], self._span)
        on = (u[numbers:] < self._chance).index_select(0, self._gate)
        values = torch.where(on, values, self._neutral)
        return dict(zip(self._names, values.unbind(0), strict=True))
