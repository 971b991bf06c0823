"""Schedules over a run's updates: falling learning rates and weight of the entropy."""

import torch
from torch import Tensor

from learner_service.learning.returns import annealed


class Schedule:
    """Sets learning rates and the entropy's weight for each update.

    Both fall linearly. Tensors only change in place, so that a captured update sees their change.
    Used by the thread that learns.

    Attributes:
        entropy_weight: scalar.
    """

    def __init__(
        self,
        optimizers: list[torch.optim.Optimizer],
        entropy_weight: float,
        anneal_updates: int,
        final_lr_fraction: float,
        device: torch.device,
        *,
        static: bool,
    ) -> None:
        """Take over the optimisers' learning rates as those of the first update.

        Args:
            optimizers: optimisers with the learning rates to lower.
            entropy_weight: weight of the entropy in the first update.
            anneal_updates: updates until the entropy's weight is 0; 0: no annealing.
            final_lr_fraction: fraction of the learning rates that is left then.
            device: the optimisers'.
            static: learning rates are tensors, as a CUDA graph needs them; else numbers.
        """
        self._groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._first_rates = [float(group["lr"]) for group in self._groups]
        self._rates = list(self._first_rates)
        self._first_weight, self._over = entropy_weight, anneal_updates
        self._final = final_lr_fraction
        self._static, self._done = static, 0.0
        self._on_device = torch.tensor(self._first_rates, device=device)
        self.entropy_weight = torch.tensor(entropy_weight, device=device)

    def set(self, updates: float) -> None:
        """Set both for the next update."""
        done = annealed(0.0, 1.0, updates, self._over)
        share = 1 - (1 - self._final) * done
        if done != self._done:  # each is a launch
            self._done = done
            self._rates = [rate * share for rate in self._first_rates]
            self.entropy_weight.fill_(self._first_weight * (1 - done))
            if self._static:
                for i, rate in enumerate(self._rates):
                    self._on_device[i].fill_(rate)
        self.restore()

    def rates(self, counts: Tensor) -> Tensor | None:
        """Return learning rates for the minibatches of a pass, [n, groups]; `step` gets a row.

        0 where nothing counts, so nothing moves. None where learning rates are numbers: such
        minibatches are left out there.

        Args:
            counts: [n] flags, `counts` of a Pass.
        """
        return self._on_device * counts.unsqueeze(1) if self._static else None

    def step(self, rates: Tensor) -> None:
        """Set the learning rates of a minibatch, [groups] of `rates`."""
        for group, rate in zip(self._groups, rates.unbind(), strict=True):
            group["lr"] = rate

    def restore(self) -> None:
        """Give the optimisers their learning rates back as numbers, which checkpoints keep."""
        for group, rate in zip(self._groups, self._rates, strict=True):
            group["lr"] = rate
