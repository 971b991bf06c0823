"""The rows of a rollout as COMA and MAPPO learn from them: inputs, values, columns, sizes."""

import math
from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor
from typing_extensions import override

from murmur.learner_service.device.cuda_graph import Captured, Outputs
from murmur.learner_service.device.streams import Pace
from murmur.learner_service.layers.forward import chunk_of
from murmur.learner_service.layers.inputs import ActorInputs, Inputs
from murmur.learner_service.layers.recurrent import RecurrentState
from murmur.learner_service.learning.actor_critic import ActorCritic
from murmur.learner_service.learning.options import OnPolicyCriticConfig
from murmur.learner_service.storage.flight import transitions_in
from murmur.learner_service.storage.rollout import Rollout
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.spec import EXPERT_ACTION

# Recurrent states of the policy and of the critic.
RecurrentStates = tuple[RecurrentState | None, RecurrentState | None]
_MOST_AT_ONCE = 16  # minibatches of a graph
_ROOM = 33 / 32  # of a minibatch of fixed size: the number of minibatches is a whole one


class RolloutRows(ActorCritic[Rollout]):
    """Finds what minibatches learn from: inputs, values, columns. Used by the thread that learns.

    It is apart from OnPolicyAlgorithm, which loops over passes and minibatches, because FixedShapes
    (CUDA graphs) does the same to rows of fixed shape: both call `_values_of_rows` and
    `_learnable`, which COMA and MAPPO define.
    """

    REMEMBERS = True
    _NUM_BATCH_SCALARS: int  # length of the last result of `_learnable`
    _config: OnPolicyCriticConfig
    _critic_inputs: ActorInputs
    _step_scalars: tuple[str, ...]  # names of logged scalars, means over minibatches
    _single = False  # minibatches are of single agents' rows
    _columns: tuple[str, ...]  # names of the columns that `_learnable` returns

    @override
    def _prepare(self) -> None:
        device = self._device
        self._static = device.type != "cpu"  # no shape depends on what rows hold
        # Sums of the step scalars over minibatches; the last element counts minibatches.
        self._total = torch.zeros(len(self._step_scalars) + 1, device=device)
        self._batch_scalars = torch.zeros(self._NUM_BATCH_SCALARS, device=device)
        self._pace = Pace(device)
        self._longest = 0  # time steps of an unroll so far, with memory

    @property
    def _imitates(self) -> bool:
        return self._spec.observation(EXPERT_ACTION) is not None

    @abstractmethod
    def _values_of_rows(
        self,
        inputs: tuple[Inputs, Inputs],
        states: RecurrentStates,
        action: Tensor,
        obs: Mapping[str, Tensor],
        envs: int = 0,
    ) -> dict[str, Tensor]:
        """Return what `_learnable` needs of rows, [R, A] by name.

        Args:
            inputs: inputs of actor and critic.
            states: recurrent states of both.
            action: [R, A, ...].
            obs: name -> [R, A, ...].
            envs: number of the first rows, those of the first time; 0: rows are of any time.
        """

    @abstractmethod
    def _learnable(
        self, batch: Rollout, values: Mapping[str, Tensor], rows: Tensor | None
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Return what minibatches learn from; called once an update, may be captured.

        Args:
            batch: its small arrays at least, [L + 1, B, ...], in graphs padded.
            values: [L + 1, B, A] result of `_values_of_rows`.
            rows: scalar, L x B without padding; None: nothing is padded.

        Returns:
            `_columns` by name, [L, B, A] each; weight [L, B, A], 1 where a row counts, else 0; and
            the batch's scalars [numbers] for `_scalars`.
        """

    def redrawn(
        self, obs: dict[str, Tensor], action: Tensor, state: RecurrentState | None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return observations and actions changed at random; an environment's rows change alike.

        Args:
            obs: name -> [R, A, ...].
            action: [R, A, ...].
            state: recurrent state before the first rows; None: rows are single ones.
        """
        rows = {OBSERVATION + name: x for name, x in obs.items()} | {"action": action}
        steps = 1 if state is None or state.first is None else len(state.first)
        found = self.transforms.draw(rows, self._generator, steps)
        return {name: found[OBSERVATION + name] for name in obs}, found["action"]

    @property
    def _width(self) -> int:
        """Units of a minibatch, on a GPU: the same whatever the number of environments."""
        if not self._static:
            return 0
        c, steps = self._config, self._spec.max_episode_steps
        wanted = c.batch_size / (1 if self._single else self._spec.acting_agents)  # transitions
        if self.memory_size:
            units = wanted / transitions_in(self._longest - 1, steps)
        else:  # a step of the longest episodes leads from one's end to the next one's beginning
            units = wanted * (1 + (1 / steps if steps else 0))
        return math.ceil(_ROOM * units) + (self._group.size > 1)

    @property
    def _block(self) -> int:
        """Minibatches of a graph."""
        number = self._config.batch_number
        return max(k for k in range(1, _MOST_AT_ONCE + 1) if number % k == 0)

    @property
    def _rows_at_once(self) -> int:
        """Joint rows that networks are fed at once on a GPU; environments with memory."""
        if self.memory_size:
            return self._width
        agents, width = self._spec.num_agents, self._width
        joint = width / self._spec.acting_agents if self._single else width
        whole = math.ceil(joint * self._config.batch_number * 9 / 8)  # with unrolls' last rows
        shapes = self._actor_inputs.shape.image, self._critic_inputs.shape.image
        most = min(chunk_of(image, self._device) for image in shapes)
        return max(1, min(most // agents, whole))

    def _call(self, step: Captured, given: Mapping[str, Tensor], **options: int) -> Outputs:
        """Run a graph, a few of them ahead of the device at most.

        What it returns the next call overwrites.
        """
        outputs = step(given, **options)
        self._pace.given()
        return outputs

    def _fed(self, obs: dict[str, Tensor], action: Tensor) -> tuple[Inputs, Inputs]:
        """Return inputs of actor and critic; the same object where both are fed alike."""
        actor = self._actor_inputs(obs)
        if self._critic_inputs is self._actor_inputs:
            return actor, actor
        return actor, self._critic_inputs(obs, action)
