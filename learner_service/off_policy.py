"""What algorithms that learn from a replay have in common."""

import torch

from learner_service.algorithm import Algorithm
from learner_service.precision import Precision
from learner_service.storage.replay import ReplayBatch, ReplayConfig, ReplayStorage
from shared.spec import EnvSpec


class OffPolicyAlgorithm(Algorithm[ReplayBatch]):
    """Learns from transitions, whatever policy made them.

    Its `update` multiplies the critics' losses by `batch.weight` [B] and sets `batch.td_error` [B].
    """

    def __init__(
        self,
        replay: ReplayConfig,
        gamma: float,
        precision: Precision,
        device: torch.device,
        seed: int,
    ) -> None:
        """Keep the replay's options until `make_storage`."""
        super().__init__(precision, device, seed)
        self._replay, self._discount, self._seed = replay, gamma, seed
        self.unroll_length = replay.unroll_steps

    def make_storage(self, spec: EnvSpec, max_policy_lag: int | None) -> ReplayStorage:
        """A replay; acting may be max_policy_lag unrolls of every environment ahead."""
        return ReplayStorage(
            self._replay,
            spec,
            self._discount,
            max_policy_lag,
            self._device,
            self.extras,
            self._seed + 2,
        )
