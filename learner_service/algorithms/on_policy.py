"""What COMA and MAPPO have in common: an update is passes over a rollout in minibatches."""

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from learner_service.algorithms.actor_critic import ActorCritic
from learner_service.algorithms.augmented import passes
from learner_service.algorithms.minibatches import Pass, Rows, number_of_minibatches
from learner_service.algorithms.options import OnPolicyCriticConfig
from learner_service.algorithms.returns import sharing_agents
from learner_service.algorithms.schedule import Schedule
from learner_service.networks.inputs import Inputs
from learner_service.networks.recurrent import RecurrentState
from learner_service.runtime.precision import Precision
from learner_service.storage.rollout import Batch
from shared.config import PluginConfig
from shared.spec import EXPERT_ACTION, EnvSpec

# Of the policy and of the critic.
RecurrentStates = tuple[RecurrentState | None, RecurrentState | None]


class OnPolicyAlgorithm(ActorCritic[Batch]):
    """Learns from each rollout once. Used by the learner thread.

    `_learn(arrays, number=)` gets a Batch's arrays and how many minibatches a pass has, and returns
    "scalars" in the order of `_logged`.
    """

    REMEMBERS = True
    _config: OnPolicyCriticConfig
    _logged: tuple[str, ...]

    def __init__(
        self,
        config: OnPolicyCriticConfig,
        spec: EnvSpec,
        network: PluginConfig,
        precision: Precision,
        device: torch.device,
        seed: int,
    ) -> None:
        """See ActorCritic."""
        self._imitates = spec.observation(EXPERT_ACTION) is not None
        self._static = device.type != "cpu"  # no shape depends on what rows hold
        self._sharing = sharing_agents(config.slices(spec.num_agents), device)
        super().__init__(config, spec, network, precision, device, seed)
        c = config
        self.unroll_length, self.unrolls_per_update = c.unroll_steps, c.unrolls_per_update
        self.rows_per_update = c.batch_size * c.batch_number
        self._schedule = Schedule(
            [optimizer for optimizer, _ in self._learned],
            c.entropy_weight,
            c.anneal_updates,
            c.final_lr_fraction,
            device,
            static=self._static,
        )
        self._counts = {"updates": 0}

    def update(self, batch: Batch) -> dict[str, Tensor]:
        """Learn from a rollout, in minibatches of joint rows.

        With memory a minibatch is some of the environments, whole: from what was remembered at the
        unroll's first row to its end.

        Returns:
            the scalars of `_logged`, means over the update and over parameter groups.
        """
        self._schedule.set(self._counts["updates"])
        number = number_of_minibatches(self._config.batch_number, batch.times, self._group)
        scalars = self._captured(batch.arrays, number=number)["scalars"].clone()
        self._schedule.restore()
        self._counts["updates"] += 1
        return dict(zip(self._logged, scalars.unbind(), strict=True))

    def _rows(
        self,
        inputs: tuple[Inputs, Inputs],
        columns: dict[str, Tensor],
        weight: Tensor,
        hidden: RecurrentStates,
    ) -> Rows:
        """What minibatches are of; `hidden` is that of all rows, the last included."""
        return Rows(
            *inputs,
            columns,
            weight,
            self._sharing,
            self._static,
            hidden[0] and hidden[0].without_last(),
            hidden[1] and hidden[1].without_last(),
            self._group,
        )

    def _passes(
        self, rows: Rows, batch: Batch, number: int, *, single: bool = False
    ) -> Iterator[tuple[Pass, list[tuple[Tensor, ...]]]]:
        """Shuffled minibatches of each pass over the rows, with their learning rates."""
        how = batch, self.augment, self._generator, self._fed, single
        for seen in passes(rows, self._config.data_passes, *how):
            shuffled = seen.shuffled(number, self._generator)
            yield shuffled, self._schedule.rates(shuffled.parts)

    @abstractmethod
    def _fed(self, obs: dict[str, Tensor], action: Tensor) -> tuple[Inputs, Inputs]:
        """Inputs of actor and critic."""
