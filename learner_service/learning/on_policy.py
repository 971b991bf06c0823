"""The common part of COMA and MAPPO: an update is passes over a rollout in minibatches.

`OnPolicyAlgorithm.update` is the whole of it. On a CPU it finds returns and weights of all rows
(`_rows`), deals these to minibatches and runs the stages' steps on them. On a GPU it replays CUDA
graphs, which do the same to padded rows: see fixed_shapes.py.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from murmur.learner_service.device.cuda_graph import Captured, Outputs
from murmur.learner_service.device.streams import Pace
from murmur.learner_service.layers.forward import chunk_of
from murmur.learner_service.layers.inputs import ActorInputs, Inputs
from murmur.learner_service.layers.recurrent import RecurrentState
from murmur.learner_service.learning.actor_critic import ActorCritic
from murmur.learner_service.learning.minibatches import (
    Pass,
    Rows,
    number_of_minibatches,
    recurrent_states,
)
from murmur.learner_service.learning.options import OnPolicyCriticConfig
from murmur.learner_service.learning.returns import annealed
from murmur.learner_service.storage.flight import transitions_in
from murmur.learner_service.storage.rollout import Rollout
from murmur.learner_service.storage.storage import lengthened, observed
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.spec import ACTION_MASK, EXPERT_ACTION

# Recurrent states of the policy and of the critic.
RecurrentStates = tuple[RecurrentState | None, RecurrentState | None]
Round = tuple[str, ...]  # stages of an update's round, by name: all passes go through these
_MOST_AT_ONCE = 16  # minibatches of a graph
_ROOM = 33 / 32  # places of a fixed-size minibatch per expected unit: their number is rounded


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
        config: OnPolicyCriticConfig,
        device: torch.device,
    ) -> None:
        """Take over the optimisers' learning rates as those of the first update.

        Args:
            optimizers: optimisers with the learning rates to lower.
            config: options of the algorithm. Over `anneal_updates` updates, 0: never,
                `entropy_weight` falls to 0, and learning rates to `final_lr_fraction` of the first.
            device: device of the optimisers.
        """
        self._groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._first_rates = [float(group["lr"]) for group in self._groups]
        self._rates = list(self._first_rates)
        self._config, self._done = config, 0.0
        self._on_device = torch.tensor(self._first_rates, device=device)
        self.entropy_weight = torch.tensor(config.entropy_weight, device=device)

    def set(self, updates: float) -> None:
        """Set both for the next update."""
        c = self._config
        done = annealed(0.0, 1.0, updates, c.anneal_updates)
        share = 1 - (1 - c.final_lr_fraction) * done
        if done != self._done:  # each is a launch
            self._done = done
            self._rates = [rate * share for rate in self._first_rates]
            self.entropy_weight.fill_(c.entropy_weight * (1 - done))
            for i, rate in enumerate(self._rates):
                self._on_device[i].fill_(rate)
        self.restore()

    def rates(self, counts: Tensor) -> Tensor:
        """Return `rates` of a Pass in a CUDA graph, of its `counts`."""
        return self._on_device * counts.unsqueeze(1)

    def step(self, rates: Tensor) -> None:
        """Set the learning rates of a minibatch, [groups]."""
        for group, rate in zip(self._groups, rates.unbind(), strict=True):
            group["lr"] = rate

    def restore(self) -> None:
        """Give the optimisers their learning rates back as numbers, which checkpoints keep."""
        for group, rate in zip(self._groups, self._rates, strict=True):
            group["lr"] = rate


class OnPolicyAlgorithm(ActorCritic[Rollout]):
    """Learns from each rollout once. Used by the thread that learns.

    A subclass finds in `_values_of_rows` and `_learnable` what minibatches learn from, and steps on
    them in the functions of `_stages`.
    """

    REMEMBERS = True
    _NUM_BATCH_SCALARS: int  # length of the last result of `_learnable`
    _config: OnPolicyCriticConfig
    _critic_inputs: ActorInputs
    _step_scalars: tuple[str, ...]  # names of logged scalars, means over minibatches
    _logged: tuple[str, ...]  # names of all logged scalars
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
        c = self._config
        self.unroll_length, self.unrolls_per_update = c.unroll_steps, c.unrolls_per_update
        self.rows_per_update = c.batch_size * c.batch_number
        self._schedule = Schedule([optimizer for optimizer, _ in self._learned], c, device)
        self._counts = {"updates": 0}
        self._each_stage = self._stages()

    def update(self, batch: Rollout) -> dict[str, Tensor]:
        """Learn from a rollout, in minibatches of joint rows.

        With memory a minibatch is some of the environments, whole: from what was remembered at the
        unroll's first row to its end.

        Returns:
            the scalars of `_logged`, means over the update and over parameter groups.
        """
        c, arrays = self._config, batch.arrays
        self._schedule.set(self._counts["updates"])
        # 1. The number of minibatches, the same on all ranks.
        if self._static and self.memory_size:  # a graph has one number of steps
            own = {"steps": max(self._longest, len(arrays["step_type"]))}
            self._longest = round(self._group.agree(own, "max")["steps"])
            arrays = lengthened(dict(arrays), self._longest)
        # Units of minibatches that may count: environments, joint rows, or rows of agents.
        units = batch.size * (self._spec.acting_agents if self._single else 1)
        number = number_of_minibatches(
            c.batch_number,
            batch.times,
            self._group,
            units=arrays["step_type"].shape[1] if self.memory_size else units,
            width=self._width,
            block=self._block,
        )
        # 2. Rows, then the steps of each round, pass and minibatch.
        if self._static:
            self._learn_in_graphs(arrays, number)
        else:
            self.graphs.eager_calls["update"] += 1
            self._total.zero_()
            rows, rounds = self._rows(batch), self._rounds()
            for names in rounds:
                seen = rows.of_single_agents() if self._single else rows
                for k in range(c.data_passes):
                    if k and self.transforms.draws:  # each pass but the first sees other changes
                        again = self._redrawn_rows(rows, batch)
                        seen = again.of_single_agents() if self._single else again
                    minibatches = seen.shuffled(number, self._generator)
                    if minibatches.number:
                        for name in names:
                            self._each_stage[name](minibatches)
                if names is not rounds[-1]:
                    rows = self._after_round(rows, names)
        # 3. Learning rates as checkpoints keep them, and what is logged.
        self._schedule.restore()
        self._counts["updates"] += 1
        scalars = self._scalars(self._total, self._batch_scalars)
        return dict(zip(self._logged, scalars.unbind(), strict=True))

    @torch.no_grad()
    def _rows(self, batch: Rollout) -> Rows:
        """Return inputs, columns and weights of all rows; keep the scalars of the batch."""
        arrays = batch.arrays
        length, envs = arrays["step_type"].shape
        obs = {name: x.flatten(0, 1) for name, x in observed(arrays).items()}
        action = arrays["raw_action" if "raw_action" in arrays else "action"].flatten(0, 1)
        action = action if action.is_floating_point() else action.long()
        inputs, seen = self._inputs_and_columns(obs, action)
        states: RecurrentStates = recurrent_states(batch) if self.memory_size else (None, None)
        values = self._values_of_rows(inputs, states, action, obs, envs)
        values = {name: x.view(length, envs, -1) for name, x in values.items()}
        columns, weight, batch_scalars = self._learnable(batch, values, None)
        self._batch_scalars.copy_(batch_scalars)
        weight = weight.flatten(0, 1)
        columns = {name: x.flatten(0, 1) for name, x in columns.items()} | seen
        actor, critic = (state and state.without_last() for state in states)
        return Rows(*inputs, columns, weight, self._sharing, actor, critic, self._group)

    def _inputs_and_columns(
        self, obs: dict[str, Tensor], action: Tensor
    ) -> tuple[tuple[Inputs, Inputs], dict[str, Tensor]]:
        """Return the networks' inputs of rows, and the columns that their losses read.

        Args:
            obs: name -> [R, A, ...].
            action: [R, A, ...].

        Returns:
            inputs of actor and critic, the same object if both networks read the same; and columns:
            actions and, if they are observed, masks of legal actions and actions of an expert.
        """
        inputs = self._actor_inputs(obs)
        critic = inputs
        if self._critic_inputs is not self._actor_inputs:
            critic = self._critic_inputs(obs, action)
        columns = {"action": action}
        if ACTION_MASK in obs:
            columns["mask"] = obs[ACTION_MASK]
        if EXPERT_ACTION in obs:
            expert = obs[EXPERT_ACTION]
            columns[EXPERT_ACTION] = expert if expert.is_floating_point() else expert.long()
        return (inputs, critic), columns

    @torch.no_grad()
    def _redrawn_rows(self, rows: Rows, batch: Rollout) -> Rows:
        """Return rows of a batch with observations and actions changed at random."""
        count = len(rows.weight)
        obs = {name: x.flatten(0, 1)[:count] for name, x in observed(batch.arrays).items()}
        obs, action = self.redrawn(obs, rows.columns["action"][:count], rows.actor_state)
        (actor, critic), seen = self._inputs_and_columns(obs, action)
        return replace(rows, actor=actor, critic=critic, columns=rows.columns | seen)

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

    @abstractmethod
    def _stages(self) -> dict[str, Callable[[Pass], None]]:
        """Return functions that step on a pass's minibatches, by name; they add to `_total`.

        A pass runs those of its round one after the other; each may be captured.
        """

    @abstractmethod
    def _scalars(self, total: Tensor, batch_scalars: Tensor) -> Tensor:
        """Return the scalars of `_logged`.

        Args:
            total: sums over minibatches as the stages add them, last the number that count.
            batch_scalars: last result of `_learnable`.
        """

    def _rounds(self) -> Sequence[Round]:
        """Return the rounds of an update: each makes all passes, one round after the other."""
        return (tuple(self._each_stage),)

    def _after_round(self, rows: Rows, names: Round) -> Rows:
        """Return the rows that the next round learns from; called after all rounds but the last."""
        return rows

    @abstractmethod
    def _learn_in_graphs(self, arrays: dict[str, Tensor], number: int) -> None:
        """Learn as `update` does, on a GPU; sums go to `_total` and `_batch_scalars`."""

    @property
    def _imitates(self) -> bool:
        return self._spec.observation(EXPERT_ACTION) is not None

    @property
    def _width(self) -> int:
        """Return the units of a minibatch on a GPU, for any number of environments; else 0."""
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
        """Return the number of minibatches of a graph, a divisor of `batch_number`."""
        number = self._config.batch_number
        return max(k for k in range(1, _MOST_AT_ONCE + 1) if number % k == 0)

    @property
    def _rows_at_once(self) -> int:
        """Return the joint rows, with memory environments, of one forward pass on a GPU."""
        if self.memory_size:
            return self._width
        agents, width = self._spec.num_agents, self._width
        joint = width / self._spec.acting_agents if self._single else width
        whole = math.ceil(joint * self._config.batch_number * 9 / 8)  # with unrolls' last rows
        shapes = self._actor_inputs.shape.image, self._critic_inputs.shape.image
        most = min(chunk_of(image, self._device) for image in shapes)
        return max(1, min(most // agents, whole))

    def _call(self, step: Captured, given: Mapping[str, Tensor], **options: int) -> Outputs:
        """Run a graph, at most a few of them ahead of the device.

        The next call overwrites the outputs.
        """
        outputs = step(given, **options)
        self._pace.given()
        return outputs
