"""The contract of an algorithm.

An algorithm plug-in is a module `learner_service/algorithms/<name>.py` that has

    Config                                                    a frozen pydantic model
    build(config, spec, network, precision, device, seed)  -> Algorithm
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from learner_service.precision import Precision
from learner_service.storage.rollout import Batch
from shared.config import PluginConfig, validate
from shared.registry import load_plugin
from shared.spec import EnvSpec

FOLDER, GROUP = "learner_service.algorithms", "murmur.algorithms"


class Policy(ABC):
    """A snapshot of what an algorithm has learned, to act with. Used by the inference thread."""

    @abstractmethod
    def act(
        self, observation: Mapping[str, Tensor], generator: torch.Generator | None
    ) -> dict[str, Tensor]:
        """Actions for rows of observations.

        Args:
            observation: name -> [B, A, ...] (or [B, ...]) in wire dtype, on the device.
            generator: where exploration draws its numbers from; None: act greedily.

        Returns:
            "action": [B, A] int32 or [B, A, U] float32, as it goes to the environment, on the
            device; and the algorithm's `extras` by name.
        """


class Algorithm(ABC):
    """Learns from batches. Used by the learner thread, but for the policies it hands out.

    Attributes:
        unroll_length: L, transitions of one unroll.
        rows_per_update: agent-transitions an update learns from, at least.
        extras: what a policy's `act` returns beside the action, to be kept with the row: name ->
            shape per agent, float32.
    """

    unroll_length: int
    rows_per_update: int
    extras: Mapping[str, tuple[int, ...]] = MappingProxyType({})

    @abstractmethod
    def update(self, batch: Batch) -> dict[str, Tensor]:
        """Learn from a batch; returns named scalars on the device, for logs."""

    @abstractmethod
    def make_policy(self) -> Policy:
        """A new policy that acts as the algorithm would now, and stays so until published to."""

    @abstractmethod
    def publish(self, policy: Policy) -> None:
        """Copy what was learned into a policy of `make_policy`; no thread may act with it now."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs: tensors, numbers, strings, lists and dicts."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""


def build_algorithm(
    config: PluginConfig,
    spec: EnvSpec,
    network: PluginConfig,
    precision: Precision,
    device: torch.device,
    seed: int,
) -> Algorithm:
    """The configured algorithm for this spec.

    Raises:
        ConfigError: for an unknown algorithm or option.
        SpecError: if the algorithm does not fit the spec.
    """
    module = load_plugin(FOLDER, GROUP, config.name)
    options = validate(module.Config, config.options, "algorithm")
    algorithm: Algorithm = module.build(options, spec, network, precision, device, seed)
    return algorithm
