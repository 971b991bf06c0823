"""The common part of COMA and MAPPO: an update is passes over a rollout in minibatches.

On a GPU all of it is a few CUDA graphs, of the steps on a few minibatches each, whatever the number
of environments: see `fixed_shapes`. Of larger graphs there would be fewer to launch, and to capture
one would take longer.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from typing_extensions import override

from learner_service.algorithms.actor_critic import ActorCritic
from learner_service.algorithms.fixed_shapes import FixedShapes
from learner_service.algorithms.minibatches import Pass, Rows, number_of_minibatches
from learner_service.algorithms.options import OnPolicyCriticConfig
from learner_service.algorithms.schedule import Schedule
from learner_service.networks.casting import cast_weights
from learner_service.networks.forward import chunk_of, forward, forward_rows
from learner_service.networks.inputs import ActorInputs, CriticInputs, Inputs
from learner_service.networks.recurrent import RecurrentState, recurrent_states
from learner_service.networks.stacked import sharing_agents
from learner_service.runtime.cuda_graph import Captured, Outputs
from learner_service.runtime.precision import Precision
from learner_service.runtime.streams import Pace
from learner_service.storage.flight import transitions_in
from learner_service.storage.joining import lengthened
from learner_service.storage.rollout import Batch
from learner_service.storage.storage import OBSERVATION
from shared.config import PluginConfig
from shared.spec import ACTION_MASK, EXPERT_ACTION, EnvSpec

# Of the policy and of the critic.
RecurrentStates = tuple[RecurrentState | None, RecurrentState | None]
_MOST_AT_ONCE = 16  # minibatches of a graph
_MOST_ROWS = 8192  # of agents, that a network is fed at once
_ROOM = 33 / 32  # of a minibatch of fixed size: the number of minibatches is a whole one


class OnPolicyAlgorithm(ActorCritic[Batch]):
    """Learns from each rollout once. Used by the thread that learns.

    A subclass finds what minibatches learn from in `_values_of_rows` and `_learnable`, and steps on
    minibatches in the functions of `_stages`.
    """

    REMEMBERS = True
    _OF_BATCH: int  # numbers that `_learnable` returns for `_scalars`
    _config: OnPolicyCriticConfig
    _critic_inputs: ActorInputs | CriticInputs
    _logged: tuple[str, ...]
    _of_steps: tuple[str, ...]  # those of them that are means over minibatches
    _single = False  # minibatches are of single agents' rows
    _columns: tuple[str, ...]  # of numbers that `_learnable` returns

    @override
    def __init__(
        self,
        config: OnPolicyCriticConfig,
        spec: EnvSpec,
        network: PluginConfig,
        precision: Precision,
        device: torch.device,
        seed: int,
    ) -> None:
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
        self._total = torch.zeros(len(self._of_steps) + 1, device=device)  # and minibatches
        self._of_batch = torch.zeros(self._OF_BATCH, device=device)
        self._fixed = FixedShapes(self, self._columns)
        stages = self._stages()
        self._each_stage = tuple(stages.values())
        self._steps_in_graphs = tuple(
            self._fixed.capture_steps(name, step) for name, step in stages.items()
        )
        self._pace = Pace(device)
        self._longest = 0

    def update(self, batch: Batch) -> dict[str, Tensor]:
        """Learn from a rollout, in minibatches of joint rows.

        With memory a minibatch is some of the environments, whole: from what was remembered at the
        unroll's first row to its end.

        Returns:
            the scalars of `_logged`, means over the update and over parameter groups.
        """
        c, arrays = self._config, batch.arrays
        self._schedule.set(self._counts["updates"])
        if self._static and self.memory_size:  # a graph has one number of steps
            own = {"steps": max(self._longest, len(arrays["step_type"]))}
            self._longest = round(self._group.agree(own, "max")["steps"])
            arrays = lengthened(dict(arrays), self._longest)
        # Units of minibatches that may count: environments, joint rows, or rows of agents.
        units = batch.rows * (self._spec.num_agents if self._single else 1)
        number = number_of_minibatches(
            c.batch_number,
            batch.times,
            self._group,
            units=arrays["step_type"].shape[1] if self.memory_size else units,
            width=self._width,
            block=self._block,
        )
        if self._static:
            self._learn_in_graphs(arrays, number)
        else:
            self.graphs.eager_calls["update"] += 1
            self._total.zero_()
            rows = self._prepare(batch)
            first = rows.of_single_agents() if self._single else rows
            for k in range(c.data_passes):
                seen = first
                if k and self.transforms.draws:
                    again = self._redrawn_rows(rows, batch)
                    seen = again.of_single_agents() if self._single else again
                minibatches = seen.shuffled(number, self._generator)
                minibatches.columns = self._derived(minibatches.columns)
                if minibatches.number:
                    for step in self._each_stage:
                        step(minibatches)
        self._schedule.restore()
        self._counts["updates"] += 1
        scalars = self._scalars(self._total, self._of_batch)
        return dict(zip(self._logged, scalars.unbind(), strict=True))

    @override
    def graph_bytes(self, rows: int) -> float:
        return self._fixed.expected_bytes(rows)

    def _learn_in_graphs(self, arrays: dict[str, Tensor], number: int) -> None:
        """Learn as `update` does, on a GPU; sums go to `_total` and `_of_batch`."""
        fixed = self._fixed
        fixed.load(arrays, number)
        arrays = self._completed(arrays)
        words = fixed.pack(arrays)
        fixed.prepare(words)
        memory = arrays["memory"][0] if self.memory_size else None
        for k in range(self._config.data_passes):
            if k and self.transforms.draws:
                words = fixed.pack(arrays, again=True)
                fixed.add_columns(words)
            for steps in self._steps_in_graphs:
                for start in range(0, number, self._block):
                    self._call(steps, fixed.gather(words, memory, k, start))

    @torch.no_grad()
    def _prepare(self, batch: Batch) -> Rows:
        """Return what minibatches are of; keep what `_scalars` needs of the batch."""
        arrays = self._completed(batch.arrays)
        batch = Batch(arrays, [])
        length, envs = arrays["step_type"].shape
        obs = {name: x.flatten(0, 1) for name, x in batch.observation().items()}
        action = arrays["raw_action" if "raw_action" in arrays else "action"].flatten(0, 1)
        action = action if action.is_floating_point() else action.long()
        inputs, states = self._fed(obs, action), recurrent_states(batch)
        values = self._values_of_rows(inputs, states, action, obs, envs)
        values = {name: x.view(length, envs, -1) for name, x in values.items()}
        columns, weight, of_batch = self._learnable(batch, values, None)
        self._of_batch.copy_(of_batch)
        weight = weight.flatten(0, 1)
        columns = {name: x.flatten(0, 1) for name, x in columns.items()}
        columns |= {"action": action[: len(weight)], **told_of_rows(obs)}
        actor, critic = (state and state.without_last() for state in states)
        return Rows(*inputs, columns, weight, self._sharing, actor, critic, self._group)

    @torch.no_grad()
    def _redrawn_rows(self, rows: Rows, batch: Batch) -> Rows:
        """Return rows of a batch with what was seen and done changed at random."""
        count = len(rows.weight)
        obs = {name: x.flatten(0, 1)[:count] for name, x in batch.observation().items()}
        obs, action = self.redrawn(obs, rows.columns["action"], rows.actor_state)
        actor, critic = self._fed(obs, action)
        columns = rows.columns | {"action": action} | told_of_rows(obs)
        return replace(rows, actor=actor, critic=critic, columns=columns)

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
    def _stages(self) -> dict[str, Callable[[Pass], None]]:
        """Return functions that step on minibatches, by name; they add to `_total`.

        A pass goes through one after the other; each may be captured.
        """

    def _completed(self, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a batch's arrays with what it lacks."""
        return arrays

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
        self, batch: Batch, values: Mapping[str, Tensor], rows: Tensor | None
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Return what minibatches learn from; called once an update, may be captured.

        Args:
            batch: its small arrays at least, [L + 1, B, ...], in graphs padded.
            values: of `_values_of_rows`, [L + 1, B, A].
            rows: scalar, L x B without padding; None: nothing is padded.

        Returns:
            `_columns` [L, B, A] by name, 1 where a row counts, else 0, and what `_scalars` needs.
        """

    @abstractmethod
    def _scalars(self, total: Tensor, of_batch: Tensor) -> Tensor:
        """Return `_logged` of sums over minibatches, and of what `_learnable` found."""

    def _derived(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return columns of minibatches, with those that follow from others."""
        return columns

    @property
    def _width(self) -> int:
        """Units of a minibatch, on a GPU: the same whatever the number of environments."""
        if not self._static:
            return 0
        c, steps = self._config, self._spec.max_episode_steps
        wanted = c.batch_size / (1 if self._single else self._spec.num_agents)  # transitions
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
        joint = width / agents if self._single else width
        whole = math.ceil(joint * self._config.batch_number * 9 / 8)  # with unrolls' last rows
        shapes = self._actor_inputs.shape.image, self._critic_inputs.shape.image
        most = min(chunk_of(image, _MOST_ROWS) for image in shapes)
        return max(1, min(most // agents, whole))

    def _outputs(self, network: nn.Module, inputs: Inputs, state: RecurrentState | None) -> Tensor:
        """Return [R, A, K] float32 of a network; without gradient any number of rows will do.

        On a GPU the rows are a block, and go through at once.
        """
        if not self._static:
            return forward_rows(network, inputs, self._precision, inputs.agents, state)
        with cast_weights(self._precision, network):
            out, _ = forward(network, inputs, state)
        return out.float()

    def _call(self, step: Captured, given: Mapping[str, Tensor], **options: int) -> Outputs:
        """Run a graph, a few of them ahead of the device at most.

        What it returns the next call overwrites.
        """
        outputs = step(given, **options)
        self._pace.given()
        return outputs

    @abstractmethod
    def _fed(self, obs: dict[str, Tensor], action: Tensor) -> tuple[Inputs, Inputs]:
        """Return inputs of actor and critic."""


def told_of_rows(obs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return columns of minibatches that are observed: legal actions, and those of experts."""
    columns = {}
    if ACTION_MASK in obs:
        columns["mask"] = obs[ACTION_MASK]
    if EXPERT_ACTION in obs:
        columns[EXPERT_ACTION] = obs[EXPERT_ACTION].long()
    return columns
